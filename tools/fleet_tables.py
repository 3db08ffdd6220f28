"""The tables of docs/fleet.md: videos of a day, how even ranks are, and what even ranks are worth."""

from __future__ import annotations

import functools

import head_balance
from gain_tables import MODELS, RUNS, last_profiles, whole_models_recorded
from records import Record, published

from parklab.experiments.tables import page_table
from parklab.studio.gain import composed_run, measured_forwards

DAY, WANTED, GPUS = 24 * 60 * 60, 1000, 8


def _runs() -> list[tuple[str, str, int, Record]]:
    """Model, its video and steps, forwards per step, and the seconds of a run as README's table has them."""
    found = []
    for model, steps, each in RUNS:
        own = measured_forwards()["models"][model]
        frames, height, _ = own["video"]
        run = composed_run(own, own.get("model", model), steps=steps, forwards_per_step=each)
        found.append((model, f"{MODELS[model]}, {frames} frames, {height}p, {steps} x {each}", each, run))
    return found


@published
def videos_of_a_day() -> str:
    rows = []
    for _, name, _, run in _runs():
        seconds = {"compiled": run["dense_s"]["compiled"]}
        seconds |= {profile: run["profiles"][profile]["seconds"] for profile in ("paper", "quality", "fast")}
        cells = (f"{int(GPUS * DAY / s):,}; {-int(-WANTED * s // DAY)}" for s in seconds.values())
        rows.append((name, *cells))
    return page_table("video, steps x forwards | dense, compiled | `paper` | `quality` | `fast`", rows)


@functools.cache
def _evenness(profile: str, scope: str, heads: int, ranks: int) -> head_balance.Evenness:
    return head_balance.evenness(head_balance.newest(), profile, scope, heads, ranks)


@published
def evenness_of_ranks() -> str:
    rows = []
    for scope, heads in dict.fromkeys(case[:2] for case in head_balance.cases()):
        for profile in head_balance.PROFILES:
            found = (
                _evenness(profile, scope, heads, ranks) if heads % ranks == 0 else None for ranks in head_balance.RANKS
            )
            ratios = (None if each is None else (each.plain, each.refresh, each.reuse) for each in found)
            cells = ("-" if each is None else ", ".join(f"{ratio:.2f}" for ratio in each) for each in ratios)
            rows.append((str(heads), scope, f"`{profile}`", *cells))
    counts = " | ".join(f"{ranks} ranks" for ranks in head_balance.RANKS)
    return page_table(f"heads | drawn from | profile | {counts}", rows)


@published
def worth_of_even_ranks() -> str:
    """Seconds of one video: a GPU's, divided by the ranks, and what sparse attention waits for the slowest of them."""
    plain = {row["model"]: row for row in whole_models_recorded() if not row["compiled"]}
    profiled = {row["model"]: row for row in last_profiles()}
    rows = []
    for model, name, each, run in (found for found in _runs() if found[0] in profiled):
        one, two = plain[model], profiled[model]
        # what all pairs would take, from a step at two densities
        pairs = (one["reuse_s"] - two["plain_reuse_s"]) / (one["density"] - two["plain_density"])
        for ranks in (4, 8):
            heads = head_balance.HEADS[model]
            if heads % ranks or heads == ranks:
                continue
            for profile in ("quality", "fast"):
                found, density = (
                    run["profiles"][profile],
                    measured_forwards()["models"][model]["profiles"][profile]["density"],
                )
                even, ratios = found["seconds"] / ranks, _evenness(profile, "all layers", heads, ranks)
                ways = [even, even]  # heads in the model's order, by density
                for phase, by_density in (("refresh", ratios.refresh), ("reuse", ratios.reuse)):
                    attention = each * found["phases"].get(phase, 0) * pairs * density[phase] / ranks
                    ways = [way + attention * (r - 1) for way, r in zip(ways, (ratios.plain, by_density), strict=True)]
                gain = f"{ways[0] / ways[1] - 1:.1%}"
                cells = (f"{found['seconds']:,.0f}", f"{even:.1f}", *(f"{way:.1f}" for way in ways), gain)
                rows.append((name, str(ranks), f"`{profile}`", *cells))  # fmt: skip
    return page_table(
        "video, steps x forwards | GPUs | profile | one GPU | evenly split | model's order | by density | gain", rows
    )
