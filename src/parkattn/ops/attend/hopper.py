"""Ragged block-sparse attention forward for Hopper (sm_90), in Gluon: TMA granules packed into 128-key tiles.

One persistent program per multiprocessor takes query tiles of `worklist` in order: one producer warp fills two rings of
shared memory with key and value tiles, granule by granule, and runs on into the next query tile while the last one is
finished; two consumer warpgroups own 64 query rows each, so that the exponentials of one run under the matrix products
of the other. A query tile of at most 64 rows is shared: both warpgroups hold its rows, take every other key tile and
join their sums at the end (alone, one warpgroup needs as long for 64 rows as two for 128). The card is at its power
limit here, so what counts is the energy of a step: exponentials look for no maximum where they can do without
(`hopper_softmax`), and the few rows where they cannot are computed again by a second launch. INT8 keys, tiles of half
the bytes, leave room for three warpgroups and tiles of 64 keys, which share nothing. Masks of partial granules and the
bias of stand-ins come with the keys, as a float per key, so that one loop serves every kind of tile, and the long one
looks for none: warpgroups and the producer run code of their own, and the instruction cache holds little more than
their loops. Output rows go straight to their place in token order. Which program takes which tile varies, what is
computed for a tile does not: results are bit-equal from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..barriers import barrier_arrive, barrier_sync
from ..records import LOST, TILE_FIELDS, TILE_HEAD, TILE_KEYS, TILE_PLAIN, TILE_ROW, TILE_ROWS
from ..triton_versions import ALWAYS_SHARE, FP_FUSION, reinterpret, thread_barrier
from .hopper_producer import produce
from .hopper_softmax import join_sums, steps_of_rows, whole_sums
from .hopper_step import any_lost, first_tile, make_barriers, pass_on, step, store_rows, weigh_values
from .tiles import GluonTile, gluon_tile, int8_tile
from .worklist import FIELDS, WARPGROUP_ROWS, WIDE, build_worklist, head_groups, heads_at_once

LOG2E = 1.4426950408889634
LINEAR = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
UNSHARED_ROWS = 16_384  # mean rows of a query block from which on its last tile is not shared
# named barriers of a shared query tile. FREE: warpgroup 0's products have read the queries, whose buffer is free;
# WRITTEN: warpgroup 1's sums are in it
FREE, WRITTEN = gl.constexpr("8"), gl.constexpr("9")


def swizzled(dtype: torch.dtype, d: int) -> gl.NVMMASharedLayout:
    """How rows of d elements lie in shared memory: in slabs of 128 bytes, or of all they have."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(d * dtype.itemsize, 128), element_bitwidth=8 * dtype.itemsize, rank=2
    )


@gluon.jit
def _list_lost_rows(acc, z, record, row, rows, count, lost_tiles, A: gl.constexpr):
    """A query tile of their own for the rows of this warpgroup, where `is_lost` of any; the counter LOST tells how many
    there are.
    """
    if any_lost(acc, z, rows, A):
        tile = lost_tiles + gl.atomic_add(count + LOST, 1, sem="relaxed") * TILE_FIELDS
        for f in gl.static_range(TILE_FIELDS):
            gl.store(tile + f, gl.load(record + f))
        gl.store(tile + TILE_ROW, row)
        gl.store(tile + TILE_ROWS, rows)


@gluon.jit
def _consumer(lists, shape, result, scales, rings, bars, exchange, KEYS: gl.constexpr, STAGES: gl.constexpr,
              D: gl.constexpr, W: gl.constexpr, COMPENSATE: gl.constexpr, SCATTER: gl.constexpr, LSE: gl.constexpr,
              QUICK: gl.constexpr, SHARE: gl.constexpr, INT8: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32 if INT8 else 16]
    )
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    _wide_lists, _tail_lists, _tiles, count, record_buffers, lost_tiles = lists
    n, _m, _kb, _wide_width, _tails_width, _bias_row, bias_tiles = shape
    out, out_strides, heads, order, lse = result
    unit, q_steps, k_steps = scales
    q_ring, _k_ring, v_ring, _bias_ring = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    x_acc, x_rows = exchange
    copies = record_buffers + gl.program_id(0) * (2 * TILE_FIELDS)
    begin = 0
    r = 0
    mbarrier.wait(q_full.index(W), 0)
    rows = gl.load(copies + TILE_ROWS)
    while rows > 0:
        record = copies + (r & 1) * TILE_FIELDS
        all_tiles = gl.load(record + TILE_KEYS)
        total = all_tiles
        if COMPENSATE:
            total = all_tiles + bias_tiles
        end = begin + total
        # a tile of at most 64 rows is shared: both warpgroups hold its rows and take every other key tile
        if SHARE:
            shared = (rows <= 64) & (total > 1)
        else:
            shared: gl.constexpr = False
        if shared | (rows > W * 64):
            if SHARE:
                stride = gl.where(shared, 2, 1)
                first = gl.where(shared, W, 0)
            else:
                stride: gl.constexpr = 1
                first: gl.constexpr = 0
            head = gl.load(record + TILE_HEAD)
            row = gl.load(record + TILE_ROW) + gl.where(shared, 0, W * 64)
            if W == 1:  # noqa: SIM102 (the outer one is decided at compile time)
                if shared:
                    pass_on(begin, k_full, k_empty, STAGES)
            at = begin + first
            biased = begin + gl.load(record + TILE_PLAIN)
            factor = unit
            if INT8:
                factor = unit * gl.load(k_steps + head) * steps_of_rows(q_steps, head, row, n, S)
            given = (q_ring.index(W), factor, unit, rings, bars)
            acc, p16, m, z = first_tile(at, biased, given, KEYS, STAGES, D, QUICK, INT8, True)
            # two tiles per turn: the weights of one are in use while those of the next are made, so each has its
            # registers;
            # tiles with a bias come last and one by one, which keeps their code out of the long loop
            odd = at + stride + gl.maximum(biased - at - 1, 0) // (2 * stride) * (2 * stride)
            where = (begin, biased, n >> 31)
            for j in range(at + stride, odd, 2 * stride):
                acc, p16, m, z = step(
                    j, stride, where, (acc, p16, m, z), given, KEYS, STAGES, D, QUICK, INT8, False, False
                )
                acc, p16, m, z = step(
                    j + stride, stride, where, (acc, p16, m, z), given, KEYS, STAGES, D, QUICK, INT8, False, False
                )
            for j in range(odd, end, stride):
                acc, p16, m, z = step(
                    j, stride, where, (acc, p16, m, z), given, KEYS, STAGES, D, QUICK, INT8, True, True
                )
            if not shared:
                mbarrier.arrive(q_empty.index(W), count=1)
            elif W == 0:
                barrier_arrive(FREE)
            last = begin + first + (total - 1 - first) // stride * stride
            if (stride == 2) & (last - 1 >= begin):
                pass_on(last - 1, v_full, v_empty, STAGES)
            mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
            acc = weigh_values(p16, v_ring.index(last % STAGES), acc, D)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(last % STAGES), count=1)
            if (stride == 2) & (last + 1 < end):
                pass_on(last + 1, k_full, k_empty, STAGES)
                pass_on(last + 1, v_full, v_empty, STAGES)
            m = gl.convert_layout(m, gl.SliceLayout(1, A))
            z = gl.convert_layout(whole_sums(z, QUICK), gl.SliceLayout(1, A))
            if shared:
                if W == 1:
                    barrier_sync(FREE)
                    x_acc.store(acc)
                    x_rows.index(0).store(m)
                    x_rows.index(1).store(z)
                    fence_async_shared()  # queries are copied there next
                    barrier_arrive(WRITTEN)
                else:
                    barrier_sync(WRITTEN)
                    m_other = x_rows.index(0).load(gl.SliceLayout(1, A))
                    z_other = x_rows.index(1).load(gl.SliceLayout(1, A))
                    mine, other, m, z = join_sums(m, z, m_other, z_other, QUICK)
                    acc = acc * mine[:, None] + x_acc.load(A) * other[:, None]
            own_rows = gl.minimum(rows - W * 64, 64)
            if W == 1:
                own_rows = gl.where(shared, 0, own_rows)
            store_rows(acc, m, z, head, row, own_rows, out, out_strides, heads, n, order, lse, D, SCATTER, LSE, A)
            if QUICK:
                _list_lost_rows(acc, z, record, row, own_rows, count, lost_tiles, A)
            if shared:  # not before the store, which uses what was loaded from that buffer: no barrier waits for loads
                mbarrier.arrive(q_empty.index(W), count=1)
        else:  # no rows for this warpgroup, and nothing to share
            mbarrier.arrive(q_empty.index(W), count=1)
            for j in range(begin, end):
                pass_on(j, k_full, k_empty, STAGES)
                pass_on(j, v_full, v_empty, STAGES)
        begin = end
        r += 1
        mbarrier.wait(q_full.index(W), r & 1)
        rows = gl.load(copies + (r & 1) * TILE_FIELDS + TILE_ROWS)


@gluon.jit(
    do_not_specialize=["heads", "n", "m", "kb", "wide_width", "tails_width", "bias_row", "bias_tiles"],
    do_not_specialize_on_alignment=["count"],
)
def attend_hopper_kernel(
    q_desc, k_wide, k_tail, v_wide, v_tail, c_desc, u_desc, bias_desc, wide_lists, tail_lists, tiles, count,
    record_buffers, lost_tiles, out, order, lse, unit, q_steps, k_steps, heads, n, m, kb, wide_width, tails_width,
    bias_row, bias_tiles, out_b, out_h, out_n, D: gl.constexpr, KEYS: gl.constexpr, WIDE: gl.constexpr,
    TAIL: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, COMPENSATE: gl.constexpr, SCATTER: gl.constexpr,
    LSE: gl.constexpr, QUICK: gl.constexpr, SHARE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, INT8: gl.constexpr,
):  # fmt: skip
    """out_i = sum_j exp(q_i k_j scale) v_j / sum_j exp(q_i k_j scale) over the keys j that i's block keeps.

    GROUPS warpgroups of 64 rows each. INT8: q and k are whole numbers of steps, one step per query row and one per head
    of keys. Grid: one program per multiprocessor. Traffic per query tile: its rows once, and 4 d (INT8: 3 d) bytes per
    listed key from L2.
    """
    BITS: gl.constexpr = 8 if INT8 else 16
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SHARED_QK: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=64 if INT8 and D == 64 else 128, element_bitwidth=BITS, rank=2
    )
    EXCHANGED: gl.constexpr = gl.SwizzledSharedLayout(vec=2, per_phase=1, max_phase=8, order=[1, 0])
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 64, D], SHARED_QK)
    k_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, KEYS, D], SHARED_QK)
    v_ring = gl.allocate_shared_memory(v_wide.dtype, [STAGES, KEYS, D], SHARED)
    if INT8 and SHARE:
        x_acc = gl.allocate_shared_memory(gl.float32, [64, D], EXCHANGED)
    elif INT8:
        x_acc = q_ring
    else:  # sums are exchanged in the place of the queries: shared memory is full
        x_acc = reinterpret(q_ring, gl.float32, [64, D], EXCHANGED)
    x_rows = gl.allocate_shared_memory(
        gl.float32, [2, 64], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    )
    bars = (
        make_barriers(GROUPS, 1),  # q_full: of each warpgroup; the producer arrives
        make_barriers(GROUPS, 1),  # q_empty: its warpgroup arrives
        make_barriers(STAGES, 1),  # k_full
        make_barriers(STAGES, GROUPS),  # k_empty: every warpgroup arrives
        make_barriers(STAGES, 1),  # v_full
        make_barriers(STAGES, GROUPS),  # v_empty
    )
    bias_ring = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, KEYS], gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    )
    exchange = (x_acc, x_rows)
    fence_async_shared()
    thread_barrier()
    descs = (q_desc, k_wide, k_tail, v_wide, v_tail, c_desc, u_desc, bias_desc)
    lists = (wide_lists, tail_lists, tiles, count, record_buffers, lost_tiles)
    shape = (n, m, kb, wide_width, tails_width, bias_row, bias_tiles)
    result = (out, (out_b, out_h, out_n), heads, order, lse)
    scales = (unit, q_steps, k_steps)
    rings = (q_ring, k_ring, v_ring, bias_ring)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consumer, (lists, shape, result, scales, rings, bars, exchange, KEYS, STAGES, D, 0, COMPENSATE, SCATTER,
                         LSE, QUICK, SHARE, INT8)),
            (_consumer, (lists, shape, result, scales, rings, bars, exchange, KEYS, STAGES, D, 1, COMPENSATE, SCATTER,
                         LSE, QUICK, SHARE, INT8)),
            (produce, (descs, lists, shape, rings, bars, KEYS, WIDE, TAIL, STAGES, D, COMPENSATE, GROUPS, BITS // 8)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (lists, shape, result, scales, rings, bars, exchange, KEYS, STAGES, D, 0, COMPENSATE, SCATTER,
                         LSE, QUICK, SHARE, INT8)),
            (_consumer, (lists, shape, result, scales, rings, bars, exchange, KEYS, STAGES, D, 1, COMPENSATE, SCATTER,
                         LSE, QUICK, SHARE, INT8)),
            (_consumer, (lists, shape, result, scales, rings, bars, exchange, KEYS, STAGES, D, 2, COMPENSATE, SCATTER,
                         LSE, QUICK, SHARE, INT8)),
            (produce, (descs, lists, shape, rings, bars, KEYS, WIDE, TAIL, STAGES, D, COMPENSATE, GROUPS, BITS // 8)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def attend_hopper(
    q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor, key_offsets: Tensor, mask: Tensor, *,
    scale: float | None = None, compensate: Tensor | None = None, centroids: Tensor | None = None,
    mean_values: Tensor | None = None, pair_bias: Tensor | None = None, out_order: Tensor | None = None,
    out: Tensor | None = None, with_lse: bool = False, quick: bool | None = None, tile: GluonTile | None = None,
    steps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention over the kept blocks, on block-ordered contiguous q [bh n d], k, v [bh m d]; bf16 or fp16, d 64 or 128.

    Offsets int32 [bh qb+1], [bh kb+1]; mask bool [bh qb kb]; compensate bool [bh kb] with centroids, mean_values [bh kb
    d] adds skipped flagged blocks through one stand-in key each, with log n or pair_bias fp32 [bh qb kb] added to its
    score. With out_order int32 [bh n] row i goes to row out_order[bh, i] of `out`, [bh n d] or [b h n d] with any
    strides (last one 1). lse fp32 [bh n] follows the same order. Heads whose lists do not fit `worklist.SCRATCH_LIMIT`
    together are computed one group after the other. scale must be positive. Rows of k and v beside a kept block, and
    the first ones of their head, are read and weighted 0: they and their scores must be finite. quick: how exponentials
    are taken first (`hopper_softmax`), for bf16 alone; None takes it there, which counts values below 2^-46 as 0.
    steps, fp32 [bh n] and [bh]: q, k and centroids are int8, and what 1 stands for in a row of q and in k.
    """
    bh, n, d = q.shape
    m = k.shape[1]
    scale = d**-0.5 if scale is None else scale
    if quick and v.dtype != torch.bfloat16:
        raise ValueError(
            f"attend_hopper: expected bf16 for quick exponentials, got {v.dtype}, whose exponents are too few; "
            "leave quick out."
        )
    quick = v.dtype == torch.bfloat16 if quick is None else quick
    tile = tile or (gluon_tile(d) if steps is None else int8_tile(d, n / max(mask.shape[1], 1), quick))
    out = torch.empty(bh, n, d, dtype=v.dtype, device=q.device) if out is None else out
    rows = out if out.ndim == 4 else out[None]
    lse = torch.empty(bh, n, dtype=torch.float32, device=q.device) if with_lse else None
    if 0 in (n, m, bh):  # no query, no key or no head
        return out.zero_(), lse if lse is None else lse.fill_(-torch.inf)
    at_once = heads_at_once(mask.shape[1], mask.shape[2], query_tokens=n, key_tokens=m,
                            query_tile=tile.groups * WARPGROUP_ROWS, key_tile=tile.keys, tail=tile.tail,
                            compensated=compensate is not None, tail_bias=True)  # fmt: skip
    q_steps, k_steps = (None, None) if steps is None else steps
    by_head = (
        q, k, v, q_steps, k_steps, query_offsets, key_offsets, mask, compensate, centroids, mean_values, pair_bias,
        out_order, lse,
    )  # fmt: skip
    for elements, heads, group in head_groups(rows.shape[0], rows.shape[1], at_once):
        _attend_heads(
            rows[elements, heads], *(x if x is None else x[group] for x in by_head), scale=scale, quick=quick, tile=tile
        )
    return out, lse


def _attend_heads(
    out: Tensor, q: Any, k: Any, v: Any, q_steps: Tensor | None, k_steps: Tensor | None, query_offsets: Any,
    key_offsets: Any, mask: Any, compensate: Tensor | None, centroids: Tensor | None, mean_values: Tensor | None,
    pair_bias: Tensor | None, out_order: Tensor | None, lse: Tensor | None, *, scale: float, quick: bool,
    tile: GluonTile,
) -> None:  # fmt: skip
    """`attend_hopper` of heads whose lists fit: fills out [b h n d] and lse."""
    n, d = q.shape[1:]
    m, kb = k.shape[1], mask.shape[2]
    work = build_worklist(query_offsets, key_offsets, mask, query_tokens=n, key_tokens=m,
                          query_tile=tile.groups * WARPGROUP_ROWS, key_tile=tile.keys, compensate=compensate,
                          pair_bias=pair_bias, scale=scale, tail=tile.tail, tail_bias=True)  # fmt: skip

    def box(x: Tensor, height: int, width: int) -> TensorDescriptor:
        flat = x.reshape(-1, d)
        return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [height, width], swizzled(x.dtype, d))

    int8 = q_steps is not None
    slab = d if int8 else 64  # columns of a box of keys: 128 bytes, or all there are
    assert work.bias is not None  # asked for by tail_bias
    bias, bias_width = work.bias.view(-1, tile.keys), work.bias.shape[1]
    stand_ins = [k, v]
    if compensate is not None:
        assert centroids is not None and mean_values is not None
        stand_ins = [centroids.to(k.dtype).contiguous(), mean_values.to(v.dtype).contiguous()]
    programs = min(torch.cuda.get_device_properties(q.device).multi_processor_count, work.tiles.shape[0])
    # double-buffered: a slow consumer may still read the record before this one
    record_buffers = torch.empty(programs, 2, FIELDS, dtype=torch.int32, device=q.device)
    boxes = (
        box(q, WARPGROUP_ROWS, d), box(k, WIDE, slab), box(k, tile.tail, slab), box(v, WIDE, 64), box(v, tile.tail, 64),
        box(stand_ins[0], tile.keys, slab), box(stand_ins[1], tile.keys, 64),
        TensorDescriptor(bias, list(bias.shape), list(bias.stride()), [1, tile.keys], LINEAR),
    )  # fmt: skip
    # each warpgroup of a query tile may lose its rows
    lost_tiles = torch.empty(tile.groups * work.tiles.shape[0], FIELDS, dtype=torch.int32, device=q.device)

    # of a long block one tile at most has few rows: shorter loops, without the code that shares it, gain more than
    # sharing it
    share = tile.groups == 2 and (ALWAYS_SHARE or n < UNSHARED_ROWS * mask.shape[1])

    def launch(tiles: Tensor, count: Tensor, tile: GluonTile, *, quick: int, share: bool) -> None:
        attend_hopper_kernel[(programs,)](
            *boxes, work.wide, work.tails, tiles, count, record_buffers, lost_tiles, out,
            work.count if out_order is None else out_order, bias if lse is None else lse, float(scale * LOG2E),
            q_steps if int8 else bias, k_steps if int8 else bias, out.shape[1], n, m, kb,
            work.wide.shape[1], work.tails.shape[1], bias_width // tile.keys,
            0 if compensate is None else -(-kb // tile.keys), out.stride(0), out.stride(1), out.stride(2),
            SCATTER=out_order is not None, LSE=lse is not None, COMPENSATE=compensate is not None, QUICK=quick,
            SHARE=share, INT8=int8, **tile.constants(d), num_warps=4, maxnreg=tile.launch_registers, **FP_FUSION,
        )  # fmt: skip

    launch(work.tiles, work.count, tile, quick=tile.quick if quick else 0, share=share or not quick)
    if quick:  # almost always nothing is left: without a host copy that is not known here
        launch(lost_tiles, work.count[LOST.value :], tile.for_lost_rows(), quick=0, share=True)
