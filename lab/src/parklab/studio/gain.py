"""What sparse attention can gain: attention's share of the work, what arithmetic makes of it, and a bound.

No measurement, but for `why_no_gain`, which reads a record. Compared are two runs of one model whose blocks are
alike, both compiled or both stock. The arithmetic gives every FLOP the same speed, so it is an estimate: a dense
kernel that is slow for its FLOPs, as with HunyuanVideo's mask, makes the real gain larger. Dense steps cost the same
on both sides whatever the kernels do: that is the bound. Compiled blocks, which `enable` may bring along on a GPU,
are a gain of their own on top of both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parkattn.checks import expect_choice
from parkattn.models import SIZES, ModelSize
from parkattn.park import ParkConfig
from parklab.sprites import CHECKPOINT

# dense bf16 tensor peak in TFLOP/s from the vendors' data sheets; a name is matched inside torch's device name
GPUS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 5090": 209.0, "RTX 4090": 165.0, "RTX 3090": 71.0}
UTILISATION = 0.5  # of the peak, for a rough time per step
LITTLE = 0.05  # of the time of denoising: less than this is said to be little


def shipped_size() -> ModelSize | None:
    paths = [Path(CHECKPOINT) / part / "config.json" for part in ("transformer", "vae")]
    if not all(path.exists() for path in paths):
        return None
    config, vae = (json.loads(path.read_text()) for path in paths)
    return ModelSize(
        transformer=config["_class_name"], layers=config["num_layers"], heads=config["num_attention_heads"], ffn=config["ffn_dim"], text=32,
        head_dim=config["attention_head_dim"], passes=1, frames=vae["scale_factor_temporal"], latent_pixels=vae["scale_factor_spatial"],
        pixels=vae["scale_factor_spatial"] * config["patch_size"][1],
    )  # fmt: skip


def model_size(name: str) -> ModelSize:
    shipped = shipped_size()
    known = SIZES | ({"sprites": shipped} if shipped else {})
    expect_choice("model", name, known)
    return known[name]


def estimate(model: str, *, frames: int, height: int, width: int, gpu: str | None = None, density: float = 0.25) -> dict[str, Any]:
    """density: of the sparse steps. by_arithmetic: the speed-up of denoising if sparse attention cost exactly its density (Amdahl)."""
    size = model_size(model)
    n = size.tokens(frames, height, width)
    if n < 1:
        raise ValueError(f"height, width: expected at least {size.pixels} pixels each, got {height} x {width}; raise them.")
    d = size.width
    in_attention = n if size.cross_attention else n + size.text
    attention = 4 * in_attention**2 * d
    cross = 4 * n * d**2 + 4 * size.text * d**2 + 4 * n * size.text * d if size.cross_attention else 0
    rest = 8 * in_attention * d**2 + cross + 4 * in_attention * d * size.ffn
    share = attention / (attention + rest)
    preset = model if model in ParkConfig.PRESETS else None  # the model in the box has none
    dense_steps = ParkConfig.for_model(preset).dense_fraction
    computed = dense_steps + (1 - dense_steps) * density
    flops = size.layers * size.passes * (attention + rest)
    peak = gpu_peak(gpu)
    return {
        "model": model,
        "video": [frames, height, width],
        "tokens": n,
        "attention_share": share,
        "density_of_sparse_steps": density,
        "dense_steps": dense_steps,
        "compared": "attention alone replaced; compiled blocks gain more, and so does fast, whose density is lower",
        "by_arithmetic": 1 / (1 - share * (1 - computed)),
        "by_arithmetic_of_profiles": {
            name: 1 / (1 - share * (1 - density) * (1 - _dense_steps(ParkConfig.profile(name, model=preset))))
            for name in ParkConfig.PROFILES
        },
        "by_arithmetic_without_any_attention_in_sparse_steps": 1 / (1 - share * (1 - dense_steps)),
        "bound": 1 / dense_steps,
        "tflop_per_step": flops / 1e12,
        "gpu": gpu,
        "dense_seconds_per_step_about": None if peak is None else flops / (peak * 1e12 * UTILISATION),
    }


def _dense_steps(config: ParkConfig) -> float:
    """Share of a run of the usual length; an anchor is a dense step that costs little more."""
    return config.dense_fraction if config.anchors is None else config.anchors / config.reference_steps


def gpu_peak(name: str | None) -> float | None:
    return next((peak for known, peak in GPUS.items() if name and known.lower() in name.lower()), None)


def what_was_saved(found: dict[str, Any]) -> str:
    """What attention saved in a run, and from which dense calls that is known. found: a record's "measured"."""
    saved = found["attention_seconds_saved"]
    if saved is None:
        return "what was saved is not known, since no dense call was timed"
    by = {"run": "by the dense calls of this run", "sample": "by one dense call that was timed apart"}[found["attention_saved_against"]]
    return f"dense attention would take about {abs(saved):.1f} s {'more' if saved >= 0 else 'less'}, {by}"


def why_no_gain(record: dict[str, Any]) -> str | None:
    """One line for a record of `park generate` that saved nothing or little, with what to do; None where it gained."""
    found, asked = record["measured"], record["request"]
    saved, seconds = found["attention_seconds_saved"], found["seconds"]
    if asked["method"] == "dense" or saved is None or saved > LITTLE * seconds["denoise"]:
        return None
    took, dense = seconds["attention"], seconds["attention"] + saved
    how_much, steps = "Nothing" if saved <= 0 else "Little", len(found["steps"])
    return (
        f"{how_much} is gained at {record['tokens']:,} tokens and {steps} steps: "
        f"attention took {took:.1f} s, dense attention would take about {dense:.1f} s; "
        "make the video longer or larger, or pass --method dense."
    )
