"""Forwards that are forecast: the line, the controller and their bookkeeping, on outputs that are known in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from parkattn import ParkConfig, make_method
from parkattn.anchors import anchor_count, anchor_steps, log_signal_to_noise
from parkattn.dense import Dense
from parkattn.engine import Engine
from parkattn.engine.forecast import CLOSE, LONGEST
from parkattn.park import Park
from parklab.research import ResearchConfig
from plans import flow_levels

STEPS = 50


def levels(steps: int) -> tuple[float, ...]:
    return flow_levels(steps, shift=3.0)


LEVELS = levels(STEPS)
U = log_signal_to_noise(STEPS, LEVELS)
FORM = "any"
GENERATOR = torch.Generator().manual_seed(0)
BASE, TILT, BEND = (
    torch.linalg.qr(torch.randn(64, 3, generator=GENERATOR, dtype=torch.float64))[0].T.float().unsqueeze(1) * 10
)
# a line through two roundings is wrong by at most 1 + 2 g / h of them, and rows are no longer than LONGEST
ROUNDING = (1 + 2 * LONGEST) * 4 * torch.finfo(torch.float32).eps * 30


def engine(tolerance: float = 0.01, method=None) -> Engine:
    made = Engine(Dense(tolerance) if method is None else method)
    made.begin_run(STEPS, LEVELS)
    return made


def drive(made: Engine, output, steps=range(STEPS), branches=("cond",), expert=lambda step: "transformer", form=FORM):
    """What the pipeline gets, by (step, branch), and what was computed, in order."""
    got, computed = {}, []
    for step in steps:
        for branch in branches:
            made.clock.step, made.clock.branch = step, branch
            out = made.forecast(expert(step), form=form)
            if out is None:
                computed.append((step, branch))
                out = output(step, branch)
                made.learn(out, expert(step), form=form)
            got[step, branch] = out
    return got, computed


def skipped(computed, branch="cond") -> set[int]:
    return set(range(STEPS)) - {step for step, of in computed if of == branch}


def line(step, branch="cond"):
    return BASE + U[step] * TILT


def parabola(step, branch="cond", bend=0.02):
    return BASE + bend * U[step] ** 2 * BEND


def test_an_exactly_linear_model_is_forecast_exactly():
    got, computed = drive(engine(1e-3), line)
    assert len(skipped(computed)) > STEPS / 2
    for (step, _), out in got.items():
        torch.testing.assert_close(out, line(step), rtol=0, atol=ROUNDING)


# of a second derivative that is the same everywhere: the error is known but for |y|, which grows by less than a tenth;
# and of one that doubles over the run: by no more between a comparison and a forecast
CURVES = {
    "parabola": (lambda u: BASE + 0.02 * u**2 * BEND, 1.1),
    "exponential": (lambda u: BASE + math.exp(math.log(2) * (u - U[0]) / (U[-1] - U[0])) * BEND, 2.2),
}


def short_run(steps: int, tolerance: float, curve):
    """The log signal-to-noise of each step, what the pipeline gets, and the steps that were computed."""
    made, u = Engine(Dense(tolerance)), log_signal_to_noise(steps, levels(steps))
    made.begin_run(steps, levels(steps))
    got, computed = drive(made, lambda step, _: curve(u[step]), steps=range(steps))
    return u, {step: out for (step, _), out in got.items()}, [step for step, _ in computed]


def left_behind(u, step, line, true) -> float:
    error = ((line - true).norm() / true.norm()).item()
    return error * (u[step + 1] - u[step]) / (1 + math.exp(u[step]))


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("tolerance", [3e-4, 5e-4, 2e-3, 6e-3, 2e-2])
@pytest.mark.parametrize("steps", [4, 8, 10, 30, 50])
def test_a_run_of_any_length_computes_what_it_must_and_no_more(steps, tolerance, name):
    """What a forecast would leave in the latents decides, at 4 steps as at 50: within `factor`, by which the curve's
    second derivative, and |y|, differ between a comparison and a forecast.
    """
    curve, factor = CURVES[name]
    u, got, computed = short_run(steps, tolerance, curve)
    left, row = 0.0, 0
    for step in range(4 if steps < CLOSE else 3, steps - 1):  # the first steps are compared, the last is computed
        before = [at for at in computed if at < step][-2:]
        slope = (curve(u[before[1]]) - curve(u[before[0]])) / (u[before[1]] - u[before[0]])
        line = curve(u[before[1]]) + (u[step] - u[before[1]]) * slope
        would = left + left_behind(u, step, line, curve(u[step]))
        if step in computed:
            assert would > tolerance / factor or row == LONGEST
            left, row = 0.0, 0
        else:
            assert would <= factor * tolerance + 1e-6 * LONGEST and row < LONGEST
            torch.testing.assert_close(got[step], line, rtol=0, atol=ROUNDING)
            left, row = would, row + 1


def test_longer_strides_leave_fewer_forecasts_and_four_steps_none():
    for curve, _ in CURVES.values():
        shares = [1 - len(short_run(steps, 6e-3, curve)[2]) / steps for steps in (4, 8, 10, 30, 50)]
        assert shares[0] == 0 and shares == sorted(shares) and shares[-1] > 0.5


@pytest.mark.parametrize("steps", [8, 10, 16, 30])
def test_in_short_runs_one_comparison_that_happens_to_be_exact_is_not_believed(steps):
    """A curve that bends one way, and then the other: where it crosses its line the comparison says nothing."""
    u = log_signal_to_noise(steps, levels(steps))
    turn = steps // 2  # the outputs of the steps before, at and after it are on a line

    def curve(x):
        return BASE + 5 * max(0.0, u[turn - 1] - x) ** 2 * BEND + 5 * max(0.0, x - u[turn + 1]) ** 2 * BEND

    made = Engine(Dense(2e-3))
    made.begin_run(steps, levels(steps))
    _, computed = drive(made, lambda step, _: curve(u[step]), steps=range(steps))
    assert {turn - 1, turn, turn + 1, turn + 2} <= {step for step, _ in computed}
    errors = [each() for each in made.log.forwards.errors]
    assert all(error < 0.2 for error in errors)


def test_a_higher_tolerance_computes_less_and_zero_computes_everything():
    counts = [len(drive(engine(tolerance), parabola)[1]) for tolerance in (0.0, 3e-4, 2e-3, 2e-2)]
    assert counts[0] == STEPS and counts == sorted(counts, reverse=True) and counts[-1] < counts[1]


@pytest.mark.parametrize(("steps", "first"), [(50, 3), (49, 4), (10, 4), (6, 4), (5, None), (4, None)])
def test_the_first_three_or_in_short_runs_four_steps_and_the_last_are_computed(steps, first):
    left_out = set(range(steps)) - set(short_run(steps, 1.0, lambda u: BASE + u * TILT)[2])
    assert min(left_out) == first and max(left_out) < steps - 1 if first else not left_out


@pytest.mark.parametrize("profile", ["paper", "quality", "fast"])
def test_dense_steps_and_anchors_are_computed(profile):
    config = ResearchConfig.profile(profile, tolerance=1.0, dense_last_steps=3)
    left_out = skipped(drive(engine(method=Park(config)), line)[1])
    kept = range(10) if profile == "paper" else anchor_steps(anchor_count(config, STEPS), STEPS, LEVELS)
    assert left_out and not left_out & {*kept, *range(STEPS - 3, STEPS)}


SHORT_CALLS = {"top_k": 0.5, "multiple": 1, "least_tokens": 1, "dense_layers": (0,)}


@pytest.mark.parametrize(
    ("name", "changes", "dense"),
    [
        ("chipmunk", {**SHORT_CALLS, "voxel": (1, 2, 2)}, {0, 1, 10, 20, 30, 40}),
        ("chipmunk", {**SHORT_CALLS, "voxel": (1, 2, 2), "refresh_steps": (10, 40)}, {0, 1, 10, 40}),
        ("mc-sparse", {**SHORT_CALLS, "group": 4, "refresh_interval": 15}, {*range(10), 24, 39}),
        # its first plan is due where the first row of forecasts ends
        ("park", {"residual_rank": 2, "query_clusters": 2, "key_clusters": 4}, {*range(10), *range(14, STEPS, 10)}),
    ],
)
def test_full_steps_that_no_anchor_rule_names_are_computed(name, changes, dense):
    """A layer whose plan is due is dense then; layer 0 is dense by its number and asks for nothing."""
    made, phases = engine(method=make_method(name, tolerance=1.0, **changes)), {}
    made.clock.grid = (2, 4, 4)
    q, k, v = torch.randn(3, 1, 1, 32, 8, generator=torch.Generator().manual_seed(3)).unbind(0)
    for step in range(STEPS):
        made.clock.step = step
        if made.forecast(form=FORM) is None:
            for layer in (0, 1):
                made.attend(q, k, v, layer=layer, dense=lambda: torch.zeros_like(q))
            phases[step] = made.log.calls[-1].stats.phase
            made.learn(line(step), form=FORM)
    assert len(phases) < STEPS
    assert dense == {step for step, phase in phases.items() if phase in ("dense", "anchor")}


def test_branches_follow_one_decision_and_the_worst_of_them_makes_it():
    def one_bends(step, branch):
        return line(step) if branch == "cond" else parabola(step, bend=0.5)

    _, computed = drive(engine(2e-3), one_bends, branches=("cond", "uncond"))
    assert (
        skipped(computed)
        == skipped(computed, "uncond")
        == skipped(drive(engine(2e-3), lambda step, _: one_bends(step, "uncond"))[1])
    )
    _, alone = drive(engine(2e-3), line)
    assert len(skipped(computed)) < len(skipped(alone))


def test_the_worst_video_of_a_batch_decides():
    _, computed = drive(engine(2e-3), lambda step, _: torch.cat([line(step), parabola(step, bend=0.5)]))
    assert skipped(computed) == skipped(drive(engine(2e-3), lambda step, _: parabola(step, bend=0.5))[1])


def test_no_line_joins_the_outputs_of_two_experts():
    def of_expert(step, branch="cond"):
        return line(step) if step < 15 else 5 * TILT - line(step)

    got, computed = drive(engine(1e-3), of_expert, expert=lambda step: "transformer" if step < 15 else "transformer_2")
    assert {15, 16, 17} <= {step for step, _ in computed} and skipped(computed) & set(range(18, STEPS))
    assert all((out - of_expert(step)).norm() < 1e-3 * of_expert(step).norm() for (step, _), out in got.items())


@pytest.mark.parametrize("end", ["begin_run", "end_run", "reset", "earlier step", "form"])
def test_a_second_video_never_sees_the_first_ones_outputs(end):
    made, form = engine(1.0), FORM
    drive(made, line, steps=range(10))
    assert made.state_bytes == 2 * line(0).nbytes
    if end == "form":  # another size or type of the latents
        form = "another"
        _, computed = drive(made, lambda step, _: -line(step), steps=range(10, STEPS), form=form)
        assert [step for step, _ in computed][:2] == [10, 11]
        return
    if end != "earlier step":
        {"begin_run": lambda: made.begin_run(STEPS, LEVELS), "end_run": made.end_run, "reset": made.reset}[end]()
        assert made.state_bytes == 0
    got, computed = drive(made, lambda step, _: -line(step))
    fresh, computed_afresh = drive(engine(1.0), lambda step, _: -line(step))
    assert computed == computed_afresh and all(torch.equal(got[at], fresh[at]) for at in fresh)


def test_two_videos_in_turn_under_one_branch_are_both_computed():
    _, computed = drive(engine(1.0), line, branches=("cond", "cond"))
    assert len(computed) == 2 * STEPS
    made = engine(1.0)
    assert drive(made, line, steps=range(4))[1] == [(0, "cond"), (1, "cond"), (2, "cond")]
    assert drive(made, line, steps=[3, 4])[1] == [
        (3, "cond"),
        (4, "cond"),
    ]  # another video joins at a step that was forecast


def test_a_branch_that_ends_holds_nothing_up_and_one_that_begins_is_computed_first():
    made = engine(1e-2)
    drive(made, line, steps=range(8), branches=("cond", "uncond"))
    _, computed = drive(made, line, steps=range(8, STEPS))
    assert len(computed) < STEPS / 2 and made.state_bytes == 2 * line(0).nbytes
    made = engine(1.0)
    drive(made, line, steps=range(4))  # of which the last is forecast
    _, computed = drive(made, line, steps=range(4, STEPS), branches=("cond", "uncond"))
    assert [step for step, branch in computed if branch == "uncond"][:2] == [4, 5]


def test_outputs_that_are_not_finite_are_computed():
    _, computed = drive(engine(1.0), lambda step, _: line(step) * (math.nan if 10 <= step < 20 else 1))
    assert set(range(10, 20)) - {10, 11, 12, 13, 14} <= {step for step, _ in computed}
    assert skipped(computed) & set(range(25, STEPS))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("steps", [12, 30, 49, 50])
@pytest.mark.parametrize("at", [2, 4, 5, 6])
def test_no_forecast_continues_an_output_that_is_not_finite(steps, at, wrong):
    """Whichever of the last comparisons it is in, and in a branch that begins with it."""
    u = log_signal_to_noise(steps, levels(steps))
    for branches, spoilt in ((("cond", "uncond"), "uncond"), (("cond",), "cond")):
        made = Engine(Dense(1.0))
        made.begin_run(steps, levels(steps))
        spoils = [at]

        def output(step, branch, made=made, spoilt=spoilt, spoils=spoils):
            found = BASE + u[step] * TILT
            if branch == spoilt and step >= spoils[0]:
                spoils[0] = steps
                return found * wrong
            return found

        for step in range(steps):
            got, computed = drive(made, output, [step], branches if step >= min(at, 4) else ("cond",))
            assert all(out.isfinite().all() for where, out in got.items() if where not in computed)
        assert made.log.forwards.steps


def test_a_branch_is_compared_before_it_is_forecast():
    made = engine(1.0)
    drive(made, line, steps=range(10))
    _, computed = drive(made, line, steps=range(10, STEPS), branches=("cond", "uncond"))
    first = sorted(step for step, branch in computed if branch == "uncond")[:3]
    assert first == list(range(first[0], first[0] + 3))


def test_an_output_that_is_written_into_afterwards_changes_nothing():
    def written(step, branch):
        return line(step)

    made, got = engine(1.0), {}
    for step in range(STEPS):
        made.clock.step = step
        out = made.forecast(form=FORM)
        if out is None:
            out = written(step, "cond")
            made.learn(out, form=FORM)
        got[step] = out.clone()
        out.zero_()
    assert all(torch.equal(got[step], out) for (step, _), out in drive(engine(1.0), line)[0].items())


def test_the_type_of_an_output_is_kept_and_noise_that_does_not_fall_is_not_extrapolated():
    got, computed = drive(engine(1.0), lambda step, _: line(step).bfloat16())
    assert skipped(computed) and {out.dtype for out in got.values()} == {torch.bfloat16}
    made = Engine(Dense(1.0))
    made.begin_run(STEPS, tuple(level for level in LEVELS[::2] for _ in range(2)))  # two forwards at each level
    assert len(drive(made, line)[1]) == STEPS


@pytest.mark.parametrize("unknown", ["step", "total_steps"])
def test_a_run_whose_steps_are_not_known_is_computed(unknown):
    made = engine(1.0)
    drive(made, line, steps=range(6))
    setattr(made.clock, unknown, None)
    assert made.forecast(form=FORM) is None


def test_the_summary_counts_forwards_and_says_how_wrong_forecasts_were():
    made = engine(2e-3)
    _, computed = drive(made, parabola)
    found = made.summary()
    assert found.forwards["computed"] == len(computed) and found.forwards["forecast"] == STEPS - len(computed)
    assert found.steps["forecast"] == sorted(skipped(computed))
    assert 0 < found.forwards["mean_error"] <= found.forwards["largest_error"] < 0.2
    assert engine(0.0).summary().forwards == {} and "forecast" not in engine(0.0).summary().steps


def test_a_host_that_never_asks_says_so_in_the_summary():
    made = engine(0.01)
    q = torch.zeros(1, 1, 4, 8)
    made.attend(q, q, q, layer=0, dense=lambda: q)
    assert made.summary().forwards["off"] == {"the host runs every forward": 1}


def test_a_tolerance_is_a_share():
    for wrong in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="tolerance: expected a number in"):
            ParkConfig(tolerance=wrong)
    assert ParkConfig.profile("paper").tolerance == 0
