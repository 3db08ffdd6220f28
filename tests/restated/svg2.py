"""SVG2 (Sparse VideoGen 2, "SAP"): k-means of queries and of keys, size-weighted centroid softmax, top-p with a
floor.

    P_uv = n_v exp(scale c_u . k_v) / sum_r n_r exp(scale c_u . k_r)   c_u, k_v centroids, n_v size of key cluster v

Decisions
- G1 Euclidean Lloyd iterations on video tokens, queries and keys apart, per head. Start: the tokens at sequence
  positions initial_queries, initial_keys [b, h, C] (all video tokens; repeats allowed), so C_q and C_k are their
  lengths (authors: 300 / 1000 Wan, 400 / 1000 HunyuanVideo, drawn with replacement).
- G2 One iteration: label every token with the nearest centroid (squared distance, lower index on ties), then replace
  every centroid by the mean of its tokens; an empty cluster keeps its centroid. Labels are not computed again after
  the last update, so a non-empty cluster's centroid is exactly the mean of its returned tokens.
- G3 `iters` iterations, no early stop: 50 from initial tokens; 2 when `earlier` (the previous call's result) is
  given, whose centroids are then the start instead of initial tokens.
- G4 Scores in full precision, never rounded to the inputs' dtype before sorting and summing. Empty key clusters have
  P = 0 and rank last (A6); kept or not they contribute nothing.
- G5 In descending P a block is removed iff the sum of the blocks before it is > p (0.9): the crossing block is
  included and the first is always kept. p >= 1 keeps all.
- G6 Floor: the first int(min_kc_ratio * C_k) ranks are kept whatever p says (0.10); C_k counts empty clusters too.
- G7 p refers to video-to-video mass; no partial blocks exist, clusters have any size.
- Difference from the authors: text and padding by A3 (their padding attends padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from restated import Restated, block_sees, descending, from_heads, scale_of, softmax, video_tokens

CLUSTERS = ("query_labels", "query_centroids", "key_labels", "key_centroids")


def nearest(point: Tensor, centroids: Tensor) -> int:
    distances = (point - centroids).square().sum(1).tolist()
    return distances.index(min(distances))


def means(tokens: Tensor, labels: list[int], old: Tensor) -> Tensor:
    new = old.clone()
    for j in range(len(old)):
        members = [r for r, label in enumerate(labels) if label == j]
        if members:
            new[j] = tokens[members].mean(0)
    return new


def lloyd(tokens: Tensor, centroids: Tensor, iterations: int) -> tuple[list[int], Tensor]:
    labels: list[int] = []
    for _ in range(iterations):
        new = [nearest(token, centroids) for token in tokens]
        centroids = means(tokens, new, centroids)
        if new == labels:  # equal labels twice: every further iteration repeats itself
            break
        labels = new
    return labels, centroids


def centroid_scores(queries: Tensor, keys: Tensor, sizes: list[int], scale: float) -> list[list[float]]:
    """Weighted by size, not by adding log n: the two are equal."""
    scores = []
    for query in queries:
        logits = [float(query @ key) * scale for key in keys]
        plain = softmax([z if n > 0 else float("-inf") for z, n in zip(logits, sizes, strict=True)])
        total = sum(n * p for n, p in zip(sizes, plain, strict=True))
        scores.append([n * p / total for n, p in zip(sizes, plain, strict=True)])
    return scores


def select(scores: list[float], p: float, floor: int) -> list[bool]:
    kept = [False] * len(scores)
    before = 0.0
    for rank, v in enumerate(descending(scores)):
        kept[v] = p >= 1 or rank == 0 or rank < floor or before <= p
        before += scores[v]
    return kept


def cluster_mask(clusters: dict, scale: float, p: float, ratio: float) -> dict:
    """The map over given clusters: {labels, centroids of queries and keys} -> scores, mask and token-level sees."""
    count = len(clusters["key_centroids"])
    sizes = [clusters["key_labels"].count(j) for j in range(count)]
    scores = centroid_scores(clusters["query_centroids"], clusters["key_centroids"], sizes, scale)
    mask = [select(row, p, int(ratio * count)) for row in scores]
    return {
        **clusters, "sizes": sizes, "scores": torch.tensor(scores, dtype=torch.float64), "mask": torch.tensor(mask),
        "sees": block_sees(mask, clusters["query_labels"], clusters["key_labels"]),
    }  # fmt: skip


def restate(q, k, v, *, grid, text, key_valid, scale, initial_queries=None, initial_keys=None, earlier=None, p=0.9,
            min_kc_ratio=0.10, iters=None) -> Restated:  # fmt: skip
    video = video_tokens(q, text, key_valid)
    iterations = iters if iters is not None else (50 if earlier is None else 2)

    def of_head(b: int, h: int) -> dict:
        if earlier is None:
            query_start, key_start = q[b, h, initial_queries[b, h]], k[b, h, initial_keys[b, h]]
        else:
            last = earlier.notes["heads"][b][h]
            query_start, key_start = last["query_centroids"], last["key_centroids"]
        queries = lloyd(q[b, h, video[b]], query_start, iterations)
        keys = lloyd(k[b, h, video[b]], key_start, iterations)
        return cluster_mask(dict(zip(CLUSTERS, (*queries, *keys), strict=True)), scale_of(q, scale), p, min_kc_ratio)

    return from_heads(q, k, v, text=text, key_valid=key_valid, scale=scale, of_head=of_head)
