"""What happened in the last generation, per layer and in all."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parkattn.site import AttentionStats, CallSite

PHASES = ("dense", "refresh", "reuse")
LOST = "another processor was set after enable; call enable again"


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts; calling the result stops; calling what that returns reads the seconds, which is where a GPU is waited for."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        begin.record(stream)

        def stop_on_gpu() -> Callable[[], float]:
            end.record(stream)
            return seconds_on_gpu

        def seconds_on_gpu() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1000

        return stop_on_gpu
    start = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return stop


@dataclass
class LayerLog:
    """Tensors are kept on their device and read when somebody asks."""

    phases: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    density: list[Tensor] = field(default_factory=list)
    mass: list[Tensor] = field(default_factory=list)
    seconds: dict[str, list[Callable[[], float]]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def seconds_by_phase(self) -> dict[str, list[float]]:
        return {phase: [read() for read in readings] for phase, readings in self.seconds.items()}


class RunLog:
    """Statistics of every attention call since the run began."""

    def __init__(self) -> None:
        self.layers: dict[tuple[str, int], LayerLog] = {}
        self.steps: dict[int, set[str]] = {}
        self.backends: set[str] = set()
        self.peak_state_bytes = 0

    def add(self, site: CallSite, stats: AttentionStats, seconds: Callable[[], float]) -> None:
        log = self.layers.setdefault((site.transformer, site.layer), LayerLog())
        log.phases[stats.phase] += 1
        log.seconds[stats.phase].append(seconds)
        if stats.phase == "dense":
            log.reasons[stats.reason] += 1
        log.density.append(stats.density.mean())
        if stats.estimated_mass is not None:
            log.mass.append(stats.estimated_mass.mean())
        self.steps.setdefault(site.step, set()).add(stats.phase)
        if stats.backend:
            self.backends.add(stats.backend)

    def clear(self) -> None:
        self.layers.clear()
        self.steps.clear()
        self.backends.clear()
        self.peak_state_bytes = 0


@dataclass(frozen=True)
class Summary:
    """to_dict() for programs (plain JSON types), str() for people."""

    method: str
    steps: dict[str, list[int]]  # phase -> steps in which some layer was in it
    calls: dict[str, int]  # phase -> attention calls
    density: float | None  # mean over all calls
    dense_because: dict[str, int]  # reason -> calls
    backends: list[str]  # what computed the sparse calls, and why
    fused: dict[str, int]  # whether blocks ran compiled by us, and why or why not -> calls of blocks
    attention_seconds: dict[str, float]  # phase -> time in attention, plans included
    seconds_saved: float | None  # against the layer's own dense calls (median); None where none ran dense
    state_bytes: int  # held now
    peak_state_bytes: int  # held during the run
    layers: list[dict[str, Any]]

    @classmethod
    def of(cls, method: str, log: RunLog, state_bytes: int, fused: dict[str, int], lost: Iterable[tuple[str, int]] = ()) -> Summary:
        rows: list[dict[str, Any]] = []
        for (transformer, layer), entry in sorted(log.layers.items()):
            rows.append({
                "transformer": transformer,
                "layer": layer,
                **{phase: entry.phases[phase] for phase in PHASES},
                "density": _mean(entry.density),
                "estimated_mass": _mean(entry.mass),
                "dense_because": dict(entry.reasons),
            })  # fmt: skip
        reasons = collections.Counter[str]()
        for row in rows:
            reasons.update(row["dense_because"])
        reasons.update(LOST for _ in lost)
        times = [entry.seconds_by_phase() for entry in log.layers.values()]
        return cls(
            method=method,
            steps={phase: sorted(step for step, phases in log.steps.items() if phase in phases) for phase in PHASES},
            calls={phase: sum(row[phase] for row in rows) for phase in PHASES},
            density=_mean([value for entry in log.layers.values() for value in entry.density]),
            dense_because=dict(reasons.most_common()),
            backends=sorted(log.backends),
            fused=fused,
            attention_seconds={phase: sum(sum(layer[phase]) for layer in times) for phase in PHASES},
            seconds_saved=_saved(times),
            state_bytes=state_bytes,
            peak_state_bytes=max(state_bytes, log.peak_state_bytes),
            layers=rows,
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        if not self.layers:
            return "\n".join([f"{self.method}: nothing has run yet", *self._reasons()])
        saved = "" if self.seconds_saved is None else f", about {self.seconds_saved:.1f} s saved"
        lines = [
            f"{self.method}: "
            + ", ".join(f"{len(self.steps[phase])} steps {phase}" for phase in PHASES if self.steps[phase])
            + f"; mean density {self.density:.2f}; plans {self.peak_state_bytes / 2**20:.1f} MiB, {self.state_bytes / 2**20:.1f} MiB now",
            f"attention took {sum(self.attention_seconds.values()):.1f} s{saved}",
            *(f"sparse calls: {reason}" for reason in self.backends),
            *(f"blocks compiled by enable: {outcome} ({count}x)" for outcome, count in self.fused.items()),
            f"{'transformer':14} {'layer':>5} {'dense':>6} {'refresh':>8} {'reuse':>6} {'density':>8} {'mass':>6}",
        ]
        for row in self.layers:
            mass = "" if row["estimated_mass"] is None else f"{row['estimated_mass']:.2f}"
            counts = f"{row['dense']:6} {row['refresh']:8} {row['reuse']:6} {row['density']:8.2f} {mass:>6}"
            lines.append(f"{row['transformer']:14} {row['layer']:5} {counts}")
        return "\n".join(lines + self._reasons())

    def _reasons(self) -> list[str]:
        return [f"dense {count}x: {reason}" for reason, count in self.dense_because.items()]


def _mean(values: list[Tensor]) -> float | None:
    """None also where there is no finite one (tokens with NaN have no mass): JSON has no word for it."""
    mean = sum(value.item() for value in values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _saved(times: list[dict[str, list[float]]]) -> float | None:
    measured = [(statistics.median(layer["dense"]), layer["refresh"] + layer["reuse"]) for layer in times if layer["dense"]]
    return sum(dense * len(sparse) - sum(sparse) for dense, sparse in measured) if measured else None
