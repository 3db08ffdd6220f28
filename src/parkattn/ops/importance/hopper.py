"""Full-K PAMA for Hopper (sm_90), d = 128, in Triton's Gluon: one TMA producer warp and two consumer warpgroups.

A program walks the query tiles (64 rows) of one work item.  The producer streams the head's centroids in chunks of 128
through a ring of shared-memory stages; consumer w takes chunks w, w + 2, ...  Chunk j leaves E_j = exp2(S_j - m_j), at
most 1, in fp16 in shared memory.  Once both consumers know the row sums z, the column sums are tensor-core work too:
  mass_j += E_j^T F_j,   F_j = exp2(m_j - m) / z   split into two fp16 terms, accumulated in fp32 over all tiles.
64 x 1,024 fp32 logits would fill the whole register file; in 16 bits they take 128 KB of shared memory.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..barriers import barrier_sync
from ..records import ITEM_BLOCK, ITEM_BLOCK_ROWS, ITEM_FIELDS, ITEM_HEAD, ITEM_ROW, ITEM_ROWS, ITEM_SLOT
from ..triton_versions import FP_FUSION, copy_to_shared, thread_barrier

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off
# ruff: noqa: B007, RUF005, RUF059, SIM108   (the compiled subset of Python:
# tuples grow by +, every buffer travels, no conditional expressions)

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _producer(q_desc, c_desc, q_row, c_row, tiles, buffers, bars, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    q_s, c_s, e_s, f_s, stat_s = buffers
    q_full, q_empty, c_full, c_empty = bars
    for t in range(tiles):
        mbarrier.wait(q_empty, (t + 1) & 1)
        mbarrier.expect(q_full, 64 * 128 * 2)
        copy_to_shared(q_desc, [q_row + t * 64, 0], q_full, q_s)
        for j in range(CHUNKS):
            g = t * CHUNKS + j
            stage = g % STAGES
            mbarrier.wait(c_empty.index(stage), (g // STAGES + 1) & 1)
            mbarrier.expect(c_full.index(stage), 128 * 128 * 2)
            copy_to_shared(c_desc, [c_row + j * 128, 0], c_full.index(stage), c_s.index(stage))


@gluon.jit
def _weights(f):
    """f [64] fp32 -> [64, 8] fp16: four columns of its rounding, four of what the rounding lost."""
    high = f.to(gl.float16)
    both = gl.join(high, (f - high.to(gl.float32)).to(gl.float16))
    four = gl.join(both, both).reshape([64, 4])
    return gl.join(four, four).reshape([64, 8])


@gluon.jit
def _consumer(target, biases, key_blocks, length, tiles, share, write, scale, buffers, bars, CHUNKS: gl.constexpr,
              STAGES: gl.constexpr, W: gl.constexpr):
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LOGITS, k_width=2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OWN: gl.constexpr = CHUNKS // 2
    q_s, c_s, e_s, f_s, stat_s = buffers
    q_full, q_empty, c_full, c_empty = bars
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, LOGITS))
    rows = gl.arange(0, 64, layout=ROW)
    mass = ()
    for i in gl.static_range(OWN):
        mass = mass + (warpgroup_mma_init(gl.zeros([128, 8], gl.float32, layout=SUMS)), )
    for t in range(tiles):
        mbarrier.wait(q_full, t & 1)
        q = q_s.load(OPERAND)
        ms = ()
        for i in gl.static_range(OWN):
            g = t * CHUNKS + 2 * i + W
            bias = gl.load(biases + (2 * i + W) * 128 + columns)
            mbarrier.wait(c_full.index(g % STAGES), (g // STAGES) & 1)
            zero = gl.zeros([64, 128], gl.float32, layout=LOGITS)
            s = warpgroup_mma(q, c_s.index(g % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)
            if i == 0:
                waited = warpgroup_mma_wait(0, deps=(s, ) + mass)
                s = waited[0]
                mass = waited[1:]
                # the column sums of the tile before are done in every warp: E and F may be overwritten, and so may the
                # queries, which
                # this product had in registers (a barrier right after their load would not wait for it: the copy engine
                # wrote over them)
                thread_barrier()
                mbarrier.arrive(q_empty, count=1)
            else:
                s = warpgroup_mma_wait(0, deps=(s, ))
            mbarrier.arrive(c_empty.index(g % STAGES), count=1)
            x = s * scale + bias[None, :]
            m = gl.maximum(gl.max(x, 1), -1e30)
            e = gl.exp2(x - m[:, None])
            z = gl.sum(e, 1)
            e_s.index(2 * i + W).store(e.to(gl.float16))
            ms = ms + (m, )
            if i == 0:
                top = m
                total = z
            else:
                higher = gl.maximum(top, m)
                total = total * gl.exp2(top - higher) + z * gl.exp2(m - higher)
                top = higher
        # the other consumer has the other half of each row; whoever is a tile ahead writes to other rows
        mine = ((t & 1) * 2 + W) * 2
        other = ((t & 1) * 2 + 1 - W) * 2
        stat_s.index(mine).store(top)
        stat_s.index(mine + 1).store(total)
        barrier_sync("8")
        their_top = stat_s.index(other).load(ROW)
        their_total = stat_s.index(other + 1).load(ROW)
        peak = gl.maximum(top, their_top)
        z = total * gl.exp2(top - peak) + their_total * gl.exp2(their_top - peak)
        weight = gl.where((rows < length - t * 64) & (z > 0), 1.0 / z, 0.0)
        for i in gl.static_range(OWN):
            f_s.index(2 * i + W).permute((1, 0)).store(_weights(gl.exp2(ms[i] - peak) * weight))
        fence_async_shared()
        thread_barrier()
        grown = ()
        for i in gl.static_range(OWN):
            grown = grown + (warpgroup_mma(e_s.index(2 * i + W).permute((1, 0)), f_s.index(2 * i + W).permute((1, 0)),
                                           mass[i], is_async=True), )
        mass = grown
    # with one chunk each the wait returns the tensor itself
    if OWN == 1:
        sums = (warpgroup_mma_wait(0, deps=mass), )
    else:
        sums = warpgroup_mma_wait(0, deps=mass)
    if write:
        column = gl.arange(0, 128, layout=gl.SliceLayout(1, SUMS))
        for i in gl.static_range(OWN):
            # each of the two terms of F stands in four of the eight columns
            gl.store(target + (2 * i + W) * 128 + column, gl.sum(sums[i], 1) * (0.25 * share),
                     mask=column < key_blocks - (2 * i + W) * 128)


@gluon.jit
def full_key_hopper(q_desc, c_desc, items, log_sizes, out, partial, n, key_blocks, scale, CHUNKS: gl.constexpr,
                    STAGES: gl.constexpr):
    """W[u, v] for one slice of block u.  Grid (items).  Traffic: q once, the head's centroids from L2 once per 64
    queries, 4 N_K bytes out.

    The grid is not persistent: a fixed split of items over 132 programs was slower than the hardware's own (H200, 4.4
    against 3.1 ms).
    """
    SWIZZLE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    item = items + gl.program_id(0) * ITEM_FIELDS
    bh = gl.load(item + ITEM_HEAD)
    length = gl.load(item + ITEM_ROWS)
    slot = gl.load(item + ITEM_SLOT)
    tiles = (length + 63) // 64
    if slot < 0:
        target = out + gl.load(item + ITEM_BLOCK).to(gl.int64) * key_blocks
    else:
        target = partial + slot.to(gl.int64) * key_blocks
    share = 1.0 / gl.maximum(gl.load(item + ITEM_BLOCK_ROWS), 1).to(gl.float32)
    write = (slot < 0) | (length > 0)
    biases = log_sizes + bh * (CHUNKS * 128)

    buffers = (gl.allocate_shared_memory(dtype, [64, 128], SWIZZLE),
               gl.allocate_shared_memory(dtype, [STAGES, 128, 128], SWIZZLE),
               gl.allocate_shared_memory(gl.float16, [CHUNKS, 64, 128], SWIZZLE),
               gl.allocate_shared_memory(gl.float16, [CHUNKS, 8, 64], SWIZZLE),
               gl.allocate_shared_memory(gl.float32, [8, 64], LINE))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(c_full.index(i), count=1)
        mbarrier.init(c_empty.index(i), count=1)
    bars = (q_full, q_empty, c_full, c_empty)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize([
        (_consumer, (target, biases, key_blocks, length, tiles, share, write, scale, buffers, bars, CHUNKS, STAGES, 0)),
        (_consumer, (target, biases, key_blocks, length, tiles, share, write, scale, buffers, bars, CHUNKS, STAGES, 1)),
        (_producer, (q_desc, c_desc, bh * n + gl.load(item + ITEM_ROW), bh * key_blocks, tiles, buffers, bars, CHUNKS,
                     STAGES)),
    ], [4, 1], [240, 24])


# 168 registers a thread at launch: the consumers then take 240 and the producer gives back all but 24
OPTIONS = {"num_warps": 4, "maxnreg": 168, **FP_FUSION}


def launch_full_key_hopper(q: torch.Tensor, centroids: torch.Tensor, items: Any, log_sizes: torch.Tensor,
                           out: torch.Tensor, partial: Any, scale: float, *, stages: int) -> None:
    """q [bh n 128], centroids [bh kb 128] in q's dtype, items int32 [w 8], log_sizes fp32 [bh width] -> fills out [bh
    qb kb] and partial rows.
    """
    bh, n, d = q.shape
    # the width is a multiple of 256: both consumers take the same number of chunks
    key_blocks, chunks = centroids.shape[1], log_sizes.shape[1] // 128
    q_desc = TensorDescriptor.from_tensor(q.view(bh * n, d), [64, 128], SWIZZLED)
    c_desc = TensorDescriptor.from_tensor(centroids.view(bh * key_blocks, d), [128, 128], SWIZZLED)
    full_key_hopper[(items.shape[0],)](q_desc, c_desc, items, log_sizes, out, partial, n, key_blocks, scale,
                                       CHUNKS=chunks, STAGES=stages, **OPTIONS)
