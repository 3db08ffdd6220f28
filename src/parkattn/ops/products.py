"""The matrix product of the Triton kernels."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc=None):
    """acc + a b. The interpreter multiplies bf16 as raw bits, so it gets float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def dot_int8(a, b):
    """a b of whole numbers, in int32. The interpreter's product is of floats, exact below 2^24: 127 * 127 * d is."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(tl.int32)
    return tl.dot(a, b, out_dtype=tl.int32)
