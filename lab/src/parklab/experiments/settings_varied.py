"""PARK with one of its settings changed: budgets, numbers of blocks, schedules and top-p."""

from __future__ import annotations

from typing import Any

from parkattn.park import ParkConfig
from parkattn.reuse import dense_prefix
from parklab.experiments.evaluation import FLOORS
from parklab.experiments.methods_compared import Request, densities_in, quality_cells, series_of
from parklab.experiments.results import CellRecords, Chosen, Label, Result, comparison
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
    spent = {name: value for name, value in request["changes"].items() if name in ("budget", "query_tile")}
    return next(name for name, changes in BUDGETS.items() if changes == spent), f"{request['density']:g}"


def budget_result(gathered: CellRecords) -> Result:
    def spent(name: str, density: float) -> Chosen:
        return lambda of: of["method"] not in FLOORS and _by_budget(of) == (name, f"{density:g}")

    pairs = [
        (f"{better} above {worse} at density {density:g}", spent(better, density), spent(worse, density))
        for density in densities_in(gathered)
        for better, worse in (("tiles", "row"), ("mass", "row"), ("error", "mass"), ("error and tiles", "error"))
    ]
    return comparison(gathered, ("budget by", "asked"), _by_budget, pairs, point=lambda label: label)


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
    return str(request["changes"]["query_clusters"]), str(request["changes"]["key_clusters"])


def sensitivity_result(gathered: CellRecords) -> Result:
    runs, pairs = _changes_in(gathered), []
    for side, other in (("query_clusters", "key_clusters"), ("key_clusters", "query_clusters")):
        usual = max({c[other] for c in runs}, key=lambda value: len({c[side] for c in runs if c[other] == value}))
        values = sorted({c[side] for c in runs if c[other] == usual})
        fewest, most = (_with({side: value, other: usual}) for value in (values[0], values[-1]))
        pairs.append((f"{values[-1]} instead of {values[0]} {side.split('_')[0]} blocks lose nothing", most, fewest))
    return comparison(gathered, ("N_Q", "N_K"), _by_blocks, pairs, tie=True)


def _changes_in(gathered: CellRecords) -> list[dict[str, Any]]:
    return [cell.request["changes"] for cell in gathered.cells if cell.request["method"] not in FLOORS]


def _with(changes: dict[str, Any]) -> Chosen:
    return lambda of: of["method"] not in FLOORS and all(of["changes"].get(name) == changes[name] for name in changes)


def schedule_cells(lab: Lab) -> list[Cell]:
    steps = lab.base.steps or 50
    first = dense_prefix(ParkConfig(), steps)
    scaled = [sorted({first, *(round(step * steps / 50) for step in each[1:])}) for each in series_of(lab, SCHEDULES)]
    return quality_cells(lab, [("park", {"refresh_steps": [step for step in each if step < steps]}) for each in scaled])


def _by_schedule(request: Request) -> Label:
    return ("{" + ", ".join(map(str, request["changes"]["refresh_steps"])) + "}",)


def schedule_result(gathered: CellRecords) -> Result:
    asked = sorted((changes["refresh_steps"] for changes in _changes_in(gathered)), key=len)
    fewest, most = (_with({"refresh_steps": each}) for each in (asked[0], asked[-1]))
    pair = f"{len(asked[-1])} refreshes instead of {len(asked[0])} lose nothing", most, fewest
    return comparison(gathered, ("refreshes at",), _by_schedule, [pair], tie=True)


def curve_cells(lab: Lab) -> list[Cell]:
    return quality_cells(lab, [("park", {"top_p": value}) for value in series_of(lab, TOP_P)])


def _by_top_p(request: Request) -> Label:
    return (f"{request['changes']['top_p']:g}",)


def curve_result(gathered: CellRecords) -> Result:
    least, most = TOP_P[0], TOP_P[-1]
    pair = f"PSNR falls as top-p goes from {most:g} to {least:g}", _with({"top_p": most}), _with({"top_p": least})
    return comparison(gathered, ("top-p",), _by_top_p, [pair], point=lambda label: ("park", *label))
