"""Rows into block order and back: one read and one write of each row, no index tensor wider than int32."""

import torch
import triton
import triton.language as tl

from . import tiles_retrieval as tiles

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off


@triton.jit
def _gather_rows(x, order, out, heads, n, xb, xh, xn, D: tl.constexpr, ROWS: tl.constexpr):
    """out[bh, i, :] = x[b, h, order[bh, i], :].  Grid (row tiles, b*h).  Traffic: 2 n d elements + 4 n bytes per head."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    token = tl.load(order + bh * n + i, mask=live, other=0).to(tl.int64)
    column = tl.arange(0, D)
    source = x + (bh // heads) * xb + (bh % heads) * xh + token[:, None] * xn + column[None, :]
    row = tl.load(source, mask=live[:, None], other=0.0)
    tl.store(out + (bh * n + i.to(tl.int64))[:, None] * D + column[None, :], row, mask=live[:, None])


@triton.jit
def _scatter_rows(x, order, out, heads, n, ob, oh, on, D: tl.constexpr, ROWS: tl.constexpr):
    """out[b, h, order[bh, i], :] = x[bh, i, :].  Grid (row tiles, b*h).  Traffic: 2 n d elements + 4 n bytes per head."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    token = tl.load(order + bh * n + i, mask=live, other=0).to(tl.int64)
    column = tl.arange(0, D)
    row = tl.load(x + (bh * n + i.to(tl.int64))[:, None] * D + column[None, :], mask=live[:, None], other=0.0)
    target = out + (bh // heads) * ob + (bh % heads) * oh + token[:, None] * on + column[None, :]
    tl.store(target, row, mask=live[:, None])


def gather_rows(x: torch.Tensor, order: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [b h n d] (any strides, last one 1), order int32 [b h n] -> [b*h n d] contiguous, token order[i] at row i."""
    b, h, n, d = x.shape
    tiles.check_rows(x, "x")
    if out is None:
        out = torch.empty(b * h, n, d, device=x.device, dtype=x.dtype)
    tile = tiles.permute_tile(d, x.dtype, tiles.arch_of(x))
    grid = (triton.cdiv(n, tile["ROWS"]), b * h)
    _gather_rows[grid](x, order, out, h, n, x.stride(0), x.stride(1), x.stride(2), D=d, **tile)
    return out


def scatter_rows(x: torch.Tensor, order: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [b*h n d] contiguous in block order, order int32 [b h n] -> [b h n d]: the exact inverse of `gather_rows`."""
    b, h, n = order.shape
    d = x.shape[-1]
    if out is None:
        out = torch.empty(b, h, n, d, device=x.device, dtype=x.dtype)
    tiles.check_rows(out, "out")
    tile = tiles.permute_tile(d, x.dtype, tiles.arch_of(x))
    grid = (triton.cdiv(n, tile["ROWS"]), b * h)
    _scatter_rows[grid](x, order, out, h, n, out.stride(0), out.stride(1), out.stride(2), D=d, **tile)
    return out
