"""ComfyUI's forwards and attention calls, in our words."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from parkattn.checks import expect_fraction
from parkattn.compat import without_compile_wrapper

# by class of the model, or one that it extends; LTX and MiniMax-H3 borrow theirs
PRESETS = {
    "WanModel": "wan2.1-14b",
    "HunyuanVideo": "hunyuanvideo",
    "LTXVModel": "wan2.1-14b",
    "MiniMaxH3Model": "hunyuanvideo",
}
LIKE_SCHEDULED = 1 - 1e-6  # a sampler's sigma equals one of its schedule up to rounding


class Forward(NamedTuple):
    """One forward of a diffusion model."""

    grid: tuple[int, int, int] | None  # (frames, height, width) of the video tokens; None: the latent is an image
    before_text: int | None  # where text begins in the sequence; None: it has none
    double_blocks: int  # which single blocks are counted after
    name: str  # of what is denoised, where a step has several windows
    branch: str
    calls: collections.Counter[int]  # layer -> self-attention calls so far
    unnumbered: tuple[int, ...] | None = None  # blocks in the order of their calls, where calls do not say theirs
    before_video: int | None = None  # the least that is packed before the video; None: nothing is
    width: int | None = None  # of the video's self-attention, where sound has one too
    replaced: bool = False  # another node has put something in the place of a block that is counted by its calls

    @classmethod
    def read(cls, model: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> Forward:
        """given: the arguments of the model's forward by name, of which options are the transformer_options."""
        latent, reference = video_of(given["x"]), given.get("ref_latent")
        patch = getattr(getattr(model, "patchifier", model), "patch_size", None)  # LTX: of its patchifier
        grid = grid_of(latent, patch or (1, 1, 1)) if latent.ndim == 5 else None
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
        found = cls(grid, before_text, blocks, name, branch or "cond", collections.Counter())
        return found._replace(**counted_blocks(model, given, options))

    @property
    def tokens(self) -> int:
        """The least that self-attention has."""
        return max(math.prod(self.grid or (0,)) + (self.before_video or 0), self.before_text or 0)

    def text(self, tokens: int) -> slice | None:
        """The span of all that is not the video, of so many tokens."""
        if self.before_video is not None:
            return slice(0, tokens - math.prod(self.grid or (0,)))
        start = self.before_text
        return slice(start, tokens) if start is not None and start < tokens else None

    def enter(self, options: Mapping[str, Any]) -> tuple[int, str]:
        """The layer of a call, and a name that tells its calls apart: VACE's blocks have the main blocks' numbers."""
        if self.unnumbered is not None:
            layer = self.unnumbered[self.calls.total()]
            self.calls[layer] += 1
            return layer, self.name
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
        if forward.unnumbered is None and "block_index" not in self.options:
            return "a call outside the numbered blocks"
        if tokens != keys:
            return "cross-attention"
        if tokens < forward.tokens:
            return "a call over a part of the video tokens"
        wide = self.heads * self.q.shape[-1] if self.skip_reshape else self.q.shape[-1]
        if forward.width is not None and forward.width != wide:
            return "attention of sound"
        if forward.unnumbered is not None and forward.calls.total() >= len(forward.unnumbered):
            return "a call after those of all blocks"
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


def counted_blocks(model: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """For models whose calls do not say their block: each block has one self-attention over the video, in order.

    LTX: blocks that guidance leaves out have none. MiniMax-H3: text, references and sound are packed before the video.
    """
    replaced = {"replaced": bool(options.get("patches_replace", {}).get("dit"))}
    if hasattr(model, "transformer_blocks"):
        left_out = options.get("stg_self_attn_blocks") or ()
        blocks = tuple(i for i in range(len(model.transformer_blocks)) if i not in left_out)
        return {"unnumbered": blocks, "width": getattr(model, "inner_dim", None), **replaced}
    if isinstance(given["x"], (list, tuple)):
        text, (_, sound) = given["context"].shape[1], given["x"]
        return {
            "unnumbered": tuple(range(len(model.blocks))),
            "before_video": text + math.prod(sound.shape[2:]),
            **replaced,
        }
    return {}


def video_of(latents: Any) -> Tensor:
    """Models that make sound too get a list, the video first."""
    found: Tensor = latents[0] if isinstance(latents, (list, tuple)) else latents
    return found


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
    """Why another node may leave out steps, as EasyCache does: forecasts beside its own would be of forecasts."""
    wrappers = (name for of_kind in options.get("wrappers", {}).values() for name in of_kind)
    found = next(
        (str(name) for name in (*options, *wrappers) if "cache" in str(name).lower() or name == "rel_l1_thresh"), None
    )
    return None if found is None else f"the model has a step cache: {found}"


def preset_for(model: Any, dense_layers: Collection[int]) -> str:
    """The preset of a MODEL; refuses a model that PARK cannot run in, and blocks that it has not."""
    transformer = without_compile_wrapper(model.get_model_object("diffusion_model"))
    presets = [PRESETS[cls.__name__] for cls in type(transformer).__mro__ if cls.__name__ in PRESETS]
    if not presets:
        got = type(transformer).__name__
        raise ValueError(
            f"model: expected Wan, HunyuanVideo, LTX or MiniMax-H3, got {got}; remove the node for this model."
        )
    names = ("blocks", "double_blocks", "single_blocks", "transformer_blocks")
    last = sum(len(getattr(transformer, name, ())) for name in names) - 1
    if dense_layers and max(dense_layers) > last:
        raise ValueError(f"dense_layers: expected blocks from 0 to {last}, got {max(dense_layers)}; remove it.")
    return presets[0]


def expect_window(start_percent: float, end_percent: float) -> None:
    for name, percent in (("start_percent", start_percent), ("end_percent", end_percent)):
        expect_fraction(name, percent, zero=True)
    if start_percent >= end_percent:
        raise ValueError(f"end_percent: expected more than start_percent={start_percent}, got {end_percent}; raise it.")
