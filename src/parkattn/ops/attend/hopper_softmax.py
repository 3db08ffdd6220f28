"""The exponentials of `hopper`, in two ways.

Careful, as everybody does it: weights are relative to the largest score that their row has seen, and sums are rescaled
when it grows.

Quick, for bf16: weights are relative to one reference per row, the largest score of its first tile. bf16 and float32
have eight bits of exponent, so a weight of 2^50 or 2^-90 is as precise as one of 1: no maximum per tile, nothing to
rescale, and no exponential waits for the whole row. What could go wrong shows in the row's sum, which `is_lost` looks
at, in a shared query tile in each warpgroup's own sum: such rows, and those whose sums of values overflowed, are listed
and computed again, carefully, with the 64 rows they came with. A row is lost when a score exceeds those of the first
tile by about 160 powers of two (110 when e is the base), and where a warpgroup saw no key at all. Steeper scores give
the same results and take up to twice as long or a little more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton_versions import reinterpret

# careful: the maximum may lag behind by 2^8, far from where bf16, fp16 or float32 sums would lose anything
LAG = gl.constexpr(8.0)
# quick: the first tile's largest weight is 2^-80 and a sum may grow to 2^80, which leaves values up to 2^47 without
# overflow (rows that
# have one are lost too), and values down to 2^-46 without a product that is flushed to zero
HEADROOM = gl.constexpr(80.0)
LARGEST_SUM = gl.constexpr(2.0**80)
# just below the least that a first tile gives; what was flushed to zero, at most 2^-126 per key, is still beyond the
# last digit
SMALLEST_SUM = gl.constexpr(2.0**-81)


def _multiply_unless_one(elements: int) -> tuple[str, str]:
    """PTX for a thread's `elements` accumulators: they lie in two rows, whose factors stand at 0 and 2, and are left
    alone where both are 1. As one block, because Gluon branches for the whole program alone.
    """
    first = 2 * elements
    grown = (
        f"setp.neu.f32 grown, ${first}, 0f3F800000; setp.neu.or.f32 grown, ${first + 2}, 0f3F800000, grown; "
        "@!grown bra kept;"
    )
    products = " ".join(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(elements))
    operands = ["=f"] * elements + [str(i) for i in range(elements)] + ["f"] * elements
    return f"{{ .reg .pred grown; {grown} {products} kept: }}", ",".join(operands)


RESCALE_32, OPERANDS_32 = (gl.constexpr(text) for text in _multiply_unless_one(32))
RESCALE_64, OPERANDS_64 = (gl.constexpr(text) for text in _multiply_unless_one(64))


@gluon.jit
def rescale(acc, decay, D: gl.constexpr):
    """acc [64 D] * decay [64 1]"""
    if D == 128:
        return gl.inline_asm_elementwise(RESCALE_64, OPERANDS_64, [acc, decay], gl.float32, is_pure=True, pack=64)
    else:  # noqa: RET505 (decided at compile time: one branch exists)
        return gl.inline_asm_elementwise(RESCALE_32, OPERANDS_32, [acc, decay], gl.float32, is_pure=True, pack=32)


@gluon.jit
def after(value):
    """value, behind a scheduling fence: the assembler would move the wait for P V above the exponentials of either row
    of a thread, and the two would no longer overlap. It moves nothing above this sleep, whose condition (a NaN payload
    that no arithmetic makes) never holds.
    """
    return gl.inline_asm_elementwise("{ .reg .pred never; setp.eq.s32 never, $2, 0x7fabcdef; "
                                     "setp.eq.and.s32 never, $3, 0x7fabcdef, never; @never nanosleep.u32 1; "
                                     "mov.b32 $0, $2; mov.b32 $1, $3; }",
                                     "=r,=r,r,r", [value], gl.float32, is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """Weights [64 keys] rounded to 16 bits, two to a register [64 keys/2]. int32 and not pure: they stay where they are
    made, under a product, and a loop that carries them does not take them apart.
    """
    low, high = gl.split(gl.reshape(p, [64, p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=False, pack=1
        )
    else:  # noqa: RET505 (decided at compile time: one branch exists)
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, P: gl.constexpr):
    """The same registers as the left operand of a product."""
    twice = gl.join(pairs, pairs)
    if dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], gl.bfloat16, is_pure=False, pack=2)
    else:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], gl.float16, is_pure=False, pack=2)
    return gl.convert_layout(gl.reshape(p, [64, pairs.shape[1] * 2]), P, assert_trivial=True)


@gluon.jit
def _times(s, factor, INT8: gl.constexpr):
    """Scores times their factor: one for all, or with INT8 one for each row."""
    if INT8:
        return s * factor[:, None]
    else:  # noqa: RET505 (decided at compile time: one branch exists)
        return s * factor


@gluon.jit
def _sums(p, QUICK: gl.constexpr):
    """Of each row; QUICK == 2: of what each of the four threads that hold a row holds of it [64 4], which needs no
    exchange.
    """
    if QUICK == 2:
        return gl.sum(gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 4, 2]), 1), 2)
    else:  # noqa: RET505
        return gl.sum(p, 1)


@gluon.jit
def whole_sums(z, QUICK: gl.constexpr):
    """[64], of what `first_weights` and `next_weights` keep as sums"""
    if QUICK == 2:
        return gl.sum(z, 1)
    else:  # noqa: RET505
        return z


@gluon.jit
def first_weights(s, factor, QUICK: gl.constexpr, INT8: gl.constexpr):
    """Scores [64 keys] of a row's first tile -> weights, what they are relative to, their sum."""
    top = gl.max(s, 1) * factor
    if QUICK:
        m = gl.where(top == -float("inf"), 0.0, top + HEADROOM)
        shift = m
    else:
        m = top
        shift = gl.where(top == -float("inf"), 0.0, top)  # a row that has seen no valid key yet
    p = gl.exp2(_times(s, factor, INT8) - shift[:, None])
    return p, m, _sums(p, QUICK)


@gluon.jit
def next_weights(s, m, z, factor, QUICK: gl.constexpr, INT8: gl.constexpr):
    """The same for a later tile, and by how much the sums before it shrink (QUICK: not at all)."""
    if QUICK:
        p = gl.exp2(_times(s, factor, INT8) - m[:, None])
        return p, m, z + _sums(p, QUICK), m
    else:  # noqa: RET505
        top = gl.max(s, 1) * factor
        top = gl.where(top - m > LAG, top, m)
        shift = gl.where(top == -float("inf"), 0.0, top)
        p = gl.exp2(_times(s, factor, INT8) - shift[:, None])
        decay = gl.exp2(m - shift)
        return p, top, z * decay + gl.sum(p, 1), decay


@gluon.jit
def is_lost(z):
    """Whether quick weights may have left the range in which they are precise. Also true of NaN, and where no key was
    valid.
    """
    return ((z >= SMALLEST_SUM) & (z <= LARGEST_SUM)) == 0


@gluon.jit
def join_sums(m, z, m_other, z_other, QUICK: gl.constexpr):
    """Sums of two warpgroups over the same rows -> what each is multiplied by, what the joined sum is relative to, the
    joined sum.
    """
    if QUICK:
        # a reference is no maximum: only with its sum does it tell which of the two is large, and 2^-126 is where
        # factors are flushed to zero
        top = gl.maximum(m + gl.log2(z), m_other + gl.log2(z_other))
        shift = top
    else:
        top = gl.maximum(m, m_other)
        shift = gl.where(top == -float("inf"), 0.0, top)
    mine = gl.exp2(m - shift)
    other = gl.exp2(m_other - shift)
    joined = z * mine + z_other * other
    if QUICK:
        joined = gl.where(is_lost(z) | is_lost(z_other), float("inf"), joined)
    return mine, other, top, joined


@gluon.jit
def add_bias(s, slot, factor, unit, KEYS: gl.constexpr, INT8: gl.constexpr, S: gl.constexpr):
    """Scores [64 keys] plus the bias that came with the keys [1 keys]: -inf beyond the valid rows of tails, log(n) of
    stand-ins.
    """
    bias = reinterpret(slot, gl.float32, [KEYS], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
    bias = bias.load(gl.SliceLayout(0, S))[None, :]
    if INT8:  # whole numbers are multiplied by `factor` next, a bias was made for `unit`
        bias = bias * (unit / factor)[:, None]
    return s + bias


@gluon.jit
def steps_of_rows(q_steps, head, row, n, S: gl.constexpr):
    """What 1 in each of the 64 rows of a warpgroup stands for [64]; rows past the head's end are not stored, so they
    take its last.
    """
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    return gl.load(q_steps + head.to(gl.int64) * n + gl.minimum(row + i, n - 1))
