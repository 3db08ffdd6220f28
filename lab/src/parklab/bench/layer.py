"""One attention layer as a model calls it: plan, refresh step and reuse step through `park_attention`, against dense
attention. And how its cost grows: attention over density at one length, attention and plan over length at one density,
with fitted exponents and a plot.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parkattn.backend import resolve
from parkattn.checks import expect_choice
from parkattn.ops import attend
from parkattn.ops.attend.definition import dense_attention
from parkattn.park import Park, ParkConfig, build_plan, park_attention
from parkattn.plan import Plan
from parkattn.site import CallSite
from parklab.bench.attend import dense_calls
from parklab.bench.gates import Case, against_exact, in_float64_and_own, unsynchronised, verdict
from parklab.bench.problems import TINY, WAN_1_3B, WAN_14B, Shape, mixture, random_plan, rows
from parklab.bench.timing import Call, Calls, Peak, Record, Row, free_memory, measured
from parklab.extras import pyplot
from parklab.files import explained, make_folder, write_atomically
from parklab.record import read_records
from parklab.research import ResearchConfig

PAPER = ResearchConfig.preset("wan2.1-14b", backend="triton")
SMALL = ResearchConfig(
    query_clusters=4, key_clusters=8, query_multiple=4, key_multiple=2, kmeans_iterations=2, top_p=None, top_k=0.4,
    backend="triton",
)  # fmt: skip
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)
AT_DENSITY = 0.25


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """The Triton backend against the definitions on one device: roles, plans, outputs, dense equality, graphs,
    synchronisation.
    """
    shape, config = TINY, SMALL
    if not rehearse:
        shape, config = Shape(4, 3000, 0, 0), PAPER.replace(query_clusters=16, key_clusters=64, top_p=0.8)
    q, k, v = (mixture(shape, centres, device) for centres in (20, 50, 50))
    valid, text = (torch.arange(shape.tokens, device=device) < 0.9 * shape.tokens)[None], slice(0, 20)
    calls: dict[str, Any] = {"plain": {}, "text": {"text": text}, "both": {"text": text, "key_valid": valid}}
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
            exact, plain = in_float64_and_own(partial(park_attention, config=reference, plan=ours), q, k, v)
            case = f"{name}{', compensated' if compensate else ''}: output"
            yield against_exact(case, out, exact, plain, units=2)
    everything = park_attention(q, k, v, config.replace(top_p=1.0, top_k=None))
    exact, plain = in_float64_and_own(dense_attention, q, k, v)
    yield against_exact("every block kept is dense attention", everything, exact, plain, units=2)
    if device.type == "cuda":
        yield from _gate_no_waiting(q, k, v, config)


def _gate_no_waiting(q: Tensor, k: Tensor, v: Tensor, config: ParkConfig) -> Iterator[Case]:
    """A reuse step through Park under PyTorch's synchronisation alarm, and captured in a CUDA graph and replayed on
    other tokens.
    """
    park = Park(config.replace(dense_steps=0))
    for step in (0, 1):
        park(q, k, v, CallSite(layer=0, step=step, total_steps=50))
    torch.cuda.synchronize()
    for step, name in ((2, "reuse"), (60, "refresh")):
        failure = ""
        try:
            with unsynchronised(q.device):
                park(q, k, v, CallSite(layer=0, step=step, total_steps=100))
        except RuntimeError as error:
            failure = str(error).split("\n")[0]
        yield verdict(f"{name} step without host synchronisation", 1 if failure else 0, 0, failure=failure)
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


def measure(device: torch.device, peak: Peak, *, repeats: int = 5, rehearse: bool = False) -> Iterator[Record]:
    """With block borders as the preset rounds them, and as clustered; tokens and top-p are the same, so densities
    differ.
    """
    shape, preset = (TINY, SMALL) if rehearse else (WAN_14B, PAPER)
    q, k, v = (mixture(shape, centres, device) for centres in (300, 700, 700))
    table = {label: Row(call) for label, call in dense_calls(q, k, v).items()}
    for borders, config in (("rounded", preset), ("as clustered", preset.replace(query_multiple=1, key_multiple=1))):
        plan = build_plan(q, k, config)
        multiples, density = (config.query_multiple, config.key_multiple), plan.density().mean().item()
        for part, call in _parts(q, k, v, config, plan).items():
            facts = {"borders": borders, "multiples": multiples, "density": density, "part": part}
            table[f"{part}, {borders}"] = Row(call, facts=facts)
    backend = resolve(preset.backend, device, q.dtype, shape.dim).reason
    yield from measured("layer", table, repeats, peak, called="part", shape=shape._asdict(), backend=backend)


def _parts(q: Tensor, k: Tensor, v: Tensor, config: ParkConfig, plan: Plan) -> Calls:
    park = Park(config.replace(dense_steps=0, refresh_interval=None))
    park(q, k, v, CallSite(layer=0, step=0, total_steps=50))
    return {
        "plan, cold": lambda: build_plan(q, k, config),
        "plan, warm": lambda: build_plan(q, k, config, start=plan),
        "attention with a plan": lambda: park_attention(q, k, v, config, plan=plan),
        "refresh step": lambda: park_attention(q, k, v, config, plan=build_plan(q, k, config, start=plan)),
        "reuse step from the store": lambda: park(q, k, v, CallSite(layer=0, step=1, total_steps=50)),
    }


# How cost grows -----------------------------------------------------------------------------------------


def measure_scaling(device: torch.device, peak: Peak, *, repeats: int = 5, rehearse: bool = False) -> Iterator[Record]:
    """One record per point, then one per fitted curve."""
    found = []
    for record in _points(device, peak, repeats, rehearse):
        found.append(record)
        yield record
    yield from fits(found)


def _points(device: torch.device, peak: Peak, repeats: int, rehearse: bool) -> Iterator[Record]:
    base = TINY if rehearse else WAN_1_3B
    ours = resolve("triton", device, torch.bfloat16, base.dim)

    def row(call: Call, shape: Shape, density: float, flops: float = 0.0) -> Row:
        return Row(call, flops, facts={"shape": shape._asdict(), "length": shape.tokens, "density": density})

    def attention(shape: Shape, asked: float) -> Row:
        plan = random_plan(shape, asked, device)
        density = plan.density().mean().item()
        call = partial(attend.over_kept, ours, *rows(shape, device), plan)
        return row(call, shape, density, shape.flops(density))

    def points(over: str, table: dict[str, Row]) -> Iterator[Record]:
        yield from measured("scaling", table, min(repeats, 3), peak, called="part", settling_s=0, over=over)
        free_memory()

    for density in (0.5, 1.0) if rehearse else DENSITIES:
        yield from points("density", {"attention": attention(base, density)})
    # a plan has as many clusters at every length: that is what the presets do
    config = ResearchConfig(
        query_clusters=base.query_blocks, key_clusters=base.key_blocks, query_multiple=1, key_multiple=1, top_p=None,
        top_k=AT_DENSITY, backend="triton",
    )  # fmt: skip
    for length in (96, 192) if rehearse else LENGTHS:
        # as many tokens to a block as in the base shape
        counts = {side: getattr(base, side) * length // base.tokens for side in ("query_blocks", "key_blocks")}
        shape = base._replace(tokens=length, **counts)
        dense = next(iter(dense_calls(*rows(shape, device)).values()))
        q, k = (mixture(shape, centres, device) for centres in (300, 700))
        plan = row(partial(build_plan, q, k, config), base._replace(tokens=length), AT_DENSITY)
        table = {"dense": row(dense, shape, 1.0, shape.flops()), "attention": attention(shape, AT_DENSITY)}
        yield from points("length", table | {"plan": plan})
        del dense, q, k, plan, table


def fits(points: list[Record]) -> Iterator[Record]:
    """ms = c x^exponent by least squares of the logarithms; for density also ms = fixed + slope density."""
    for over in ("density", "length"):
        for part in dict.fromkeys(p["part"] for p in points if p["over"] == over):
            x, y = _curve(points, over, part)
            exponent, level = statistics.linear_regression([math.log(a) for a in x], [math.log(b) for b in y])
            fit: Record = {"benchmark": "scaling", "over": over, "part": f"{part}: fit"}
            fit |= {"exponent": exponent, "ms_at_1": math.exp(level)}
            if over == "density":
                slope, fixed = statistics.linear_regression(x, y)
                worst = max(abs(fixed + slope * a - b) / b for a, b in zip(x, y, strict=True))
                fit |= {"ms_fixed": fixed, "ms_per_density": slope, "worst_residual": worst}
            else:
                # launches and half-filled tiles show at short lengths; the last doubling is what long videos pay
                fit["exponent_of_last_doubling"] = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])
            yield fit


def _curve(points: list[Record], over: str, part: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    x, y = zip(*((p[over], p["ms"]) for p in points if p["over"] == over and p["part"] == part), strict=True)
    return x, y


def draw(record: Path, plot: Path) -> None:
    """The records of `measure_scaling` as two panels: time over density (linear) and time over length (logarithmic)."""
    expect_choice("plot", plot.suffix.removeprefix("."), ("svg", "png", "pdf"))
    wanted = "results of 'park bench scaling'"
    points = [p for p in read_records(record) if p.get("benchmark") == "scaling"]
    named = [p for p in points if isinstance(p.get("over"), str) and isinstance(p.get("part"), str)]
    numbers = (p.get(name) for p in named for name in (("exponent",) if "exponent" in p else (p["over"], "ms")))
    if not points or len(named) < len(points) or not all(isinstance(number, (int, float)) for number in numbers):
        found = "broken ones" if points else "none"
        raise ValueError(f"record: expected {wanted} in {record}, got {found}; measure first.")
    figure, axes = pyplot("the plot").subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, over in zip(axes, ("density", "length"), strict=True):
        fitted = {p["part"]: p["exponent"] for p in points if p["over"] == over and "exponent" in p}
        for part, exponent in ((name.removesuffix(": fit"), value) for name, value in fitted.items()):
            axis.plot(*_curve(points, over, part), marker="o", markersize=4, label=f"{part}: exponent {exponent:.2f}")
        axis.set(xlabel=over, ylabel="ms")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(xlim=(0, None), ylim=(0, None), title="over density")
    axes[1].set(title=f"over length, density {AT_DENSITY}")
    axes[1].set_xscale("log", base=2)
    axes[1].set_yscale("log")
    data = io.BytesIO()
    figure.savefig(data, format=plot.suffix.removeprefix("."))
    with explained(plot):
        make_folder(plot.parent)
    write_atomically(plot, data.getvalue())
