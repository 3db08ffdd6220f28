"""Dense attention in our kernel beside cuDNN's and FlashAttention-3's, an anchor step, what the residual and tiles
cost.

The bars: a dense call takes at most 0.81 of cuDNN's time, 0.64 with INT8, adding the residual at most 3 % of a reuse
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parkattn.backend import INT8_HEAD_DIMS, resolve
from parkattn.ops import Backend, attend, residual
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.attend.sage import attend_dense_sage, sage_version, why_no_sage
from parkattn.ops.residual.definition import add_residual, factor
from parkattn.park import ParkConfig
from parkattn.plan import Plan
from parkattn.planned import sampled_error
from parkattn.reuse import History, PlanStore
from parkattn.settings import LONG_VIDEO, PRECISIONS, Precision
from parkattn.site import CallSite, SiteKey
from parklab.bench.attend import dense_calls, in_precisions, kernels_for
from parklab.bench.gates import (
    Case,
    against_exact,
    in_float64_and_own,
    quick_as_careful,
    repeated,
    unsynchronised,
    verdict,
)
from parklab.bench.problems import HUNYUAN, TINY, WAN_14B, Shape, random_plan, rows, tiled_plan
from parklab.bench.timing import Call, Calls, Peak, Record, Row, free_memory, measured
from parklab.research import AdaptiveSchedule

RANK, QUERY_TILE = ParkConfig.profile("fast").rank_for(LONG_VIDEO), ParkConfig.PROFILES["fast"]["query_tile"]
HERE = SiteKey("transformer", 0, "")
DENSITY = 0.10
RUN_STEPS = 50
DENSE_BARS: dict[Precision, float] = {"bf16": 0.81, "int8": 0.64}
RESIDUAL_BAR = 0.03
REUSE = "reuse, compensated"


def gate(device: torch.device, *, rehearse: bool = False, full: bool = False) -> Iterator[Case]:
    """Against float64: dense attention with and without padding, short and long, an anchor, the residual.

    None of it waits for the GPU, nor do adaptive anchors. full: every head dimension and dtype; otherwise those that
    are timed, since compiling takes minutes.
    """
    yield from _gate_adaptive(device)
    for dim in (TINY.dim,) if rehearse else (64, 128, 256) if full else (WAN_14B.dim,):
        for dtype in (torch.bfloat16, torch.float16) if full else (torch.bfloat16,):
            ours = resolve("triton", device, dtype, dim)
            # 17,000 rows in one block: long enough that no tile is shared
            shapes = (TINY,) if rehearse else (Shape(3, 1500, 12, 70, dim), Shape(2, 17_000, 12, 70, dim))
            for shape in shapes:
                yield from _gate_dense(ours, shape, dtype, device)
            if dim in INT8_HEAD_DIMS and device.type == "cuda":
                yield from gate_int8(shapes[0], dtype, device)
            if dtype == torch.bfloat16 or dim == 128:
                yield from _gate_anchor(ours, shapes[0]._replace(dim=dim), dtype, device)


def _gate_adaptive(device: torch.device) -> Iterator[Case]:
    """Anchors by measured errors are those of the CPU, and no step waits for its errors before they are read."""
    wanted = _adaptive_phases(torch.device("cpu"))
    _adaptive_phases(device)  # whatever a first call sets up
    with unsynchronised(device):
        found = _adaptive_phases(device)
    differing = sum(ours != theirs for ours, theirs in zip(found, wanted, strict=True))
    yield verdict("adaptive anchors", differing if wanted.count("anchor") > 1 else 1, 0, phases=found)


def _adaptive_phases(device: torch.device) -> list[str]:
    """Of a run whose output is off by 4 % more in every step since the anchor, where 10 % ask for one."""
    schedule, last = AdaptiveSchedule(ParkConfig(anchors=RUN_STEPS), anchor_error=0.1), 0
    q, k, v = rows(TINY, device)
    exact = dense_attention(q, k, v)
    names: list[str] = []
    for step in range(12):
        site = CallSite(step=step, total_steps=RUN_STEPS)
        name = schedule.phase(site, History(last if step else None)).name
        if name == "anchor":
            last = step
        else:
            schedule.observe(site, sampled_error(q, k, v, exact * (1 + 0.04 * (step - last)), rows=8))
        names.append(name)
    return names


def _gate_dense(ours: Backend, shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    from parkattn.ops.attend.kernels import AttentionKernel  # Triton, where there is none this module is read too

    q, k, v = rows(shape, device, dtype)
    k, v = k[:, :, :1500], v[:, :, :1500]
    keys = k.shape[2]
    scattered = torch.rand(1, keys, device=device) < 0.7
    for padding, valid in {"": None, ", padded": _all_but_a_fifth(k), ", scattered": scattered}.items():
        with unsynchronised(device):
            out, lse = AttentionKernel(ours.hopper).over_all_with_lse(q, k, v, scale=None, key_valid=valid)
        name = f"dense d{shape.dim} {str(dtype)[6:]} {shape.tokens} x {keys}{padding}"
        yield against_exact(name, out, *in_float64_and_own(partial(dense_attention, key_valid=valid), q, k, v))
        scores = q.double() @ k.double().mT * shape.dim**-0.5
        exact_lse = (scores if valid is None else scores.masked_fill(~valid[:, None, None], -torch.inf)).logsumexp(-1)
        yield verdict(f"{name}: lse", (lse.double() - exact_lse).abs().max(), 2e-3)
        yield repeated(name, partial(attend.over_all, ours, q, k, v, key_valid=valid), 3)
        del scores, exact_lse


def gate_int8(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """The whole call in INT8, rounding included, against the definition that rounds the same way, in float64; and the
    Hopper kernel where scores are so steep that quick exponentials lose rows.
    """
    q, k, v = rows(shape, device, dtype)
    keys = k.shape[2] - k.shape[2] // 5 * 2 - 1  # another number than of queries, and no multiple of a tile
    k, v = k[:, :, :keys], v[:, :, :keys]
    ours = resolve("triton", device, dtype, shape.dim, "int8")
    name = f"dense int8 d{shape.dim} {str(dtype)[6:]} {shape.tokens} x {keys}"
    for padding, valid in {"": None, ", padded": _all_but_a_fifth(k)}.items():
        call = partial(attend.over_all, ours, q, k, v, key_valid=valid)
        definition = partial(dense_attention, key_valid=valid, precision="int8")
        # weights are rounded in the kernel alone
        yield against_exact(f"{name}{padding}", call(), *in_float64_and_own(definition, q, k, v), units=2)
        yield repeated(f"{name}{padding}", call, 3)
    nothing = attend.over_all(ours, q, k, v, key_valid=torch.zeros(1, keys, device=device, dtype=torch.bool))
    yield verdict(f"{name}, no key", nothing.abs().max(), 0)
    if ours.hopper and dtype == torch.bfloat16:
        yield _gate_steep(q, k, v, name)


def _all_but_a_fifth(k: Tensor) -> Tensor:
    keys = k.shape[2]
    return torch.arange(keys, device=k.device)[None] < keys - keys // 5


def _gate_steep(q: Tensor, k: Tensor, v: Tensor, name: str) -> Case:
    from parkattn.ops.attend.hopper_dense import attend_dense_hopper
    from parkattn.ops.permute import triton as permute

    q = q.clone()
    q[:, 0] *= 300
    (given, row_steps), (keys, step) = permute.round_rows(q, None), permute.round_rows(k, None, permute.key_rounding(k))
    values, steps = permute.gather_rows(v, None), (row_steps, step / q.shape[-1])
    return quick_as_careful(name, lambda quick: attend_dense_hopper(given, keys, values, quick=quick, steps=steps)[0])


def _gate_anchor(ours: Backend, shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    plan = random_plan(shape, 0.35, device, empty=True)
    q, k, v = rows(shape, device, dtype)
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    unit = torch.finfo(dtype).eps * exact.abs().max()
    for compensate in (False, True):
        name = f"anchor d{shape.dim} {str(dtype)[6:]}{' compensated' if compensate else ''}"
        with unsynchronised(device):
            dense, missed = attend.over_both(ours, q, k, v, plan, scale=None, compensate=compensate)
            kept = residual.factor(ours, missed, RANK)
        # two parts are rounded, and their sum
        yield verdict(f"{name}: dense", (dense.double() - exact).abs().max(), 2 * unit)
        sparse = attend.over_kept(ours, q, k, v, plan, compensate=compensate)
        yield verdict(f"{name}: residual", (missed.double() - (exact - sparse.double())).abs().max(), 4 * unit)
        energy, best = missed.double().square().sum(), factor(missed, RANK)
        left, least = ((missed.double() - x.expand().double()).square().sum() for x in (kept, best))
        yield verdict(f"{name}: energy that rank {RANK} leaves out", left, least + 0.01 * energy)
        wanted = sparse.double() + kept.expand().double()
        plain = add_residual(sparse, kept)
        with unsynchronised(device):
            added = residual.add_residual(ours, sparse.clone(memory_format=torch.preserve_format), kept)
        yield against_exact(f"{name}: residual added", added, wanted, plain, unit=unit)


def measure(
    device: torch.device, peak: Peak, *, repeats: int = 7, rehearse: bool = False, barred: bool = False
) -> Iterator[Record]:
    """barred: of the first shape dense attention alone, beside the bars."""
    shape = TINY if rehearse else WAN_14B
    q, k, v = rows(shape, device)
    dense: Calls = {**dense_calls(q, k, v), **_ours(q, k, v)}
    if why_no_sage(q, k, v) is None:
        dense[f"sageattention {sage_version()}"] = partial(attend_dense_sage, q, k, v, scale=None)
    table = _rows(dense, shape.flops())
    if not barred:
        table |= _around_anchors(q, k, v, shape)
    case = "tiny" if rehearse else "wan2.1-14b"
    yield from measured("dense", table, repeats, peak, case=case, shape=shape._asdict())
    del q, k, v, dense, table
    free_memory()
    if not barred:
        yield from _measure_padded(device, peak, repeats, rehearse)


def _around_anchors(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> dict[str, Row]:
    """An anchor, and what the reuse steps after it do: attention over blocks or tiles, the residual, the plan kept."""
    ours = resolve("triton", q.device, q.dtype, shape.dim)
    plan = random_plan(shape, DENSITY, q.device, multiples=(64, 32))
    tiles, apart = (tiled_plan(plan, QUERY_TILE, apart=each) for each in (False, True))
    together = [x.contiguous() for x in (q, k, v)]
    anchor = partial(attend.over_both, ours, q, k, v, plan, scale=None, compensate=True)
    missed = anchor()[1]
    kept = residual.factor(ours, missed, RANK)
    reuse = partial(attend.over_kept, ours, q, k, v, compensate=True)

    def out_of_the_store(held: Plan) -> Call:
        store = PlanStore()
        store.put(HERE, held, 0)
        return partial(store.get, HERE, ours)

    whole: Calls = {
        "ours, rows of a head together": partial(attend.over_all, ours, *together),
        "anchor, compensated": anchor,
    }
    steps: Calls = {"factor": partial(residual.factor, ours, missed, RANK), REUSE: partial(reuse, plan)}
    added = {"add residual": partial(residual.add_residual, ours, torch.empty_like(q), kept)}
    others = {f"{REUSE}, tiles": partial(reuse, tiles), f"{REUSE}, tiles apart": partial(reuse, apart)}
    held = {"blocks out of the store": out_of_the_store(plan), "tiles out of the store": out_of_the_store(tiles)}
    return (
        _rows(whole, shape.flops())
        | _rows(steps)
        | _rows(added, beside=REUSE, residual_mb=kept.nbytes / 1e6)
        | _rows(others | held, beside=REUSE)
    )


def _measure_padded(device: torch.device, peak: Peak, repeats: int, rehearse: bool) -> Iterator[Record]:
    """Dense attention of HunyuanVideo's shape, whose text ends in padding."""
    shape = TINY if rehearse else HUNYUAN._replace(tokens=HUNYUAN.tokens + 256)
    q, k, v = rows(shape, device)
    valid = torch.arange(shape.tokens, device=device)[None] < shape.tokens - shape.tokens // 600
    calls: Calls = {
        "without a mask": next(iter(dense_calls(q, k, v).values())),
        "stock, with a mask": partial(dense_attention, q, k, v, key_valid=valid),
    }
    calls |= {f"{label}, padded": partial(call, key_valid=valid) for label, call in _ours(q, k, v).items()}
    case = "tiny, padded" if rehearse else "hunyuan, padded"
    yield from measured("dense", _rows(calls, shape.flops()), repeats, peak, case=case, shape=shape._asdict())
    free_memory()


def _ours(q: Tensor, k: Tensor, v: Tensor) -> dict[str, partial[Tensor]]:
    """Our dense attention in every precision, bf16 first, by the name that bars go by."""
    found = in_precisions(kernels_for(q.device, q.shape[-1])[:1], q.shape[-1]).values()
    labels = (f"ours, {ours.precision}".removesuffix(", bf16") for ours in found)
    return {label: partial(attend.over_all, ours, q, k, v) for label, ours in zip(labels, found, strict=True)}


def _rows(calls: Mapping[str, Call], flops: float = 0.0, beside: str = "", **facts: Any) -> dict[str, Row]:
    return {
        label: Row(call, flops, beside, {"bar": bar_of(label), "residual_mb": None, **facts})
        for label, call in calls.items()
    }


def bar_of(label: str) -> float | None:
    """A precision without a bar of its own has none."""
    if label == "add residual":
        return RESIDUAL_BAR
    rounded: Precision = next((name for name in PRECISIONS if f", {name}" in label), "bf16")
    return DENSE_BARS.get(rounded) if label.startswith("ours") else None
