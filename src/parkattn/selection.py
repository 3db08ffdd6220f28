"""Which key blocks a query block keeps, from estimated importance [b h qb kb] to a bool mask of the same shape.

Sums are float32: in bfloat16 a running sum over a flat row stops growing and everything is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_fraction


def select_top_p(importance: Tensor, p: float, *, sizes: Tensor | None = None, floor: float = 0.0, crossing: str = "include") -> Tensor:
    """Keep blocks in descending importance until their mass reaches p; the block that crosses p is kept (or, as some
    baselines do, dropped with crossing="exclude"). p = 1 keeps every non-empty block.

    sizes [b h kb] marks empty blocks, which are never kept; floor keeps at least that share of the non-empty ones.
    """
    expect_fraction("p", p, zero=False)
    expect_fraction("floor", floor, zero=True)
    expect_choice("crossing", crossing, ("include", "exclude"))
    occupied = _occupied(importance, sizes)
    ranked, order = _rank(importance, occupied)
    mass = ranked.clamp(min=0).cumsum(-1)
    before = torch.nn.functional.pad(mass, (1, 0))[..., :-1]
    # written as "not reached" so that a NaN row keeps everything and shows as NaN in the output, as in dense attention
    keep = ~(before >= p) if crossing == "include" else ~(mass > p)
    keep[..., 0] = True
    if p == 1:
        keep[:] = True
    if floor > 0:
        keep |= _first(keep, _share(occupied, floor))
    return _unrank(keep, order, occupied, importance)


def select_top_k(importance: Tensor, ratio: float, *, sizes: Tensor | None = None) -> Tensor:
    """Keep the ceil(ratio * non-empty blocks) most important blocks, at least one."""
    expect_fraction("ratio", ratio, zero=False)
    occupied = _occupied(importance, sizes)
    ranked, order = _rank(importance, occupied)
    return _unrank(_first(ranked, _share(occupied, ratio)), order, occupied, importance)


def kept_mass(importance: Tensor, mask: Tensor, query_sizes: Tensor) -> Tensor:
    """Share of the importance that a mask keeps, mean over query tokens: [b h qb kb], [b h qb] -> [b h]"""
    rows = query_sizes.to(importance.dtype)
    return (((importance * mask).sum(-1) * rows).sum(-1) / rows.sum(-1)).float()


def _occupied(importance: Tensor, sizes: Tensor | None) -> Tensor:
    """[b h 1 kb] bool"""
    return torch.ones_like(importance[..., :1, :], dtype=torch.bool) if sizes is None else (sizes > 0).unsqueeze(-2)


def _rank(importance: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Descending importance and the block at each rank; empty blocks last, ties to the lower index."""
    return importance.float().masked_fill(~occupied, -1.0).sort(dim=-1, descending=True, stable=True)


def _share(occupied: Tensor, ratio: float) -> Tensor:
    """ceil(ratio * non-empty blocks) [b h 1 1], at least 1."""
    counts = occupied.sum(-1, keepdim=True)
    # 0.1 * 30 must be 3, not the 4 that the binary 0.1 rounds up to
    return (counts.double() * ratio - 1e-9).ceil().clamp(min=1)


def _first(like: Tensor, count: Tensor) -> Tensor:
    return (torch.arange(like.shape[-1], device=like.device) < count).expand(like.shape)


def _unrank(keep: Tensor, order: Tensor, occupied: Tensor, importance: Tensor) -> Tensor:
    mask = torch.zeros_like(keep).scatter_(-1, order, keep)
    has_queries = ~(importance.sum(-1, keepdim=True) == 0)
    return mask & occupied & has_queries
