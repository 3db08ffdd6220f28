"""What a run tells: its engine's log as plain numbers per step, layer and head, and how much attention the plans
caught.

Recall needs the queries and keys, so it is measured while the run goes on, by an engine's `watch`, on a few query rows
of each call; the time that takes is kept apart and never reported as the method's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parkattn.engine import LoggedCall
from parkattn.engine.summary import Summary
from parkattn.plan import Blocks, Plan
from parkattn.site import AttentionStats, CallSite
from parklab.metrics.retrieval import attention_recall, recall_summary

PHASES = ("dense", "anchor", "refresh", "reuse")
RECALL_ROWS = 128


class Observer:
    """An engine's `watch`. recall_rows: query rows per call on which recall is measured, 0 for none."""

    def __init__(
        self, *, recall_rows: int = 0, on_call: Callable[[CallSite, AttentionStats], None] = lambda site, stats: None
    ) -> None:
        self.recall_rows = recall_rows
        self.recalls: list[Tensor | None] = []  # [b h] of every call in the log
        self.measuring: dict[int, float] = {}  # step -> seconds spent on measuring, not on generating
        self.dense_sample: float | None = None  # seconds of a dense call, where no layer made one beside others
        self._on_call = on_call
        self._step, self._branch = -1, ""  # the step under way and the branch that came first in it
        self._dense, self._others = set[tuple[str, int]](), set[tuple[str, int]]()  # layers that had such calls

    def __call__(self, q: Tensor, k: Tensor, site: CallSite, stats: AttentionStats) -> None:
        self.recalls.append(self._recall(q, k, site, stats))
        (self._dense if stats.phase == "dense" else self._others).add((site.transformer, site.layer))
        if stats.phase != "dense":
            self._time_dense(site, q.device)
        self._on_call(site, stats)

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
        if (
            not last
            or site.dense is None
            or torch.is_grad_enabled()
            or self.dense_sample is not None
            or self._dense & self._others
        ):
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


def measured(
    calls: Sequence[LoggedCall], summary: Summary, observer: Observer, step_ends: list[float], total_steps: int
) -> dict[str, Any]:
    """Plain JSON values: per step, per layer and head, and in all. step_ends:
    clock readings at the end of every step.
    """
    # a log begins with its run, an observer may be older
    recalls = observer.recalls[len(observer.recalls) - len(calls) :]
    seen = list(zip(calls, recalls, strict=True))
    sparse = [each for each in seen if each[0].stats.phase not in ("dense", "anchor")]
    steps = [_step_row(step, [each for each in seen if each[0].site.step == step]) for step in range(total_steps)]
    starts = [calls[0].began if calls else (step_ends[0] if step_ends else 0.0), *step_ends[:-1]]
    for row, begin, end in zip(steps, starts, step_ends, strict=False):
        row["seconds"] = end - begin - observer.measuring.get(row["step"], 0.0)
    caught = [recall.flatten().float().cpu() for recall in recalls if recall is not None]
    return {
        "steps": steps,
        "heat": {"density": _per_head([(call, call.stats.density) for call, _ in sparse]), "recall": _per_head(sparse)},
        "map": _layer_step_map(seen, total_steps),
        "density": _mean([call.stats.density for call in calls]) if calls else 1.0,
        "density_sparse_steps": _mean([call.stats.density for call, _ in sparse]),
        "recall": recall_summary(torch.cat(caught)) if caught else None,
        "phase_seconds": {
            phase: sum(row.get("seconds", 0.0) for row in steps if row["phase"] == phase) for phase in PHASES
        },
        "phase_steps": {phase: sum(row["phase"] == phase for row in steps) for phase in PHASES},
        "attention_seconds": {phase: summary.attention_seconds.get(phase, 0.0) for phase in PHASES},
        **_saved(calls, summary, observer.dense_sample),
        "measuring_seconds": sum(observer.measuring.values()),
        "summary": summary.to_dict(),
    }


def _saved(calls: Sequence[LoggedCall], summary: Summary, dense_sample: float | None) -> dict[str, Any]:
    """The summary's, by the dense calls of the "run"; else by a "sample", a dense call that was timed apart; else not
    known.
    """
    saved, against = summary.seconds_saved, "run"
    if saved is None and dense_sample is not None:
        saved, against = sum(dense_sample - call.seconds() for call in calls if call.stats.phase != "dense"), "sample"
    return {"attention_seconds_saved": saved, "attention_saved_against": None if saved is None else against}


Seen = tuple[LoggedCall, Tensor | None]  # a call and a value [b h] of it


def _step_row(step: int, seen: list[Seen]) -> dict[str, Any]:
    phases = {call.stats.phase for call, _ in seen}
    # layers may differ (dense_layers): a step counts as what its most eventful layer did
    phase = next((name for name in ("anchor", "refresh", "reuse") if name in phases), "dense")
    return {
        "step": step,
        "phase": phase,
        "density": _mean([call.stats.density for call, _ in seen]) if seen else 1.0,
        "recall": _mean([recall for _, recall in seen if recall is not None]),
        "attention_seconds": sum(call.seconds() for call, _ in seen),
    }


def _per_head(seen: Sequence[Seen]) -> list[list[float]] | None:
    """[layers][heads]: mean over steps, branches and batch."""
    sums: dict[tuple[str, int], list[Tensor]] = {}
    for call, value in seen:
        if value is not None:
            sums.setdefault((call.site.transformer, call.site.layer), []).append(value.float().mean(0).cpu())
    return [torch.stack(rows).mean(0).tolist() for _, rows in sorted(sums.items())] or None


def _layer_step_map(seen: list[Seen], total_steps: int) -> dict[str, Any]:
    """layers: [transformer, layer] of each row; density, recall: [layers][steps], None where nothing was measured."""
    rows = sorted({(call.site.transformer, call.site.layer) for call, _ in seen})
    found: dict[str, dict[tuple[str, int, int], list[Tensor]]] = {"density": {}, "recall": {}}
    for call, recall in seen:
        place = call.site.transformer, call.site.layer, call.site.step
        for name, value in (("density", call.stats.density), ("recall", recall)):
            if value is not None:
                found[name].setdefault(place, []).append(value)
    maps = {
        name: [[_mean(values.get((*row, step), [])) for step in range(total_steps)] for row in rows] if values else None
        for name, values in found.items()
    }
    return {"layers": [list(row) for row in rows], **maps}


def _mean(values: list[Tensor]) -> float | None:
    return torch.stack([v.float().mean() for v in values]).mean().item() if values else None
