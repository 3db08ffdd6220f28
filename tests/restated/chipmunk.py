"""Chipmunk (Silveria and others, 2025), restated: keys one by one for each voxel of queries, best, random and near ones.

    a_uj = sum_{i in u} exp(scale q_i.k_j - l_i)

Decisions
 1. Cells are put into voxel order: whole voxels lexicographically, inside them lexicographically; then the cells past
    the last whole voxel in time, then in height, then in width, each by (t, y, x). Groups are runs of one voxel's size
    in that order; the first E of them are the voxels. Padding keeps its place and is no member and no key.
 2. l_i is the log sum over all valid keys of this call, or the one of an earlier call where `log_sums` is given.
 3. count = multiple * round(top_k M / multiple), halves to even, at least 1, at most M; top_k = 1 keeps all.
 4. Random keys: a hash of (seed, 0, 0, group, cell) once for a run, and of (seed, step + 1, layer + 1, group, cell) for
    every plan, each below floor(random_keys 2^32).
 5. Voxels keep the keys of the first voxel; with local_voxels also those of a window of voxels around them that moves
    inwards at borders, and the other groups the last side^3 voxels' worth of places.
 6. Text, padding, residual and later steps: as in `anchored`.
"""

from __future__ import annotations

import math

import torch

from restated.problem import Restated, anchored, cells, heaviest, log_sum, mass_of, tokens_by_role


def restate(q, k, v, *, grid, text, key_valid, scale, top_k=0.05, random_keys=0.01, voxel=(4, 6, 8), local_voxels=0,
            multiple=128, seed=0, step=0, layer=0, log_sums=None, later=None) -> Restated:  # fmt: skip
    n, m, d = q.shape[2], k.shape[2], q.shape[3]
    scale = d**-0.5 if scale is None else scale
    cell_of = cells(n, m, text, grid)
    size, total = math.prod(voxel), math.prod(grid)
    place = {cell: at for at, cell in enumerate(_voxel_order(grid, voxel))}
    voxels = [side // edge for side, edge in zip(grid, voxel, strict=True)]
    whole = math.prod(voxels)
    below = math.floor(random_keys * 2**32)
    current = torch.zeros(q.shape[:3], dtype=q.dtype)
    for i in range(q.shape[0]):
        tokens = tokens_by_role(n, m, text, key_valid, i)
        for j in range(q.shape[1]):
            keys = k[i, j].tolist()
            for row in tokens.video_queries:
                current[i, j, row] = log_sum(q[i, j, row].tolist(), keys, tokens.valid_keys, scale)

    def groups_of(entry, head):
        tokens = tokens_by_role(n, m, text, key_valid, entry)
        groups = [[] for _ in range(-(-total // size))]
        for row in tokens.video_queries:
            groups[place[cell_of[row]] // size].append(row)
        return groups

    def near(u, cell):
        """Whether group u keeps a key for where it is."""
        if u < whole and place[cell] // size == 0:
            return True
        if not local_voxels:
            return False
        reach = local_voxels // 2
        side = 2 * reach + 1
        if u >= whole:
            return place[cell] >= total - side**3 * size
        other = place[cell] // size
        if other >= whole:
            return False
        pairs = zip(_coordinates(u, voxels), _coordinates(other, voxels), voxels, strict=True)
        return all(_in_window(mine, theirs, count, reach, side) for mine, theirs, count in pairs)

    def keep(entry, head, u, members):
        tokens = tokens_by_role(n, m, text, key_valid, entry)
        queries, keys = q[entry, head].tolist(), k[entry, head].tolist()
        sums = (current if log_sums is None else log_sums)[entry, head].tolist()
        mass = mass_of(members, queries, keys, tokens.video_keys, sums, scale)
        count = len(mass) if top_k == 1 else max(1, min(multiple * round(top_k * len(mass) / multiple), len(mass)))
        chosen = set(heaviest(mass, count))
        for key in tokens.video_keys:
            cell = cell_of[key]
            drawn = (_draw(seed, 0, 0, u, cell), _draw(seed, step + 1, layer + 1, u, cell))
            if min(drawn) < below or near(u, cell):
                chosen.add(key)
        return sorted(chosen), mass

    how = {"text": text, "key_valid": key_valid, "scale": scale, "later": later}
    result = anchored(q, k, v, **how, groups_of=groups_of, keep=keep)
    result.notes["log_sums"] = current
    return result


def _voxel_order(grid, voxel) -> list[int]:
    T, H, W = grid
    whole = [side // edge * edge for side, edge in zip(grid, voxel, strict=True)]

    def rank(cell):
        at = (cell // (H * W), cell // W % H, cell % W)
        inside = [x < end for x, end in zip(at, whole, strict=True)]
        if all(inside):
            outer = tuple(x // edge for x, edge in zip(at, voxel, strict=True))
            return (0, *outer, *(x % edge for x, edge in zip(at, voxel, strict=True)))
        return (1 + inside.index(False), *at, 0, 0, 0)

    return sorted(range(T * H * W), key=rank)


def _coordinates(u, voxels):
    return u // (voxels[1] * voxels[2]), u // voxels[2] % voxels[1], u % voxels[2]


def _in_window(mine, theirs, count, reach, side) -> bool:
    if count <= side:
        return True
    first = min(max(mine - reach, 0), count - side)
    return first <= theirs < first + side


def _mix(x: int) -> int:
    for _ in range(2):
        x = ((x >> 16) ^ x) * 73244475 % 2**32
    return (x >> 16) ^ x


def _draw(seed, a, b, u, c) -> int:
    x = _mix(seed % 2**32)
    for part in (a, b, u, c):
        x = _mix(x ^ part)
    return x
