"""What every host shares: the clock of a run, the engine that puts a method into attention calls, and their log.

A host says where a run stands and hands its attention calls over; it needs nothing else of this package:

    engine = Engine(method)
    engine.begin_run(total_steps=50, noise_levels=sigmas)     # state of an earlier run is gone
    engine.clock.step, engine.clock.branch, engine.clock.grid = 0, "cond", (21, 45, 80)
    out = engine.attend(q, k, v, layer=3, dense=lambda: stock(q, k, v))     # [b h n d], in every layer of every step
    engine.end_run()                                          # plans are released, the log stays
    print(engine.summary())

A host that can leave out whole forwards asks before each of them, and tells what those returned that it ran:

    out = engine.forecast(form=(latents.shape, latents.dtype))    # None: run it, then engine.learn(out, form=...)
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parkattn.balance import Ranks
from parkattn.compat import backward_pass
from parkattn.engine.forecast import Forecast, ForwardLog
from parkattn.engine.summary import Summary
from parkattn.site import AttentionMethod, AttentionOutput, AttentionStats, CallSite, Forecastable, HeadBalancing

_UNTOLD = (
    "attention: expected a backward pass that does not call attention again, got one that does, after steps whose "
    "plans are remembered; use transformer.enable_gradient_checkpointing(), which is seen, or disable before training."
)


@dataclass
class Clock:
    """Where a run stands. step None: the host does not know, and calls run dense."""

    step: int | None = None
    """Denoising step, from 0; None: not known."""
    total_steps: int | None = None
    """Steps of the run; None: not known."""
    branch: str = "cond"
    """Branch of guidance, such as cond or uncond."""
    grid: tuple[int, int, int] | None = None
    """(frames, height, width) of the video tokens; a call with another number of them is given none."""
    references: tuple[range, ...] = ()
    """Tokens before the video that are videos too and may be sparse, where a host was asked for it."""
    noise_levels: tuple[float, ...] | None = None
    """One per step."""
    videos: int | None = None
    """Videos that are made at once, where known: a batch of twice as many holds each in two branches of guidance."""
    gradient: bool = False
    """The model runs with gradients on."""
    recomputed: bool = False
    """Under gradient checkpointing: the backward pass calls attention again."""


class Engine:
    """One method in the attention calls of one model. unknown_step: why calls are dense while the step is not known.

    watch, where it is set, is told of every call once it is timed and logged.
    """

    def __init__(
        self, method: AttentionMethod, unknown_step: str = "the step is unknown: engine.clock.step is None"
    ) -> None:
        self.method = method
        self.clock = Clock()
        self.log = RunLog()
        self.watch: Watch | None = None
        self._unknown_step = unknown_step
        self._forecast = Forecast(method.tolerance if isinstance(method, Forecastable) else 0.0)
        self._remembers_with_gradient = False  # since the last forward that was told to be recomputed

    def begin_run(self, total_steps: int | None = None, noise_levels: tuple[float, ...] | None = None) -> None:
        """Forget the run before, and stand at step 0. noise_levels: the scheduler's sigmas, one per step."""
        self.reset()
        self.clock.step, self.clock.total_steps, self.clock.noise_levels = 0, total_steps, noise_levels

    def end_run(self) -> None:
        """Plans, which may be a gigabyte, are not kept until the next run."""
        self._weigh()
        self.method.reset()
        self._forecast.reset()

    def _weigh(self) -> None:
        self.log.peak_state_bytes = max(self.log.peak_state_bytes, self.state_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes that are held between steps."""
        return self.method.state_bytes + self._forecast.nbytes

    @property
    def forecasts(self) -> bool:
        """Whether forwards may be left out."""
        return self._forecast.tolerance > 0

    def reset(self) -> None:
        """Forget plans and statistics; the clock stays where it is."""
        self.method.reset()
        self._forecast.reset()
        self.log.clear()

    def forecast(self, transformer: str = "transformer", *, form: Any) -> Tensor | None:
        """What a forward would return, where it need not run; None: run it, and tell `learn`.

        form: what the size and the type of the output follow from. All forwards of a step are forecast, or none.
        """
        site = self._forward_site(transformer)
        if not self.forecasts or site is None:
            return None

        def must_compute() -> bool:
            return isinstance(self.method, Forecastable) and self.method.computes(site)

        return self._forecast.output(site, form, must_compute, self.log.forwards)

    def learn(self, output: Tensor, transformer: str = "transformer", *, form: Any) -> None:
        """The output of a forward that ran after `forecast` gave None."""
        site = self._forward_site(transformer)
        if self.forecasts and site is not None:
            self._forecast.learn(site, form, output, self.log.forwards)

    def note_unseen_forwards(self, reason: str) -> None:
        """Say in the log why no forward was forecast, where the host saw none that could have been."""
        if self.forecasts and self.log.calls and not (self.log.forwards.computed or self.log.forwards.off):
            self.log.forwards.off[reason] += 1

    def _forward_site(self, transformer: str) -> CallSite | None:
        """None where the run is not known well enough to leave a forward out."""
        clock = self.clock
        if clock.step is None or clock.total_steps is None or clock.step >= clock.total_steps:
            return None
        return CallSite(
            step=clock.step,
            total_steps=clock.total_steps,
            branch=clock.branch,
            transformer=transformer,
            noise_levels=clock.noise_levels,
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int,
        dense: Callable[[], Tensor],
        transformer: str = "transformer",
        text: slice | None = None,
        key_valid: Tensor | None = None,
        scale: float | None = None,
        part: int = 0,
        parts: int = 1,
        reason: str | None = None,
        ranks: Ranks | None = None,
    ) -> Tensor:
        """One attention call of the host: [b h n d].

        dense: the host's own attention of this call. part: which call of the same layer, where a host attends to one
        batch element after the other; parts: of how many, where known. reason: why the call must be dense; None leaves
        that to the method. ranks: those that share the heads, where the host puts them into `head_order`.
        """
        clock, recomputing = self.clock, backward_pass() != -1
        if recomputing and self._remembers_with_gradient:
            raise RuntimeError(_UNTOLD)
        # what is computed twice must not depend on what was remembered in between: a plan of this call alone, at step 0
        alone = recomputing or clock.recomputed
        self._remembers_with_gradient = not alone and (self._remembers_with_gradient or clock.gradient)
        video_tokens = q.shape[2] - (text.stop - text.start if text is not None else 0)
        site = dataclasses.replace(
            self._site(q.shape[0], layer, transformer, part, parts),
            step=0 if alone else clock.step or 0,
            total_steps=clock.total_steps,
            grid=clock.grid if clock.grid is not None and math.prod(clock.grid) == video_tokens else None,
            text=text,
            scale=scale,
            key_valid=key_valid,
            noise_levels=clock.noise_levels,
            dense=dense,
            ranks=ranks if isinstance(self.method, HeadBalancing) else None,
        )
        if reason is None and clock.step is None and not alone:
            reason = self._unknown_step
        began, stop = time.perf_counter(), stopwatch(q.device)
        if reason is not None:
            out, stats = dense(), AttentionStats("dense", reason, q.new_ones(q.shape[:2]))
        elif alone:
            out, stats = self._ask_alone(q, k, v, site)
        else:
            out, stats = self.method(q, k, v, site)
        if not recomputing:
            self.log.add(site, stats, stop(), began)
            if stats.phase != "reuse":
                self._weigh()  # not at the end alone: a later plan may come without a residual
            if self.watch is not None:
                self.watch(q, k, site, stats)
        return out

    def _site(self, batch: int, layer: int, transformer: str, part: int, parts: int) -> CallSite:
        """Where a call is filed."""
        clock = self.clock
        # the first of two is another branch of guidance than one alone
        branch = clock.branch if part == 0 and parts == 1 else f"{clock.branch}, part {part}"
        return CallSite(
            layer=layer,
            branch=branch + (f" of {parts}" if parts > 1 else ""),
            video=part % clock.videos if clock.videos else part,
            paired=clock.videos is not None and batch == 2 * clock.videos,
            transformer=transformer,
        )

    def head_order(
        self, batch: int, *, layer: int, transformer: str = "transformer", part: int = 0, parts: int = 1
    ) -> Tensor | None:
        """The head [h] at each place of all ranks, in which the next call must be spread; None: the model's order."""
        if not isinstance(self.method, HeadBalancing):
            self.log.unbalanced[f"{self.method.name} does not say that its heads may change ranks"] += 1
            return None
        return self.method.head_order(self._site(batch, layer, transformer, part, parts), batch)

    def _ask_alone(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        """As if nothing had been before and gradients were asked for, which reentrant checkpointing hides at first."""
        asked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        self.method.reset()
        with torch.enable_grad():
            out, stats = self.method(q if asked else q.detach().requires_grad_(), k, v, site)
        self.method.reset()
        reason = f"{stats.reason}; under gradient checkpointing every call counts as step 0"
        return AttentionOutput(out if asked else out.detach(), dataclasses.replace(stats, reason=reason))

    def summary(self) -> Summary:
        """Summary of the calls since `begin_run`."""
        self.note_unseen_forwards("the host runs every forward")
        return Summary.of(self.method.name, self.log, self.state_bytes)


Watch = Callable[[Tensor, Tensor, CallSite, AttentionStats], None]  # (q, k, site, stats)


@dataclass(frozen=True)
class LoggedCall:
    """Tensors of statistics are kept on their device and read when somebody asks."""

    site: CallSite  # without tensors
    stats: AttentionStats  # without the plan
    began: float  # by time.perf_counter
    seconds: Callable[[], float]


class RunLog:
    """Every attention call since the run began."""

    def __init__(self) -> None:
        self.calls: list[LoggedCall] = []
        self.forwards = ForwardLog()
        self.unbalanced = Counter[str]()  # why heads stayed with their ranks -> calls
        self.peak_state_bytes = 0

    def add(self, site: CallSite, stats: AttentionStats, seconds: Callable[[], float], began: float = 0.0) -> None:
        plain = dataclasses.replace(site, dense=None, key_valid=None, values=None, ranks=None)
        self.calls.append(LoggedCall(plain, dataclasses.replace(stats, plan=None), began, seconds))

    def take(self, other: RunLog, names: Mapping[str, str]) -> None:
        """Add what another engine has seen of the transformers in names, under the names given there."""
        for call in other.calls:
            if (name := call.site.transformer) in names:
                self.calls.append(
                    dataclasses.replace(call, site=dataclasses.replace(call.site, transformer=names[name]))
                )
        self.forwards.take(other.forwards)
        self.unbalanced.update(other.unbalanced)
        self.peak_state_bytes += other.peak_state_bytes

    def clear(self) -> None:
        self.calls.clear()
        self.unbalanced.clear()
        self.forwards = ForwardLog()
        self.peak_state_bytes = 0


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts; calling the result stops; calling what that returns reads the seconds, and waits for a GPU."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        begin.record(stream)

        def stop_on_gpu() -> Callable[[], float]:
            end.record(stream)
            return seconds_on_gpu

        def seconds_on_gpu() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1000

        return stop_on_gpu
    start = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return stop
