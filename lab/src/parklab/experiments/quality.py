"""What is measured of a video: measures of `metrics.measures` by name, and two of our own.

error   ||video - reference|| / ||reference||, over all values of the raw 8-bit frames
cost    attention of the whole run as a share of all-dense (`whole_run_cost`)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from parklab.bench.frontier import whole_run_cost
from parklab.metrics.measures import MEASURES, REFERENCE, Setting, choose_measures
from parklab.studio.video import Frames

ALWAYS = "psnr"  # findings are margins of it
USUAL = (ALWAYS, "ssim", "lpips", "st_lpips", "vmaf")  # those of them that are installed, where nothing is asked for


class VideoMeasures(NamedTuple):
    video: dict[str, float | None]  # by measure; None where it could not be taken
    by_frame: dict[str, list[float]]
    reasons: dict[str, str]  # why not


def named_measures(asked: str) -> str | list[str]:
    """all, or names in a fixed order, whether or not they can be taken on this machine."""
    if asked == "all":
        return asked
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in MEASURES:
            choose_measures(name, Setting(), reference=True)  # says which there are
    return [name for name in MEASURES if name in {ALWAYS, *names}]


def takeable_measures(asked: str | None, setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Names, and why others cannot be taken here. One that is asked for by its name and cannot is an error."""
    if asked is None:
        reasons = {name: reason for name in USUAL if (reason := MEASURES[name].reason(setting)) is not None}
        return [name for name in USUAL if name not in reasons], reasons
    found, reasons = choose_measures(asked, setting, reference=True)
    return [name for name in MEASURES if name in {ALWAYS, *found}], reasons


def measure_frames(names: Iterable[str], frames: Frames, reference: Frames, setting: Setting) -> VideoMeasures:
    """What these frames are refused for, such as a size below a measure's window, is a reason and no error."""
    found = VideoMeasures({}, {}, {})
    for name in names:
        measure = MEASURES[name]
        try:
            value: Mapping[str, Any] = measure.value(
                setting, *((frames, reference) if measure.kind == REFERENCE else (frames,))
            )
        except ValueError as error:
            found.reasons[name], value = str(error), {"mean": None}
        found.video[name] = value["mean"]
        if "per_frame" in value:
            found.by_frame[name] = value["per_frame"]
    found.video["error"] = relative_error(frames, reference)
    return found


def video_row(
    quality: VideoMeasures, made: Mapping[str, Any], dense_seconds: Mapping[str, float | None]
) -> dict[str, float | None]:
    """What tables show of one video: how close it is to the dense one, what it computed, and what both took."""
    seconds, sparse = made["seconds"], made["density_sparse_steps"]
    summary = made["summary"]
    cost = whole_run_cost(summary["calls"], float(made["density"]), summary.get("forwards", {}))
    return quality.video | {
        "cost": cost["cost"], "cost_two_passes": cost["cost_two_passes"], "density": 1.0 if sparse is None else sparse,
        "density_all_steps": made["density"], "recall": made["recall"]["mean"] if made["recall"] else None,
        "seconds": seconds["total"], "dense_seconds": dense_seconds["total"], "denoise_seconds": seconds["denoise"],
        "dense_denoise_seconds": dense_seconds["denoise"], "attention_seconds": seconds["attention"],
        "dense_attention_seconds": dense_seconds["attention"],
    }  # fmt: skip


def relative_error(frames: Frames, reference: Frames) -> float:
    # frame by frame: a long video in float64 would take eight times its room
    apart = whole = 0.0
    for frame, wanted in zip(frames, reference, strict=True):
        exact = wanted.astype(np.float64)
        apart += float(np.sum((frame - exact) ** 2))
        whole += float(np.sum(exact**2))
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)
