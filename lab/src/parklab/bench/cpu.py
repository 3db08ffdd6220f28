"""What a CPU can say on the built-in scene: time per call, sparse against dense, and after how many reuses a plan has
paid for itself; and the choices that the paper leaves open, one at a time, by recall at a fixed share of key blocks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from parkattn.ops.attend.definition import dense_attention
from parkattn.park import ParkConfig, build_plan, park_attention
from parkattn.plan import Plan
from parklab.metrics.budget import solve_budget
from parklab.metrics.retrieval import attention_recall, score_error
from parklab.record import environment
from parklab.research import ResearchConfig
from parklab.scene import clustered_scene

GRID = (8, 32, 32)  # 8,192 tokens
DENSITIES = (0.5, 0.25, 0.1)
Advance = Callable[[str], None]
BLOCKS = ParkConfig(query_clusters=16, key_clusters=64)  # blocks of about the paper's 590 queries and 148 keys


def measure_cpu(
    *, densities: tuple[float, ...] = DENSITIES, threads: int = 2, repeats: int = 5,
    advance: Advance = lambda doing: None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One record per density. Dense and sparse runs alternate, so that a busy machine slows both alike.

    advance(what comes next) is called once before the gate, and for each density before its budget is searched and
    before every round.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scene = clustered_scene(heads=4, grid=GRID, dim=64)
        advance("correctness gate")
        _expect_dense_when_all_kept(scene.q, scene.k, scene.v)
        for density in densities:
            yield _compare(scene.q, scene.k, scene.v, density, repeats, advance)
    finally:
        torch.set_num_threads(before)


def rounds(densities: int, repeats: int) -> int:
    """How often `advance` is called."""
    return 1 + densities * (2 + repeats)


def _compare(q: Tensor, k: Tensor, v: Tensor, asked: float, repeats: int, advance: Advance) -> dict[str, Any]:
    advance(f"density {asked}: budget")
    # kept blocks are larger than the average block, so the share of blocks that comes nearest is searched
    share, _ = solve_budget(lambda share: _density(q, k, BLOCKS.replace(top_p=None, top_k=share)), asked)
    config = BLOCKS.replace(top_p=None, top_k=share)
    plan = build_plan(q, k, config)
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: dense_attention(q, k, v),
        "sparse": lambda: park_attention(q, k, v, config, plan=plan),
        "plan": lambda: build_plan(q, k, config),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        advance(f"density {asked}: " + (f"round {number} of {repeats}" if number else "warm-up"))
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    dense, sparse, planning = (median(found[1:]) for found in times.values())
    saved = dense - sparse
    return {
        "benchmark": "cpu",
        "shape": {"heads": q.shape[1], "tokens": q.shape[2], "dim": q.shape[3]},
        "blocks": [config.query_clusters, config.key_clusters],
        "asked_density": asked,
        "density": round(plan.density().mean().item(), 4),
        "dense_ms": round(dense * 1e3, 1),
        "sparse_ms": round(sparse * 1e3, 1),
        "plan_ms": round(planning * 1e3, 1),
        "speedup": round(dense / sparse, 2),
        "calls_to_break_even": round(planning / saved, 2) if saved > 0 else None,
        "environment": environment(),
    }


def _expect_dense_when_all_kept(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The correctness gate: a fast wrong answer is not a result."""
    out, reference = park_attention(q, k, v, BLOCKS.replace(top_p=1.0)), dense_attention(q, k, v)
    error = ((out - reference).norm() / reference.norm()).item()
    if not error < 1e-5:
        raise RuntimeError(
            "with every block kept the output should be dense attention; "
            f"the relative error is {error:.1e}, so nothing was timed."
        )


def _density(q: Tensor, k: Tensor, config: ParkConfig) -> float:
    return build_plan(q, k, config).density().mean().item()


# The choices that the paper leaves open ------------------------------------------------------------------

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

    def keeping(mass: float) -> ResearchConfig:
        return config.replace(top_k=None, top_p=mass)

    found = solve_budget(lambda mass: _density(q, k, keeping(mass)), EQUAL_DENSITY, evaluations=13, close=1e-4)
    return keeping(found[0])


def _quality(q: Tensor, k: Tensor, config: ResearchConfig, start: Plan | None = None) -> dict[str, float]:
    plan = build_plan(q, k, config, start=start)
    found = {
        "recall": attention_recall(q, k, plan),
        "density": plan.density(),
        "score_error": score_error(q, k, plan.keys.labels, plan.key_clusters),
    }
    return {name: round(value.mean().item(), 4) for name, value in found.items()}
