"""Random pipelines and transformers of a few thousand weights: real diffusers code, no download, milliseconds per step."""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    # older releases warn on import where there is no GPU, and tests turn warnings into errors
    warnings.simplefilter("ignore")
    import diffusers
    import transformers as text_models
    from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel, WanPipeline
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

STEPS = 4
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
SIZE = {"height": 64, "width": 64, "num_frames": 9}


def tokenizer(max_length: int = 512, bos: str | None = None):
    """A byte-level tokenizer, built in memory."""
    specials = [token for token in ("<pad>", "</s>", "<unk>", bos) if token]
    vocabulary = {token: i for i, token in enumerate(specials)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A </s>" if bos else "$A </s>",
        special_tokens=[(token, vocabulary[token]) for token in ("</s>", bos) if token],
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", **({"bos_token": bos} if bos else {})}
    fast = text_models.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=max_length, padding_side="right", **names
    )
    return fast, len(vocabulary)


def wan_transformer(seed: int = 0, cls: str = "WanTransformer3DModel", **changes):
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2}
    sizes = {
        "in_channels": 16, "out_channels": 16, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 64,
    }  # fmt: skip
    return getattr(diffusers, cls)(**{**heads, **sizes, **changes}).eval()


def unipc():
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def wan_vae():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()


def wan(experts: int = 1, seed: int = 0, pipeline: type = WanPipeline, **changes):
    """Wan2.1, or with two experts Wan2.2."""
    words, vocabulary = tokenizer()
    torch.manual_seed(seed)
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    encoder = text_models.UMT5EncoderModel(
        text_models.UMT5Config(vocab_size=vocabulary, **small)
    ).eval()  # as from_pretrained does
    parts = {"tokenizer": words, "text_encoder": encoder, "vae": wan_vae(), "scheduler": unipc()}
    parts["transformer"] = wan_transformer(seed, **changes)
    if experts == 2:
        parts |= {"transformer_2": wan_transformer(seed + 1, **changes), "boundary_ratio": 0.875}
    return quiet(pipeline(**parts))


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan_image_to_video():
    """As Wan2.2's: the first frame enters through the latents, not through an image encoder."""
    return wan(pipeline=diffusers.WanImageToVideoPipeline, in_channels=36)


def run_wan(pipe, steps: int = STEPS, seed: int = 0, prompt="a cat walks on the grass", **changes):
    """Latents."""
    guidance = {"max_sequence_length": 16, "guidance_scale": 5.0, "negative_prompt": "blurry"}
    return pipe(prompt=prompt, **{**SIZE, **guidance, **latents_of(steps, seed), **changes}).frames


def latents_of(steps: int, seed: int) -> dict:
    """What a call needs to give latents after so many steps."""
    return {"num_inference_steps": steps, "generator": torch.Generator().manual_seed(seed), "output_type": "latent"}


def hunyuan_transformer(seed: int = 0, **changes):
    torch.manual_seed(seed)
    sizes = {**HEADS, "num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1}
    text = {"text_embed_dim": 16, "pooled_projection_dim": 16, "rope_axes_dim": (4, 6, 6), "mlp_ratio": 1.0}
    return HunyuanVideoTransformer3DModel(**{"in_channels": 16, "out_channels": 16, **sizes, **text, **changes}).eval()


def hunyuan(seed: int = 0, **changes):
    words, vocabulary = tokenizer(bos="<s>")
    words_2, vocabulary_2 = tokenizer(77, bos="<s>")
    torch.manual_seed(seed)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    small |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    llama = text_models.LlamaConfig(
        vocab_size=vocabulary, num_hidden_layers=3, num_key_value_heads=2, max_position_embeddings=512, **small
    )
    clip = text_models.CLIPTextConfig(
        vocab_size=vocabulary_2, num_hidden_layers=1, max_position_embeddings=77, projection_dim=16, **small
    )
    texts = {
        "text_encoder": text_models.LlamaModel(llama).eval(),
        "text_encoder_2": text_models.CLIPTextModel(clip).eval(),
    }
    parts = {"tokenizer": words, "tokenizer_2": words_2, "vae": hunyuan_vae()}
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    return quiet(HunyuanVideoPipeline(**texts, **parts, transformer=hunyuan_transformer(seed, **changes)))


def hunyuan_vae(channels: int = 16):
    sizes = {"latent_channels": channels, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1}
    return diffusers.AutoencoderKLHunyuanVideo(**sizes, norm_num_groups=4).eval()


def run_hunyuan(pipe, steps: int = STEPS, seed: int = 0, prompt="a cat walks on the grass", **changes):
    """Latents. 64 places for text, of which the prompt fills some: the mask is a real one."""
    text = {"max_sequence_length": 64, "prompt_template": {"template": "{}", "crop_start": 0}}
    run = {**SIZE, **text, "guidance_scale": 6.0, **latents_of(steps, seed), **changes}
    return pipe(prompt=prompt, **run).frames


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def transformers() -> dict:
    """name -> (transformer, arguments of one forward, text span or None). 3 x 4 x 4 video tokens each."""
    video, timestep = noise(1, 16, 3, 8, 8), torch.tensor([500.0])
    words = noise(1, 16, 16, seed=1)
    wan_inputs = {"hidden_states": video, "timestep": timestep, "encoder_hidden_states": words}
    some_words = (torch.arange(16) < 9)[None]  # the rest is padding
    hunyuan_inputs = {**wan_inputs, "encoder_attention_mask": some_words, "pooled_projections": noise(1, 16, seed=2)}
    image_to_video = wan_transformer(in_channels=36, image_dim=8, added_kv_proj_dim=48)
    image_inputs = {"hidden_states": noise(1, 36, 3, 8, 8), "encoder_hidden_states": noise(1, 512, 16)}
    image_inputs["encoder_hidden_states_image"] = noise(1, 257, 8)
    per_token = torch.where(torch.arange(48) < 16, 0.0, 500.0)[None]
    vace = wan_transformer(cls="WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=8)
    control = {"control_hidden_states": noise(1, 8, 3, 8, 8), "control_hidden_states_scale": torch.ones(1)}
    replaced = hunyuan_transformer(image_condition_type="token_replace", guidance_embeds=False)
    return {
        "wan": (wan_transformer(), wan_inputs, None), "wan i2v": (image_to_video, {**wan_inputs, **image_inputs}, None),
        "wan ti2v": (wan_transformer(), {**wan_inputs, "timestep": per_token}, None),
        "wan vace": (vace, {**wan_inputs, **control}, None),
        "skyreels": (wan_transformer(cls="SkyReelsV2Transformer3DModel"), wan_inputs, None),
        "hunyuan": (hunyuan_transformer(), {**hunyuan_inputs, "guidance": torch.tensor([6000.0])}, slice(48, 64)),
        "hunyuan i2v": (replaced, hunyuan_inputs, slice(48, 64)), "hunyuan 1.5": hunyuan15(some_words),
        "cogvideox": cogvideox(words), "ltx": ltx(some_words), "mochi": mochi(some_words),
    }  # fmt: skip


def hunyuan15(some_words):
    torch.manual_seed(0)
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        **HEADS, in_channels=16, out_channels=16, num_layers=2, num_refiner_layers=1, mlp_ratio=1.0, patch_size=2, text_embed_dim=16,
        text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(4, 6, 6),
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 16, 3, 8, 8), "timestep": torch.tensor([500.0]), "image_embeds": torch.zeros(1, 5, 8),
        "encoder_hidden_states": noise(1, 16, 16, seed=1), "encoder_attention_mask": some_words,
        "encoder_hidden_states_2": noise(1, 4, 8, seed=2), "encoder_attention_mask_2": torch.tensor([[True, True, False, False]]),
    }  # fmt: skip
    return transformer, inputs, slice(48, 48 + 16 + 4 + 5)


def cogvideox(words):
    torch.manual_seed(0)
    transformer = diffusers.CogVideoXTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8,
        sample_frames=9, max_text_seq_length=16,
    ).eval()  # fmt: skip
    inputs = {"hidden_states": noise(2, 3, 4, 8, 8), "timestep": torch.tensor([500, 500])}
    inputs["encoder_hidden_states"] = words.repeat(2, 1, 1)
    return transformer, inputs, slice(0, 16)


def ltx(some_words):
    torch.manual_seed(0)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24, num_layers=2, caption_channels=16,
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 48, 8), "timestep": torch.tensor([500]), "num_frames": 3, "height": 4, "width": 4,
        "encoder_hidden_states": noise(1, 16, 16, seed=1), "encoder_attention_mask": some_words.long(),
    }  # fmt: skip
    return transformer, inputs, None


def mochi(some_words):
    torch.manual_seed(0)
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=16,
        time_embed_dim=8, max_sequence_length=16,
    ).eval()  # fmt: skip
    inputs = {"hidden_states": noise(1, 4, 3, 8, 8), "timestep": torch.tensor([500])}
    inputs |= {"encoder_hidden_states": noise(1, 16, 16, seed=1), "encoder_attention_mask": some_words}
    return transformer, inputs, slice(48, 48 + 9)  # stock code drops padding
