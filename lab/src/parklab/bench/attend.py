"""Sparse attention of a reuse step against dense attention in the same run.

A step starts from q, k, v [b h n d] as views of [b n h d] memory and a plan as it is kept between steps, and holds
everything the call needs: unpack and sort the labels, gather into block order, work list on the GPU, attention, rows
written back to token order. Everything is timed twice, the second time in reverse order. Plans come with borders on
multiples, as the presets have them, and as clustered.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from parkattn.backend import INT8_HEAD_DIMS, resolve
from parkattn.ops import Backend, attend
from parkattn.ops.attend.definition import DefinedAttention, attend_with_lse
from parkattn.ops.attend.tiles import HOPPER_HEAD_DIMS, TRITON_HEAD_DIMS
from parkattn.ops.permute.definition import gather
from parkattn.plan import Plan
from parkattn.reuse import PlanStore
from parkattn.settings import KEY_GRANULE, PRECISIONS, QUERY_TILE, Precision
from parkattn.site import SiteKey
from parklab.bench.problems import (
    HUNYUAN,
    TINY,
    WAN_1_3B,
    WAN_14B,
    Case,
    Shape,
    random_plan,
    repeats_equal,
    rows,
    verdict,
)
from parklab.bench.timing import Call, extra_mb, free_memory, steady_ms

# how the presets round, and the paper's own blocks
BORDERS = {"rounded": (QUERY_TILE, KEY_GRANULE), "as clustered": (1, 1)}
CASES: dict[str, tuple[Shape, float]] = {
    "wan2.1-14b, density 0.25": (WAN_14B, 0.25),
    "wan2.1-14b, density 0.10": (WAN_14B, 0.10),
    "wan2.1-14b, density 0.40": (WAN_14B, 0.40),
    "hunyuan, density 0.25": (HUNYUAN, 0.25),
    "wan2.1-1.3b, density 0.25": (WAN_1_3B, 0.25),
    "d 64, density 0.25": (WAN_14B._replace(dim=64), 0.25),
}


_DTYPES = (torch.bfloat16, torch.float16)


def kernels_for(device: torch.device, dim: int) -> list[str]:
    """The attention kernels this device runs at this head dim; the first is what the Triton backend takes."""
    return ["gluon", "triton"] if resolve("triton", device, torch.bfloat16, dim).hopper else ["triton"]


def in_precisions(kernels: list[str], dim: int) -> dict[str, Backend]:
    """Label -> backend: each of `kernels_for` in every precision that it has at this head dim."""
    found = {}
    for kernel, precision in itertools.product(kernels, PRECISIONS):
        dims = HOPPER_HEAD_DIMS if kernel == "gluon" else TRITON_HEAD_DIMS
        if dim in dims.get(precision, ()):
            label = kernel if precision == "bf16" else f"{kernel} {precision}"
            found[label] = backend_of(kernel, precision)
    return found


def backend_of(kernel: str, precision: Precision = "bf16") -> Backend:
    """With one of `kernels_for`."""
    return Backend("triton", f"{kernel} asked for", precision, hopper=kernel == "gluon")


def gate(
    device: torch.device,
    *,
    rehearse: bool = False,
    kernels: list[str] | None = None,
    compensated: tuple[bool, ...] = (False, True),
    dims: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> Iterator[Case]:
    """Both kernels on block-ordered tensors against the float64 definition: empty blocks, compensation, poison,
    repeats, lse.
    """
    watched = rehearse and device.type == "cuda"  # small, for the sanitizers
    for dim in dims or ((64, 128) if watched else (64,) if rehearse else (64, 128, 256)):
        for kernel, compensate in itertools.product(kernels or kernels_for(device, dim), compensated):
            # 300 stand-ins: several tiles of them, the last one not full
            shape = TINY if rehearse else Shape(3, 1500, 12, 300 if compensate else 70, dim)
            if watched:  # several query tiles per program, of both kinds, with several key tiles
                shape = Shape(20, 700, 4, 300 if compensate else 8, dim)
            # the Hopper kernel takes exponentials in another way for each dtype
            for dtype in dtypes or (_DTYPES if kernel == "gluon" else _DTYPES[compensate : compensate + 1]):
                yield from _gate_kernel(kernel, shape, dtype, compensate, device, rehearse)
                if dtype == torch.bfloat16 and dim in INT8_HEAD_DIMS:
                    # blocks that fill two warpgroups, and three
                    for query_blocks in (4, 12) if watched or not rehearse else (shape.query_blocks,):
                        blocks = shape._replace(query_blocks=query_blocks)
                        yield from _gate_int8(kernel, blocks, compensate, device, rehearse)
                        if kernel == "gluon":
                            yield _gate_steep_int8(blocks, compensate, device)
                if kernel == "gluon" and dtype == torch.bfloat16:
                    yield _gate_steep(shape, compensate, device)
                    if not compensate:
                        yield from (_gate_far_apart(rows_of_tile, dim, device) for rows_of_tile in (10, 100))


def gate_large(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """More than 2^31 elements per tensor; only the last blocks of both sides meet."""
    n = 2048 if rehearse else 2**24 + 4096 + 40
    ends = (
        torch.tensor([[0, n - 500, n]], device=device).int(),
        torch.tensor([[0, 1000, n - 300, n]], device=device).int(),
    )
    mask = torch.tensor([[[False, False, False], [False, False, True]]], device=device)
    dim = 64 if rehearse else 128
    q, k, v = (torch.randn(1, n, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    exact = scaled_dot_product_attention(q[:, -500:].double(), k[:, -300:].double(), v[:, -300:].double())
    plain = scaled_dot_product_attention(q[:, -500:], k[:, -300:], v[:, -300:]).double()
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(q.dtype).eps * exact.abs().max()
    for kernel in kernels_for(device, dim):
        out, _ = _launch(kernel)(q, k, v, *ends, mask, out=torch.full_like(q, torch.nan))
        yield verdict(
            f"{kernel} past 2^31 elements", (out[:, -500:].double() - exact).abs().max(), allowed, elements=q.numel()
        )
        yield verdict(f"{kernel} rows without keys are 0", out[:, :-500].abs().max(), 0)
        del out
        free_memory()


def measure(
    device: torch.device,
    peak: dict[str, float],
    *,
    repeats: int = 7,
    rehearse: bool = False,
    only: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """only: some of CASES, with the presets' borders and Hopper's kernels alone."""
    chosen = {name: CASES[name] for name in only or CASES}
    for name, (shape, asked) in ({"tiny": (TINY, 0.5)} if rehearse else chosen).items():
        q, k, v = rows(shape, device)
        calls = dense_calls(q, k, v)
        facts: dict[str, dict[str, Any]] = {label: {} for label in calls}
        for borders, multiples in list(BORDERS.items())[: 1 if only else None]:
            plan = random_plan(shape, asked, device, multiples=multiples)
            work = {"borders": borders, "multiples": multiples, "density": plan.density().mean().item()}
            # the Triton kernel and FlashInfer are for comparison: once is enough
            sparse = _sparse_calls(q, k, v, plan, everything=not only and name in ("tiny", next(iter(CASES))))
            for label, (kernel, call) in sparse.items():
                calls[f"{label}, {borders}"] = call
                facts[f"{label}, {borders}"] = work | {"kernel": label, "executed_over_useful": _padding(plan, kernel)}
        first = next(iter(calls))
        # the second time in reverse: what drifts during a round weighs on all alike
        rounds = [steady_ms(turn, repeats) for turn in (calls, dict(reversed(calls.items())))]
        found = {label: sum(ms[label] for ms in rounds) / 2 for label in calls}
        for label, ms in found.items():
            flops = 4 * shape.heads * shape.tokens**2 * shape.dim * facts[label].get("density", 1.0)
            yield {
                "benchmark": "attend",
                "case": name,
                "shape": shape._asdict(),
                "kernel": label,
                **facts[label],
                "ms": ms,
                "baseline": first,
                "ratio": ms / found[first],
                "useful_tflops": flops / ms / 1e9,
                "share_of_roofline": flops / ms / 1e9 / peak["tflops"],
                "extra_mb": extra_mb(calls[label]),
            }
        del q, k, v, plan, calls, sparse
        free_memory()


def dense_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """cuDNN through PyTorch (PyTorch's own choice without a GPU), and FlashAttention-3 where fa3-fwd is installed."""
    if q.device.type != "cuda":
        return {"pytorch": lambda: scaled_dot_product_attention(q, k, v)}

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    calls: dict[str, Call] = {"cudnn": cudnn}
    try:
        flash = importlib.import_module("fa3_fwd_interface").flash_attn_func
    except ImportError:
        return calls
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    return calls | {"fa3": lambda: flash(*by_token)}


def _sparse_calls(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, everything: bool) -> dict[str, tuple[str, Call]]:
    """Label -> (kernel whose work list it walks, call)."""
    store, key = PlanStore(), SiteKey("transformer", 0, "cond")
    store.put(key, plan, 0)

    def reuse(backend: Backend, compensate: bool) -> Tensor:
        held = store.get(key, backend)
        assert held is not None
        return attend.over_kept(backend, q, k, v, held.plan, compensate=compensate)

    calls: dict[str, tuple[str, Call]] = {}
    kernels = kernels_for(q.device, q.shape[-1])
    for label, ours in in_precisions(kernels if everything else kernels[:1], q.shape[-1]).items():
        calls[label] = label, partial(reuse, ours, False)
        calls[f"{label} compensated"] = label, partial(reuse, ours, True)
    try:
        other = resolve("flashinfer", q.device, q.dtype, q.shape[-1])
    except ModuleNotFoundError:
        return calls
    return calls | ({"flashinfer with its plan": (kernels[0], partial(reuse, other, False))} if everything else {})


def _padding(plan: Plan, kernel: str) -> float:
    """Token pairs that the kernel's tiles hold / token pairs that the plan keeps."""
    worklist = importlib.import_module("parkattn.ops.attend.worklist")
    (b, h), n, m = plan.mask.shape[:2], plan.queries.tokens, plan.keys.tokens
    rows, keys, part = _tile_of(kernel, plan.mask.device)
    blocks = (x.reshape(b * h, *x.shape[2:]).contiguous() for x in (plan.queries.offsets, plan.keys.offsets, plan.mask))
    work = worklist.build_worklist(*blocks, query_tokens=n, key_tokens=m, query_tile=rows, key_tile=keys)
    tiles = work.tiles[: int(work.count[0])].double()
    executed = ((tiles[:, 3] / part).ceil() * part * tiles[:, 6] * keys).sum()
    return float(executed / (plan.density().double().sum() * n * m))


def _tile_of(kernel: str, device: torch.device) -> tuple[int, int, int]:
    """Query rows and keys of a tile at head dim 128, and the rows that a part of it is rounded to."""
    tiles = importlib.import_module("parkattn.ops.attend.tiles")
    if kernel.startswith("gluon"):
        tile = tiles.int8_tile(128, 512, True) if kernel.endswith("int8") else tiles.gluon_tile(128)
        return 64 * tile.groups, tile.keys, 64
    tile = tiles.triton_tile(128, tiles.arch_or_hopper(device), int8=kernel.endswith("int8"))
    return tile.queries, tile.keys, tile.queries


def _gate_kernel(
    kernel: str, shape: Shape, dtype: torch.dtype, compensate: bool, device: torch.device, small: bool
) -> Iterator[Case]:
    plan, q, k, v, stand_ins = _gate_problem(shape, dtype, compensate, device)
    blocks, flags = (
        (plan.queries.offsets[0], plan.keys.offsets[0], plan.mask[0]),
        plan.compensable() if compensate else None,
    )

    def run() -> tuple[Tensor, Tensor]:
        out, lse = _launch(kernel)(q, k, v, *blocks, out=torch.full_like(q, torch.nan), with_lse=True, **stand_ins)
        return out, lse

    def definition(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        # its thousands of small operators would keep a sanitizer busy for minutes
        place = "cpu" if small else device
        a, b, c = (t[None].to(place, kind) for t in (q, k, v))
        held = plan.to(place)
        out, lse = attend_with_lse(
            a, b, c, held.queries, held.keys, held.mask, compensate=None if flags is None else flags.to(place)
        )
        return out[0].to(device, torch.float64), lse[0].to(device, torch.float64)

    (exact, exact_lse), (plain, _), (out, lse) = definition(torch.float64), definition(dtype), run()
    unit = torch.finfo(dtype).eps
    name = f"{kernel} d{shape.dim} {str(dtype)[6:]}{' compensated' if compensate else ''}"
    # stand-ins are rounded to the kernel's dtype, which moves a score by |q| |c| eps / sqrt(d)
    slack = 2 if compensate else 1
    allowed = 2 * (plain - exact).abs().max() + slack * unit * exact.abs().max()
    yield verdict(name, (out.double() - exact).abs().max(), allowed)
    yield verdict(f"{name}: repeats bit-equal", 0 if repeats_equal(run, 2 if small else 10) else 1, 0)
    seen = exact_lse.isfinite()
    yield verdict(f"{name}: lse", (lse.double() - exact_lse)[seen].abs().max(), 2e-3 if not compensate else 2e-2)
    yield verdict(f"{name}: lse -inf where no key is kept", (lse.isinf() != ~seen).sum(), 0)


def _gate_int8(kernel: str, shape: Shape, compensate: bool, device: torch.device, small: bool) -> Iterator[Case]:
    """The whole call, rounding included, against the definition with float64 weights and values."""
    plan = random_plan(shape, 0.35, device, seed=shape.dim, empty=True)
    q, k, v = rows(shape, device)
    ours = backend_of(kernel, "int8")
    place = torch.device("cpu") if small else device

    def definition(kind: torch.dtype) -> Tensor:
        a, b, c = (x.to(place, kind) for x in (q, k, v))
        return DefinedAttention("int8").over_kept(a, b, c, plan.to(place), scale=None, compensate=compensate)

    exact, plain = definition(torch.float64).to(device), definition(torch.bfloat16).to(device).double()
    call = partial(attend.over_kept, ours, q, k, v, plan, compensate=compensate)
    name = f"{kernel} int8 d{shape.dim}{' compensated' if compensate else ''}, {shape.query_blocks} query blocks"
    # weights are rounded in the kernel alone
    allowed = 2 * (plain - exact).abs().max() + 2 * torch.finfo(q.dtype).eps * exact.abs().max()
    yield verdict(name, (call().double() - exact).abs().max(), allowed)
    yield verdict(f"{name}: repeats bit-equal", 0 if repeats_equal(call, 2 if small else 10) else 1, 0)


def _gate_problem(
    shape: Shape, dtype: torch.dtype, compensate: bool, device: torch.device
) -> tuple[Plan, Tensor, Tensor, Tensor, Case]:
    """A plan, q, k, v [h n d] in block order, and what an attention kernel is told about stand-ins."""
    plan = random_plan(shape, 0.35, device, seed=shape.dim, empty=True)
    q, k, v = (
        gather(x, side)[0]
        for x, side in zip(rows(shape, device, dtype), (plan.queries, plan.keys, plan.keys), strict=True)
    )
    if not compensate:
        return plan, q, k, v, {}
    centroids, mean_values = (_block_means(x, plan.keys.offsets[0]).to(dtype) for x in (k, v))
    return plan, q, k, v, {"compensate": plan.compensable()[0], "centroids": centroids, "mean_values": mean_values}


def _gate_steep(shape: Shape, compensate: bool, device: torch.device) -> Case:
    """In the first head scores differ by hundreds: quick exponentials lose its rows, and they are computed again."""
    plan, q, k, v, stand_ins = _gate_problem(shape, torch.bfloat16, compensate, device)
    q[0] *= 300
    blocks = (plan.queries.offsets[0], plan.keys.offsets[0], plan.mask[0])
    out, careful = (
        _launch("gluon")(q, k, v, *blocks, out=torch.full_like(q, torch.nan), with_lse=True, quick=quick, **stand_ins)[
            0
        ]
        for quick in (True, False)
    )
    allowed = 2 * torch.finfo(q.dtype).eps * careful.abs().max()
    name = f"gluon d{shape.dim} bfloat16{' compensated' if compensate else ''}: quick as careful where scores are steep"
    return verdict(name, (out.double() - careful.double()).abs().max(), allowed)


def _gate_steep_int8(shape: Shape, compensate: bool, device: torch.device) -> Case:
    """The same of the INT8 kernel, whose lost rows are computed by another number of warpgroups."""
    from parkattn.ops.attend.kernels import AttentionKernel  # Triton, where there is none this module is read too

    plan = random_plan(shape, 0.35, device, seed=shape.dim, empty=True)
    q, k, v = rows(shape, device)
    q[:, 0] *= 300
    over, stand_ins = AttentionKernel(True, "int8")._attention(q, k, v, plan, None, compensate)
    out, careful = (over(plan.mask, with_lse=True, quick=quick, **stand_ins)[0] for quick in (True, False))
    allowed = 2 * torch.finfo(q.dtype).eps * careful.abs().max()
    name = f"gluon int8 d{shape.dim}{' compensated' if compensate else ''}, {shape.query_blocks} query blocks"
    return verdict(
        f"{name}: quick as careful where scores are steep", (out.double() - careful.double()).abs().max(), allowed
    )


def _gate_far_apart(tile_rows: int, dim: int, device: torch.device) -> Case:
    """Scores that are the same within a tile of 128 keys and up to 300 powers of two apart between tiles,
    in any order.
    """
    steps = torch.tensor([-150, -100, -60, -20, 0, 20, 50, 64, 100, 150])
    levels = steps[torch.randint(10, (64, 4), generator=torch.Generator().manual_seed(dim))]
    heads, means = len(levels), torch.arange(1.0, 5)
    q, k, v = (
        torch.zeros(heads, tile_rows, dim),
        torch.zeros(heads, 512, dim),
        means.repeat_interleave(128)[:, None].expand(heads, 512, dim),
    )
    q[..., 0], k[..., 0] = 1, levels.repeat_interleave(128, 1)
    ends = (torch.tensor([0, count], dtype=torch.int32, device=device).repeat(heads, 1) for count in (tile_rows, 512))
    given = (x.to(device, torch.bfloat16).contiguous() for x in (q, k, v))
    out, _ = _launch("gluon")(
        *given,
        *ends,
        torch.ones(heads, 1, 1, dtype=torch.bool, device=device),
        scale=math.log(2),
        with_lse=True,
        quick=True,
    )
    exact = torch.softmax(levels.double() * math.log(2), 1) @ means.double()
    error = (out.double().cpu() / exact[:, None, None] - 1).abs().max()
    return verdict(
        f"gluon d{dim} bfloat16: {tile_rows} rows, tiles whose scores lie far apart",
        error,
        2 * torch.finfo(torch.bfloat16).eps,
    )


def _block_means(x: Tensor, ends: Tensor) -> Tensor:
    """[h m d] in block order, int32 [h kb+1] -> fp32 [h kb d]"""
    sums = torch.nn.functional.pad(x.double().cumsum(1), (0, 0, 1, 0))
    picked = sums.gather(1, ends.long()[..., None].expand(-1, -1, x.shape[-1])).diff(dim=1)
    return (picked / ends.diff(dim=-1).clamp(min=1)[..., None]).float()


def _launch(kernel: str) -> Any:
    if kernel == "gluon":
        return importlib.import_module("parkattn.ops.attend.hopper").attend_hopper
    return importlib.import_module("parkattn.ops.attend.triton").attend_ragged
