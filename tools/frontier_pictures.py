"""Quality against cost and against the seconds of a whole run on an H200, out of records: docs/pictures/frontier.svg
and run.svg.

python tools/frontier_pictures.py
"""

from __future__ import annotations

import statistics
from pathlib import Path

from page_svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Axes, Picture
from quality_tables import PROFILES, TOKENS, method_rows, profile_curves, profiles_beside_methods
from records import RESULTS, SIZES, Record, cells

from parkattn.park import ParkConfig
from parklab.bench.frontier import read_records
from parklab.experiments.evaluation import FLOORS
from parklab.experiments.run_frontier import CACHES, DENSE_FORECAST, DRAWN, FEWER, METHODS_ALONE, TITLES, Run, runs_of

PICTURES = Path(__file__).resolve().parents[1] / "docs/pictures"
WIDTH, HEIGHT = 300, 250  # of a panel

# Over the attention that is computed

COLOURS = {"svg2": GREEN, "svg-ear": RED, "sparsepr": PURPLE, "sol": ORANGE}
NAMES = {
    "svg2": "SVG2",
    "svg-ear": "SVG-EAR",
    "sparsepr": "SparsePR",
    "sol": "Sol-Attn",
    "svg": "SVG",
    "svoo": "SVOO",
    "sta": "STA",
}
NAMES |= {"xattention": "XAttention", "radial": "Radial"}
LARGEST = 70  # percent of all-dense


def over_costs() -> Picture:
    said = (
        "Mean PSNR against the dense video over the attention that is computed in the whole run, two lengths of video."
        " PARK's profile quality lies above SVG2, SVG-EAR, SparsePR and Sol-Attn at equal cost. "
        "fast does at 7,168 tokens, and at 75,600 tokens computes less than any of their runs."
    )
    picture = Picture(760, 385, "Quality against cost on an H200", said)
    for place, folder in enumerate(TOKENS):
        _panel_of_costs(picture, 55 + place * (WIDTH + 75), folder)
    picture.legend(
        55, 355, [("PARK", BLUE), *((NAMES[name], colour) for name, colour in COLOURS.items()), ("other methods", GREY)]
    )
    return picture


def _panel_of_costs(picture: Picture, left: float, folder: str) -> None:
    budgets, prompts = profile_curves(folder)
    groups, profiles, videos = method_rows(folder, prompts), profiles_beside_methods(folder, prompts), len(prompts)
    points = {
        place: _mean(rows) for place, rows in groups.items() if not place[0].startswith("dense") and len(rows) == videos
    }
    shown = {name: _mean(list(profiles[name].values())) for name in PROFILES}
    heights = [psnr for _, psnr in (*points.values(), *shown.values(), *map(_mean, budgets.values()))]
    low, high = 5 * (min(heights) // 5), 5 * (max(heights) // 5 + 1)
    picture.text(left, 24, f"{TOKENS[folder]} tokens, {videos} videos", size=13)
    axes = Axes(
        picture,
        (left, 58, WIDTH, HEIGHT),
        (15, LARGEST),
        (low, high),
        ("attention computed, % of all-dense", "PSNR, dB"),
    )
    axes.ticks(range(20, LARGEST + 1, 10), [low + 10 * i for i in range(int((high - low) // 10) + 1)])
    for name in dict.fromkeys(name for name, _ in points):
        runs = sorted(point for (which, _), point in points.items() if which == name and point[0] <= LARGEST)
        if name in COLOURS:
            axes.curve(runs, COLOURS[name])
            for run in runs:
                picture.dot(*axes.at(*run), 3, COLOURS[name])
        elif name in NAMES and (name, 0.0) in points:
            x, y = axes.at(*points[name, 0.0])
            picture.dot(x, y, 3, GREY)
            picture.text(x + 6, y + 4, NAMES[name], size=10, fill=GREY)
    for name in PROFILES:
        runs = sorted(
            run for (which, _), rows in budgets.items() if which == name and (run := _mean(rows))[0] <= LARGEST
        )
        if runs:
            axes.curve(sorted([*runs, shown[name]]), BLUE)
    for name, point in shown.items():
        x, y = axes.at(*point)
        picture.dot(x, y, 6, BLUE)
        picture.text(x + 9, y + (4 if name != "paper" else 14), name, size=13, fill=INK)


def _mean(rows: list[Record]) -> tuple[float, float]:
    """Percent of all-dense, dB."""
    return 100 * statistics.fmean(row["cost"] for row in rows), statistics.fmean(row["psnr"] for row in rows)


# Over the seconds of a whole run

# a later line replaces an earlier one
LINES, CAMPAIGN = ("frontier.jsonl", "run_75600.jsonl", "run_7168.jsonl"), "gpu_75600"
CURVES = {FEWER: INK, DENSE_FORECAST: RED} | dict(zip(CACHES.values(), (ORANGE, GREEN, PURPLE), strict=True))
ROW = 345  # from one row of panels to the next
LENGTHS = {SIZES["gpu_75600"]: "75,600", SIZES["gpu_7168"]: "7,168"}
Point = tuple[float, float]  # seconds, dB


def over_seconds() -> Picture:
    said = (
        "Mean PSNR against the dense video over the seconds of a whole run, for two models and two lengths of video. "
        "Further left is faster, higher is closer to dense attention. PARK's profiles are blue; "
        "a line leads from each to the same profile with forecasts."
    )
    lines = [line for name in LINES if (RESULTS / name).exists() for line in read_records(RESULTS / name)]
    runs = list(runs_of(lines, _own_settings()))
    videos = sorted({run.video for run in runs}, reverse=True)
    picture = Picture(760, 72 + ROW * len(videos), "Quality against the seconds of a run on an H200", said)
    for row, video in enumerate(videos):
        for place, model in enumerate(DRAWN):
            here = [run for run in runs if (run.model, run.video) == (model, video) and run.seconds and run.videos]
            dense = next(run.dense for run in runs if run.model == model and run.dense)
            corner = 55 + place * (WIDTH + 75), ROW * row
            _panel_of_seconds(
                picture, corner, f"{TITLES[model]}, dense {dense['compiled']:,.0f} s; {LENGTHS[video[:3]]} tokens", here
            )
    drawn = dict.fromkeys(run.family for run in runs if run.videos)
    shown = [("PARK", BLUE), *((name, colour) for name, colour in CURVES.items() if name in drawn)]
    shown.append((METHODS_ALONE, GREY))
    for row in range(2):
        picture.legend(55, 38 + ROW * len(videos) + 20 * row, shown[4 * row : 4 * row + 4])
    return picture


def _own_settings() -> list[tuple[Record, Record]]:
    found = [(record["request"], record["row"]) for record in cells(CAMPAIGN, "quality").values()]
    return [
        (asked, row)
        for asked, row in found
        if asked["density"] is None
        and not asked["changes"]
        and "profile" not in asked
        and asked["method"] not in FLOORS
    ]


def _panel_of_seconds(picture: Picture, corner: tuple[float, float], title: str, runs: list[Run]) -> None:
    points = {run.name: (run.seconds or 0.0, statistics.fmean(run.psnr)) for run in runs}
    heights = [psnr for _, psnr in points.values()]
    low, high = 5 * (min(heights) // 5), 5 * (max(heights) // 5 + 1)
    left, top = corner
    stride = 200
    right = stride * (max(seconds for seconds, _ in points.values()) // stride + 1)
    picture.text(left, top + 24, title, size=13)
    axes = Axes(picture, (left, top + 58, WIDTH, HEIGHT), (0, right), (low, high), ("seconds of a run", "PSNR, dB"))
    axes.ticks(range(0, int(right) + 1, stride), [low + 10 * i for i in range(int((high - low) // 10) + 1)])
    for family, colour in CURVES.items():
        curve = sorted(points[run.name] for run in runs if run.family == family)
        if curve and family in (FEWER, DENSE_FORECAST):  # caches have more than one setting that varies
            axes.curve(curve, colour)
        for point in curve:
            picture.dot(*axes.at(*point), 3, colour)
    for run in runs:
        if run.family == METHODS_ALONE:
            x, y = axes.at(*points[run.name])
            picture.dot(x, y, 3, GREY)
            picture.text(x + 5, y + 4, run.name, size=9, fill=GREY)
    for profile in ParkConfig.PROFILES:
        # the highest tolerance last, which takes the fewest seconds
        forecasts = sorted((points[run.name] for run in runs if run.family == f"{profile}, forecasts"), reverse=True)
        if profile in points:
            axes.curve([points[profile], *forecasts], BLUE)
            for point in forecasts:
                picture.dot(*axes.at(*point), 4, BLUE)
            x, y = axes.at(*points[profile])
            picture.dot(x, y, 6, BLUE)
            picture.text(x + 9, y + 4, profile, size=13, fill=INK)


DRAWINGS = {"frontier": over_costs, "run": over_seconds}

if __name__ == "__main__":
    for name, drawn in DRAWINGS.items():
        drawn().write(PICTURES / f"{name}.svg")
