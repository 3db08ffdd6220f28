"""Which rank computes which heads: as many each, by planned cost, so that no rank waits long for the densest.

Heads that differ in density make ranks wait under Ulysses: AsymHP (NeurIPS 2026) shows it, predicts costs from the step
before and gives ranks unequal numbers of heads. Here a plan says what its heads cost, and equal numbers leave the
exchange as it is: another assignment is another order of heads before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """Those that share the heads of a call. All of them gather at the same calls."""

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The tensor of each rank in the place of x [..] -> [ranks ..]."""
        ...


def assign_heads(cost: Tensor, ranks: int) -> Tensor:
    """cost [h] -> the heads of each rank [ranks, h / ranks], without a host synchronisation.

    Longest processing time in rounds: the next `ranks` heads in descending cost, the largest to the rank with the
    least. Where that is no better, the model's order. Ties go to the lower head: every rank finds the same.
    """
    rounds = cost.argsort(descending=True, stable=True).view(-1, ranks)
    load, given = cost.new_zeros(ranks), []
    for heads in rounds:
        given.append(torch.empty_like(heads).scatter(0, load.argsort(stable=True), heads))
        load = load + cost[given[-1]]
    found, plain = torch.stack(given, 1), torch.arange(len(cost), device=cost.device).view(ranks, -1)
    return torch.where(imbalance(cost, found) < imbalance(cost, plain), found, plain)


def imbalance(cost: Tensor, heads: Tensor) -> Tensor:
    """The slowest rank over the mean of all, for heads [ranks, h / ranks]."""
    load = cost[heads].sum(1)
    return load.amax() / load.mean()


class Reassignment(NamedTuple):
    order: Tensor  # the head [h] at each place of all ranks
    move: Callable[[Tensor], Tensor]  # held [b h ..] -> the same of the heads that are computed here from now on
    imbalance: Tensor  # [2]: in the model's order, and from now on


def reassign(cost: Tensor, order: Tensor | None, ranks: Ranks) -> Reassignment:
    """cost [h / ranks] of the heads that are here, out of all heads in `order` (None: the model's)."""
    held = ranks.gather(cost)
    plain = torch.arange(held.numel(), device=held.device).view_as(held)
    place = plain.flatten() if order is None else order.argsort()  # of each head
    cost = held.flatten()[place]
    heads = assign_heads(cost, len(held))
    mine = place[heads[ranks.rank]]

    def move(x: Tensor) -> Tensor:
        return ranks.gather(x).transpose(0, 1).flatten(1, 2).index_select(1, mine)

    return Reassignment(heads.flatten(), move, torch.stack([imbalance(cost, plain), imbalance(cost, heads)]))
