"""SVG2, Sparse VideoGen2, "semantic-aware permutation" (arXiv 2505.18875): k-means of queries and of keys, retrieval by
centroids.

Per head, video tokens only; c_u and k_v are centroids of query cluster u and key cluster v, n_v is a size, s the scale:

    P_uv = n_v exp(s c_u.k_v) / sum_r n_r exp(s c_u.k_r)
    u keeps key clusters by falling P while the sum before a cluster is <= top_p, and at least the first int(floor C_k).

Defaults are those of the authors' scripts: 300 query and 1000 key clusters (HunyuanVideo 400 and 1000), top_p 0.9,
floor 0.10, 50 Lloyd iterations at first and 2 from the previous centroids at every later step, 20 % dense steps
(HunyuanVideo 10 %), the first 3 % of the layers dense, rounded down. They have no setting for Wan2.2; it gets Wan2.1's.
What the paper calls "Turbo" is not published.

Differences from the authors' code:
- the first centroids are distinct tokens, one per stretch of the sequence; theirs are drawn with replacement;
- each guidance branch starts from its own centroids; theirs share one set, so each starts from the other's;
- clusters are not computed during the dense steps (their HunyuanVideo script does), so the first plan is the cold one;
- P stays in float32 (float64) until the selection; theirs is rounded to the inputs' dtype before it is sorted and
  summed;
- no early stop, which would wait for the GPU;
- padding attends to every valid key and nothing attends to padding; theirs attends to itself;
- below 16,384 tokens the clusters hold as many tokens as theirs do at 75,600.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from parkattn.ops import Backend, cluster
from parkattn.ops.cluster.borders import fitting_multiple
from parkattn.ops.cluster.definition import Clustering
from parkattn.ops.importance.definition import centroid_log_mass, kept_mass
from parkattn.plan import Plan, Roles, assign_roles
from parkattn.settings import LONG_VIDEO, BlockCounts, by_length
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import FlooredSelection, KMeans, StudiedConfig

# of SVG2, and of SVG-EAR, which begins from its settings
AUTHORS_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "wan2.1-1.3b": {},
    "wan2.1-14b": {"dense_layers": (0,)},
    "wan2.2-14b": {"dense_layers": (0,)},
    "hunyuanvideo": {"long_video_blocks": (400, 1000), "dense_fraction": 0.1, "dense_layers": (0,)},
}
AUTHORS_TOKENS = 75_600  # Wan at 720p with 81 frames, which the authors' cluster counts are for


@dataclass(frozen=True, kw_only=True)
class AuthorsClusters(KMeans):
    """Clusters as SVG2 and its successors have them: end where k-means ends them, in proportion to their counts in a
    short video.
    """

    long_video_blocks: tuple[int, int] = (300, 1000)
    kmeans_iterations: int = 50
    warm_iterations: int = 2
    query_multiple: int | None = 1
    key_multiple: int | None = 1

    def counts(self, queries: int, keys: int) -> BlockCounts:
        """As many tokens per block as the authors' clusters hold, in short videos too."""

        def count(asked: Any, tokens: int, many: int, least: int) -> int:
            own = by_length(asked, tokens >= LONG_VIDEO)
            return own or (many if tokens >= LONG_VIDEO else max(least, tokens * many // AUTHORS_TOKENS))

        return BlockCounts(
            count(self.query_clusters, queries, self.long_video_blocks[0], 2),
            count(self.key_clusters, keys, self.long_video_blocks[1], 4),
            self.query_multiple or 1,
            self.key_multiple or 1,
        )

    def counts_in(self, q: Tensor, k: Tensor, site: CallSite) -> BlockCounts:
        """Of a call, whose text is in no cluster."""
        return self.counts(q.shape[2] - site.text_tokens, k.shape[2] - site.text_tokens)


@dataclass(frozen=True, kw_only=True)
class Svg2Config(AuthorsClusters, FlooredSelection, StudiedConfig):
    """Defaults are the authors' for Wan2.1 text to video; `floor` is their min_kc_ratio."""

    floor: float = 0.1
    refresh_interval: int | None = 1

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = AUTHORS_PRESETS


class Svg2Planner(ConfiguredPlanner[Svg2Config]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        roles = assign_roles(q, k, site.text, site.key_valid)
        queries, keys, memory = cluster_both(backend, q, k, site, roles, earlier, config)
        weights = centroid_weights(queries, keys, site.scale)
        ranked, order = by_weight(weights, keys)
        keep = first_ranks(ranked, config, share_of(keys, config.floor), keys)
        mask = torch.zeros_like(keep).scatter_(-1, order, keep)
        return planned_blocks(backend, roles, queries, keys, mask, weights, memory)


def cluster_both(
    backend: Backend, q: Tensor, k: Tensor, site: CallSite, roles: Roles, earlier: Plan | None, config: AuthorsClusters
) -> tuple[Clustering, Clustering, dict[str, Tensor]]:
    """Clusters of queries and of keys by plain k-means, and what the next call begins from: the centroids, in q's
    dtype.
    """
    counts = config.counts_in(q, k, site)
    found, memory = [], {}
    for name, x, count, multiple, valid in (
        ("query_centroids", q, counts.queries, counts.query_multiple, roles.clustered_queries),
        ("key_centroids", k, counts.keys, counts.key_multiple, roles.clustered_keys),
    ):
        start = None if earlier is None or not config.warm_start else earlier.memory.get(name)
        iterations = config.kmeans_iterations if start is None else config.warm_iterations
        if start is None:
            start = cluster.first_centroids(backend, x, count, seed=config.seed, valid=valid)
        clusters = cluster.lloyd(backend, x, start, iterations=iterations, valid=valid)
        memory[name] = clusters.centroids.to(q.dtype)
        found.append(with_borders(backend, x, clusters, multiple))
    return found[0], found[1], memory


def with_borders(backend: Backend, x: Tensor, found: Clustering, multiple: int) -> Clustering:
    """Clusters as blocks that begin at multiples, where a user asks for it; clusters that do not exist stay marked."""
    if multiple == 1:
        return found
    rounded = cluster.round_borders(backend, x, found, fitting_multiple(multiple, x.shape[2], found.clusters))
    return rounded._replace(centroids=rounded.centroids.masked_fill(found.centroids.isnan(), torch.nan))


def centroid_weights(queries: Clustering, keys: Clustering, scale: float | None) -> Tensor:
    """P [b h c_q c_k] in float32 or better: 0 for empty key clusters, and in rows of empty query clusters."""
    log_mass = centroid_log_mass(queries.centroids, keys.centroids, keys.sizes, scale=scale)
    log_mass = log_mass.masked_fill((keys.sizes == 0).unsqueeze(-2), -torch.inf)
    return log_mass.softmax(-1).masked_fill((queries.sizes == 0).unsqueeze(-1), 0.0)


def by_weight(weights: Tensor, keys: Clustering) -> tuple[Tensor, Tensor]:
    """Weights [b h c_q c_k] in falling order, and the cluster at each rank: empty clusters last, ties to the lower
    index.
    """
    ranked, order = weights.masked_fill((keys.sizes == 0).unsqueeze(-2), -1.0).sort(
        dim=-1, descending=True, stable=True
    )
    return ranked.clamp(min=0), order


def share_of(found: Clustering, ratio: float | Tensor, slack: float = 0.0) -> Tensor:
    """int(ratio * C) [b h 1 1], C the clusters that exist, empty ones included.
    ratio: a number, or one per head [h].
    """
    existing = (~found.centroids[..., 0].isnan()).sum(-1).double()
    return (existing * ratio + slack).floor()[..., None, None]


def first_ranks(ranked: Tensor, selection: FlooredSelection, least: Tensor, keys: Clustering) -> Tensor:
    """Which ranks [b h c_q c_k] the budget covers: weights fall along a row; the first, and `least` [b h 1 1] in any
    case.
    """
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    if selection.top_k is not None:
        keep = (rank < share_of(keys, selection.top_k)).expand(ranked.shape)
    else:
        assert selection.top_p is not None
        before = pad(ranked.cumsum(-1), (1, 0))[..., :-1]
        # written as "not exceeded" so that a NaN row keeps everything and shows in the output, as in dense attention
        keep = ~(before > selection.top_p) if selection.top_p < 1 else torch.ones_like(ranked, dtype=torch.bool)
    return keep | (rank < least) | (rank == 0)


def planned_blocks(
    backend: Backend,
    roles: Roles,
    queries: Clustering,
    keys: Clustering,
    mask: Tensor,
    weights: Tensor,
    memory: Mapping[str, Tensor],
) -> Plan:
    """The plan of a mask [b h c_q c_k] over clusters; weights: the estimated attention it is to be judged by."""
    mask = mask & (keys.sizes > 0).unsqueeze(-2) & (queries.sizes > 0).unsqueeze(-1)
    return Plan(
        cluster.arrange(backend, *roles.query_blocks(queries.labels, queries.clusters)),
        cluster.arrange(backend, *roles.key_blocks(keys.labels, keys.clusters)),
        roles.extend(mask),
        queries.clusters,
        keys.clusters,
        padding=roles.key_valid is not None,
        estimated_mass=kept_mass(weights, mask, queries.sizes),
        memory=memory,
    )


ENTRIES = (
    planned_entry("svg2", Svg2Planner, Svg2Config,
        "k-means of queries and keys at every step, size-weighted centroid softmax, top-p with a floor",
        "Sparse VideoGen2, arXiv 2505.18875", "top_p", "top_k"),
)  # fmt: skip
