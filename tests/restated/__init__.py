"""Slow float64 restatements of the methods PARK is compared with, written from their papers and a survey alone.

Every module has one `restate(q, k, v, *, grid, text, key_valid, scale, **settings) -> Restated`; its docstring's
"Decisions" list is what an implementation must agree with. Decisions shared by all methods, and deliberate
differences from the authors:

Decisions (all methods)
- A1 Self-attention only: q, k, v have the same [b, h, n, d]; scale None means d ** -0.5; every batch element and head
  is treated as if it were alone (counts, blocks and clusters never depend on a neighbour in the batch).
- A2 A token is padding if key_valid is False there (this wins over text), else text if inside `text`, else video.
- A3 Text and padding queries see every valid key; valid text keys are seen by every query; padding keys by nobody.
- A4 Only video tokens take part in the method's own blocks, scores, clusters and profiling: text and padding change
  nothing about which video keys a video query sees.
- A5 Fixed blocks are cut from the video tokens numbered 0, 1, ... in sequence order with text and padding skipped:
  block of token number r is r // size, so only the last block can be short (SVG alone counts grid positions, see
  there).
- A6 Descending orders are stable: equal scores rank by lower index. argmin and argmax ties go to the lower index.
- A7 out = softmax(scale q k^T) over the allowed keys, times v. Nothing else is changed (no quantisation, no PV
  skipping).
- A8 int(ratio * count) is evaluated in double precision and truncated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Restated:
    """What a method attends and returns; per-head intermediate values in `notes` are nested lists [b][h]."""

    allowed: Tensor  # [b h n m] bool
    out: Tensor  # [b h n d]
    notes: dict[str, Any] = field(default_factory=dict)


def scale_of(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def text_tokens(n: int, text: slice | None) -> set[int]:
    return set() if text is None else set(range(n)[text])


def video_tokens(q: Tensor, text: slice | None, key_valid: Tensor | None) -> list[list[int]]:
    """Sequence positions of the video tokens of each batch element, in order."""
    batch, n = q.shape[0], q.shape[2]
    outside = [i for i in range(n) if i not in text_tokens(n, text)]
    return [[i for i in outside if key_valid is None or bool(key_valid[b, i])] for b in range(batch)]


def per_head(q: Tensor, of_head: Any) -> list[list[Any]]:
    """of_head(b, h) for every batch element and head."""
    return [[of_head(b, h) for h in range(q.shape[1])] for b in range(q.shape[0])]


def blocks_of(count: int, size: int) -> list[list[int]]:
    """The numbers 0 .. count - 1 in runs of `size`; the last run may be short."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def softmax(logits: list[float]) -> list[float]:
    """Over the finite entries; minus infinity gets exactly 0, and all zeros come back where nothing is finite."""
    finite = [z for z in logits if z != float("-inf")]
    if not finite:
        return [0.0] * len(logits)
    top = max(finite)
    weights = torch.tensor([z - top for z in logits], dtype=torch.float64).exp()
    return (weights / weights.sum()).tolist()


def descending(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def block_sees(mask: list[list[bool]], query_block: list[int], key_block: list[int]) -> list[list[bool]]:
    """Block mask -> which video token (row) sees which video token (column)."""
    return [[mask[u][v] for v in key_block] for u in query_block]


def from_heads(q: Tensor, k: Tensor, v: Tensor, *, text, key_valid, scale, of_head, **notes: Any) -> Restated:
    """of_head(b, h): the notes of a head, `sees` among them, as `restated` takes it."""
    heads = per_head(q, of_head)
    sees = [[head.pop("sees") for head in row] for row in heads]
    notes["heads"] = heads
    return restated(q, k, v, text=text, key_valid=key_valid, scale=scale, sees=sees, notes=notes)


def restated(q: Tensor, k: Tensor, v: Tensor, *, text, key_valid, scale, sees, notes) -> Restated:
    """sees[b][h][r][s]: video token number r sees video token number s. Adds the roles (A2, A3) and attends (A7)."""
    assert q.shape == k.shape == v.shape and q.dtype == torch.float64
    batch, heads, n, _ = q.shape
    in_text = text_tokens(n, text)
    video = video_tokens(q, text, key_valid)
    allowed = torch.zeros(batch, heads, n, n, dtype=torch.bool)
    out = torch.zeros_like(q)
    for b in range(batch):
        valid = [key_valid is None or bool(key_valid[b, j]) for j in range(n)]
        number = {token: r for r, token in enumerate(video[b])}
        for h in range(heads):
            for i in range(n):
                keys = []
                for j in range(n):
                    if not valid[j]:
                        continue
                    if i not in number or j in in_text or sees[b][h][number[i]][number[j]]:
                        keys.append(j)
                allowed[b, h, i, keys] = True
                logits = (k[b, h, keys] @ q[b, h, i]) * scale_of(q, scale)
                weights = (logits - logits.max()).exp()
                out[b, h, i] = weights @ v[b, h, keys] / weights.sum()
    return Restated(allowed, out, notes)
