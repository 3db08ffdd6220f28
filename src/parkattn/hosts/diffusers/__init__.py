"""One line on a diffusers pipeline: enable, disable, summary.

parkattn.enable(pipe)            # PARK with the profile quality and the preset of the model
video = pipe(prompt).frames[0]
print(parkattn.summary(pipe))
parkattn.disable(pipe)           # every processor object is the old one again
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parkattn.checks import expect_count, expect_flag
from parkattn.engine.summary import Summary
from parkattn.hosts.diffusers.sequence_parallel import hunyuan_sequence_parallel
from parkattn.hosts.diffusers.session import Session, release, sessions_of, summary_of, transformers_of
from parkattn.methods import configured_method
from parkattn.models import no_references, row_for
from parkattn.park import ParkConfig
from parkattn.planned import PlannedMethod
from parkattn.reuse import dense_prefix
from parkattn.settings import MethodConfig
from parkattn.site import AttentionMethod

__all__ = ["Session", "Summary", "disable", "enable", "sequence_parallel_plan", "summary"]


def enable(
    target: Any,
    config: MethodConfig | Mapping[str, Any] | str | None = None,
    *,
    method: str | AttentionMethod = "park",
    total_steps: int | None = None,
    fuse: bool | None = None,
    image: bool = False,
    references: bool = False,
    **changes: Any,
) -> Session:
    """Run `method` in the video self-attention of a pipeline or a transformer.

    method: a name (park methods) or an AttentionMethod. config: the name of a profile ("paper", "quality", "fast",
    "turbo") or of a preset, a value of the method's config type, a mapping of fields, or None: quality for PARK, the
    model's preset or the defaults for other methods; changes override single fields. Enabling again replaces what was
    enabled before. total_steps is for a bare transformer, which has no scheduler to ask. fuse: run the stock blocks
    compiled, which fuses their norms, RoPE and modulation; None: on a GPU, in large runs. image: say that the model
    makes images, which gain at 4k (65,536 tokens) and not at usual sizes. references: given videos that a model packs
    before its own (MiniMax-H3) are sparse too, instead of exact.
    """
    row = row_for(next(iter(transformers_of(target).values())))
    if image is not row.image:
        kind = "images" if row.image else "videos"
        raise ValueError(
            f"image: expected {row.image} for {row.released}, which makes {kind}, got {image!r}; "
            f"pass image={row.image}."
        )
    expect_flag("references", references)
    if references and row.references is no_references:
        raise ValueError(
            f"references: expected False for {row.released}, which packs no videos before its own, got True; "
            "leave it out."
        )
    named = ParkConfig.DEFAULT_PROFILE if config is None and method == "park" else config
    made = configured_method(method, named, model=row.preset, **changes)
    if total_steps is not None:
        expect_count("total_steps", total_steps)
    expect_layers(target, getattr(made, "config", None))
    if isinstance(target, torch.nn.Module) and isinstance(made, PlannedMethod):
        dense_prefix(made.config, total_steps)  # refuses now what would fail in the first forward
    session = Session(target, made, total_steps, fuse, references)
    if config is None and row.borrows and row.preset in getattr(getattr(made, "config", None), "PRESETS", ()):
        session.advice.append(
            f"this model has no preset of its own and borrows {row.preset}'s; compare with dense before relying on it"
        )
    return session


def expect_layers(target: Any, config: MethodConfig | None) -> None:
    """A layer that no transformer has would be left out without a word."""
    named = getattr(config, "dense_layers", ())
    layers = max(len(row_for(transformer).attentions(transformer)) for transformer in transformers_of(target).values())
    if named and named[-1] >= layers:
        raise ValueError(
            f"dense_layers: expected layers from 0 to {layers - 1}, which this model has, got {named[-1]}; remove it."
        )


def disable(target: Any) -> None:
    """Undo enable without a trace; does nothing where nothing is enabled."""
    release(target)


def summary(target: Any) -> Summary:
    """Summary of the last generation; of all transformers of a pipeline, also if enabled one by one."""
    sessions = sessions_of(target)
    if not sessions:
        raise ValueError(
            "summary: expected a pipeline or transformer on which parkattn.enable was called, got one without; "
            "call enable first."
        )
    if len(set(sessions.values())) == 1:
        return next(iter(sessions.values())).summary()
    return summary_of(
        sessions,
        {name: sessions[name].name_of(module) for name, module in transformers_of(target).items() if name in sessions},
    )


def sequence_parallel_plan(target: Any) -> dict[str, Any] | None:
    """The cp_plan for enable_parallelism: ours where diffusers has none (HunyuanVideo), None where it has its own."""
    row = row_for(next(iter(transformers_of(target).values())))
    return hunyuan_sequence_parallel() if row.sequence_parallel else None
