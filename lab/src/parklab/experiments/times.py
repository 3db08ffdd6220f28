"""What a plan and a call of attention take, in milliseconds of one layer: means over calls of a dense run that are in
no table.

plan_ms        a run's first plan
later_plan_ms  one after it, which may start from it
attention_ms   attention over the kept blocks, and what the method does to its output
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from parkattn.planned import PlannedMethod
from parkattn.site import AttentionMethod
from parklab.bench.methods import parts_of_call
from parklab.bench.timing import Call, least_ms, median_ms
from parklab.experiments.calibration import scheduled_phases
from parklab.experiments.captures import CapturedCall
from parklab.experiments.results import NOT_RUN, CellRecords, Result, nothing_run
from parklab.experiments.tables import Table, columns_of, without_empty
from parklab.metrics.budget import leaves_sparse, no_sparse_calls
from parklab.store import Record

GPU_REPEATS, CPU_REPEATS = 3, 7  # medians of the former, the least of the latter
COLUMNS = columns_of(
    "method | asked | density:3 | first plan, ms:2 | later plan, ms:2 | attention, ms:2 | plans per sparse call:3 | "
    "sparse call, ms:2 | of dense:3 | note"
)


def time_method(method: AttentionMethod, calls: Sequence[CapturedCall], steps: int, layers: int) -> dict[str, float]:
    """steps, layers: of a whole run, over which its schedule shares out plans."""
    times = _time_calls(method, calls)
    return times | plans_in_run(method, steps, layers) if isinstance(method, PlannedMethod) else times


def plans_in_run(method: PlannedMethod, steps: int, layers: int) -> dict[str, float]:
    """How many plans a run makes, how many of them are a layer's first, and how many calls share them."""
    by_layer = scheduled_phases(method, steps, layers)
    plans, reused = (sum(phases[name] for phases in by_layer) for name in ("refresh", "reuse"))
    return {
        "plans": plans,
        "first_plans": sum(phases["refresh"] > 0 for phases in by_layer),
        "sparse_calls": plans + reused,
    }


def sparse_call_ms(times: Mapping[str, float]) -> float:
    """Attention, and each plan shared among the sparse calls between it and the next."""
    if "plans" not in times:
        return times["attention_ms"]
    planning = (
        times["first_plans"] * times["plan_ms"] + (times["plans"] - times["first_plans"]) * times["later_plan_ms"]
    )
    return times["attention_ms"] + planning / times["sparse_calls"]


@torch.no_grad()
def _time_calls(method: AttentionMethod, calls: Sequence[CapturedCall]) -> dict[str, float]:
    """Of a method without plans attention alone; calls that a schedule leaves dense are left out."""
    found = []
    for call in calls:
        values, site = call.site.values, call.site
        assert values is not None
        if not isinstance(method, PlannedMethod):
            found.append({"density": 1.0, "attention_ms": _timed(partial(method, call.q, call.k, values, site), call)})
        elif leaves_sparse(method, site):
            # a later plan is made one step after, which the run must have
            site = dataclasses.replace(site, step=max(0, min(site.step, (site.total_steps or site.step + 2) - 2)))
            plan, parts = parts_of_call(method, call.q, call.k, values, site)
            times = {name: _timed(part, call) for name, part in parts.items()}
            attention = times["attend"] + times.get("repair", 0.0)
            row = {"plan_ms": times["plan"], "later_plan_ms": times["later_plan"], "attention_ms": attention}
            found.append({"density": plan.density().mean().item(), **row})
    if not found:
        raise no_sparse_calls(method.name)
    return {name: statistics.fmean(row[name] for row in found) for name in found[0]} | {"calls": len(found)}


def _timed(part: Call, on: CapturedCall) -> float:
    return median_ms(part, GPU_REPEATS) if on.q.is_cuda else least_ms(part, CPU_REPEATS)


def times_result(gathered: CellRecords) -> Result:
    if not gathered.cells:
        advice = "run without it, on a machine that does nothing else"
        return Result(None, note=f"{NOT_RUN}: --untimed takes no times; {advice}")
    records = {cell.name: gathered.records.get(cell.name) for cell in gathered.cells}
    if not any(records.values()):
        return nothing_run(gathered)
    timed = (record for record in records.values() if record and record["request"]["method"] == "dense")
    dense = next((record["times"]["attention_ms"] for record in timed), None)
    rows = []
    for cell in gathered.cells:
        asked, record = cell.request, records[cell.name]
        head = asked["method"], "" if asked["density"] is None else f"{asked['density']:g}"
        if record is None:
            rows.append((*head, *(None,) * (len(COLUMNS) - 3), f"{NOT_RUN}: {gathered.why_not([cell])}"))
            continue
        times = record["times"]
        parts = (times.get(name) for name in ("density", "plan_ms", "later_plan_ms", "attention_ms"))
        shared = times["plans"] / times["sparse_calls"] if "plans" in times else None
        whole = sparse_call_ms(times)
        rows.append((*head, *parts, shared, whole, whole / dense if dense else None, ""))
    table = without_empty(Table(COLUMNS, tuple(rows)), 2)
    return Result(table, note=_measured_on(next(filter(None, records.values()))))


def _measured_on(record: Record) -> str:
    calls, (heads, tokens) = record["times"]["calls"], record["shape"]
    on_gpu = record["request"]["device"].startswith("cuda")
    repeats = f"medians of {GPU_REPEATS}" if on_gpu else f"the least of {CPU_REPEATS}"
    return f"Means over up to {calls} calls of {heads} heads and {tokens:,} tokens, one layer each; {repeats} repeats."
