"""PARK in vLLM-Omni's diffusion models, as a plug-in: installed beside vLLM-Omni, it is found by its entry point.

    vllm serve Wan-AI/Wan2.2-T2V-A14B-Diffusers --omni \\
        --diffusion-attention-config '{"per_role": {"self": {"backend": "PARK_ATTN"}}}'

The keys of that config are closed, so settings come by the environment: PARKATTN_SETTINGS is a profile, or JSON with
profile, model, min_tokens, references and fields of the profile. Models say where their video is by
`AttentionMetadata.video_layout` (Wan and MiniMax-H3 do). What is outside of it is always seen; padding behind it is cut
off. Ulysses and CFG parallelism stay vLLM-Omni's own.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from parkattn.checks import shown
from parkattn.hosts.served import ServedRequest, ServedSettings
from parkattn.models import Grid

MEMBER = "PARK_ATTN"
BACKEND = "parkattn.hosts.vllm_omni.backend.ParkBackend"
LOGGER = "vllm_omni.parkattn"  # below a logger that vLLM-Omni sets up
VARIABLE = "PARKATTN_SETTINGS"
KEY = "_parkattn"  # of the state on a forward context, and of the sigmas beside it
LEVELS = "_parkattn_noise_levels"


class VideoPlace(NamedTuple):
    """The video on this grid after so many tokens, last but for padding. references: earlier videos among these."""

    before: int
    grid: Grid
    references: tuple[range, ...] = ()

    @property
    def used(self) -> int:
        return self.before + math.prod(self.grid)

    @classmethod
    def read(cls, layout: Any) -> VideoPlace | None:
        """None: the layout says no video, or none that comes last."""
        if layout is None:
            return None
        spans = sorted(getattr(layout, "video_spans", ()), key=lambda span: span.start)
        if spans:
            *others, last = spans
            given = tuple(range(span.start, span.start + math.prod(span.latent_grid)) for span in others)
            place = cls(last.start, last.latent_grid, given)
        elif layout.prefix_len is not None and layout.latent_grid is not None:
            place = cls(layout.prefix_len, layout.latent_grid)
        else:
            return None
        return place if layout.used_len in (None, place.used) else None

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> VideoPlace:
        """Of `packed`."""
        before, frames, height, width, *ends = numbers
        return cls(before, (frames, height, width), tuple(map(range, ends[::2], ends[1::2])))

    def packed(self) -> list[int]:
        """As operators of a graph take it."""
        return [self.before, *self.grid, *(end for given in self.references for end in (given.start, given.stop))]


def register_backend() -> None:
    """vLLM-Omni calls it in every process, perhaps again, by the entry point `vllm_omni.general_plugins`."""
    from aenum import extend_enum
    from vllm_omni.diffusion import forward_context
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

    if MEMBER in DiffusionAttentionBackendEnum.__members__:
        return
    extend_enum(DiffusionAttentionBackendEnum, MEMBER, BACKEND)
    mixin = forward_context.DenoiseProgressMixin
    mixin.record_denoise_step = telling_steps(mixin.record_denoise_step, forward_context)


def telling_steps(original: Callable[..., None], contexts: Any) -> Callable[..., None]:
    """Wan's pipelines record the step and not how many there are, which their scheduler knows."""

    @functools.wraps(original)
    def record_denoise_step(
        pipeline: Any, step_idx: int | None, timestep: Any = None, scheduler: Any = None, **told: Any
    ) -> None:
        original(pipeline, step_idx, timestep, scheduler, **told)
        if step_idx is None or not contexts.is_forward_context_available():
            return
        context, scheduler = contexts.get_forward_context(), scheduler or getattr(pipeline, "scheduler", None)
        timesteps, sigmas = getattr(scheduler, "timesteps", None), getattr(scheduler, "sigmas", None)
        if context.total_denoise_steps is None and timesteps is not None:
            context.total_denoise_steps = len(timesteps)
        if step_idx == 0 and isinstance(sigmas, Tensor):
            setattr(context, LEVELS, tuple(sigmas[: context.total_denoise_steps].tolist()))

    return record_denoise_step


def settings() -> ServedSettings:
    """Settings out of the environment."""
    told = os.environ.get(VARIABLE, "quality").strip()
    try:
        return ServedSettings.read(VARIABLE, json.loads(told) if told.startswith("{") else told)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{VARIABLE}: expected a profile or JSON, got {shown(told)} ({error}); write a profile or JSON."
        ) from None


def request_of(context: Any) -> ServedRequest:
    """The state of the request, or batch of requests, of a forward context, with which it is dropped."""
    if not hasattr(context, KEY):
        setattr(context, KEY, ServedRequest(settings(), LOGGER))
    return getattr(context, KEY)


def why_dense(context: Any, request: ServedRequest) -> str | None:
    """Why no call of this step can use or leave plans."""
    step, total = context.denoise_step_idx, context.total_denoise_steps
    if step is None or total is None:
        return "the pipeline does not record its step, or how many there are"
    if step > 0 and not request.engine.log.calls:
        return "step-wise execution: every step has a context of its own, and none names its request"
    return None
