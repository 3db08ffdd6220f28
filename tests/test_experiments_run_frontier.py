"""The frontier in seconds: composed of measured forwards, from records alone, with what was not run said."""

import pytest

from parklab.bench.frontier import FORMAT
from parklab.experiments.results import NOT_RUN, CellRecords, Plot
from parklab.experiments.run_frontier import CACHES, COLUMNS, run_result, runs_of
from parklab.studio.gain import composed_run, measured_forwards

WAN = measured_forwards()["models"]["wan2.1-14b"]
STEPS = 50
FAST = {"dense": [0], "anchor": [1, 5, 10, 20, 30, 40]}


def line(setting, psnr=30.0, prompt="a", share=1.0, phases=None, size=(81, 400, 576), guidance=5.0, cost=0.5):
    return {
        "format": FORMAT, "setting": setting, "prompt": prompt, "seed": 0, "guidance": guidance, "steps": STEPS, "psnr": psnr,
        "cost": cost, "share_computed": share, "steps_by_phase": phases or {}, **dict(zip(("frames", "height", "width"), size, strict=True)),
    }  # fmt: skip


def by_name(lines, cells=()):
    return {run.name: run for run in runs_of(lines, cells) if run.model == "wan2.1-14b"}


def test_a_profile_that_computes_all_forwards_takes_what_doctor_composes():
    reuse = [step for step in range(STEPS) if step not in (*FAST["dense"], *FAST["anchor"])]
    run = by_name([line("fast", phases={**FAST, "reuse": reuse})])["fast"]
    known = composed_run(WAN, "wan2.1-14b", steps=STEPS, forwards_per_step=2)
    assert known["profiles"]["fast"]["phases"] == {"dense": 1, "anchor": 6, "reuse": 43}
    assert run.seconds == pytest.approx(known["profiles"]["fast"]["seconds"]) and run.how == "measured"


def test_a_forecast_takes_no_seconds_and_float8_saves_in_computed_forwards_alone():
    phases = {**FAST, "reuse": list(range(41, 50)), "forecast": list(range(11, 20))}
    found = by_name([line("fast tolerance=0.004", phases=phases, share=0.32)])
    seconds, own = WAN["profiles"]["fast"]["seconds"], found["fast tolerance=0.004"]
    once = seconds["dense"] + seconds["anchor_cold"] + 5 * seconds["anchor"] + 9 * seconds["reuse"]
    assert own.seconds == pytest.approx(2 * once) and own.family == "fast, forecasts"
    eight = found["fast tolerance=0.004, float8 linears"]
    assert eight.seconds == pytest.approx(2 * (once - 16 * WAN["float8_saves_s"])) and not eight.videos


def test_dense_rows_take_their_share_of_compiled_forwards():
    shares = {"dense steps=25": 0.5, "dense tolerance=0.004": 0.4, "dense cache=mag threshold=0.1": 0.45}
    found = by_name([line(name, share=share) for name, share in shares.items()])
    for name, share in shares.items():
        assert found[name].seconds == pytest.approx(share * 2 * STEPS * WAN["dense"]["compiled"])
    # one of 40 blocks of a forward that is left out
    first = by_name([line("dense cache=first-block", share=0.5)])["dense cache=first-block"]
    assert first.seconds == pytest.approx((0.5 + 0.5 / 40) * 2 * STEPS * WAN["dense"]["compiled"])


def test_other_methods_take_our_kernel_at_their_cost():
    asked = {"frames": 81, "height": 400, "width": 576, "steps": STEPS, "guidance": 5.0, "prompt": "a", "seed": 0}
    costs = {"svg2": 1.0, "svg": WAN["profiles"]["paper"]["density"]["reuse"]}
    cells = [(asked | {"method": name}, {"psnr": 30.0, "cost": cost}) for name, cost in costs.items()]
    found = by_name([line("paper", phases={"dense": [0]})], cells)
    assert found["svg2"].seconds == pytest.approx(2 * STEPS * WAN["dense"]["own kernel"])
    assert found["svg"].seconds == pytest.approx(2 * STEPS * WAN["profiles"]["paper"]["seconds"]["reuse"])
    assert found["svg"].how == "estimated"


def test_lines_that_do_not_say_their_phases_have_no_seconds():
    plain = line("fast")
    del plain["steps_by_phase"]
    found = by_name([plain, line("quality", phases={"anchors": [0]})])
    assert found["fast"].seconds is None is found["quality"].seconds and found["fast"].how.startswith("not known")


def test_rows_without_records_say_so_and_lengths_of_video_are_kept_apart():
    lines = [line("quality", phases={"dense": [0]}), line("fast", phases=FAST, size=(29, 224, 256))]
    result = run_result(CellRecords([], {}, {}, lines=lines))
    names = [column.name for column in COLUMNS]
    rows = [dict(zip(names, row, strict=True)) for row in result.table.rows]
    assert {row["video"] for row in rows} == {"81x400x576, 50 steps", "29x224x256, 50 steps"}
    missing = [row for row in rows if row["seconds are"] == NOT_RUN]
    assert {"MagCache", "fast, int8, forecasts", "sparse methods"} <= {row["run"] for row in missing}
    assert all(row["PSNR"] is None and row["seconds"] is None for row in missing)
    assert {finding.verdict for finding in result.findings} == {NOT_RUN} and isinstance(result.figure, Plot)
    assert run_result(CellRecords([], {}, {})).note.startswith(NOT_RUN)


def test_forecasts_are_compared_with_caches_on_the_same_videos_at_the_same_number_of_forwards():
    ours = [(0.6, 60.0), (0.45, 50.0), (0.3, 20.0)]
    lines = [
        line(f"dense tolerance={i + 1}e-3", psnr + shift, prompt, share)
        for i, (share, psnr) in enumerate(ours)
        for prompt, shift in (("a", 0.0), ("b", 2.0))
    ]
    lines += [line("dense cache=mag threshold=0.1", 45.0, prompt, 0.5) for prompt in "ab"]
    # fewer forwards than any of ours
    lines += [line("dense cache=taylorseer cache_interval=5", 10.0, prompt, 0.2) for prompt in "ab"]
    findings = run_result(CellRecords([], {}, {}, lines=lines)).findings[: len(CACHES)]
    found = {name: next(each for each in findings if name in each.statement) for name in CACHES.values()}
    # a third of the way from 50 to 60, on the mean of both videos, over 45
    assert (
        found["MagCache"].margin == pytest.approx(1 + 50 + 10 / 3 - 45)
        and "threshold=0.1" in found["MagCache"].statement
    )
    assert found["TaylorSeer"].margin is None and found["FirstBlockCache"].margin is None
