"""The stock code around an attention call as one compiled graph: norms and RoPE in one pass over q and k instead of a dozen.

What is compiled is the processor's own stock code, nothing of a model is written anew, and attention stays one operator in it. Eager,
these passes cost as much as a fifth of the sparse attention itself at 720p; what compiles a whole block saves more, and is up to the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LONG = 30_000  # tokens from which on a run is minutes long, and the seconds of compiling once are worth it
COMPILER = "inductor"


class Fusing:
    """Whether the stock code around attention is compiled, and why or why not; one per session.

    wanted: True and False as said; None means on a GPU, for long sequences.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted
        self.reason = "nothing has run yet"
        self._failure: str | None = None

    def applies_to(self, hidden_states: Tensor) -> bool:
        """hidden_states [b n c]. Inside a graph of the user's there is nothing left to compile."""
        if torch.compiler.is_compiling():
            return False
        refusal = self._why_not(hidden_states)
        self.reason = (
            f"no: {refusal}" if refusal is not None else f"yes: {hidden_states.shape[1]} tokens" if self.wanted is None else "yes: as asked"
        )
        return refusal is None

    def _why_not(self, hidden_states: Tensor) -> str | None:
        if self.wanted is False:
            return "as asked"
        if self._failure is not None:
            return self._failure
        if torch.is_grad_enabled():
            return "gradients are on"
        if self.wanted is None and hidden_states.device.type != "cuda":
            return f"on {hidden_states.device.type}"
        if self.wanted is None and hidden_states.shape[1] < LONG:
            return f"{hidden_states.shape[1]} tokens, fewer than {LONG}"
        return None

    def call(self, compiled: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """compiled(...), or plain(...) from the first time on that the compiler refuses; what attention itself raises is raised."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as failure:
            # a graph that cannot be made has not run, so nothing of this call has happened yet
            self._failure = f"torch.compile refused: {str(failure).strip().splitlines()[0][:200]}"
            self.reason = f"no: {self._failure}"
        return plain(*args, **kwargs)


def compile_later(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    """plain, compiled in the first call: importing the compiler takes seconds that not everybody needs.

    name: of the stock class, which gets graphs of its own; torch counts them by code object, and gives up on one that has many.
    """
    plain.__code__ = plain.__code__.replace(co_name=f"{plain.__code__.co_name} of {name}")
    made: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(torch.compile(plain, fullgraph=True, backend=COMPILER))
        return made[0](*args, **kwargs)

    return call
