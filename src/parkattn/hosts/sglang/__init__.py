"""PARK in SGLang diffusion's Wan, HunyuanVideo and MiniMax-H3 models, as a plug-in: installed beside SGLang, it is
found by its entry point.

    sglang serve --model-path Wan-AI/Wan2.1-T2V-14B-Diffusers --attention-backend sparge_attn \\
        --attention-backend-config '{"park": "quality"}'

SGLang's list of backends is closed, so PARK answers for a sparse member of it, and only where the config has the key
park: a profile, or a mapping with profile, model, min_tokens and fields of the profile. Ulysses and CFG parallelism
stay SGLang's own: attention is asked after the exchange, with all tokens and some of the heads.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from parkattn.hosts.served import ServedRequest, ServedSettings
from parkattn.models import Grid, grid_of_latents

MEMBER = "SPARGE_ATTN"  # sparse, so that cross-attention never gets it, and without metadata of its own
BACKEND = "parkattn.hosts.sglang.backend.ParkBackend"
PLATFORMS = ("cuda.CudaPlatform", "cpu.CpuPlatform")
_STAGES = "sglang.multimodal_gen.runtime.pipelines_core.stages"
STAGES = (
    f"{_STAGES}.denoising.DenoisingStage.forward",
    f"{_STAGES}.model_specific_stages.minimax_h3.stages.denoising.MiniMaxH3DenoisingStage.forward",  # its own loop
)
SIGMAS = "minimax_h3_sigmas"  # in Req.extra: the levels of its loop, which has no scheduler
LOGGER = "sglang.multimodal_gen.parkattn"  # below a logger that SGLang sets up
KEY = "_parkattn"  # of the state in Req.extra; a leading _ keeps it where it is when a request moves to another machine


class Block(NamedTuple):
    """A layer by its prefix: its number, and whether text follows the video or all else is packed before it."""

    layer: int | None = None
    text_follows: bool = False
    packed: bool = False

    @classmethod
    def read(cls, prefix: str) -> Block:
        joint = re.search(r"(?:^|\.)(?:double|single)_blocks\.(\d+)\.", prefix)  # numbered through
        packed = re.fullmatch(r"blocks\.(\d+)\.attn", prefix)  # MiniMax-H3; its text refiner has another prefix
        found = joint or packed or re.search(r"(?:^|\.)blocks\.(\d+)\.attn1\b", prefix)
        return cls(int(found[1]), joint is not None, packed is not None) if found else cls()


def register_hooks() -> None:
    """SGLang calls it once in every process, by the entry point `sglang.multimodal_gen.plugins`."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for platform in PLATFORMS:
        target = f"sglang.multimodal_gen.runtime.platforms.{platform}.get_attn_backend_cls_str"
        HookRegistry.register(target, choose_backend, HookType.AROUND)
    for stage in STAGES:
        HookRegistry.register(stage, release_after, HookType.AROUND)


def choose_backend(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    """PARK for its member where the config asks for it; otherwise what SGLang chooses."""
    asked = {getattr(value, "name", None) for value in (*args, *kwargs.values())}
    return BACKEND if MEMBER in asked and settings_of(server_args()) is not None else original(*args, **kwargs)


def server_args() -> Any:
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    return get_global_server_args()


def settings_of(args: Any) -> ServedSettings | None:
    """PARK's settings in --attention-backend-config; None: it has none."""
    config = getattr(args, "attention_backend_config", None) or {}
    if not config.get("park"):
        return None
    dit = dit_config(args)
    joint = str(getattr(dit, "prefix", "")).lower() == "hunyuan" or type(dit).__name__.startswith("MiniMaxH3")
    settings = ServedSettings.read("park", config["park"], "hunyuanvideo" if joint else "wan2.1-14b")
    if settings.references:
        raise ValueError(
            "references: expected False, since SGLang does not say which they are, got True; leave it out."
        )
    return settings


def dit_config(args: Any) -> Any:
    return getattr(getattr(args, "pipeline_config", None), "dit_config", None)


def release_after(original: Callable[..., Any], stage: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The denoising stage of one request; plans go and the summary is logged when it ends, however it ends."""
    try:
        return original(stage, batch, *args, **kwargs)
    finally:
        request = batch.extra.pop(KEY, None)
        if request is not None:
            request.end_run()


def request_of(batch: Any, args: Any) -> ServedRequest:
    """The state of a request, which lives and dies with it."""
    if KEY not in batch.extra:
        batch.extra[KEY] = ServedRequest(settings_of(args) or ServedSettings(), LOGGER)
    return batch.extra[KEY]


def steps_of(batch: Any) -> tuple[int, tuple[float, ...] | None]:
    """Number of steps of a request, and the noise levels of its scheduler."""
    if SIGMAS in batch.extra:
        levels = tuple(float(level) for level in batch.extra[SIGMAS]["video"][:-1])
        return len(levels), levels
    timesteps, sigmas = getattr(batch, "timesteps", None), getattr(getattr(batch, "scheduler", None), "sigmas", None)
    steps = len(timesteps) if timesteps is not None else batch.num_inference_steps
    return steps, tuple(sigmas[:steps].tolist()) if isinstance(sigmas, Tensor) else None


def grid_of_request(batch: Any, args: Any) -> Grid | None:
    """Of the whole video, also where the sequence is split over GPUs."""
    latents = types.SimpleNamespace(shape=tuple(getattr(batch, "raw_latent_shape", None) or ()))
    return grid_of_latents({"hidden_states": latents}, dit_config(args))
