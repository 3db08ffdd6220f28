"""PARK in LightX2V's Wan and MiniMax-H3 models, as one more class in its open registry of attention.

    from parkattn.hosts.lightx2v import register_attention

    attention = register_attention("quality")         # before the pipeline is built
    pipe.create_generator(attn_mode="park_attn", ...)  # or "self_attn_1_type": "park_attn" in a JSON config
    print(attention.summary())                         # after a video

Blocks pass `block_idx`, `scheduler` and `grid_sizes` to their self-attention: layer, step, branch and grid.
MiniMax-H3's scheduler holds the layout of its packed sequence instead of a grid, the video last. A run is a schedule:
`scheduler.prepare` makes new timesteps, or a new layout, and at the end of their last step plans are released.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_count, expect_string, shown
from parkattn.hosts.attached import CountingEngine
from parkattn.methods import configured_method
from parkattn.site import AttentionMethod


class RegisteredAttention(CountingEngine):
    """State shared by all layers: the engine, and where its run stands. One video at a time."""

    def __init__(self, method: AttentionMethod, min_tokens: int) -> None:
        super().__init__(method, min_tokens, unknown_step="the scheduler has no step_index: the step is unknown")
        self._running = False  # a run has begun since the last reset
        self._prepared: Any = None  # what `prepare` made for that run

    def reset(self) -> None:
        """Forget plans and statistics: the next call begins a run."""
        super().reset()
        self._running, self._prepared = False, None

    def attend(self, number: int, dense: Any, q: Tensor, k: Tensor, v: Tensor, told: Mapping[str, Any]) -> Tensor:
        """[n h d] in, [n h*d] out. number: of the object that is asked; dense: LightX2V's own, for what stays dense."""
        foreign = why_not_video(q, k, v, told)
        if foreign is not None:
            self.declined[foreign] += 1
            return dense.apply(q=q, k=k, v=v, **told)
        tokens, heads, dim = q.shape
        layer = self._read_clock(told)
        name, part = self.enter(number, layer)  # a part above 0: heads are attended one after the other
        out = self.engine.attend(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            layer=layer,
            dense=lambda: dense.apply(q=q, k=k, v=v, **told).reshape(tokens, heads, dim).transpose(0, 1)[None],
            transformer=name,
            part=part,
            text=self._text(told["scheduler"], tokens),
            reason=self._why_dense(tokens, packed_rows(told["scheduler"])),
        )
        self.leave()
        return out[0].transpose(0, 1).flatten(1)

    def _text(self, scheduler: Any, tokens: int) -> slice | None:
        """All that is packed before the video: text, keyframes, references and sound."""
        packed, grid = packed_rows(scheduler), self.engine.clock.grid
        return slice(0, tokens - math.prod(grid)) if packed == tokens and grid is not None else None

    def _why_dense(self, tokens: int, packed: int | None) -> str | None:
        grid = self.engine.clock.grid
        if packed is not None and packed != tokens:
            return f"{tokens} tokens are not the {packed} of the packed sequence: padding may be among them"
        if grid is None or (packed is None and math.prod(grid) != tokens):
            return f"{tokens} tokens are not those of the grid {grid}: text, sound or padding may be among them"
        return self.why_short(tokens)

    def _read_clock(self, told: Mapping[str, Any]) -> int:
        """Sets the clock -> the layer."""
        scheduler, clock = told["scheduler"], self.engine.clock
        step, prepared = getattr(scheduler, "step_index", None), getattr(scheduler, "timesteps", None)
        prepared = getattr(scheduler, "layout_cpu", prepared)  # MiniMax-H3 keeps its timesteps from video to video
        went_back = step is not None and clock.step is not None and step < clock.step
        if not self._running or prepared is not self._prepared or went_back:
            self._begin(scheduler, prepared)
        clock.step, clock.grid = step, told.get("grid_sizes") or packed_grid(scheduler)
        clock.branch = "cond" if getattr(scheduler, "infer_condition", True) else "uncond"
        return int(told["block_idx"])

    def _begin(self, scheduler: Any, prepared: Any) -> None:
        self.reset()
        sigmas, steps = getattr(scheduler, "sigmas", None), getattr(scheduler, "infer_steps", None)
        sigmas = getattr(scheduler, "video_sigmas", sigmas)
        levels = tuple(sigmas[:steps].tolist()) if isinstance(sigmas, Tensor) and steps is not None else ()
        self.engine.begin_run(steps, levels if levels and len(levels) == steps else None)
        self._running, self._prepared = True, prepared


def packed_rows(scheduler: Any) -> int | None:
    """Of MiniMax-H3's sequence; None: the model packs none."""
    return getattr(getattr(scheduler, "layout_cpu", None), "sequence_length", None)


def packed_grid(scheduler: Any) -> tuple[int, int, int] | None:
    if packed_rows(scheduler) is None:
        return None
    sizes = (scheduler.num_latent_frames, scheduler.latent_height, scheduler.latent_width)
    frames, height, width = (n // p for n, p in zip(sizes, scheduler.config.get("patch_size", (1, 2, 2)), strict=True))
    return frames, height, width


def why_not_video(q: Tensor, k: Tensor, v: Tensor, told: Mapping[str, Any]) -> str | None:
    """Why a call is not self-attention of one video in a numbered block."""
    if told.get("block_idx") is None or told.get("scheduler") is None:
        return "a call without block_idx and scheduler, such as cross-attention or HunyuanVideo's"
    if q.ndim != 3 or not q.shape == k.shape == v.shape:
        return "q, k and v are not of one shape [tokens, heads, d]"
    if told.get("attn_mask") is not None or told.get("causal") or told.get("drop_rate"):
        return "the call has a mask or dropout"
    sequences = [told[name].numel() - 1 for name in ("cu_seqlens_q", "cu_seqlens_kv") if told.get(name) is not None]
    return "several sequences in one call" if any(count > 1 for count in sequences) else None


def register_attention(
    profile: str = "quality",
    *,
    name: str = "park_attn",
    dense: str = "torch_sdpa",
    model: str = "wan2.1-14b",
    min_tokens: int = 8192,
    **changes: Any,
) -> RegisteredAttention:
    """Puts PARK into LightX2V's registry of attention as name, which must be done before a model is built.

    dense: the entry of the registry that answers what stays dense. model: whose preset the profile builds on.
    changes override single fields of the profile, such as top_p.
    """
    expect_count("min_tokens", min_tokens, least=0)
    expect_string("name", name)
    method = configured_method("park", profile, model=model, **changes)
    registry, template = _open_registry()
    expect_choice("dense", dense, registry)
    if name in registry:
        raise ValueError(f"name: expected one that LightX2V's registry has not, got {shown(name)}; pass another name.")
    state, numbers = RegisteredAttention(method, min_tokens), itertools.count()

    class ParkAttnWeight(template):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.config: dict[str, Any] = {}
            self.number, self.dense = next(numbers), registry[dense]()

        @torch.compiler.disable
        def apply(self, q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Tensor:
            return state.attend(self.number, self.dense, q, k, v, told)

    registry.register(ParkAttnWeight, key=name)
    return state


def _open_registry() -> tuple[Any, Any]:
    """ATTN_WEIGHT_REGISTER with LightX2V's own entries, and the class that entries derive from."""
    try:
        importlib.import_module("lightx2v.common.ops.attn")
    except ModuleNotFoundError as missing:
        line = f"{missing.name}: expected for LightX2V, got no such package; run this where LightX2V runs."
        raise ModuleNotFoundError(line, name=missing.name) from None
    template = importlib.import_module("lightx2v.common.ops.attn.template")
    return importlib.import_module("lightx2v.utils.registry_factory").ATTN_WEIGHT_REGISTER, template.AttnWeightTemplate
