"""The one calibrator: which budget (top_p, top_k, ...) makes a method compute the density one asks for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from torch import Tensor

from parkattn.planned import PlannedMethod, make_plan
from parkattn.reuse import History
from parkattn.site import CallSite

CLOSE_ENOUGH = 0.005  # of density


def solve_budget(
    density: Callable[[float], float], target: float, *, evaluations: int = 8, close: float = CLOSE_ENOUGH
) -> tuple[float, float]:
    """A budget in (0, 1] whose density is near the target, and that density: the best point tried.

    False position between 0 and 1 (Illinois): density grows with the budget and is 1 at 1.
    """
    low, high = (0.0, -target), (1.0, 1.0 - target)
    best = (1.0, 1.0)
    for _ in range(evaluations):
        value = (low[0] * high[1] - high[0] * low[1]) / (high[1] - low[1])
        value = min(max(value, 1e-3), 1.0)
        reached = density(value)
        if abs(reached - target) < abs(best[1] - target):
            best = (value, reached)
        if abs(reached - target) <= close or value >= 1.0:
            break
        # halving the end that stays keeps the other end moving
        if reached < target:
            low, high = (value, reached - target), (high[0], high[1] / 2)
        else:
            low, high = (low[0], low[1] / 2), (value, reached - target)
    return best


def density_of_sparse_calls(method: PlannedMethod, calls: Iterable[tuple[Tensor, Tensor, CallSite]]) -> float:
    """Mean density of the plans of these calls (q, k, site), without those that the method's schedule keeps dense."""
    sparse = (call for call in calls if leaves_sparse(method, call[2]))
    # one plan at a time: those of a real model are large
    found = [make_plan(q, k, method.planner, site, None).density().mean().item() for q, k, site in sparse]
    if not found:
        raise no_sparse_calls(method.name)
    return statistics.fmean(found)


def leaves_sparse(method: PlannedMethod, site: CallSite) -> bool:
    """Whether the schedule plans blocks for a call where no plan is held yet."""
    return method.schedule.phase(site, History()).name != "dense"


def no_sparse_calls(method: str) -> ValueError:
    wanted = f"method: expected one with sparse calls among those captured, got {method}"
    return ValueError(f"{wanted}, whose schedule keeps all of them dense; ask for more steps or fewer dense_layers.")
