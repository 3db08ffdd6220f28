"""Forwards of a transformer that are forecast instead of run, by the attribute that `transformer.compile()` sets.

It is what a call of the module enters first: a forecast wakes no hook that brings offloaded weights, and outputs are
those of all ranks. Whoever compiles the transformer later takes our place, and then every forward runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parkattn import compat
from parkattn.engine import Engine
from parkattn.engine.forecast import ForwardLog
from parkattn.hosts.diffusers.instances import replaced_forward
from parkattn.hosts.diffusers.tracker import ForwardHooks

COMPILED = "the transformer is compiled whole, so its forwards are not seen; use compile_repeated_blocks()"
_HARMLESS = ("diffusers.hooks", "accelerate")  # whose hooks may stand between a call and the forward of the class


class Forwards:
    """Between a pipeline and the forwards of one transformer."""

    def __init__(self, engine: Engine, name: str, hearing: ForwardHooks) -> None:
        self._engine, self._name, self._hearing = engine, name, hearing
        self._run: ForwardLog | None = None  # the log of the run that the transformer was looked at for
        self._cache: str | None = None  # of somebody else, on the transformer
        self._wraps: dict[Any, Callable[[Tensor], Any]] = {}  # form -> what a forward returns around its tensor

    def attach(self, transformer: Any) -> Callable[[], None]:
        """Returns how to take it off, which does not keep the transformer alive."""
        of_transformer = weakref.ref(transformer)

        def call(*args: Any, **kwargs: Any) -> Any:
            alive: Any = of_transformer()
            if torch.compiler.is_compiling():
                return compat.stock_call(alive)(*args, **kwargs)
            return self._call(alive, *args, **kwargs)

        return compat.intercept_calls(transformer, call)

    def _call(self, transformer: Any, *args: Any, **kwargs: Any) -> Any:
        engine, hearing = self._engine, self._hearing
        hearing.before(transformer, args, kwargs)
        log, given = engine.log.forwards, {**dict(zip(hearing.names, args, strict=False)), **kwargs}
        if log is not self._run:  # once a run: it looks at every module
            self._run, self._cache = log, other_cache(transformer)
            self._wraps.clear()
        off = self._cache or ("gradients are on" if torch.is_grad_enabled() else None)
        latents = given.get("hidden_states")
        form = (getattr(latents, "shape", None), getattr(latents, "dtype", None), given.get("return_dict", True))
        wrap = self._wraps.get(form)
        forecast = engine.forecast(self._name, form=form) if off is None else None
        if forecast is not None and wrap is not None:
            out = wrap(forecast)
            hearing.after(transformer, args, out)
            return out
        hearing.told = True
        try:
            out = compat.stock_call(transformer)(*args, **kwargs)
        finally:
            hearing.told = False
        found = _unwrapped(out)
        if found is None:
            off = off or f"{type(transformer).__name__} returns more than one tensor"
        if off is None and found is not None:
            self._wraps[form] = found[1]
            engine.learn(found[0], self._name, form=form)
        else:
            log.off[str(off)] += 1
        return out


def _unwrapped(out: Any) -> tuple[Tensor, Callable[[Tensor], Any]] | None:
    """The one tensor that a forward returns, and how to return another; None where it returns more."""
    if isinstance(out, tuple) and len(out) == 1 and isinstance(out[0], Tensor):
        return out[0], lambda tensor: (tensor,)
    if isinstance(out, Mapping) and len(out) == 1:
        kind, ((name, tensor),) = type(out), out.items()
        return (tensor, lambda another: kind(**{name: another})) if isinstance(tensor, Tensor) else None
    return None


def other_cache(transformer: Any) -> str | None:
    """Why somebody else may leave out steps of this transformer: forecasts beside theirs would be of forecasts."""
    if (name := compat.step_cache(transformer)) is not None:
        return f"the transformer has a step cache: {name}"
    own = replaced_forward(transformer)
    source = getattr(own.func if isinstance(own, functools.partial) else own, "__module__", None) or ""
    if compat.marked_as_cached(transformer) or (own is not None and not source.startswith(_HARMLESS)):
        return f"the transformer's forward is replaced, as step caches do it, by {source or 'an unknown module'}"
    return None
