"""Who computes the verbs: the PyTorch definitions, the Triton kernels, or FlashInfer's attention as the paper ran it.

| name       | clusters, importance, permutation | attention                            | needs                                       |
|------------|-----------------------------------|--------------------------------------|---------------------------------------------|
| reference  | PyTorch definitions               | PyTorch definition                   | nothing                                     |
| triton     | Triton kernels                    | Gluon on sm_90, d 64 or 128; Triton  | NVIDIA sm_80 or later, bf16 or fp16         |
| flashinfer | Triton kernels                    | FlashInfer's variable-block wrapper  | as triton, and the extra parkattn[flashinfer] |

"auto" looks at the device alone: triton on CUDA, reference elsewhere. A backend that cannot run a call refuses it in
one line that names the alternative; nothing is replaced silently. `resolve(...).reason` says what was chosen and why.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parkattn.checks import (
    asks_for_gradient,
    expect_attention_inputs,
    expect_choice,
    expect_finite,
    expect_scale,
    shape_of,
)
from parkattn.ops.attend.definition import attend, dense_attention
from parkattn.ops.cluster.borders import round_borders
from parkattn.ops.cluster.definition import Clustering, cluster_keys, first_centroids, kmeans, lloyd
from parkattn.ops.importance.definition import ESTIMATORS, score_spread
from parkattn.ops.permute.definition import gather, scatter
from parkattn.ops.residual.definition import LowRank, factor
from parkattn.plan import Blocks, Plan, arrange
from parkattn.segments import segment_mean
from parkattn.settings import BACKENDS, KeyMetric, Precision
from parkattn.site import CallSite


class Backend(Protocol):
    """The verbs that planners and the executor use. Every backend gives the same result up to the rounding of its
    dtype.
    """

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str:
        """What was chosen and why, in one sentence."""

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow through attend; a plan never has any."""

    def kmeans(
        self,
        x: Tensor,
        clusters: int,
        *,
        iterations: int,
        seed: int,
        start: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Clustering:
        """k-means of x [b h n d]; start: labels [b h n] of an earlier plan; valid [b n]: False is left out."""

    def first_centroids(self, x: Tensor, clusters: int, *, seed: int, valid: Tensor | None = None) -> Tensor:
        """The tokens that kmeans begins from [b h c d], NaN for clusters beyond the number of tokens."""

    def lloyd(self, x: Tensor, centroids: Tensor, *, iterations: int, valid: Tensor | None = None) -> Clustering:
        """k-means of x [b h n d] from these centroids [b h c d]; an empty cluster keeps its centroid."""

    def cluster_keys(
        self,
        k: Tensor,
        q: Tensor,
        clusters: int,
        metric: KeyMetric,
        *,
        iterations: int,
        seed: int,
        start: Tensor | None = None,
        valid: Tensor | None = None,
        query_valid: Tensor | None = None,
    ) -> Clustering:
        """QRKC of k [b h m d] in the metric of q, or k-means of k with key_metric="euclidean"."""

    def round_borders(self, x: Tensor, found: Clustering, multiple: int) -> Clustering:
        """The clusters of x [b h n d] as blocks that begin at multiples; 1 changes nothing."""

    def importance(
        self,
        kind: str,
        q: Tensor,
        k: Tensor,
        query_blocks: Blocks,
        queries: Clustering,
        keys: Clustering,
        *,
        scale: float | None,
    ) -> Tensor:
        """Estimated attention between clusters [b h c_q c_k]; the first c_q of query_blocks are the clusters."""

    def score_spread(
        self,
        q: Tensor,
        k: Tensor,
        keys: Clustering,
        *,
        valid: Tensor | None,
        query_valid: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Root mean square distance of scores from those of their key clusters' means [b h]; valid [b m]: the keys in
        clusters.
        """

    def arrange(self, labels: Tensor, count: int) -> Blocks:
        """Stable sort of labels [b h n] in [0, count) into blocks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool) -> Tensor:
        """Attention over the plan's kept blocks; tensors in and out are in token order."""

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None) -> Tensor:
        """Dense attention; key_valid [b m]: False where a key is padding."""

    def attend_anchor(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> tuple[Tensor, Tensor]:
        """Dense attention (over every key that is not padding), and what of it `attend` with this plan misses: dense -
        sparse.
        """

    def factor(self, residual: Tensor, rank: int) -> LowRank:
        """residual [b h n d] as its nearest matrices of a rank, in 8 bits."""

    def add_residual(self, out: Tensor, residual: LowRank) -> Tensor:
        """out [b h n d] + residual; out may be written to."""


@dataclass(frozen=True)
class ReferenceBackend:
    """The definitions, on any device PyTorch knows and in any floating dtype."""

    reason: str
    precision: Precision = "bf16"
    name: str = "reference"
    differentiable = True

    def kmeans(
        self,
        x: Tensor,
        clusters: int,
        *,
        iterations: int,
        seed: int,
        start: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Clustering:
        return kmeans(x, clusters, iterations=iterations, seed=seed, start=start, valid=valid)

    def first_centroids(self, x: Tensor, clusters: int, *, seed: int, valid: Tensor | None = None) -> Tensor:
        return first_centroids(x, clusters, seed=seed, valid=valid)

    def lloyd(self, x: Tensor, centroids: Tensor, *, iterations: int, valid: Tensor | None = None) -> Clustering:
        return lloyd(x, centroids, iterations=iterations, valid=valid)

    def cluster_keys(
        self,
        k: Tensor,
        q: Tensor,
        clusters: int,
        metric: KeyMetric,
        *,
        iterations: int,
        seed: int,
        start: Tensor | None = None,
        valid: Tensor | None = None,
        query_valid: Tensor | None = None,
    ) -> Clustering:
        if metric.key_metric == "euclidean":
            return kmeans(k, clusters, iterations=iterations, seed=seed, start=start, valid=valid)
        return cluster_keys(
            k,
            q,
            clusters,
            alpha=metric.alpha,
            epsilon=metric.epsilon,
            s_min=metric.s_min,
            root=metric.metric_root,
            iterations=iterations,
            seed=seed,
            start=start,
            valid=valid,
            query_valid=query_valid,
        )

    def round_borders(self, x: Tensor, found: Clustering, multiple: int) -> Clustering:
        if multiple == 1:
            return found
        labels = round_borders(x, found.labels, found.centroids, multiple)
        return Clustering(labels, *segment_mean(x, labels, found.clusters))

    def importance(
        self,
        kind: str,
        q: Tensor,
        k: Tensor,
        query_blocks: Blocks,
        queries: Clustering,
        keys: Clustering,
        *,
        scale: float | None,
    ) -> Tensor:
        return ESTIMATORS[kind](q, k, queries.labels, queries.clusters, keys.labels, keys.clusters, scale=scale)

    def score_spread(
        self,
        q: Tensor,
        k: Tensor,
        keys: Clustering,
        *,
        valid: Tensor | None,
        query_valid: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        return score_spread(
            q, k, keys.centroids, keys.labels, query_valid=query_valid, scale=scale
        )  # labels tell what is valid

    def arrange(self, labels: Tensor, count: int) -> Blocks:
        return arrange(labels, count)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool) -> Tensor:
        out = attend(
            gather(q, plan.queries),
            gather(k, plan.keys),
            gather(v, plan.keys),
            plan.queries,
            plan.keys,
            plan.mask,
            scale=scale,
            compensate=plan.compensable() if compensate else None,
            bias=plan.bias,
            precision=self.precision,
        )
        return scatter(out, plan.queries)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None) -> Tensor:
        return dense_attention(q, k, v, scale=scale, key_valid=key_valid, precision=self.precision)

    def attend_anchor(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> tuple[Tensor, Tensor]:
        # padding keys are the last block of every head
        valid = plan.keys.labels[:, 0] < plan.keys.count - 1 if plan.padding else None
        dense = dense_attention(q, k, v, scale=scale, key_valid=valid, precision=self.precision)
        return dense, dense - self.attend(q, k, v, plan, scale=scale, compensate=compensate)

    def factor(self, residual: Tensor, rank: int) -> LowRank:
        # where dense attention is not finite there is nothing to keep, and eigenvectors of NaN raise
        return factor(residual.where(residual.isfinite(), 0.0), min(rank, *residual.shape[2:]))

    def add_residual(self, out: Tensor, residual: LowRank) -> Tensor:
        return residual.add_to(out)


@contextlib.contextmanager
def explained_memory(q: Tensor, k: Tensor, doing: str) -> Iterator[None]:
    """An out-of-memory error inside says what was asked for and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if str(error).startswith("memory:"):  # explained further down already
            raise
        asked = re.search(r"allocate (\d[\d.]* \w+)", str(error))
        raise torch.OutOfMemoryError(
            f"memory: expected room for {asked[1] if asked else 'the tensors'} more on {q.device} in {doing} with q {shape_of(q)} "
            f"and k {shape_of(k)}, got out of memory; pass fewer heads at a time, a smaller resolution or fewer frames, or offload "
            "other models of the pipeline (enable_model_cpu_offload)."
        ) from error


@contextlib.contextmanager
def outside_autocast(q: Tensor) -> Iterator[None]:
    """Compute in the precision that is named: autocast would cluster and select in half precision."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield


def resolve(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, precision: Precision = "bf16"
) -> Backend:
    """The backend for q, k, v of this kind, or an error that names the one that would run.

    Where it cannot take Q K^T in INT8 it takes it in the tensors' own dtype, and its reason says why.
    """
    expect_choice("backend", name, BACKENDS)
    chosen = name
    if name == "auto":
        chosen = "triton" if device.type == "cuda" else "reference"
    why = f"chosen by name (backend={name!r})" if name != "auto" else f"backend='auto' takes {chosen} on {device.type}"
    if chosen == "reference":
        return _reference(f"{why}: PyTorch definitions", head_dim, precision)
    # imported here: only a backend that is used may load Triton or FlashInfer
    if chosen == "triton":
        from parkattn.backend.triton import triton_backend

        return triton_backend(why, device, dtype, head_dim, precision)
    from parkattn.backend.flashinfer import flashinfer_backend

    return flashinfer_backend(why, device, dtype, head_dim, precision)


def _reference(reason: str, head_dim: int, precision: Precision) -> ReferenceBackend:
    if precision == "int8" and head_dim & (head_dim - 1):
        own = "Q K^T in the tensors' own dtype and not in INT8, which is defined for head dims that are powers of two"
        return ReferenceBackend(f"{reason}; {own}, not {head_dim}")
    return ReferenceBackend(f"{reason}; Q K^T in INT8" if precision == "int8" else reason, precision)


def resolve_for(q: Tensor, name: str, precision: Precision = "bf16") -> Backend:
    """The backend for q [b h n d] and what goes with it."""
    return resolve(name, q.device, q.dtype, q.shape[-1], precision)


@contextlib.contextmanager
def planning(q: Tensor, k: Tensor, site: CallSite, check_finite: bool = False) -> Iterator[None]:
    """Around a planner: inputs are checked, and a plan that lives for steps keeps no graph of this one."""
    expect_attention_inputs(q, k)
    expect_scale(site.scale)
    if check_finite:
        expect_finite("q", q)
        expect_finite("k", k)
    with torch.no_grad(), outside_autocast(q), explained_memory(q, k, "a plan"):
        yield


def attend_planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    backend: Backend,
    *,
    scale: float | None = None,
    compensate: bool = False,
) -> Tensor:
    """Attention over the plan's blocks: [b h n d]. Equal to dense attention when every block is kept."""
    _expect_attendable(q, k, v, plan, backend, scale)
    with outside_autocast(q), explained_memory(q, k, "attention"):
        return backend.attend(q, k, v, plan, scale=scale, compensate=compensate)


def attend_dense_and_rest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    backend: Backend,
    *,
    scale: float | None = None,
    compensate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Dense attention, and what of it attend_planned misses: [b h n d] each."""
    _expect_attendable(q, k, v, plan, backend, scale)
    with outside_autocast(q), explained_memory(q, k, "an anchor's attention"):
        return backend.attend_anchor(q, k, v, plan, scale=scale, compensate=compensate)


def attend_every_key(
    q: Tensor, k: Tensor, v: Tensor, backend: Backend, *, scale: float | None = None, key_valid: Tensor | None = None
) -> Tensor:
    """Dense attention by the backend: [b h n d]."""
    expect_attention_inputs(q, k, v)
    expect_scale(scale)
    with outside_autocast(q), explained_memory(q, k, "dense attention"):
        return backend.attend_dense(q, k, v, scale=scale, key_valid=key_valid)


def _expect_attendable(q: Tensor, k: Tensor, v: Tensor, plan: Plan, backend: Backend, scale: float | None) -> None:
    expect_attention_inputs(q, k, v)
    expect_scale(scale)
    if asks_for_gradient(q, k, v) and not backend.differentiable:
        raise ValueError(
            f"q, k, v: expected tensors without gradient with backend={backend.name!r}, got requires_grad=True; "
            "call under torch.no_grad(), or use backend='reference', which has a gradient."
        )
    if not plan.fits(q, k):
        made_for = (
            f"queries {list(plan.queries.labels.shape)} and keys {list(plan.keys.labels.shape)} on {plan.mask.device}"
        )
        raise ValueError(
            f"plan: expected one built for q {shape_of(q)} and k {shape_of(k)} on {q.device}, got one for {made_for}; make another plan."
        )
