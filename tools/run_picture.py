"""Quality against the seconds of a whole run, out of records: docs/pictures/run.svg, and beside step caches caches.svg.

`python tools/frontier_pictures.py` writes both.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from page_svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Axes, Picture
from records import RESULTS, SIZES, cells, frontier_lines

from parkattn.park import ParkConfig
from parklab.bench.frontier import Setting
from parklab.experiments.run_frontier import (
    CACHES,
    DENSE_FORECAST,
    FEWER,
    METHODS_ALONE,
    MODELS,
    TITLES,
    Run,
    is_as_authors_set_it,
    runs_of,
)

# a later line replaces an earlier one
LINES, CAMPAIGN = ("frontier.jsonl", "run_75600.jsonl", "run_7168.jsonl"), "gpu_75600"
LONG, SHORT = SIZES["gpu_75600"], SIZES["gpu_7168"]
CURVES = {FEWER: INK, DENSE_FORECAST: RED} | dict(zip(CACHES.values(), (ORANGE, GREEN, PURPLE), strict=True))
DENSE = {"compiled": "dense, compiled", "own kernel": "dense, our kernel"}
WIDTH, HEIGHT = 345, 270  # of a panel
STRIDE = 200  # seconds between two ticks
Point = tuple[float, float]  # seconds and dB, or pixels
Box = tuple[float, float, float, float]  # left, top, right, bottom


def draw() -> Picture:
    """The hero picture: videos of 75,600 tokens, methods at their authors' settings, PARK's profiles."""
    said = (
        "Mean PSNR against the dense video over the seconds of a whole run, for two models. Further left is faster, "
        "higher is closer to dense attention. PARK's profiles are blue; a line leads from each to the same profile "
        "with forecasts. Other sparse methods are grey, dense attention is a dashed line."
    )
    picture = Picture(860, 372, "Quality against the seconds of a run on an H200", said)
    runs = [run for run in recorded_runs() if run.video[:3] == LONG and (run.videos or run.dense)]
    for place, model in enumerate(("wan2.1-14b", "hunyuanvideo")):
        here = [run for run in runs if run.model == model and run.family in (*_profiles(), METHODS_ALONE)]
        shown = Panel(picture, (52 + place * (WIDTH + 70), 48, WIDTH, HEIGHT), here, _title(model))
        dense = next(run.dense for run in runs if run.model == model and run.dense)
        shown.dashes({DENSE[way]: dense[way] for way in DENSE})
        shown.profiles("{profile}", "tolerance={tolerance:g}")
        shown.methods([run for run in here if run.family == METHODS_ALONE])
    return picture


def draw_caches() -> Picture:
    """Videos of 7,168 tokens at guidance 1: step caches, fewer steps and dense attention with forecasts beside PARK."""
    said = (
        "Mean PSNR against the dense video over the seconds of a whole run of HunyuanVideo: PARK's profiles with and "
        "without forecasts, dense attention with forecasts, with step caches of diffusers, and in fewer steps."
    )
    picture = Picture(620, 420, "Forecasts beside step caches", said)
    model = "hunyuanvideo"
    runs = [run for run in recorded_runs() if (run.model, run.video[:3]) == (model, SHORT) and run.videos]
    runs = [run for run in runs if run.family in (*_profiles(), *CURVES)]
    shown = Panel(picture, (52, 48, 500, HEIGHT), runs, f"{TITLES[model]}, one forward a step")
    for family, colour in CURVES.items():
        shown.curve(family, colour)
    shown.profiles("{profile}", "")
    drawn = dict.fromkeys(run.family for run in runs)
    entries = [("PARK", BLUE), *((name, colour) for name, colour in CURVES.items() if name in drawn)]
    for row in range(2):
        picture.legend(52, 378 + 20 * row, entries[3 * row : 3 * row + 3])
    return picture


def recorded_runs() -> list[Run]:
    lines = [line for name in LINES if (RESULTS / name).exists() for line in frontier_lines(RESULTS / name)]
    found = [(record["request"], record["row"]) for record in cells(CAMPAIGN, "quality").values()]
    return list(runs_of(lines, [each for each in found if is_as_authors_set_it(each[0])]))


def _profiles() -> list[str]:
    """Families of runs of PARK."""
    return [family for profile in ParkConfig.PROFILES for family in (profile, f"{profile}, forecasts")]


def _title(model: str) -> str:
    return f"{TITLES[model]}, 50 steps, {'two forwards' if MODELS[model][1] == 2 else 'one forward'} a step"


class Panel:
    """Dots over axes; each name stands beside its dot, where nothing stands yet."""

    def __init__(self, picture: Picture, box: tuple[float, float, float, float], runs: Sequence[Run], title: str):
        self.picture = picture
        self.runs = {run.name: run for run in runs if run.seconds and run.videos}
        self.points = {name: (run.seconds or 0.0, statistics.fmean(run.psnr)) for name, run in self.runs.items()}
        heights = [psnr for _, psnr in self.points.values()]
        low, high = 5 * (min(heights) // 5), 5 * ((max(heights) + 1) // 5 + 1)
        longest = max([seconds for seconds, _ in self.points.values()] + [run.dense["compiled"] for run in runs])
        right = STRIDE * (longest // STRIDE + 1)
        picture.text(box[0], box[1] - 28, title, size=13)
        self.axes = Axes(picture, box, (0, right), (low, high), ("seconds of a run", "PSNR of the small model, dB"))
        self.axes.ticks(range(0, int(right) + 1, STRIDE), [low + 10 * i for i in range(int((high - low) // 10) + 1)])
        self.taken: list[Box] = [_around(self.axes.at(*point), 7) for point in self.points.values()]

    def dashes(self, dense: dict[str, float]) -> None:
        """Upright lines at the seconds of dense attention, named near their foot."""
        low, high = self.axes.y
        for step, (name, seconds) in enumerate(dense.items()):
            self.picture.line([self.axes.at(seconds, low), self.axes.at(seconds, high)], INK, width=1, dash="4 3")
            x, y = self.axes.at(seconds, low)
            foot = y - 44 * step
            for row, part in enumerate((*name.split(", "), f"{seconds:,.0f} s")):
                self.picture.text(x - 5, foot - 34 + 12 * row, part, size=10, anchor="end")
            self.taken += [(x - 85, foot - 46, x, foot), (x - 2, self.axes.at(seconds, high)[1], x + 2, y)]

    def curve(self, family: str, colour: str) -> None:
        curve = sorted(self.points[name] for name, run in self.runs.items() if run.family == family)
        if curve and family in (FEWER, DENSE_FORECAST):  # caches have more than one setting that varies
            self._line(curve, colour)
        for point in curve:
            self.picture.dot(*self.axes.at(*point), 3, colour)

    def _line(self, points: Sequence[Point], colour: str) -> None:
        self.axes.curve(points, colour)
        for one, other in itertools.pairwise(self.axes.at(*point) for point in points):
            between = [
                (one[0] + s * (other[0] - one[0]), one[1] + s * (other[1] - one[1]))
                for s in (i / 20 for i in range(21))
            ]
            self.taken += [_around(point, 2) for point in between]

    def profiles(self, name: str, with_forecasts: str) -> None:
        for profile in ParkConfig.PROFILES:
            # the highest tolerance last, which takes the fewest seconds
            forecasts = sorted(
                (name for name, run in self.runs.items() if run.family == f"{profile}, forecasts"),
                key=lambda name: -self.points[name][0],
            )
            if profile not in self.points:
                continue
            self._line([self.points[each] for each in (profile, *forecasts)], BLUE)
            for each in forecasts:
                self.picture.dot(*self.axes.at(*self.points[each]), 4, BLUE)
            self.picture.dot(*self.axes.at(*self.points[profile]), 6, BLUE)
            self.name(name.format(profile=profile), self.points[profile], 13, INK)
            for each in forecasts[:1] if with_forecasts else ():
                tolerance = Setting.parse(each).changes["tolerance"]
                self.name(with_forecasts.format(profile=profile, tolerance=tolerance), self.points[each], 10, INK)

    def methods(self, runs: Sequence[Run]) -> None:
        here = [run for run in runs if run.name in self.points]
        for run in here:
            self.picture.dot(*self.axes.at(*self.points[run.name]), 3, GREY)
        for run in sorted(here, key=lambda run: -self.points[run.name][1]):
            self.name(run.name, self.points[run.name], 9, "#5f6368")

    def name(self, said: str, point: Point, size: int, fill: str) -> None:
        """At the first free place around the point; a thin line leads to one that lies further off."""
        x, y = self.axes.at(*point)
        width = 0.56 * size * len(said)
        for dx, dy, anchor in _places():
            if anchor == "middle" and size < 10:  # small names stand close to each other: beside their dots alone
                continue
            left = x + dx - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            box = (left, y + dy - 0.8 * size, left + width, y + dy + 0.2 * size)
            inside = box[0] >= self.axes.box[0] and box[2] <= self.axes.box[0] + self.axes.box[2] + 20
            if inside and not any(_meet(box, other) for other in self.taken):
                break
        else:
            raise ValueError(f"{said}: expected a free place near its point, got none; widen the panel.")
        if abs(dy - 4) > 12:
            self.picture.line(
                [(x, y), (x + dx - (2 if anchor == "start" else -2), y + dy - 0.3 * size)], GREY, width=0.6
            )
        self.picture.text(x + dx, y + dy, said, size=size, anchor=anchor, fill=fill)
        self.taken.append(box)


def _places() -> Iterator[tuple[float, float, str]]:
    """Right and left of a point, below and above it, further and further off."""
    for away in (0, 10, -10, 20, -20, 30, -30, 42, -42, 54, -54, 66, -66):
        if abs(away) >= 10:
            yield 0, away + (9 if away > 0 else -2), "middle"
        for dx, anchor in ((10, "start"), (-10, "end"), (24, "start"), (-24, "end")):
            yield dx, 4 + away, anchor


def _around(point: Point, reach: float) -> Box:
    return point[0] - reach, point[1] - reach, point[0] + reach, point[1] + reach


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
