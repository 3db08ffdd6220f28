"""Rows into block order and back: one read and one write of each row, no index tensor wider than int32.

On the way q and k can be rounded to INT8 (`attend.Rounding` is the definition): turned by the Hadamard matrix of signs,
keys without their mean, then divided by a step.
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
def _gather_rows(x, order, out, heads, n, xb, xh, xn, ORDERED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """out[bh, i, :] = x[b, h, order[bh, i], :], of row i itself where not ORDERED.

    Grid (row tiles, b*h).  Traffic: 2 n d elements + 4 n bytes per head.
    """
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    token = i.to(tl.int64)
    if ORDERED:
        token = tl.load(order + bh * n + i, mask=live, other=0).to(tl.int64)
    column = tl.arange(0, D)
    source = x + (bh // heads) * xb + (bh % heads) * xh + token[:, None] * xn + column[None, :]
    row = tl.load(source, mask=live[:, None], other=0.0)
    tl.store(out + (bh * n + i.to(tl.int64))[:, None] * D + column[None, :], row, mask=live[:, None])


@triton.jit
def _scatter_rows(x, order, out, heads, n, ob, oh, on, D: tl.constexpr, ROWS: tl.constexpr):
    """out[b, h, order[bh, i], :] = x[bh, i, :].  Grid (row tiles, b*h).
     Traffic: 2 n d elements + 4 n bytes per head.
    """
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    token = tl.load(order + bh * n + i, mask=live, other=0).to(tl.int64)
    column = tl.arange(0, D)
    row = tl.load(x + (bh * n + i.to(tl.int64))[:, None] * D + column[None, :], mask=live[:, None], other=0.0)
    target = out + (bh // heads) * ob + (bh % heads) * oh + token[:, None] * on + column[None, :]
    tl.store(target, row, mask=live[:, None])


@triton.jit
def _signs(D: tl.constexpr, dtype: tl.constexpr):
    """The Hadamard matrix [D D]: -1 where i and j have an odd number of bits in common."""
    i = tl.arange(0, D)
    common = i[:, None] & i[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float32).to(dtype)


@triton.jit
def _nearest(x, inverse):
    """Whole numbers of steps; inverse: of a step."""
    return tl.floor(x * inverse + 0.5).to(tl.int8)


@triton.jit
def _key_range(k, partial, heads, n, kb, kh, kn, D: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr):
    """Sum, largest and least of each column of turned rows.  Grid (parts, b*h), TURNS * ROWS rows each.
     Traffic: n d elements per head.
    """
    bh = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)
    signs = _signs(D, k.dtype.element_ty)
    k += (bh // heads) * kb + (bh % heads) * kh
    total = tl.zeros([ROWS, D], tl.float32)
    most = tl.full([ROWS, D], -float("inf"), tl.float32)
    least = tl.full([ROWS, D], float("inf"), tl.float32)
    for turn in range(TURNS):
        i = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        live = (i < n)[:, None]
        row = dot(tl.load(k + i.to(tl.int64)[:, None] * kn + column[None, :], mask=live, other=0.0), signs)
        total += row
        most = tl.maximum(most, tl.where(live, row, -float("inf")))
        least = tl.minimum(least, tl.where(live, row, float("inf")))
    part = partial + (bh * tl.num_programs(0) + tl.program_id(0)) * 3 * D + column
    tl.store(part, tl.sum(total, 0))
    tl.store(part + D, tl.max(most, 0))
    tl.store(part + 2 * D, tl.min(least, 0))


@triton.jit
def _key_step(partial, means, steps, n, parts, D: tl.constexpr, LANES: tl.constexpr):
    """The parts of `_key_range` -> the mean of the turned keys of a head and their step.  Grid (b*h)."""
    bh = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    total = tl.zeros([LANES, D], tl.float32)
    most = tl.full([LANES, D], -float("inf"), tl.float32)
    least = tl.full([LANES, D], float("inf"), tl.float32)
    for i in range(0, parts, LANES):
        part = i + tl.arange(0, LANES)
        live = (part < parts)[:, None]
        at = partial + (bh * parts + part)[:, None] * (3 * D) + column[None, :]
        total += tl.load(at, mask=live, other=0.0)
        most = tl.maximum(most, tl.load(at + D, mask=live, other=-float("inf")))
        least = tl.minimum(least, tl.load(at + 2 * D, mask=live, other=float("inf")))
    mean = tl.sum(total, 0) / n
    reach = tl.max(tl.maximum(tl.max(most, 0) - mean, mean - tl.min(least, 0)), 0)
    tl.store(means + bh * D + column, mean)
    # what is not finite shows in the mean, which maxima pass over
    tl.store(steps + bh, tl.maximum(reach, 1e-12) / 127.0 + tl.sum(mean * 0.0, 0))


@triton.jit
def _round_rows(x, order, out, steps, mean, heads, n, xb, xh, xn, ORDERED: tl.constexpr, KEYS: tl.constexpr,
                D: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr):
    """`_gather_rows` in INT8: KEYS without their mean by the step of their head, queries by a step for each row, which
    is stored.

    Grid (parts, b*h), TURNS * ROWS rows each.  Traffic: 1.5 n d elements + 8 n bytes per head.
    """
    bh = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)
    signs = _signs(D, x.dtype.element_ty)
    x += (bh // heads) * xb + (bh % heads) * xh
    for turn in range(TURNS):
        i = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        live = i < n
        token = i.to(tl.int64)
        if ORDERED:
            token = tl.load(order + bh * n + i, mask=live, other=0).to(tl.int64)
        row = dot(tl.load(x + token[:, None] * xn + column[None, :], mask=live[:, None], other=0.0), signs)
        if KEYS:
            rounded = _nearest(row - tl.load(mean + bh * D + column)[None, :], 1.0 / tl.load(steps + bh))
        else:
            # what is not finite makes its row's step NaN
            step = tl.maximum(tl.max(tl.abs(row), 1), 1e-12) / 127.0 + tl.sum(row * 0.0, 1)
            tl.store(steps + bh * n + i, step, mask=live)
            rounded = _nearest(row, (1.0 / step)[:, None])
        tl.store(out + (bh * n + i.to(tl.int64))[:, None] * D + column[None, :], rounded, mask=live[:, None])


@triton.jit
def _gather_with_means(k, v, order, offsets, keys, values, key_means, value_means, mean, steps, heads, n, count,
                       all_blocks, kb, kh, kn, vb, vh, vn, D: tl.constexpr, ROWS: tl.constexpr, INT8: tl.constexpr,
                       BLOCKS: tl.constexpr):
    """`_gather_rows` of two tensors by one order, and the means of their blocks: fp32 sums in block order, no second
    read. INT8: keys and their means as `_round_rows` has them.

    Grid (b*h * blocks / BLOCKS).  Traffic: 4 n d elements + 4 n bytes per head.
    """
    column = tl.arange(0, D)
    r = tl.arange(0, ROWS)
    if INT8:
        signs = _signs(D, k.dtype.element_ty)
    for i in range(tl.minimum(BLOCKS, all_blocks - tl.program_id(0) * BLOCKS)):
        block = tl.program_id(0) * BLOCKS + i
        bh = (block // count).to(tl.int64)
        at = offsets + bh * (count + 1) + block % count
        begin = tl.load(at)
        end = tl.load(at + 1)
        k_head = k + (bh // heads) * kb + (bh % heads) * kh
        v_head = v + (bh // heads) * vb + (bh % heads) * vh
        tokens = order + bh * n
        if INT8:
            centre = tl.load(mean + bh * D + column)[None, :]
            inverse = 1.0 / tl.load(steps + bh)
        key_sum = tl.zeros([ROWS, D], tl.float32)
        value_sum = tl.zeros([ROWS, D], tl.float32)
        # tokens are fetched one step early: the row loads depend on them
        token = tl.load(tokens + begin + r, mask=begin + r < end, other=0)
        for first in range(begin, end, ROWS):
            coming = tl.load(tokens + first + ROWS + r, mask=first + ROWS + r < end, other=0)
            live = (first + r < end)[:, None]
            key = tl.load(k_head + token.to(tl.int64)[:, None] * kn + column[None, :], mask=live, other=0.0)
            value = tl.load(v_head + token.to(tl.int64)[:, None] * vn + column[None, :], mask=live, other=0.0)
            target = (bh * n + first + r)[:, None] * D + column[None, :]
            if INT8:
                key = tl.where(live, dot(key, signs) - centre, 0.0)
                tl.store(keys + target, _nearest(key, inverse), mask=live)
            else:
                tl.store(keys + target, key, mask=live)
            tl.store(values + target, value, mask=live)
            key_sum += key.to(tl.float32)
            value_sum += value.to(tl.float32)
            token = coming
        size = tl.maximum(end - begin, 1).to(tl.float32)
        key_mean = tl.sum(key_sum, 0) / size
        place = block.to(tl.int64) * D + column
        if INT8:
            tl.store(key_means + place, _nearest(key_mean, inverse))
        else:
            tl.store(key_means + place, key_mean)
        tl.store(value_means + place, tl.sum(value_sum, 0) / size)


@triton.jit
def _block_means(x, offsets, means, heads, count, xb, xh, xn, D: tl.constexpr, ROWS: tl.constexpr):
    """The means of `_gather_with_means`, of rows that are in block order already.  Grid (b*h * blocks).
     Traffic: n d elements per head.
    """
    block = tl.program_id(0).to(tl.int64)
    bh = block // count
    at = offsets + bh * (count + 1) + block % count
    begin = tl.load(at)
    end = tl.load(at + 1)
    column = tl.arange(0, D)
    r = tl.arange(0, ROWS)
    x += (bh // heads) * xb + (bh % heads) * xh
    total = tl.zeros([ROWS, D], tl.float32)
    for first in range(begin, end, ROWS):
        token = (first + r).to(tl.int64)
        total += tl.load(x + token[:, None] * xn + column[None, :], mask=(first + r < end)[:, None],
                         other=0.0).to(tl.float32)
    tl.store(means + block * D + column, tl.sum(total, 0) / tl.maximum(end - begin, 1).to(tl.float32))


def block_means(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [b h n d] in block order, offsets int32 [b h c+1] from 0 to n -> the means of its blocks [b*h c d], 0 where
    empty, in x's dtype.
    """
    b, h, _, d = x.shape
    count = offsets.shape[-1] - 1
    tiles.check_rows(x, "x")
    means = torch.empty(b * h, count, d, device=x.device, dtype=x.dtype)
    tile = tiles.segment_tile(d, x.dtype, tiles.arch_of(x))
    _block_means[(b * h * count,)](x, offsets, means, h, count, x.stride(0), x.stride(1), x.stride(2), D=d, **tile,
                                   **FP_FUSION)
    return means


def gather_rows(x: torch.Tensor, order: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [b h n d] (any strides, last one 1), order int32 [b h n] -> [b*h n d] contiguous, token order[i] at row i.

    order None: tokens stay in order, and x itself is the result where it is contiguous.
    """
    b, h, n, d = x.shape
    tiles.check_rows(x, "x")
    if out is None and order is None and x.is_contiguous():
        return x.view(b * h, n, d)
    if out is None:
        out = torch.empty(b * h, n, d, device=x.device, dtype=x.dtype)
    tile = tiles.permute_tile(d, x.dtype, tiles.arch_of(x))
    grid = (triton.cdiv(n, tile["ROWS"]), b * h)
    _gather_rows[grid](x, x if order is None else order, out, h, n, x.stride(0), x.stride(1), x.stride(2),
                       ORDERED=order is not None, D=d, **tile, **FP_FUSION)
    return out


def key_rounding(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k [b h n d] -> the mean of its turned rows [b*h d], and the step [b*h] by which the largest entry beside it is
    127; NaN where k is not finite.
    """
    b, h, n, d = k.shape
    tiles.check_rows(k, "k")
    tile = tiles.key_range_tile(d)
    parts = triton.cdiv(n, tile["ROWS"] * tile["TURNS"])
    partial = torch.empty(b * h, parts, 3, d, device=k.device, dtype=torch.float32)
    _key_range[(parts, b * h)](k, partial, h, n, k.stride(0), k.stride(1), k.stride(2), D=d, **tile, **FP_FUSION)
    mean, step = (torch.empty(b * h, *width, device=k.device, dtype=torch.float32) for width in ((d,), ()))
    _key_step[(b * h,)](partial, mean, step, n, parts, D=d, LANES=16, num_warps=4, **FP_FUSION)
    return mean, step


def round_rows(x: torch.Tensor, order: torch.Tensor | None,
               keys: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [b h n d], order int32 [b h n] or None -> int8 [b*h n d] in that order and its steps: [b*h n], or with `keys`,
    what `key_rounding` gave, the [b*h] of these.
    """
    b, h, n, d = x.shape
    tiles.check_rows(x, "x")
    out = torch.empty(b * h, n, d, device=x.device, dtype=torch.int8)
    mean, steps = (out, torch.empty(b * h, n, device=x.device, dtype=torch.float32)) if keys is None else keys
    tile = tiles.rounding_tile(d)
    _round_rows[(triton.cdiv(n, tile["ROWS"] * tile["TURNS"]), b * h)](
        x, steps if order is None else order, out, steps, mean, h, n, x.stride(0), x.stride(1), x.stride(2),
        ORDERED=order is not None, KEYS=keys is not None, D=d, **tile, **FP_FUSION)
    return out, steps


def gather_with_means(k: torch.Tensor, v: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor,
                      rounding: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, ...]:
    """k, v [b h n d], order int32 [b h n], offsets int32 [b h c+1] from 0 to n -> keys, values [b*h n d] in block order
    and the means of their blocks [b*h c d], 0 where empty; all in k's dtype, keys and their means in INT8 with
    `rounding`, what `key_rounding` gave.
    """
    b, h, n, d = k.shape
    count = offsets.shape[-1] - 1
    tiles.check_rows(k, "k")
    tiles.check_rows(v, "v")
    kinds = (k.dtype if rounding is None else torch.int8, k.dtype)
    keys, values = (torch.empty(b * h, n, d, device=k.device, dtype=kind) for kind in kinds)
    means = tuple(torch.empty(b * h, count, d, device=k.device, dtype=kind) for kind in kinds)
    tile = tiles.segment_tile(d, k.dtype, tiles.arch_of(k))
    blocks = 1 if rounding is None else 4  # the matrix of signs is made once for so many
    _gather_with_means[(triton.cdiv(b * h * count, blocks),)](
        k, v, order, offsets, keys, values, *means, *(rounding or (order, order)), h, n, count, b * h * count,
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2), INT8=rounding is not None,
        BLOCKS=blocks, D=d, **tile, **FP_FUSION)
    return keys, values, *means


def scatter_rows(x: torch.Tensor, order: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [b*h n d] contiguous in block order, order int32 [b h n] -> [b h n d]: the exact inverse of `gather_rows`."""
    b, h, n = order.shape
    d = x.shape[-1]
    if out is None:
        out = torch.empty(b, h, n, d, device=x.device, dtype=x.dtype)
    tiles.check_rows(out, "out")
    tile = tiles.permute_tile(d, x.dtype, tiles.arch_of(x))
    grid = (triton.cdiv(n, tile["ROWS"]), b * h)
    _scatter_rows[grid](x, order, out, h, n, out.stride(0), out.stride(1), out.stride(2), D=d, **tile, **FP_FUSION)
    return out
