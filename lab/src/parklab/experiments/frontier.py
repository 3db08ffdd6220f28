"""The frontier: how far a video is from the dense one, against the attention of the whole run and against seconds.

PARK's profiles and every method at its own settings, over prompts, seeds and guidance; from cells of this run, or from
lines that `python -m parklab.bench.frontier` wrote.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parkattn.park import ParkConfig
from parklab.bench.frontier import DENSE
from parklab.bench.frontier import FORMAT as LINE
from parklab.experiments import results
from parklab.experiments.evaluation import FLOORS
from parklab.experiments.methods_compared import floors_of, methods_of
from parklab.experiments.results import CellRecords, Result, machines_in, mean_of_all, setting_of, trade_off
from parklab.experiments.runner import Lab
from parklab.experiments.tables import Finding, Table, columns_of, interval
from parklab.store import Cell

PAPER = "paper"
Row = Mapping[str, Any]
Place = tuple[str, str]  # guidance and video
Runs = dict[tuple[Place, str], dict[tuple[str, int], Row]]  # by place and setting: by prompt and seed

COLUMNS = columns_of(
    "setting | guidance | video | runs | attention:3 | in two passes:3 | seconds:2 | speedup:2 | PSNR:2 | ±:2 | "
    "worst:2 | error:4 | ± error:4 | over paper, dB:2 | ± dB:2"
)


def frontier_cells(lab: Lab) -> list[Cell]:
    """None where lines of earlier runs are given. Without a profile PARK's settings are the paper's."""
    if any(line.get("format") == LINE for line in lab.lines):
        return []
    profiles = (name for name in ParkConfig.long_run_profiles() if name != PAPER)
    rows: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (*floors_of(lab), "park")]
    rows += [("park", {"profile": name}) for name in profiles]
    rows += [(name, {}) for name in methods_of(lab) if name != "park"]
    return [lab.quality_cell(request, method, **more) for request in lab.requests() for method, more in rows]


def frontier_result(gathered: CellRecords) -> Result:
    lines = [line for line in gathered.lines if line.get("format") == LINE]
    runs = _runs_of_lines(lines) if lines else _runs_of_cells(gathered)
    if not runs:
        return Result(None, note=f"not run: {gathered.why_not(gathered.cells)}")
    places = list(dict.fromkeys(place for place, _ in runs))
    rows = [_table_row(runs, place, setting) for place, setting in runs]
    shown = [i for i, column in enumerate(COLUMNS) if column.name != "video" or len({video for _, video in places}) > 1]
    shown = [i for i in shown if any(row[i] is not None for row in rows)]
    table = Table(tuple(COLUMNS[i] for i in shown), tuple(tuple(row[i] for i in shown) for row in rows))
    videos = {video for _, video in places}
    titles = {place: place[0] if len(videos) == 1 else ", ".join(filter(None, place)) for place in places}
    points: results.Runs = {
        (titles[place], name, name): list(found.values()) for (place, name), found in runs.items() if name not in FLOORS
    }
    note = f"{places[0][1]}." if len(videos) == 1 else ""
    if lines:
        note = f"From lines of earlier runs on {', '.join(machines_in(lines)) or 'no named machine'}. {note}".strip()
    return Result(table, tuple(_findings(runs, places)), trade_off(points, ("psnr", "error")), note)


def tabulate(lines: Sequence[Row], baseline: str = PAPER) -> list[dict[str, Any]]:
    """Lines of each setting and place as one row: means over prompts and seeds; the gain is on the baseline's own
    prompts.
    """
    groups: dict[tuple[Any, ...], dict[tuple[str, int], Row]] = {}
    for line in lines:
        place = tuple(line[name] for name in ("frames", "height", "width", "steps", "guidance", "setting"))
        groups.setdefault(place, {})[line["prompt"], line["seed"]] = line
    rows = []
    for place, found in groups.items():
        if place[-1] == DENSE:
            continue
        base, psnr = groups.get((*place[:-1], baseline), {}), [line["psnr"] for line in found.values()]
        ahead = [line["psnr"] - base[which]["psnr"] for which, line in found.items() if which in base]
        rows.append({
            "size": "x".join(map(str, place[:3])), "steps": place[3], "guidance": place[4], "setting": place[5],
            "runs": len(psnr), "cost": statistics.fmean(line["cost"] for line in found.values()),
            "psnr": statistics.fmean(psnr), "worst_psnr": min(psnr),
            "gain_db": statistics.fmean(ahead) if ahead else None, "config": list(found.values())[-1].get("config", {}),
        })  # fmt: skip
    return rows


def _runs_of_cells(gathered: CellRecords) -> Runs:
    runs: Runs = {}
    for cell in gathered.cells:
        asked = cell.request
        if cell.name not in gathered.records:
            continue
        found = runs.setdefault((_place(asked), setting_of(asked)), {})
        found[asked["prompt"], asked["seed"]] = gathered.records[cell.name]["row"]
    return runs


def _runs_of_lines(lines: Sequence[Row]) -> Runs:
    """Later lines of a setting, prompt and seed replace earlier ones."""
    key: Callable[[Row], tuple[Any, ...]] = lambda line: (_place(line), line["prompt"], line["seed"])  # noqa: E731
    dense = {key(line): line.get("seconds") for line in lines if line["setting"] == DENSE}
    runs: Runs = {}
    for line in lines:
        if line["setting"] != DENSE:
            row = {**line, "error": line.get("error"), "dense_seconds": dense.get(key(line))}
            runs.setdefault((_place(line), line["setting"]), {})[line["prompt"], line["seed"]] = row
    return runs


def _place(asked: Row) -> Place:
    scale, size = asked.get("guidance"), (asked["frames"], asked["height"], asked["width"])
    video = "the model's own size" if None in size else "x".join(map(str, size))
    return "" if scale is None else f"{scale:g}", f"{video}, {asked['steps'] or 'the model’s own'} steps"


def _table_row(runs: Runs, place: Place, setting: str) -> tuple[Any, ...]:
    found = list(runs[place, setting].values())
    values = {name: [row[name] for row in found if row.get(name) is not None] for name in ("psnr", "error")}
    mean = {name: mean_of_all(found, name) for name in ("cost", "cost_two_passes", "seconds")}
    dense = [row["dense_seconds"] for row in found if row.get("dense_seconds") is not None]
    ahead = [] if setting in (PAPER, *FLOORS) else _ahead(runs, place, setting, PAPER)
    return (
        setting, place[0], place[1], len(found), mean["cost"], mean["cost_two_passes"], mean["seconds"],
        statistics.fmean(dense) / mean["seconds"] if mean["seconds"] and len(dense) == len(found) else None,
        statistics.fmean(values["psnr"]), interval(values["psnr"]), min(values["psnr"]),
        statistics.fmean(values["error"]) if values["error"] else None, interval(values["error"]),
        statistics.fmean(ahead) if ahead else None, interval(ahead),
    )  # fmt: skip


def _ahead(runs: Runs, place: Place, upper: str, lower: str, part: str = "psnr") -> list[float]:
    """Difference on every prompt and seed that both have."""
    below = runs.get((place, lower), {})
    return [row[part] - below[which][part] for which, row in runs.get((place, upper), {}).items() if which in below]


def _findings(runs: Runs, places: Sequence[Place]) -> list[Finding]:
    found = []
    for place in places:
        at = f", guidance {place[0]}" if len({scale for scale, _ in places}) > 1 else ""
        at += f", {place[1]}" if len({video for _, video in places}) > 1 else ""
        for profile in (name for name in ParkConfig.long_run_profiles() if name != PAPER):
            dearer, better = _ahead(runs, place, profile, PAPER, "cost"), _ahead(runs, place, profile, PAPER)
            for statement, values, factor, unit in (
                (f"{profile} computes less attention than {PAPER}", dearer, -100.0, "% of all-dense"),
                (f"{profile} has a higher PSNR than {PAPER}", better, 1.0, "dB"),
            ):
                scaled = [factor * value for value in values]
                margin = statistics.fmean(scaled) if scaled else None
                found.append(Finding(statement + at, margin, unit, interval(scaled), "no prompt that both were run on"))
        found += [_undominated(runs, place, profile, at) for profile in ParkConfig.PROFILES if (place, profile) in runs]
    return found


def _undominated(runs: Runs, place: Place, profile: str, at: str) -> Finding:
    """Against the strongest of the other methods that compute no more attention."""
    here = {name: list(found.values()) for (where, name), found in runs.items() if where == place}
    cost = {name: statistics.fmean(row["cost"] for row in found) for name, found in here.items()}
    ours = (*ParkConfig.PROFILES, "park", DENSE)  # with settings of their own too, such as forecasts
    others = [name for name in cost if name.split()[0] not in ours and cost[name] <= cost[profile]]
    rivals = {name: ahead for name in others if (ahead := _ahead(runs, place, profile, name))}
    statement = f"no other method with as little attention as {profile} has its PSNR{at}"
    if not rivals:
        return Finding(statement, None, reason="no other method computes as little")
    nearest = min(rivals, key=lambda name: statistics.fmean(rivals[name]))
    margin = statistics.fmean(rivals[nearest])
    return Finding(f"{statement}; nearest {nearest}", margin, "dB", interval(rivals[nearest]))
