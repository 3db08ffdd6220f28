"""The authors' own kernels beside ours on the same tensors, for time only: what a user gets from their package instead.

| package          | kernel                          | ours beside it            | needs                               |
|------------------|---------------------------------|---------------------------|-------------------------------------|
| flashinfer       | variable-block attention, bf16  | attention, the same plan  | compiles at first use               |
| comfy-kitchen    | Sol-Attn, INT8, with its choice | Sol-Attn: attention, plan | head dim 128                        |
| sageattention    | dense, INT8 scores              | dense attention           | 1.0.6 is Triton; later: from source |
| fastvideo-kernel | STA of 3 x 3 x 3 tiles, bf16    | STA: attention, plan      | sm_90, grids that its kernel knows  |

Theirs get tokens in the order they want; ours in the model's, so that gathering is in our time and not in theirs.
comfy-kitchen and fastvideo-kernel fall back to another kernel in silence where their compiled one does not load:
`compiled` says which one was timed.

FlashInfer, the paper's choice, has a bench of its own: is it right behind our seam, and what do its plan and its kernel
cost. The first use of a kernel compiles it.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parkattn.backend import resolve_for
from parkattn.checks import first_line
from parkattn.methods import make_method
from parkattn.ops import attend
from parkattn.ops.attend.definition import DefinedAttention
from parkattn.ops.permute.definition import gather
from parkattn.planned import PlannedMethod
from parkattn.site import CallSite
from parklab.baselines.sta import tile_of_cell
from parklab.bench.attend import dense_calls
from parklab.bench.gates import Case, against_exact, in_float64_and_own, verdict
from parklab.bench.methods import parts_of_call
from parklab.bench.problems import TINY, WAN_14B, Shape, random_plan, rows
from parklab.bench.timing import Peak, Record, Row, free_memory, in_two_rounds, measured, median_ms
from parklab.record import installed

STA_GRID, STA_TILE, STA_WINDOW = (18, 48, 80), (6, 8, 8), (3, 3, 3)  # of their kernel
DENSITY = 0.25
INT8_ERROR = 0.1  # of the norm: scores of INT8 queries and keys, as their papers have them
BF16_ERROR = 2.0**-6  # of the norm: weights and output of both sides are rounded to 8 bits
FASTVIDEO = "pip install fastvideo-kernel==0.3.2"  # later ones want one version of torch
FLASHINFER, FLASHINFER_KERNELS = "flashinfer-python", ("fa2", "fa3")


class Call(NamedTuple):
    official: Callable[[], Tensor]
    ours: Callable[[], Tensor]  # [b h n d] in the model's order
    our_plan: Callable[[], object] | None = None
    order: Tensor | None = None  # [b h n] int64: the token at each row of theirs; None: as ours
    compiled: bool | None = None  # whether theirs is the package's compiled kernel; None: there is no other


class Package(NamedTuple):
    module: str
    method: str
    install: str
    make: Callable[[Tensor, Tensor, Tensor], Call]
    error: float  # allowed against ours where both compute the same
    grid: tuple[int, int, int] | None = None  # the only one it takes here

    def absence(self, device: torch.device) -> str | None:
        """Why it cannot run, and what to do; None where it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"not installed: {self.install}"
        return None if device.type == "cuda" else "installed, needs a GPU"


def with_flashinfer(q: Tensor, k: Tensor, v: Tensor) -> Call:
    plan = random_plan(Shape(q.shape[1], q.shape[2], 128, 512, q.shape[3]), DENSITY, q.device)
    wrapper = flashinfer_attention().planned(q, k, plan)
    in_blocks = [gather(x, side)[0] for x, side in ((q, plan.queries), (k, plan.keys), (v, plan.keys))]
    ours = partial(attend.over_kept, resolve_for(q, "auto"), q, k, v, plan)
    return Call(partial(wrapper.run, *in_blocks), ours, order=plan.queries.permutation().long())


def with_comfy_kitchen(q: Tensor, k: Tensor, v: Tensor) -> Call:
    package: Any = importlib.import_module("comfy_kitchen")
    by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    ours, plan = _planned("sol", {"topk": DENSITY}, q, k, v, CallSite(step=30, total_steps=50))
    compiled = package.sol_attn_is_available(q.device)
    return Call(lambda: package.sol_attn(*by_token, topk_ratio=DENSITY).transpose(1, 2), ours, plan, compiled=compiled)


def with_sageattention(q: Tensor, k: Tensor, v: Tensor) -> Call:
    sageattn: Any = importlib.import_module("sageattention").sageattn
    by_head = [x.contiguous() for x in (q, k, v)]
    ours = partial(attend.over_all, resolve_for(q, "auto"), q, k, v)
    return Call(lambda: sageattn(*by_head, tensor_layout="HND"), ours)


def with_fastvideo(q: Tensor, k: Tensor, v: Tensor) -> Call:
    ops: Any = importlib.import_module("fastvideo_kernel.ops")
    order = tile_of_cell(STA_GRID, STA_TILE, q.device).argsort(stable=True)
    by_tile = [x[:, :, order].contiguous() for x in (q, k, v)]
    windows, name = [list(STA_WINDOW)] * q.shape[1], "x".join(map(str, STA_GRID))
    site = CallSite(step=30, total_steps=50, grid=STA_GRID)
    ours, plan = _planned("sta", {"tile": STA_TILE, "window": STA_WINDOW}, q, k, v, site)
    theirs = partial(ops.sliding_tile_attention, *by_tile, windows, 0, False, name)
    return Call(theirs, ours, plan, order.expand(q.shape[:3]), compiled=ops.sta_fwd is not None)


def _planned(name: str, settings: Record, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> Any:
    """Our attention over a method's plan, and making the plan."""
    method = make_method(name, settings)
    assert isinstance(method, PlannedMethod)
    parts = parts_of_call(method, q, k, v, site)[1]
    return parts["attend"], parts["plan"]


PACKAGES = {
    FLASHINFER: Package("flashinfer", "any blocks", "pip install 'parkattn[flashinfer]'", with_flashinfer, BF16_ERROR),
    "comfy-kitchen": Package("comfy_kitchen", "sol", "pip install comfy-kitchen", with_comfy_kitchen, INT8_ERROR),
    "sageattention": Package("sageattention", "dense", "pip install sageattention", with_sageattention, INT8_ERROR),
    "fastvideo-kernel": Package("fastvideo_kernel", "sta", FASTVIDEO, with_fastvideo, BF16_ERROR, STA_GRID),
}


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Where both compute the same they agree: all but Sol-Attn, whose kernel weighs what it skips by a block's mean
    query.
    """
    for name, package in PACKAGES.items():
        if package.absence(device) is None and name != "comfy-kitchen":
            call = package.make(*_tensors(package, Shape(2, 4096, 16, 32), device))
            theirs, ours = call.official().float(), call.ours().float()
            if call.order is not None:
                ours = ours.gather(2, call.order.unsqueeze(-1).expand_as(ours))
            ours = ours.view_as(theirs)
            yield verdict(f"official {name}: as ours", (theirs - ours).norm() / ours.norm(), package.error)


def measure(device: torch.device, peak: Peak, *, repeats: int = 7, rehearse: bool = False) -> Iterator[Record]:
    """One record per package; one that is absent, or fails, says so in its record."""
    for name, package in PACKAGES.items():
        record = {"benchmark": "official", "kernel": name, "method": package.method, "version": installed(name)}
        absent = package.absence(device)
        if absent is None:
            try:
                record |= _times(package, TINY if rehearse else WAN_14B, device, repeats)
            except Exception as failure:  # whatever another package does: the others are still timed
                absent = f"failed: {type(failure).__name__}: {first_line(failure)}"
        yield record if absent is None else record | {"absent": absent}
        free_memory()


def _times(package: Package, shape: Shape, device: torch.device, repeats: int) -> Record:
    q, k, v = _tensors(package, shape, device)
    call = package.make(q, k, v)
    found: Record = {"heads": q.shape[1], "tokens": q.shape[2]}
    found |= in_two_rounds({"official_ms": call.official, "ours_ms": call.ours}, repeats)
    found |= {} if call.our_plan is None else {"ours_plan_ms": median_ms(call.our_plan, 3)}
    return found | ({} if call.compiled is None else {"compiled": call.compiled})


def _tensors(package: Package, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return rows(shape if package.grid is None else shape._replace(tokens=math.prod(package.grid)), device)


# FlashInfer by itself -----------------------------------------------------------------------------------


def flashinfer_attention(kernel: str = "auto") -> Any:
    return importlib.import_module("parkattn.ops.attend.flashinfer").FlashInferAttention(kernel=kernel)


def gate_flashinfer(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Against the float64 definition, with empty blocks."""
    shape = Shape(3, 1500, 12, 70)
    given: Record = {"plan": random_plan(shape, 0.35, device, empty=True), "scale": None, "compensate": False}
    for kernel, dtype in itertools.product(FLASHINFER_KERNELS, (torch.bfloat16, torch.float16)):
        q, k, v = rows(shape, device, dtype)
        exact, plain = in_float64_and_own(partial(DefinedAttention().over_kept, **given), q, k, v)
        found = flashinfer_attention(kernel).over_kept(q, k, v, **given)
        yield against_exact(f"flashinfer {kernel} {str(dtype)[6:]}", found, exact, plain)


def measure_flashinfer(
    device: torch.device, peak: Peak, *, repeats: int = 7, rehearse: bool = False
) -> Iterator[Record]:
    shape = WAN_14B
    plan = random_plan(shape, DENSITY, device)
    density = plan.density().mean().item()
    q, k, v = rows(shape, device)
    in_order = [x[0].contiguous() for x in (q, k, v)]
    name, dense = next(iter(dense_calls(q, k, v).items()))
    table = {name: Row(dense)}
    for kernel in FLASHINFER_KERNELS:
        attention = flashinfer_attention(kernel)
        alone = partial(attention.planned(q, k, plan).run, *in_order)
        step = partial(attention.over_kept, q, k, v, plan, scale=None, compensate=False)
        table[f"flashinfer {kernel}: its plan"] = Row(partial(attention.planned, q, k, plan))
        table[f"flashinfer {kernel}: attention alone"] = Row(alone, shape.flops(density))
        table[f"flashinfer {kernel}: all of a reuse step"] = Row(step)
    about = shape._asdict()
    yield from measured("flashinfer", table, repeats, peak, called="part", shape=about, density=density)
    free_memory()
