"""The seam between a model and a method: where attention is called, and what a method returns.

Everything a method may know about a call is in `CallSite`; every method, PARK and baselines alike, is an `AttentionMethod`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from parkattn.plan import Plan


class SiteKey(NamedTuple):
    """What state between steps is filed under."""

    transformer: str
    layer: int
    branch: str


@dataclass(frozen=True)
class CallSite:
    """Methods check it (`checks.expect_call_site`)."""

    layer: int = 0
    step: int = 0
    total_steps: int | None = None
    branch: str = "cond"
    transformer: str = "transformer"
    grid: tuple[int, int, int] | None = None  # (frames, height, width) of the video tokens
    text: slice | None = None  # the span of text tokens in q and k
    scale: float | None = None  # of the scores; None: d ** -0.5
    key_valid: Tensor | None = None  # [b m] bool: False where a key is padding
    values: Tensor | None = None  # v [b h m d], for planners that read values too
    noise_levels: tuple[float, ...] | None = None  # the scheduler's sigmas, one per step, where it has them
    dense: Callable[[], Tensor] | None = None  # the model's own dense attention of this call -> [b h n d]; None: PyTorch's


@dataclass(frozen=True)
class AttentionStats:
    """What happened in one call. Tensors stay on the device, so that reading them is the caller's choice."""

    phase: str  # "dense", "anchor", "refresh" or "reuse"
    reason: str
    density: Tensor  # [b h]
    estimated_mass: Tensor | None = None  # [b h]
    backend: str = ""  # what computed it and why, in one sentence; "" where the method has no choice of backends
    plan: Plan | None = None  # what was attended to; None where every pair was
    error: Tensor | None = None  # [b h] fp32: |out - dense| / |dense| over a few sampled queries, where that was asked for


class AttentionOutput(NamedTuple):
    out: Tensor  # [b h n d]
    stats: AttentionStats


@runtime_checkable
class AttentionMethod(Protocol):
    name: str

    @property
    def state_bytes(self) -> int:
        """What is held between steps."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput: ...

    def reset(self) -> None:
        """Forget everything remembered between steps."""
        ...
