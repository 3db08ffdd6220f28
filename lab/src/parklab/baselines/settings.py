"""Groups of settings that only comparisons change: the library holds them fixed (parkattn.settings)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parkattn.checks import expect_count, expect_flag, expect_fraction, expect_indices, shown
from parkattn.settings import LARGEST_SEED, LONG_VIDEO, Clusters, PlannedConfig, Selection

MOST_ITERATIONS = 1000  # of k-means, which is long still by then


@dataclass(frozen=True, kw_only=True)
class KMeans(Clusters):
    """How clusters are found, and which blocks they become."""

    long_video_blocks: tuple[int, int] = (128, 512)
    """Query and key blocks of a long video where query_clusters and key_clusters are None."""
    query_multiple: int | None = None
    """Query blocks begin at multiples of this. 1: where clusters end. None: 64 in a long video, else 1 (borders.py)."""
    key_multiple: int | None = None
    """Key blocks begin at multiples of this. 1: where clusters end. None: 32 in a long video, else 1."""
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
        for name in ("query_multiple", "key_multiple"):
            if getattr(self, name) is not None:
                expect_count(name, getattr(self, name))
        object.__setattr__(self, "long_video_blocks", _expect_pair("long_video_blocks", self.long_video_blocks))
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

    own_dense: bool = False
    """Dense steps by the backend's own kernel instead of the model's attention: equal up to rounding."""
    short_residual_rank: int | None = None
    """Rank of a residual below 16,384 tokens, where a higher one takes no more memory; None: residual_rank."""
    reference_steps: int = 50
    """Shorter runs refresh sooner, in proportion, and have fewer anchors (`anchor_count`)."""
    refresh_steps: tuple[int, ...] | None = None
    """Steps at which plans are rebuilt, instead of refresh_interval."""
    dense_last_steps: int = 0
    """Number of last steps that stay dense."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_flag("own_dense", self.own_dense)
        if self.short_residual_rank is not None:
            expect_count("short_residual_rank", self.short_residual_rank, least=0)
            if isinstance(self.residual_rank, tuple):
                got = f"got {self.short_residual_rank}; leave out one of them."
                raise ValueError(
                    f"short_residual_rank: expected None beside residual_rank={self.residual_rank}, which names it, "
                    f"{got}"
                )
        expect_count("reference_steps", self.reference_steps)
        expect_count("dense_last_steps", self.dense_last_steps, least=0)
        if self.refresh_steps is not None:
            object.__setattr__(self, "refresh_steps", expect_indices("refresh_steps", self.refresh_steps))

    def rank_for(self, tokens: int) -> int:
        short = self.short_residual_rank
        return super().rank_for(tokens) if short is None or tokens >= LONG_VIDEO else short


def _expect_pair(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{name}: expected two whole numbers, query blocks and key blocks, got {shown(value)}; write (128, 512)."
        )
    for count in value:
        expect_count(name, count)
    return value[0], value[1]
