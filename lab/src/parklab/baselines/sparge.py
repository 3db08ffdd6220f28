"""SpargeAttn (Zhang et al., ICML 2025, arXiv 2502.18137): pooled blocks rank the pairs, incoherent blocks stay dense.

Query blocks u of 128 and key blocks v of 64 consecutive video tokens; k' = k - (mean of all video keys); s the scale:
    sim(x)   = | mean_i x_i / |x_i| |^2            mean cosine of all pairs in a block: is one mean a fair summary?
    coherent = sim > simthreshd1
    P_uv     = softmax over coherent v of  s mean(q_u) . mean(k'_v)
    keep     the leading blocks of row u while their sum of P stays <= cdfthreshd, at least one (the crossing block is
             out), or, with topk, the first max(1, floor(topk * key blocks))
    on       rows of incoherent query blocks, columns of incoherent key blocks, with attention_sink the first key block

Defaults: simthreshd1 0.6 and cdfthreshd 0.98 of spas_sage2_attn_meansim_cuda; with topk simthreshd1 is -0.1 (every
block is coherent) as in spas_sage2_attn_meansim_topk_cuda, whose topk is 0.5 and which the authors now recommend;
blocks of 128 x 64 as on every GPU but sm_90, where they have 64 x 128. No dense steps or layers in any of their
scripts; a plan at every call.

Different from the authors' code, on purpose:
- text and padding have blocks of their own (always on, never on); theirs puts text into ordinary blocks at the end;
- scores and sums in float32 whatever the inputs are; a row whose key blocks are all incoherent has no scores (theirs
  are NaN) and is dense, as theirs;
- the kernel's own second stage (pvthreshd) and its int8 and fp8 are no part of the map and left out, and so are the
  thresholds searched per head (autotune); any number of tokens and any head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parkattn.checks import expect_count, expect_flag, expect_fraction, shown
from parkattn.ops.importance.definition import kept_mass, select_top_p
from parkattn.plan import Plan
from parkattn.segments import compute_dtype
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.video import HEADS_AT_ONCE, Runs, cut_both_sides, keep_best


@dataclass(frozen=True, kw_only=True)
class SpargeConfig(StudiedConfig):
    """SpargeAttn's settings under the authors' names."""

    cdfthreshd: float = 0.98
    """Keep key blocks while their sum of P stays at or below this; 1 is dense. Not used with topk."""
    topk: float | None = None
    """Keep this share of the key blocks instead; the authors' is 0.5."""
    simthreshd1: float | None = None
    """Blocks of a mean cosine above this are coherent, the others dense; None: 0.6, or -0.1 with topk."""
    block_q: int = 128
    """Queries per block."""
    block_k: int = 64
    """Keys per block."""
    smooth_k: bool = True
    """Whether the mean key is taken off before pooling."""
    attention_sink: bool = False
    """Whether every query sees the first key block."""
    dense_fraction: float = 0.0
    refresh_interval: int | None = 1
    """Steps for which a plan is used, in a run of reference_steps; None: until the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("cdfthreshd", self.cdfthreshd, zero=False)
        if self.topk is not None:
            expect_fraction("topk", self.topk, zero=False)
        least = self.simthreshd1
        if least is not None and (not isinstance(least, (int, float)) or isinstance(least, bool)):
            raise TypeError(f"simthreshd1: expected a number or None, got {shown(least)}; pass a cosine such as 0.6.")
        for name in ("block_q", "block_k"):
            expect_count(name, getattr(self, name))
        for name in ("smooth_k", "attention_sink"):
            expect_flag(name, getattr(self, name))

    @property
    def coherence(self) -> float:
        """Mean cosine above which a block is coherent, with the authors' number where none is set."""
        if self.simthreshd1 is not None:
            return self.simthreshd1
        return 0.6 if self.topk is None else -0.1


class SpargePlanner(ConfiguredPlanner[SpargeConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        sides = cut_both_sides(q, k, site, config.block_q, config.block_k)
        queries, keys = sides.queries, sides.keys
        pooled_queries, query_similarity = pool(q, queries, smooth=False)
        pooled_keys, key_similarity = pool(k, keys, smooth=config.smooth_k)

        occupied = keys.sizes > 0
        coherent_queries = query_similarity > config.coherence
        coherent_keys = (key_similarity > config.coherence) & occupied
        logits = (pooled_queries @ pooled_keys.mT * sides.scale).masked_fill(~coherent_keys.unsqueeze(-2), -torch.inf)
        unknown = ~coherent_keys.any(-1)  # [b h]: no key block has a score
        scores = torch.where(unknown[..., None, None], 0, logits.softmax(-1))
        if config.topk is None:
            mask = select_top_p(scores, config.cdfthreshd, sizes=keys.sizes, crossing="exclude")
        else:
            counts = (occupied.sum(-1, keepdim=True).double() * config.topk).floor().clamp(min=1)
            mask = keep_best(scores, counts.unsqueeze(-1), occupied.unsqueeze(-2))
        mask |= ~coherent_queries.unsqueeze(-1) | ~coherent_keys.unsqueeze(-2)
        if config.attention_sink:
            mask[..., 0] = True
        return sides.plan(mask, backend, torch.where(unknown, 1.0, kept_mass(scores, mask, queries.sizes)))


def pool(x: Tensor, runs: Runs, *, smooth: bool) -> tuple[Tensor, Tensor]:
    """Means [b h blocks d] and mean cosines [b h blocks] of the blocks of x [b h n d], after its mean if `smooth`."""
    means, similarities = [], []
    sizes, members = runs.sizes.clamp(min=1).unsqueeze(-1), runs.members.clamp(min=1).view(-1, 1, 1, 1, 1)
    for heads in x.split(HEADS_AT_ONCE, 1):
        tokens = runs.gather(heads).to(compute_dtype(x.dtype))
        if smooth:
            tokens = torch.where(runs.occupied, tokens - tokens.sum((2, 3), keepdim=True) / members, 0)
        means.append(tokens.sum(3) / sizes)
        # a zero token has cosine 0 with every other, so the norm is held at the least number above 0
        unit = torch.nn.functional.normalize(tokens, dim=-1, eps=torch.finfo(tokens.dtype).tiny)
        similarities.append((unit.sum(3) / sizes).square().sum(-1))
    return torch.cat(means, 1), torch.cat(similarities, 1)


ENTRIES = (
    planned_entry("sparge", SpargePlanner, SpargeConfig,
        "SpargeAttn: pooled block scores up to a cumulative share or top-k, incoherent blocks dense",
        "arXiv 2502.18137", "topk", "cdfthreshd"),
)  # fmt: skip
