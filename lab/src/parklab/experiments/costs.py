"""PARK's profiles against other methods where both compute as much attention over the whole run, dense steps included.

A method at a density costs a + (1 - a) density, a being the share of calls that its own schedule leaves dense. Every
cost that the paper's settings and the other methods have at the densities of the evaluation is asked of every profile.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from parkattn.methods import method_entry
from parkattn.park import ParkConfig
from parklab.experiments import results
from parklab.experiments.calibration import density_at, named_profile
from parklab.experiments.evaluation import FLOORS
from parklab.experiments.methods_compared import floors_of, methods_of
from parklab.experiments.results import NOT_RUN, CellRecords, Chosen, Finding, Result, setting_of
from parklab.experiments.runner import Lab
from parklab.experiments.tables import Table, columns_of, grouped, interval
from parklab.store import Cell

PAPER = "paper"
EQUAL = 0.03  # of all-dense: how far beyond a method's first or last run a profile is still compared with that run
RIVALS = ("svg2", "svg-ear", "sparsepr", "sol")
ROUNDING = 1e-4  # costs that are asked for and differ by less are one
Request = Mapping[str, Any]
Row = tuple[str, float | None, float | None]  # setting, density and guidance that are asked for

COLUMNS = columns_of(
    "setting | cost asked:3 | guidance | runs | cost:3 | density:3 | PSNR:2 | ±:2 | error:4 | seconds:2 | note"
)


def cost_cells(lab: Lab) -> list[Cell]:
    """Cells of matched_densities, and each profile at every cost that those have."""
    chosen = methods_of(lab) if lab.evaluation.methods else RIVALS
    names = ["park", *(name for name in chosen if name != "park" and method_entry(name).budgets)]
    densities, changes = lab.evaluation.densities, lab.evaluation.changes
    asked = [{"method": name, "density": density, "changes": changes} for density in densities for name in names]
    costs = _distinct([lab.cost(each) for each in asked])
    rows: list[tuple[str, float | None, str | None]] = [(floor, None, None) for floor in floors_of(lab)]
    rows += [(name, density, None) for density in densities for name in names]
    for profile in filter(_is_profile, ParkConfig.long_run_profiles()):
        share = lab.dense_share({"method": "park", "changes": changes, **named_profile(profile)})
        rows += [("park", density_at(cost, share), profile) for cost in costs]
    return [
        lab.quality_cell(request, method, density=density, profile=profile)
        for request in lab.requests() for method, density, profile in rows
    ]  # fmt: skip


class CostComparison(NamedTuple):
    profile: str
    method: str
    cost: float  # that the profile was asked for
    guidance: float | None
    finding: Finding


def compare_at_costs(
    gathered: CellRecords, asked: Mapping[tuple[str, float | None], float] | None = None
) -> Iterator[CostComparison]:
    """Every profile at every cost with every method. asked: costs by setting and density."""
    asked = _asked_costs(gathered) if asked is None else asked
    methods = list(dict.fromkeys(setting for setting, _ in asked if not _is_profile(setting)))
    scales = list(dict.fromkeys(cell.request["guidance"] for cell in gathered.cells))
    for cost in sorted(set(asked.values())):
        at = {setting: density for (setting, density), each in asked.items() if each == cost}
        for profile, method, scale in itertools.product(filter(_is_profile, at), methods, scales):
            place = f", guidance {scale:g}" if len(scales) > 1 else ""
            chosen = _is(profile, at[profile], scale), _is(method, None, scale)
            statement = f"{profile} above {method} at cost {cost:.3g}{place}"
            found = results.psnr_above_line(gathered, statement, *chosen, "cost", near=EQUAL)
            yield CostComparison(profile, method, cost, scale, found)


def cost_result(gathered: CellRecords) -> Result:
    rows = grouped(gathered.cells, lambda cell: _row(cell.request))
    asked = _asked_costs(gathered)
    table = Table(COLUMNS, tuple(_table_row(gathered, row, asked.get(row[:2]), cells) for row, cells in rows.items()))
    findings = tuple(compared.finding for compared in compare_at_costs(gathered, asked))

    def point(request: Request) -> results.Label:
        return results.guidance_of(request), setting_of(request), f"{asked[_row(request)[:2]]:.3g}"

    return Result(table, findings, results.trade_off(results.runs_by(gathered, point)))


def _is_profile(setting: str) -> bool:
    return setting in ParkConfig.PROFILES and setting != PAPER


def _row(request: Request) -> Row:
    return setting_of(request), request["density"], request["guidance"]


def _is(setting: str, density: float | None, guidance: float | None) -> Chosen:
    """density: None is every one."""

    def chosen(request: Request) -> bool:
        at = request["density"] if density is None else density
        return request["density"] is not None and _row(request) == (setting, at, guidance)

    return chosen


def _asked_costs(gathered: CellRecords) -> dict[tuple[str, float | None], float]:
    """By setting and density; a profile's is the cost it was asked for, next to that of its rounded density."""
    assert gathered.cost is not None
    requests = {_row(cell.request)[:2]: cell.request for cell in gathered.cells if cell.request["method"] not in FLOORS}
    found = {what: gathered.cost(request) for what, request in requests.items()}
    distinct = _distinct(cost for (setting, _), cost in found.items() if not _is_profile(setting))
    return {what: min(distinct, key=lambda each: abs(each - cost)) for what, cost in found.items()}


def _distinct(costs: Iterable[float]) -> list[float]:
    found: list[float] = []
    for cost in sorted(costs):
        if not found or cost - found[-1] > ROUNDING:
            found.append(cost)
    return found


def _table_row(gathered: CellRecords, row: Row, cost: float | None, cells: Sequence[Cell]) -> tuple[Any, ...]:
    found = [record["row"] for record in gathered.of(cells)]
    head = row[0], cost, results.guidance_of(cells[0].request), len(found)
    if not found:
        return (*head, *(None,) * 6, f"{NOT_RUN}: {gathered.why_not(cells)}")
    psnr = [each["psnr"] for each in found]
    mean = {name: results.mean_of_all(found, name) for name in ("cost", "density", "error", "seconds")}
    missing = len(cells) - len(found)
    return (
        *head, mean["cost"], mean["density"], statistics.fmean(psnr), interval(psnr), mean["error"], mean["seconds"],
        f"{missing} of {len(cells)} {NOT_RUN}" if missing else "",
    )  # fmt: skip
