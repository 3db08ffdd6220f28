"""Models of real size with random weights, and the inputs of one of their forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parkattn.models import SIZES, row_for
from parklab.research import ResearchConfig


@dataclass(frozen=True)
class WholeModel:
    name: str  # of the released size, and of its preset
    video: tuple[int, int, int]  # frames, height, width in pixels
    sizes: Mapping[str, Any]  # where the model differs from its class's defaults
    text_tokens: int
    valid_text: int  # the rest is padding
    settings: dict[str, Any] = field(default_factory=dict)  # for sizes that the preset was not made for

    @property
    def transformer(self) -> str:
        """Its class in diffusers."""
        return SIZES[self.name].transformer

    @property
    def latents(self) -> tuple[int, int, int]:
        return SIZES[self.name].latents(*self.video)

    @property
    def tokens(self) -> int:
        return SIZES[self.name].tokens(*self.video)

    def config(self, **changes: Any) -> ResearchConfig:
        return ResearchConfig.preset(self.name, **{**self.settings, **changes})


def released(name: str, valid_text: int | None = None) -> WholeModel:
    size = SIZES[name]
    return WholeModel(name, size.video, size.made_with, size.text, size.text if valid_text is None else valid_text)


MODELS = {
    "wan2.1-1.3b": released("wan2.1-1.3b"),
    "wan2.1-14b": released("wan2.1-14b"),
    "wan2.1-14b-480p": replace(released("wan2.1-14b"), video=(81, 480, 832)),
    "hunyuanvideo": released("hunyuanvideo", valid_text=80),  # a prompt of 60 words
}
# for gates, and for rehearsals under Triton's interpreter, where every token costs seconds
_SETTINGS = {"query_clusters": 4, "key_clusters": 8, "kmeans_iterations": 1, "warm_iterations": 1}
_SMALL: dict[str, Any] = {"video": (9, 64, 64), "text_tokens": 16, "settings": _SETTINGS}
_HEADS = {"num_attention_heads": 2}  # of the real head dimension, which is what kernels are compiled for
SMALL_WAN = replace(
    MODELS["wan2.1-1.3b"],
    **_SMALL,
    valid_text=16,
    sizes={**_HEADS, "num_layers": 2, "text_dim": 32, "ffn_dim": 64, "freq_dim": 32},
)
SMALL_HUNYUAN = replace(
    MODELS["hunyuanvideo"], **_SMALL, valid_text=9,
    sizes={
        **_HEADS, "num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 32,
        "pooled_projection_dim": 16, "mlp_ratio": 1.0,
    },
)  # fmt: skip
SMALL = {**dict.fromkeys(MODELS, SMALL_WAN), "hunyuanvideo": SMALL_HUNYUAN}


def random_transformer(model: WholeModel, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The diffusers class with its own random first weights, made on the device; float32 where from_pretrained keeps
    float32.
    """
    import diffusers

    before = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            made = getattr(diffusers, model.transformer)(**model.sizes).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(before)
    kept = set(getattr(made, "_keep_in_fp32_modules", None) or ())
    for name, weights in made.named_parameters():
        if kept & set(name.split(".")):
            weights.data = weights.data.float()
    return made


def forward_inputs(
    model: WholeModel, transformer: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Arguments of one forward without its timestep."""
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    config = transformer.config
    inputs: dict[str, Any] = {"hidden_states": noise(1, config.in_channels, *model.latents)}
    inputs["encoder_hidden_states"] = noise(
        1, model.text_tokens, getattr(config, "text_dim", None) or config.text_embed_dim
    )
    if hasattr(config, "pooled_projection_dim"):
        inputs["encoder_attention_mask"] = (torch.arange(model.text_tokens, device=device) < model.valid_text)[None]
        inputs["pooled_projections"] = noise(1, config.pooled_projection_dim)
        inputs["guidance"] = torch.tensor([6000.0], device=device, dtype=dtype)
    return inputs


def run_forward(transformer: Any, inputs: dict[str, Any], timestep: float) -> torch.Tensor:
    steps = torch.tensor([timestep], device=inputs["hidden_states"].device)
    with torch.no_grad():
        return transformer(**inputs, timestep=steps, return_dict=False)[0]


@contextlib.contextmanager
def first_blocks(transformer: Any, count: int) -> Iterator[None]:
    """The transformer cut to the first blocks of each kind: all of its shapes in a fraction of its time."""
    names = [blocks for blocks, _ in row_for(transformer).blocks]
    whole = {name: getattr(transformer, name) for name in names}
    try:
        for name, blocks in whole.items():
            setattr(transformer, name, blocks[:count])
        yield
    finally:
        for name, blocks in whole.items():
            setattr(transformer, name, blocks)
