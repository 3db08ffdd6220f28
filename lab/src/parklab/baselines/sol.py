"""Sol-Attn (arXiv 2607.24027): pooled scores above their own mean choose what is exact, the rest enters pooled.

Blocks of 64 consecutive video tokens on both sides, qbar_u and kbar_v their means, n_v their sizes, s the scale:
    x_uv  = s log2(e) qbar_u . kbar_v,   mu_u = mean_v x_uv,   sigma_u = sqrt(var_u + 1e-6)
    var_u = sum_c (s log2(e) qbar_uc)^2 var_v(kbar_vc)    "diag": the diagonal of the pooled keys' covariance
          = mean_v (x_uv - mu_u)^2                        "exact": all of it
    exact iff x_uv > mu_u + tau sigma_u (with topk: among the best), or |u - v| <= 1, or v overlaps the sink
    out_i = ( sum_{j exact} e^{s q_i.k_j} v_j + sum_{v not exact} e^{s q_i.kbar_v} sum_{j in v} v_j )
          / ( sum_{j exact} e^{s q_i.k_j}     + sum_{v not exact} n_v e^{s q_i.kbar_v} )
The second sums are `compensate`: one stand-in per skipped block, its mean key with logit + log n and its mean value.

Defaults: block 64, tau 1.0, threshold "diag" and no sink of the authors' interface (tau 1.3 in ComfyUI's node); 10
dense steps of 50 and a dense first layer as a public engine sets Sol-Attn by default; a plan at every call.

Different from the authors' code, on purpose:
- the map is written down (theirs decides inside the kernel, from mean and variance alone), and the mean and the
  variance weigh every block equally, the shorter last one too;
- text is seen exactly by all and never pooled, padding is in nothing (theirs puts text into exact sink blocks);
- no Morton order; the tail uses every query's own logit (as theirs; ComfyUI's kernel uses the query block's mean);
- topk rounds to the nearest count and 1 is dense (ComfyUI's kernel stops one block before).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_count, expect_fraction, shown
from parkattn.plan import Plan
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.video import Runs, cut_both_sides, keep_best

Threshold = Literal["diag", "exact"]
THRESHOLDS = get_args(Threshold)


@dataclass(frozen=True, kw_only=True)
class SolConfig(StudiedConfig):
    """Sol-Attn's settings under the authors' names."""

    tau: float = 1.0
    """A block is exact if its pooled score is this many standard deviations above its row's mean; not with topk."""
    topk: float | None = None
    """Keep this share of the key blocks exact instead."""
    threshold: Threshold = "diag"
    """The variance of a row's scores: from the diagonal of the pooled keys' covariance, or as it is."""
    block: int = 64
    """Tokens per block on both sides."""
    sink_tokens: int = 0
    """Length of a range of video keys that is exact for all, in whole blocks."""
    sink_start: int | None = None
    """Where that range begins, counted in video keys; None: it ends at the last one."""
    compensate: bool = True
    """A skipped block enters through one key, its mean, with the weight of its size, and its mean value."""
    dense_layers: tuple[int, ...] = (0,)
    refresh_interval: int | None = 1
    """Steps for which a plan is used, in a run of reference_steps; None: until the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tau, (int, float)) or isinstance(self.tau, bool) or not math.isfinite(self.tau):
            raise ValueError(
                f"tau: expected a finite number, got {shown(self.tau)}; pass standard deviations such as 1.0."
            )
        if self.topk is not None:
            expect_fraction("topk", self.topk, zero=False)
        expect_choice("threshold", self.threshold, THRESHOLDS)
        expect_count("block", self.block)
        expect_count("sink_tokens", self.sink_tokens, least=0)
        if self.sink_start is not None:
            expect_count("sink_start", self.sink_start, least=0)


class SolPlanner(ConfiguredPlanner[SolConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        sides = cut_both_sides(q, k, site, config.block, config.block)
        queries, keys = sides.queries, sides.keys
        pooled_queries, pooled_keys = queries.means(q) * (sides.scale * math.log2(math.e)), keys.means(k)
        scores = pooled_queries @ pooled_keys.mT
        occupied = keys.sizes > 0  # [b 1 kb]
        if config.topk is None:
            mask = scores > threshold(pooled_queries, pooled_keys, scores, occupied, config).unsqueeze(-1)
        else:
            blocks = occupied.sum(-1, keepdim=True).double()
            counts = (blocks * config.topk + 0.5).floor().clamp(min=1).minimum(blocks)
            mask = keep_best(scores, counts.unsqueeze(-1), occupied.unsqueeze(-2))
        mask |= neighbours(queries.count, keys.count, q.device) | in_sink(keys, config).unsqueeze(-2)
        return sides.plan(mask, backend)


def threshold(queries: Tensor, keys: Tensor, scores: Tensor, occupied: Tensor, config: SolConfig) -> Tensor:
    """mu_u + tau sigma_u [b h qb] over the key blocks that have tokens; queries are scaled."""
    present = occupied.to(keys.dtype)
    count = present.sum(-1, keepdim=True)
    mean = (scores * present.unsqueeze(-2)).sum(-1) / count
    if config.threshold == "diag":
        weight = present.unsqueeze(-1)
        centred = (keys - (keys * weight).sum(-2, keepdim=True) / count.unsqueeze(-1)) * weight
        spread = centred.square().sum(-2) / count  # [b h d]
        variance = (queries.square() @ spread.unsqueeze(-1)).squeeze(-1)
    else:
        variance = ((scores - mean.unsqueeze(-1)) * present.unsqueeze(-2)).square().sum(-1) / count
    return mean + config.tau * (variance + 1e-6).sqrt()


def neighbours(rows: int, columns: int, device: torch.device) -> Tensor:
    """|u - v| <= 1 [qb kb]"""
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return (row.unsqueeze(1) - column).abs() <= 1


def in_sink(keys: Runs, config: SolConfig) -> Tensor:
    """Key blocks with a token in [sink_start, sink_start + sink_tokens): [b 1 kb]"""
    members = keys.members.view(-1, 1, 1)
    first = torch.arange(keys.count, device=members.device) * keys.size
    begin = members - config.sink_tokens if config.sink_start is None else torch.full_like(members, config.sink_start)
    last = torch.minimum(first + keys.size, members)
    return (first < begin + config.sink_tokens) & (last > begin) & (config.sink_tokens > 0)


ENTRIES = (
    planned_entry("sol", SolPlanner, SolConfig,
        "Sol-Attn: blocks whose pooled score stands out are exact, the others enter through their means",
        "arXiv 2607.24027", "topk"),
)  # fmt: skip
