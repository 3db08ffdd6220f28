"""Attention over one packed sequence whose video comes last: text, sound, pictures and references are before it.

All that is before the video is exact. References that are videos may be sparse too: tokens are put into another order
for the call, [exact | references | video], and back after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parkattn.engine import Engine


def attend_packed(
    engine: Engine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    before: int,
    references: Sequence[range],
    dense: Callable[[], Tensor],
    key_valid: Tensor | None = None,
    reason: str | None = None,
    **site: Any,
) -> Tensor:
    """engine.attend, [b h n d]. before: tokens before the video; references: those of them that are sparse too."""
    sparse = tuple(references) if reason is None else ()  # a dense call needs no order
    exact = before - sum(map(len, sparse))
    site |= {"text": slice(0, exact) if exact else None, "reason": reason}
    if not sparse:
        return engine.attend(q, k, v, dense=dense, key_valid=key_valid, **site)
    order, back = packed_order(before, sparse, q.shape[2], q.device)
    q, k, v = (x.index_select(2, order) for x in (q, k, v))
    valid = None if key_valid is None else key_valid[:, order]
    out = engine.attend(q, k, v, dense=lambda: dense().index_select(2, order), key_valid=valid, **site)
    return out.index_select(2, back)


@functools.lru_cache(maxsize=8)
def packed_order(
    before: int, references: tuple[range, ...], tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Places [n] as [exact | references | video], and the inverse; kept for all layers. Reset: cache_clear."""
    moved = {place for reference in references for place in reference}
    exact = [place for place in range(before) if place not in moved]
    order = torch.tensor([*exact, *sorted(moved), *range(before, tokens)])
    return order.to(device), order.argsort().to(device)
