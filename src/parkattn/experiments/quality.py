"""What is measured of a video against its dense reference: the one place where a measure is added.

psnr, ssim, lpips   per frame (`metrics.fidelity`); a video's value is the mean over its frames
error               ||video - reference|| / ||reference||, over all values of the raw 8-bit frames
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from parkattn.metrics import fidelity
from parkattn.studio.video import Frames

Values = dict[str, float | None]
# each gives one value per frame, or None where it cannot be measured on this machine
PER_FRAME: dict[str, Callable[..., list[float] | None]] = {
    "psnr": fidelity.psnr_per_frame,
    "ssim": fidelity.ssim_per_frame,
    "lpips": fidelity.lpips_per_frame,
}


def measure_frames(frames: Frames, reference: Frames, device: str) -> tuple[Values, dict[str, list[float]]]:
    """The video's values, and the frames' values of every measure that could be taken."""
    by_frame: dict[str, list[float]] = {}
    for name, measure in PER_FRAME.items():
        options = {"device": device} if "device" in inspect.signature(measure).parameters else {}
        found = measure(frames, reference, **options)
        if found is not None:
            by_frame[name] = [float(value) for value in found]
    video: Values = {name: statistics.fmean(by_frame[name]) if name in by_frame else None for name in PER_FRAME}
    return video | {"error": relative_error(frames, reference)}, by_frame


def relative_error(frames: Frames, reference: Frames) -> float:
    # frame by frame: a long video in float64 would take eight times its room
    apart = whole = 0.0
    for frame, wanted in zip(frames, reference, strict=True):
        exact = wanted.astype(np.float64)
        apart += float(np.sum((frame - exact) ** 2))
        whole += float(np.sum(exact**2))
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)


def whole_run_cost(measured: dict[str, Any]) -> dict[str, float]:
    """Attention over the whole run as a share of all-dense: dense calls and anchors count 1, a sparse call its density.

    An anchor whose dense and sparse outputs come out of two passes costs its plan's density more (cost_two_passes).
    """
    calls, cost = measured["summary"]["calls"], float(measured["density"])
    whole, anchors = sum(calls.values()), calls.get("anchor", 0)
    sparse = measured["density_sparse_steps"] or 0.0
    return {"cost": cost, "cost_two_passes": cost + (anchors / whole * sparse if anchors else 0.0)}
