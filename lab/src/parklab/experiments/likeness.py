"""How like the real models a model is: recall, densities, residuals from step to step, spread over heads.

Beside them stand the paper's figures (`paper_numbers`) and MagCache's (`PUBLISHED`). A finding holds where a
model is as near to two real models as those are to each other: it needs no tolerance of ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from parklab.experiments.mismatches import REPRESENTATIONS
from parklab.experiments.paper_numbers import PAPER
from parklab.experiments.results import CellRecords, Panel, Plot, Result, Series, nothing_run
from parklab.experiments.runner import Lab
from parklab.experiments.tables import Finding, Table, columns_of, grouped, interval, without_empty
from parklab.store import Cell, Record

CONDITIONAL, UNCONDITIONAL = "conditional", "unconditional"
STEPS = 50  # so that there are 49 ratios
# Ratios of successive residuals of real models, as MagCache publishes them: model, branch, ratios. A residual is the
# output of the last block less the input of the first one; a ratio is the mean over tokens of its norm over that of the
# step before. Taken from the calibrations in https://github.com/Zehong-Ma/MagCache (Apache-2.0), commit df81cb1:
# MagCache4Wan2.1/magcache_generate.py and MagCache4HunyuanVideo/magcache_sample_video.py (720p), 50 steps, one prompt.
# The scripts say neither prompt, size nor shift of Wan2.1's; their defaults are 1280 x 720, UniPC, shift 5 and guidance
# 5. Their spread over tokens and their cosine distances are drawn in the paper (arXiv 2506.09045), not printed.
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "Wan2.1-1.3B": {
        CONDITIONAL: (
            1.0124, 1.00166, 0.99791, 0.99682, 0.99634, 0.99567, 0.99416, 0.99578, 0.9957, 0.99511, 0.99535,
            0.99552, 0.99541, 0.9954, 0.99489, 0.99518, 0.99484, 0.99481, 0.99415, 0.99419, 0.99396, 0.99388,
            0.99349, 0.99309, 0.9927, 0.99228, 0.99171, 0.99137, 0.99068, 0.99005, 0.98944, 0.98849, 0.98758,
            0.98644, 0.98504, 0.9836, 0.98202, 0.97977, 0.97717, 0.9741, 0.97003, 0.96538, 0.9593, 0.95086,
            0.94013, 0.92402, 0.90241, 0.86821, 0.81838,
        ),
        UNCONDITIONAL: (
            1.02213, 1.0041, 1.00061, 0.99762, 0.99685, 0.99586, 0.99422, 0.99575, 0.99563, 0.99506, 0.99531,
            0.99549, 0.99539, 0.99536, 0.99485, 0.99514, 0.99478, 0.99479, 0.99413, 0.99416, 0.99393, 0.99386,
            0.99349, 0.99304, 0.9927, 0.99226, 0.9917, 0.99135, 0.99063, 0.99003, 0.98942, 0.98849, 0.98757,
            0.98643, 0.98503, 0.98359, 0.98201, 0.97978, 0.97718, 0.97411, 0.97002, 0.96541, 0.95933, 0.95089,
            0.94019, 0.92414, 0.9026, 0.86868, 0.81939,
        ),
    },
    "Wan2.1-14B": {
        CONDITIONAL: (
            1.02504, 1.00025, 0.9985, 0.99779, 0.9966, 0.99482, 0.99467, 0.99664, 0.99434, 0.99533, 0.99468,
            0.99438, 0.99516, 0.99384, 0.99404, 0.99517, 0.99409, 0.99428, 0.99347, 0.99418, 0.99271, 0.99313,
            0.99215, 0.99218, 0.99216, 0.99163, 0.99138, 0.98982, 0.98996, 0.9887, 0.98772, 0.98767, 0.98573,
            0.98501, 0.9838, 0.98177, 0.98037, 0.97678, 0.97546, 0.97184, 0.96711, 0.96349, 0.95629, 0.94926,
            0.93964, 0.92511, 0.90693, 0.8796, 0.86111,
        ),
        UNCONDITIONAL: (
            1.03017, 1.00251, 0.99962, 0.99771, 0.99658, 0.99476, 0.99451, 0.99656, 0.99431, 0.99545, 0.99465,
            0.99434, 0.99517, 0.9938, 0.99401, 0.99516, 0.99408, 0.99426, 0.99343, 0.99416, 0.99269, 0.99311,
            0.99215, 0.99215, 0.99217, 0.99161, 0.99135, 0.9898, 0.98995, 0.98866, 0.9877, 0.98765, 0.9857,
            0.98498, 0.98376, 0.98173, 0.98035, 0.97677, 0.97543, 0.97183, 0.96708, 0.96345, 0.95625, 0.94929,
            0.93961, 0.92504, 0.90678, 0.87945, 0.86189,
        ),
    },
    "HunyuanVideo": {
        CONDITIONAL: (
            1.0754, 1.27807, 1.11596, 1.09504, 1.05188, 1.00844, 1.05779, 1.00657, 1.04142, 1.03101, 1.00679,
            1.02556, 1.00908, 1.06949, 1.05438, 1.02214, 1.02321, 1.03019, 1.00779, 1.03381, 1.01886, 1.01161,
            1.02968, 1.00544, 1.02822, 1.00689, 1.02119, 1.0105, 1.01044, 1.01572, 1.02972, 1.0094, 1.02368,
            1.0226, 0.98965, 1.01588, 1.02146, 1.0018, 1.01687, 0.99436, 1.00283, 1.01139, 0.97122, 0.98251,
            0.94513, 0.97656, 0.90943, 0.85703, 0.75456,
        ),
    },
}  # fmt: skip

GUIDED = 5.0  # where the model's own is none: the branch without the prompt is measured too
# as diffusers calls them; pipelines that say nothing run the branch with the prompt first, or both in one batch
BRANCHES = {"cond": CONDITIONAL, "pred_cond": CONDITIONAL, "uncond": UNCONDITIONAL, "pred_uncond": UNCONDITIONAL}
ALONE = {"forward 0": CONDITIONAL, "forward 1": UNCONDITIONAL}
REAL = ("Wan2.1-1.3B", "Wan2.1-14B", "HunyuanVideo")
WANS = REAL[:2]
PRINTED = {"Wan2.1-14B": "Wan 2.1-14B", "HunyuanVideo": "HunyuanVideo"}  # as the paper's tables call them
RECALLS = {"top_k": "tab:query_key_compression_topk", "top_p": "tab:query_key_compression"}
NAMED = {"top_k": "recall of top-k 0.1", "top_p": "recall of top-p 0.9"}
SHOWN = {"top_k": ("exact", "pama"), "top_p": ("pama",)}  # top-p of exact importance keeps 0.9 of it anywhere
PARTS = {"first fifth": (0.0, 0.2), "middle": (0.2, 0.8), "last fifth": (0.8, 1.0)}  # of a run
LAST = "last step"
MEASURES = {
    "ratio": "ratio of residuals", "ratio_std": "its spread over tokens",
    "cosine_distance": "cosine distance of residuals", "output_change": "relative change of outputs",
}  # fmt: skip
COLUMNS = columns_of(" | ".join(("measure | of | at | measured:4 | ±:4", *(f"{name}:4" for name in REAL))))
NEAR = "as near to {} as those are to each other"

Row = tuple[Any, ...]
Curve = Mapping[float, float]  # share of the run that lies behind: value of the step there
QUANTILES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean, "P05": lambda x: x.quantile(0.05), "median": lambda x: x.quantile(0.5),
    "P95": lambda x: x.quantile(0.95),
}  # fmt: skip


def likeness_cells(lab: Lab) -> list[Cell]:
    """Retrieval as in the paper's tables, and dense runs; captures that are given have no runs."""
    e = lab.evaluation
    if e.captures:
        return lab.retrieval_cells()
    asked = lab.requests()
    if e.guidances == (None,) and lab.base.guidance is not None and lab.base.guidance <= 1:
        asked = [dataclasses.replace(request, guidance=GUIDED) for request in asked]
    runs = [lab.forwards_cell(request) for request in asked]
    return [*lab.retrieval_cells(), *runs]


def likeness_result(gathered: CellRecords) -> Result:
    found = gathered.of(gathered.cells)
    calls = [record["calls"] for record in found if "calls" in record]
    runs = [record for record in found if "forwards" in record]
    if not found:
        return nothing_run(gathered)
    rows, findings = [], []
    for part in (_recalls(calls), _densities(runs), _residuals(runs)):
        rows += part[0]
        findings += part[1]
    missing = len(gathered.cells) - len(found)
    left = f" {missing} of {len(gathered.cells)} cells not run: {gathered.why_not(gathered.cells)}." if missing else ""
    table = without_empty(Table(COLUMNS, tuple(rows)), 3)
    return Result(table, tuple(findings), _figure(runs), _what_was_measured(calls, runs) + left)


# recall and densities, by head


def _recalls(videos: Sequence[Sequence[Record]]) -> tuple[list[Row], list[Finding]]:
    rows: list[Row] = []
    findings = []
    for kind, order in itertools.product(SHOWN, ("Clustered", "Original")) if videos else ():
        for estimator in SHOWN[kind]:
            pair = " x ".join(REPRESENTATIONS[estimator])
            by_video = [[v for call in calls for v in call["recall"][order][kind][estimator]] for calls in videos]
            for quantile in QUANTILES:
                real = _printed(kind, order, estimator, quantile)
                rows.append(
                    _row(NAMED[kind], f"{order.lower()}, {pair}", f"heads: {quantile}", by_video, quantile, real)
                )
                if estimator == "exact" and real:
                    statement = f"{NAMED[kind]}, {order.lower()}, {quantile}"
                    findings.append(_nearness(statement, by_video, quantile, real))
    return rows, findings


def _printed(kind: str, order: str, estimator: str, quantile: str) -> dict[str, float]:
    """By model, as a share; empty where the paper prints none."""
    table = PAPER[RECALLS[kind]]
    wanted = {name: f"{printed} {quantile.capitalize()}" for name, printed in PRINTED.items()}
    (row,) = (row for row in table.rows if row[:3] == (order, *REPRESENTATIONS[estimator]))
    values = dict(zip(table.columns, row, strict=True))
    return {name: float(values[column]) / 100 for name, column in wanted.items() if column in values}


def _densities(runs: Sequence[Record]) -> tuple[list[Row], list[Finding]]:
    """At the first sparse step over heads; at the later ones the mean."""
    rows: list[Row] = []
    steps = sorted({int(step) for run in runs for step in run["densities"]})
    for step in steps:
        by_video = [
            list(itertools.chain(*run["densities"][str(step)])) for run in runs if str(step) in run["densities"]
        ]
        rows += [
            _row("density at p = 0.9", f"step {step}", f"heads: {quantile}", by_video, quantile, {})
            for quantile in (QUANTILES if step == steps[0] else ("mean",))
        ]
    return rows, []


def _row(
    measure: str, of: str, at: str, by_video: Sequence[Sequence[float]], quantile: str, real: Mapping[str, float]
) -> Row:
    take = QUANTILES[quantile]
    whole = _quantile(list(itertools.chain(*by_video)), take)
    spread = interval([_quantile(values, take) for values in by_video])
    return (measure, of, at, whole, spread, *(real.get(name) for name in REAL))


def _quantile(values: Sequence[float], take: Callable[[torch.Tensor], torch.Tensor]) -> float:
    return float(take(torch.tensor(values, dtype=torch.float64)))


def _nearness(statement: str, by_video: Sequence[Sequence[float]], quantile: str, real: Mapping[str, float]) -> Finding:
    """How much closer the measured value is to the nearest of two than they are to each other."""
    low, high = sorted(real.values())

    def margin(values: Sequence[float]) -> float:
        got = _quantile(values, QUANTILES[quantile])
        return (high - low) - max(low - got, got - high, 0.0)

    every = margin(list(itertools.chain(*by_video)))
    told = f"{statement}: {NEAR.format(' and '.join(real))}"
    return Finding(told, every, spread=interval([margin(values) for values in by_video]))


# from step to step


def _residuals(runs: Sequence[Record]) -> tuple[list[Row], list[Finding]]:
    rows: list[Row] = []
    findings = []
    for branch in _branches(runs):
        name = _shown(branch, runs)
        for measure, title in MEASURES.items():
            curves = [_curve(run, branch, measure) for run in runs]
            real = _published(name, curves) if measure == "ratio" else {}
            for place in (*PARTS, *((LAST,) if measure == "ratio" else ())):
                values = [statistics.fmean(part.values()) for curve in curves if (part := _part(curve, place))]
                if not values:
                    continue
                means = [
                    statistics.fmean(_part(real[model], place).values()) if model in real else None for model in REAL
                ]
                rows.append((title, name, place, statistics.fmean(values), interval(values), *means))
                if real and place in PARTS:
                    findings.append(_nearness_of_curves(f"ratio of residuals, {name}, {place}", curves, place, real))
    return rows, findings


def _branches(runs: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(row["branch"] for run in runs for row in run["forwards"]))


def _shown(branch: str, runs: Iterable[Record]) -> str:
    batched = any("batch" in row for run in runs for row in run["forwards"] if row["branch"] == branch)
    return branch if batched else (BRANCHES | ALONE).get(branch, branch)


def _curve(run: Record, branch: str, measure: str) -> Curve:
    steps = 1 + max(row["step"] for row in run["forwards"])
    return {row["step"] / steps: row[measure] for row in run["forwards"] if row["branch"] == branch and measure in row}


def _part(curve: Curve, place: str) -> Curve:
    if place == LAST:
        return {at: value for at, value in curve.items() if at == max(curve)}
    low, high = PARTS[place]
    return {at: value for at, value in curve.items() if low < at <= high}


def _published(branch: str, curves: Sequence[Curve]) -> dict[str, Curve]:
    """By model; in other numbers of steps than theirs, over the same stretches of the run."""
    places = sorted({at for curve in curves for at in curve})
    return {
        model: {at: _over(ratios[branch], at, places[0]) for at in places}  # a step is as long as the first
        for model, ratios in PUBLISHED.items() if branch in ratios and places
    }  # fmt: skip


def _over(ratios: Sequence[float], at: float, stretch: float) -> float:
    """The product of the ratios over a stretch of the run that ends at this share of it."""
    logs = [0.0, *itertools.accumulate(math.log(ratio) for ratio in ratios)]

    def passed(share: float) -> float:
        place = max(share, 0.0) * STEPS
        before = min(int(place), STEPS - 2)  # a run of more steps ends later than theirs, which goes on as it ended
        return logs[before] + (place - before) * (logs[before + 1] - logs[before])

    return math.exp(passed(at) - passed(at - stretch))


def _nearness_of_curves(statement: str, curves: Sequence[Curve], place: str, real: Mapping[str, Curve]) -> Finding:
    """Distance: mean over the steps there of the difference of two ratios."""

    def apart(one: Curve, other: Curve) -> float:
        return statistics.fmean(abs(value - other[at]) for at, value in _part(one, place).items())

    def margin(curve: Curve) -> float:
        return apart(*(real[name] for name in WANS)) - min(apart(curve, real[name]) for name in WANS)

    told = f"{statement}: {NEAR.format(' and '.join(WANS))}"
    return Finding(told, margin(_mean_curve(curves)), spread=interval([margin(curve) for curve in curves]))


def _figure(runs: Sequence[Record]) -> Plot | None:
    panels = []
    for measure, title in MEASURES.items():
        series = []
        for branch in _branches(runs):
            curves = [_curve(run, branch, measure) for run in runs]
            name = _shown(branch, runs)
            series.append(_series(f"measured, {name}", _mean_curve(curves)))
            if measure == "ratio" and name == CONDITIONAL:
                series += [_series(model, curve) for model, curve in _published(name, curves).items()]
        if any(each.points for each in series):
            panels.append(Panel("share of the run", title, tuple(series)))
    return Plot((tuple(panels),)) if panels else None


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """Over the runs that have a step there."""
    found = grouped((point for curve in curves for point in curve.items()), lambda point: point[0])
    return {at: statistics.fmean(value for _, value in points) for at, points in found.items()}


def _series(name: str, curve: Curve) -> Series:
    return Series(name, tuple((at, value, None, "") for at, value in sorted(curve.items())))


def _what_was_measured(videos: Sequence[Sequence[Record]], runs: Sequence[Record]) -> str:
    told = []
    if videos:
        call = videos[0][0]
        told.append(
            f"Recall: {len(videos)} videos, {call['tokens'][0]:,} tokens, {call['blocks'][0]} query and "
            f"{call['blocks'][1]} key blocks"
        )
    if runs:
        steps = 1 + max(row["step"] for row in runs[0]["forwards"])
        scales = sorted({run["request"]["guidance"] for run in runs if run["request"]["guidance"] is not None})
        guided = f", guidance {', '.join(f'{scale:g}' for scale in scales)}" if scales else ""
        told.append(f"forwards: {len(runs)} runs of {steps} steps{guided}")
    told.append(
        "recall of real models is the paper's; their ratios are MagCache's, of 50 steps, here over the same stretches "
        "of a run"
    )
    return "; ".join(told) + "."
