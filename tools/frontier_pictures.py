"""Quality against cost on an H200, out of records: docs/pictures/frontier.svg; with it run.svg and caches.svg, of
seconds (`run_picture`).

python tools/frontier_pictures.py
"""

from __future__ import annotations

import statistics
from pathlib import Path

import run_picture
from page_svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Axes, Picture
from quality_tables import PROFILES, TOKENS, method_rows, profile_curves, profiles_beside_methods
from records import Record

PICTURES = Path(__file__).resolve().parents[1] / "docs/pictures"
WIDTH, HEIGHT = 300, 250  # of a panel

COLOURS = {"svg2": GREEN, "svg-ear": RED, "sparsepr": PURPLE, "sol": ORANGE}
NAMES = {
    "svg2": "SVG2", "svg-ear": "SVG-EAR", "sparsepr": "SparsePR", "sol": "Sol-Attn", "svg": "SVG", "svoo": "SVOO",
    "sta": "STA",
}  # fmt: skip
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


DRAWINGS = {"frontier": over_costs, "run": run_picture.draw, "caches": run_picture.draw_caches}

if __name__ == "__main__":
    for name, drawn in DRAWINGS.items():
        drawn().write(PICTURES / f"{name}.svg")
