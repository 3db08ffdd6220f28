"""Importance by the Triton and Gluon kernels, with the arguments of the definitions. No function waits for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from parkattn.plan import Blocks

from ..cluster.definition import Clustering
from ..cluster.triton import query_metric
from ..permute.triton import gather_rows
from .triton import pama


def estimate(
    kind: str, q: Tensor, k: Tensor, query_blocks: Blocks, queries: Clustering, keys: Clustering, *, scale: float | None
) -> Tensor:
    """PAMA, and the one softmax per query block that it replaces: PAMA over the cluster means, one row each.

    Means and centroids are rounded to q's dtype.
    """
    if kind not in ("pama", "query-centroid"):
        raise ValueError(
            f"importance: expected pama or query-centroid, which have kernels, got {kind!r}; use backend='reference'."
        )
    b, h, _, d = q.shape
    centroids, sizes = keys.centroids.to(q.dtype).view(b * h, -1, d), keys.sizes.reshape(b * h, -1).contiguous()
    if kind == "pama":
        rows = gather_rows(q, query_blocks.permutation())
        offsets = query_blocks.offsets[..., : queries.clusters + 1].reshape(b * h, -1).contiguous()
        weights = pama(rows, offsets, centroids, sizes, scale=scale)
    else:
        rows = queries.centroids.to(q.dtype).view(b * h, -1, d)
        offsets = torch.arange(queries.clusters + 1, dtype=torch.int32, device=q.device).repeat(b * h, 1)
        weights = pama(rows, offsets, centroids, sizes, scale=scale) * (queries.sizes > 0).view(b * h, -1, 1)
    return weights.view(b, h, queries.clusters, keys.clusters)


def score_spread(
    q: Tensor, k: Tensor, keys: Clustering, *, valid: Tensor | None, query_valid: Tensor | None, scale: float | None
) -> Tensor:
    """Centroids are means, so E^T E = K^T K - sum_v n_v c_v c_v^T: no pass over single keys' errors."""
    sizes, centroids = keys.sizes.float(), keys.centroids.float()
    weighted = centroids * (sizes / sizes.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
    errors = query_metric(k, valid) - weighted.mT @ centroids
    square = (query_metric(q, query_valid) * errors).sum((-2, -1))
    return square.clamp(min=0).sqrt() * abs(q.shape[-1] ** -0.5 if scale is None else scale)
