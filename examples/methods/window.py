"""A static method: every token sees a 3-D window of frames, rows and columns around its tile. Outside the package, on
its seam.

import window; parkattn.register(window.ENTRY); parkattn.enable(pipe, method="window")
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parkattn import CallSite, MethodEntry, Plan, PlannedMethod
from parkattn.plan import arrange, assign_roles
from parkattn.settings import PlannedConfig


@dataclass(frozen=True, kw_only=True)
class WindowConfig(PlannedConfig):
    tile: tuple[int, int, int] = (2, 4, 4)
    """Frames, rows and columns of a tile."""
    reach: int = 1
    """How many tiles away, along each axis, a token sees."""
    refresh_interval: int | None = None
    """A static mask is made once."""


class WindowPlanner:
    def __init__(self, config: WindowConfig) -> None:
        self.config = config

    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        if site.grid is None:
            raise ValueError("grid: expected the video's (frames, rows, columns), got None; use a model of the table.")
        roles = assign_roles(q, k, site.text, site.key_valid)
        sides = list(zip(site.grid, self.config.tile, strict=True))
        axes = [torch.arange(size, device=q.device) // tile for size, tile in sides]
        counts = [int(-(-size // tile)) for size, tile in sides]
        tile_of = (axes[0][:, None, None] * counts[1] + axes[1][:, None]) * counts[2] + axes[2]
        places = torch.cartesian_prod(*(torch.arange(count, device=q.device) for count in counts)).view(-1, 3)
        near = (places[:, None] - places).abs().amax(-1) <= self.config.reach
        number, text = len(places), site.text or slice(0, 0)
        labels = torch.full((q.shape[2],), number, dtype=torch.int32, device=q.device)
        video = torch.ones(q.shape[2], dtype=torch.bool)
        video[text] = False
        labels[video.nonzero().squeeze(1).to(q.device)] = tile_of.flatten().to(torch.int32)
        labels = labels.expand(*q.shape[:3])
        mask = roles.extend(near.expand(*q.shape[:2], number, number))
        own = roles.clustered_queries
        query_labels = labels if own is None else torch.where(own[:, None], labels, number)
        queries, keys = arrange(*roles.query_blocks(query_labels, number)), arrange(*roles.key_blocks(labels, number))
        return Plan(queries, keys, mask, number, number, padding=site.key_valid is not None)


def make(config: WindowConfig) -> PlannedMethod:
    return PlannedMethod("window", WindowPlanner(config), config)


ENTRY = MethodEntry("window", make, "a static 3-D window around each tile", WindowConfig)
