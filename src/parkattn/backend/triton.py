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

from parkattn.checks import shape_of
from parkattn.ops.cluster.definition import Clustering, initial_tokens, metric_root, stabilise, uniform
from parkattn.ops.residual.definition import LowRank, iterate_directions, quantise
from parkattn.plan import Blocks, Plan
from parkattn.settings import KeyMetric, Precision

HEAD_DIMS = (64, 128, 256)
GLUON_HEAD_DIMS = (64, 128)
INT8_HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
# from this shrinkage on the metric is positive definite by a margin that float32 rounding cannot reach, so its Cholesky
# factor needs no check, and no synchronisation for one
SAFE_SHRINKAGE = 0.01
Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Found = TypeVar("Found")


def on_its_gpu(verb: Callable[Concatenate[Owner, Given], Found]) -> Callable[Concatenate[Owner, Given], Found]:
    """A kernel is launched on the current GPU, which need not be that of its tensors: pipe.to("cuda:1") makes no GPU the current one."""

    @functools.wraps(verb)
    def there(self: Owner, *given: Given.args, **named: Given.kwargs) -> Found:
        with torch.cuda.device_of(next(x for x in (*given, *named.values()) if isinstance(x, Tensor))):
            return verb(self, *given, **named)

    return there


def triton_backend(why: str, device: torch.device, dtype: torch.dtype, head_dim: int, precision: Precision = "bf16") -> TritonBackend:
    """Refuses what the kernels cannot run; `reason` says which attention kernel runs and why, and in what precision."""
    gluon, because = _attention_kernel(device, dtype, head_dim)
    kernel = "Gluon" if gluon else "Triton"
    reason = f"{why}: Triton kernels, attention in {kernel} because {because}"
    if precision == "int8" and head_dim not in INT8_HEAD_DIMS:
        reason += f"; Q K^T in {str(dtype)[6:]} and not in INT8, whose kernels have head dims 64 and 128, not {head_dim}"
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
        self, x: Tensor, clusters: int, *, iterations: int, seed: int, start: Tensor | None = None, valid: Tensor | None = None
    ) -> Clustering:
        self._expect_dense_rows(x=x)
        return self._kmeans(x, clusters, seed, iterations, start, valid)

    @on_its_gpu
    def first_centroids(self, x: Tensor, clusters: int, *, seed: int, valid: Tensor | None = None) -> Tensor:
        count = min(clusters, x.shape[2])
        first = _first_tokens(x, count, seed, valid)
        if valid is None:
            return x[:, :, first].float()
        tokens = x.gather(2, first[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])).float()
        beyond = torch.arange(count, device=x.device) >= valid.sum(-1, keepdim=True)
        return tokens.masked_fill(beyond[:, None, :, None], torch.nan)

    @on_its_gpu
    def lloyd(self, x: Tensor, centroids: Tensor, *, iterations: int, valid: Tensor | None = None) -> Clustering:
        from parkattn.ops.cluster import triton as cluster

        self._expect_dense_rows(x=x)
        b, h, count, d = centroids.shape
        at = centroids.float().reshape(b * h, count, d)
        absent = at[..., 0].isnan()
        at = at.masked_fill(absent.unsqueeze(-1), 0.0)
        mu = at.sum(1) / (~absent).sum(-1, keepdim=True).clamp(min=1)
        labels, order, offsets, at = cluster.lloyd(x, at, mu, iterations=iterations, valid=valid, absent=absent)
        moved = cluster.segment_mean(x, order, offsets, old=at).masked_fill(absent.unsqueeze(-1), torch.nan)
        return Clustering(labels, moved.view(b, h, count, d), offsets.diff(dim=-1))

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
        from parkattn.ops.cluster import triton as cluster

        self._expect_dense_rows(k=k, q=q)
        if metric.key_metric == "euclidean":
            return self._kmeans(k, clusters, seed, iterations, start, valid)
        moments = stabilise(cluster.query_metric(q, query_valid), alpha=metric.alpha, epsilon=metric.epsilon, s_min=metric.s_min)
        if metric.metric_root == "cholesky" and metric.alpha >= SAFE_SHRINKAGE:
            root = torch.linalg.cholesky_ex(moments, check_errors=False).L
        else:
            root = metric_root(moments, metric.metric_root)
        count = min(clusters, k.shape[2])
        features = cluster.transform_keys(k, root, _first_tokens(k, count, seed, valid))
        labels, _, sizes = self._kmeans(features, clusters, seed, iterations, start, valid)
        order, offsets = cluster.sort_labels(labels, count)
        return Clustering(labels, cluster.segment_mean(k, order, offsets).view(*k.shape[:2], count, -1), sizes)

    @on_its_gpu
    def round_borders(self, x: Tensor, found: Clustering, multiple: int) -> Clustering:
        from parkattn.ops.cluster import borders_triton as borders
        from parkattn.ops.cluster import triton as cluster

        if multiple == 1:
            return found
        labels = borders.round_borders(x, *found, multiple)
        order, offsets = cluster.sort_labels(labels, found.clusters)
        return Clustering(labels, cluster.segment_mean(x, order, offsets).view_as(found.centroids), offsets.diff(dim=-1))

    @on_its_gpu
    def importance(
        self, kind: str, q: Tensor, k: Tensor, query_blocks: Blocks, queries: Clustering, keys: Clustering, *, scale: float | None
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
            weights = importance.pama(rows, offsets, centroids, sizes, scale=scale) * (queries.sizes > 0).view(b * h, -1, 1)
        return weights.view(b, h, queries.clusters, keys.clusters)

    @on_its_gpu
    def score_spread(
        self, q: Tensor, k: Tensor, keys: Clustering, *, valid: Tensor | None, query_valid: Tensor | None, scale: float | None
    ) -> Tensor:
        """Centroids are means, so E^T E = K^T K - sum_v n_v c_v c_v^T: no pass over single keys' errors."""
        from parkattn.ops.cluster import triton as cluster

        sizes, centroids = keys.sizes.float(), keys.centroids.float()
        weighted = centroids * (sizes / sizes.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        errors = cluster.query_metric(k, valid) - weighted.mT @ centroids
        square = (cluster.query_metric(q, query_valid) * errors).sum((-2, -1))
        return square.clamp(min=0).sqrt() * abs(q.shape[-1] ** -0.5 if scale is None else scale)

    @on_its_gpu
    def arrange(self, labels: Tensor, count: int) -> Blocks:
        from parkattn.ops.cluster import triton as cluster

        labels = labels.to(torch.int32)
        return Blocks(labels, *cluster.sort_labels(labels, count))

    @on_its_gpu
    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool) -> Tensor:
        over, stand_ins = self._attention(q, k, v, plan, scale, compensate)
        return over(plan.mask, **stand_ins)[0]

    @on_its_gpu
    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None) -> Tensor:
        return self.attend_dense_with_lse(q, k, v, scale=scale, key_valid=key_valid)[0]

    @on_its_gpu
    def attend_dense_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """softmax(Q K^T scale) V and its log-sum-exp [b h n]; key_valid bool [b m].

        In Triton as one block that keeps one block, read in place; in Gluon q, k and v are copied first unless they are contiguous. With
        key_valid keys and values are gathered, those that count first: which do is known on the GPU alone.
        """
        if self.gluon:
            return self._dense_hopper(q, k, v, scale, key_valid)
        (b, h, n, _), m = q.shape, k.shape[2]
        both = torch.arange(2, dtype=torch.int32, device=q.device).expand(b, h, 2)  # not copied from the host, which would wait
        order, ends = None, both * m
        if key_valid is not None:
            order = (~key_valid).to(torch.uint8).argsort(stable=True).int()[:, None].expand(b, h, m)
            ends = torch.nn.functional.pad(key_valid.sum(-1, dtype=torch.int32)[:, None], (1, 1))[:, None].expand(b, h, 3).clone()
            ends[..., 2] = m
        mask = torch.arange(ends.shape[-1] - 1, device=q.device).expand(b, h, 1, -1) == 0
        whole = torch.zeros((), dtype=torch.int32, device=q.device)
        sides = Blocks(whole.expand(b, h, n), None, both * n), Blocks(whole.expand(b, h, m), order, ends)
        over, _ = self._attention(q, k, v, Plan(*sides, mask, 1, 1, key_valid is not None, whole.expand(b, h).float()), scale, False)
        out, lse = over(mask, with_lse=True)
        return out, lse.view(b, h, n)

    @on_its_gpu
    def attend_anchor(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool) -> tuple[Tensor, Tensor]:
        """Dense attention, and what of it `attend` with this plan misses, in the work of one dense call: kept keys, skipped keys and the
        stand-ins of skipped blocks are attended apart and merged."""
        from parkattn.ops.residual.triton import merge_parts

        over, stand_ins = self._attention(q, k, v, plan, scale, compensate)
        skipped = ~plan.mask
        if plan.padding:
            skipped[..., -1] = False
        parts = [over(kept, with_lse=True) for kept in (plan.mask, skipped)]
        if compensate:
            weight = plan.keys.sizes.float().log().unsqueeze(-2) if plan.bias is None else plan.bias
            enters = {"pair_bias": torch.where(plan.mask, -torch.inf, weight).flatten(0, 1)}
            parts.append(over(torch.zeros_like(plan.mask), with_lse=True, **(stand_ins | enters)))
        return merge_parts(*parts)

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

    def _dense_hopper(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, key_valid: Tensor | None) -> tuple[Tensor, Tensor]:
        from parkattn.ops.attend.hopper_dense import attend_dense_hopper
        from parkattn.ops.permute import triton as permute

        self._expect_attendable(q, k, v, scale)
        (b, h, n, d), m = q.shape, k.shape[2]
        order = counts = steps = None
        if key_valid is not None:
            order = (~key_valid).to(torch.uint8).argsort(stable=True).int()[:, None].expand(b, h, m).contiguous()
            counts = key_valid.sum(-1, dtype=torch.int32)[:, None].expand(b, h).flatten().contiguous()
        if self.precision == "int8":
            rounding = permute.key_rounding(k)
            (rows, row_steps), (keys, step) = permute.round_rows(q, None), permute.round_rows(k, order, rounding)
            steps = row_steps, step / d
        else:
            rows, keys = permute.gather_rows(q, None), permute.gather_rows(k, order)
        values = permute.gather_rows(v, order)
        out, lse = attend_dense_hopper(rows, keys, values, counts, scale=scale, out=torch.empty_like(q), with_lse=True, steps=steps)
        assert lse is not None
        return out, lse.view(b, h, n)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None, compensate: bool
    ) -> tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any]]:
        """Attention over any mask of the plan's blocks, (out [b h n d] in token order, lse [b*h n]), and what it is told about stand-ins."""
        from parkattn.ops.permute import triton as permute

        self._expect_attendable(q, k, v, scale)
        b, h, m, d = k.shape
        # the kernels take a plan's tensors as contiguous; one cut out of a larger plan is not
        offsets = [x.reshape(b * h, -1).contiguous() for x in (plan.queries.offsets, plan.keys.offsets)]
        order, key_order = (None if x is None else x.contiguous() for x in (plan.queries.order, plan.keys.order))
        token_of_row = None if order is None else order.view(b * h, -1)
        keys, values, means = k, v, []
        int8 = self.precision == "int8"
        rounding = permute.key_rounding(k) if int8 else None
        if int8 and (key_order is not None or compensate):
            sorted_already = torch.arange(m, dtype=torch.int32, device=k.device).expand(b, h, m)
            key_order = sorted_already.contiguous() if key_order is None else key_order
            keys, values, *means = permute.gather_with_means(k, v, key_order, plan.keys.offsets.contiguous(), rounding)
        elif rounding is not None:
            keys = permute.round_rows(k, None, rounding)[0]
        elif key_order is not None and compensate:
            keys, values, *means = permute.gather_with_means(k, v, key_order, plan.keys.offsets.contiguous())
        elif key_order is not None:
            keys, values = permute.gather_rows(k, key_order), permute.gather_rows(v, key_order)
        elif compensate:
            means = [permute.block_means(x, plan.keys.offsets.contiguous()) for x in (k, v)]
        stand_ins: dict[str, Any] = {}
        if compensate:
            stand_ins = {"compensate": plan.compensable().reshape(b * h, -1), **dict(zip(("centroids", "mean_values"), means, strict=True))}
            if plan.bias is not None:
                stand_ins["pair_bias"] = plan.bias.reshape(b * h, *plan.bias.shape[2:]).contiguous()
        attend: Callable[..., Any]
        rows, steps = q, None
        if rounding is not None:
            rows, row_steps = permute.round_rows(q, order)
            steps = row_steps, rounding[1] / d
        if self.gluon:
            from parkattn.ops.attend.hopper import attend_hopper

            # tokens in block order are read in place, but copied first where the memory is [b n h d]: the copy engine wants a head's rows together
            flat = [x if x.ndim == 3 else permute.gather_rows(x, None) for x in (keys, values)]
            rows = permute.gather_rows(q, order) if rounding is None else rows
            attend = functools.partial(attend_hopper, rows, *flat, *offsets, out_order=token_of_row, steps=steps)
        else:
            from parkattn.ops.attend.triton import attend_ragged

            by_head = (x.view(b, h, -1, d) if x.ndim == 3 else x for x in (rows, keys, values))
            attend = functools.partial(attend_ragged, *by_head, *offsets, query_order=token_of_row, steps=steps)

        def over(mask: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
            found: Any = attend(mask.reshape(b * h, *mask.shape[2:]).contiguous(), scale=scale, out=torch.empty_like(q), **how)
            return found

        return over, stand_ins

    def _expect_attendable(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
        self._expect_dense_rows(q=q, k=k, v=v)
        if v.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"v: expected q's head dim {q.shape[-1]} with backend={self.name!r}, got {shape_of(v)}; use backend='reference'."
            )
        if scale is not None and not scale > 0:
            raise ValueError(f"scale: expected a positive number with backend={self.name!r}, got {scale}; use backend='reference'.")

    def _expect_dense_rows(self, **tensors: Tensor) -> None:
        for name, x in tensors.items():
            if x.stride(-1) != 1:
                raise ValueError(
                    f"{name}: expected a last dimension of stride 1 with backend={self.name!r}, got stride {x.stride(-1)}; "
                    f"call {name}.contiguous(), or use backend='reference'."
                )

    def _kmeans(self, x: Tensor, clusters: int, seed: int, iterations: int, start: Tensor | None, valid: Tensor | None) -> Clustering:
        from parkattn.ops.cluster import triton as cluster

        count = min(clusters, x.shape[2])
        if start is not None:
            start = start.clamp(max=count)
            start = (start if valid is None else torch.where(valid.unsqueeze(1), start, count)).to(torch.int32)
        first = _first_tokens(x, count, seed, valid)
        labels, centroids, sizes, _, _ = cluster.kmeans(x, first, iterations=iterations, start=start, valid=valid)
        return Clustering(labels, centroids, sizes)


def _first_tokens(x: Tensor, count: int, seed: int, valid: Tensor | None) -> Tensor:
    """The tokens of the first centroids: [c], or [b c] where some tokens are not valid [b n] and none of those may count.

    The definition draws from the valid tokens; their number is on the GPU, so the draw is scaled there.
    """
    if valid is None:
        return initial_tokens(x.shape[2], count, seed).to(x.device, non_blocking=True)
    draw = uniform(count, seed).to(valid.device, non_blocking=True)
    members = valid.sum(-1, keepdim=True)
    used = members.clamp(min=1, max=count)  # as many clusters as tokens
    cluster = torch.arange(count + 1, device=valid.device)
    edges = (cluster * members // used).minimum(members)
    chosen = edges[:, :-1] + (draw * edges.diff(dim=-1)).long()
    # the other clusters begin where cluster 0 does and so lose every tie against it
    chosen = torch.where(cluster[:-1] < used, chosen, chosen[:, :1])
    valid_first = (~valid).to(torch.uint8).argsort(stable=True)
    return valid_first.gather(1, chosen)


def _attention_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[bool, str]:
    """Whether the Gluon kernel runs, and why or why not."""
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(
            "backend 'triton': the package triton is not installed; pip install 'parkattn[triton]', or use backend='reference'."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(f"backend: expected a CUDA device for 'triton', got {device}; move q, k, v to CUDA or use backend='reference'.")
    if dtype not in DTYPES:
        raise TypeError(f"backend: expected bfloat16 or float16 for 'triton', got {dtype}; cast q, k, v or use backend='reference'.")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"backend: expected a head dim of 64, 128 or 256 for 'triton', got {head_dim}; use backend='reference'.")
    if interpreted:
        return False, "TRITON_INTERPRET=1 runs no Gluon"
    if torch.version.hip is not None:
        raise ValueError("backend: expected an NVIDIA GPU for 'triton', got an AMD one, untested; use backend='reference'.")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(f"backend: expected a GPU from sm_80 on for 'triton', got sm_{major}{minor}; use backend='reference'.")
    if (major, minor) != (9, 0):
        return False, f"the GPU is sm_{major}{minor}, not sm_90"
    if head_dim not in GLUON_HEAD_DIMS:
        return False, f"the Hopper kernel has head dims 64 and 128, not {head_dim}"
    from parkattn.ops.triton_versions import why_no_gluon

    if because := why_no_gluon():
        return False, because
    return True, f"the GPU is sm_90 and the head dim {head_dim}"
