"""Released models that are newer than those of `e2e`: sizes of their transformers, and arguments of one forward.

Sizes are those of the released checkpoints; diffusers' conversion scripts and the models' own configs name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parkattn.models import Grid

Noise = Callable[..., Tensor]
Inputs = Callable[[Grid, Any, Noise, torch.device], dict[str, Any]]
Times = Callable[[float, torch.device], dict[str, Tensor]]


def one_time(time: float, device: torch.device) -> dict[str, Tensor]:
    return {"timestep": torch.tensor([time], device=device)}


@dataclass(frozen=True)
class RealModel:
    """grid: of the video's tokens. blocks: how many the released model has; depth: the argument that says it.

    inputs: arguments of a forward but its times, of which times makes those of a timestep from 0 to 1000.
    """

    transformer: str
    video: str
    grid: Grid
    blocks: int
    inputs: Inputs
    sizes: Mapping[str, Any]
    depth: str = "num_layers"
    times: Times = one_time
    beside: int = 0  # tokens that are in one sequence with the video's
    settings: Mapping[str, Any] = field(default_factory=dict)  # for sizes that no preset was made for

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2] + self.beside

    def arguments(self, transformer: Any, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        return self.inputs(self.grid, transformer.config, noise, device)

    def with_blocks(self, count: int) -> RealModel:
        return replace(self, sizes={**self.sizes, self.depth: count})


def packed_rows(text: int, sound: int) -> Inputs:
    """Text, sound and the video in one sequence, without keyframes, as the pipeline of MiniMax-H3 lays it out."""

    def inputs(grid: Grid, config: Any, noise: Noise, device: torch.device) -> dict[str, Any]:
        frames, height, width = grid
        video = frames * height * width
        with torch.device(device):
            places = torch.zeros(text + sound + video, 3, dtype=torch.float64)
            places[:text, 0] = torch.arange(text)
            places[text : text + sound, 0] = text + torch.arange(sound)
            steps = [torch.arange(size, dtype=torch.float64) for size in grid]
            places[text + sound :] = torch.cartesian_prod(text + 5.0 / 3.0 * steps[0], *steps[1:])
            words, heard, seen = torch.arange(text + sound + video).split([text, sound, video])
            kinds = torch.tensor([1] * text + [2] * sound + [0] * video)
            times = torch.tensor([2] * text + [1] * sound + [0] * video)
        patch = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
        return {
            "hidden_states": noise(1, video, config.in_channels * patch),
            "audio_hidden_states": noise(1, sound, config.audio_in_channels),
            "encoder_hidden_states": noise(1, text, config.text_dim),
            "timestep_indices": times, "token_tags": kinds, "position_ids": places,
            "video_indices": seen, "audio_indices": heard, "text_indices": words,
        }  # fmt: skip

    return inputs


def times_of_rows(time: float, device: torch.device) -> dict[str, Tensor]:
    """From 0 to 1: of video, of sound, and of text, which has no noise."""
    return {"timestep": torch.tensor([time / 1000, time / 1000, 1.0], device=device)}


def video_and_sound(text: int, sound: int) -> Inputs:
    """LTX-2: one sequence of video, one of sound; text comes projected to the width of each."""

    def inputs(grid: Grid, config: Any, noise: Noise, device: torch.device) -> dict[str, Any]:
        frames, height, width = grid
        return {
            "hidden_states": noise(1, frames * height * width, config.in_channels),
            "audio_hidden_states": noise(1, sound, config.audio_in_channels),
            "encoder_hidden_states": noise(1, text, config.cross_attention_dim),
            "audio_encoder_hidden_states": noise(1, text, config.audio_cross_attention_dim),
            "num_frames": frames, "height": height, "width": width, "audio_num_frames": sound,
        }  # fmt: skip

    return inputs


def times_of_video_and_sound(time: float, device: torch.device) -> dict[str, Tensor]:
    names = ("timestep", "audio_timestep", "sigma", "audio_sigma")
    return {name: torch.tensor([time], device=device) for name in names}


def channels_last(text: int, scale: tuple[float, float, float]) -> Inputs:
    """Kandinsky 5: latents [b f h w c], with channels of given frames beside them."""

    def inputs(grid: Grid, config: Any, noise: Noise, device: torch.device) -> dict[str, Any]:
        _, high, wide = config.patch_size
        channels = 2 * config.in_visual_dim + 1 if config.visual_cond else config.in_visual_dim
        return {
            "hidden_states": noise(1, grid[0], grid[1] * high, grid[2] * wide, channels),
            "encoder_hidden_states": noise(1, text, config.in_text_dim),
            "pooled_projections": noise(1, config.in_text_dim2),
            "visual_rope_pos": [torch.arange(size, device=device) for size in grid],
            "text_rope_pos": torch.arange(text, device=device), "scale_factor": scale,
        }  # fmt: skip

    return inputs


def latents_and_text(text: int) -> Inputs:
    """Cosmos: latents [b c f h w]. Channels of given frames and of padding are among them: to add the latter needs
    torchvision.
    """

    def inputs(grid: Grid, config: Any, noise: Noise, device: torch.device) -> dict[str, Any]:
        _, high, wide = config.patch_size
        words = config.crossattn_proj_in_channels if config.use_crossattn_projection else config.text_embed_dim
        return {
            "hidden_states": noise(1, config.in_channels, grid[0], grid[1] * high, grid[2] * wide),
            "encoder_hidden_states": noise(1, text, words), "fps": 16,
        }  # fmt: skip

    return inputs


REAL = {
    "minimax-h3": RealModel(
        "MiniMaxH3Transformer3DModel", "345 frames of 768x1344", (102, 24, 42), 50, packed_rows(213, 1150), {},
        times=times_of_rows, beside=1363,
    ),
    "ltx-2.5": RealModel(
        "LTX2VideoTransformer3DModel", "241 frames of 1408x2560", (31, 44, 80), 48, video_and_sound(1024, 251), {
            "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
            "perturbed_attn": True, "rope_type": "split", "use_prompt_embeddings": False, "ff_bias": False,
            "use_keyframes_abs_pos_embedding": True,
        },
        times=times_of_video_and_sound,
    ),
    "kandinsky-5-pro": RealModel(
        "Kandinsky5Transformer3DModel", "121 frames of 768x1280", (31, 48, 80), 60,
        channels_last(256, (1.0, 3.16, 3.16)), {
            "in_visual_dim": 16, "out_visual_dim": 16, "time_dim": 1024, "model_dim": 4096, "ff_dim": 16384,
            "num_text_blocks": 4, "axes_dims": (32, 48, 48), "visual_cond": True,
        },
        depth="num_visual_blocks",
    ),
    "cosmos-2.5-14b": RealModel(
        "CosmosTransformer3DModel", "93 frames of 704x1280", (24, 44, 80), 36, latents_and_text(512), {
            "in_channels": 18, "num_attention_heads": 40, "rope_scale": (1.0, 3.0, 3.0), "concat_padding_mask": False,
            "extra_pos_embed_type": None, "use_crossattn_projection": True, "crossattn_proj_in_channels": 100352,
        },
    ),
}  # fmt: skip

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}
_GRID = (3, 4, 4)
_FEW: dict[str, Any] = {"query_clusters": 2, "key_clusters": 4, "kmeans_iterations": 1, "warm_iterations": 1}
_TINY_SIZES: dict[str, dict[str, Any]] = {
    "minimax-h3": {
        **_HEADS, "hidden_size": 64, "num_refiner_layers": 1, "ffn_dim": 64, "in_channels": 4, "audio_in_channels": 4,
        "text_dim": 16, "freq_dim": 32, "time_embed_hidden_dim": 32, "time_embed_dim": 16, "rope_freq_dim": 8,
    },
    "ltx-2.5": {
        **_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 128, "audio_in_channels": 4,
        "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 32,
        "audio_cross_attention_dim": 64,
    },
    "kandinsky-5-pro": {
        "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 16, "time_dim": 16,
        "model_dim": 128, "ff_dim": 64, "num_text_blocks": 1, "axes_dims": (16, 24, 24),
    },
    "cosmos-2.5-14b": {
        **_HEADS, "in_channels": 6, "out_channels": 4, "mlp_ratio": 2.0, "text_embed_dim": 16, "adaln_lora_dim": 4,
        "max_size": (8, 16, 16), "crossattn_proj_in_channels": 32, "encoder_hidden_states_channels": 16,
    },
}  # fmt: skip
_TINY_INPUTS = {
    "minimax-h3": packed_rows(5, 6),
    "ltx-2.5": video_and_sound(8, 10),
    "kandinsky-5-pro": channels_last(8, (1.0, 2.0, 2.0)),
    "cosmos-2.5-14b": latents_and_text(8),
}
# the same classes and switches, for rehearsals under Triton's interpreter
TINY = {
    name: replace(
        model, grid=_GRID, blocks=3, beside=11 if model.beside else 0, video="rehearsed", inputs=_TINY_INPUTS[name],
        sizes={**model.sizes, **_TINY_SIZES[name]}, settings=_FEW
    )
    for name, model in REAL.items()
}  # fmt: skip
