"""What a plan and a call of attention take, in milliseconds of one layer: means over calls of a dense run that are in no table.

plan_ms        a run's first plan
later_plan_ms  one after it, which may start from it
attention_ms   attention over the kept blocks, and what the method does to its output
sparse_call_ms attention, and each plan shared among the sparse calls between it and the next
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from parkattn.bench.methods import parts_of_call
from parkattn.bench.timing import median_ms
from parkattn.experiments.calibration import scheduled_phases
from parkattn.experiments.captures import Captured
from parkattn.experiments.results import NOT_RUN, Gathered, Result, nothing_run
from parkattn.experiments.tables import Column, Table, without_empty
from parkattn.planned import PlannedMethod
from parkattn.reuse import History
from parkattn.site import AttentionMethod
from parkattn.store import Record

REPEATS = 3
COLUMNS = (
    Column("method"), Column("asked"), Column("density", 3), Column("first plan, ms", 2), Column("later plan, ms", 2),
    Column("attention, ms", 2), Column("plans per sparse call", 3), Column("sparse call, ms", 2), Column("of dense", 3), Column("note"),
)  # fmt: skip


def time_method(method: AttentionMethod, calls: Sequence[Captured], steps: int, layers: int) -> dict[str, float]:
    """steps, layers: of a whole run, over which its schedule shares out plans."""
    times = _time_calls(method, calls)
    if not isinstance(method, PlannedMethod):
        return times | {"sparse_call_ms": times["attention_ms"]}
    return times | plans_shared_out(times, scheduled_phases(method, steps, layers), layers)


def plans_shared_out(times: Mapping[str, float], phases: Counter[str], layers: int) -> dict[str, float]:
    """phases: how many calls of a run are what. A layer's first plan is made once."""
    sparse, plans = phases["refresh"] + phases["reuse"], phases["refresh"]
    first = min(layers, plans)
    planning = first * times["plan_ms"] + (plans - first) * times["later_plan_ms"]
    return {"plans_per_call": plans / sparse, "sparse_call_ms": times["attention_ms"] + planning / sparse}


@torch.no_grad()
def _time_calls(method: AttentionMethod, calls: Sequence[Captured]) -> dict[str, float]:
    """Of a method without plans attention alone; calls that a schedule leaves dense are left out."""
    found = []
    for call in calls:
        values, site = call.site.values, call.site
        assert values is not None
        if not isinstance(method, PlannedMethod):
            found.append({"density": 1.0, "attention_ms": median_ms(partial(method, call.q, call.k, values, site), REPEATS)})
        elif method.schedule.phase(site, History()).name != "dense":
            # a later plan is made one step after, which the run must have
            site = dataclasses.replace(site, step=max(0, min(site.step, (site.total_steps or site.step + 2) - 2)))
            plan, parts = parts_of_call(method, call.q, call.k, values, site)
            times = {name: median_ms(part, REPEATS) for name, part in parts.items()}
            attention = times["attend"] + times.get("repair", 0.0)
            row = {"plan_ms": times["plan"], "later_plan_ms": times["later_plan"], "attention_ms": attention}
            found.append({"density": plan.density().mean().item(), **row})
    if not found:
        raise ValueError(f"method: expected one with sparse calls among those captured, got {method.name}; ask for more steps.")
    return {name: statistics.fmean(row[name] for row in found) for name in found[0]} | {"calls": len(found)}


def times_result(gathered: Gathered) -> Result:
    if not gathered.cells:
        return Result(None, note=f"{NOT_RUN}: --untimed takes no times; run without it, on a machine that does nothing else")
    records = {cell.name: gathered.records.get(cell.name) for cell in gathered.cells}
    if not any(records.values()):
        return nothing_run(gathered)
    dense = next(
        (record["times"]["attention_ms"] for record in records.values() if record and record["request"]["method"] == "dense"), None
    )
    rows = []
    for cell in gathered.cells:
        asked, record = cell.request, records[cell.name]
        head = asked["method"], "" if asked["density"] is None else f"{asked['density']:g}"
        if record is None:
            rows.append((*head, *(None,) * (len(COLUMNS) - 3), f"{NOT_RUN}: {gathered.why_not([cell])}"))
            continue
        times = record["times"]
        parts = (times.get(name) for name in ("density", "plan_ms", "later_plan_ms", "attention_ms", "plans_per_call", "sparse_call_ms"))
        rows.append((*head, *parts, times["sparse_call_ms"] / dense if dense else None, ""))
    return Result(without_empty(Table(COLUMNS, tuple(rows)), 2), note=_measured_on(next(filter(None, records.values()))))


def _measured_on(record: Record) -> str:
    calls, (heads, tokens) = record["times"]["calls"], record["shape"]
    return f"Means over up to {calls} calls of {heads} heads and {tokens:,} tokens, one layer each; medians of {REPEATS} repeats."
