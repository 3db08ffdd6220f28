"""The stock attention processor, with its attention call handed to a method.

The stock `__call__` is kept as it is, projections, norms, RoPE and LoRA included; only the function that it looks up for
attention is another one. So nothing of a model is copied, and a new release of diffusers brings its own code along.

A compiled transformer calls the operator `parkattn::attention` instead, which finds its processor by a number in a 0-dim
tensor: a graph input, so that one graph serves every layer.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parkattn.integrations import xdit
from parkattn.integrations.sequence_parallel import attend_ulysses, in_one_piece, why_not_sparse
from parkattn.integrations.tracker import itself


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a model: q, k, v [b s h d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    text_tokens: int
    scale: float | None
    dense: Callable[[], Tensor]  # the stock attention of this call -> [b s h d]
    part: int = 0  # which call of the same layer: some stock code attends to one batch element after the other
    reason: str | None = None  # why the call must be dense
    compiled: bool = False


# how a compiled graph finds a processor; weak, so that a deleted pipeline takes its processors along
_PROCESSORS: weakref.WeakValueDictionary[int, MethodProcessor] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
# whose stock code is running, for stock code that hands nothing of its processor to the attention function
_RUNNING: contextvars.ContextVar[_Caller] = contextvars.ContextVar("parkattn_running_processor")
_SHARED = ("_attention_backend", "_parallel_config", "_cp_config")  # what diffusers sets on processors, and cache-dit


class MethodProcessor:
    """Stands in for one attention module's processor. Made by `replace_processor`."""

    _attention_backend: Any = None
    _parallel_config: Any = None
    _cp_config: Any = None

    def __init__(self, stock: Any, attend: Callable[[AttentionCall], Tensor], text: str, pair_mask: bool) -> None:
        self.stock = stock
        self.attend = attend
        self.text = text
        self.pair_mask = pair_mask
        for name in _SHARED:
            setattr(self, name, getattr(stock, name, None))
        number = next(_NUMBERS)
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        _PROCESSORS[number] = self

    def give_back(self) -> Any:
        """The stock processor, with the backend and the parallelism that were chosen in the meantime."""
        return self._share(self.stock)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copied or pickled transformer is a stock one: it is in no session, which alone could take us off again."""
        return itself, (self._share(copy.copy(self.stock)),)

    def _share(self, stock: Any) -> Any:
        for name in _SHARED:
            if getattr(self, name) is not getattr(self.stock, name, None):
                setattr(stock, name, getattr(self, name))
        return stock

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, text_tokens: int, options: CallOptions, compiled: bool = False
    ) -> Tensor:
        """Where the tokens of a sequence are spread over ranks, they are brought together first: [b s h d] -> [b s h d]."""
        if options.usp:
            return self._attend_in_usp(q, k, v, text_tokens, options, compiled)
        parallel = self._parallel_config if options.parallel else None
        # tensor parallelism spreads heads, not tokens
        if parallel is None or getattr(parallel, "context_parallel_config", parallel) is None:
            return self._attend(q, k, v, mask, text_tokens, options, compiled)
        if self._cp_config is not None and mask is not None and text_tokens:
            # cache-dit has put the mask into the order of the ranks already
            ranks = parallel.context_parallel_config.ulysses_degree or 1
            mask = in_one_piece(mask.permute(0, 3, 1, 2), ranks, text_tokens, self.text).permute(0, 2, 3, 1)
        refusal = why_not_sparse(parallel, text_tokens)
        if refusal is not None:
            dense = functools.partial(self._dense, q, k, v, mask, options, parallel)
            return self.attend(AttentionCall(q, k, v, mask, text_tokens, options.scale, dense, options.part, refusal, compiled))

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, text_tokens: int) -> Tensor:
            return self._attend(q, k, v, mask, text_tokens, options, compiled)

        return attend_ulysses(attend, q, k, v, mask, text_tokens, self.text, parallel, options.scale)

    def _attend_in_usp(self, q: Tensor, k: Tensor, v: Tensor, text_tokens: int, options: CallOptions, compiled: bool) -> Tensor:
        extras = getattr(self.stock, "attention_kwargs", None)
        exchange = xdit.Exchange(text_tokens, self.text, options.usp == "whole text", extras, options.dropout, options.causal)

        def call(q: Tensor, k: Tensor, v: Tensor, text_tokens: int, dense: Callable[..., Tensor], reason: str | None) -> Tensor:
            dense = functools.partial(dense, q, k, v)
            return self.attend(AttentionCall(q, k, v, None, text_tokens, options.scale, dense, options.part, reason, compiled))

        refusal = exchange.why_not_sparse()
        if refusal is not None:
            return call(q, k, v, text_tokens, exchange.stock, refusal)
        return exchange.attend(lambda q, k, v, text_tokens: call(q, k, v, text_tokens, exchange.dense, options.why_dense()), q, k, v)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, text_tokens: int, options: CallOptions, compiled: bool
    ) -> Tensor:
        dense = functools.partial(self._dense, q, k, v, mask, options, None)
        return self.attend(AttentionCall(q, k, v, mask, text_tokens, options.scale, dense, options.part, options.why_dense(), compiled))

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: CallOptions, parallel: Any) -> Tensor:
        if options.by_head:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=options.dropout, is_causal=options.causal, scale=options.scale
            )
            return out.transpose(1, 2)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=options.dropout,
            is_causal=options.causal,
            scale=options.scale,
            backend=self._attention_backend,
            parallel_config=parallel,
        )


@dataclass(frozen=True)
class CallOptions:
    scale: float | None = None
    dropout: float = 0.0
    causal: bool = False
    parallel: bool = False
    by_head: bool = False  # the stock code calls scaled_dot_product_attention itself
    part: int = 0
    usp: str = ""  # the stock code calls xDiT's USP: with each rank's "share" of the text, or the "whole text" on every rank

    def why_dense(self) -> str | None:
        if self.causal:
            return "the call is causal"
        return "the call has dropout" if self.dropout else None


class _Caller:
    """Who calls the attention function."""

    def __init__(self, processor: MethodProcessor, video_tokens: int) -> None:
        self.processor = processor
        self.video_tokens = video_tokens
        self.calls = 0


class _StockSelf:
    """What stock code sees as `self`: the stock processor, except that its backend leads back to ours."""

    def __init__(self, caller: _Caller, functional: _Functional) -> None:
        self._stock = caller.processor.stock
        self.attention_function = functional.usp  # where xDiT's processor of Wan keeps its USP
        # stock code passes these two on to the attention function, which is how `_dispatch` learns who calls
        self._attention_backend = caller
        self._parallel_config = caller.processor._parallel_config
        self._cp_config = caller.processor._cp_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class KeyPadding:
    """A text mask [b s] that withstands being blown up to [b 1 n n] by stock code: every step of that leaves it as it is."""

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self.shape = valid.shape

    def bool(self) -> KeyPadding:
        return KeyPadding(self.valid.bool())

    def view(self, *shape: int) -> KeyPadding:
        return self

    def repeat(self, *times: int) -> KeyPadding:
        return self

    def transpose(self, *axes: int) -> KeyPadding:
        return self

    def __and__(self, other: KeyPadding) -> KeyPadding:
        return self


class _Functional:
    """torch.nn.functional, with our attention, and with a `pad` that knows KeyPadding; and xDiT's USP, with our attention."""

    def __init__(self) -> None:
        self.traced: _Caller | None = None  # who calls, while a graph is traced: torch.compile cannot follow a ContextVar

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
        options = CallOptions(scale, dropout_p, is_causal, by_head=True, part=part)
        return _call(caller, q, k, v, attn_mask, options).transpose(1, 2)

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
        options = CallOptions(None, dropout_p, is_causal, part=part, usp="share" if joint_query is None else "whole text")
        return _call(caller, q, k, v, None, options).transpose(1, 2)

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


def _dispatch(
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
    mask = attn_mask.valid[:, None, None, :] if isinstance(attn_mask, KeyPadding) else attn_mask
    spread = parallel_config is not None or cp_config is not None
    return _call(backend, query, key, value, mask, CallOptions(scale, dropout_p, is_causal, parallel=spread))


def _call(caller: _Caller, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: CallOptions) -> Tensor:
    processor = caller.processor
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # torch 2.11 cannot trace is_autocast_available, which meta alone is not
        # as it would for the stock attention, which q and k of norms in float32 reach with v in half precision
        q, k, v = (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    text_tokens = 0 if processor.text == "none" else q.shape[1] - caller.video_tokens
    if torch.compiler.is_compiling():
        flags = (options.scale, options.dropout, options.causal, options.parallel, options.by_head, options.part, options.usp)
        return _attention_op(q, k, v, mask, processor.handle, text_tokens, *flags)
    return processor.attention(q, k, v, mask, text_tokens, options)


@torch.library.custom_op("parkattn::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    handle: Tensor,
    text_tokens: int,
    scale: float | None,
    dropout: float,
    causal: bool,
    parallel: bool,
    by_head: bool,
    part: int,
    usp: str = "",
) -> Tensor:
    processor = _PROCESSORS.get(int(handle))
    if processor is None:
        raise RuntimeError("parkattn::attention: expected an enabled transformer, got a graph whose session is gone; compile it again.")
    options = CallOptions(scale, dropout, causal, parallel, by_head, part, usp)
    return processor.attention(q, k, v, mask, text_tokens, options, compiled=True).contiguous()


@_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@_attention_op.register_autograd
def _(*_: Any) -> Any:
    raise RuntimeError("parkattn::attention: expected a graph without gradients, got one; use torch.no_grad(), or do not compile to train.")


def replace_processor(attention: Any, attend: Callable[[AttentionCall], Tensor], text: str, pair_mask: bool) -> MethodProcessor:
    """Put a MethodProcessor in place of the attention module's own processor, and return it."""
    stock: Any = type(attention.processor)
    made = _class_for(stock)(attention.processor, attend, text, pair_mask)
    set_processor(attention, made)
    return made


def set_processor(attention: Any, processor: Any) -> None:
    if hasattr(attention, "set_processor"):
        attention.set_processor(processor)
    else:  # Mochi's attention module has no such method
        attention.processor = processor


@functools.cache
def _class_for(stock: type) -> type[MethodProcessor]:
    """One class, and one copy of the stock code, for all layers: what a graph is compiled for."""
    stock_call: Any = stock.__call__
    code = getattr(stock_call, "__code__", None)
    names = {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))} if code is not None else set()  # and getattr's
    functional = _Functional()
    dispatchers = {"dispatch_attention_fn", "_dispatch_attention_fn"} & names
    if dispatchers and "_attention_backend" in names:
        replaced: dict[str, Any] = {**dict.fromkeys(dispatchers, _dispatch), "F": functional}
    elif {"USP", "attention_function"} & names:
        xdit.register_backend()
        replaced = {"USP": functional.usp}
    elif "scaled_dot_product_attention" in names:
        replaced = {"F": functional}
    else:
        raise ValueError(
            f"processor: expected one that hands its backend to dispatch_attention_fn, or calls F.scaled_dot_product_attention or USP, got "
            f"{stock.__name__}; set the model's default processor before enable, or leave this model dense."
        )
    by_context, in_usp = not dispatchers, "USP" in replaced
    names_seen = {**stock_call.__globals__, **replaced}
    # by this name torch.compile would look globals up in the stock module, where cross-attention finds its own
    names_seen.pop("__name__")
    copied: Any = types.FunctionType(stock_call.__code__, names_seen, stock_call.__name__, stock_call.__defaults__, stock_call.__closure__)
    copied.__kwdefaults__ = stock_call.__kwdefaults__

    # the signature must stay the stock one: diffusers drops every keyword (RoPE!) that a processor's signature does not name
    @functools.wraps(stock_call)
    def call(self: MethodProcessor, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.pair_mask and not in_usp and kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = KeyPadding(kwargs["attention_mask"])
        caller = _Caller(self, hidden_states.shape[1])
        if not by_context:
            return copied(_StockSelf(caller, functional), attn, hidden_states, *args, **kwargs)
        if torch.compiler.is_compiling():
            functional.traced = caller
            out = copied(_StockSelf(caller, functional), attn, hidden_states, *args, **kwargs)
            functional.traced = None
            return out
        token = _RUNNING.set(caller)
        try:
            return copied(_StockSelf(caller, functional), attn, hidden_states, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return type(f"Method{stock.__name__}", (MethodProcessor,), {"__call__": call, "__doc__": MethodProcessor.__doc__})
