"""From records of videos to tables and findings: pure functions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parklab.experiments.evaluation import FLOOR, FLOORS
from parklab.experiments.quality import ALWAYS
from parklab.experiments.tables import Column, Finding, Table, columns_of, grouped, interval, mean, without_empty
from parklab.metrics.measures import MEASURES
from parklab.store import Cell, Record
from parklab.studio.video import Frames

NOT_RUN = "not run"
Label = tuple[str, ...]


@dataclass(frozen=True)
class Dots:
    """A figure of single values: panels of (title, lower or higher is better), each with names and values."""

    panels: tuple[tuple[str, tuple[str, ...], tuple[float, ...]], ...]


@dataclass(frozen=True)
class Series:
    """Points of one name, (x, y, half the interval of y or None, label), joined by a line in the order of x."""

    name: str
    points: tuple[tuple[float, float, float | None, str], ...]


@dataclass(frozen=True)
class Panel:
    x: str
    y: str
    series: tuple[Series, ...]
    title: str = ""
    logarithmic: bool = False  # both axes


@dataclass(frozen=True)
class Plot:
    """A figure of rows of panels, with one legend: a name has one colour in all of them."""

    rows: tuple[tuple[Panel, ...], ...]


@dataclass(frozen=True)
class Sheet:
    """A figure of frames: one row per method, each of frames [n, height, width, 3]."""

    rows: tuple[tuple[str, Frames], ...]


Figure = Dots | Plot | Sheet


@dataclass(frozen=True)
class Result:
    table: Table | None
    findings: tuple[Finding, ...] = ()
    figure: Figure | None = None
    note: str = ""


@dataclass(frozen=True)
class CellRecords:
    """What was asked for, what is there, and why the rest is not."""

    cells: Sequence[Cell]
    records: Mapping[str, Record]
    failures: Mapping[str, str]
    load: Callable[[Record], Frames] | None = None  # frames of a record that has them
    lines: Sequence[Mapping[str, Any]] = ()  # of earlier measurements
    cost: Callable[[Mapping[str, Any]], float] | None = None  # of a run, by the density that a request asks for
    timed: Sequence[Record] = ()  # records among which are times of methods, made by this experiment or before

    def of(self, cells: Iterable[Cell]) -> list[Record]:
        return [self.records[cell.name] for cell in cells if cell.name in self.records]

    def times_of(self, request: Mapping[str, Any]) -> Mapping[str, float]:
        """Of the method, density and settings of a quality cell's request; empty where they were not taken."""
        wanted = {"method": "dense" if request["method"] == FLOOR else request["method"], "density": request["density"]}
        wanted["changes"] = request["changes"]
        found = (
            r["times"]
            for r in self.timed
            if "times" in r and all(r["request"][name] == value for name, value in wanted.items())
        )
        return next(found, {}) if "profile" not in request else {}

    def why_not(self, cells: Iterable[Cell]) -> str:
        reasons = [self.failures[cell.name] for cell in cells if cell.name in self.failures]
        return reasons[0] if reasons else "left to another shard, or not finished yet"


def frame_sheet(gathered: CellRecords, needs: str = "") -> Result:
    """needs: what is missing where nothing was asked for."""
    if not gathered.cells:
        return Result(None, note=f"{NOT_RUN}: {needs}")
    assert gathered.load is not None
    found = [(record["request"], record["shown"], gathered.load(record)) for record in gathered.of(gathered.cells)]
    if not found:
        return nothing_run(gathered)
    rows = tuple(
        (asked["method"], ", ".join(map(str, shown)), f"{asked['prompt']}, seed {asked['seed']}")
        for asked, shown, _ in found
    )
    table = Table(columns_of("method | frames | video"), rows)
    return Result(table, figure=Sheet(tuple((asked["method"], frames) for asked, _, frames in found)))


def machines_in(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """GPUs that something was measured on, or CPUs."""
    facts = (record.get("environment") or {} for record in records)
    return [str(name) for name in dict.fromkeys(each.get("gpu") or each.get("cpu") for each in facts) if name]


def setting_of(request: Mapping[str, Any]) -> str:
    """The profile or method of a quality cell; PARK without a profile has the paper's settings."""
    own: str = "paper" if request["method"] == "park" else request["method"]
    return request.get("profile") or own


def nothing_run(gathered: CellRecords) -> Result:
    return Result(None, note=f"{NOT_RUN}: {gathered.why_not(gathered.cells)}")


# quality


OTHERS = [name for name in MEASURES if name != ALWAYS]
QUALITY = (
    *columns_of("runs | PSNR:2 | ±:2"), *(Column(MEASURES[name].title, MEASURES[name].digits) for name in OTHERS),
    *columns_of(
        "error:4 | density:3 | of all steps:3 | recall:3 | plan, ms:2 | attention, ms:2 | seconds:2 | speedup:2 | note"
    ),
)  # fmt: skip

MEANS = (*OTHERS, "error", "density", "density_all_steps", "recall")


def quality_table(gathered: CellRecords, heads: Label, label: Callable[[Mapping[str, Any]], Label]) -> Result:
    """One row per label of a cell's request, in the order of the cells;
    ± is half the 95 % interval of the mean PSNR.
    """
    rows: list[tuple[Any, ...]] = []
    for name, cells in grouped(gathered.cells, lambda cell: label(cell.request)).items():
        found = [record["row"] for record in gathered.of(cells)]
        if not found:
            rows.append((*name, 0, *(None,) * (len(QUALITY) - 2), f"{NOT_RUN}: {gathered.why_not(cells)}"))
            continue
        psnr = [row["psnr"] for row in found]
        seconds, dense = (mean_of_all(found, part) for part in ("seconds", "dense_seconds"))
        missing, times = len(cells) - len(found), gathered.times_of(cells[0].request)
        notes = [
            f"{missing} of {len(cells)} {NOT_RUN}" if missing else "",
            "equal frames" if not any(row["error"] for row in found) else "",
        ]
        rows.append((
            *name, len(found), statistics.fmean(psnr), interval(psnr), *(_mean_of(found, part) for part in MEANS),
            times.get("later_plan_ms"), times.get("attention_ms"), seconds,
            dense / seconds if seconds and dense else None, "; ".join(filter(None, notes)),
        ))  # fmt: skip
    return Result(without_empty(Table((*map(Column, heads), *QUALITY), tuple(rows)), len(heads)))


Chosen = Callable[[Mapping[str, Any]], bool]  # of requests
Pair = tuple[str, Chosen, Chosen]  # a statement, the requests said to be above, and those below


def comparison(
    gathered: CellRecords,
    heads: Label,
    label: Callable[[Mapping[str, Any]], Label],
    pairs: Iterable[Pair],
    *,
    tie: bool = False,
    near: float | None = None,
    point: Callable[[Label], Label] | None = None,
) -> Result:
    """A row per label and guidance, and each pair's finding at every guidance.

    label: of a request that is no floor. near: pairs are compared at the density that the lower one has. point: series
    and name of a label on a trade-off.
    """

    def place(request: Mapping[str, Any]) -> Label:
        floor = request["method"] in FLOORS
        return (*((request["method"], *("",) * (len(heads) - 1)) if floor else label(request)), guidance_of(request))

    table = quality_table(gathered, (*heads, "guidance"), place)
    findings = tuple(
        itertools.chain.from_iterable(psnr_findings(gathered, *pair, tie=tie, near=near) for pair in pairs)
    )
    if point is None:
        return Result(table.table, findings)
    return Result(table.table, findings, trade_off(runs_by(gathered, lambda of: (guidance_of(of), *point(label(of))))))


def guidance_of(request: Mapping[str, Any]) -> str:
    return "" if request["guidance"] is None else f"{request['guidance']:g}"


def psnr_findings(
    gathered: CellRecords, statement: str, upper: Chosen, lower: Chosen, *, tie: bool = False, near: float | None = None
) -> list[Finding]:
    """The same statement at every guidance: videos of one prompt at two of them are no independent samples."""
    if near is not None:
        return psnr_findings_at_density(gathered, statement, upper, lower, near=near)
    return [
        psnr_finding(gathered, told, up, low, tie=tie)
        for told, up, low in _at_scales(gathered, statement, upper, lower)
    ]


def _at_scales(gathered: CellRecords, statement: str, *sides: Chosen) -> Iterator[tuple[Any, ...]]:
    """A statement and the sides of it at every guidance."""
    scales = list(dict.fromkeys(cell.request["guidance"] for cell in gathered.cells))
    for scale in scales:
        place = f", guidance {scale:g}" if len(scales) > 1 else ""
        at = [lambda request, side=side, scale=scale: request["guidance"] == scale and side(request) for side in sides]
        yield statement + place, *at


def psnr_finding(gathered: CellRecords, statement: str, upper: Chosen, lower: Chosen, *, tie: bool = False) -> Finding:
    """Mean over prompts and seeds of the difference in PSNR, on those that both have."""
    sides: list[dict[tuple[Any, ...], Mapping[str, Any]]] = []
    for chosen in (upper, lower):
        cells = [cell for cell in gathered.cells if chosen(cell.request)]
        sides.append({_place(record["request"]): record["row"] for record in gathered.of(cells)})
        if not sides[-1]:
            return Finding(statement, None, reason=gathered.why_not(cells))
    both = [(row, sides[1][place]) for place, row in sides[0].items() if place in sides[1]]
    if not both:
        return Finding(statement, None, reason="no prompt that both were run on")
    ahead = [one["psnr"] - other["psnr"] for one, other in both]
    return Finding(statement, statistics.fmean(ahead), "dB", interval(ahead), tie=tie)


def psnr_findings_at_density(
    gathered: CellRecords, statement: str, upper: Chosen, lower: Chosen, *, near: float
) -> list[Finding]:
    """The same at the density that the lower one has there, whatever was asked for, at every guidance; all runs of the
    upper one are given.
    """
    findings = [
        psnr_above_line(gathered, told, low, up, "density", near=near)
        for told, up, low in _at_scales(gathered, statement, upper, lower)
    ]
    return [found if found.margin is None else replace(found, margin=-found.margin) for found in findings]


def psnr_above_line(
    gathered: CellRecords, statement: str, ones: Chosen, line: Chosen, by: str, *, near: float
) -> Finding:
    """How far runs lie above the line through the runs of another method, at the cost or density (`by`) that each of
    the former has.

    Between two runs next to that place a method has what lies on the straight line, beyond its first or last one what
    that has if it is no further away than `near`. Fewer than half of the prompts say nothing.
    """
    cells = [[cell for cell in gathered.cells if chosen(cell.request)] for chosen in (ones, line)]
    sides = [gathered.of(each) for each in cells]
    for side, asked in zip(sides, cells, strict=True):
        if not side:
            return Finding(statement, None, reason=gathered.why_not(asked))
    curves: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for record in sides[1]:
        curves.setdefault(_place(record["request"]), []).append((record["row"][by], record["row"]["psnr"]))
    rows = [(record["row"], curves[place]) for record in sides[0] if (place := _place(record["request"])) in curves]
    if not rows:
        return Finding(statement, None, reason="no prompt that both were run on")
    ahead = [row["psnr"] - other for row, curve in rows if (other := on_curve(curve, row[by], near)) is not None]
    if 2 * len(ahead) < len(rows):
        have = sorted(place for _, curve in rows for place, _ in curve)
        mean = statistics.fmean(row[by] for row, _ in rows)
        what = {"cost": f"costs {mean:.3f} of all-dense", "density": f"has a density of {mean:.3f}"}[by]
        return Finding(statement, None, reason=f"{what}, and the other {have[0]:.3f} to {have[-1]:.3f}")
    return Finding(statement, statistics.fmean(ahead), "dB", interval(ahead))


def on_curve(points: Sequence[tuple[float, float]], x: float, near: float) -> float | None:
    """y at x, on straight lines between the points; beyond their ends that of the end, None where it is not near."""
    below, above = [point for point in points if point[0] <= x], [point for point in points if point[0] >= x]
    if not below or not above:
        end = min(points, key=lambda point: abs(point[0] - x))
        return end[1] if abs(end[0] - x) <= near else None
    (x0, y0), (x1, y1) = max(below), min(above)
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


TRADED = {"psnr": "PSNR against dense, dB", "error": "relative error of frames"}
AXES = {"cost": "attention, share of all-dense", "seconds": "seconds of a video"}
Runs = Mapping[Label, Sequence[Mapping[str, Any]]]  # (guidance, series, label): rows


def trade_off(runs: Runs, measures: Iterable[str] = ("psnr",)) -> Plot | None:
    """A row of panels for each guidance: every measure against the cost of attention and against seconds."""
    rows = []
    for scale in dict.fromkeys(guidance for guidance, _, _ in runs):
        here = {name: found for name, found in runs.items() if name[0] == scale and found}
        panels = []
        for measure, (axis, title) in itertools.product(measures, AXES.items()):
            if any(row.get(part) is None for found in here.values() for row in found for part in (measure, axis)):
                continue
            points: dict[str, list[tuple[float, float, float | None, str]]] = {}
            for (_, name, label), found in here.items():
                values = [row[measure] for row in found]
                points.setdefault(name, []).append(
                    (mean(found, axis), statistics.fmean(values), interval(values), label)
                )
            series = tuple(Series(name, tuple(sorted(each))) for name, each in points.items())
            panels.append(Panel(title, TRADED[measure], series, f"guidance {scale}" if scale else ""))
        if panels:
            rows.append(tuple(panels))
    return Plot(tuple(rows)) if rows else None


def runs_by(gathered: CellRecords, label: Callable[[Mapping[str, Any]], Label]) -> Runs:
    """Rows of what was run, without the floors, which have no place on a trade-off."""
    cells = (cell for cell in gathered.cells if cell.request["method"] not in FLOORS)
    groups = grouped(cells, lambda cell: label(cell.request))
    return {name: [record["row"] for record in gathered.of(group)] for name, group in groups.items()}


def _mean_of(found: Sequence[Mapping[str, Any]], part: str) -> float | None:
    values = [row[part] for row in found if row.get(part) is not None]
    return statistics.fmean(values) if values else None


def mean_of_all(found: Sequence[Mapping[str, Any]], part: str) -> float | None:
    """None where one is missing: seconds of some runs would stand for all."""
    values = [row[part] for row in found if row.get(part) is not None]
    return statistics.fmean(values) if len(values) == len(found) else None


def _place(request: Mapping[str, Any]) -> tuple[Any, ...]:
    return request["prompt"], request["seed"], request["guidance"]
