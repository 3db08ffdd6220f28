"""Fused PAMA: W[u, v] = mean over queries i of block u of softmax_v(scale * q_i.c_v + log n_v), nothing of size L x N_K
in memory.

A block longer than `chunk` rows is cut: its first chunk writes the output row, every further chunk a partial row that
`_add_partials` adds in order.  `chunk` follows from the head's length alone and no float is ever added atomically, so a
head's result has the same bits in every call.  Three launches: `_list_work`, the kernel (two for two-pass),
`_add_partials`.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .. import tiles
from ..products import dot
from ..records import ITEM_BLOCK, ITEM_BLOCK_ROWS, ITEM_FIELDS, ITEM_HEAD, ITEM_ROW, ITEM_ROWS, ITEM_SLOT
from ..triton_versions import FP_FUSION

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off
# ruff: noqa: SIM108   (the compiled subset of Python has no conditional expression over run-time values)

PARTIAL_ROWS = 12  # of each head, for heads of 3,072 to 98,304 queries
SHORTEST_CHUNK = 256
# a tensor-core sum of many more rows would lose bits: wgmma truncates when it aligns addends
LONGEST_CHUNK = 8192
FULL_KEY_LIMIT = 1024


@triton.jit
def _list_work(offsets, sizes, log_sizes, items, heads, query_blocks, key_blocks, chunk, extras, width,
               BLOCKS: tl.constexpr, KEYS: tl.constexpr):
    """items[w] = (bh, first row, rows here, rows of the block, partial slot or -1, block): further chunks first, then
    the blocks, the longest of every head, the second longest of every head, ...  And log_sizes [bh width] = log2 of
    sizes, -inf where empty or past the last block.

    Grid (bh, query_blocks / BLOCKS).  Slot w < extras of a head is one of its further chunks; what is not needed has no
    rows and block -1.
    """
    bh = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < query_blocks
    row = offsets + bh * (query_blocks + 1)
    begin = tl.load(row + block, mask=live, other=0)
    size = tl.load(row + block + 1, mask=live, other=0) - begin
    more = tl.maximum(size - 1, 0) // chunk
    rank = tl.zeros([BLOCKS], tl.int32)
    slot = tl.zeros([BLOCKS], tl.int32) + bh * extras
    listed = bh * extras
    for start in range(0, query_blocks, BLOCKS):
        w = start + tl.arange(0, BLOCKS)
        other = tl.load(row + w + 1, mask=w < query_blocks, other=0) - tl.load(row + w, mask=w < query_blocks, other=0)
        their_more = tl.maximum(other - 1, 0) // chunk
        earlier = w[None, :] < block[:, None]
        ahead = (other[None, :] > size[:, None]) | ((other[None, :] == size[:, None]) & earlier)
        rank += tl.sum((ahead & (w < query_blocks)[None, :]).to(tl.int32), 1)
        slot += tl.sum(tl.where(earlier, their_more[None, :], 0), 1)
        listed += tl.sum(their_more, 0)
    item = items + (heads * extras + rank * heads + bh) * ITEM_FIELDS
    tl.store(item + ITEM_HEAD, bh, mask=live)
    tl.store(item + ITEM_ROW, begin, mask=live)
    tl.store(item + ITEM_ROWS, tl.minimum(size, chunk), mask=live)
    tl.store(item + ITEM_BLOCK_ROWS, size, mask=live)
    tl.store(item + ITEM_SLOT, -1, mask=live)
    tl.store(item + ITEM_BLOCK, bh * query_blocks + block, mask=live)
    for further in range(1, tl.max(more, 0) + 1):
        needed = live & (further <= more)
        item = items + (slot + further - 1) * ITEM_FIELDS
        tl.store(item + ITEM_HEAD, bh, mask=needed)
        tl.store(item + ITEM_ROW, begin + further * chunk, mask=needed)
        tl.store(item + ITEM_ROWS, tl.minimum(size - further * chunk, chunk), mask=needed)
        tl.store(item + ITEM_BLOCK_ROWS, size, mask=needed)
        tl.store(item + ITEM_SLOT, slot + further - 1, mask=needed)
        tl.store(item + ITEM_BLOCK, bh * query_blocks + block, mask=needed)
    if tl.program_id(1) == 0:
        for start in range(listed, (bh + 1) * extras, 16):
            spare = start + tl.arange(0, 16)
            unused = spare < (bh + 1) * extras
            tl.store(items + spare * ITEM_FIELDS + ITEM_HEAD, bh, mask=unused)
            tl.store(items + spare * ITEM_FIELDS + ITEM_ROW, 0, mask=unused)
            tl.store(items + spare * ITEM_FIELDS + ITEM_ROWS, 0, mask=unused)
            tl.store(items + spare * ITEM_FIELDS + ITEM_BLOCK_ROWS, 0, mask=unused)
            tl.store(items + spare * ITEM_FIELDS + ITEM_SLOT, spare, mask=unused)
            tl.store(items + spare * ITEM_FIELDS + ITEM_BLOCK, -1, mask=unused)
        for start in range(0, width, KEYS):
            v = start + tl.arange(0, KEYS)
            keys = tl.load(sizes + bh * key_blocks + v, mask=v < key_blocks, other=0).to(tl.float32)
            tl.store(log_sizes + bh * width + v, tl.where(keys > 0, tl.log2(tl.maximum(keys, 1.0)), float("-inf")),
                     mask=v < width)


@triton.jit
def _read_item(items, w):
    item = items + w * ITEM_FIELDS
    bh = tl.load(item + ITEM_HEAD).to(tl.int64)
    first = tl.load(item + ITEM_ROW)
    last = first + tl.load(item + ITEM_ROWS)
    return bh, tl.load(item + ITEM_BLOCK), first, last, tl.load(item + ITEM_BLOCK_ROWS), tl.load(item + ITEM_SLOT)


@triton.jit
def _target(out, partial, block, slot, key_blocks):
    if slot >= 0:
        row = partial + tl.cast(slot, tl.int64) * key_blocks
    else:
        row = out + block.to(tl.int64) * key_blocks
    return row


@triton.jit
def _full_key(q, centroids, log_sizes, items, out, partial, n, key_blocks, width, scale, D: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Full-K: the logits [BM, BN >= N_K] of a query tile stay in registers, the GEMM runs over feature tiles of BD.

    Grid (items).  Traffic: q once, the head's centroids from L2 once per BM queries, 4 N_K bytes out per block.
    """
    bh, block, first, last, rows, slot = _read_item(items, tl.program_id(0))
    v = tl.arange(0, BN)
    feature = tl.arange(0, BD)
    q += bh * n * D
    centroids += bh * key_blocks * D
    bias = tl.load(log_sizes + bh * width + v, mask=v < key_blocks, other=float("-inf"))
    total = tl.zeros([BN], tl.float32)
    for row in range(first, last, BM):
        i = row + tl.arange(0, BM)
        s = tl.zeros([BM, BN], tl.float32)
        for f in range(0, D, BD):
            tile = tl.load(q + i.to(tl.int64)[:, None] * D + (f + feature)[None, :], mask=(i < last)[:, None],
                           other=0.0)
            c = tl.load(centroids + v[:, None] * D + (f + feature)[None, :], mask=(v < key_blocks)[:, None], other=0.0)
            s = dot(tile, tl.trans(c), s)
        s = s * scale + bias[None, :]
        top = tl.maximum(tl.max(s, 1), -1e30)
        e = tl.exp2(s - top[:, None])
        z = tl.sum(e, 1)
        weight = tl.where((i < last) & (z > 0), 1.0 / z, 0.0)
        total += tl.sum(e * weight[:, None], 0)
    if (slot < 0) | (first < last):
        tl.store(_target(out, partial, block, slot, key_blocks) + v, total / tl.maximum(rows, 1).to(tl.float32),
                 mask=v < key_blocks)


@triton.jit
def _keys_tile(keys, log_sizes, column, key_blocks, D: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr):
    """Centroids [BN, D] from row `column` on, and log2 of their sizes; -inf past the last block."""
    v = tl.arange(0, BN)
    at = keys + column * D + v[:, None] * D + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(at), tl.load(log_sizes + column + v)
    live = column + v < key_blocks
    return tl.load(at, mask=live[:, None], other=0.0), tl.load(log_sizes + column + v, mask=live, other=float("-inf"))


@triton.jit
def _row_lse(q, centroids, log_sizes, lse, n, key_blocks, width, scale, D: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, EVEN: tl.constexpr):
    """Pass 1: lse[i] = log2 sum_v 2^(scale q_i.c_v + log2 n_v), +inf where every block is empty, so that pass 2 gives
    such rows no weight.

    Grid (query tiles, bh).  Traffic: q once, the head's centroids from L2 once per BM queries, 4 n bytes out.
    """
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.load(q + (bh * n + i)[:, None] * D + tl.arange(0, D)[None, :], mask=(i < n)[:, None], other=0.0)
    centroids += bh * key_blocks * D
    log_sizes += bh * width
    top = tl.full([BM], -1e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    for column in range(0, key_blocks, BN):
        c, bias = _keys_tile(centroids, log_sizes, column, key_blocks, D, BN, EVEN)
        s = dot(tile, tl.trans(c), tl.zeros([BM, BN], tl.float32)) * scale + bias[None, :]
        higher = tl.maximum(top, tl.max(s, 1))
        z = z * tl.exp2(top - higher) + tl.sum(tl.exp2(s - higher[:, None]), 1)
        top = higher
    tl.store(lse + bh * n + i, tl.where(z > 0, top + tl.log2(z), float("inf")), mask=i < n)


@triton.jit
def _block_mass(q, centroids, log_sizes, lse, items, out, partial, n, key_blocks, width, scale, D: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr):
    """Pass 2: out[u, v] = mean over rows i of block u of 2^(scale q_i.c_v + log2 n_v - lse_i), for one tile of BN
    columns.

    Grid (items * column tiles, columns fastest: they share the item's queries in L2).  The centroid tile stays, the
    queries stream, and column sums grow in registers: they are reduced across rows once per program.  Traffic: q N_K /
    BN times (L2), 4 N_K bytes out per block.
    """
    columns = tl.cdiv(key_blocks, BN)
    bh, block, first, last, rows, slot = _read_item(items, tl.program_id(0) // columns)
    if (slot < 0) | (first < last):
        column = tl.program_id(0) % columns * BN
        v = tl.arange(0, BN)
        r = tl.arange(0, BM)
        c, bias = _keys_tile(centroids + bh * key_blocks * D, log_sizes + bh * width, column, key_blocks, D, BN, EVEN)
        queries = q + (bh * n + first) * D
        lse += bh * n + first
        cell = r[:, None] * D + tl.arange(0, D)[None, :]
        mass = tl.zeros([BM, BN], tl.float32)
        for row in range(0, last - first, BM):
            live = row + r < last - first
            tile = tl.load(queries + row * D + cell, mask=live[:, None], other=0.0)
            norm = tl.load(lse + row + r, mask=live, other=float("inf"))
            s = dot(tile, tl.trans(c), tl.zeros([BM, BN], tl.float32)) * scale + bias[None, :]
            mass += tl.exp2(s - norm[:, None])
        target = _target(out, partial, block, slot, key_blocks) + column + v
        tl.store(target, tl.sum(mass, 0) / tl.maximum(rows, 1).to(tl.float32), mask=column + v < key_blocks)


@triton.jit
def _add_partials(out, partial, items, key_blocks, chunk, BN: tl.constexpr):
    """out[block] += its partial rows, in order.  Grid (slots, N_K / BN);
    the first slot of a block does it, the others leave at once.
    """
    slot = tl.program_id(0)
    v = tl.program_id(1) * BN + tl.arange(0, BN)
    block = tl.load(items + slot * ITEM_FIELDS + ITEM_BLOCK)
    before = tl.load(items + slot * ITEM_FIELDS + (ITEM_BLOCK - ITEM_FIELDS), mask=slot > 0, other=-1)
    if (block >= 0) & (block != before):
        row = out + block.to(tl.int64) * key_blocks + v
        total = tl.load(row, mask=v < key_blocks, other=0.0)
        for further in range(slot, slot + (tl.load(items + slot * ITEM_FIELDS + ITEM_BLOCK_ROWS) - 1) // chunk):
            total += tl.load(partial + tl.cast(further, tl.int64) * key_blocks + v, mask=v < key_blocks, other=0.0)
        tl.store(row, total, mask=v < key_blocks)


def _work(offsets, sizes, n):
    """offsets int32 [bh qb+1], sizes int32 [bh kb] -> (items int32 [w 8], log_sizes fp32 [bh width], partial fp32
    [bh*extras kb], chunk).
    """
    (bh, query_blocks), key_blocks = (offsets.shape[0], offsets.shape[1] - 1), sizes.shape[1]
    # of n alone: the order in which a head's rows are added must not depend on the other heads of the call
    chunk = triton.cdiv(min(max(triton.cdiv(n, PARTIAL_ROWS), SHORTEST_CHUNK), LONGEST_CHUNK), 64) * 64
    extras, width = n // chunk, triton.cdiv(key_blocks, 256) * 256
    items = torch.empty(bh * (extras + query_blocks), ITEM_FIELDS.value, device=offsets.device, dtype=torch.int32)
    log_sizes = torch.empty(bh, width, device=offsets.device, dtype=torch.float32)
    _list_work[(bh, triton.cdiv(query_blocks, 64))](offsets, sizes, log_sizes, items, bh, query_blocks, key_blocks,
                                                    chunk, extras, width, BLOCKS=64, KEYS=256, num_warps=4, **FP_FUSION)
    return items, log_sizes, torch.empty(bh * extras, key_blocks, device=offsets.device, dtype=torch.float32), chunk


def _prepare(q, offsets, centroids, sizes, scale, out):
    tiles.check_rows(q, "q")
    if not (q.is_contiguous() and centroids.is_contiguous() and offsets.is_contiguous() and sizes.is_contiguous()):
        raise ValueError("q, offsets, centroids, sizes: expected contiguous tensors; call .contiguous()")
    if centroids.dtype != q.dtype:
        raise TypeError(f"centroids: expected q's dtype {q.dtype}, got {centroids.dtype}; cast them with .to(q.dtype)")
    bh, query_blocks, key_blocks = q.shape[0], offsets.shape[-1] - 1, centroids.shape[1]
    if out is None:
        out = torch.empty(bh, query_blocks, key_blocks, device=q.device, dtype=torch.float32)
    scale = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * math.log2(math.e)
    return key_blocks, out, scale


def _finish(out, partial, items, chunk):
    slots, key_blocks = partial.shape
    if slots:
        _add_partials[(slots, triton.cdiv(key_blocks, 1024))](out, partial, items, key_blocks, chunk, BN=1024,
                                                              num_warps=4, **FP_FUSION)
    return out


def pama_full_key(q: torch.Tensor, offsets: torch.Tensor, centroids: torch.Tensor, sizes: torch.Tensor, *,
                  scale: float | None = None, out: torch.Tensor | None = None, tile: Any = None) -> torch.Tensor:
    """q [bh n d] in block order, offsets int32 [bh qb+1], centroids [bh kb d] in q's dtype, sizes int32 [bh kb] -> fp32
    [bh qb kb]; kb <= 1024.
    """
    key_blocks, out, scale = _prepare(q, offsets, centroids, sizes, scale, out)
    if key_blocks > FULL_KEY_LIMIT:
        raise ValueError(f"centroids: Full-K holds at most {FULL_KEY_LIMIT} key blocks, got {key_blocks}; "
                         "use pama_two_pass")
    n, d = q.shape[1:]
    width = max(triton.next_power_of_2(key_blocks), 16)
    tile = dict(tile or tiles.full_key_tile(d, q.dtype, tiles.arch_of(q), width))
    items, log_sizes, partial, chunk = _work(offsets, sizes, n)
    if tile.pop("GLUON", False):
        # imported here: Gluon exists on the GPUs it is for, and the interpreter cannot run it
        from .hopper import launch_full_key_hopper

        launch_full_key_hopper(q, centroids, items, log_sizes, out, partial, scale, **tile)
    else:
        _full_key[(items.shape[0],)](q, centroids, log_sizes, items, out, partial, n, key_blocks, log_sizes.shape[1],
                                     scale, D=d, BN=width, **tile, **FP_FUSION)
    return _finish(out, partial, items, chunk)


def pama_two_pass(q: torch.Tensor, offsets: torch.Tensor, centroids: torch.Tensor, sizes: torch.Tensor, *,
                  scale: float | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """The same function for any number of key blocks; 4 bytes of scratch per query."""
    key_blocks, out, scale = _prepare(q, offsets, centroids, sizes, scale, out)
    bh, n, d = q.shape
    one, two = tiles.two_pass_tiles(d, q.dtype, tiles.arch_of(q))
    items, log_sizes, partial, chunk = _work(offsets, sizes, n)
    width = log_sizes.shape[1]
    lse = torch.empty(bh, n, device=q.device, dtype=torch.float32)
    _row_lse[(triton.cdiv(n, one["BM"]), bh)](q, centroids, log_sizes, lse, n, key_blocks, width, scale, D=d,
                                              EVEN=key_blocks % one["BN"] == 0, **one, **FP_FUSION)
    grid = (triton.cdiv(key_blocks, two["BN"]) * items.shape[0],)
    _block_mass[grid](q, centroids, log_sizes, lse, items, out, partial, n, key_blocks, width, scale, D=d,
                      EVEN=key_blocks % two["BN"] == 0, **two, **FP_FUSION)
    return _finish(out, partial, items, chunk)


def pama(q: torch.Tensor, offsets: torch.Tensor, centroids: torch.Tensor, sizes: torch.Tensor, *,
         scale: float | None = None) -> torch.Tensor:
    """The faster of the two for this shape and GPU."""
    width = max(triton.next_power_of_2(centroids.shape[1]), 16)
    full = tiles.prefers_full_key(q.shape[-1], q.dtype, tiles.arch_of(q), width)
    return (pama_full_key if full else pama_two_pass)(q, offsets, centroids, sizes, scale=scale)
