"""Tables of DESIGN.md and docs/diary.md, and of what fits in memory, for tools/tables.py: borders, budgets, spreads of
anchors, GB by model.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parklab.experiments.tables import grouped, mean, page_table, within
from parklab.studio.gain import model_size
from parklab.studio.memory import PARAMETERS, memory

sys.path.insert(0, str(Path(__file__).parent))
import budgets
import residual_age
from records import RESULTS, Columns, cells, frontier_lines, lines, published, table_of, table_rows

# what the diary calls a rule: its name in the record, and the size of query tiles
RULES = {
    "top-k per row": ("top-k per row", None),
    "mass per cost, one threshold per head": ("mass per cost over a head", None),
    "the same over the heads of a layer": ("mass per cost over a layer", None),
    "and a quarter of the mean head's cost for each": ("the same, a quarter to each head", None),
    '`budget="mass"`': ("budget=mass", None),
    'mass times spread: `budget="error"` with stand-ins': ("budget=error", None),
    "`query_tile=64`": ("top-p per row", 64),
    "top-k per row, `query_tile=64`": ("top-k per row", 64),
    '`budget="mass"`, `query_tile=64`': ("budget=mass", 64),
    "mass times spread, `query_tile=64`": ("budget=error", 64),
    "mass times spread, `query_tile=128`": ("budget=error", 128),
}
# settings of whole videos at about the same densities, by what stands behind their top_p
VIDEO_SETTINGS = {
    "paper, `query_tile=64`": ("paper", "query_tile=64", (0.369, 0.705, 0.922)),
    'paper, `budget="mass"`': ("paper", "budget=mass", (None, 0.41, None)),
    "paper, both": ("paper", "query_tile=64 budget=mass", (0.304, 0.487, 0.716)),
    "fast, `query_tile=64`": ("fast", "query_tile=64", (0.369, 0.705, 0.922)),
    'fast, `budget="error"`': ("fast", "budget=error", (None, 0.293, None)),
    'fast, `budget="mass"`, `query_tile=64`': ("fast", "query_tile=64 budget=mass", (None, 0.487, None)),
    'fast, `budget="error"`, `query_tile=64`': ("fast", "query_tile=64 budget=error", (0.146, 0.467, 0.744)),
}
SWEPT = {
    "paper": "paper",
    "fast, p = 0.5 per row": "fast",
    "fast, p = 0.5 per row, `query_tile=128`": "fast query_tile=128",
    'fast, `budget="error"`, `query_tile=128`, p = 0.3': "fast query_tile=128 budget=error top_p=0.3",
    'fast, `budget="error"`, `query_tile=128`, p = 0.5': "fast query_tile=128 budget=error top_p=0.5",
    "quality, p = 0.85 per row": "quality",
    'quality, `budget="error"`, `query_tile=128`, p = 0.7': "quality query_tile=128 budget=error top_p=0.7",
}
VIDEO = {"frames": 81, "height": 720, "width": 1280}


@published
def budget_rules() -> str:
    """Errors on captured calls, relative to top-p per row."""
    found = {
        (line["rule"], line["query_tile"], line["tokens"], line["asked"], line["compensate"]): line
        for line in lines("budgets.jsonl")
        if line["format"] == budgets.FORMAT
    }
    calls = {tokens: line["calls"] for (_, _, tokens, _, _), line in found.items()}
    places = [(tokens, density) for tokens in sorted(calls) for density in budgets.DENSITIES]

    def head(tokens: int, density: float) -> str:
        first = density == budgets.DENSITIES[0]
        return f"{tokens:,} tokens, {calls[tokens]} calls: {density:g}" if first else f"{density:g}"

    rows = (
        (name, *(", ".join(f"{found[*rule, *at, stand]['ratio']:.2f}" for stand in (True, False)) for at in places))
        for name, rule in RULES.items()
    )
    return page_table(" | ".join(["with stand-ins, without; density", *(head(*at) for at in places)]), rows)


@published
def budget_videos() -> str:
    gains = budgets.gains_at_equal_cost(RESULTS / "budgets.jsonl")

    def shown(profile: str, rest: str, top_p: float | None) -> str:
        if top_p is None:
            return ""
        gain = [each for each, _, _ in gains[f"{profile} top_p={top_p:g} {rest}"]]
        return f"{statistics.fmean(gain):.1f}{within(gain, 1)}"

    columns = ["sparse density about", *(f"{density:g}" for density in budgets.DENSITIES)]
    rows = (
        (name, *(shown(profile, rest, p) for p in top_p)) for name, (profile, rest, top_p) in VIDEO_SETTINGS.items()
    )
    return page_table(" | ".join(columns), rows)


@published
def budget_sweep() -> str:
    """Means over the prompts that the tiled budget was swept on."""
    size = {"frames": 81, "height": 400, "width": 576, "steps": 50, "guidance": 1.0}
    lines = frontier_lines(RESULTS / "frontier_sweep.jsonl")
    swept = [line for line in lines if all(line[name] == value for name, value in size.items())]
    tiled = SWEPT['fast, `budget="error"`, `query_tile=128`, p = 0.3']
    prompts = {line["prompt"] for line in swept if line["setting"] == tiled}
    rows = []
    for name, setting in SWEPT.items():
        last = {line["prompt"]: line for line in swept if line["setting"] == setting and line["prompt"] in prompts}
        runs = last.values()
        rows.append((name, str(len(runs)), f"{mean(runs, 'cost'):.1%}", f"{mean(runs, 'psnr'):.1f} dB"))
    return page_table("setting | videos | attention computed | PSNR", rows)


@published
def anchor_spreads() -> str:
    with_the_budget_of_fast, _ = lines("residual_age.jsonl", "residual age")
    return page_table("anchors | at | sum of e^2", residual_age.spreads(with_the_budget_of_fast))


@published
def borders_on_scene() -> str:
    found = [line for line in lines("decisions.jsonl", "decisions") if line["choice"] == "block borders"]
    heads = [f"{line['value']['query_multiple']}, {line['value']['key_multiple']}" for line in found]
    rows = [("recall", *(f"{line['recall']:.3f}" for line in found))]
    return page_table(" | ".join(["multiples of queries, keys", *heads]), rows)


@published
def borders_in_videos() -> str:
    """Means over prompts."""
    park = (row for row in lines("ablation.jsonl") if row.get("method") == "park")
    runs = grouped(park, lambda row: "{query_multiple}, {key_multiple}".format(**row["changes"]))
    rows = [
        ("PSNR against dense", *(f"{mean(found, 'psnr'):.1f} dB" for found in runs.values())),
        ("density, recall", *(f"{mean(found, 'density'):.3f}, {mean(found, 'recall'):.3f}" for found in runs.values())),
    ]
    return page_table(" | ".join(["multiples of queries, keys", *runs]), rows)


@published
def videos_made_twice() -> str:
    """Rows of cells that two machines made."""
    found = []
    for folder, tokens in (("gpu_7168", "7,168"), ("gpu_75600", "75,600")):
        again, first = (cells(campaign, "quality") for campaign in ("second_machine", folder))
        pairs = [(first[key]["row"], cell["row"]) for key, cell in again.items() if key in first]
        apart = [abs(one["psnr"] - other["psnr"]) for one, other in pairs]
        found.append((tokens, str(len(pairs)), str(sum(one == other for one, other in pairs)), f"{max(apart):.2f} dB"))
    return page_table("tokens | videos | equal rows | largest difference", found)


@published
def times_on_three_machines() -> str:
    """The first and the second machine's, and those of the tables."""
    rows = []
    for key, first in cells("first_machine", "times").items():
        found = [first, *(cells(campaign, "times")[key] for campaign in ("second_machine", "gpu_75600"))]
        sides = [each["times"] for each in found]
        parts = (
            ", ".join(f"{side[name]:.1f}" for side in sides) if name in sides[0] else ""
            for name in ("plan_ms", "later_plan_ms", "attention_ms")
        )
        rows.append((found[0]["request"]["method"], *parts))
    return page_table("method, three machines | first plan, ms | later plan, ms | attention, ms", rows)


@published
def recall_by_rule() -> str:
    columns: Columns = {
        "density asked": "{asked:g}", "method": "{method}", "blocks": "{blocks[0]:,} x {blocks[1]:,}",
        "rule": "{budget}", "density": "{density:.3f}",
        "density of heads": "{least_density:.2f} to {most_density:.2f}", "recall": "{recall:.3f}",
        "least of a head": "{least_recall:.3f}",
    }  # fmt: skip
    return table_of(columns, table_rows("recall_by_rule"))


@published
def memory_by_model() -> str:
    return page_table(
        "model | weights, bf16 | weights, float8 | activations, stock and compiled | state, quality and paper | "
        "decoding | on 24 GB",
        _memory_rows(),
    )


def _memory_rows() -> Iterator[tuple[str, ...]]:
    for model in PARAMETERS:
        frames, height, width = VIDEO["frames"], VIDEO["height"], VIDEO["width"]
        found: Any = memory(model, model_size(model), frames=frames, height=height, width=width)
        several = f"{found['transformers']} x " if found["transformers"] > 1 else ""
        weights = (f"{several}{found['weights_gb'][kind]:.1f}" for kind in ("bfloat16", "float8"))
        activations = ", ".join(f"{found['activations_gb'][kind]:.1f}" for kind in ("stock", "compiled"))
        state = ", ".join(f"{found['plans_gb'][name]:.2f}" for name in ("quality", "paper"))
        decoding = (
            "not measured: `pipe.vae.enable_tiling()`" if found["decode_gb"] is None else f"{found['decode_gb']:.1f}"
        )
        yield model, *weights, activations, state, decoding, "; ".join(found["fits"]["24"]) or "nothing"


CARDS = {80: "A100", 86: "RTX 3090", 89: "RTX 4090", 90: "H200", 100: "B200", 120: "RTX 5090"}


@published
def builds_by_architecture() -> str:
    """Of the plain attention kernel, with everything and in brackets in its plain form."""
    found = table_rows("builds")
    columns: Columns = {
        "architecture, for example": lambda row: f"sm_{row['arch']}, {CARDS[row['arch']]}",
        "Q K^T": lambda row: "INT8" if row["int8"] else "bf16",
        "tile: queries x keys, warps, stages": "{tile[0]} x {tile[1]}, {tile[2]}, {tile[3]}",
        "registers": "{registers} ({plain[registers]})", "spilled bytes": "{stack} ({plain[stack]})",
        "shared memory": lambda row: f"{row['shared'] / 1024:.0f} KB ({row['plain']['shared'] / 1024:.0f})",
        "matrix products": lambda row: ", ".join(f"`{_short(name)}`" for name in row["products"]),
    }  # fmt: skip
    return table_of(columns, (whole | {"plain": plain} for plain, whole in zip(found[::2], found[1::2], strict=True)))


def _short(product: str) -> str:
    """An instruction without what all of its kind have in common."""
    for common in (".sync.aligned", ".mma_async", ".row.col", ".satfinite", ".cta_group::1", ".sync"):
        product = product.replace(common, "")
    return product


@published
def errors_of_rounding() -> str:
    rows = table_rows("rounding")
    found = {(row["scheme"], row["problem"], row["density"]): row for row in rows}
    columns = list(dict.fromkeys((row["problem"], row["density"]) for row in rows))
    lines = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        cells = [found[scheme, *column] for column in columns]
        shown = (f"{cell['error']:.1e}" if scheme == "bf16" else f"{cell['ratio']:.2f}" for cell in cells)
        lines.append((f"{scheme}: the error itself" if scheme == "bf16" else scheme, *shown))
    return page_table(" | ".join(["rounding", *(f"{problem}, {density:g}" for problem, density in columns)]), lines)
