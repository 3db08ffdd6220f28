"""Dense attention in our kernel beside cuDNN's and FlashAttention-3's, an anchor step, what the residual and tiles
cost.

Everything is timed twice, the second time in reverse order. The bars: a dense call takes at most 0.81 of cuDNN's time,
0.64 with INT8, adding the residual at most 3 % of a reuse call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from parkattn.planned import sampled_error
from parkattn.reuse import History, PlanStore
from parkattn.settings import LONG_VIDEO, PRECISIONS, Precision
from parkattn.site import CallSite, SiteKey
from parklab.bench.attend import dense_calls
from parklab.bench.problems import (
    HUNYUAN,
    TINY,
    WAN_14B,
    Case,
    Shape,
    random_plan,
    repeats_equal,
    rows,
    tiled_plan,
    verdict,
)
from parklab.bench.timing import Call, extra_mb, free_memory, steady_ms
from parklab.research import AdaptiveSchedule

RANK, QUERY_TILE = ParkConfig.profile("fast").rank_for(LONG_VIDEO), ParkConfig.PROFILES["fast"]["query_tile"]
HERE = SiteKey("transformer", 0, "")
DENSITY = 0.10
RUN_STEPS = 50
DENSE_BARS: dict[Precision, float] = {"bf16": 0.81, "int8": 0.64}
RESIDUAL_BAR = 0.03


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
    with _unsynchronised(device):
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
    k, v = k[:, :, : min(shape.tokens, 1500)], v[:, :, : min(shape.tokens, 1500)]
    keys = k.shape[2]
    paddings = {
        "": None,
        ", padded": torch.arange(keys, device=device)[None] < keys - keys // 5,
        ", scattered": torch.rand(1, keys, device=device) < 0.7,
    }
    for padding, valid in paddings.items():
        with _unsynchronised(device):
            out, lse = AttentionKernel(ours.hopper).over_all_with_lse(q, k, v, scale=None, key_valid=valid)
        exact = dense_attention(q.double(), k.double(), v.double(), key_valid=valid)
        plain = dense_attention(q, k, v, key_valid=valid).double()
        allowed = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        name = f"dense d{shape.dim} {str(dtype)[6:]} {shape.tokens} x {keys}{padding}"
        yield verdict(name, (out.double() - exact).abs().max(), allowed)
        scores = q.double() @ k.double().mT * shape.dim**-0.5
        exact_lse = (scores if valid is None else scores.masked_fill(~valid[:, None, None], -torch.inf)).logsumexp(-1)
        yield verdict(f"{name}: lse", (lse.double() - exact_lse).abs().max(), 2e-3)
        again = partial(attend.over_all, ours, q, k, v, scale=None, key_valid=valid)
        yield verdict(f"{name}: repeats bit-equal", 0 if repeats_equal(again, 3) else 1, 0)
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
    for padding, valid in (
        ("", None),
        (", padded", torch.arange(keys, device=device)[None] < keys - keys // 5),
        (", no key", torch.zeros(1, keys, device=device, dtype=torch.bool)),
    ):
        call = partial(attend.over_all, ours, q, k, v, scale=None, key_valid=valid)
        out = call()
        if padding == ", no key":
            yield verdict(f"{name}{padding}", out.abs().max(), 0)
            continue
        exact, plain = (
            dense_attention(q.to(kind), k.to(kind), v.to(kind), key_valid=valid, precision="int8").double()
            for kind in (torch.float64, dtype)
        )
        # weights are rounded in the kernel alone
        allowed = 2 * (plain - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
        yield verdict(f"{name}{padding}", (out.double() - exact).abs().max(), allowed)
        yield verdict(f"{name}{padding}: repeats bit-equal", 0 if repeats_equal(call, 3) else 1, 0)
    if ours.hopper and dtype == torch.bfloat16:
        yield _gate_steep(q, k, v, name)


def _gate_steep(q: Tensor, k: Tensor, v: Tensor, name: str) -> Case:
    from parkattn.ops.attend.hopper_dense import attend_dense_hopper
    from parkattn.ops.permute import triton as permute

    q = q.clone()
    q[:, 0] *= 300
    (given, row_steps), (keys, step) = (
        permute.round_rows(q, None),
        permute.round_rows(k, None, permute.key_rounding(k)),
    )
    values, steps = permute.gather_rows(v, None), (row_steps, step / q.shape[-1])
    out, careful = (attend_dense_hopper(given, keys, values, quick=quick, steps=steps)[0] for quick in (True, False))
    allowed = 2 * torch.finfo(q.dtype).eps * careful.abs().max()
    return verdict(
        f"{name}: quick as careful where scores are steep", (out.double() - careful.double()).abs().max(), allowed
    )


def _gate_anchor(ours: Backend, shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    plan = random_plan(shape, 0.35, device, empty=True)
    q, k, v = rows(shape, device, dtype)
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    unit = torch.finfo(dtype).eps * exact.abs().max()
    for compensate in (False, True):
        name = f"anchor d{shape.dim} {str(dtype)[6:]}{' compensated' if compensate else ''}"
        with _unsynchronised(device):
            dense, missed = attend.over_both(ours, q, k, v, plan, scale=None, compensate=compensate)
            kept = residual.factor(ours, missed, RANK)
        # two parts are rounded, and their sum
        yield verdict(f"{name}: dense", (dense.double() - exact).abs().max(), 2 * unit)
        sparse = attend.over_kept(ours, q, k, v, plan, scale=None, compensate=compensate)
        yield verdict(f"{name}: residual", (missed.double() - (exact - sparse.double())).abs().max(), 4 * unit)
        energy, best = missed.double().square().sum(), factor(missed, RANK)
        left, least = ((missed.double() - x.expand().double()).square().sum() for x in (kept, best))
        yield verdict(f"{name}: energy that rank {RANK} leaves out", left, least + 0.01 * energy)
        wanted = sparse.double() + kept.expand().double()
        plain = (add_residual(sparse, kept).double() - wanted).abs().max()
        with _unsynchronised(device):
            added = residual.add_residual(ours, sparse.clone(memory_format=torch.preserve_format), kept)
        yield verdict(f"{name}: residual added", (added.double() - wanted).abs().max(), 2 * plain + unit)


def measure(
    device: torch.device,
    peak: dict[str, float],
    *,
    repeats: int = 7,
    rehearse: bool = False,
    barred: bool = False,
) -> Iterator[dict[str, Any]]:
    """barred: of the first shape dense attention alone, beside the bars."""
    shape = TINY if rehearse else WAN_14B
    ours, *rounded = _in_precisions(device, shape.dim)
    plan = random_plan(shape, DENSITY, device, multiples=(64, 32))
    q, k, v = rows(shape, device)
    together = [x.contiguous() for x in (q, k, v)]
    calls: dict[str, Call] = dict(dense_calls(q, k, v))
    calls["ours"] = partial(attend.over_all, ours, q, k, v, scale=None, key_valid=None)
    for other in rounded:
        calls[f"ours, {other.precision}"] = partial(attend.over_all, other, q, k, v, scale=None, key_valid=None)
    if why_no_sage(q, k, v) is None:
        calls[f"sageattention {sage_version()}"] = partial(attend_dense_sage, q, k, v, scale=None)
    case = "tiny" if rehearse else "wan2.1-14b"
    if barred:
        yield from _timed(case, shape, calls, dict.fromkeys(calls, 1.0), repeats, {}, None)
        return
    calls["ours, rows of a head together"] = partial(attend.over_all, ours, *together, scale=None, key_valid=None)
    calls["anchor, compensated"] = partial(attend.over_both, ours, q, k, v, plan, scale=None, compensate=True)
    flops = dict.fromkeys(calls, 1.0)
    _, missed = attend.over_both(ours, q, k, v, plan, scale=None, compensate=True)
    kept = residual.factor(ours, missed, RANK)
    calls["factor"] = partial(residual.factor, ours, missed, RANK)
    reuse = "reuse, compensated"
    calls[reuse] = partial(attend.over_kept, ours, q, k, v, plan, scale=None, compensate=True)
    calls["add residual"] = partial(residual.add_residual, ours, torch.empty_like(q), kept)
    beside = {"add residual": reuse}
    tiled = {
        "tiles": tiled_plan(plan, QUERY_TILE, apart=False),
        "tiles apart": tiled_plan(plan, QUERY_TILE, apart=True),
    }
    for name, cut in tiled.items():
        calls[f"{reuse}, {name}"] = partial(attend.over_kept, ours, q, k, v, cut, scale=None, compensate=True)
        beside[f"{reuse}, {name}"] = reuse
    for name, cut in {"blocks": plan, "tiles": tiled["tiles"]}.items():
        held = PlanStore()
        held.put(HERE, cut, 0)
        calls[f"{name} out of the store"] = partial(held.get, HERE, ours)
        beside[f"{name} out of the store"] = reuse
    yield from _timed(case, shape, calls, flops, repeats, beside, kept.nbytes)
    del q, k, v, together, calls, missed, kept, plan, tiled, held
    free_memory()
    yield from _measure_padded(device, repeats, rehearse)


def _measure_padded(device: torch.device, repeats: int, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Dense attention of HunyuanVideo's shape, whose text ends in padding."""
    shape = TINY if rehearse else HUNYUAN._replace(tokens=HUNYUAN.tokens + 256)
    ours, *rounded = _in_precisions(device, shape.dim)
    q, k, v = rows(shape, device)
    valid = torch.arange(shape.tokens, device=device)[None] < shape.tokens - shape.tokens // 600
    padded: dict[str, Call] = {
        "without a mask": next(iter(dense_calls(q, k, v).values())),
        "stock, with a mask": partial(dense_attention, q, k, v, key_valid=valid),
        "ours, padded": partial(attend.over_all, ours, q, k, v, scale=None, key_valid=valid),
    }
    for other in rounded:
        padded[f"ours, {other.precision}, padded"] = partial(attend.over_all, other, q, k, v, key_valid=valid)
    case = "tiny, padded" if rehearse else "hunyuan, padded"
    yield from _timed(case, shape, padded, dict.fromkeys(padded, 1.0), repeats, {}, None)
    free_memory()


def _in_precisions(device: torch.device, dim: int) -> list[Backend]:
    """bf16 first; a precision that has no kernel here has no row."""
    found = [resolve("triton", device, torch.bfloat16, dim, precision) for precision in PRECISIONS]
    return [backend for precision, backend in zip(PRECISIONS, found, strict=True) if backend.precision == precision]


def _timed(
    case: str,
    shape: Shape,
    calls: dict[str, Call],
    flops: dict[str, float],
    repeats: int,
    beside: dict[str, str],
    kept_bytes: int | None,
) -> Iterator[dict[str, Any]]:
    """beside: what a call's time is a share of, where that is not the first one."""
    rounds = [steady_ms(turn, repeats) for turn in (calls, dict(reversed(calls.items())))]
    found = {label: sum(ms[label] for ms in rounds) / 2 for label in calls}
    for label, ms in found.items():
        baseline = beside.get(label, next(iter(calls)))
        work = 4 * shape.heads * shape.tokens**2 * shape.dim * flops.get(label, 0.0)
        yield {
            "benchmark": "dense",
            "case": case,
            "shape": shape._asdict(),
            "kernel": label,
            "ms": ms,
            "baseline": baseline,
            "ratio": ms / found[baseline],
            "bar": _bar_of(label),
            "useful_tflops": work / ms / 1e9 if work else None,
            "residual_mb": kept_bytes / 1e6 if label == "add residual" and kept_bytes else None,
            "extra_mb": extra_mb(calls[label]),
        }


def _bar_of(label: str) -> float | None:
    """A precision without a bar of its own has none."""
    if label == "add residual":
        return RESIDUAL_BAR
    rounded: Precision = next((name for name in PRECISIONS if f", {name}" in label), "bf16")
    return DENSE_BARS.get(rounded) if label.startswith("ours") else None


@contextlib.contextmanager
def _unsynchronised(device: torch.device) -> Iterator[None]:
    """What waits for the GPU in here fails."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
