"""PARK in ComfyUI's Wan, HunyuanVideo, LTX and MiniMax-H3 models, by hooks of its ModelPatcher; ComfyUI itself is not
imported.

optimized_attention_override  every attention call: ours are answered, others go to the earlier override or to ComfyUI
diffusion_model (a wrapper)   every forward: step, branch and grid are read from its arguments, or it is forecast
on_pre_run, on_cleanup        a sampler begins: plans and statistics are dropped; it ends or fails: plans are released
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parkattn.checks import expect_count
from parkattn.engine.summary import Summary
from parkattn.hosts.attached import AttachedEngine
from parkattn.hosts.comfyui_calls import (
    LIKE_SCHEDULED,
    Call,
    Forward,
    expect_window,
    other_cache,
    preset_for,
    sigmas_of,
    step_of,
    video_of,
)
from parkattn.methods import configured_method
from parkattn.site import AttentionMethod

FEW = 4  # steps, of which the first is dense: the summary says what they can gain
KEY = "parkattn"  # of the hooks, and of the summary in transformer_options


class PatchedModel(AttachedEngine):
    """The engine of one patched model, which its clones share: ComfyUI runs one sampler at a time."""

    def __init__(self, method: AttentionMethod, start_percent: float, end_percent: float, min_tokens: int) -> None:
        super().__init__(
            method, min_tokens, unknown_step="the sampler gives no sigmas or sample_sigmas: the step is unknown"
        )
        self.percents = (start_percent, end_percent)
        self._sigmas = (math.inf, 0.0)  # within which calls may be sparse
        self._schedule: Tensor | None = None
        self._forward: Forward | None = None
        self._reason: str | None = None  # why all calls of this forward are dense

    def summary(self) -> Summary:
        found, steps = super().summary(), self.engine.clock.total_steps
        dense = sorted({*found.steps["dense"], *found.steps.get("anchor", ())})
        if steps is None or steps > FEW or len(dense) in (0, steps) or not found.density:
            return found
        advice = (
            f"{len(dense)} of the {steps} steps of this sampler are dense, so attention is at most "
            f"{1 / found.density:.1f} times as fast; more steps in one sampler gain more"
        )
        return dataclasses.replace(found, advice=[*found.advice, advice])

    def begin(self, patcher: Any) -> None:
        self.reset()
        self.engine.clock.step, self._schedule = None, None
        self._sigmas = sigmas_of(patcher.get_model_object("model_sampling"), *self.percents)

    def run_forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        self._read_forward(executor.class_obj, given)
        try:
            return self._forecast_or_run(given, functools.partial(executor, *args, **kwargs))
        finally:
            self._forward = None

    def _forecast_or_run(self, given: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """A sampler that asks twice within a step gets every forward computed: a branch comes again."""
        engine, forward = self.engine, self._forward
        if not engine.forecasts or forward is None:
            return run()
        form, log = (video_of(given["x"]).shape, video_of(given["x"]).dtype), engine.log.forwards
        off = self._reason or other_cache(given.get("transformer_options", {}))
        out = engine.forecast(forward.name, form=form) if off is None else None
        if out is None:
            out = run()
            if off is None and isinstance(out, Tensor):
                engine.learn(out, forward.name, form=form)
            else:
                log.off[off or f"the model returns a {type(out).__name__}"] += 1
        return out

    @torch.compiler.disable
    def _read_forward(self, model: Any, given: Mapping[str, Any]) -> None:
        options = given.get("transformer_options", {})
        self._forward = forward = Forward.read(model, given, options)
        self.engine.clock.grid, self.engine.clock.branch = forward.grid, forward.branch
        self._reason = self._why_dense(forward, self._read_step(options))

    def _read_step(self, options: Mapping[str, Any]) -> float | None:
        """Sets the clock; sigma of this forward, which waits for the GPU once."""
        clock, schedule = self.engine.clock, options.get("sample_sigmas")
        if schedule is None or options.get("sigmas") is None:
            clock.step = None
            return None
        if schedule is not self._schedule:
            self._schedule, clock.noise_levels = schedule, tuple(schedule[:-1].tolist())
            clock.total_steps = max(1, len(clock.noise_levels))
        sigma = options["sigmas"].max().item()
        clock.step = step_of(sigma, clock.noise_levels or ())
        return sigma

    def _why_dense(self, forward: Forward, sigma: float | None) -> str | None:
        if forward.grid is None:
            return "the latent is an image, not a video"
        if torch.is_grad_enabled():
            return "gradients are on, as in training"
        if forward.replaced:
            return "another node replaces blocks: the layer is unknown"
        if sigma is not None and not self._sigmas[1] <= sigma * LIKE_SCHEDULED <= self._sigmas[0]:
            return "sigma is outside the window of {:g} to {:g}".format(*self.percents)
        return None

    def attend(self, stock: Callable[[], Tensor], call: Call) -> Tensor:
        """stock: the earlier override or ComfyUI's function, of this call."""
        forward = self._forward
        foreign = call.why_not_video(forward)
        if forward is None or foreign is not None:
            self.declined[str(foreign)] += 1
            return stock()
        q, k, v = (call.by_head(x, call.skip_reshape) for x in call[:3])
        layer, name = forward.enter(call.options)
        tokens = q.shape[2]
        out = self.engine.attend(
            q, k, v,
            layer=layer,
            dense=lambda: call.by_head(stock(), call.skip_output_reshape),
            transformer=name,
            text=forward.text(tokens),
            scale=call.others.get("scale"),
            reason=self._reason or call.why_dense() or self.why_short(tokens),
        )  # fmt: skip
        return out if call.skip_output_reshape else out.transpose(1, 2).flatten(2)


def patch_model(
    model: Any,
    profile: str = "quality",
    *,
    start_percent: float = 0.0,
    end_percent: float = 1.0,
    min_tokens: int = 8192,
    **changes: Any,
) -> Any:
    """A clone of a ComfyUI MODEL in which PARK runs. changes override single fields of the profile, such as top_p."""
    expect_count("min_tokens", min_tokens, least=0)
    expect_window(start_percent, end_percent)
    if KEY in model.model_options.get("transformer_options", {}):
        raise ValueError("model: expected one without PARK, got one that has it; remove one of the two nodes.")
    method = configured_method("park", profile, model=preset_for(model, changes.get("dense_layers", ())), **changes)
    state = PatchedModel(method, start_percent, end_percent, min_tokens)
    patched = model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    previous = options.get("optimized_attention_override")

    # functions, not bound methods: clone() copies model_options deeply, and the copy would have a state of its own
    @torch.compiler.disable
    def override(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        asked = func if previous is None else functools.partial(previous, func)
        return state.attend(functools.partial(asked, *args, **kwargs), Call.read(*args, **kwargs))

    options["optimized_attention_override"] = override
    options[KEY] = lambda: state.summary()
    patched.add_wrapper_with_key("diffusion_model", KEY, torch.compiler.disable(state.run_forward, recursive=False))
    patched.add_callback_with_key("on_pre_run", KEY, state.begin)
    patched.add_callback_with_key("on_cleanup", KEY, lambda _: state.end_run())
    return patched


def summary_of(model: Any) -> Summary:
    """Summary of the last sampler that used a patched model or a clone of it."""
    if KEY not in (options := model.model_options.get("transformer_options", {})):
        raise ValueError("model: expected one with PARK, got one without; connect the model output of its node.")
    return options[KEY]()
