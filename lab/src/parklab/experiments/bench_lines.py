"""Lines that park bench and python -m parklab.bench.frontier wrote, as the input of experiments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from parkattn.files import read_regular
from parklab.bench.frontier import FORMAT as FRONTIER

Line = Mapping[str, Any]
BENCHMARKS = ("pama", "qrkc", "scaling")
GATED_BY = {"scaling": "attend"}


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """Those that an experiment can use; a file without any is refused. A line that a stop cut off is skipped."""
    found: list[Line] = []
    for path in paths:
        kinds = f"park bench {', '.join(BENCHMARKS)} or parklab.bench.frontier"
        wanted = f"records: expected JSON lines of {kinds}, got {path}"
        data = read_regular(path)
        try:
            if data is None:
                raise ValueError
            lines = data.decode().splitlines()
        except ValueError:
            raise ValueError(f"{wanted}, which cannot be read; check the path.") from None
        known = [line for line in map(_parsed, lines) if line is not None and not line.get("rehearsal")]
        if not known:
            raise ValueError(f"{wanted}, which holds none; measure first.")
        found += known
    return found


def measure_benchmark(name: str) -> list[Line]:
    """What park bench NAME measures here, after its gate; each line says where it was measured."""
    from parklab.bench.gpu import GATES, MEASURES
    from parklab.bench.problems import expect_all_pass
    from parklab.bench.timing import bench_device, gpu_environment, roofline

    device = bench_device()
    torch.manual_seed(0)
    expect_all_pass(GATES[f"gate-{GATED_BY.get(name, name)}"](device))
    facts, peak = gpu_environment(), roofline(device)
    return [{**line, "environment": facts} for line in MEASURES[name](device, peak)]


def _parsed(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    return line if line.get("format") == FRONTIER or line.get("benchmark") in BENCHMARKS else None
