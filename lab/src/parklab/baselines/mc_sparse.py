"""MC-Sparse (arXiv 2610.06801): groups of similar queries, each with the keys that it attends to most at one full step.

Per head, video tokens only; s the scale, N queries, M keys, B = ceil(N / group):

    groups   a tree over an order of the queries, at first that of the sequence. A node of blocks lo .. hi - 1 (blocks
             of `group` places) is sorted by x_i.w, w from `power_iterations` times w <- G w / |G w| with
             G = sum (x_i - xbar) (x_i - xbar)^T over the node, and split behind (hi - lo) // 2 of its blocks; a block
             alone is a group.
             x_i = q_i, with `whiten` x_i = C^(1/2) q_i, C the covariance of the keys.
    mass     a_uj = sum over i in u of softmax_j(s q_i.k_j), over all keys that can be attended to
    kept     the first floor(top_k M) keys by falling a_uj, rounded up to a multiple of `multiple`
    residual R = dense - sparse of that step, whole, added to every later step's sparse output (`token_groups`)

Defaults are the authors' code's for MiniMax-H3: top_k 0.25, groups of 128, whiten off, 10 dense steps of 50, the plan
made at the last of them and kept to the end, layers 0 and 1 dense, calls below 4,096 tokens dense. Shorter runs have a
fifth of their steps dense, rounded up. `refresh_interval` is their calibrate_every.

Differences from the authors' code:
- w starts from (cos 0.7, cos 1.4, ...) in every node; theirs from a random vector, drawn for all heads at once;
- only queries of the video are grouped, and text sees every key; theirs groups text too, with text keys always on;
- top_k counts keys of the video; theirs those of text too, though text comes on top of it;
- mass and products are in float32 (float64); theirs is rounded to bfloat16 before it is ranked;
- the plan is kept in bits of a mask, theirs in 32-bit indices, and the residual on the device, theirs in host memory;
- no FP8, no budgets by head or layer, no selection on pooled tokens, which their default has off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from parkattn.checks import expect_count, expect_flag
from parkattn.plan import Plan
from parkattn.registry import MethodEntry
from parkattn.segments import compute_dtype
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner
from parklab.baselines.settings import MOST_ITERATIONS
from parklab.baselines.token_groups import FullSteps, GroupedMethod, Groups, TokenGroupsConfig, plan_tokens

TURN = 0.7  # of the start of every power iteration


@dataclass(frozen=True, kw_only=True)
class McSparseConfig(TokenGroupsConfig):
    """Defaults are the authors' for MiniMax-H3."""

    group: int = 128
    """Queries per group."""
    power_iterations: int = 4
    """Towards the direction in which a node of the tree is sorted."""
    whiten: bool = False
    """Whether queries are grouped by their scores with the keys instead of by themselves."""
    least_tokens: int = 4096
    """Calls of fewer tokens stay dense."""
    refresh_interval: int | None = None
    """Steps for which a plan is used, in a run of reference_steps; None: until the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count("group", self.group)
        expect_count("power_iterations", self.power_iterations, most=MOST_ITERATIONS)
        expect_flag("whiten", self.whiten)

    def kept_keys(self, video: Tensor) -> Tensor:
        least = (video.double() * self.top_k + 1e-9).floor().clamp(min=1)
        return ((least / self.multiple).ceil() * self.multiple).minimum(video)


class McSparsePlanner(ConfiguredPlanner[McSparseConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config = self.config
        words = slice(0, 0) if site.text is None else site.text
        token = torch.arange(q.shape[2], device=q.device)
        outside = torch.cat([token[: words.start], token[words.stop :]])

        def groups_of(queries: Tensor, keys: Tensor, asks: Tensor | None, video: Tensor | None) -> Groups:
            x = queries.to(compute_dtype(queries.dtype))
            x = (whitened(x, keys, video) if config.whiten else x).index_select(0, outside)
            live = None if asks is None else asks.index_select(0, outside)
            order = principal_order(x, live, config.group, config.power_iterations)
            return Groups.of(outside[order], config.group, asks, len(queries))

        return plan_tokens(q, k, site, config, config.group, groups_of)


def whitened(q: Tensor, k: Tensor, video: Tensor | None) -> Tensor:
    """q C^(1/2), C the covariance of the video's keys: distances become those of scores. [n d], [m d], [m] -> [n d]"""
    keys = k.to(q.dtype)
    member = torch.ones_like(keys[:, :1]) if video is None else video.unsqueeze(-1).to(q.dtype)
    mean = torch.where(member > 0, keys, 0).sum(0) / member.sum()
    off = torch.where(member > 0, keys - mean, 0)
    values, vectors = torch.linalg.eigh(off.T @ off / member.sum())
    return q @ (vectors * values.clamp(min=0).sqrt() @ vectors.T)


def principal_order(x: Tensor, live: Tensor | None, size: int, iterations: int) -> Tensor:
    """The order [n] of x [n d] in which every `size` rows are a group;
    live [n]: rows that are not come last in a node.
    """
    n, d = x.shape
    rows = pad(x, (0, 0, 0, 1))
    alive = torch.ones(n, dtype=torch.bool, device=x.device) if live is None else live
    alive = pad(alive, (0, 1))  # one row past the last stands for places beyond a node's end
    order = torch.arange(n + 1, device=x.device)
    start = torch.cos(TURN * torch.arange(1, d + 1, dtype=x.dtype, device=x.device))
    for nodes in levels(-(-n // size)):
        begin, end = torch.tensor([(lo * size, min(hi * size, n)) for lo, hi in nodes], device=x.device).T.unsqueeze(-1)
        longest = max(min(hi * size, n) - lo * size for lo, hi in nodes)
        at = begin + torch.arange(longest, device=x.device)
        at = torch.where(at < end, at, n)
        token = order[at]
        inside, members = alive[token].unsqueeze(-1), rows[token]
        mean = torch.where(inside, members, 0).sum(1, keepdim=True) / inside.sum(1, keepdim=True).clamp(min=1)
        off = torch.where(inside, members - mean, 0)
        gram = off.mT @ off
        w = (start / start.norm()).expand(len(nodes), d).unsqueeze(-1)
        for _ in range(iterations):
            w = gram @ w
            w = w / w.norm(dim=1, keepdim=True).clamp(min=1e-12)
        along = torch.where(inside, members @ w, torch.inf).squeeze(-1).nan_to_num(torch.inf, torch.inf, -torch.inf)
        ranked = token.gather(1, along.sort(dim=1, stable=True).indices)
        order = order.scatter(0, at.flatten(), ranked.flatten())
        order[n] = n
    return order[:n]


def levels(blocks: int) -> Iterator[list[tuple[int, int]]]:
    """The nodes of each depth that are split: intervals of blocks, halved until one is left."""
    nodes = [(0, blocks)]
    while nodes := [(lo, hi) for lo, hi in nodes if hi - lo > 1]:
        yield nodes
        halves = [(lo, lo + (hi - lo) // 2, hi) for lo, hi in nodes]
        nodes = [node for lo, middle, hi in halves for node in ((lo, middle), (middle, hi))]


ENTRIES = (
    MethodEntry(
        "mc-sparse",
        lambda config: GroupedMethod("mc-sparse", McSparsePlanner(config), config, FullSteps(config)),
        "groups of similar queries, their keys by exact attention mass at one dense step, and all that it missed there",
        McSparseConfig,
        budgets=("top_k",),
        paper="MC-Sparse, arXiv 2610.06801",
    ),
)
