"""PARK with what its authors left open as settings, for ablations and decisions; the library holds these fixed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from parkattn.anchors import UNANCHORED, anchor_count, levels_of, log_signal_to_noise
from parkattn.checks import expect_choice, expect_flag, expect_fraction, expect_positive
from parkattn.methods import method_entry
from parkattn.ops.importance.definition import ESTIMATORS
from parkattn.park import QUERY_BLOCKS, Park, ParkConfig, ParkPlanner, Shares, WithoutBoth, WithoutPama, WithoutQrkc
from parkattn.registry import MethodEntry
from parkattn.reuse import History, Phase, always_dense, unanchored
from parkattn.settings import KEY_GRANULE, QUERY_TILE, KeyMetric, MethodConfig, Timetable
from parkattn.site import AttentionOutput, CallSite
from parklab.baselines.settings import FlooredSelection, KMeans, StudiedConfig


def _written_out(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `ParkConfig` as a `ResearchConfig` and its records have them: each number under a name of its own."""
    found, share, rank, keys = (
        dict(fields),
        fields.get("top_p"),
        fields.get("residual_rank"),
        fields.get("key_clusters"),
    )
    if isinstance(share, (tuple, list)) and share[2:] in ((), [], (share[0],), [share[0]]):
        found |= {"top_p": share[0], "refresh_top_p": share[1]} | ({"refresh_falls": True} if share[2:] else {})
    if isinstance(rank, (tuple, list)):
        found["residual_rank"], found["short_residual_rank"] = rank
    if isinstance(keys, (tuple, list)) and keys[1] is None and keys[0] is not None:
        found |= {"key_clusters": None, "long_video_blocks": (QUERY_BLOCKS, keys[0])}
    return found


@dataclass(frozen=True, kw_only=True)
class ResearchConfig(KMeans, KeyMetric, FlooredSelection, StudiedConfig, ParkConfig):
    """`Park` and `build_plan` take it as they take a `ParkConfig`."""

    refresh_top_p: float | None = None
    """top_p of a plan that is built between anchors; None: as at anchors."""
    refresh_falls: bool = False
    """refresh_top_p holds at the step after the first and falls to top_p over the run, by log signal to noise."""
    importance: Literal["pama", "query-centroid", "full-key", "exact"] = "pama"
    """How much attention a query block gives to a key block: per query (pama), by the mean query, by all keys, or
    exactly.
    """
    budget: Literal["row", "mass", "error"] = "row"  # type: ignore[assignment]
    """What top_p = p means: as in `ParkConfig`; mass: as error, without the spread of scores."""
    BUDGETS: ClassVar[tuple[str, ...]] = ("row", "mass", "error")
    """Values of `budget`."""
    noise_tau: float | None = None
    """top_p falls from 1 with the noise (iCATS, arXiv 2610.11302): by a logistic curve in log signal-to-noise that has
    come this far towards top_p where anchors end, and half of the way after the shortest stride of a run; None: it is
    the same at every step."""
    exact_anchors: bool = False
    """Plans that anchors make go by the attention that blocks really get: their dense pass has computed all scores."""
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {**changes, "query_multiple": QUERY_TILE, "key_multiple": KEY_GRANULE}
        for name, changes in ParkConfig.PRESETS.items()
    }
    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {**_written_out(changes), **({"own_dense": True} if "residual_rank" in changes else {})}
        for name, changes in ParkConfig.PROFILES.items()
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice("importance", self.importance, ESTIMATORS)
        expect_flag("refresh_falls", self.refresh_falls)
        if self.refresh_top_p is not None:
            expect_fraction("refresh_top_p", self.refresh_top_p, zero=False)
            if self.top_p is None:
                got = f"got {self.refresh_top_p}; leave out one of them."
                raise ValueError(f"refresh_top_p: expected None beside top_k={self.top_k}, {got}")
            if isinstance(self.top_p, tuple):
                got = f"got {self.refresh_top_p}; leave out one of them."
                raise ValueError(f"refresh_top_p: expected None beside top_p={self.top_p}, which names it, {got}")
            if self.anchors is None:
                got = f"got {self.refresh_top_p}; set top_p, or anchors too."
                raise ValueError(f"refresh_top_p: expected None without anchors, between which it holds, {got}")
        elif self.refresh_falls:
            raise ValueError("refresh_falls: expected False without refresh_top_p, which falls, got True; set both.")
        expect_flag("exact_anchors", self.exact_anchors)
        if self.exact_anchors and self.anchors is None:
            raise ValueError("exact_anchors: expected False without anchors, got True; set anchors too.")
        if self.noise_tau is not None:
            expect_fraction("noise_tau", self.noise_tau, zero=False)
            if not 0.5 < self.noise_tau < 1:
                raise ValueError(f"noise_tau: expected a number between 0.5 and 1, got {self.noise_tau}; take 0.99.")
            if self.top_p is None or self.shares.last is not None:
                raise ValueError("noise_tau: expected top_p, which falls to it, and no refresh_falls; leave one out.")
        if self.top_k is not None and self.floor:
            raise ValueError(f"floor: expected 0 beside top_k={self.top_k}, got {self.floor}; leave out one of them.")

    @property
    def shares(self) -> Shares:
        if self.refresh_top_p is None:
            return super().shares
        assert not isinstance(self.top_p, tuple)
        return Shares(self.top_p, self.refresh_top_p, self.top_p if self.refresh_falls else None)

    @classmethod
    def of(cls, config: MethodConfig) -> Self:
        if isinstance(config, ParkConfig) and not isinstance(config, ResearchConfig):
            return cls.from_dict({**_written_out(config.to_dict()), "own_dense": config.own_dense})
        return super().of(config)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Also of a record from when anchors by error were a setting, which it left off."""
        off = isinstance(fields, Mapping) and "anchor_error" in fields and fields["anchor_error"] is None
        return super().from_dict({name: fields[name] for name in fields if name != "anchor_error"} if off else fields)

    @classmethod
    def for_model(cls, name: str | None, **changes: Any) -> Self:
        return cls.from_dict({**_written_out(ParkConfig.for_model(name).to_dict()), **changes})

    @classmethod
    def settled(cls, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Whoever sets top_p or top_k means it for every plan, and a residual_rank for videos of every length."""
        changes = super().settled(settings, changes)
        implied: dict[str, Any] = {}
        given = {**settings, **changes}
        if "top_p" in changes or changes.get("top_k") is not None or given.get("anchors") is None:
            implied["refresh_top_p"] = None
        if {**given, **implied}.get("refresh_top_p") is None:
            implied["refresh_falls"] = False
        if "residual_rank" in changes:
            implied["short_residual_rank"] = None
        return {**implied, **changes}

    @property
    def metric(self) -> KeyMetric:
        return self


# what a variant of PARK leaves out, as settings
_VARIANTS: dict[type, dict[str, Any]] = {
    ParkConfig: {},
    WithoutPama: {"importance": "query-centroid"},
    WithoutQrkc: {"key_metric": "euclidean"},
    WithoutBoth: {"importance": "query-centroid", "key_metric": "euclidean"},
}


def studied_entry(name: str) -> MethodEntry:
    """The entry of a method as the laboratory sets it: PARK and its variants have every setting of `ResearchConfig`."""
    entry = method_entry(name)
    changes = _VARIANTS.get(entry.config)
    if changes is None:
        return entry

    def make(config: ResearchConfig) -> Park:
        return StudiedPark(config.replace(**changes), name)

    return dataclasses.replace(entry, make=make, config=ResearchConfig)


class StudiedPlanner(ParkPlanner):
    """A share that follows noise."""

    config: ResearchConfig

    def share(self, site: CallSite) -> float | None:
        share, tau = super().share(site), self.config.noise_tau
        return share if share is None or tau is None else share_by_noise(share, tau, site)


class StudiedPark(Park):
    """PARK with the settings of `ResearchConfig` that its planners do not know."""

    def __init__(self, config: ResearchConfig, name: str = "park") -> None:
        super().__init__(config, name)
        if config.noise_tau is None and not config.exact_anchors:
            return
        share, between, last = config.shares
        self.planner = StudiedPlanner(config.replace(importance="exact") if config.exact_anchors else config, share)
        self.between = StudiedPlanner(config, between or share, last)


def share_by_noise(least: float, tau: float, site: CallSite) -> float:
    """iCATS: p + (1 - p) / (1 + exp k (l - l_pivot)), with k = log (tau / (1 - tau)) / (l_sparse - l_pivot).

    l is the log of signal to noise, l_pivot that after the shortest stride, l_sparse that of the last step with
    anchors.
    """
    total, levels = levels_of(site)
    reached = log_signal_to_noise(total, levels)[: max(1, math.ceil(total * (1 - UNANCHORED)))]
    strides = [abs(after - before) for before, after in itertools.pairwise(reached)]
    pivot = reached[strides.index(min(strides)) + 1] if strides else reached[-1]
    if reached[-1] == pivot:
        return least
    steepness = math.log(tau / (1 - tau)) / abs(reached[-1] - pivot)
    passed = reached[min(site.step, len(reached) - 1)] - pivot
    return least + (1 - least) / (1 + math.exp(steepness * passed))


class AdaptiveSchedule:
    """Anchors where the mean error that sparse calls report exceeds `anchor_error`, at most `anchor_count` in a run.

    All layers of a step do the same. What a step measured is read when the step after the next begins: by then the GPU
    has it.
    """

    def __init__(self, when: Timetable, anchor_error: float) -> None:
        self.when, self.anchor_error = when, anchor_error
        self.reset()

    def reset(self) -> None:
        self._step, self._anchor, self._used = -1, -1, 1  # the run's first step is an anchor
        self._errors: list[Tensor] = []
        self._read: Callable[[], float] | None = None
        self._read_step = -1

    def phase(self, site: CallSite, history: History) -> Phase:
        last = history.refreshed_at
        if site.step < self._step:
            self.reset()
        if site.step != self._step:
            self._begin(site)
        if (dense := always_dense(self.when, site)) is not None:
            return dense
        if last is not None and last < self._anchor <= site.step:
            return Phase("anchor", f"the error passed {self.anchor_error} before step {self._anchor}")
        return unanchored(site, last)

    def observe(self, site: CallSite, error: Tensor) -> None:
        self._errors.append(error.mean())

    def _begin(self, site: CallSite) -> None:
        """The step before ends: its error starts on its way to the host, and that of the step before it is read."""
        measured, self._read = self._read, None
        fresh = self._read_step > self._anchor  # measured after the last anchor
        if (
            measured is not None
            and fresh
            and self._used < anchor_count(self.when, site.total_steps)
            and measured() > self.anchor_error
        ):
            self._anchor, self._used = site.step, self._used + 1
        if self._errors:
            self._read, self._read_step = start_read(torch.stack(self._errors).mean()), self._step
            self._errors.clear()
        self._step = site.step


def start_read(value: Tensor) -> Callable[[], float]:
    """Begins the copy of a scalar to the host; calling the result waits for that copy alone."""
    if not value.is_cuda:
        return value.item
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    host.copy_(value.detach(), non_blocking=True)
    arrived = torch.cuda.current_stream(value.device).record_event()

    def read() -> float:
        arrived.synchronize()
        return host.item()

    return read


class AdaptivePark(Park):
    """PARK whose anchors lie where the error of its sparse calls, measured on `guard_rows` queries, passes a bound."""

    schedule: AdaptiveSchedule

    def __init__(self, config: ParkConfig, anchor_error: float) -> None:
        super().__init__(config)
        expect_positive("anchor_error", anchor_error)
        for name, usual in (("anchors", 12), ("guard_rows", 16)):
            if not getattr(config, name):
                raise ValueError(
                    f"{name}: expected some beside anchor_error={anchor_error}, got {getattr(config, name)}; "
                    f"pass {name}={usual}."
                )
        self.schedule = AdaptiveSchedule(config, anchor_error)

    def computes(self, site: CallSite) -> bool:
        """No other step is known before the run."""
        return site.step == 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        made = super().__call__(q, k, v, site)
        if made.stats.error is not None:
            # of all heads, so that every rank decides alike
            error = made.stats.error if site.ranks is None else site.ranks.gather(made.stats.error)
            self.schedule.observe(site, error)
        return made


class GivenForecasts(Park):
    """PARK whose forwards at given steps are forecast whatever their error: seconds of a run that another model had."""

    def __init__(self, config: ParkConfig, steps: Iterable[int]) -> None:
        super().__init__(config)
        self.steps = frozenset(steps)

    @property
    def tolerance(self) -> float:
        return math.inf

    def computes(self, site: CallSite) -> bool:
        return site.step not in self.steps or super().computes(site)
