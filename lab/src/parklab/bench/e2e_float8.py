"""`park bench e2e --float8`: the same forwards with bfloat16 and with float8 linears, dense and PARK, in one process.

    park bench e2e --only wan2.1-14b --float8 --record FILE

Every linear of a block multiplies float8 by float8: weights are rounded once, activations in every call, both with a
scale per row. By torchao where it is installed, else by `ScaledLinear`; a record names which. Compiler settings stay
torch's own.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parkattn.hosts.diffusers import enable, summary
from parkattn.models import row_for
from parkattn.park import ParkConfig
from parklab.bench.e2e import (
    PHASES_MEASURED,
    RUN_STEPS,
    Keep,
    PreparedModel,
    compile_phases,
    largest,
    memory_record,
    naming,
    paper_config,
    prepare,
    run_facts,
    seconds_of_fusing,
    timed_forward,
    timed_phases,
)
from parklab.bench.e2e_profile import compiled_again, compiled_dense
from parklab.bench.e2e_run import sparse_density
from parklab.bench.timing import Measurement, steady_ms
from parklab.bench.whole_models import WholeModel, first_blocks, run_forward
from parklab.record import installed

FLOAT8 = torch.float8_e4m3fn
# rounding to 4 significant bits errs by 2^-4 at most and by 2^-4 / sqrt(3) on average; two operands, independently
LARGEST_ERROR = 2**-4
BAR = 0.8  # of the reuse forward with bfloat16 linears
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_int_mm", "aten::_scaled_mm", "aten::_scaled_mm_v2")


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n c] -> (float8 [n c], scale [n 1]): scale = max |row| / largest float8."""
    largest_of_row = x.abs().amax(-1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest_of_row / torch.finfo(FLOAT8).max
    return (x.float() / scale).to(FLOAT8), scale


class ScaledLinear(torch.nn.Module):
    """x W^T + b by torch._scaled_mm: the least that float8 linears take."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight, scale = by_row(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = by_row(x.flatten(0, -2))
        out = scaled_product(rows, self.weight, scale, self.scale, self.bias, x.dtype)
        return out.unflatten(0, x.shape[:-1])


def scaled_product(
    rows: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_mm(rows, weight.t(), scale, weight_scale, bias=bias, out_dtype=dtype, use_fast_accum=True)


def linears_of(block: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Those whose sides are multiples of 16, which is what a float8 product takes."""
    found = {name: module for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module for name, module in found.items() if not (module.in_features % 16 or module.out_features % 16)}


def make_float8(transformer: Any, device: torch.device) -> str:
    """The linears of all blocks, in place; errors beyond those of rounding are refused. Returns what they are now."""
    blocks = row_for(transformer).all_blocks(transformer)
    exact = {name: copy.deepcopy(linear) for name, linear in linears_of(blocks[0]).items()}
    by_torchao = device.type == "cuda" and importlib.util.find_spec("torchao") is not None
    for block in blocks:
        _quantise_by_torchao(block) if by_torchao else _replace_linears(block)
    for name, linear in exact.items():
        error = error_of(blocks[0].get_submodule(name), linear)
        if not error <= LARGEST_ERROR:
            raise RuntimeError(f"e2e: float8 linear {name} errs by {error:.3f}, more than rounding's {LARGEST_ERROR}.")
    own = "torch._scaled_mm with scales per row, ScaledLinear of this benchmark"
    return f"torchao {installed('torchao')}, Float8DynamicActivationFloat8WeightConfig(PerRow)" if by_torchao else own


def _quantise_by_torchao(block: torch.nn.Module) -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    chosen = set(linears_of(block).values())
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(block, config, filter_fn=lambda module, name: module in chosen)


def _replace_linears(block: torch.nn.Module) -> None:
    for name, linear in linears_of(block).items():
        parent, _, own = name.rpartition(".")
        setattr(block.get_submodule(parent), own, ScaledLinear(linear))


def error_of(rounded: torch.nn.Module, linear: torch.nn.Linear) -> float:
    """|difference| / |exact| for standard normal rows."""
    x = _standard_normal(256, linear)
    with torch.no_grad():
        exact = linear(x).float()
        return float((rounded(x).float() - exact).norm() / exact.norm())


def change_to_float8(
    ready: PreparedModel, calls: dict[torch.nn.Module, Any], config: ParkConfig, phases: tuple[str, ...]
) -> str:
    """The linears of a model that was timed with its own, and what must not be timed with the new ones. Returns what
    they are now. calls: of blocks compiled with the old ones, which are dropped.
    """
    calls.clear()
    torch._dynamo.reset()  # graphs of the other linears
    made = make_float8(ready.transformer, ready.device)
    ready.fusing_s = seconds_of_fusing(ready.transformer, ready.inputs, ready.model, ready.device)
    compile_phases(ready, config, phases)
    return made


def run_float8(
    name: str, model: WholeModel, device: torch.device, keep: Keep, *, density: float, turn: Callable[[], float]
) -> None:
    """One model's section: products alone, then every forward with bfloat16 linears and again with float8 ones."""
    ready, named = prepare(model, device, density=density), naming(keep, model=name)
    calls = compiled_dense(ready)
    turn()
    before: dict[str, Any] | None = None
    for row in products_alone(ready):
        named(row)
    for linears in ("bfloat16", "float8"):
        made = linears
        if linears == "float8":
            made = change_to_float8(ready, calls, paper_config(ready), PHASES_MEASURED)
            calls = compiled_dense(ready)
            named({"benchmark": "e2e preparation", "part": "float8 linears"})
        note = naming(named, linears=linears)
        found = measure_linears(ready, calls, note)
        if before is not None:
            found["of_bfloat16"] = {key: found[key] / before[key] for key in ("dense_s", "dense_compiled_s", "reuse_s")}
            found["bar"] = {"reuse_s": BAR, "met": found["of_bfloat16"]["reuse_s"] <= BAR}
        note({"made_by": made, **found})
        before = found


def measure_linears(ready: PreparedModel, calls: dict[torch.nn.Module, Any], note: Keep) -> dict[str, Any]:
    """One forward of each kind, and where the kernels of a dense and of a reuse forward spend their time.

    calls: of blocks compiled for dense, as compiled_dense returns them.
    """
    transformer, config = ready.transformer, paper_config(ready)
    runs, report, *_ = timed_phases(ready, config, PHASES_MEASURED, note)
    refresh_cold, first_reuse, refresh_warm, second_reuse = (run.seconds for run in runs)
    with enable(transformer, config, total_steps=RUN_STEPS):
        timed_forward(ready, 999.0, "refresh", note)
        split = {"reuse": split_forward(ready, 998.0)}
    with compiled_again(calls):
        compiled = timed_forward(ready, 999.0, "dense, compiled", note)
        split["dense, compiled"] = split_forward(ready, 999.0)
    stock = timed_forward(ready, 999.0, "dense", note)
    everything: list[Measurement] = [*runs, compiled, stock]
    return {
        "benchmark": "e2e float8", **run_facts(ready, config, report), "density": sparse_density(report.layers),
        "dense_s": stock.seconds, "dense_compiled_s": compiled.seconds,
        "refresh_cold_s": refresh_cold, "refresh_warm_s": refresh_warm,
        "reuse_s": statistics.median((first_reuse, second_reuse)),
        "split": split, "finite": all(run.finite for run in everything),
        "memory": {
            **memory_record(
                transformer, report, dense_peak_gb=stock.peak_gb, dense_compiled_peak_gb=compiled.peak_gb,
                park_peak_gb=largest([run.peak_gb for run in runs]),
            ),
            "weights_gb": weights_bytes(transformer) / 1e9,
        },
    }  # fmt: skip


def weights_bytes(transformer: torch.nn.Module) -> int:
    """Of parameters and buffers; a quantised weight counts by what it is stored as."""
    return sum(stored_bytes(tensor) for tensor in [*transformer.parameters(), *transformer.buffers()])


def stored_bytes(tensor: Tensor) -> int:
    """A subclass of Tensor says which plain ones it is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.nbytes


@dataclass(frozen=True)
class Split:
    """Of one forward's kernels, in seconds. attention: of the video and to the text; linears: matrix products only."""

    attention: float
    linears: float
    kernels: float

    @property
    def rest(self) -> float:
        return self.kernels - self.attention - self.linears


def split_forward(ready: PreparedModel, timestep: float) -> dict[str, float]:
    """torch.profiler over one forward; on the CPU time in operators stands in for time in kernels.

    The engine times its own attention calls, in which a reuse step runs no matrix product to be taken for a linear's.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = ready.device.type == "cuda"
    own_before = _own_attention(ready)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as seen:
        run_forward(ready.transformer, ready.inputs, timestep)
        if on_gpu:
            torch.cuda.synchronize(ready.device)
    rows = seen.key_averages()
    operators = [row for row in rows if row.device_type == DeviceType.CPU]
    # annotations span kernels that are counted already
    on_device = [row for row in rows if row.device_type == DeviceType.CUDA and not row.is_user_annotation]
    kernels = on_device if on_gpu else operators
    attention = [row for row in operators if "attention" in row.key and not row.key.startswith("parkattn")]
    products = [row for row in operators if row.key in PRODUCTS]
    found = Split(
        attention=_own_attention(ready) - own_before + _microseconds(attention, on_gpu) / 1e6,
        linears=_microseconds(products, on_gpu) / 1e6,
        kernels=_microseconds(kernels, on_gpu) / 1e6,
    )
    parts = {"attention_s": found.attention, "linears_s": found.linears, "rest_s": found.rest}
    return {**parts, "kernels_s": found.kernels}


def _own_attention(ready: PreparedModel) -> float:
    """Seconds so far of the attention calls that enable answered; 0 where nothing is enabled."""
    from parkattn.hosts.diffusers.session import session_of

    return 0.0 if session_of(ready.transformer) is None else sum(summary(ready.transformer).attention_seconds.values())


def _microseconds(rows: list[Any], on_gpu: bool) -> float:
    return float(sum(row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in rows))


def products_alone(ready: PreparedModel) -> list[dict[str, Any]]:
    """The blocks' linears by size, each alone: in bfloat16, its float8 product, and its input rounded in one kernel."""
    calls: Counter[tuple[int, int, int]] = Counter()
    linears: dict[tuple[int, int, int], torch.nn.Linear] = {}
    with contextlib.ExitStack() as hooks:
        for name, _ in row_for(ready.transformer).blocks:
            blocks = getattr(ready.transformer, name)

            def count(module: torch.nn.Linear, args: tuple[Tensor, ...], alike: int = len(blocks)) -> None:
                size = args[0].numel() // module.in_features, module.in_features, module.out_features
                calls[size] += alike
                linears.setdefault(size, module)

            for linear in linears_of(blocks[0]).values():
                hooks.callback(linear.register_forward_pre_hook(count).remove)
        with first_blocks(ready.transformer, 1):
            run_forward(ready.transformer, ready.inputs, 999.0)
    rounding = torch.compile(by_row, dynamic=False) if ready.device.type == "cuda" else by_row
    alone = {size: _product_alone(size, linears[size], rounding) for size in sorted(calls)}
    return [{**row, "calls_per_forward": calls[size]} for size, row in alone.items()]


def _product_alone(
    size: tuple[int, int, int], linear: torch.nn.Linear, rounding: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    rows, ins, outs = size
    float8 = ScaledLinear(linear)
    x = _standard_normal(rows, linear)
    with torch.no_grad():
        rounded, scale = rounding(x)
        ms = steady_ms({
            "bfloat16_ms": lambda: linear(x),
            "float8_ms": lambda: scaled_product(rounded, float8.weight, scale, float8.scale, float8.bias, x.dtype),
            "rounding_ms": lambda: rounding(x),
        })  # fmt: skip
    tflops = {f"{kind}_tflops": 2 * rows * ins * outs / ms[f"{kind}_ms"] / 1e9 for kind in ("bfloat16", "float8")}
    return {"benchmark": "e2e float8 product", "rows": rows, "in": ins, "out": outs, **ms, **tflops}


def _standard_normal(rows: int, linear: torch.nn.Linear) -> Tensor:
    device, dtype = linear.weight.device, linear.weight.dtype
    made = torch.Generator(device).manual_seed(3)
    return torch.randn(rows, linear.in_features, generator=made, device=device, dtype=dtype)
