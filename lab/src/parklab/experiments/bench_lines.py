"""Lines that park bench and python -m parklab.bench.frontier wrote, as the input of experiments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from parkattn.checks import read_file, shown
from parklab.bench.frontier import FORMAT as FRONTIER

Line = Mapping[str, Any]
BENCHMARKS = ("pama", "qrkc", "scaling")
GATED_BY = {"scaling": "attend"}
LARGEST_FILE = 2**28  # bytes
LARGEST_VALUE = 1e12  # sums and products of such numbers stay finite
# what experiments read of a line: str, int or float (any number); a name with ? may be absent or null
FIELDS: dict[str, dict[str, type]] = {
    FRONTIER: dict.fromkeys(("setting", "prompt"), str) | dict.fromkeys(("seed", "frames", "height", "width", "steps"),
                                                                        int)
    | dict.fromkeys(("psnr", "cost", "seconds?", "guidance?", "cost_two_passes?", "error?", "share_computed?"), float),
    "pama": {"shape.name": str, "kernel": str, "speedup": float} | dict.fromkeys(("ms?", "extra_mb?",
                                                                                  "memory_reduction?"), float),
    "qrkc": dict.fromkeys(("shape.heads", "shape.tokens"), int)
    | dict.fromkeys(("metric_ms", "cholesky_ms", "transform_ms", "means_ms", "ms"), float),
    "scaling": {"over": str, "part": str, "length": int, "density": float, "ms": float},
    "scaling fit": {"over": str, "part": str, "exponent": float},
}  # fmt: skip


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """Those that an experiment can use; a file without any is refused. A line that a stop cut off is skipped."""
    found: list[Line] = []
    for path in paths:
        kinds = f"park bench {', '.join(BENCHMARKS)} or parklab.bench.frontier"
        wanted = f"records: expected JSON lines of {kinds}, got {path}"
        data = read_file("records", path, f"JSON lines of {kinds}", most=LARGEST_FILE)
        known = []
        for number, text in enumerate(data.decode(errors="replace").splitlines(), 1):
            line = _parsed(text)
            if line is None or line.get("rehearsal"):
                continue
            if wrong := fault_of_line(line):
                raise ValueError(f"{wanted}, whose line {number} {wrong}; measure again.")
            known.append(line)
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


def fault_of_line(line: Line) -> str:
    """What is wrong with a line that an experiment would read, or nothing."""
    kind = FRONTIER if line.get("format") == FRONTIER else line["benchmark"]
    for field, wanted in FIELDS["scaling fit" if kind == "scaling" and "exponent" in line else kind].items():
        value: Any = line
        for part in field.rstrip("?").split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None and field.endswith("?"):
            continue
        kinds = (int, float) if wanted is float else wanted
        if not isinstance(value, kinds) or isinstance(value, bool):
            return f"has {field.rstrip('?')} = {shown(value)} where {wanted.__name__} is expected"
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST_VALUE:  # not so for NaN
            return f"has {field.rstrip('?')} = {shown(value)}, which is no measurement"
    return "" if isinstance(line.get("environment", {}), dict) else "has no object as its environment"


def _parsed(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    return line if line.get("format") == FRONTIER or line.get("benchmark") in BENCHMARKS else None
