"""What is known of each model: one row per transformer class, one per released size. No torch, no copied model code.

A class says where its video self-attention is, where text stands in the sequence and how its tokens lie on the grid; a
size says how large the released model is. Hosts, doctor and benchmarks read the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Grid = tuple[int, int, int]  # (frames, height, width) in tokens


def grid_of_latents(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """hidden_states [b c f h w], cut into patches that the config names."""
    return _patched(arguments, config, channels=1)


def grid_of_frames_first(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """hidden_states [b f c h w]."""
    return _patched(arguments, config, channels=2)


def grid_by_name(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """hidden_states [b n c] are tokens already, and num_frames, height and width say how they lie."""
    named = [arguments.get(name) for name in ("num_frames", "height", "width")]
    frames, height, width = (int(size) if size is not None else 0 for size in named)
    return (frames, height, width) if frames and height and width else None


def _patched(arguments: Mapping[str, Any], config: Any, channels: int) -> Grid | None:
    shape = getattr(arguments.get("hidden_states"), "shape", ())
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, int):
        patch = (getattr(config, "patch_size_t", None) or 1, patch, patch)
    if len(shape) != 5 or not isinstance(patch, (tuple, list)) or len(patch) != 3:
        return None
    sizes = [*shape[1:channels], *shape[channels + 1 :]]
    frames, height, width = (size // p for size, p in zip(sizes, patch, strict=True))
    return frames, height, width


@dataclass(frozen=True)
class ModelRow:
    """One transformer class.

    blocks: (attribute of the transformer that lists blocks, attribute of a block that is its video self-attention).
    text: where text tokens stand in the attention sequence: "none", "last" or "first".
    preset: the name of the settings that methods know. borrows: they were made for another model, and nobody has tuned them for this one.
    grid: (arguments of forward, config) -> the grid of the video tokens, None where they do not say it.
    pair_mask: the stock processor expands its key padding to a [tokens, tokens] mask, which hosts keep from being built.
    sequence_parallel: the host has to bring a plan for splitting the sequence, because the model brings none.
    """

    blocks: tuple[tuple[str, str], ...]
    text: Literal["none", "first", "last"] = "none"
    preset: str = "wan2.1-14b"
    borrows: bool = False
    grid: Callable[[Mapping[str, Any], Any], Grid | None] = grid_of_latents
    pair_mask: bool = False
    sequence_parallel: bool = False

    def attentions(self, transformer: Any) -> list[Any]:
        """The attention modules; their place in this list is their layer number."""
        return [getattr(block, attention) for blocks, attention in self.blocks for block in getattr(transformer, blocks)]

    def all_blocks(self, transformer: Any) -> list[Any]:
        return [block for blocks, _ in self.blocks for block in getattr(transformer, blocks)]


_WAN = ModelRow((("blocks", "attn1"),))

MODELS: dict[str, ModelRow] = {
    "WanTransformer3DModel": _WAN,
    # control blocks come after the main ones, so that layer numbers mean the same as in Wan
    "WanVACETransformer3DModel": ModelRow((("blocks", "attn1"), ("vace_blocks", "attn1"))),
    "SkyReelsV2Transformer3DModel": _WAN,
    "HunyuanVideoTransformer3DModel": ModelRow(
        (("transformer_blocks", "attn"), ("single_transformer_blocks", "attn")),
        text="last",
        preset="hunyuanvideo",
        sequence_parallel=True,
    ),
    "HunyuanVideo15Transformer3DModel": ModelRow(
        (("transformer_blocks", "attn"),), text="last", preset="hunyuanvideo", borrows=True, pair_mask=True
    ),
    "CogVideoXTransformer3DModel": ModelRow((("transformer_blocks", "attn1"),), text="first", borrows=True, grid=grid_of_frames_first),
    "LTXVideoTransformer3DModel": ModelRow((("transformer_blocks", "attn1"),), borrows=True, grid=grid_by_name),
    "MochiTransformer3DModel": ModelRow((("transformer_blocks", "attn1"),), text="last", borrows=True),
}


def row_for(transformer: Any) -> ModelRow:
    """The row of the transformer's class, or of the class that it extends, as xDiT's do."""
    names = [cls.__name__ for cls in type(without_compile_wrapper(transformer)).__mro__]
    for name in names:
        if name in MODELS:
            return MODELS[name]
    supported = ", ".join(sorted(MODELS))
    raise ValueError(f"transformer: expected one of {supported}, got {names[0]}; this model stays dense, or add its row to MODELS.")


def without_compile_wrapper(module: Any) -> Any:
    """torch.compile(module) keeps the module behind _orig_mod."""
    return getattr(module, "_orig_mod", module)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """One released model. layers: blocks with video self-attention; text: places for text; passes: forwards per step.

    frames, pixels: how many make one token in each direction, after the first frame, which makes one by itself.
    made_with: arguments by which the class makes it, where they are not its defaults. video: the paper's, in frames and pixels.
    """

    transformer: str
    layers: int
    heads: int
    ffn: int
    text: int
    head_dim: int = 128
    cross_attention: bool = True
    passes: int = 2  # with classifier-free guidance
    frames: int = 4
    pixels: int = 16
    latent_pixels: int = 8
    video: tuple[int, int, int] = (81, 720, 1280)
    made_with: Mapping[str, int] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def latents(self, frames: int, height: int, width: int) -> Grid:
        return (frames - 1) // self.frames + 1, height // self.latent_pixels, width // self.latent_pixels

    def tokens(self, frames: int, height: int, width: int) -> int:
        return ((frames - 1) // self.frames + 1) * (height // self.pixels) * (width // self.pixels)


_WAN_14B = ModelSize(transformer="WanTransformer3DModel", layers=40, heads=40, ffn=13824, text=512)

SIZES: dict[str, ModelSize] = {
    "wan2.1-1.3b": ModelSize(
        transformer="WanTransformer3DModel", layers=30, heads=12, ffn=8960, text=512,
        made_with={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    ),
    "wan2.1-14b": _WAN_14B,
    "wan2.2-14b": _WAN_14B,
    # 20 dual and 40 single blocks; guidance is distilled into the model; 125 frames are 32 latent frames
    "hunyuanvideo": ModelSize(
        transformer="HunyuanVideoTransformer3DModel", layers=60, heads=24, ffn=12288, text=256, cross_attention=False, passes=1,
        video=(125, 720, 1280),
    ),
}  # fmt: skip
