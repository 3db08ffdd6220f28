"""What sparse attention can gain at best: attention's share of the work, and Amdahl's bound. Arithmetic, no measurement."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkattn.checks import expect_choice
from parkattn.park import ParkConfig
from parkattn.sprites import CHECKPOINT

# dense bf16 tensor peak in TFLOP/s from the vendors' data sheets; a name is matched inside torch's device name
GPUS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 5090": 209.0, "RTX 4090": 165.0, "RTX 3090": 71.0}
UTILISATION = 0.5  # of the peak, for a rough time per step


@dataclass(frozen=True)
class ModelShape:
    """blocks: transformer blocks; width: model dimension; every/pixels: frames and pixels per token."""

    blocks: int
    width: int
    ffn: int
    text: int
    cross_attention: bool
    passes: int  # forwards per step: 2 with classifier-free guidance
    every: int = 4
    pixels: int = 16

    def tokens(self, frames: int, height: int, width: int) -> int:
        return ((frames - 1) // self.every + 1) * (height // self.pixels) * (width // self.pixels)


MODELS = {
    "wan2.1-1.3b": ModelShape(30, 1536, 8960, 512, True, 2),
    "wan2.1-14b": ModelShape(40, 5120, 13824, 512, True, 2),
    "wan2.2-14b": ModelShape(40, 5120, 13824, 512, True, 2),
    "hunyuanvideo": ModelShape(60, 3072, 12288, 256, False, 1),
}


def shipped_shape() -> ModelShape | None:
    paths = [Path(CHECKPOINT) / part / "config.json" for part in ("transformer", "vae")]
    if not all(path.exists() for path in paths):
        return None
    config, vae = (json.loads(path.read_text()) for path in paths)
    width, pixels = config["num_attention_heads"] * config["attention_head_dim"], vae["scale_factor_spatial"] * config["patch_size"][1]
    return ModelShape(config["num_layers"], width, config["ffn_dim"], 32, True, 1, vae["scale_factor_temporal"], pixels)


def model_shape(name: str) -> ModelShape:
    shipped = shipped_shape()
    known = MODELS | ({"sprites": shipped} if shipped else {})
    expect_choice("model", name, known)
    return known[name]


def estimate(model: str, *, frames: int, height: int, width: int, gpu: str | None = None, density: float = 0.25) -> dict[str, Any]:
    """density: of the sparse steps. bound: the speed-up of denoising if sparse attention cost exactly its density."""
    shape = model_shape(model)
    n = shape.tokens(frames, height, width)
    if n < 1:
        raise ValueError(f"height, width: expected at least {shape.pixels} pixels each, got {height} x {width}; raise them.")
    d = shape.width
    in_attention = n if shape.cross_attention else n + shape.text
    attention = 4 * in_attention**2 * d
    cross = 4 * n * d**2 + 4 * shape.text * d**2 + 4 * n * shape.text * d if shape.cross_attention else 0
    rest = 8 * in_attention * d**2 + cross + 4 * in_attention * d * shape.ffn
    share = attention / (attention + rest)
    dense_steps = ParkConfig.for_model(model).dense_fraction
    computed = dense_steps + (1 - dense_steps) * density
    flops = shape.blocks * shape.passes * (attention + rest)
    peak = gpu_peak(gpu)
    return {
        "model": model,
        "tokens": n,
        "attention_share": share,
        "density_of_sparse_steps": density,
        "dense_steps": dense_steps,
        "bound": 1 / (1 - share * (1 - computed)),
        "bound_without_any_attention_in_sparse_steps": 1 / (1 - share * (1 - dense_steps)),
        "tflop_per_step": flops / 1e12,
        "gpu": gpu,
        "dense_seconds_per_step_about": None if peak is None else flops / (peak * 1e12 * UTILISATION),
    }


def gpu_peak(name: str | None) -> float | None:
    return next((peak for known, peak in GPUS.items() if name and known.lower() in name.lower()), None)
