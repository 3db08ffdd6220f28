"""What a restatement returns, the few loops that several of them share, and the problems they are tried on.

Everything here and beside it is float64 on Python lists: slow, explicit, and written without sight of the package.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Restated:
    allowed: Tensor  # [b h n m] bool: which key each query token attends exactly
    out: Tensor  # [b h n d]
    notes: dict = field(default_factory=dict)


class Tokens(NamedTuple):
    """Positions by role in one batch entry, ascending."""

    video_queries: list[int]
    video_keys: list[int]
    text_keys: list[int]
    valid_keys: list[int]


def tokens_by_role(n: int, m: int, text: slice | None, key_valid: Tensor | None, entry: int) -> Tokens:
    """Padding queries exist in self-attention only (n = m), where a query is padding if its key is."""
    valid = [key_valid is None or bool(key_valid[entry, j]) for j in range(m)]
    in_text = [text is not None and text.start <= j < text.stop for j in range(max(n, m))]
    return Tokens(
        video_queries=[i for i in range(n) if not in_text[i] and (n != m or valid[i])],
        video_keys=[j for j in range(m) if valid[j] and not in_text[j]],
        text_keys=[j for j in range(m) if valid[j] and in_text[j]],
        valid_keys=[j for j in range(m) if valid[j]],
    )


def cells(n: int, m: int, text: slice | None, grid: tuple[int, int, int] | None) -> dict[int, int]:
    """Sequence position -> cell of the grid in frame-major order: the tokens outside the text, in sequence order."""
    outside = [i for i in range(n) if text is None or not text.start <= i < text.stop]
    if grid is None or n != m or len(outside) != math.prod(grid):
        expected = f"self-attention over {len(outside)} video tokens"
        raise ValueError(f"grid: expected {expected}, got {grid}; give the grid of the video tokens.")
    return {position: cell for cell, position in enumerate(outside)}


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(map(operator.mul, x, y))


def squared_distance(x: list[float], y: list[float]) -> float:
    apart = [*map(operator.sub, x, y)]
    return dot(apart, apart)


def mean(rows: list[list[float]]) -> list[float]:
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def attend_row(logits: list[float], values: list[list[float]], counts: list[float] | None = None) -> list[float]:
    """sum_j n_j e^{l_j} v_j / sum_j n_j e^{l_j}: one softmax row; n_j = 1 unless counts are given."""
    counts = [1.0] * len(logits) if counts is None else counts
    top = max(logits)
    weights = [c * math.exp(x - top) for c, x in zip(counts, logits, strict=True)]
    total = math.fsum(weights)
    return [dot(weights, list(channel)) / total for channel in zip(*values, strict=True)]


def attend_keys(query, keys, values, seen: list[int], scale: float) -> list[float]:
    """Softmax attention of one query over the keys at the positions `seen`."""
    return attend_row([scale * dot(query, keys[j]) for j in seen], [values[j] for j in seen])


def evenly_spaced(tokens: list[int], count: int) -> list[int]:
    """Token floor(i * len / count) of the list, i < count: the default first centroids."""
    count = min(count, len(tokens))
    return [tokens[i * len(tokens) // count] for i in range(count)]


def lloyd(points: list[list[float]], start: list[int], iterations: int) -> list[int]:
    """Labels of `points` after `iterations` assignments; the first centroids are points[start].

    Assign, then move every centroid to its members' mean; an empty cluster keeps its centroid; ties to the lower index.
    The last assignment is followed by a move only, so the means under the returned labels are the final centroids.
    """
    centroids = [list(points[i]) for i in start]
    labels = [0] * len(points)
    for _ in range(iterations):
        for i, x in enumerate(points):
            distances = [squared_distance(x, centroid) for centroid in centroids]
            labels[i] = distances.index(min(distances))
        for u in range(len(centroids)):
            members = [points[i] for i in range(len(points)) if labels[i] == u]
            if members:
                centroids[u] = mean(members)
    return labels


def first_tokens(initial, entry: int, head: int, tokens: list[int], count: int) -> list[int]:
    """Sequence positions of the tokens that are the first centroids: initial[entry][head], else evenly spaced ones."""
    if initial is None:
        return evenly_spaced(tokens, count)
    return [int(i) for i in initial[entry][head]]


def grouped(tokens: list[int], labels: list[int], count: int) -> list[list[int]]:
    """Sequence positions of each cluster's tokens."""
    return [[t for t, label in zip(tokens, labels, strict=True) if label == u] for u in range(count)]


def descending(scores: dict[int, float]) -> list[int]:
    """Blocks by falling score, ties to the lower index."""
    return sorted(scores, key=lambda block: (-scores[block], block))


def whole_part(x: float) -> int:
    """floor that forgives the last bits of a product: 0.29 * 100 is 29."""
    return math.floor(x + 1e-9)


def log_block_error(centroid, keys, values, members: list[int], scale, smallest: float, *, per_token: bool) -> float:
    """log E, E = sum_j |e^{s c.k_j} v_j - e^{s c.kbar} vbar|^2 over one key block (its mean over j if per_token).

    With t the block's largest logit (kbar's included), E = e^{2t} E' and E' is held at `smallest` or above.
    """
    pooled_key, pooled_value = mean([keys[j] for j in members]), mean([values[j] for j in members])
    logits = [scale * dot(centroid, keys[j]) for j in members]
    pooled = scale * dot(centroid, pooled_key)
    top = max([pooled, *logits])
    stand_in = [math.exp(pooled - top) * y for y in pooled_value]
    error = math.fsum(
        squared_distance([math.exp(logit - top) * x for x in values[j]], stand_in)
        for logit, j in zip(logits, members, strict=True)
    )
    return math.log(max(error / (len(members) if per_token else 1), smallest)) + 2 * top


def empty(q: Tensor, k: Tensor) -> Restated:
    """Nothing allowed, output 0."""
    b, h, n, _ = q.shape
    return Restated(torch.zeros(b, h, n, k.shape[2], dtype=torch.bool), torch.zeros_like(q))


def static(q, k, v, *, text, key_valid, scale, sees) -> Restated:
    """Video queries see the text, and the video keys where sees(head, query, key); all others see every valid key."""
    b, h, n, d = q.shape
    scale = d**-0.5 if scale is None else scale
    result = empty(q, k)
    for i in range(b):
        tokens = tokens_by_role(n, k.shape[2], text, key_valid, i)
        video = set(tokens.video_queries)
        for j in range(h):
            queries, keys, values = q[i, j].tolist(), k[i, j].tolist(), v[i, j].tolist()
            for row in range(n):
                seen = tokens.valid_keys
                if row in video:
                    seen = [*tokens.text_keys, *(column for column in tokens.video_keys if sees(j, row, column))]
                result.allowed[i, j, row, seen] = True
                result.out[i, j, row] = q.new_tensor(attend_keys(queries[row], keys, values, seen, scale))
    return result


@dataclass(frozen=True)
class Problem:
    """One generated call: an odd grid, text at either end or inside, padding in the text or scattered."""

    grid: tuple[int, int, int]
    text_tokens: int = 0
    text_at: str = "end"
    padding: str = "none"  # "text": the last text token of the last entry; "video": scattered
    batch: int = 1
    heads: int = 1
    dim: int = 4
    seed: int = 0

    def inputs(self):
        """(q, k, v, the keywords every restatement takes)"""
        video = math.prod(self.grid)
        n = video + self.text_tokens
        start = {"start": 0, "middle": video // 2, "end": video}[self.text_at]
        text = slice(start, start + self.text_tokens) if self.text_tokens else None
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.heads, n, self.dim)
        q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
        valid = None
        if self.padding == "text":
            valid = torch.ones(self.batch, n, dtype=torch.bool)
            valid[-1, text.stop - 1] = False
        if self.padding == "video":
            valid = torch.rand(self.batch, n, generator=generator) < 0.8
            valid[:, n // 2] = True
        return 2 * q, k, v, {"grid": self.grid, "text": text, "key_valid": valid, "scale": None}


def expect_roles(allowed, text, key_valid):
    """Text sees and is seen by all that is valid, padding sees it too and is seen by nobody, and nobody sees nothing."""
    valid = torch.ones(len(allowed), allowed.shape[2], dtype=torch.bool) if key_valid is None else key_valid
    in_text = torch.zeros(allowed.shape[2], dtype=torch.bool)
    in_text[slice(0, 0) if text is None else text] = True
    for seen, there in zip(allowed, valid, strict=True):
        assert (seen[:, in_text | ~there] == there).all()
        assert not seen[:, :, ~there].any() and seen[:, :, in_text & there].all()
    assert allowed.any(-1).all()


def dense(q, k, v, key_valid=None):
    """Softmax attention over the valid keys."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if key_valid is not None:
        scores = scores.masked_fill(~key_valid[:, None, None], -torch.inf)
    return scores.softmax(-1) @ v


def masked(q, k, v, allowed):
    """Softmax attention over the allowed keys."""
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ v


# What MC-Sparse and Chipmunk share: keys chosen one by one for each group of queries, and a residual kept whole.
# At the step of the mask ("anchor") the output is dense attention over the valid keys, and R = dense - sparse is kept;
# a later step is sparse attention of its own q, k, v over the same keys, plus R.


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
