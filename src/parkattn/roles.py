"""Which tokens are clustered, which are always on (text), and which are never attended (padding)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parkattn.checks import expect_key_valid, expect_text


@dataclass(frozen=True)
class Roles:
    """None stands for "every token" so that the common case costs nothing."""

    clustered_queries: Tensor | None  # [b n] bool
    clustered_keys: Tensor | None  # [b m] bool
    key_valid: Tensor | None  # [b m] bool
    has_text: bool

    def query_blocks(self, labels: Tensor, clusters: int) -> tuple[Tensor, int]:
        """Labels with every query that is not clustered in one last block, and the number of blocks."""
        return labels, clusters + (self.clustered_queries is not None)

    def key_blocks(self, labels: Tensor, clusters: int) -> tuple[Tensor, int]:
        """Labels with text keys in one block after the clusters and padding keys in the last, and the number of blocks."""
        if self.key_valid is None:
            return labels, clusters + self.has_text
        padding = clusters + self.has_text
        return torch.where(self.key_valid.unsqueeze(1), labels, padding).to(labels.dtype), padding + 1

    def extend(self, mask: Tensor) -> Tensor:
        """[b h c_q c_k] over clusters -> [b h qb kb]: text rows and columns on, padding column off."""
        right = torch.cat(
            [mask.new_ones(*mask.shape[:-1], int(self.has_text)), mask.new_zeros(*mask.shape[:-1], int(self.key_valid is not None))], -1
        )
        mask = torch.cat([mask, right], -1)
        if self.clustered_queries is not None:
            row = torch.ones_like(mask[..., :1, :])
            if self.key_valid is not None:
                row[..., -1] = False
            mask = torch.cat([mask, row], -2)
        return mask


def assign_roles(q: Tensor, k: Tensor, text: slice | None, key_valid: Tensor | None) -> Roles:
    """text is the same span in q and k; in self-attention a padding key's query is padding too and is kept out of the clusters."""
    b, n, m = q.shape[0], q.shape[2], k.shape[2]
    if text is not None:
        expect_text(text, n, m)
        text = None if text.start == text.stop else text
    if key_valid is not None:
        expect_key_valid(key_valid, k)
    if text is None and key_valid is None:
        return Roles(None, None, None, has_text=False)

    keys = (
        torch.ones(b, m, dtype=torch.bool, device=k.device) if key_valid is None else key_valid.clone(memory_format=torch.contiguous_format)
    )
    queries = keys.clone() if n == m else torch.ones(b, n, dtype=torch.bool, device=q.device)
    if text is not None:
        queries[:, text] = False
        keys[:, text] = False
    for name, clustered in (("q", queries), ("k", keys)):
        # text alone always leaves a token to cluster; asking the tensor would wait for the GPU
        if key_valid is not None and not bool(clustered.any(dim=1).all()):
            raise ValueError(
                f"key_valid, text: expected at least one valid token of {name} outside the text, got none; use dense attention for this call."
            )
    only_clusters = n != m and text is None
    return Roles(None if only_clusters else queries, keys, key_valid, has_text=text is not None)
