"""What a sparse step leaves out, kept from a dense step: parts of attention merged, a low-rank residual in 8 bits.

Kept and skipped keys attended apart, each with its log-sum-exp, give the dense output without a second pass:
    out = sum_p exp(lse_p - lse) out_p,    lse = log sum_p exp(lse_p).

The residual R = dense - sparse [n d] of a head is kept as R ~ A B with B [r d] the top-r eigenvectors of R^T R and
A = R B^T, the best approximation of rank r (Eckart-Young): |R - A B|^2 is the sum of the discarded eigenvalues, 0 where
R has rank r or less. A is stored in 8 bits with one step s per column, max|A_column| / 127. Rounding adds at most s / 2
to an entry of A and, because the rows of B are orthonormal, at most sqrt(sum_c s_c^2) / 2 to the norm of a row. What
neither bound covers is age: a later step's residual is another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parkattn.segments import compute_dtype

LEVELS = 127  # of int8, either side of 0
ITERATIONS = 6  # of `iterate_directions`


@dataclass(frozen=True)
class LowRank:
    """A B as it is stored: at rank 8 and d = 128 a 32nd of an output in bf16."""

    a: Tensor  # [b h n r] int8
    step: Tensor  # [b h r] fp32: what 1 in a column of `a` stands for
    b: Tensor  # [b h r d] fp32, orthonormal rows

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.a, self.step, self.b))

    def fits(self, batch: int, tokens: int, width: int) -> bool:
        """Whether it can be added to an output of this batch, these tokens and this head dimension."""
        return (self.a.shape[0], self.a.shape[2], self.b.shape[3]) == (batch, tokens, width)

    def expand(self) -> Tensor:
        """A B [b h n d] fp32"""
        return self.a.float() @ (self.step.unsqueeze(-1) * self.b)

    def moved(self, move: Callable[[Tensor], Tensor]) -> LowRank:
        """That of other heads: `move` brings them here, tensor by tensor."""
        return LowRank(move(self.a), move(self.step), move(self.b))


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over disjoint sets of keys, (out [b h n d], lse [b h n]) each -> that over all of them.

    0 and -inf where no part has a key.
    """
    dtype = compute_dtype(parts[0][0].dtype)
    each = torch.stack([lse.to(dtype) for _, lse in parts])
    lse = each.logsumexp(0)
    weights = torch.exp(each - lse.masked_fill(lse == -torch.inf, 0.0))
    out = sum(weight.unsqueeze(-1) * part.to(dtype) for weight, (part, _) in zip(weights, parts, strict=True))
    return torch.as_tensor(out).to(parts[0][0].dtype), lse


def factor(residual: Tensor, rank: int) -> LowRank:
    """residual [b h n d] -> its best approximation of that rank, in 8 bits.

    Where dense attention is not finite there is nothing to keep, and eigenvectors of NaN raise.
    """
    residual = residual.where(residual.isfinite(), 0.0)
    rows = residual.to(compute_dtype(residual.dtype))
    return quantise(residual, top_directions(rows.mT @ rows, min(rank, *residual.shape[2:])))


def add_residual(out: Tensor, residual: LowRank) -> Tensor:
    """out [b h n d] + A B, rounded once to out's dtype."""
    return (out.to(compute_dtype(out.dtype)) + residual.expand()).to(out.dtype)


def top_directions(gram: Tensor, rank: int) -> Tensor:
    """The eigenvectors of the largest eigenvalues of gram [b h d d], as orthonormal rows [b h r d]."""
    return torch.linalg.eigh(gram).eigenvectors[..., -rank:].mT.float().contiguous()


def iterate_directions(gram: Tensor, rank: int) -> Tensor:
    """`top_directions` without a host synchronisation: orthogonal iteration in float64, Y <- orth(G^2 Y).

    The subspace converges as (eigenvalue r+1 / eigenvalue r)^(2 ITERATIONS); where these are close, mistaking one for
    the other costs little. orth(Y) = Y L^-T with L L^T = Y^T Y + a little of the identity, which leaves the directions
    of a rank-deficient G short instead of undefined; applied twice it is orthonormal to rounding.
    """
    d = gram.shape[-1]
    gram = gram.double()
    gram = gram / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=1e-300)
    gram = gram @ gram
    place = torch.arange(1, d + 1, device=gram.device, dtype=torch.float64)
    y = torch.cos(place[:, None] * place[:rank] * 0.7).expand(*gram.shape[:-1], rank)
    for _ in range(ITERATIONS):
        y = _orthonormal(gram @ y)
    return _orthonormal(y).mT.float().contiguous()


def _orthonormal(y: Tensor) -> Tensor:
    """y [... d r] -> columns of the same span."""
    y = y / y.norm(dim=-2, keepdim=True).clamp(min=1e-300)
    ridge = 1e-14 * torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    lower = torch.linalg.cholesky_ex(y.mT @ y + ridge, check_errors=False).L
    return torch.linalg.solve_triangular(lower, y.mT, upper=False).mT


def quantise(residual: Tensor, directions: Tensor) -> LowRank:
    """A = R B^T in 8 bits, for directions B [b h r d]."""
    # a sum may be sqrt(d) times the largest entry, for which fp16 has no room
    room = 2.0 ** math.ceil(math.log2(residual.shape[-1]) / 2) if residual.dtype == torch.float16 else 1.0
    a = (residual @ (directions.mT / room).to(residual.dtype)).float() * room
    step = a.abs().amax(-2) / LEVELS
    # a column of zeros has no step: 0 / 1 instead of 0 / 0
    codes = (a / torch.where(step > 0, step, 1.0).unsqueeze(-2)).round_().to(torch.int8)
    return LowRank(codes, step, directions)
