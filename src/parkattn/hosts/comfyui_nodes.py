"""ComfyUI's nodes: what a graph shows of `patch_model`, and a summary that runs after the sampler."""

from __future__ import annotations

import re
from typing import Any

from parkattn.checks import shown
from parkattn.hosts.comfyui import patch_model, summary_of
from parkattn.methods import method_entry


def block_numbers(text: str) -> tuple[int, ...]:
    """ "0, 2-4" -> (0, 2, 3, 4)"""
    numbers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        found = re.fullmatch(r"(\d{1,4})(?:\s*-\s*(\d{1,4}))?", part)
        if found is None:
            raise ValueError(f"dense_blocks: expected numbers and ranges as in 0, 2-4, got {shown(part)}; correct it.")
        first, last = int(found[1]), int(found[2] or found[1])
        numbers.update(range(min(first, last), max(first, last) + 1))
    return tuple(sorted(numbers))


def share_input(default: float, step: float, tooltip: str) -> tuple[str, dict[str, Any]]:
    return "FLOAT", {"default": default, "min": 0.0, "max": 1.0, "step": step, "tooltip": tooltip}


class ParkAttention:
    """MODEL in, MODEL with PARK out; the model that came in is left as it is."""

    CATEGORY = "model_patches/attention"
    DESCRIPTION = (
        "Block-sparse attention (PARK) for Wan, HunyuanVideo, LTX and MiniMax-H3. "
        "Other attention calls stay as they are."
    )
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        profiles = list(method_entry("park").config.PROFILES)
        profile = {"default": "quality", "tooltip": "turbo, fast, quality, or the paper's settings."}
        blocks = "Blocks that stay dense, such as 0, 2-4. Single blocks are counted after double ones."
        return {
            "required": {
                "model": ("MODEL",),
                "profile": (profiles, profile),
                "top_p": share_input(0.0, 0.01, "0: the profile's. 1: dense."),
                "start_percent": share_input(0.0, 0.001, "Earlier steps: dense."),
                "end_percent": share_input(1.0, 0.001, "Later steps: dense."),
                "dense_blocks": ("STRING", {"default": "", "tooltip": blocks}),
                "min_tokens": ("INT", {"default": 8192, "min": 0, "max": 1 << 24, "tooltip": "With fewer: dense."}),
            },
            "optional": {"tolerance": share_input(0.0, 0.001, "Forecast steps. 0.004 is usual. 0: none.")},
        }

    def patch(
        self,
        model: Any,
        profile: str,
        top_p: float,
        start_percent: float,
        end_percent: float,
        dense_blocks: str,
        min_tokens: int,
        tolerance: float = 0.0,
    ) -> tuple[Any]:
        changes: dict[str, Any] = {"top_p": top_p} if top_p > 0 else {}
        if tolerance > 0:
            changes["tolerance"] = tolerance
        if dense_blocks.strip():
            changes["dense_layers"] = block_numbers(dense_blocks)
        window = {"start_percent": start_percent, "end_percent": end_percent}
        return (patch_model(model, profile, min_tokens=min_tokens, **window, **changes),)


class ParkAttentionSummary:
    """Takes the sampler's latent, so that it runs after the sampler, and hands it on."""

    CATEGORY = "model_patches/attention"
    DESCRIPTION = "What PARK did in the sampler whose latent comes in: steps, density, and why calls were dense."
    FUNCTION = "report"
    OUTPUT_NODE = True
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latent", "summary")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",)}}

    def report(self, model: Any, latent: Any) -> dict[str, Any]:
        text = str(summary_of(model))
        return {"ui": {"text": (text,)}, "result": (latent, text)}


NODE_CLASS_MAPPINGS: dict[str, type] = {"ParkAttention": ParkAttention, "ParkAttentionSummary": ParkAttentionSummary}
NODE_DISPLAY_NAME_MAPPINGS = {"ParkAttention": "PARK Attention", "ParkAttentionSummary": "PARK Attention Summary"}
