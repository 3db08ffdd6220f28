"""Settings that only research changes: a share that follows noise, exact anchors, and forecasts at given steps."""

from __future__ import annotations

import itertools

import pytest
import torch

from parkattn.anchors import anchor_count, anchor_steps, log_signal_to_noise
from parkattn.site import CallSite
from parklab.bench.frontier import Setting
from parklab.research import GivenForecasts, ResearchConfig, StudiedPark, share_by_noise, studied_entry
from parklab.scene import clustered_scene

STEPS = 50
SMALL = {"query_clusters": 4, "key_clusters": 12}


def levels(shift: float) -> tuple[float, ...]:
    return tuple(shift * s / (1 + (shift - 1) * s) for s in (1 - step / STEPS for step in range(STEPS)))


def share(step: int, least: float = 0.2, tau: float = 0.99, shift: float = 3.0) -> float:
    return share_by_noise(least, tau, CallSite(step=step, total_steps=STEPS, noise_levels=levels(shift)))


def test_a_share_falls_with_the_noise_from_one_to_its_least():
    found = [share(step) for step in range(STEPS)]
    assert 0.99 < found[0] <= 1 and all(before >= after for before, after in itertools.pairwise(found))
    last = STEPS - 1 - STEPS // 9  # of those with anchors, and as the steps after it
    assert found[last] == pytest.approx(0.2 + 0.8 * 0.01) and found[last:] == [found[last]] * (STEPS - last)
    strides = [b - a for a, b in itertools.pairwise(log_signal_to_noise(STEPS, levels(3.0))[: last + 1])]
    assert found[strides.index(min(strides)) + 1] == pytest.approx(0.2 + 0.8 / 2)


def test_a_flows_shift_leaves_shares_as_they_are():
    for step in range(1, STEPS - STEPS // 9):  # the first is pure noise, and what ends a run is cut at a hundredth
        assert share(step, shift=1.0) == pytest.approx(share(step, shift=5.0))


def test_a_least_share_of_one_and_a_run_of_one_step_keep_it():
    assert {share(step, least=1.0) for step in range(STEPS)} == {1.0}
    assert share_by_noise(0.3, 0.99, CallSite(step=0, total_steps=1)) == 0.3


def plans(config: ResearchConfig, steps: int = STEPS):
    """The plan of each anchor and refresh, by step; tokens are the same at all of them."""
    q, k, v, grid, _ = clustered_scene(grid=(4, 12, 12))
    method, found = studied_entry("park").make(config), {}
    for step in range(steps):
        out = method(q, k, v, CallSite(step=step, total_steps=steps, noise_levels=levels(3.0)[:steps], grid=grid))
        if out.stats.phase in ("anchor", "refresh"):
            found[step] = out.stats.phase, next(iter(method.plans._held.values())).packed
    return found


def test_plans_keep_less_as_noise_falls_and_what_is_kept_at_the_end_is_top_p():
    following = plans(ResearchConfig.profile("fast", **SMALL, noise_tau=0.99, warm_start=False))
    same = plans(ResearchConfig.profile("fast", **SMALL, warm_start=False))
    kept = [packed.density.mean().item() for _, packed in following.values()]
    assert kept[0] > 0.9 and kept == sorted(kept, reverse=True) and kept[-1] < kept[0]
    assert all(
        one.density.mean() >= other.density.mean()
        for (_, one), (_, other) in zip(following.values(), same.values(), strict=True)
    )


def test_anchors_go_by_exact_attention_and_plans_between_them_by_the_estimate():
    short = {**SMALL, "top_p": 0.5, "warm_start": False}
    mixed, exact, usual = (
        plans(ResearchConfig.profile("fast", **short, **changes), steps=16)
        for changes in ({"exact_anchors": True}, {"importance": "exact"}, {})
    )
    phases = {step: phase for step, (phase, _) in mixed.items()}
    assert set(phases.values()) == {"anchor", "refresh"}
    for step, phase in phases.items():
        wanted = exact if phase == "anchor" else usual
        assert torch.equal(mixed[step][1].bits, wanted[step][1].bits), step
    assert any(not torch.equal(exact[step][1].bits, usual[step][1].bits) for step in phases)


def test_settings_that_have_no_effect_or_no_meaning_are_refused():
    with pytest.raises(ValueError, match="exact_anchors: expected False without anchors"):
        ResearchConfig(exact_anchors=True)
    for tau in (0.5, 1.0):
        with pytest.raises(ValueError, match="noise_tau: expected a number between"):
            ResearchConfig(noise_tau=tau)
    with pytest.raises(ValueError, match="noise_tau: expected top_p"):
        ResearchConfig(noise_tau=0.9, top_p=None, top_k=0.2)
    with pytest.raises(ValueError, match="noise_tau: expected top_p"):
        ResearchConfig.profile("turbo", noise_tau=0.9)


def test_a_row_of_the_frontier_names_them():
    asked = Setting.parse("fast noise_tau=0.99 top_p=0.1 exact_anchors=true")
    made = studied_entry(asked.method).make(ResearchConfig.profile(asked.config, **asked.changes))
    assert isinstance(made, StudiedPark) and made.planner.config.importance == "exact"
    assert (made.between.config.importance, made.between.config.noise_tau) == ("pama", 0.99)


def test_forwards_at_given_steps_are_forecast_unless_they_are_anchors():
    config = ResearchConfig.profile("fast")
    made = GivenForecasts(config, range(STEPS))
    left_out = [step for step in range(STEPS) if not made.computes(CallSite(step=step, total_steps=STEPS))]
    anchors = anchor_steps(anchor_count(config, STEPS), STEPS)
    assert sorted({*left_out, *anchors}) == list(range(STEPS)) and not {*left_out} & {*anchors}
