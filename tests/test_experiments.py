"""`park reproduce` and `park capture`: what is resumed, remade and refused, and how tables and findings follow from records."""

import csv
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer

pytest.importorskip("diffusers")

import reproduce_campaign
from parkattn.experiments import catalogue, commands, mismatches, paper_numbers, reproduce, results, runner
from parkattn.experiments.captures import Capture, Captured, Selection, read_captures, write_captures
from parkattn.experiments.catalogue import EXPERIMENTS, NOT_BUILT, choose_experiments
from parkattn.experiments.mismatches import REPRESENTATIONS, measure_call
from parkattn.experiments.results import Gathered
from parkattn.experiments.tables import Column, Finding, Table, to_csv, to_latex, to_markdown
from parkattn.metrics.retrieval import attention_recall
from parkattn.park import ParkConfig
from parkattn.plan import Plan, arrange
from parkattn.retrieval import pama, select_top_p
from parkattn.site import CallSite
from parkattn.store import Cell, read_record, sealed
from parkattn.studio import checkpoints
from parkattn.studio.prompts import Shard

NAMES = ["tab:query_key_compression", "tab:module_ablation", "matched_densities"]


def quick(**given):
    asked = {
        "model": "tiny",
        "prompts": None,
        "prompt_file": None,
        "device": "cpu",
        "methods": ("park", "svg"),
        **given,
    }
    return reproduce.evaluation_for(quick=True, **asked)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was killed once it had made a cell, and a second one that went on."""
    out = tmp_path_factory.mktemp("reproduce")
    words = [
        sys.executable,
        "-m",
        "parkattn.cli",
        "reproduce",
        *NAMES,
        "--quick",
        "--methods",
        "park,svg",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list(out.glob("cells/quality-*.json")):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    before = {path.name: path.read_bytes() for path in out.glob("cells/quality-*.json")}
    return out, before, reproduce.run_experiments(NAMES, quick(), out)


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
    again = reproduce.run_experiments(NAMES, quick(), out)
    assert (again.made, again.kept) == (0, first.made + first.kept)
    assert (out / "tables/tab-module_ablation.csv").read_bytes() == report


def test_a_corrupt_record_is_made_again_and_no_other(run):
    out, _, _ = run
    records = sorted(out.glob("cells/quality-*.json"))
    damaged = next(path for path in records if "dense-again" in path.name)
    others = {path: path.read_bytes() for path in records if path != damaged}
    damaged.write_bytes(damaged.read_bytes()[:100])
    said = []
    again = reproduce.run_experiments(NAMES, quick(), out, say=said.append)
    assert again.made == 1 and read_record(damaged)["row"]["psnr"] == 100.0
    assert all(path.read_bytes() == data for path, data in others.items())
    assert any("made again" in line for line in said)


def test_the_page_holds_every_label_the_papers_numbers_and_nothing_from_outside(run):
    out, _, _ = run
    page = (out / "index.html").read_text()
    for label in (*EXPERIMENTS, *NOT_BUILT):
        assert f'<h2 id="{label.replace(":", "-")}">{label}</h2>' in page
    for label in NAMES[:2]:
        for row in paper_numbers.PAPER[label].rows:
            assert all(f">{value}</td>" in page for value in row)
    assert page.count('<p class="not-run"><b>not run</b>') == len(EXPERIMENTS) + len(NOT_BUILT) - len(NAMES)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)|url\(|@import|<script|<link""", page)


def test_a_table_is_the_mean_of_its_records(run):
    out, _, _ = run
    rows = {row["variant"]: row for row in csv.DictReader(io.StringIO((out / "tables/tab-module_ablation.csv").read_text()))}
    assert list(rows) == ["dense again", "park", "park-no-pama", "park-no-qrkc"]
    assert float(rows["dense again"]["PSNR"]) == 100.0, "dense attention differs from itself"
    found = [read_record(path) for path in out.glob("cells/quality-park-????????????????.json")]
    own = next(r for r in found if r["request"]["density"] is None)
    assert float(rows["park"]["PSNR"]) == own["row"]["psnr"] and 0 < own["row"]["density"] < 1


def test_equal_density_is_reached_or_the_method_is_marked_not_run(run):
    out, _, outcome = run
    budgets = {path.name.split("-at-")[0]: read_record(path)["budget"]["density"] for path in out.glob("cells/budget-*.json")}
    assert len(budgets) == 5
    # SVG's bands are whole frames of 96 tokens: of 288 it computes more than half, whatever its budget
    assert all((abs(density - 0.5) <= runner.MATCHED) == (name != "budget-svg") for name, density in budgets.items())
    findings = {f.statement: f for s in outcome.sections if s.label == "matched_densities" for f in s.result.findings}
    assert findings["PARK above svg at density 0.5"].verdict == "not run"
    assert "density: expected a sparsity of svg" in (out / "report.md").read_text()


# tables and findings


def _quality(prompt, method, psnr, **changes):
    asked = {"prompt": prompt, "seed": 0, "guidance": 1.0, "method": method, "changes": changes, "density": 0.5}
    row = {
        "psnr": psnr,
        "ssim": 0.9,
        "lpips": None,
        "density": 0.5,
        "density_all_steps": 0.6,
        "recall": None,
        "error": 0.1,
        "cost": 0.6,
        "cost_two_passes": 0.7,
        "seconds": 2.0,
        "dense_seconds": 3.0,
    }
    cell = Cell(name=f"{prompt} {method} {changes}", format="f", request=asked)
    return cell, {"request": asked, "row": row}


def _gathered(*pairs, failures=None):
    missing = failures or {}
    return Gathered([cell for cell, _ in pairs], {c.name: r for c, r in pairs if c.name not in missing}, missing)


def test_an_ablation_that_gains_is_printed_as_not_held_with_its_margin():
    pairs = [
        _quality(p, m, x)
        for p, base in (("a", 20.0), ("b", 24.0))
        for m, x in (("park", base), ("park-no-pama", base - 1), ("park-no-qrkc", base + 2))
    ]
    pama_finding, qrkc_finding = EXPERIMENTS["tab:module_ablation"].result(_gathered(*pairs)).findings
    assert (pama_finding.verdict, pama_finding.margin) == ("held", 1.0)
    assert (qrkc_finding.verdict, qrkc_finding.margin) == ("not held", -2.0)
    assert "margin -2" in qrkc_finding.line()


def test_a_finding_compares_only_prompts_that_both_have():
    pairs = [_quality("a", "park", 20.0), _quality("b", "park", 90.0), _quality("a", "svg", 19.0)]
    finding = EXPERIMENTS["matched_densities"].result(_gathered(*pairs)).findings[0]
    assert finding.margin == 1.0


def test_a_method_that_failed_is_a_row_marked_not_run_with_its_reason():
    good, bad = _quality("a", "park", 20.0), _quality("a", "svg", 19.0)
    result = EXPERIMENTS["matched_densities"].result(_gathered(good, bad, failures={bad[0].name: "grid: too small"}))
    assert "not run: grid: too small" in to_markdown(result.table)
    assert result.findings[0].verdict == "not run" and "grid: too small" in result.findings[0].line()


def test_more_blocks_that_change_nothing_lose_nothing():
    blocks = [{"query_clusters": q, "key_clusters": k} for q, k in ((4, 32), (8, 32), (16, 32), (8, 16), (8, 64))]
    result = EXPERIMENTS["tab:centroid_count_sensitivity_hy"].result(_gathered(*(_quality("a", "park", 20.0, **each) for each in blocks)))
    assert [finding.verdict for finding in result.findings] == ["held", "held"]
    assert [finding.statement for finding in result.findings] == [
        "16 instead of 4 query blocks lose nothing", "64 instead of 16 key blocks lose nothing",
    ]  # fmt: skip


def test_recall_is_summed_up_over_heads_in_percent():
    values = {name: [0.5, 1.0] for name in REPRESENTATIONS} | {"pama": [0.75, 0.75], "exact": [1.0, 1.0]}
    call = {
        "recall": {order: {"top_p": values} for order in ("Clustered", "Original")},
        "tv": values,
        "tokens": [9, 9],
        "blocks": [2, 2],
    }
    cell = Cell(name="r", format="f")
    result = results.recall_table(Gathered([cell], {"r": {"calls": [call]}}, {}), "top_p")
    assert result.table.rows[1] == ("Clustered", "Centroid", "Centroid", 75.0, pytest.approx(52.5), 50.0)
    assert result.findings[0].margin == 0 and result.findings[0].verdict == "not held", "a tie is not the best"


def test_what_is_not_run_is_neither_held_nor_not_held():
    assert Finding("s", None, reason="why").held is None
    assert "less than its interval" in Finding("s", 1.0, "dB", 2.0).line() and "less" not in Finding("s", 3.0, "dB", 2.0).line()
    assert Finding("s", 0.0).held is False and Finding("s", 0.0, tie=True).held is True


def test_signs_of_latex_and_markdown_are_escaped_and_csv_keeps_every_digit():
    table = Table((Column("a_b"), Column("x", 2)), (("50% | {1}", 1 / 3),))
    assert (
        "a\\_b" in to_latex(table, "c & d", "tab:x")
        and "50\\% | \\{1\\}" in to_latex(table, "c", "l")
        and "0.33" in to_latex(table, "c", "l")
    )
    assert "50% \\| {1} | 0.33" in to_markdown(table)
    assert repr(1 / 3) in to_csv(table)


def test_printed_tables_have_whole_rows_under_labels_that_are_listed():
    for label, printed in paper_numbers.PAPER.items():
        assert label in EXPERIMENTS or label in NOT_BUILT
        assert all(len(row) == len(printed.columns) and all(row) for row in printed.rows)
    assert (
        "HunyuanVideo",
        "PARK",
        "30.69",
        "0.936",
        "0.166",
        "96.87%",
        "96.50%",
        "69.41%",
        "55.07%",
        "1837s",
        "1.66×",
    ) in paper_numbers.PAPER["tab:main_quality_efficiency"].rows


def _line(setting, prompt, psnr, cost, guidance=5.0):
    size = {"frames": 9, "height": 64, "width": 96, "steps": 4, "guidance": guidance}
    found = {"psnr": psnr, "cost": cost, "cost_two_passes": cost, "seconds": 10 * cost}
    return {"format": "parkattn.frontier.1", "setting": setting, "prompt": prompt, "seed": 0, **size, **found}


def test_the_frontier_of_earlier_lines_pairs_prompts_and_names_the_strongest_rival(tmp_path):
    lines = [
        _line(setting, prompt, base + psnr, cost)
        for prompt, base in (("a", 0.0), ("b", 6.0))
        for setting, psnr, cost in (
            ("dense", 100.0, 1.0),
            ("paper", 30.0, 0.5),
            ("quality", 33.0, 0.4),
            ("svg", 31.0, 0.3),
            ("sta", 29.0, 0.2),
        )
    ]
    path = tmp_path / "frontier.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"format": "parkattn.fron')
    lab = runner.Lab(quick(records=(path,)), tmp_path)
    assert EXPERIMENTS["frontier"].cells(lab) == [], "what was measured is not measured again"
    result = EXPERIMENTS["frontier"].result(Gathered([], {}, {}, lines=lab.lines))
    rows = {row[0]: dict(zip((c.name for c in result.table.columns), row, strict=True)) for row in result.table.rows}
    assert list(rows) == ["paper", "quality", "svg", "sta"] and rows["paper"]["speedup"] == 2.0
    assert (rows["quality"]["over paper, dB"], rows["quality"]["± dB"], rows["quality"]["worst"]) == (3.0, 0.0, 33.0)
    findings = {finding.statement: finding for finding in result.findings}
    assert findings["quality has a higher PSNR than paper"].margin == 3.0
    rival = findings["no other method with as little attention as paper has its PSNR; nearest svg"]
    assert (rival.margin, rival.verdict) == (-1.0, "not held")
    assert findings["fast has a higher PSNR than paper"].verdict == "not run"


def test_kernel_tables_are_drawn_from_the_last_line_of_each_kernel_and_need_a_gpu_without_lines(tmp_path):
    shape = {"name": "wan", "heads": 2, "tokens": 900}
    lines = [
        {"benchmark": "pama", "shape": shape, "kernel": kernel, "ms": ms, "speedup": 8 / ms, "extra_mb": 1.0, "memory_reduction": 2.0}
        for kernel, ms in (("PyTorch", 8.0), ("Triton (Full-K)", 9.0), ("Triton (Full-K)", 2.0))
    ]
    lines.append({"benchmark": "qrkc", "shape": shape, "ms": 2.5, "metric_ms": 1, "cholesky_ms": 1, "transform_ms": 1, "means_ms": 1})
    lines += [{"benchmark": "scaling", "over": "density", "part": "attention", "length": 9, "density": d, "ms": d} for d in (0.5, 1.0)]
    path = tmp_path / "gpu.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    lab = runner.Lab(quick(records=(path,)), tmp_path)
    labels = ("tab:pama_kernel_overhead", "fig:qrkc_breakdown", "scaling")
    assert all(EXPERIMENTS[label].cells(lab) == [] for label in labels)
    pama_table, qrkc, scaling = (EXPERIMENTS[label].result(Gathered([], {}, {}, lines=lab.lines)) for label in labels)
    assert [row[1:4] for row in pama_table.table.rows] == [("PyTorch", 8.0, 1.0), ("Triton (Full-K)", 2.0, 4.0)]
    assert (pama_table.findings[0].margin, qrkc.findings[0].margin, qrkc.findings[0].verdict) == (3.0, -0.5, "not held")
    assert [point[:2] for point in scaling.figure.rows[0][0].series[0].points] == [(0.5, 0.5), (1.0, 1.0)]
    for label in labels:
        nothing = EXPERIMENTS[label].result(Gathered([], {}, {}))
        assert nothing.table is None and nothing.note.startswith("not run: needs a GPU; ")


@pytest.mark.parametrize(("layers", "experts", "label"), [(30, 1, "wan2.1-1.3B"), (40, 1, "wan2.1"), (40, 2, "wan2.2")])
def test_a_sheet_of_frames_is_made_with_the_model_of_its_name(tmp_path, monkeypatch, layers, experts, label):
    lab = runner.Lab(quick(), tmp_path)
    sheets = [name for name in EXPERIMENTS if name.startswith("fig:video_vis_")]
    assert all(EXPERIMENTS[name].cells(lab) == [] for name in sheets), "the shipped model is none of the paper's"
    assert EXPERIMENTS[sheets[0]].result(Gathered([], {}, {})).note == "not run: needs HunyuanVideo; pass its folder with --model"
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text(json.dumps({"num_layers": layers}))
    parts = dict.fromkeys(("transformer", "transformer_2")[:experts], (None, "WanTransformer3DModel"))
    monkeypatch.setattr(catalogue, "judge_index", lambda folder: parts)
    lab.evaluation, lab.folder = dataclasses.replace(lab.evaluation, model="some/folder"), tmp_path
    monkeypatch.setattr(runner.Lab, "requests", lambda lab: [lab.base])
    assert [name for name in sheets if EXPERIMENTS[name].cells(lab)] == [f"fig:video_vis_{label}"]


def test_records_that_hold_nothing_of_use_are_refused_in_one_line(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"benchmark": "cpu"}\n[1]\n')
    for name in ("absent.jsonl", "other.jsonl"):
        with pytest.raises(ValueError, match=r"^records: expected JSON lines of park bench [^\n]*\.$"):
            runner.Lab(quick(records=(tmp_path / name,)), tmp_path)


def test_the_ablation_is_made_of_cells_that_matched_densities_has_too(tmp_path):
    lab = runner.Lab(quick(densities=(0.25, 0.5)), tmp_path)
    own, matched = ({cell.name for cell in EXPERIMENTS[name].cells(lab)} for name in ("ablation", "matched_densities"))
    assert own < matched and len(own) == 1 + 2 * 4
    pairs = [
        _quality("a", name, psnr) for name, psnr in (("park", 30.0), ("park-no-pama", 28.0), ("park-no-qrkc", 29.0), ("centroid", 28.5))
    ]
    margins = {finding.statement: finding.margin for finding in EXPERIMENTS["ablation"].result(_gathered(*pairs)).findings}
    assert margins["PARK above centroid at density 0.5"] == 1.5 and margins["park-no-pama above centroid at density 0.5"] == -0.5


def test_the_frontier_runs_profiles_once_and_shares_the_papers_with_the_main_table(tmp_path):
    lab = runner.Lab(quick(), tmp_path)
    cells, main = (EXPERIMENTS[name].cells(lab) for name in ("frontier", "tab:main_quality_efficiency"))
    asked = [(cell.request["method"], cell.request.get("profile")) for cell in cells]
    assert asked == [("dense again", None), ("park", None), ("park", "quality"), ("park", "fast"), ("svg", None)]
    assert {cell.name for cell in main} < {cell.name for cell in cells}


# cells


def test_a_run_that_is_stopped_before_some_file_operations_goes_on_to_the_same_bytes():
    for part, found in reproduce_campaign.trials(every=101):
        assert found.clean, (part, found)


def test_frames_that_are_not_kept_are_made_once_per_prompt_and_give_the_same_rows(run, tmp_path, monkeypatch):
    kept = list(filter(None, map(read_record, run[0].glob("cells/quality-*.json"))))
    whole = {record["request"]["method"]: record["row"] for record in kept if record["request"]["density"] is None}
    made = []
    dense = runner.Lab._dense_video
    monkeypatch.setattr(runner.Lab, "_dense_video", lambda lab, cell: made.append(cell.name) or dense(lab, cell))
    outcome = reproduce.run_experiments(["tab:module_ablation"], quick(keep="records"), tmp_path)
    assert (outcome.made, len(made)) == (4, 1)
    assert not [path for path in (tmp_path / "cells").iterdir() if path.suffix != ".json"]
    found = {r["request"]["method"]: r for r in map(read_record, tmp_path.glob("cells/quality-*.json"))}
    assert all(found[name]["row"][part] == row[part] for name, row in whole.items() if name in found for part in ("psnr", "ssim", "error"))
    assert len(found["park"]["by_frame"]["psnr"]) == 9


def test_a_model_that_cannot_be_loaded_ends_the_run_and_a_missing_package_of_a_method_fails_its_cell(tmp_path, monkeypatch):
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


def test_a_long_call_is_measured_on_a_sample_of_its_queries_for_the_log_mass_alone(monkeypatch):
    q, k = (2 * x for x in _problem(heads=1, tokens=256)[:2])
    config = ParkConfig(query_clusters=4, key_clusters=16)
    whole = measure_call(Captured(q, k, CallSite()), config)
    monkeypatch.setattr(mismatches, "LOG_MASS_QUERIES", 64)
    part = measure_call(Captured(q, k, CallSite()), config)
    for metric in ("euclidean", "query-response"):
        sample, all_of_it = part["keys"][metric].pop("log_mass")[0], whole["keys"][metric].pop("log_mass")[0]
        # 64 of 256 rows, each within a factor of 3 of the mean: half the mean is six standard errors
        assert sample != all_of_it and abs(sample - all_of_it) < 0.5 * all_of_it
    assert part == whole


def test_a_record_of_another_request_fails_its_cell_alone(tmp_path, monkeypatch):
    lab = runner.Lab(quick(), tmp_path)
    cells = [lab.quality_cell(lab.requests()[0], name) for name in ("park", "svg")]
    foreign = {"format": cells[0].format, "request": {**cells[0].request, "seed": 7}, "files": {}}
    (tmp_path / "cells").mkdir()
    path = tmp_path / "cells" / f"{cells[0].name}.json"
    path.write_text(json.dumps(sealed(foreign)))
    before = path.read_bytes()
    monkeypatch.setattr(
        runner.Lab, "_make", lambda lab, making: making.commit({"format": making.cell.format, "request": dict(making.cell.request)})
    )
    records, failures, _ = lab.fill(cells)
    assert set(records) == {cells[1].name} and path.read_bytes() == before
    assert re.fullmatch(r"out: expected [^\n]*seed = 7, asked 0[^\n]*; remove it, or pass another --out\.", failures[cells[0].name])


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
        making.commit({"format": making.cell.format, "request": dict(making.cell.request), "row": {}})

    monkeypatch.setattr(runner.Lab, "_make", make)
    moved = []
    records, failures, left_out = lab.fill(cells, lambda: moved.append(1))
    assert set(records) == {cells[0].name, cells[2].name} and len(moved) == 3
    assert failures == {cells[1].name: "grid: expected more, got less; enlarge it."} and not left_out
    assert set(lab.finished(cells)) == set(records)


def test_cells_differ_in_what_they_ask_and_not_in_where_the_weights_lie(tmp_path):
    lab = runner.Lab(quick(), tmp_path)
    copy = runner.Lab(quick(model=str(checkpoints.find_model(None)), changes={"query_clusters": 8, "key_clusters": 32}), tmp_path)
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


def test_another_model_needs_its_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "find_model", lambda model: tmp_path)
    with pytest.raises(ValueError, match=r"^prompt_file: expected one for a model other than the shipped one"):
        quick(model="some/folder")


# captures


def _problem(heads=4, tokens=48):
    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, 16) for _ in range(3)]


def _captured(selection, **site):
    capture = Capture(selection, layers=2, steps=3)
    q, k, v = _problem()
    for step in range(3):
        for branch in ("cond", "uncond"):
            for layer in range(2):
                capture(
                    q + step,
                    k + layer,
                    v,
                    CallSite(layer=layer, step=step, branch=branch, grid=(3, 4, 4), total_steps=3, **site),
                )
    return capture


def test_a_capture_keeps_the_chosen_calls_and_its_file_gives_them_back(tmp_path):
    chosen = Selection(layers=(1,), heads=(0, 3), steps=(0, 2), first_branch=True, values=True)
    valid = torch.arange(48).lt(40).unsqueeze(0)
    calls = list(_captured(chosen, text=slice(0, 4), key_valid=valid, noise_levels=(1.0, 0.5, 0.1)).kept.values())
    assert [call.name for call in calls] == ["transformer/1/0/cond", "transformer/1/2/cond"]
    q, k, v = _problem()
    assert torch.equal(calls[1].q, (q + 2)[:, [0, 3]]) and torch.equal(calls[1].k, (k + 1)[:, [0, 3]])
    for again in ("c", "d", "e", "f"):
        write_captures(tmp_path / f"{again}.safetensors", calls, {"prompt": "p"})
        assert (tmp_path / f"{again}.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()
    back, about = read_captures(tmp_path / "c.safetensors")
    assert about == {"prompt": "p"}
    for call, same in zip(calls, back, strict=True):
        assert torch.equal(call.q, same.q) and torch.equal(call.k, same.k) and torch.equal(v[:, [0, 3]], same.site.values)
        assert torch.equal(same.site.key_valid, valid)
        plain = [dataclasses.replace(c.site, values=None, key_valid=None) for c in (call, same)]
        assert plain[0] == plain[1]
    assert [x.shape[2] for x in back[0].video_tokens()] == [36, 36], "text and padding are no video tokens"


def test_a_capture_beyond_its_limit_is_refused_at_the_first_call_or_has_fewer_heads():
    one_head = 2 * 3 * 2 * 48 * 16 * 4  # layers, steps, q and k, tokens, features, bytes
    with pytest.raises(ValueError, match=r"^limit: expected captures of at most .*; choose fewer layers, heads or steps\.$"):
        _captured(Selection(first_branch=True, limit=4 * one_head - 1))
    thinned = _captured(Selection(first_branch=True, limit=2 * one_head, thin_heads=True))
    assert thinned.bytes == 2 * one_head and all(
        torch.equal(call.q[0, 1], _problem()[0][0, 2] + call.site.step) for call in thinned.kept.values()
    )


def test_files_that_are_no_capture_are_refused_in_one_line(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("no tensors")
    save_file({"x": torch.zeros(1)}, str(tmp_path / "other"))
    for name in ("absent", "text", "other"):
        with pytest.raises(ValueError, match=r"^captures: expected a file written by park capture, got [^\n]*\.$"):
            read_captures(Path(tmp_path / name))


def test_the_measured_recall_is_that_of_the_plan_and_exact_estimates_have_no_error():
    q, k = (2 * x for x in _problem(heads=2, tokens=256)[:2])
    config = ParkConfig(query_clusters=4, key_clusters=16)
    found = measure_call(Captured(q, k, CallSite()), config)
    assert found["tv"]["exact"] == [0.0] * q.shape[1]
    assert min(found["recall"]["Clustered"]["top_p"]["exact"]) >= 0.9 - 1e-6
    labels = torch.arange(q.shape[2]).div(q.shape[2] // 4, rounding_mode="floor").int().expand(q.shape[:3])
    keys = torch.arange(k.shape[2]).div(k.shape[2] // 16, rounding_mode="floor").int().expand(k.shape[:3])
    mask = select_top_p(pama(q, k, labels, 4, keys, 16), 0.9)
    plan = Plan(arrange(labels, 4), arrange(keys, 16), mask, 4, 16)
    assert found["recall"]["Original"]["top_p"]["pama"] == pytest.approx(attention_recall(q, k, plan).flatten().tolist(), abs=1e-5)
