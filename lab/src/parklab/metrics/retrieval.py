"""How well blocks are clustered and chosen: one value per head, [b h], unless said otherwise.

Label arguments follow `importance`: tokens with a label >= count take no part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parkattn.ops.cluster.definition import query_metric
from parkattn.ops.importance.definition import centroid_log_mass, exact_log_mass
from parkattn.plan import Plan
from parkattn.segments import by_head, compute_dtype, heads, segment_mean

QUERIES_AT_ONCE = 1024


def attention_recall(q: Tensor, k: Tensor, plan: Plan, *, scale: float | None = None) -> Tensor:
    """Share of the dense attention weight that lies in kept blocks (eq. attention_recall)."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = compute_dtype(q.dtype)

    def one_head(queries: Tensor, keys: Tensor, query_labels: Tensor, key_labels: Tensor, mask: Tensor) -> Tensor:
        # the last key block holds padding, which dense attention does not see either
        if plan.padding:
            seen = key_labels < plan.keys.count - 1
            keys, key_labels = keys[seen], key_labels[seen]
        keys, key_labels = keys.to(dtype), key_labels.long()
        kept = queries.new_zeros((), dtype=dtype)
        for rows, labels in zip(queries.split(QUERIES_AT_ONCE), query_labels.split(QUERIES_AT_ONCE), strict=True):
            weights = (rows.to(dtype) @ keys.T * factor).softmax(-1)
            kept = kept + (weights * mask[labels.long()][:, key_labels]).sum(dtype=torch.float64)
        return (kept / len(queries)).to(dtype)

    return by_head([one_head(*head) for head in heads(q, k, plan.queries.labels, plan.keys.labels, plan.mask)], q)


def recall_summary(recall: Tensor) -> dict[str, float]:
    """Mean, fifth percentile and worst over all values given (heads, layers, steps), as in the paper's tables."""
    values = recall.flatten().double()
    return {"mean": values.mean().item(), "p05": values.quantile(0.05).item(), "worst": values.min().item()}


def weight_tv(estimate: Tensor, reference: Tensor, query_sizes: Tensor) -> Tensor:
    """Total variation between two importance maps [b h qb kb], weighted by queries (eq. appendix_mismatch_tv)."""
    rows = query_sizes.to(estimate.dtype)
    distance = (estimate - reference).abs().sum(-1) / 2
    return (distance * rows).sum(-1) / rows.sum(-1)


def centered_log_mass_rmse(
    q: Tensor, k: Tensor, key_labels: Tensor, key_count: int, *, scale: float | None = None
) -> Tensor:
    """RMSE over non-empty key blocks of the log-mass error, less its mean, averaged over queries (eq.
    appendix_mismatch_centered_rmse).
    """
    centroids, sizes = segment_mean(k, key_labels, key_count)
    parts = []
    for rows in q.split(QUERIES_AT_ONCE, dim=2):
        error = exact_log_mass(rows, k, key_labels, key_count, scale=scale) - centroid_log_mass(
            rows, centroids, sizes, scale=scale
        )
        occupied = (sizes > 0).unsqueeze(-2).expand_as(error)
        blocks = occupied.sum(-1)
        # -inf - -inf in empty blocks
        error = torch.where(occupied, error, 0.0)
        centered = torch.where(occupied, error - (error.sum(-1) / blocks).unsqueeze(-1), 0.0)
        parts.append((centered.square().sum(-1) / blocks).sqrt())
    return torch.cat(parts, -1).mean(-1)


def key_mse(k: Tensor, key_labels: Tensor, key_count: int) -> Tensor:
    """D_key: mean squared distance of a key to its centroid (eq. key_score_errors)."""
    return euclidean_objective(k, key_labels, key_count) / (key_labels < key_count).sum(-1)


def score_error(q: Tensor, k: Tensor, key_labels: Tensor, key_count: int, *, scale: float | None = None) -> Tensor:
    """D_QK: mean squared error of the scaled scores when each key is replaced by its centroid (eq.
    key_score_errors).
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return factor**2 * qrkc_objective(q, k, key_labels, key_count) / (key_labels < key_count).sum(-1)


def qrkc_objective(q: Tensor, k: Tensor, key_labels: Tensor, key_count: int) -> Tensor:
    """J_QRKC: sum over keys of the G_Q-distance to the centroid (eq. qrkc_objective)."""
    residual = _residual(k, key_labels, key_count)
    return (residual @ query_metric(q).to(residual.dtype) * residual).sum((-1, -2))


def euclidean_objective(k: Tensor, key_labels: Tensor, key_count: int) -> Tensor:
    """J_Euc: sum over keys of the squared distance to the centroid (eq. app_euclidean_objective)."""
    return _residual(k, key_labels, key_count).square().sum((-1, -2))


def _residual(k: Tensor, labels: Tensor, count: int) -> Tensor:
    """Keys less their centroid [b h m d], 0 for keys that take no part."""
    centroids, _ = segment_mean(k, labels, count)
    own = centroids.take_along_dim(labels.long().clamp(max=count - 1).unsqueeze(-1), dim=2)
    return torch.where((labels < count).unsqueeze(-1), k.to(own.dtype) - own, 0.0)
