"""Putting the tokens of a block next to each other, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from parkattn.plan import Blocks
from parkattn.segments import segment_sizes


def arrange(labels: Tensor, count: int) -> Blocks:
    """Blocks from labels [b h n] in [0, count): stable, so tokens keep their order inside a block."""
    order = labels.argsort(dim=-1, stable=True).to(torch.int32)
    ends = segment_sizes(labels, count).cumsum(-1, dtype=torch.int32)
    return Blocks(labels.to(torch.int32), order, torch.nn.functional.pad(ends, (1, 0)))


def gather(x: Tensor, blocks: Blocks) -> Tensor:
    """x [b h n d] in block order."""
    return x.reshape(-1, x.shape[-1]).index_select(0, _rows(blocks)).view_as(x)


def scatter(x: Tensor, blocks: Blocks) -> Tensor:
    """The exact inverse of gather."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.empty_like(flat).index_copy_(0, _rows(blocks), flat).view_as(x)


def _rows(blocks: Blocks) -> Tensor:
    """[b*h*n]: the order of every head as rows of the flattened tensor."""
    b, h, n = blocks.order.shape
    return (blocks.order + torch.arange(b * h, device=blocks.order.device).view(b, h, 1) * n).flatten()
