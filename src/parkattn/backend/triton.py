"""The kernels behind the verbs. No verb of a reuse step waits for the GPU, so the step can be captured in a CUDA graph."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from parkattn.ops.cluster.definition import Clustering
from parkattn.ops.residual.definition import LowRank, iterate_directions, quantise
from parkattn.plan import Blocks, Plan
from parkattn.settings import KeyMetric, Precision

HEAD_DIMS = (64, 128, 256)
GLUON_HEAD_DIMS = (64, 128)
INT8_HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Found = TypeVar("Found")


def on_its_gpu(verb: Callable[Concatenate[Owner, Given], Found]) -> Callable[Concatenate[Owner, Given], Found]:
    """A kernel is launched on the current GPU, which need not be that of its tensors: pipe.to("cuda:1") makes no GPU
    the current one.
    """

    @functools.wraps(verb)
    def there(self: Owner, *given: Given.args, **named: Given.kwargs) -> Found:
        with torch.cuda.device_of(next(x for x in (*given, *named.values()) if isinstance(x, Tensor))):
            return verb(self, *given, **named)

    return there


def triton_backend(
    why: str, device: torch.device, dtype: torch.dtype, head_dim: int, precision: Precision = "bf16"
) -> TritonBackend:
    """Refuses what the kernels cannot run; `reason` says which attention kernel runs and why, and in what precision."""
    gluon, because = _attention_kernel(device, dtype, head_dim)
    kernel = "Gluon" if gluon else "Triton"
    reason = f"{why}: Triton kernels, attention in {kernel} because {because}"
    if precision == "int8" and head_dim not in INT8_HEAD_DIMS:
        reason += (
            f"; Q K^T in {str(dtype)[6:]} and not in INT8, whose kernels have head dims 64 and 128, not {head_dim}"
        )
        return TritonBackend(reason, gluon)
    return TritonBackend(reason + ("; Q K^T in INT8" if precision == "int8" else ""), gluon, precision)


@dataclass(frozen=True)
class TritonBackend:
    reason: str
    gluon: bool  # attention by the Hopper kernel
    precision: Precision = "bf16"
    name: str = "triton"
    differentiable = False

    @on_its_gpu
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
        from parkattn.ops.cluster import kernels

        return kernels.kmeans(x, clusters, iterations=iterations, seed=seed, start=start, valid=valid)

    @on_its_gpu
    def first_centroids(self, x: Tensor, clusters: int, *, seed: int, valid: Tensor | None = None) -> Tensor:
        from parkattn.ops.cluster import kernels

        return kernels.first_centroids(x, clusters, seed=seed, valid=valid)

    @on_its_gpu
    def lloyd(self, x: Tensor, centroids: Tensor, *, iterations: int, valid: Tensor | None = None) -> Clustering:
        from parkattn.ops.cluster import kernels

        return kernels.lloyd(x, centroids, iterations=iterations, valid=valid)

    @on_its_gpu
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
        from parkattn.ops.cluster import kernels

        how: dict[str, Any] = {"start": start, "valid": valid, "query_valid": query_valid}
        return kernels.cluster_keys(k, q, clusters, metric, iterations=iterations, seed=seed, **how)

    @on_its_gpu
    def round_borders(self, x: Tensor, found: Clustering, multiple: int) -> Clustering:
        from parkattn.ops.cluster import kernels

        return kernels.round_borders(x, found, multiple)

    @on_its_gpu
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
        """PAMA, and the one softmax per query block that it replaces: PAMA over the cluster means, one row each.

        Means and centroids are rounded to q's dtype.
        """
        from parkattn.ops.importance import triton as importance
        from parkattn.ops.permute import triton as permute

        if kind not in ("pama", "query-centroid"):
            raise ValueError(
                f"importance: expected pama or query-centroid with backend={self.name!r}, got {kind!r}; use backend='reference'."
            )
        b, h, _, d = q.shape
        centroids, sizes = keys.centroids.to(q.dtype).view(b * h, -1, d), keys.sizes.reshape(b * h, -1).contiguous()
        if kind == "pama":
            rows = permute.gather_rows(q, query_blocks.permutation())
            offsets = query_blocks.offsets[..., : queries.clusters + 1].reshape(b * h, -1).contiguous()
            weights = importance.pama(rows, offsets, centroids, sizes, scale=scale)
        else:
            rows = queries.centroids.to(q.dtype).view(b * h, -1, d)
            offsets = torch.arange(queries.clusters + 1, dtype=torch.int32, device=q.device).repeat(b * h, 1)
            weights = importance.pama(rows, offsets, centroids, sizes, scale=scale) * (queries.sizes > 0).view(
                b * h, -1, 1
            )
        return weights.view(b, h, queries.clusters, keys.clusters)

    @on_its_gpu
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
        from parkattn.ops.cluster import kernels

        return kernels.score_spread(q, k, keys, valid=valid, query_valid=query_valid, scale=scale)

    @on_its_gpu
    def arrange(self, labels: Tensor, count: int) -> Blocks:
        from parkattn.ops.cluster import triton as cluster

        labels = labels.to(torch.int32)
        return Blocks(labels, *cluster.sort_labels(labels, count))

    @on_its_gpu
    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool) -> Tensor:
        from parkattn.ops.attend.kernels import AttentionKernel

        return AttentionKernel(self.gluon, self.precision).over_kept(q, k, v, plan, scale=scale, compensate=compensate)

    @on_its_gpu
    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None) -> Tensor:
        return self.attend_dense_with_lse(q, k, v, scale=scale, key_valid=key_valid)[0]

    @on_its_gpu
    def attend_dense_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from parkattn.ops.attend.kernels import AttentionKernel

        return AttentionKernel(self.gluon, self.precision).over_all(q, k, v, scale=scale, key_valid=key_valid)

    @on_its_gpu
    def attend_anchor(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> tuple[Tensor, Tensor]:
        from parkattn.ops.attend.kernels import AttentionKernel

        return AttentionKernel(self.gluon, self.precision).over_both(q, k, v, plan, scale=scale, compensate=compensate)

    @on_its_gpu
    def factor(self, residual: Tensor, rank: int) -> LowRank:
        """`residual.factor` without a host synchronisation."""
        from parkattn.ops.cluster import triton as cluster

        # where dense attention is not finite, or fp16 has no room for the difference, there is nothing to keep
        residual = residual.nan_to_num_(0.0, 0.0, 0.0)
        return quantise(residual, iterate_directions(cluster.query_metric(residual), rank))

    @on_its_gpu
    def add_residual(self, out: Tensor, residual: LowRank) -> Tensor:
        """out + A B, in place."""
        from parkattn.ops.residual.triton import add_low_rank

        return add_low_rank(out, residual.a, residual.step, residual.b)


def _attention_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[bool, str]:
    """Whether the Gluon kernel runs, and why or why not."""
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(
            "backend 'triton': the package triton is not installed; pip install 'parkattn[triton]', or use backend='reference'."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"backend: expected a CUDA device for 'triton', got {device}; move q, k, v to CUDA or use backend='reference'."
        )
    if dtype not in DTYPES:
        raise TypeError(
            f"backend: expected bfloat16 or float16 for 'triton', got {dtype}; cast q, k, v or use backend='reference'."
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"backend: expected a head dim of 64, 128 or 256 for 'triton', got {head_dim}; use backend='reference'."
        )
    if interpreted:
        return False, "TRITON_INTERPRET=1 runs no Gluon"
    if torch.version.hip is not None:
        raise ValueError(
            "backend: expected an NVIDIA GPU for 'triton', got an AMD one, untested; use backend='reference'."
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"backend: expected a GPU from sm_80 on for 'triton', got sm_{major}{minor}; use backend='reference'."
        )
    if (major, minor) != (9, 0):
        return False, f"the GPU is sm_{major}{minor}, not sm_90"
    if head_dim not in GLUON_HEAD_DIMS:
        return False, f"the Hopper kernel has head dims 64 and 128, not {head_dim}"
    from parkattn.ops.triton_versions import why_no_gluon

    if because := why_no_gluon():
        return False, because
    return True, f"the GPU is sm_90 and the head dim {head_dim}"
