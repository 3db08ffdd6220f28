"""One command for people with any NVIDIA card: our kernels in every precision beside PyTorch's attention and
SageAttention's.

Sizes are those of a 480p video and fit 8 GB. Errors are relative, on sampled rows, against float64 of the same inputs
and the same plan. On Hopper the plain Triton kernel, which other cards run, stands beside Hopper's own: the check that
it is right on a real GPU. Without a GPU the definitions run at a tiny size: a rehearsal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from parkattn.checks import first_line
from parkattn.ops import Backend, attend
from parkattn.ops.attend.sage import attend_dense_sage, sage_version, why_no_sage
from parkattn.plan import Plan
from parkattn.segments import segment_mean
from parkattn.settings import KEY_GRANULE, PRECISIONS, QUERY_TILE
from parklab.bench.attend import in_precisions, kernels_for
from parklab.bench.official import BF16_ERROR, INT8_ERROR
from parklab.bench.problems import TINY, WAN_14B, Shape, mixture, random_plan
from parklab.bench.timing import free_memory, gpu_environment, steady_ms

TOKENS = 32_760  # 81 frames of 480 x 832
DENSITIES = (0.25, 0.10)
HEADS = (40, 24, 12, 6, 3)  # the most that fit
TENSORS = 12  # q, k, v and out, gathered copies, and what other packages copy
SAMPLED_HEADS, SAMPLED_ROWS = 4, 32
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ERRORS = {"int8": INT8_ERROR}
COLUMNS = ("dtype", "work", "kernel", "ms", "tflops", "ratio", "error")


class Row(NamedTuple):
    work: str  # dense, or sparse at a density
    kernel: str
    call: Callable[[], Tensor]
    plan: Plan | None = None
    compensate: bool = False
    allowed: float = BF16_ERROR  # of the norm
    absent: str = ""  # why it cannot run


def card_device() -> torch.device:
    """The GPU; where there is none, or the interpreter is asked for, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not _interpreted() else "cpu")


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
    device: torch.device,
    *,
    repeats: int = 5,
    budget_s: float = 240,
    advance: Callable[[str], None] = lambda doing: None,
) -> Iterator[dict[str, Any]]:
    """A record for each row; one that cannot run, or for which no time is left, says so in its note."""
    began, shape = time.monotonic(), shape_for(device)
    for dtype in NAMES:
        torch.manual_seed(0)
        q, k, v = (mixture(shape, shape.query_blocks, device, dtype) for _ in range(3))
        baseline: float | None = None
        for row in _rows(q, k, v, shape, device):
            advance(f"{NAMES[dtype]} {row.work} {row.kernel}")
            record = _fact(row, dtype, shape)
            if row.absent or time.monotonic() - began > budget_s:
                yield record | {"note": row.absent or "no time left"}
                continue
            try:
                record |= _measured(row, record["density"], q, k, v, repeats)
            except Exception as failure:  # another package, or a kernel that this card refuses: the others still run
                yield record | {"ok": False, "note": f"failed: {type(failure).__name__}: {first_line(failure)}"}
                continue
            baseline = record["ms"] if baseline is None else baseline
            note = "" if record["ok"] else f"wrong: error above {row.allowed:.2g}"
            yield record | {"ratio": record["ms"] / baseline, "note": note}
        del q, k, v
        free_memory()


def _rows(q: Tensor, k: Tensor, v: Tensor, shape: Shape, device: torch.device) -> Iterator[Row]:
    """PyTorch's attention first: the others are compared with it."""
    yield Row("dense", "pytorch", partial(scaled_dot_product_attention, q, k, v))
    if device.type == "cuda":
        yield Row("dense", "pytorch, cudnn", partial(_cudnn, q, k, v))
    sage = partial(attend_dense_sage, q, k, v, scale=None)
    yield Row(
        "dense",
        f"sageattention {sage_version() or ''}".strip(),
        sage,
        allowed=INT8_ERROR,
        absent=why_no_sage(q, k, v) or "",
    )
    engines = list(_engines(q, device))
    for kernel, ours in engines:
        call = partial(attend.over_all, ours, q, k, v)
        yield Row("dense", kernel, call, allowed=_allowed(kernel))
    for density in DENSITIES:
        # mean keys stand for skipped blocks, as in the profiles, at the lower density
        compensate = density == DENSITIES[-1]
        plan = random_plan(shape, density, device, multiples=(1, 1) if shape is TINY else (QUERY_TILE, KEY_GRANULE))
        for kernel, ours in engines:
            call = partial(attend.over_kept, ours, q, k, v, plan, compensate=compensate)
            work = f"sparse {density:.2f}{', compensated' if compensate else ''}"
            yield Row(work, kernel, call, plan, compensate, _allowed(kernel))


def facts_of(device: torch.device) -> dict[str, Any]:
    """What a row of another person's card is read with."""
    facts = gpu_environment() | {"rehearsal": device.type != "cuda", "sageattention": sage_version()}
    if device.type != "cuda":
        return facts
    card = torch.cuda.get_device_properties(device)
    return facts | {"capability": f"{card.major}.{card.minor}", "memory_gb": card.total_memory / 1e9}


def _engines(q: Tensor, device: torch.device) -> Iterator[tuple[str, Backend]]:
    """Our kernels that this device runs, in every precision that they have; Hopper's first, then the plain one."""
    if device.type == "cuda" or _interpreted():
        yield from in_precisions(kernels_for(device, q.shape[-1]), q.shape[-1]).items()
        return
    for precision in PRECISIONS:
        name = "definition" if precision == "bf16" else f"definition {precision}"
        yield name, Backend("reference", "rehearsal", precision)


def _measured(row: Row, density: float, q: Tensor, k: Tensor, v: Tensor, repeats: int) -> dict[str, Any]:
    error = sampled_error(row.call(), q, k, v, row.plan, compensate=row.compensate)
    ms = steady_ms({"": row.call}, repeats)[""]
    flops = 4 * q.shape[1] * q.shape[2] ** 2 * q.shape[3] * density
    return {"ms": ms, "tflops": flops / ms / 1e9, "error": error, "ok": error <= row.allowed}


def _fact(row: Row, dtype: torch.dtype, shape: Shape) -> dict[str, Any]:
    density = 1.0 if row.plan is None else row.plan.density().mean().item()
    facts = {"benchmark": "card", "dtype": NAMES[dtype], "work": row.work, "kernel": row.kernel, "density": density}
    return facts | {"shape": shape._asdict(), "allowed": row.allowed}


def sampled_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, *, compensate: bool) -> float:
    """|out - exact| / |exact| over rows of some heads; exact in float64 from the same q, k, v, over the keys that the
    plan keeps.
    """
    rows = torch.linspace(0, q.shape[2] - 1, SAMPLED_ROWS, device=q.device).long().unique()
    wrong, whole = 0.0, 0.0
    for head in torch.linspace(0, q.shape[1] - 1, SAMPLED_HEADS).long().unique().tolist():
        keys, values = k[0, head].double(), v[0, head].double()
        scores = q[0, head, rows].double() @ keys.T * q.shape[-1] ** -0.5
        if plan is not None:
            kept = plan.mask[0, head, plan.queries.labels[0, head, rows].long()]  # [rows kb]
            names = plan.keys.labels[0, head].long()
            scores = scores.masked_fill(~kept[:, names], -torch.inf)
            if compensate:
                sizes = plan.keys.sizes[0, head].double()
                means, mean_values = (segment_mean(x, names, len(sizes))[0] for x in (keys, values))
                stand_ins = q[0, head, rows].double() @ means.T * q.shape[-1] ** -0.5 + sizes.log()
                scores = torch.cat([scores, stand_ins.masked_fill(kept, -torch.inf)], -1)
                values = torch.cat([values, mean_values])
        exact = scores.softmax(-1) @ values
        wrong += (out[0, head, rows].double() - exact).square().sum().item()
        whole += exact.square().sum().item()
    return float((wrong / whole) ** 0.5)


def _allowed(kernel: str) -> float:
    """A precision's own bar, by the last word of the label."""
    return ERRORS.get(kernel.split()[-1], BF16_ERROR)


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
