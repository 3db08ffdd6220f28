"""Summary of the last generation, per layer and in all."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from parkattn.engine import LoggedCall, RunLog
    from parkattn.engine.forecast import ForwardLog

_SLOWER = (
    "plans and sparse attention took {:.2f} s longer than dense attention would have: the video is too short to gain; "
    "disable parkattn for it, or make it longer or larger"
)
_MUCH = (
    "{:.0%} of dense attention was computed, so attention cannot be much faster: disable parkattn for such runs, "
    "or make the video longer or larger, or take more steps"
)
MUCH = 2 / 3  # of dense attention: without plans and overhead it would be 1.5 times as fast
PHASES = ("dense", "refresh", "reuse")  # always reported, in this order; what else a method reports comes after them


@dataclass(frozen=True)
class Summary:
    """to_dict() for programs (plain JSON types), str() for people."""

    method: str
    """Name of the method."""
    steps: dict[str, list[int]]
    """Phase -> steps in which some layer was in it."""
    calls: dict[str, int]
    """Phase -> attention calls."""
    density: float | None
    """Mean over all calls."""
    dense_because: dict[str, int]
    """Reason -> calls."""
    backends: list[str]
    """Backends of the sparse calls, and why."""
    fused: dict[str, int]
    """Whether blocks ran compiled by us, and why or why not -> calls of blocks."""
    attention_seconds: dict[str, float]
    """Phase -> time in attention, plans included."""
    seconds_saved: float | None
    """Against the layer's own dense calls (median); None where no layer has dense calls and others."""
    seconds_saved_at_most: float | None
    """Where that is None: against the layer's shortest anchor, which also builds a plan; None without anchors."""
    state_bytes: int
    """Held now."""
    peak_state_bytes: int
    """Held during the run."""
    layers: list[dict[str, Any]]
    """One row per transformer and layer: calls by phase, density, estimated mass, error, reasons."""
    advice: list[str]
    """Advice to the user, in sentences."""
    forwards: dict[str, Any] = field(default_factory=dict)
    """Where forwards may be forecast: how many were "computed" and "forecast", the "mean_error" and "largest_error" of
    forecasts as measured where one ended (None: none did), and why some were not asked about ("off": reason ->
    forwards). Else empty.
    """

    balance: dict[str, Any] = field(default_factory=dict)
    """Where ranks share the heads: new "plans" after which heads were assigned to ranks, the slowest rank over the mean
    of all by their density, "plain" (the model's order) and "assigned" (means over plans), and why heads stayed with
    their ranks ("off": reason -> calls). Else empty.
    """

    @classmethod
    def of(
        cls,
        method: str,
        log: RunLog,
        state_bytes: int,
        fused: Mapping[str, int] | None = None,
        missed: Mapping[str, int] | None = None,
        advice: Sequence[str] = (),
    ) -> Summary:
        """missed: reason -> layers whose calls did not reach the engine, where known. advice: the host's."""
        names = tuple(dict.fromkeys((*PHASES, *(call.stats.phase for call in log.calls))))
        layers: dict[tuple[str, int], list[LoggedCall]] = {}
        for call in log.calls:
            layers.setdefault((call.site.transformer, call.site.layer), []).append(call)
        rows = [_row(*where, calls, names) for where, calls in sorted(layers.items())]
        reasons = collections.Counter[str]()
        for row in rows:
            reasons.update(row["dense_because"])
        reasons.update(missed or {})
        times = [
            {phase: [c.seconds() for c in calls if c.stats.phase == phase] for phase in names}
            for calls in layers.values()
        ]
        saved = _saved(times, "dense", statistics.median)
        at_most = _saved_at_most(times, layers.values()) if saved is None else None
        density = _mean([call.stats.density for calls in layers.values() for call in calls])
        slower = _slower(log, density, saved, at_most)
        return cls(
            method=method,
            steps={phase: sorted({c.site.step for c in log.calls if c.stats.phase == phase}) for phase in names}
            | ({"forecast": sorted(log.forwards.steps)} if log.forwards.steps else {}),
            calls={phase: sum(row[phase] for row in rows) for phase in names},
            density=density,
            dense_because=dict(reasons.most_common()),
            backends=sorted({c.stats.backend for c in log.calls if c.stats.backend}),
            fused=dict(fused or {}),
            attention_seconds={phase: sum(sum(layer[phase]) for layer in times) for phase in names},
            seconds_saved=saved,
            seconds_saved_at_most=at_most,
            state_bytes=state_bytes,
            peak_state_bytes=max(state_bytes, log.peak_state_bytes),
            layers=rows,
            advice=[*slower, *advice],
            forwards=_forwards(log.forwards),
            balance=_balance(log),
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in plain JSON types."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        if not self.layers:
            return "\n".join([f"{self.method}: nothing has run yet", *self._reasons()])
        widths = {phase: max(6, len(phase) + 1) for phase in self.calls}
        counted = ((len(found), phase) for phase, found in self.steps.items() if found)
        steps = ", ".join(f"{count} {'step' if count == 1 else 'steps'} {phase}" for count, phase in counted)
        held = f"plans {self.peak_state_bytes / 2**20:.1f} MiB, {self.state_bytes / 2**20:.1f} MiB now"
        seconds = sum(self.attention_seconds.values())
        computed = f"{self.density:.0%} of dense attention was computed"
        where = " in the forwards that ran" if self.forwards.get("forecast") else ""
        columns = " ".join(f"{phase:>{width}}" for phase, width in widths.items())
        lines = [
            f"{self.method}: {steps}; mean density {self.density:.2f}; {held}",
            f"attention took {seconds:.1f} s, {self._saved()}; {computed}{where}",
            *self._forecasts(),
            *self._ranks(),
            *(f"attention: {reason}" for reason in self.backends),
            *(f"blocks compiled by enable: {outcome} ({count}x)" for outcome, count in self.fused.items()),
            f"{'transformer':14} {'layer':>5} {columns} {'density':>8} {'mass':>6}",
        ]
        for row in self.layers:
            mass = "" if row["estimated_mass"] is None else f"{row['estimated_mass']:.2f}"
            counts = " ".join(f"{row[phase]:{width}}" for phase, width in widths.items())
            lines.append(f"{row['transformer']:14} {row['layer']:5} {counts} {row['density']:8.2f} {mass:>6}")
        return "\n".join(lines + self._reasons())

    def _forecasts(self) -> list[str]:
        if not self.forwards:
            return []
        run, not_run, mean = self.forwards["computed"], self.forwards["forecast"], self.forwards["mean_error"]
        error = ""
        if mean is not None:
            most = self.forwards["largest_error"]
            error = f"; where forecasts ended they were wrong by {mean:.1%}, at most {most:.1%}"
        counts = [f"forwards: {run} computed, {not_run} forecast{error}"] if run + not_run else []
        return counts + [f"no forecast: {reason} ({count}x)" for reason, count in self.forwards["off"].items()]

    def _ranks(self) -> list[str]:
        found = self.balance
        if not found:
            return []
        ratios = "slowest rank {plain:.2f} times the mean in the model's order, {assigned:.2f} as assigned"
        lines = []
        if found["plans"]:
            lines = [f"heads by planned density: {ratios.format(**found)} ({found['plans']} plans)"]
        return lines + [f"heads stay with their ranks: {reason} ({count}x)" for reason, count in found["off"].items()]

    def _saved(self) -> str:
        seconds = self.seconds_saved_at_most if self.seconds_saved is None else self.seconds_saved
        if seconds is None:
            return "what was saved is not known, since no layer has dense calls to compare with"
        change = f"{abs(seconds):.1f} s {'saved' if seconds >= 0 else 'lost'}"
        if self.seconds_saved is not None:
            return f"about {change}, by the dense calls of this run"
        return f"at {'most' if seconds >= 0 else 'least'} {change}, by the anchors, dense calls that also build a plan"

    def _reasons(self) -> list[str]:
        because = [f"dense {count}x: {reason}" for reason, count in self.dense_because.items()]
        return because + [f"advice: {line}" for line in self.advice]


def _forwards(log: ForwardLog) -> dict[str, Any]:
    if not (log.computed or log.forecast or log.off):
        return {}
    errors = [value for read in log.errors if math.isfinite(value := read())]
    return {
        "computed": log.computed,
        "forecast": log.forecast,
        "mean_error": sum(errors) / len(errors) if errors else None,
        "largest_error": max(errors, default=None),
        "off": dict(log.off.most_common()),
    }


def _balance(log: RunLog) -> dict[str, Any]:
    found = [call.stats.imbalance.tolist() for call in log.calls if call.stats.imbalance is not None]
    if not (found or log.unbalanced):
        return {}
    plain, assigned = (sum(each) / len(found) for each in zip(*found, strict=True)) if found else (None, None)
    return {"plans": len(found), "plain": plain, "assigned": assigned, "off": dict(log.unbalanced.most_common())}


def _row(transformer: str, layer: int, calls: Sequence[LoggedCall], phases: Sequence[str]) -> dict[str, Any]:
    found = [call.stats for call in calls]
    counts = collections.Counter(stats.phase for stats in found)
    return {
        "transformer": transformer,
        "layer": layer,
        **{phase: counts[phase] for phase in phases},
        "density": _mean([stats.density for stats in found]),
        "estimated_mass": _mean([stats.estimated_mass for stats in found]),
        "error": _mean([stats.error for stats in found]),
        "dense_because": dict(collections.Counter(stats.reason for stats in found if stats.phase == "dense")),
    }


def _mean(values: Sequence[Tensor | None]) -> float | None:
    """None also where there is no finite one (tokens with NaN have no mass): JSON has no word for it."""
    known = [value.mean().item() for value in values if value is not None]
    mean = sum(known) / len(known) if known else math.nan
    return mean if math.isfinite(mean) else None


def _saved_at_most(times: list[dict[str, list[float]]], layers: Iterable[list[LoggedCall]]) -> float | None:
    """Seconds saved where no call was dense: a call takes no less than its share of the fastest anchor."""
    at_most = _saved(times, "anchor", min)
    if at_most is None or at_most <= 0:
        return at_most
    skipped = [sum(1 - call.stats.density.mean().item() for call in calls) for calls in layers]
    parts = zip(times, skipped, strict=True)
    return min(at_most, sum(min(layer["anchor"]) * part for layer, part in parts if layer.get("anchor")))


def _slower(log: RunLog, density: float | None, saved: float | None, at_most: float | None) -> list[str]:
    """Advice where sparse attention gained nothing."""
    known = saved if at_most is None else at_most
    if known is not None and known < 0:
        return [_SLOWER.format(-known)]
    # a forward that was forecast had no attention at all
    forwards = log.forwards
    ran = forwards.computed / (forwards.computed + forwards.forecast) if forwards.forecast else 1.0
    sparse = any(call.stats.phase not in ("dense", "anchor") for call in log.calls)
    much = saved is None and sparse and density is not None and ran * density > MUCH
    return [_MUCH.format(density)] if much else []


def _saved(times: list[dict[str, list[float]]], phase: str, choose: Callable[[list[float]], float]) -> float | None:
    """Seconds of the calls not of this phase, against as many of one that is, which `choose` takes of a layer's."""
    others = [[s for each, seconds in layer.items() if each != phase for s in seconds] for layer in times]
    if times and not any(others):
        return 0.0
    pairs = zip(times, others, strict=True)
    measured = [(choose(layer[phase]), own) for layer, own in pairs if own and layer.get(phase)]
    return sum(one * len(own) - sum(own) for one, own in measured) if measured else None
