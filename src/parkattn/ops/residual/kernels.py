"""Residuals by the Triton kernels, with the arguments of the definitions. No function waits for the GPU."""

from __future__ import annotations

from torch import Tensor

from ..cluster.triton import query_metric
from .definition import LowRank, iterate_directions, quantise
from .triton import add_low_rank


def factor(residual: Tensor, rank: int) -> LowRank:
    # where dense attention is not finite, or fp16 has no room for the difference, there is nothing to keep
    residual = residual.nan_to_num_(0.0, 0.0, 0.0)
    return quantise(residual, iterate_directions(query_metric(residual), rank))


def add_residual(out: Tensor, residual: LowRank) -> Tensor:
    """In place."""
    return add_low_rank(out, residual.a, residual.step, residual.b)
