"""PARK with one of its settings changed: budgets, numbers of blocks, schedules and top-p."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parkattn.park import ParkConfig
from parkattn.reuse import dense_prefix
from parklab.experiments import results
from parklab.experiments.evaluation import FLOORS
from parklab.experiments.methods_compared import Request, guidance_of, quality_cells, series_of
from parklab.experiments.results import CellRecords, Chosen, Label, Result
from parklab.experiments.runner import Lab
from parklab.store import Cell

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


def budget_cells(lab: Lab) -> list[Cell]:
    rows = [("park", {"compensate": True, **changes}) for changes in BUDGETS.values()]
    return quality_cells(lab, rows, densities=lab.evaluation.densities)


def _by_budget(request: Request) -> Label:
    if request["method"] in FLOORS:
        return (request["method"], "", guidance_of(request))
    spent = {name: value for name, value in request["changes"].items() if name in ("budget", "query_tile")}
    name = next(name for name, changes in BUDGETS.items() if changes == spent)
    return (name, f"{request['density']:g}", guidance_of(request))


def budget_result(gathered: CellRecords) -> Result:
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
    figure = results.trade_off(
        results.runs_by(gathered, lambda request: (guidance_of(request), *_by_budget(request)[:2]))
    )
    return Result(table.table, tuple(findings), figure)


def sensitivity_cells(kind: str, lab: Lab) -> list[Cell]:
    # what 1.0 stands for: as set for all methods, or the paper's
    changes = lab.evaluation.changes
    base = changes.get("query_clusters") or 128, changes.get("key_clusters") or PAPER_KEYS[kind]
    queries, keys = (
        ((QUERY_SHARES[0], 1.0, QUERY_SHARES[-1]), KEY_SHARES[kind][:1])
        if lab.evaluation.quick
        else (QUERY_SHARES, KEY_SHARES[kind])
    )
    chosen = [(share, 1.0) for share in queries] + [(1.0, share) for share in keys]
    counts = [
        {"query_clusters": max(1, round(q * base[0])), "key_clusters": max(1, round(k * base[1]))} for q, k in chosen
    ]
    return quality_cells(lab, [("park", each) for each in counts])


def _by_blocks(request: Request) -> Label:
    if request["method"] in FLOORS:
        return (request["method"], "", guidance_of(request))
    return (str(request["changes"]["query_clusters"]), str(request["changes"]["key_clusters"]), guidance_of(request))


def sensitivity_result(gathered: CellRecords) -> Result:
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
    return lambda request: (
        request["method"] not in FLOORS
        and all(request["changes"].get(name) == value for name, value in changes.items())
    )


def schedule_cells(lab: Lab) -> list[Cell]:
    steps = lab.base.steps or 50
    first = dense_prefix(ParkConfig(), steps)
    scaled = [sorted({first, *(round(step * steps / 50) for step in each[1:])}) for each in series_of(lab, SCHEDULES)]
    return quality_cells(lab, [("park", {"refresh_steps": [step for step in each if step < steps]}) for each in scaled])


def _by_schedule(request: Request) -> Label:
    if request["method"] in FLOORS:
        return (request["method"], guidance_of(request))
    return ("{" + ", ".join(map(str, request["changes"]["refresh_steps"])) + "}", guidance_of(request))


def schedule_result(gathered: CellRecords) -> Result:
    table = results.quality_table(gathered, ("refreshes at", "guidance"), _by_schedule)
    asked = sorted(
        (c.request["changes"]["refresh_steps"] for c in gathered.cells if c.request["method"] not in FLOORS), key=len
    )
    fewest, most = ({"refresh_steps": each} for each in (asked[0], asked[-1]))
    statement = f"{len(asked[-1])} refreshes instead of {len(asked[0])} lose nothing"
    return Result(table.table, tuple(results.psnr_findings(gathered, statement, _with(most), _with(fewest), tie=True)))


def curve_cells(lab: Lab) -> list[Cell]:
    return quality_cells(lab, [("park", {"top_p": value}) for value in series_of(lab, TOP_P)])


def _by_top_p(request: Request) -> Label:
    return (
        request["method"] if request["method"] in FLOORS else f"{request['changes']['top_p']:g}",
        guidance_of(request),
    )


def curve_result(gathered: CellRecords) -> Result:
    table = results.quality_table(gathered, ("top-p", "guidance"), _by_top_p)
    statement = f"PSNR falls as top-p goes from {TOP_P[-1]:g} to {TOP_P[0]:g}"
    found = results.psnr_findings(gathered, statement, _with({"top_p": TOP_P[-1]}), _with({"top_p": TOP_P[0]}))
    figure = results.trade_off(
        results.runs_by(gathered, lambda request: (guidance_of(request), "park", _by_top_p(request)[0]))
    )
    return Result(table.table, tuple(found), figure)
