"""Where anchors lie: how many a run has, at which steps, and how far a plan made at one reaches."""

from __future__ import annotations

import functools
import math

from parkattn.settings import Timetable
from parkattn.site import CallSite


def anchor_count(when: Timetable, total_steps: int | None) -> int:
    """Anchors of a run: as many per unit of sqrt(steps) as in a run of reference_steps, at most a third of the steps.

    A run of fewer steps passes the same noise levels in longer strides: with as many anchors in proportion each would
    serve a longer stretch of the run, with as many in number each would cost more of it. Between the two lies the
    square root.
    """
    if total_steps is None:
        raise ValueError("total_steps: expected the number of steps, got None; pass it, or set anchors=None.")
    assert when.anchors is not None
    if total_steps >= when.reference_steps:
        return min(when.anchors, total_steps)
    # 1e-9 because 10 * sqrt(12.5 / 50) must stay 5
    count = math.ceil(when.anchors * math.sqrt(total_steps / when.reference_steps) - 1e-9)
    return max(1, min(count, total_steps // 3))


# the last share of a run has no anchor of its own: what is wrong there has no later step to grow in
UNANCHORED = 1 / 9


@functools.lru_cache(maxsize=64)
def anchor_steps(count: int, total_steps: int, noise_levels: tuple[float, ...] | None = None) -> tuple[int, ...]:
    """Steps at equal distances of log signal-to-noise, from the first step to UNANCHORED before the end, each once.

    Between two steps attention changes about as much as the log of signal to noise does (docs/corrections.md).
    """
    reached = log_signal_to_noise(total_steps, noise_levels)
    end = _anchored_until(reached)
    steps = [0]
    for j in range(1, min(count, total_steps)):
        wanted = reached[0] + (end - reached[0]) * j / count
        nearest = min(range(total_steps), key=lambda step: abs(reached[step] - wanted))
        steps.append(max(steps[-1] + 1, nearest))
    # steps that were pushed past the last one move back
    latest = total_steps - 1
    for j in range(len(steps) - 1, 0, -1):
        steps[j] = min(steps[j], latest)
        latest = steps[j] - 1
    return tuple(steps)


# in a short run a plan and its residual serve for this share of the log signal-to-noise that has anchors
REACH = 0.22


def outlived(when: Timetable, last: int, site: CallSite) -> bool:
    """Whether a plan of step `last` is too old at this step of a run of fewer than reference_steps.

    What the last share of a run does has no later step to grow in.
    """
    total, levels = levels_of(site)
    if total >= when.reference_steps:
        return False
    reached = log_signal_to_noise(total, levels)
    end = _anchored_until(reached)
    if end < reached[0]:  # a run towards noise, as inversion is
        reached, end = [-level for level in reached], -end
    return min(reached[site.step], end) - min(reached[last], end) > REACH * (end - reached[0])


def passed_since_first(site: CallSite) -> float:
    """The share of a run's log signal-to-noise behind this step: 0 after the first step, 1 where anchors end."""
    total, levels = levels_of(site)
    if site.step < 2 or total < 3:
        return 0.0
    reached = log_signal_to_noise(total, levels)
    whole = _anchored_until(reached) - reached[1]
    return min(1.0, max(0.0, (reached[min(site.step, total - 1)] - reached[1]) / whole)) if whole else 1.0


def _anchored_until(reached: list[float]) -> float:
    """The log signal-to-noise up to which a run has anchors."""
    last = min(len(reached) - 1, len(reached) * (1 - UNANCHORED))
    return reached[math.floor(last)] * (1 - last % 1) + reached[math.ceil(last)] * (last % 1)


# by how much a level may lie outside 0 to 1: schedulers shift levels in float32
ROUNDED = 1e-5


def log_signal_to_noise(total_steps: int, noise_levels: tuple[float, ...] | None = None) -> list[float]:
    """Of each step, from its noise level s: log (1 - s) / s where levels end at 1 (flow), -log s where they go beyond.

    Without levels: those of a flow that falls linearly. The first step may be pure noise, minus infinity: it counts as
    one more stride of the length of the next. Noise below a hundredth counts as a hundredth: it hides nothing.
    """
    levels = noise_levels or tuple(1 - step / total_steps for step in range(total_steps))
    signal = (lambda level: 1 - level) if max(levels) <= 1 + ROUNDED else (lambda level: 1.0)
    reached = [math.log(max(signal(level), 1e-9) / max(level, 0.01)) for level in levels]
    if len(reached) > 2:
        reached[0] = max(reached[0], 2 * reached[1] - reached[2])
    return reached


def levels_of(site: CallSite) -> tuple[int, tuple[float, ...] | None]:
    """Steps, and the noise level of each where they can be read as such; without them a run falls linearly."""
    total, levels = site.total_steps or 0, site.noise_levels
    return total, levels if levels is not None and len(levels) == total and _are_levels(levels) else None


@functools.lru_cache(maxsize=64)
def _are_levels(levels: tuple[float, ...]) -> bool:
    """Finite, not below 0, and in one direction: a schedule that goes back, or stays, says nothing about distances."""
    if not all(math.isfinite(level) and level >= -ROUNDED for level in levels):
        return False
    return list(levels) in (sorted(levels), sorted(levels, reverse=True)) and (
        len(levels) < 2 or levels[0] != levels[-1]
    )
