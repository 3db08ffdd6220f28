"""Sol-Attn (arXiv 2607.24027), restated: pooled blocks choose what is exact, the rest stays in the softmax pooled.

Blocks of 64 consecutive video tokens on both sides; qbar_u, kbar_v their means, n_v their sizes, s the scale.
    x_uv = s log2(e) qbar_u . kbar_v,  mu_u = mean_v x_uv,  sigma_u = sqrt(var_u + 1e-6)
    var_u = sum_c (s log2(e) qbar_uc)^2 var_v(kbar_vc)  ("diag", the diagonal of the covariance of the pooled keys)
          = mean_v (x_uv - mu_u)^2                       ("exact", the full covariance)
    (u, v) exact  iff  x_uv > mu_u + tau sigma_u,  or |u - v| <= 1,  or v overlaps the sink range.
    out_i = ( sum_{j exact} e^{s q_i.k_j} v_j + sum_{v not exact} e^{s q_i.kbar_v} sum_{j in v} v_j )
          / ( sum_{j exact} e^{s q_i.k_j}     + sum_{v not exact} n_v e^{s q_i.kbar_v} )

Decisions
 1. Defaults: block 64, tau 1.0, threshold "diag", no sink (the authors' interface; ComfyUI's node has tau 1.3).
 2. Blocks are cut from the list of the batch entry's video tokens in sequence order (text and padding left out
    first), separately for queries and keys; the last block may be shorter, and its mean and multiplicity use its
    real size. No Morton order.
 3. mu_u and var_u weigh every non-empty key block equally, whatever its size; variances are population variances
    (divide by the count).
 4. Scores are in base 2 (times log2 e): only the 1e-6 inside sigma depends on it. The comparison is strict.
 5. |u - v| <= 1 compares block numbers of the two lists (in self-attention these are the same blocks).
 6. topk (None: the tau rule): instead of the threshold the top count = min(max(floor(topk * blocks + 0.5), 1),
    blocks) key blocks by x_uv are exact, ties to the lower index; neighbours and sink are added on top (they do not
    use up the count). ComfyUI's kernel stops at blocks - 1 and drops ties; here topk = 1 is dense.
 7. The sink range is [sink_start, sink_start + sink_tokens) in the list of video keys, at its end if sink_start is
    None; every key block that overlaps it is exact for every query. Text is not the sink's business: see 9.
 8. The tail uses each query's own logit with the pooled key (the authors' kernels; ComfyUI's uses the query block's
    mean logit).
 9. Text and padding queries see every valid key exactly, text keys are exact for every query, padding keys are seen
    by nobody and are in no pooled key (our convention; the authors put text into exact sink blocks, which here do
    not mix with video).
10. `allowed` holds the exact keys; keys that enter through the tail are not in it.
"""

from __future__ import annotations

import math

from restated.problem import Restated, attend_keys, attend_row, descending, dot, empty, mean, tokens_by_role


def restate(
    q, k, v, *, grid, text, key_valid, scale,
    block=64, tau=1.0, threshold="diag", topk=None, sink_tokens=0, sink_start=None,
) -> Restated:  # fmt: skip
    b, h, n, d = q.shape
    m = k.shape[2]
    scale = d**-0.5 if scale is None else scale
    result = empty(q, k)
    result.notes = {"exact": {}, "covered": {}}
    for i in range(b):
        tokens = tokens_by_role(n, m, text, key_valid, i)
        query_blocks, key_blocks = _cut(tokens.video_queries, block), _cut(tokens.video_keys, block)
        block_of = {token: u for u, members in enumerate(query_blocks) for token in members}
        start = len(tokens.video_keys) - sink_tokens if sink_start is None else sink_start
        sink = {tokens.video_keys[p] for p in range(start, start + sink_tokens)}
        for j in range(h):
            queries, keys, values = q[i, j].tolist(), k[i, j].tolist(), v[i, j].tolist()
            pooled_keys = [mean([keys[t] for t in members]) for members in key_blocks]
            pooled_values = [mean([values[t] for t in members]) for members in key_blocks]
            exact = set()
            for u, members in enumerate(query_blocks):
                pooled_query = mean([queries[t] for t in members])
                chosen = _routed(pooled_query, pooled_keys, scale * math.log2(math.e), tau, threshold, topk)
                for t in range(len(key_blocks)):
                    if t in chosen or abs(u - t) <= 1 or sink & set(key_blocks[t]):
                        exact.add((u, t))
            result.notes["exact"][i, j] = exact
            for row in range(n):
                if row not in block_of:
                    seen = tokens.valid_keys
                    result.out[i, j, row] = q.new_tensor(attend_keys(queries[row], keys, values, seen, scale))
                else:
                    near = [t for t in range(len(key_blocks)) if (block_of[row], t) in exact]
                    tail = [t for t in range(len(key_blocks)) if (block_of[row], t) not in exact]
                    seen = tokens.text_keys + [x for t in near for x in key_blocks[t]]
                    entries = [keys[x] for x in seen] + [pooled_keys[t] for t in tail]
                    carried = [values[x] for x in seen] + [pooled_values[t] for t in tail]
                    counts = [1.0] * len(seen) + [float(len(key_blocks[t])) for t in tail]
                    logits = [scale * dot(queries[row], key) for key in entries]
                    result.out[i, j, row] = q.new_tensor(attend_row(logits, carried, counts))
                    result.notes["covered"][i, j, row] = sum(counts)
                result.allowed[i, j, row, seen] = True
    return result


def _cut(tokens: list[int], block: int) -> list[list[int]]:
    return [tokens[start : start + block] for start in range(0, len(tokens), block)]


def _routed(query, pooled_keys, scale, tau, threshold, topk) -> set[int]:
    """Key blocks that one pooled query chooses by its scores."""
    count = len(pooled_keys)
    scores = [scale * dot(query, key) for key in pooled_keys]
    if topk is not None:
        return set(descending(dict(enumerate(scores)))[: min(max(math.floor(topk * count + 0.5), 1), count)])
    centre = math.fsum(scores) / count
    if threshold == "exact":
        variance = math.fsum((x - centre) ** 2 for x in scores) / count
    elif threshold == "diag":
        average = mean(pooled_keys)
        spread = [math.fsum((key[c] - average[c]) ** 2 for key in pooled_keys) / count for c in range(len(query))]
        variance = math.fsum((scale * x) ** 2 * s for x, s in zip(query, spread, strict=True))
    else:
        raise ValueError(f"threshold: expected 'diag' or 'exact', got {threshold!r}; give one of these.")
    return {t for t, x in enumerate(scores) if x > centre + tau * math.sqrt(variance + 1e-6)}
