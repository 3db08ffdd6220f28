"""Forwards that are not run: their output is the straight line through the last two that were (docs/forecast.md).

    u        log signal-to-noise of a step, the variable of the line
    y1, y2   the last two computed outputs of a branch, at u1 and u2;  h = u2 - u1, g = u - u2
    line     y2 + g / h (y2 - y1), whose error grows as g (g + h)

Each computed forward is compared with the line: e = |line - y| / |y|. By c = e / (g (g + h)) of the last comparison, a
forecast will be wrong by c g (g + h), and du / (1 + exp u) of that goes into the latents, as a share of the signal in
them, on the way to the next step. A row of forecasts goes on as long as the sum of these shares is within the
tolerance. In runs of fewer than CLOSE steps the larger c of the last two comparisons counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parkattn.anchors import levels_of, log_signal_to_noise
from parkattn.site import CallSite

LONGEST = 4  # steps forecast in a row: an error that has grown since is seen no later
# steps of a run whose comparisons lie close: below, one alone may be where a curve that bends crosses its line
CLOSE = 50


@dataclass
class ForwardLog:
    """Forwards of a run in which some may be forecast."""

    computed: int = 0
    forecast: int = 0
    steps: set[int] = field(default_factory=set)
    """Those that were forecast."""
    errors: list[Callable[[], float]] = field(default_factory=list)
    """Of the line at each computed step that ended a row of forecasts."""
    off: Counter[str] = field(default_factory=Counter)
    """Why forwards were computed that nobody asked the forecast about."""

    def take(self, other: ForwardLog) -> None:
        self.computed, self.forecast = self.computed + other.computed, self.forecast + other.forecast
        self.steps |= other.steps
        self.errors += other.errors
        self.off.update(other.off)


class _Comparison(NamedTuple):
    error: Callable[[], float]  # the largest of a step's branches; waits for the GPU
    stretch: float  # g (g + h)

    def growth(self) -> float:
        return self.error() / self.stretch


class _ComputedForward(NamedTuple):
    step: int
    form: Any  # size and type of what went in and came out; no line joins outputs of two forms
    output: Tensor
    compared: bool  # with the line through the two before it


class Forecast:
    """The last two outputs of each branch of a run, and the error of the last line. tolerance 0: all is computed."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.reset()

    def reset(self) -> None:
        self._held: dict[str, list[_ComputedForward]] = {}
        self._transformer: str | None = None
        self._step: int | None = None  # the one that was decided about last
        self._skips = False  # what was decided
        self._computed_at = -1  # the last step that was not to be forecast
        self._row = 0  # steps forecast since the last computed one
        self._left_behind = 0.0  # in the latents, by those
        self._seen: set[str] = set()  # branches of the step
        self._errors: list[Tensor] = []  # of the branches of the step
        self._stretch = 0.0  # g (g + h) of those
        self._compared: list[_Comparison] = []  # the last two; empty after a step without any
        self._growth: float | None = None  # by those; None: not read yet

    @property
    def nbytes(self) -> int:
        return sum(each.output.nbytes for held in self._held.values() for each in held)

    def output(self, site: CallSite, form: Any, must_compute: Callable[[], bool], log: ForwardLog) -> Tensor | None:
        """The forecast of this forward; None: compute it, and `learn`. The first of a step decides for all of them."""
        if site.transformer != self._transformer or (self._step is not None and site.step < self._step):
            self.reset()  # another expert, or another run
            self._transformer = site.transformer
        if site.step != self._step:
            self._end_step(log)
            self._skips = not must_compute() and self._may_skip(site)
            self._step = site.step
            self._computed_at, self._row = (self._computed_at, self._row + 1) if self._skips else (site.step, self._row)
            self._seen.clear()
        if site.branch in self._seen:  # two videos in turn: whose outputs are held is not known
            self._held.pop(site.branch, None)
        self._seen.add(site.branch)
        line = self._line(site, form) if self._skips else None
        if line is not None:
            log.forecast += 1
            log.steps.add(site.step)
            return line.to(self._held[site.branch][-1].output.dtype)
        return None

    def learn(self, site: CallSite, form: Any, output: Tensor, log: ForwardLog) -> None:
        """Keep what was computed, after comparing the line with it."""
        log.computed += 1
        line, held = None if self._skips else self._line(site, form), self._held.get(site.branch, [])
        if line is not None:
            # the largest of a batch, whose elements are videos or branches
            missed, size = (x.flatten(1).norm(dim=1) for x in (line - output.float(), output.float()))
            self._errors.append((missed / size.clamp(min=torch.finfo(torch.float32).tiny)).max())
            self._stretch = self._gaps(site, held)[2]
        kept = [each for each in held[-1:] if each.form == form and each.step < site.step]
        copy = output.detach().clone()  # because a pipeline may write into its output
        self._held[site.branch] = [*kept, _ComputedForward(site.step, form, copy, line is not None)]

    def _line(self, site: CallSite, form: Any) -> Tensor | None:
        held = self._held.get(site.branch, [])
        if len(held) < 2 or held[-1].form != form:
            return None
        g, h, stretch = self._gaps(site, held)
        first, last = (each.output.float() for each in held)
        return torch.lerp(first, last, 1 + g / h) if stretch > 0 else None

    def _gaps(self, site: CallSite, held: list[_ComputedForward]) -> tuple[float, float, float]:
        """g, h and g (g + h), 0 where noise does not fall: some schedulers ask twice at one level."""
        u = _positions(site)
        g, h = u[site.step] - u[held[1].step], u[held[1].step] - u[held[0].step]
        return g, h, g * (g + h) if g > 0 and h > 0 else 0.0

    def _may_skip(self, site: CallSite) -> bool:
        if site.step >= (site.total_steps or 0) - 1 or self._row >= LONGEST:
            return False
        # a branch that the last computed step did not have is over
        self._held = {branch: held for branch, held in self._held.items() if held[-1].step >= self._computed_at}
        if not self._held or not all(held[-1].compared for held in self._held.values()):
            return False
        wanted = 1 if (site.total_steps or 0) >= CLOSE else 2
        if self._growth is None and len(self._compared) >= wanted:
            growths = [each.growth() for each in self._compared[-wanted:]]  # once after each computed step
            self._growth = max(growths) if all(map(math.isfinite, growths)) else math.nan  # max may pass NaN over
        stretches, u = [self._gaps(site, held)[2] for held in self._held.values()], _positions(site)
        if self._growth is None or min(stretches) <= 0:
            return False
        error = self._growth * max(stretches)
        left_behind = self._left_behind + error * (u[site.step + 1] - u[site.step]) / (1 + math.exp(u[site.step]))
        if not left_behind <= self.tolerance:  # nor where it is NaN
            return False
        self._left_behind = left_behind
        return True

    def _end_step(self, log: ForwardLog) -> None:
        """A computed step's errors are read when the next step is decided about."""
        if self._step is not None and not self._skips:
            self._growth = None
            if self._errors:
                self._compared = [
                    *self._compared[-1:],
                    _Comparison(torch.stack(self._errors).max().item, self._stretch),
                ]
                if self._row:
                    log.errors.append(self._compared[-1].error)
            else:
                self._compared = []
            self._errors, self._row, self._left_behind = [], 0, 0.0


def _positions(site: CallSite) -> list[float]:
    return log_signal_to_noise(*levels_of(site))
