"""Attention whose tokens are spread over ranks by diffusers' enable_parallelism.

Ulysses hands every rank all tokens of some heads, which is all that a method per head needs. Ring hands it all heads of
some keys, from which no plan can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parkattn import compat

RING = "ring context parallelism shows each rank a part of the keys only; use ulysses_degree"


def why_not_ulysses(parallel: Any, text_tokens: int) -> str | None:
    """None where run_in_ulysses applies."""
    degrees = getattr(parallel, "context_parallel_config", None)
    if degrees is None:
        return f"the parallelism of {type(parallel).__name__} is not that of diffusers; use enable_parallelism"
    if (degrees.ring_degree or 1) > 1:
        return RING
    if compat.context_parallel_attention() is None:
        return compat.lacking("diffusers", "_templated_context_parallel_attention")
    if text_tokens and getattr(degrees, "ulysses_anything", False):
        return "ulysses_anything hides how text was split over the ranks; pad to a multiple of ulysses_degree"
    return None


def why_not_balanced(parallel: Any, heads: int, key_heads: int) -> str | None:
    """None where heads may be spread over the ranks in any order."""
    degrees = parallel.context_parallel_config
    ranks = degrees.ulysses_degree
    if compat.ulysses_mesh(degrees) is None:
        return compat.lacking("diffusers", "_ulysses_mesh")
    if heads % ranks or heads != key_heads:
        return f"{heads} heads of queries and {key_heads} of keys are not equal shares of {ranks} ranks"
    return "each rank has one head" if heads == ranks else None


class UlyssesRanks:
    """Those that share the heads of a call."""

    def __init__(self, parallel: Any) -> None:
        self._group = compat.ulysses_mesh(parallel.context_parallel_config).get_group()

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank(self._group)

    def gather(self, x: Tensor) -> Tensor:
        """As bytes: NCCL has no 16-bit integers."""
        own = x.contiguous().flatten().view(torch.uint8)
        found = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(self._group))]
        torch.distributed.all_gather(found, own, group=self._group)
        return torch.stack(found).view(x.dtype).unflatten(1, x.shape)


def run_in_ulysses(
    with_all_tokens: Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    text_tokens: int,
    text: str,
    parallel: Any,
    scale: float | None,
) -> Tensor:
    """with_all_tokens(q, k, v, mask, text_tokens) sees every token of this rank's heads, in the order of one process.

    q, k, v [b s h d] and text_tokens are this rank's share; mask is that of the whole sequence.
    """
    spread = compat.context_parallel_attention()
    assert spread is not None, "as why_not_ulysses says"
    ranks = parallel.context_parallel_config.ulysses_degree

    def forward_op(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if not text_tokens:
            return with_all_tokens(query, key, value, mask, 0).contiguous()
        query, key, value = (in_one_piece(x, ranks, text_tokens, text) for x in (query, key, value))
        out = with_all_tokens(query, key, value, mask, text_tokens * ranks)
        return in_rank_pieces(out, ranks, text_tokens, text).contiguous()

    # the mask goes past diffusers, which cannot know its order, and in 0.36 refuses any
    asked = (None, 0.0, False, scale, False, False)  # mask, dropout, causal, scale, grouped queries, log-sum
    return spread(q, k, v, *asked, forward_op=forward_op, backward_op=None, _parallel_config=parallel)


def mask_of_all_ranks(mask: Any, parallel: Any, keys: int) -> tuple[Any, bool]:
    """A mask over this rank's keys alone -> over those of all ranks in their order, and whether it was one."""
    degrees = parallel.context_parallel_config
    if not isinstance(mask, Tensor) or mask.shape[-1] != keys or compat.ulysses_mesh(degrees) is None:
        return mask, False
    return torch.cat(list(UlyssesRanks(parallel).gather(mask)), -1), True


def mask_in_one_piece(mask: Tensor | None, parallel: Any, text_tokens: int, text: str) -> Tensor | None:
    """[b 1 1 n] in the order of the ranks -> in the order of one process."""
    if mask is None or not text_tokens or mask.ndim != 4:
        return mask
    ranks = parallel.context_parallel_config.ulysses_degree or 1
    return in_one_piece(mask.permute(0, 3, 1, 2), ranks, text_tokens, text).permute(0, 2, 3, 1)


def in_one_piece(x: Tensor, ranks: int, text_tokens: int, text: str) -> Tensor:
    """[video_0 text_0 video_1 text_1 ..] -> [video text], or the same with text first: [b n h d]."""
    pieces = x.unflatten(1, (ranks, -1))
    cut = pieces.shape[2] - text_tokens if text == "last" else text_tokens
    return torch.cat([pieces[:, :, :cut].flatten(1, 2), pieces[:, :, cut:].flatten(1, 2)], 1)


def in_rank_pieces(x: Tensor, ranks: int, text_tokens: int, text: str) -> Tensor:
    """The inverse of in_one_piece."""
    cut = x.shape[1] - text_tokens * ranks if text == "last" else text_tokens * ranks
    return torch.cat([x[:, :cut].unflatten(1, (ranks, -1)), x[:, cut:].unflatten(1, (ranks, -1))], 2).flatten(1, 2)


def hunyuan_sequence_parallel() -> dict[str, Any]:
    """Splits video and text at the first block, gathers video at the last projection: [video_i, text_i] per rank."""
    ContextParallelInput, ContextParallelOutput = compat.context_parallel_parts()
    rope = {i: ContextParallelInput(split_dim=0, expected_dims=2, split_output=True) for i in (0, 1)}
    names = ("hidden_states", "encoder_hidden_states")
    tokens = {name: ContextParallelInput(split_dim=1, expected_dims=3) for name in names}
    return {
        "rope": rope,
        "transformer_blocks.0": tokens,
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
