"""One attention layer as a model calls it: plan, refresh step and reuse step through `park_attention`, against dense
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parkattn.backend import resolve
from parkattn.ops.attend.definition import dense_attention
from parkattn.park import Park, ParkConfig, build_plan, park_attention
from parkattn.plan import Plan
from parkattn.site import CallSite
from parklab.bench.attend import dense_calls
from parklab.bench.problems import TINY, WAN_14B, Case, Shape, mixture, verdict
from parklab.bench.timing import Call, extra_mb, steady_ms
from parklab.research import ResearchConfig

PAPER = ResearchConfig.preset("wan2.1-14b", backend="triton")
SMALL = ResearchConfig(
    query_clusters=4,
    key_clusters=8,
    query_multiple=4,
    key_multiple=2,
    kmeans_iterations=2,
    top_p=None,
    top_k=0.4,
    backend="triton",
)


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """The Triton backend against the definitions on one device: roles, plans, outputs, dense equality, graphs,
    synchronisation.
    """
    shape, config = (
        (TINY, SMALL)
        if rehearse
        else (Shape(4, 3000, 0, 0), PAPER.replace(query_clusters=16, key_clusters=64, top_p=0.8))
    )
    q, k, v = (mixture(shape, centres, device) for centres in (20, 50, 50))
    valid = (torch.arange(shape.tokens, device=device) < 0.9 * shape.tokens)[None]
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "text": {"text": slice(0, 20)},
        "both": {"text": slice(0, 20), "key_valid": valid},
    }
    for name, call in calls.items():
        ours = build_plan(q, k, config, **call)
        theirs = build_plan(q, k, config.replace(backend="reference"), **call)
        assert ours.estimated_mass is not None and theirs.estimated_mass is not None
        # k-means of two roundings ends in two partitions: their estimates must be as good, not equal
        yield verdict(f"{name}: estimated mass", (ours.estimated_mass - theirs.estimated_mass).abs().max(), 0.05)
        yield verdict(f"{name}: density", (ours.density() - theirs.density()).abs().max(), 0.1)
        for compensate in (False, True):
            out = park_attention(q, k, v, config.replace(compensate=compensate), plan=ours)
            reference = config.replace(compensate=compensate, backend="reference")
            exact = park_attention(q.double(), k.double(), v.double(), reference, plan=ours)
            plain = park_attention(q, k, v, reference, plan=ours).double()
            allowed = 2 * (plain - exact).abs().max() + 2 * torch.finfo(q.dtype).eps * exact.abs().max()
            yield verdict(
                f"{name}{', compensated' if compensate else ''}: output", (out.double() - exact).abs().max(), allowed
            )
    everything = park_attention(q, k, v, config.replace(top_p=1.0, top_k=None))
    exact, plain = dense_attention(q.double(), k.double(), v.double()), dense_attention(q, k, v).double()
    allowed = 2 * (plain - exact).abs().max() + 2 * torch.finfo(q.dtype).eps * exact.abs().max()
    yield verdict("every block kept is dense attention", (everything.double() - exact).abs().max(), allowed)
    if device.type == "cuda":
        yield from _gate_no_waiting(q, k, v, config)


def _gate_no_waiting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: ParkConfig) -> Iterator[Case]:
    """A reuse step through Park under PyTorch's synchronisation alarm, and captured in a CUDA graph and replayed on
    other tokens.
    """
    park = Park(config.replace(dense_steps=0))
    for step in (0, 1):
        park(q, k, v, CallSite(layer=0, step=step, total_steps=50))
    torch.cuda.synchronize()
    for step, name in ((2, "reuse"), (60, "refresh")):
        torch.cuda.set_sync_debug_mode("error")
        try:
            park(q, k, v, CallSite(layer=0, step=step, total_steps=100))
            failure = ""
        except RuntimeError as error:
            failure = str(error).split("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        yield {**verdict(f"{name} step without host synchronisation", 1 if failure else 0, 0), "failure": failure}
    plan = build_plan(q, k, config)
    q_in = q.clone()
    park_attention(q_in, k, v, config, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = park_attention(q_in, k, v, config, plan=plan)
    q_in.normal_()
    graph.replay()
    expected = park_attention(q_in, k, v, config, plan=plan)
    yield verdict("CUDA graph replay", (captured != expected).sum(), 0)


def measure(
    device: torch.device, peak: dict[str, float], *, repeats: int = 5, rehearse: bool = False
) -> Iterator[dict[str, Any]]:
    """With block borders as the preset rounds them, and as clustered; tokens and top-p are the same, so densities
    differ.
    """
    shape, preset = (TINY, SMALL) if rehearse else (WAN_14B, PAPER)
    q, k, v = (mixture(shape, centres, device) for centres in (300, 700, 700))
    calls = dense_calls(q, k, v)
    dense = next(iter(calls))
    facts: dict[str, dict[str, Any]] = {label: {} for label in calls}
    for borders, config in (("rounded", preset), ("as clustered", preset.replace(query_multiple=1, key_multiple=1))):
        plan = build_plan(q, k, config)
        parts = _parts(q, k, v, config, plan)
        calls |= {f"{part}, {borders}": call for part, call in parts.items()}
        known = {
            "borders": borders,
            "multiples": (config.query_multiple, config.key_multiple),
            "density": plan.density().mean().item(),
        }
        facts |= {f"{part}, {borders}": known | {"part": part} for part in parts}
    times = steady_ms(calls, repeats)
    for label, ms in times.items():
        yield {
            "benchmark": "layer",
            "shape": shape._asdict(),
            "part": label,
            **facts[label],
            "ms": ms,
            "baseline": dense,
            "ratio": ms / times[dense],
            "extra_mb": extra_mb(calls[label]),
            "backend": resolve(preset.backend, device, q.dtype, shape.dim).reason,
        }


def _parts(q: Tensor, k: Tensor, v: Tensor, config: ParkConfig, plan: Plan) -> dict[str, Call]:
    park = Park(config.replace(dense_steps=0, refresh_interval=None))
    park(q, k, v, CallSite(layer=0, step=0, total_steps=50))
    return {
        "plan, cold": lambda: build_plan(q, k, config),
        "plan, warm": lambda: build_plan(q, k, config, start=plan),
        "attention with a plan": lambda: park_attention(q, k, v, config, plan=plan),
        "refresh step": lambda: park_attention(q, k, v, config, plan=build_plan(q, k, config, start=plan)),
        "reuse step from the store": lambda: park(q, k, v, CallSite(layer=0, step=1, total_steps=50)),
    }
