"""A dynamic method: contiguous tiles, scored by their mean query and key, the best ones kept. Outside the package, on
its seam.

import tile_top_k; parkattn.register(tile_top_k.ENTRY); parkattn.enable(pipe, method="tile-top-k", top_k=0.2)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parkattn import CallSite, MethodEntry, Plan, PlannedMethod
from parkattn.checks import expect_count, expect_fraction
from parkattn.ops.importance.definition import kept_mass, query_centroid, select_top_k
from parkattn.plan import arrange, assign_roles, tiles
from parkattn.settings import PlannedConfig


@dataclass(frozen=True, kw_only=True)
class TileConfig(PlannedConfig):
    tile: int = 128
    """Tokens of a tile."""
    top_k: float = 0.25
    """Share of the key tiles that a query tile keeps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count("tile", self.tile)
        expect_fraction("top_k", self.top_k, zero=False)


class TilePlanner:
    def __init__(self, config: TileConfig) -> None:
        self.config = config

    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        roles = assign_roles(q, k, site.text, site.key_valid)
        queries, keys = tiles(q, self.config.tile), tiles(k, self.config.tile)
        counts, labels = (queries.count, keys.count), [queries.labels, keys.labels]
        # text and padding leave their tiles for blocks of their own, so tokens move
        if roles.clustered_queries is not None:
            labels[0] = torch.where(roles.clustered_queries[:, None], labels[0], counts[0]).to(torch.int32)
            queries = arrange(*roles.query_blocks(labels[0], counts[0]))
        if roles.clustered_keys is not None:
            labels[1] = torch.where(roles.clustered_keys[:, None], labels[1], counts[1]).to(torch.int32)
            keys = arrange(*roles.key_blocks(labels[1], counts[1]))
        importance = query_centroid(q, k, labels[0], counts[0], labels[1], counts[1], scale=site.scale)
        mask = select_top_k(importance, self.config.top_k, sizes=keys.sizes[..., : counts[1]])
        mass = kept_mass(importance, mask, queries.sizes[..., : counts[0]])
        return Plan(queries, keys, roles.extend(mask), *counts, padding=site.key_valid is not None, estimated_mass=mass)


def make(config: TileConfig) -> PlannedMethod:
    return PlannedMethod("tile-top-k", TilePlanner(config), config)


ENTRY = MethodEntry("tile-top-k", make, "contiguous tiles by their mean query and key", TileConfig, budgets=("top_k",))
