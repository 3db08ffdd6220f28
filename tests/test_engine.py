"""The engine under a host that is no diffusers: clock, calls, log and summary."""

from __future__ import annotations

import json

import pytest
import torch

from host_stand_ins import Recording
from parkattn import Park
from parkattn.engine import Engine, RunLog
from parkattn.engine.summary import Summary
from parkattn.site import AttentionStats, CallSite
from parklab.research import ResearchConfig

BLOCKS = {"query_clusters": 3, "key_clusters": 4, "kmeans_iterations": 2, "top_p": None, "top_k": 0.5}
SPARSE = ResearchConfig(**BLOCKS, dense_steps=1, refresh_interval=2, reference_steps=5)
LAYERS, STEPS = 2, 5


def qkv(seed: int, tokens: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, tokens, 8, generator=generator) for _ in range(3)]


def stock(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def generate(engine: Engine, seed: int = 0, steps: int = STEPS) -> list[torch.Tensor]:
    """All that a host has to say."""
    engine.begin_run(total_steps=steps, noise_levels=tuple(1 - step / steps for step in range(steps)))
    outputs = []
    for step in range(steps):
        for branch in ("cond", "uncond"):
            engine.clock.step, engine.clock.branch, engine.clock.grid = step, branch, (2, 4, 5)
            for layer in range(LAYERS):
                given = qkv(100 * seed + 10 * layer + (branch == "cond"))
                outputs.append(engine.attend(*given, layer=layer, dense=lambda given=given: stock(*given)))
    engine.end_run()
    return outputs


def test_a_host_says_where_a_run_stands_and_the_method_is_told():
    method = Recording()
    generate(Engine(method))
    assert [(site.step, site.branch, site.layer) for site in method.sites] == [
        (step, branch, layer) for step in range(STEPS) for branch in ("cond", "uncond") for layer in range(LAYERS)
    ]
    assert {(site.total_steps, site.grid, site.transformer) for site in method.sites} == {
        (STEPS, (2, 4, 5), "transformer")
    }
    assert {site.noise_levels for site in method.sites} == {tuple(1 - step / STEPS for step in range(STEPS))}


def test_the_summary_takes_any_phase_a_method_reports_after_the_three_known_ones():
    engine = Engine(Recording("drafted", state_bytes=7))
    generate(engine)
    report = engine.summary()
    each = 2 * LAYERS
    assert list(report.calls.items()) == [
        ("dense", each),
        ("refresh", 0),
        ("reuse", 0),
        ("drafted", (STEPS - 1) * each),
    ]
    assert report.steps == {"dense": [0], "refresh": [], "reuse": [], "drafted": [1, 2, 3, 4]}
    assert report.state_bytes == 7
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    heading, *rows = (line.split() for line in str(report).splitlines()[2 : 3 + LAYERS])
    assert heading == ["transformer", "layer", "dense", "refresh", "reuse", "drafted", "density", "mass"]
    assert [row[1:6] for row in rows] == [[str(layer), "2", "0", "0", "8"] for layer in range(LAYERS)]


def test_a_second_run_never_sees_the_plans_of_the_first():
    engine = Engine(Park(SPARSE))
    generate(engine, seed=1)
    other = Engine(Park(SPARSE))
    assert all(map(torch.equal, generate(engine), generate(other)))
    assert engine.summary().calls == other.summary().calls == {"dense": 4, "refresh": 8, "reuse": 8}


def test_the_end_of_a_run_releases_plans_and_keeps_the_log():
    engine = Engine(Park(SPARSE))
    generate(engine)
    report = engine.summary()
    assert report.state_bytes == 0 < report.peak_state_bytes
    assert sum(report.calls.values()) == 2 * LAYERS * STEPS


@pytest.mark.parametrize("reason", ["the call is causal", None])
def test_a_call_that_must_be_dense_or_whose_step_is_unknown_is_the_hosts_own_attention(reason):
    method = Recording()
    engine = Engine(method)
    given = qkv(0)
    if reason is not None:
        engine.begin_run(total_steps=STEPS)
    out = engine.attend(*given, layer=0, dense=lambda: stock(*given), reason=reason)
    assert torch.equal(out, stock(*given)) and not method.sites
    assert engine.summary().dense_because == {reason or "the step is unknown: engine.clock.step is None": 1}


def test_a_grid_of_another_number_of_tokens_is_not_passed_on():
    method = Recording()
    engine = Engine(method)
    engine.begin_run(total_steps=STEPS)
    engine.clock.grid = (2, 4, 5)
    for tokens, text in ((40, None), (44, slice(40, 44)), (48, None)):
        given = qkv(0, tokens)
        engine.attend(*given, layer=0, dense=lambda given=given: stock(*given), text=text)
    assert [site.grid for site in method.sites] == [(2, 4, 5), (2, 4, 5), None]


def test_calls_of_one_layer_that_come_in_parts_have_branches_of_their_own():
    method = Recording()
    engine = Engine(method)
    engine.begin_run(total_steps=STEPS)
    for part in range(2):
        engine.attend(*qkv(part), layer=0, dense=lambda part=part: stock(*qkv(part)), part=part)
    assert [site.branch for site in method.sites] == ["cond", "cond, part 1"]


def _summary_of(calls, densities=None):
    """(layer, phase, seconds) of each call, and its density, a half where nothing is said."""
    log = RunLog()
    for (layer, phase, seconds), density in zip(calls, densities or [0.5] * len(calls), strict=True):
        stats = AttentionStats(phase, "", torch.full((1, 1), density))
        log.add(CallSite(layer=layer), stats, lambda seconds=seconds: seconds)
    return Summary.of("park", log, 0)


def test_summary_compares_the_time_of_sparse_calls_with_the_dense_calls_of_their_layer():
    dense = [(0, "dense", seconds) for seconds in (3.0, 2.0, 9.0)]
    report = _summary_of([*dense, (0, "refresh", 2.5), (0, "reuse", 1.0), (1, "reuse", 4.0)])
    assert report.attention_seconds == {"dense": 14.0, "refresh": 2.5, "reuse": 5.0}
    # layer 0: two sparse calls instead of 3 s each; layer 1 has nothing to be compared with
    assert report.seconds_saved == 2 * 3.0 - 3.5
    assert report.seconds_saved_at_most is None
    assert "attention took 21.5 s, about 2.5 s saved, by the dense calls of this run" in str(report)


def test_a_video_too_short_to_gain_gets_advice():
    for sparse, said in ((2.5, False), (3.5, True)):
        report = _summary_of([(0, "dense", 3.0), (0, "reuse", sparse)])
        assert ("too short to gain" in str(report)) == said == bool(report.to_dict()["advice"])


def test_a_run_without_a_dense_call_says_its_cost_and_gets_advice_where_little_was_skipped():
    for density, said in ((0.5, False), (0.9, True)):
        report = _summary_of([(0, "anchor", 1.0), (0, "reuse", 1.0)], [density] * 2)
        assert (
            f"at most 0.0 s saved, by the anchors, dense calls that also build a plan; {density:.0%} of dense attention"
            in str(report)
        )
        assert ("cannot be much faster" in str(report)) == said == bool(report.to_dict()["advice"])


def test_with_anchors_alone_what_was_saved_is_a_bound_by_the_shortest_of_them():
    report = _summary_of(
        [(0, "anchor", 9.0), (0, "reuse", 1.0), (0, "anchor", 4.0), (0, "reuse", 1.5), (1, "dense", 5.0)]
    )
    # layer 1 stays dense and has nothing to be compared with
    assert report.seconds_saved is None and report.seconds_saved_at_most == 2 * 4.0 - 2.5
    assert "at most 5.5 s saved, by the anchors" in str(report) and not report.advice
    slower = _summary_of([(0, "anchor", 1.0), (0, "reuse", 3.0)])
    assert slower.seconds_saved_at_most == -2.0
    assert "at least 2.0 s lost, by the anchors" in str(slower) and "too short to gain" in slower.advice[0]


def test_what_was_saved_is_no_more_than_what_was_skipped():
    report = _summary_of([(0, "anchor", 4.0), (0, "reuse", 1.0), (0, "reuse", 1.0)], [1.0, 1.0, 0.75])
    # by the anchor alone it would be 2 * 4 - 2; but a quarter of one call is all that was skipped
    assert report.seconds_saved_at_most == 1.0


def test_without_dense_calls_and_anchors_the_summary_says_why_nothing_is_known_of_savings():
    report = _summary_of([(0, "refresh", 2.0), (0, "reuse", 1.0)])
    assert report.seconds_saved is report.seconds_saved_at_most is None
    assert "what was saved is not known, since no layer has dense calls to compare with" in str(report)
    assert _summary_of([(0, "dense", 2.0)]).seconds_saved == 0.0
