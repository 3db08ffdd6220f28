"""Tiny pipelines of the classes in `tiny_models`: stock pipelines of diffusers, random weights, embeddings given
instead of text encoders.
"""

from __future__ import annotations

from typing import Any

import torch

import tiny_families as families
import tiny_models
import tiny_pipelines as tiny
from tiny_families import WITHOUT_SECOND, Family, embeds, euler, image, masked_embeds, without_text, words
from tiny_pipelines import SIZE, diffusers, noise, quiet, unipc


def made(name: str, **sizes: Any) -> Any:
    cls, stock, _, _ = tiny_models.newer()[name]
    return tiny_models.made(cls, {**stock, **sizes})


def kandinsky_embeds(names: tuple[str, str]) -> dict[str, torch.Tensor]:
    found = {}
    for sign, seed in (("", 1), ("negative_", 5)):
        found |= {f"{sign}{names[0]}": words(seed), f"{sign}{names[1]}": noise(1, 16, seed=seed + 1)}
    return found


def kandinsky5() -> Any:
    transformer = made("kandinsky5", visual_cond=True)
    return without_text("Kandinsky5T2VPipeline", transformer, euler(), tiny.hunyuan_vae(4), **WITHOUT_SECOND)


def kandinsky5_inputs() -> dict[str, Any]:
    lengths = torch.tensor([0, families.WORDS])
    more = {"prompt_cu_seqlens": lengths, "negative_prompt_cu_seqlens": lengths, "guidance_scale": 5.0}
    return {**SIZE, **kandinsky_embeds(("prompt_embeds_qwen", "prompt_embeds_clip")), **more}


def kandinsky6() -> Any:
    return without_text("Kandinsky6TI2VAPipeline", made("kandinsky6"), euler(), tiny.hunyuan_vae(4), **WITHOUT_SECOND)


def kandinsky6_inputs() -> dict[str, Any]:
    more = {"sample_audio": False, "guidance_scale": 5.0}
    return {**SIZE, **kandinsky_embeds(("prompt_embeds", "pooled_prompt_embeds")), **more}


def with_image(cls: str, transformer: Any) -> Any:
    """A pipeline around Wan's VAE and image encoder."""
    stock = families.wan_i2v()
    parts = {name: getattr(stock, name) for name in ("image_processor", "image_encoder")}
    return without_text(cls, transformer, unipc(), tiny.wan_vae(), **parts)


def chronoedit() -> Any:
    transformer = made("chronoedit", in_channels=36, out_channels=16, image_dim=8, added_kv_proj_dim=32)
    return with_image("ChronoEditPipeline", transformer)


def wan_animate() -> Any:
    return with_image("WanAnimatePipeline", made("wan animate", in_channels=36, latent_channels=16, out_channels=16))


def wan_animate_inputs() -> dict[str, Any]:
    from PIL import Image

    frames = {
        f"{kind}_video": [Image.new("RGB", (64, 64), (20 * i, 90, 200)) for i in range(9)] for kind in ("pose", "face")
    }
    size = {"height": 64, "width": 64, "segment_frame_length": 9, "guidance_scale": 5.0}
    return {**size, **embeds(), **frames, "image": image()}


def easyanimate() -> Any:
    vae = diffusers.AutoencoderKLMagvit(
        in_channels=3, down_block_types=("SpatialDownBlock3D",) + ("SpatialTemporalDownBlock3D",) * 3,
        up_block_types=("SpatialUpBlock3D",) + ("SpatialTemporalUpBlock3D",) * 3, block_out_channels=(8, 8, 8, 8), latent_channels=4,
        layers_per_block=1, norm_num_groups=2, spatial_group_norm=False,
    )  # fmt: skip
    return without_text("EasyAnimatePipeline", made("easyanimate"), euler(), vae.eval())


def framepack() -> Any:
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    vae, looks = (
        tiny.hunyuan_vae(4),
        SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=32, patch_size=16)).eval(),
    )
    parts = {"image_encoder": looks, "feature_extractor": SiglipImageProcessor(size={"height": 32, "width": 32})}
    return without_text("HunyuanVideoFramepackPipeline", made("framepack"), euler(), vae, **WITHOUT_SECOND, **parts)


def framepack_inputs() -> dict[str, Any]:
    pooled = {"pooled_prompt_embeds": noise(1, 8, seed=3), "negative_pooled_prompt_embeds": noise(1, 8, seed=4)}
    return {**SIZE, **masked_embeds(), **pooled, "image": image(), "true_cfg_scale": 3.0, "latent_window_size": 3}


def ltx2() -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,), decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, False),
        downsample_type=("spatial",), upsample_residual=(False,), upsample_factor=(1,), patch_size=16, patch_size_t=1,
    )  # fmt: skip
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8, mid_block_add_attention=False,
    )  # fmt: skip
    heads = {f"{kind}_connector_{name}": 2 if name != "attention_head_dim" else 8 for kind in ("video", "audio") for name in (
        "num_attention_heads", "attention_head_dim")}  # fmt: skip
    few = {f"{kind}_connector_{name}": size for kind in ("video", "audio") for name, size in (
        ("num_layers", 1), ("num_learnable_registers", None))}  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=1, rope_double_precision=False, **heads, **few
    ).eval()
    parts = {"audio_vae": sound.eval(), "connectors": connectors, "vocoder": None}
    return without_text("LTX2Pipeline", made("ltx2"), euler(), vae.eval(), **parts)


def ltx2_inputs() -> dict[str, Any]:
    """Guidance by the prompt, by a layer left out and by the other modality."""
    guidance = {"guidance_scale": 3.0, "stg_scale": 1.0, "modality_scale": 3.0, "spatio_temporal_guidance_blocks": [1]}
    return {**families.LARGE, "num_frames": 5, **masked_embeds(), **guidance}


def motif() -> Any:
    guider = diffusers.ClassifierFreeGuidance(guidance_scale=6.0)
    return without_text(
        "MotifVideoPipeline", made("motif", in_channels=33, out_channels=16), euler(), tiny.wan_vae(), guider=guider
    )


def cosmos() -> Any:
    class Harmless:
        def to(self, *_: Any) -> Any:
            return self

        def check_text_safety(self, _: Any) -> bool:
            return True

    scheduler = diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min"
    )
    return without_text("CosmosTextToWorldPipeline", made("cosmos"), scheduler, safety_checker=Harmless())


class Words:
    """What Cosmos 3's pipeline asks of its tokenizer: 8 tokens that depend on the words."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, name: str) -> int:
        return 2

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> Any:
        from transformers import BatchEncoding

        letters = sum(len(str(message["content"])) for message in conversation)
        return BatchEncoding({"input_ids": [3 + place * letters % 20 for place in range(8)]})


def cosmos3() -> Any:
    transformer = made("cosmos 3", latent_channel=16, patch_latent_dim=64, sound_gen=False)
    parts = {"text_tokenizer": Words(), "vae": tiny.wan_vae(), "scheduler": unipc(), "enable_safety_checker": False}
    return quiet(diffusers.Cosmos3OmniPipeline(transformer=transformer, **parts))


def run_cosmos3(pipe: Any, seed: int, steps: int) -> torch.Tensor:
    run = {**SIZE, "guidance_scale": 5.0, **tiny.latents_of(steps, seed)}
    return pipe("a cat", negative_prompt="a dog of another size", **run).video


def consisid() -> Any:
    from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # diffusers hides it without OpenCV

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8),
        latent_channels=4, layers_per_block=1, norm_num_groups=2,
    )  # fmt: skip
    parts = {"tokenizer": None, "text_encoder": None, "scheduler": diffusers.CogVideoXDDIMScheduler()}
    return quiet(ConsisIDPipeline(vae=vae.eval(), transformer=made("consisid", in_channels=8), **parts))


def minimax_h3(component: str = "transformer", **sizes: Any) -> Any:
    """The denoising loop of the modular pipeline; what comes before it are encoders and the layout of the sequence."""
    from diffusers.modular_pipelines.minimax_h3 import denoise

    loop = denoise.MiniMaxH3DenoiseStep if component == "transformer" else denoise.MiniMaxH3Ref2VADenoiseStep
    pipe = loop().init_pipeline()
    pipe.update_components(
        **{component: made("minimax h3", **sizes)}, scheduler=diffusers.MiniMaxH3Scheduler(),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(shift=4.0),
    )  # fmt: skip
    return quiet(pipe)


def run_minimax_h3(pipe: Any, seed: int, steps: int) -> torch.Tensor:
    _, _, inputs, _ = tiny_models.newer()["minimax h3"]
    times = []
    for scheduler in (pipe.scheduler, pipe.audio_scheduler):
        scheduler.set_timesteps(steps + 1)  # the last is where they end
        times.append(scheduler.timesteps)
    given, rows = torch.tensor([0.9, 1.0]), torch.tensor([3] * 8 + [2] * 16 + [1] * 10 + [0] * 48)
    layout = ("token_tags", "position_ids", "video_indices", "audio_indices", "text_indices")
    return pipe(
        latents=noise(64, 16, seed=seed), audio_latents=noise(10, 4, seed=seed + 5), prompt_embeds=inputs["encoder_hidden_states"],
        row_timestep_plan=[(torch.cat([torch.stack(pair), given]), rows) for pair in zip(*times, strict=True)],
        timesteps=times[0], audio_timesteps=times[1], num_condition_video_rows=16,
        denoiser_input_fields={name: inputs[name] for name in layout}, output="latents",
    )  # fmt: skip


def plain(cls: str, name: str, scheduler: Any, vae: Any = None) -> Any:
    """Latents have as many channels as Wan's VAE, where there is one."""
    channels = {} if vae is None else {"in_channels": 16, "out_channels": 16}
    return without_text(cls, made(name, **channels), scheduler, vae)


GUIDED = {**SIZE, **embeds(), "guidance_scale": 5.0}
MASKED = {**SIZE, **masked_embeds(), "guidance_scale": 5.0}
_FAMILIES = {
    "wan animate": Family(wan_animate, wan_animate_inputs, forwards=2),
    "chronoedit": Family(chronoedit, families.wan_i2v_inputs, forwards=2),
    # guidance is distilled
    "anyflow": Family(
        lambda: plain("AnyFlowPipeline", "anyflow", diffusers.FlowMapEulerDiscreteScheduler(), tiny.wan_vae()),
        lambda: {**SIZE, **embeds()},
    ),
    "helios": Family(
        lambda: plain("HeliosPipeline", "helios", euler(), tiny.wan_vae()),
        lambda: {**GUIDED, "num_latent_frames_per_chunk": 3},
        forwards=2,
    ),
    "framepack": Family(framepack, framepack_inputs, forwards=2),
    "motif": Family(motif, lambda: {**SIZE, **masked_embeds()}, forwards=2),
    "easyanimate": Family(easyanimate, lambda: MASKED, batch=2),
    "allegro": Family(
        lambda: plain("AllegroPipeline", "allegro", diffusers.EulerAncestralDiscreteScheduler()),
        lambda: {**MASKED, "negative_prompt": None},
        batch=2,
    ),
    # the forward of skip guidance leaves the attention of one layer out
    "ltx2": Family(ltx2, ltx2_inputs, forwards=3, left_out=1),
    "cosmos": Family(cosmos, lambda: {**GUIDED, "fps": 30}, forwards=2),
    "cosmos 3": Family(cosmos3, dict, forwards=2, call=run_cosmos3),
    "consisid": Family(
        consisid,
        lambda: {**SIZE, **embeds(), "image": image(), "max_sequence_length": 16, "guidance_scale": 6.0},
        batch=2,
    ),
    "minimax h3": Family(minimax_h3, dict, call=run_minimax_h3),
    "kandinsky5": Family(kandinsky5, kandinsky5_inputs, forwards=2),
    "kandinsky6": Family(kandinsky6, kandinsky6_inputs, forwards=2),
}
FAMILIES = {name: family for name, family in _FAMILIES.items() if hasattr(diffusers, tiny_models.newer()[name][0])}
