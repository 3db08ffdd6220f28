"""The seam between a model and a method: where attention is called, and what a method returns.

Everything a method may know about a call is in `CallSite`; every method, PARK and baselines alike, is an
`AttentionMethod`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from parkattn.balance import Ranks
from parkattn.plan import Plan
from parkattn.settings import Precision


class SiteKey(NamedTuple):
    """The key of state between steps."""

    transformer: str
    layer: int
    branch: str
    video: int = 0
    batch: int = 1  # a batch of another size, or one that pairs other branches, has other videos in its places
    paired: bool = False


@dataclass(frozen=True)
class Backend:
    """The backend of the operations. Every one gives the same result up to the rounding of its dtype."""

    name: str
    """reference, triton or flashinfer."""
    reason: str = ""
    """Which kernels were chosen and why, in one sentence."""
    precision: Precision = "bf16"
    """The numbers that attention takes Q K^T in."""
    hopper: bool = False
    """Whether attention runs in the Hopper kernels."""

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow through attention; a plan never has any."""
        return self.name == "reference"


REFERENCE = Backend("reference", "PyTorch definitions")


@dataclass(frozen=True)
class CallSite:
    """Everything that a method may know about one attention call. Methods check it (`checks.expect_call_site`)."""

    layer: int = 0
    """Number of the attention layer, from 0."""
    step: int = 0
    """Denoising step, from 0."""
    total_steps: int | None = None
    """Steps of the run; None: not known."""
    branch: str = "cond"
    """Branch of guidance, such as cond or uncond; each has its own plans."""
    video: int = 0
    """Which video of a batch, where a model attends to one by one; only branches of one video share a plan."""
    paired: bool = False
    """Whether the second half of the batch is the videos of the first half again, in another branch of guidance."""
    transformer: str = "transformer"
    """Name of the transformer in the pipeline; Wan2.2 has two."""
    grid: tuple[int, int, int] | None = None
    """(frames, height, width) of the video tokens."""
    text: slice | None = None
    """The span of text tokens in q and k."""
    scale: float | None = None
    """Factor of the scores; None: d ** -0.5."""
    key_valid: Tensor | None = None
    """[b m] bool: False where a key is padding."""
    values: Tensor | None = None
    """v [b h m d], for planners that read values too."""
    noise_levels: tuple[float, ...] | None = None
    """The scheduler's sigmas, one per step, where it has them."""
    dense: Callable[[], Tensor] | None = None
    """The model's own dense attention of this call -> [b h n d]; None: PyTorch's."""
    backend: Backend | None = None
    """The backend that the method chose for the call, for its planner; None: the planner chooses."""
    ranks: Ranks | None = None
    """Those that share its heads, where `head_order` is asked for before they are spread; None: heads stay in place."""

    @property
    def text_tokens(self) -> int:
        """Number of text tokens."""
        return 0 if self.text is None else self.text.stop - self.text.start


@dataclass(frozen=True)
class AttentionStats:
    """Statistics of one call. Tensors stay on the device: reading them is the caller's choice."""

    phase: str
    """One of dense, anchor, refresh and reuse, or a word of the method's own."""
    reason: str
    """Why the call was in that phase, for people."""
    density: Tensor
    """[b h]: token pairs computed, of those that dense attention computes."""
    estimated_mass: Tensor | None = None
    """[b h]: share of the estimated attention that is kept."""
    backend: str = ""
    """The backend and its reason, in one sentence; "" where the method has no choice of backends."""
    plan: Plan | None = None
    """The pairs attended to; None where every pair was."""
    error: Tensor | None = None
    """[b h] fp32: |out - dense| / |dense| over a few sampled queries, where that was asked for."""
    imbalance: Tensor | None = None
    """[2]: the slowest rank over the mean by a new plan's density: heads in the model's order, and as assigned."""


class AttentionOutput(NamedTuple):
    """Output of a method."""

    out: Tensor
    """[b h n d]: what attention returns."""
    stats: AttentionStats
    """Statistics of the call."""


@runtime_checkable
class AttentionMethod(Protocol):
    """Anything that answers attention calls: PARK, what it is compared with, and methods of other packages."""

    name: str
    """Name in summaries and tables."""

    @property
    def state_bytes(self) -> int:
        """Bytes that are held between steps."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        """One attention call. q [b h n d], k and v [b h m d]."""
        ...

    def reset(self) -> None:
        """Forget everything remembered between steps."""
        ...


@runtime_checkable
class Forecastable(AttentionMethod, Protocol):
    """A method beside which whole forwards may be forecast (docs/forecast.md)."""

    @property
    def tolerance(self) -> float:
        """0: every forward is computed."""
        ...

    def computes(self, site: CallSite) -> bool:
        """Whether the forwards of this step must run, as dense steps and anchors must. The site says only the time."""
        ...


@runtime_checkable
class HeadBalancing(Protocol):
    """A method that holds nothing but what belongs to single heads, and moves it between ranks (`CallSite.ranks`)."""

    def head_order(self, site: CallSite, batch: int) -> Tensor | None:
        """The head [h] at each place of all ranks, for the next call at this site; None: the model's order."""
        ...
