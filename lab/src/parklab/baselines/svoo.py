"""SVOO (arXiv 2603.18636): queries and keys clustered by how they respond to each other, floors from an offline
profile.

Per head, video tokens only; C and K hold query and key centroids as rows. One iteration of the co-clustering:

    key n:   profile C k_n, centroid j: profile C K_j, both L2-normalised; label = nearest; K <- means of the raw keys
    query m: profile K q_m, centroid u: profile K C_u, the same with the updated K;      C <- means of the raw queries

Then SVG2's map (svg2.py), with a floor per head: at least the first int(ratio_h C_k) key clusters, ratio_h = the head's
required density at this step and layer (density_profile.py) clipped to floor_clip; `floor`, unclipped, for all heads of
a layer where the profile is missing or has no entry for one of them.

Clusters are computed at every recluster_interval-th step from the first sparse one. Between them labels, sizes and
centroids are the old ones, and the map is made again from them: only the floor can change it.

Defaults are those of the authors' scripts for Wan2.1-14B: 256 and 1024 clusters, 2 iterations, top_p 0.90, floor_clip
(0.15, 0.20), floor 0.10, 20 % dense steps; the presets have the other models'.

A profile has one density per head of the model. Where heads are spread over GPUs (Ulysses) a call shows some of them
without saying which, and is refused with a profile; without one every head's plan is its own, as in every other method
here.

The paper describes another rule (the quantile of a Gaussian fit over calibration inputs, and a minimum or maximum of
recall and sparsity); the authors' code is followed here.

Differences from the authors' code:
- the first centroids are distinct tokens, one per stretch of the sequence, drawn anew at every reclustering; theirs are
  drawn with replacement;
- each guidance branch has its own clusters; theirs share the last branch's on reuse steps;
- dot products in float32 (float64), where theirs are TF32, and P stays so until the selection;
- centroids are kept in the inputs' dtype;
- padding attends to every valid key and nothing attends to padding; theirs attends to itself;
- below 16,384 tokens the clusters hold as many tokens as theirs do at 75,600.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from parkattn.checks import expect_count, expect_fraction, shown
from parkattn.ops import cluster
from parkattn.ops.cluster.definition import Clustering
from parkattn.ops.importance.definition import kept_mass
from parkattn.plan import Plan, Roles, assign_roles
from parkattn.reuse import dense_prefix
from parkattn.segments import aligned, compute_dtype, segment_mean, segment_sizes
from parkattn.settings import LARGEST_SEED
from parkattn.site import CallSite
from parklab.baselines.density_profile import DensityProfile
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import FlooredSelection, StudiedConfig
from parklab.baselines.svg2 import (
    AuthorsClusters,
    by_weight,
    centroid_weights,
    first_ranks,
    planned_blocks,
    share_of,
    with_borders,
)

TOKENS_AT_ONCE = 16_384  # bounds the [tokens, clusters] products
LEAST_NORM = 1e-8

_WAN = {"floor_clip": (0.15, 0.20), "recluster_interval": 40}


@dataclass(frozen=True, kw_only=True)
class SvooConfig(AuthorsClusters, FlooredSelection, StudiedConfig):
    """Defaults are the authors' for Wan2.1-14B; a plan, that is a map, is made at every step."""

    FILES: ClassVar[tuple[str, ...]] = ("density_profile",)
    long_video_blocks: tuple[int, int] = (256, 1024)
    kmeans_iterations: int = 2
    warm_start: bool = False
    floor: float = 0.1
    refresh_interval: int | None = 1
    density_profile: str | None = None
    """File of a density profile (park profile), or sprites: that of the model in the box.
    None: `floor` for every head.
    """
    floor_clip: tuple[float, float] = (0.15, 0.20)
    """Least and largest floor that a profile may ask for."""
    recluster_interval: int = 40
    """Steps for which clusters are kept, from the first sparse step on."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "wan2.1-1.3b": {**_WAN, "recluster_interval": 20},
        "wan2.1-14b": {**_WAN, "dense_layers": (0,)},
        "wan2.2-14b": {**_WAN, "floor_clip": (0.20, 0.22), "dense_layers": (0,)},
        "hunyuanvideo": {
            "top_p": 0.88,
            "floor_clip": (0.05, 0.10),
            "recluster_interval": 50,
            "dense_fraction": 0.1,
            "dense_layers": (0,),
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density_profile is not None and not isinstance(self.density_profile, str):
            raise TypeError(
                f"density_profile: expected the path of a density profile or None, got {shown(self.density_profile)}; "
                "pass a string."
            )
        if (
            not isinstance(self.floor_clip, (tuple, list))
            or len(self.floor_clip) != 2
            or self.floor_clip[0] > self.floor_clip[1]
        ):
            raise ValueError(
                f"floor_clip: expected the least and the largest floor, got {shown(self.floor_clip)}; "
                "write (0.15, 0.2)."
            )
        for ratio in self.floor_clip:
            expect_fraction("floor_clip", ratio, zero=True)
        object.__setattr__(self, "floor_clip", tuple(self.floor_clip))
        expect_count("recluster_interval", self.recluster_interval)


class SvooPlanner(ConfiguredPlanner[SvooConfig]):
    def __init__(self, config: SvooConfig, profile: DensityProfile | None = None) -> None:
        super().__init__(config)
        file = config.density_profile if profile is None else None
        self._profile = profile if file is None else DensityProfile.load(file)

    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        roles = assign_roles(q, k, site.text, site.key_valid)
        kept = None if earlier is None or "query_centroids" not in earlier.memory else earlier
        if kept is None or reclusters(site.step, dense_prefix(config, site.total_steps), config.recluster_interval):
            queries, keys = self._cluster(q, k, site, roles, kept)
            kept = None
        else:
            queries = Clustering(
                kept.queries.labels, kept.memory["query_centroids"], kept.queries.sizes[..., : kept.query_clusters]
            )
            keys = Clustering(kept.keys.labels, kept.memory["key_centroids"], kept.keys.sizes[..., : kept.key_clusters])
        weights = centroid_weights(queries, keys, site.scale)
        ranked, order = by_weight(weights, keys)
        keep = first_ranks(ranked, config, share_of(keys, self.floors(q, site)), keys)
        mask = torch.zeros_like(keep).scatter_(-1, order, keep)
        if kept is None:
            memory = {"query_centroids": queries.centroids, "key_centroids": keys.centroids}
            return planned_blocks(backend, roles, queries, keys, mask, weights, memory)
        # the blocks are the old ones, so nothing is sorted again
        mask = mask & (keys.sizes > 0).unsqueeze(-2)
        return dataclasses.replace(
            kept, mask=roles.extend(mask), estimated_mass=kept_mass(weights, mask, queries.sizes)
        )

    def _cluster(
        self, q: Tensor, k: Tensor, site: CallSite, roles: Roles, earlier: Plan | None
    ) -> tuple[Clustering, Clustering]:
        config, backend = self.config, self.backend(q, site)
        counts = config.counts_in(q, k, site)
        valid = roles.clustered_queries, roles.clustered_keys
        if earlier is not None and config.warm_start:
            starts = [earlier.memory["query_centroids"], earlier.memory["key_centroids"]]
            iterations = config.warm_iterations
        else:
            seed = (config.seed + site.step) % LARGEST_SEED
            sides = zip((q, k), counts[:2], valid, strict=True)
            starts = [
                cluster.first_centroids(backend, x, count, seed=seed, valid=members) for x, count, members in sides
            ]
            iterations = config.kmeans_iterations
        queries, keys = co_cluster(
            q, k, starts[0], starts[1], iterations=iterations, query_valid=valid[0], key_valid=valid[1]
        )
        queries = with_borders(backend, q, queries, counts.query_multiple)
        keys = with_borders(backend, k, keys, counts.key_multiple)
        own, other = (side._replace(centroids=side.centroids.to(q.dtype)) for side in (queries, keys))
        return own, other

    def floors(self, q: Tensor, site: CallSite) -> Tensor | float:
        """Least share of the key clusters, per head [h] where the profile has this step and layer."""
        if self._profile is None:
            return self.config.floor
        if self._profile.densities.device != q.device:
            self._profile = self._profile.to(q.device)  # once: a copy at every step would wait for the GPU
        needed = self._profile.at(site)
        if needed is None:
            return self.config.floor
        if len(needed) != q.shape[1]:
            raise ValueError(
                f"profile: expected one density per head, {q.shape[1]} of them, got {len(needed)}; "
                "measure the profile with this model, or pass density_profile=None where heads are spread over GPUs."
            )
        # one head without an entry, and the whole layer takes the fallback
        return torch.where(needed.isnan().any(), self.config.floor, needed.clamp(*self.config.floor_clip))


def reclusters(step: int, start: int, interval: int) -> bool:
    """Whether clusters are computed at this step, start being the first sparse one."""
    return step >= start and (step - start) % interval == 0


def co_cluster(
    q: Tensor,
    k: Tensor,
    query_centroids: Tensor,
    key_centroids: Tensor,
    *,
    iterations: int,
    query_valid: Tensor | None = None,
    key_valid: Tensor | None = None,
) -> tuple[Clustering, Clustering]:
    """Clusters of q [b h n d] and k [b h m d] from centroids [b h c d]; NaN rows are clusters that do not exist
    (cluster.lloyd).
    """
    (b, h), dtype = q.shape[:2], compute_dtype(q.dtype)
    labels = [torch.empty(x.shape[:3], dtype=torch.int32, device=q.device) for x in (q, k)]
    moved = [torch.empty_like(x, dtype=dtype) for x in (query_centroids, key_centroids)]
    for i in range(b):
        members = [None if valid is None else valid[i] for valid in (query_valid, key_valid)]
        for j in range(h):
            queries, keys = (aligned(x[i, j]).to(dtype) for x in (q, k))
            at_queries, at_keys = query_centroids[i, j].to(dtype), key_centroids[i, j].to(dtype)
            for _ in range(iterations):
                labels[1][i, j], at_keys = _assign_by_response(keys, at_keys, at_queries, members[1])
                labels[0][i, j], at_queries = _assign_by_response(queries, at_queries, at_keys, members[0])
            moved[0][i, j], moved[1][i, j] = at_queries, at_keys
    sizes = [segment_sizes(found, at.shape[2]) for found, at in zip(labels, moved, strict=True)]
    return Clustering(labels[0], moved[0], sizes[0]), Clustering(labels[1], moved[1], sizes[1])


def _assign_by_response(
    tokens: Tensor, centroids: Tensor, others: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Labels [n] of tokens [n d] by their products with the centroids of the other side, and the means of the raw
    tokens.
    """
    count, others = len(centroids), others.nan_to_num(nan=0.0)
    shape = normalize(centroids @ others.T, dim=-1, eps=LEAST_NORM)
    # |a - b|^2 / 2 without the |a|^2 that all clusters share
    halves = (shape.square().sum(-1) / 2).nan_to_num(nan=torch.inf)
    shape = shape.nan_to_num(nan=0.0)
    found = torch.cat([
        torch.addmm(halves, normalize(part @ others.T, dim=-1, eps=LEAST_NORM), shape.T, alpha=-1).argmin(-1)
        for part in tokens.split(TOKENS_AT_ONCE)
    ]).to(torch.int32)  # fmt: skip
    if valid is not None:
        found = torch.where(valid, found, count).to(torch.int32)
    means, sizes = segment_mean(tokens, found, count)
    return found, torch.where(sizes.unsqueeze(-1) > 0, means, centroids)


ENTRIES = (
    planned_entry("svoo", SvooPlanner, SvooConfig,
        "co-clustering of queries and keys by their responses, top-p with floors from an offline density profile",
        "SVOO, arXiv 2603.18636", "top_p", "top_k"),
)  # fmt: skip
