"""Sparse against dense attention on the CPU: time per call, and after how many reuses a plan has paid for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from parkattn.ops.attend.definition import dense_attention
from parkattn.park import ParkConfig, build_plan, park_attention
from parklab.metrics.budget import solve_budget
from parklab.record import environment
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
    """Kept blocks are larger than the average block, so the share of blocks that comes nearest to the token density is
    searched.
    """
    advance(f"density {asked}: budget")

    def density(share: float) -> float:
        return build_plan(q, k, BLOCKS.replace(top_p=None, top_k=share)).density().mean().item()

    config = BLOCKS.replace(top_p=None, top_k=solve_budget(density, asked)[0])
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
