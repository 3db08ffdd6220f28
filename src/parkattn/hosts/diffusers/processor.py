"""What stands in for the attention processor of one layer: it runs the stock code and answers its attention call.

The stock `__call__` is kept as it is, projections, norms, RoPE and LoRA included (`stand_ins.py`). Its attention call
comes here, finds all tokens of its heads (through `sequence_parallel.py` or `xdit.py` where they are spread over
ranks), and goes to the engine.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parkattn.engine import Engine
from parkattn.hosts.diffusers import xdit
from parkattn.hosts.diffusers.instances import itself
from parkattn.hosts.diffusers.sequence_parallel import (
    UlyssesRanks,
    mask_in_one_piece,
    mask_of_all_ranks,
    run_in_ulysses,
    why_not_balanced,
    why_not_ulysses,
)
from parkattn.hosts.packed import attend_packed
from parkattn.models import ModelRow

_UNKNOWN_LAYOUT = (
    "which tokens are the video is unknown: several videos or images in one sequence, or a transformer compiled whole; "
    "compile blocks alone (block.compile())"
)
_KEYS_SPREAD = "keys of text without queries cannot be told from the video's where ranks hold a part of them"
_SHARED = ("_attention_backend", "_parallel_config", "_cp_config")  # what diffusers sets on processors, and cache-dit


@dataclass(frozen=True)
class CallOptions:
    """Options of the stock code's attention call."""

    scale: float | None = None
    dropout: float = 0.0
    causal: bool = False
    parallel: bool = False
    by_head: bool = False  # the stock code calls scaled_dot_product_attention itself
    part: int = 0
    usp: str = ""  # the stock code calls xDiT's USP with a rank's "share" of the text, or with the "whole text"
    parts: int = 1  # calls of this layer in one forward
    extras: Mapping[str, Any] = field(default_factory=dict)  # what else the stock attention was asked for

    def why_dense(self) -> str | None:
        if self.causal:
            return "the call is causal"
        if self.extras:
            return f"the call has {', '.join(self.extras)}"
        return "the call has dropout" if self.dropout else None


class Tokens(NamedTuple):
    """Tokens of one attention call: q, k, v [b s h d], of which text_tokens are text."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    text_tokens: int


class MethodProcessor:
    """Stands in for one attention module's processor. Made by `stand_ins.replace_processor`.

    on_compiled_call(transformer, layer) is told of calls out of compiled graphs: they may be all one sees of a forward.
    """

    _attention_backend: Any = None
    _parallel_config: Any = None
    _cp_config: Any = None

    def __init__(
        self,
        stock: Any,
        engine: Engine,
        row: ModelRow,
        transformer: str,
        layer: int,
        on_compiled_call: Callable[[str, int], None],
    ) -> None:
        self.stock = stock
        self.retired = False
        self.engine = engine
        self.row = row
        self.transformer = transformer
        self.layer = layer
        self.handle = torch.tensor(-1, dtype=torch.int64, device="cpu")  # set where a graph can find this processor
        self._on_compiled_call = on_compiled_call
        for name in _SHARED:
            setattr(self, name, getattr(stock, name, None))

    def give_back(self) -> Any:
        """The stock processor, with the backend and the parallelism chosen meanwhile. From now on we only run it."""
        self.retired = True
        return self._share(self.stock)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copied or pickled transformer is a stock one: it is in no session, which alone could take us off again."""
        return itself, (self._share(copy.copy(self.stock)),)

    def _share(self, stock: Any) -> Any:
        for name in _SHARED:
            if getattr(self, name) is not getattr(self.stock, name, None):
                setattr(stock, name, getattr(self, name))
        return stock

    def choose_route(self, tokens: Tokens, options: CallOptions, compiled: bool = False) -> Tensor:
        """Where tokens are spread over ranks, they are brought together first: [b s h d] -> [b s h d]."""
        if compiled:
            self._on_compiled_call(self.transformer, self.layer)
        if options.usp:
            extras = getattr(self.stock, "attention_kwargs", None)
            exchange = xdit.Exchange(
                tokens.text_tokens, self.row.text, options.usp == "whole text", extras, options.dropout, options.causal
            )
            return self._route_usp(tokens, options, exchange)
        parallel = self._parallel_config if options.parallel else None
        # tensor parallelism spreads heads, not tokens
        if parallel is None or getattr(parallel, "context_parallel_config", parallel) is None:
            stock = functools.partial(self._stock_attention, tokens, options, None)
            if self.row.text == "keys":
                return self._route_keys(tokens, options, stock)
            return self._ask_engine(tokens, options, options.why_dense(), stock)
        if self.row.text == "keys":
            spread = functools.partial(self._stock_attention, tokens, options, parallel)
            return spread() if options.causal else self._ask_engine(tokens, options, _KEYS_SPREAD, spread)
        return self._route_ulysses(tokens, options, parallel)

    def _route_keys(self, tokens: Tokens, options: CallOptions, stock: Callable[[], Tensor]) -> Tensor:
        """[text | video | others] as keys, [video | others] as queries -> [text | others | video], text queries 0."""
        if options.causal:
            return stock()  # the text's own attention
        text, grid = tokens.k.shape[1] - tokens.q.shape[1], self.engine.clock.grid
        video = 0 if grid is None else math.prod(grid)
        if not 0 < video <= tokens.q.shape[1]:
            return self._ask_engine(tokens, options, _UNKNOWN_LAYOUT, stock)
        others = tokens.q.shape[1] - video

        def reordered(before: Tensor, x: Tensor) -> Tensor:
            return torch.cat([before, x[:, video:], x[:, :video]], 1)

        def stock_reordered() -> Tensor:
            even = tokens.v.mean(1, keepdim=True).expand(-1, text, -1, -1)  # what a query of 0 attends to
            return reordered(even, stock())

        q = reordered(tokens.q.new_zeros(tokens.q.shape[0], text, *tokens.q.shape[2:]), tokens.q)
        k, v = (reordered(x[:, :text], x[:, text:]) for x in (tokens.k, tokens.v))
        whole = Tokens(q, k, v, tokens.mask, text + others)
        out = self._ask_engine(whole, options, options.why_dense(), stock_reordered)
        return torch.cat([out[:, text + others :], out[:, text : text + others]], 1)

    def _route_ulysses(self, tokens: Tokens, options: CallOptions, parallel: Any) -> Tensor:
        tokens = self._with_text_before_video(tokens, parallel)
        refusal = why_not_ulysses(parallel, tokens.text_tokens)
        if refusal is not None:
            spread = functools.partial(self._stock_attention, tokens, options, parallel)
            return self._ask_engine(tokens, options, refusal, spread)

        mask, in_order_of_ranks = mask_of_all_ranks(tokens.mask, parallel, tokens.k.shape[1])
        if in_order_of_ranks or self._cp_config is not None:
            # cache-dit has put the mask into the order of the ranks already
            mask = mask_in_one_piece(mask, parallel, tokens.text_tokens, self.row.text)
        tokens = tokens._replace(mask=mask)
        fixed = why_not_balanced(parallel, tokens.q.shape[2], tokens.k.shape[2])
        order = None
        if fixed is None:
            order = self.engine.head_order(tokens.q.shape[0], **self._place(options))
        else:
            self.engine.log.unbalanced[fixed] += 1

        def with_all_tokens(*found: Any) -> Tensor:
            whole = Tokens(*found)
            stock = functools.partial(self._stock_attention, whole, options, None)
            ranks = UlyssesRanks(parallel) if fixed is None else None
            return self._ask_engine(whole, options, options.why_dense(), stock, ranks)

        if order is not None:
            q, k, v = (x.index_select(2, order) for x in tokens[:3])
            tokens = tokens._replace(q=q, k=k, v=v)
        out = run_in_ulysses(with_all_tokens, *tokens, self.row.text, parallel, options.scale)
        return out if order is None else out.index_select(2, order.argsort())

    def _with_text_before_video(self, tokens: Tokens, parallel: Any) -> Tokens:
        """Where the sequence is packed, only the grid says how much of a rank's share is text."""
        degrees, grid = getattr(parallel, "context_parallel_config", None), self.engine.clock.grid
        if not self.row.text_apart or grid is None or degrees is None:
            return tokens
        before = tokens.q.shape[1] - math.prod(grid) // (degrees.ulysses_degree or 1)
        return tokens._replace(text_tokens=max(before, 0))

    def _place(self, options: CallOptions) -> dict[str, Any]:
        return {"layer": self.layer, "transformer": self.transformer, "part": options.part, "parts": options.parts}

    def _route_usp(self, tokens: Tokens, options: CallOptions, exchange: xdit.Exchange) -> Tensor:
        q, k, v, _, _ = tokens
        refusal = exchange.why_not_usp()
        if refusal is not None:
            return self._ask_engine(tokens, options, refusal, functools.partial(exchange.run_whole_usp, q, k, v))

        self.engine.log.unbalanced["xDiT hands out heads by itself"] += 1

        def between_exchanges(q: Tensor, k: Tensor, v: Tensor, text_tokens: int) -> Tensor:
            whole = Tokens(q, k, v, None, text_tokens)
            stock = functools.partial(exchange.run_xdit_backend, q, k, v)
            return self._ask_engine(whole, options, options.why_dense(), stock)

        return exchange.run_usp_around(between_exchanges, q, k, v)

    def _ask_engine(
        self,
        tokens: Tokens,
        options: CallOptions,
        reason: str | None,
        stock: Callable[[], Tensor],
        ranks: UlyssesRanks | None = None,
    ) -> Tensor:
        """stock: the stock attention of these tokens -> [b s h d]."""
        key_valid, mask_reason = _key_valid(tokens.mask, tokens.q)
        text_tokens, length, grid = tokens.text_tokens, tokens.q.shape[1], self.engine.clock.grid
        if self.row.text == "packed":
            text_tokens = length - math.prod(grid) if grid is not None else length
            reason = reason or (_UNKNOWN_LAYOUT if not 0 <= text_tokens < length else None)
        site = self._place(options) | {
            "key_valid": key_valid,
            "scale": options.scale,
            "dense": lambda: stock().transpose(1, 2),
            "reason": reason or mask_reason,
            "ranks": ranks,
        }
        q, k, v = (x.transpose(1, 2) for x in tokens[:3])
        if self.row.text == "packed":
            references = self.engine.clock.references
            out = attend_packed(self.engine, q, k, v, before=text_tokens, references=references, **site)
        else:
            out = self.engine.attend(q, k, v, text=_text_span(self.row.text, text_tokens, length), **site)
        return out.transpose(1, 2)

    def _stock_attention(self, tokens: Tokens, options: CallOptions, parallel: Any) -> Tensor:
        given: dict[str, Any] = {
            "attn_mask": tokens.mask,
            "dropout_p": options.dropout,
            "is_causal": options.causal,
            "scale": options.scale,
            **options.extras,
        }
        if options.by_head:
            q, k, v = (x.transpose(1, 2) for x in tokens[:3])
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(*tokens[:3], **given, backend=self._attention_backend, parallel_config=parallel)


def _text_span(place: str, tokens: int, length: int) -> slice | None:
    if place == "none" or tokens == 0:
        return None
    return slice(length - tokens, length) if place == "last" else slice(0, tokens)


def _key_valid(mask: Any, q: Tensor) -> tuple[Tensor | None, str | None]:
    """A mask over keys alone becomes key_valid [b m]; any other, a flex BlockMask too, is a reason to stay dense."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):
        return None, f"the mask is a {type(mask).__name__}, which may be more than key padding"
    if mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0].expand(q.shape[0], -1), None
    return None, f"the mask {list(mask.shape)} of {mask.dtype} is more than key padding"
