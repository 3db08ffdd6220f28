"""Fused PAMA against the materialised PyTorch one: the paper's table (Appendix D), on the GPU at hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parkattn.bench.problems import HUNYUAN, TINY, WAN_14B, Case, Shape, offsets, repeats_equal, verdict
from parkattn.bench.timing import extra_mb, free_memory, median_ms

# N_Q = 256 as in the paper's table; above 1,024 key blocks fewer heads, so that the materialised baseline fits
PAPER = {
    "hunyuan": HUNYUAN._replace(query_blocks=256),
    "wan2.1-14b": WAN_14B._replace(query_blocks=256, key_blocks=1024),
    "wan2.1-14b, 512 key blocks": WAN_14B._replace(query_blocks=256),
    "2,048 key blocks": Shape(12, 115_200, 256, 2048),
    "4,096 key blocks": Shape(6, 115_200, 256, 4096),
}
REHEARSAL = {"tiny": TINY}


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


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Error at most twice that of same-dtype PyTorch, poisoned outputs, repeated runs bit-equal."""
    from parkattn.kernels import importance

    bf16, fp16 = torch.bfloat16, torch.float16
    cases = [(1024, 128, bf16), (1000, 128, fp16), (512, 128, bf16), (70, 128, bf16), (300, 64, bf16), (300, 256, bf16), (2500, 128, bf16)]
    for key_blocks, d, dtype in [(20, 64, bf16)] if rehearse else cases:
        case = _case(Shape(2, 90, 5, key_blocks, d) if rehearse else Shape(3, 5000, 17, key_blocks, d), device, dtype)
        exact = pama_torch(*case, dtype=torch.float64)
        allowed = 2 * (pama_torch(*case).double() - exact).abs().max() + torch.finfo(torch.float32).eps
        for kernel in (importance.pama_two_pass, importance.pama_full_key)[: 1 if key_blocks > 1024 else 2]:
            out = kernel(*case, out=torch.full_like(exact, torch.nan, dtype=torch.float32))
            same = repeats_equal(partial(kernel, *case), 2 if rehearse else 10)
            name = f"{kernel.__name__} {key_blocks} d{d} {str(dtype)[6:]}"
            yield verdict(name, (out.double() - exact).abs().max() if same else torch.nan, allowed, repeats_equal=same)


def measure(device: torch.device, peak: dict[str, float], *, repeats: int = 7, rehearse: bool = False) -> Iterator[dict[str, Any]]:
    from parkattn.kernels import importance

    for name, shape in (REHEARSAL if rehearse else PAPER).items():
        case = _case(shape, device, torch.bfloat16)
        torch_ms, torch_mb = median_ms(partial(pama_torch, *case), 3), extra_mb(partial(pama_torch, *case))
        facts = {"benchmark": "pama", "shape": {"name": name, **shape._asdict()}}
        yield {**facts, "kernel": "pytorch", "ms": torch_ms, "extra_mb": torch_mb, "speedup": 1.0}
        gemm_flops = 2 * shape.heads * shape.tokens * shape.key_blocks * shape.dim
        for label, kernel in {"full-k": importance.pama_full_key, "two-pass": importance.pama_two_pass}.items():
            if label == "full-k" and shape.key_blocks > importance.FULL_KEY_LIMIT:
                continue
            call = partial(kernel, *case)
            ms = median_ms(call, repeats)
            yield {
                **facts,
                "kernel": label,
                "ms": ms,
                "extra_mb": extra_mb(call),
                "speedup": torch_ms / ms,
                "tflops": gemm_flops / ms / 1e9,
                "share_of_roofline": gemm_flops / ms / 1e9 / peak["tflops"],
            }
        del case
        free_memory()


def _case(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = 2 * torch.randn(shape.heads, shape.tokens, shape.dim, device=device, dtype=dtype)
    centroids = torch.randn(shape.heads, shape.key_blocks, shape.dim, device=device, dtype=dtype)
    ends = offsets(shape.heads, shape.tokens, shape.query_blocks, device, seed=1, empty=True)
    sizes = offsets(shape.heads, shape.tokens, shape.key_blocks, device, seed=2, empty=True).diff(dim=-1)
    return q, ends, centroids, sizes
