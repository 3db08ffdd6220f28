"""Fused PAMA against the materialised PyTorch one: the paper's table (Appendix D), on the GPU at hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parklab.bench.problems import HUNYUAN, TINY, WAN_14B, Case, Shape, offsets, repeats_equal, verdict
from parklab.bench.timing import extra_mb, free_memory, median_ms

# N_Q = 256 as in the paper's table; above 1,024 key blocks fewer heads, so that the materialised baseline fits
PAPER = {
    "hunyuan": HUNYUAN._replace(query_blocks=256),
    "wan2.1-14b": WAN_14B._replace(query_blocks=256, key_blocks=1024),
    "wan2.1-14b, 512 key blocks": WAN_14B._replace(query_blocks=256),
    "2,048 key blocks": Shape(12, 115_200, 256, 2048),
    "4,096 key blocks": Shape(6, 115_200, 256, 4096),
}
REHEARSAL = {"tiny": TINY}
BF16, FP16 = torch.bfloat16, torch.float16
# both dtypes at every head dim, one to eight chunks of the Hopper kernel, above Full-K's limit; the last one keeps
# every
# multiprocessor busy for many tiles: copies that overtake reads show there first
GATED = [
    *(
        (Shape(3, 5000, 17, key_blocks, 128), dtype)
        for key_blocks, dtype in ((1024, BF16), (1000, FP16), (700, BF16), (512, FP16), (70, BF16))
    ),
    *((Shape(3, 5000, 17, 300, dim), dtype) for dim in (64, 256) for dtype in (BF16, FP16)),
    (Shape(3, 5000, 17, 2500, 128), BF16),
    *((Shape(8, 75_600, 256, key_blocks, 128), BF16) for key_blocks in (200, 512, 1024)),
]


def pama_torch(q: Tensor, ends: Tensor, centroids: Tensor, sizes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The materialised definition: GEMM, softmax in at least float32, mean over each query block."""
    dtype = dtype or q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bh, n, d = q.shape
    logits = q.to(dtype) @ centroids.to(dtype).mT * d**-0.5 + sizes.to(wide).log().to(dtype)[:, None]
    weights = logits.softmax(-1, dtype=wide)
    starts = ends[:, :-1].long() + n * torch.arange(bh, device=q.device)[:, None]
    edges = torch.cat([starts.flatten(), torch.tensor([bh * n], device=q.device)])
    sums = torch.segment_reduce(weights.view(bh * n, -1), "sum", offsets=edges, axis=0, unsafe=True)
    return sums.view(bh, ends.shape[-1] - 1, -1) / ends.diff(dim=-1).clamp(min=1)[..., None]


def gate(
    device: torch.device,
    *,
    rehearse: bool = False,
    shapes: list[tuple[Shape, torch.dtype]] | None = None,
    only: str = "",
) -> Iterator[Case]:
    """Error at most twice that of same-dtype PyTorch, poisoned outputs, ten runs bit-equal; TileLang's kernels too
    where installed.
    """
    # a small case on a GPU is for the sanitizer: it takes the Hopper kernel along, with several tiles per block
    small = [(Shape(2, 90, 5, 20, 64), BF16)] + ([(Shape(2, 600, 3, 300, 128), BF16)] if device.type == "cuda" else [])
    for shape, dtype in shapes or (small if rehearse else GATED):
        key_blocks, dim = shape.key_blocks, shape.dim
        case = _case(shape, device, dtype)
        exact = pama_torch(*case, dtype=torch.float64)
        allowed = 2 * (pama_torch(*case).double() - exact).abs().max() + torch.finfo(torch.float32).eps
        poison = torch.full_like(exact, torch.nan, dtype=torch.float32)
        for label, kernel in {
            **_kernels(key_blocks),
            **({} if rehearse or dim > 128 else _tilelang_kernels(key_blocks, device)),
        }.items():
            if only not in label:
                continue
            name = f"{label}, {shape.tokens} queries, {key_blocks} key blocks, d {dim}, {str(dtype)[6:]}"
            try:
                out = kernel(*case, **({} if "TileLang" in label else {"out": poison.clone()}))
                same = repeats_equal(partial(kernel, *case), 2 if rehearse else 10)
            except Exception as failure:
                if "TileLang" not in label:
                    raise
                # an extra that does not compile here is a failed check, not the end of all others
                yield {"gate": name, "ok": False, "failure": str(failure)[-1500:]}
                continue
            yield verdict(name, (out.double() - exact).abs().max() if same else torch.nan, allowed, repeats_equal=same)


def gate_large(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """More than 2^31 elements: the last head has the bits it has alone, and the error rule holds for it."""
    shape = TINY if rehearse else Shape(24, 720_000, 200, 300)
    case = _case(shape, device, BF16)
    q, ends, centroids, sizes = (part[-1:].contiguous() for part in case)
    last = (q, ends, centroids, sizes)
    exact = pama_torch(*last, dtype=torch.float64)
    allowed = 2 * (pama_torch(*last).double() - exact).abs().max() + torch.finfo(torch.float32).eps
    for label, kernel in _kernels(shape.key_blocks).items():
        whole = kernel(*case, out=torch.full((shape.heads, *exact.shape[1:]), torch.nan, device=device))[-1:]
        name = f"{label} past 2^31 elements, last head"
        yield verdict(name, (whole.double() - exact).abs().max(), allowed, elements=case[0].numel())
        yield verdict(f"{name}: other bits than alone", (whole != kernel(*last)).sum(), 0)


def measure(
    device: torch.device, peak: dict[str, float], *, repeats: int = 7, rehearse: bool = False
) -> Iterator[dict[str, Any]]:
    for name, shape in (REHEARSAL if rehearse else PAPER).items():
        case = _case(shape, device, BF16)
        torch_ms, torch_mb = median_ms(partial(pama_torch, *case), 3), extra_mb(partial(pama_torch, *case))
        facts = {"benchmark": "pama", "shape": {"name": name, **shape._asdict()}}
        yield {
            **facts,
            "kernel": "PyTorch",
            "ms": torch_ms,
            "extra_mb": torch_mb,
            "speedup": 1.0,
            "memory_reduction": 1.0,
        }
        gemm_flops = 2 * shape.heads * shape.tokens * shape.key_blocks * shape.dim
        for label, kernel in {
            **_kernels(shape.key_blocks),
            **({} if rehearse else _tilelang_kernels(shape.key_blocks, device)),
        }.items():
            call = partial(kernel, *case)
            ms, mb = median_ms(call, repeats), extra_mb(call)
            yield {
                **facts,
                "kernel": label,
                "ms": ms,
                "extra_mb": mb,
                "speedup": torch_ms / ms,
                "memory_reduction": torch_mb / mb if mb else None,
                "tflops": gemm_flops / ms / 1e9,
                "share_of_roofline": gemm_flops / ms / 1e9 / peak["tflops"],
            }
        del case, call
        free_memory()


def _kernels(key_blocks: int) -> dict[str, Callable[..., Tensor]]:
    from parkattn.ops.importance import triton as importance

    two_pass = {"Triton (two-pass)": importance.pama_two_pass}
    return (
        two_pass
        if key_blocks > importance.FULL_KEY_LIMIT
        else {**two_pass, "Triton (Full-K)": importance.pama_full_key}
    )


def _tilelang_kernels(key_blocks: int, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """None where the extra or the GPU is missing."""
    if device.type != "cuda" or importlib.util.find_spec("tilelang") is None:
        return {}
    from parklab.bench import importance_tilelang

    two_pass = {"TileLang (two-pass)": importance_tilelang.pama_two_pass}
    if key_blocks > importance_tilelang.FULL_KEY_LIMIT:
        return two_pass
    return {**two_pass, "TileLang (Full-K)": importance_tilelang.pama_full_key}


def _case(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = 2 * torch.randn(shape.heads, shape.tokens, shape.dim, device=device, dtype=dtype)
    centroids = torch.randn(shape.heads, shape.key_blocks, shape.dim, device=device, dtype=dtype)
    ends = offsets(shape.heads, shape.tokens, shape.query_blocks, device, seed=1, empty=True)
    sizes = offsets(shape.heads, shape.tokens, shape.key_blocks, device, seed=2, empty=True).diff(dim=-1)
    return q, ends, centroids, sizes
