"""Tiny pipelines of the whole family: stock diffusers pipelines, random weights, embeddings given instead of text
encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tiny_pipelines as tiny
from tiny_pipelines import SIZE, diffusers, latents_of, noise, quiet, unipc

STEPS = 3
WORDS, WIDTH = 16, 16


@dataclass(frozen=True)
class Family:
    """build() -> pipeline; inputs(): what a call needs besides steps and generator; forwards: of the transformer per
    step.
    """

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    forwards: int = 1
    batch: int = 1  # of one forward
    left_out: int = 0  # attention calls of a step that guidance leaves out
    # (pipe, seed, steps) -> latents, where the pipeline has arguments of its own
    call: Callable[[Any, int, int], torch.Tensor] | None = None

    def run(self, pipe: Any, seed: int = 0, steps: int = STEPS) -> torch.Tensor:
        if self.call is not None:
            return self.call(pipe, seed, steps)
        found = pipe(**self.inputs(), **latents_of(steps, seed)).frames
        return found[0] if isinstance(found, list) else found


def image():
    from PIL import Image

    return Image.new("RGB", (64, 64), (90, 140, 60))


LARGE = {"height": 128, "width": 128}
WITHOUT_SECOND = {"text_encoder_2": None, "tokenizer_2": None}
SOME_WORDS = (torch.arange(WORDS) < 9)[None]  # the rest is padding


def words(seed: int = 1) -> torch.Tensor:
    return noise(1, WORDS, WIDTH, seed=seed)


def embeds() -> dict[str, torch.Tensor]:
    return {"prompt_embeds": words(), "negative_prompt_embeds": words(2)}


def masked_embeds() -> dict[str, torch.Tensor]:
    masks = {"prompt_attention_mask": SOME_WORDS, "negative_prompt_attention_mask": torch.ones_like(SOME_WORDS)}
    return {**embeds(), **masks}


def euler():
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def without_text(cls: str, transformer: Any, scheduler: Any, vae: Any = None, **parts: Any) -> Any:
    made = {"tokenizer": None, "text_encoder": None, "vae": vae, "scheduler": scheduler, "transformer": transformer}
    return quiet(getattr(diffusers, cls)(**made, **parts))


def wan_i2v():
    """Wan2.1's: the image also enters cross-attention."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    transformer = tiny.wan_transformer(in_channels=36, image_dim=8, added_kv_proj_dim=48)
    torch.manual_seed(0)
    small = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14,
    }  # fmt: skip
    encoder = CLIPVisionModel(CLIPVisionConfig(**small)).eval()
    parts = {"image_processor": CLIPImageProcessor(), "image_encoder": encoder}
    return without_text("WanImageToVideoPipeline", transformer, unipc(), tiny.wan_vae(), **parts)


def wan_i2v_inputs():
    # stock code takes the last 512 tokens of cross-attention for text
    texts = {"prompt_embeds": noise(1, 512, WIDTH), "negative_prompt_embeds": noise(1, 512, WIDTH, seed=2)}
    return {**SIZE, **texts, "image": image(), "guidance_scale": 5.0}


def wan_ti2v():
    """Wan2.2's 5B: one timestep per token."""
    return without_text("WanPipeline", tiny.wan_transformer(), unipc(), tiny.wan_vae(), expand_timesteps=True)


def vace():
    transformer = tiny.wan_transformer(cls="WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=96)
    return without_text("WanVACEPipeline", transformer, unipc(), tiny.wan_vae())


def vace_inputs():
    from PIL import Image

    frames = [Image.new("RGB", (64, 64), (20 * i, 100, 200)) for i in range(9)]
    masks = [Image.new("L", (64, 64), 255 * (i > 3)) for i in range(9)]
    return {**SIZE, **embeds(), "video": frames, "mask": masks, "guidance_scale": 5.0}


def skyreels(cls: str = "SkyReelsV2Pipeline", **sizes: Any):
    transformer = tiny.wan_transformer(cls="SkyReelsV2Transformer3DModel", **sizes)
    return without_text(cls, transformer, unipc(), tiny.wan_vae())


def hunyuan_i2v(kind: str):
    channels = 33 if kind == "latent_concat" else 16
    transformer = tiny.hunyuan_transformer(
        image_condition_type=kind, in_channels=channels, guidance_embeds=kind == "token_replace"
    )
    torch.manual_seed(0)
    parts = {**WITHOUT_SECOND, "image_processor": None}
    return without_text("HunyuanVideoImageToVideoPipeline", transformer, euler(), tiny.hunyuan_vae(), **parts)


def hunyuan_i2v_inputs():
    pooled = {"pooled_prompt_embeds": noise(1, 16, seed=3), "negative_pooled_prompt_embeds": noise(1, 16, seed=4)}
    return {**SIZE, **masked_embeds(), **pooled, "image": image(), "true_cfg_scale": 3.0}


def hunyuan15(**guidance: Any):
    torch.manual_seed(0)
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        **tiny.HEADS, in_channels=9, out_channels=4, num_layers=2, num_refiner_layers=1, mlp_ratio=1.0, patch_size=1, text_embed_dim=WIDTH,
        text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(4, 6, 6), target_size=64,
    ).eval()  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    guider = guidance.get("guider") or diffusers.ClassifierFreeGuidance(guidance_scale=6.0)
    pipe = without_text("HunyuanVideo15Pipeline", transformer, euler(), vae.eval(), **WITHOUT_SECOND, guider=guider)
    pipe.vision_num_semantic_tokens = 5
    return pipe


def hunyuan15_inputs():
    found, mask = dict(SIZE), torch.tensor([[1, 1, 0, 0]])
    for sign, seed in (("", 1), ("negative_", 5)):
        found |= {f"{sign}prompt_embeds": words(seed), f"{sign}prompt_embeds_mask": SOME_WORDS}
        found |= {f"{sign}prompt_embeds_2": noise(1, 4, 8, seed=seed), f"{sign}prompt_embeds_mask_2": mask}
    return found


def cogvideox():
    transformer, _, _ = tiny.cogvideox(words())
    return without_text("CogVideoXPipeline", transformer, diffusers.CogVideoXDDIMScheduler())


def ltx():
    transformer, _, _ = tiny.ltx(SOME_WORDS)
    return without_text("LTXPipeline", transformer, euler())


def mochi():
    transformer, _, _ = tiny.mochi(SOME_WORDS)
    return without_text("MochiPipeline", transformer, euler())


FAMILIES = {
    "wan i2v": Family(wan_i2v, wan_i2v_inputs, forwards=2),
    "wan ti2v": Family(wan_ti2v, lambda: {**SIZE, **embeds(), "guidance_scale": 5.0}, forwards=2),
    "wan vace": Family(vace, vace_inputs, forwards=2),
    "skyreels": Family(skyreels, lambda: {**SIZE, **embeds(), "guidance_scale": 5.0}, forwards=2),
    "hunyuan i2v, latent concat": Family(lambda: hunyuan_i2v("latent_concat"), hunyuan_i2v_inputs, forwards=2),
    "hunyuan i2v, token replace": Family(lambda: hunyuan_i2v("token_replace"), hunyuan_i2v_inputs, forwards=2),
    "hunyuan 1.5": Family(hunyuan15, hunyuan15_inputs, forwards=2),
    "cogvideox": Family(cogvideox, lambda: {**SIZE, **embeds(), "guidance_scale": 6.0}, batch=2),
    "ltx": Family(ltx, lambda: {**LARGE, "num_frames": 17, **masked_embeds(), "guidance_scale": 3.0}, batch=2),
    "mochi": Family(mochi, lambda: {**SIZE, "num_frames": 13, **masked_embeds(), "guidance_scale": 4.5}, batch=2),
}
