"""Tables of videos by many methods, and of float8 linears, for tools/tables.py: written from records, as all of them."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from parkattn.bench.e2e import composed, phases_of_run
from parkattn.bench.frontier import interval, read_records, tabulate
from parkattn.experiments.catalogue import EXPERIMENTS
from parkattn.experiments.costs import compare_at_costs
from parkattn.experiments.reproduce import evaluation_for
from parkattn.experiments.results import Gathered, on_curve
from parkattn.experiments.runner import Lab
from parkattn.experiments.tables import text_table, to_markdown
from parkattn.methods import METHODS
from parkattn.park import ParkConfig

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
PROFILES = ("paper", "quality", "fast")
RIVALS = ("svg2", "svg-ear", "sparsepr", "sol")
FOLDERS = {"gpu_75600": ("75,600", (81, 400, 576)), "gpu_7168": ("7,168", (29, 224, 256))}  # tokens, size of the video
DENSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
NEAR = 0.03  # of all-dense: as in park reproduce matched_costs
Record = dict[str, Any]


def float8_linears() -> str:
    rows = [json.loads(line) for line in (RESULTS / "e2e_float8.jsonl").read_text().splitlines()]
    found = {row["linears"]: row for row in rows if row["benchmark"] == "e2e float8"}
    before = found["bfloat16"]
    phases = phases_of_run(ParkConfig.profile("paper", model="wan2.1-14b"))

    def whole(row: Record) -> float:
        return float(
            composed(row["dense_compiled_s"], row["refresh_cold_s"], row["refresh_warm_s"], row["reuse_s"], phases)[
                "park_s"
            ]
        )

    columns = "linears | dense s | blocks compiled s | PARK, reuse s | of bfloat16 | PARK, 50 steps | attention | products | rest | weights | peak, dense | peak, PARK"
    return _markdown(
        columns,
        (
            (name, f"{row['dense_s']:.2f}", f"{row['dense_compiled_s']:.2f}", f"{row['reuse_s']:.2f}", f"{row['reuse_s'] / before['reuse_s']:.2f}", f"{whole(row):.0f} s",
             *(f"{row['split']['reuse'][part]:.2f}" for part in ("attention_s", "linears_s", "rest_s")),
             *(f"{row['memory'][part]:.1f} GB" for part in ("weights_gb", "dense_peak_gb", "park_peak_gb")))
            for name, row in found.items()
        ),
    )  # fmt: skip


def methods_on_h200() -> str:
    """Every method that was run at a size, and the profiles on the same prompts; PSNR with half its 95 % interval."""
    rows = []
    for folder, (tokens, _) in FOLDERS.items():
        profiles = profile_rows(folder)
        groups = method_rows(folder) | {(f"PARK, {name}", 0.0): list(runs.values()) for name, runs in profiles.items()}
        for (name, asked), found in sorted(
            groups.items(), key=lambda item: statistics.fmean(row["cost"] for row in item[1])
        ):
            if len(found) == len(profiles["paper"]):  # means over the same videos
                psnr = [row["psnr"] for row in found]
                density = statistics.fmean(row["density" if "density" in row else "density_sparse"] for row in found)
                own = "" if name.startswith(("PARK", "dense")) else "its own"
                rows.append(
                    (tokens, name, f"{asked:g}" if asked else own, str(len(found)), f"{statistics.fmean(row['cost'] for row in found):.1%}",
                     f"{density:.2f}", f"{statistics.fmean(psnr):.1f} ± {interval(psnr):.1f} dB", f"{min(psnr):.1f} dB")
                )  # fmt: skip
    return _markdown(
        "tokens | method | density asked | videos | attention computed | density of sparse steps | PSNR | worst video",
        rows,
    )


def profiles_above_methods() -> str:
    """PSNR of a profile less that of a method at the same cost on the same prompts, on lines between the method's runs."""
    rows = []
    for folder, (tokens, _) in FOLDERS.items():
        curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for cell in _cells(folder):
            place = cell["request"]["method"], cell["request"]["prompt"]
            curves.setdefault(place, []).append((cell["row"]["cost"], cell["row"]["psnr"]))
        for setting, runs in profile_rows(folder).items():
            if setting != "paper":
                cost = statistics.fmean(row["cost"] for row in runs.values())
                rows.append((tokens, setting, f"{cost:.1%}", *(_margin(runs, curves, name) for name in RIVALS)))
    return _markdown(f"tokens | profile | attention computed | {' | '.join(f'above {name}' for name in RIVALS)}", rows)


def short_runs_at_equal_cost() -> str:
    """Profiles in runs of few steps beside the paper's settings with a top_p that costs about as much."""
    equal = [
        row for row in tabulate(read_records(RESULTS / "frontier_equal_cost.jsonl")) if row["size"] == "81x400x576"
    ]
    own = [
        row
        for row in tabulate(read_records(RESULTS / "frontier.jsonl"))
        if row["size"] == "81x400x576" and row["steps"] < 50
    ]
    rows = sorted([*equal, *own], key=lambda row: (-row["steps"], row["guidance"], row["cost"]))
    return _markdown(
        "steps | guidance | setting | videos | attention computed | PSNR | worst video",
        (
            (str(row["steps"]), f"{row['guidance']:g}", row["setting"], str(row["runs"]), f"{row['cost']:.1%}", f"{row['psnr']:.1f} dB",
             f"{row['worst_psnr']:.1f} dB")
            for row in rows
        ),
    )  # fmt: skip


def matched_2k() -> str:
    """PSNR at equal density of the sparse steps, means over the prompts; empty where a method cannot have the density."""
    found: dict[tuple[str, float, float], list[float]] = {}
    for cell in _all_cells("matched_2k"):
        asked = cell["request"]
        if asked["density"] in DENSITIES and "profile" not in asked:
            found.setdefault((asked["method"], asked["guidance"], asked["density"]), []).append(cell["row"]["psnr"])
    scales = sorted({scale for _, scale, _ in found})
    columns = [(scale, density) for scale in scales for density in DENSITIES]
    rows = [
        (name, *(f"{statistics.fmean(found[name, *at]):.1f}" if (name, *at) in found else "" for at in columns))
        for name in METHODS if any(which == name for which, _, _ in found)
    ]  # fmt: skip
    head = [
        f"{density:g}" if density != DENSITIES[0] else f"guidance {scale:g}: {density:g}" for scale, density in columns
    ]
    return _markdown(" | ".join(["method", *head]), rows)


@functools.cache
def costs_2k() -> str:
    """What `park reproduce matched_costs --draw` finds of the cells: a profile above each method at every cost."""
    evaluation = evaluation_for(
        model="tiny", prompts=8, prompt_file=None, quick=False, guidances=(1.0, 5.0), densities=DENSITIES, device="cpu", draw=True, keep="records"
    )  # fmt: skip
    lab = Lab(evaluation, RESULTS / "matched_2k")
    cells = EXPERIMENTS["matched_costs"].cells(lab)
    records = lab.finished(cells)
    reasons = lab.unreachable([cell for cell in cells if cell.name not in records])
    rows: dict[tuple[float, float], dict[str, dict[str, str]]] = {}  # by guidance, cost and profile
    for profile, method, cost, scale, finding in compare_at_costs(
        Gathered(cells, records, reasons, lab.load_frames, (), lab.cost)
    ):
        if finding.margin is not None:
            spread = "" if finding.spread is None else f" ± {finding.spread:.1f}"
            rows.setdefault((scale or 0.0, cost), {}).setdefault(profile, {})[method] = f"{finding.margin:+.1f}{spread}"
    names = ("paper", *RIVALS)
    return _markdown(
        f"guidance | cost asked | profile | {' | '.join(f'above {name}, dB' for name in names)}",
        (
            (
                f"{scale:g}",
                f"{cost:.3g}",
                ", ".join(name for name, row in found.items() if row == told),
                *(told.get(name, "") for name in names),
            )
            for (scale, cost), found in sorted(rows.items())
            for told in (row for place, row in enumerate(found.values()) if row not in list(found.values())[:place])
        ),
    )


def _margin(runs: dict[str, Record], curves: dict[tuple[str, str], list[tuple[float, float]]], name: str) -> str:
    """Where a profile costs less than every run of a method: how much better it is than the cheapest of them."""
    ahead = [
        row["psnr"] - y
        for prompt, row in runs.items()
        if (y := on_curve(curves[name, prompt], row["cost"], NEAR)) is not None
    ]
    if 2 * len(ahead) >= len(runs):
        return f"{statistics.fmean(ahead):+.1f} ± {interval(ahead):.1f} dB"
    cheapest = [min(curves[name, prompt]) for prompt in runs]
    if any(cost < row["cost"] for (cost, _), row in zip(cheapest, runs.values(), strict=True)):
        return f"not between its runs, {min(cheapest)[0]:.1%} to {max(max(curves[name, prompt]) for prompt in runs)[0]:.1%}"
    apart = [row["psnr"] - psnr for row, (_, psnr) in zip(runs.values(), cheapest, strict=True)]
    at = statistics.fmean(cost for cost, _ in cheapest)
    return f"{statistics.fmean(apart):+.1f} ± {interval(apart):.1f} dB, its cheapest run computes {at:.1%}"


@functools.cache
def _all_cells(folder: str) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / folder / "cells").glob("quality-*.json"))]


def _cells(folder: str) -> list[Record]:
    """Of guidance 1; those of profiles at other budgets are left out."""
    return [
        cell for cell in _all_cells(folder) if cell["request"]["guidance"] == 1.0 and "profile" not in cell["request"]
    ]


def method_rows(folder: str) -> dict[tuple[str, float], list[Record]]:
    """By method and the density that was asked for, 0 where it is the method's own."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for cell in _cells(folder):
        groups.setdefault((cell["request"]["method"], cell["request"]["density"] or 0.0), []).append(cell["row"])
    return groups


def profile_rows(folder: str) -> dict[str, dict[str, Record]]:
    """Runs of each profile by prompt, on the prompts of a folder: 50 steps, guidance 1."""
    size = dict(zip(("frames", "height", "width"), FOLDERS[folder][1], strict=True))
    prompts = {cell["request"]["prompt"] for cell in _cells(folder)}
    found: dict[str, dict[str, Record]] = {name: {} for name in PROFILES}
    for line in read_records(RESULTS / "frontier.jsonl"):
        same = all(line[name] == value for name, value in {**size, "steps": 50, "guidance": 1.0}.items())
        if same and line["setting"] in PROFILES and line["prompt"] in prompts:
            found[line["setting"]][line["prompt"]] = line
    return found


def _markdown(columns: str, rows: Iterable[Sequence[str]]) -> str:
    return re.sub(r"\|  (?=\|)", "| ", to_markdown(text_table(columns.split(" | "), [tuple(row) for row in rows])))


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        float8_linears,
        methods_on_h200,
        profiles_above_methods,
        short_runs_at_equal_cost,
        matched_2k,
        costs_2k,
    )
}
