"""Tables of whole runs for tools/tables.py: forecasts beside every forward and beside the step caches of others, few
steps, INT8, and seconds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any

import records
from of_models import of_models
from records import RESULTS, Columns, Record, frontier_lines, published, table_of

from parkattn.park import ParkConfig
from parklab.bench.frontier import DENSE, Setting
from parklab.experiments.run_frontier import DRAWN, TITLES, runs_of
from parklab.experiments.tables import mean, page_table, within

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


def _beside(field: str, lines: list[Record]) -> Iterator[tuple[Any, Setting, Videos, Videos]]:
    """Place, setting and videos of each profile with a field, and the videos of the same without it."""
    found = by_setting(lines)
    for (steps, guidance, name), videos in found.items():
        asked, plain = Setting.parse(name), found.get((steps, guidance, name.partition(f" {field}=")[0]))
        if asked.method != DENSE and field in asked.changes and plain is not None:
            yield (str(steps), f"{guidance:g}"), asked, videos, plain


def _lost(videos: Videos, plain: Videos) -> tuple[str, str]:
    """The mean and the most that a video loses, in dB."""
    lost = [plain[place]["psnr"] - row["psnr"] for place, row in videos.items() if place in plain]
    return f"{statistics.fmean(lost):+.2f}{within(lost)}", f"{max(lost):+.2f}"


def _psnr(videos: Videos) -> list[float]:
    return [row["psnr"] for row in videos.values()]


@published
@of_models(heads=4)
def forecast_profiles() -> str:
    """What forecasts lose against the same profile with every forward, on the same videos."""
    rows = [
        (tokens, *place, f"`{asked.label}`", str(len(videos)), _share(videos), f"{mean(videos.values(), 'psnr'):.1f}",
         *_lost(videos, plain), f"{min(_psnr(plain)):.1f}, {min(_psnr(videos)):.1f}")
        for tokens, lines in recorded().items()
        for place, asked, videos, plain in _beside("tolerance", lines)
    ]  # fmt: skip
    heads = (
        "tokens | steps | guidance | setting | videos | forwards computed | PSNR | lost, dB | most lost by a video, dB "
        "| worst video, without and with"
    )
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
    order = sorted(
        found.items(),
        key=lambda item: (*item[0][:2], item[0][2].split()[0], mean(item[1].values(), "share_computed")),
    )
    rows = [
        (tokens, f"{guidance:g}", f"`{name}`", rule, _share(videos),
         *_lost(videos, every[tokens][50, guidance, name.split()[0]]))
        for (tokens, guidance, name, rule), videos in order
    ]  # fmt: skip
    return page_table(
        "tokens | guidance | setting | rule | forwards computed | lost, dB | most lost by a video, dB", rows
    )


@published
@of_models(heads=3, ranked=("PSNR in INT8",))
def int8_videos() -> str:
    """Profiles whose attention is computed in INT8 beside the same ones in the model's dtype, on the same videos."""
    rows = [
        (tokens, place[1], str(asked.config), str(len(videos)), f"{mean(videos.values(), 'psnr'):.1f}",
         *_lost(videos, plain))
        for tokens, lines in recorded().items()
        for place, asked, videos, plain in _beside("precision", lines) if asked.changes == {"precision": "int8"}
    ]  # fmt: skip
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
        paper = here.get("paper", {})
        for name in sorted(here.keys() - {DENSE}, key=lambda name: mean(here[name].values(), "cost")):
            videos, kept = here[name], _psnr(here[name])
            above = [row["psnr"] - paper[place]["psnr"] for place, row in videos.items() if place in paper]
            rows.append((
                str(steps), f"`{name}`", str(len(kept)), f"{mean(videos.values(), 'cost'):.1%}",
                f"{statistics.fmean(kept):.1f}{within(kept)}", f"{min(kept):.1f}",
                f"{statistics.fmean(above):+.1f}{within(above)}" if above and name != "paper" else "",
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
                f"{statistics.fmean(psnr):.1f}{within(psnr)}" if psnr else "", "" if share is None else f"{share:.2f}",
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
    columns: Columns = {
        "run of 50 steps": _whole,
        "forecast": lambda line: str(len(line["steps_by_phase"].get("forecast", ()))),
        "density": "{density_sparse_steps:.2f}", "whole": "{denoise_s:.1f} s", "composed": "{composed_s:.1f} s",
        "apart": lambda line: f"{line['denoise_s'] / line['composed_s'] - 1:+.1%}",
    }  # fmt: skip
    rows = [line for line in found if line["method"] == "park"]
    return table_of(columns, rows) if rows else NOT_RUN


def _whole(run: dict[str, Any]) -> str:
    guided = f", guidance {run['guidance_scale']:g}" if run["guidance_scale"] > 1 else ""
    return f"{run['model']}, `{run['profile']}`{', INT8' * (run.get('precision') == 'int8')}{guided}"


def _of_profile(family: str) -> bool:
    return family.partition(",")[0] in ParkConfig.long_run_profiles()


@published
@of_models(heads=3)
def forecast_caches() -> str:
    """Dense attention with forecasts, with step caches of others and in fewer steps, by the forwards computed."""
    rows = []
    for tokens, lines in recorded().items():
        most = max((line["steps"] for line in lines), default=0)
        runs = [
            (guidance, name, videos)
            for (steps, guidance, name), videos in by_setting(lines).items()
            if steps == most and name.startswith(f"{DENSE} ")
        ]
        for guidance, name, videos in sorted(runs, key=lambda run: (run[0], -mean(run[2].values(), "share_computed"))):
            psnr, cost = _psnr(videos), mean(videos.values(), "cost")
            rows.append((
                tokens, f"{guidance:g}", f"`{name}`", str(len(psnr)), _share(videos), f"{cost:.2f}",
                f"{statistics.fmean(psnr):.1f}{within(psnr)}", f"{min(psnr):.1f}",
            ))  # fmt: skip
    heads = "tokens | guidance | setting | videos | forwards computed | attention | PSNR | worst video"
    return page_table(heads, rows) if rows else NOT_RUN


def _share(videos: Videos) -> str:
    return (
        f"{mean(videos.values(), 'share_computed'):.2f} ({max(row['share_computed'] for row in videos.values()):.2f})"
    )
