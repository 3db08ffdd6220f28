"""One method on the transformers of one pipeline: who is replaced, when state goes, and how it all comes off again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parkattn.compat import END_OF_CALL, loops_of, without_compile_wrapper
from parkattn.engine import Engine, RunLog
from parkattn.engine.summary import Summary
from parkattn.hosts.diffusers.forwards import COMPILED, Forwards
from parkattn.hosts.diffusers.fused import BlockFusion
from parkattn.hosts.diffusers.instances import put_on_instance
from parkattn.hosts.diffusers.processor import MethodProcessor
from parkattn.hosts.diffusers.stand_ins import replace_processor, set_processor
from parkattn.hosts.diffusers.tracker import StepTracker
from parkattn.models import ModelRow, row_for
from parkattn.site import AttentionMethod

_UNKNOWN_STEP = (
    "the step is unknown: a compiled transformer without a scheduler; "
    "enable on the pipeline, or compile blocks alone (block.compile())"
)
_LOST = "another processor was set after enable; call enable again"
# which session a transformer belongs to; a deleted transformer takes its session along, which holds no transformer
_SESSIONS: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()


@dataclass
class _Attachment:
    """Everything put on one transformer, held weakly: a deleted pipeline frees its weights at once."""

    name: str
    transformer: weakref.ref[torch.nn.Module]
    processors: list[tuple[weakref.ref[Any], MethodProcessor]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def take_off(self) -> None:
        for of_attention, processor in reversed(self.processors):
            stock, attention = processor.give_back(), of_attention()
            if attention is not None and attention.processor is processor:
                set_processor(attention, stock)
        while self.undo:
            self.undo.pop()()

    def lost(self) -> int:
        return sum(
            getattr(of_attention(), "processor", None) is not processor for of_attention, processor in self.processors
        )


class Session:
    """One enable. A context manager: leaving it disables."""

    def __init__(
        self,
        target: Any,
        method: AttentionMethod,
        total_steps: int | None = None,
        fuse: bool | None = None,
        references: bool = False,
    ) -> None:
        transformers = transformers_of(target)
        rows = {name: row_for(transformer) for name, transformer in transformers.items()}
        self.advice: list[str] = []  # said in every summary
        # refuses a wrong fuse before anything is taken off
        self.engine = Engine(method, _UNKNOWN_STEP)
        self.fusing = BlockFusion(fuse, lambda: self.engine.clock.total_steps)
        for transformer in transformers.values():
            release(transformer)
        self.tracker = StepTracker(
            self.engine.clock, _SchedulerOf(target), self._begin_run, self.engine.end_run, total_steps, references
        )
        self._attached: list[_Attachment] = []
        self._undo: list[Callable[[], None]] = []  # of what is on the pipeline
        self._inside_call = self._began_at_latents = False  # of the pipeline
        self._runs_in_call = 0
        try:
            for name, transformer in transformers.items():
                self._attach(name, transformer, rows[name])
            if not isinstance(target, torch.nn.Module):
                self._follow_calls(target)
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        """Forget plans, statistics and the step: a run begins. Happens by itself where that can be seen."""
        self._clear()
        self.tracker.forget_run()

    def close(self) -> None:
        """Put every processor object back and forget all state."""
        while self._attached:
            self._take_off(self._attached[-1])
        while self._undo:
            self._undo.pop()()
        self.reset()

    def release(self, transformer: torch.nn.Module) -> None:
        """Let go of one transformer; the session goes on with the others, and is over without any."""
        for attached in [attached for attached in self._attached if attached.transformer() is transformer]:
            self._take_off(attached)
        if not self._attached:
            self.close()

    def summary(self) -> Summary:
        """Summary of the last generation, per layer and in all."""
        lost = sum(attached.lost() for attached in self._attached)
        self.engine.note_unseen_forwards(COMPILED)
        return _summary(
            self.method.name, self.engine.log, self.engine.state_bytes, self.fusing.outcomes, lost, self.advice
        )

    @property
    def method(self) -> AttentionMethod:
        """The method that answers the attention calls."""
        return self.engine.method

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def name_of(self, transformer: torch.nn.Module) -> str:
        """The pipeline's name of this transformer."""
        return next(attached.name for attached in self._attached if attached.transformer() is transformer)

    def lost(self, name: str) -> int:
        """Number of attention modules of a transformer that have another processor now."""
        return sum(attached.lost() for attached in self._attached if attached.name == name)

    def _attach(self, name: str, transformer: torch.nn.Module, row: ModelRow) -> None:
        attached = _Attachment(name, weakref.ref(transformer))
        self._attached.append(attached)
        for layer, attention in enumerate(row.attentions(transformer)):
            made = replace_processor(attention, self.engine, row, name, layer, self.tracker.at_layer)
            attached.processors.append((weakref.ref(attention), made))
        blocks = row.all_blocks(transformer)
        attached.undo += [self.fusing.attach(block, len(blocks)) for block in blocks]
        hooks, undo = self.tracker.attach(transformer, row)
        attached.undo += undo
        if self.engine.forecasts:
            attached.undo.append(Forwards(self.engine, name, hooks).attach(transformer))
        # what any pipeline calls at its end, one made by from_pipe included
        if hasattr(transformer, END_OF_CALL):
            attached.undo.append(self._follow(transformer, END_OF_CALL, Session._end_call))
        _SESSIONS[transformer] = self

    def _take_off(self, attached: _Attachment) -> None:
        self._attached.remove(attached)
        attached.take_off()
        transformer = attached.transformer()
        if transformer is not None and _SESSIONS.get(transformer) is self:
            del _SESSIONS[transformer]

    def _follow_calls(self, pipeline: Any) -> None:
        """Every pipeline checks its inputs first, denoises under a progress bar, and frees its hooks last."""
        if hasattr(pipeline, "check_inputs"):
            self._undo.append(self._follow(pipeline, "check_inputs", Session._begin_call))
        if hasattr(pipeline, "maybe_free_model_hooks"):
            self._undo.append(self._follow(pipeline, "maybe_free_model_hooks", Session._end_call))
        if hasattr(pipeline, "prepare_latents"):
            self._undo.append(self._follow(pipeline, "prepare_latents", receive=Session._see_latents))
        self._undo += [self._follow(loop, "progress_bar", receive=Session._watch) for loop in loops_of(pipeline)]

    def _follow(
        self,
        owner: Any,
        name: str,
        tell: Callable[[Session], None] = lambda session: None,
        receive: Callable[[Session, Any], Any] = lambda session, result: result,
    ) -> Callable[[], None]:
        """tell(session) before a call; receive(session, result) -> the caller's result. Returns how to take it off."""
        stock, of_session = getattr(owner, name), weakref.ref(self)

        def followed(*args: Any, **kwargs: Any) -> Any:
            if (session := of_session()) is not None:
                tell(session)
            result, session = stock(*args, **kwargs), of_session()
            return result if session is None else receive(session, result)

        return put_on_instance(owner, name, followed)

    def _see_latents(self, made: Any) -> Any:
        """Sets the number of videos, and the grid for a transformer compiled whole; others say it in every forward.

        A pipeline that checks no inputs begins its call here.
        """
        if not self._inside_call or self._began_at_latents:
            self._begin_call()
            self._began_at_latents = True
        transformer = self._attached[0].transformer()
        latents = made[0] if isinstance(made, tuple) else made
        self.engine.clock.videos = latents.shape[0] if isinstance(latents, torch.Tensor) else None
        if transformer is not None:
            grid, config = row_for(transformer).grid, getattr(transformer, "config", None)
            self.engine.clock.grid = grid({"hidden_states": latents}, config)
        return made

    def _watch(self, bar: Any) -> _WatchedBar:
        self.tracker.begin_loop(getattr(bar, "total", None))
        return _WatchedBar(bar, weakref.ref(self))

    def _begin_call(self) -> None:
        self._end_call()  # an earlier one may have failed where nobody saw it
        self.engine.clock.grid = self.engine.clock.videos = None
        self._inside_call = True

    def _end_call(self) -> None:
        """Plans, which may be a gigabyte, are not kept until the next video; the log stays."""
        self.engine.end_run()
        self.tracker.begin_loop(None)
        self.tracker.forget_run()
        self._inside_call = self._began_at_latents = False
        self._runs_in_call = 0

    def _clear(self) -> None:
        self.engine.reset()
        self.fusing.outcomes.clear()

    def _begin_run(self) -> None:
        """A pipeline's call may be several runs, one per chunk of a long video: new plans in each, one log for all."""
        if self._runs_in_call:
            self.engine.end_run()
        else:
            self._clear()
        self._runs_in_call += self._inside_call


class _WatchedBar:
    """A pipeline's progress bar, around its denoising loop: whatever ends the loop, plans are dropped at once."""

    def __init__(self, bar: Any, of_session: weakref.ref[Session]) -> None:
        self._bar = bar
        self._of_session = of_session

    def __enter__(self) -> Any:
        return self._bar.__enter__()

    def __exit__(self, kind: Any, *failure: Any) -> Any:
        session = self._of_session()
        if session is not None and kind is None:
            session.engine.end_run()
        elif session is not None:
            session._end_call()
        return self._bar.__exit__(kind, *failure)

    def __iter__(self) -> Any:
        """Some pipelines loop over the bar itself."""
        try:
            yield from self._bar
        finally:
            session = self._of_session()
            if session is not None:
                session.engine.end_run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


class _SchedulerOf:
    """The scheduler of a pipeline held weakly; of one that is gone, its last, which `from_pipe` has handed on."""

    def __init__(self, target: Any) -> None:
        self._target = weakref.ref(target)
        self._last: Any = getattr(target, "scheduler", None)

    def __call__(self) -> Any:
        target = self._target()
        if target is not None:
            self._last = getattr(target, "scheduler", None)
        return self._last


def session_of(target: Any) -> Session | None:
    return next(iter(sessions_of(target).values()), None)


def sessions_of(target: Any) -> dict[str, Session]:
    """By the name that a transformer has in target."""
    return {name: _SESSIONS[module] for name, module in transformers_of(target).items() if module in _SESSIONS}


def release(target: Any) -> None:
    """Let go of every transformer of target, in whichever way it was enabled."""
    for transformer in transformers_of(target).values():
        session = _SESSIONS.get(transformer)
        if session is not None:
            session.release(transformer)
        for module in transformer.modules():
            processor = getattr(module, "processor", None)
            if isinstance(processor, MethodProcessor):  # saved while enabled, and set again later
                set_processor(module, processor.give_back())


def summary_of(sessions: Mapping[str, Session], names: Mapping[str, str]) -> Summary:
    """names: what each transformer is called in its session, by what it is called here."""
    log, fused, lost = RunLog(), Counter[str](), 0
    different = list(dict.fromkeys(sessions.values()))
    for session in different:
        session.engine.note_unseen_forwards(COMPILED)
        own = {names[name]: name for name, of in sessions.items() if of is session}
        log.take(session.engine.log, own)
        fused.update(session.fusing.outcomes)
        lost += sum(session.lost(name) for name in own)
    methods = " + ".join(dict.fromkeys(session.method.name for session in different))
    advice = list(dict.fromkeys(line for session in different for line in session.advice))
    return _summary(methods, log, sum(session.engine.state_bytes for session in different), fused, lost, advice)


def _summary(method: str, log: RunLog, state_bytes: int, fused: Counter[str], lost: int, advice: list[str]) -> Summary:
    return Summary.of(method, log, state_bytes, dict(fused.most_common()), {_LOST: lost} if lost else {}, advice)


def transformers_of(target: Any) -> dict[str, torch.nn.Module]:
    """The denoising transformers of a pipeline by name (Wan2.2 has two), each once, or the transformer itself."""
    if isinstance(target, torch.nn.Module):
        return {"transformer": without_compile_wrapper(target)}
    found: dict[str, torch.nn.Module] = {}
    for name in ("transformer", "transformer_2", "transformer_ref"):
        module = without_compile_wrapper(getattr(target, name, None))
        if isinstance(module, torch.nn.Module) and not any(module is other for other in found.values()):
            found[name] = module
    if not found:
        raise TypeError(
            f"target: expected a diffusers pipeline with a transformer, or a transformer, got {type(target).__name__}; "
            "pass pipe or pipe.transformer."
        )
    return found
