"""SpargeAttn: mean-pooled block scores, coherent blocks only, cumulative or top-k selection.

For query block u and key block v of video tokens, k' = k - mean over video tokens of k:
    sim(x) = || mean_i x_i / |x_i| ||^2,  coherent(x) = sim(x) > simthreshd1
    P_uv = softmax over coherent v of ( mean(q_u) . mean(k'_v) * scale )

Decisions
- S1 block_q = 128, block_k = 64 (the authors' geometry outside sm90); blocks by A5, the short last block averages
  over its real tokens; no size term in the scores.
- S2 smooth_k = True subtracts the mean of the video keys before pooling AND before the similarity (the fused path);
  False uses raw keys for both. Queries are never smoothed.
- S3 A zero vector has cosine 0 with everything (it adds nothing to the mean of unit vectors, but counts in the mean).
- S4 simthreshd1 None means the authors' default of the mode: 0.6 with cdfthreshd, -0.1 with topk. Comparison is
  strict.
- S5 topk None selects by cdfthreshd (default 0.98): keep the first n_u blocks in descending P, n_u = number of ranks
  whose cumulative sum, itself included, is <= cdfthreshd (the crossing block is excluded), at least 1. cdfthreshd >=
  1 keeps all.
- S6 topk = rho keeps max(1, int(rho * key blocks)) blocks; the count is over all of the element's non-empty key
  blocks, incoherent ones included (they rank last with P = 0 and are forced on anyway).
- S7 After selection: rows of incoherent query blocks all on, columns of incoherent key blocks all on, and with
  attention_sink = True (default False) the first video key block on for every row.
- S8 A row whose key blocks are all incoherent has no scores (P = 0); S7 turns all its columns on.
- S9 The kernel's second stage (pvthreshd), int8 and fp8 are left out: they are not part of the mask.
- Difference from the authors: text and padding by A3, A4 (they mix text into the tail blocks); no limits on n and d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from restated import Restated, block_sees, blocks_of, descending, from_heads, scale_of, softmax, video_tokens


def similarity(x: Tensor) -> float:
    """Mean over all ordered pairs (i, j), i = j included, of the cosine; zero vectors have cosine 0."""
    norms = [float(token.norm()) for token in x]
    total = 0.0
    for i, dots in enumerate((x @ x.T).tolist()):
        for j, dot in enumerate(dots):
            total += dot / (norms[i] * norms[j]) if norms[i] * norms[j] > 0 else 0.0
    return total / len(x) ** 2


def select(scores: list[float], cdfthreshd: float, topk: float | None) -> set[int]:
    order = descending(scores)
    if topk is not None:
        return set(order[: max(1, int(topk * len(scores)))])
    if cdfthreshd >= 1:
        return set(order)
    kept: list[int] = []
    cumulative = 0.0
    for v in order:
        cumulative += scores[v]
        if cumulative > cdfthreshd:
            break
        kept.append(v)
    return set(kept or order[:1])


def restate(q, k, v, *, grid, text, key_valid, scale, block_q=128, block_k=64, simthreshd1=None, cdfthreshd=0.98, topk=None,
            smooth_k=True, attention_sink=False) -> Restated:  # fmt: skip
    video = video_tokens(q, text, key_valid)
    theta = simthreshd1 if simthreshd1 is not None else (0.6 if topk is None else -0.1)

    def of_head(b: int, h: int) -> dict:
        queries, keys = q[b, h, video[b]], k[b, h, video[b]]
        if smooth_k:
            keys = keys - keys.mean(0)
        query_blocks, key_blocks = blocks_of(len(queries), block_q), blocks_of(len(keys), block_k)
        query_similarity = [similarity(queries[block]) for block in query_blocks]
        key_similarity = [similarity(keys[block]) for block in key_blocks]
        query_block_of, key_block_of = ([r // size for r in range(len(queries))] for size in (block_q, block_k))
        pooled_queries = [queries[block].mean(0) for block in query_blocks]
        pooled_keys = [keys[block].mean(0) for block in key_blocks]
        scores, mask = [], []
        for u in range(len(query_blocks)):
            logits = []
            for w in range(len(key_blocks)):
                score = float(pooled_queries[u] @ pooled_keys[w]) * scale_of(q, scale)
                logits.append(score if key_similarity[w] > theta else float("-inf"))
            scores.append(softmax(logits))
            kept = select(scores[u], cdfthreshd, topk)
            row = []
            for w in range(len(key_blocks)):
                forced = query_similarity[u] <= theta or key_similarity[w] <= theta or (attention_sink and w == 0)
                row.append(forced or w in kept)
            mask.append(row)
        return {
            "scores": torch.tensor(scores, dtype=torch.float64),
            "mask": torch.tensor(mask),
            "query_similarity": query_similarity,
            "key_similarity": key_similarity,
            "sees": block_sees(mask, query_block_of, key_block_of),
        }

    return from_heads(q, k, v, text=text, key_valid=key_valid, scale=scale, of_head=of_head)
