"""The stock blocks around attention, compiled: their norms, RoPE and modulation in a few passes over the tokens instead of dozens.

At 720p those passes take nearly as long as the sparse attention. What is compiled is the stock code, once for all blocks of a kind, and
attention stays one operator in it. It is done by the attribute that `block.compile()` sets: whoever compiles a block later takes our place.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LONG = 30_000  # tokens from which on a run takes minutes, and compiling once is worth its seconds
COMPILER = "inductor"


class Fusing:
    """Which blocks run compiled, and why or why not; one per session.

    wanted: True and False as said; None means on a GPU, for long sequences.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted
        self.outcomes: Counter[str] = Counter()  # since the run began, by calls of blocks
        self._refusal: str | None = None

    def attach(self, block: torch.nn.Module) -> Callable[[], None]:
        """Returns how to take it off, which does not keep the block alive."""
        if self.wanted is False or block._compiled_call_impl is not None:
            return lambda: None
        of_block = weakref.ref(block)

        def call(*args: Any, **kwargs: Any) -> Any:
            alive: Any = of_block()
            if torch.compiler.is_compiling():  # by the user
                return alive._call_impl(*args, **kwargs)
            return self._call(alive, *args, **kwargs)

        def undo() -> None:
            alive: Any = of_block()
            if alive is not None and alive._compiled_call_impl is call:
                del alive._compiled_call_impl

        block._compiled_call_impl = call
        return undo

    def _call(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs["hidden_states"]
        reason = self._why_not(tokens) or _hooks_in(block)
        if reason is None:
            from torch._dynamo.exc import TorchDynamoException

            try:
                kind: Any = type(block)
                out = _compiled(kind, COMPILER)(block, *args, **kwargs)
                self.outcomes["yes, as asked" if self.wanted else f"yes, {tokens.shape[1]} tokens"] += 1
                return out
            except TorchDynamoException as failure:
                # a graph that cannot be made has not run, so nothing of this call has happened yet
                self._refusal = reason = f"torch.compile refused: {str(failure).strip().splitlines()[0][:200]}"
        self.outcomes[f"no, {reason}"] += 1
        return block._call_impl(*args, **kwargs)

    def _why_not(self, tokens: Tensor) -> str | None:
        """tokens [b n c]"""
        if self._refusal is not None:
            return self._refusal
        if torch.is_grad_enabled():
            return "gradients are on"
        if self.wanted is None and tokens.device.type != "cuda":
            return f"on {tokens.device.type}"
        if self.wanted is None and tokens.shape[1] < LONG:
            return f"{tokens.shape[1]} tokens, fewer than {LONG}"
        return None


@functools.cache
def _compiled(kind: type[torch.nn.Module], compiler: str) -> Callable[..., Any]:
    """The stock forward of a class of blocks; torch makes the graph in the first call."""
    return torch.compile(kind.forward, fullgraph=True, backend=compiler)


def _hooks_in(block: torch.nn.Module) -> str | None:
    """Hooks and replaced forwards (offloading, caches, context parallelism, a user's own) may change at any time, unseen by a graph."""
    for name, module in block.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return f"a hook is on {name or 'the block'}"
    return None
