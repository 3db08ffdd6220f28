"""Watching a method at work: what each attention call did, how long it took, and how much attention it caught.

The observer is itself an AttentionMethod that passes every call on. Recall needs the queries and keys, so it is measured
here, on a few query rows of each call; the time that takes is kept apart and never reported as the method's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parkattn.plan import Blocks, Plan
from parkattn.site import AttentionMethod, AttentionOutput, AttentionStats, CallSite, Forecastable
from parklab.metrics.retrieval import attention_recall, recall_summary

PHASES = ("dense", "anchor", "refresh", "reuse")
RECALL_ROWS = 128


@dataclass(frozen=True)
class Call:
    site: CallSite
    stats: AttentionStats
    marks: tuple[Any, Any]  # when the call began and ended: seconds, or events on a GPU
    recall: Tensor | None  # [b h]

    @property
    def seconds(self) -> float:
        begin, end = self.marks
        return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class Observer:
    """recall_rows: query rows per call on which recall is measured, 0 for none."""

    def __init__(self, method: AttentionMethod, *, recall_rows: int = 0, on_call: Callable[[Call], None] | None = None) -> None:
        self.method = method
        self.name = method.name
        self.recall_rows = recall_rows
        self.calls: list[Call] = []
        self.began: float | None = None
        self.measuring: dict[int, float] = {}  # step -> seconds spent on measuring, not on generating
        self.dense_sample: float | None = None  # seconds of a dense call, where the method made none
        self._on_call = on_call
        self._step, self._branch = -1, ""  # the step under way and the branch that came first in it

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        if self.began is None:
            self.began = time.perf_counter()
        begin = _mark(q.device)
        out, stats = self.method(q, k, v, site)
        marks = (begin, _mark(q.device))
        recall = self._recall(q, k, site, stats)
        if stats.phase != "dense":
            self._time_dense(site, q.device)
        call = Call(dataclasses.replace(site, dense=None, key_valid=None), dataclasses.replace(stats, plan=None), marks, recall)
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)
        return AttentionOutput(out, stats)

    @property
    def state_bytes(self) -> int:
        return self.method.state_bytes

    @property
    def tolerance(self) -> float:
        return self.method.tolerance if isinstance(self.method, Forecastable) else 0.0

    def computes(self, site: CallSite) -> bool:
        return isinstance(self.method, Forecastable) and self.method.computes(site)

    def reset(self) -> None:
        """What was seen is kept: it is read after the pipeline has let go of the method."""
        self.method.reset()

    def _recall(self, q: Tensor, k: Tensor, site: CallSite, stats: AttentionStats) -> Tensor | None:
        # guidance doubles the calls without adding a layer or a head: the first branch of a step speaks for it
        if site.step != self._step:
            self._step, self._branch = site.step, site.branch
        if not self.recall_rows or stats.plan is None or site.branch != self._branch:
            return None
        with self._apart(site.step, q.device):
            return sampled_recall(q, k, stats.plan, self.recall_rows, scale=site.scale)

    def _time_dense(self, site: CallSite, device: torch.device) -> None:
        """One dense call in the last step of a run that had none: without it nobody knows what was saved."""
        last = site.total_steps is not None and site.step == site.total_steps - 1
        if not last or site.layer != 0 or site.dense is None or torch.is_grad_enabled():
            return
        if self.dense_sample is not None or any(call.stats.phase == "dense" for call in self.calls):
            return
        with self._apart(site.step, device):
            site.dense()  # the first call may choose its kernel
            synchronise(device)
            begin = time.perf_counter()
            site.dense()
            synchronise(device)
            self.dense_sample = time.perf_counter() - begin

    @contextlib.contextmanager
    def _apart(self, step: int, device: torch.device) -> Iterator[None]:
        """What is done inside is measuring, not generating."""
        synchronise(device)
        begin = time.perf_counter()
        yield
        synchronise(device)
        self.measuring[step] = self.measuring.get(step, 0.0) + time.perf_counter() - begin


def sampled_recall(q: Tensor, k: Tensor, plan: Plan, rows: int, *, scale: float | None = None) -> Tensor:
    """attention_recall over `rows` evenly spread queries: [b h]."""
    chosen = torch.linspace(0, q.shape[2] - 1, min(rows, q.shape[2]), device=q.device).round().long()
    queries = Blocks(plan.queries.labels[..., chosen], plan.queries.order, plan.queries.offsets)
    return attention_recall(q[:, :, chosen], k, dataclasses.replace(plan, queries=queries), scale=scale)


def synchronise(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measured(observer: Observer, step_ends: list[float], total_steps: int) -> dict[str, Any]:
    """Plain JSON values: per step, per layer and head, and in all. step_ends: clock readings at the end of every step."""
    calls = observer.calls
    sparse = [call for call in calls if call.stats.phase not in ("dense", "anchor")]
    steps = [_step_row(step, [c for c in calls if c.site.step == step]) for step in range(total_steps)]
    starts = [observer.began if observer.began is not None else (step_ends[0] if step_ends else 0.0), *step_ends[:-1]]
    for row, begin, end in zip(steps, starts, step_ends, strict=False):
        row["seconds"] = end - begin - observer.measuring.get(row["step"], 0.0)
    recalls = [call.recall.flatten().float().cpu() for call in calls if call.recall is not None]
    return {
        "steps": steps,
        "heat": {"density": _per_head(sparse, lambda c: c.stats.density), "recall": _per_head(sparse, lambda c: c.recall)},
        "map": _layer_step_map(calls, total_steps),
        "density": _mean([c.stats.density for c in calls]) if calls else 1.0,
        "density_sparse_steps": _mean([c.stats.density for c in sparse]),
        "recall": recall_summary(torch.cat(recalls)) if recalls else None,
        "phase_seconds": {phase: sum(row.get("seconds", 0.0) for row in steps if row["phase"] == phase) for phase in PHASES},
        "phase_steps": {phase: sum(row["phase"] == phase for row in steps) for phase in PHASES},
        "attention_seconds": {phase: sum(c.seconds for c in calls if c.stats.phase == phase) for phase in PHASES},
        "attention_seconds_saved": _saved(calls, observer.dense_sample),
        "attention_saved_against": _saved_against(calls, observer.dense_sample),
        "measuring_seconds": sum(observer.measuring.values()),
    }


def _saved(calls: list[Call], dense_sample: float | None) -> float | None:
    """What as many dense calls would have taken, less what these took; None where no dense call was timed."""
    dense = [call.seconds for call in calls if call.stats.phase == "dense"]
    if not dense and dense_sample is not None:
        dense = [dense_sample]
    return statistics.median(dense) * len(calls) - sum(call.seconds for call in calls) if dense else None


def _saved_against(calls: list[Call], dense_sample: float | None) -> str | None:
    """Which dense calls `_saved` is an estimate from: "run", "sample" (one that was timed apart), or None."""
    if any(call.stats.phase == "dense" for call in calls):
        return "run"
    return None if dense_sample is None else "sample"


def _step_row(step: int, calls: list[Call]) -> dict[str, Any]:
    seen = {call.stats.phase for call in calls}
    # layers may differ (dense_layers): a step counts as what its most eventful layer did
    phase = next((name for name in ("anchor", "refresh", "reuse") if name in seen), "dense")
    return {
        "step": step,
        "phase": phase,
        "density": _mean([c.stats.density for c in calls]) if calls else 1.0,
        "recall": _mean([c.recall for c in calls if c.recall is not None]),
        "attention_seconds": sum(c.seconds for c in calls),
    }


def _per_head(calls: list[Call], value: Callable[[Call], Tensor | None]) -> list[list[float]] | None:
    """[layers][heads]: mean over steps, branches and batch."""
    sums: dict[tuple[str, int], list[Tensor]] = {}
    for call in calls:
        found = value(call)
        if found is not None:
            sums.setdefault((call.site.transformer, call.site.layer), []).append(found.float().mean(0).cpu())
    return [torch.stack(rows).mean(0).tolist() for _, rows in sorted(sums.items())] or None


def _layer_step_map(calls: list[Call], total_steps: int) -> dict[str, Any]:
    """layers: [transformer, layer] of each row; density, recall: [layers][steps], None where nothing was measured."""
    rows = sorted({(call.site.transformer, call.site.layer) for call in calls})
    found: dict[str, dict[tuple[str, int, int], list[Tensor]]] = {"density": {}, "recall": {}}
    for call in calls:
        place = call.site.transformer, call.site.layer, call.site.step
        for name, value in (("density", call.stats.density), ("recall", call.recall)):
            if value is not None:
                found[name].setdefault(place, []).append(value)
    maps = {
        name: [[_mean(values.get((*row, step), [])) for step in range(total_steps)] for row in rows] if values else None
        for name, values in found.items()
    }
    return {"layers": [list(row) for row in rows], **maps}


def _mean(values: list[Tensor]) -> float | None:
    return torch.stack([v.float().mean() for v in values]).mean().item() if values else None
