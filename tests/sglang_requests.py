"""Requests, settings and sizes of the tests of SGLang: what its plug-in reads of them."""

from __future__ import annotations

import types
from typing import Any

import torch

ROOT = "sglang.multimodal_gen.runtime"
GRID, STEPS, LAYERS, HEADS, DIM = (5, 8, 8), 4, 2, 2, 32
VIDEO = 5 * 8 * 8
SMALL = {
    "profile": "paper",
    "query_clusters": 4,
    "key_clusters": 8,
    "dense_steps": 0,
    "min_tokens": 0,
}
KEEP_ALL, SPARSE = {**SMALL, "top_p": 1.0}, {**SMALL, "top_p": 0.5}


class Request(types.SimpleNamespace):
    """What is read of a Req, by PARK and by SGLang's transformers."""

    def __init__(self, seed: int = 0, steps: int = STEPS) -> None:
        super().__init__(
            seed=seed,
            extra={},
            is_cfg_negative=False,
            raw_latent_shape=torch.Size((1, 4, 5, 16, 16)),
            num_inference_steps=steps,
        )
        self.timesteps, self.scheduler = (
            torch.arange(steps, 0, -1),
            types.SimpleNamespace(sigmas=torch.linspace(1, 0, steps + 1)),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def arguments(park: Any = None, prefix: str = "wan", **others: Any) -> Any:
    config = types.SimpleNamespace(patch_size=(1, 2, 2), prefix=prefix)
    pipeline = types.SimpleNamespace(dit_config=config)
    return types.SimpleNamespace(
        attention_backend_config={"park": park} if park else {}, pipeline_config=pipeline, **others
    )
