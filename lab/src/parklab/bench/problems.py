"""What the GPU benchmarks run on: the paper's shapes, uneven blocks, clustered tokens."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from parkattn.models import SIZES
from parkattn.park import ParkConfig
from parkattn.plan import Blocks, Plan, cut_blocks


class Shape(NamedTuple):
    heads: int
    tokens: int
    query_blocks: int
    key_blocks: int
    dim: int = 128

    def flops(self, density: float = 1.0) -> float:
        """Of attention over this share of the token pairs."""
        return 4 * self.heads * self.tokens**2 * self.dim * density


def paper_shape(model: str) -> Shape:
    """One layer's attention over the video that the paper makes with the model, text aside."""
    size = SIZES[model]
    tokens = size.tokens(*size.video)
    counts = ParkConfig.preset(model).counts(tokens, tokens)
    return Shape(size.heads, tokens, counts.queries, counts.keys, size.head_dim)


WAN_14B, WAN_1_3B, HUNYUAN = map(paper_shape, ("wan2.1-14b", "wan2.1-1.3b", "hunyuanvideo"))
TINY = Shape(2, 96, 4, 8, 64)  # a rehearsal under the interpreter


def offsets(
    bh: int, tokens: int, blocks: int, device: torch.device, *, seed: int = 0, empty: bool = False, multiple: int = 1
) -> Tensor:
    """int32 [bh blocks+1]: sizes in proportion to gamma(2) draws; with `empty` every fourth block of the first half is
    empty.

    multiple: borders are rounded to it, as `parkattn.ops.cluster.borders` does.
    """
    g = torch.Generator().manual_seed(seed)
    weight = torch._standard_gamma(torch.full((bh, blocks), 2.0), generator=g).double()
    if empty:
        weight[:, 1 : blocks // 2 : 4] = 0
    ends = weight.cumsum(1) / weight.sum(1, keepdim=True) * tokens
    ends = (ends / multiple).round().mul(multiple).clamp(max=tokens)
    ends[:, -1] = tokens
    return torch.nn.functional.pad(ends, (1, 0)).int().to(device)


def random_plan(
    shape: Shape, density: float, device: torch.device, *,
    seed: int = 0, empty: bool = False, multiples: tuple[int, int] = (1, 1),
) -> Plan:  # fmt: skip
    """A plan with uneven blocks, random orders and a random mask that leaves no query block without keys.

    multiples: where the borders of query and of key blocks lie.
    """
    h, n, qb, kb = shape[:4]
    g = torch.Generator().manual_seed(seed)

    def blocks(count: int, which: int) -> Blocks:
        ends = offsets(h, n, count, device, seed=seed + which, empty=empty, multiple=multiples[which - 1])
        order = torch.stack([torch.randperm(n, device=device) for _ in range(h)])
        names = torch.arange(count, device=device, dtype=torch.int32)
        by_position = torch.stack([names.repeat_interleave(row.diff()) for row in ends])
        labels = torch.empty_like(by_position).scatter_(1, order, by_position)
        return Blocks(labels[None], order.int()[None], ends[None])

    queries, keys = blocks(qb, 1), blocks(kb, 2)
    mask = torch.rand(1, h, qb, kb, generator=g) < density
    mask[..., -1] |= ~mask.any(-1)
    return Plan(queries, keys, mask.to(device), qb, kb, estimated_mass=torch.ones(1, h, device=device))


def tiled_plan(plan: Plan, size: int, *, apart: bool) -> Plan:
    """The plan with query blocks in tiles, which keep what their block keeps or, with `apart`, as many others, each its
    own.
    """
    queries, block = cut_blocks(plan.queries, plan.query_clusters, size)
    tiles, kb = block.shape[-1], plan.mask.shape[-1]
    kept = plan.mask.gather(2, block.long().unsqueeze(-1).expand(-1, -1, -1, kb))
    if apart:
        # a stride that has no factor in common with the number of blocks, which is a power of two in the paper
        places, strides = (torch.arange(count, device=kept.device) for count in (kb, tiles))
        kept = kept.gather(-1, ((places + 37 * strides.unsqueeze(-1)) % kb).expand_as(kept))
    return dataclasses.replace(plan, queries=queries, mask=kept, query_clusters=tiles)


def rows(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1 h n d] as views of [1 n h d] memory, as models have them."""
    memory = 1, shape.tokens, shape.heads, shape.dim
    q, k, v = (torch.randn(memory, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    return q, k, v


def mixture(shape: Shape, centres: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Tokens around uneven centres with a large offset common to a head, as keys have; [1 h n d] as a view of [1 n h
    d].
    """
    h, n, d = shape.heads, shape.tokens, shape.dim
    centre = torch.randn(h, centres, d, device=device)
    which = torch.multinomial(torch.randn(h, centres, device=device).exp(), n, replacement=True)
    x = torch.empty(1, n, h, d, device=device, dtype=dtype)
    for i in range(h):
        x[0, :, i] = (centre[i, which[i]] + 0.7 * torch.randn(n, d, device=device) + 2 * centre[i, :1]).to(dtype)
    return x.transpose(1, 2)
