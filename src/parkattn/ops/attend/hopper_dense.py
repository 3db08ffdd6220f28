"""Dense attention forward for Hopper (sm_90), in Gluon: the loop of `hopper` without lists.

One persistent program per multiprocessor takes every so many-th query tile, head by head; one producer warp fills the
rings, whole tiles at a time; two or three consumer warpgroups own 64 query rows each. Key tiles are visited last to
first: only the first one visited can be partial, so the loop has no mask. Rows that quick exponentials lose
(`hopper_softmax`) are computed again by a second launch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton_versions import FP_FUSION, copy_to_shared, thread_barrier
from .hopper import LOG2E, WARPGROUP_ROWS, swizzled
from .hopper_softmax import steps_of_rows, whole_sums
from .hopper_step import any_lost, first_tile, make_barriers, step, store_rows, weigh_values
from .tiles import GluonTile, dense_tile


@gluon.jit
def _tile_of(i, lost, AGAIN: gl.constexpr):
    """The query tile that comes i-th: AGAIN of those that were lost."""
    if AGAIN:
        return gl.load(lost + 1 + i)
    else:  # noqa: RET505 (decided at compile time: one branch exists)
        return i


@gluon.jit
def _consumer(work, shape, result, scales, rings, bars, KEYS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
              W: gl.constexpr, GROUPS: gl.constexpr, LSE: gl.constexpr, QUICK: gl.constexpr, AGAIN: gl.constexpr,
              INT8: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32 if INT8 else 16]
    )
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    key_counts, lost, programs = work
    n, _m, q_tiles, tiles = shape
    out, out_strides, heads, lse = result
    unit, q_steps, k_steps = scales
    q_ring, _k_ring, v_ring, _no_bias = rings
    q_full, q_empty, _k_full, _k_empty, v_full, v_empty = bars
    begin = 0
    r = 0
    count = tiles
    if AGAIN:
        count = gl.load(lost)
    i = gl.program_id(0)
    while i < count:
        tile = _tile_of(i, lost, AGAIN)
        head = tile // q_tiles
        row = tile % q_tiles * (GROUPS * 64) + W * 64
        keys = gl.load(key_counts + head)
        k_tiles = gl.maximum((keys + KEYS - 1) // KEYS, 1)  # without a key one tile in which none counts
        end = begin + k_tiles
        factor = unit
        if INT8:
            factor = unit * gl.load(k_steps + head) * steps_of_rows(q_steps, head, row, n, S)
        mbarrier.wait(q_full.index(W), r & 1)
        given = (q_ring.index(W), factor, unit, rings, bars)
        acc, p, m, z = first_tile(begin, keys - (k_tiles - 1) * KEYS, given, KEYS, STAGES, D, QUICK, INT8, False)
        where = (begin, end, n >> 31)
        # two tiles per turn: the weights of one are in use while those of the next are made, so each has its registers
        odd = begin + 1 + (k_tiles - 1) // 2 * 2
        for j in range(begin + 1, odd, 2):
            acc, p, m, z = step(j, 1, where, (acc, p, m, z), given, KEYS, STAGES, D, QUICK, INT8, False, False)
            acc, p, m, z = step(j + 1, 1, where, (acc, p, m, z), given, KEYS, STAGES, D, QUICK, INT8, False, False)
        for j in range(odd, end):
            acc, p, m, z = step(j, 1, where, (acc, p, m, z), given, KEYS, STAGES, D, QUICK, INT8, False, True)
        mbarrier.arrive(q_empty.index(W), count=1)
        last = end - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        acc = weigh_values(p, v_ring.index(last % STAGES), acc, D)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(last % STAGES), count=1)
        m = gl.convert_layout(m, gl.SliceLayout(1, A))
        z = gl.convert_layout(whole_sums(z, QUICK), gl.SliceLayout(1, A))
        rows = gl.minimum(n - row, 64)
        store_rows(acc, m, z, head, row, rows, out, out_strides, heads, n, lse, lse, D, False, LSE, A)
        if QUICK:  # noqa: SIM102 (the outer one is decided at compile time)
            if any_lost(acc, z, rows, A):  # noqa: SIM102 (what is counted must not be counted where nothing is lost)
                if gl.atomic_add(lost + 1 + tiles + tile, 1, sem="relaxed") == 0:
                    gl.store(lost + 1 + gl.atomic_add(lost, 1, sem="relaxed"), tile)
        begin = end
        r += 1
        i += programs


@gluon.jit
def _produce(descs, work, shape, rings, bars, KEYS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
             GROUPS: gl.constexpr, AGAIN: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """BYTES: of an element of q and k; values have two."""
    q_desc, k_desc, v_desc = descs
    key_counts, lost, programs = work
    n, m, q_tiles, tiles = shape
    q_ring, k_ring, v_ring, _no_bias = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    # through the same tiles as a consumer, in the same words: nobody hands them out, so each of the two counts them
    done = 0
    r = 0
    count = tiles
    if AGAIN:
        count = gl.load(lost)
    i = gl.program_id(0)
    while i < count:
        tile = _tile_of(i, lost, AGAIN)
        head = tile // q_tiles
        k_tiles = gl.maximum((gl.load(key_counts + head) + KEYS - 1) // KEYS, 1)
        first = head * m + (k_tiles - 1) * KEYS
        # keys run one tile ahead of values, the order in which the consumers free the slots
        for j in range(k_tiles + 1):
            if j < k_tiles:
                at = done + j
                slot = at % STAGES
                mbarrier.wait(k_empty.index(slot), ((at // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(slot), KEYS * D * BYTES)
                copy_to_shared(k_desc, [first - j * KEYS, 0], k_full.index(slot), k_ring.index(slot))
            if j == 0:
                for w in gl.static_range(GROUPS):
                    mbarrier.wait(q_empty.index(w), (r & 1) ^ 1)
                    mbarrier.expect(q_full.index(w), 64 * D * BYTES)
                    copy_to_shared(
                        q_desc,
                        [head * n + tile % q_tiles * (GROUPS * 64) + w * 64, 0],
                        q_full.index(w),
                        q_ring.index(w),
                    )
            else:
                at = done + j - 1
                slot = at % STAGES
                mbarrier.wait(v_empty.index(slot), ((at // STAGES) & 1) ^ 1)
                mbarrier.expect(v_full.index(slot), KEYS * D * 2)
                copy_to_shared(v_desc, [first - (j - 1) * KEYS, 0], v_full.index(slot), v_ring.index(slot))
        done += k_tiles
        r += 1
        i += programs


@gluon.jit(do_not_specialize=["programs", "heads", "n", "m", "q_tiles", "tiles"])
def attend_dense_kernel(
    q_desc, k_desc, v_desc, key_counts, lost, programs, out, lse, unit, q_steps, k_steps, heads, n, m, q_tiles, tiles,
    out_b, out_h, out_n, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    LSE: gl.constexpr, QUICK: gl.constexpr, AGAIN: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, INT8: gl.constexpr,
):  # fmt: skip
    """out_i = sum_j exp(q_i k_j scale) v_j / sum_j exp(q_i k_j scale) over the first key_counts keys j of a head.

    INT8: as in `hopper`. lost: how many tiles were lost, which, and for each tile whether it is among them; AGAIN
    computes those. Grid: `programs`, one per multiprocessor. Traffic per query tile: its rows once, and 4 d (INT8: 3 d)
    bytes per key from L2.
    """
    BITS: gl.constexpr = 8 if INT8 else 16
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SHARED_QK: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=64 if INT8 and D == 64 else 128, element_bitwidth=BITS, rank=2
    )
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 64, D], SHARED_QK)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, D], SHARED_QK)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, D], SHARED)
    # as in `hopper`, whose text has them because `park bench sanitize` rewrites it
    bars = (
        make_barriers(GROUPS, 1),  # q_full: of each warpgroup; the producer arrives
        make_barriers(GROUPS, 1),  # q_empty: its warpgroup arrives
        make_barriers(STAGES, 1),  # k_full
        make_barriers(STAGES, GROUPS),  # k_empty: every warpgroup arrives
        make_barriers(STAGES, 1),  # v_full
        make_barriers(STAGES, GROUPS),  # v_empty
    )
    fence_async_shared()
    thread_barrier()
    descs = (q_desc, k_desc, v_desc)
    work = (key_counts, lost, programs)
    shape = (n, m, q_tiles, tiles)
    result = (out, (out_b, out_h, out_n), heads, lse)
    scales = (unit, q_steps, k_steps)
    rings = (q_ring, k_ring, v_ring, v_ring)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consumer, (work, shape, result, scales, rings, bars, KEYS, STAGES, D, 0, GROUPS, LSE, QUICK, AGAIN,
                         INT8)),
            (_consumer, (work, shape, result, scales, rings, bars, KEYS, STAGES, D, 1, GROUPS, LSE, QUICK, AGAIN,
                         INT8)),
            (_produce, (descs, work, shape, rings, bars, KEYS, STAGES, D, GROUPS, AGAIN, BITS // 8)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (work, shape, result, scales, rings, bars, KEYS, STAGES, D, 0, GROUPS, LSE, QUICK, AGAIN,
                         INT8)),
            (_consumer, (work, shape, result, scales, rings, bars, KEYS, STAGES, D, 1, GROUPS, LSE, QUICK, AGAIN,
                         INT8)),
            (_consumer, (work, shape, result, scales, rings, bars, KEYS, STAGES, D, 2, GROUPS, LSE, QUICK, AGAIN,
                         INT8)),
            (_produce, (descs, work, shape, rings, bars, KEYS, STAGES, D, GROUPS, AGAIN, BITS // 8)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def attend_dense_hopper(
    q: Tensor, k: Tensor, v: Tensor, key_counts: Tensor | None = None, *, scale: float | None = None,
    out: Tensor | None = None, with_lse: bool = False, quick: bool | None = None, tile: GluonTile | None = None,
    steps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention over the first key_counts int32 [bh] keys of each head, all where None; contiguous q [bh n d], k, v [bh
    m d]; d 64 or 128.

    out, lse, quick and steps as in `attend_hopper`. scale must be positive. Up to a tile of the rows of k and v behind
    those that count is read and weighted 0: they and their scores must be finite.
    """
    bh, n, d = q.shape
    m = k.shape[1]
    int8 = steps is not None
    quick = v.dtype == torch.bfloat16 if quick is None else quick
    tile = tile or dense_tile(int8, quick)
    out = torch.empty(bh, n, d, dtype=v.dtype, device=q.device) if out is None else out
    rows = out if out.ndim == 4 else out[None]
    lse = torch.empty(bh, n, dtype=torch.float32, device=q.device) if with_lse else None
    if n == 0 or bh == 0:
        return out, lse
    if m == 0:
        return out.zero_(), lse if lse is None else lse.fill_(-torch.inf)
    q_tiles = -(-n // (tile.groups * WARPGROUP_ROWS))
    tiles = bh * q_tiles
    programs = min(torch.cuda.get_device_properties(q.device).multi_processor_count, tiles)
    key_counts = torch.full((bh,), m, dtype=torch.int32, device=q.device) if key_counts is None else key_counts
    lost = torch.zeros(1 + 2 * tiles, dtype=torch.int32, device=q.device)
    nothing = torch.empty(1, dtype=torch.float32, device=q.device)

    def box(x: Tensor, height: int) -> TensorDescriptor:
        flat = x.reshape(-1, d)
        return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [height, d], swizzled(x.dtype, d))

    constants = {name: value for name, value in tile.constants(d).items() if name not in ("WIDE", "TAIL")}

    unit = float((d**-0.5 if scale is None else scale) * LOG2E)

    def launch(quick: int, again: bool) -> None:
        attend_dense_kernel[(programs,)](
            box(q, WARPGROUP_ROWS), box(k, tile.keys), box(v, tile.keys), key_counts, lost, programs, rows,
            nothing if lse is None else lse, unit, *(steps or (nothing, nothing)), rows.shape[1], n, m, q_tiles, tiles,
            *rows.stride()[:3], LSE=lse is not None, QUICK=quick, AGAIN=again, INT8=int8, **constants, num_warps=4,
            maxnreg=tile.launch_registers, **FP_FUSION,
        )  # fmt: skip

    launch(tile.quick if quick else 0, False)
    if quick:  # almost always nothing is left: without a host copy that is not known here
        launch(0, True)
    return out, lse
