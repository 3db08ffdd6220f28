"""Tables of videos by many methods for tools/tables.py: written from records, as all of them."""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from parkattn.methods import METHODS
from parklab.experiments.calibration import MATCHED
from parklab.experiments.catalogue import EXPERIMENTS
from parklab.experiments.costs import compare_at_costs
from parklab.experiments.evaluation import FLOOR
from parklab.experiments.frontier import tabulate
from parklab.experiments.methods_compared import is_method
from parklab.experiments.results import CellRecords, on_curve, psnr_findings_at_density
from parklab.experiments.tables import grouped, mean, page_table, within
from parklab.store import Cell

sys.path.insert(0, str(Path(__file__).parent))
from call_tables import TIME_HEADS, time_columns
from of_models import of_models
from records import RESULTS, SIZES, Columns, Record, cells, frontier_lines, lab, published, table_of

PROFILES = ("paper", "quality", "fast")
RIVALS = ("svg2", "svg-ear", "sparsepr", "sol")
RELATIVES = ("mc-sparse", "chipmunk")  # beside them where they were run at densities
TOKENS = {"gpu_75600": "75,600", "gpu_7168": "7,168"}
DENSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
H200_DENSITIES = {1.0: (0.1, 0.25, 0.5), 5.0: (0.25,)}
COST_DENSITIES = (0.1, 0.2, 0.25, 0.35, 0.5)  # of the H200's runs at equal cost
SAME_SCHEDULE = {"dense_layers": [0], "dense_steps": 10}  # of the runs in gpu_75600_same_schedule
COSTS_ARE_ONE = 1e-3
NEAR = 0.03  # of all-dense: as in park reproduce matched_costs
QUALITY_HEADS = "videos | attention computed | PSNR | worst video | SSIM | error | recall"
MATCHED_HEADS = f"density asked | method | density | {QUALITY_HEADS}"
TIMED_AS = {FLOOR: "dense"}  # rows of a table: the method that was timed


Place = Callable[[Record], Any]  # of a cell's request; None: it has no place in the table


@published
@of_models(heads=2)
def own_settings_on_h200() -> str:
    """Every method at its authors' settings, and PARK's profiles, on all prompts that each was run on."""

    def own(asked: Record) -> Any:
        return (asked["guidance"], asked["method"]) if asked["density"] is None and not asked["changes"] else None

    found = _rows_by(own, _all_cells("gpu_75600"))
    for scale in (1.0, 5.0):
        for name, runs in profile_rows("gpu_75600", scale).items():
            if name != "paper" and runs:  # paper is park at its own settings
                found[scale, f"PARK, {name}"] = list(runs.values())
    rows = [
        (f"{scale:g}", name, *_quality(rows), *time_columns("gpu_75600", TIMED_AS.get(name, name), None))
        for (scale, name), rows in sorted(found.items(), key=lambda item: (item[0][0], mean(item[1], "cost")))
    ]
    return page_table(f"guidance | method | {QUALITY_HEADS} | {TIME_HEADS}", rows)


@published
@of_models(heads=3)
def matched_on_h200() -> str:
    """Every method at a density that is asked for, at each guidance; which it cannot have are left out."""
    rows = [
        (f"{scale:g}", *_matched(density, name, rows), *time_columns("gpu_75600", name, density))
        for (scale, density, name), rows in _by_density("gpu_75600").items()
    ]
    return page_table(f"guidance | {MATCHED_HEADS} | {TIME_HEADS}", rows)


@published
@of_models(heads=2)
def same_schedule_on_h200() -> str:
    """As above, with one schedule for every method, and how far PARK is above it on the same prompts."""
    margins = _park_above("gpu_75600_same_schedule", SAME_SCHEDULE)
    rows = [
        (*_matched(density, name, rows), margins.get((density, name), ""))
        for (_, density, name), rows in _by_density("gpu_75600_same_schedule").items()
    ]
    return page_table(f"{MATCHED_HEADS} | PARK above it", rows)


def _by_density(folder: str) -> dict[tuple[float, float, str], list[Record]]:
    """Rows by guidance, density and method, in the order of a table."""

    def at(asked: Record) -> Any:
        matched = asked["density"] in H200_DENSITIES.get(asked["guidance"], ()) and "profile" not in asked
        return (asked["guidance"], asked["density"], asked["method"]) if matched else None

    order = list(METHODS)
    found = _rows_by(at, _all_cells(folder))
    return dict(sorted(found.items(), key=lambda item: (*item[0][:2], order.index(item[0][2]))))


def _matched(density: float, name: str, rows: Sequence[Record]) -> tuple[str, ...]:
    return f"{density:g}", name, f"{mean(rows, 'density'):.3f}", *_quality(rows)


def _park_above(folder: str, changes: Record) -> dict[tuple[float, str], str]:
    """What `park reproduce matched_densities --draw` finds at guidance 1: PARK at the density that the other really
    has, on the same prompts.
    """
    records = {key: cell for key, cell in cells(folder, "quality").items() if _matches(cell["request"], changes)}
    ours = [Cell(name=key, format=cell["format"], request=cell["request"]) for key, cell in records.items()]
    gathered, found = CellRecords(ours, records, {}), {}
    for density, name in [(density, name) for _, density, name in _by_density(folder) if name != "park"]:
        (finding,) = psnr_findings_at_density(
            gathered, name, is_method("park"), is_method(name, density=density), near=MATCHED
        )
        if finding.margin is not None and finding.spread is not None:
            found[density, name] = f"{finding.margin:+.1f} ± {finding.spread:.1f} dB"
    return found


def _matches(request: Record, changes: Record) -> bool:
    asked = request["guidance"], request["changes"], "profile" in request
    return asked == (1.0, changes, False) and request["density"] in H200_DENSITIES[1.0]


@published
@of_models(heads=2)
def blocks_on_h200() -> str:
    return _changed("query blocks | key blocks", ("query_clusters", "key_clusters"))


@published
@of_models(heads=1)
def schedules_on_h200() -> str:
    return _changed("plans are rebuilt at steps", ("refresh_steps",))


def _changed(heads: str, settings: tuple[str, ...]) -> str:
    """Runs of PARK that differ in these settings."""

    def values(asked: Record) -> Any:
        found = [asked["changes"].get(name) for name in settings]
        alone = set(asked["changes"]) == set(settings)
        return tuple(tuple(value) if isinstance(value, list) else value for value in found) if alone else None

    found = _rows_by(values, _all_cells("gpu_75600"))
    rows = [
        (*(", ".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in place), *_quality(rows))
        for place, rows in sorted(found.items(), key=lambda item: (str(item[0]).count(","), item[0]))
    ]
    return page_table(f"{heads} | {QUALITY_HEADS}", rows)


def _quality(rows: Sequence[Record]) -> tuple[str, ...]:
    psnr = [row["psnr"] for row in rows]
    more = {name: [row[name] for row in rows if row.get(name) is not None] for name in ("ssim", "error", "recall")}
    return (
        str(len(rows)), f"{mean(rows, 'cost'):.1%}", f"{statistics.fmean(psnr):.1f}{within(psnr, 1)} dB",
        f"{min(psnr):.1f} dB", *(f"{statistics.fmean(values):.4f}" if values else "" for values in more.values()),
    )  # fmt: skip


@published
@of_models(heads=2)
def profiles_above_methods() -> str:
    """PSNR of a profile less that of a method at the same cost on the same prompts, on lines between the method's
    runs.
    """
    rows, names = [], (*RIVALS, *dict.fromkeys(name for folder in TOKENS for name in relatives_in(folder)))
    for folder, tokens in TOKENS.items():
        found = _rows_by(lambda asked: (asked["method"], asked["prompt"]), _cells(folder))
        curves = {place: [(row["cost"], row["psnr"]) for row in rows] for place, rows in found.items()}
        for setting, runs in profiles_beside_methods(folder, {prompt for _, prompt in curves}).items():
            if setting != "paper" and runs:
                run_on = (all((name, prompt) in curves for prompt in runs) for name in names)
                margins = [_margin(runs, curves, name) if was else "" for name, was in zip(names, run_on, strict=True)]
                rows.append((tokens, setting, str(len(runs)), f"{mean(runs.values(), 'cost'):.1%}", *margins))
    above = " | ".join(f"above {name}" for name in names)
    return page_table(f"tokens | profile | videos | attention computed | {above}", rows)


@published
@of_models(heads=3)
def short_runs_at_equal_cost() -> str:
    """Profiles in runs of few steps beside the paper's settings with a top_p that costs about as much."""
    found = [
        row
        for name in ("frontier_equal_cost", "frontier")
        for row in tabulate(frontier_lines(RESULTS / f"{name}.jsonl"))
    ]
    rows = [row for row in found if row["size"] == "81x400x576" and row["steps"] < 50]
    columns: Columns = {
        "steps": "{steps}", "guidance": "{guidance:g}", "setting": "{setting}", "videos": "{runs}",
        "attention computed": "{cost:.1%}", "PSNR": "{psnr:.1f} dB", "worst video": "{worst_psnr:.1f} dB",
    }  # fmt: skip
    return table_of(columns, sorted(rows, key=lambda row: (-row["steps"], row["guidance"], row["cost"])))


@published
@of_models(heads=1, ranked=())
def matched_2k() -> str:
    """PSNR at equal density of the sparse steps, means over the prompts;
    empty where a method cannot have the density.
    """

    def at(asked: Record) -> Any:
        matched = asked["density"] in DENSITIES and "profile" not in asked
        return (asked["method"], asked["guidance"], asked["density"]) if matched else None

    found = _rows_by(at, _all_cells("matched_2k"))
    columns = list(itertools.product(sorted({scale for _, scale, _ in found}), DENSITIES))
    rows = [
        (name, *(f"{mean(found[name, *at], 'psnr'):.1f}" if (name, *at) in found else "" for at in columns))
        for name in METHODS if any(which == name for which, _, _ in found)
    ]  # fmt: skip
    head = [
        f"{density:g}" if density != DENSITIES[0] else f"guidance {scale:g}: {density:g}" for scale, density in columns
    ]
    return page_table(" | ".join(["method", *head]), rows)


@published
@functools.cache
def costs_2k() -> str:
    return _costs("matched_2k", guidances=(1.0, 5.0), densities=DENSITIES, device="cpu")


@published
@functools.cache
def costs_7k() -> str:
    return _costs("gpu_7168", guidances=(1.0,), densities=COST_DENSITIES)


def _costs(folder: str, **asked: Any) -> str:
    """What `park reproduce matched_costs --draw` finds of the cells: a profile above each method at every cost."""
    relatives = relatives_in(folder)
    drawn = lab(folder, **asked, **({"methods": (*RIVALS, *relatives)} if relatives else {}))
    wanted = EXPERIMENTS["matched_costs"].cells(drawn)
    records = drawn.finished(wanted)
    reasons = drawn.unreachable([cell for cell in wanted if cell.name not in records])
    rows: dict[tuple[float, float], dict[str, dict[str, str]]] = {}  # by guidance, cost and profile
    for profile, method, cost, scale, finding in compare_at_costs(
        CellRecords(wanted, records, reasons, drawn.load_frames, (), drawn.cost)
    ):
        if finding.margin is not None:
            spread = "" if finding.spread is None else f" ± {finding.spread:.1f}"
            rows.setdefault((scale or 0.0, cost), {}).setdefault(profile, {})[method] = f"{finding.margin:+.1f}{spread}"
    made = [cell for cell in wanted if "profile" in cell.request and cell.name in records]

    def own(scale: float, profile: str, cost: float) -> str:
        there = [
            cell for cell in made if (cell.request["guidance"] or 0.0, cell.request["profile"]) == (scale, profile)
        ]
        near = [cell for cell in there if abs(drawn.cost(cell.request) - cost) < COSTS_ARE_ONE]
        return f"{mean((records[cell.name]['row'] for cell in near), 'cost'):.3f}"

    names = ("paper", *RIVALS, *relatives)
    lines = []
    for (scale, cost), found in sorted(rows.items()):
        for place, told in enumerate(found.values()):
            if told not in list(found.values())[:place]:
                same = [name for name, row in found.items() if row == told]
                margins = (told.get(name, "") for name in names)
                lines.append((f"{scale:g}", f"{cost:.3g}", own(scale, same[0], cost), ", ".join(same), *margins))
    return page_table(
        f"guidance | cost asked | cost | profile | {' | '.join(f'above {name}, dB' for name in names)}", lines
    )


def _margin(runs: dict[str, Record], curves: dict[tuple[str, str], list[tuple[float, float]]], name: str) -> str:
    """Where a profile costs less than every run of a method: how much better it is than the cheapest of them."""
    ahead = [
        row["psnr"] - y
        for prompt, row in runs.items()
        if (y := on_curve(curves[name, prompt], row["cost"], NEAR)) is not None
    ]
    if 2 * len(ahead) >= len(runs):
        return f"{statistics.fmean(ahead):+.1f}{within(ahead, 1)} dB"
    cheapest, dearest = ([end(curves[name, prompt]) for prompt in runs] for end in (min, max))
    if any(cost < row["cost"] for (cost, _), row in zip(cheapest, runs.values(), strict=True)):
        return f"not between its runs, {min(cheapest)[0]:.1%} to {max(dearest)[0]:.1%}"
    apart = [row["psnr"] - psnr for row, (_, psnr) in zip(runs.values(), cheapest, strict=True)]
    at = statistics.fmean(cost for cost, _ in cheapest)
    return f"{statistics.fmean(apart):+.1f}{within(apart, 1)} dB, its cheapest run computes {at:.1%}"


def relatives_in(folder: str) -> tuple[str, ...]:
    """Those that have runs at densities among the cells of a folder."""
    asked = [cell["request"] for cell in _all_cells(folder)]
    run = {each["method"] for each in asked if each["density"] is not None and each["guidance"] == 1.0}
    return tuple(name for name in RELATIVES if name in run)


def _all_cells(folder: str) -> list[Record]:
    return list(cells(folder, "quality").values())


def _rows_by(place: Place, chosen: Iterable[Record]) -> dict[Any, list[Record]]:
    """Rows of cells by the place of their request."""
    found = grouped(chosen, lambda cell: place(cell["request"]))
    return {at: [cell["row"] for cell in group] for at, group in found.items() if at is not None}


def _cells(folder: str) -> list[Record]:
    """Of guidance 1, on the prompts that every rival was run on at all densities; those of profiles at other budgets
    are left out.
    """
    found = [
        cell for cell in _all_cells(folder) if cell["request"]["guidance"] == 1.0 and "profile" not in cell["request"]
    ]
    last = [cell["request"] for cell in found if cell["request"]["density"] == DENSITIES[-1]]
    run_on = [{asked["prompt"] for asked in last if asked["method"] == name} for name in RIVALS]
    prompts = set.intersection(*run_on)
    return [cell for cell in found if cell["request"]["prompt"] in prompts]


def method_rows(folder: str, prompts: set[str]) -> dict[tuple[str, float], list[Record]]:
    """By method and the density that was asked for, 0 where it is the method's own."""
    chosen = (cell for cell in _cells(folder) if cell["request"]["prompt"] in prompts)
    return _rows_by(lambda asked: (asked["method"], asked["density"] or 0.0), chosen)


def profile_curves(folder: str) -> tuple[dict[tuple[str, float], list[Record]], set[str]]:
    """Runs of profiles at other budgets, by profile and density, on the prompts that have all of them; or none, and all
    prompts.
    """
    found = [cell for cell in _all_cells(folder) if "profile" in cell["request"]]
    budgets = {(cell["request"]["profile"], cell["request"]["density"]) for cell in found}
    count = Counter(cell["request"]["prompt"] for cell in found)
    prompts = {prompt for prompt, runs in count.items() if runs == len(budgets)}
    chosen = (cell for cell in found if cell["request"]["prompt"] in prompts)
    groups = _rows_by(lambda asked: (asked["profile"], asked["density"]), chosen)
    return groups, prompts or {cell["request"]["prompt"] for cell in _cells(folder)}


def profile_rows(folder: str, guidance: float = 1.0) -> dict[str, dict[str, Record]]:
    """Runs of each profile by prompt: 50 steps, the size of a folder."""
    asked = {
        **dict(zip(("frames", "height", "width"), SIZES[folder], strict=True)),
        "steps": 50,
        "guidance": guidance,
    }
    found: dict[str, dict[str, Record]] = {name: {} for name in PROFILES}
    for line in frontier_lines(RESULTS / "frontier.jsonl"):
        if all(line[name] == value for name, value in asked.items()) and line["setting"] in PROFILES:
            found[line["setting"]][line["prompt"]] = line
    return found


def profiles_beside_methods(folder: str, prompts: set[str]) -> dict[str, dict[str, Record]]:
    """Of guidance 1, with their own budgets, on some prompts."""
    return {
        name: {prompt: row for prompt, row in runs.items() if prompt in prompts}
        for name, runs in profile_rows(folder).items()
    }
