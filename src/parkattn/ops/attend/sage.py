"""Dense attention by SageAttention's kernels, of its authors' package `sageattention`: scores in INT8, no mask.

1.0.6 is Triton and on the package index; 2.x is built from source. Both have the same function.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from parkattn.checks import asks_for_gradient

HEAD_DIMS = (64, 128)  # that all versions have
DTYPES = (torch.bfloat16, torch.float16)


def why_no_sage(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None = None) -> str | None:
    """Why SageAttention does not take this call; None where it does."""
    if importlib.util.find_spec("sageattention") is None:
        return "SageAttention is not installed (pip install sageattention)"
    if q.device.type != "cuda":
        return f"SageAttention needs a CUDA GPU, and q is on {q.device}"
    if q.dtype not in DTYPES:
        return f"SageAttention takes bfloat16 and float16, not {q.dtype}"
    if not {q.shape[-1], v.shape[-1]} <= {*HEAD_DIMS}:
        return f"SageAttention has head dims 64 and 128, not {q.shape[-1]} and {v.shape[-1]}"
    if asks_for_gradient(q, k, v):
        return "SageAttention has no gradient"
    return None if key_valid is None else "SageAttention has no mask for padding"


def sage_version() -> str | None:
    try:
        return version("sageattention")
    except PackageNotFoundError:
        return None


def attend_dense_sage(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
    """[b h n d] each; rows are made contiguous, as its kernels want them."""
    package: Any = importlib.import_module("sageattention")
    with torch.cuda.device_of(q):
        out: Tensor = package.sageattn(
            *(x.contiguous() for x in (q, k, v)), tensor_layout="HND", is_causal=False, sm_scale=scale
        )
    return out
