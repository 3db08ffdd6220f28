"""SVG, Sparse VideoGen (Xi et al., ICML 2025, arXiv 2502.01776): spatial and temporal heads, each with its own band.

F frames of S tokens, L = F S + (text tokens). Spatial heads number the grid's cells frame by frame (f S + s), temporal
ones place by place (s F + f). In a head's own numbers a query i sees the key j if
    wan:      |i - j| <= block ceil(width / block)  or  j < S            hunyuan:  |i - j| < block floor(width / block)
    width = L (1 - sqrt(1 - s')),   s' = sparsity - 2 (text tokens) / L
and a head is temporal if on 64 sampled rows the temporal profile mask gives the smaller squared error of the output:
    |i // block - j // block| < frames S / block,  frames = 2 (wan, and j < S) or 1.5 (hunyuan)

Defaults: the authors call the DENSITY sparsity: 0.30 in their Wan and 0.25 in their HunyuanVideo scripts (None: by the
layout, which follows from whether there is text); 64 rows below 10,000; profiled at every call. Dense steps and layers
as in the scripts: 0.2 of the steps for Wan, 0.1 for HunyuanVideo, and the first layer in models of 34 layers or more.

Different from the authors' code, on purpose:
- attention runs over whole blocks of `tile` tokens of a head's own order: every pair of their mask is computed, and at
  the edges of the band up to tile + 1 further keys per query (3 tile where tile does not divide block); they mask the
  edge blocks token by token, as tile=1 does;
- rows are drawn by a seed, the same ones for all heads and elements; ties within rounding go to spatial;
- the mask is shared by both layouts' formulas, with or without text; the hunyuan width is at least 1;
- text takes no part in profiling, sees and is seen by all; padding is seen by nobody (theirs attends padding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_count, expect_fraction
from parkattn.ops.cluster.definition import uniform
from parkattn.plan import Plan, Roles, assign_roles
from parkattn.planned import values_of
from parkattn.segments import compute_dtype
from parkattn.settings import LARGEST_SEED, LONG_VIDEO
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.video import arrange_keys, arrange_queries, expect_grid

HEADS_AT_ONCE = 4  # bounds the [rows, keys] weights of profiling
Layout = Literal["wan", "hunyuan"]
DENSITY: dict[Layout, float] = {"wan": 0.30, "hunyuan": 0.25}
PROFILED_FRAMES = {"wan": 2.0, "hunyuan": 1.5}


@dataclass(frozen=True, kw_only=True)
class SvgConfig(StudiedConfig):
    """SVG's settings, under the authors' names where they have one."""

    sparsity: float | None = None
    """The share of pairs that is KEPT, as the authors use the word, text paid for first: with text 1 is not dense.
    None: 0.30 in the wan layout, 0.25 in hunyuan."""
    layout: Layout | None = None
    """How the band is rounded and whether all see the first S keys; None: hunyuan if there is text, else wan."""
    num_sampled_rows: int = 64
    """Queries that a head's kind is decided on."""
    sample_mse_max_row: int = 10_000
    """They are drawn from this many first cells."""
    block: int = 128
    """The width of the bands is a multiple of this."""
    tile: int | None = None
    """Tokens per block of the plan; 1 gives the band to the token. None: 128 in a long video, else 16."""
    seed: int = 0
    """Of the sampled rows."""
    refresh_interval: int | None = 1
    """Steps for which a plan is used, in a run of reference_steps; None: until the run ends."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "wan2.1-1.3b": {"sparsity": 0.30, "layout": "wan"},
        "wan2.1-14b": {"sparsity": 0.30, "layout": "wan", "dense_layers": (0,)},
        "wan2.2-14b": {"sparsity": 0.30, "layout": "wan", "dense_layers": (0,)},
        "hunyuanvideo": {"sparsity": 0.25, "layout": "hunyuan", "dense_layers": (0,), "dense_fraction": 0.1},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity is not None:
            expect_fraction("sparsity", self.sparsity, zero=False)
        if self.layout is not None:
            expect_choice("layout", self.layout, DENSITY)
        for name in ("num_sampled_rows", "sample_mse_max_row", "block"):
            expect_count(name, getattr(self, name))
        if self.tile is not None:
            expect_count("tile", self.tile)
        expect_count("seed", self.seed, least=0, most=LARGEST_SEED)


@dataclass(frozen=True)
class Bands:
    """What the masks are made of, in a head's own numbers."""

    layout: Layout
    frames: int
    per_frame: int
    reach: int  # |i - j| <= reach is seen
    tile: int

    @property
    def cells(self) -> int:
        return self.frames * self.per_frame

    @property
    def sink(self) -> int:
        """The first cells, that all see."""
        return self.per_frame if self.layout == "wan" else 0

    def numbers(self, device: torch.device) -> Tensor:
        """The number of each cell in spatial and in temporal heads: [2 cells]"""
        cell = torch.arange(self.cells, device=device)
        return torch.stack([cell, cell % self.per_frame * self.frames + cell // self.per_frame])


class SvgPlanner(ConfiguredPlanner[SvgConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        backend = self.backend(q, site)
        b, h = q.shape[:2]
        bands = self.bands(q, k, site)
        roles = assign_roles(q, k, site.text, site.key_valid)
        rows = self.sampled_rows(site, bands.cells).to(q.device, non_blocking=True)
        values = values_of(q, k, site)  # heads are judged by their outputs
        temporal = temporal_heads(q, k, values, rows, bands, self.config.block, site, roles)
        of_query, of_key, seen = band_blocks(bands, q.device)
        own = temporal.unsqueeze(-1)
        rows_count, columns_count = seen.shape
        return Plan(
            arrange_queries(torch.where(own, of_query[1], of_query[0]), rows_count, q, site, roles, backend),
            arrange_keys(torch.where(own, of_key[1], of_key[0]), columns_count, k, site, roles, backend),
            roles.extend(seen.expand(b, h, -1, -1)),
            rows_count,
            columns_count,
            padding=site.key_valid is not None,
        )

    def bands(self, q: Tensor, k: Tensor, site: CallSite) -> Bands:
        config = self.config
        frames, height, width = expect_grid(q, k, site)
        cells, words = frames * height * width, site.text_tokens
        layout: Layout = config.layout or ("hunyuan" if words else "wan")
        reach = band_reach(config.sparsity or DENSITY[layout], words, cells, config.block, layout)
        return Bands(layout, frames, height * width, reach, config.tile or (128 if cells >= LONG_VIDEO else 16))

    def sampled_rows(self, site: CallSite, cells: int) -> Tensor:
        """Cells [num_sampled_rows] on the CPU, drawn with replacement, other ones at every step and layer."""
        seed = (self.config.seed + 100_003 * site.step + 1_009 * site.layer) % LARGEST_SEED
        most = min(self.config.sample_mse_max_row, cells)
        return (uniform(self.config.num_sampled_rows, seed) * most).long()


def band_reach(sparsity: float, words: int, cells: int, block: int, layout: Layout) -> int:
    """The largest |i - j| that is seen."""
    tokens = cells + words
    share = min(max(sparsity - 2 * words / tokens, 0.0), 1.0)  # text rows and columns are paid for first
    width = tokens * (1 - math.sqrt(1 - share))
    if layout == "wan":
        return block * math.ceil(width / block)
    return max(block * math.floor(width / block), 1) - 1


def band_blocks(bands: Bands, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key block of each cell in spatial and temporal heads [2 cells], and the pairs with a seen one [qb kb].

    Blocks are tiles of a head's own order; key blocks also end where the sink does, which so is exact.
    """
    numbers, tile, cells, sink = bands.numbers(device), bands.tile, bands.cells, bands.sink
    count = -(-cells // tile)
    inside = bool(sink % tile) and sink < cells  # the sink ends inside a tile, which then is two key blocks
    at = sink // tile if inside else count
    block = torch.arange(count + inside, device=device)
    start = (block - (block > at).long()) * tile
    begin = torch.where(block == at + 1, sink, start)
    end = torch.where(block == at, sink, (start + tile).clamp(max=cells)) - 1
    first = torch.arange(count, device=device).unsqueeze(1) * tile
    last = (first + tile).clamp(max=cells) - 1
    gap = torch.maximum(begin - last, first - end).clamp(min=0)
    of_query = numbers // tile
    of_key = of_query + (numbers >= sink).long() if inside else of_query
    return of_query, of_key, (gap <= bands.reach) | (begin < sink)


def temporal_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    bands: Bands,
    block: int,
    site: CallSite,
    roles: Roles,
) -> Tensor:
    """Heads whose outputs at cells `rows` [r] the temporal mask brings nearer to the exact ones: [b h] bool"""
    dtype = compute_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if site.scale is None else site.scale
    valid = None if roles.key_valid is None else _cells(roles.key_valid, site, 1)  # [b cells]
    tokens = rows if not site.text_tokens else _tokens(rows, site)
    counted = q.new_ones(1, len(rows), dtype=dtype) if valid is None else valid[:, rows].to(dtype)  # [1 or b, r]
    masks = profile_masks(rows, bands, block)
    chosen = []
    for queries, keys, values in zip(*(x.split(HEADS_AT_ONCE, 1) for x in (q, k, v)), strict=True):
        keys, values = _cells(keys, site, 2).to(dtype), _cells(values, site, 2).to(dtype)
        scores = queries.index_select(2, tokens).to(dtype) @ keys.mT * scale
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
        exact = scores.softmax(-1) @ values
        errors = []
        for mask in masks:
            out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values
            errors.append(_mean_square(out - exact, counted))
        chosen.append(errors[0] - errors[1] > 1e-9 * _mean_square(exact, counted))
    return torch.cat(chosen, 1)


def profile_masks(rows: Tensor, bands: Bands, block: int) -> Tensor:
    """What sampled rows see in a spatial and in a temporal head's profile: [2 r cells] bool"""
    numbers = bands.numbers(rows.device)
    near = max(1, int(PROFILED_FRAMES[bands.layout] * bands.per_frame / block))
    away = (numbers[:, rows].unsqueeze(-1) // block - numbers.unsqueeze(1) // block).abs()
    return (away < near) | (numbers.unsqueeze(1) < bands.sink)


def _mean_square(x: Tensor, counted: Tensor) -> Tensor:
    """Over rows that count and channels: [b h r d], [1 or b, r] -> [b h]; 0 where no row counts."""
    rows = torch.where(counted.unsqueeze(1) > 0, x.square().mean(-1), 0)
    return rows.sum(-1) / counted.sum(-1, keepdim=True).clamp(min=1)


def _cells(x: Tensor, site: CallSite, dim: int) -> Tensor:
    """x without the text along dim."""
    if not site.text_tokens:
        return x
    assert site.text is not None
    before, after = x.narrow(dim, 0, site.text.start), x.narrow(dim, site.text.stop, x.shape[dim] - site.text.stop)
    return before if not after.shape[dim] else after if not before.shape[dim] else torch.cat([before, after], dim)


def _tokens(cells: Tensor, site: CallSite) -> Tensor:
    """Where cells are in the sequence."""
    assert site.text is not None
    return cells + (cells >= site.text.start) * site.text_tokens


ENTRIES = (
    planned_entry("svg", SvgPlanner, SvgConfig,
        "SVG: spatial and temporal heads, told apart on sampled rows, each a band in its own order",
        "arXiv 2502.01776", "sparsity"),
)  # fmt: skip
