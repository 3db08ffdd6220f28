"""SVG-EAR (arXiv 2603.08982), restated: SVG2's clusters and budget, spent where a centroid replaces its block worst.

Per head: k-means of the video queries (C_q clusters) and of the video keys (C_k), sizes n_u, n_v, means c_u, kbar_v and
vbar_v (values under the key labels), s the scale.
    E_uv = sum_{j in v} | e^{s c_u.k_j} v_j - e^{s c_u.kbar_v} vbar_v |^2     error of replacing v, probed by one query
    S_uv = log E_uv - gamma log(n_u n_v)                                      error per cost
    P_uv = softmax_v( s c_u.kbar_v + log n_v )
    budget_u = sum of n_u n_v over the blocks by falling P while the sum of P before the block is <= p, and at least the
               first floor(2 r C_k);  guaranteed: the first max(1, floor(r C_k)) by P
    fill: the other blocks by falling S while the area filled so far < budget_u - area(guaranteed)
    out_i = ( sum_{j kept} e^{s q_i.k_j} v_j + sum_{v skipped} n_v e^{s q_i.kbar_v} vbar_v )
          / ( sum_{j kept} e^{s q_i.k_j}     + sum_{v skipped} n_v e^{s q_i.kbar_v} )

Decisions
 1. Defaults: query_clusters 300, key_clusters 1000, iterations 50 (the first call; later calls take 2 from earlier
    centroids, not restated), top_p 0.9, floor r 0.05 (the literal in both processors, not the scripts' 0.10), gamma
    1, compensate True.
 2. Clusters: plain Lloyd on the tokens as they are. `iterations` assignments, each followed by the means; labels
    are those of the last assignment. An empty cluster keeps its centroid, ties go to the lower index. No early
    stop.
 3. C_q = min(query_clusters, video queries of the batch entry), C_k likewise; the first centroids are the tokens
    initial_queries[b][h], initial_keys[b][h] (sequence positions); if None, the tokens floor(i * count / C), i < C,
    of the entry's video tokens. C is the length of the list where one is given.
 4. C_k in floor(r C_k) and floor(2 r C_k) counts empty clusters, as the authors do; an empty block has no P, no S,
    is never kept and never counts as skipped. floor(x) is floor(x + 1e-9), so that 0.29 * 100 is 29.
 5. The block that crosses p is kept. p >= 1 keeps every non-empty block.
 6. The comparison in the fill is strict on integer areas: the block that crosses the budget is taken. Budget and
    guarantee are per query cluster, never shared between rows.
 7. All rankings: ties to the lower block index.
 8. log E is taken in log space: with t the largest of the block's logits s c_u.k_j and s c_u.kbar_v, E = e^{2t} E',
    and log E = log max(E', 1e-8) + 2t (the authors clamp E itself at 1e-8 and overflow in float32 beyond logits of
    44).
 9. The logit of a skipped block is s q_i.kbar_v + log n_v (the authors add 1e-6 to n_v).
10. compensate=False leaves the skipped blocks out of both sums.
11. Text and padding queries see every valid key and have no skipped blocks; text keys are seen exactly by every
    query and are outside E, P, the budget and the compensation; padding keys are in nothing (the authors' first
    release lets the padding block into the normaliser).
12. There are no partial blocks: clusters have the sizes they have; the grid is not used.
13. `allowed` holds the kept keys; keys that enter through their centroid are not in it.
"""

from __future__ import annotations

import math

from restated.problem import (
    Restated,
    attend_keys,
    attend_row,
    descending,
    dot,
    empty,
    first_tokens,
    grouped,
    lloyd,
    log_block_error,
    mean,
    tokens_by_role,
    whole_part,
)

SMALLEST_ERROR = 1e-8


def restate(
    q, k, v, *, grid, text, key_valid, scale,
    query_clusters=300, key_clusters=1000, iterations=50, initial_queries=None, initial_keys=None,
    top_p=0.9, floor=0.05, gamma=1.0, compensate=True,
) -> Restated:  # fmt: skip
    b, h, n, d = q.shape
    m = k.shape[2]
    scale = d**-0.5 if scale is None else scale
    result = empty(q, k)
    noted = ("query_blocks", "key_blocks", "kept", "budget", "guaranteed", "mass", "score")
    result.notes = {name: {} for name in noted}
    for i in range(b):
        tokens = tokens_by_role(n, m, text, key_valid, i)
        for j in range(h):
            queries, keys, values = q[i, j].tolist(), k[i, j].tolist(), v[i, j].tolist()
            query_blocks = _clusters(queries, tokens.video_queries, query_clusters, iterations, initial_queries, i, j)
            key_blocks = _clusters(keys, tokens.video_keys, key_clusters, iterations, initial_keys, i, j)
            filled = [t for t, members in enumerate(key_blocks) if members]
            pooled_keys = {t: mean([keys[x] for x in key_blocks[t]]) for t in filled}
            pooled_values = {t: mean([values[x] for x in key_blocks[t]]) for t in filled}
            result.notes["query_blocks"][i, j], result.notes["key_blocks"][i, j] = query_blocks, key_blocks

            for row in sorted(set(range(n)) - set(tokens.video_queries)):
                result.allowed[i, j, row, tokens.valid_keys] = True
                everything = attend_keys(queries[row], keys, values, tokens.valid_keys, scale)
                result.out[i, j, row] = q.new_tensor(everything)

            for u, members in enumerate(query_blocks):
                if not members:
                    continue
                centroid = mean([queries[x] for x in members])
                mass = _mass(centroid, pooled_keys, key_blocks, scale)
                score = {
                    t: log_block_error(centroid, keys, values, key_blocks[t], scale, SMALLEST_ERROR, per_token=False)
                    - gamma * math.log(len(members) * len(key_blocks[t]))
                    for t in filled
                }
                area = {t: len(members) * len(key_blocks[t]) for t in filled}
                budget, guaranteed = _budget(mass, area, top_p, floor, len(key_blocks))
                kept = set(guaranteed)
                left = budget - sum(area[t] for t in guaranteed)
                taken = 0
                for t in descending({t: score[t] for t in filled if t not in kept}):
                    if taken >= left:
                        break
                    kept.add(t)
                    taken += area[t]
                notes = {"kept": kept, "budget": budget, "guaranteed": guaranteed, "mass": mass, "score": score}
                for name, value in notes.items():
                    result.notes[name][i, j, u] = value

                seen = tokens.text_keys + [x for t in sorted(kept) for x in key_blocks[t]]
                skipped = [t for t in filled if t not in kept] if compensate else []
                entries = [keys[x] for x in seen] + [pooled_keys[t] for t in skipped]
                carried = [values[x] for x in seen] + [pooled_values[t] for t in skipped]
                counts = [1.0] * len(seen) + [float(len(key_blocks[t])) for t in skipped]
                for row in members:
                    result.allowed[i, j, row, seen] = True
                    logits = [scale * dot(queries[row], key) for key in entries]
                    result.out[i, j, row] = q.new_tensor(attend_row(logits, carried, counts))
    return result


def _clusters(rows, tokens, count, iterations, initial, entry, head) -> list[list[int]]:
    start = first_tokens(initial, entry, head, tokens, count)
    labels = lloyd([rows[t] for t in tokens], [tokens.index(t) for t in start], iterations)
    return grouped(tokens, labels, len(start))


def _mass(centroid, pooled_keys, key_blocks, scale) -> dict[int, float]:
    logits = {t: scale * dot(centroid, key) + math.log(len(key_blocks[t])) for t, key in pooled_keys.items()}
    top = max(logits.values())
    total = math.fsum(math.exp(x - top) for x in logits.values())
    return {t: math.exp(x - top) / total for t, x in logits.items()}


def _budget(mass, area, top_p, floor, count) -> tuple[int, list[int]]:
    """(budget_u, guaranteed blocks)"""
    order = descending(mass)
    least = whole_part(2 * floor * count)
    budget, before = 0, 0.0
    for rank, t in enumerate(order):
        if before <= top_p or top_p >= 1 or rank < least:
            budget += area[t]
        before += mass[t]
    return budget, order[: max(1, whole_part(floor * count))]
