"""Fused PAMA: W[u, v] = mean over queries i of block u of softmax_v(scale * q_i.c_v + log n_v), nothing of size L x N_K in memory.

A block longer than `chunk` rows is cut: its first chunk writes the output row, every further chunk a partial row that
`_add_partials` adds in order.  A call needs about PARTIAL_ROWS partial rows (more only past 4 million queries), and no float is ever added atomically.
"""

import math
import os

import torch
import triton
import triton.language as tl

from . import tiles_retrieval as tiles

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off
# ruff: noqa: SIM108   (the compiled subset of Python has no conditional expression over run-time values)

# tl.dot on bf16 is silently wrong in the interpreter: operands are upcast there.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
PARTIAL_ROWS = 512
# a tensor-core sum of many more rows would lose bits: wgmma truncates when it aligns addends
LONGEST_CHUNK = 8192
FULL_KEY_LIMIT = 1024


@triton.jit
def _dot(a, b, acc):
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _log2_sizes(sizes, log_sizes, total, BLOCK: tl.constexpr):
    """log_sizes = log2 sizes, -inf where empty.  Grid (total / BLOCK)."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(sizes + cell, mask=cell < total, other=0).to(tl.float32)
    tl.store(log_sizes + cell, tl.where(size > 0, tl.log2(tl.maximum(size, 1.0)), float("-inf")), mask=cell < total)


@triton.jit
def _size_up(offsets, sizes, counts, blocks, query_blocks, chunk, BLOCK: tl.constexpr):
    """Rows of every query block, and how many chunks it needs beyond its first.  Grid (blocks / BLOCK)."""
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = block < blocks
    at = offsets + block // query_blocks * (query_blocks + 1) + block % query_blocks
    size = tl.load(at + 1, mask=live, other=0) - tl.load(at, mask=live, other=0)
    tl.store(sizes + block, size, mask=live)
    tl.store(counts + block, tl.maximum(size - 1, 0) // chunk, mask=live)


@triton.jit
def _list_items(offsets, longest_first, extra_ends, items, blocks, query_blocks, extras, chunk, count, STEPS: tl.constexpr, ITEMS: tl.constexpr):
    """items[w] = (bh, first row, rows here, rows of the block, partial slot or -1, block).  Extra chunks first, then the blocks, longest first.

    Grid (count / ITEMS).  Extra chunk w belongs to the first block whose extra_ends exceeds w.
    """
    w = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    low = tl.zeros([ITEMS], tl.int32)
    high = tl.zeros([ITEMS], tl.int32) + blocks
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        beyond = tl.load(extra_ends + middle, mask=open_, other=0) > w
        high = tl.where(open_ & beyond, middle, high)
        low = tl.where(open_ & (beyond == 0), middle + 1, low)
    extra = w < extras
    listed = tl.load(longest_first + w - extras, mask=(w >= extras) & (w < count), other=0).to(tl.int32)
    block = tl.where(extra, tl.minimum(low, blocks - 1), listed)
    before = tl.load(extra_ends + block - 1, mask=extra & (block > 0), other=0)
    bh = block // query_blocks
    begin = tl.load(offsets + bh * (query_blocks + 1) + block % query_blocks)
    end = tl.load(offsets + bh * (query_blocks + 1) + block % query_blocks + 1)
    first = begin + tl.where(extra, (w - before + 1) * chunk, 0)
    here = tl.where(extra & (low >= blocks), 0, tl.minimum(end - first, chunk))
    live = w < count
    tl.store(items + w * 8, bh, mask=live)
    tl.store(items + w * 8 + 1, first, mask=live)
    tl.store(items + w * 8 + 2, here, mask=live)
    tl.store(items + w * 8 + 3, end - begin, mask=live)
    tl.store(items + w * 8 + 4, tl.where(extra, w, -1), mask=live)
    tl.store(items + w * 8 + 5, block, mask=live)


@triton.jit
def _read_item(items, w):
    item = items + w * 8
    bh = tl.load(item).to(tl.int64)
    first = tl.load(item + 1)
    return bh, tl.load(item + 5), first, first + tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)


@triton.jit
def _target(out, partial, block, slot, key_blocks):
    if slot >= 0:
        row = partial + tl.cast(slot, tl.int64) * key_blocks
    else:
        row = out + block.to(tl.int64) * key_blocks
    return row


@triton.jit
def _full_key(q, centroids, log_sizes, items, out, partial, n, key_blocks, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Full-K: the logits [BM, BN >= N_K] of a query tile stay in registers, the GEMM runs over feature tiles of BD.

    Grid (items).  Traffic: q once, the head's centroids from L2 once per BM queries, 4 N_K bytes out per block.
    """
    bh, block, first, last, rows, slot = _read_item(items, tl.program_id(0))
    v = tl.arange(0, BN)
    feature = tl.arange(0, BD)
    q += bh * n * D
    centroids += bh * key_blocks * D
    bias = tl.load(log_sizes + bh * key_blocks + v, mask=v < key_blocks, other=float("-inf"))
    total = tl.zeros([BN], tl.float32)
    for row in range(first, last, BM):
        i = row + tl.arange(0, BM)
        s = tl.zeros([BM, BN], tl.float32)
        for f in range(0, D, BD):
            tile = tl.load(q + i.to(tl.int64)[:, None] * D + (f + feature)[None, :], mask=(i < last)[:, None], other=0.0)
            c = tl.load(centroids + v[:, None] * D + (f + feature)[None, :], mask=(v < key_blocks)[:, None], other=0.0)
            s = _dot(tile, tl.trans(c), s)
        s = s * scale + bias[None, :]
        top = tl.maximum(tl.max(s, 1), -1e30)
        e = tl.exp2(s - top[:, None])
        z = tl.sum(e, 1)
        weight = tl.where((i < last) & (z > 0), 1.0 / z, 0.0)
        total += tl.sum(e * weight[:, None], 0)
    if (slot < 0) | (first < last):
        tl.store(_target(out, partial, block, slot, key_blocks) + v, total / tl.maximum(rows, 1).to(tl.float32), mask=v < key_blocks)


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
def _row_lse(q, centroids, log_sizes, lse, n, key_blocks, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr):
    """Pass 1: lse[i] = log2 sum_v 2^(scale q_i.c_v + log2 n_v), +inf where every block is empty, so that pass 2 gives such rows no weight.

    Grid (query tiles, bh).  Traffic: q once, the head's centroids from L2 once per BM queries, 4 n bytes out.
    """
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.load(q + (bh * n + i)[:, None] * D + tl.arange(0, D)[None, :], mask=(i < n)[:, None], other=0.0)
    centroids += bh * key_blocks * D
    log_sizes += bh * key_blocks
    top = tl.full([BM], -1e30, tl.float32)
    z = tl.zeros([BM], tl.float32)
    for column in range(0, key_blocks, BN):
        c, bias = _keys_tile(centroids, log_sizes, column, key_blocks, D, BN, EVEN)
        s = _dot(tile, tl.trans(c), tl.zeros([BM, BN], tl.float32)) * scale + bias[None, :]
        higher = tl.maximum(top, tl.max(s, 1))
        z = z * tl.exp2(top - higher) + tl.sum(tl.exp2(s - higher[:, None]), 1)
        top = higher
    tl.store(lse + bh * n + i, tl.where(z > 0, top + tl.log2(z), float("inf")), mask=i < n)


@triton.jit
def _block_mass(q, centroids, log_sizes, lse, items, out, partial, n, key_blocks, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                EVEN: tl.constexpr):
    """Pass 2: out[u, v] = mean over rows i of block u of 2^(scale q_i.c_v + log2 n_v - lse_i), for one tile of BN columns.

    Grid (items * column tiles, columns fastest: they share the item's queries in L2).  The centroid tile stays, the queries stream, and column sums grow in registers: they are
    reduced across rows once per program.  Traffic: q N_K / BN times (L2), 4 N_K bytes out per block.
    """
    columns = tl.cdiv(key_blocks, BN)
    bh, block, first, last, rows, slot = _read_item(items, tl.program_id(0) // columns)
    if (slot < 0) | (first < last):
        column = tl.program_id(0) % columns * BN
        v = tl.arange(0, BN)
        r = tl.arange(0, BM)
        c, bias = _keys_tile(centroids + bh * key_blocks * D, log_sizes + bh * key_blocks, column, key_blocks, D, BN, EVEN)
        queries = q + (bh * n + first) * D
        lse += bh * n + first
        cell = r[:, None] * D + tl.arange(0, D)[None, :]
        mass = tl.zeros([BM, BN], tl.float32)
        for row in range(0, last - first, BM):
            live = row + r < last - first
            tile = tl.load(queries + row * D + cell, mask=live[:, None], other=0.0)
            norm = tl.load(lse + row + r, mask=live, other=float("inf"))
            s = _dot(tile, tl.trans(c), tl.zeros([BM, BN], tl.float32)) * scale + bias[None, :]
            mass += tl.exp2(s - norm[:, None])
        target = _target(out, partial, block, slot, key_blocks) + column + v
        tl.store(target, tl.sum(mass, 0) / tl.maximum(rows, 1).to(tl.float32), mask=column + v < key_blocks)


@triton.jit
def _add_partials(out, partial, extra_ends, key_blocks, BN: tl.constexpr):
    """out[block] += its partial rows, in order.  Grid (b*h*qb, N_K / BN); most programs leave at once."""
    block = tl.program_id(0)
    v = tl.program_id(1) * BN + tl.arange(0, BN)
    end = tl.load(extra_ends + block)
    begin = tl.load(extra_ends + block - 1, mask=block > 0, other=0)
    if end > begin:
        row = out + block.to(tl.int64) * key_blocks + v
        total = tl.load(row, mask=v < key_blocks, other=0.0)
        for slot in range(begin, end):
            total += tl.load(partial + tl.cast(slot, tl.int64) * key_blocks + v, mask=v < key_blocks, other=0.0)
        tl.store(row, total, mask=v < key_blocks)


def _work(offsets, n, key_blocks):
    """offsets int32 [bh qb+1] -> (items int32 [w 8], partial fp32 [extras kb], extra_ends int32 [bh*qb])."""
    query_blocks, tokens = offsets.shape[-1] - 1, offsets.shape[0] * n
    chunk = triton.cdiv(min(max(triton.cdiv(tokens, PARTIAL_ROWS), 256), LONGEST_CHUNK), 64) * 64
    blocks, extras = offsets.shape[0] * query_blocks, tokens // chunk
    sizes, counts = torch.empty(2, blocks, device=offsets.device, dtype=torch.int32).unbind(0)
    _size_up[(triton.cdiv(blocks, 1024),)](offsets, sizes, counts, blocks, query_blocks, chunk, BLOCK=1024, num_warps=4)
    extra_ends = counts.cumsum(0, dtype=torch.int32)
    longest_first = sizes.argsort(descending=True)
    items = torch.empty(extras + blocks, 8, device=offsets.device, dtype=torch.int32)
    _list_items[(triton.cdiv(extras + blocks, 128),)](offsets, longest_first, extra_ends, items, blocks, query_blocks, extras, chunk, extras + blocks,
                                                      STEPS=blocks.bit_length(), ITEMS=128, num_warps=4)
    return items, torch.empty(extras, key_blocks, device=offsets.device, dtype=torch.float32), extra_ends


def _logs(sizes):
    """sizes int32 [bh kb] -> log2 of them, fp32, -inf where empty."""
    log_sizes = torch.empty(sizes.shape, device=sizes.device, dtype=torch.float32)
    _log2_sizes[(triton.cdiv(sizes.numel(), 1024),)](sizes, log_sizes, sizes.numel(), BLOCK=1024, num_warps=4)
    return log_sizes


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


def _finish(out, partial, extra_ends, key_blocks):
    if partial.shape[0]:
        _add_partials[(extra_ends.numel(), triton.cdiv(key_blocks, 1024))](out, partial, extra_ends, key_blocks, BN=1024, num_warps=4)
    return out


def pama_full_key(q, offsets, centroids, sizes, *, scale=None, out=None, tile=None) -> torch.Tensor:
    """q [bh n d] in block order, offsets int32 [bh qb+1], centroids [bh kb d] in q's dtype, sizes int32 [bh kb] -> fp32 [bh qb kb]; kb <= 1024."""
    key_blocks, out, scale = _prepare(q, offsets, centroids, sizes, scale, out)
    if key_blocks > FULL_KEY_LIMIT:
        raise ValueError(f"centroids: Full-K holds at most {FULL_KEY_LIMIT} key blocks, got {key_blocks}; use pama_two_pass")
    n, d = q.shape[1:]
    width = max(triton.next_power_of_2(key_blocks), 16)
    tile = dict(tile or tiles.full_key_tile(d, q.dtype, tiles.arch_of(q), width))
    items, partial, extra_ends = _work(offsets, n, key_blocks)
    if tile.pop("GLUON", False):
        # imported here: Gluon exists on the GPUs it is for, and the interpreter cannot run it
        from .importance_hopper import launch_full_key_hopper

        launch_full_key_hopper(q, centroids, items, _logs(sizes), out, partial, scale, **tile)
    else:
        _full_key[(items.shape[0],)](q, centroids, _logs(sizes), items, out, partial, n, key_blocks, scale, D=d, BN=width, **tile)
    return _finish(out, partial, extra_ends, key_blocks)


def pama_two_pass(q, offsets, centroids, sizes, *, scale=None, out=None, tile=None) -> torch.Tensor:
    """The same function for any number of key blocks; 4 bytes of scratch per query.  tile: (pass 1, pass 2)."""
    key_blocks, out, scale = _prepare(q, offsets, centroids, sizes, scale, out)
    bh, n, d = q.shape
    one, two = tile or tiles.two_pass_tiles(d, q.dtype, tiles.arch_of(q))
    items, partial, extra_ends = _work(offsets, n, key_blocks)
    log_sizes = _logs(sizes)
    lse = torch.empty(bh, n, device=q.device, dtype=torch.float32)
    _row_lse[(triton.cdiv(n, one["BM"]), bh)](q, centroids, log_sizes, lse, n, key_blocks, scale, D=d, EVEN=key_blocks % one["BN"] == 0, **one)
    grid = (triton.cdiv(key_blocks, two["BN"]) * items.shape[0],)
    _block_mass[grid](q, centroids, log_sizes, lse, items, out, partial, n, key_blocks, scale, D=d, EVEN=key_blocks % two["BN"] == 0, **two)
    return _finish(out, partial, extra_ends, key_blocks)


def pama(q, offsets, centroids, sizes, *, scale=None, out=None) -> torch.Tensor:
    """The faster of the two for this shape and GPU."""
    width = max(triton.next_power_of_2(centroids.shape[1]), 16)
    full = tiles.prefers_full_key(q.shape[-1], q.dtype, tiles.arch_of(q), width)
    return (pama_full_key if full else pama_two_pass)(q, offsets, centroids, sizes, scale=scale, out=out)
