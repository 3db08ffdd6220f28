"""One method on the transformers of one pipeline: who is replaced, what is remembered, and how it all comes off again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parkattn.integrations.fused import Fusing
from parkattn.integrations.models import row_for, without_compile_wrapper
from parkattn.integrations.processor import AttentionCall, MethodProcessor, replace_processor, set_processor
from parkattn.integrations.summary import RunLog, Summary, stopwatch
from parkattn.integrations.tracker import StepTracker, put_on_instance
from parkattn.site import AttentionMethod, AttentionStats, CallSite

# which session a transformer belongs to; a deleted transformer takes its session along, which holds no transformer
_SESSIONS: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()


class Session:
    """A context manager: leaving it disables."""

    def __init__(self, target: Any, method: AttentionMethod, total_steps: int | None = None, fuse: bool | None = None) -> None:
        transformers = transformers_of(target)
        rows = {name: row_for(transformer) for name, transformer in transformers.items()}
        # refuses a wrong fuse before anything is taken off
        self.fusing = Fusing(fuse, lambda: self.tracker.total_steps)
        for transformer in transformers.values():
            close_session_of(transformer)
        self.method = method
        self.log = RunLog()
        self.tracker = StepTracker(functools.partial(_scheduler, weakref.ref(target)), self.reset, total_steps)
        self._undo: list[Callable[[], None]] = []
        self._transformers = [weakref.ref(transformer) for transformer in transformers.values()]
        # weak: a deleted pipeline frees its weights at once
        self._processors: list[tuple[str, int, weakref.ref[Any], MethodProcessor]] = []
        try:
            for name, transformer in transformers.items():
                row = rows[name]
                for layer, attention in enumerate(row.attentions(transformer)):
                    attend = functools.partial(self._attend, name, layer, row.text)
                    made = replace_processor(attention, attend, row.text, row.pair_mask)
                    self._processors.append((name, layer, weakref.ref(attention), made))
                blocks = row.all_blocks(transformer)
                self._undo += [self.fusing.attach(block, len(blocks)) for block in blocks]
                self.tracker.attach(transformer)
                _SESSIONS[transformer] = self
            self._follow_end_of_run(target)
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        """Forget plans and statistics. Happens by itself when a run begins."""
        self.method.reset()
        self.log.clear()
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
        lost = [
            (name, layer)
            for name, layer, attention, processor in self._processors
            if getattr(attention(), "processor", None) is not processor
        ]
        return Summary.of(self.method.name, self.log, self._state_bytes(), dict(self.fusing.outcomes.most_common()), lost)

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
        self.log.peak_state_bytes = self._state_bytes()
        self.method.reset()
        self.tracker.forget_run()

    def _state_bytes(self) -> int:
        return self.method.state_bytes

    def _attend(self, transformer: str, layer: int, text: str, call: AttentionCall) -> Tensor:
        tracker = self.tracker
        if call.compiled:
            tracker.at_layer(transformer, layer)
        key_valid, mask_reason = _key_valid(call.mask, call.q)
        site = CallSite(
            layer=layer,
            step=tracker.step or 0,
            total_steps=tracker.total_steps,
            branch=tracker.branch if call.part == 0 else f"{tracker.branch}, part {call.part}",
            transformer=transformer,
            grid=tracker.grid,
            text=_text_span(text, call.text_tokens, call.q.shape[1]),
            scale=call.scale,
            key_valid=key_valid,
            dense=lambda: call.dense().transpose(1, 2),
        )
        reason = call.reason or mask_reason
        if reason is None and tracker.step is None:
            reason = "the step is unknown: a compiled transformer without a scheduler; enable on the pipeline, or compile_repeated_blocks"
        stop = stopwatch(call.q.device)
        if reason is not None:
            out = call.dense()
            self.log.add(site, AttentionStats("dense", reason, call.q.new_ones(call.q.shape[0], call.q.shape[2])), stop())
            return out
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        out, stats = self.method(q, k, v, site)
        self.log.add(site, stats, stop())
        return out.transpose(1, 2)


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


def _text_span(place: str, tokens: int, length: int) -> slice | None:
    if place == "none" or tokens == 0:
        return None
    return slice(0, tokens) if place == "first" else slice(length - tokens, length)


def _key_valid(mask: Tensor | None, q: Tensor) -> tuple[Tensor | None, str | None]:
    """A mask over keys alone becomes key_valid [b m]; any other mask is a reason to stay dense."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0].expand(q.shape[0], -1), None
    return None, f"the mask {list(mask.shape)} of {mask.dtype} is more than key padding"
