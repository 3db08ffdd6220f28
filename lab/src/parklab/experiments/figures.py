"""Figures as PNG bytes, from values that stand in a table too: without matplotlib the table is all there is."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from parklab.experiments.results import Dots, Figure, Plot, Sheet

DPI = 110
WIDEST = 13.0  # inches
FEW = 4  # up to so many series, every point is labelled
COLOURS = ("#2f6f9f", "#c8553d", "#3f8f4f", "#8c5fa8", "#b58900", "#111827", "#2aa198", "#d33682", "#7f8c8d")
MARKERS = ("o", "s", "^", "D")


def draw(figure: Figure) -> bytes | None:
    """None where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib import figure as canvases

    if isinstance(figure, Sheet):
        return _as_png(_sheet(canvases.Figure, figure))
    rows, columns = (
        (1, len(figure.panels)) if isinstance(figure, Dots) else (len(figure.rows), max(map(len, figure.rows)))
    )
    width = min(3.4 * columns, WIDEST)
    names = [] if isinstance(figure, Dots) else _names(figure)
    # inches of the widest name with its sign, and of a line of names
    in_a_line = max(1, min(len(names), int(width / (0.075 * max(map(len, names), default=0) + 0.6))))
    legend = 0.2 + 0.18 * -(-len(names) // in_a_line) if len(names) > 1 else 0.0
    canvas: Any = canvases.Figure(figsize=(width, 2.8 * rows + legend), dpi=DPI, layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False)
    if isinstance(figure, Dots):
        for axis, (title, kinds, values) in zip(axes[0], figure.panels, strict=True):
            # points, for bars begin at zero, and beside 90 nobody sees the difference of 90.66 and 90.88
            axis.plot(kinds, values, "o", markersize=7, color="#2f6f9f")
            for place, value in enumerate(values):
                axis.annotate(
                    f"{value:.4g}", (place, value), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8
                )
            axis.grid(axis="y", color="#d5dce3", linewidth=0.6)
            axis.set_title(title, fontsize=9)
            axis.margins(x=0.5 / len(kinds), y=0.3)
            if len(kinds) > 2:
                axis.tick_params(axis="x", labelrotation=20)
    else:
        _plot(canvas, axes, figure, in_a_line)
    for axis in axes.flatten():
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return _as_png(canvas)


def _names(figure: Plot) -> list[str]:
    return list(dict.fromkeys(series.name for row in figure.rows for panel in row for series in panel.series))


def _plot(canvas: Any, axes: Any, figure: Plot, in_a_line: int) -> None:
    names, drawn = _names(figure), {}
    for row, panels in zip(axes, figure.rows, strict=True):
        for axis in row[len(panels) :]:
            axis.set_axis_off()
        for axis, panel in zip(row, panels, strict=False):
            for series in panel.series:
                place = names.index(series.name)
                x, y, spread = ([point[i] for point in series.points] for i in range(3))
                drawn[series.name] = axis.errorbar(
                    x, y, yerr=None if None in spread else spread, color=COLOURS[place % len(COLOURS)],
                    marker=MARKERS[place // len(COLOURS) % len(MARKERS)], markersize=5, linewidth=1, capsize=2,
                )  # fmt: skip
                for point in series.points if len(names) <= FEW else ():
                    axis.annotate(point[3], point[:2], textcoords="offset points", xytext=(4, 4), fontsize=7)
            axis.set_xlabel(panel.x, fontsize=9)
            axis.set_ylabel(panel.y, fontsize=9)
            axis.set_title(panel.title, fontsize=9)
            if panel.logarithmic:
                axis.set(xscale="log", yscale="log")
    if len(names) > 1:
        canvas.legend(
            drawn.values(), drawn.keys(), loc="outside lower center", ncols=in_a_line, fontsize=8, frameon=False
        )


def _sheet(make: Any, figure: Sheet) -> Any:
    """Frames side by side, methods one below the other."""
    columns, (height, width) = len(figure.rows[0][1]), figure.rows[0][1].shape[1:3]
    canvas = make(figsize=(9, 9 / columns * height / width * len(figure.rows) + 0.3), dpi=DPI, layout="constrained")
    axes = canvas.subplots(len(figure.rows), columns, squeeze=False)
    for row, (name, frames) in zip(axes, figure.rows, strict=True):
        row[0].set_ylabel(name, fontsize=9)
        for axis, frame in zip(row, frames, strict=True):
            axis.imshow(frame)
            axis.set_xticks([])
            axis.set_yticks([])
    return canvas


def _as_png(canvas: Any) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
