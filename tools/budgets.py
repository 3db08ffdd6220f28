"""Rules for spending one budget: true output error at equal density on captured calls.

park capture "a green cross moves down over blue stripes" --values --capture-steps 2,4,7,10 --steps 12 --guidance 1 \\
    --frames 29 --height 96 --width 160 --out calls.safetensors
python tools/budgets.py calls.safetensors --out benchmarks/results/budgets.jsonl

Every rule gets the budget at which its density, mean over all calls of the files, is the asked one. The error of a call
is |out - dense| / |dense| over all its heads; "ratio" is its geometric mean over calls against that of top-p per row.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parkattn.cluster import Clustering, cluster_keys, kmeans
from parkattn.experiments.captures import Captured, read_captures
from parkattn.park import ParkConfig
from parkattn.plan import Blocks, arrange, cut_blocks
from parkattn.record import append_records, environment
from parkattn.retrieval import pama, score_spread, select_shared, select_top_k, select_top_p
from parkattn.segments import segment_mean

FORMAT = "parkattn.budgets.1"
DENSITIES = (0.15, 0.3, 0.5)
ROWS_AT_ONCE = 768
TODAY = "top-p per row"


@dataclass(frozen=True)
class Case:
    """A call with its key blocks, and for every tile size (None: blocks are not cut) its query blocks."""

    call: Captured
    keys: Clustering
    spread: Tensor  # [1 h]
    queries: dict[int | None, tuple[Blocks, Tensor]]  # and their importance [1 h qb kb]

    def pairs(self, tile: int | None) -> Tensor:
        """Token pairs of each block pair, as a share of all."""
        sizes = self.queries[tile][0].sizes.double().unsqueeze(-1) * self.keys.sizes.double().unsqueeze(-2)
        return sizes / sizes.sum((-2, -1), keepdim=True)


Rule = Callable[[Case, int | None, float], Tensor]  # case, tile, budget in (0, 1] -> mask [1 h qb kb]


def pooled(case: Case, tile: int | None, p: float, *, heads: bool, floor: float = 0.0) -> Tensor:
    """Blocks by mass per cost until share p of the mass of a head, or of all heads, is kept, and each row's heaviest.

    floor: every head also spends this share of what heads spend on average.
    """
    importance, pairs = case.queries[tile][1], case.pairs(tile)
    mass = importance.double() * case.queries[tile][0].sizes.unsqueeze(-1)
    score = torch.where(pairs > 0, mass / pairs, -1.0).flatten(0 if heads else 2)
    ranked, order = score.sort(dim=-1, descending=True, stable=True)
    held = mass.view_as(score).gather(-1, order).cumsum(-1)
    before = torch.nn.functional.pad(held, (1, 0))[..., :-1]
    kept = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, order, before < p * held[..., -1:]).view_as(mass)
    kept |= torch.arange(mass.shape[-1]) == importance.argmax(-1, keepdim=True)
    if floor:
        each, least = score.view(*mass.shape[:2], -1), floor * float((kept * pairs).sum()) / mass.shape[1]
        order = each.argsort(dim=-1, descending=True, stable=True)
        spent = pairs.view_as(each).gather(-1, order)
        kept |= (
            torch.zeros_like(each, dtype=torch.bool).scatter_(-1, order, spent.cumsum(-1) - spent < least).view_as(kept)
        )
    return kept & (pairs > 0)


RULES: dict[str, tuple[Rule, tuple[int | None, ...]]] = {
    TODAY: (lambda c, t, p: select_top_p(c.queries[t][1], p, sizes=c.keys.sizes), (None, 64, 128)),
    "top-k per row": (lambda c, t, p: select_top_k(c.queries[t][1], p, sizes=c.keys.sizes), (None, 64)),
    "mass per cost over a head": (lambda c, t, p: pooled(c, t, p, heads=False), (None, 64)),
    "mass per cost over a layer": (lambda c, t, p: pooled(c, t, p, heads=True), (None, 64)),
    "the same, a quarter to each head": (lambda c, t, p: pooled(c, t, p, heads=True, floor=0.25), (None,)),
    "budget=mass": (lambda c, t, p: select_shared(c.queries[t][1], p, sizes=c.keys.sizes), (None, 64)),
    "budget=error": (
        lambda c, t, p: select_shared(c.queries[t][1], p, sizes=c.keys.sizes, spread=c.spread),
        (None, 64, 128),
    ),
}
Name = tuple[str, int | None]


def prepare(call: Captured) -> Case:
    q, k = call.q.float(), call.k.float()
    counts = ParkConfig().counts(q.shape[2], k.shape[2])
    found, keys = kmeans(q, counts.queries), cluster_keys(k, q, counts.keys)
    whole = arrange(found.labels, found.clusters)
    queries = {}
    for tile in sorted({tile for _, tiles in RULES.values() for tile in tiles}, key=lambda tile: tile or 0):
        blocks = whole if tile is None else cut_blocks(whole, found.clusters, tile)[0]
        queries[tile] = blocks, pama(q, k, blocks.labels, blocks.count, keys.labels, keys.clusters)
    return Case(call, keys, score_spread(q, k, keys.centroids, keys.labels), queries)


def density(cases: list[Case], rule: Rule, tile: int | None, budget: float) -> float:
    return statistics.fmean(float((rule(c, tile, budget) * c.pairs(tile)).sum((-2, -1)).mean()) for c in cases)


def solve(cases: list[Case], rule: Rule, tile: int | None, goal: float) -> tuple[float, float]:
    """The budget whose density is nearest, by bisection, and that density."""
    low, high = 1e-4, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if density(cases, rule, tile, middle) < goal else (low, middle)
    return min(((end, density(cases, rule, tile, end)) for end in (low, high)), key=lambda at: abs(at[1] - goal))


def errors(case: Case, masks: dict[tuple[Name, float], Tensor]) -> dict[tuple[Name, float, bool], tuple[float, float]]:
    """|out - dense| / |dense| over all heads and in the worst head, without and with compensation.

    A key block enters an output as sums over its keys, so these are made once for all masks.
    """
    q, k, v = (x[0].float() for x in (case.call.q, case.call.k, case.call.site.values))
    scale, sizes = q.shape[-1] ** -0.5, case.keys.sizes[0]
    means = segment_mean(v[None], case.keys.labels, case.keys.clusters)[0][0]
    missed = {(*key, stand): torch.zeros(len(q)) for key in masks for stand in (False, True)}
    norms = torch.zeros(len(q))
    for h in range(len(q)):
        order, cut = case.keys.labels[0, h].argsort(stable=True), sizes[h].tolist()
        for start in range(0, q.shape[1], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            scores = q[h, rows] @ k[h, order].T * scale
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp().split(cut, -1)
            mass = torch.stack([w.sum(-1) for w in weights], -1)
            sums = torch.stack([w @ x for w, x in zip(weights, v[h, order].split(cut), strict=True)], 1)
            dense = sums.sum(1) / mass.sum(-1, keepdim=True)
            norms[h] += dense.square().sum()
            stood = (q[h, rows] @ case.keys.centroids[0, h].T * scale - top).exp() * sizes[h]
            for ((name, tile), goal), mask in masks.items():
                kept = mask[0, h][case.queries[tile][0].labels[0, h, rows].long()].float()
                over, held = torch.bmm(kept.unsqueeze(1), sums).squeeze(1), (kept * mass).sum(-1)
                for stand in (False, True):
                    rest = (1 - kept) * stood * stand
                    out = (over + rest @ means[h]) / (held + rest.sum(-1)).unsqueeze(-1)
                    missed[(name, tile), goal, stand][h] += (out - dense).square().sum()
    return {key: (float((e.sum() / norms.sum()).sqrt()), float((e / norms).sqrt().max())) for key, e in missed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    cases = [prepare(call) for path in asked.captures for call in read_captures(path)[0]]
    names = [(name, tile) for name, (_, tiles) in RULES.items() for tile in tiles]
    budgets = {(name, goal): solve(cases, RULES[name[0]][0], name[1], goal) for name in names for goal in DENSITIES}
    found = [
        errors(case, {key: RULES[key[0][0]][0](case, key[0][1], at) for key, (at, _) in budgets.items()})
        for case in cases
    ]
    records = []
    for stand in (False, True):
        for goal in DENSITIES:
            for name in names:
                ratios = [math.log(each[name, goal, stand][0] / each[(TODAY, None), goal, stand][0]) for each in found]
                budget, reached = budgets[name, goal]
                records.append({
                    "format": FORMAT, "tokens": cases[0].call.q.shape[2], "rule": name[0], "query_tile": name[1],
                    "compensate": stand, "asked": goal, "density": reached, "budget": budget, "calls": len(found),
                    "error": statistics.fmean(each[name, goal, stand][0] for each in found),
                    "worst_head": max(each[name, goal, stand][1] for each in found),
                    "ratio": math.exp(statistics.fmean(ratios)), "better": sum(r < 0 for r in ratios),
                    "environment": environment(),
                })  # fmt: skip
                r = records[-1]
                print(
                    f"{'stand-ins' if stand else 'gone':9} {goal:4} {reached:.3f}  error {r['error']:.4f}  "
                    f"worst head {r['worst_head']:.3f}  ratio {r['ratio']:.3f}  better {r['better']}/{r['calls']}  "
                    f"{name[0]}{'' if name[1] is None else f', tiles of {name[1]}'}"
                )
    if asked.out is not None:
        append_records(asked.out, records)


if __name__ == "__main__":
    main()
