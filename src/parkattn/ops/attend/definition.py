"""Attention over the kept blocks only (eq. sparse_attention, with the softmax taken over the kept keys), and dense
attention.

`attend` takes q, k and v in block order. Work and memory follow the kept token pairs: each query block meets the
concatenation of its key blocks in one fused attention call, so a CPU gains what sparsity allows.

precision="int8" takes Q K^T from q and k rounded to 8 bits (`Rounding`), and the weights of v as otherwise. A
log-sum-exp is then of scores without q.mean, the same for all keys of a row: parts of one row merge as otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parkattn.checks import expect_choice
from parkattn.ops.permute.definition import gather, scatter
from parkattn.plan import Blocks, Plan
from parkattn.segments import compute_dtype, segment_mean
from parkattn.settings import Precision

LEVELS = 127  # of int8, either side of 0
SMALLEST_REACH = 1e-12  # rows of zeros have a step too


class Rounding(NamedTuple):
    """How queries and keys of a head become whole numbers of steps.

    Both are turned by the Hadamard matrix of signs, over sqrt(d): scores stay, and what single columns hold is spread
    over all, so that steps are smaller. Keys, text and padding among them, lose their mean, which adds the same to all
    scores of a row. Each row of queries has a step of its own, the keys of a head have one: 127 of them reach its
    largest entry.
    """

    mean: Tensor  # [... 1 d], of the turned keys of a head
    step: Tensor  # [... 1 1]

    @staticmethod
    def why_not(head_dim: int) -> str | None:
        """Why rows of this length cannot be rounded; None where they can."""
        if head_dim & (head_dim - 1) == 0:
            return None
        return f"defined for head dims that are powers of two, not {head_dim}"

    @classmethod
    def of_keys(cls, k: Tensor) -> Self:
        turned = _turned(k)
        mean = turned.mean(-2, keepdim=True)
        return cls(mean, (turned - mean).abs().amax((-2, -1), keepdim=True).clamp(min=SMALLEST_REACH) / LEVELS)

    def keys(self, k: Tensor) -> Tensor:
        """k [... n d] as the whole numbers stand for it: turned, without its mean."""
        return _nearest(_turned(k) - self.mean, self.step)

    def queries(self, q: Tensor) -> Tensor:
        turned = _turned(q)
        return _nearest(turned, turned.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_REACH) / LEVELS)


ROUNDINGS: dict[Precision, type[Rounding]] = {"int8": Rounding}
"""Rounding of q and k in each precision but bf16, which stands for the tensors' own dtype."""


def rounding_of(precision: Precision) -> type[Rounding] | None:
    """None: q and k stay as they are."""
    if precision == "bf16":
        return None
    expect_choice("precision", precision, ("bf16", *ROUNDINGS))
    return ROUNDINGS[precision]


def _nearest(x: Tensor, step: Tensor) -> Tensor:
    return (x / step + 0.5).floor() * step


def _turned(x: Tensor) -> Tensor:
    """x [... d] times the Hadamard matrix, orthonormal; d a power of two."""
    signs = torch.ones(1, 1, dtype=compute_dtype(x.dtype), device=x.device)
    while len(signs) < x.shape[-1]:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return x.to(signs.dtype) @ signs * x.shape[-1] ** -0.5


@dataclass(frozen=True)
class DefinedAttention:
    """The definitions, around which tokens are put in block order and back. Any device and floating dtype."""

    precision: Precision = "bf16"

    def over_kept(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> Tensor:
        out = attend(
            gather(q, plan.queries),
            gather(k, plan.keys),
            gather(v, plan.keys),
            plan.queries,
            plan.keys,
            plan.mask,
            scale=scale,
            compensate=plan.compensable() if compensate else None,
            bias=plan.bias,
            precision=self.precision,
        )
        return scatter(out, plan.queries)

    def over_all(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None) -> Tensor:
        return dense_attention(q, k, v, scale=scale, key_valid=key_valid, precision=self.precision)

    def over_both(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> tuple[Tensor, Tensor]:
        # padding keys are the last block of every head
        valid = plan.keys.labels[:, 0] < plan.keys.count - 1 if plan.padding else None
        dense = self.over_all(q, k, v, scale=scale, key_valid=valid)
        return dense, dense - self.over_kept(q, k, v, plan, scale=scale, compensate=compensate)


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Blocks, keys: Blocks, mask: Tensor, *, scale: float | None = None,
    compensate: Tensor | None = None, bias: Tensor | None = None, precision: Precision = "bf16",
) -> Tensor:  # fmt: skip
    """out_i = softmax(q_i K_S^T scale) V_S over the key blocks S that i's block keeps. mask [b h qb kb] -> [b h n d]

    compensate [b h kb] marks key blocks that, where they are skipped, still enter through one stand-in key: their mean
    key with logit + log n and their mean value. The normaliser then covers all keys, exactly so if a block's keys are
    equal. bias [b h qb kb] is added to the logit of a stand-in instead of log n.
    """
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    for at, rows, row_keys, row_values, weight in _query_blocks(
        q, k, v, queries, keys, mask, compensate, bias, precision
    ):
        block = scaled_dot_product_attention(
            rows[None, None], row_keys[None, None], row_values[None, None], attn_mask=weight, scale=scale
        )
        out[at] = block[0, 0].to(q.dtype)
    return out


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, queries: Blocks, keys: Blocks, mask: Tensor, *, scale: float | None = None,
    compensate: Tensor | None = None, bias: Tensor | None = None, precision: Precision = "bf16",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """attend, and log sum exp of the kept scores [b h n] (-inf where nothing is kept), for merging partial results."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    lse = torch.full(q.shape[:3], -torch.inf, dtype=compute_dtype(q.dtype), device=q.device)
    for at, rows, row_keys, _, weight in _query_blocks(q, k, v, queries, keys, mask, compensate, bias, precision):
        scores = rows.to(lse.dtype) @ row_keys.to(lse.dtype).T * factor
        lse[at] = (scores if weight is None else scores + weight).logsumexp(-1)
    return attend(q, k, v, queries, keys, mask, scale=scale, compensate=compensate, bias=bias, precision=precision), lse


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    key_valid: Tensor | None = None,
    precision: Precision = "bf16",
) -> Tensor:
    """softmax(Q K^T scale) V (eq. full_attention); key_valid [b m] is True where a key may be attended."""
    allowed = None if key_valid is None else key_valid[:, None, None, :]
    if (kind := rounding_of(precision)) is not None:
        rounding = kind.of_keys(k)
        rows, keys = rounding.queries(q), rounding.keys(k)
        return scaled_dot_product_attention(rows, keys, v.to(rows.dtype), attn_mask=allowed, scale=scale).to(q.dtype)
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)


def _query_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Blocks,
    keys: Blocks,
    mask: Tensor,
    compensate: Tensor | None,
    bias: Tensor | None,
    precision: Precision,
) -> Iterator[tuple[Any, Tensor, Tensor, Tensor, Tensor | None]]:
    """Of each query block with work: its place, queries, keys and values, and the log weights of stand-ins."""
    starts, key_sizes, kind = queries.offsets.tolist(), keys.sizes, rounding_of(precision)
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        stand_ins = None if compensate is None else _stand_ins(k[b, h], v[b, h], key_sizes[b, h])
        head_rows, head_keys, head_values = q[b, h], k[b, h], v[b, h]
        if kind is not None:
            rounding = kind.of_keys(k[b, h])
            head_rows, head_keys = rounding.queries(q[b, h]), rounding.keys(k[b, h])
            head_values = head_values.to(head_keys.dtype)
            stand_ins = None if stand_ins is None else (rounding.keys(stand_ins[0]), *stand_ins[1:])
        pairs = torch.cat([head_keys, head_values], -1)
        kept = mask[b, h].repeat_interleave(key_sizes[b, h], dim=1)
        picked_by_block = kept.nonzero()[:, 1].split(kept.sum(-1).tolist())
        for u, (first, last) in enumerate(itertools.pairwise(starts[b][h])):
            if first == last:
                continue
            rows, weight = head_rows[first:last], None
            row_keys, row_values = pairs.index_select(0, picked_by_block[u]).split([k.shape[-1], v.shape[-1]], -1)
            if compensate is not None and stand_ins is not None:
                skipped = compensate[b, h] & ~mask[b, h, u]
                means, mean_values, log_weights = (part[skipped] for part in stand_ins)
                if bias is not None:
                    log_weights = bias[b, h, u][skipped].to(log_weights.dtype)
                weight = torch.cat([log_weights.new_zeros(len(row_keys)), log_weights]).expand(len(rows), -1)
                row_keys, row_values = (
                    torch.cat([row_keys.to(means.dtype), means]),
                    torch.cat([row_values.to(means.dtype), mean_values]),
                )
                rows = rows.to(means.dtype)
            if len(row_keys):
                yield (b, h, slice(first, last)), rows, row_keys, row_values, weight


def _stand_ins(k: Tensor, v: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean key, mean value and log size of each key block."""
    labels = torch.arange(len(sizes), device=k.device).repeat_interleave(sizes)
    return (
        segment_mean(k, labels, len(sizes))[0],
        segment_mean(v, labels, len(sizes))[0],
        sizes.to(compute_dtype(k.dtype)).log(),
    )
