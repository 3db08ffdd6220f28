"""Leading subspaces of small matrices, one per head: what SparsePR's metrics and repair keep of theirs.

Exact off the GPU. PyTorch's eigenvalues and singular values wait for the GPU, so on CUDA the span is found by subspace
iteration in float64: exact where the spectrum has a gap at the rank, and otherwise a mixture of directions that matter
equally.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COLD_STEPS, WARM_STEPS = 30, 2
SHIFT = 1e-5  # of the mean eigenvalue: bounds the condition that Cholesky sees, and changes no eigenvector
LEAST_EIGENVALUE = 1e-9  # of the mean, so that a metric of lower rank has a Cholesky factor


def metric_factor(metric: Tensor, rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """F [b h d r] with F F^T = the leading part of metric [b h d d] over the mean of its r eigenvalues.

    And the basis to start from next time, where there is one to follow.
    """
    rank, metric = min(rank, metric.shape[-1]), metric.double()
    if metric.is_cuda:
        return followed_factor(metric, rank, start)
    # eigh refuses NaN, and one head's NaN must not reach the others
    values, vectors = torch.linalg.eigh(torch.where(_finite(metric), metric, 0))
    values, vectors = values[..., -rank:].clamp(min=0), vectors[..., -rank:]
    factor = vectors * (values / values.mean(-1, True).clamp(min=1e-12)).sqrt().unsqueeze(-2)
    return torch.where(_finite(metric), factor, torch.nan), None


def _finite(matrices: Tensor) -> Tensor:
    """[... 1 1]: which of them hold no NaN and no Inf."""
    return matrices.isfinite().flatten(-2).all(-1)[..., None, None]


def followed_factor(metric: Tensor, rank: int, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """metric_factor by subspace iteration; F differs by a rotation of its columns, which no distance sees."""
    basis = follow(metric, rank, start, COLD_STEPS if start is None else WARM_STEPS)
    inside = basis.mT @ metric @ basis
    mean = inside.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-12)
    eye = torch.eye(rank, dtype=metric.dtype, device=metric.device)
    return basis @ torch.linalg.cholesky_ex(inside / mean + LEAST_EIGENVALUE * eye).L, basis


def onto_leading(x: Tensor, rows: Tensor, rank: int) -> Tensor:
    """x Psi Psi^T, Psi the leading right singular vectors of rows: [b h d d], [b h p d] -> [b h d d]"""
    rank = min(rank, *rows.shape[-2:])
    if rows.is_cuda:
        basis = follow((rows.mT @ rows).double(), rank, None, COLD_STEPS).to(x.dtype)
    else:
        basis = torch.linalg.svd(torch.where(_finite(rows), rows, 0), full_matrices=False).Vh[..., :rank, :].mT
    return x @ basis @ basis.mT


def follow(matrix: Tensor, rank: int, start: Tensor | None, steps: int) -> Tensor:
    """Orthonormal columns [b h d r] that span the leading eigenvectors of a positive semi-definite matrix [b h d d]."""
    d = matrix.shape[-1]
    eye = torch.eye(d, dtype=matrix.dtype, device=matrix.device)
    matrix = matrix + SHIFT * matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)[..., None, None] * eye
    if start is None:
        # columns of a cosine transform: orthogonal, and in no special direction
        index = torch.arange(d, dtype=matrix.dtype, device=matrix.device)
        start = torch.cos(torch.outer(index + 0.5, index[:rank]) * math.pi / d).expand(*matrix.shape[:-1], rank)
    basis = start
    for _ in range(steps):
        # Cholesky-QR twice: the second pass removes what the first lost to rounding
        basis = _orthonormal(_orthonormal(matrix @ basis))
    return basis


def _orthonormal(columns: Tensor) -> Tensor:
    root = torch.linalg.cholesky_ex(columns.mT @ columns).L
    return torch.linalg.solve_triangular(root, columns.mT, upper=False).mT
