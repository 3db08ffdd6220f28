"""What a block-sparse attention kernel walks: for every query block a list of key granules, and the list of query tiles.

Selected key blocks that lie next to each other in block order form a run of tokens [a, a + s). A run is cut into granules
of WIDE = 32 rows and its remainder into granules of TAIL = 8 rows, so at most 7 rows per run are padding (2 % of the work at
the Wan2.1-14B shape with density 0.25; 32-row granules alone pad 8 %, 128-row tiles 33 %). Granules are packed into tiles of
`key_tile` keys: first the tiles made of wide granules, then tiles of whole tail granules, then the tiles that hold the
partial granules, which alone need a mask.

Everything is built on the GPU with launch sizes and buffers fixed by the shapes: no host copy, no synchronisation, safe to
capture in a CUDA graph. A list is 1/32 of a token index; its worst-case buffer is 70 MB at (40, 75600, 128 x 512 blocks), that of
the bias 45 MB, 55 MB with stand-ins; what is used of them is far less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_versions import FP_FUSION

WIDE = 32
FIELDS = 8  # int32 per query tile


class WorkList(NamedTuple):
    """The lists of one call. Rows count from the start of their head, in block order."""

    wide: Tensor  # [bh*qb, ceil(m/32)] int32: first row of each wide granule
    tails: Tensor  # [bh*qb, width] int32: row << 5 | valid rows (filler: 0)
    tiles: Tensor  # [worst case, 8] int32: head, list, first query row, rows, wide tiles, unmasked tiles, all tiles, 0
    count: Tensor  # [4] int32: how many rows of `tiles` are filled; 0, for a kernel that hands tiles out in order; the same for tiles that it lists itself: 0, 0
    # [bh*qb, width] fp32, what is added to scores: first for stand-in keys, padded to a tile, log(n)/scale where one counts, else -inf;
    # then, with `tail_bias`, for each tile past the unmasked ones, 0 where a row is valid, else -inf
    bias: Tensor | None


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["qb", "kb", "wide_width", "tails_width", "bias_width"])
def list_keys_kernel(
    key_offsets, mask, compensate, wide, tails, summary, bias, inverse_scale, qb, kb, wide_width, tails_width, bias_width,
    KEY_TILE: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, LANES: tl.constexpr, FILLERS: tl.constexpr, TAIL_BIAS: tl.constexpr,
    COMPENSATE: tl.constexpr,
):  # fmt: skip
    """Granules of one (head, query block). Grid: bh * qb. Reads the mask once, writes about m * density / 32 words per list.

    Lane v looks at block v and at the blocks before it (v = kb closes the last run). With c_v the selected tokens before
    block v, the unselected tokens before it, start_v - c_v, name the run that v belongs to: equal gap, same run, whether or
    not empty blocks lie between.
    """
    list_id = tl.program_id(0)
    head = list_id // qb
    row = mask + list_id.to(tl.int64) * kb
    v = tl.arange(0, LANES)
    offsets = key_offsets + head * (kb + 1)
    start = tl.load(offsets + v, mask=v <= kb, other=0)
    end = tl.load(offsets + v + 1, mask=v < kb, other=0)
    before = (v >= 1) & (v <= kb)
    start_before = tl.load(offsets + v - 1, mask=before, other=0)
    kept = (tl.load(row + v, mask=v < kb, other=0) != 0) & (end > start) & (v < kb)
    kept_before = (tl.load(row + v - 1, mask=before, other=0) != 0) & (start > start_before) & before

    bias_row = bias + list_id.to(tl.int64) * bias_width
    if COMPENSATE:
        flagged = tl.load(compensate + head * kb + v, mask=v < kb, other=0) != 0
        skipped = flagged & (end > start) & (tl.load(row + v, mask=v < kb, other=1) == 0)
        size = tl.maximum(end - start, 1).to(tl.float32)
        stand_in = tl.where(skipped, tl.log(size) * inverse_scale, -float("inf"))
        stand_ins = (kb + KEY_TILE - 1) // KEY_TILE * KEY_TILE
        tl.store(bias_row + v, stand_in, mask=v < stand_ins)
        bias_row += stand_ins

    size_before = tl.where(kept_before, start - start_before, 0)
    covered = tl.cumsum(size_before, 0)
    covered_before = covered - size_before
    # one scan carries both the gap of the run before lane v (high word) and where that run begins (low word, smallest wins)
    packed = ((start_before - covered_before).to(tl.int64) << 32) | (0x7FFFFFFF - covered_before).to(tl.int64)
    packed = tl.associative_scan(tl.where(kept_before, packed, -1), 0, _larger)
    gap = (packed >> 32).to(tl.int32)
    first = 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
    closes = (packed >= 0) & ((v == kb) | (kept & (start - covered != gap)))
    length = tl.where(closes, covered - first, 0)
    begin = first + gap

    per_tile: tl.constexpr = KEY_TILE // WIDE
    split: tl.constexpr = WIDE // TAIL
    wides = length // WIDE
    rest = length % WIDE
    wide_at = tl.cumsum(wides, 0) - wides
    wide_total = tl.sum(wides, 0)
    wholes = rest // TAIL
    part = rest % TAIL
    has_part = (part > 0).to(tl.int32)
    tail_total = tl.sum(wholes + has_part, 0)
    wide_tiles = wide_total // per_tile
    cut = wide_tiles * per_tile
    wide_row = wide + list_id.to(tl.int64) * wide_width
    step = tl.arange(0, 4)
    for i in range(0, tl.max(wides, 0), 4):
        at = i + step[None, :] + 0 * v[:, None]
        target = wide_at[:, None] + at
        tl.store(wide_row + target, begin[:, None] + at * WIDE, mask=(at < wides[:, None]) & (target < cut))

    tails_row = tails + list_id.to(tl.int64) * tails_width
    piece = tl.arange(0, split)
    for i in tl.static_range(per_tile - 1):  # wide granules that fill no tile go first into the tail list
        target = cut + i
        owns = (wide_at <= target) & (target < wide_at + wides)
        at = tl.sum(tl.where(owns, begin + (target - wide_at) * WIDE, 0), 0)
        tl.store(tails_row + i * split + piece, ((at + piece * TAIL) << 5) | TAIL, mask=target < wide_total + 0 * piece)
    whole_at = (wide_total - cut) * split + tl.cumsum(wholes, 0) - wholes
    whole_total = (wide_total - cut) * split + tl.sum(wholes, 0)
    rest_begin = begin + wides * WIDE
    for i in tl.static_range(split - 1):
        tl.store(tails_row + whole_at + i, ((rest_begin + i * TAIL) << 5) | TAIL, mask=i < wholes)
    part_at = whole_total + tl.cumsum(has_part, 0) - has_part
    tl.store(tails_row + part_at, ((rest_begin + wholes * TAIL) << 5) | part, mask=part > 0)

    tails_per_tile: tl.constexpr = KEY_TILE // TAIL
    tail_total += (wide_total - cut) * split
    tail_tiles = (tail_total + tails_per_tile - 1) // tails_per_tile
    # an empty list keeps one tile in which no key is valid: it gives output 0 and log-sum-exp -inf without a special case
    tail_tiles = tl.where(wide_tiles + tail_tiles == 0, 1, tail_tiles)
    filler = tail_total + tl.arange(0, FILLERS)
    tl.store(tails_row + filler, tl.zeros_like(filler), mask=filler < tail_tiles * tails_per_tile)
    field = tl.arange(0, 4)
    counts = tl.where(field == 0, wide_tiles, tl.where(field == 1, wide_tiles + whole_total // tails_per_tile, wide_tiles + tail_tiles))
    tl.store(summary + list_id * 4 + field, counts)

    if TAIL_BIAS:
        unmasked = whole_total // tails_per_tile * tails_per_tile
        r = tl.arange(0, KEY_TILE)
        tl.store(bias_row + r, 0.0 * r, mask=r < (whole_total - unmasked) * TAIL)
        for i in tl.static_range(TAIL):
            tl.store(bias_row + (part_at - unmasked) * TAIL + i, tl.where(i < part, 0.0, -float("inf")), mask=part > 0)
        r += (tail_total - unmasked) * TAIL
        tl.store(bias_row + r, 0.0 * r - float("inf"), mask=r < (tail_tiles * tails_per_tile - unmasked) * TAIL)


@triton.jit(do_not_specialize=["bh", "qb"])
def list_queries_kernel(query_offsets, summary, tiles, count, bh, qb, QUERY_TILE: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Query tiles of one head, longest key list first, after the tiles of all earlier heads. Grid: bh.

    Head by head, because the keys and values of one head (39 MB at 75,600 tokens) stay in the L2 cache while it is worked on.
    """
    head = tl.program_id(0)
    base = 0
    for i in range(0, head * qb, CHUNK):
        flat = i + tl.arange(0, CHUNK)
        at = query_offsets + (flat // qb) * (qb + 1) + flat % qb
        inside = flat < head * qb
        size = tl.load(at + 1, mask=inside, other=0) - tl.load(at, mask=inside, other=0)
        base += tl.sum((size + QUERY_TILE - 1) // QUERY_TILE, 0)
    u = tl.arange(0, LANES)
    offsets = query_offsets + head * (qb + 1)
    start = tl.load(offsets + u, mask=u < qb, other=0)
    end = tl.load(offsets + u + 1, mask=u < qb, other=0)
    needs = (end - start + QUERY_TILE - 1) // QUERY_TILE
    mine = summary + (head * qb + u) * 4
    plain = tl.load(mine + 1, mask=u < qb, other=0)
    wide = tl.load(mine, mask=u < qb, other=0)
    work = tl.load(mine + 2, mask=u < qb, other=0)
    at = tl.zeros_like(u) + base
    for i in range(0, qb, 16):
        w = i + tl.arange(0, 16)
        other = w < qb
        size = tl.load(offsets + w + 1, mask=other, other=0) - tl.load(offsets + w, mask=other, other=0)
        other_needs = (size + QUERY_TILE - 1) // QUERY_TILE
        other_work = tl.load(summary + (head * qb + w) * 4 + 2, mask=other, other=0)
        longer = (other_work[None, :] > work[:, None]) | ((other_work[None, :] == work[:, None]) & (w[None, :] < u[:, None]))
        at += tl.sum(tl.where(longer, other_needs[None, :], 0), 1)
    for i in range(tl.max(needs, 0)):
        here = i < needs
        record = tiles + (at + i).to(tl.int64) * 8
        tl.store(record, head + 0 * u, mask=here)
        tl.store(record + 1, head * qb + u, mask=here)
        tl.store(record + 2, start + i * QUERY_TILE, mask=here)
        tl.store(record + 3, tl.minimum(end - start - i * QUERY_TILE, QUERY_TILE), mask=here)
        tl.store(record + 4, wide, mask=here)
        tl.store(record + 5, plain, mask=here)
        tl.store(record + 6, work, mask=here)
        tl.store(record + 7, 0 * u, mask=here)
    if head == bh - 1:
        tl.store(count, base + tl.sum(needs, 0))
        for zero in tl.static_range(1, 4):
            tl.store(count + zero, 0)


def build_worklist(
    query_offsets: Tensor, key_offsets: Tensor, mask: Tensor, *, query_tokens: int, key_tokens: int, query_tile: int, key_tile: int,
    compensate: Tensor | None = None, scale: float = 1.0, tail: int = 8, tail_bias: bool = False,
) -> WorkList:  # fmt: skip
    """Lists for offsets int32 [bh qb+1], [bh kb+1] and mask bool [bh qb kb]; compensate bool [bh kb] adds the bias of stand-ins, tail_bias
    that of tails."""
    bh, qb, kb = mask.shape
    lists, device = bh * qb, mask.device
    per_tile = key_tile // tail
    wide_width = max(triton.cdiv(key_tokens, WIDE), 1)
    # per run at most 32/tail pieces, at most (kb+1)/2 runs that do not touch, the wide granules of one unfilled tile, one tile of filler
    runs = (kb + 1) // 2
    tails_width = triton.cdiv(runs * (WIDE // tail) + 2 * per_tile, per_tile) * per_tile
    stand_ins = 0 if compensate is None else triton.cdiv(kb, key_tile) * key_tile
    bias_width = stand_ins + (triton.cdiv(runs + per_tile - 1, per_tile) * key_tile if tail_bias else 0)
    tile_bound = bh * (query_tokens // query_tile + min(qb, max(query_tokens, 1)))
    wide = torch.empty(lists, wide_width, dtype=torch.int32, device=device)
    tails = torch.empty(lists, tails_width, dtype=torch.int32, device=device)
    summary = torch.empty(lists, 4, dtype=torch.int32, device=device)
    tiles = torch.empty(max(tile_bound, 1), FIELDS, dtype=torch.int32, device=device)
    count = torch.empty(4, dtype=torch.int32, device=device)
    bias = torch.empty(lists, bias_width, dtype=torch.float32, device=device) if bias_width else None
    lanes = triton.next_power_of_2(max(kb + 1, stand_ins, key_tile))
    flags = mask if compensate is None else compensate.contiguous().view(torch.uint8)
    list_keys_kernel[(lists,)](
        key_offsets, mask.contiguous().view(torch.uint8), flags.view(torch.uint8), wide, tails, summary, wide.view(torch.float32) if bias is None else bias,
        1.0 / scale, qb, kb, wide_width, tails_width, bias_width,
        KEY_TILE=key_tile, WIDE=WIDE, TAIL=tail, LANES=lanes, FILLERS=triton.next_power_of_2(per_tile), TAIL_BIAS=tail_bias, COMPENSATE=compensate is not None, num_warps=min(16, max(4, lanes // 128)), **FP_FUSION,
    )  # fmt: skip
    list_queries_kernel[(bh,)](
        query_offsets, summary, tiles, count, bh, qb, QUERY_TILE=query_tile, LANES=triton.next_power_of_2(qb), CHUNK=1024, num_warps=4, **FP_FUSION
    )  # fmt: skip
    return WorkList(wide, tails, tiles, count, bias)
