"""Where a generation stands: step, number of steps, branch and token grid, read without touching the GPU.

One tracker per pipeline, so that Wan2.2's second expert does not restart the warm-up. Sources of the step, best first:
the pipeline's cache context (step_index), the scheduler's counters, and, where neither counts, `timesteps.py`.
Everything is put on instances and taken off again.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parkattn.engine import Clock
from parkattn.hosts.diffusers.instances import put_on_instance
from parkattn.hosts.diffusers.timesteps import MOST_BRANCHES, TimestepCounter
from parkattn.models import Grid, ModelRow


class StepTracker:
    """Sets a clock by what a pipeline does.

    scheduler_of returns the pipeline's scheduler, which users may replace between runs; None for a bare transformer.
    begin_run is called when a run begins, drop_plans when plans are of no use any more, while the log goes on.
    references: the clock is also told of those that are videos.
    """

    def __init__(
        self,
        clock: Clock,
        scheduler_of: Callable[[], Any],
        begin_run: Callable[[], None],
        drop_plans: Callable[[], None],
        total_steps: int | None = None,
        references: bool = False,
    ) -> None:
        self.clock = clock
        self.references = references
        clock.total_steps = total_steps
        clock.branch = "forward 0"
        self._scheduler_of = scheduler_of
        self._begin_run = begin_run
        self._drop_plans = drop_plans
        self._context: tuple[str, dict[str, Any]] | None = None
        self._layers_seen: set[tuple[str, int]] = set()
        self._by_timestep = TimestepCounter()
        self._iterations: int | None = None  # of the pipeline's loop, where known
        self.forget_run()

    def forget_run(self) -> None:
        """Whatever comes next begins a run."""
        self.clock.step = None
        self._run: Any = None  # the scheduler's timesteps: a new tensor for every run
        self._begun = False
        # branch -> contexts opened in this run, the present one included
        self._opened = Counter[str]([] if self._context is None else [self._context[0]])
        self._by_timestep.forget()
        self._forwards_in_step = 0
        self._inside_forward = False

    def begin_loop(self, iterations: int | None) -> None:
        """The pipeline's denoising loop begins; None: it is over, or nobody knows how long it is."""
        self._iterations = iterations
        self._opened.clear()

    def attach(self, transformer: torch.nn.Module, row: ModelRow) -> tuple[ForwardHooks, list[Callable[[], None]]]:
        """Returns what hears of its forwards, and how to take it off."""
        names = [name for name in inspect.signature(type(transformer).forward).parameters if name != "self"]
        hooks = ForwardHooks(self, row, names)
        undo = [
            transformer.register_forward_pre_hook(hooks.before, with_kwargs=True).remove,
            transformer.register_forward_hook(hooks.after, always_call=True).remove,
        ]
        if hasattr(transformer, "cache_context"):
            undo.append(self._follow_contexts(transformer))
        return hooks, undo

    def begin_forward(self, arguments: dict[str, Any] | None, training: bool = False) -> None:
        """arguments of the transformer's forward; None where they are not known."""
        scheduler = self._scheduler_of()
        timesteps = getattr(scheduler, "timesteps", None)
        # an interruption inside a transformer that has no scheduler shows only in a forward that never ended
        aborted = self._inside_forward and scheduler is None
        if aborted or timesteps is not self._run:
            self.forget_run()
        self._inside_forward = arguments is not None
        begins, self._begun, self._run = not self._begun, True, timesteps
        name, facts = self._context or (None, {})
        step, branch = facts.get("step_index"), name
        step = _counter(scheduler) if step is None else int(step)
        total = len(timesteps) if timesteps is not None else facts.get("num_inference_steps")
        if step is None and name is not None and total is not None and (self._iterations or 0) > total:
            # frames that begin one after the other, as SkyReels' may: the loop is longer than any frame's timesteps
            step, total = self._opened[name] - 1, self._iterations
        if step is None and arguments is not None and arguments.get("timestep") is not None:
            schedule = timesteps.tolist() if isinstance(timesteps, torch.Tensor) else []
            step, branch, another = self._by_timestep.count(arguments, name, schedule, training)
            begins, branch = begins or another, branch or name
        elif step is None and timesteps is not None:
            # a compiled transformer, and a scheduler that never counts, or not before its first step: a branch opens
            # one context per step
            step = self._opened[name] - 1 if name is not None else 0 if begins else None
        if begins or (step is not None and self.clock.step is not None and step < self.clock.step):
            self._begin_run()
        # a pipeline that opens no context runs its branches one after the other
        self._forwards_in_step = self._forwards_in_step + 1 if step == self.clock.step and not begins else 0
        if branch is None and self._forwards_in_step >= MOST_BRANCHES:
            self._drop_plans()
        self.clock.branch = branch if branch is not None else f"forward {self._forwards_in_step}"
        self.clock.step = step
        self.clock.total_steps = total if total is not None else self.clock.total_steps
        if begins:
            self.clock.noise_levels = _noise_levels(scheduler)
        self._layers_seen.clear()

    def end_forward(self, failed: bool = False) -> None:
        self._inside_forward = False
        if failed:
            self._drop_plans()
            self.forget_run()

    def at_layer(self, transformer: str, layer: int) -> None:
        """Forwards of a transformer compiled whole are not seen: a layer that comes again begins one."""
        if self._inside_forward:
            return
        if not self._layers_seen or (transformer, layer) in self._layers_seen:
            self.begin_forward(None)
        self._layers_seen.add((transformer, layer))

    def _follow_contexts(self, transformer: Any) -> Callable[[], None]:
        stock = transformer.cache_context

        @contextlib.contextmanager
        def cache_context(name: str, *args: Any, **facts: Any) -> Iterator[None]:
            self._context = (name, facts)
            self._opened[name] += 1
            self._layers_seen.clear()
            try:
                with stock(name, *args, **facts):
                    yield
            finally:
                self._context = None

        return put_on_instance(transformer, "cache_context", cache_context)


class ForwardHooks:
    """Forwards of one transformer, told to the tracker. Copied or pickled along with it, hooks do nothing."""

    def __init__(self, tracker: StepTracker | None, row: ModelRow | None, names: list[str]) -> None:
        self.tracker = tracker
        self.row = row
        self.names = names  # of the arguments of forward
        self.told = False  # of the forward under way, by whoever called it
        # the last argument that was read, and what it says
        self._read: tuple[weakref.ref[Any], Grid | None, tuple[range, ...]] | None = None

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # in a graph nothing may depend on the step; attention then asks for the position itself (`at_layer`)
        if torch.compiler.is_compiling() or self.told or self.tracker is None or self.row is None:
            return
        arguments, clock = {**dict(zip(self.names, args, strict=False)), **kwargs}, self.tracker.clock
        clock.gradient = torch.is_grad_enabled()
        clock.recomputed = clock.gradient and bool(getattr(module, "gradient_checkpointing", False))
        self.tracker.begin_forward(dict(self.row.named(arguments)), training=clock.gradient and module.training)
        clock.grid, clock.references = self._layout(arguments, getattr(module, "config", None))

    def _layout(self, arguments: dict[str, Any], config: Any) -> tuple[Grid | None, tuple[range, ...]]:
        """The grid of the video, and references that are videos."""
        assert self.row is not None and self.tracker is not None
        places = arguments.get(self.row.read_once)
        if places is None:
            return self.row.grid(arguments, config), ()
        if self._read is None or self._read[0]() is not places:
            references = self.row.references(arguments) if self.tracker.references else ()
            self._read = weakref.ref(places), self.row.grid(arguments, config), references
        return self._read[1:]

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or self.tracker is None or self.row is None:
            return
        self.tracker.end_forward(failed=output is None)  # which torch calls us with where forward raised
        if self.row.by_grid and not self.tracker.clock.recomputed:
            # of this forward alone: one that is compiled whole would take it for its own
            self.tracker.clock.grid, self.tracker.clock.references = None, ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ForwardHooks, (None, None, [])


def _counter(scheduler: Any) -> int | None:
    step, timesteps = getattr(scheduler, "step_index", None), getattr(scheduler, "timesteps", None)
    if step is not None and timesteps is not None and step >= len(timesteps):
        return None  # its run is over: another pipeline with a scheduler of its own runs the transformer
    return getattr(scheduler, "begin_index", None) if step is None else step


def _noise_levels(scheduler: Any) -> tuple[float, ...] | None:
    """One sigma per step. Read once per run: schedulers keep them on the CPU, as a tensor or an array."""
    sigmas, timesteps = getattr(scheduler, "sigmas", None), getattr(scheduler, "timesteps", None)
    if sigmas is None or timesteps is None or not 0 <= len(sigmas) - len(timesteps) <= 1:
        return None  # before set_timesteps, sigmas are those of training
    # one more is where the last step ends, mostly 0; inverted ones, as Mochi's, are shares of signal
    inverted = getattr(getattr(scheduler, "config", None), "invert_sigmas", False)
    return tuple(1 - sigma if inverted else float(sigma) for sigma in sigmas.tolist()[: len(timesteps)])
