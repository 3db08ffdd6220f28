"""The choices the paper leaves open, measured one at a time on the built-in scene: recall at a fixed share of key
blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parkattn.park import build_plan
from parkattn.plan import Plan
from parklab.metrics.budget import solve_budget
from parklab.metrics.retrieval import attention_recall, score_error
from parklab.record import environment
from parklab.research import ResearchConfig
from parklab.scene import clustered_scene

BASE = ResearchConfig(query_clusters=32, key_clusters=64, top_p=None, top_k=0.15)
CHOICES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "k-means iterations": ("kmeans_iterations", (1, 2, 3, 5, 10, 20, 50)),
    "seed of the first tokens": ("seed", (0, 1, 2, 3, 4)),
    "shrinkage alpha": ("alpha", (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)),
    "stability epsilon": ("epsilon", (1e-8, 1e-6, 1e-4, 1e-2)),
    "metric root": ("metric_root", ("cholesky", "sqrt")),
}
# tokens per block as in the paper (590 queries, 148 keys), so that a multiple means what it means there
PAPER_BLOCKS = BASE.replace(query_clusters=14, key_clusters=56)
MULTIPLES = ((1, 1), (1, 16), (1, 32), (1, 64), (64, 1), (128, 1), (64, 32), (128, 32))
EQUAL_DENSITY = 0.25
DRIFT = 0.3  # noise between the step a plan is from and the step it starts, relative to the tokens


def measure_decisions() -> Iterator[dict[str, Any]]:
    """One record per value of each choice, then rounded borders at equal density, then warm against cold starts on
    tokens that drifted.
    """
    facts, scene = environment(), clustered_scene()
    q, k = scene.q, scene.k

    def record(choice: str, value: dict[str, Any], quality: dict[str, float]) -> dict[str, Any]:
        return {"benchmark": "decisions", "choice": choice, "value": value, **quality, "environment": facts}

    for choice, (field, values) in CHOICES.items():
        for value in values:
            yield record(choice, {field: value}, _quality(q, k, BASE.replace(**{field: value})))
    for queries, keys in MULTIPLES:
        borders = {"query_multiple": queries, "key_multiple": keys}
        config = _at_density(q, k, PAPER_BLOCKS.replace(**borders))
        yield record("block borders", borders, _quality(q, k, config))
    for queries, keys in ((1, 1), (64, 32), (128, 32)):
        borders = {"query_multiple": queries, "key_multiple": keys}
        config = PAPER_BLOCKS.replace(top_k=None, top_p=0.9, **borders)
        yield record("block borders, p = 0.9", borders, _quality(q, k, config))
    earlier = build_plan(q, k, BASE)
    random = torch.Generator().manual_seed(1)
    q, k = (x + DRIFT * x.std() * torch.randn(x.shape, generator=random) for x in (q, k))
    for iterations, start in itertools.product((1, 2, 5, 10), (None, earlier)):
        config = BASE.replace(kmeans_iterations=iterations, warm_iterations=iterations)
        value = {"iterations": iterations, "warm": start is not None}
        yield record("warm start", value, _quality(q, k, config, start))


def _at_density(q: Tensor, k: Tensor, config: ResearchConfig) -> ResearchConfig:
    """The config with the top-p that gives EQUAL_DENSITY: what rounding does to the estimate must not show as more or
    less work.
    """

    def density(mass: float) -> float:
        return build_plan(q, k, config.replace(top_k=None, top_p=mass)).density().mean().item()

    mass, _ = solve_budget(density, EQUAL_DENSITY, evaluations=13, close=1e-4)
    return config.replace(top_k=None, top_p=mass)


def _quality(q: Tensor, k: Tensor, config: ResearchConfig, start: Plan | None = None) -> dict[str, float]:
    plan = build_plan(q, k, config, start=start)
    found = {
        "recall": attention_recall(q, k, plan),
        "density": plan.density(),
        "score_error": score_error(q, k, plan.keys.labels, plan.key_clusters),
    }
    return {name: round(value.mean().item(), 4) for name, value in found.items()}
