"""Methods put on one instance, and how they come off again: nothing of a class is changed."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any


class _Shadow:
    """A method put on one instance. A copied or pickled instance has what was shadowed, as a method of its own."""

    def __init__(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        self.owner = weakref.ref(owner)
        self.name = name
        self.value = value
        self.shadowed = owner.__dict__.get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_method_of_class, (self.owner(), self.name)) if self.shadowed is None else (itself, (self.shadowed,))


def _method_of_class(owner: Any, name: str) -> Any:
    return types.MethodType(getattr(type(owner), name), owner)


def replaced_forward(module: Any) -> Any:
    """The forward on an instance, unless it is the class's: diffusers and accelerate leave that when hooks come off."""
    own = module.__dict__.get("forward")
    return None if own == types.MethodType(type(module).forward, module) else own


def itself(value: Any) -> Any:
    """For __reduce_ex__ of what is to come back as something else."""
    return value


def put_on_instance(owner: Any, name: str, value: Callable[..., Any]) -> Callable[[], None]:
    """Shadow a method on one instance; returns how to take it off, which does not keep the owner alive."""
    shadow = _Shadow(owner, name, value)
    setattr(owner, name, shadow)
    of_owner, of_value = weakref.ref(owner), weakref.ref(shadow)

    def undo() -> None:
        alive, ours = of_owner(), of_value()
        # somebody who shadowed it after us keeps their place
        if alive is None or ours is None or alive.__dict__.get(name) is not ours:
            return
        if ours.shadowed is None:
            del alive.__dict__[name]
        else:
            setattr(alive, name, ours.shadowed)

    return undo
