"""How cost grows: attention over density at one length, attention and plan over length at one density, with fitted
exponents and a plot.
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

from parkattn.backend import resolve
from parkattn.checks import expect_choice
from parkattn.files import explained, make_folder, write_atomically
from parkattn.ops import attend
from parkattn.park import build_plan
from parklab.bench.attend import dense_calls
from parklab.bench.problems import TINY, WAN_1_3B, Shape, mixture, random_plan, rows
from parklab.bench.timing import free_memory, median_ms
from parklab.extras import pyplot
from parklab.record import read_records
from parklab.research import ResearchConfig

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)
AT_DENSITY = 0.25
Records = list[dict[str, Any]]


def measure(
    device: torch.device, peak: dict[str, float], *, repeats: int = 5, rehearse: bool = False
) -> Iterator[dict[str, Any]]:
    """One record per point, then one per fitted curve."""
    found = []
    for record in _points(device, repeats, rehearse):
        found.append(record)
        yield record
    yield from fits(found)


def fits(points: Records) -> Iterator[dict[str, Any]]:
    """ms = c x^exponent by least squares of the logarithms; for density also ms = fixed + slope density."""
    for over in ("density", "length"):
        for part in dict.fromkeys(p["part"] for p in points if p["over"] == over):
            x, y = zip(*((p[over], p["ms"]) for p in points if p["over"] == over and p["part"] == part), strict=True)
            if len(x) < 2:
                continue
            exponent, level = statistics.linear_regression([math.log(a) for a in x], [math.log(b) for b in y])
            fit = {
                "benchmark": "scaling",
                "over": over,
                "part": f"{part}: fit",
                "exponent": exponent,
                "ms_at_1": math.exp(level),
            }
            if over == "density":
                slope, fixed = statistics.linear_regression(x, y)
                worst = max(abs(fixed + slope * a - b) / b for a, b in zip(x, y, strict=True))
                fit |= {"ms_fixed": fixed, "ms_per_density": slope, "worst_residual": worst}
            else:
                # launches and half-filled tiles show at short lengths; the last doubling is what long videos pay
                fit["exponent_of_last_doubling"] = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])
            yield fit


def draw(record: Path, plot: Path) -> None:
    """The records of `measure` as two panels: time over density (linear) and time over length (logarithmic)."""
    expect_choice("plot", plot.suffix.removeprefix("."), ("svg", "png", "pdf"))
    wanted = "results of 'park bench scaling'"
    points = [p for p in read_records(record) if p.get("benchmark") == "scaling"]
    named = [p for p in points if isinstance(p.get("over"), str) and isinstance(p.get("part"), str)]
    numbers = (p.get(name) for p in named for name in (("exponent",) if "exponent" in p else (p["over"], "ms")))
    if not points or len(named) < len(points) or not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError(
            f"record: expected {wanted} in {record}, got {'broken ones' if points else 'none'}; measure first."
        )
    figure, axes = pyplot("the plot").subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, over in zip(axes, ("density", "length"), strict=True):
        exponents = {
            p["part"].removesuffix(": fit"): p["exponent"] for p in points if p["over"] == over and "exponent" in p
        }
        for part in exponents:
            x, y = zip(*((p[over], p["ms"]) for p in points if p["over"] == over and p["part"] == part), strict=True)
            axis.plot(x, y, marker="o", markersize=4, label=f"{part}: exponent {exponents[part]:.2f}")
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


def _points(device: torch.device, repeats: int, rehearse: bool) -> Iterator[dict[str, Any]]:
    base = TINY if rehearse else WAN_1_3B
    backend = resolve("triton", device, torch.bfloat16, base.dim)
    for density in (0.5, 1.0) if rehearse else DENSITIES:
        plan, q, k, v = random_plan(base, density, device), *rows(base, device)
        call = partial(attend.over_kept, backend, q, k, v, plan)
        yield _point("density", "attention", base, plan.density().mean().item(), call, repeats)
        del plan, q, k, v, call
        free_memory()
    for length in (96, 192) if rehearse else LENGTHS:
        # as many tokens to a block as in the base shape
        blocks = {side: getattr(base, side) * length // base.tokens for side in ("query_blocks", "key_blocks")}
        shape = base._replace(tokens=length, **blocks)
        plan, q, k, v = random_plan(shape, AT_DENSITY, device), *rows(shape, device)
        call = partial(attend.over_kept, backend, q, k, v, plan)
        yield _point("length", "attention", shape, plan.density().mean().item(), call, repeats)
        yield _point("length", "dense", shape, 1.0, next(iter(dense_calls(q, k, v).values())), min(repeats, 3))
        # a plan has as many clusters at every length: that is what the presets do
        config = ResearchConfig(
            query_clusters=base.query_blocks,
            key_clusters=base.key_blocks,
            query_multiple=1,
            key_multiple=1,
            top_p=None,
            top_k=AT_DENSITY,
            backend="triton",
        )
        q, k = (mixture(shape, centres, device) for centres in (300, 700))
        same = shape._replace(query_blocks=base.query_blocks, key_blocks=base.key_blocks)
        yield _point("length", "plan", same, AT_DENSITY, partial(build_plan, q, k, config), min(repeats, 3))
        del plan, q, k, v, call
        free_memory()


def _point(over: str, part: str, shape: Shape, density: float, call: Any, repeats: int) -> dict[str, Any]:
    facts = {
        "benchmark": "scaling",
        "over": over,
        "part": part,
        "shape": shape._asdict(),
        "density": density,
        "length": shape.tokens,
    }
    return {**facts, "ms": median_ms(call, repeats)}
