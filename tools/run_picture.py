"""Quality against the seconds of a whole run, out of records: docs/pictures/run.svg.

python tools/run_picture.py
"""

from __future__ import annotations

import statistics
from pathlib import Path

from page_svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Axes, Picture
from records import RESULTS, SIZES, Record, cells, frontier_lines

from parkattn.park import ParkConfig
from parklab.experiments.evaluation import FLOORS
from parklab.experiments.run_frontier import CACHES, DENSE_FORECAST, DRAWN, FEWER, METHODS_ALONE, TITLES, Run, runs_of

PICTURE = Path(__file__).resolve().parents[1] / "docs/pictures/run.svg"
# a later line replaces an earlier one
LINES, CAMPAIGN = ("frontier.jsonl", "run_75600.jsonl", "run_7168.jsonl"), "gpu_75600"
CURVES = {FEWER: INK, DENSE_FORECAST: RED} | dict(zip(CACHES.values(), (ORANGE, GREEN, PURPLE), strict=True))
WIDTH, HEIGHT, ROW = 300, 250, 345  # of a panel, and from one row of them to the next
TOKENS = {SIZES["gpu_75600"]: "75,600", SIZES["gpu_7168"]: "7,168"}
Point = tuple[float, float]  # seconds, dB


def draw() -> Picture:
    said = (
        "Mean PSNR against the dense video over the seconds of a whole run, for two models and two lengths of video. "
        "Further left is faster, higher is closer to dense attention. PARK's profiles are blue; "
        "a line leads from each to the same profile with forecasts."
    )
    lines = [line for name in LINES if (RESULTS / name).exists() for line in frontier_lines(RESULTS / name)]
    runs = list(runs_of(lines, _own_settings()))
    videos = sorted({run.video for run in runs}, reverse=True)
    picture = Picture(760, 72 + ROW * len(videos), "Quality against the seconds of a run on an H200", said)
    for row, video in enumerate(videos):
        for place, model in enumerate(DRAWN):
            here = [run for run in runs if (run.model, run.video) == (model, video) and run.seconds and run.videos]
            dense = next(run.dense for run in runs if run.model == model and run.dense)
            corner = 55 + place * (WIDTH + 75), ROW * row
            _panel(
                picture, corner, f"{TITLES[model]}, dense {dense['compiled']:,.0f} s; {TOKENS[video[:3]]} tokens", here
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


def _panel(picture: Picture, corner: tuple[float, float], title: str, runs: list[Run]) -> None:
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


if __name__ == "__main__":
    draw().write(PICTURE)
