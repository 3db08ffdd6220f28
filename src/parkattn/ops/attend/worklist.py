"""What a block-sparse attention kernel walks: for every query block a list of key granules, and the list of query
tiles.

Selected key blocks that lie next to each other in block order form a run of tokens [a, a + s). A run is cut into
granules of WIDE = 32 rows and its remainder into granules of TAIL = 8 rows, so at most 7 rows per run are padding (2 %
of the work at the Wan2.1-14B shape with density 0.25; 32-row granules alone pad 8 %, 128-row tiles 33 %). Granules are
packed into tiles of `key_tile` keys: first the tiles made of wide granules, then tiles of whole tail granules, then the
tiles that hold the partial granules, which alone need a mask.

Everything is built on the GPU with launch sizes and buffers fixed by the shapes: no host copy, no synchronisation, safe
to capture in a CUDA graph. A list is 1/32 of a token index, but its buffer must hold the longest list there can be: 2.9
MB per head at 75,600 tokens with 128 x 512 blocks, 29 MB with 64 x 128. `heads_at_once` says how many heads fit
SCRATCH_LIMIT; attention runs so many at a time, one launch after the other in the same memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import (
    COUNT,
    COUNTERS,
    NEXT,
    SUMMARY_FIELDS,
    SUMMARY_KEYS,
    SUMMARY_PLAIN,
    SUMMARY_WIDE,
    TILE_FIELDS,
    TILE_HEAD,
    TILE_KEYS,
    TILE_LIST,
    TILE_PLAIN,
    TILE_ROW,
    TILE_ROWS,
    TILE_WIDE,
)
from ..triton_versions import FP_FUSION

WIDE = 32
FIELDS: int = TILE_FIELDS.value
WARPGROUP_ROWS = 64  # of the queries in a tile
SCRATCH_LIMIT = 256 * 2**20  # bytes


class WorkList(NamedTuple):
    """The lists of one call. Rows count from the start of their head, in block order."""

    wide: Tensor  # [bh*qb, ceil(m/32)] int32: first row of each wide granule
    tails: Tensor  # [bh*qb, width] int32: row << 5 | valid rows (filler: 0)
    tiles: Tensor  # [worst case, 8] int32, the query tiles of `records`
    count: Tensor  # [4] int32, the counters of `records`: rows of `tiles` that are filled, then zeros
    # [bh*qb, width] fp32, what is added to scores: first for stand-in keys, padded to a tile, log(n)/scale where one
    # counts, else -inf;
    # then, with `tail_bias`, for each tile past the unmasked ones, 0 where a row is valid, else -inf
    bias: Tensor | None


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["qb", "kb", "wide_width", "tails_width", "bias_width"])
def list_keys_kernel(
    key_offsets, mask, compensate, wide, tails, summary, bias, inverse_scale, qb, kb, wide_width, tails_width,
    bias_width, pair_bias, KEY_TILE: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, TAIL_BIAS: tl.constexpr, COMPENSATE: tl.constexpr, PAIR_BIAS: tl.constexpr,
):  # fmt: skip
    """Granules of one (head, query block). Grid: bh * qb. Reads the mask once, writes about m * density / 32 words per
    list.

    Lane v looks at block v and at the blocks before it (v = kb closes the last run). With c_v the selected tokens
    before block v, the unselected tokens before it, start_v - c_v, name the run that v belongs to: equal gap, same run,
    whether or not empty blocks lie between.
    """
    list_id = tl.program_id(0)
    head = list_id // qb
    row = mask + list_id.to(tl.int64) * kb
    v = tl.arange(0, LANES)
    offsets = key_offsets + head * (kb + 1)
    start = tl.load(offsets + v, mask=v <= kb, other=0)
    end = tl.load(offsets + v + 1, mask=v < kb, other=0)
    before = (v >= 1) & (v <= kb)
    bias_row = bias + list_id.to(tl.int64) * bias_width
    if COMPENSATE:  # before the scans, beside whose values these would not fit into registers
        flagged = tl.load(compensate + head * kb + v, mask=v < kb, other=0) != 0
        skipped = flagged & (end > start) & (tl.load(row + v, mask=v < kb, other=1) == 0)
        if PAIR_BIAS:
            logit = tl.load(pair_bias + list_id.to(tl.int64) * kb + v, mask=v < kb, other=0.0)
        else:
            logit = tl.log(tl.maximum(end - start, 1).to(tl.float32))
        stand_in = tl.where(skipped, logit * inverse_scale, -float("inf"))
        stand_ins = (kb + KEY_TILE - 1) // KEY_TILE * KEY_TILE
        tl.store(bias_row + v, stand_in, mask=v < stand_ins)
        bias_row += stand_ins

    start_before = tl.load(offsets + v - 1, mask=before, other=0)
    kept = (tl.load(row + v, mask=v < kb, other=0) != 0) & (end > start) & (v < kb)
    kept_before = (tl.load(row + v - 1, mask=before, other=0) != 0) & (start > start_before) & before

    size_before = tl.where(kept_before, start - start_before, 0)
    covered = tl.cumsum(size_before, 0)
    covered_before = covered - size_before
    # one scan carries both the gap of the run before lane v (high word) and where that run begins (low word, smallest
    # wins)
    packed = ((start_before - covered_before).to(tl.int64) << 32) | (0x7FFFFFFF - covered_before).to(tl.int64)
    packed = tl.associative_scan(tl.where(kept_before, packed, -1), 0, _larger)
    gap = (packed >> 32).to(tl.int32)
    first = 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
    closes = (packed >= 0) & ((v == kb) | (kept & (start - covered != gap)))
    length = tl.where(closes, covered - first, 0)
    begin = first + gap

    per_tile: tl.constexpr = KEY_TILE // WIDE
    split: tl.constexpr = WIDE // TAIL
    tails_per_tile: tl.constexpr = KEY_TILE // TAIL
    wides = length // WIDE
    rest = length % WIDE
    wholes = rest // TAIL
    part = rest % TAIL
    # one scan counts wide granules, whole tail granules and parts; 20 bits are enough for a million blocks
    counts = (wides.to(tl.int64) << 40) | (wholes.to(tl.int64) << 20) | (part > 0).to(tl.int64)
    counted = tl.cumsum(counts, 0) - counts
    totals = tl.sum(counts, 0)
    wide_at = (counted >> 40).to(tl.int32)
    wide_total = (totals >> 40).to(tl.int32)
    wide_tiles = wide_total // per_tile
    cut = wide_tiles * per_tile
    whole_total = (wide_total - cut) * split + ((totals >> 20) & 0xFFFFF).to(tl.int32)
    tail_total = whole_total + (totals & 0xFFFFF).to(tl.int32)

    tails_row = tails + list_id.to(tl.int64) * tails_width
    whole_at = (wide_total - cut) * split + ((counted >> 20) & 0xFFFFF).to(tl.int32)
    rest_begin = begin + wides * WIDE
    for i in tl.static_range(split - 1):
        tl.store(tails_row + whole_at + i, ((rest_begin + i * TAIL) << 5) | TAIL, mask=i < wholes)
    part_at = whole_total + (counted & 0xFFFFF).to(tl.int32)
    tl.store(tails_row + part_at, ((rest_begin + wholes * TAIL) << 5) | part, mask=part > 0)

    # granule t of the run that begins at row b with granule s is b + (t - s) * WIDE: b - s * WIDE grows from run to
    # run, so that
    # the largest one up to granule t is its own run's
    wide_row = wide + list_id.to(tl.int64) * wide_width
    t = tl.arange(0, CHUNK)
    for i in range(0, wide_total, CHUNK):
        tl.store(wide_row + i + t, tl.zeros_like(t), mask=i + t < wide_total)
    tl.debug_barrier()
    tl.store(wide_row + wide_at, begin - wide_at * WIDE + 1, mask=wides > 0)
    tl.debug_barrier()
    largest = 0
    for i in range(0, wide_total, CHUNK):
        mark = tl.load(wide_row + i + t, mask=i + t < wide_total, other=0)
        mark = tl.maximum(tl.associative_scan(mark, 0, _larger), largest)
        largest = tl.max(mark, 0)
        tl.store(wide_row + i + t, mark - 1 + (i + t) * WIDE, mask=i + t < wide_total)
    tl.debug_barrier()
    piece = tl.arange(0, per_tile * split)  # wide granules that fill no tile go first into the tail list
    left_over = cut + piece // split < wide_total
    at = tl.load(wide_row + cut + piece // split, mask=left_over, other=0)
    tl.store(tails_row + piece, ((at + piece % split * TAIL) << 5) | TAIL, mask=left_over)

    tail_tiles = (tail_total + tails_per_tile - 1) // tails_per_tile
    # an empty list keeps one tile in which no key is valid: it gives output 0 and log-sum-exp -inf without a special
    # case
    tail_tiles = tl.where(wide_tiles + tail_tiles == 0, 1, tail_tiles)
    filler = tail_total + tl.arange(0, tails_per_tile)
    tl.store(tails_row + filler, tl.zeros_like(filler), mask=filler < tail_tiles * tails_per_tile)
    field = tl.arange(0, SUMMARY_FIELDS)
    summed = tl.where(
        field == SUMMARY_WIDE,
        wide_tiles,
        tl.where(field == SUMMARY_PLAIN, wide_tiles + whole_total // tails_per_tile, wide_tiles + tail_tiles),
    )
    tl.store(summary + list_id * SUMMARY_FIELDS + field, summed)

    if TAIL_BIAS:
        tl.debug_barrier()  # the tail list is read again
        unmasked = whole_total // tails_per_tile * tails_per_tile
        entries = (tail_tiles * tails_per_tile - unmasked) * TAIL
        for i in range(0, entries, CHUNK):
            word = tl.load(tails_row + unmasked + (i + t) // TAIL, mask=i + t < entries, other=0)
            tl.store(bias_row + i + t, tl.where((i + t) % TAIL < (word & 31), 0.0, -float("inf")), mask=i + t < entries)


@triton.jit(do_not_specialize=["bh", "qb"])
def list_queries_kernel(
    query_offsets, summary, tiles, count, bh, qb, QUERY_TILE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    LANES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Query tiles of LANES query blocks of one head: longest key list of the head first, after the tiles of all earlier
    heads.

    Grid (qb / LANES, bh). Head by head, because the keys and values of one head (39 MB at 75,600 tokens) stay in the L2
    cache while it is worked on.
    """
    head = tl.program_id(1)
    base = 0
    for i in range(0, head * qb, CHUNK):
        flat = i + tl.arange(0, CHUNK)
        at = query_offsets + (flat // qb) * (qb + 1) + flat % qb
        inside = flat < head * qb
        size = tl.load(at + 1, mask=inside, other=0) - tl.load(at, mask=inside, other=0)
        base += tl.sum((size + QUERY_TILE - 1) // QUERY_TILE, 0)
    u = tl.program_id(0) * LANES + tl.arange(0, LANES)
    offsets = query_offsets + head * (qb + 1)
    start = tl.load(offsets + u, mask=u < qb, other=0)
    end = tl.load(offsets + u + 1, mask=u < qb, other=0)
    needs = (end - start + QUERY_TILE - 1) // QUERY_TILE
    mine = summary + (head * qb + u) * SUMMARY_FIELDS
    plain = tl.load(mine + SUMMARY_PLAIN, mask=u < qb, other=0)
    wide = tl.load(mine + SUMMARY_WIDE, mask=u < qb, other=0)
    work = tl.load(mine + SUMMARY_KEYS, mask=u < qb, other=0)
    at = tl.zeros_like(u) + base
    total = base
    for i in range(0, qb, LANES):
        w = i + tl.arange(0, LANES)
        other = w < qb
        size = tl.load(offsets + w + 1, mask=other, other=0) - tl.load(offsets + w, mask=other, other=0)
        other_needs = (size + QUERY_TILE - 1) // QUERY_TILE
        other_work = tl.load(summary + (head * qb + w) * SUMMARY_FIELDS + SUMMARY_KEYS, mask=other, other=0)
        longer = (other_work[None, :] > work[:, None]) | (
            (other_work[None, :] == work[:, None]) & (w[None, :] < u[:, None])
        )
        at += tl.sum(tl.where(longer, other_needs[None, :], 0), 1)
        total += tl.sum(other_needs, 0)
    # a block's warpgroups are dealt out evenly: two tiles of two are faster than one of three and one of one
    groups = (end - start + GROUP_ROWS - 1) // GROUP_ROWS
    share = groups // tl.maximum(needs, 1)
    larger = groups - share * needs
    for i in range(tl.max(needs, 0)):
        here = i < needs
        first = (i * share + tl.minimum(i, larger)) * GROUP_ROWS
        rows = (share + (i < larger).to(tl.int32)) * GROUP_ROWS
        record = tiles + (at + i).to(tl.int64) * TILE_FIELDS
        tl.store(record + TILE_HEAD, head + 0 * u, mask=here)
        tl.store(record + TILE_LIST, head * qb + u, mask=here)
        tl.store(record + TILE_ROW, start + first, mask=here)
        tl.store(record + TILE_ROWS, tl.minimum(end - start - first, rows), mask=here)
        tl.store(record + TILE_WIDE, wide, mask=here)
        tl.store(record + TILE_PLAIN, plain, mask=here)
        tl.store(record + TILE_KEYS, work, mask=here)
        tl.store(record + 7, 0 * u, mask=here)
    if (head == bh - 1) & (tl.program_id(0) == 0):
        tl.store(count + COUNT, total)
        for other_counter in tl.static_range(NEXT, COUNTERS):
            tl.store(count + other_counter, 0)


class _Widths(NamedTuple):
    """Words of 4 bytes that one query block's lists may need."""

    wide: int
    tails: int
    stand_ins: int
    bias: int  # stand-ins included


def _widths(
    key_blocks: int, key_tokens: int, *, key_tile: int, tail: int, compensated: bool, tail_bias: bool
) -> _Widths:
    per_tile = key_tile // tail
    # per run at most 32/tail pieces, at most (kb+1)/2 runs that do not touch, the wide granules of one unfilled tile,
    # one tile of filler
    runs = (key_blocks + 1) // 2
    tails = triton.cdiv(runs * (WIDE // tail) + 2 * per_tile, per_tile) * per_tile
    stand_ins = triton.cdiv(key_blocks, key_tile) * key_tile if compensated else 0
    bias = stand_ins + (triton.cdiv(runs + per_tile - 1, per_tile) * key_tile if tail_bias else 0)
    return _Widths(max(triton.cdiv(key_tokens, WIDE), 1), tails, stand_ins, bias)


def _tile_bound(heads: int, query_blocks: int, query_tokens: int, query_tile: int) -> int:
    """The most query tiles that there can be."""
    return max(heads * (query_tokens // query_tile + min(query_blocks, max(query_tokens, 1))), 1)


def scratch_bytes(
    heads: int, query_blocks: int, key_blocks: int, *, query_tokens: int, key_tokens: int, query_tile: int,
    key_tile: int, tail: int = 8, compensated: bool = False, tail_bias: bool = False,
) -> int:  # fmt: skip
    """Bytes of the lists of so many heads."""
    widths = _widths(key_blocks, key_tokens, key_tile=key_tile, tail=tail, compensated=compensated, tail_bias=tail_bias)
    words = heads * query_blocks * (widths.wide + widths.tails + widths.bias + SUMMARY_FIELDS.value)
    return 4 * (words + FIELDS * _tile_bound(heads, query_blocks, query_tokens, query_tile) + COUNTERS.value)


def heads_at_once(query_blocks: int, key_blocks: int, **tokens_and_tiles: Any) -> int:
    """How many heads' lists fit SCRATCH_LIMIT, at least one; arguments as of `scratch_bytes`."""
    return max(SCRATCH_LIMIT // scratch_bytes(1, query_blocks, key_blocks, **tokens_and_tiles), 1)


def head_groups(batch: int, heads: int, at_once: int) -> list[tuple[slice, slice, slice]]:
    """Groups of at most at_once heads: which batch elements, which heads of them, which of all batch * heads."""
    if batch * heads <= at_once:
        return [(slice(None), slice(None), slice(None))]
    firsts = [(b, h) for b in range(batch) for h in range(0, heads, at_once)]
    ends = [(b, h, min(h + at_once, heads)) for b, h in firsts]
    return [(slice(b, b + 1), slice(h, end), slice(b * heads + h, b * heads + end)) for b, h, end in ends]


def build_worklist(
    query_offsets: Tensor, key_offsets: Tensor, mask: Tensor, *, query_tokens: int, key_tokens: int, query_tile: int,
    key_tile: int, compensate: Tensor | None = None, pair_bias: Tensor | None = None, scale: float = 1.0, tail: int = 8,
    tail_bias: bool = False,
) -> WorkList:  # fmt: skip
    """Lists for offsets int32 [bh qb+1], [bh kb+1] and mask bool [bh qb kb]; compensate bool [bh kb] adds the bias of
    stand-ins, log n or pair_bias fp32 [bh qb kb], tail_bias that of tails.
    """
    bh, qb, kb = mask.shape
    lists, device = bh * qb, mask.device
    widths = _widths(
        kb, key_tokens, key_tile=key_tile, tail=tail, compensated=compensate is not None, tail_bias=tail_bias
    )
    wide = torch.empty(lists, widths.wide, dtype=torch.int32, device=device)
    tails = torch.empty(lists, widths.tails, dtype=torch.int32, device=device)
    summary = torch.empty(lists, SUMMARY_FIELDS.value, dtype=torch.int32, device=device)
    tiles = torch.empty(_tile_bound(bh, qb, query_tokens, query_tile), FIELDS, dtype=torch.int32, device=device)
    count = torch.empty(COUNTERS.value, dtype=torch.int32, device=device)
    bias = torch.empty(lists, widths.bias, dtype=torch.float32, device=device) if widths.bias else None
    lanes = triton.next_power_of_2(max(kb + 1, widths.stand_ins, key_tile))
    query_lanes = min(triton.next_power_of_2(qb), 64)  # compared with as many others at a time
    flags = mask if compensate is None else compensate.contiguous().view(torch.uint8)
    none = wide.view(torch.float32)
    list_keys_kernel[(lists,)](
        key_offsets, mask.contiguous().view(torch.uint8), flags.view(torch.uint8), wide, tails, summary,
        none if bias is None else bias, 1.0 / scale, qb, kb, widths.wide, widths.tails, widths.bias,
        none if pair_bias is None else pair_bias.contiguous(), KEY_TILE=key_tile, WIDE=WIDE, TAIL=tail, LANES=lanes,
        CHUNK=512, TAIL_BIAS=tail_bias, COMPENSATE=compensate is not None, PAIR_BIAS=pair_bias is not None,
        num_warps=min(16, max(4, lanes // 256)), **FP_FUSION,
    )  # fmt: skip
    list_queries_kernel[(triton.cdiv(qb, query_lanes), bh)](
        query_offsets, summary, tiles, count, bh, qb, QUERY_TILE=query_tile, GROUP_ROWS=min(query_tile, WARPGROUP_ROWS),
        LANES=query_lanes, CHUNK=1024, num_warps=4, **FP_FUSION,
    )  # fmt: skip
    return WorkList(wide, tails, tiles, count, bias)
