"""Grouping tokens: Euclidean k-means, and QRKC, k-means of keys in a space shaped by the current queries (Algorithm 3).

Rules the paper leaves open, decided here and argued in DESIGN.md: the first centroids are tokens drawn one per stratum;
a warm start begins from the means under earlier labels; an empty cluster stays where it was and may win tokens back.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_count, expect_fraction, expect_heads
from parkattn.segments import aligned, by_head, compute_dtype, heads, segment_mean, segment_sizes
from parkattn.settings import METRIC_ROOTS, KeyMetric, MetricRoot

QRKC = KeyMetric()


class Clustering(NamedTuple):
    labels: Tensor  # [b h n] int32; c where a token was not clustered
    centroids: Tensor  # [b h c d]: means of the tokens as given, 0 where empty
    sizes: Tensor  # [b h c] int32

    @property
    def clusters(self) -> int:
        return self.sizes.shape[-1]


def kmeans(
    x: Tensor,
    clusters: int,
    *,
    iterations: int = 10,
    seed: int = 0,
    start: Tensor | None = None,
    valid: Tensor | None = None,
) -> Clustering:
    """Lloyd's algorithm on x [b h n d]. start: labels [b h n] of an earlier run; valid: [b n], False is left out."""
    expect_heads("x", x)
    expect_count("clusters", clusters)
    expect_count("iterations", iterations)
    count = min(clusters, x.shape[2])
    found = []
    for i, j in itertools.product(range(x.shape[0]), range(x.shape[1])):
        earlier, members = None if start is None else start[i, j], None if valid is None else valid[i]
        found.append(_cluster_head(x[i, j], count, iterations, seed, earlier, members))
    labels = by_head(found, x)
    centroids, sizes = segment_mean(x, labels, count)
    return Clustering(labels, centroids, sizes)


def _cluster_head(
    x: Tensor, count: int, iterations: int, seed: int, start: Tensor | None, valid: Tensor | None
) -> Tensor:
    """Labels [n] of one head x [n d]."""
    members = slice(None) if valid is None else valid.nonzero().squeeze(1)
    points = aligned(x[members].to(compute_dtype(x.dtype)))
    # distances do not change with the origin, and float32 keeps more of them near it
    points = points - points.mean(0)
    centroids = points[initial_tokens(len(points), min(count, len(points)), seed).to(x.device)]
    if start is not None:
        centroids = _recenter(points, start[members], centroids)
    found = _nearest(points, centroids)
    for _ in range(iterations - 1):
        centroids = _recenter(points, found, centroids)
        found = _nearest(points, centroids)
    labels = torch.full((len(x),), count, dtype=torch.int32, device=x.device)
    labels[members] = found.to(torch.int32)
    return labels


def first_centroids(x: Tensor, clusters: int, *, seed: int = 0, valid: Tensor | None = None) -> Tensor:
    """The tokens that `kmeans` begins from, as centroids [b h c d] for `lloyd`.

    An element with fewer tokens than clusters has NaN in the last rows: clusters that do not exist.
    """
    expect_heads("x", x)
    expect_count("clusters", clusters)
    b, h, n, d = x.shape
    centroids = torch.full((b, h, min(clusters, n), d), torch.nan, dtype=compute_dtype(x.dtype), device=x.device)
    for i in range(b):
        members = torch.arange(n, device=x.device) if valid is None else valid[i].nonzero().squeeze(1)
        used = min(clusters, len(members))
        first = members[initial_tokens(len(members), used, seed).to(x.device)]
        centroids[i, :, :used] = x[i][:, first].to(centroids.dtype)
    return centroids


def lloyd(x: Tensor, centroids: Tensor, *, iterations: int, valid: Tensor | None = None) -> Clustering:
    """`iterations` times: label every token with the nearest centroid, then move each centroid to the mean of its
    tokens.

    x [b h n d], centroids [b h c d], valid [b n]. Other than from `kmeans`, a centroid without tokens is where it was,
    so that a later call can begin from it; a row of NaN is a cluster that does not exist and stays so.
    """
    expect_heads("x", x)
    expect_count("iterations", iterations)
    count = centroids.shape[2]
    labels = torch.full(x.shape[:3], count, dtype=torch.int32, device=x.device)
    moved = torch.empty_like(centroids, dtype=compute_dtype(x.dtype))
    for i in range(x.shape[0]):
        members = slice(None) if valid is None else valid[i].nonzero().squeeze(1)
        for j in range(x.shape[1]):
            points = aligned(x[i, j, members].to(moved.dtype))
            origin, at = points.mean(0), centroids[i, j].to(moved.dtype)
            for _ in range(iterations):
                found = _nearest_existing(points - origin, at - origin)
                at = _recenter(points, found, at)
            labels[i, j, members] = found.to(torch.int32)
            moved[i, j] = at
    return Clustering(labels, moved, segment_sizes(labels, count))


def initial_tokens(n: int, count: int, seed: int) -> Tensor:
    """`count` distinct tokens, one from each of `count` equal stretches of the sequence, by a private generator."""
    edges = torch.arange(count + 1, device="cpu") * n // count
    return edges[:-1] + (uniform(count, seed) * edges.diff()).long()


def uniform(count: int, seed: int) -> Tensor:
    """[count] float64 in [0, 1), the same on every machine: on the CPU, whatever the default device."""
    return torch.rand(count, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """argmin_v |x - c_v|^2, without the |x|^2 that all v share. [n d], [c d] -> [n]"""
    return torch.addmm(centroids.square().sum(-1), points, centroids.T, alpha=-2).argmin(-1)


def _nearest_existing(points: Tensor, centroids: Tensor) -> Tensor:
    """The same where some centroids may not exist (NaN): those are infinitely far."""
    halves = (centroids.square().sum(-1) / 2).nan_to_num(nan=torch.inf)
    return torch.addmm(halves, points, centroids.nan_to_num(nan=0.0).T, alpha=-1).argmin(-1)


def _recenter(points: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    means, sizes = segment_mean(points, labels, len(centroids))
    return torch.where(sizes.unsqueeze(-1) > 0, means, centroids)


def query_metric(q: Tensor, valid: Tensor | None = None) -> Tensor:
    """G_Q = Q^T Q / L (eq. app_query_second_moment), symmetrised. q [b h n d] -> [b h d d]; valid [b n]."""

    def second_moment(queries: Tensor, kept: Tensor) -> Tensor:
        rows = queries[kept].to(compute_dtype(queries.dtype))
        return rows.T @ rows / len(rows)

    kept = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device) if valid is None else valid
    metric = by_head([second_moment(*head) for head in heads(q, kept.unsqueeze(1).expand(-1, q.shape[1], -1))], q)
    return (metric + metric.mT) / 2


def stabilise(metric: Tensor, *, alpha: float = 0.05, epsilon: float = 1e-6, s_min: float = 1e-12) -> Tensor:
    """(1 - alpha) G + (alpha + epsilon) s_Q I with s_Q = max(tr G / d, s_min) (eqs. app_query_metric_scale,
    app_regularized_query_metric).
    """
    expect_fraction("alpha", alpha, zero=True)
    d = metric.shape[-1]
    scale = (metric.diagonal(dim1=-2, dim2=-1).sum(-1) / d).clamp(min=s_min)[..., None, None]
    return (1 - alpha) * metric + (alpha + epsilon) * scale * torch.eye(d, dtype=metric.dtype, device=metric.device)


def metric_root(metric: Tensor, kind: MetricRoot = "cholesky") -> Tensor:
    """R with R R^T = G (eqs. app_query_metric_cholesky, app_query_metric_sqrt); "sqrt" takes a singular metric too."""
    expect_choice("root", kind, METRIC_ROOTS)
    # d x d is small: factor in float64 so that a nearly singular metric costs no accuracy
    exact = metric.double()
    finite = exact.isfinite().all(-1).all(-1)
    if kind == "cholesky":
        root, failed = torch.linalg.cholesky_ex(exact)
        if bool((failed.bool() & finite).any()):
            raise ValueError(
                "metric: expected positive definite for metric_root='cholesky', got a singular one; "
                "raise alpha or set metric_root='sqrt'."
            )
        return root.to(metric.dtype)
    # eigh refuses NaN, and one head's NaN must not reach the others
    values, vectors = torch.linalg.eigh(torch.where(finite[..., None, None], exact, 0))
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2) @ vectors.mT
    return torch.where(finite[..., None, None], root, torch.nan).to(metric.dtype)


def cluster_keys(
    k: Tensor,
    q: Tensor,
    clusters: int,
    metric: KeyMetric = QRKC,
    *,
    iterations: int = 10,
    seed: int = 0,
    start: Tensor | None = None,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
) -> Clustering:
    """QRKC of k [b h m d]: k-means of K R, where distances are squared QK-score errors under q (eq. qrkc_objective).

    Centroids stay in key space. With key_metric="euclidean" it is k-means of k.
    """
    how: dict[str, Any] = {"iterations": iterations, "seed": seed, "start": start, "valid": valid}
    if metric.key_metric == "euclidean":
        return kmeans(k, clusters, **how)
    moments = query_metric(q, query_valid)
    stable = stabilise(moments, alpha=metric.alpha, epsilon=metric.epsilon, s_min=metric.s_min)
    root = metric_root(stable, metric.metric_root)
    transformed = by_head([keys.to(r.dtype) @ r for keys, r in heads(k, root)], k)
    labels, _, sizes = kmeans(transformed, clusters, **how)
    centroids, _ = segment_mean(k, labels, sizes.shape[-1])
    return Clustering(labels, centroids, sizes)
