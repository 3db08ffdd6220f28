"""Attention through FlashInfer's variable-block wrapper, as the paper ran it; everything else by the Triton kernels.

The wrapper expands the plan to token indices and copies them to the host on every call: it synchronises, and no CUDA
graph can capture it. Kept as the baseline that the Triton backend is measured against.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parkattn.plan import Plan

from ..permute import triton as permute
from .kernels import AttentionKernel

WORKSPACE_BYTES = 128 * 1024 * 1024  # what FlashInfer's documentation recommends


@dataclass(frozen=True)
class FlashInferAttention(AttentionKernel):
    """Over kept blocks; over every key it is the plain Triton kernel."""

    hopper: bool = False
    kernel: str = "auto"
    """fa2, fa3, or auto for FlashInfer's own choice; the first use of one compiles it, for up to 90 s."""

    def over_kept(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> Tensor:
        if compensate:
            raise ValueError(
                "compensate: expected False with backend='flashinfer', which has no stand-in keys; "
                "use backend='triton'."
            )
        wrapper = self.planned(q, k, plan, scale=scale)
        rows = (
            permute.gather_rows(x, side.permutation().contiguous())
            for x, side in ((q, plan.queries), (k, plan.keys), (v, plan.keys))
        )
        out = torch.empty_like(q)
        return permute.scatter_rows(wrapper.run(*rows), plan.queries.permutation().contiguous(), out=out)

    def planned(self, q: Tensor, k: Tensor, plan: Plan, *, scale: float | None = None) -> Any:
        """FlashInfer's wrapper with its own plan made: token indices, on the host too."""
        b, h, _, d = q.shape
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer_package().VariableBlockSparseAttentionWrapper(workspace, backend=self.kernel)
        wrapper.plan(
            block_mask_map=plan.mask.flatten(0, 1),
            block_row_sz=plan.queries.sizes.flatten(0, 1),
            block_col_sz=plan.keys.sizes.flatten(0, 1),
            num_qo_heads=b * h,
            num_kv_heads=b * h,
            head_dim=d,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        return wrapper


def flashinfer_package() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        raise ModuleNotFoundError(
            "backend 'flashinfer': the package flashinfer is not installed; "
            "pip install 'parkattn[flashinfer]', or use backend='triton'."
        ) from None
