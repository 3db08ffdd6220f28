"""Which measures a quality cell takes, what is beside them, and the floors of dense against dense."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("diffusers")

from parklab.bench.frontier import FORMAT
from parklab.experiments import quality, reproduce, runner
from parklab.experiments.catalogue import EXPERIMENTS
from parklab.experiments.evaluation import FLOOR, FLOORS, OWN_FLOOR
from parklab.experiments.quality import measure_frames, named_measures, takeable_measures
from parklab.experiments.results import NOT_RUN, CellRecords, Plot
from parklab.experiments.run_frontier import CACHES, COLUMNS, run_result, runs_of
from parklab.metrics.measures import MEASURES, SINGLE, Setting
from parklab.store import read_record
from parklab.studio.gain import composed_run, measured_forwards
from parklab.studio.prompts import Shard
from reproduce_cases import gathered, quick
from reproduce_cases import quality as made_up

QUALITY_TABLES = (
    "tab:main_quality_efficiency", "tab:module_ablation", "tab:centroid_count_sensitivity_hy", "tab:centroid_count_sensitivity_wan",
    "tab:reuse_schedule_hy", "fig:quality_efficiency_curve", "matched_densities", "matched_costs", "ablation", "frontier",
)  # fmt: skip


def _frames(seed, size=16):
    return np.random.default_rng(seed).integers(0, 256, (3, size, size, 3), dtype=np.uint8)


@pytest.fixture
def two_more(monkeypatch):
    """A measure of one video that is installed, and one against a reference that is not."""
    steady = dataclasses.replace(
        MEASURES["subject_consistency"], title="steady", run=lambda video, setting: 0.5, reason=lambda setting: None
    )
    absent = dataclasses.replace(
        MEASURES["vmaf"], reason=lambda setting: "no package absent; install it with: pip install absent"
    )
    monkeypatch.setitem(MEASURES, "vmaf", absent)
    monkeypatch.setitem(MEASURES, "steady", dataclasses.replace(steady, package=None))
    assert steady.kind == SINGLE


def test_without_names_whatever_is_installed_is_measured_and_the_rest_has_a_reason(two_more):
    names, reasons = takeable_measures(None, Setting())
    assert names[:2] == ["psnr", "ssim"] and "vmaf" not in names
    assert reasons["vmaf"] == "no package absent; install it with: pip install absent"
    assert {*names, *reasons} == set(quality.USUAL)
    every, lacking = takeable_measures("all", Setting())
    assert "steady" in every and "vmaf" in lacking and {*every, *lacking} == set(MEASURES)


def test_a_measure_that_is_named_and_cannot_be_taken_ends_the_run_before_it_begins(two_more, tmp_path):
    with pytest.raises(ModuleNotFoundError, match=r"^vmaf: expected what it needs, got no package absent"):
        runner.Lab(quick(measures="psnr,vmaf"), tmp_path)
    with pytest.raises(ValueError, match=r"^measures: expected all or some of .*got 'vmfa'; did you mean vmaf\?"):
        quick(measures="vmfa")
    runner.Lab(quick(measures="vmaf", draw=True), tmp_path)  # what another machine measured can be drawn


def test_both_kinds_of_measures_stand_in_the_row_and_frames_too_small_for_one_are_no_failure(two_more):
    found = measure_frames(["psnr", "ssim", "steady"], _frames(0), _frames(1), Setting())
    assert (
        found.video["steady"] == 0.5
        and 0 < found.video["ssim"] < 1
        and len(found.by_frame["psnr"]) == 3
        and not found.reasons
    )
    assert found.video["psnr"] == pytest.approx(np.mean(found.by_frame["psnr"]))
    small = measure_frames(["psnr", "ssim"], _frames(0, 8), _frames(1, 8), Setting())
    assert small.video["ssim"] is None and small.video["psnr"] > 0
    assert small.reasons["ssim"].startswith("frames: expected at least 11 x 11 pixels for SSIM")


def test_named_measures_are_part_of_what_a_cell_asks_in_one_order_and_psnr_is_always_among_them(tmp_path):
    assert named_measures("ssim") == named_measures("ssim,psnr,ssim") == ["psnr", "ssim"]
    labs = [runner.Lab(quick(measures=asked), tmp_path) for asked in (None, "ssim", "ssim,psnr", "all")]
    cells = [lab.quality_cell(lab.requests()[0], "park") for lab in labs]
    assert [cell.request.get("measures") for cell in cells] == [None, ["psnr", "ssim"], ["psnr", "ssim"], "all"]
    assert cells[1].name == cells[2].name and len({cell.name for cell in cells}) == 3


def test_a_measure_has_a_column_of_its_own_name_where_it_was_taken():
    cell, record = made_up("a", "park", 20.0)
    record["row"] |= {"vmaf": 91.25, "imaging_quality": 0.7}
    table = EXPERIMENTS["tab:main_quality_efficiency"].result(gathered((cell, record))).table
    shown = dict(zip((column.name for column in table.columns), table.shown()[0], strict=True))
    assert (shown["VMAF"], shown["imaging quality"], shown["SSIM"]) == ("91.25", "0.7000", "0.9000")
    assert "ST-LPIPS" not in shown and "LPIPS" not in shown


@pytest.mark.parametrize("label", QUALITY_TABLES)
def test_every_quality_table_begins_with_dense_against_dense(label, tmp_path):
    for device, floors in (("cpu", (FLOOR,)), ("cuda", FLOORS)):
        lab = runner.Lab(quick(draw=True, device=device), tmp_path)
        asked = [cell.request["method"] for cell in EXPERIMENTS[label].cells(lab)]
        assert tuple(asked[: len(floors)]) == floors and not set(asked[len(floors) :]) & set(FLOORS)


def test_a_floor_is_a_row_of_its_table_and_of_no_finding():
    pairs = [
        made_up("a", method, psnr)
        for method, psnr in ((FLOOR, 100.0), (OWN_FLOOR, 60.0), ("park", 20.0), ("svg", 19.0))
    ]
    pairs[0][1]["row"]["error"] = 0.0
    for label in ("matched_densities", "frontier"):
        for cell, record in pairs:
            cell.request.update(frames=9, height=64, width=96, steps=4)
            record["row"]["cost"] = 0.1  # dense runs that cost nothing would win, were they methods
        result = EXPERIMENTS[label].result(gathered(*pairs))
        assert [row[0] for row in result.table.rows][:2] == [FLOOR, OWN_FLOOR]
        assert not any(floor in finding.statement for finding in result.findings for floor in FLOORS)
        assert not {FLOOR, OWN_FLOOR} & {
            series.name for row in result.figure.rows for panel in row for series in panel.series
        }
    table = EXPERIMENTS["matched_densities"].result(gathered(*pairs)).table
    notes = [row[-1] for row in table.rows]
    assert notes[0] == "equal frames" and not any(notes[1:])


def test_the_own_kernels_floor_is_all_dense_and_off_by_rounding_at_most(tmp_path):
    lab = runner.Lab(quick(measures="psnr"), tmp_path)
    request = lab.requests()[0]
    assert not lab.fill([lab.quality_cell(request, OWN_FLOOR)]).failures
    record = read_record(next(tmp_path.glob("cells/quality-dense-by-our-kernel-*.json")))
    assert (
        record["row"]["density_all_steps"] == 1.0
        and record["config"]["own_dense"]
        and record["config"]["dense_fraction"] == 1.0
    )
    # frames that differ by one of 255 levels everywhere have this PSNR
    assert record["row"]["psnr"] >= 20 * np.log10(255)


def test_a_rank_of_torchrun_takes_its_own_gpu_and_a_named_part_does_not(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(reproduce, "take_device", lambda device, shard: taken.append((device, shard)))
    monkeypatch.setattr(reproduce, "choose_experiments", lambda names: [])
    reproduce.run_experiments([], quick(), tmp_path, part=reproduce.parse_shard("1/2"))
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert reproduce.parse_shard(None) == Shard(3, 4, 1)
    reproduce.run_experiments([], quick(), tmp_path, part=reproduce.parse_shard(None))
    reproduce.run_experiments([], quick(draw=True), tmp_path)
    assert taken == [("cpu", Shard()), ("cpu", Shard(3, 4, 1))]


# The frontier in seconds, of records alone, with what was not run said ----------------------------------


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


@pytest.mark.parametrize("phases", [{}, {"dense": []}, {"dense": 5}, {"dense": "0"}, {"dense": None}, [[0]], "dense"])
def test_a_line_whose_phases_are_no_lists_of_steps_has_no_seconds(phases):
    run = by_name([line("fast") | {"steps_by_phase": phases}])["fast"]
    assert run.seconds is None and run.how.startswith("not known")


def test_a_line_without_guidance_is_of_no_model():
    bare = line("fast", phases=FAST)
    del bare["guidance"]
    assert by_name([line("fast", phases=FAST)])["fast"].videos and not by_name([bare])["fast"].videos


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
