"""FlashInfer's variable-block attention, the paper's choice: is it right behind our seam, and what do its plan and its
kernel cost.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from parkattn.ops.attend.definition import DefinedAttention
from parklab.bench.attend import dense_calls
from parklab.bench.problems import WAN_14B, Case, Shape, random_plan, rows, verdict
from parklab.bench.timing import free_memory, steady_ms

if TYPE_CHECKING:
    from parkattn.ops.attend.flashinfer import FlashInferAttention

KERNELS = ("fa2", "fa3")


def installed(device: torch.device) -> bool:
    """Where it is not, `park bench gpu` leaves it out and `park bench flashinfer` is refused."""
    return device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None


def flashinfer_attention(kernel: str) -> FlashInferAttention:
    from parkattn.ops.attend.flashinfer import FlashInferAttention

    return FlashInferAttention(kernel=kernel)


def gate(device: torch.device, *, rehearse: bool = False, kernels: tuple[str, ...] = KERNELS) -> Iterator[Case]:
    """Against the float64 definition, with empty blocks."""
    shape = Shape(3, 1500, 12, 70)
    plan = random_plan(shape, 0.35, device, empty=True)
    for kernel in kernels:
        for dtype in (torch.bfloat16, torch.float16):
            q, k, v = rows(shape, device, dtype)
            reference = partial(DefinedAttention().over_kept, plan=plan, scale=None, compensate=False)
            exact, plain = reference(q.double(), k.double(), v.double()), reference(q, k, v).double()
            found = flashinfer_attention(kernel).over_kept(q, k, v, plan, scale=None, compensate=False)
            allowed = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
            yield verdict(f"flashinfer {kernel} {str(dtype)[6:]}", (found.double() - exact).abs().max(), allowed)


def measure(
    device: torch.device,
    peak: dict[str, float],
    *,
    repeats: int = 7,
    rehearse: bool = False,
    kernels: tuple[str, ...] = KERNELS,
) -> Iterator[dict[str, Any]]:
    shape, density = WAN_14B, 0.25
    plan = random_plan(shape, density, device)
    q, k, v = rows(shape, device)
    calls = dict([next(iter(dense_calls(q, k, v).items()))])
    in_order = [x[0].contiguous() for x in (q, k, v)]
    for kernel in kernels:
        attention = flashinfer_attention(kernel)
        wrapper = attention.planned(q, k, plan)
        calls[f"flashinfer {kernel}: its plan"] = partial(attention.planned, q, k, plan)
        calls[f"flashinfer {kernel}: attention alone"] = partial(wrapper.run, *in_order)
        calls[f"flashinfer {kernel}: all of a reuse step"] = partial(
            attention.over_kept, q, k, v, plan, scale=None, compensate=False
        )
    times = steady_ms(calls, repeats)
    baseline = next(iter(times))
    flops = 4 * shape.heads * shape.tokens**2 * shape.dim * plan.density().mean().item()
    for part, ms in times.items():
        yield {
            "benchmark": "flashinfer",
            "shape": shape._asdict(),
            "density": plan.density().mean().item(),
            "part": part,
            "ms": ms,
            "baseline": baseline,
            "ratio": ms / times[baseline],
            "useful_tflops": flops / ms / 1e9 if "alone" in part else None,
        }
    del calls, wrapper
    free_memory()
