"""Parts of attention merged into the dense output and its residual, a low rank added to an output: one pass each.

The definitions are `merge` and `add_residual` of `definition.py`.
"""

import torch
import triton
import triton.language as tl

from .. import tiles
from ..products import dot
from ..triton_versions import FP_FUSION

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off


@triton.jit
def _weights(first, second):
    """exp(first - lse) and exp(second - lse) with lse = log(exp(first) + exp(second)); 0 and 0 where both are -inf."""
    top = tl.maximum(first, second)
    shift = tl.where(top == -float("inf"), 0.0, top)
    one = tl.exp(first - shift)
    two = tl.exp(second - shift)
    inverse = tl.where(one + two > 0, 1.0 / (one + two), 0.0)
    return one * inverse, two * inverse


@triton.jit
def _merge_parts(kept, skipped, stand_ins, kept_lse, skipped_lse, stand_ins_lse, dense, residual, heads, n,
                 stride_b, stride_h, stride_n, D: tl.constexpr, ROWS: tl.constexpr, STAND_INS: tl.constexpr):
    """dense = kept and skipped keys merged; residual = dense - sparse, with sparse = kept keys,
    merged with stand-ins where there are some.

    Grid (row tiles, b*h).  Traffic: 4 n d elements per head, 5 with stand-ins.
    """
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    head = (bh // heads) * stride_b + (bh % heads) * stride_h
    at = head + i.to(tl.int64)[:, None] * stride_n + tl.arange(0, D)[None, :]
    line = bh * n + i
    lse = tl.load(kept_lse + line, mask=live, other=0.0)
    kept_weight, skipped_weight = _weights(lse, tl.load(skipped_lse + line, mask=live, other=0.0))
    mine = tl.load(kept + at, mask=live[:, None], other=0.0).to(tl.float32)
    other = tl.load(skipped + at, mask=live[:, None], other=0.0).to(tl.float32)
    whole = mine * kept_weight[:, None] + other * skipped_weight[:, None]
    tl.store(dense + at, whole.to(dense.dtype.element_ty), mask=live[:, None])
    sparse = mine
    if STAND_INS:
        kept_weight, weight = _weights(lse, tl.load(stand_ins_lse + line, mask=live, other=0.0))
        stand_in = tl.load(stand_ins + at, mask=live[:, None], other=0.0).to(tl.float32)
        sparse = mine * kept_weight[:, None] + stand_in * weight[:, None]
    tl.store(residual + at, (whole - sparse).to(residual.dtype.element_ty), mask=live[:, None])


@triton.jit
def _add_low_rank(out, a, step, b, heads, n, stride_b, stride_h, stride_n, D: tl.constexpr, RANK: tl.constexpr,
                  WIDTH: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """out[i, :] += sum_c a[i, c] step[c] b[c, :], a matrix product: a is exact in bf16, step b the sum of two bf16
    numbers.

    WIDTH: RANK as wide as a product takes.  Grid (STEPS row tiles, b*h).  Traffic: 2 n d elements and n RANK bytes per
    head.
    """
    bh = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)
    c = tl.arange(0, WIDTH)
    used = c < RANK
    direction = tl.load(b + (bh * RANK + c)[:, None] * D + column[None, :], mask=used[:, None], other=0.0)
    direction *= tl.load(step + bh * RANK + c, mask=used, other=0.0)[:, None]
    high = direction.to(tl.bfloat16)
    low = (direction - high.to(tl.float32)).to(tl.bfloat16)
    head = (bh // heads) * stride_b + (bh % heads) * stride_h
    for tile in range(STEPS):
        i = (tl.program_id(0) * STEPS + tile) * ROWS + tl.arange(0, ROWS)
        live = i < n
        share = tl.load(a + (bh * n + i)[:, None] * RANK + c[None, :], mask=live[:, None] & used[None, :], other=0)
        share = share.to(tl.float32).to(tl.bfloat16)  # not in one step, which the interpreter gets wrong
        target = out + head + i.to(tl.int64)[:, None] * stride_n + column[None, :]
        total = tl.load(target, mask=live[:, None], other=0.0).to(tl.float32) + dot(share, low, dot(share, high))
        tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None])


Part = tuple[torch.Tensor, torch.Tensor]


def merge_parts(kept: Part, skipped: Part, stand_ins: Part | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b h n d], lse fp32 [b*h n]) of the kept keys, of the skipped ones and of the stand-ins of the latter
    -> dense attention, and what of it sparse attention misses.  The parts have equal strides."""
    (out, kept_lse), (other, skipped_lse), (extra, extra_lse) = kept, skipped, kept if stand_ins is None else stand_ins
    b, h, n, d = out.shape
    tiles.check_rows(out, "out")
    if not out.stride() == other.stride() == extra.stride():
        found = f"{out.stride()}, {other.stride()} and {extra.stride()}"
        raise ValueError(f"out: expected parts of equal strides, got {found}; copy them.")
    dense, residual = torch.empty_like(out), torch.empty_like(out)
    tile = tiles.residual_tile(d)
    _merge_parts[(triton.cdiv(n, tile["ROWS"]), b * h)](
        out, other, extra, kept_lse, skipped_lse, extra_lse, dense, residual, h, n, *out.stride()[:3], D=d,
        STAND_INS=stand_ins is not None, **tile, **FP_FUSION,
    )
    return dense, residual


def add_low_rank(out: torch.Tensor, a: torch.Tensor, step: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """out [b h n d] (any strides, last one 1) += A B, in place.

    a int8 [b h n r], step fp32 [b h r], b fp32 [b h r d], contiguous.
    """
    tiles.check_rows(out, "out")
    if not (a.is_contiguous() and step.is_contiguous() and b.is_contiguous()):
        raise ValueError("a, step, b: expected contiguous tensors; call .contiguous()")
    batch, h, n, d = out.shape
    rank, tile = a.shape[-1], tiles.low_rank_tile(d)
    _add_low_rank[(triton.cdiv(n, tile["ROWS"] * tile["STEPS"]), batch * h)](
        out, a, step, b, h, n, *out.stride()[:3], D=d, RANK=rank, WIDTH=tiles.product_width(rank), **tile, **FP_FUSION,
    )
    return out
