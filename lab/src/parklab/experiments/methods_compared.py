"""Methods beside each other: which cells a table of theirs needs, and what follows from their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parkattn.methods import METHODS, method_entry
from parklab.experiments.calibration import MATCHED
from parklab.experiments.evaluation import FLOOR, FLOORS
from parklab.experiments.results import CellRecords, Chosen, Label, Result, comparison
from parklab.experiments.runner import Lab
from parklab.store import Cell

PAPER_BASELINES = ("sparge", "xattention", "svg", "svg2", "svoo")
ABLATIONS = {"park-no-pama": "PAMA", "park-no-qrkc": "QRKC"}
NEITHER = "centroid"  # retrieval with centroids of queries and Euclidean clusters of keys
Request = Mapping[str, Any]


def quality_cells(
    lab: Lab, settings: list[tuple[str, dict[str, Any]]], *, densities: tuple[float | None, ...] = (None,)
) -> list[Cell]:
    """The floors first, then each (method, changes), all on one prompt before the next: they share its reference."""
    rows = [
        *((floor, {}, None) for floor in floors_of(lab)),
        *((method, changes, density) for density in densities for method, changes in settings),
    ]
    return [
        lab.quality_cell(request, method, density=goal, **changes)
        for request in lab.requests()
        for method, changes, goal in rows
    ]


def floors_of(lab: Lab) -> tuple[str, ...]:
    """Dense attention once more; on a GPU, where that gives the same bits, by another kernel too."""
    return FLOORS if lab.base.device.startswith("cuda") else (FLOOR,)


def series_of(lab: Lab, values: Sequence[Any]) -> Sequence[Any]:
    return (values[0], values[-1]) if lab.evaluation.quick else values


def by_method(request: Request) -> Label:
    return (request["method"],)


def by_density(request: Request) -> Label:
    return request["method"], f"{request['density']:g}"


def densities_in(gathered: CellRecords) -> list[float]:
    return sorted({cell.request["density"] for cell in gathered.cells if cell.request["density"] is not None})


def methods_of(lab: Lab) -> tuple[str, ...]:
    """Those asked for, or the paper's and then all others but PARK's own variants."""
    if lab.evaluation.methods:
        return tuple(name for name in lab.evaluation.methods if name != "dense")
    others = [name for name in METHODS if name not in ("dense", "park", NEITHER, *ABLATIONS, *PAPER_BASELINES)]
    return ("park", *PAPER_BASELINES, *others)


def is_method(method: str, **more: Any) -> Chosen:
    return lambda request: request["method"] == method and all(request[name] == value for name, value in more.items())


def main_cells(lab: Lab) -> list[Cell]:
    return quality_cells(lab, [(name, {}) for name in methods_of(lab)])


def main_result(gathered: CellRecords) -> Result:
    pairs = [
        (f"PARK above {name}, each at its own settings", is_method("park"), is_method(name))
        for name in _others(gathered)
    ]
    return comparison(gathered, ("method",), by_method, pairs)


def _others(gathered: CellRecords) -> list[str]:
    names = dict.fromkeys(cell.request["method"] for cell in gathered.cells)
    return [name for name in names if name not in ("park", *FLOORS)]


def matched_cells(lab: Lab) -> list[Cell]:
    return quality_cells(lab, [(name, {}) for name in methods_with_budget(lab)], densities=lab.evaluation.densities)


def methods_with_budget(lab: Lab) -> list[str]:
    """PARK's own variants are among them where no methods were named."""
    asked = lab.evaluation.methods and not lab.evaluation.quick
    names = methods_of(lab) if asked else (*methods_of(lab), *ABLATIONS, NEITHER)
    return [name for name in dict.fromkeys(names) if method_entry(name).budgets]


def halves_cells(lab: Lab) -> list[Cell]:
    """Of matched_densities' cells, those of PARK, of each half of it, and of neither."""
    names = ("park", *ABLATIONS, NEITHER)
    return quality_cells(lab, [(name, {}) for name in names], densities=lab.evaluation.densities)


def halves_result(gathered: CellRecords) -> Result:
    pairs = [
        (f"{name} above {NEITHER} at density {density:g}", is_method(name, density=density),
         is_method(NEITHER, density=density))
        for density in densities_in(gathered) for name in ABLATIONS
    ]  # fmt: skip
    found, more = matched_result(gathered), comparison(gathered, ("method", "asked"), by_density, pairs)
    return replace(found, findings=(*found.findings, *more.findings))


def times_cells(lab: Lab) -> list[Cell]:
    """Dense attention, and every method at its own settings and at each density."""
    own = [lab.times_cell(name) for name in ("dense", *methods_of(lab))]
    return own + [
        lab.times_cell(name, density) for density in lab.evaluation.densities for name in methods_with_budget(lab)
    ]


def timed_cells(lab: Lab) -> list[Cell]:
    return times_cells(lab) if lab.evaluation.timed or lab.evaluation.draw else []


def matched_result(gathered: CellRecords) -> Result:
    pairs = [
        (f"PARK above {name} at density {density:g}", is_method("park"), is_method(name, density=density))
        for density in densities_in(gathered) for name in _others(gathered)
    ]  # fmt: skip
    return comparison(gathered, ("method", "asked"), by_density, pairs, near=MATCHED, point=lambda label: label)


def ablation_cells(lab: Lab) -> list[Cell]:
    return quality_cells(lab, [(name, {}) for name in ("park", *ABLATIONS)])


def ablation_result(gathered: CellRecords) -> Result:
    pairs = [(f"removing {what} loses PSNR", is_method("park"), is_method(name)) for name, what in ABLATIONS.items()]
    return comparison(gathered, ("variant",), by_method, pairs)
