"""Random transformers of the classes that came after the first ones: class -> (sizes, arguments of one forward, text
span).

3 x 4 x 4 video tokens each, history apart. A release of diffusers that lacks a class leaves it out.
"""

from __future__ import annotations

from typing import Any

import torch

import tiny_pipelines
from tiny_pipelines import HEADS, diffusers, noise

CHANNELS = {"in_channels": 4, "out_channels": 4}
WAN = {**HEADS, **CHANNELS, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
DUAL = {
    **HEADS, **CHANNELS, "num_layers": 1, "num_single_layers": 2, "mlp_ratio": 1.0, "text_embed_dim": 16,
    "rope_axes_dim": (4, 6, 6),
}  # fmt: skip
KANDINSKY = {
    "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 16, "time_dim": 16, "model_dim": 32, "ff_dim": 32,
    "num_text_blocks": 1, "axes_dims": (4, 6, 6),
}  # fmt: skip


def video(*shape: int) -> dict[str, Any]:
    """hidden_states, timestep and 16 words."""
    return {
        "hidden_states": noise(1, *shape),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": noise(1, 16, 16, seed=1),
    }


def wan_animate() -> tuple[dict[str, Any], dict[str, Any]]:
    motion = {
        f"motion_{name}": size
        for name, size in (("encoder_size", 16), ("style_dim", 8), ("dim", 4), ("encoder_dim", 16))
    }
    sizes = {
        **WAN, "in_channels": 12, "latent_channels": 4, "image_dim": 8, "rope_max_seq_len": 32, "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2, "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, **motion,
    }  # fmt: skip
    inputs = {
        **video(12, 3, 8, 8),
        "encoder_hidden_states_image": noise(1, 4, 8),
        "pose_hidden_states": noise(1, 4, 2, 8, 8),
        "face_pixel_values": noise(1, 3, 5, 16, 16),
    }
    return sizes, inputs


def ltx2(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """As 2.3 and later: gates per head, the processor that can be perturbed, split RoPE."""
    sizes = {
        **HEADS, **CHANNELS, "cross_attention_dim": 32, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16, "num_layers": 2, "caption_channels": 16,
        "rope_double_precision": False, "gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True, "rope_type": "split", **changes,
    }  # fmt: skip
    words, heard = (
        {f"{kind}encoder_hidden_states": noise(1, 8, 16, seed=1) for kind in ("", "audio_")},
        torch.ones(1, 8),
    )
    inputs = {
        **words, **{f"{kind}encoder_attention_mask": heard for kind in ("", "audio_")},
        "hidden_states": noise(1, 48, 4), "audio_hidden_states": noise(1, 10, 4, seed=2),
        "timestep": torch.full((1, 48), 500.0), "audio_timestep": torch.tensor([500.0]),
        **dict(zip(("num_frames", "height", "width", "audio_num_frames"), (3, 4, 4, 10), strict=True)),
    }  # fmt: skip
    return sizes, inputs


def framepack() -> tuple[dict[str, Any], dict[str, Any]]:
    """48 tokens of video after 16, 4 and 4 of history; 4 of an image and 16 of text come last."""
    sizes = {
        **DUAL, "num_refiner_layers": 1, "pooled_projection_dim": 8, "image_condition_type": None, "has_image_proj": True,
        "image_proj_dim": 16, "has_clean_x_embedder": True,
    }  # fmt: skip
    inputs = {
        **video(4, 3, 8, 8), "encoder_attention_mask": torch.ones(1, 16), "pooled_projections": noise(1, 8),
        "image_embeds": noise(1, 4, 16), "guidance": torch.tensor([1.0]), "indices_latents": torch.arange(19, 22),
    }  # fmt: skip
    for name, frames in (("clean", 1), ("history_2x", 2), ("history_4x", 16)):
        inputs |= {f"latents_{name}": noise(1, 4, frames, 8, 8), f"indices_latents_{name}": torch.arange(frames)}
    return sizes, inputs


def helios() -> tuple[dict[str, Any], dict[str, Any]]:
    """48 tokens of video after 4 long, 4 middle and 16 short ones of history."""
    sizes = {**WAN, "rope_dim": (4, 6, 6), "is_amplify_history": True}
    inputs = {**video(4, 3, 8, 8), "indices_hidden_states": torch.arange(19, 22)[None]}
    for name, first, frames in (("long", 0, 16), ("mid", 16, 2), ("short", 18, 1)):
        inputs[f"latents_history_{name}"] = noise(1, 4, frames, 8, 8)
        inputs[f"indices_latents_history_{name}"] = torch.arange(first, first + frames)[None]
    return sizes, inputs


def cosmos(image: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """2.5 has a mask channel of given frames, and attends to an image's tokens too. Its padding mask, which needs
    torchvision, is off.
    """
    sizes = {
        **HEADS, **CHANNELS, "num_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (8, 16, 16),
        "patch_size": (1, 2, 2), "rope_scale": (2.0, 1.0, 1.0), "concat_padding_mask": False,
        "extra_pos_embed_type": None if image else "learnable",
    }  # fmt: skip
    inputs = {**video(4, 3, 8, 8), "fps": 30}
    if image:
        sizes |= {"in_channels": 5, "img_context_dim_in": 8, "img_context_num_tokens": 4, "img_context_dim_out": 32}
        inputs |= {"condition_mask": torch.zeros(1, 1, 3, 8, 8)}
        inputs["encoder_hidden_states"] = (inputs["encoder_hidden_states"], noise(1, 4, 8, seed=3))
    return sizes, inputs


def cosmos3() -> tuple[dict[str, Any], dict[str, Any]]:
    """Queries and keys of 48 tokens of video and 5 of sound; 8 keys of text before them; two heads share keys."""
    sizes = {
        "head_dim": 16, "hidden_size": 32, "intermediate_size": 32, "latent_channel": 4, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "patch_latent_dim": 16, "vocab_size": 32, "rope_axes_dim": (4, 2, 2), "sound_gen": True, "sound_dim": 4,
    }  # fmt: skip
    frames, seconds = torch.arange(3), torch.arange(5)
    places = torch.cat(
        [
            torch.arange(8).expand(3, 8),
            8 + torch.cartesian_prod(*map(torch.arange, (3, 4, 4))).T,
            8 + seconds.expand(3, 5),
        ],
        1,
    )
    inputs = {
        "input_ids": torch.arange(8), "text_indexes": torch.arange(8), "position_ids": places, "und_len": 8, "sequence_length": 61,
        "vision_tokens": [noise(1, 4, 3, 8, 8)], "vision_token_shapes": [(3, 4, 4)], "vision_timesteps": torch.full((48,), 500.0),
        "vision_sequence_indexes": torch.arange(8, 56), "vision_mse_loss_indexes": torch.arange(8, 56), "vision_noisy_frame_indexes": [frames],
        "sound_tokens": [noise(4, 5, seed=2)], "sound_token_shapes": [(5, 1, 1)], "sound_timesteps": torch.full((5,), 500.0),
        "sound_sequence_indexes": torch.arange(56, 61), "sound_mse_loss_indexes": torch.arange(56, 61),
        "sound_noisy_frame_indexes": [seconds],
    }  # fmt: skip
    return sizes, inputs


def minimax_h3() -> tuple[dict[str, Any], dict[str, Any]]:
    """One packed sequence: 8 of text, a keyframe of 16, 10 of audio, 48 of video."""
    sizes = {
        **HEADS, "attention_head_dim": 32, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 64, "in_channels": 4,
        "audio_in_channels": 4, "text_dim": 16, "freq_dim": 32, "time_embed_hidden_dim": 32, "time_embed_dim": 16, "rope_freq_dim": 4,
    }  # fmt: skip
    frame = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
    places = [torch.zeros(34, 3), *(torch.cat([torch.full((16, 1), 8 + 1.5 * t), frame], 1) for t in range(3))]
    text, keyframe, audio, clip = torch.arange(82).split([8, 16, 10, 48])
    inputs = {
        "hidden_states": noise(1, 64, 16), "audio_hidden_states": noise(1, 10, 4, seed=2),
        "encoder_hidden_states": noise(1, 8, 16, seed=1), "timestep": torch.tensor([0.5, 0.1, 0.0]),
        "timestep_indices": torch.tensor([2] * 8 + [1] * 16 + [0] * 58),
        "token_tags": torch.tensor([1] * 8 + [0] * 16 + [2] * 10 + [0] * 48),
        "position_ids": torch.cat(places).double(), "video_indices": torch.cat([keyframe, clip]),
        "audio_indices": audio, "text_indices": text,
    }  # fmt: skip
    return sizes, inputs


def kandinsky5() -> dict[str, Any]:
    places = [torch.arange(size) for size in (3, 4, 4)]
    return {
        **video(3, 8, 8, 4),
        "pooled_projections": noise(1, 16),
        "visual_rope_pos": places,
        "text_rope_pos": torch.arange(16),
    }


def newer() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], slice | None]]:
    """name -> class, sizes, arguments, text span."""
    words = {"encoder_attention_mask": (torch.arange(16) < 9)[None]}
    few = torch.full((1, 3), 500.0)
    cogvideox = {
        **HEADS, **CHANNELS, "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 2, "sample_width": 8,
        "sample_height": 8,
    }  # fmt: skip
    audio = {"audio_hidden_states": noise(1, 10, 4, seed=2), "pooled_projections": noise(1, 16)}
    allegro = {
        **HEADS, **CHANNELS, "attention_head_dim": 24, "cross_attention_dim": 48, "caption_channels": 16,
        "num_layers": 2,
    }  # fmt: skip
    return {
        "wan animate": ("WanAnimateTransformer3DModel", *wan_animate(), None),
        "chronoedit": ("ChronoEditTransformer3DModel", WAN, video(4, 3, 8, 8), None),
        "anyflow": (
            "AnyFlowTransformer3DModel",
            WAN,
            {**video(3, 4, 8, 8), "timestep": few, "r_timestep": torch.zeros(1, 3)},
            None,
        ),
        "helios": ("HeliosTransformer3DModel", *helios(), None),
        "framepack": ("HunyuanVideoFramepackTransformer3DModel", *framepack(), slice(72, 92)),
        "motif": ("MotifVideoTransformer3DModel", DUAL, {**video(4, 3, 8, 8), **words}, slice(48, 64)),
        "consisid": (
            "ConsisIDTransformer3DModel",
            {
                **cogvideox,
                "sample_frames": 9,
                "max_text_seq_length": 16,
                "is_train_face": False,
                "use_rotary_positional_embeddings": False,
            },
            video(3, 4, 8, 8),
            slice(0, 16),
        ),
        "easyanimate": (
            "EasyAnimateTransformer3DModel",
            {**cogvideox, "patch_size": 2, "mmdit_layers": 2, "text_embed_dim_t5": None},
            video(4, 3, 8, 8),
            slice(0, 16),
        ),
        "allegro": (
            "AllegroTransformer3DModel",
            {**allegro, "sample_width": 8, "sample_height": 8, "sample_frames": 3},
            {**video(4, 3, 8, 8), "image_rotary_emb": allegro_rope()},
            None,
        ),
        "ltx2": ("LTX2VideoTransformer3DModel", *ltx2(), None),
        "ltx2.0": (
            "LTX2VideoTransformer3DModel",
            *ltx2(gated_attn=False, audio_gated_attn=False, perturbed_attn=False, rope_type="interleaved"),
            None,
        ),
        "cosmos": ("CosmosTransformer3DModel", *cosmos(), None),
        "cosmos 2.5": ("CosmosTransformer3DModel", *cosmos(image=True), None),
        "cosmos 3": ("Cosmos3OmniTransformer", *cosmos3(), slice(0, 13)),
        "minimax h3": ("MiniMaxH3Transformer3DModel", *minimax_h3(), slice(0, 34)),
        # its RoPE rounds to bfloat16: in a second layer a difference in the last bit could become one of 2**-8
        "kandinsky5": ("Kandinsky5Transformer3DModel", {**KANDINSKY, "num_visual_blocks": 1}, kandinsky5(), None),
        "kandinsky6": (
            "Kandinsky6Transformer3DModel",
            {**KANDINSKY, "in_audio_dim": 4, "out_audio_dim": 4, "num_visual_blocks": 2},
            {**video(3, 8, 8, 9), **audio},
            None,
        ),
    }


def allegro_rope() -> Any:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    freqs_t, freqs_h, freqs_w, grid_t, grid_h, grid_w = get_3d_rotary_pos_embed_allegro(
        embed_dim=24, crops_coords=((0, 0), (4, 4)), grid_size=(4, 4), temporal_size=3
    )
    places = torch.cartesian_prod(grid_t, grid_h, grid_w).long()
    return (freqs_t, freqs_h, freqs_w), tuple(places.T[:, None])  # [1 n] each


def made(cls: str, sizes: dict[str, Any]) -> torch.nn.Module:
    """With noise added to every weight: some are zero at first, which would keep attention out of the output."""
    torch.manual_seed(0)
    model = getattr(diffusers, cls)(**sizes).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def video_of(output: Any) -> torch.Tensor:
    """Of what forward returns without a dict; Cosmos 3 returns a list of videos."""
    return output[0][0] if isinstance(output[0], list) else output[0]


def every() -> dict[str, tuple[torch.nn.Module, dict[str, Any], slice | None]]:
    """The first ones too."""
    return {**tiny_pipelines.transformers(), **transformers()}


def transformers() -> dict[str, tuple[torch.nn.Module, dict[str, Any], slice | None]]:
    return {
        name: (made(cls, sizes), inputs, text)
        for name, (cls, sizes, inputs, text) in newer().items()
        if hasattr(diffusers, cls)
    }
