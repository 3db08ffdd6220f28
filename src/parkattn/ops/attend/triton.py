"""Ragged block-sparse attention forward in Triton, for every GPU from sm_80 up.

One program per query tile walks the key granules of its query block (`worklist`): tiles of 32-row granules without a
mask, then tiles of 8-row granules with one. Rows are read through pointers, so the gather into block order and the
scatter back can be folded into the loads and stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..products import dot, dot_int8
from ..records import COUNT, TILE_FIELDS, TILE_HEAD, TILE_KEYS, TILE_LIST, TILE_ROW, TILE_ROWS, TILE_WIDE
from ..triton_versions import FP_FUSION
from .tiles import TritonTile, arch_or_hopper, triton_tile
from .worklist import WIDE, build_worklist, head_groups, heads_at_once


@triton.jit
def _attend_keys(
    q, acc, m, z, k_head, v_head, rows, bias, stride_kn, stride_vn, factor, unit, D: tl.constexpr, MASKED: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over the keys in `rows`; bias is added to the scores when MASKED.

    factor: what a score is multiplied by, `unit` for all, or with STEPS one for each row.
    """
    column = tl.arange(0, D)
    k = tl.load(k_head + rows.to(tl.int64)[:, None] * stride_kn + column[None, :])
    if STEPS:
        if q.dtype == tl.int8:
            s = dot_int8(q, tl.trans(k)).to(tl.float32)
        else:
            s = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
        s *= factor[:, None]
        if MASKED:
            s += (bias * unit)[None, :]
        top = tl.maximum(m, tl.max(s, 1))
    else:
        s = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
        if MASKED:
            s += bias[None, :]
        top = tl.maximum(m, tl.max(s, 1) * factor)
    shift = top
    if MASKED:  # a row that has seen no valid key yet
        shift = tl.where(top == -float("inf"), 0.0, top)
    if not STEPS:
        s *= factor
    p = tl.exp2(s - shift[:, None])
    decay = tl.exp2(m - shift)
    z = z * decay + tl.sum(p, 1)
    v = tl.load(v_head + rows.to(tl.int64)[:, None] * stride_vn + column[None, :])
    acc = dot(p.to(v.dtype), v, acc * decay[:, None])
    return acc, top, z


@triton.jit(do_not_specialize=["heads", "n", "m_keys", "kb", "wide_width", "tails_width", "bias_width"])
def attend_kernel(
    q, k, v, centroids, mean_values, wide_lists, tail_lists, tiles, count, bias, query_order, out, lse, unit, q_steps,
    k_steps, heads, n, m_keys, kb, wide_width, tails_width, bias_width,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob,
    stride_oh, stride_on, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    TAIL: tl.constexpr, GATHER_Q: tl.constexpr, COMPENSATE: tl.constexpr, LSE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """out_i = sum_j exp(q_i k_j scale) v_j / sum_j exp(q_i k_j scale) over the keys j that i's block keeps.

    STEPS: q and k are multiples of steps, one step per query row and one per head of keys; q is in block order. The
    element type decides the product.
    Grid: the most query tiles there can be; programs past count[0] leave at once. Traffic per program: its query rows
    once, 4 d bytes per listed key (from L2: programs run head by head).
    """
    pid = tl.program_id(0)
    if pid >= tl.load(count + COUNT):
        return
    record = tiles + pid.to(tl.int64) * TILE_FIELDS
    head = tl.load(record + TILE_HEAD).to(tl.int64)
    list_id = tl.load(record + TILE_LIST).to(tl.int64)
    first = tl.load(record + TILE_ROW)
    rows = tl.load(record + TILE_ROWS)
    wide_tiles = tl.load(record + TILE_WIDE)
    all_tiles = tl.load(record + TILE_KEYS)
    b = head // heads
    h = head % heads
    i = tl.arange(0, QUERIES)
    column = tl.arange(0, D)
    key = tl.arange(0, KEYS)
    live = i < rows
    row = tl.where(live, first + i, first).to(tl.int64)
    token = row
    if GATHER_Q:
        token = tl.load(query_order + head * n + row).to(tl.int64)
    factor = unit
    if STEPS:
        factor = unit * tl.load(k_steps + head) * tl.load(q_steps + head * n + row)
    else:
        row = token
    q_tile = tl.load(q + b * stride_qb + h * stride_qh + row[:, None] * stride_qn + column[None, :])
    k_head = k + b * stride_kb + h * stride_kh
    v_head = v + b * stride_vb + h * stride_vh
    wide = wide_lists + list_id * wide_width
    tails = tail_lists + list_id * tails_width
    acc = tl.zeros([QUERIES, D], tl.float32)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    z = tl.zeros([QUERIES], tl.float32)
    no_bias = tl.zeros([KEYS], tl.float32)
    for j in range(wide_tiles):
        key_rows = tl.load(wide + j * (KEYS // WIDE) + key // WIDE) + key % WIDE
        acc, m, z = _attend_keys(
            q_tile, acc, m, z, k_head, v_head, key_rows, no_bias, stride_kn, stride_vn, factor, unit, D, False, STEPS
        )
    for j in range(all_tiles - wide_tiles):
        piece = tl.load(tails + j * (KEYS // TAIL) + key // TAIL)
        key_rows = tl.minimum((piece >> 5) + key % TAIL, m_keys - 1)
        cut = tl.where(key % TAIL < (piece & 31), 0.0, -float("inf"))
        acc, m, z = _attend_keys(
            q_tile, acc, m, z, k_head, v_head, key_rows, cut, stride_kn, stride_vn, factor, unit, D, True, STEPS
        )
    if COMPENSATE:
        for j in range((kb + KEYS - 1) // KEYS):
            block = j * KEYS + key
            stand_in = tl.load(bias + list_id * bias_width + block)
            acc, m, z = _attend_keys(q_tile, acc, m, z, centroids + head * kb * D, mean_values + head * kb * D,
                                     tl.minimum(block, kb - 1), stand_in, D, D, factor, unit, D, True,
                                     STEPS)  # fmt: skip
    total = tl.where(z == 0, 1.0, z)  # a row without keys: acc is 0
    # said in other words than where q was read, or registers would hold it during the loops
    token = first + i
    if GATHER_Q:
        token = tl.load(query_order + head * n + token, mask=live, other=0)
    token = token.to(tl.int64)
    target = out + b * stride_ob + h * stride_oh + token[:, None] * stride_on + column[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    if LSE:
        value = tl.where(z == 0, -float("inf"), (m + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + head * n + token, value, mask=live)


def attend_ragged(
    q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor, key_offsets: Tensor, mask: Tensor, *,
    scale: float | None = None, compensate: Tensor | None = None, centroids: Tensor | None = None,
    mean_values: Tensor | None = None, pair_bias: Tensor | None = None, query_order: Tensor | None = None,
    out: Tensor | None = None, with_lse: bool = False, tile: TritonTile | None = None,
    steps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention over the kept blocks; q [bh n d] or [b h n d], k, v likewise with m, any strides, the last one 1; bf16
    or fp16, d 64, 128 or 256, int8 64 or 128.

    k and v are in block order. So is q without query_order; with it, int32 [bh n], q is read and `out` and lse are
    written in token order. Offsets int32 [bh qb+1], [bh kb+1]; mask bool [bh qb kb]; compensate bool [bh kb] with
    centroids, mean_values [bh kb d] adds skipped flagged blocks through one stand-in key each, with log n or pair_bias
    fp32 [bh qb kb] added to its score. lse is fp32 [bh n]. Heads whose lists do not fit `worklist.SCRATCH_LIMIT`
    together are computed one group after the other. steps, fp32 [bh n] and [bh]: what 1 stands for in
    a row of q and in k; q, k and centroids are all in block order, int8 or as otherwise. scale must be positive. Rows
    of k and v beside a kept block are read and weighted 0: they and their scores must be finite.
    """
    q4, k4, v4 = (x if x.ndim == 4 else x[None] for x in (q, k, v))
    batch, heads, n, d = q4.shape
    bh, m = batch * heads, k4.shape[2]
    scale = d**-0.5 if scale is None else scale
    tile = tile or triton_tile(d, arch_or_hopper(q.device), int8=q.dtype == torch.int8)
    out = torch.empty_like(q, dtype=v.dtype) if out is None else out
    o4 = out if out.ndim == 4 else out[None]
    lse = torch.empty(bh, n, dtype=torch.float32, device=q.device) if with_lse else None
    if 0 in (n, m, bh):  # no query, no key or no head
        return out.zero_(), lse if lse is None else lse.fill_(-torch.inf)
    at_once = heads_at_once(mask.shape[1], mask.shape[2], query_tokens=n, key_tokens=m, query_tile=tile.queries,
                            key_tile=tile.keys, compensated=compensate is not None)  # fmt: skip
    by_head = (
        query_offsets, key_offsets, mask, compensate, centroids, mean_values, pair_bias, query_order, lse,
        *(steps or (None, None)),
    )  # fmt: skip
    for elements, some, group in head_groups(batch, heads, at_once):
        rows = (x[elements, some] for x in (o4, q4, k4, v4))
        _attend_heads(*rows, *(x if x is None else x[group] for x in by_head), scale=scale, tile=tile)
    return out, lse


def _attend_heads(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor, key_offsets: Tensor, mask: Tensor,
    compensate: Tensor | None, centroids: Tensor | None, mean_values: Tensor | None, pair_bias: Tensor | None,
    query_order: Tensor | None, lse: Tensor | None, q_steps: Tensor | None, k_steps: Tensor | None, *, scale: float,
    tile: TritonTile,
) -> None:  # fmt: skip
    """`attend_ragged` of heads whose lists fit: fills out [b h n d] and lse."""
    heads, n, d = q.shape[1:]
    m, kb = k.shape[2], mask.shape[2]
    work = build_worklist(query_offsets, key_offsets, mask, query_tokens=n, key_tokens=m, query_tile=tile.queries,
                          key_tile=tile.keys, compensate=compensate, pair_bias=pair_bias, scale=scale)  # fmt: skip
    stand_ins = (k, v)
    if compensate is not None:
        assert centroids is not None and mean_values is not None
        stand_ins = (centroids.to(k.dtype).contiguous(), mean_values.to(v.dtype).contiguous())
    attend_kernel[(work.tiles.shape[0],)](
        q, k, v, *stand_ins, work.wide, work.tails, work.tiles, work.count,
        work.wide if work.bias is None else work.bias, work.wide if query_order is None else query_order, out,
        work.wide if lse is None else lse, float(scale * 1.4426950408889634),
        *(work.wide if x is None else x for x in (q_steps, k_steps)), heads, n, m, kb, work.wide.shape[1],
        work.tails.shape[1], 0 if work.bias is None else work.bias.shape[1], *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *out.stride()[:3], D=d, QUERIES=tile.queries, KEYS=tile.keys, WIDE=WIDE, TAIL=8,
        GATHER_Q=query_order is not None, COMPENSATE=compensate is not None, LSE=lse is not None,
        STEPS=q_steps is not None, num_warps=tile.warps, num_stages=tile.stages, **FP_FUSION,
    )  # fmt: skip
