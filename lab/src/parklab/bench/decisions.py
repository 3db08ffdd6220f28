"""The choices the paper leaves open, measured one at a time on the built-in scene: recall at a fixed share of key
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parkattn.park import build_plan
from parklab.metrics.budget import solve_budget
from parklab.metrics.retrieval import attention_recall, score_error
from parklab.record import environment
from parklab.research import ResearchConfig
from parklab.scene import clustered_scene

BASE = ResearchConfig(query_clusters=32, key_clusters=64, top_p=None, top_k=0.15)
CHOICES: dict[str, list[dict[str, Any]]] = {
    "k-means iterations": [{"kmeans_iterations": n} for n in (1, 2, 3, 5, 10, 20, 50)],
    "seed of the first tokens": [{"seed": seed} for seed in range(5)],
    "shrinkage alpha": [{"alpha": alpha} for alpha in (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)],
    "stability epsilon": [{"epsilon": epsilon} for epsilon in (1e-8, 1e-6, 1e-4, 1e-2)],
    "metric root": [{"metric_root": root} for root in ("cholesky", "sqrt")],
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
    facts = environment()
    scene = clustered_scene()
    for choice, values in CHOICES.items():
        for value in values:
            yield {
                "benchmark": "decisions",
                "choice": choice,
                "value": value,
                **_quality(scene.q, scene.k, BASE.replace(**value)),
                "environment": facts,
            }
    for queries, keys in MULTIPLES:
        value = {"query_multiple": queries, "key_multiple": keys}
        quality = _quality(scene.q, scene.k, _at_density(scene.q, scene.k, PAPER_BLOCKS.replace(**value)))
        yield {"benchmark": "decisions", "choice": "block borders", "value": value, **quality, "environment": facts}
    for queries, keys in ((1, 1), (64, 32), (128, 32)):
        value = {"query_multiple": queries, "key_multiple": keys}
        quality = _quality(scene.q, scene.k, PAPER_BLOCKS.replace(top_k=None, top_p=0.9, **value))
        yield {
            "benchmark": "decisions",
            "choice": "block borders, p = 0.9",
            "value": value,
            **quality,
            "environment": facts,
        }
    earlier = build_plan(scene.q, scene.k, BASE)
    random = torch.Generator().manual_seed(1)
    q, k = (x + DRIFT * x.std() * torch.randn(x.shape, generator=random) for x in (scene.q, scene.k))
    for iterations in (1, 2, 5, 10):
        for start in (None, earlier):
            config, value = (
                BASE.replace(kmeans_iterations=iterations, warm_iterations=iterations),
                {"iterations": iterations, "warm": start is not None},
            )
            yield {
                "benchmark": "decisions",
                "choice": "warm start",
                "value": value,
                **_quality(q, k, config, start),
                "environment": facts,
            }


def _at_density(q: torch.Tensor, k: torch.Tensor, config: ResearchConfig) -> ResearchConfig:
    """The config with the top-p that gives EQUAL_DENSITY: what rounding does to the estimate must not show as more or
    less work.
    """

    def keeping(mass: float) -> ResearchConfig:
        return config.replace(top_k=None, top_p=mass)

    return keeping(
        solve_budget(
            lambda mass: build_plan(q, k, keeping(mass)).density().mean().item(),
            EQUAL_DENSITY,
            evaluations=13,
            close=1e-4,
        )[0]
    )


def _quality(q: torch.Tensor, k: torch.Tensor, config: ResearchConfig, start: Any = None) -> dict[str, float]:
    plan = build_plan(q, k, config, start=start)
    return {
        "recall": round(attention_recall(q, k, plan).mean().item(), 4),
        "density": round(plan.density().mean().item(), 4),
        "score_error": round(score_error(q, k, plan.keys.labels, plan.key_clusters).mean().item(), 4),
    }
