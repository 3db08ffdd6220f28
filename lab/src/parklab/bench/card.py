"""One command for people with any NVIDIA card: our kernels in every precision beside PyTorch's attention and
SageAttention's.

Sizes are those of a 480p video and fit 8 GB. Errors are relative, on sampled rows, against float64 of the same inputs
and the same plan. On Hopper the plain Triton kernel, which other cards run, stands beside Hopper's own: the check that
it is right on a real GPU. Without a GPU the definitions run at a tiny size: a rehearsal.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parkattn.checks import first_line
from parkattn.ops import Backend, attend
from parkattn.ops.attend.definition import DefinedAttention, dense_attention
from parkattn.ops.attend.sage import attend_dense_sage, sage_version, why_no_sage
from parkattn.plan import Blocks, Plan, arrange
from parkattn.settings import KEY_GRANULE, PRECISIONS, QUERY_TILE
from parklab.bench.attend import cudnn_attention, in_precisions, kernels_for
from parklab.bench.official import BF16_ERROR, INT8_ERROR
from parklab.bench.problems import TINY, WAN_14B, Shape, mixture, random_plan
from parklab.bench.timing import Record, free_memory, gpu_environment, interpreted, steady_ms

TOKENS = 32_760  # 81 frames of 480 x 832
DENSITIES = (0.25, 0.10)
HEADS = (40, 24, 12, 6, 3)  # the most that fit
TENSORS = 12  # q, k, v and out, gathered copies, and what other packages copy
SAMPLED_HEADS, SAMPLED_ROWS = 4, 32
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ERRORS = {"int8": INT8_ERROR, "sageattention": INT8_ERROR}  # of the norm, by a word of the label; else BF16_ERROR
COLUMNS = ("dtype", "work", "kernel", "ms", "tflops", "ratio", "error")


class CardRow(NamedTuple):
    work: str  # dense, or sparse at a density
    kernel: str
    call: Callable[[], Tensor]
    plan: Plan | None = None
    compensate: bool = False
    absent: str = ""  # why it cannot run


def card_device() -> torch.device:
    """The GPU; where there is none, or the interpreter is asked for, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not interpreted() else "cpu")


def shape_for(device: torch.device, free: int | None = None) -> Shape:
    """As many heads of Wan2.1-14B at 480p as the free memory holds; free: in bytes, asked for on the GPU."""
    if device.type != "cuda" and free is None:
        return TINY
    free = torch.cuda.mem_get_info(device)[0] if free is None else free
    shape = WAN_14B._replace(tokens=TOKENS)
    needed = TENSORS * 2 * shape.tokens * shape.dim  # bytes of a head
    fitting = next((heads for heads in HEADS if heads * needed <= 0.9 * free), None)
    if fitting is None:
        raise ValueError(
            f"park bench card: expected {needed * HEADS[-1] / 1e9:.1f} GB of free GPU memory, got {free / 1e9:.1f} GB; "
            "close other programs on this card."
        )
    return shape._replace(heads=fitting)


def measure(
    device: torch.device, *, repeats: int = 5, budget_s: float = 240,
    advance: Callable[[str], None] = lambda doing: None,
) -> Iterator[Record]:  # fmt: skip
    """A record for each row; one that cannot run, or for which no time is left, says so in its note."""
    began, shape = time.monotonic(), shape_for(device)
    for dtype, name in NAMES.items():
        torch.manual_seed(0)
        q, k, v = (mixture(shape, shape.query_blocks, device, dtype) for _ in range(3))
        baseline: float | None = None
        for row in _rows(q, k, v, shape):
            advance(f"{name} {row.work} {row.kernel}")
            density = 1.0 if row.plan is None else row.plan.density().mean().item()
            allowed = max(ERRORS.get(word, BF16_ERROR) for word in row.kernel.split())
            record: Record = {
                "benchmark": "card",
                "dtype": name,
                "work": row.work,
                "kernel": row.kernel,
                "density": density,
            }
            record |= {"shape": shape._asdict(), "allowed": allowed}
            if row.absent or time.monotonic() - began > budget_s:
                yield record | {"note": row.absent or "no time left"}
                continue
            try:
                error = sampled_error(row.call(), q, k, v, row.plan, compensate=row.compensate)
                ms = steady_ms({"": row.call}, repeats)[""]
            except Exception as failure:  # another package, or a kernel that this card refuses: the others still run
                yield record | {"ok": False, "note": f"failed: {type(failure).__name__}: {first_line(failure)}"}
                continue
            baseline, ok = baseline or ms, error <= allowed
            note = "" if ok else f"wrong: error above {allowed:.2g}"
            found = {"ms": ms, "tflops": shape.flops(density) / ms / 1e9, "ratio": ms / baseline}
            yield record | found | {"error": error, "ok": ok, "note": note}
        del q, k, v
        free_memory()


def _rows(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Iterator[CardRow]:
    """PyTorch's attention first: the others are compared with it."""
    yield CardRow("dense", "pytorch", partial(scaled_dot_product_attention, q, k, v))
    if q.is_cuda:
        yield CardRow("dense", "pytorch, cudnn", partial(cudnn_attention, q, k, v))
    sage = partial(attend_dense_sage, q, k, v, scale=None)
    name = f"sageattention {sage_version() or ''}".strip()
    yield CardRow("dense", name, sage, absent=why_no_sage(q, k, v) or "")
    engines = engines_for(q)
    for kernel, ours in engines.items():
        yield CardRow("dense", kernel, partial(attend.over_all, ours, q, k, v))
    for density in DENSITIES:
        # mean keys stand for skipped blocks, as in the profiles, at the lower density
        compensate = density == DENSITIES[-1]
        multiples = (1, 1) if shape is TINY else (QUERY_TILE, KEY_GRANULE)
        plan = random_plan(shape, density, q.device, multiples=multiples)
        work = f"sparse {density:.2f}{', compensated' if compensate else ''}"
        for kernel, ours in engines.items():
            call = partial(attend.over_kept, ours, q, k, v, plan, compensate=compensate)
            yield CardRow(work, kernel, call, plan, compensate)


def facts_of(device: torch.device) -> Record:
    """What a row of another person's card is read with."""
    facts = gpu_environment() | {"rehearsal": device.type != "cuda", "sageattention": sage_version()}
    if device.type != "cuda":
        return facts
    card = torch.cuda.get_device_properties(device)
    return facts | {"capability": f"{card.major}.{card.minor}", "memory_gb": card.total_memory / 1e9}


def engines_for(q: Tensor) -> dict[str, Backend]:
    """Our kernels that q's device runs, in every precision that they have; Hopper's first, then the plain one."""
    if q.is_cuda or interpreted():
        return in_precisions(kernels_for(q.device, q.shape[-1]), q.shape[-1])
    names = {precision: f"definition {precision}".removesuffix(" bf16") for precision in PRECISIONS}
    return {name: Backend("reference", "rehearsal", precision) for precision, name in names.items()}


def sampled_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, *, compensate: bool) -> float:
    """|out - exact| / |exact| over rows of some heads; exact: the definition in float64, on the same inputs."""
    rows = torch.linspace(0, q.shape[2] - 1, SAMPLED_ROWS, device=q.device).long().unique()
    wrong, whole = 0.0, 0.0
    for head in torch.linspace(0, q.shape[1] - 1, SAMPLED_HEADS).long().unique().tolist():
        found, queries, keys, values = (x[:, head : head + 1] for x in (out, q, k, v))
        given = queries[:, :, rows].double(), keys.double(), values.double()
        if plan is None:
            exact = dense_attention(*given)
        else:
            labels, mask, *parts = (
                x[:, head : head + 1]
                for x in (plan.queries.labels, plan.mask, plan.keys.labels, plan.keys.permutation(), plan.keys.offsets)
            )
            sides = arrange(labels[:, :, rows], plan.queries.count), Blocks(*parts)
            here = dataclasses.replace(plan, queries=sides[0], keys=sides[1], mask=mask)
            exact = DefinedAttention().over_kept(*given, here, scale=None, compensate=compensate)
        wrong += (found[:, :, rows].double() - exact).square().sum().item()
        whole += exact.square().sum().item()
    return float((wrong / whole) ** 0.5)
