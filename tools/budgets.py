"""Rules for spending one budget: true output error at equal density on captured calls.

park capture "a green cross moves down over blue stripes" --values --capture-steps 2,4,7,10 --steps 12 --guidance 1 \\
    --frames 29 --height 96 --width 160 --out calls.safetensors
python tools/budgets.py calls.safetensors --out benchmarks/results/budgets.jsonl

Every rule gets the budget at which its density, mean over all calls of the files, is the asked one. The error of a call
is |out - dense| / |dense| over all its heads; "ratio" is its geometric mean over calls against that of top-p per row.

python tools/budgets.py --videos benchmarks/results/budgets.jsonl    what settings of bench.frontier gain at equal cost
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import argument_reader
from torch import Tensor

from parkattn.ops.cluster.definition import Clustering, cluster_keys, kmeans
from parkattn.ops.importance.definition import pama, score_spread, select_shared, select_top_k, select_top_p
from parkattn.park import ParkConfig
from parkattn.plan import Blocks, arrange, cut_blocks
from parkattn.segments import segment_mean
from parklab.bench.frontier import read_records
from parklab.experiments.captures import CapturedCall, read_captures
from parklab.experiments.tables import interval
from parklab.record import append_records, environment

FORMAT = "parkattn.budgets.1"
DENSITIES = (0.15, 0.3, 0.5)
ROWS_AT_ONCE = 768
TODAY = "top-p per row"


@dataclass(frozen=True)
class Case:
    """A call with its key blocks, and for every tile size (None: blocks are not cut) its query blocks."""

    call: CapturedCall
    keys: Clustering
    spread: Tensor  # [1 h]
    queries: dict[int | None, tuple[Blocks, Tensor]]  # and their importance [1 h qb kb]

    def pairs(self, tile: int | None) -> Tensor:
        """Token pairs of each block pair, as a share of all."""
        sizes = self.queries[tile][0].sizes.double().unsqueeze(-1) * self.keys.sizes.double().unsqueeze(-2)
        return sizes / sizes.sum((-2, -1), keepdim=True)


Rule = Callable[[Case, int | None, float], Tensor]  # case, tile, budget in (0, 1] -> mask [1 h qb kb]


def pooled(case: Case, tile: int | None, p: float, *, heads: bool, floor: float = 0.0) -> Tensor:
    """Blocks by mass per cost until share p of the mass of a head, or of all, is kept;
    floor: of the mean head's cost.
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


def prepare(call: CapturedCall) -> Case:
    q, k = call.q.float(), call.k.float()
    counts = ParkConfig().counts(q.shape[2], k.shape[2])
    found, keys = kmeans(q, counts.queries), cluster_keys(k, q, counts.keys)
    whole = arrange(found.labels, found.clusters)
    queries = {}
    for tile in sorted({tile for _, tiles in RULES.values() for tile in tiles}, key=lambda tile: tile or 0):
        blocks = whole if tile is None else cut_blocks(whole, found.clusters, tile)[0]
        queries[tile] = blocks, pama(q, k, blocks.labels, blocks.count, keys.labels, keys.clusters)
    return Case(call, keys, score_spread(q, k, keys), queries)


def density(cases: list[Case], rule: Rule, tile: int | None, budget: float) -> float:
    return statistics.fmean(float((rule(c, tile, budget) * c.pairs(tile)).sum((-2, -1)).mean()) for c in cases)


def solve(cases: list[Case], rule: Rule, tile: int | None, goal: float) -> tuple[float, float]:
    """The budget whose density is nearest, by bisection, and that density."""
    low, high = 1e-4, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if density(cases, rule, tile, middle) < goal else (low, middle)
    return min(((end, density(cases, rule, tile, end)) for end in (low, high)), key=lambda at: abs(at[1] - goal))


def errors(case: Case, masks: dict[Any, Tensor]) -> dict[Any, tuple[float, float]]:
    """|out - dense| / |dense| over all heads and in the worst head, without and with compensation."""
    # a key block enters an output as sums over its keys: these are made once for all masks
    assert case.call.site.values is not None
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


def measure_rules(cases: list[Case]) -> list[dict[str, Any]]:
    names = [(name, tile) for name, (_, tiles) in RULES.items() for tile in tiles]
    budgets = {(name, goal): solve(cases, RULES[name[0]][0], name[1], goal) for name in names for goal in DENSITIES}
    found = [errors(c, {at: RULES[at[0][0]][0](c, at[0][1], p) for at, (p, _) in budgets.items()}) for c in cases]
    records, facts = [], environment()
    for stand, goal, name in itertools.product((False, True), DENSITIES, names):
        each, (budget, reached) = [of[name, goal, stand] for of in found], budgets[name, goal]
        ratios = [math.log(e / of[(TODAY, None), goal, stand][0]) for (e, _), of in zip(each, found, strict=True)]
        row = {
            "rule": name[0], "query_tile": name[1], "compensate": stand, "asked": goal, "density": reached,
            "budget": budget, "error": statistics.fmean(e for e, _ in each), "worst_head": max(w for _, w in each),
            "ratio": math.exp(statistics.fmean(ratios)), "better": sum(r < 0 for r in ratios), "calls": len(each),
        }  # fmt: skip
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()), sep="  ")
        records.append({"format": FORMAT, "tokens": cases[0].call.q.shape[2], **row, "environment": facts})
    return records


def gains_at_equal_cost(path: Path) -> dict[str, list[tuple[float, float, float]]]:
    """By setting, for each prompt: PSNR above that of top-p per row at its cost, between whose settings it is
    interpolated; cost; PSNR.
    """
    runs: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for r in read_records(path):
        if r["method"] == "park":
            runs.setdefault((r["setting"].split()[0], r["prompt"]), {})[r["setting"]] = r["cost"], r["psnr"]
    gains: dict[str, list[tuple[float, float, float]]] = {}
    for found in runs.values():
        line = sorted(at for name, at in found.items() if "budget=" not in name and "query_tile=" not in name)
        for name, (cost, psnr) in found.items():
            costs, psnrs = zip(*line, strict=True)
            row = float(np.interp(cost, costs, psnrs))
            gains.setdefault(name, []).append((psnr - row, cost, psnr))
    return gains


def print_gains(path: Path) -> None:
    for name, each in sorted(gains_at_equal_cost(path).items()):
        gain, cost, psnr = zip(*each, strict=True)
        means = (
            f"cost {statistics.fmean(cost):.3f}  PSNR {statistics.fmean(psnr):.2f}  gain {statistics.fmean(gain):+.2f}"
        )
        print(f"{means} +- {interval(gain) or math.nan:.2f}, least {min(gain):+.2f}  prompts {len(gain)}  {name}")


def main() -> None:
    parser = argument_reader(__doc__)
    parser.add_argument("captures", nargs="*", type=Path)
    parser.add_argument("--videos", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.videos is not None:
        print_gains(asked.videos)
    if asked.captures:
        records = measure_rules([prepare(call) for path in asked.captures for call in read_captures(path)[0]])
        if asked.out is not None:
            append_records(asked.out, records)


if __name__ == "__main__":
    main()
