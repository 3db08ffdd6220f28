"""Every experiment by its label in the paper: which cells it needs, and how its table and findings follow from their
records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from parkattn.checks import did_you_mean
from parkattn.models import SIZES
from parklab.experiments import methods_compared as compared
from parklab.experiments import results
from parklab.experiments import retrieval_tables as retrieval
from parklab.experiments import settings_varied as varied
from parklab.experiments.costs import cost_cells, cost_result
from parklab.experiments.frontier import frontier_cells, frontier_result
from parklab.experiments.kernel_tables import bench_cells, pama_result, qrkc_result, scaling_result
from parklab.experiments.likeness import likeness_cells, likeness_result
from parklab.experiments.paper_numbers import LABELS
from parklab.experiments.results import CellRecords, Result
from parklab.experiments.run_frontier import run_cells, run_result
from parklab.experiments.runner import Lab
from parklab.experiments.times import times_result
from parklab.store import Cell
from parklab.studio.model_files import LARGEST_CONFIG, read_json
from parklab.studio.model_folder import judge_index


@dataclass(frozen=True)
class Experiment:
    label: str
    title: str
    cells: Callable[[Lab], list[Cell]]
    result: Callable[[CellRecords], Result]
    needs: str = ""  # what the shipped model on a CPU is not enough for


@dataclass(frozen=True)
class NotBuilt:
    label: str
    title: str
    reason: str


def _retrieval(lab: Lab) -> list[Cell]:
    return lab.retrieval_cells()


def _example(lab: Lab) -> list[Cell]:
    return [lab.frames_cell(lab.requests()[0], method) for method in ("dense", "park", "svg2")]


def _model_of(lab: Lab) -> str | None:
    """Which of the paper's models the folder holds, by the class, size and number of its transformers."""
    if lab.evaluation.model is None:
        return None
    parts = judge_index(lab.folder)
    if "hunyuanvideo" in parts["transformer"][1].lower():
        return "hunyuanvideo"
    if parts["transformer"][1] != "WanTransformer3DModel":
        return None
    config = read_json(lab.folder / "transformer" / "config.json", LARGEST_CONFIG, "every model has one")
    small = config.get("num_layers") == SIZES["wan2.1-1.3b"].layers
    return "wan2.2" if "transformer_2" in parts else "wan2.1-1.3B" if small else "wan2.1"


def _sheet(model: str, lab: Lab) -> list[Cell]:
    return (
        [lab.frames_cell(lab.requests()[0], method) for method in ("dense", "park")] if _model_of(lab) == model else []
    )


_pama, _qrkc, _scaling = (partial(bench_cells, name) for name in ("pama", "qrkc", "scaling"))
_top_p, _top_k = (partial(retrieval.recall_table, kind=kind) for kind in ("top_p", "top_k"))
_hy, _wan = (partial(varied.sensitivity_cells, kind) for kind in ("hy", "wan"))
_GPU = "a GPU, or --records FILE"
_LINES = "--records FILE of python -m parklab.bench.frontier"
SHEETS = {"hunyuanvideo": "HunyuanVideo", "wan2.1": "Wan2.1-14B", "wan2.1-1.3B": "Wan2.1-1.3B", "wan2.2": "Wan2.2-14B"}
EXPERIMENTS: dict[str, Experiment] = {each.label: each for each in (
    Experiment("tab:query_key_compression", "Top-p recall by representation, %", _retrieval, _top_p),
    Experiment("tab:query_key_compression_topk", "Top-k recall by representation, %", _retrieval, _top_k),
    Experiment("tab:main_quality_efficiency", "Every method at its own settings",
        compared.main_cells, compared.main_result),
    Experiment("tab:module_ablation", "PARK without PAMA and without QRKC",
        compared.ablation_cells, compared.ablation_result),
    Experiment("tab:query_representation_errors", "TV of attention weights",
        _retrieval, retrieval.representation_table),
    Experiment("tab:key_score_errors", "Errors of keys and of QK scores", _retrieval, retrieval.key_error_table),
    Experiment("fig:retrieval_mismatches", "The two mismatches, panel c", _retrieval, retrieval.mismatch_panel),
    Experiment("fig:mismatch_errors_appendix", "The two mismatches, measured", _retrieval, retrieval.mismatch_figure),
    Experiment("fig:qrkc_effect", "QRKC and recall", _retrieval, retrieval.qrkc_figure),
    Experiment("tab:centroid_count_sensitivity_hy", "Numbers of blocks, as on HunyuanVideo",
        _hy, varied.sensitivity_result),
    Experiment("tab:centroid_count_sensitivity_wan", "Numbers of blocks, as on Wan2.1-1.3B",
        _wan, varied.sensitivity_result),
    Experiment("tab:reuse_schedule_hy", "Steps at which plans are rebuilt",
        varied.schedule_cells, varied.schedule_result),
    Experiment("fig:quality_efficiency_curve", "Quality against time, by top-p",
        varied.curve_cells, varied.curve_result),
    Experiment("fig:generation_example", "Frames of dense attention, PARK and SVG2", _example, results.frame_sheet),
    Experiment("matched_densities", "Every method at one density (not in the paper)",
        compared.matched_cells, compared.matched_result),
    Experiment("matched_costs", "Profiles against methods at one cost (not in the paper)", cost_cells, cost_result),
    Experiment("call_times", "What plans and calls of attention take (not in the paper)",
        compared.timed_cells, times_result),
    Experiment("ablation", "PARK's halves at equal density (not in the paper)",
        compared.halves_cells, compared.halves_result),
    Experiment("budgets", "Rules for spending one density (not in the paper)",
        varied.budget_cells, varied.budget_result),
    Experiment("likeness", "How like the real models a model is (not in the paper)", likeness_cells, likeness_result),
    Experiment("tab:pama_kernel_overhead", "PAMA's kernels", _pama, pama_result, _GPU),
    Experiment("fig:qrkc_breakdown", "What QRKC adds to k-means", _qrkc, qrkc_result, _GPU),
    Experiment("scaling", "Time against density and length", _scaling, scaling_result, _GPU),
    *(
        Experiment(
            f"fig:video_vis_{name}", f"Frames of dense attention and PARK, {title}", partial(_sheet, name),
            partial(results.frame_sheet, needs=f"needs {title}; pass its folder with --model"),
            f"{title}: --model FOLDER",
        )
        for name, title in SHEETS.items()
    ),
    Experiment(
        "frontier", "Quality against cost, profiles and methods (not in the paper)", frontier_cells, frontier_result
    ),
    Experiment(
        "run_frontier", "Quality against the seconds of a run (not in the paper)", run_cells, run_result, _LINES
    ),
)}  # fmt: skip
NOT_BUILT = {"fig:overview": NotBuilt("fig:overview", "Overview of PARK", "a drawing")}


def in_the_papers_order(labels: Iterable[str]) -> list[str]:
    """What the paper does not have comes last."""
    return sorted(labels, key=lambda label: LABELS.index(label) if label in LABELS else len(LABELS))


def choose_experiments(names: list[str]) -> list[Experiment]:
    """all, or labels; without tab: or fig: too."""
    known = {label.partition(":")[2] or label: label for label in (*EXPERIMENTS, *NOT_BUILT)}
    if "all" in names:
        return list(EXPERIMENTS.values())
    chosen = []
    for name in dict.fromkeys(names):
        label = known.get(name, name)
        if label in NOT_BUILT:
            raise ValueError(
                f"name: expected an experiment that can be run here, got {label} ({NOT_BUILT[label].reason}); "
                "choose another."
            )
        if label not in EXPERIMENTS:
            advice = did_you_mean(name, [*known, *EXPERIMENTS], "see park reproduce --list.")
            raise ValueError(f"name: expected a label of the paper, got {name!r}; {advice}")
        chosen.append(EXPERIMENTS[label])
    return chosen
