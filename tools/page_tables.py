"""Tables of single pages: docs/fleet.md (videos of a day, how even ranks are and what that is worth), newer models by
the block and whole (`park bench models`), docs/solids.md.
"""

from __future__ import annotations

import functools
import itertools

import head_balance
from gain_tables import last_profiles, recorded_runs, whole_models_recorded
from records import Columns, Record, lines, published, table_of

from parklab.experiments.tables import page_table
from parklab.solids.following import BARS
from parklab.solids.judge import judge_record
from parklab.studio.gain import measured_forwards

# docs/fleet.md

DAY, WANTED, GPUS = 24 * 60 * 60, 1000, 8


@published
def videos_of_a_day() -> str:
    rows = []
    for _, name, _, run in recorded_runs():
        profiles = (run["profiles"][profile]["seconds"] for profile in ("paper", "quality", "fast"))
        cells = (
            f"{int(GPUS * DAY / s):,}; {-int(-WANTED * s // DAY)}" for s in (run["dense_s"]["compiled"], *profiles)
        )
        rows.append((name.replace(" |", ","), *cells))
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
    for model, name, each, run in (found for found in recorded_runs() if found[0] in profiled):
        one, two = plain[model], profiled[model]
        # what all pairs would take, from a step at two densities
        pairs = (one["reuse_s"] - two["plain_reuse_s"]) / (one["density"] - two["plain_density"])
        heads, timed = head_balance.HEADS[model], measured_forwards()["models"][model]["profiles"]
        for ranks, profile in itertools.product((4, 8), ("quality", "fast")):
            if heads % ranks or heads == ranks:
                continue
            found, density = run["profiles"][profile], timed[profile]["density"]
            even, ratios = found["seconds"] / ranks, _evenness(profile, "all layers", heads, ranks)
            ways = [even, even]  # heads in the model's order, by density
            for phase, by_density in (("refresh", ratios.refresh), ("reuse", ratios.reuse)):
                attention = each * found["phases"].get(phase, 0) * pairs * density[phase] / ranks
                ways = [way + attention * (r - 1) for way, r in zip(ways, (ratios.plain, by_density), strict=True)]
            cells = (f"{found['seconds']:,.0f}", *(f"{s:.1f}" for s in (even, *ways)), f"{ways[0] / ways[1] - 1:.1%}")
            rows.append((name.replace(" |", ","), str(ranks), f"`{profile}`", *cells))
    return page_table(
        "video, steps x forwards | GPUs | profile | one GPU | evenly split | model's order | by density | gain", rows
    )


# docs/measured/models.md

NEWER = {
    "minimax-h3": "MiniMax-H3", "ltx-2.5": "LTX-2.5", "kandinsky-5-pro": "Kandinsky 5 Pro",
    "cosmos-2.5-14b": "Cosmos 2.5 14B",
}  # fmt: skip


def gated() -> dict[str, Record]:
    """The figures of each model, whose gate must have passed."""
    cases = lines("gpu_models.jsonl", "models gate")
    assert all(case["ok"] for case in cases)
    return {found["model"]: found for found in lines("gpu_models.jsonl", "models")}


@published
def blocks_of_newer_models() -> str:
    columns: Columns = {
        "model": lambda found: NEWER[found["model"]], "video": "{video}", "tokens": "{tokens:,}",
        "dense, stock": "{block_dense_s:.2f} s", "dense, our kernel": "{block_own_dense_s:.2f} s",
        "reuse, `paper`": "{paper[block_s][reuse]:.2f} s, {paper[reuse_speedup]:.2f}x",
        "reuse, `quality`": "{quality[block_s][reuse]:.2f} s, {quality[reuse_speedup]:.2f}x",
        "density": "{paper[density]:.3f}, {quality[density]:.3f}",
    }  # fmt: skip
    return table_of(columns, (gated()[name] for name in NEWER))


@published
def whole_minimax_h3() -> str:
    (found,) = lines("gpu_models.jsonl", "models whole")
    assert found["ok"]
    kinds = {"dense": "dense, stock", "refresh": "first plan", "reuse": "reuse"}
    rows = [
        (f"{told}, {found['blocks']} of {found['released_blocks']} blocks", f"{found['seconds'][kind]:.1f} s",
         f"{found['seconds'][kind] / found['seconds']['dense']:.2f}", f"{found['peak_gb'][kind]:.1f} GB")
        for kind, told in kinds.items()
    ]  # fmt: skip
    return page_table("one forward of MiniMax-H3 | seconds | of dense | peak memory", rows)


# docs/solids.md

SOLIDS = "solids.jsonl"


@published
def solids_speed() -> str:
    found, rows = lines(SOLIDS, "solids speed"), []
    for record in found:
        where = record["environment"]
        machine = where["gpu"] if record["device"] == "cuda" else f"CPU, threads: {where['threads']}"
        rows.append((machine, *(f"{rate['clips_a_minute']:,.0f}" for rate in record["rates"])))
    sizes = ("{} x {} x {}".format(*rate["size"]) for rate in found[0]["rates"])
    return page_table(" | ".join(("machine", *sizes)), rows)


def _followed(name: str, bar: float, record: Record | None) -> tuple[str, ...]:
    judge = judge_record()["held_out_renders"] if record is None else record["judge_on_renders"]
    seen = "not run" if record is None else f"{record[name]:.0%}"
    return (name, f"{bar:.0%}", seen, f"{judge[name]:.0%}", f"{judge['shuffled_' + name]:.0%}")


@published
def solids_following() -> str:
    last = next(reversed(lines(SOLIDS, "solids following")), None)
    rows = [_followed(name, bar, last) for name, bar in BARS.items()]
    return page_table("of the first object | bar | videos | true renders | renders, other sentences", rows)
