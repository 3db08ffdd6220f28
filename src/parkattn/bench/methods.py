"""What each method's plan and attention cost at the sizes of real videos, at its authors' settings, on Gaussian mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from parkattn.backend import attend_planned, resolve_for
from parkattn.bench.problems import Case, Shape, mixture, verdict
from parkattn.bench.timing import extra_mb, free_memory, median_ms
from parkattn.methods import METHODS, make_method
from parkattn.planned import PlannedMethod, make_plan
from parkattn.site import CallSite

SIZES = {"wan-14b": (40, (21, 45, 80), 0), "hunyuan": (24, (32, 45, 80), 256)}  # heads, grid, text tokens
TINY_SIZES = {"tiny": (1, (2, 4, 6), 0)}
PADDED = 100  # text tokens that are padding, where there is text
CENTRES = (300, 700, 700)  # of the mixtures of q, k and v


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Every method gives finite output for text and padding."""
    for name in METHODS:
        q, k, v, site = _problem(2, (2, 8, 8), 20, device, 64)
        out = make_method(name)(q, k, v, site).out
        yield verdict(f"{name}: finite", (~out.isfinite()).sum(), 0)


def measure(device: torch.device, peak: dict[str, float], *, repeats: int = 3, rehearse: bool = False) -> Iterator[dict[str, Any]]:
    """One record per method and size."""
    for label, (heads, grid, words) in (TINY_SIZES if rehearse else SIZES).items():
        q, k, v, site = _problem(heads, grid, words, device, 64 if rehearse else 128)
        for name in METHODS:
            method = make_method(name)
            if not isinstance(method, PlannedMethod):
                continue
            call = partial(make_plan, q, k, method.planner, site, None)
            plan, backend = call(), resolve_for(q, method.config.backend)
            attend = partial(attend_planned, q, k, v, plan, backend, scale=None, compensate=method.config.compensate)
            yield {
                "benchmark": "methods",
                "shape": label,
                "method": name,
                "density": plan.density().mean().item(),
                "plan_ms": median_ms(call, min(repeats, 3)),
                "plan_mb": extra_mb(call),
                "attend_ms": median_ms(attend, min(repeats, 3)),
                "attend_mb": extra_mb(attend),
            }
            del plan, attend
            free_memory()


def _problem(heads: int, grid: tuple[int, int, int], words: int, device: torch.device, dim: int) -> tuple[Any, ...]:
    n = grid[0] * grid[1] * grid[2] + words
    q, k, v = (mixture(Shape(heads, n, 128, 512, dim), centres, device) for centres in CENTRES)
    valid = (torch.arange(n, device=device) < n - min(PADDED, words // 2))[None] if words else None
    text = slice(n - words, n) if words else None
    return q, k, v, CallSite(step=30, total_steps=50, grid=grid, text=text, key_valid=valid, values=v)
