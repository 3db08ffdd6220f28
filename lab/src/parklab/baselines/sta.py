"""STA, Sliding Tile Attention (Zhang et al., ICML 2025, arXiv 2502.04507): whole tiles of a window around each tile.

The grid (frames, height, width) is cut into tiles; on an axis of T tiles, with w = min(window, T), tile t sees
    first .. first + w - 1,   first = min(max(t - w // 2, 0), T - w)
so at the border the window moves inwards instead of shrinking. A tile is seen if it is on all three axes. No score is
computed: the plan depends on the grid alone and is kept for the whole run.

Defaults: tile (6, 8, 8) of the authors' kernel and window (3, 3, 3) tiles of its documentation; 12 dense steps of 50 as
in their script for Wan2.1. `window` is one triple, or one per head (they search one per layer and head; not here),
which is refused where heads are spread over GPUs (Ulysses), because a call then shows some of them without saying
which.

Different from the authors' code, on purpose:
- the last tile of an axis may be smaller (their kernel takes only grids that the tile divides);
- an even window shows exactly w tiles, the odd one out on the lower side (their reference mask would show w + 1);
- padding is seen by nobody; text sees and is seen by all, as theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parkattn.checks import expect_count, shown
from parkattn.plan import Plan, assign_roles
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.video import arrange_keys, arrange_queries, expect_grid

Triple = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class StaConfig(StudiedConfig):
    """Triples count along (frames, height, width)."""

    window: Triple | tuple[Triple, ...] = (3, 3, 3)
    """Tiles seen along each axis; a triple per head is taken too."""
    tile: Triple = (6, 8, 8)
    """Tokens of a tile along each axis."""
    dense_fraction: float = 0.24
    refresh_interval: int | None = None
    """Steps for which a plan is used, in a run of reference_steps; None: until the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tile", expect_triple("tile", self.tile))
        if isinstance(self.window, Sequence) and self.window and isinstance(self.window[0], Sequence):
            windows: Any = tuple(expect_triple("window", one) for one in self.window)
        else:
            windows = expect_triple("window", self.window)
        object.__setattr__(self, "window", windows)

    def windows(self, heads: int) -> list[Triple]:
        """One triple for all heads, or one for each."""
        given: Any = self.window
        if isinstance(given[0], int):
            return [given]
        if len(given) != heads:
            got = f"{len(given)}; or pass one for all"
            raise ValueError(f"window: expected one triple for each of {heads} heads, got {got}; give each head one.")
        return list(given)


class StaPlanner(ConfiguredPlanner[StaConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        b, h = q.shape[:2]
        grid = expect_grid(q, k, site)
        roles = assign_roles(q, k, site.text, site.key_valid)
        tiles = [-(-size // tile) for size, tile in zip(grid, config.tile, strict=True)]
        count = tiles[0] * tiles[1] * tiles[2]
        of_cell = tile_of_cell(grid, config.tile, q.device).view(1, 1, -1)
        seen = torch.stack([sliding_window(tiles, window, q.device) for window in config.windows(h)])
        return Plan(
            arrange_queries(of_cell, count, q, site, roles, backend),
            arrange_keys(of_cell, count, k, site, roles, backend),
            roles.extend(seen.unsqueeze(0).expand(b, h, count, count)),
            count,
            count,
            padding=site.key_valid is not None,
        )


def tile_of_cell(grid: Triple, tile: Triple, device: torch.device) -> Tensor:
    """[cells], cells and tiles numbered frame by frame, row by row."""
    number: Tensor | int = 0
    for axis, (size, length) in enumerate(zip(grid, tile, strict=True)):
        along = torch.arange(size, device=device) // length
        number = number * -(-size // length) + along.view([-1 if axis == other else 1 for other in range(3)])
    assert isinstance(number, Tensor)
    return number.flatten()


def sliding_window(tiles: Sequence[int], window: Triple, device: torch.device) -> Tensor:
    """Which tile (row) sees which tile (column): [count count] bool"""
    seen = torch.ones(1, 1, dtype=torch.bool, device=device)
    for total, wanted in zip(tiles, window, strict=True):
        width = min(wanted, total)
        at = torch.arange(total, device=device)
        first = (at - width // 2).clamp(0, total - width).unsqueeze(1)
        axis = (at >= first) & (at < first + width)
        rows = seen.shape[0] * total
        seen = (seen[:, None, :, None] & axis[None, :, None, :]).reshape(rows, rows)
    return seen


def expect_triple(name: str, value: Any) -> Triple:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        raise TypeError(
            f"{name}: expected (frames, height, width) in whole numbers, got {shown(value)}; write (3, 3, 3)."
        )
    for number in value:
        expect_count(name, number)
    return value[0], value[1], value[2]


ENTRIES = (
    planned_entry("sta", StaPlanner, StaConfig,
        "STA: a fixed 3-D window of whole tiles around each tile of the video",
        "arXiv 2502.04507"),
)  # fmt: skip
