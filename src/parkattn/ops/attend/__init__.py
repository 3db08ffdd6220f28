"""Attention over a plan's kept blocks, over every key, or both at an anchor: [b h n d], in and out in token order."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from parkattn.ops import Backend, explained_memory, on_gpu_of, outside_autocast
from parkattn.ops.attend.definition import DefinedAttention
from parkattn.plan import Plan


class Attention(Protocol):
    """Interface of a precision, a kernel or another package's attention."""

    def over_kept(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> Tensor: ...

    def over_all(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None) -> Tensor: ...

    def over_both(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> tuple[Tensor, Tensor]: ...


def attention_of(backend: Backend) -> Attention:
    """Imported when chosen: only attention that runs may load Triton or FlashInfer."""
    if backend.name == "reference":
        return DefinedAttention(backend.precision)
    if backend.name == "flashinfer":
        from parkattn.ops.attend.flashinfer import FlashInferAttention

        return FlashInferAttention()
    from parkattn.ops.attend.kernels import AttentionKernel

    return AttentionKernel(backend.hopper, backend.precision)


def over_kept(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *,
    scale: float | None = None, compensate: bool = False,
) -> Tensor:  # fmt: skip
    """Attention over the plan's kept blocks. Equal to dense attention when every block is kept.

    compensate: a skipped block enters through its mean key and value.
    """
    with outside_autocast(q), explained_memory(q, k, "attention"), on_gpu_of(q):
        return attention_of(backend).over_kept(q, k, v, plan, scale=scale, compensate=compensate)


def over_all(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, key_valid: Tensor | None = None
) -> Tensor:
    """Dense attention; key_valid [b m]: False where a key is padding."""
    with outside_autocast(q), explained_memory(q, k, "dense attention"), on_gpu_of(q):
        return attention_of(backend).over_all(q, k, v, scale=scale, key_valid=key_valid)


def over_both(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *,
    scale: float | None = None, compensate: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense attention over every key that is not padding, and the part of it that `over_kept` with this plan misses."""
    with outside_autocast(q), explained_memory(q, k, "an anchor's attention"), on_gpu_of(q):
        return attention_of(backend).over_both(q, k, v, plan, scale=scale, compensate=compensate)
