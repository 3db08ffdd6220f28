"""SparsePR (arXiv 2608.18484), restated: each side is partitioned by how the other responds to it, the density is
fixed, and exact probe rows fit a repair of the sparse output.

Per head, s the scale, N video queries.
 1. M_K = mean over sampled video queries of q q^T; F_K = V sqrt(lambda / mean lambda) of its top 48 eigenpairs;
    features F_K^T k, divided by one root mean square over all keys and features; k-means -> key blocks;
    kbar_v, vbar_v their means in the original space.
 2. M_Q = covariance of the non-empty kbar_v (each counts once); F_Q likewise from its top 64; features F_Q^T q,
    each row divided by its own root mean square; k-means -> query blocks; c_u their means in the original space.
 3. Score of (u, v): "value_error" log( E_uv / n_v ), E_uv as in SVG-EAR; or
    "attention_mass" log sum_{j in v} e^{s c_u.k_j}. The budget in key tokens is the same for all query blocks,
    ceil( (density - probes / N) * (video keys + text keys) ) - text keys;
    blocks by falling score are kept until their tokens reach the budget.
 4. O = softmax attention over kept blocks and text; nothing stands for the others.
 5. Probes: in each of the 64 largest query blocks the token whose feature is nearest to the block's mean feature;
    weight w = block size / mean of these sizes. R = dense row - O row, X = (O - mean_w) / std_w per channel,
    Y = R - mean_w(R), B = argmin sum w |Y - X B|^2 + ridge |B|^2, Psi = top 16 right singular vectors of sqrt(w) Y.
    out = O + mean_w(R) + X B Psi Psi^T for every video row; probe rows get their dense rows.

Decisions
 1. Defaults: query_clusters 300, key_clusters 1000, iterations 25 (first call; later calls take 2 from earlier
    centroids, not restated), density 0.22, samples 2048, key_rank 48, query_rank 64, score "value_error" (Wan2.2's
    configuration: "attention_mass"), probes 64, repair_rank 16, ridge 0.1, repair True.
 2. Sampled queries: all N if N <= samples, else positions (2 i (N - 1) + S - 1) // (2 (S - 1)), i < S = samples, of
    the list of video queries (even spacing, halves up), each once; S = 1 takes position 0. M_K is not centred.
 3. Factors: exact eigenpairs (the authors follow the subspace by iteration after the first call), rank = min(rank,
    d), negative eigenvalues are 0, the mean is over the kept eigenvalues and at least 1e-12.
 4. The key features' one root mean square is at least 1e-8, the query features' row root mean square at least 1e-6.
 5. M_Q is centred by the plain mean of the non-empty centroids and divided by their number (a further factor 1/d
    cancels).
 6. Lloyd as in SVG-EAR (decisions 2 and 3 there) in the feature space; initial_queries[b][h], initial_keys[b][h]
    are sequence positions of tokens whose features are the first centroids; if None, tokens floor(i * count / C) of
    the entry's video tokens.
 7. E_uv is taken in log space as in SVG-EAR, held at 1e-12 after division by n_v: log max(E' / n_v, 1e-12) + 2t
    (the authors hold at 1e-30, which in their expanded square is below rounding). Empty blocks are never kept.
 8. probes in the budget is the number really taken, min(probes, non-empty query blocks), and 0 if repair is False.
    ceil(x) is ceil(x - 1e-9). The budget is at least 1, so that no row is empty. density >= 1 keeps every block
    (the authors would still take the probes off). The block that crosses the budget is kept: take while the tokens
    taken < budget; ties to the lower block index.
 9. Probe blocks: sizes falling, ties to the lower block index. The probe is the first token of the block whose
    squared distance to the mean feature of the block's members is at most (1 + 1e-5) times the smallest: in a block
    of two both are equally far, and rounding must not decide. Fewer non-empty blocks than probes: fewer probes (the
    authors take first tokens instead).
10. Means and standard deviations of the fit are weighted, divided by the sum of weights; a standard deviation is at
    least 1e-5 (the authors standardise O, not only centre it). Rank = min(repair_rank, probes taken, d). Psi comes
    from the measured residual, not from the fitted one. Where Psi is not unique (singular value 0) B Psi Psi^T does
    not depend on the choice.
11. Dense rows of probes see every valid key, text included.
12. Text and padding queries see every valid key and are not repaired; text keys are seen by every query; padding is
    in nothing (our convention). Text does not enter the metrics, the clusters or the scores.
13. `allowed` is the plan before the repair: probe rows keep their block's mask there; notes["probes"] names them.
14. There are no partial blocks: clusters have the sizes they have; the grid is not used.
"""

from __future__ import annotations

import math

import torch

from restated.problem import (
    Restated,
    attend_keys,
    descending,
    dot,
    empty,
    first_tokens,
    grouped,
    lloyd,
    log_block_error,
    mean,
    squared_distance,
    tokens_by_role,
)

SMALLEST_ERROR = 1e-12


def restate(
    q, k, v, *, grid, text, key_valid, scale,
    query_clusters=300, key_clusters=1000, iterations=25, initial_queries=None, initial_keys=None,
    density=0.22, samples=2048, key_rank=48, query_rank=64, score="value_error",
    probes=64, repair_rank=16, ridge=0.1, repair=True,
) -> Restated:  # fmt: skip
    b, h, n, d = q.shape
    m = k.shape[2]
    scale = d**-0.5 if scale is None else scale
    result = empty(q, k)
    noted = ("query_blocks", "key_blocks", "kept", "budget", "score", "probes", "weights", "sparse")
    result.notes = {name: {} for name in noted}
    for i in range(b):
        tokens = tokens_by_role(n, m, text, key_valid, i)
        for j in range(h):
            queries, keys, values = q[i, j].tolist(), k[i, j].tolist(), v[i, j].tolist()
            key_features = _key_features(queries, keys, tokens, samples, min(key_rank, d))
            start = first_tokens(initial_keys, i, j, tokens.video_keys, key_clusters)
            key_blocks = _partition(key_features, tokens.video_keys, start, iterations)
            filled = [t for t, members in enumerate(key_blocks) if members]

            pooled_keys = [mean([keys[x] for x in key_blocks[t]]) for t in filled]
            query_features = _query_features(queries, tokens, pooled_keys, min(query_rank, d))
            start = first_tokens(initial_queries, i, j, tokens.video_queries, query_clusters)
            query_blocks = _partition(query_features, tokens.video_queries, start, iterations)
            picked, weights = _probes(query_features, query_blocks, probes if repair else 0)

            share = density - len(picked) / len(tokens.video_queries)
            whole = math.ceil(share * (len(tokens.video_keys) + len(tokens.text_keys)) - 1e-9)
            budget = len(tokens.video_keys) if density >= 1 else max(1, whole - len(tokens.text_keys))
            sparse = {}
            for u, members in enumerate(query_blocks):
                if not members:
                    continue
                centroid = mean([queries[x] for x in members])
                scores = {t: _score(score, centroid, keys, values, key_blocks[t], scale) for t in filled}
                kept, taken = [], 0
                for t in descending(scores):
                    if taken >= budget:
                        break
                    kept.append(t)
                    taken += len(key_blocks[t])
                result.notes["kept"][i, j, u], result.notes["score"][i, j, u] = set(kept), scores
                seen = tokens.text_keys + [x for t in sorted(kept) for x in key_blocks[t]]
                for row in members:
                    result.allowed[i, j, row, seen] = True
                    sparse[row] = attend_keys(queries[row], keys, values, seen, scale)

            dense = {row: attend_keys(queries[row], keys, values, tokens.valid_keys, scale) for row in picked}
            rank = min(repair_rank, len(picked), d)
            repaired = _repaired(sparse, dense, picked, weights, rank, ridge) if picked else sparse
            for row in range(n):
                if row in sparse:
                    result.out[i, j, row] = q.new_tensor(repaired[row])
                else:
                    result.allowed[i, j, row, tokens.valid_keys] = True
                    everything = attend_keys(queries[row], keys, values, tokens.valid_keys, scale)
                    result.out[i, j, row] = q.new_tensor(everything)
            found = {"query_blocks": query_blocks, "key_blocks": key_blocks, "budget": budget}
            found |= {"probes": picked, "weights": weights, "sparse": sparse}
            for name, value in found.items():
                result.notes[name][i, j] = value
    return result


def _factor(metric, rank: int):
    """[d rank]: V sqrt(lambda / mean lambda) of the largest eigenpairs of a symmetric matrix."""
    eigenvalues, vectors = torch.linalg.eigh(torch.tensor(metric, dtype=torch.float64))
    eigenvalues = eigenvalues[-rank:].clamp(min=0)
    return (vectors[:, -rank:] * (eigenvalues / eigenvalues.mean().clamp(min=1e-12)).sqrt()).tolist()


def _second_moment(rows):
    d = len(rows[0])
    return [[math.fsum(row[a] * row[c] for row in rows) / len(rows) for c in range(d)] for a in range(d)]


def _project(row, factor):
    return [dot(row, [line[c] for line in factor]) for c in range(len(factor[0]))]


def _key_features(queries, keys, tokens, samples, rank):
    """{key position: feature}"""
    total = len(tokens.video_queries)
    places = range(total)
    if total > samples:
        gaps = max(samples - 1, 1)
        places = sorted({(2 * i * (total - 1) + gaps) // (2 * gaps) for i in range(samples)})
    factor = _factor(_second_moment([queries[tokens.video_queries[p]] for p in places]), rank)
    features = {t: _project(keys[t], factor) for t in tokens.video_keys}
    size = math.sqrt(math.fsum(x * x for feature in features.values() for x in feature) / (len(features) * rank))
    return {t: [x / max(size, 1e-8) for x in feature] for t, feature in features.items()}


def _query_features(queries, tokens, pooled_keys, rank):
    """{query position: feature}"""
    centre = mean(pooled_keys)
    factor = _factor(_second_moment([[x - c for x, c in zip(key, centre, strict=True)] for key in pooled_keys]), rank)
    features = {}
    for t in tokens.video_queries:
        feature = _project(queries[t], factor)
        size = max(math.sqrt(math.fsum(x * x for x in feature) / rank), 1e-6)
        features[t] = [x / size for x in feature]
    return features


def _partition(features, tokens, start, iterations) -> list[list[int]]:
    labels = lloyd([features[t] for t in tokens], [tokens.index(t) for t in start], iterations)
    return grouped(tokens, labels, len(start))


def _score(score, centroid, keys, values, members, scale) -> float:
    if score == "value_error":
        return log_block_error(centroid, keys, values, members, scale, SMALLEST_ERROR, per_token=True)
    if score == "attention_mass":
        logits = [scale * dot(centroid, keys[x]) for x in members]
        return max(logits) + math.log(math.fsum(math.exp(x - max(logits)) for x in logits))
    raise ValueError(f"score: expected 'value_error' or 'attention_mass', got {score!r}; give one of these.")


def _probes(features, blocks, count):
    """(positions, weights) of one representative of each of the largest blocks."""
    largest = descending({u: float(len(members)) for u, members in enumerate(blocks) if members})[:count]
    picked = []
    for u in largest:
        centre = mean([features[t] for t in blocks[u]])
        distances = [squared_distance(features[t], centre) for t in blocks[u]]
        nearest = [t for t, x in zip(blocks[u], distances, strict=True) if x <= (1 + 1e-5) * min(distances)]
        picked.append(nearest[0])
    sizes = [len(blocks[u]) for u in largest]
    return picked, [size * len(sizes) / sum(sizes) for size in sizes]


def _repaired(sparse, dense, picked, weights, rank, ridge):
    """{row: O + mean R + X B Psi Psi^T}, dense rows at the probes."""
    w = torch.tensor(weights, dtype=torch.float64)[:, None]
    o = torch.tensor([sparse[row] for row in picked], dtype=torch.float64)
    residual = torch.tensor([dense[row] for row in picked], dtype=torch.float64) - o
    centre, shift = (w * o).sum(0) / w.sum(), (w * residual).sum(0) / w.sum()
    spread = ((w * (o - centre) ** 2).sum(0) / w.sum()).sqrt().clamp(min=1e-5)
    x, y = w.sqrt() * (o - centre) / spread, w.sqrt() * (residual - shift)
    map_ = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], dtype=torch.float64), x.T @ y)
    basis = torch.linalg.svd(y, full_matrices=False).Vh[:rank].T
    low_rank = map_ @ basis @ basis.T
    rows = {}
    for row, base in sparse.items():
        base = torch.tensor(base, dtype=torch.float64)
        rows[row] = (base + shift + (base - centre) / spread @ low_rank).tolist()
    return rows | dense
