"""How tables, figures and findings follow from records, and from lines of earlier measurements."""

import dataclasses
import json

import pytest

pytest.importorskip("diffusers")

from parklab.experiments import catalogue, paper_numbers, retrieval_tables, runner, settings_varied
from parklab.experiments.catalogue import EXPERIMENTS, NOT_BUILT
from parklab.experiments.mismatches import REPRESENTATIONS
from parklab.experiments.report import sections_of
from parklab.experiments.results import CellRecords
from parklab.experiments.tables import Column, Finding, Table, interval, to_csv, to_latex, to_markdown
from parklab.store import Cell
from reproduce_cases import gathered, quality, quick


def test_an_ablation_that_gains_is_printed_as_not_held_with_its_margin():
    pairs = [
        quality(p, m, x)
        for p, base in (("a", 20.0), ("b", 24.0))
        for m, x in (("park", base), ("park-no-pama", base - 1), ("park-no-qrkc", base + 2))
    ]
    pama_finding, qrkc_finding = EXPERIMENTS["tab:module_ablation"].result(gathered(*pairs)).findings
    assert (pama_finding.verdict, pama_finding.margin) == ("held", 1.0)
    assert (qrkc_finding.verdict, qrkc_finding.margin) == ("not held", -2.0)
    assert "margin -2" in qrkc_finding.line()


def test_a_finding_compares_only_prompts_that_both_have():
    pairs = [quality("a", "park", 20.0), quality("b", "park", 90.0), quality("a", "svg", 19.0)]
    finding = EXPERIMENTS["matched_densities"].result(gathered(*pairs)).findings[0]
    assert finding.margin == 1.0


def test_a_method_that_failed_is_a_row_marked_not_run_with_its_reason():
    good, bad = quality("a", "park", 20.0), quality("a", "svg", 19.0)
    result = EXPERIMENTS["matched_densities"].result(gathered(good, bad, failures={bad[0].name: "grid: too small"}))
    assert "not run: grid: too small" in to_markdown(result.table)
    assert result.findings[0].verdict == "not run" and "grid: too small" in result.findings[0].line()


def test_more_blocks_that_change_nothing_lose_nothing():
    blocks = [{"query_clusters": q, "key_clusters": k} for q, k in ((4, 32), (8, 32), (16, 32), (8, 16), (8, 64))]
    result = EXPERIMENTS["tab:centroid_count_sensitivity_hy"].result(
        gathered(*(quality("a", "park", 20.0, **each) for each in blocks))
    )
    assert [finding.verdict for finding in result.findings] == ["held", "held"]
    assert [finding.statement for finding in result.findings] == [
        "16 instead of 4 query blocks lose nothing", "64 instead of 16 key blocks lose nothing",
    ]  # fmt: skip


def test_recall_is_summed_up_over_heads_in_percent():
    values = {name: [0.5, 1.0] for name in REPRESENTATIONS} | {"pama": [0.75, 0.75], "exact": [1.0, 1.0]}
    by_order = {order: {"top_p": values} for order in ("Clustered", "Original")}
    call = {"recall": by_order, "tv": values, "tokens": [9, 9], "blocks": [2, 2]}
    cell = Cell(name="r", format="f")
    result = retrieval_tables.recall_table(CellRecords([cell], {"r": {"calls": [call]}}, {}), "top_p")
    assert result.table.rows[1] == ("Clustered", "Centroid", "Centroid", 75.0, pytest.approx(52.5), 50.0), (
        "of one video there is no interval"
    )
    assert result.findings[0].margin == 0 and result.findings[0].verdict == "not held", "a tie is not the best"


def test_retrieval_has_intervals_over_videos_and_margins_are_paired():
    def video(pama, centroid):
        recall = {"exact": [1.0], "full-key": [0.1], "pama": [pama], "query-centroid": [centroid]}
        keys = {
            "euclidean": {"key_mse": [1.0], "score_error": [2.0]},
            "query-response": {"key_mse": [1.0 + pama], "score_error": [1.0]},
        }
        by_order = {order: {"top_p": recall} for order in ("Clustered", "Original")}
        return {"calls": [{"recall": by_order, "tv": recall, "keys": keys, "tokens": [9, 9], "blocks": [2, 2]}]}

    # the two lie far apart, and always by as much: the margin is sure where the means are not
    cells = [Cell(name=name, format="f") for name in ("a", "b")]
    found = CellRecords(cells, {"a": video(0.9, 0.8), "b": video(0.5, 0.4)}, {})
    table = retrieval_tables.recall_table(found, "top_p")
    assert [column.name for column in table.table.columns][3:] == ["Mean", "±", "P05", "Worst"]
    assert table.table.rows[3][3:5] == (pytest.approx(70.0), pytest.approx(100 * interval([0.9, 0.5])))
    assert table.findings[0].margin == pytest.approx(10.0) and table.findings[0].spread == pytest.approx(0.0, abs=1e-6)
    errors = retrieval_tables.key_error_table(found)
    assert errors.table.rows[0][3:] == ("+70.0%", pytest.approx(interval([90.0, 50.0])))
    assert errors.findings[1].margin == pytest.approx(50.0) and errors.findings[1].spread == pytest.approx(0.0)


def test_an_error_of_zero_has_no_change_in_percent_and_is_no_failure():
    sides = {metric: {"key_mse": [0.0], "score_error": [0.0]} for metric in ("euclidean", "query-response")}
    call = {"keys": sides, "tv": {"exact": [0.0]}, "tokens": [9, 9], "blocks": [2, 2]}
    result = retrieval_tables.key_error_table(CellRecords([Cell(name="r", format="f")], {"r": {"calls": [call]}}, {}))
    assert [column.name for column in result.table.columns] == ["Metric", "Euclidean", "QRKC"]
    assert [finding.verdict for finding in result.findings] == ["not run", "not run"]


def test_what_is_not_run_is_neither_held_nor_not_held():
    assert Finding("s", None, reason="why").held is None
    assert "less than its interval" in Finding("s", 1.0, "dB", 2.0).line()
    assert "less" not in Finding("s", 3.0, "dB", 2.0).line()
    assert Finding("s", 0.0).held is False and Finding("s", 0.0, tie=True).held is True


def test_signs_of_latex_and_markdown_are_escaped_and_csv_keeps_every_digit():
    table = Table((Column("a_b"), Column("x", 2)), (("50% | {1}", 1 / 3),))
    written = to_latex(table, "c & d", "tab:x")
    assert "a\\_b" in written and "50\\% | \\{1\\}" in written and "0.33" in written
    assert "50% \\| {1} | 0.33" in to_markdown(table)
    assert repr(1 / 3) in to_csv(table)


def test_the_page_has_the_papers_tables_and_figures_in_its_order_and_then_ours():
    labels = [section.label for section in sections_of({})]
    assert tuple(labels[: len(paper_numbers.LABELS)]) == paper_numbers.LABELS
    assert set(labels) == {*EXPERIMENTS, *NOT_BUILT} and len(labels) == len(set(labels))
    assert not [label for label in labels[len(paper_numbers.LABELS) :] if ":" in label]
    assert set(paper_numbers.PAPER) <= set(paper_numbers.LABELS)


def test_printed_tables_have_whole_rows_under_labels_that_are_listed():
    for label, printed in paper_numbers.PAPER.items():
        assert label in EXPERIMENTS or label in NOT_BUILT
        assert all(len(row) == len(printed.columns) and all(row) for row in printed.rows)
    row = "HunyuanVideo PARK 30.69 0.936 0.166 96.87% 96.50% 69.41% 55.07% 1837s 1.66×"
    assert tuple(row.split()) in paper_numbers.PAPER["tab:main_quality_efficiency"].rows


def _line(setting, prompt, psnr, cost, guidance=5.0):
    size = {"frames": 9, "height": 64, "width": 96, "steps": 4, "guidance": guidance}
    found = {"psnr": psnr, "cost": cost, "cost_two_passes": cost, "seconds": 10 * cost}
    return {"format": "parkattn.frontier.1", "setting": setting, "prompt": prompt, "seed": 0, **size, **found}


def test_the_frontier_of_earlier_lines_pairs_prompts_and_names_the_strongest_rival(tmp_path):
    lines = [
        _line(setting, prompt, base + psnr, cost)
        for prompt, base in (("a", 0.0), ("b", 6.0))
        for setting, psnr, cost in (
            ("dense", 100.0, 1.0), ("paper", 30.0, 0.5), ("quality", 33.0, 0.4), ("svg", 31.0, 0.3), ("sta", 29.0, 0.2),
        )
    ]  # fmt: skip
    path = tmp_path / "frontier.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"format": "parkattn.fron')
    lab = runner.Lab(quick(records=(path,)), tmp_path)
    assert EXPERIMENTS["frontier"].cells(lab) == [], "what was measured is not measured again"
    result = EXPERIMENTS["frontier"].result(CellRecords([], {}, {}, lines=lab.lines))
    rows = {row[0]: dict(zip((c.name for c in result.table.columns), row, strict=True)) for row in result.table.rows}
    assert list(rows) == ["paper", "quality", "svg", "sta"] and rows["paper"]["speedup"] == 2.0
    assert (rows["quality"]["over paper, dB"], rows["quality"]["± dB"], rows["quality"]["worst"]) == (3.0, 0.0, 33.0)
    findings = {finding.statement: finding for finding in result.findings}
    assert findings["quality has a higher PSNR than paper"].margin == 3.0
    rival = findings["no other method with as little attention as paper has its PSNR; nearest svg"]
    assert (rival.margin, rival.verdict) == (-1.0, "not held")
    assert findings["fast has a higher PSNR than paper"].verdict == "not run"


def test_lines_of_another_model_are_left_out(tmp_path):
    lines = [{**_line("paper", "a", 30.0, 0.5), "model": model} for model in ("", "+lora:ac", "0123456789abcdef")]
    path = tmp_path / "frontier.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [line["model"] for line in runner.Lab(quick(records=(path,)), tmp_path).lines] == ["", "+lora:ac"]


def test_kernel_tables_are_drawn_from_the_last_line_of_each_kernel_and_need_a_gpu_without_lines(tmp_path):
    shape = {"name": "wan", "heads": 2, "tokens": 900}
    memory = {"extra_mb": 1.0, "memory_reduction": 2.0}
    lines = [
        {"benchmark": "pama", "shape": shape, "kernel": kernel, "ms": ms, "speedup": 8 / ms, **memory}
        for kernel, ms in (("PyTorch", 8.0), ("Triton (Full-K)", 9.0), ("Triton (Full-K)", 2.0))
    ]
    parts = dict.fromkeys(("metric_ms", "cholesky_ms", "transform_ms", "means_ms"), 1)
    lines.append({"benchmark": "qrkc", "shape": shape, "ms": 2.5, **parts})
    lines += [
        {"benchmark": "scaling", "over": "density", "part": "attention", "length": 9, "density": d, "ms": d}
        for d in (0.5, 1.0)
    ]
    path = tmp_path / "gpu.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    lab = runner.Lab(quick(records=(path,)), tmp_path)
    labels = ("tab:pama_kernel_overhead", "fig:qrkc_breakdown", "scaling")
    assert all(EXPERIMENTS[label].cells(lab) == [] for label in labels)
    pama_table, qrkc, scaling = (
        EXPERIMENTS[label].result(CellRecords([], {}, {}, lines=lab.lines)) for label in labels
    )
    assert [row[1:4] for row in pama_table.table.rows] == [("PyTorch", 8.0, 1.0), ("Triton (Full-K)", 2.0, 4.0)]
    assert (pama_table.findings[0].margin, qrkc.findings[0].margin, qrkc.findings[0].verdict) == (3.0, -0.5, "not held")
    assert [point[:2] for point in scaling.figure.rows[0][0].series[0].points] == [(0.5, 0.5), (1.0, 1.0)]
    for label in labels:
        nothing = EXPERIMENTS[label].result(CellRecords([], {}, {}))
        assert nothing.table is None and nothing.note.startswith("not run: needs a GPU; ")


@pytest.mark.parametrize(("layers", "experts", "label"), [(30, 1, "wan2.1-1.3B"), (40, 1, "wan2.1"), (40, 2, "wan2.2")])
def test_a_sheet_of_frames_is_made_with_the_model_of_its_name(tmp_path, monkeypatch, layers, experts, label):
    lab = runner.Lab(quick(), tmp_path)
    sheets = [name for name in EXPERIMENTS if name.startswith("fig:video_vis_")]
    assert all(EXPERIMENTS[name].cells(lab) == [] for name in sheets), "the shipped model is none of the paper's"
    assert (
        EXPERIMENTS[sheets[0]].result(CellRecords([], {}, {})).note
        == "not run: needs HunyuanVideo; pass its folder with --model"
    )
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text(json.dumps({"num_layers": layers}))
    parts = dict.fromkeys(("transformer", "transformer_2")[:experts], (None, "WanTransformer3DModel"))
    monkeypatch.setattr(catalogue, "judge_index", lambda folder: parts)
    lab.evaluation, lab.folder = dataclasses.replace(lab.evaluation, model="some/folder"), tmp_path
    monkeypatch.setattr(runner.Lab, "requests", lambda lab: [lab.base])
    assert [name for name in sheets if EXPERIMENTS[name].cells(lab)] == [f"fig:video_vis_{label}"]


def test_records_that_hold_nothing_of_use_are_refused_in_one_line(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"benchmark": "cpu"}\n[1]\n')
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\0")
    for name in ("absent.jsonl", "other.jsonl", "bytes.jsonl", "/dev/full"):
        with pytest.raises(ValueError, match=r"^records: expected JSON lines of park bench [^\n]*\.$"):
            runner.Lab(quick(records=(tmp_path / name,)), tmp_path)


def test_the_ablation_is_made_of_cells_that_matched_densities_has_too(tmp_path):
    lab = runner.Lab(quick(densities=(0.25, 0.5)), tmp_path)
    own, matched = ({cell.name for cell in EXPERIMENTS[name].cells(lab)} for name in ("ablation", "matched_densities"))
    assert own < matched and len(own) == 1 + 2 * 4
    pairs = [
        quality("a", name, psnr)
        for name, psnr in (("park", 30.0), ("park-no-pama", 28.0), ("park-no-qrkc", 29.0), ("centroid", 28.5))
    ]
    margins = {
        finding.statement: finding.margin for finding in EXPERIMENTS["ablation"].result(gathered(*pairs)).findings
    }
    wanted = {"PARK": 1.5, "park-no-pama": -0.5}
    assert all(margins[f"{name} above centroid at density 0.5"] == margin for name, margin in wanted.items())


def test_each_rule_for_a_budget_has_a_row_and_a_finding_of_its_own(tmp_path):
    lab = runner.Lab(quick(densities=(0.5,)), tmp_path)
    cells = [cell for cell in EXPERIMENTS["budgets"].cells(lab) if cell.request["method"] == "park"]
    assert len(cells) == len(settings_varied.BUDGETS) == 5
    psnr = {"row": 20.0, "tiles": 22.0, "mass": 21.0, "error": 24.0, "error and tiles": 23.0}
    pairs = [
        quality("a", "park", psnr[name], compensate=True, **changes)
        for name, changes in settings_varied.BUDGETS.items()
    ]
    result = EXPERIMENTS["budgets"].result(gathered(*pairs))
    assert {finding.statement: (finding.margin, finding.verdict) for finding in result.findings} == {
        "tiles above row at density 0.5": (2.0, "held"),
        "mass above row at density 0.5": (1.0, "held"),
        "error above mass at density 0.5": (3.0, "held"),
        "error and tiles above error at density 0.5": (-1.0, "not held"),
    }
    assert all(name in to_markdown(result.table) for name in psnr)


def test_the_frontier_runs_profiles_once_and_shares_the_papers_with_the_main_table(tmp_path):
    lab = runner.Lab(quick(), tmp_path)
    cells, main = (EXPERIMENTS[name].cells(lab) for name in ("frontier", "tab:main_quality_efficiency"))
    asked = [(cell.request["method"], cell.request.get("profile")) for cell in cells]
    assert asked == [("dense again", None), ("park", None), ("park", "quality"), ("park", "fast"), ("svg", None)]
    assert {cell.name for cell in main} < {cell.name for cell in cells}


@pytest.mark.parametrize(
    ("label", "few", "all_of_them"),
    [
        ("tab:centroid_count_sensitivity_hy", 4, 7),
        ("tab:reuse_schedule_hy", 2, 4),
        ("fig:quality_efficiency_curve", 2, 6),
    ],
)
def test_a_quick_run_has_of_a_series_what_its_findings_compare(tmp_path, label, few, all_of_them):
    for evaluation, count in ((quick(), few), (dataclasses.replace(quick(steps=50), quick=False), all_of_them)):
        cells = [
            cell
            for cell in EXPERIMENTS[label].cells(runner.Lab(evaluation, tmp_path))
            if cell.request["method"] == "park"
        ]
        assert len(cells) == count
        pairs = [(cell, {"request": cell.request, "row": quality("a", "park", 20.0)[1]["row"]}) for cell in cells]
        findings = EXPERIMENTS[label].result(gathered(*pairs)).findings
        assert findings and all(finding.margin == 0 for finding in findings)


def test_at_equal_density_a_method_is_compared_at_the_density_it_has_and_not_at_the_one_it_was_asked_for():
    def run(prompt, method, asked, density, psnr):
        cell, record = quality(prompt, method, psnr)
        request = {**cell.request, "density": asked}
        cell = Cell(name=f"{prompt} {method} {asked}", format="f", request=request)
        return cell, {"request": request, "row": record["row"] | {"density": density}}

    runs = [
        run(prompt, "park", asked, asked, 100 * asked + more)
        for prompt, more in (("a", 0), ("b", 2))
        for asked in (0.3, 0.5)
    ]
    # 40 dB is what PARK has at the 0.4 that svg2 gets of 0.5; beside PARK's 50 dB at 0.5 it would look 9 dB worse
    runs += [run("a", "svg2", 0.5, 0.4, 41.0), run("b", "svg2", 0.5, 0.4, 43.0), run("a", "sol", 0.5, 0.9, 41.0)]
    found = {
        finding.statement: finding
        for finding in catalogue.EXPERIMENTS["matched_densities"].result(gathered(*runs)).findings
    }
    below = found["PARK above svg2 at density 0.5"]
    assert (
        below.margin == pytest.approx(-1.0)
        and below.spread == pytest.approx(0.0, abs=1e-9)
        and below.verdict == "not held"
    )
    far = found["PARK above sol at density 0.5"]
    assert far.verdict == "not run" and far.reason == "has a density of 0.900, and the other 0.300 to 0.500"
