"""The model: a stock diffusers `WanPipeline` in a small configuration, with a word-level tokenizer for the grammar."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from .grammar import WORDS

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"


@dataclass(frozen=True, kw_only=True)
class SpriteModelConfig:
    """One token is 8 x 8 pixels x 4 frames, so 81 frames of 400 x 576 are the familiar 75,600 tokens.

    The autoencoder works on 2 x 2 pixel patches and halves twice more, so that a CPU decodes a demo clip in seconds. It
    has Wan2.2's shortcuts around each change of resolution, which need no weights and train faster.
    """

    heads: int = 3
    head_dim: int = 128
    layers: int = 6
    ffn_dim: int = 1024
    text_dim: int = 128
    text_layers: int = 2
    latent_channels: int = 48
    encoder_dim: int = 32
    decoder_dim: int = 40
    flow_shift: float = 3.0

    def to_dict(self) -> dict:
        return asdict(self)


def build_tokenizer(words: tuple[str, ...] = WORDS) -> PreTrainedTokenizerFast:
    """One token per word of the grammar; the empty prompt (used for guidance) is the end token alone."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate((PAD, END, UNKNOWN, *words))}
    model = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    model.normalizer = normalizers.Lowercase()
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, vocabulary[END])])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=512,
        padding_side="right",
    )


def build_text_encoder(config: SpriteModelConfig, words: tuple[str, ...] = WORDS) -> UMT5EncoderModel:
    """Its heads begin by looking at their neighbours: "blue" before a shape and "blue" after "over" are different
    words.
    """
    from transformers import UMT5Config, UMT5EncoderModel

    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(words) + 3,
            d_model=config.text_dim,
            d_kv=32,
            d_ff=2 * config.text_dim,
            num_heads=4,
            num_layers=config.text_layers,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )
    with torch.no_grad():
        for block in encoder.encoder.block:
            # buckets of UMT5's relative positions: 0 is the word itself, 1 the one before it, 17 the one after it
            for head, bucket in enumerate((0, 1, 17)):
                block.layer[0].SelfAttention.relative_attention_bias.weight[bucket, head] += 3.0
    return encoder


def build_autoencoder(
    config: SpriteModelConfig, latents_mean: list[float] | None = None, latents_std: list[float] | None = None
) -> AutoencoderKLWan:
    from diffusers import AutoencoderKLWan

    channels = config.latent_channels
    vae = AutoencoderKLWan(
        base_dim=config.encoder_dim,
        decoder_base_dim=config.decoder_dim,
        z_dim=channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
        latents_mean=latents_mean or [0.0] * channels,
        latents_std=latents_std or [1.0] * channels,
    )
    for name, p in vae.named_parameters():
        if name.endswith(("conv2.weight", "conv2.bias", "proj.weight", "proj.bias")):
            torch.nn.init.zeros_(p)  # a residual block begins as nothing
    return vae


def build_transformer(config: SpriteModelConfig) -> WanTransformer3DModel:
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        in_channels=config.latent_channels,
        out_channels=config.latent_channels,
        text_dim=config.text_dim,
        freq_dim=256,
        ffn_dim=config.ffn_dim,
        num_layers=config.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )
    # a prediction of zero is the best start for flow matching on normalised latents
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def build_pipeline(config: SpriteModelConfig | None = None, seed: int = 0, **parts: Any) -> WanPipeline:
    """An untrained pipeline; `parts` replace components (vae, transformer, text_encoder, tokenizer). Global RNG
    untouched.
    """
    from diffusers import UniPCMultistepScheduler, WanPipeline

    config = config or SpriteModelConfig()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        builders = {"vae": build_autoencoder, "transformer": build_transformer, "text_encoder": build_text_encoder}
        made = {name: parts[name] if name in parts else build(config).eval() for name, build in builders.items()}
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=config.flow_shift
    )
    return WanPipeline(tokenizer=parts.get("tokenizer") or build_tokenizer(), scheduler=scheduler, **made)
