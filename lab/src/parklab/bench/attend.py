"""Sparse attention of a reuse step against dense attention in the same run.

A step starts from q, k, v [b h n d] as views of [b n h d] memory and a plan as it is kept between steps, and holds
everything the call needs: unpack and sort the labels, gather into block order, work list on the GPU, attention, rows
written back to token order. Plans come with borders on multiples, as the presets have them, and as clustered.
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
from parkattn.ops.attend import tiles
from parkattn.ops.attend.definition import DefinedAttention, attend_with_lse
from parkattn.ops.permute.definition import gather
from parkattn.plan import Plan
from parkattn.reuse import PlanStore
from parkattn.segments import segment_mean
from parkattn.settings import KEY_GRANULE, PRECISIONS, QUERY_TILE
from parkattn.site import SiteKey
from parklab.bench.gates import Case, against_exact, in_float64_and_own, quick_as_careful, repeated, verdict
from parklab.bench.problems import HUNYUAN, TINY, WAN_1_3B, WAN_14B, Shape, random_plan, rows
from parklab.bench.timing import Call, Calls, Peak, Record, Row, free_memory, measured

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
BF16, FP16 = torch.bfloat16, torch.float16
STEEP = 300  # times the first head's queries: quick exponentials lose its rows, and they are computed again


def kernels_for(device: torch.device, dim: int) -> list[str]:
    """The attention kernels this device runs at this head dim; the first is what the Triton backend takes."""
    return ["gluon", "triton"] if resolve("triton", device, BF16, dim).hopper else ["triton"]


def in_precisions(kernels: list[str], dim: int) -> dict[str, Backend]:
    """Label -> backend: each of `kernels_for` in every precision that it has at this head dim."""
    found = {}
    for kernel, precision in itertools.product(kernels, PRECISIONS):
        hopper = kernel == "gluon"
        if dim in (tiles.HOPPER_HEAD_DIMS if hopper else tiles.TRITON_HEAD_DIMS).get(precision, ()):
            label = f"{kernel} {precision}".removesuffix(" bf16")
            found[label] = Backend("triton", f"{kernel} asked for", precision, hopper=hopper)
    return found


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Both kernels against the float64 definition at every head dimension, with and without compensation."""
    watched = rehearse and device.type == "cuda"  # small, for the sanitizers
    for dim in (64, 128) if watched else (64,) if rehearse else (64, 128, 256):
        for kernel, compensate in itertools.product(kernels_for(device, dim), (False, True)):
            # the Hopper kernel takes exponentials in another way for each dtype
            for dtype in (BF16, FP16) if kernel == "gluon" else (FP16 if compensate else BF16,):
                yield from gate_kernel(kernel, dim, dtype, compensate, device, rehearse)


def gate_kernel(
    kernel: str, dim: int, dtype: torch.dtype, compensate: bool, device: torch.device, rehearse: bool
) -> Iterator[Case]:
    """Empty blocks, poison, repeats, lse; in bf16 the whole call in INT8 too, and what can go wrong with quick
    exponentials.
    """
    watched = rehearse and device.type == "cuda"
    # 300 stand-ins: several tiles of them, the last one not full
    shape = TINY if rehearse else Shape(3, 1500, 12, 300 if compensate else 70, dim)
    if watched:  # several query tiles per program, of both kinds, with several key tiles
        shape = Shape(20, 700, 4, 300 if compensate else 8, dim)
    name = f"{kernel} d{dim} {str(dtype)[6:]}{' compensated' if compensate else ''}"
    yield from _gate_in_blocks(name, kernel, shape, dtype, compensate, device, rehearse)
    if dtype == BF16 and dim in INT8_HEAD_DIMS:
        # blocks that fill two warpgroups, and three
        for query_blocks in (4, 12) if watched or not rehearse else (shape.query_blocks,):
            blocks = shape._replace(query_blocks=query_blocks)
            yield from _gate_int8(kernel, blocks, compensate, device, rehearse)
    if kernel == "gluon" and dtype == BF16 and not compensate:
        yield from (_gate_far_apart(f"{name}: {count} rows", count, dim, device) for count in (10, 100))


def gate_large(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """More than 2^31 elements per tensor; only the last blocks of both sides meet."""
    n, dim = (2048, 64) if rehearse else (2**24 + 4096 + 40, 128)
    borders = [0, n - 500, n], [0, 1000, n - 300, n]
    ends = (torch.tensor([each], device=device).int() for each in borders)
    mask = torch.tensor([[[False, False, False], [False, False, True]]], device=device)
    q, k, v = (torch.randn(1, n, dim, device=device, dtype=BF16) for _ in range(3))
    exact, plain = in_float64_and_own(scaled_dot_product_attention, q[:, -500:], k[:, -300:], v[:, -300:])
    given = q, k, v, *ends, mask
    for kernel in kernels_for(device, dim):
        out, _ = _launch(kernel)(*given, out=torch.full_like(q, torch.nan))
        yield against_exact(f"{kernel} past 2^31 elements", out[:, -500:], exact, plain, elements=q.numel())
        yield verdict(f"{kernel} rows without keys are 0", out[:, :-500].abs().max(), 0)
        del out
        free_memory()


def measure(
    device: torch.device, peak: Peak, *, repeats: int = 7, rehearse: bool = False, only: Collection[str] = ()
) -> Iterator[Record]:
    """only: some of CASES, with the presets' borders and Hopper's kernels alone."""
    chosen = {name: CASES[name] for name in only or CASES}
    for name, (shape, asked) in ({"tiny": (TINY, 0.5)} if rehearse else chosen).items():
        q, k, v = rows(shape, device)
        table = {label: Row(call, shape.flops()) for label, call in dense_calls(q, k, v).items()}
        for borders, multiples in list(BORDERS.items())[: 1 if only else None]:
            plan = random_plan(shape, asked, device, multiples=multiples)
            work: Record = {"borders": borders, "multiples": multiples, "density": plan.density().mean().item()}
            # the Triton kernel and FlashInfer are for comparison: once is enough
            sparse = _sparse_calls(q, k, v, plan, everything=not only and name in ("tiny", next(iter(CASES))))
            for label, (kernel, call) in sparse.items():
                facts = work | {"kernel": label, "executed_over_useful": _padding(plan, kernel)}
                table[f"{label}, {borders}"] = Row(call, shape.flops(work["density"]), facts=facts)
        yield from measured("attend", table, repeats, peak, case=name, shape=shape._asdict())
        del q, k, v, plan, table, sparse, call
        free_memory()


def dense_calls(q: Tensor, k: Tensor, v: Tensor) -> Calls:
    """cuDNN through PyTorch (PyTorch's own choice without a GPU), and FlashAttention-3 where fa3-fwd is installed."""
    if q.device.type != "cuda":
        return {"pytorch": partial(scaled_dot_product_attention, q, k, v)}
    calls: Calls = {"cudnn": partial(cudnn_attention, q, k, v)}
    try:
        flash = importlib.import_module("fa3_fwd_interface").flash_attn_func
    except ImportError:
        return calls
    return calls | {"fa3": partial(flash, *(x.transpose(1, 2) for x in (q, k, v)))}


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


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
    n, m, int8 = plan.queries.tokens, plan.keys.tokens, kernel.endswith("int8")
    tile = tiles.triton_tile(128, tiles.arch_or_hopper(plan.mask.device), int8=int8)
    sides, part = {"query_tile": tile.queries, "key_tile": tile.keys}, tile.queries
    if kernel.startswith("gluon"):
        hopper = tiles.int8_tile(128, 512, True) if int8 else tiles.gluon_tile(128)
        sides, part = {"query_tile": 64 * hopper.groups, "key_tile": hopper.keys}, 64
    blocks = (x.flatten(0, 1).contiguous() for x in (plan.queries.offsets, plan.keys.offsets, plan.mask))
    work = worklist.build_worklist(*blocks, query_tokens=n, key_tokens=m, **sides)
    found = work.tiles[: int(work.count[0])].double()
    executed = ((found[:, 3] / part).ceil() * part * found[:, 6] * sides["key_tile"]).sum()
    return float(executed / (plan.density().double().sum() * n * m))


def _gate_in_blocks(
    name: str, kernel: str, shape: Shape, dtype: torch.dtype, compensate: bool, device: torch.device, small: bool
) -> Iterator[Case]:
    """The kernel itself, on tensors in block order."""
    plan = random_plan(shape, 0.35, device, seed=shape.dim, empty=True)
    sides = plan.queries, plan.keys, plan.keys
    given = [gather(x, side) for x, side in zip(rows(shape, device, dtype), sides, strict=True)]
    stand_ins = {}
    if compensate:
        labels = plan.keys.labels.gather(-1, plan.keys.permutation().long())
        means = [segment_mean(x.double(), labels, plan.keys.count)[0][0].to(dtype) for x in given[1:]]
        stand_ins = {"compensate": plan.compensable()[0], "centroids": means[0], "mean_values": means[1]}
    in_blocks = *(x[0] for x in given), plan.queries.offsets[0], plan.keys.offsets[0], plan.mask[0]

    def run(**how: bool) -> Any:
        poisoned = torch.full_like(in_blocks[0], torch.nan)
        return _launch(kernel)(*in_blocks, out=poisoned, with_lse=True, **stand_ins, **how)

    # its thousands of small operators would keep a sanitizer busy for minutes
    place = "cpu" if small else device
    held = plan.to(place)
    flags = held.compensable() if compensate else None
    definition = partial(attend_with_lse, queries=held.queries, keys=held.keys, mask=held.mask, compensate=flags)
    (exact, exact_lse), (plain, _) = in_float64_and_own(definition, *(x.to(place) for x in given))
    out, lse = run()
    # stand-ins are rounded to the kernel's dtype, which moves a score by |q| |c| eps / sqrt(d)
    yield against_exact(name, out, exact[0], plain[0], units=2 if compensate else 1)
    yield repeated(name, run, 2 if small else 10)
    exact_lse = exact_lse[0].to(device)
    seen = exact_lse.isfinite()
    yield verdict(f"{name}: lse", (lse.double() - exact_lse)[seen].abs().max(), 2e-2 if compensate else 2e-3)
    yield verdict(f"{name}: lse -inf where no key is kept", (lse.isinf() != ~seen).sum(), 0)
    if kernel == "gluon" and dtype == BF16:
        in_blocks[0][0] *= STEEP
        yield quick_as_careful(name, lambda quick: run(quick=quick)[0])


def _gate_int8(kernel: str, shape: Shape, compensate: bool, device: torch.device, small: bool) -> Iterator[Case]:
    """The whole call, rounding included, against the definition with float64 weights and values."""
    from parkattn.ops.attend.kernels import AttentionKernel  # Triton, where there is none this module is read too

    plan = random_plan(shape, 0.35, device, seed=shape.dim, empty=True)
    q, k, v = rows(shape, device)
    place = torch.device("cpu") if small else device
    definition = partial(DefinedAttention("int8").over_kept, plan=plan.to(place), scale=None, compensate=compensate)
    exact, plain = in_float64_and_own(definition, *(x.to(place) for x in (q, k, v)))
    ours = in_precisions([kernel], shape.dim)[f"{kernel} int8"]
    call = partial(attend.over_kept, ours, q, k, v, plan, compensate=compensate)
    name = f"{kernel} int8 d{shape.dim}{' compensated' if compensate else ''}, {shape.query_blocks} query blocks"
    # weights are rounded in the kernel alone
    yield against_exact(name, call(), exact, plain, units=2)
    yield repeated(name, call, 2 if small else 10)
    if kernel == "gluon":  # lost rows are computed by another number of warpgroups
        q[:, 0] *= STEEP
        over, stand_ins = AttentionKernel(True, "int8")._attention(q, k, v, plan, None, compensate)
        yield quick_as_careful(name, lambda quick: over(plan.mask, with_lse=True, quick=quick, **stand_ins)[0])


def _gate_far_apart(name: str, count: int, dim: int, device: torch.device) -> Case:
    """Scores that are the same within a tile of 128 keys and up to 300 powers of two apart between tiles, in any
    order; count: of rows.
    """
    steps = torch.tensor([-150, -100, -60, -20, 0, 20, 50, 64, 100, 150])
    levels = steps[torch.randint(10, (64, 4), generator=torch.Generator().manual_seed(dim))]
    heads, means = len(levels), torch.arange(1.0, 5)
    q, k = torch.zeros(heads, count, dim), torch.zeros(heads, 512, dim)
    v = means.repeat_interleave(128)[:, None].expand(heads, 512, dim)
    q[..., 0], k[..., 0] = 1, levels.repeat_interleave(128, 1)
    given = (x.to(device, BF16).contiguous() for x in (q, k, v))
    ends = (torch.tensor([0, end], dtype=torch.int32, device=device).repeat(heads, 1) for end in (count, 512))
    mask = torch.ones(heads, 1, 1, dtype=torch.bool, device=device)
    out, _ = _launch("gluon")(*given, *ends, mask, scale=math.log(2), with_lse=True, quick=True)
    exact = torch.softmax(levels.double() * math.log(2), 1) @ means.double()
    error = (out.double().cpu() / exact[:, None, None] - 1).abs().max()
    return verdict(f"{name}, tiles whose scores lie far apart", error, 2 * torch.finfo(BF16).eps)


def _launch(kernel: str) -> Any:
    if kernel == "gluon":
        return importlib.import_module("parkattn.ops.attend.hopper").attend_hopper
    return importlib.import_module("parkattn.ops.attend.triton").attend_ragged
