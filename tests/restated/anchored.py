"""What MC-Sparse and Chipmunk share: keys chosen one by one for each group of queries, and a residual kept whole.

At the step of the mask ("anchor") the output is dense attention over the valid keys, and R = dense - sparse is kept;
a later step is sparse attention of its own q, k, v over the same keys, plus R.
"""

from __future__ import annotations

import math

import torch

from restated.problem import Restated, attend_keys, descending, dot, empty, tokens_by_role


def anchored(q, k, v, *, text, key_valid, scale, later, groups_of, keep) -> Restated:
    """groups_of(entry, head) -> lists of video queries; keep(entry, head, u, members, mass) -> video keys of group u.

    mass: dict of the group's video keys, a_uj = sum over members i of exp(scale q_i.k_j - l_i), by `mass_of`.
    """
    b, h, n, _ = q.shape
    m = k.shape[2]
    result = empty(q, k)
    dense, sparse = torch.zeros_like(q), torch.zeros_like(q)
    notes: dict = {"groups": {}, "mass": {}}
    second = torch.zeros_like(q)
    for i in range(b):
        tokens = tokens_by_role(n, m, text, key_valid, i)
        for j in range(h):
            queries, keys, values = q[i, j].tolist(), k[i, j].tolist(), v[i, j].tolist()
            groups = groups_of(i, j)
            notes["groups"][i, j] = groups
            seen = dict.fromkeys(range(n), tokens.valid_keys)
            for u, members in enumerate(groups):
                chosen, notes["mass"][i, j, u] = keep(i, j, u, members)
                for row in members:
                    seen[row] = sorted({*chosen, *tokens.text_keys})
            after = [x[i, j].tolist() for x in later] if later is not None else None
            for row in range(n):
                result.allowed[i, j, row, seen[row]] = True
                dense[i, j, row] = q.new_tensor(attend_keys(queries[row], keys, values, tokens.valid_keys, scale))
                sparse[i, j, row] = q.new_tensor(attend_keys(queries[row], keys, values, seen[row], scale))
                if after is not None:
                    second[i, j, row] = q.new_tensor(attend_keys(after[0][row], after[1], after[2], seen[row], scale))
    result.out = dense
    notes["residual"] = dense - sparse
    if later is not None:
        notes["later"] = second + notes["residual"]
    result.notes = notes
    return result


def log_sum(query, keys, valid: list[int], scale: float) -> float:
    logits = [scale * dot(query, keys[j]) for j in valid]
    top = max(logits)
    return top + math.log(math.fsum(math.exp(x - top) for x in logits))


def mass_of(members, queries, keys, video_keys, sums: dict[int, float], scale: float) -> dict[int, float]:
    """a_uj of the video keys j; sums: l_i of each member."""
    return {j: math.fsum(math.exp(scale * dot(queries[i], keys[j]) - sums[i]) for i in members) for j in video_keys}


def heaviest(mass: dict[int, float], count: int) -> list[int]:
    """The first `count` keys by falling mass, ties to the lower position."""
    return descending(mass)[:count]
