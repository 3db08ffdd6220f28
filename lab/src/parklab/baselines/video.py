"""The video tokens of a call: runs of them in sequence order, the cells of the grid they fill, a row's best blocks.

Text and padding are in no run and in no cell's block: `plan.Roles` gives them blocks of their own. Nothing here asks
the device for a value, so planning never waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parkattn.ops import Backend, cluster
from parkattn.plan import Blocks, Plan, Roles, assign_roles, tiles
from parkattn.segments import compute_dtype
from parkattn.site import CallSite

HEADS_AT_ONCE = 8  # bounds the float32 copies of queries and keys that planning makes


@dataclass(frozen=True)
class Runs:
    """One side's video tokens, numbered in sequence order, in blocks of `size`; the last one may be shorter."""

    size: int
    count: int  # blocks; where a batch element has padding its last ones may be empty
    members: Tensor  # [b] int64: video tokens of each batch element
    labels: Tensor | None  # [b 1 n] int32: each token's block, `count` outside the video; None: every token is video
    order: Tensor | None  # [b n] int64: tokens, those of the video first; None: every token is video

    @property
    def sizes(self) -> Tensor:
        """[b 1 count] int64"""
        first = torch.arange(self.count, device=self.members.device) * self.size
        return (self.members.view(-1, 1, 1) - first).clamp(0, self.size)

    @property
    def occupied(self) -> Tensor:
        """[b 1 count size 1] bool: places that hold a token."""
        return (torch.arange(self.size, device=self.members.device) < self.sizes.unsqueeze(-1)).unsqueeze(-1)

    def gather(self, x: Tensor) -> Tensor:
        """x [b h n d] -> [b h count size d], zero where a block has no token."""
        b, h, n, d = x.shape
        places = self.count * self.size
        if self.order is not None:
            x = x.gather(2, self.order[:, None, :places, None].expand(b, h, -1, d))
        x = torch.nn.functional.pad(x, (0, 0, 0, max(0, places - n))).view(b, h, self.count, self.size, d)
        return x if self.order is None else torch.where(self.occupied, x, 0)

    def means(self, x: Tensor) -> Tensor:
        """Mean of each block of x [b h n d], 0 where it is empty: [b h count d] in float32 (float64 for float64)."""
        dtype, sizes = compute_dtype(x.dtype), self.sizes.clamp(min=1).unsqueeze(-1)
        return torch.cat([self.gather(heads).sum(3, dtype=dtype) / sizes for heads in x.split(HEADS_AT_ONCE, 1)], 1)

    def query_blocks(self, q: Tensor, roles: Roles, backend: Backend) -> Blocks:
        if self.labels is None:
            return tiles(q, self.size)
        return for_all_heads(cluster.arrange(backend, *roles.query_blocks(self.labels, self.count)), q)

    def key_blocks(self, k: Tensor, roles: Roles, backend: Backend) -> Blocks:
        if self.labels is None:
            return tiles(k, self.size)
        return for_all_heads(cluster.arrange(backend, *roles.key_blocks(self.labels, self.count)), k)


def cut_runs(x: Tensor, video: Tensor | None, size: int, site: CallSite) -> Runs:
    """The runs of x [b h n d]; video [b n] is False on text and padding, None: every token is video."""
    b, n = x.shape[0], x.shape[2]
    if video is None:
        return Runs(size, -(-n // size), torch.full((b,), n, device=x.device), None, None)
    # as many blocks as without padding: how much of it there is only the device knows
    count = -(-(n - site.text_tokens) // size)
    labels = torch.where(video, (video.cumsum(-1) - 1) // size, count).to(torch.int32)
    return Runs(size, count, video.sum(-1), labels.unsqueeze(1), (~video).to(torch.uint8).argsort(dim=-1, stable=True))


@dataclass(frozen=True)
class TwoSides:
    """A call whose queries and keys are in runs: what SpargeAttn, XAttention and Sol-Attn score."""

    q: Tensor
    k: Tensor
    queries: Runs
    keys: Runs
    roles: Roles
    scale: float

    def plan(self, mask: Tensor, backend: Backend, estimated_mass: Tensor | None = None) -> Plan:
        """The plan of a mask [b h qb kb] over runs; key runs without a token are taken off."""
        return Plan(
            self.queries.query_blocks(self.q, self.roles, backend),
            self.keys.key_blocks(self.k, self.roles, backend),
            self.roles.extend(mask & (self.keys.sizes > 0).unsqueeze(-2)),
            self.queries.count,
            self.keys.count,
            padding=self.roles.key_valid is not None,
            estimated_mass=estimated_mass,
        )


def cut_both_sides(q: Tensor, k: Tensor, site: CallSite, query_size: int, key_size: int) -> TwoSides:
    roles = assign_roles(q, k, site.text, site.key_valid)
    queries = cut_runs(q, roles.clustered_queries, query_size, site)
    keys = cut_runs(k, roles.clustered_keys, key_size, site)
    return TwoSides(q, k, queries, keys, roles, q.shape[-1] ** -0.5 if site.scale is None else site.scale)


def for_all_heads(blocks: Blocks, like: Tensor) -> Blocks:
    """Blocks of [1 or b, 1 or h] as blocks of every head of like [b h n d], without a copy."""
    b, h = like.shape[:2]
    order = None if blocks.order is None else blocks.order.expand(b, h, -1)
    return Blocks(blocks.labels.expand(b, h, -1), order, blocks.offsets.expand(b, h, -1))


def expect_grid(q: Tensor, k: Tensor, site: CallSite) -> tuple[int, int, int]:
    """(frames, height, width) of a call whose tokens outside the text are the cells of the grid, frame by frame."""
    if site.grid is None:
        raise ValueError("grid: expected (frames, height, width) of the video, got None; pass it in the CallSite.")
    frames, height, width = site.grid
    n, m = q.shape[2], k.shape[2]
    cells = n - site.text_tokens
    if n != m:
        raise ValueError(f"k: expected {n} keys as there are queries, got {m}; use dense attention for this call.")
    if frames * height * width != cells:
        got = f"{frames} * {height} * {width}"
        raise ValueError(f"grid: expected {cells} cells, the tokens outside the text, got {got}; count after patching.")
    return frames, height, width


def arrange_queries(of_cell: Tensor, count: int, q: Tensor, site: CallSite, roles: Roles, backend: Backend) -> Blocks:
    """Query blocks from the block of each cell [1 or b, 1 or h, cells]; cells that are padding leave their block."""
    labels = _label_tokens(of_cell, count, site, roles.clustered_queries)
    return for_all_heads(cluster.arrange(backend, *roles.query_blocks(labels, count)), q)


def arrange_keys(of_cell: Tensor, count: int, k: Tensor, site: CallSite, roles: Roles, backend: Backend) -> Blocks:
    """Key blocks from the block of each cell [1 or b, 1 or h, cells]; cells that are padding leave their block."""
    labels = _label_tokens(of_cell, count, site, roles.clustered_keys)
    return for_all_heads(cluster.arrange(backend, *roles.key_blocks(labels, count)), k)


def _label_tokens(of_cell: Tensor, count: int, site: CallSite, video: Tensor | None) -> Tensor:
    """[.. cells] -> [.. n] int32, `count` outside the video."""
    labels = of_cell.to(torch.int32)
    if words := site.text_tokens:
        assert site.text is not None
        text = labels.new_full((*labels.shape[:-1], words), count)
        labels = torch.cat([labels[..., : site.text.start], text, labels[..., site.text.start :]], -1)
    return labels if video is None else torch.where(video.unsqueeze(1), labels, count).to(torch.int32)


def keep_best(scores: Tensor, counts: Tensor, occupied: Tensor) -> Tensor:
    """The `counts` [b 1 1 1] best of each row's occupied [b 1 1 kb] blocks, ties to the lower index: [b h qb kb]"""
    order = scores.masked_fill(~occupied, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    keep = (ranks < counts).expand(scores.shape)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, keep) & occupied
