"""What each method's plan and attention cost at the sizes of real videos, at its authors' settings, on Gaussian
mixtures.

Then each method through `enable` on the real transformers at the same sizes, cut to two blocks of random weights: a
dense step and two sparse ones, where diffusers is installed. That says that a method runs where its users run it, and
what its forwards take.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parkattn.backend import resolve_for
from parkattn.checks import first_line
from parkattn.hosts.diffusers import enable
from parkattn.methods import METHODS, make_method
from parkattn.plan import Plan
from parkattn.planned import PlannedMethod, make_plan
from parkattn.settings import PlannedConfig, Timetable
from parkattn.site import AttentionMethod, CallSite
from parklab.baselines.settings import KMeans
from parklab.baselines.token_groups import TokenGroupsConfig
from parklab.bench.e2e import largest
from parklab.bench.gates import Case, verdict
from parklab.bench.problems import Shape, mixture
from parklab.bench.timing import Calls, Peak, Record, extra_mb, free_memory, median_ms, watched
from parklab.bench.whole_models import MODELS, SMALL, WholeModel, forward_inputs, random_transformer, run_forward
from parklab.research import studied_entry

SIZES = {"wan-14b": (40, (21, 45, 80), 0), "hunyuan": (24, (32, 45, 80), 256)}  # heads, grid, text tokens
TINY_SIZES = {"tiny": (1, (2, 4, 6), 0), "tiny, text": (1, (2, 4, 6), 12)}
TWO_BLOCKS = {
    "wan2.1-14b": {"num_layers": 2},
    "hunyuanvideo": {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
}
REHEARSED = ("dense", "sol", "sta")  # seconds in the interpreter; the others take minutes
STEPS = 3  # of each model: one dense, two sparse
PADDED = 100  # text tokens that are padding, where there is text
CENTRES = (300, 700, 700)  # of the mixtures of q, k and v


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Every method gives finite output for text and padding."""
    for name in METHODS:
        q, k, v, site = _problem(*(TINY_SIZES["tiny, text"] if rehearse else (2, (2, 8, 8), 20)), device, 64)
        out = _method(name, rehearse)(q, k, v, site).out
        yield verdict(f"{name}: finite", (~out.isfinite()).sum(), 0)


def measure(device: torch.device, peak: Peak, *, repeats: int = 3, rehearse: bool = False) -> Iterator[Record]:
    """One record per method and size; a method that fails says why in its record, and the others go on."""
    for label, (heads, grid, words) in (TINY_SIZES if rehearse else SIZES).items():
        q, k, v, site = _problem(heads, grid, words, device, 64 if rehearse else 128)
        for name in METHODS:
            method = _method(name, rehearse)
            if isinstance(method, PlannedMethod):
                record = {"benchmark": "methods", "shape": label, "method": name}
                yield _tried(record, partial(_costs, method, q, k, v, site, min(repeats, 3)))
        del q, k, v, site
    for name in TWO_BLOCKS if importlib.util.find_spec("diffusers") else ():
        yield from through_model((SMALL if rehearse else MODELS)[name], name, device, rehearse=rehearse)


def through_model(model: WholeModel, label: str, device: torch.device, *, rehearse: bool = False) -> Iterator[Record]:
    """One record per method: seconds of its forwards, what its calls were, and whether everything was finite."""
    model = dataclasses.replace(model, sizes={**model.sizes, **TWO_BLOCKS[label]})
    transformer = random_transformer(model, device)
    inputs = forward_inputs(model, transformer, device)
    for name in REHEARSED if rehearse else METHODS:
        record = {"benchmark": "methods through a model", "shape": label, "method": name, "tokens": model.tokens}
        yield _tried(record, partial(_forwards, name, transformer, inputs, device, rehearse))


def _tried(record: Record, costs: Callable[[], Record]) -> Record:
    """With what was found, or why it failed."""
    try:
        return record | costs()
    except (RuntimeError, ValueError, TypeError, AssertionError) as failure:
        return record | {"ok": False, "failure": f"{type(failure).__name__}: {first_line(failure)}"}
    finally:
        free_memory()


def _forwards(name: str, transformer: Any, inputs: Record, device: torch.device, rehearse: bool) -> Record:
    method = _method(name, rehearse)
    config = getattr(method, "config", None)
    if isinstance(config, Timetable):
        # no prefix of a fifth of the steps; a layer that stays dense stays so, but for one of two, as a short call may
        run = {"dense_steps": 1, "dense_fraction": 0.0, "dense_layers": config.dense_layers[:1]}
        short = {"least_tokens": 1} if isinstance(config, TokenGroupsConfig) else {}
        method = make_method(studied_entry(name), config.replace(**run, **short))
    with enable(transformer, method=method, total_steps=STEPS, fuse=False) as session:
        forwards = [partial(run_forward, transformer, inputs, 999.0 - step) for step in range(STEPS)]
        runs = [watched(forward, device) for forward in forwards]
        report = session.summary()
    sparse = sum(count for phase, count in report.calls.items() if phase != "dense")
    finite = all(run.finite for run in runs)
    return {
        "ok": finite and bool(sparse or name == "dense"), "finite": finite, "calls": report.calls,
        "density": report.density, "seconds": [run.seconds for run in runs], "forward_s": runs[-1].seconds,
        "peak_gb": largest([run.peak_gb for run in runs]), "dense_because": report.dense_because,
    }  # fmt: skip


def _method(name: str, rehearse: bool) -> AttentionMethod:
    """At its defaults; a rehearsal runs the kernels in the interpreter, where "auto" would not, and few iterations."""
    entry = studied_entry(name)
    if not rehearse:
        return make_method(entry)
    few = {"kmeans_iterations": 2, "warm_iterations": 1} if issubclass(entry.config, KMeans) else {}
    has_kernels = issubclass(entry.config, PlannedConfig) and entry.config().backend == "auto"
    return make_method(entry, few | ({"backend": "triton"} if has_kernels else {}))


def _costs(method: PlannedMethod, q: Tensor, k: Tensor, v: Tensor, site: CallSite, repeats: int) -> dict[str, float]:
    plan, parts = parts_of_call(method, q, k, v, site)
    costs = {f"{name}_ms": median_ms(part, repeats) for name, part in parts.items()}
    memory = {f"{name}_mb": extra_mb(parts[name]) for name in ("plan", "attend")}
    return {"density": plan.density().mean().item(), **costs, **memory}


def parts_of_call(method: PlannedMethod, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> tuple[Plan, Calls]:
    """A run's first plan, and what can be timed: making it, a later one that may start from it, attention over it, and
    its repair.
    """
    first = partial(make_plan, q, k, method.planner, site, None)
    plan, backend = first(), resolve_for(q, method.config.backend)
    later = partial(make_plan, q, k, method.planner, dataclasses.replace(site, step=site.step + 1), plan)
    attend = partial(method.attend, q, k, v, plan, site, backend)
    parts: Calls = {"plan": first, "later_plan": later, "attend": attend}
    if method.repair is not None:
        parts["repair"] = partial(method.repair.repair, q, k, v, plan, attend(), site)
    return plan, parts


def _problem(heads: int, grid: tuple[int, int, int], words: int, device: torch.device, dim: int) -> tuple[Any, ...]:
    n = grid[0] * grid[1] * grid[2] + words
    q, k, v = (mixture(Shape(heads, n, 128, 512, dim), centres, device) for centres in CENTRES)
    valid = (torch.arange(n, device=device) < n - min(PADDED, words // 2))[None] if words else None
    text = slice(n - words, n) if words else None
    return q, k, v, CallSite(step=30, total_steps=50, grid=grid, text=text, key_valid=valid, values=v)
