"""PSNR against the seconds of a whole run: videos of the shipped model, seconds of the models that people run.

Videos are lines of `python -m parklab.bench.frontier` and quality cells of campaign files; nothing is made here.
Seconds are composed of measured forwards (`studio.gain`), with the steps of each phase that the small model's run had:

    dense attention          compiled blocks; a step cache and fewer steps leave forwards out
    PARK                     forwards of the profile, by phase
    other sparse methods     estimated in their favour: our kernel at their cost, plans free
    float8 linears           less what they save in each forward
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from parkattn.models import SIZES
from parkattn.park import ParkConfig
from parkattn.settings import PRECISIONS
from parklab.bench.frontier import DENSE, Setting
from parklab.bench.frontier import FORMAT as LINE
from parklab.experiments.evaluation import FLOORS, named_cell
from parklab.experiments.results import NOT_RUN, CellRecords, Panel, Plot, Result, Series, on_curve
from parklab.experiments.runner import Lab
from parklab.experiments.tables import Finding, Table, columns_of, interval
from parklab.store import Cell
from parklab.studio.gain import FORECAST, measured_forwards, seconds_of_phases, timed_beside

Row = Mapping[str, Any]
Place = tuple[str, int]  # of a video: prompt and seed
Video = tuple[int, int, int, int]  # frames, height, width, steps
FASTEST = "compiled"  # of the ways to run dense attention without parkattn
FLOAT8 = "float8 linears"
ROUNDED = "{} attention"  # of a precision: of a run whose videos were not made in it
ONE_FORWARD = 0.02  # of 50 steps: beyond the ends of a curve
# whose seconds: guidance of the small model's videos, and forwards in a step
MODELS = {"wan2.1-14b": (5.0, 2), "wan2.1-1.3b": (5.0, 2), "hunyuanvideo": (1.0, 1)}
TITLES = {"wan2.1-14b": "Wan2.1-14B", "wan2.1-1.3b": "Wan2.1-1.3B", "hunyuanvideo": "HunyuanVideo"}
DRAWN = ("wan2.1-14b", "hunyuanvideo")  # one of each guidance
CACHES = {"first-block": "FirstBlockCache", "mag": "MagCache", "taylorseer": "TaylorSeer"}
FEWER, DENSE_FORECAST, METHODS_ALONE = "dense, fewer steps", "dense, forecasts", "sparse methods"
COLUMNS = columns_of(
    "model | video | run | videos | PSNR:2 | ±:2 | worst:2 | forwards:3 | attention:3 | seconds:0 | over stock:2 | "
    "over compiled:2 | seconds are"
)


@dataclass(frozen=True)
class Run:
    """One row: the small model's videos by prompt and seed, and the seconds of a whole run of a model."""

    model: str
    video: Video  # of the small model
    name: str
    family: str
    videos: Mapping[Place, Row]
    seconds: float | None = None
    how: str = ""  # the seconds are: measured, estimated, or why there are none
    dense: Mapping[str, float] = field(default_factory=dict)  # seconds of a dense run, by the way it is run

    @property
    def psnr(self) -> list[float]:
        return [row["psnr"] for row in self.videos.values()]

    def mean(self, part: str) -> float | None:
        values = [row.get(part, 1.0) for row in self.videos.values()]
        return statistics.fmean(values) if values else None


def run_cells(lab: Lab) -> list[Cell]:
    """Every method at its own settings, as far as campaign files have it."""
    asked = (record["request"] for record in lab.store.records("quality").values())
    return [named_cell("quality", each["method"], each) for each in asked if is_as_authors_set_it(each)]


def is_as_authors_set_it(asked: Row) -> bool:
    """Of a quality cell's request: a method at its own settings."""
    changed = asked["density"] is not None or asked["changes"] or "profile" in asked
    return not changed and asked["method"] not in FLOORS


def run_result(gathered: CellRecords) -> Result:
    lines = [line for line in gathered.lines if line.get("format") == LINE]
    if not lines:
        return Result(None, note=f"{NOT_RUN}: pass --records with lines of python -m parklab.bench.frontier")
    cells = [
        (cell.request, gathered.records[cell.name]["row"]) for cell in gathered.cells if cell.name in gathered.records
    ]
    runs = list(runs_of(lines, cells))
    table = Table(COLUMNS, tuple(_table_row(run) for run in runs))
    note = (
        f"Videos of the shipped model, seconds of forwards on an {measured_forwards()['gpu']}. "
        "A run that stands further left takes less time, and one that stands higher is closer to the video of dense "
        "attention."
    )
    return Result(table, tuple(_findings(runs)), _figure(runs), note)


def runs_of(lines: Sequence[Row], cells: Sequence[tuple[Row, Row]] = ()) -> Iterator[Run]:
    """Rows of every model and length of video; those that nothing was recorded of have no videos."""
    for video in videos_of(lines):
        for model in MODELS:
            yield from _runs_of_model(model, video, lines, cells)


def videos_of(lines: Sequence[Row]) -> list[Video]:
    """In as many steps as any has; the largest first."""
    found = {_video(line) for line in lines}
    return sorted((each for each in found if each[3] == max(video[3] for video in found)), reverse=True)


def _video(of: Row) -> Video:
    return of["frames"], of["height"], of["width"], of["steps"]


def _runs_of_model(model: str, video: Video, lines: Sequence[Row], cells: Sequence[tuple[Row, Row]]) -> Iterator[Run]:
    (guidance, each), own, steps = MODELS[model], measured_forwards()["models"][model], video[3]
    here: dict[str, dict[Place, Row]] = {}
    for line in lines:
        if (_video(line), line.get("guidance")) == (video, guidance) and line["setting"] != DENSE:
            share = line.get("share_computed")  # None: of a line that is older than forecasts
            here.setdefault(line["setting"], {})[line["prompt"], line["seed"]] = {
                **line,
                "share_computed": 1.0 if share is None else share,
            }
    for asked, row in cells:
        if (_video(asked), asked["guidance"]) == (video, guidance) and asked["method"] != "park":
            here.setdefault(asked["method"], {})[asked["prompt"], asked["seed"]] = row
    dense = {way: steps * each * seconds for way, seconds in own["dense"].items()}
    run = partial(Run, model, video, dense=dense)
    yield run(DENSE, DENSE, {}, dense[FASTEST], "measured")
    families = {name: family for name in here if (family := _family(name))}
    for name, family in families.items():
        alone = Setting.parse(name)
        ways = {"": alone, **_rounded(alone, own, families)} if alone.method == "park" else {"": alone}
        for suffix, taken in ways.items():
            yield from _runs_of_setting(run, name + suffix, family + suffix, taken, here[name], own, made=not suffix)
    yield from (run(family, family, {}, None, NOT_RUN) for family in _families() if family not in families.values())


def _runs_of_setting(
    run: Callable[..., Run], name: str, family: str, asked: Setting, rows: Mapping[Place, Row], own: Row, *, made: bool
) -> Iterator[Run]:
    """A setting, and PARK with float8 linears too. rows: its videos, made with it or only as far as forwards go."""
    plain = run(name, family, rows)
    steps, each = plain.video[3], MODELS[plain.model][1]
    profile = _profiles_in(own, asked.changes.get("precision", "bf16")).get(asked.config or "", {})
    dense = {**plain.dense, **timed_beside(profile, steps * each)}
    seconds, how = _seconds(own, plain.model, asked, rows, steps, each)
    yield replace(
        plain,
        videos=rows if made else {},
        seconds=None if seconds is None else each * seconds,
        how=how,
        dense=dense,
    )
    if seconds is not None and "float8_saves_s" in own and asked.method == "park":
        computed = steps * statistics.fmean(row.get("share_computed", 1.0) for row in rows.values())
        less = each * (seconds - computed * own["float8_saves_s"])
        yield run(f"{name}, {FLOAT8}", f"{family}, {FLOAT8}", {}, less, how, dense=dense)


def _rounded(asked: Setting, own: Row, recorded: Iterable[str]) -> dict[str, Setting]:
    """Forecasts in precisions that were timed and have no videos, by what is added to the name."""
    found, made = {}, [(each.config, each.changes) for each in map(Setting.parse, recorded)]
    for precision in PRECISIONS:
        taken = replace(asked, changes={**asked.changes, "precision": precision})
        timed = precision != "bf16" and asked.config in _profiles_in(own, precision)
        forecasts = asked.changes.get("tolerance") and "precision" not in asked.changes
        if timed and forecasts and (taken.config, taken.changes) not in made:
            found[f", {ROUNDED.format(precision.upper())}"] = taken
    return found


def _profiles_in(own: Row, precision: str) -> Row:
    """Forwards of each profile of a model in that precision, as forwards.json has them."""
    found: Row = own.get("profiles" if precision == "bf16" else precision, {})
    return found


def _family(name: str) -> str | None:
    """What a setting is one of; None: of nothing that has a place here."""
    try:
        asked = Setting.parse(name)
    except ValueError:  # of a method that is no longer there
        return None
    if asked.cache:
        return CACHES.get(asked.cache["cache"])
    if asked.method == DENSE:
        return FEWER if asked.steps else DENSE_FORECAST if asked.changes.get("tolerance") else None
    if asked.method != "park":
        return METHODS_ALONE if asked.config is None and not asked.changes else None
    if asked.config is None or asked.steps or asked.changes.keys() - {"tolerance", "precision"}:
        return None
    precision = asked.changes.get("precision", "bf16")
    parts = [asked.config, *([] if precision == "bf16" else [precision])]
    return ", ".join([*parts, *(["forecasts"] if asked.changes.get("tolerance") else [])])


def _families() -> list[str]:
    rounded = ["", *(f", {precision}" for precision in PRECISIONS if precision != "bf16")]
    own = ["".join(parts) for parts in itertools.product(ParkConfig.PROFILES, rounded, ("", ", forecasts"))]
    return [
        FEWER,
        *CACHES.values(),
        DENSE_FORECAST,
        METHODS_ALONE,
        *(name for name in own if not name.startswith("paper, ")),
    ]


def _seconds(
    own: Row, model: str, asked: Setting, found: Mapping[Place, Row], steps: int, branches: int
) -> tuple[float | None, str]:
    """Of one branch of guidance, and how they are known."""
    rows = list(found.values())
    if asked.method == DENSE:
        share = statistics.fmean(row["share_computed"] for row in rows)
        # FirstBlockCache runs one block of a forward that it leaves out
        share += (1 - share) / SIZES[model].layers if asked.cache.get("cache") == "first-block" else 0.0
        return share * steps * own["dense"][
            FASTEST
        ], "measured" if asked.steps else "by its share of forwards, hooks free"
    if asked.method != "park":
        plain, whole = own["profiles"]["paper"], own["dense"]["own kernel"]
        attention = (whole - plain["seconds"]["reuse"]) / (1 - plain["density"]["reuse"])
        cost = statistics.fmean(row["cost"] for row in rows)
        return steps * (whole - attention * (1 - cost)), "estimated"
    precision = asked.changes.get("precision", "bf16")
    profile = _profiles_in(own, precision).get(asked.config or "")
    if profile is None:
        return None, f"not measured: no forward in {str(precision).upper()}"
    steps_of: list[Any] = [row.get("steps_by_phase") for row in rows]
    known = {*profile["seconds"], FORECAST}
    if not all(_names_steps(found, known) for found in steps_of):
        return None, "not known: the lines do not say which phases were run"
    phases = [{phase: len(at) for phase, at in found.items() if at} for found in steps_of]
    estimated = any(count.get(phase) for count in phases for phase in profile["estimated"])
    return (
        statistics.fmean(seconds_of_phases(profile["seconds"], count, branches) for count in phases),
        "estimated" if estimated else "measured",
    )


def _names_steps(found: Any, known: set[str]) -> bool:
    """Whether it lists steps, all of them in phases that have seconds: anybody may have written a line."""
    if not isinstance(found, dict) or not all(isinstance(at, list) for at in found.values()):
        return False
    run = {phase for phase, at in found.items() if at}
    return bool(run) and run <= known


def _table_row(run: Run) -> tuple[Any, ...]:
    psnr = run.psnr
    faster = [run.dense[way] / run.seconds if run.seconds else None for way in ("stock", FASTEST)]
    return (
        TITLES[run.model], _shown(run.video), run.name, len(psnr), statistics.fmean(psnr) if psnr else None,
        interval(psnr), min(psnr, default=None), run.mean("share_computed"), run.mean("cost"), run.seconds, *faster,
        run.how,
    )  # fmt: skip


def _shown(video: Video) -> str:
    return f"{'x'.join(map(str, video[:3]))}, {video[3]} steps"


def _figure(runs: Sequence[Run]) -> Plot | None:
    """Seconds of each model above, attention of the small model below, for each video."""
    rows = []
    for video in dict.fromkeys(run.video for run in runs):
        for axis, label in (("seconds", "seconds of a run"), ("cost", "attention, share of all-dense")):
            panels = []
            for model in DRAWN:
                guidance = MODELS[model][0]
                here = [run for run in runs if (run.model, run.video) == (model, video)]
                title = f"{TITLES[model] if axis == 'seconds' else f'guidance {guidance:g}'}, {_shown(video)}"
                panels += [Panel(label, "PSNR, dB", found, title)] if (found := series_of(here, axis)) else []
            rows += [tuple(panels)] if panels else []
    return Plot(tuple(rows)) if rows else None


def series_of(runs: Sequence[Run], axis: str) -> tuple[Series, ...]:
    """One of each family, and of each of the other methods. axis: seconds or cost."""
    points: dict[str, list[tuple[float, float, float | None, str]]] = {}
    for run in runs:
        x = run.seconds if axis == "seconds" else run.mean("cost")
        if run.videos and x is not None:
            name = run.name if run.family == METHODS_ALONE else run.family
            points.setdefault(name, []).append((x, statistics.fmean(run.psnr), interval(run.psnr), run.name))
    return tuple(Series(name, tuple(sorted(found))) for name, found in points.items())


def _findings(runs: Sequence[Run]) -> Iterator[Finding]:
    """At equal numbers of computed forwards with dense attention: forecasts against each cache."""
    for model, video in dict.fromkeys((run.model, run.video) for run in runs if run.model in DRAWN):
        here = [run for run in runs if (run.model, run.video) == (model, video) and run.videos]
        curve = [run for run in here if run.family == DENSE_FORECAST]
        for cache in CACHES.values():
            where = f"guidance {MODELS[model][0]:g}, {_shown(video)}"
            statement = f"forecasts are above {cache} at equal numbers of forwards, {where}"
            margins = {run.name: found for run in here if run.family == cache if (found := _above(curve, run))}
            if not margins:
                yield Finding(statement, None, reason="no runs of both")
                continue
            name = min(margins, key=lambda each: statistics.fmean(margins[each]))
            margin = statistics.fmean(margins[name])
            yield Finding(f"{statement}; nearest {name}", margin, "dB", interval(margins[name]))


def _above(curve: Sequence[Run], other: Run) -> list[float]:
    """On each video: what forecasts have at the other's number of forwards, between their runs, over the other."""
    found = []
    for place, row in other.videos.items():
        points = [
            (run.videos[place]["share_computed"], run.videos[place]["psnr"]) for run in curve if place in run.videos
        ]
        ours = on_curve(points, row["share_computed"], near=ONE_FORWARD) if points else None
        found += [] if ours is None else [ours - row["psnr"]]
    return found
