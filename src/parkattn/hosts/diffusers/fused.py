"""The stock blocks around attention, compiled: their norms, RoPE and modulation in a few passes over the tokens instead
of dozens.

At 720p that saves a sixth to a fifth of a reuse forward. What is compiled is the stock code, once for all blocks of a
kind, and attention stays one operator in it. It is done by the attribute that `block.compile()` sets: whoever compiles
a block later takes our place.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parkattn import compat
from parkattn.checks import first_line, shown
from parkattn.hosts.diffusers.instances import replaced_forward

# steps x blocks x elements of hidden_states from which on compiling pays in one run: on an H200 it takes 15 s, and a
# fused block saves 7e-11 s per element (Wan2.1-1.3B, 14B and HunyuanVideo at 720p within 10 %),
# twice that with guidance
WORTH_IT = 1.5e11
COMPILER = "inductor"
FUSED = AS_ASKED, LARGE_ENOUGH = "yes, as asked", "yes, the run is large enough"  # outcomes of blocks that ran compiled
# names under which diffusers registers what offloads a group of blocks
OFFLOADING = frozenset({"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"})


class BlockFusion:
    """Which blocks run compiled, and why or why not; one per session.

    wanted: True and False as said; None means on a GPU, in runs that are large enough to pay for it.
    steps: of the run that is under way, where known.
    """

    def __init__(self, wanted: bool | None, steps: Callable[[], int | None] = lambda: None) -> None:
        if wanted is not None and not isinstance(wanted, bool):
            raise TypeError(
                f"fuse: expected True, False or None, got {shown(wanted)}; "
                "None lets the device and the size of the run decide."
            )
        self.wanted = wanted
        self._steps = steps
        self.outcomes: Counter[str] = Counter()  # since the run began, by calls of blocks
        self._refusal: str | None = None

    def attach(self, block: torch.nn.Module, blocks: int) -> Callable[[], None]:
        """blocks: how many the transformer has. Returns how to take it off, which does not keep the block alive."""
        if self.wanted is False:
            return lambda: None
        if (reason := compat.why_not_intercepted()) is not None:
            self.outcomes[f"no, {reason}"] += 1
        of_block = weakref.ref(block)

        def call_block(*args: Any, **kwargs: Any) -> Any:
            alive: Any = of_block()
            if torch.compiler.is_compiling():  # by the user
                return compat.stock_call(alive)(*args, **kwargs)
            return self._run_block(alive, blocks, *args, **kwargs)

        return compat.intercept_calls(block, call_block)

    def _run_block(self, block: Any, blocks: int, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        inside = _inside_offloading(block)
        reason = self._why_not(hidden, blocks) or _unseen_by_graphs(block, offloaded=inside is not None)
        if reason is not None:
            out = compat.stock_call(block)(*args, **kwargs)
            self.outcomes[f"no, {reason}"] += 1
            return out
        if inside is None:
            return self._run_compiled(block, compat.stock_call(block), *args, **kwargs)
        stock = inside.forward
        inside.forward = functools.partial(self._run_compiled, block, stock)
        try:
            return compat.stock_call(block)(*args, **kwargs)
        finally:
            inside.forward = stock

    def _run_compiled(self, block: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """plain: what runs where the compiler refuses."""
        kind: Any = type(block)
        try:
            out = _compiled(kind.forward, COMPILER)(block, *args, **kwargs)
            self.outcomes[AS_ASKED if self.wanted else LARGE_ENOUGH] += 1
            return out
        except compat.compiler_refusals() as failure:
            # a graph that cannot be made has not run, so nothing of this call has happened yet
            reason = f"torch.compile refused: {_in_one_line(failure)}"
        out = plain(*args, **kwargs)
        # only now: a block that fails by itself, on wrong inputs say, has told nothing about the compiler
        self._refusal = reason
        self.outcomes[f"no, {reason}"] += 1
        return out

    def _why_not(self, hidden: Tensor | None, blocks: int) -> str | None:
        """hidden [b n c]"""
        if self._refusal is not None:
            return self._refusal
        if torch.is_grad_enabled():
            return "gradients are on"
        if self.wanted is None:
            if hidden is None or hidden.device.type != "cuda":
                return "not on a GPU"
            steps = self._steps()
            if steps is None:
                return "the number of steps is not known"
            if steps * blocks * hidden.numel() < WORTH_IT:
                return f"{steps} steps of {hidden.shape[1]} tokens do not pay for compiling"
        return compat.why_compiler_is_off()


@functools.cache
def _compiled(forward: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    """The stock forward of a class of blocks; torch makes the graph in the first call."""
    return torch.compile(forward, fullgraph=True, backend=compiler)


def _in_one_line(failure: Exception) -> str:
    if "LimitHit" in type(failure).__name__:  # whose own words are "Hard failure"
        return "this block has as many graphs as torch._dynamo.config.recompile_limit allows"
    return first_line(failure)[:200]


def _inside_offloading(block: Any) -> Any:
    """Where block-level group offload calls the block's own forward; None where it is not all that is in between.

    Weights come and go outside of the forward, so a graph of the forward misses nothing of it.
    """
    innermost = compat.innermost_hook(block)
    if innermost is None or not OFFLOADING.issuperset(compat.diffusers_hooks(block)):
        return None
    return innermost if innermost.forward == types.MethodType(type(block).forward, block) else None


def _unseen_by_graphs(block: torch.nn.Module, offloaded: bool) -> str | None:
    """Why a graph of the block might not do what the block does.

    Hooks and replaced forwards (offloading, caches, context parallelism, a user's own) may change at any time.
    offloaded: the forward of the block itself is replaced by block-level group offload.
    """
    if (reason := compat.why_hooks_are_not_known()) is not None:
        return reason
    for name, module in block.named_modules():
        replaced = replaced_forward(module) is not None and not (offloaded and module is block)
        if replaced or compat.has_hooks(module):
            return f"a hook is on {name or 'the block'}"
        for weights in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not _known_to_graphs(weights):
                kind = type(weights).__name__
                return f"the weights of {name or 'the block'} are {kind}, which a graph may take for a plain tensor"
    return None


def _known_to_graphs(weights: Tensor) -> bool:
    """Plain tensors, and subclasses that say which tensors they are made of, as torchao's do.

    What others do in __torch_function__ or keep beside the tensor (GGUF, bitsandbytes) can be lost or leave the graph:
    with GGUF a compiled block returned its hidden states as a quantised weight.
    """
    return type(weights) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or compat.says_its_tensors(weights)
