"""PARK on one page: cluster, permute, estimate, select, attend.

q, k ──▶ cluster ──▶ importance ──▶ selection ──▶ Plan ──▶ attend over kept blocks ──▶ out
         k-means(q)   PAMA           top-p / top-k   │
         QRKC(k | q)                                 └─ reused for R steps
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor

from parkattn.anchors import passed_since_first
from parkattn.backend import resolve_for
from parkattn.checks import (
    expect_attention_inputs,
    expect_choice,
    expect_count,
    expect_finite,
    expect_no_gradient,
    expect_scale,
    shown,
)
from parkattn.models import SIZES
from parkattn.ops import attend, cluster, importance, planning
from parkattn.ops.cluster.borders import fitting_multiple
from parkattn.ops.cluster.definition import Clustering
from parkattn.ops.importance.definition import kept_mass, select_shared, select_top_k, select_top_p
from parkattn.plan import Blocks, Plan, assign_roles, cut_blocks
from parkattn.planned import PlannedMethod, plan_key
from parkattn.registry import MethodEntry
from parkattn.segments import segment_mean
from parkattn.settings import Clusters, KeyMetric, PlannedConfig, Selection
from parkattn.site import CallSite

# not the paper's: what stands in for skipped blocks (docs/corrections.md)
_CORRECTED = {"compensate": True, "residual_rank": (12, 32), "share_branches": True}
# not the paper's: each tile of the attention kernel chooses, by the error that stand-ins would leave (docs/concepts.md)
_BY_ERROR = {"budget": "error", "query_tile": 128}
QUERY_BLOCKS = 128  # of a long video, in every model
CLUSTER_OF_TILE = "cluster_of_tile"  # in a plan's memory
_STUDIED = (
    "kmeans_iterations", "warm_iterations", "warm_start", "seed", "alpha", "epsilon", "metric_root", "key_metric",
    "importance", "floor", "refresh_steps", "query_multiple", "key_multiple", "dense_last_steps", "reference_steps",
)  # fmt: skip
_PREFIX_FIELDS = ("dense_fraction", "dense_steps", "refresh_interval", "refresh_steps")  # of a schedule without anchors


class Shares(NamedTuple):
    """top_p of the plans of a run; None: plans are made by top_k."""

    at_anchors: float | None
    """Of every plan where nothing else is said."""
    between: float | None = None
    """Of a plan that is built between anchors, where no residual stands in for skipped blocks; None: as at anchors."""
    last: float | None = None
    """The share that `between`, which holds at the step after the first, falls to over the run; None: it stays."""


@dataclass(frozen=True, kw_only=True)
class ParkConfig(Clusters, Selection, PlannedConfig):
    """Defaults are the paper's Wan settings; the fields of each group are explained in settings.py."""

    top_p: float | tuple[float, ...] | None = 0.9  # type: ignore[assignment]
    """Keep blocks until their estimated share of attention reaches this; larger is better and slower. Two numbers: at
    anchors, and in plans that are built between anchors. Three: the second falls to the third over the run, by log
    signal to noise, since late errors have few steps to grow in.
    """
    budget: Literal["row", "error"] = "row"
    """What top_p = p means. row: each query block keeps blocks until they hold this share of its attention. error: one
    threshold for all rows, heads and layers keeps blocks whose keys draw at least (1 - p) / p times the mean key's
    attention, with compensate times the spread of scores in a head's blocks: what stand-ins get wrong."""
    query_tile: int | None = None
    """Query blocks are cut into tiles of this many queries, each of which keeps blocks of its own; None: not cut."""
    most_shares = len(Shares._fields)
    importance = "pama"  # how much attention a query block gives to a key block (ESTIMATORS)

    # the defaults are the paper's, but for borders where the attention kernel's tiles begin (DESIGN.md,
    # "Block borders")
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {"query_clusters": QUERY_BLOCKS, "key_clusters": size.key_blocks} for name, size in SIZES.items()
    }
    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "quality": {**_CORRECTED, **_BY_ERROR, "top_p": (0.7, 0.9), "anchors": 12},
        "fast": {**_CORRECTED, **_BY_ERROR, "top_p": (0.3, 0.7), "anchors": 7},
        "turbo": {**_CORRECTED, **_BY_ERROR, "top_p": (0.3, 0.7, 0.3), "anchors": 7},
    }
    MOVED: ClassVar[Mapping[str, str]] = {
        "refresh_top_p": "write top_p=(0.7, 0.9): at anchors, and between them.",
        "refresh_falls": "write top_p=(0.3, 0.7, 0.3): at anchors, between them, and at the end of the run.",
        "short_residual_rank": "write residual_rank=(12, 32): in long videos, and in short ones.",
        "own_dense": "leave it out: dense steps run in the backend's kernel where residual_rank is set.",
        "long_video_blocks": "write query_clusters=(128, None) and key_clusters=(512, None): in long videos.",
        **dict.fromkeys(
            _STUDIED, "it is a field of parklab.research.ResearchConfig, which Park and build_plan take too."
        ),
    }
    BUDGETS: ClassVar[tuple[str, ...]] = ("row", "error")
    """Values of `budget`."""
    DEFAULT_PROFILE: ClassVar[str] = "quality"
    """What hosts take when no profile is named (docs/profiles.md); variants for ablations keep the paper's settings."""

    def __post_init__(self) -> None:
        if isinstance(self.top_p, list):  # out of JSON
            object.__setattr__(self, "top_p", tuple(self.top_p))
        super().__post_init__()
        expect_choice("budget", self.budget, self.BUDGETS)
        if self.query_tile is not None:
            expect_count("query_tile", self.query_tile)
        # rules across fields; `settled` keeps them where one field of a profile is changed
        if self.budget != "row" and self.top_p is None:
            raise ValueError(f"budget: expected row beside top_k={self.top_k}, got {self.budget}; set top_p instead.")
        if isinstance(self.top_p, tuple) and self.anchors is None:
            got = f"got {self.top_p}; pass one number, or anchors too."
            raise ValueError(f"top_p: expected one number without anchors, between which the others hold, {got}")

    @property
    def shares(self) -> Shares:
        """top_p of the plans of a run."""
        return Shares(*self.top_p) if isinstance(self.top_p, tuple) else Shares(self.top_p)

    @property
    def metric(self) -> KeyMetric:
        """The metric that keys are clustered in."""
        return KeyMetric()

    @classmethod
    def long_run_profiles(cls) -> list[str]:
        """Profiles without those that differ from another one in runs of fewer than reference_steps alone."""
        return [name for name in cls.PROFILES if cls.profile(name).shares.last is None]

    @classmethod
    def profile(cls, name: str, *, model: str | None = None, **changes: Any) -> Self:
        """A profile, with the settings of a model underneath. A budget among `changes` is the only one."""
        expect_choice("profile", name, cls.PROFILES)
        for field in _PREFIX_FIELDS if {**cls.PROFILES[name], **changes}.get("anchors") is not None else ():
            if field in changes:
                got = f"got {field}={shown(changes[field])}; take the profile paper, or pass anchors=None too."
                raise ValueError(
                    f"{field}: expected none with the profile {name}, whose dense steps are spread over the run, {got}"
                )
        return super().profile(name, model=model, **cls.settled(cls.PROFILES[name], changes))

    def replace(self, **changes: Any) -> Self:
        """A copy with other values. A budget among them is the only one; fields that lose their effect go with it."""
        return super().replace(**self.settled(dataclasses.asdict(self), changes))

    @classmethod
    def settled(cls, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changes, and those that they imply: top_k is per row, and without anchors no plan is between them."""
        implied: dict[str, Any] = {}
        if changes.get("top_k") is not None:
            implied["budget"] = "row"
        share = settings.get("top_p")
        if isinstance(share, tuple) and {**settings, **changes}.get("anchors") is None:
            implied["top_p"] = share[0]
        return {**implied, **changes}

    @classmethod
    def for_model(cls, name: str | None, **changes: Any) -> Self:
        """The preset of a model, with its blocks in a long video and the rule of `counts` in a short one."""
        blocks = SIZES[cls.known_model(name) or "wan2.1-14b"].key_blocks
        own = {} if blocks == cls.long_video_blocks[1] else {"key_clusters": (blocks, None)}
        return cls.from_dict({**own, **changes})


class ParkPlanner:
    def __init__(self, config: ParkConfig, share: float | None, falls_to: float | None = None) -> None:
        """share: top_p of its plans; None: by top_k. falls_to: the share at the end of the run; None: it stays."""
        self.config = config
        self.begins_at, self.falls_to = share, falls_to

    def share(self, site: CallSite) -> float | None:
        """top_p at this step; None: top_k is set instead."""
        if self.begins_at is None or self.falls_to is None:
            return self.begins_at
        return self.begins_at + (self.falls_to - self.begins_at) * passed_since_first(site)

    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, site.backend or resolve_for(q, self.config.backend)
        roles = assign_roles(q, k, site.text, site.key_valid)
        words = 0 if site.text is None else site.text.stop - site.text.start
        counts = config.counts(q.shape[2] - words, k.shape[2] - words)
        iterations, old_queries, old_keys = config.kmeans_iterations, None, None
        if config.warm_start and earlier is not None and _tells_clusters(earlier, counts.queries):
            iterations, old_queries, old_keys = config.warm_iterations, _clusters_of(earlier), earlier.keys.labels
        how: dict[str, Any] = {"iterations": iterations, "seed": config.seed}
        queries_of, keys_of = roles.clustered_queries, roles.clustered_keys
        queries = cluster.kmeans(backend, q, counts.queries, **how, start=old_queries, valid=queries_of)
        keys = cluster.cluster_keys(
            backend, k, q, counts.keys, config.metric, **how, start=old_keys, valid=keys_of, query_valid=queries_of
        )
        if counts.query_multiple > 1:
            multiple = fitting_multiple(counts.query_multiple, q.shape[2], queries.clusters)
            queries = cluster.round_borders(backend, q, queries, multiple)
        if counts.key_multiple > 1:
            multiple = fitting_multiple(counts.key_multiple, k.shape[2], keys.clusters)
            keys = cluster.round_borders(backend, k, keys, multiple)
        query_blocks = cluster.arrange(backend, *roles.query_blocks(queries.labels, queries.clusters))
        memory = {}
        if config.query_tile is not None:
            query_blocks, memory[CLUSTER_OF_TILE] = cut_blocks(query_blocks, queries.clusters, config.query_tile)
            queries = _tiles(q, query_blocks, memory[CLUSTER_OF_TILE].shape[-1], config.importance)
        key_blocks = cluster.arrange(backend, *roles.key_blocks(keys.labels, keys.clusters))
        attention = importance.estimate(backend, config.importance, q, k, query_blocks, queries, keys, scale=site.scale)
        share = self.share(site)
        if share is None:
            assert config.top_k is not None
            mask = select_top_k(attention, config.top_k, sizes=keys.sizes)
        elif config.budget == "row":
            mask = select_top_p(attention, share, sizes=keys.sizes, floor=config.floor)
        else:
            spread = None
            if config.budget == "error" and config.compensate:
                spread = importance.score_spread(
                    backend, q, k, keys, valid=keys_of, query_valid=queries_of, scale=site.scale
                )
            mask = select_shared(attention, share, sizes=keys.sizes, floor=config.floor, spread=spread)
        return Plan(
            query_blocks,
            key_blocks,
            roles.extend(mask),
            queries.clusters,
            keys.clusters,
            padding=site.key_valid is not None,
            estimated_mass=kept_mass(attention, mask, queries.sizes),
            memory=memory,
        )


def _tiles(q: Tensor, blocks: Blocks, count: int, importance: str) -> Clustering:
    """The first `count` blocks as what importance is estimated for."""
    # means of tiles are a pass over q, and only this estimator reads them
    means = segment_mean(q, blocks.labels, count)[0] if importance == "query-centroid" else q[:, :, :0]
    return Clustering(blocks.labels, means, blocks.sizes[..., :count])


def _tells_clusters(plan: Plan, clusters: int) -> bool:
    """Whether the clusters of queries can be told from a plan: tiles out of a file hold no memory."""
    return CLUSTER_OF_TILE in plan.memory or plan.query_clusters <= clusters


def _clusters_of(plan: Plan) -> Tensor:
    """Labels [b h n] of the clusters that a plan's query blocks, or the blocks its tiles were cut from, are."""
    labels, clusters = plan.queries.labels, plan.memory.get(CLUSTER_OF_TILE)
    return labels if clusters is None else clusters.gather(-1, labels.long().clamp(max=clusters.shape[-1] - 1))


def build_plan(
    q: Tensor,
    k: Tensor,
    config: ParkConfig | None = None,
    *,
    text: slice | None = None,
    key_valid: Tensor | None = None,
    scale: float | None = None,
    start: Plan | None = None,
) -> Plan:
    """Decide what attends to what. q [b h n d], k [b h m d].

    text: the span of text tokens, the same in q and k: never clustered, always on. key_valid [b m]: False where a key
    is padding. start: an earlier plan to warm-start the clusters from.
    """
    config = _expect_config(config)
    if start is not None:
        _expect_plan("start", start)
    expect_attention_inputs(q, k)
    expect_scale(scale)
    return _plan(q, k, config, CallSite(text=text, key_valid=key_valid, scale=scale), start)


def _plan(q: Tensor, k: Tensor, config: ParkConfig, site: CallSite, start: Plan | None = None) -> Plan:
    with planning(q, k, config.check_finite):
        earlier = start if start is not None and start.fits(q, k) else None
        return ParkPlanner(config, config.shares.at_anchors).plan(q.detach(), k.detach(), site, earlier)


def park_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: ParkConfig | None = None,
    *,
    plan: Plan | None = None,
    text: slice | None = None,
    key_valid: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Sparse attention of q over k, v: [b h n d]. Equal to dense attention when every block is kept.

    Without a plan one is built for this call; with one, text and padding are the plan's and must not be given again.
    """
    config = _expect_config(config)
    expect_attention_inputs(q, k, v)
    expect_scale(scale)
    backend = resolve_for(q, config.backend, config.precision)
    if not backend.differentiable:
        expect_no_gradient(backend.name, q, k, v)
    if plan is None:
        plan = _plan(q, k, config, CallSite(text=text, key_valid=key_valid, scale=scale))
    else:
        _expect_plan("plan", plan)
        plan.expect_fit(q, k)
        if text is not None or key_valid is not None:
            raise ValueError(
                "text, key_valid: expected None beside a plan, which holds them already, got a value; "
                "pass them to build_plan."
            )
        if config.check_finite:
            expect_finite("q", q)
            expect_finite("k", k)
    return attend.over_kept(backend, q, k, v, plan, scale=scale, compensate=config.compensate)


class Park(PlannedMethod):
    """PARK as an `AttentionMethod`: a config, and the plans it holds between the steps of one generation."""

    def __init__(self, config: ParkConfig | None = None, name: str = "park") -> None:
        config = _expect_config(config)
        share, between, last = config.shares
        planner = ParkPlanner(config, share)
        lone = None if between is None else ParkPlanner(config, between, last)
        super().__init__(name, planner, config, between=lone)

    def head_order(self, site: CallSite, batch: int) -> Tensor | None:
        """The head [h] at each place of all ranks, for the next call at this site; None: the model's order."""
        return self.plans.head_order(plan_key(site, batch))


def _expect_config(config: ParkConfig | None) -> ParkConfig:
    if config is not None and not isinstance(config, ParkConfig):
        raise TypeError(
            f"config: expected a ParkConfig or None, got {shown(config)}; "
            "write ParkConfig(top_p=0.8), or ParkConfig.preset(name)."
        )
    return ParkConfig() if config is None else config


def _expect_plan(name: str, plan: Plan) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"{name}: expected a Plan, got {type(plan).__name__}; make one with build_plan.")


class WithoutPama(ParkConfig):
    """The mean query's softmax instead of PAMA."""

    importance = "query-centroid"


class WithoutQrkc(ParkConfig):
    """Euclidean k-means of keys instead of QRKC."""

    @property
    def metric(self) -> KeyMetric:
        return KeyMetric(key_metric="euclidean")


class WithoutBoth(WithoutPama, WithoutQrkc):
    """Retrieval by centroids."""


def _entry(name: str, line: str, config: type[ParkConfig]) -> MethodEntry:
    return MethodEntry(
        name, lambda settings: Park(settings, name), line, config, budgets=("top_p", "top_k"), paper="PARK"
    )


ENTRIES = (
    _entry("park", "k-means queries, QRKC keys, PAMA, top-p", ParkConfig),
    _entry("park-no-pama", "PARK with the mean query's softmax instead of PAMA", WithoutPama),
    _entry("park-no-qrkc", "PARK with Euclidean k-means of keys instead of QRKC", WithoutQrkc),
    _entry("centroid", "retrieval by centroids: PARK without PAMA and QRKC", WithoutBoth),
)
