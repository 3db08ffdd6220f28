"""Tokens in block order, and back: a permutation of rows, by index."""

from __future__ import annotations

import torch
from torch import Tensor

from parkattn.plan import Blocks


def gather(x: Tensor, blocks: Blocks) -> Tensor:
    """x [b h n d] in block order."""
    if blocks.order is None:
        return x
    return x.reshape(-1, x.shape[-1]).index_select(0, _rows(blocks.order)).view_as(x)


def scatter(x: Tensor, blocks: Blocks) -> Tensor:
    """The exact inverse of gather."""
    if blocks.order is None:
        return x
    flat = x.reshape(-1, x.shape[-1])
    return torch.empty_like(flat).index_copy_(0, _rows(blocks.order), flat).view_as(x)


def _rows(order: Tensor) -> Tensor:
    """[b*h*n]: the order of every head as rows of the flattened tensor."""
    b, h, n = order.shape
    return (order + torch.arange(b * h, device=order.device).view(b, h, 1) * n).flatten()
