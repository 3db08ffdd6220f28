"""Every experiment by its label in the paper: which cells it needs, and how its table and findings follow from their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from parkattn.checks import did_you_mean
from parkattn.methods import METHODS, method_entry
from parkattn.models import SIZES
from parkattn.park import ParkConfig
from parkattn.reuse import dense_prefix
from parklab.experiments import results, retrieval_tables
from parklab.experiments.calibration import MATCHED
from parklab.experiments.costs import cost_cells, cost_result
from parklab.experiments.evaluation import FLOOR, FLOORS
from parklab.experiments.frontier import frontier_cells, frontier_result
from parklab.experiments.kernel_tables import bench_cells, pama_result, qrkc_result, scaling_result
from parklab.experiments.paper_numbers import LABELS
from parklab.experiments.results import Chosen, Gathered, Label, Result
from parklab.experiments.runner import Lab
from parklab.experiments.times import times_result
from parklab.store import Cell
from parklab.studio.model_folder import LARGEST_CONFIG, judge_index, read_json

PAPER_BASELINES = ("sparge", "xattention", "svg", "svg2", "svoo")
ABLATIONS = {"park-no-pama": "PAMA", "park-no-qrkc": "QRKC"}
NEITHER = "centroid"  # retrieval with centroids of queries and Euclidean clusters of keys
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# of the paper's 128 query blocks, and of its 1,024 or 512 key blocks
QUERY_SHARES, KEY_SHARES = (0.5, 1.0, 1.5, 2.0, 2.5), {"hy": (0.5, 0.75), "wan": (1.5, 2.0)}
PAPER_KEYS = {"hy": 1024, "wan": 512}
# steps at which plans are rebuilt, of 50; the first is where sparse attention begins
SCHEDULES = ((10,), (10, 30), (10, 20, 30), (10, 20, 30, 40))
# how one budget is spent on blocks that have stand-ins where they are skipped, by what is added to top-p per row
BUDGETS: dict[str, dict[str, Any]] = {
    "row": {},
    "tiles": {"query_tile": 64},
    "mass": {"budget": "mass"},
    "error": {"budget": "error"},
    "error and tiles": {"budget": "error", "query_tile": 64},
}
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    label: str
    title: str
    cells: Callable[[Lab], list[Cell]]
    result: Callable[[Gathered], Result]
    needs: str = ""  # what the shipped model on a CPU is not enough for


@dataclass(frozen=True)
class NotBuilt:
    label: str
    title: str
    reason: str


def _retrieval(lab: Lab) -> list[Cell]:
    return lab.retrieval_cells()


def _runs(lab: Lab, settings: list[tuple[str, dict[str, Any]]], *, densities: tuple[float | None, ...] = (None,)) -> list[Cell]:
    """The floors first, then each (method, changes), all on one prompt before the next: they share its reference."""
    rows = [
        *((floor, {}, None) for floor in _floors(lab)),
        *((method, changes, density) for density in densities for method, changes in settings),
    ]
    return [lab.quality_cell(request, method, density=goal, **changes) for request in lab.requests() for method, changes, goal in rows]


def _floors(lab: Lab) -> tuple[str, ...]:
    """Dense attention once more; on a GPU, where that gives the same bits, by another kernel too."""
    return FLOORS if lab.base.device.startswith("cuda") else (FLOOR,)


def _series(lab: Lab, values: Sequence[Any]) -> Sequence[Any]:
    return (values[0], values[-1]) if lab.evaluation.quick else values


def _by_method(request: Request) -> Label:
    return (request["method"], _guidance(request))


def _guidance(request: Request) -> str:
    return "" if request["guidance"] is None else f"{request['guidance']:g}"


def _methods(lab: Lab) -> tuple[str, ...]:
    """Those asked for, or the paper's and then all others but PARK's own variants."""
    if lab.evaluation.methods:
        return tuple(name for name in lab.evaluation.methods if name != "dense")
    others = [name for name in METHODS if name not in ("dense", "park", NEITHER, *ABLATIONS, *PAPER_BASELINES)]
    return ("park", *PAPER_BASELINES, *others)


def _main(lab: Lab) -> list[Cell]:
    return _runs(lab, [(name, {}) for name in _methods(lab)])


def _main_result(gathered: Gathered) -> Result:
    table = results.quality_table(gathered, ("method", "guidance"), _by_method)
    names = dict.fromkeys(cell.request["method"] for cell in gathered.cells if cell.request["method"] not in ("park", *FLOORS))
    found = [results.psnr_findings(gathered, f"PARK above {name}, each at its own settings", _is("park"), _is(name)) for name in names]
    return Result(table.table, tuple(finding for each in found for finding in each))


def _matched(lab: Lab) -> list[Cell]:
    return _runs(lab, [(name, {}) for name in _with_budget(lab)], densities=lab.evaluation.densities)


def _with_budget(lab: Lab) -> list[str]:
    """PARK's own variants are among them where no methods were named."""
    asked = lab.evaluation.methods and not lab.evaluation.quick
    names = _methods(lab) if asked else (*_methods(lab), *ABLATIONS, NEITHER)
    return [name for name in dict.fromkeys(names) if method_entry(name).budgets]


def _halves(lab: Lab) -> list[Cell]:
    """Of matched_densities' cells, those of PARK, of each half of it, and of neither."""
    names = ("park", *ABLATIONS, NEITHER)
    return _runs(lab, [(name, {}) for name in names], densities=lab.evaluation.densities)


def _halves_result(gathered: Gathered) -> Result:
    found = _matched_result(gathered)
    densities = sorted({cell.request["density"] for cell in gathered.cells if cell.request["density"] is not None})
    more = [
        finding
        for density in densities
        for name in ABLATIONS
        for finding in results.psnr_findings(
            gathered, f"{name} above {NEITHER} at density {density:g}", _is(name, density=density), _is(NEITHER, density=density)
        )
    ]
    return Result(found.table, (*found.findings, *more), found.figure)


def _by_density(request: Request) -> Label:
    return (request["method"], "" if request["density"] is None else f"{request['density']:g}", _guidance(request))


def times_cells(lab: Lab) -> list[Cell]:
    """Dense attention, and every method at its own settings and at each density."""
    own = [lab.times_cell(name) for name in ("dense", *_methods(lab))]
    return own + [lab.times_cell(name, density) for density in lab.evaluation.densities for name in _with_budget(lab)]


def _times(lab: Lab) -> list[Cell]:
    return times_cells(lab) if lab.evaluation.timed or lab.evaluation.draw else []


def _matched_result(gathered: Gathered) -> Result:
    table = results.quality_table(gathered, ("method", "asked", "guidance"), _by_density)
    asked = [cell.request for cell in gathered.cells if cell.request["method"] not in FLOORS]
    names = [name for name in dict.fromkeys(request["method"] for request in asked) if name != "park"]
    densities = sorted({request["density"] for request in asked})
    findings = [
        finding
        for density in densities
        for name in names
        for finding in results.psnr_findings_at_density(
            gathered, f"PARK above {name} at density {density:g}", _is("park"), _is(name, density=density), near=MATCHED
        )
    ]
    figure = results.trade_off(results.runs_by(gathered, lambda request: (_guidance(request), *_by_density(request)[:2])))
    return Result(table.table, tuple(findings), figure)


def _ablation(lab: Lab) -> list[Cell]:
    return _runs(lab, [(name, {}) for name in ("park", *ABLATIONS)])


def _ablation_result(gathered: Gathered) -> Result:
    table = results.quality_table(gathered, ("variant", "guidance"), _by_method)
    found = [results.psnr_findings(gathered, f"removing {what} loses PSNR", _is("park"), _is(name)) for name, what in ABLATIONS.items()]
    return Result(table.table, tuple(finding for each in found for finding in each))


def _budgets(lab: Lab) -> list[Cell]:
    rows = [("park", {"compensate": True, **changes}) for changes in BUDGETS.values()]
    return _runs(lab, rows, densities=lab.evaluation.densities)


def _by_budget(request: Request) -> Label:
    if request["method"] in FLOORS:
        return (request["method"], "", _guidance(request))
    spent = {name: value for name, value in request["changes"].items() if name in ("budget", "query_tile")}
    name = next(name for name, changes in BUDGETS.items() if changes == spent)
    return (name, f"{request['density']:g}", _guidance(request))


def _budgets_result(gathered: Gathered) -> Result:
    table = results.quality_table(gathered, ("budget by", "asked", "guidance"), _by_budget)
    densities = sorted({cell.request["density"] for cell in gathered.cells if cell.request["density"] is not None})

    def spent(name: str, density: float) -> Chosen:
        return lambda request: _by_budget(request)[:2] == (name, f"{density:g}")

    findings = [
        finding
        for density in densities
        for better, worse in (("tiles", "row"), ("mass", "row"), ("error", "mass"), ("error and tiles", "error"))
        for finding in results.psnr_findings(
            gathered, f"{better} above {worse} at density {density:g}", spent(better, density), spent(worse, density)
        )
    ]
    figure = results.trade_off(results.runs_by(gathered, lambda request: (_guidance(request), *_by_budget(request)[:2])))
    return Result(table.table, tuple(findings), figure)


def _is(method: str, **more: Any) -> Chosen:
    return lambda request: request["method"] == method and all(request[name] == value for name, value in more.items())


def _sensitivity(kind: str, lab: Lab) -> list[Cell]:
    # what 1.0 stands for: as set for all methods, or the paper's
    changes = lab.evaluation.changes
    base = changes.get("query_clusters") or 128, changes.get("key_clusters") or PAPER_KEYS[kind]
    queries, keys = (
        ((QUERY_SHARES[0], 1.0, QUERY_SHARES[-1]), KEY_SHARES[kind][:1]) if lab.evaluation.quick else (QUERY_SHARES, KEY_SHARES[kind])
    )
    chosen = [(share, 1.0) for share in queries] + [(1.0, share) for share in keys]
    counts = [{"query_clusters": max(1, round(q * base[0])), "key_clusters": max(1, round(k * base[1]))} for q, k in chosen]
    return _runs(lab, [("park", each) for each in counts])


def _by_blocks(request: Request) -> Label:
    if request["method"] in FLOORS:
        return (request["method"], "", _guidance(request))
    return (str(request["changes"]["query_clusters"]), str(request["changes"]["key_clusters"]), _guidance(request))


def _sensitivity_result(gathered: Gathered) -> Result:
    table = results.quality_table(gathered, ("N_Q", "N_K", "guidance"), _by_blocks)
    runs = [cell.request["changes"] for cell in gathered.cells if cell.request["method"] not in FLOORS]
    findings = []
    for side, other in (("query_clusters", "key_clusters"), ("key_clusters", "query_clusters")):
        usual = max({c[other] for c in runs}, key=lambda value: len({c[side] for c in runs if c[other] == value}))
        values = sorted({c[side] for c in runs if c[other] == usual})
        fewest, most = ({side: value, other: usual} for value in (values[0], values[-1]))
        statement = f"{values[-1]} instead of {values[0]} {side.split('_')[0]} blocks lose nothing"
        findings += results.psnr_findings(gathered, statement, _with(most), _with(fewest), tie=True)
    return Result(table.table, tuple(findings))


def _with(changes: dict[str, Any]) -> Callable[[Request], bool]:
    return lambda request: request["method"] not in FLOORS and all(request["changes"].get(name) == value for name, value in changes.items())


def _schedules(lab: Lab) -> list[Cell]:
    steps = lab.base.steps or 50
    first = dense_prefix(ParkConfig(), steps)
    scaled = [sorted({first, *(round(step * steps / 50) for step in each[1:])}) for each in _series(lab, SCHEDULES)]
    return _runs(lab, [("park", {"refresh_steps": [step for step in each if step < steps]}) for each in scaled])


def _by_schedule(request: Request) -> Label:
    if request["method"] in FLOORS:
        return (request["method"], _guidance(request))
    return ("{" + ", ".join(map(str, request["changes"]["refresh_steps"])) + "}", _guidance(request))


def _schedule_result(gathered: Gathered) -> Result:
    table = results.quality_table(gathered, ("refreshes at", "guidance"), _by_schedule)
    asked = sorted((c.request["changes"]["refresh_steps"] for c in gathered.cells if c.request["method"] not in FLOORS), key=len)
    fewest, most = ({"refresh_steps": each} for each in (asked[0], asked[-1]))
    statement = f"{len(asked[-1])} refreshes instead of {len(asked[0])} lose nothing"
    return Result(table.table, tuple(results.psnr_findings(gathered, statement, _with(most), _with(fewest), tie=True)))


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
    return [lab.frames_cell(lab.requests()[0], method) for method in ("dense", "park")] if _model_of(lab) == model else []


def _curve(lab: Lab) -> list[Cell]:
    return _runs(lab, [("park", {"top_p": value}) for value in _series(lab, TOP_P)])


def _by_top_p(request: Request) -> Label:
    return (request["method"] if request["method"] in FLOORS else f"{request['changes']['top_p']:g}", _guidance(request))


def _curve_result(gathered: Gathered) -> Result:
    table = results.quality_table(gathered, ("top-p", "guidance"), _by_top_p)
    statement = f"PSNR falls as top-p goes from {TOP_P[-1]:g} to {TOP_P[0]:g}"
    found = results.psnr_findings(gathered, statement, _with({"top_p": TOP_P[-1]}), _with({"top_p": TOP_P[0]}))
    figure = results.trade_off(results.runs_by(gathered, lambda request: (_guidance(request), "park", _by_top_p(request)[0])))
    return Result(table.table, tuple(found), figure)


def _frontier(lab: Lab) -> list[Cell]:
    return frontier_cells(lab, _floors(lab), _methods(lab))


def _costs(lab: Lab) -> list[Cell]:
    return cost_cells(lab, _floors(lab), _methods(lab))


_top_p, _top_k = (partial(retrieval_tables.recall_table, kind=kind) for kind in ("top_p", "top_k"))
_hy, _wan = (partial(_sensitivity, kind) for kind in ("hy", "wan"))
_GPU = "a GPU, or --records FILE"
SHEETS = {"hunyuanvideo": "HunyuanVideo", "wan2.1": "Wan2.1-14B", "wan2.1-1.3B": "Wan2.1-1.3B", "wan2.2": "Wan2.2-14B"}
EXPERIMENTS: dict[str, Experiment] = {
    each.label: each
    for each in (
        Experiment("tab:query_key_compression", "Top-p recall by representation, %", _retrieval, _top_p),
        Experiment("tab:query_key_compression_topk", "Top-k recall by representation, %", _retrieval, _top_k),
        Experiment("tab:main_quality_efficiency", "Every method at its own settings", _main, _main_result),
        Experiment("tab:module_ablation", "PARK without PAMA and without QRKC", _ablation, _ablation_result),
        Experiment("tab:query_representation_errors", "TV of attention weights", _retrieval, retrieval_tables.representation_table),
        Experiment("tab:key_score_errors", "Errors of keys and of QK scores", _retrieval, retrieval_tables.key_error_table),
        Experiment("fig:retrieval_mismatches", "The two mismatches, panel c", _retrieval, retrieval_tables.mismatch_panel),
        Experiment("fig:mismatch_errors_appendix", "The two mismatches, measured", _retrieval, retrieval_tables.mismatch_figure),
        Experiment("fig:qrkc_effect", "QRKC and recall", _retrieval, retrieval_tables.qrkc_figure),
        Experiment("tab:centroid_count_sensitivity_hy", "Numbers of blocks, as on HunyuanVideo", _hy, _sensitivity_result),
        Experiment("tab:centroid_count_sensitivity_wan", "Numbers of blocks, as on Wan2.1-1.3B", _wan, _sensitivity_result),
        Experiment("tab:reuse_schedule_hy", "Steps at which plans are rebuilt", _schedules, _schedule_result),
        Experiment("fig:quality_efficiency_curve", "Quality against time, by top-p", _curve, _curve_result),
        Experiment("fig:generation_example", "Frames of dense attention, PARK and SVG2", _example, results.frame_sheet),
        Experiment("matched_densities", "Every method at one density (not in the paper)", _matched, _matched_result),
        Experiment("matched_costs", "Profiles against methods at one cost (not in the paper)", _costs, cost_result),
        Experiment("call_times", "What plans and calls of attention take (not in the paper)", _times, times_result),
        Experiment("ablation", "PARK's halves at equal density (not in the paper)", _halves, _halves_result),
        Experiment("budgets", "Rules for spending one density (not in the paper)", _budgets, _budgets_result),
        Experiment("tab:pama_kernel_overhead", "PAMA's kernels", partial(bench_cells, benchmark="pama"), pama_result, _GPU),
        Experiment("fig:qrkc_breakdown", "What QRKC adds to k-means", partial(bench_cells, benchmark="qrkc"), qrkc_result, _GPU),
        Experiment("scaling", "Time against density and length", partial(bench_cells, benchmark="scaling"), scaling_result, _GPU),
        *(
            Experiment(
                f"fig:video_vis_{name}",
                f"Frames of dense attention and PARK, {title}",
                partial(_sheet, name),
                partial(results.frame_sheet, needs=f"needs {title}; pass its folder with --model"),
                f"{title}: --model FOLDER",
            )
            for name, title in SHEETS.items()
        ),
        Experiment("frontier", "Quality against cost, profiles and methods (not in the paper)", _frontier, frontier_result),
    )
}
NOT_BUILT: dict[str, NotBuilt] = {each.label: each for each in (NotBuilt("fig:overview", "Overview of PARK", "a drawing"),)}


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
            raise ValueError(f"name: expected an experiment that can be run here, got {label} ({NOT_BUILT[label].reason}); choose another.")
        if label not in EXPERIMENTS:
            advice = did_you_mean(name, [*known, *EXPERIMENTS], "see park reproduce --list.")
            raise ValueError(f"name: expected a label of the paper, got {name!r}; {advice}")
        chosen.append(EXPERIMENTS[label])
    return chosen
