"""The dense steps that runs of one prompt begin with, computed once.

Until its first sparse call a run has the inputs of the all-dense run of the same prompt, seed and guidance, so its
dense calls have the same outputs, bit by bit. `DenseOpening` keeps them from the one, `ResumedMethod` hands them to the
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from parkattn.dense import Dense
from parkattn.site import AttentionMethod, AttentionOutput, CallSite, Forecastable

STEPS = 0.2  # share of a run that is kept: what most settings leave dense
LIMIT = 12 * 2**30  # bytes on the device that the outputs may take
SHARE = 4  # and no more than this part of what is free there

Place = tuple[str, int, int, str, int]


class DenseOpening(Dense):
    """Dense attention that keeps the outputs of its first steps."""

    def __init__(self, steps: int, limit: int = LIMIT) -> None:
        self.outputs: dict[Place, Tensor] = {}
        self._last, self._limit = max(1, round(STEPS * steps)), limit
        self._room: int | None = None  # not known before the first call

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        found = super().__call__(q, k, v, site)
        if self._room is None:
            self._room = min(self._limit, torch.cuda.mem_get_info(q.device)[0] // SHARE) if q.is_cuda else self._limit
        if site.step <= self._last and found.out.nbytes <= self._room:
            self._room -= found.out.nbytes
            self.outputs[_place(site)] = found.out.detach().clone()
        return found


class ResumedMethod:
    """A method whose dense calls before its first sparse one take what is kept."""

    def __init__(self, method: AttentionMethod, opening: DenseOpening) -> None:
        self.method, self.name = method, method.name
        self.taken = 0  # calls that nothing was computed for
        self._outputs, self._same = opening.outputs, True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        kept = self._outputs.get(_place(site)) if self._same else None
        if kept is None:
            found = self.method(q, k, v, site)
        else:

            def take() -> Tensor:
                self.taken += 1
                return kept.clone()

            found = self.method(q, k, v, dataclasses.replace(site, dense=take))
        self._same = self._same and found.stats.phase == "dense"
        return found

    @property
    def state_bytes(self) -> int:
        return self.method.state_bytes

    @property
    def tolerance(self) -> float:
        return self.method.tolerance if isinstance(self.method, Forecastable) else 0.0

    def computes(self, site: CallSite) -> bool:
        return isinstance(self.method, Forecastable) and self.method.computes(site)

    def reset(self) -> None:
        self.method.reset()


class Openings:
    """The opening of the reference that was last made; none where runs are timed."""

    def __init__(self, *, timed: bool) -> None:
        self._timed = timed
        self._last: tuple[str, DenseOpening] | None = None

    def begin(self, reference: str, steps: int) -> DenseOpening | None:
        """What makes a reference, by name, in the place of plain dense attention; None: that itself."""
        self._last = None if self._timed else (reference, DenseOpening(steps))
        return None if self._last is None else self._last[1]

    def resumed(self, reference: str, make: Callable[[], AttentionMethod]) -> ResumedMethod | None:
        """The method for a run that is compared with this reference; None, and nothing made, where its opening is not
        there.
        """
        return ResumedMethod(make(), self._last[1]) if self._last is not None and self._last[0] == reference else None


def _place(site: CallSite) -> Place:
    return site.transformer, site.layer, site.step, site.branch, site.video
