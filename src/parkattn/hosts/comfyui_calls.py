"""What ComfyUI tells of a forward and of an attention call, in our words."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from parkattn.checks import expect_fraction
from parkattn.models import without_compile_wrapper

PRESETS = {"WanModel": "wan2.1-14b", "HunyuanVideo": "hunyuanvideo"}  # by class of the model, or one that it extends
LIKE_SCHEDULED = 1 - 1e-6  # a sampler's sigma equals one of its schedule up to rounding


class Forward(NamedTuple):
    """One forward of a diffusion model."""

    grid: tuple[int, int, int] | None  # (frames, height, width) of the video tokens; None: the latent is an image
    before_text: int | None  # where text begins in the sequence; None: it has none
    double_blocks: int  # which single blocks are counted after
    name: str  # of what is denoised, where a step has several windows
    branch: str
    calls: collections.Counter[int]  # layer -> self-attention calls so far

    @classmethod
    def read(cls, model: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> Forward:
        """given: the arguments of the model's forward by name, of which options are the transformer_options."""
        latent, reference = given["x"], given.get("ref_latent")
        grid = grid_of(latent, model.patch_size) if latent.ndim == 5 else None
        before_text = None
        if grid is not None and hasattr(model, "double_blocks"):
            frame = (0,) if reference is None else grid_of(reference, model.patch_size)
            before_text = math.prod(grid) + math.prod(frame)
        # conditions have names of their own, because a branch may have several
        named = zip(options.get("cond_or_uncond", ()), options.get("uuids", ()), strict=False)
        branch = ", ".join(f"{'uncond' if kind else 'cond'} {uuid}" for kind, uuid in named)
        window = getattr(options.get("context_window"), "index_list", None)
        name = "model" if window is None else f"frames {window[0]} to {window[-1]}"
        blocks = len(getattr(model, "double_blocks", ()))
        return cls(grid, before_text, blocks, name, branch or "cond", collections.Counter())

    @property
    def tokens(self) -> int:
        """The least that self-attention has."""
        return max(math.prod(self.grid or (0,)), self.before_text or 0)

    def enter(self, options: Mapping[str, Any]) -> tuple[int, str]:
        """The layer of a call, and a name that tells its calls apart: VACE's blocks have the main blocks' numbers."""
        layer = options["block_index"] + (self.double_blocks if options.get("block_type") == "single" else 0)
        self.calls[layer] += 1
        return layer, self.name if self.calls[layer] == 1 else f"{self.name}, call {self.calls[layer]}"


class Call(NamedTuple):
    """Arguments of ComfyUI's attention functions: [b n h*d], or [b h n d] with skip_reshape."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    mask: Tensor | None
    attn_precision: Any
    skip_reshape: bool
    skip_output_reshape: bool
    others: Mapping[str, Any]

    @classmethod
    def read(
        cls, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, attn_precision: Any = None,
        skip_reshape: bool = False, skip_output_reshape: bool = False, **others: Any,
    ) -> Call:  # fmt: skip
        return cls(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, others)

    @property
    def options(self) -> Mapping[str, Any]:
        return self.others.get("transformer_options") or {}

    def by_head(self, x: Tensor, laid_out: bool) -> Tensor:
        return x if laid_out else x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def why_not_video(self, forward: Forward | None) -> str | None:
        """Why this is not self-attention of a block over all video tokens."""
        tokens, keys = (x.shape[2 if self.skip_reshape else 1] for x in (self.q, self.k))
        if forward is None:
            return "a call outside the forward of the patched model"
        if "block_index" not in self.options:
            return "a call outside the numbered blocks"
        if tokens != keys:
            return "cross-attention"
        if tokens < forward.tokens:
            return "a call over a part of the video tokens"
        by_head = self.skip_reshape and self.q.shape[1] == self.heads
        if not self.q.shape == self.k.shape == self.v.shape or self.skip_reshape != by_head:
            return "q, k and v differ in their heads"
        return None

    def why_dense(self) -> str | None:
        if self.mask is not None:
            return "the call has a mask"
        if self.attn_precision not in (None, self.q.dtype):
            return f"the call asks for a precision of {self.attn_precision}"
        return None


def grid_of(latent: Tensor, patch: Sequence[int]) -> tuple[int, int, int]:
    """Latents are padded to whole patches."""
    frames, height, width = (-(-size // p) for size, p in zip(latent.shape[2:], patch, strict=True))
    return frames, height, width


def step_of(sigma: float, levels: Sequence[float]) -> int:
    """The last step of the schedule whose level is not below sigma: samplers also ask between two steps."""
    return max(0, sum(level >= sigma * LIKE_SCHEDULED for level in levels) - 1)


def sigmas_of(sampling: Any, start_percent: float, end_percent: float) -> tuple[float, float]:
    """The largest and the least sigma of a window; the ends of the run have no bound, whatever a sampler adds there."""
    largest = float(sampling.percent_to_sigma(start_percent)) if start_percent > 0 else math.inf
    return largest, float(sampling.percent_to_sigma(end_percent)) if end_percent < 1 else 0.0


def other_cache(options: Mapping[str, Any]) -> str | None:
    """Why another node may leave out steps, as EasyCache, LazyCache and TeaCache do: forecasts beside its own would be of forecasts."""
    wrappers = (name for of_kind in options.get("wrappers", {}).values() for name in of_kind)
    found = next((str(name) for name in (*options, *wrappers) if "cache" in str(name).lower() or name == "rel_l1_thresh"), None)
    return None if found is None else f"the model has a step cache: {found}"


def preset_for(model: Any, dense_layers: Collection[int]) -> str:
    """The preset of a MODEL; refuses a model that PARK cannot run in, and blocks that it has not."""
    transformer = without_compile_wrapper(model.get_model_object("diffusion_model"))
    presets = [PRESETS[cls.__name__] for cls in type(transformer).__mro__ if cls.__name__ in PRESETS]
    if not presets:
        got = type(transformer).__name__
        raise ValueError(f"model: expected Wan or HunyuanVideo, got {got}; remove the node for this model.")
    names = ("blocks", "double_blocks", "single_blocks")
    last = sum(len(getattr(transformer, name, ())) for name in names) - 1
    if dense_layers and max(dense_layers) > last:
        raise ValueError(f"dense_layers: expected blocks from 0 to {last}, got {max(dense_layers)}; remove it.")
    return presets[0]


def expect_window(start_percent: float, end_percent: float) -> None:
    for name, percent in (("start_percent", start_percent), ("end_percent", end_percent)):
        expect_fraction(name, percent, zero=True)
    if start_percent >= end_percent:
        raise ValueError(f"end_percent: expected more than start_percent={start_percent}, got {end_percent}; raise it.")
