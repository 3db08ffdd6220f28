"""Videos of a checkpoint folder: the stock pipeline, loaded once, many sentences at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parklab.sprites.data import ClipSize
from parklab.sprites.following import generate
from parklab.sprites.gradients import autocast, untried_kernels

from .grammar import Scene, parse
from .packing import INDEX, unpack
from .recipe import GUIDANCE, SAMPLING_STEPS
from .sheet import SENTENCES, write_sheet

if TYPE_CHECKING:
    from diffusers import WanPipeline

TOKENS_AT_ONCE = 60_000


def load_pipeline(folder: Path, device: torch.device) -> WanPipeline:
    """Of a diffusers folder, or of a packed one, which is unpacked inside."""
    from diffusers import WanPipeline

    whole = unpack(folder, folder / "unpacked") if (folder / INDEX).is_file() else folder
    pipeline = WanPipeline.from_pretrained(whole, use_safetensors=True, local_files_only=True).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def videos(
    pipeline: WanPipeline,
    scenes: Sequence[Scene],
    size: ClipSize,
    *,
    steps: int = SAMPLING_STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> list[Tensor]:
    """Clips [3, frames, h, w] in [0, 1] on the CPU; as many at a time as fill a GPU, one by one on a CPU."""
    device = pipeline.device
    batch = max(1, TOKENS_AT_ONCE // size.tokens) if device.type == "cuda" else 1
    with autocast(device), untried_kernels():
        return list(generate(pipeline, scenes, size, steps=steps, seed=seed, guidance=guidance, batch=batch))


def sample_sheet(
    pipeline: WanPipeline, path: Path, size: ClipSize, *, steps: int = SAMPLING_STEPS, count: int = len(SENTENCES)
) -> None:
    """The contact sheet's sentences as the model draws them."""
    scenes = [parse(sentence) for sentence in SENTENCES[:count]]
    write_sheet(path, videos(pipeline, scenes, size, steps=steps), [scene.sentence for scene in scenes], frames=5)
