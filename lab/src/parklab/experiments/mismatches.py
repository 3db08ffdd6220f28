"""What compressing queries and keys costs block retrieval, measured on one captured call: plain numbers, one per head.

Partitions: "Clustered" is Euclidean k-means of queries and of keys; "Original" is as many contiguous tiles in token
order. Text and padding take no part.

recall     share of the exact attention in the blocks that top-p (0.9) or top-k (0.1) keeps of an estimated importance
tv         total variation between estimated and exact block importance (eq. appendix_mismatch_tv), Euclidean partitions
log_mass   centred log-mass RMSE (eq. appendix_mismatch_centered_rmse), over LOG_MASS_QUERIES evenly spread queries
           where there are more; key_mse and score_error (eq. key_score_errors): each for Euclidean clusters of keys and
           for QRKC
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parkattn.backend import resolve_for
from parkattn.ops import cluster
from parkattn.ops.importance.definition import ESTIMATORS, exact, kept_mass, select_top_k, select_top_p
from parkattn.plan import Blocks, arrange, tiles
from parklab.experiments.captures import CapturedCall
from parklab.metrics import retrieval as measures
from parklab.research import ResearchConfig

TOP_P, TOP_K = 0.9, 0.1
LOG_MASS_QUERIES = 4096
# estimator: what stands for queries and for keys
REPRESENTATIONS = {
    "exact": ("Full", "Full"), "query-centroid": ("Centroid", "Centroid"), "full-key": ("Centroid", "Full"),
    "pama": ("Full", "Centroid"),
}  # fmt: skip


def measure_call(call: CapturedCall, config: ResearchConfig, device: str = "cpu") -> dict[str, Any]:
    """config: the numbers of blocks, k-means iterations and the metric of QRKC."""
    q, k = call.to(device).video_tokens()
    scale, counts = call.site.scale, config.counts(q.shape[2], k.shape[2])
    backend = resolve_for(q, config.backend)
    asked: dict[str, Any] = {"iterations": config.kmeans_iterations, "seed": config.seed}
    clusters = cluster.kmeans(backend, q, counts.queries, **asked)
    found = {
        metric: cluster.cluster_keys(backend, k, q, counts.keys, config.replace(key_metric=metric), **asked)
        for metric in ("euclidean", "query-response")
    }
    queries = arrange(clusters.labels, clusters.clusters)
    keys = {metric: arrange(side.labels, side.clusters) for metric, side in found.items()}
    original = [tiles(x, -(-x.shape[2] // count)) for x, count in ((q, counts.queries), (k, counts.keys))]

    reference = {
        metric: exact(q, k, queries.labels, queries.count, side.labels, side.count, scale=scale)
        for metric, side in keys.items()
    }
    clustered, tv = _recalls(q, k, queries, keys["euclidean"], scale, reference["euclidean"])
    in_order = exact(q, k, original[0].labels, original[0].count, original[1].labels, original[1].count, scale=scale)
    return {
        "call": call.name,
        "tokens": [q.shape[2], k.shape[2]],
        "blocks": [queries.count, keys["euclidean"].count],
        "recall": {"Clustered": clustered, "Original": _recalls(q, k, original[0], original[1], scale, in_order)[0]},
        "tv": tv,
        "keys": {
            metric: _key_errors(q, k, queries, blocks, scale, reference[metric]) for metric, blocks in keys.items()
        },
    }


def _recalls(
    q: Tensor, k: Tensor, queries: Blocks, keys: Blocks, scale: float | None, reference: Tensor
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """By selection and estimator: recall; and the total variation by estimator. reference: the exact importance."""
    sides = queries.labels, queries.count, keys.labels, keys.count
    recall: dict[str, Any] = {"top_p": {}, "top_k": {}}
    tv = {}
    for name in REPRESENTATIONS:
        estimate = reference if name == "exact" else ESTIMATORS[name](q, k, *sides, scale=scale)
        tv[name] = _listed(measures.weight_tv(estimate, reference, queries.sizes))
        masks = {
            "top_p": select_top_p(estimate, TOP_P, sizes=keys.sizes),
            "top_k": select_top_k(estimate, TOP_K, sizes=keys.sizes),
        }
        for kind, mask in masks.items():
            recall[kind][name] = _listed(kept_mass(reference, mask, queries.sizes))
    return recall, tv


def _key_errors(
    q: Tensor, k: Tensor, queries: Blocks, keys: Blocks, scale: float | None, reference: Tensor
) -> dict[str, list[float]]:
    # head by head: the exact log-mass holds a row of scores for each of many queries
    rows = torch.linspace(0, q.shape[2] - 1, min(q.shape[2], LOG_MASS_QUERIES), device=q.device).round().long()
    heads = [(q[:, h : h + 1, rows], k[:, h : h + 1], keys.labels[:, h : h + 1]) for h in range(q.shape[1])]
    log_mass = torch.cat([measures.centered_log_mass_rmse(*head, keys.count, scale=scale) for head in heads], 1)
    importance = ESTIMATORS["pama"](q, k, queries.labels, queries.count, keys.labels, keys.count, scale=scale)
    mask = select_top_p(importance, TOP_P, sizes=keys.sizes)
    return {
        "log_mass": _listed(log_mass),
        "key_mse": _listed(measures.key_mse(k, keys.labels, keys.count)),
        "score_error": _listed(measures.score_error(q, k, keys.labels, keys.count, scale=scale)),
        "pama_recall": _listed(kept_mass(reference, mask, queries.sizes)),
    }


def _listed(values: Tensor) -> list[float]:
    return [float(value) for value in values.flatten().tolist()]
