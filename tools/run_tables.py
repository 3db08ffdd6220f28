"""Tables of whole runs for tools/tables.py: forecasts beside every forward, and beside the step caches of others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from records import RESULTS, Record, published

from parklab.bench.frontier import DENSE, Setting, read_records
from parklab.experiments.run_frontier import Run
from parklab.experiments.tables import interval, page_table

FILES = {"run_75600.jsonl": "75,600", "run_7168.jsonl": "7,168"}  # tokens
NOT_RUN = "not run: docs/forecast.md has the commands\n"
Videos = dict[tuple[str, int], Record]  # by prompt and seed


def recorded() -> dict[str, list[Record]]:
    """Lines by tokens, of the files that are there."""
    return {tokens: read_records(RESULTS / name) for name, tokens in FILES.items() if (RESULTS / name).exists()}


def by_setting(lines: list[Record]) -> dict[tuple[int, float, str], Videos]:
    """By steps, guidance and setting."""
    found: dict[tuple[int, float, str], Videos] = {}
    for line in lines:
        place = line["steps"], line["guidance"], line["setting"]
        found.setdefault(place, {})[line["prompt"], line["seed"]] = line
    return dict(sorted(found.items(), key=lambda item: (-item[0][0], item[0][1])))


def profile_rows() -> Iterator[tuple[str, ...]]:
    for tokens, lines in recorded().items():
        found = by_setting(lines)
        for (steps, guidance, name), videos in found.items():
            asked = Setting.parse(name)
            every = found.get((steps, guidance, name.partition(" tolerance=")[0]))
            if asked.method == DENSE or "tolerance" not in asked.changes or every is None:
                continue
            lost = [every[place]["psnr"] - row["psnr"] for place, row in videos.items() if place in every]
            kept = [row["psnr"] for row in videos.values()]
            yield (
                tokens, str(steps), f"{guidance:g}", f"`{name}`", str(len(kept)), _share(videos.values()), f"{statistics.fmean(kept):.1f}",
                f"{statistics.fmean(lost):+.2f}{_within(lost)}", f"{max(lost):+.2f}",
            )  # fmt: skip


@published
def forecast_profiles() -> str:
    """What forecasts lose against the same profile with every forward, on the same videos."""
    heads = "tokens | steps | guidance | setting | videos | forwards computed | PSNR | lost, dB | worst video lost, dB"
    rows = list(profile_rows())
    return page_table(heads, rows) if rows else NOT_RUN


@published
def forecast_caches() -> str:
    """Dense attention with forecasts, with step caches of others and in fewer steps, by the forwards computed."""
    rows = []
    for tokens, lines in recorded().items():
        for guidance in sorted({line["guidance"] for line in lines}):
            steps = max(line["steps"] for line in lines)
            runs = [
                Run("", (0, 0, 0, steps), name, "", videos)
                for (in_steps, scale, name), videos in by_setting(lines).items()
                if (in_steps, scale) == (steps, guidance) and name.startswith(f"{DENSE} ")
            ]
            rows += [
                (tokens, f"{guidance:g}", f"`{run.name}`", str(len(run.psnr)), _share(run.videos.values()), f"{run.mean('cost'):.2f}",
                 f"{statistics.fmean(run.psnr):.1f}{_within(run.psnr)}", f"{min(run.psnr):.1f}")
                for run in sorted(runs, key=lambda run: -(run.mean("share_computed") or 0))
            ]  # fmt: skip
    heads = "tokens | guidance | setting | videos | forwards computed | attention | PSNR | worst video"
    return page_table(heads, rows) if rows else NOT_RUN


def _share(videos: Iterable[Mapping[str, Any]]) -> str:
    shares = [row["share_computed"] for row in videos]
    return f"{statistics.fmean(shares):.2f} ({max(shares):.2f})"


def _within(values: list[float]) -> str:
    half = interval(values)
    return "" if half is None else f" ± {half:.2f}"
