"""MC-Sparse (arXiv 2610.06801), restated: equal groups of queries by principal directions, keys one by one by exact mass.

    a_uj = sum_{i in u} p_ij,   p_ij = softmax over all valid keys of scale q_i.k_j

Decisions
 1. The list of a head is every position outside the text, padding included; B = ceil(N / group) blocks. A node is an
    interval of blocks; one of more than one block is reordered and split at lo + (hi - lo) // 2. Leaves are the groups.
 2. A node's order: its valid members by rising projection on the direction w of most variance, then its padding. w is
    `power_iterations` products with the scatter matrix of the valid members about their mean, from
    (cos 0.7, cos 1.4, ...) of length one, normalised after each by max(|w|, 1e-12). Equal projections keep their order.
 3. whiten: queries are multiplied by the symmetric square root of the covariance of the valid video keys first;
    eigenvalues below 0 count as 0.
 4. Padding is left out of the groups, which may be empty then.
 5. count = floor(top_k M + 1e-9), at least 1, rounded up to a multiple of `multiple`, at most M, the number of valid
    video keys.
 6. Text, padding, residual and later steps: as in `anchored`.
"""

from __future__ import annotations

import math

import torch

from restated.problem import Restated, anchored, dot, heaviest, log_sum, mass_of, mean, tokens_by_role, whole_part


def restate(q, k, v, *, grid, text, key_valid, scale, top_k=0.25, group=128, multiple=128, power_iterations=4,
            whiten=False, later=None) -> Restated:  # fmt: skip
    n, m, d = q.shape[2], k.shape[2], q.shape[3]
    scale = d**-0.5 if scale is None else scale

    def groups_of(entry, head):
        tokens = tokens_by_role(n, m, text, key_valid, entry)
        valid = set(tokens.video_queries)
        listed = [i for i in range(n) if text is None or not text.start <= i < text.stop]
        points = _whitened(q[entry, head], k[entry, head], tokens.video_keys) if whiten else q[entry, head].tolist()
        blocks = -(-len(listed) // group)
        order = _divide(listed, 0, blocks, points, valid, group, power_iterations)
        cut = [order[u * group : (u + 1) * group] for u in range(blocks)]
        return [sorted(i for i in members if i in valid) for members in cut]

    def keep(entry, head, u, members):
        tokens = tokens_by_role(n, m, text, key_valid, entry)
        queries, keys = q[entry, head].tolist(), k[entry, head].tolist()
        sums = {i: log_sum(queries[i], keys, tokens.valid_keys, scale) for i in members}
        mass = mass_of(members, queries, keys, tokens.video_keys, sums, scale)
        count = max(1, whole_part(top_k * len(mass)))
        return heaviest(mass, min(-(-count // multiple) * multiple, len(mass))), mass

    how = {"text": text, "key_valid": key_valid, "scale": scale, "later": later}
    return anchored(q, k, v, **how, groups_of=groups_of, keep=keep)


def _divide(members, low, high, points, valid, group, iterations):
    """The members of blocks [low, high) in their last order."""
    if high - low <= 1:
        return members
    middle = (high - low) // 2
    w = _direction([points[i] for i in members if i in valid], len(points[0]), iterations)
    real = sorted((i for i in members if i in valid), key=lambda i: dot(points[i], w))
    order = real + [i for i in members if i not in valid]
    left, right = order[: middle * group], order[middle * group :]
    return _divide(left, low, low + middle, points, valid, group, iterations) + _divide(
        right, low + middle, high, points, valid, group, iterations
    )


def _direction(points, d, iterations):
    w = [math.cos(0.7 * (c + 1)) for c in range(d)]
    length = math.sqrt(dot(w, w))
    w = [x / length for x in w]
    centre = mean(points) if points else [0.0] * d
    apart = [[x - c for x, c in zip(point, centre, strict=True)] for point in points]
    scatter = [[math.fsum(x[a] * x[c] for x in apart) for c in range(d)] for a in range(d)]
    for _ in range(iterations):
        w = [dot(row, w) for row in scatter]
        length = max(math.sqrt(dot(w, w)), 1e-12)
        w = [x / length for x in w]
    return w


def _whitened(q, k, video_keys):
    keys = k[video_keys]
    apart = keys - keys.mean(0)
    values, vectors = torch.linalg.eigh(apart.T @ apart / len(video_keys))
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    return (q @ root).tolist()
