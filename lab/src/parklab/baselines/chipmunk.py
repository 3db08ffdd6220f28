"""Chipmunk (arXiv 2506.03275): columns of attention that matter at full steps, and the rest cached.

Per head, video tokens only; s the scale, M keys. The grid is cut into voxels of 4 x 6 x 8 cells, frame by frame, then
come the cells that fill no voxel: first of the last frames, then of the lower, then of the right border. Every 192
tokens of that order are a group u of queries. At a full step u keeps

    best     the first round(top_k M / 128) 128 keys by a_uj = sum over i in u of e^{s q_i.k_j - l_i}, l_i the
             log-sum-exp of row i at the full step before (at the first one, its own)
    random   a key with probability random_keys, drawn once for the run, and again for each plan
    first    the keys of the first voxel
    local    with local_voxels: the keys of so many voxels along each axis around its own, moved inwards at a border; a
             group that is no voxel: the last of so many voxels' keys

and R = dense - sparse of that step is added to later steps' sparse output (`token_groups`).

Defaults are those of the authors' package: top_k 0.05, random_keys 0.01, no local voxels, full steps 0, 1 and every
10th of 50, layers 0 and 1 dense. Their script for HunyuanVideo has full steps 0, 1, 10 and 40, as the preset has. Their
script for Wan2.1-14B has top_k 0.1 and local_voxels 5, which alone keep a third of the keys at 720p; both can be set.
Shorter runs: the first 4 % of the steps, rounded up, and every 10 in 50, at least every second one. Their sparse MLP
and their step cache are other things and not here.

Differences from the authors' code:
- random keys are those of a hash of group and key, the same for every head; theirs come from the device's generator,
  the first draw with the same rate and the second always with 1 in 100;
- as many keys as are chosen; theirs rounds the number of each group up to a multiple of 128 with keys at random;
- text has its own blocks, exact on both sides; in theirs the last group or two see everything and hold text and video;
- top_k counts and ranks keys of the video; theirs text too, though text is always on;
- a window of voxels that is wider than the grid is the grid; theirs then reaches into other rows;
- mass is in float32 (float64); theirs is rounded to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from parkattn.checks import expect_count, expect_fraction
from parkattn.plan import Plan
from parkattn.registry import MethodEntry
from parkattn.reuse import History, Phase, always_dense, dense_prefix, plan_lifetime
from parkattn.settings import LARGEST_SEED
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner
from parklab.baselines.sta import Triple, expect_triple, sliding_window
from parklab.baselines.token_groups import FullSteps, GroupedMethod, Groups, TokenGroupsConfig, plan_tokens
from parklab.baselines.video import expect_grid

MIXER, WORD = 73244475, 2**32  # of the hash that random keys are drawn by
DRAWS_AT_ONCE = 2**23  # bounds the draws of some groups: 64 MB


@dataclass(frozen=True, kw_only=True)
class ChipmunkConfig(TokenGroupsConfig):
    """Defaults are those of the authors' package."""

    top_k: float = 0.05
    """Share of the video's keys that a group keeps for their mass; 1: all of them."""
    random_keys: float = 0.01
    """Share of the keys in each of two random draws."""
    voxel: Triple = (4, 6, 8)
    """Cells of a group along (frames, height, width)."""
    local_voxels: int = 0
    """Voxels along each axis around its own that a group keeps whole; an even number counts as the next odd one."""
    seed: int = 0
    """Of the random keys."""
    dense_fraction: float = 0.04
    """Share of the steps, at the start, that are full."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"hunyuanvideo": {"refresh_steps": (10, 40)}}

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("random_keys", self.random_keys, zero=True)
        object.__setattr__(self, "voxel", expect_triple("voxel", self.voxel))
        expect_count("local_voxels", self.local_voxels, least=0)
        expect_count("seed", self.seed, least=0, most=LARGEST_SEED)

    def kept_keys(self, video: Tensor) -> Tensor:
        if self.top_k == 1:
            return video
        return ((video.double() * self.top_k / self.multiple).round() * self.multiple).clamp(min=1).minimum(video)


class EveryFullStep(FullSteps):
    """Every first step is remembered, later ones at multiples of the interval."""

    def phase(self, site: CallSite, history: History) -> Phase:
        found, when, last = super().phase(site, history), self.when, history.refreshed_at
        fixed = when.anchors is not None or when.refresh_steps is not None or when.refresh_interval is None
        if fixed or last is None or last > site.step or always_dense(when, site) is not None:
            return found
        if site.step < dense_prefix(when, site.total_steps):
            return found
        assert when.refresh_interval is not None
        interval = max(plan_lifetime(when, site.total_steps) or 1, min(2, when.refresh_interval))
        due = site.step // interval > last // interval
        return Phase("anchor", f"every {interval} steps are full") if due else Phase("reuse", f"plan of step {last}")

    def _first(self, dense: Phase, site: CallSite, count: int) -> Phase:
        return Phase("anchor", dense.reason)


class ChipmunkPlanner(ConfiguredPlanner[ChipmunkConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, size = self.config, math.prod(self.config.voxel)
        grid = expect_grid(q, k, site)
        order = voxel_order(grid, config.voxel, q.device)
        kept = self._always(order, grid, site)
        if words := site.text_tokens:
            assert site.text is not None
            start = site.text.start
            text = kept.new_zeros(len(kept), words)
            kept = torch.cat([kept[:, :start], text, kept[:, start:]], 1)
            order = order + (order >= start) * words

        def groups_of(queries: Tensor, keys: Tensor, asks: Tensor | None, video: Tensor | None) -> Groups:
            return Groups.of(order, size, asks, len(queries))

        before = None if earlier is None else earlier.memory.get("log_sums")
        return plan_tokens(q, k, site, config, size, groups_of, always=kept, log_sums=before, remember=True)

    def _always(self, order: Tensor, grid: Triple, site: CallSite) -> Tensor:
        """Random, first and local keys: [groups cells] bool"""
        config, size, cells = self.config, math.prod(self.config.voxel), len(order)
        voxels = [length // side for length, side in zip(grid, config.voxel, strict=True)]
        whole, groups = math.prod(voxels), -(-cells // size)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(cells, device=order.device))
        kept = random_keys(groups, cells, config.random_keys, config.seed, site, order.device)
        kept[:whole] |= place < size
        if config.local_voxels:
            side = 2 * (config.local_voxels // 2) + 1
            if whole:
                near = torch.nn.functional.pad(sliding_window(voxels, (side,) * 3, order.device), (0, groups - whole))
                kept[:whole] |= near[:, place // size]
            kept[whole:] |= place >= cells - side**3 * size
        return kept


def voxel_order(grid: Triple, voxel: Triple, device: torch.device) -> Tensor:
    """Cells [cells] voxel by voxel, those that fill none last: of the last frames, of the lower,
    of the right border.
    """
    cell = torch.arange(math.prod(grid), device=device)
    at = (cell // (grid[1] * grid[2]), cell // grid[2] % grid[1], cell % grid[2])
    number, inside = torch.zeros_like(cell), torch.zeros_like(cell)
    behind = torch.zeros_like(cell)
    for axis in range(3):
        count = grid[axis] // voxel[axis]
        number, inside = number * max(1, count) + at[axis] // voxel[axis], inside * voxel[axis] + at[axis] % voxel[axis]
        behind = torch.where((behind == 0) & (at[axis] >= count * voxel[axis]), axis + 1, behind)
    key = torch.where(behind == 0, number * math.prod(voxel) + inside, behind * len(cell) + cell)
    return key.argsort(stable=True)


def random_keys(groups: int, cells: int, rate: float, seed: int, site: CallSite, device: torch.device) -> Tensor:
    """Two draws for every group and cell: one for the run, one for this step and layer. [groups cells] bool"""
    below, cell = int(rate * WORD), torch.arange(cells, device=device)
    parts = []
    for some in torch.arange(groups, device=device).split(max(1, DRAWS_AT_ONCE // cells)):
        drawn = torch.zeros(len(some), cells, dtype=torch.bool, device=device)
        for when in ((0, 0), (site.step + 1, site.layer + 1)) if below else ():
            start = mixed(mixed(mixed(seed % WORD) ^ when[0]) ^ when[1])
            drawn |= mixed(mixed(some ^ start).unsqueeze(1) ^ cell) < below
        parts.append(drawn)
    return torch.cat(parts)


def mixed(x: Any) -> Any:
    """A number below 2^32, or a tensor of them, to another, so that near ones are far apart."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * MIXER % WORD
    return (x >> 16) ^ x


ENTRIES = (
    MethodEntry(
        "chipmunk",
        lambda config: GroupedMethod("chipmunk", ChipmunkPlanner(config), config, EveryFullStep(config)),
        "Chipmunk: voxels of queries with their heaviest keys and some at random, chosen at full steps, and all that "
        "these missed there",
        ChipmunkConfig,
        budgets=("top_k",),
        paper="arXiv 2506.03275",
    ),
)
