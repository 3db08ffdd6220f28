"""What sparse attention left out of one dense step, kept per token as a product of two thin matrices.

At a step whose dense output D [n d] is known, the sparse output S of the same q, k, v and plan misses R = D - S. Later steps
add what is kept of it: S' + L(R). By Eckart and Young the best R_r of rank r projects on the r leading eigenvectors V of
R^T R [d d], and what it leaves out is known: |R - R V V^T|^2 = the sum of the other eigenvalues.

residual [b h n d]  ──▶  factor  ──▶  LowRank: A = R V in 8 bits, V  ──▶  add to later outputs: out + A V^T

A column of A is stored as whole multiples of its largest entry / 127, so that rounding moves an entry by at most 1/254 of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parkattn.segments import compute_dtype

LEVELS = 127  # of an int8 on either side of 0
# of the subspace iteration: each shrinks what is not leading by lambda_(rank+spare+1) / lambda_rank
ITERATIONS, SPARE = 8, 8


class LowRank(NamedTuple):
    """A diag(scale) B^T, for every batch element and head."""

    a: Tensor  # [b h n r] int8
    scale: Tensor  # [b h r] float32: what one step of a column of a is worth
    b: Tensor  # [b h d r] float32, orthonormal columns

    @property
    def nbytes(self) -> int:
        return sum(part.untyped_storage().nbytes() for part in self)

    def fits(self, out: Tensor) -> bool:
        """Whether it was made of an output of this shape on this device."""
        return self.a.shape[:3] == out.shape[:3] and self.b.shape[2] == out.shape[3] and self.a.device == out.device


def factor(residual: Tensor, rank: int) -> LowRank:
    """The rank-r matrix nearest to residual [b h n d], its left factor rounded to 8 bits. Does not wait for a GPU."""
    rows = residual.to(compute_dtype(residual.dtype))
    basis = leading_eigenvectors(rows.mT @ rows, min(rank, *rows.shape[2:]))
    left = rows @ basis
    scale = (left.abs().amax(-2) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    # not finite where dense attention was not: an int8 has no NaN, the scale has
    whole = (left / scale.unsqueeze(-2)).nan_to_num(0.0).round().clamp(-LEVELS, LEVELS)
    return LowRank(whole.to(torch.int8), scale.float(), basis.float())


def expand(kept: LowRank) -> Tensor:
    """A diag(scale) B^T: [b h n d] float32"""
    return kept.a.float() @ (kept.b * kept.scale.unsqueeze(-2)).mT


def add_low_rank(out: Tensor, kept: LowRank) -> Tensor:
    """out + A diag(scale) B^T in out's dtype, summed in float32: out [b h n d] -> [b h n d]"""
    return (out.to(compute_dtype(out.dtype)) + expand(kept)).to(out.dtype)


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from out [b h n d] and log-sum-exp [b h n] over each:
    out = (e^l1 out_1 + e^l2 out_2) / (e^l1 + e^l2). A set without keys has the log-sum-exp -inf."""
    (out, lse), (more, more_lse) = one, other
    largest = torch.maximum(lse, more_lse).nan_to_num(neginf=0.0)
    weight, more_weight = (torch.exp(x - largest).unsqueeze(-1) for x in (lse, more_lse))
    total = (weight + more_weight).clamp(min=torch.finfo(weight.dtype).tiny)
    return ((weight * out + more_weight * more) / total).to(out.dtype)


def leading_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Of symmetric gram [... d d], the eigenvectors of its r largest eigenvalues: [... d r].

    On a GPU by subspace iteration, because eigh waits for the device: exact where the spectrum has a gap after r + SPARE,
    and where it has none, as good as another choice of equally large directions.
    """
    if not gram.is_cuda:
        return torch.linalg.eigh(gram.nan_to_num(0.0))[1][..., -rank:].contiguous()  # not a view that holds the others
    return subspace_iteration(gram, rank)


def subspace_iteration(gram: Tensor, rank: int) -> Tensor:
    """V <- orth(G V) from the columns of the identity that G moves most, then V's own eigenvectors."""
    gram = gram.nan_to_num(0.0)
    wide = min(rank + SPARE, gram.shape[-1])
    largest = gram.norm(dim=-2).topk(wide, dim=-1).indices  # [... wide]
    basis = gram.gather(-1, largest.unsqueeze(-2).expand(*gram.shape[:-1], wide))
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(basis / basis.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(basis.dtype).tiny))[0]
        basis = gram @ basis
    basis = torch.linalg.qr(basis / basis.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(basis.dtype).tiny))[0]
    energy = (gram @ basis).norm(dim=-2)  # of each column: qr keeps the order of a power iteration, leading first
    best = energy.topk(rank, dim=-1).indices
    return basis.gather(-1, best.unsqueeze(-2).expand(*gram.shape[:-1], rank))
