"""How PARK is set: one frozen value, checked when it is made, and the paper's settings by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parkattn.checks import expect_choice, expect_count, expect_fraction, expect_positive

IMPORTANCE = ("pama", "query-centroid", "full-key", "exact")
KEY_METRICS = ("query-response", "euclidean")
METRIC_ROOTS = ("cholesky", "sqrt")
BACKENDS = ("auto", "reference", "triton", "flashinfer")


@dataclass(frozen=True, kw_only=True)
class ParkConfig:
    """Every field is explained in DESIGN.md; defaults are the paper's Wan settings."""

    # blocks
    query_clusters: int = 128
    key_clusters: int = 512
    kmeans_iterations: int = 10
    warm_start: bool = True
    warm_iterations: int = 3
    seed: int = 0
    # where block borders may lie: 1 is the paper, larger multiples are faster on a GPU and cost a little recall (borders.py)
    query_multiple: int = 1
    key_multiple: int = 1
    # the metric that keys are clustered in (QRKC)
    key_metric: str = "query-response"
    metric_root: str = "cholesky"
    alpha: float = 0.05
    epsilon: float = 1e-6
    s_min: float = 1e-12
    # which blocks are kept: top_p is a share of attention mass, top_k a share of the key blocks
    importance: str = "pama"
    top_p: float | None = 0.9
    top_k: float | None = None
    floor: float = 0.0
    compensate: bool = False
    # when: counts are steps, fractions are of all steps, layers and steps count from 0
    dense_fraction: float = 0.2
    dense_steps: int | None = None
    dense_last_steps: int = 0
    dense_layers: tuple[int, ...] = ()
    refresh_interval: int = 10
    refresh_steps: tuple[int, ...] | None = None
    reference_steps: int = 50
    # one device synchronisation per call buys an error instead of NaN output
    check_finite: bool = False
    # who computes: "auto" takes the Triton kernels on CUDA and the PyTorch definitions elsewhere
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("query_clusters", "key_clusters", "query_multiple", "key_multiple", "kmeans_iterations", "warm_iterations"):
            expect_count(name, getattr(self, name))
        for name in ("refresh_interval", "reference_steps"):
            expect_count(name, getattr(self, name))
        for name in ("seed", "dense_last_steps"):
            expect_count(name, getattr(self, name), least=0)
        if self.dense_steps is not None:
            expect_count("dense_steps", self.dense_steps, least=0)
        for name in ("warm_start", "compensate", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}; pass a bool.")
        for name in ("dense_layers", "refresh_steps"):
            object.__setattr__(self, name, _indices(name, getattr(self, name)))
        expect_choice("importance", self.importance, IMPORTANCE)
        expect_choice("key_metric", self.key_metric, KEY_METRICS)
        expect_choice("metric_root", self.metric_root, METRIC_ROOTS)
        expect_choice("backend", self.backend, BACKENDS)
        for name in ("alpha", "floor", "dense_fraction"):
            expect_fraction(name, getattr(self, name), zero=True)
        for name in ("epsilon", "s_min"):
            expect_positive(name, getattr(self, name))
        if (self.top_p is None) == (self.top_k is None):
            raise ValueError(
                f"top_p, top_k: expected exactly one of them, got top_p={self.top_p}, top_k={self.top_k}; for a fixed ratio pass top_p=None, top_k=0.1."
            )
        if self.top_p is not None:
            expect_fraction("top_p", self.top_p, zero=False)
        if self.top_k is not None:
            expect_fraction("top_k", self.top_k, zero=False)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ParkConfig:
        """The paper's settings for one model, with round block borders; changes override single fields."""
        expect_choice("preset", name, PRESETS)
        return cls.from_dict({**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ParkConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(
                f"ParkConfig: expected fields out of {', '.join(sorted(known))}, got {', '.join(unknown)}; correct or remove that name."
            )
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; from_dict restores an equal config."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()}

    def replace(self, **changes: Any) -> ParkConfig:
        return self.from_dict({**dataclasses.asdict(self), **changes})


# section "Implementations" of the paper; Wan and HunyuanVideo differ in the number of key blocks only
_PAPER = {"query_clusters": 128, "top_p": 0.9, "dense_fraction": 0.2, "refresh_interval": 10, "alpha": 0.05, "s_min": 1e-12}
# not the paper's: borders where the attention kernel's tiles begin; what that gains, and where it gains nothing: DESIGN.md, "Block borders";
# query_multiple=1, key_multiple=1 gives the paper's blocks back
_BORDERS = {"query_multiple": 64, "key_multiple": 32}
PRESETS: dict[str, dict[str, Any]] = {
    "wan2.1-1.3b": {**_PAPER, **_BORDERS, "key_clusters": 512},
    "wan2.1-14b": {**_PAPER, **_BORDERS, "key_clusters": 512},
    "wan2.2-14b": {**_PAPER, **_BORDERS, "key_clusters": 512},
    "hunyuanvideo": {**_PAPER, **_BORDERS, "key_clusters": 1024},
}


def _indices(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None and name == "refresh_steps":
        return None
    try:
        indices = tuple(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected a collection of indices counted from 0, got {value!r}; write ({value!r},) or range(...)."
        ) from None
    for index in indices:
        expect_count(name, index, least=0)
    return tuple(sorted(set(indices)))
