"""From records of captured calls to the paper's tables of retrieval: means over heads, layers and videos.

± is half of the 95 % interval of a mean or margin over videos; there is none of one video.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from parklab.experiments.mismatches import REPRESENTATIONS
from parklab.experiments.results import CellRecords, Dots, Result, nothing_run
from parklab.experiments.tables import Finding, Table, columns_of, interval, without_empty
from parklab.metrics.retrieval import recall_summary

NO_ERROR = "Euclidean clusters have no error to compare with"
POINTS = "percentage points"
METRICS = {"euclidean": "Euclidean", "query-response": "QRKC"}
Call = dict[str, Any]
Video = Sequence[Call]
Pick = Callable[[Call], Sequence[float]]  # one value per head


def _of_videos(measured: Callable[..., Result]) -> Callable[..., Result]:
    """From the calls of each video that was run, where there is one."""

    @functools.wraps(measured)
    def result(gathered: CellRecords, *given: Any, **named: Any) -> Result:
        videos = [record["calls"] for record in gathered.of(gathered.cells)]
        return measured(videos, *given, **named) if videos else nothing_run(gathered)

    return result


@_of_videos
def recall_table(videos: list[Video], kind: str) -> Result:
    """kind: top_p or top_k. Percent, over all layers, heads, prompts and seeds."""
    rows, findings = [], []
    for order in ("Clustered", "Original"):
        means = {}
        for estimator, (query, key) in REPRESENTATIONS.items():
            pick = _picker("recall", order, kind, estimator)
            found = _percent(_all(videos, pick))
            means[estimator] = _means(videos, pick)
            rows.append(
                (order, query, key, found["mean"], _spread(means[estimator], 100), found["p05"], found["worst"])
            )
        rival = max(("query-centroid", "full-key"), key=lambda name: statistics.fmean(means[name]))
        statement = (
            f"{order.lower()} order, {kind.replace('_', '-')}: Full x Centroid has the best mean recall of the "
            "compressed pairs"
        )
        findings.append(_difference(statement, means["pama"], means[rival], POINTS, 100))
    return _result(videos, "Ordering | Query | Key | Mean:2 | ±:2 | P05:2 | Worst:2", rows, findings)


@_of_videos
def representation_table(videos: list[Video]) -> Result:
    tv = {name: _means(videos, _picker("tv", name)) for name in REPRESENTATIONS}
    rows = tuple((*pair, statistics.fmean(tv[name]), _spread(tv[name])) for name, pair in REPRESENTATIONS.items())
    findings = (
        _difference(
            "per-query TV is below centroid TV, both over key centroids", tv["query-centroid"], tv["pama"], "TV"
        ),
        _difference("Full x Centroid has lower TV than Centroid x Full", tv["full-key"], tv["pama"], "TV"),
    )
    return _result(videos, "Query | Key | TV:4 | ±:4", rows, findings)


@_of_videos
def key_error_table(videos: list[Video]) -> Result:
    rows: list[tuple[Any, ...]] = []
    findings = []
    for name, shown, sign, statement in (
        ("key_mse", "Raw-key MSE", 1, "QRKC raises raw-key MSE"),
        ("score_error", "QK-score squared error", -1, "QRKC lowers QK-score error"),
    ):
        sides = [_means(videos, _picker("keys", metric, name)) for metric in METRICS]
        euclidean, qrkc = map(statistics.fmean, sides)
        change = 100 * (qrkc / euclidean - 1) if euclidean else None
        changes = [100 * (after / before - 1) for before, after in zip(*sides, strict=True) if before]
        rows.append((shown, euclidean, qrkc, "" if change is None else f"{change:+.1f}%", _spread(changes)))
        findings.append(
            Finding(statement, None if change is None else sign * change, "%", _spread(changes), reason=NO_ERROR)
        )
    return _result(videos, "Metric | Euclidean:3 | QRKC:3 | Change | ±:1", rows, findings)


def mismatch_panel(gathered: CellRecords) -> Result:
    """Panel c of fig:retrieval_mismatches; what it finds is said where the figure of the appendix is."""
    found = mismatch_figure(gathered)
    note = f"Panel c; a and b are drawings. {found.note}"
    return found if found.table is None else replace(found, findings=(), note=note)


@_of_videos
def mismatch_figure(videos: list[Video]) -> Result:
    tv = {
        shown: _means(videos, _picker("tv", name))
        for name, shown in (("query-centroid", "query centroid"), ("pama", "per query"))
    }
    mass = {shown: _means(videos, _picker("keys", metric, "log_mass")) for metric, shown in METRICS.items()}
    rows, panels = [], []
    for title, sides in (("attention-weight TV", tv), ("log-mass RMSE", mass)):
        rows += [(title, shown, statistics.fmean(means), _spread(means)) for shown, means in sides.items()]
        panels.append((title, tuple(sides), tuple(map(statistics.fmean, sides.values()))))
    findings = (_difference("QRKC lowers the centred log-mass RMSE", mass["Euclidean"], mass["QRKC"]),)
    return _result(videos, "Metric | Estimate | Error:4 | ±:4", rows, findings, Dots(tuple(panels)))


@_of_videos
def qrkc_figure(videos: list[Video]) -> Result:
    picks = {metric: _picker("keys", metric, "pama_recall") for metric in METRICS}
    found = {metric: _percent(_all(videos, pick)) for metric, pick in picks.items()}
    spread = {metric: _spread(_means(videos, pick), 100) for metric, pick in picks.items()}
    rows = tuple(
        (METRICS[metric], each["mean"], spread[metric], each["p05"], each["worst"]) for metric, each in found.items()
    )
    panels = tuple(
        (f"{part} recall, %", tuple(METRICS.values()), tuple(each[part] for each in found.values()))
        for part in ("mean", "p05")
    )
    findings = []
    for part in ("mean", "p05"):
        margin = found["query-response"][part] - found["euclidean"][part]
        by_video = [[_percent(_all([video], pick))[part] for video in videos] for pick in picks.values()]
        apart = [qrkc - euclidean for euclidean, qrkc in zip(*by_video, strict=True)]
        findings.append(Finding(f"QRKC raises {part} recall of PAMA", margin, POINTS, _spread(apart)))
    return _result(videos, "Keys | Mean:2 | ±:2 | P05:2 | Worst:2", rows, findings, Dots(panels))


def _result(
    videos: Sequence[Video], told: str, rows: Iterable[Any], findings: Iterable[Finding], figure: Dots | None = None
) -> Result:
    table = without_empty(Table(columns_of(told), tuple(rows)))
    return Result(table, tuple(findings), figure, _what_was_measured(videos))


def _picker(*path: str) -> Pick:
    def pick(call: Call) -> Sequence[float]:
        found: Any = call
        for name in path:
            found = found[name]
        return list(found)

    return pick


def _all(videos: Iterable[Video], pick: Pick) -> list[float]:
    return [value for video in videos for call in video for value in pick(call)]


def _means(videos: Iterable[Video], pick: Pick) -> list[float]:
    """Of each video, over its layers and heads."""
    return [statistics.fmean(_all([video], pick)) for video in videos]


def _percent(values: Sequence[float]) -> dict[str, float]:
    return {name: 100 * value for name, value in recall_summary(torch.tensor(values)).items()}


def _spread(values: Sequence[float], factor: float = 1.0) -> float | None:
    found = interval(values)
    return None if found is None else factor * found


def _difference(
    statement: str, upper: Sequence[float], lower: Sequence[float], unit: str = "", factor: float = 1.0
) -> Finding:
    apart = [factor * (one - other) for one, other in zip(upper, lower, strict=True)]
    return Finding(statement, statistics.fmean(apart), unit, interval(apart))


def _what_was_measured(videos: Sequence[Video]) -> str:
    calls = [call for video in videos for call in video]
    heads = sum(len(call["tv"]["exact"]) for call in calls)
    tokens, blocks = calls[0]["tokens"], calls[0]["blocks"]
    return (
        f"{heads} heads of {len(calls)} calls, {tokens[0]:,} tokens, {blocks[0]} query and {blocks[1]} key blocks; "
        f"± over videos: {len(videos)}."
    )
