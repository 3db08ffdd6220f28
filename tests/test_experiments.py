"""`park reproduce`: what is resumed, remade, refused and left alone."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import typer

pytest.importorskip("diffusers")

import reproduce_cases
from parklab.experiments import commands, paper_numbers, reproduce, runner
from parklab.experiments.calibration import MATCHED
from parklab.experiments.campaign import read_campaign
from parklab.experiments.catalogue import EXPERIMENTS, NOT_BUILT, choose_experiments
from parklab.store import Cell, read_record, sealed
from parklab.studio import checkpoints
from parklab.studio.prompts import Shard
from reproduce_cases import quick

NAMES = ["tab:query_key_compression", "tab:module_ablation", "matched_densities"]


def short(**given):
    return quick(frames=5, **given)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was killed once it had made a cell, and a second one that went on."""
    out = tmp_path_factory.mktemp("reproduce")
    words = [
        sys.executable, "-m", "parklab.cli", "reproduce", *NAMES, "--quick", "--frames", "5", "--methods", "park,svg",
        "--device", "cpu", "--out", str(out),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list(out.glob("cells/quality-*.json")):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    before = {path.name: path.read_bytes() for path in out.glob("cells/quality-*.json")}
    return out, before, reproduce.run_experiments(NAMES, short(), out)


def test_a_killed_run_goes_on_where_it_stood(run):
    out, before, outcome = run
    assert outcome.kept >= len(before) >= 1
    assert all((out / "cells" / name).read_bytes() == data for name, data in before.items())
    # floor, PARK and two ablations; at one density PARK, the ablations and centroid retrieval; one retrieval cell
    assert (outcome.made + outcome.kept, outcome.failures, outcome.left_out) == (4 + 4 + 1, {}, 1)
    assert not [path.name for path in (out / "cells").iterdir() if path.name.startswith(".") or "tmp" in path.name]


def test_a_second_run_loads_no_model_and_makes_nothing(run, monkeypatch):
    out, _, first = run
    report = (out / "tables/tab-module_ablation.csv").read_bytes()
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *_, **__: pytest.fail("a finished run loaded the model"))
    again = reproduce.run_experiments(NAMES, short(), out)
    assert (again.made, again.kept) == (0, first.made + first.kept)
    assert (out / "tables/tab-module_ablation.csv").read_bytes() == report


def test_what_is_there_is_drawn_without_a_model_and_for_a_device_that_this_machine_has_not(run, tmp_path, monkeypatch):
    out, _, first = run
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *_, **__: pytest.fail("drawing loaded the model"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = shutil.copytree(out, tmp_path / "copy")
    (folder / "tables/matched_densities.csv").unlink()
    drawn = reproduce.run_experiments(NAMES, short(draw=True), folder)
    assert (drawn.made, drawn.kept, drawn.failures, drawn.left_out) == (0, first.made + first.kept, {}, 1)
    assert (folder / "tables/matched_densities.csv").read_bytes() == (out / "tables/matched_densities.csv").read_bytes()
    elsewhere = reproduce.run_experiments([*NAMES, "scaling"], short(draw=True, device="cuda"), folder)
    assert (elsewhere.made, elsewhere.kept) == (0, 0)
    with pytest.raises(ValueError, match="device: expected one this machine has"):
        reproduce.run_experiments(NAMES, short(device="cuda"), folder)


def test_a_packed_folder_draws_the_same_report_and_nothing_of_it_is_made_again(run, tmp_path):
    out, file = run[0], tmp_path / "campaign.jsonl"
    commands.reproduce(out=out, pack=file)
    for number, draw in enumerate((True, False)):
        outcome = reproduce.run_experiments(NAMES, short(draw=draw, records=(file,)), tmp_path / str(number))
        assert (outcome.made, outcome.kept, outcome.failures) == (0, run[2].made + run[2].kept, {})
        assert not list(tmp_path.glob("*/cells/*"))
        for name in ("report.md", "tables/matched_densities.csv", "tables/tab-query_key_compression.csv"):
            assert (tmp_path / str(number) / name).read_bytes() == (out / name).read_bytes()
    commands.reproduce(out=tmp_path / "0", records=[file], pack=tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == file.read_bytes()


def test_a_packed_file_holds_every_record_as_it_was_sealed_and_a_changed_one_is_refused(run, tmp_path):
    file = tmp_path / "campaign.jsonl"
    commands.reproduce(out=run[0], pack=file)
    there = {path.stem: read_record(path) for path in (run[0] / "cells").glob("*.json")}
    packed = read_campaign(file)
    alone = {name: record for name, record in there.items() if not record["files"]}
    assert list(packed) == sorted(packed) and len(packed) == len(alone) < len(there)
    assert sorted(map(json.dumps, packed.values())) == sorted(map(json.dumps, alone.values()))
    lines = file.read_text().splitlines()
    lines[2] = lines[2].replace('"seed":0', '"seed":1')
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="sealed cell in line 3 of"):
        runner.Lab(short(draw=True, records=(file,)), tmp_path)
    with pytest.raises(ValueError, match="got none that are records alone; run some first"):
        commands.reproduce(out=tmp_path, pack=file)


def test_a_corrupt_record_is_made_again_and_no_other(run):
    out, _, _ = run
    records = sorted(out.glob("cells/quality-*.json"))
    damaged = next(path for path in records if "dense-again" in path.name)
    others = {path: path.read_bytes() for path in records if path != damaged}
    damaged.write_bytes(damaged.read_bytes()[:100])
    said = []
    again = reproduce.run_experiments(NAMES, short(), out, say=said.append)
    assert again.made == 1 and read_record(damaged)["row"]["psnr"] == 100.0
    assert all(path.read_bytes() == data for path, data in others.items())
    assert any("made again" in line for line in said)


def test_the_page_holds_every_label_the_papers_numbers_and_nothing_from_outside(run):
    out, _, _ = run
    page = (out / "index.html").read_text()
    for label in (*EXPERIMENTS, *NOT_BUILT):
        assert f'id="{label.replace(":", "-")}">' in page and f">{label}</code>" in page
    for label in NAMES[:2]:
        for row in paper_numbers.PAPER[label].rows:
            assert all(f">{value}</t" in page for value in row)
    assert page.count('<p class="not-run"><b>not run</b>') == len(EXPERIMENTS) + len(NOT_BUILT) - len(NAMES)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)|url\(|@import|<script\s|<link""", page)


def test_a_table_is_the_mean_of_its_records(run):
    out, _, _ = run
    rows = {
        row["variant"]: row for row in csv.DictReader(io.StringIO((out / "tables/tab-module_ablation.csv").read_text()))
    }
    assert list(rows) == ["dense again", "park", "park-no-pama", "park-no-qrkc"]
    assert float(rows["dense again"]["PSNR"]) == 100.0, "dense attention differs from itself"
    found = [read_record(path) for path in out.glob("cells/quality-park-????????????????.json")]
    own = next(r for r in found if r["request"]["density"] is None)
    assert float(rows["park"]["PSNR"]) == own["row"]["psnr"] and 0 < own["row"]["density"] < 1


def test_equal_density_is_reached_or_the_method_is_marked_not_run(run):
    out, _, outcome = run
    budgets = {
        path.name.split("-at-")[0]: read_record(path)["budget"]["density"] for path in out.glob("cells/budget-*.json")
    }
    assert len(budgets) == 5
    # SVG's bands are whole frames of 96 tokens: of 288 it computes more than half, whatever its budget
    assert all((abs(density - 0.5) <= MATCHED) == (name != "budget-svg") for name, density in budgets.items())
    findings = {f.statement: f for s in outcome.sections if s.label == "matched_densities" for f in s.result.findings}
    assert findings["PARK above svg at density 0.5"].verdict == "not run"
    assert "density: expected a sparsity of svg" in (out / "report.md").read_text()


def test_a_run_that_is_stopped_before_some_file_operations_goes_on_to_the_same_bytes():
    for part, found in reproduce_cases.trials(every=101):
        assert found.clean, (part, found)


def test_frames_that_are_not_kept_are_made_once_per_prompt_and_give_the_same_rows(run, tmp_path, monkeypatch):
    kept = list(filter(None, map(read_record, run[0].glob("cells/quality-*.json"))))
    whole = {record["request"]["method"]: record["row"] for record in kept if record["request"]["density"] is None}
    made = []
    dense = runner.Lab._dense_video
    monkeypatch.setattr(runner.Lab, "_dense_video", lambda lab, cell: made.append(cell.name) or dense(lab, cell))
    outcome = reproduce.run_experiments(["tab:module_ablation"], short(keep="records"), tmp_path)
    assert (outcome.made, len(made)) == (4, 1)
    assert not [path for path in (tmp_path / "cells").iterdir() if path.suffix != ".json"]
    found = {r["request"]["method"]: r for r in map(read_record, tmp_path.glob("cells/quality-*.json"))}
    assert all(
        found[name]["row"][part] == row[part]
        for name, row in whole.items()
        if name in found
        for part in ("psnr", "ssim", "error")
    )
    assert len(found["park"]["by_frame"]["psnr"]) == 5


def test_a_model_that_cannot_be_loaded_ends_the_run_and_a_missing_package_of_a_method_fails_its_cell(
    tmp_path, monkeypatch
):
    def load(*arguments, **options):
        raise ValueError("model: expected whole weights, got none; download it again.")

    lab = runner.Lab(quick(), tmp_path)
    cells = [lab.quality_cell(lab.requests()[0], name) for name in ("park", "svg")]
    monkeypatch.setattr(checkpoints, "load_pipeline", load)
    with pytest.raises(ValueError, match=r"^model: expected whole weights"):
        lab.fill(cells)
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *arguments, **options: None)

    def make(self, making):
        if making.cell.request["method"] == "svg":
            raise ModuleNotFoundError("svg: expected the package svg, got none; install it.")
        making.commit({"format": making.cell.format, "request": dict(making.cell.request)})

    monkeypatch.setattr(runner.Lab, "_make", make)
    assert lab.fill(cells).failures == {cells[1].name: "svg: expected the package svg, got none; install it."}


def test_a_record_of_another_request_fails_its_cell_alone(tmp_path, monkeypatch):
    lab = runner.Lab(quick(), tmp_path)
    cells = [lab.quality_cell(lab.requests()[0], name) for name in ("park", "svg")]
    foreign = {"format": cells[0].format, "request": {**cells[0].request, "seed": 7}, "files": {}}
    (tmp_path / "cells").mkdir()
    path = tmp_path / "cells" / f"{cells[0].name}.json"
    path.write_text(json.dumps(sealed(foreign)))
    before = path.read_bytes()
    monkeypatch.setattr(
        runner.Lab,
        "_make",
        lambda lab, making: making.commit({"format": making.cell.format, "request": dict(making.cell.request)}),
    )
    records, failures, _ = lab.fill(cells)
    assert set(records) == {cells[1].name} and path.read_bytes() == before
    assert re.fullmatch(
        r"out: expected [^\n]*seed = 7, asked 0[^\n]*; remove it, or pass another --out\.", failures[cells[0].name]
    )


def test_a_failed_cell_makes_the_exit_status_1_and_one_line(run, tmp_path, monkeypatch, capsys):
    outcome = dataclasses.replace(run[2], failures={"quality-svg": "grid: expected more, got less; enlarge it."})
    with pytest.raises(typer.Exit) as ended:
        commands._show(outcome, tmp_path)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: quality-svg: grid: expected more, got less; enlarge it."
    commands._show(run[2], tmp_path)


def test_fewer_prompts_are_the_first_of_more_and_none_is_calibrated_on():
    eight, spare = reproduce.held_out_prompts(8)
    assert [reproduce.held_out_prompts(n) for n in (1, 2, 4)] == [(eight[:n], spare) for n in (1, 2, 4)]
    assert len({*eight, spare}) == 9


@pytest.mark.parametrize("text", ["81x400", "axbxc", "", "81x400x576x3", "-1x2x3"])
def test_a_size_that_is_none_is_refused_in_one_line(text):
    assert reproduce.parse_size("81x400x576") == {"frames": 81, "height": 400, "width": 576}
    with pytest.raises(ValueError, match=r"^size: expected FRAMESxHEIGHTxWIDTH, got .*; write 81x400x576\.$"):
        reproduce.parse_size(text)


def test_shards_share_out_every_cell_once_and_keep_groups_whole():
    cells = [Cell(name=f"{i}", format="f", group=f"g{i % 5}") for i in range(20)]
    parts = [reproduce.share_out(cells, Shard(rank, 3)) for rank in range(3)]
    assert sorted(cell.name for part in parts for cell in part) == sorted(cell.name for cell in cells)
    assert not {cell.group for cell in parts[0]} & {cell.group for cell in parts[1]}


@pytest.mark.parametrize("text", ["3/3", "-1/2", "1", "a/b", "0/0"])
def test_a_shard_that_is_none_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"^shard: expected I/N .*; write 0/4\.$"):
        reproduce.parse_shard(text)


def test_a_cell_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    lab = runner.Lab(quick(), tmp_path)
    request = lab.requests()[0]
    cells = [lab.quality_cell(request, name) for name in ("park", "svg", "svg2")]

    def make(self, making):
        if making.cell.request["method"] == "svg":
            raise ValueError("grid: expected more, got less; enlarge it.")
        row = dict.fromkeys(("psnr", "error", "cost", "density", "seconds", "dense_seconds"), 1.0)
        making.commit({"format": making.cell.format, "request": dict(making.cell.request), "row": row})

    monkeypatch.setattr(runner.Lab, "_make", make)
    moved = []
    records, failures, left_out = lab.fill(cells, lambda: moved.append(1))
    assert set(records) == {cells[0].name, cells[2].name} and len(moved) == 3
    assert failures == {cells[1].name: "grid: expected more, got less; enlarge it."} and not left_out
    assert set(lab.finished(cells)) == set(records)


def test_cells_differ_in_what_they_ask_and_not_in_where_the_weights_lie(tmp_path):
    lab = runner.Lab(quick(), tmp_path)
    copy = runner.Lab(
        quick(model=str(checkpoints.find_model(None)), changes={"query_clusters": 8, "key_clusters": 32}), tmp_path
    )
    request = lab.requests()[0]
    assert lab.quality_cell(request, "park").name == copy.quality_cell(copy.requests()[0], "park").name
    cells = [
        lab.quality_cell(request, "park"),
        lab.quality_cell(request, "park", density=0.5),
        lab.quality_cell(request, "park", top_p=0.5),
    ]
    cells.append(lab.quality_cell(dataclasses.replace(request, seed=1), "park"))
    assert len({cell.name for cell in cells}) == 4


@pytest.mark.parametrize(("names", "line"), [
    (["tab:module_ablatoin"], "did you mean tab:module_ablation?"),
    (["fig:overview"], "a drawing"),
])  # fmt: skip
def test_a_name_that_cannot_be_run_is_refused_with_a_reason(names, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        choose_experiments(names)
    assert [each.label for each in choose_experiments(["module_ablation"])] == ["tab:module_ablation"]


def test_blocks_of_the_small_size_are_not_those_of_a_size_that_is_asked_for():
    assert quick().changes == {"query_clusters": 8, "key_clusters": 32}
    assert quick(frames=81, height=720, width=1280).changes == {}
    assert quick(changes={"key_clusters": 16}).changes == {"query_clusters": 8, "key_clusters": 16}


def test_at_the_small_size_a_method_that_is_dense_in_short_calls_is_not_and_no_other_cell_is_another(tmp_path):
    def least(method, **given):
        lab = runner.Lab(quick(**given), tmp_path)
        one = lab.spare()
        cells = [lab.quality_cell(one, method, density=0.5), lab.times_cell(method), lab.frames_cell(one, method)]
        (found,) = {cell.request["changes"].get("least_tokens") for cell in cells}
        return found

    assert least("mc-sparse") == 1 and least("chipmunk") is None and least("park") is None
    assert least("mc-sparse", changes={"least_tokens": 7}) == 7
    assert least("mc-sparse", frames=29, height=224, width=256) is None


def test_the_report_says_what_was_set_for_every_method(tmp_path):
    asked = {"dense_layers": [0], "dense_steps": 10}
    for folder, changes in (("own", {}), ("one schedule", asked)):
        reproduce.run_experiments(["matched_densities"], quick(draw=True, changes=changes), tmp_path / folder)
    own, one = ((tmp_path / folder / "report.md").read_text() for folder in ("own", "one schedule"))
    assert (
        "- settings: dense_layers=[0], dense_steps=10 of every method that has them; otherwise each method's own" in one
    )
    assert "settings:" not in own


def test_another_model_needs_its_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "find_model", lambda model: tmp_path)
    with pytest.raises(ValueError, match=r"^prompt_file: expected one for a model other than the shipped one"):
        quick(model="some/folder")


def test_fused_runs_are_cells_of_their_own_and_reach_the_pipeline(tmp_path, monkeypatch):
    plain, fused = (runner.Lab(quick(fuse=fuse), tmp_path) for fuse in (None, True))
    cells = [lab.quality_cell(lab.requests()[0], "park") for lab in (plain, fused)]
    assert cells[0].name != cells[1].name and "fuse" not in cells[0].request
    seen = []

    def generated(*args, fuse=None, **options):
        seen.append(fuse)
        raise ValueError("enough: expected no more.")

    monkeypatch.setattr(runner, "generate_frames", generated)
    for lab, cell in zip((plain, fused), cells, strict=True):
        assert lab.fill([cell]).failures == {cell.name: "enough: expected no more."}
    assert seen == [None, True]


def test_methods_that_are_named_are_all_that_matched_densities_has(tmp_path):
    evaluation = dataclasses.replace(quick(methods=("svg2", "sta", "sol")), quick=False)
    asked = [
        cell.request["method"] for cell in EXPERIMENTS["matched_densities"].cells(runner.Lab(evaluation, tmp_path))
    ]
    assert asked == ["dense again", "svg2", "sol"]
