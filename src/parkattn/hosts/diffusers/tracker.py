"""Where a generation stands: step, number of steps, branch and token grid, read without touching the GPU.

One tracker per pipeline, so that Wan2.2's second expert does not restart the warm-up. Sources of the step, best first: the
pipeline's cache context (step_index), the scheduler's counters, and, where neither counts, forwards whose timestep changed.
Everything is put on instances and taken off again by `detach`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parkattn.engine import Clock
from parkattn.hosts.diffusers.instances import put_on_instance
from parkattn.models import ModelRow


class StepTracker:
    """Sets a clock by what a pipeline does."""

    def __init__(
        self, clock: Clock, scheduler_of: Callable[[], Any], on_new_run: Callable[[], None], total_steps: int | None = None
    ) -> None:
        """scheduler_of returns the pipeline's scheduler, which users may replace between runs; None for a bare transformer."""
        self.clock = clock
        clock.total_steps = total_steps
        clock.branch = "forward 0"
        self._scheduler_of = scheduler_of
        self._on_new_run = on_new_run
        self._undo: list[Callable[[], Any]] = []
        self._context: tuple[str, dict[str, Any]] | None = None
        self._layers_seen: set[tuple[str, int]] = set()
        self.forget_run()

    def forget_run(self) -> None:
        """Whatever comes next begins a run."""
        self.clock.step = None
        self._run: Any = None  # the scheduler's timesteps: a new tensor for every run
        self._begun = False
        self._uncounted: set[str | None] = set()  # branches of a compiled transformer seen before the scheduler began to count
        self._last_timestep: float | None = None
        self._rising: bool | None = None  # whether timesteps rise; not known before they change
        self._forwards_in_step = 0
        self._inside_forward = False

    def attach(self, transformer: torch.nn.Module, row: ModelRow) -> None:
        names = [name for name in inspect.signature(type(transformer).forward).parameters if name != "self"]
        hooks = _Hooks(self, row, names)
        self._undo.append(transformer.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
        self._undo.append(transformer.register_forward_hook(hooks.after).remove)
        if hasattr(transformer, "cache_context"):
            self._follow_contexts(transformer)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.forget_run()

    def begin_forward(self, arguments: dict[str, Any] | None) -> None:
        """arguments of the transformer's forward; None where they are not known."""
        scheduler = self._scheduler_of()
        timesteps = getattr(scheduler, "timesteps", None)
        # an exception inside a transformer that has no scheduler shows only in a forward that never ended
        aborted = self._inside_forward and scheduler is None
        if aborted or timesteps is not self._run:
            self.forget_run()
        self._inside_forward = arguments is not None
        first, self._begun, self._run = not self._begun, True, timesteps
        name, facts = self._context or (None, {})
        step = facts.get("step_index")
        step = _counter(scheduler) if step is None else step
        step = self._count(arguments, first, name) if step is None else int(step)
        if first or (step is not None and self.clock.step is not None and step < self.clock.step):
            self._on_new_run()
        # a pipeline that opens no context runs its branches one after the other
        self._forwards_in_step = self._forwards_in_step + 1 if step == self.clock.step and not first else 0
        self.clock.branch = name if name is not None else f"forward {self._forwards_in_step}"
        self.clock.step = step
        total = len(timesteps) if timesteps is not None else facts.get("num_inference_steps")
        self.clock.total_steps = total if total is not None else self.clock.total_steps
        if first:
            self.clock.noise_levels = _noise_levels(scheduler)
        self._layers_seen.clear()

    def end_forward(self) -> None:
        self._inside_forward = False

    def at_layer(self, transformer: str, layer: int) -> None:
        """Called by compiled attention. Where the whole transformer is compiled its forwards are not seen: a layer that comes again begins one."""
        if self._inside_forward:
            return
        if not self._layers_seen or (transformer, layer) in self._layers_seen:
            self.begin_forward(None)
        self._layers_seen.add((transformer, layer))

    def _count(self, arguments: dict[str, Any] | None, first: bool, branch: str | None) -> int | None:
        """Where neither context nor scheduler counts, or not yet: the timestep's place in the schedule, else the number of changes.

        Reads a device value, which costs a synchronisation.
        """
        timestep = (arguments or {}).get("timestep")
        if timestep is None:
            # some schedulers begin to count after the first step, which shows each branch once
            known = self._run is not None and branch not in self._uncounted and (first or branch is not None)
            self._uncounted.add(branch)
            return 0 if known else None
        # the largest, because image-to-video gives the tokens of its clean first frame the timestep 0
        value = float(timestep.max()) if isinstance(timestep, torch.Tensor) else float(timestep)
        last, self._last_timestep = self._last_timestep, value
        schedule = self._run.tolist() if isinstance(self._run, torch.Tensor) else []
        if value in schedule:
            return schedule.index(value)
        if first or self.clock.step is None or last is None:
            return 0
        if value == last:
            return self.clock.step
        # most models denoise downwards, Mochi upwards: the first change says which, and a turn begins a new run
        rising = value > last
        turned = self._rising is not None and rising != self._rising
        self._rising = None if turned else rising
        return 0 if turned else self.clock.step + 1

    def _follow_contexts(self, transformer: Any) -> None:
        stock = transformer.cache_context

        @contextlib.contextmanager
        def cache_context(name: str, *args: Any, **facts: Any) -> Iterator[None]:
            self._context = (name, facts)
            self._layers_seen.clear()
            try:
                with stock(name, *args, **facts):
                    yield
            finally:
                self._context = None

        self._undo.append(put_on_instance(transformer, "cache_context", cache_context))


class _Hooks:
    """What the tracker hears of one transformer. A copied or pickled transformer takes hooks along that do nothing."""

    def __init__(self, tracker: StepTracker | None, row: ModelRow | None, names: list[str]) -> None:
        self.tracker = tracker
        self.row = row
        self.names = names  # of the arguments of forward

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # in a graph nothing may depend on the step; attention then asks for the position itself (`at_layer`)
        if not torch.compiler.is_compiling() and self.tracker is not None and self.row is not None:
            arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
            self.tracker.begin_forward(arguments)
            self.tracker.clock.grid = self.row.grid(arguments, getattr(module, "config", None))

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling() and self.tracker is not None:
            self.tracker.end_forward()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Hooks, (None, None, [])


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
    return tuple(float(sigma) for sigma in sigmas.tolist()[: len(timesteps)])  # after the last step comes where it ends, mostly 0
