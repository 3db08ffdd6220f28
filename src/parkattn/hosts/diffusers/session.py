"""One method on the transformers of one pipeline: who is replaced, what is remembered, and how it all comes off again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from parkattn.engine import Engine
from parkattn.engine.summary import Summary
from parkattn.hosts.diffusers.fused import Fusing
from parkattn.hosts.diffusers.instances import put_on_instance
from parkattn.hosts.diffusers.processor import MethodProcessor
from parkattn.hosts.diffusers.stand_ins import replace_processor, set_processor
from parkattn.hosts.diffusers.tracker import StepTracker
from parkattn.models import row_for, without_compile_wrapper
from parkattn.site import AttentionMethod

_UNKNOWN_STEP = "the step is unknown: a compiled transformer without a scheduler; enable on the pipeline, or compile_repeated_blocks"
_LOST = "another processor was set after enable; call enable again"
# which session a transformer belongs to; a deleted transformer takes its session along, which holds no transformer
_SESSIONS: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()


class Session:
    """A context manager: leaving it disables."""

    def __init__(self, target: Any, method: AttentionMethod, total_steps: int | None = None, fuse: bool | None = None) -> None:
        transformers = transformers_of(target)
        rows = {name: row_for(transformer) for name, transformer in transformers.items()}
        # refuses a wrong fuse before anything is taken off
        self.engine = Engine(method, _UNKNOWN_STEP)
        self.fusing = Fusing(fuse, lambda: self.engine.clock.total_steps)
        for transformer in transformers.values():
            close_session_of(transformer)
        self.tracker = StepTracker(self.engine.clock, functools.partial(_scheduler, weakref.ref(target)), self.reset, total_steps)
        self._undo: list[Callable[[], None]] = []
        self._transformers = [weakref.ref(transformer) for transformer in transformers.values()]
        # weak: a deleted pipeline frees its weights at once
        self._processors: list[tuple[str, int, weakref.ref[Any], MethodProcessor]] = []
        try:
            for name, transformer in transformers.items():
                row = rows[name]
                for layer, attention in enumerate(row.attentions(transformer)):
                    made = replace_processor(attention, self.engine, row, name, layer, self.tracker.at_layer)
                    self._processors.append((name, layer, weakref.ref(attention), made))
                blocks = row.all_blocks(transformer)
                self._undo += [self.fusing.attach(block, len(blocks)) for block in blocks]
                self.tracker.attach(transformer, row)
                _SESSIONS[transformer] = self
            self._follow_end_of_run(target)
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        """Forget plans and statistics. Happens by itself when a run begins."""
        self.engine.reset()
        self.fusing.outcomes.clear()

    def close(self) -> None:
        """Put every processor object back and forget all state."""
        for _, _, of_attention, processor in reversed(self._processors):
            stock, attention = processor.give_back(), of_attention()
            if attention is not None and attention.processor is processor:
                set_processor(attention, stock)
        self._processors.clear()
        self.tracker.detach()
        self.reset()
        for reference in self._transformers:
            transformer = reference()
            if transformer is not None and _SESSIONS.get(transformer) is self:
                del _SESSIONS[transformer]
        while self._undo:
            self._undo.pop()()

    def summary(self) -> Summary:
        lost = sum(getattr(attention(), "processor", None) is not made for _, _, attention, made in self._processors)
        missed, fused = ({_LOST: lost} if lost else {}), dict(self.fusing.outcomes.most_common())
        return Summary.of(self.method.name, self.engine.log, self.method.state_bytes, fused, missed)

    @property
    def method(self) -> AttentionMethod:
        return self.engine.method

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _follow_end_of_run(self, target: Any) -> None:
        """Pipelines end with maybe_free_model_hooks: plans, which may be a gigabyte, are not kept until the next video."""
        if not hasattr(target, "maybe_free_model_hooks"):
            return
        stock, session = target.maybe_free_model_hooks, weakref.ref(self)

        def maybe_free_model_hooks() -> None:
            alive = session()
            if alive is not None:
                alive._end_run()
            stock()

        self._undo.append(put_on_instance(target, "maybe_free_model_hooks", maybe_free_model_hooks))

    def _end_run(self) -> None:
        self.engine.end_run()
        self.tracker.forget_run()


def session_of(target: Any) -> Session | None:
    for transformer in transformers_of(target).values():
        if transformer in _SESSIONS:
            return _SESSIONS[transformer]
    return None


def close_session_of(target: Any) -> None:
    session = session_of(target)
    if session is not None:
        session.close()


def transformers_of(target: Any) -> dict[str, torch.nn.Module]:
    """The denoising transformers of a pipeline (Wan2.2 has two), or the transformer itself."""
    if isinstance(target, torch.nn.Module):
        return {"transformer": without_compile_wrapper(target)}
    found = {name: getattr(target, name, None) for name in ("transformer", "transformer_2")}
    present = {name: without_compile_wrapper(module) for name, module in found.items() if isinstance(module, torch.nn.Module)}
    if not present:
        raise TypeError(
            f"target: expected a diffusers pipeline with a transformer, or a transformer, got {type(target).__name__}; "
            "pass pipe or pipe.transformer."
        )
    return present


def _scheduler(target: weakref.ref[Any]) -> Any:
    return getattr(target(), "scheduler", None)
