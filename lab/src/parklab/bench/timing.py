"""How GPU figures are taken: medians of CUDA events in two rounds, what each row of a table of kernels says beside its
time, the roofline of the same run, and the facts beside them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from parklab.record import environment, installed

Call = Callable[[], object]
Calls = dict[str, Call]
Record = dict[str, Any]
Peak = dict[str, float]
SETTLING_S = 0.5
PACKAGES = ("flash-kmeans", "fa3-fwd", "flashinfer-python", "torchao")  # that are timed beside ours


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def bench_device() -> torch.device:
    """The GPU, or the CPU where the interpreter stands in for one (to rehearse a benchmark, not to time it)."""
    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "park bench: expected a CUDA GPU, got none; use 'park bench cpu', or TRITON_INTERPRET=1 with --rehearse."
        )
    return torch.device("cuda")


def median_ms(call: Call, repeats: int = 7) -> float:
    call()
    return median(_each_ms(call, repeats))


def least_ms(call: Call, repeats: int = 5) -> float:
    """For a CPU, where other work on the machine only adds."""
    call()
    return min(_each_ms(call, repeats))


def steady_ms(calls: Mapping[str, Call], repeats: int = 7, settling_s: float = SETTLING_S) -> dict[str, float]:
    """Each call repeated by itself until the card has settled: at its power limit a call takes 10 % longer after a hot
    kernel than after a light one, so calls that take turns would be charged for their neighbours.
    """
    found = {}
    for name, call in calls.items():
        done, began = 0, time.monotonic()
        while torch.cuda.is_available() and (done < 3 or time.monotonic() - began < settling_s):
            call()
            torch.cuda.synchronize()
            done += 1
        # short calls are repeated more often, over as long a time
        found[name] = median(_each_ms(call, max(repeats, min(done, 100))))
    return found


def in_two_rounds(calls: Mapping[str, Call], repeats: int, settling_s: float = SETTLING_S) -> dict[str, float]:
    """The second one in reverse: what drifts during a round weighs on all alike."""
    turns = list(calls), list(reversed(list(calls)))
    rounds = [steady_ms({name: calls[name] for name in turn}, repeats, settling_s) for turn in turns]
    return {name: fmean(ms[name] for ms in rounds) for name in calls}


class Row(NamedTuple):
    """A call of a table of kernels."""

    call: Call
    flops: float = 0.0  # of its useful work, where somebody asks
    beside: str = ""  # the row whose time it is a share of, else the first
    facts: Mapping[str, Any] = MappingProxyType({})  # what its record says besides


def measured(
    benchmark: str, table: Mapping[str, Row], repeats: int, peak: Peak, *,
    called: str = "kernel", settling_s: float = SETTLING_S, **common: Any,
) -> Iterator[Record]:  # fmt: skip
    """A record for each row, by its name in the field `called`; common: what all of them say."""
    times = in_two_rounds({name: row.call for name, row in table.items()}, repeats, settling_s)
    for name, row in table.items():
        ms, baseline = times[name], row.beside or next(iter(table))
        tflops = row.flops / ms / 1e9 if row.flops else None
        yield {
            "benchmark": benchmark, **common, called: name, **row.facts,
            "ms": ms, "baseline": baseline, "ratio": ms / times[baseline], "useful_tflops": tflops,
            "share_of_roofline": tflops and tflops / peak["tflops"], "extra_mb": extra_mb(row.call),
        }  # fmt: skip


def extra_mb(call: Call) -> float:
    """Most memory in use during the call beyond what was in use before it."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def roofline(device: torch.device) -> Peak:
    """What this card reaches now: TFLOP/s of a square matrix product, GB/s of a copy."""
    side, times = (8192, 8) if device.type == "cuda" else (256, 1)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    many, other = (torch.empty(times, side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product, copy = median_ms(lambda: a @ b), median_ms(lambda: other.copy_(many))
    return {"tflops": 2 * side**3 / product / 1e9, "gbytes_per_s": 2 * many.nbytes / copy / 1e6}


def gpu_environment() -> Record:
    others = {name: installed(name) for name in PACKAGES if installed(name)}
    return environment() | {"triton": installed("triton"), "driver": _driver(), **others}


free_memory = torch.cuda.empty_cache  # nothing where no GPU is used


def _each_ms(call: Call, repeats: int) -> list[float]:
    """Calls follow each other without waiting, as in a model: launches are hidden behind the work of the call
    before.
    """
    if not torch.cuda.is_available():
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            found.append((time.perf_counter() - begin) * 1e3)
        return found
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(stop)) for start, stop in events]


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked.stdout.split("\n")[0].strip() or None


@dataclass(frozen=True)
class Measurement:
    seconds: float
    peak_gb: float | None  # None where there is no GPU
    finite: bool


def watched(call: Callable[[], torch.Tensor], device: torch.device) -> Measurement:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    out = call()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None
    return Measurement(seconds, peak, bool(out.isfinite().all()))
