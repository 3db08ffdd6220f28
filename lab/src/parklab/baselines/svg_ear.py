"""SVG-EAR (arXiv 2603.08982): SVG2's clusters and budget, spent where a centroid would replace its block worst.

Per head, video tokens only; query clusters of n_u tokens and mean c_u, key clusters of n_v tokens with mean key kbar_v
and mean value vbar_v, s the scale, r the `floor`:

    E_uv = sum_{j in v} | e^{s c_u.k_j} v_j - e^{s c_u.kbar_v} vbar_v |^2   error of replacing v, seen by one query
    S_uv = log E_uv - gamma log(n_u n_v)                                    error per cost
    P_uv = softmax_v( s c_u.kbar_v + log n_v )

    budget_u     key tokens of the blocks that SVG2 would keep: by falling P while the sum before a block is <= top_p,
                 and at least the first floor(2 r C_k)
    guaranteed   the first max(1, floor(r C_k)) by P
    fill         the others by falling S while the tokens filled so far < budget_u - tokens(guaranteed)

A skipped block stays in the softmax through its centroid (`compensate`): logit s q_i.kbar_v + log n_v, value vbar_v.

Defaults are the authors' code's: SVG2's clusters, iterations and schedule, top_p 0.9, gamma 1, r 0.05: a literal in
their processors, which their scripts' 0.10 does not reach. They have no setting for Wan2.2; it gets Wan2.1's.

Differences from the authors' code, besides those of svg2.py:
- log E = log max(E', 1e-8) + 2 t with E = e^{2t} E' and t the block's largest logit; theirs holds E itself at 1e-8 and
  overflows in float32 beyond logits of 44;
- E' is summed as a_j^2 |v_j - vbar|^2 + 2 a_j (a_j - abar) vbar.(v_j - vbar) + (a_j - abar)^2 |vbar|^2, where a_j and
  abar are the exponentials, which in float32 loses less of a tight block than their expanded square;
- log n_v, where theirs is log(n_v + 1e-6);
- text is exact for every query and padding is in nothing; their first release lets padding into the normaliser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from parkattn.checks import expect_positive
from parkattn.ops import cluster
from parkattn.ops.cluster.definition import Clustering
from parkattn.plan import Blocks, Plan, assign_roles
from parkattn.planned import values_of
from parkattn.segments import compute_dtype
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import FlooredSelection, StudiedConfig
from parklab.baselines.svg2 import (
    AUTHORS_PRESETS,
    AuthorsClusters,
    by_weight,
    centroid_weights,
    cluster_both,
    first_ranks,
    planned_blocks,
    share_of,
)

LEAST_ERROR = 1e-8
CENTROIDS_AT_ONCE = 128  # bounds the [keys, query centroids] terms of one head


@dataclass(frozen=True, kw_only=True)
class SvgEarConfig(AuthorsClusters, FlooredSelection, StudiedConfig):
    """Defaults are the authors' for Wan2.1 text to video."""

    floor: float = 0.05
    """Share of the key clusters that are kept for their weight; twice this share is the least budget."""
    gamma: float = 1.0
    """How much a block's size counts against it."""
    compensate: bool = True
    refresh_interval: int | None = 1

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = AUTHORS_PRESETS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma != 0:
            expect_positive("gamma", self.gamma)


class SvgEarPlanner(ConfiguredPlanner[SvgEarConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        v = values_of(q, k, site)
        roles = assign_roles(q, k, site.text, site.key_valid)
        queries, keys, memory = cluster_both(backend, q, k, site, roles, earlier, config)
        weights = centroid_weights(queries, keys, site.scale)
        ranked, order = by_weight(weights, keys)
        sizes = keys.sizes.long().unsqueeze(-2).expand(order.shape)
        in_order = sizes.gather(-1, order)
        covered = first_ranks(ranked, config, share_of(keys, 2 * config.floor, slack=1e-9), keys)
        first = torch.arange(order.shape[-1], device=q.device) < share_of(keys, config.floor, slack=1e-9).clamp(min=1)
        left = (in_order * covered).sum(-1, keepdim=True) - (in_order * first).sum(-1, keepdim=True)
        guaranteed = torch.zeros_like(covered).scatter_(-1, order, first.expand(order.shape))

        error = replacement_error(
            queries, keys, cluster.arrange(backend, *roles.key_blocks(keys.labels, keys.clusters)), k, v, site.scale
        )
        # n_u is the same along a row and changes no order
        score = error.scaled.clamp(min=LEAST_ERROR).log() + 2 * error.largest - config.gamma * sizes.log()
        filled = fill_blocks(score.masked_fill(guaranteed | (sizes == 0), -torch.inf), sizes, left)
        return planned_blocks(backend, roles, queries, keys, guaranteed | filled, weights, memory)


class ReplacementError(NamedTuple):
    scaled: Tensor  # [b h c_q c_k]: E e^{-2 largest}
    largest: Tensor  # [b h c_q c_k]: the largest logit of a block's keys and of its mean key


def replacement_error(
    queries: Clustering, keys: Clustering, blocks: Blocks, k: Tensor, v: Tensor, scale: float | None
) -> ReplacementError:
    """E_uv in two factors, so that no exponential overflows. blocks: of the keys, the first c_k are the clusters.

    One head at a time: [keys, query centroids] of all heads would be 3.6 GB at 40 heads and 75,600 tokens.
    """
    factor, dtype = k.shape[-1] ** -0.5 if scale is None else scale, compute_dtype(k.dtype)
    scaled = torch.empty(*k.shape[:2], queries.clusters, keys.clusters, dtype=dtype, device=k.device)
    largest = torch.empty_like(scaled)
    sizes, permutation = blocks.sizes.long(), blocks.permutation().long()
    for i, j in ((i, j) for i in range(k.shape[0]) for j in range(k.shape[1])):
        order, lengths = permutation[i, j], sizes[i, j]
        # text and padding come last, and what they give is cut off below
        label = blocks.labels[i, j].long()[order].clamp(max=keys.clusters - 1)
        tokens, values = k[i, j][order].to(dtype), v[i, j][order].to(dtype)
        means = reduce_blocks(values, lengths, "sum") / lengths.clamp(min=1).unsqueeze(-1)
        off = values - means[label]
        spread, along, square = (
            off.square().sum(-1, True),
            (off * means[label]).sum(-1, True),
            means.square().sum(-1, True)[label],
        )
        key_means, query_means = (found.centroids[i, j].to(dtype).nan_to_num(nan=0.0) for found in (keys, queries))
        for begin in range(0, queries.clusters, CENTROIDS_AT_ONCE):
            rows = slice(begin, begin + CENTROIDS_AT_ONCE)
            logits, mean_logits = (x @ query_means[rows].T * factor for x in (tokens, key_means))
            top = reduce_blocks(logits, lengths, "max")[: keys.clusters].maximum(mean_logits)
            weight = (logits - top[label]).exp()
            excess = weight - (mean_logits - top).exp()[label]
            terms = weight.square() * spread + 2 * weight * excess * along + excess.square() * square
            scaled[i, j, rows] = reduce_blocks(terms, lengths, "sum")[: keys.clusters].T
            largest[i, j, rows] = top.T
    return ReplacementError(scaled, largest)


def reduce_blocks(x: Tensor, lengths: Tensor, how: str) -> Tensor:
    """Sums or maxima of consecutive rows: x [m d], lengths [blocks] -> [blocks d]. Repeatable, and does not wait for
    the GPU.
    """
    return torch.segment_reduce(x, how, lengths=lengths, axis=0, unsafe=True)


def fill_blocks(score: Tensor, sizes: Tensor, budget: Tensor) -> Tensor:
    """Blocks by falling score while the tokens taken < budget [b h c_q 1], the one that crosses it included; -inf is
    never taken.
    """
    ranked, order = score.sort(dim=-1, descending=True, stable=True)
    in_order = sizes.gather(-1, order)
    # int64: token counts are exact
    take = (in_order.cumsum(-1) - in_order < budget) & (ranked != -torch.inf)
    return torch.zeros_like(take).scatter_(-1, order, take)


ENTRIES = (
    planned_entry("svg-ear", SvgEarPlanner, SvgEarConfig,
        "SVG2's clusters and budget, spent by the error of replacing a block by its centroid, which stands in for what "
        "is skipped",
        "SVG-EAR, arXiv 2603.08982", "top_p", "top_k"),
)  # fmt: skip
