"""python -m parklab.solids.speed [--out FILE.jsonl]

Clips a minute that a device renders, and how they differ from a CPU's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from parklab.record import append_records, environment
from parklab.sprites.data import ClipSize

from .motion import training_clip
from .recipe import LONG, SHRUNK
from .renderer import RAYS_AT_ONCE, render

DIFFERENT = 4 / 255  # a display value that is off by more is counted
SAMPLES = 2


def clips_a_minute(size: ClipSize, device: torch.device, seconds: float) -> dict[str, Any]:
    """Renders batches as large as the renderer takes for at least so long, after one to warm up."""
    at_once = max(1, RAYS_AT_ONCE[device.type] // (size.frames * size.height * size.width * SAMPLES**2))
    render([training_clip(0, i, "speed") for i in range(at_once)], size, device)
    done, began = 0, time.perf_counter()
    while True:
        clips = [training_clip(0, done + i, "speed") for i in range(at_once)]
        render(clips, size, device).sum().item()  # waits for the device
        done += at_once
        took = time.perf_counter() - began
        if took >= seconds:
            return {
                "size": [size.frames, size.height, size.width], "clips": done, "seconds": round(took, 2),
                "clips_a_minute": round(60 * done / took, 1),
            }  # fmt: skip


def difference(device: torch.device, count: int = 4) -> dict[str, float]:
    """Between a device's and a CPU's renders of the same clips, in display values from 0 to 1."""
    clips, size = [training_clip(0, i, "speed") for i in range(count)], ClipSize(5, 64, 96)
    apart = (render(clips, size, device).cpu() - render(clips, size)).abs() / 2
    return {"mean": apart.mean().item(), "share_of_different_values": (apart > DIFFERENT).float().mean().item()}


def measured(device: torch.device, seconds: float) -> dict[str, Any]:
    return {
        "benchmark": "solids speed",
        "device": device.type,
        "rates": [clips_a_minute(size, device, seconds) for size in (*SHRUNK, LONG)],
        "difference": difference(device),
        "environment": environment(),
    }


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    reader.add_argument("--seconds", type=float, default=3.0, help="of each size, at least")
    reader.add_argument("--out", type=Path, help="file of JSON lines to append the result to")
    asked = reader.parse_args()
    result = measured(torch.device(asked.device), asked.seconds)
    sys.stdout.write(json.dumps(result) + "\n")
    if asked.out:
        append_records(asked.out, [result])


if __name__ == "__main__":
    main()
