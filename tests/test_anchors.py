"""Where anchors lie: the fixed rule over noise levels, and the adaptive one over measured errors."""

import itertools
import math

import pytest
import torch

from parkattn import CallSite, Park, ParkConfig
from parkattn.anchors import anchor_count, anchor_steps, levels_of, log_signal_to_noise, passed_since_first
from parkattn.reuse import History, Schedule, dense_prefix
from parklab.research import AdaptivePark, AdaptiveSchedule, ResearchConfig
from plans import flow_levels, phases

RUNS = [1, 2, 4, 16, 30, 50, 100]


def test_six_anchors_of_thirty_linear_steps_are_dense_early():
    assert anchor_steps(6, 30, flow_levels(30, 1.0)) == anchor_steps(6, 30) == (0, 1, 4, 8, 15, 22)


@pytest.mark.parametrize("total", [4, 16, 30, 50])
@pytest.mark.parametrize("shift", [3.0, 5.0, 12.0])
def test_a_shifted_flow_keeps_its_anchors(total, shift):
    """A shift adds the same number to the log signal-to-noise of every step: log (1 - s) / s - log shift."""
    assert anchor_steps(6, total, flow_levels(total, shift)) == anchor_steps(6, total)


@pytest.mark.parametrize("total", [4, 16, 30, 50])
def test_a_flow_whose_first_level_is_rounded_past_one_is_a_flow(total):
    """Schedulers shift in float32, where 0.2 / (1 - 0.8) is more than 1."""
    one = torch.tensor(0.2) / (1 + (torch.tensor(0.2) - 1) * torch.tensor(1.0))
    assert one > 1
    exact = flow_levels(total, 0.2)
    for first in (one.item(), 1 - 6e-7):
        levels = (first, *exact[1:])
        assert log_signal_to_noise(total, levels)[1:] == log_signal_to_noise(total, exact)[1:]
        assert anchor_steps(6, total, levels) == anchor_steps(6, total, exact)
    towards_signal = tuple(1 - level for level in (one.item(), *exact[1:]))  # inverted, as Mochi's are
    assert levels_of(CallSite(step=0, total_steps=total, noise_levels=towards_signal))[1] == towards_signal


def test_anchors_follow_the_levels_and_not_the_steps():
    """Steps that hardly change the noise need no anchor: a schedule that stays at two levels for long."""
    levels = tuple(0.95 - 0.0001 * step for step in range(20)) + tuple(0.9 - 0.04 * step for step in range(20))
    steps = anchor_steps(6, 40, levels)
    assert sum(step < 20 for step in steps) <= 2


def test_levels_above_one_are_those_of_noise_added_to_the_signal():
    karras = tuple((80 ** (1 / 7) + step / 49 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for step in range(50))
    found = log_signal_to_noise(50, karras)
    assert found[10] == pytest.approx(-math.log(karras[10])) and found == sorted(found)
    assert len(set(anchor_steps(8, 50, karras))) == 8


@pytest.mark.parametrize("total", [16, 30, 50])
def test_a_run_towards_noise_has_anchors_and_refreshes_as_one_that_leaves_it(total):
    """Levels of equal strides of log signal-to-noise, up or down: distances are all that counts."""
    falling = tuple(1 / (1 + math.exp(-4 + 8 * step / total)) for step in range(total))
    names = [
        phases(Schedule(ParkConfig(anchors=6)), total, levels=levels)
        for levels in (falling, tuple(1 - level for level in falling))
    ]
    assert names[0] == names[1] and (total > 16 or "refresh" in names[0])


@pytest.mark.parametrize("total", RUNS)
@pytest.mark.parametrize("count", [1, 2, 6, 12, 50])
@pytest.mark.parametrize("shift", [None, 1.0, 3.0, 5.0, 12.0])
def test_anchors_are_distinct_steps_from_the_first_on(total, count, shift):
    steps = anchor_steps(count, total, None if shift is None else flow_levels(total, shift))
    assert steps[0] == 0 and len(steps) == min(count, total)
    assert all(a < b for a, b in itertools.pairwise(steps)) and steps[-1] < total


@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0, 12.0])
def test_no_stretch_between_anchors_is_most_of_a_run(shift):
    steps = (*anchor_steps(6, 50, flow_levels(50, shift)), 50)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 25


def test_levels_that_belong_to_another_run_are_not_used():
    when = ParkConfig(anchors=6)
    assert phases(Schedule(when), 30, levels=flow_levels(50, 12.0)) == phases(Schedule(when), 30)


@pytest.mark.parametrize(
    "levels",
    [
        [1.0] * 30,
        [1.0, 0.5] * 15,
        [math.nan] * 30,
        [math.inf, *flow_levels(30, 1.0)[1:]],
        [-x for x in flow_levels(30, 1.0)],
    ],
    ids=["constant", "back and forth", "NaN", "infinite", "negative"],
)
def test_numbers_that_cannot_be_noise_levels_leave_a_run_its_plain_anchors(levels):
    when = ParkConfig(anchors=6)
    assert phases(Schedule(when), 30, levels=tuple(levels)) == phases(Schedule(when), 30)


def test_a_run_with_anchors_is_anchors_and_reuse_and_nothing_else():
    names = phases(Schedule(ParkConfig(anchors=6)), 50)
    assert [step for step, name in enumerate(names) if name == "anchor"] == list(anchor_steps(6, 50))
    assert set(names) == {"anchor", "reuse"}


def test_an_anchor_right_before_another_builds_no_plan():
    names = phases(Schedule(ParkConfig(anchors=12)), 50)
    planned = anchor_steps(12, 50)
    assert (
        {step for step, name in enumerate(names) if name == "dense"}
        == {step for step in planned if step + 1 in planned}
        != set()
    )
    skipped = [step for step in range(50) if step != 1]
    assert phases(Schedule(ParkConfig(anchors=12)), 50, ran=skipped)[:2] == ["dense", "dense"], (
        "step 2, whose next is an anchor too"
    )


def test_shorter_runs_have_fewer_anchors_but_more_than_in_proportion_and_at_most_a_third():
    counts = {total: anchor_count(ParkConfig(anchors=8), total) for total in (1, 2, 4, 12, 16, 30, 49, 50, 100)}
    assert counts == {1: 1, 2: 1, 4: 1, 12: 4, 16: 5, 30: 7, 49: 8, 50: 8, 100: 8}
    assert anchor_count(ResearchConfig(anchors=10, reference_steps=200), 50) == 5, "10 / 2 is 5 and not a little more"


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
@pytest.mark.parametrize("anchors", [1, 3, 7, 12, 30, 50])
def test_plans_of_a_run_of_full_length_reach_the_next_anchor(anchors, shift):
    for total in (50, 80):
        assert "refresh" not in phases(Schedule(ParkConfig(anchors=anchors)), total, levels=flow_levels(total, shift))


@pytest.mark.parametrize("total", [4, 8, 16])
@pytest.mark.parametrize("anchors", [7, 12])
def test_no_plan_of_a_short_run_is_used_further_away_than_its_reach(anchors, total):
    levels = flow_levels(total, 3.0)
    reached = log_signal_to_noise(total, levels)
    names, last = phases(Schedule(ParkConfig(anchors=anchors)), total, levels=levels), 0
    end = total * (1 - 1 / 9)
    for step, name in enumerate(names):
        last = step if name in ("anchor", "refresh") else last
        if name == "reuse" and step <= end:
            assert reached[step] - reached[last] <= 0.22 * (reached[min(math.ceil(end), total - 1)] - reached[0])
    assert "refresh" in names


def test_a_plan_between_anchors_has_its_own_budget_and_no_residual():
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 60, 16, generator=random).unbind(0)
    config = ParkConfig.profile("fast", query_clusters=3, key_clusters=12, top_p=(0.3, 1.0))
    park = Park(config)
    made = [park(q, k, v, CallSite(step=step, total_steps=4)).stats for step in range(4)]
    assert [stats.phase for stats in made] == ["anchor", "refresh", "refresh", "refresh"]
    assert all(stats.density.item() == 1.0 for stats in made[1:])
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    # with a stale residual added it would not be dense attention
    torch.testing.assert_close(park(q, k, v, CallSite(step=3, total_steps=4)).out, exact)


@pytest.mark.parametrize("total", RUNS)
@pytest.mark.parametrize("shift", [None, 1.0, 3.0, 12.0])
def test_a_budget_falls_from_the_step_after_the_first_to_the_end(total, shift):
    levels = None if shift is None else flow_levels(total, shift)
    passed = [passed_since_first(CallSite(step=s, total_steps=total, noise_levels=levels)) for s in range(total)]
    assert passed == sorted(passed) and passed[:2] == [0.0, 0.0][:total] and passed[-1] == (total > 2)
    if total == 4:
        assert passed == pytest.approx([0, 0, 0.5, 1])  # log s / (1 - s) of the quarters s lies in equal steps


def test_plans_between_the_anchors_of_turbo_keep_less_and_less_and_those_of_fast_do_not():
    random = torch.Generator().manual_seed(0)
    q, k, v = 2 * torch.randn(3, 1, 1, 120, 16, generator=random)
    kept = {}
    for name in ("fast", "turbo"):
        park = Park(ParkConfig.profile(name, query_clusters=3, key_clusters=40))
        made = [park(q, k, v, CallSite(step=step, total_steps=4)).stats for step in range(4)]
        assert [stats.phase for stats in made] == ["anchor", "refresh", "refresh", "refresh"]
        kept[name] = [stats.density.item() for stats in made[1:]]
    assert kept["turbo"][0] > kept["turbo"][1] > kept["turbo"][2] and kept["turbo"][0] == kept["fast"][0]
    # clusters move a little from plan to plan, as they start from those of the plan before
    assert kept["fast"] == pytest.approx([kept["fast"][0]] * 3, rel=0.1)


def test_an_anchor_that_a_cache_skipped_is_made_up_at_the_next_step_that_runs():
    steps = anchor_steps(6, 50)
    ran = [step for step in range(50) if step not in (steps[2], steps[2] + 1)]
    names = dict(zip(ran, phases(Schedule(ParkConfig(anchors=6)), 50, ran=ran), strict=True))
    assert names[steps[2] + 2] == "anchor" and list(names.values()).count("anchor") == 6


def test_layers_last_steps_and_earlier_runs_are_as_without_anchors():
    schedule = Schedule(ResearchConfig(anchors=6, dense_layers=(3,), dense_last_steps=2))
    assert schedule.phase(CallSite(step=0, layer=3, total_steps=50), History()).name == "dense"
    assert schedule.phase(CallSite(step=48, total_steps=50), History(40)).name == "dense"
    assert schedule.phase(CallSite(step=50, total_steps=50), History(40)).name == "dense"
    late = schedule.phase(CallSite(step=7, total_steps=50), History(30))
    assert late.name == "anchor" and "earlier run" in late.reason


def test_a_second_transformer_begins_with_an_anchor_of_its_own():
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 40, 16, generator=random).unbind(0)
    park = Park(ParkConfig(anchors=2, residual_rank=4, compensate=True, query_clusters=2, key_clusters=4))
    both = [
        park(q, k, v, CallSite(step=step, total_steps=50, transformer=name))
        for step, name in ((0, "a"), (1, "a"), (2, "b"), (3, "b"))
    ]
    assert [made.stats.phase for made in both] == ["anchor", "reuse", "anchor", "reuse"]


@pytest.mark.parametrize("field", ["dense_steps", "refresh_steps"])
def test_anchors_beside_another_rule_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}: expected None beside anchors=6"):
        ResearchConfig(anchors=6, **{field: 3 if field == "dense_steps" else (3,)})


def test_anchors_need_the_number_of_steps():
    with pytest.raises(ValueError, match="total_steps: expected the number of steps"):
        dense_prefix(ParkConfig(anchors=6), None)


def test_an_error_to_hold_needs_rows_to_measure_and_a_bound():
    with pytest.raises(ValueError, match="guard_rows: expected some"):
        AdaptivePark(ParkConfig(anchors=6), anchor_error=0.1)
    with pytest.raises(ValueError, match="anchors: expected some"):
        AdaptivePark(ParkConfig(guard_rows=8), anchor_error=0.1)


class Drift:
    """A run whose error grows by a fixed amount per step since the anchor, seen by two layers."""

    def __init__(self, growth: float, **settings):
        self.schedule = AdaptiveSchedule(ParkConfig(**settings), anchor_error=0.1)
        self.growth = growth

    def run(self, total: int = 50) -> list[int]:
        last, anchors = {0: None, 1: None}, []
        for step in range(total):
            names = set()
            for layer in last:
                site = CallSite(step=step, layer=layer, total_steps=total)
                name = self.schedule.phase(site, History(last[layer])).name
                names.add(name)
                if name == "anchor":
                    last[layer] = step
                else:
                    self.schedule.observe(site, torch.full((1, 2), self.growth * (step - last[layer])))
            assert len(names) == 1
            anchors += [step] if names == {"anchor"} else []
        return anchors


def test_an_error_that_stays_small_asks_for_no_second_anchor():
    assert Drift(0.0019, anchors=6).run() == [0]


def test_an_anchor_comes_two_steps_after_the_error_passed_and_all_layers_take_it():
    # 0.04 a step: 0.12 is measured at the third step after an anchor and acted on at the fifth
    assert Drift(0.04, anchors=50).run(20) == [0, 5, 10, 15]


def test_the_number_of_adaptive_anchors_is_bounded():
    assert len(Drift(1.0, anchors=6).run()) == 6


def test_an_adaptive_run_forgets_the_run_before():
    drift = Drift(0.04, anchors=50)
    first = drift.run(20)
    assert drift.run(20) == first
    drift.schedule.reset()
    assert drift.run(20) == first


GUARDED = ParkConfig(
    anchors=8, guard_rows=16, residual_rank=2, compensate=True, query_clusters=4, key_clusters=8, top_p=0.3
)


class BesideAWorseRank:
    """Ulysses of two ranks, told from this one: the heads of the other have a million times its error."""

    rank = 0

    def gather(self, x):
        return torch.stack([x, 1e6 * x if x.is_floating_point() and x.shape == (1, 2) else x])


def test_errors_of_heads_on_other_ranks_ask_for_an_anchor_too():
    q, k, v = torch.randn(3, 1, 2, 80, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    for ranks, anchors in ((None, [0]), (BesideAWorseRank(), [0, 3])):
        park = AdaptivePark(GUARDED, anchor_error=10.0)  # above what errors of this rank's heads reach
        sites = [CallSite(step=step, total_steps=50, ranks=ranks) for step in range(5)]
        assert [site.step for site in sites if park(q, k, v, site).stats.phase == "anchor"] == anchors


def test_a_method_with_an_error_to_hold_measures_and_anchors():
    random = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 80, 16, generator=random).unbind(0)
    park = AdaptivePark(GUARDED, anchor_error=1e-3)
    found = [park(q + 0.1 * step, k, v, CallSite(step=step, total_steps=50)).stats for step in range(8)]
    assert [stats.phase for stats in found] == [
        "anchor",
        "reuse",
        "reuse",
        "anchor",
        "reuse",
        "reuse",
        "anchor",
        "reuse",
    ]
    assert all((stats.error is None) == (stats.phase == "anchor") for stats in found)
