"""XAttention: antidiagonal sums of strided tiles as block scores, kept until a threshold of the estimated mass.

With groups of `stride` consecutive video tokens, a for queries and b for keys:
    Z_ab = scale / (stride * norm) * sum_t q_{a stride + (stride - 1 - t)} . k_{b stride + t}
    A = softmax over b of Z,  W_uv = sum of A over the groups of query block u and key block v

Decisions
- X1 block = 128 on both sides, stride = 8, threshold = 0.9 (the authors' HunyuanVideo script, their only video
  setting; the bare call has 0.8), norm = 1. block must be a multiple of stride.
- X2 Blocks and groups by A5. Tokens missing from the last group are zero vectors (their products are 0) and the
  divisor stays `stride`. A group exists if it has at least one video token.
- X3 Groups that do not exist are masked, on both sides: the softmax runs over existing key groups only and only
  existing query groups are summed (the authors leave padded key groups in the softmax; masking is the sane reading).
- X4 Row u: in descending W keep a block iff the sum of the blocks before it is < threshold * (sum of the row): the
  crossing block is included. The best block is always kept; threshold >= 1 keeps all.
- X5 keep_sink = True: the first video key block is always kept. The authors' option of that name is off, but a side
  effect of their non-causal branch keeps block 0 all the same, so True reproduces them and False is the paper's rule.
- X6 keep_recent = False; True also keeps the key block with the query block's own number.
- Difference from the authors: text and padding by A3, A4 (they treat real text as ordinary tail tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor

from restated import Restated, block_sees, blocks_of, descending, from_heads, scale_of, softmax, video_tokens


def antidiagonal(queries: Tensor, keys: Tensor, stride: int) -> Tensor:
    """[groups groups]: sum of q_i . k_j over places i, j in the groups, i + j = stride - 1; missing tokens add 0."""
    groups = blocks_of(len(queries), stride)
    dots = (queries @ keys.T).tolist()
    summed = [[0.0] * len(groups) for _ in groups]
    for a, query_group in enumerate(groups):
        for b, key_group in enumerate(groups):
            for t in range(stride):
                if stride - 1 - t < len(query_group) and t < len(key_group):
                    summed[a][b] += dots[query_group[stride - 1 - t]][key_group[t]]
    return torch.tensor(summed, dtype=torch.float64)


def select(scores: list[float], threshold: float) -> set[int]:
    order = descending(scores)
    if threshold >= 1:
        return set(order)
    kept, before, total = {order[0]}, 0.0, sum(scores)
    for v in order:
        if before < threshold * total:
            kept.add(v)
        before += scores[v]
    return kept


def restate(q, k, v, *, grid, text, key_valid, scale, block=128, stride=8, threshold=0.9, norm=1.0, keep_sink=True,
            keep_recent=False) -> Restated:  # fmt: skip
    assert block % stride == 0
    video = video_tokens(q, text, key_valid)

    def of_head(b: int, h: int) -> dict:
        queries, keys = q[b, h, video[b]], k[b, h, video[b]]
        logits = antidiagonal(queries, keys, stride) * scale_of(q, scale) / (stride * norm)
        mass = [softmax(row) for row in logits.tolist()]
        count = len(blocks_of(len(queries), block))
        scores = [[0.0] * count for _ in range(count)]
        for a in range(len(mass)):
            for c in range(len(mass)):
                scores[a * stride // block][c * stride // block] += mass[a][c]
        mask = []
        for u in range(count):
            kept = select(scores[u], threshold)
            mask.append([w in kept or (keep_sink and w == 0) or (keep_recent and w == u) for w in range(count)])
        block_of = [r // block for r in range(len(queries))]
        return {
            "logits": logits,
            "scores": torch.tensor(scores, dtype=torch.float64),
            "mask": torch.tensor(mask),
            "sees": block_sees(mask, block_of, block_of),
        }

    return from_heads(q, k, v, text=text, key_valid=key_valid, scale=scale, of_head=of_head)
