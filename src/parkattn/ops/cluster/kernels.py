"""Clusters by the Triton kernels, with the arguments of the definitions. No function waits for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from parkattn.plan import Blocks
from parkattn.settings import KeyMetric

from ..tiles import expect_dense_rows
from . import borders_triton as borders
from . import triton as cluster
from .definition import Clustering, initial_tokens, metric_root, stabilise, uniform

# from this shrinkage on the metric is positive definite by a margin that float32 rounding cannot reach, so its Cholesky
# factor needs no check, and no synchronisation for one
SAFE_SHRINKAGE = 0.01


def kmeans(
    x: Tensor, clusters: int, *, iterations: int, seed: int, start: Tensor | None = None, valid: Tensor | None = None
) -> Clustering:
    expect_dense_rows(x=x)
    return _kmeans(x, clusters, seed, iterations, start, valid)


def first_centroids(x: Tensor, clusters: int, *, seed: int, valid: Tensor | None = None) -> Tensor:
    count = min(clusters, x.shape[2])
    first = first_tokens(x, count, seed, valid)
    if valid is None:
        return x[:, :, first].float()
    tokens = x.gather(2, first[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])).float()
    beyond = torch.arange(count, device=x.device) >= valid.sum(-1, keepdim=True)
    return tokens.masked_fill(beyond[:, None, :, None], torch.nan)


def lloyd(x: Tensor, centroids: Tensor, *, iterations: int, valid: Tensor | None = None) -> Clustering:
    expect_dense_rows(x=x)
    b, h, count, d = centroids.shape
    at = centroids.float().reshape(b * h, count, d)
    absent = at[..., 0].isnan()
    at = at.masked_fill(absent.unsqueeze(-1), 0.0)
    mu = at.sum(1) / (~absent).sum(-1, keepdim=True).clamp(min=1)
    labels, order, offsets, at = cluster.lloyd(x, at, mu, iterations=iterations, valid=valid, absent=absent)
    moved = cluster.segment_mean(x, order, offsets, old=at).masked_fill(absent.unsqueeze(-1), torch.nan)
    return Clustering(labels, moved.view(b, h, count, d), offsets.diff(dim=-1))


def cluster_keys(
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
    expect_dense_rows(k=k, q=q)
    if metric.key_metric == "euclidean":
        return _kmeans(k, clusters, seed, iterations, start, valid)
    moments = stabilise(
        cluster.query_metric(q, query_valid), alpha=metric.alpha, epsilon=metric.epsilon, s_min=metric.s_min
    )
    if metric.metric_root == "cholesky" and metric.alpha >= SAFE_SHRINKAGE:
        root = torch.linalg.cholesky_ex(moments, check_errors=False).L
    else:
        root = metric_root(moments, metric.metric_root)
    count = min(clusters, k.shape[2])
    features = cluster.transform_keys(k, root, first_tokens(k, count, seed, valid))
    labels, _, sizes = _kmeans(features, clusters, seed, iterations, start, valid)
    order, offsets = cluster.sort_labels(labels, count)
    return Clustering(labels, cluster.segment_mean(k, order, offsets).view(*k.shape[:2], count, -1), sizes)


def arrange(labels: Tensor, count: int) -> Blocks:
    labels = labels.to(torch.int32)
    return Blocks(labels, *cluster.sort_labels(labels, count))


def round_borders(x: Tensor, found: Clustering, multiple: int) -> Clustering:
    if multiple == 1:
        return found
    labels = borders.round_borders(x, *found, multiple)
    order, offsets = cluster.sort_labels(labels, found.clusters)
    return Clustering(labels, cluster.segment_mean(x, order, offsets).view_as(found.centroids), offsets.diff(dim=-1))


def _kmeans(
    x: Tensor, clusters: int, seed: int, iterations: int, start: Tensor | None, valid: Tensor | None
) -> Clustering:
    count = min(clusters, x.shape[2])
    if start is not None:
        start = start.clamp(max=count)
        start = (start if valid is None else torch.where(valid.unsqueeze(1), start, count)).to(torch.int32)
    first = first_tokens(x, count, seed, valid)
    labels, centroids, sizes, _, _ = cluster.kmeans(x, first, iterations=iterations, start=start, valid=valid)
    return Clustering(labels, centroids, sizes)


def first_tokens(x: Tensor, count: int, seed: int, valid: Tensor | None) -> Tensor:
    """The tokens of the first centroids: [c], or [b c] where some tokens are not valid [b n] and none of those may
    count.

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
