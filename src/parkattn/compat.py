"""Every private name of torch and diffusers that is used, and what follows where a version lacks it.

| name | of | without it |
|---|---|---|
| `Module._compiled_call_impl`, `_call_impl` | torch | blocks are not compiled, forwards not forecast |
| `torch._dynamo`, `_stance`, `torch._C._len_torch_dispatch_stack` | torch | blocks are not compiled |
| `_has_any_global_hook`, `_forward_hooks`, `_forward_pre_hooks` | torch | blocks are not compiled |
| `torch._C._current_graph_task_id` | torch | a call under gradient checkpointing is not told from another |
| `is_traceable_wrapper_subclass`, `_orig_mod` | torch | subclasses of tensors are not compiled; a wrapper is unknown |
| `_templated_context_parallel_attention` | diffusers | attention spread over ranks is dense |
| `_ulysses_mesh` | diffusers | heads stay with their ranks |
| `_modeling_parallel` | diffusers | `sequence_parallel_plan` says so |
| `_diffusers_hook`, `_fn_refs` | diffusers | offloaded blocks are not compiled |
| `_is_stateful`, `_cache_config` | diffusers | caches of diffusers are not seen |
| `_reset_stateful_cache`, `_blocks` | diffusers | plans are dropped when the next run begins |

`own_code` relies on torch.compile filing graphs by code object.
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

END_OF_CALL = "_reset_stateful_cache"  # method of a transformer that every pipeline calls at its end
SEEN = {"torch": ("2.8", "2.15"), "diffusers": ("0.37", "0.42")}  # lowest and newest that make matrix has run


def lacking(package: str, name: str) -> str:
    """Why something is left out."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of an unknown version"
    return f"{package} {found} has no {name}, which {' to '.join(SEEN[package])} have"


# calls of a module


def why_not_intercepted() -> str | None:
    """None where `intercept_calls` works."""
    absent = [name for name in ("_compiled_call_impl", "_call_impl") if not hasattr(torch.nn.Module, name)]
    return lacking("torch", f"Module.{absent[0]}") if absent else None


def intercept_calls(module: Any, call: Callable[..., Any]) -> Callable[[], None]:
    """`call` runs in place of the module, its hooks included, unless it is compiled already.

    Returns how to take it off, which does not keep the module alive.
    """
    if why_not_intercepted() or module._compiled_call_impl is not None:
        return lambda: None
    of_module = weakref.ref(module)

    def undo() -> None:
        alive: Any = of_module()
        if alive is not None and alive._compiled_call_impl is call:
            del alive._compiled_call_impl

    module._compiled_call_impl = call
    return undo


stock_call = attrgetter("_call_impl")  # of a module, with its hooks, past `intercept_calls`


def why_hooks_are_not_known() -> str | None:
    """A hook that is on every module, or no way to see hooks."""
    ask = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    if ask is None:
        return lacking("torch", "_has_any_global_hook")
    return "a hook is on every module" if ask() else None


def has_hooks(module: Any) -> bool:
    return any(getattr(module, name, True) for name in ("_forward_hooks", "_forward_pre_hooks"))


def without_compile_wrapper(module: Any) -> Any:
    """torch.compile(module) keeps the module behind _orig_mod."""
    return getattr(module, "_orig_mod", module)


# the backward pass under way, in which a forward is computed again; -1: none
backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


# torch.compile


def why_compiler_is_off() -> str | None:
    """Asked before, because torch would run the block as it is and say so, in some releases, by an error afterwards."""
    try:
        from torch._dynamo import config, eval_frame, is_dynamo_supported

        modes = torch._C._len_torch_dispatch_stack()
    except (ImportError, AttributeError) as absent:
        return lacking("torch", getattr(absent, "name", None) or "torch._dynamo")
    if not is_dynamo_supported():
        return "torch.compile does not know this Python or this system"
    if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off"
    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")  # torch has no public way to ask
    if stance != "default":
        return f"torch.compiler.set_stance says {stance}"
    return f"inside {type(torch._C._get_dispatch_stack_at(0)).__name__}" if modes else None


def compiler_refusals() -> tuple[type[Exception], ...]:
    """Errors of a graph that cannot be made."""
    from torch._dynamo import exc

    # reaching the limit of recompilations is no TorchDynamoException, and has had two names
    limits = (getattr(exc, name, None) for name in ("FailOnRecompileLimitHit", "FailOnCacheLimitHit"))
    return exc.TorchDynamoException, *(limit for limit in limits if limit is not None)


def says_its_tensors(weights: Tensor) -> bool:
    """Whether a subclass of Tensor tells graphs which tensors it is made of."""
    try:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass
    except ImportError:
        return False
    return is_traceable_wrapper_subclass(weights)


def own_code(code: types.CodeType) -> types.CodeType:
    """A copy, inner functions too: torch.compile files graphs by code object, and their names among its globals."""
    return code.replace(
        co_consts=tuple(own_code(part) if isinstance(part, types.CodeType) else part for part in code.co_consts)
    )


# diffusers, imported by name: the engine reads this module, and knows no host


def context_parallel_attention() -> Callable[..., Tensor] | None:
    """Attention whose tokens are spread over ranks; None: this diffusers has it under another name."""
    dispatch = import_module("diffusers.models.attention_dispatch")
    found: Callable[..., Tensor] | None = getattr(dispatch, "_templated_context_parallel_attention", None)
    return found


def ulysses_mesh(degrees: Any) -> Any:
    """The ranks that share the heads of a call; None: this diffusers has them under another name."""
    return getattr(degrees, "_ulysses_mesh", None)


def context_parallel_parts() -> tuple[Any, Any]:
    """The types of inputs and outputs in a plan for context parallelism."""
    try:
        parts = import_module("diffusers.models._modeling_parallel")
    except ImportError:
        raise NotImplementedError(lacking("diffusers", "_modeling_parallel")) from None
    return parts.ContextParallelInput, parts.ContextParallelOutput


def diffusers_hooks(module: Any) -> Mapping[str, Any]:
    """Hooks of diffusers on a module, by name."""
    found: Mapping[str, Any] = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return found


def innermost_hook(module: Any) -> Any:
    """Where the hooks of diffusers call the module's own forward; None: nowhere that is known."""
    references = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())
    return references[0] if references else None


def step_cache(transformer: Any) -> str | None:
    """The name of a cache on a transformer that may leave out steps."""
    config = getattr(transformer, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    hooks = (pair for module in transformer.modules() for pair in diffusers_hooks(module).items())
    return next((name for name, hook in hooks if getattr(hook, "_is_stateful", False)), None)


def marked_as_cached(transformer: Any) -> bool:
    """cache-dit's mark."""
    return bool(getattr(transformer, "_is_cached", False))


def loops_of(pipeline: Any) -> list[Any]:
    """Objects with a progress bar: the pipeline, or in a modular one those of its blocks that loop."""
    found = [pipeline, getattr(pipeline, "_blocks", None)]
    for block in found:
        found += getattr(block, "sub_blocks", {}).values()
    return [loop for loop in found if hasattr(loop, "progress_bar")]
