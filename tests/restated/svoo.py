"""SVOO: bidirectional co-clustering by response profiles, SVG2's map, and a floor per head from an offline density
profile.

One iteration, query centroids C and key centroids K as rows:
    key n:   profile C k_n, centroid j: profile C K_j, L2-normalised; label = nearest profile; K <- means of raw keys
    query m: profile K q_m, centroid u: profile K C_u, the same with the UPDATED K; C <- means of raw queries

Decisions
- O1 Video tokens only, per head. Start: tokens at sequence positions initial_queries, initial_keys [b, h, C]
  (authors: 256 / 1024 drawn with replacement, afresh at every reclustering, no warm start).
- O2 iters = 2 iterations, key step before query step, labels by squared distance of normalised profiles (lower index
  on ties), profile / max(norm, 1e-8); profiles run over all centroids, empty ones included; no scale inside profiles.
- O3 An empty cluster keeps its centroid; labels are not computed again after the last update (as G2).
- O4 Map from centroids and sizes exactly as SVG2 G4, G5 with p = 0.90 (HunyuanVideo 0.88); p >= 1 keeps all.
- O5 Floor per head: int(ratio * C_k) first ranks, ratio = clip(profile[h], lo, hi), floor_clip = (lo, hi) = (0.15,
  0.20) (Wan2.1 T2V). With profile None, or any head's entry missing (NaN), ALL heads use min_kc_ratio = 0.10, which
  is not clipped.
- O6 `profile` [h] holds required densities of this (step, layer); a batch shares it.
- O7 Reuse: with `earlier` (a previous call's result) labels, centroids and sizes are its own, nothing is clustered,
  and the map is made again from the OLD centroids with the current p and floor.
- O8 Steps count from 1: reclusters(step, start, interval) is (step - start) % interval == 0 from `start` on (start =
  dense steps + 1).
- O9 required_density: for every video query, the number of largest softmax probabilities over video keys needed to
  reach `mass` = 0.95 of the total (the crossing key included), divided by the number of video keys, averaged over
  video queries -> [b, h]; several inputs are joined by their maximum per head.
- O10 The paper's own rule (quantile of a Gaussian fit, min / max of recall and sparsity) differs from the authors'
  code; the code is restated. No partial blocks exist.
- Difference from the authors: text and padding by A3; full precision (they use TF32 dots and sort in the inputs'
  dtype).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from restated import Restated, descending, from_heads, scale_of, softmax, video_tokens
from restated.svg2 import CLUSTERS, cluster_mask, means, nearest


def response(tokens: Tensor, others: Tensor) -> Tensor:
    """Normalised dot products of each token with every centroid of the other side."""
    rows = []
    for token in tokens:
        profile = others @ token
        rows.append(profile / max(float(profile.norm()), 1e-8))
    return torch.stack(rows)


def assign(tokens: Tensor, centroids: Tensor, others: Tensor) -> list[int]:
    references = response(centroids, others)
    return [nearest(profile, references) for profile in response(tokens, others)]


def co_cluster(queries: Tensor, keys: Tensor, query_start: Tensor, key_start: Tensor, iterations: int) -> dict:
    query_centroids, key_centroids = query_start, key_start
    query_labels: list[int] = []
    key_labels: list[int] = []
    for _ in range(iterations):
        key_labels = assign(keys, key_centroids, query_centroids)
        key_centroids = means(keys, key_labels, key_centroids)
        query_labels = assign(queries, query_centroids, key_centroids)
        query_centroids = means(queries, query_labels, query_centroids)
    return dict(zip(CLUSTERS, (query_labels, query_centroids, key_labels, key_centroids), strict=True))


def reclusters(step: int, start: int, interval: int) -> bool:
    return step >= start and (step - start) % interval == 0


def required_density(q: Tensor, k: Tensor, *, text, key_valid, scale, mass: float = 0.95) -> Tensor:
    video = video_tokens(q, text, key_valid)
    density = torch.zeros(q.shape[:2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            fractions = []
            for i in video[b]:
                row = softmax((k[b, h, video[b]] @ q[b, h, i] * scale_of(q, scale)).tolist())
                covered, count = 0.0, 0
                for j in descending(row):
                    covered, count = covered + row[j], count + 1
                    if covered >= mass * sum(row):
                        break
                fractions.append(count / len(row))
            density[b, h] = sum(fractions) / len(fractions)
    return density


def floor_ratio(profile: Sequence[float] | None, head: int, clip: tuple[float, float], fallback: float) -> float:
    if profile is None or any(math.isnan(value) for value in profile):
        return fallback
    return min(max(float(profile[head]), clip[0]), clip[1])


def restate(q, k, v, *, grid, text, key_valid, scale, initial_queries=None, initial_keys=None, earlier=None, p=0.90,
            profile=None, floor_clip=(0.15, 0.20), min_kc_ratio=0.10, iters=2) -> Restated:  # fmt: skip
    video = video_tokens(q, text, key_valid)

    def of_head(b: int, h: int) -> dict:
        if earlier is None:
            starts = q[b, h, initial_queries[b, h]], k[b, h, initial_keys[b, h]]
            clusters = co_cluster(q[b, h, video[b]], k[b, h, video[b]], *starts, iters)
        else:
            clusters = {name: earlier.notes["heads"][b][h][name] for name in CLUSTERS}
        return cluster_mask(clusters, scale_of(q, scale), p, floor_ratio(profile, h, floor_clip, min_kc_ratio))

    return from_heads(q, k, v, text=text, key_valid=key_valid, scale=scale, of_head=of_head)
