"""The stock code of an attention processor, with other values behind a few of its names.

A copy of the stock `__call__` looks `dispatch_attention_fn`, `F` and `USP` up among globals of ours. So nothing of a
model is copied by hand, and a new release of diffusers brings its own code along.
"""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parkattn.compat import own_code
from parkattn.engine import Engine
from parkattn.hosts.diffusers.operator import number_for_graphs, put_into_graph
from parkattn.hosts.diffusers.processor import CallOptions, MethodProcessor, Tokens
from parkattn.hosts.diffusers.xdit import register_backend
from parkattn.models import ModelRow

# whose stock code is running, for stock code that hands nothing of its processor to the attention function
_RUNNING: contextvars.ContextVar[_Caller] = contextvars.ContextVar("parkattn_running_processor")


def replace_processor(
    attention: Any,
    engine: Engine,
    row: ModelRow,
    transformer: str,
    layer: int,
    on_compiled_call: Callable[[str, int], None],
) -> MethodProcessor:
    """Put a MethodProcessor in place of the attention module's own processor, and return it."""
    stock = attention.processor
    if isinstance(stock, MethodProcessor):  # saved while enabled, and set again later
        stock = stock.give_back()
    kind: Any = type(stock)
    made = processor_class_for(kind)(stock, engine, row, transformer, layer, on_compiled_call)
    number_for_graphs(made)
    set_processor(attention, made)
    return made


def set_processor(attention: Any, processor: Any) -> None:
    if hasattr(attention, "set_processor"):
        attention.set_processor(processor)
    else:  # Mochi's attention module has no such method
        attention.processor = processor


@functools.cache
def processor_class_for(stock: type) -> type[MethodProcessor]:
    """One class, and one copy of the stock code, for all layers: what a graph is compiled for."""
    stock_call: Any = stock.__call__
    code = getattr(stock_call, "__code__", None)
    names = set() if code is None else {*code.co_names, *code.co_consts}  # constants are getattr's
    functional = FunctionalStandIn()
    dispatchers = {"dispatch_attention_fn", "_dispatch_attention_fn"} & names
    hands_itself_over = bool(dispatchers) and "_attention_backend" in names
    if dispatchers:
        answer = dispatch_stand_in if hands_itself_over else functional.dispatch
        replaced: dict[str, Any] = {**dict.fromkeys(dispatchers, answer), "F": functional}
    elif {"USP", "attention_function"} & names:
        register_backend()
        replaced = {"USP": functional.usp}
    elif "scaled_dot_product_attention" in names:
        replaced = {"F": functional}
    else:
        raise ValueError(
            f"processor: expected one that calls dispatch_attention_fn, F.scaled_dot_product_attention or USP, got "
            f"{stock.__name__}; set the model's default processor before enable, or leave this model dense."
        )
    by_context, in_usp = not hands_itself_over, "USP" in replaced
    names_seen = {**stock_call.__globals__, **replaced}
    # by this name torch.compile would look globals up in the stock module, where cross-attention finds its own
    names_seen.pop("__name__")
    own = own_code(stock_call.__code__)
    copied: Any = types.FunctionType(
        own, names_seen, stock_call.__name__, stock_call.__defaults__, stock_call.__closure__
    )
    copied.__kwdefaults__ = stock_call.__kwdefaults__

    # the signature must stay the stock one: diffusers drops every keyword (RoPE!) that the signature does not name
    @functools.wraps(stock_call)
    def run_stock_code(self: MethodProcessor, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.retired:
            return stock_call(self.stock, attn, hidden_states, *args, **kwargs)
        if self.row.pair_mask and not in_usp and kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = KeyPadding(kwargs["attention_mask"])
        caller = _Caller(self, *hidden_states.shape[:2])
        seen_as = _StockSelf(caller, functional)
        if not by_context:
            return copied(seen_as, attn, hidden_states, *args, **kwargs)
        if torch.compiler.is_compiling():
            functional.traced = caller
            out = copied(seen_as, attn, hidden_states, *args, **kwargs)
            functional.traced = None
            return out
        token = _RUNNING.set(caller)
        try:
            return copied(seen_as, attn, hidden_states, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return type(
        f"Method{stock.__name__}", (MethodProcessor,), {"__call__": run_stock_code, "__doc__": MethodProcessor.__doc__}
    )


class _Caller:
    """The caller of the attention function."""

    def __init__(self, processor: MethodProcessor, batch: int, video_tokens: int) -> None:
        self.processor = processor
        self.batch = batch
        self.video_tokens = video_tokens
        self.calls = 0

    def answer(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: CallOptions) -> Tensor:
        device = q.device.type
        # torch 2.11 cannot trace is_autocast_available, which meta alone is not
        if device != "meta" and torch.is_autocast_enabled(device):
            # as it would for the stock attention, which q and k of norms in float32 reach with v in half precision
            q, k, v = (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        tokens = Tokens(q, k, v, mask, self.processor.row.text_tokens(q.shape[1], self.video_tokens))
        if torch.compiler.is_compiling():
            return put_into_graph(self.processor, tokens, options)
        return self.processor.choose_route(tokens, options)


class _StockSelf:
    """The `self` of stock code: the stock processor, except that its backend leads back to ours."""

    def __init__(self, caller: _Caller, functional: FunctionalStandIn) -> None:
        self._stock = caller.processor.stock
        self.attention_function = functional.usp  # where xDiT's processor of Wan keeps its USP
        # stock code passes these on to the attention function, which is how `dispatch_stand_in` learns who calls
        self._attention_backend = caller
        self._parallel_config = caller.processor._parallel_config
        self._cp_config = caller.processor._cp_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def dispatch_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
    cp_config: Any = None,
) -> Tensor:
    """In place of diffusers' dispatch_attention_fn, and of the one that cache-dit's parallelism puts there."""
    if enable_gqa and backend.processor.row.text == "keys":
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
        enable_gqa = False
    mask = attn_mask.valid[:, None, None, :] if isinstance(attn_mask, KeyPadding) else attn_mask
    spread = parallel_config is not None or cp_config is not None
    named = {"enable_gqa": enable_gqa, "attention_kwargs": attention_kwargs}
    extras = {name: given for name, given in named.items() if given}
    options = CallOptions(scale, dropout_p, is_causal, parallel=spread, extras=extras)
    return backend.answer(query, key, value, mask, options)


class FunctionalStandIn:
    """torch.nn.functional with our attention and a `pad` that knows KeyPadding; and xDiT's USP with our attention."""

    def __init__(self) -> None:
        # the caller while a graph is traced: torch.compile cannot follow a ContextVar
        self.traced: _Caller | None = None

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        caller, part = self._next_call()
        extras = {"enable_gqa": True} if enable_gqa else {}
        parts = caller.batch // query.shape[0]
        options = CallOptions(scale, dropout_p, is_causal, by_head=True, part=part, parts=parts, extras=extras)
        return caller.answer(q, k, v, attn_mask, options).transpose(1, 2)

    def dispatch(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of a dispatch_attention_fn that stock code hands no backend, as Cosmos' does."""
        return dispatch_stand_in(*args, **{**kwargs, "backend": self._next_call()[0]})

    def usp(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        joint_query: Tensor | None = None,
        joint_key: Tensor | None = None,
        joint_value: Tensor | None = None,
        joint_strategy: str | None = None,
        **_: Any,
    ) -> Tensor:
        """[b h s d]. The joint tensors are the text of a rank that holds all of it."""
        if joint_query is not None and joint_key is not None and joint_value is not None:
            pairs = ((query, joint_query), (key, joint_key), (value, joint_value))
            query, key, value = (torch.cat(pair[:: -1 if joint_strategy == "front" else 1], 2) for pair in pairs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        caller, part = self._next_call()
        usp = "share" if joint_query is None else "whole text"
        options = CallOptions(None, dropout_p, is_causal, part=part, usp=usp)
        return caller.answer(q, k, v, None, options).transpose(1, 2)

    def _next_call(self) -> tuple[_Caller, int]:
        caller = _RUNNING.get() if self.traced is None else self.traced
        caller.calls += 1
        return caller, caller.calls - 1

    def pad(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, KeyPadding):
            return KeyPadding(torch.nn.functional.pad(x.valid, *args, **kwargs))
        return torch.nn.functional.pad(x, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)


class KeyPadding:
    """A text mask [b s] that stock code expands to [b 1 n n]: every reshape on that way returns it as it is."""

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self.shape = valid.shape

    def bool(self) -> KeyPadding:
        return KeyPadding(self.valid.bool())

    def _itself(self, *_: Any) -> KeyPadding:
        return self

    view = repeat = transpose = __and__ = _itself
