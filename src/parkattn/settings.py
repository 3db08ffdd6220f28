"""Settings of methods: small frozen groups of fields, which a method's config inherits, checked when a value is made.

@dataclass(frozen=True, kw_only=True)
class MyConfig(Selection, PlannedConfig):
    tile: int = 128
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast, get_args

from parkattn.checks import (
    did_you_mean,
    expect_by_length,
    expect_choice,
    expect_count,
    expect_flag,
    expect_fraction,
    expect_indices,
    expect_positive,
    shown,
)

BackendName = Literal["auto", "reference", "triton", "flashinfer"]
"""Backend of the operations."""
Precision = Literal["bf16", "int8"]
"""Number format of Q K^T: the model's own dtype, or 8 bits."""
KeyMetricName = Literal["query-response", "euclidean"]
"""Distance of two keys."""
MetricRoot = Literal["cholesky", "sqrt"]
"""Root of the metric."""
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
KEY_METRICS: tuple[KeyMetricName, ...] = get_args(KeyMetricName)
METRIC_ROOTS: tuple[MetricRoot, ...] = get_args(MetricRoot)
# from this many tokens on a video is long and has the paper's blocks; below, it has the paper's tokens per block
LONG_VIDEO = 16_384
QUERIES_PER_BLOCK, KEYS_PER_BLOCK = 500, 130
# where the attention kernel's tiles begin
QUERY_TILE, KEY_GRANULE = 64, 32
LARGEST_SEED = 2**63 - 1
# of models that presets may have; models.SIZES has their sizes
MODEL_NAMES = ("wan2.1-1.3b", "wan2.1-14b", "wan2.2-14b", "hunyuanvideo")


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Common part of every method's config."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Changes of the defaults by the name of a model."""
    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Changes of any model's settings by what is wanted."""
    FILES: ClassVar[tuple[str, ...]] = ()
    """Settings that name a file: its content decides a result, too."""
    MOVED: ClassVar[Mapping[str, str]] = {}
    """Advice for fields of earlier versions."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        try:
            expect_known_fields(cls, given)
        except ValueError as unknown:
            raise TypeError(str(unknown)) from None  # as for any function called with a keyword it does not have
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Groups check their own fields and call the next one's check."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The authors' settings for one model by name; changes override single fields."""
        expect_choice("preset", name, cls.PRESETS)
        return cls.from_dict({**cls.PRESETS[name], **changes})

    @classmethod
    def for_model(cls, name: str | None, **changes: Any) -> Self:
        """The settings of a model: its preset where the method has one, else the defaults."""
        return cls.from_dict({**cls.PRESETS.get(cls.known_model(name) or "", {}), **changes})

    @classmethod
    def known_model(cls, name: str | None) -> str | None:
        """A model's name as presets have it, however it is cased and joined: Hunyuan-Video is hunyuanvideo."""
        if name is None:
            return None
        names = {_joined(known): known for known in (*MODEL_NAMES, *cls.PRESETS)}
        if not isinstance(name, str) or _joined(name) not in names:
            expect_choice("model", name, names.values())
        return names[_joined(name)]

    @classmethod
    def profile(cls, name: str, *, model: str | None = None, **changes: Any) -> Self:
        """A profile ("paper", "quality", "fast", "turbo"), with the settings of a model underneath."""
        expect_choice("profile", name, cls.PROFILES)
        return cls.for_model(model, **{**cls.PROFILES[name], **changes})

    @classmethod
    def named(cls, name: str, *, model: str | None = None, **changes: Any) -> Self:
        """A profile or a preset; no name is both."""
        if not (cls.PROFILES or cls.PRESETS):
            neither = f"since {cls.__name__} has neither profiles nor presets"
            raise ValueError(f"profile: expected none, {neither}, got {shown(name)}; leave it out.")
        expect_choice("profile", name, [*cls.PROFILES, *cls.PRESETS])
        return cls.profile(name, model=model, **changes) if name in cls.PROFILES else cls.preset(name, **changes)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """A config from fields by name, as `to_dict` gives them; a name that it does not know is refused."""
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"{cls.__name__}: expected a mapping of field names to values, got {shown(fields)}; pass a dict."
            )
        expect_known_fields(cls, fields)
        return cls(**fields)

    @classmethod
    def of(cls, config: MethodConfig) -> Self:
        """A config of a kind that this one extends, as one of this kind."""
        return cls.from_dict(config.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; from_dict restores an equal config."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    def replace(self, **changes: Any) -> Self:
        """The same config with single fields changed."""
        return self.from_dict({**dataclasses.asdict(self), **changes})


def expect_known_fields(config: type[MethodConfig], given: Mapping[str, Any]) -> None:
    known = sorted(field.name for field in dataclasses.fields(config))
    unknown = sorted(set(map(str, given)) - set(known))
    if not unknown:
        return
    if not known:
        got = shown(", ".join(unknown))[1:-1]
        raise ValueError(f"{config.__name__}: expected no fields, since it has none, got {got}; leave them out.")
    advice = config.MOVED.get(unknown[0]) or did_you_mean(unknown[0], known, "")
    if {"profile", "preset"} & set(unknown):
        advice = 'pass the name of a profile or preset as config, as in enable(pipe, "quality").'
    # the list only where no name is near: it is long
    wanted = "other fields" if advice else f"fields out of {', '.join(known)}"
    advice = advice or "correct or remove that name."
    raise ValueError(f"{config.__name__}: expected {wanted}, got {shown(', '.join(unknown))[1:-1]}; {advice}")


class BlockCounts(NamedTuple):
    """Numbers of blocks, and the multiples that they begin at."""

    queries: int
    """Query blocks per head."""
    keys: int
    """Key blocks per head."""
    query_multiple: int
    """Query blocks begin at multiples of this."""
    key_multiple: int
    """Key blocks begin at multiples of this."""


ByLength = int | tuple[int, int | None] | None
"""A number; a pair: in a long video (from 16,384 tokens on), and in a short one; None: by a rule."""


def by_length(value: ByLength, long: bool) -> int | None:
    """The number for a long or a short video."""
    return value[0 if long else 1] if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class Clusters(MethodConfig):
    """Blocks by k-means."""

    query_clusters: ByLength = None
    """Query blocks per head; a pair: in a long video and in a short one; None: from the number of tokens (`counts`)."""
    key_clusters: ByLength = None
    """Key blocks per head; a pair: in a long video and in a short one; None: from the number of tokens (`counts`)."""
    # settings of a laboratory's subclass: blocks of a long video, and the multiples that blocks begin at
    long_video_blocks = (128, 512)
    query_multiple = key_multiple = cast("int | None", None)
    kmeans_iterations, warm_iterations = 10, 3
    warm_start, seed = True, 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("query_clusters", "key_clusters"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, expect_by_length(name, getattr(self, name), least=1))

    def counts(self, queries: int, keys: int) -> BlockCounts:
        """The one rule that chooses blocks from the number of video tokens, wherever a field is None."""
        long_queries, long_keys = queries >= LONG_VIDEO, keys >= LONG_VIDEO
        return BlockCounts(
            by_length(self.query_clusters, long_queries)
            or (self.long_video_blocks[0] if long_queries else max(2, queries // QUERIES_PER_BLOCK)),
            by_length(self.key_clusters, long_keys)
            or (self.long_video_blocks[1] if long_keys else max(4, keys // KEYS_PER_BLOCK)),
            self.query_multiple or (QUERY_TILE if long_queries else 1),
            self.key_multiple or (KEY_GRANULE if long_keys else 1),
        )


@dataclass(frozen=True, kw_only=True)
class KeyMetric(MethodConfig):
    """The metric that keys are clustered in (QRKC)."""

    key_metric: KeyMetricName = "query-response"
    """query-response: distances are squared QK-score errors under the current queries. euclidean: plain k-means."""
    metric_root: MetricRoot = "cholesky"
    """R with R R^T = G: sqrt also takes a singular metric."""
    alpha: float = 0.05
    """Shrinkage of the metric towards a multiple of the identity."""
    epsilon: float = 1e-6
    """Added to alpha, for stability."""
    s_min: float = 1e-12
    """Least scale of the metric."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice("key_metric", self.key_metric, KEY_METRICS)
        expect_choice("metric_root", self.metric_root, METRIC_ROOTS)
        expect_fraction("alpha", self.alpha, zero=True)
        for name in ("epsilon", "s_min"):
            expect_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Selection(MethodConfig):
    """Which key blocks a query block keeps: exactly one of top_p and top_k."""

    top_p: float | None = 0.9
    """Keep blocks until their estimated share of attention reaches this; larger is better and slower."""
    top_k: float | None = None
    """Keep this share of the key blocks."""
    floor = 0.0  # with top_p: the least share of the key blocks; a setting of a laboratory's subclass
    most_shares = 1  # numbers in top_p, where a method's plans differ over a run

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.top_p is None) == (self.top_k is None):
            raise ValueError(
                f"top_p, top_k: expected exactly one of them, got top_p={shown(self.top_p)}, "
                f"top_k={shown(self.top_k)}; for a fixed ratio pass top_p=None, top_k=0.1."
            )
        for name in ("top_p", "top_k"):
            if getattr(self, name) is not None:
                for share in self._shares(name):
                    expect_fraction(name, share, zero=False)

    def _shares(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if name != "top_p" or not isinstance(value, tuple) or self.most_shares == 1:
            return (value,)
        if not 2 <= len(value) <= self.most_shares:
            wanted = "a number, or two or three of them"
            raise ValueError(f"top_p: expected {wanted}, got {shown(value)}; write 0.7, (0.7, 0.9) or (0.3, 0.7, 0.3).")
        return value


@dataclass(frozen=True, kw_only=True)
class Timetable(MethodConfig):
    """Which steps are dense, which build a plan and which reuse one. Layers and steps count from 0."""

    dense_fraction: float = 0.2
    """Share of the steps, at the start, that stay dense."""
    dense_steps: int | None = None
    """Number of first steps that stay dense, instead of dense_fraction."""
    dense_layers: tuple[int, ...] = ()
    """Layers that stay dense."""
    refresh_interval: int | None = 10
    """Steps for which a plan is used, in a run of 50; fewer in shorter runs, in proportion. None: until it ends."""
    share_branches: bool = False
    """Branches of a guided step use the plan of the first one: they then miss the same, which cancels in guidance."""
    anchors: int | None = None
    """Dense steps of a run of 50, spread by its noise levels from step 0 on; plans are built there, and in shorter
    runs, which have fewer (`anchor_count`), between two of them where they lie far apart. None: the first steps are
    dense, by the fields above."""
    # settings of a laboratory's subclass: the run that these numbers are for, dense steps at its end, refreshes
    reference_steps, dense_last_steps = 50, 0
    refresh_steps = cast("tuple[int, ...] | None", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors is not None:
            expect_count("anchors", self.anchors)
            for name in ("dense_steps", "refresh_steps"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name}: expected None beside anchors={self.anchors}, got {shown(value)}; leave out one."
                    )
            for name in ("dense_fraction", "refresh_interval"):
                # what a preset says of runs without anchors has no effect, and what a user says must have one
                usual = [
                    type(self).__dataclass_fields__[name].default,
                    *(made[name] for made in self.PRESETS.values() if name in made),
                ]
                if getattr(self, name) not in usual:
                    got = f"got {shown(getattr(self, name))}; leave out one of them."
                    raise ValueError(
                        f"{name}: expected {usual[0]} beside anchors={self.anchors}, which replaces it, {got}"
                    )
        expect_fraction("dense_fraction", self.dense_fraction, zero=True)
        if self.dense_steps is not None:
            expect_count("dense_steps", self.dense_steps, least=0)
        if self.refresh_interval is not None:
            expect_count("refresh_interval", self.refresh_interval)
        expect_flag("share_branches", self.share_branches)
        object.__setattr__(self, "dense_layers", expect_indices("dense_layers", self.dense_layers))


@dataclass(frozen=True, kw_only=True)
class Forecasts(MethodConfig):
    """Which forwards of the whole model are not run."""

    tolerance: float = 0.0
    """Forwards are forecast from earlier ones as long as that leaves an error of this share in the latents
    (docs/forecast.md); 0.004 is usual, 0: every forward runs.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("tolerance", self.tolerance, zero=True)


@dataclass(frozen=True, kw_only=True)
class Correction(MethodConfig):
    """Stand-ins of skipped blocks."""

    compensate: bool = False
    """A skipped block enters through one key, its mean, with the weight of its size, and its mean value."""
    residual_rank: int | tuple[int, int] = 0
    """Keep the part of a dense step that its plan misses as a matrix of this rank per head, and add it until the next
    dense step; 8 is usual, 0: none. A pair: in a long video and in a short one, where a higher rank takes no more
    memory. Plans are then built at dense steps, and dense steps run in the backend's own kernel. Held: one byte per
    token, head, layer, branch and unit of rank.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_flag("compensate", self.compensate)
        object.__setattr__(self, "residual_rank", expect_by_length("residual_rank", self.residual_rank, least=0))

    def rank_for(self, tokens: int) -> int:
        """The rank of the residual of this many queries; 0: none is kept."""
        return by_length(self.residual_rank, tokens >= LONG_VIDEO) or 0

    @property
    def own_dense(self) -> bool:
        """Whether dense steps run in the backend's own kernel, as anchors with a residual do: equal up to rounding."""
        return self.residual_rank not in (0, (0, 0))


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(MethodConfig):
    """Backend, precision and checks."""

    check_finite: bool = False
    """One device synchronisation per call buys an error instead of NaN output."""
    backend: BackendName = "auto"
    """auto: the Triton kernels on CUDA, the PyTorch definitions elsewhere."""
    precision: Precision = "bf16"
    """What the backend's attention takes Q K^T in: bf16 stands for the model's own dtype, int8 for q and k in 8 bits
    (`attend.Rounding`), where a key that is much larger than the others of its head makes all scores coarse. Plans
    are made in the model's dtype, which stays where no INT8 kernel exists; `summary` says why.
    """
    sage_dense: bool = False
    """Dense steps by SageAttention, of the package sageattention, whose scores are INT8. Where it cannot take a call,
    they run as without it, and `summary` says why.
    """
    guard_rows: int = 0
    """Queries per head whose exact output is computed in every sparse call, to report its error; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_flag("check_finite", self.check_finite)
        expect_flag("sage_dense", self.sage_dense)
        expect_count("guard_rows", self.guard_rows, least=0)
        expect_choice("backend", self.backend, BACKENDS)
        expect_choice("precision", self.precision, PRECISIONS)


@dataclass(frozen=True, kw_only=True)
class PlannedConfig(Timetable, Forecasts, Correction, RuntimeOptions):
    """Config of a `PlannedMethod`; a method adds its own fields and groups."""


def _joined(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
