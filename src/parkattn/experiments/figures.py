"""Figures as PNG bytes, from values that stand in a table too: without matplotlib the table is all there is."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from parkattn.experiments.results import Bars, Curve, Sheet

DPI = 110


def draw(figure: Bars | Curve | Sheet) -> bytes | None:
    """None where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    if isinstance(figure, Sheet):
        return _as_png(_sheet(Figure, figure))
    panels = len(figure.panels) if isinstance(figure, Bars) else 1
    canvas: Any = Figure(figsize=(3.4 * panels, 2.8), dpi=DPI, layout="constrained")
    axes = canvas.subplots(1, panels, squeeze=False)[0]
    if isinstance(figure, Bars):
        for axis, (title, names, values) in zip(axes, figure.panels, strict=True):
            bars = axis.bar(names, values, color=["#9aa5b1", "#2f6f9f"][: len(names)], width=0.6)
            axis.bar_label(bars, fmt="%.4g", fontsize=8)
            axis.set_title(title, fontsize=9)
            axis.margins(y=0.15)
    else:
        points = sorted(figure.points)
        axes[0].plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", color="#2f6f9f")
        for x, y, label in points:
            axes[0].annotate(label, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
        axes[0].set_xlabel(figure.x, fontsize=9)
        axes[0].set_ylabel(figure.y, fontsize=9)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return _as_png(canvas)


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
