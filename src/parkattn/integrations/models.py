"""Which attention of which transformer is video self-attention: one row per model, no copied model code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelRow:
    """blocks: (attribute of the transformer that lists blocks, attribute of a block that is its video self-attention).

    text: where text tokens stand in the attention sequence: "none", "last" or "first".
    pair_mask: the stock processor blows its key padding up to a [tokens, tokens] mask, which we keep from being built.
    sequence_parallel: a plan for diffusers' enable_parallelism, where the model brings none.
    """

    blocks: tuple[tuple[str, str], ...]
    text: str = "none"
    preset: str = "wan2.1-14b"
    pair_mask: bool = False
    sequence_parallel: Callable[[], dict[str, Any]] | None = None

    def attentions(self, transformer: Any) -> list[Any]:
        """The attention modules; their place in this list is their layer number."""
        return [getattr(block, attention) for blocks, attention in self.blocks for block in getattr(transformer, blocks)]

    def all_blocks(self, transformer: Any) -> list[Any]:
        return [block for blocks, _ in self.blocks for block in getattr(transformer, blocks)]


def _hunyuan_sequence_parallel() -> dict[str, Any]:
    """Split video and text at the first block, gather video at the last projection; every rank then holds [video_i, text_i]."""
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    rope = {i: ContextParallelInput(split_dim=0, expected_dims=2, split_output=True) for i in (0, 1)}
    tokens = {name: ContextParallelInput(split_dim=1, expected_dims=3) for name in ("hidden_states", "encoder_hidden_states")}
    return {"rope": rope, "transformer_blocks.0": tokens, "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3)}


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
        sequence_parallel=_hunyuan_sequence_parallel,
    ),
    "HunyuanVideo15Transformer3DModel": ModelRow((("transformer_blocks", "attn"),), text="last", preset="hunyuanvideo", pair_mask=True),
    "CogVideoXTransformer3DModel": ModelRow((("transformer_blocks", "attn1"),), text="first"),
    "LTXVideoTransformer3DModel": ModelRow((("transformer_blocks", "attn1"),)),
    "MochiTransformer3DModel": ModelRow((("transformer_blocks", "attn1"),), text="last"),
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
