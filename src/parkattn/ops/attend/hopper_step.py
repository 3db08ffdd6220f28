"""What one warpgroup of a Hopper attention kernel does with a tile of keys, and with its 64 rows at the end.

`hopper` walks lists of tiles with it, `hopper_dense` all of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_softmax import add_bias, after, first_weights, is_lost, next_weights, packed, rescale, unpacked


@gluon.jit
def pass_on(at, full, empty, STAGES: gl.constexpr):
    """Free a ring slot that the other warpgroup uses."""
    mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
    mbarrier.arrive(empty.index(at % STAGES), count=1)


@gluon.jit
def scores(q, k_tile, KEYS: gl.constexpr, INT8: gl.constexpr, S: gl.constexpr):
    """Q K^T, not waited for: float32, or whole numbers of INT8 operands."""
    zero = gl.zeros([64, KEYS], gl.int32 if INT8 else gl.float32, layout=S)
    return warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def first_tile(at, edge, given, KEYS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, QUICK: gl.constexpr,
               INT8: gl.constexpr, LISTED: gl.constexpr):  # fmt: skip
    """The sums of a row after its first tile: nothing to overlap with yet. edge: the first tile with a bias (LISTED),
    or how many keys of this one count.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32 if INT8 else 16]
    )
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q, factor, unit, rings, bars = given
    _q_ring, k_ring, v_ring, bias_ring = rings
    _q_full, _q_empty, k_full, k_empty, _v_full, _v_empty = bars
    mbarrier.wait(k_full.index(at % STAGES), (at // STAGES) & 1)
    s = scores(q, k_ring.index(at % STAGES), KEYS, INT8, S)
    s = warpgroup_mma_wait(0, deps=(s,))
    if INT8:
        s = s.to(gl.float32)
    if LISTED:
        if at >= edge:
            s = add_bias(s, bias_ring.index(at % STAGES), factor, unit, KEYS, INT8, S)
    else:
        s = gl.where((gl.arange(0, KEYS, layout=gl.SliceLayout(0, S)) < edge)[None, :], s, -float("inf"))
    mbarrier.arrive(k_empty.index(at % STAGES), count=1)
    p, m, z = first_weights(s, factor, QUICK, INT8)
    acc = gl.zeros([64, D], gl.float32, layout=A)
    return acc, packed(p, v_ring.dtype), m, z


@gluon.jit
def weigh_values(p, v_tile, acc, D: gl.constexpr):
    """acc + P V, not waited for"""
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights = unpacked(p, v_tile.dtype, gl.DotOperandLayout(operand_index=0, parent=A, k_width=2))
    return warpgroup_mma(weights, v_tile, acc, is_async=True)


@gluon.jit
def step(at, stride, where, sums, given, KEYS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, QUICK: gl.constexpr,
         INT8: gl.constexpr, BIASED: gl.constexpr, ALONE: gl.constexpr):  # fmt: skip
    """S_j = Q K_j^T and acc += P_{j'} V_{j'} (j' the step before) are issued together; softmax of S_j runs while the
    second does.

    where: where the tiles of this query tile begin, and those of them that have a bias, which only BIASED looks for.
    ALONE: a loop of one step, where the weights in use need registers of their own: a copy that the assembler does not
    see through.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32 if INT8 else 16]
    )
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    begin, biased, zero = where
    acc, pairs, m, z = sums
    q, factor, unit, rings, bars = given
    _q_ring, k_ring, v_ring, bias_ring = rings
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = bars
    slot = at % STAGES
    earlier = at - stride
    before = earlier % STAGES
    if stride == 2:  # the tiles between are the other warpgroup's
        pass_on(at - 1, k_full, k_empty, STAGES)
        if at - 3 >= begin:
            pass_on(at - 3, v_full, v_empty, STAGES)
    if ALONE:
        pairs = pairs ^ zero
    weights = unpacked(
        pairs, v_ring.dtype, P
    )  # before the first product: nothing may write its registers between the two
    mbarrier.wait(k_full.index(slot), (at // STAGES) & 1)
    s = scores(q, k_ring.index(slot), KEYS, INT8, S)
    mbarrier.wait(v_full.index(before), (earlier // STAGES) & 1)
    acc = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if INT8:
        s = s.to(gl.float32)
    if BIASED:  # noqa: SIM102 (the outer one is decided at compile time)
        if at >= biased:
            s = add_bias(s, bias_ring.index(slot), factor, unit, KEYS, INT8, S)
    mbarrier.arrive(k_empty.index(slot), count=1)
    p, m, z, decay = next_weights(s, m, z, factor, QUICK, INT8)
    pairs = packed(p, v_ring.dtype)
    z = after(z)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    if not QUICK:
        acc = rescale(acc, gl.convert_layout(decay, gl.SliceLayout(1, A))[:, None], acc.shape[1])
    return acc, pairs, m, z


@gluon.jit
def store_rows(acc, m, z, head, row, rows, out, out_strides, heads, n, order, lse, D: gl.constexpr,
               SCATTER: gl.constexpr, LSE: gl.constexpr,
                A: gl.constexpr):  # fmt: skip
    out_b, out_h, out_n = out_strides
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, A))
    live = i < rows
    token = row + i
    if SCATTER:
        token = gl.load(order + head.to(gl.int64) * n + token, mask=live, other=0)
    inverse = gl.where(z > 0, 1.0 / z, 0.0)
    base = out + (head // heads).to(gl.int64) * out_b + (head % heads).to(gl.int64) * out_h
    column = gl.arange(0, D, layout=gl.SliceLayout(0, A))
    gl.store(
        base + token.to(gl.int64)[:, None] * out_n + column[None, :],
        (acc * inverse[:, None]).to(out.dtype.element_ty),
        mask=live[:, None],
    )
    if LSE:
        value = gl.where(z == 0, -float("inf"), (m + gl.log2(z)) * 0.6931471805599453)
        gl.store(lse + head.to(gl.int64) * n + token, value, mask=live)


@gluon.jit
def any_lost(acc, z, rows, A: gl.constexpr):
    """Whether quick exponentials lost any of the first `rows` rows."""
    overflown = gl.sum(acc * 0.0, 1)  # NaN where an element is not finite
    lost = is_lost(z + overflown) & (gl.arange(0, 64, layout=gl.SliceLayout(1, A)) < rows)
    return gl.max(lost.to(gl.int32), 0) > 0


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars
