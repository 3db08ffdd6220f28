"""Attention whose tokens are spread over ranks by xDiT (the package xfuser, 0.5 or newer).

xDiT's processors call one function, USP: it hands every rank all tokens of some heads, calls the attention function of
a backend, and hands the tokens back. A method is one more backend there.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parkattn.hosts.diffusers.sequence_parallel import RING, in_one_piece, in_rank_pieces

_BACKEND = "parkattn"  # its name among xDiT's backends
# what that backend calls, with q, k, v [b n h d]: xDiT hands a backend nothing but tensors
_BETWEEN: contextvars.ContextVar[Callable[[Tensor, Tensor, Tensor], Tensor]] = contextvars.ContextVar(
    "parkattn_between_exchanges"
)


def register_backend() -> None:
    """Make the backend known to xDiT, or say why xDiT cannot have it."""
    try:
        from xfuser.core.distributed.attention_backend import ATTENTION_FUNCTION_REGISTRY
    except ImportError as error:
        raise ValueError(
            f"xfuser: expected 0.5 or newer, where attention backends can be registered, got {error}; "
            "upgrade it, or split the video with diffusers' enable_parallelism."
        ) from error
    ATTENTION_FUNCTION_REGISTRY[_BACKEND] = run_as_backend


def run_as_backend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
    """[b h n d] -> [b h n d]. The second value is the log-sum, which only ring attention reads."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _BETWEEN.get()(q, k, v).transpose(1, 2), None


class Exchange:
    """One call of USP: q, k, v [b s h d] are this rank's share of the video and its text.

    text_tokens of them are text, at the end or the start as `text` says; with whole_text every rank holds all of it.
    extras is the dictionary with which xDiT configures its own sparse backends.
    """

    def __init__(
        self, text_tokens: int, text: str, whole_text: bool, extras: dict[str, Any] | None, dropout: float, causal: bool
    ) -> None:
        self.text_tokens = text_tokens
        self.text = text
        self.whole_text = whole_text
        self.extras = extras
        self.options = {"dropout_p": dropout, "is_causal": causal}

    def why_not_usp(self) -> str | None:
        """None where `run_usp_around` applies."""
        from xfuser.core.distributed import get_ring_parallel_world_size

        if get_ring_parallel_world_size() > 1:
            return RING
        if self.text_tokens and self.extras is not None:
            return "xDiT's attention_kwargs may mask text; make its transformer without them"
        return None

    def run_whole_usp(self, q: Tensor, k: Tensor, v: Tensor, backend: Any = None) -> Tensor:
        """USP as xDiT's processor would call it; backend None is the one that xDiT was told to use."""
        from xfuser.model_executor.layers.usp import USP

        given = [x.transpose(1, 2) for x in (q, k, v)]
        joint: dict[str, Any] = {}
        if self.whole_text:
            last = self.text == "last"
            sizes = [q.shape[1] - self.text_tokens, self.text_tokens]
            pairs = [x.split(sizes if last else sizes[::-1], dim=2)[:: 1 if last else -1] for x in given]
            given = [video for video, _ in pairs]
            names = ("joint_query", "joint_key", "joint_value")
            joint = {name: words for name, (_, words) in zip(names, pairs, strict=True)} | {
                "joint_strategy": "rear" if last else "front"
            }
        out: Tensor = USP(*given, **self.options, **joint, backend=backend, attention_kwargs=self.extras)
        return out.transpose(1, 2)

    def run_usp_around(
        self,
        with_all_tokens: Callable[[Tensor, Tensor, Tensor, int], Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """with_all_tokens(q, k, v, text_tokens) sees every token of this rank's heads, in the order of one process."""
        from xfuser.core.distributed import get_ulysses_parallel_world_size

        ranks, text_tokens = get_ulysses_parallel_world_size(), self.text_tokens

        def between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not text_tokens:
                return with_all_tokens(q, k, v, 0)
            if self.whole_text:  # keys come with one text at the end or the start, queries with one per rank
                out = with_all_tokens(without_copies(q, ranks, text_tokens, self.text), k, v, text_tokens)
                return with_copies(out, ranks, text_tokens, self.text)
            q, k, v = (in_one_piece(x, ranks, text_tokens, self.text) for x in (q, k, v))
            return in_rank_pieces(with_all_tokens(q, k, v, text_tokens * ranks), ranks, text_tokens, self.text)

        token = _BETWEEN.set(between)
        try:
            return self.run_whole_usp(q, k, v, _BACKEND)
        finally:
            _BETWEEN.reset(token)

    def run_xdit_backend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """xDiT's own attention of what `with_all_tokens` was shown."""
        from xfuser.core.distributed import get_runtime_state
        from xfuser.core.distributed.attention_backend import ATTENTION_FUNCTION_REGISTRY

        function = ATTENTION_FUNCTION_REGISTRY[get_runtime_state().attention_backend]
        out: Tensor = function(*(x.transpose(1, 2) for x in (q, k, v)), **self.options, attention_kwargs=self.extras)[0]
        return out.transpose(1, 2)


def without_copies(x: Tensor, ranks: int, text_tokens: int, text: str) -> Tensor:
    """[video_0 text video_1 text ..] -> [video text], or the same with text first: [b n h d]."""
    whole = in_one_piece(x, ranks, text_tokens, text)
    copies = (ranks - 1) * text_tokens
    return whole[:, copies:] if text == "first" else whole[:, : whole.shape[1] - copies]


def with_copies(x: Tensor, ranks: int, text_tokens: int, text: str) -> Tensor:
    """The inverse of without_copies."""
    words = x[:, :text_tokens] if text == "first" else x[:, -text_tokens:]
    copies = [words] * (ranks - 1)
    return in_rank_pieces(torch.cat([*copies, x] if text == "first" else [x, *copies], 1), ranks, text_tokens, text)
