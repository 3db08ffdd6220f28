"""Tables of whole runs for tools/tables.py: forecasts beside every forward and beside the step caches of others, few
steps, INT8, and seconds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import records
from of_models import of_models
from records import RESULTS, Record, frontier_lines, published

from parkattn.park import ParkConfig
from parklab.bench.frontier import DENSE, Setting
from parklab.experiments.run_frontier import DRAWN, TITLES, Run, runs_of
from parklab.experiments.tables import interval, page_table

FILES = {"run_75600.jsonl": "75,600", "run_7168.jsonl": "7,168", "run_1920.jsonl": "1,920"}  # tokens
FEW = "few_steps.jsonl"
# of a table of seconds; a later line replaces an earlier one
LENGTHS = {"75,600": ("frontier.jsonl", "run_75600.jsonl"), "7,168": ("frontier.jsonl", "run_7168.jsonl")}
LONGEST = "75,600"
FRAMES = {"75,600": (81, 400, 576), "7,168": (29, 224, 256)}
CHOICES = ("paper", "quality", "quality tolerance=0.003", "fast", "fast tolerance=0.006")
NOT_RUN = "not run: docs/forecast.md has the commands\n"
Videos = dict[tuple[str, int], Record]  # by prompt and seed


def recorded() -> dict[str, list[Record]]:
    """Lines by tokens, of the files that are there."""
    return {tokens: frontier_lines(RESULTS / name) for name, tokens in FILES.items() if (RESULTS / name).exists()}


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
            lowest = [min(row["psnr"] for row in each.values()) for each in (every, videos)]
            yield (
                tokens, str(steps), f"{guidance:g}", f"`{name}`", str(len(kept)), _share(videos.values()),
                f"{statistics.fmean(kept):.1f}", f"{statistics.fmean(lost):+.2f}{_within(lost)}", f"{max(lost):+.2f}",
                f"{lowest[0]:.1f}, {lowest[1]:.1f}",
            )  # fmt: skip


@published
@of_models(heads=4)
def forecast_profiles() -> str:
    """What forecasts lose against the same profile with every forward, on the same videos."""
    heads = (
        "tokens | steps | guidance | setting | videos | forwards computed | PSNR | lost, dB | most lost by a video, dB "
        "| worst video, without and with"
    )
    rows = list(profile_rows())
    return page_table(heads, rows) if rows else NOT_RUN


@published
def forecast_rules() -> str:
    """Other rules of forecasts beside the one that is built: the first steps computed, and fewer forecasts in a row."""
    every = {tokens: by_setting(lines) for tokens, lines in recorded().items()}
    found: dict[tuple[str, float, str, str], Videos] = {}
    for line in records.lines("forecast_rules.jsonl"):
        (tokens,) = (name for name, size in FRAMES.items() if size[1] == line["height"])
        first, longest = line["rule"]["first"], line["rule"]["longest"]
        rule = f"first {first:.0%} computed" if first else f"at most {longest} in a row"
        found.setdefault((tokens, line["guidance"], line["setting"], rule), {})[line["prompt"], line["seed"]] = line
    for tokens, settings in every.items():
        for (steps, guidance, name), videos in settings.items():
            if steps == 50 and re.fullmatch(r"(quality|fast) tolerance=[\d.]+", name):
                found[tokens, guidance, name, "as it is"] = videos
    rows = []
    for (tokens, guidance, name, rule), videos in sorted(
        found.items(), key=lambda item: (*item[0][:2], item[0][2].split()[0], _computed(item[1]))
    ):
        whole = every[tokens][50, guidance, name.split()[0]]
        lost = [whole[place]["psnr"] - row["psnr"] for place, row in videos.items()]
        loss = f"{statistics.fmean(lost):+.2f}{_within(lost)}"
        rows.append((tokens, f"{guidance:g}", f"`{name}`", rule, _share(videos.values()), loss, f"{max(lost):+.2f}"))
    return page_table(
        "tokens | guidance | setting | rule | forwards computed | lost, dB | most lost by a video, dB", rows
    )


def _computed(videos: Videos) -> float:
    return statistics.fmean(row["share_computed"] for row in videos.values())


@published
@of_models(heads=3, ranked=("PSNR in INT8",))
def int8_videos() -> str:
    """Profiles whose attention is computed in INT8 beside the same ones in the model's dtype, on the same videos."""
    rows = []
    for tokens, lines in recorded().items():
        found = by_setting(lines)
        for (steps, guidance, name), videos in found.items():
            asked = Setting.parse(name)
            same = found.get((steps, guidance, asked.config or ""))
            if list(asked.changes.items()) != [("precision", "int8")] or same is None:
                continue
            lost = [same[place]["psnr"] - row["psnr"] for place, row in videos.items() if place in same]
            kept = [row["psnr"] for row in videos.values()]
            rows.append((
                tokens, f"{guidance:g}", str(asked.config), str(len(kept)), f"{statistics.fmean(kept):.1f}",
                f"{statistics.fmean(lost):+.2f}{_within(lost)}", f"{max(lost):+.2f}",
            ))  # fmt: skip
    heads = "tokens | guidance | profile | videos | PSNR in INT8 | lost, dB | most lost by a video, dB"
    return page_table(heads, rows) if rows else NOT_RUN


@published
@of_models(heads=2)
def few_steps() -> str:
    """Profiles in 4 and 8 steps with the few-step LoRA of the small model, and how far they are above `paper`."""
    found = by_setting(frontier_lines(RESULTS / FEW)) if (RESULTS / FEW).exists() else {}
    rows = []
    for steps, guidance in sorted({place[:2] for place in found}):
        here = {name: videos for (*place, name), videos in found.items() if tuple(place) == (steps, guidance)}
        for name in sorted(here.keys() - {DENSE}, key=lambda name: _cost(here[name])):
            videos, paper = here[name], here.get("paper", {})
            kept = [row["psnr"] for row in videos.values()]
            above = [row["psnr"] - paper[place]["psnr"] for place, row in videos.items() if place in paper]
            rows.append((
                str(steps), f"`{name}`", str(len(kept)), f"{_cost(videos):.1%}",
                f"{statistics.fmean(kept):.1f}{_within(kept)}", f"{min(kept):.1f}",
                f"{statistics.fmean(above):+.1f}{_within(above)}" if above and name != "paper" else "",
            ))  # fmt: skip
    heads = "steps | profile | videos | attention computed | PSNR | worst video | above `paper`, dB"
    return page_table(heads, rows) if rows else NOT_RUN


def newest_lines(tokens: str) -> list[Record]:
    """Of videos of that length."""
    names = [name for name in LENGTHS[tokens] if (RESULTS / name).exists()]
    lines = [line for name in names for line in frontier_lines(RESULTS / name)]
    return [line for line in lines if (line["frames"], line["height"], line["width"]) == FRAMES[tokens]]


@published
def choices() -> str:
    """What a setting costs and keeps: seconds of a run of a real model, fidelity of the small one."""
    runs = {(run.model, run.name): run for run in runs_of(newest_lines("75,600")) if run.videos and run.seconds}
    rows = [
        (TITLES[model], f"`{name}`", f"{run.seconds:,.0f} s{', estimated' * (run.how == 'estimated')}",
         *(f"{run.dense[way] / run.seconds:.2f}x" for way in ("stock", "compiled", "own kernel")),
         f"{statistics.fmean(run.psnr):.1f} dB", f"{min(run.psnr):.1f} dB")
        for model in DRAWN for name in CHOICES if (run := runs.get((model, name))) and run.seconds
    ]  # fmt: skip
    heads = "model | setting | seconds | against stock | compiled | our dense kernel | PSNR, small model | worst video"
    return page_table(heads, rows) if rows else NOT_RUN


@published
def run_seconds() -> str:
    """Whole runs of three models in seconds, at the share of forwards that the small model computed."""
    rows = []
    for tokens in LENGTHS:
        for run in runs_of(newest_lines(tokens)):
            name, _, linears_or_precision = run.name.partition(", ")
            if run.seconds is None or not _of_profile(run.family) or not (run.videos or linears_or_precision):
                continue
            if "attention" in linears_or_precision and tokens != LONGEST:
                continue  # the seconds are those of long videos
            psnr, share = run.psnr, run.mean("share_computed")
            rows.append((
                TITLES[run.model], tokens, f"`{name}`{', ' * bool(linears_or_precision)}{linears_or_precision}",
                f"{statistics.fmean(psnr):.1f}{_within(psnr)}" if psnr else "", "" if share is None else f"{share:.2f}",
                f"{run.seconds:,.0f} s", *(f"{run.dense[way] / run.seconds:.2f}x" for way in ("stock", "compiled")),
                run.how,
            ))  # fmt: skip
    rows.sort(key=lambda row: (list(TITLES.values()).index(row[0]), list(LENGTHS).index(row[1])))
    heads = (
        "model | tokens | run | PSNR of the small model | forwards computed | seconds | against stock | blocks "
        "compiled | seconds are"
    )
    return page_table(heads, rows) if rows else NOT_RUN


@published
def whole_runs() -> str:
    """Runs of which every step was made, beside what their forwards, timed one by one, add up to."""
    files = {"e2e_profile.jsonl": "profile", "e2e_forecast.jsonl": "profile", "e2e_bits.jsonl": "bits"}
    there = {name: f"e2e {kind} run" for name, kind in files.items() if (RESULTS / name).exists()}
    found = [line for name, benchmark in there.items() for line in records.lines(name, benchmark)]
    rows = [
        (_whole(line), str(len(line["steps_by_phase"].get("forecast", ()))),
         f"{line['density_sparse_steps']:.2f}", f"{line['denoise_s']:.1f} s", f"{line['composed_s']:.1f} s",
         f"{line['denoise_s'] / line['composed_s'] - 1:+.1%}")
        for line in found if line["method"] == "park"
    ]  # fmt: skip
    return page_table("run of 50 steps | forecast | density | whole | composed | apart", rows) if rows else NOT_RUN


def _whole(run: Mapping[str, Any]) -> str:
    guided = f", guidance {run['guidance_scale']:g}" if run["guidance_scale"] > 1 else ""
    return f"{run['model']}, `{run['profile']}`{', INT8' * (run.get('precision') == 'int8')}{guided}"


def _of_profile(family: str) -> bool:
    return family.partition(",")[0] in ParkConfig.long_run_profiles()


def _cost(videos: Videos) -> float:
    return statistics.fmean(row["cost"] for row in videos.values())


@published
@of_models(heads=3)
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
                (tokens, f"{guidance:g}", f"`{run.name}`", str(len(run.psnr)), _share(run.videos.values()),
                 f"{run.mean('cost'):.2f}", f"{statistics.fmean(run.psnr):.1f}{_within(run.psnr)}",
                 f"{min(run.psnr):.1f}")
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
