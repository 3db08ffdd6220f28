"""The definitions, on any device PyTorch knows and in any floating dtype."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from parkattn import permute
from parkattn.attend import attend
from parkattn.borders import round_borders
from parkattn.cluster import Clustering, cluster_keys, kmeans
from parkattn.config import ParkConfig
from parkattn.importance import ESTIMATORS
from parkattn.plan import Blocks, Plan
from parkattn.segments import segment_mean


@dataclass(frozen=True)
class ReferenceBackend:
    reason: str
    name: str = "reference"
    differentiable = True

    def cluster_queries(self, q: Tensor, config: ParkConfig, *, iterations: int, start: Tensor | None, valid: Tensor | None) -> Clustering:
        return kmeans(q, config.query_clusters, iterations=iterations, seed=config.seed, start=start, valid=valid)

    def cluster_keys(
        self,
        k: Tensor,
        q: Tensor,
        config: ParkConfig,
        *,
        iterations: int,
        start: Tensor | None,
        valid: Tensor | None,
        query_valid: Tensor | None,
    ) -> Clustering:
        if config.key_metric == "euclidean":
            return kmeans(k, config.key_clusters, iterations=iterations, seed=config.seed, start=start, valid=valid)
        return cluster_keys(
            k,
            q,
            config.key_clusters,
            alpha=config.alpha,
            epsilon=config.epsilon,
            s_min=config.s_min,
            root=config.metric_root,
            iterations=iterations,
            seed=config.seed,
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
        self, kind: str, q: Tensor, k: Tensor, query_blocks: Blocks, queries: Clustering, keys: Clustering, *, scale: float | None
    ) -> Tensor:
        return ESTIMATORS[kind](q, k, queries.labels, queries.clusters, keys.labels, keys.clusters, scale=scale)

    def arrange(self, labels: Tensor, count: int) -> Blocks:
        return permute.arrange(labels, count)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool) -> Tensor:
        out = attend(
            permute.gather(q, plan.queries),
            permute.gather(k, plan.keys),
            permute.gather(v, plan.keys),
            plan.queries,
            plan.keys,
            plan.mask,
            scale=scale,
            compensate=plan.compensable() if compensate else None,
        )
        return permute.scatter(out, plan.queries)
