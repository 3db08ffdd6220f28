"""Radial Attention (Li et al., NeurIPS 2025, arXiv 2506.19852): fixed bands between frames, narrower with distance.

S tokens per frame, bits(x) the number of binary digits of x, D = |frame_i - frame_j|. A query at place r of frame i
sees the key at place c of frame j if
    |r - c| <= width(D)  and  D mod split(D) = 0
    width(D) = S for D <= 1, else max(decay 2^bits(S) / 2^bits(D), block)
    split(D) = 1 if reach >= block else floor(block / reach),   reach = 2^bits(S) / 2^bits(D)
so the band halves when D doubles, and from one block on frames are left out instead; with `sink` all see frame 0.
Blocks of `block` consecutive video tokens: (u, v) is kept if for one pair of frames, of the columns of v in frame j
that a row of u in frame i sees, more than 3/5 are seen by more than a third of as many rows as u has; (u, u) always is.
All of this depends on the grid alone, and the plan is kept for the whole run.

Defaults: block 128, decay 1.0 of the authors' command line; sink True as for Wan. Presets as in their scripts: decay
0.2 for Wan2.1 (theirs is for 14B), 0.8 for Wan2.2, 0.95 and no sink for HunyuanVideo; 12 dense steps of 50, and for Wan
the first layer dense.

Different from the authors' code, on purpose:
- every block that a frame touches takes part (theirs drops the last one where a frame begins inside a block);
- the diagonal is always kept and the last block may be shorter (theirs needs a multiple of `block` tokens);
- their code is followed where the paper's formula differs (the narrowest band is one block, not the diagonal);
- padding is seen by nobody; text sees and is seen by all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from parkattn.checks import expect_count, expect_flag, expect_fraction
from parkattn.plan import Plan, assign_roles, tiles
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.video import arrange_keys, arrange_queries, expect_grid


@dataclass(frozen=True, kw_only=True)
class RadialConfig(StudiedConfig):
    """Radial Attention's settings."""

    decay: float = 1.0
    """Narrows the bands of frames that are more than one apart."""
    sink: bool = True
    """Whether every query sees the first frame."""
    block: int = 128
    """Tokens per block, and the width below which bands do not fall."""
    dense_fraction: float = 0.24
    refresh_interval: int | None = None
    """Steps for which a plan is used, in a run of reference_steps; None: until the run ends."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "wan2.1-1.3b": {"decay": 0.2, "dense_layers": (0,)},
        "wan2.1-14b": {"decay": 0.2, "dense_layers": (0,)},
        "wan2.2-14b": {"decay": 0.8, "dense_layers": (0,)},
        "hunyuanvideo": {"decay": 0.95, "sink": False},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("decay", self.decay, zero=False)
        expect_flag("sink", self.sink)
        expect_count("block", self.block)


class RadialPlanner(ConfiguredPlanner[RadialConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        b, h = q.shape[:2]
        frames, height, width = expect_grid(q, k, site)
        roles = assign_roles(q, k, site.text, site.key_valid)
        kept = kept_blocks(frames, height * width, config.block, config.decay, config.sink)
        count = len(kept)
        if roles.clustered_keys is None:
            queries, keys = tiles(q, config.block), tiles(k, config.block)
        else:
            of_cell = (torch.arange(frames * height * width, device=q.device) // config.block).view(1, 1, -1)
            queries = arrange_queries(of_cell, count, q, site, roles, backend)
            keys = arrange_keys(of_cell, count, k, site, roles, backend)
        if q.is_cuda:
            kept = kept.pin_memory()  # a copy from pageable memory would wait for the GPU
        mask = roles.extend(kept.to(q.device, non_blocking=True).expand(b, h, count, count))
        return Plan(queries, keys, mask, count, count, padding=site.key_valid is not None)


@functools.lru_cache(maxsize=8)
def kept_blocks(frames: int, per_frame: int, block: int, decay: float, sink: bool) -> Tensor:
    """[blocks blocks] bool on the CPU, the same for every layer of a run.

    A block's tokens in one frame are a piece: rows r0..r1 or columns c0..c1 of a pair of frames. Of the columns, those
    that at least t of the rows see are one interval, so a pair of pieces is judged without looking at its tokens:
        min(r1, c + w) - max(r0, c - w) + 1 >= t  iff
        r0 - w + t - 1 <= c <= r1 + w - t + 1  and  t <= r1 - r0 + 1  and  t <= 2 w + 1
    """
    cells = frames * per_frame
    begin = torch.tensor(sorted({*range(0, cells, block), *range(0, cells, per_frame)}))
    end = torch.cat([begin[1:], torch.tensor([cells])]) - 1
    frame, of_block = begin // per_frame, begin // block
    first, last = begin % per_frame, end % per_frame
    tokens = (cells - of_block * block).clamp(max=block)  # of the piece's block

    apart = (frame.unsqueeze(1) - frame).abs()
    bands = [band(distance, per_frame, block, decay) for distance in range(frames)]
    reach = torch.tensor(bands)[apart]  # -1: nothing is seen
    if sink:
        reach[:, frame == 0] = per_frame
    rows, columns = (first.unsqueeze(1), last.unsqueeze(1)), (first, last)
    least = (tokens // 3 + 1).unsqueeze(1)  # more than a third of the rows
    used = seen_columns(rows, columns, reach, torch.ones_like(least))
    dense = seen_columns(rows, columns, reach, least)
    kept = (5 * dense > 3 * used) & (used > 0) & (reach >= 0)
    count = -(-cells // block)
    pairs = (of_block.unsqueeze(1) * count + of_block).flatten()
    by_block = torch.zeros(count * count, dtype=torch.int64).index_add_(0, pairs, kept.flatten().long()) > 0
    return by_block.view(count, count) | torch.eye(count, dtype=torch.bool)


def seen_columns(rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], reach: Tensor, least: Tensor) -> Tensor:
    """How many of columns c0..c1 at least `least` of rows r0..r1 see in a band |r - c| <= reach: [pieces pieces]"""
    lower = torch.maximum(columns[0], rows[0] - reach + least - 1)
    upper = torch.minimum(columns[1], rows[1] + reach - least + 1)
    possible = (least <= rows[1] - rows[0] + 1) & (least <= 2 * reach + 1)
    return torch.where(possible, (upper - lower + 1).clamp(min=0), 0)


def band(distance: int, per_frame: int, block: int, decay: float) -> int:
    """floor(width(D)), or -1 where D is left out."""
    reach = 2.0 ** (per_frame.bit_length() - distance.bit_length())
    split = 1 if reach >= block else math.floor(block / reach)
    if distance % split:
        return -1
    return per_frame if distance <= 1 else math.floor(max(reach * decay, block))


ENTRIES = (
    planned_entry("radial", RadialPlanner, RadialConfig,
        "Radial Attention: a fixed band per pair of frames that halves when their distance doubles",
        "arXiv 2506.19852", "decay"),
)  # fmt: skip
