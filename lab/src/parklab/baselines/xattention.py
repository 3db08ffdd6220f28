"""XAttention (Xu et al., ICML 2025, arXiv 2503.16428): antidiagonals of small tiles stand for the attention of a block.

Groups a of `stride` consecutive video queries, b of as many keys; blocks u, v of 128 tokens; s the scale:
    Z_ab = s / (stride norm)  sum_t  q_{a stride + stride - 1 - t} . k_{b stride + t}       one antidiagonal of a tile
    A    = softmax over b of Z
    W_uv = sum of A over the groups of u and of v
    keep the leading blocks of row u until their sum of W reaches threshold * (row sum); the crossing block is kept

Defaults: block 128, stride 8, threshold 0.9 and 5 dense steps of 50 as in the authors' HunyuanVideo script, their only
setting for video (the bare call has threshold 0.8, and no setting for Wan exists); norm 1; a plan at every call.
keep_sink True: their option of that name is off, but in the branch without a causal mask an index of 0 stands for "not
chosen", so that the first key block is always kept.

Different from the authors' code, on purpose:
- text and padding have blocks of their own (always on, never on); theirs treats text as ordinary tokens at the end;
- places behind the last token are masked in the softmax (theirs take part with a score of 0); a last group with fewer
  tokens is filled with zeros, as theirs;
- products of half inputs stay in float32 (theirs are rounded); sums over blocks are float64, as theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parkattn.checks import expect_count, expect_flag, expect_fraction, expect_positive
from parkattn.ops.importance.definition import kept_mass
from parkattn.plan import Plan
from parkattn.segments import compute_dtype
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.video import Runs, cut_both_sides

SCORES_AT_ONCE = 2**24  # bounds the [query groups, key groups] scores: 64 MB in float32


@dataclass(frozen=True, kw_only=True)
class XAttentionConfig(StudiedConfig):
    """XAttention's settings under the authors' names."""

    threshold: float = 0.9
    """Keep key blocks until their estimated share of attention reaches this; 1 is dense."""
    stride: int = 8
    """Tokens per group: the score of a tile takes one in `stride` of its products."""
    block: int = 128
    """Tokens per block on both sides, a multiple of stride."""
    norm: float = 1.0
    """Divides the scores before the softmax."""
    keep_sink: bool = True
    """Whether every query sees the first key block."""
    keep_recent: bool = False
    """Whether every query block sees the key block of its own number."""
    dense_fraction: float = 0.1
    refresh_interval: int | None = 1
    """Steps for which a plan is used, in a run of reference_steps; None: until the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("threshold", self.threshold, zero=False)
        for name in ("stride", "block"):
            expect_count(name, getattr(self, name))
        if self.block % self.stride:
            raise ValueError(f"block: expected a multiple of stride {self.stride}, got {self.block}; take 16 * stride.")
        expect_positive("norm", self.norm)
        for name in ("keep_sink", "keep_recent"):
            expect_flag(name, getattr(self, name))


class XAttentionPlanner(ConfiguredPlanner[XAttentionConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        sides = cut_both_sides(q, k, site, config.block, config.block)
        queries, keys = sides.queries, sides.keys
        factor = sides.scale / (config.stride * config.norm)
        importance = antidiagonal_importance(q, k, queries, keys, config.stride, factor)
        mask = reach_share(importance, config.threshold)
        if config.keep_sink:
            mask[..., 0] = True
        if config.keep_recent:
            mask |= torch.eye(queries.count, keys.count, dtype=torch.bool, device=q.device)
        return sides.plan(mask, backend, kept_mass(importance, mask, queries.sizes))


def antidiagonal_importance(q: Tensor, k: Tensor, queries: Runs, keys: Runs, stride: int, factor: float) -> Tensor:
    """W_uv over its row sum: [b h qb kb], rows of 0 where a query block is empty."""
    b, h = q.shape[:2]
    in_block, key_groups = queries.size // stride, keys.count * keys.size // stride
    blocks_at_once = max(1, SCORES_AT_ONCE // (in_block * key_groups))
    filled = ((keys.members + stride - 1) // stride).view(b, 1, 1)
    absent = torch.arange(key_groups, device=k.device) >= filled  # [b 1 groups]
    # [b qb 1 in_block]: query groups that exist, so a sum over a block is a product with this row
    group = torch.arange(queries.count * in_block, device=q.device).view(queries.count, 1, in_block)
    present = group < ((queries.members + stride - 1) // stride).view(b, 1, 1, 1)
    rows = []
    for head in range(h):
        # one head at a time bounds the gathered copies; the flip turns antidiagonals into rows of one product
        left = queries.gather(q[:, head : head + 1]).view(b, -1, stride, q.shape[-1]).flip(2).flatten(2)
        right = keys.gather(k[:, head : head + 1]).view(b, key_groups, -1)
        parts = []
        for at in range(0, queries.count, blocks_at_once):
            some = left[:, at * in_block : (at + blocks_at_once) * in_block]
            weights = (_product(some, right) * factor).masked_fill_(absent, -torch.inf).softmax(-1)
            pooled = weights.view(b, -1, in_block, keys.count, keys.size // stride).sum(-1)  # [b qb in_block kb]
            parts.append((present[:, at : at + blocks_at_once].to(pooled.dtype) @ pooled).squeeze(2))
        rows.append(torch.cat(parts, 1))
    summed = torch.stack(rows, 1)
    return summed / present.sum((2, 3)).clamp(min=1).view(b, 1, -1, 1)


def reach_share(importance: Tensor, threshold: float) -> Tensor:
    """Leading blocks of each row until their sum, in float64, reaches threshold * (row sum). [b h qb kb] -> bool"""
    ranked, order = importance.double().sort(dim=-1, descending=True, stable=True)
    sums = ranked.cumsum(-1)
    before = torch.nn.functional.pad(sums, (1, 0))[..., :-1]
    # written as "not reached" so that a NaN row keeps everything and shows as NaN in the output, as in dense attention
    keep = ~(before >= threshold * sums[..., -1:])
    keep[..., 0] = True
    if threshold == 1:
        keep[:] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in float32 (float64 for float64): [b n d], [b m d] -> [b n m]"""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    dtype = compute_dtype(a.dtype)
    return a.to(dtype) @ b.to(dtype).mT


ENTRIES = (
    planned_entry("xattention", XAttentionPlanner, XAttentionConfig,
        "XAttention: sums along antidiagonals of small tiles, kept up to a share of the estimated attention",
        "arXiv 2503.16428", "threshold"),
)  # fmt: skip
