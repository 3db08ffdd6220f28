"""Attention in a compiled graph: the operator `parkattn::attention`.

It finds its processor by a number in a 0-dim tensor: a graph input, so that one graph serves every layer.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from parkattn.hosts.diffusers.processor import CallOptions, MethodProcessor, Tokens

# weak, so that a deleted pipeline takes its processors along
_PROCESSORS: weakref.WeakValueDictionary[int, MethodProcessor] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number_for_graphs(processor: MethodProcessor) -> None:
    """From now on graphs find the processor by its handle."""
    number = next(_NUMBERS)
    processor.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
    _PROCESSORS[number] = processor


def put_into_graph(processor: MethodProcessor, tokens: Tokens, options: CallOptions) -> Tensor:
    """While a graph is traced: the operator in place of the call. It takes tensors and numbers."""
    if options.extras or not isinstance(tokens.mask, (Tensor, type(None))):
        got = ", ".join(options.extras) or f"a {type(tokens.mask).__name__}"
        raise ValueError(
            f"attention: expected a call with tensors alone in a compiled transformer, got {got}; do not compile it."
        )
    flags = (options.scale, options.dropout, options.causal, options.parallel, options.by_head)
    calls = (options.part, options.usp, options.parts)
    return attention_in_graph(*tokens[:4], processor.handle, tokens.text_tokens, *flags, *calls)


@torch.library.custom_op("parkattn::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attention_in_graph(
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
    parts: int = 1,
) -> Tensor:
    processor = _PROCESSORS.get(int(handle))
    if processor is None:
        raise RuntimeError(
            "parkattn::attention: expected an enabled transformer, got a graph whose session is gone; compile it again."
        )
    options = CallOptions(scale, dropout, causal, parallel, by_head, part, usp, parts)
    return processor.choose_route(Tokens(q, k, v, mask, text_tokens), options, compiled=True).contiguous()


@attention_in_graph.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@attention_in_graph.register_autograd
def _(*_: Any) -> Any:
    raise RuntimeError(
        "parkattn::attention: expected a graph without gradients, got one; "
        "use torch.no_grad(), or do not compile to train."
    )
