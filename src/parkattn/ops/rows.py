"""Inputs that every kernel asks for."""

from __future__ import annotations

from torch import Tensor


def expect_dense_rows(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected a last dimension of stride 1 with backend='triton', got stride {x.stride(-1)}; "
                f"call {name}.contiguous(), or use backend='reference'."
            )
