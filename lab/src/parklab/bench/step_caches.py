"""diffusers' own step caches beside dense attention: what forecasts are compared with.

    dense cache=first-block threshold=0.1
    dense cache=mag threshold=0.12 max_skip_steps=2         ratios: calibrated in one run of CALIBRATION
    dense cache=taylorseer cache_interval=3 max_order=1     attention, cross-attention and MLP of every block

Fields are those of diffusers' configs. TaylorSeer's own patterns name no module of a Wan transformer, so modules are
named here as its authors cache them, and its factors are kept in the model's type, as theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from parkattn.engine import RunLog

CALIBRATION = "a blue square moves down over red dots"  # a sentence of training, in no table
_MODULES = [r"blocks\.\d+\.(attn1|attn2|ffn)"]


def cache_config(fields: Mapping[str, Any], steps: int, dtype: torch.dtype, ratios: list[float] | None = None) -> Any:
    """diffusers' config of "cache=NAME field=value ..."."""
    from diffusers import hooks

    name, given = fields["cache"], {field: value for field, value in fields.items() if field != "cache"}
    lite = given.get("use_lite_mode", False)
    kinds: dict[str, tuple[type, dict[str, Any]]] = {
        "first-block": (hooks.FirstBlockCacheConfig, {}),
        "mag": (
            hooks.MagCacheConfig,
            {"num_inference_steps": steps, "mag_ratios": ratios, "calibrate": ratios is None},
        ),
        "taylorseer": (
            hooks.TaylorSeerCacheConfig,
            {"taylor_factors_dtype": dtype, "cache_identifiers": None if lite else _MODULES},
        ),
    }
    if name not in kinds:
        raise ValueError(f"cache: expected {', '.join(kinds)}, got {name!r}; correct it.")
    kind, ours = kinds[name]
    known = {field.name for field in dataclasses.fields(kind)} - ours.keys()
    if strange := sorted(given.keys() - known):
        raise ValueError(
            f"cache: expected fields out of {', '.join(sorted(known))}, got {', '.join(strange)}; correct."
        )
    return kind(**given, **ours)


def calibrate(transformer: Any, steps: int, dtype: torch.dtype, run: Callable[[], object]) -> list[float]:
    """MagCache's ratios of the branch with the prompt, out of the run, as it prints them to be copied."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), cached(transformer, cache_config({"cache": "mag"}, steps, dtype)):
        run()
    return next(json.loads(line) for line in printed.getvalue().splitlines() if line.startswith("[1.0"))


@contextlib.contextmanager
def cached(transformer: Any, config: Any) -> Iterator[Counter[str]]:
    """The cache on the transformer; counts its "forwards"."""
    count: Counter[str] = Counter()
    counting = transformer.register_forward_pre_hook(lambda *_: count.update(["forwards"]))
    transformer.enable_cache(config)
    try:
        yield count
    finally:
        transformer.disable_cache()
        counting.remove()


def computed(log: RunLog, forwards: int) -> dict[str, float]:
    """Of all forwards, the share whose last block ran; of their attention, the share that ran."""
    layers = Counter(call.site.layer for call in log.calls)
    return {
        "share_computed": layers[max(layers)] / forwards,
        "cost": layers.total() / (len(layers) * forwards),
    }
