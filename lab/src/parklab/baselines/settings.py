"""Groups of settings that only comparisons change: the library holds them fixed (parkattn.settings)."""

from __future__ import annotations

from dataclasses import dataclass

from parkattn.checks import expect_count, expect_flag, expect_fraction, expect_indices
from parkattn.settings import LARGEST_SEED, Clusters, PlannedConfig, Selection

MOST_ITERATIONS = 1000  # of k-means, which is long still by then


@dataclass(frozen=True, kw_only=True)
class KMeans(Clusters):
    """How clusters are found."""

    kmeans_iterations: int = 10
    """Lloyd iterations of a cold start."""
    warm_start: bool = True
    """Whether a refresh begins from the clusters of the plan before."""
    warm_iterations: int = 3
    """Lloyd iterations of a warm start."""
    seed: int = 0
    """Random seed for choosing the initial centroids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kmeans_iterations", "warm_iterations"):
            expect_count(name, getattr(self, name), most=MOST_ITERATIONS)
        expect_count("seed", self.seed, least=0, most=LARGEST_SEED)
        expect_flag("warm_start", self.warm_start)


@dataclass(frozen=True, kw_only=True)
class FlooredSelection(Selection):
    """A selection that keeps a least share."""

    floor: float = 0.0
    """With top_p: keep at least this share of the key blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("floor", self.floor, zero=True)


@dataclass(frozen=True, kw_only=True)
class StudiedConfig(PlannedConfig):
    """A schedule whose every number can be changed, so that methods can be given the same one."""

    reference_steps: int = 50
    """Shorter runs refresh sooner, in proportion, and have fewer anchors (`anchor_count`)."""
    refresh_steps: tuple[int, ...] | None = None
    """Steps at which plans are rebuilt, instead of refresh_interval."""
    dense_last_steps: int = 0
    """Number of last steps that stay dense."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count("reference_steps", self.reference_steps)
        expect_count("dense_last_steps", self.dense_last_steps, least=0)
        if self.refresh_steps is not None:
            object.__setattr__(self, "refresh_steps", expect_indices("refresh_steps", self.refresh_steps))
