"""Numbers of blocks that retrieval is measured with: those that are asked for, or those of the model that attends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parkattn.models import MODELS
from parklab.experiments.captures import MODEL, read_about
from parklab.research import ResearchConfig
from parklab.studio.model_folder import judge_index

COUNTS = {"query_clusters", "key_clusters"}


def preset_in(folder: Path) -> str | None:
    """The preset of the model in a diffusers folder, by its transformer's class."""
    row = MODELS.get(judge_index(folder)["transformer"][1])
    return None if row is None else row.preset


def preset_of_capture(path: Path, changes: Mapping[str, Any]) -> str | None:
    """As the capture says it; None where numbers of blocks are asked for and nothing else depends on it."""
    named: str | None = read_about(path).get(MODEL)
    if named is None and not changes.keys() >= COUNTS:
        wanted = f"model: expected the model of {path.name}, which does not say it, got none"
        raise ValueError(f"{wanted}; pass --model FOLDER, or --set query_clusters=N --set key_clusters=N.")
    return named


def blocks_for(preset: str | None, changes: Mapping[str, Any]) -> ResearchConfig:
    """What measuring retrieval depends on, and no other setting of the preset: equal measurements have equal cells."""
    known = {field.name for field in dataclasses.fields(ResearchConfig)}
    counts = ResearchConfig.for_model(preset).long_video_blocks
    return ResearchConfig(long_video_blocks=counts).replace(
        **{name: value for name, value in changes.items() if name in known}
    )


def settings_of_plans(config: ResearchConfig) -> dict[str, Any]:
    """What a cell about retrieval asks for: a plan by itself depends neither on the precision of attention nor on what
    the steps of a run do; anchors by error were a setting once.
    """
    left_out = ("precision", "tolerance", "refresh_falls", "sage_dense", "noise_tau", "exact_anchors")
    asked = {name: value for name, value in config.to_dict().items() if name not in left_out}
    return {**asked, "anchor_error": None}
