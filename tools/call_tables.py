"""Tables of single calls for tools/tables.py: what plans, attention and linears take, and what retrieval loses."""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path

from parkattn.methods import METHODS
from parkattn.park import ParkConfig
from parklab.bench.e2e import composed, phases_of_run
from parklab.experiments.catalogue import EXPERIMENTS
from parklab.experiments.results import CellRecords
from parklab.experiments.tables import Table, page_table, to_markdown
from parklab.experiments.times import sparse_call_ms

sys.path.insert(0, str(Path(__file__).parent))
from records import Columns, Record, cells, lab, lines, published, table_of

DENSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
OFFICIAL = {
    "flashinfer-python": "the same blocks, density 0.25",
    "comfy-kitchen": "Sol-Attn, top-k 0.25; theirs with its choice of blocks, INT8",
    "sageattention": "dense; theirs with INT8 scores",
    "fastvideo-kernel": "STA, 3 x 3 x 3 tiles",
}
FALL_BACK = ("comfy-kitchen", "fastvideo-kernel")  # to another kernel, in silence
INT8_BARS = {  # of cuDNN's time, in bf16 and INT8
    "dense": ("0.81", "0.64"),
    "wan2.1-14b, density 0.25": ("0.27", "0.175"),
    "wan2.1-14b, density 0.10": ("0.119", "0.080"),
    "hunyuan, density 0.25": ("0.297", "0.18"),
}
TIME_HEADS = "plan, ms | attention, ms | sparse call, ms"
Times = dict[str, float]


def times_in(campaign: str) -> dict[tuple[str, float | None], Times]:
    """By method and the density that was asked for, None at its own settings."""
    found = cells(campaign, "times").values()
    return {(cell["request"]["method"], cell["request"]["density"]): cell["times"] for cell in found}


def time_columns(campaign: str, method: str, density: float | None) -> tuple[str, ...]:
    times = times_in(campaign).get((method, density))
    if times is None:
        return "", "", ""
    found = times.get("later_plan_ms"), times["attention_ms"], sparse_call_ms(times)
    return tuple("" if value is None else f"{value:.1f}" for value in found)


@published
def times_2k() -> str:
    """A method's plan takes as long at every density: the mean of them."""
    rows = []
    for name in METHODS:
        found = {density: times for (method, density), times in times_in("matched_2k").items() if method == name}
        plans = [times["later_plan_ms"] for times in found.values() if "later_plan_ms" in times]
        own = found.get(None)
        first = statistics.fmean(plans) if plans else None, None if own is None else sparse_call_ms(own)
        attention = (found[at]["attention_ms"] if at in found else None for at in (None, *DENSITIES))
        shown = ("" if value is None else _short(value) for value in (*first, *attention))
        rows += [(name, *shown)] if found else []
    heads = "method | plan | sparse call, own settings | attention, own settings"
    return page_table(" | ".join([heads, *(f"{density:g}" for density in DENSITIES)]), rows)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


@published
def recall_on_h200() -> str:
    """The paper's two tables side by side."""
    sides = [_retrieval(f"tab:query_key_compression{ending}") for ending in ("", "_topk")]
    names = [column.name for column in sides[0].columns][3:]
    heads = ["ordering", "query", "key", *(f"{kind}: {name.lower()}" for kind in ("top-p", "top-k") for name in names)]
    rows = zip(*(side.shown() for side in sides), strict=True)
    return page_table(" | ".join(heads), ([*one, *other[3:]] for one, other in rows))


@published
def representation_errors_on_h200() -> str:
    return to_markdown(_retrieval("tab:query_representation_errors"))


@published
def key_errors_on_h200() -> str:
    return to_markdown(_retrieval("tab:key_score_errors"))


@published
def qrkc_recall_on_h200() -> str:
    return to_markdown(_retrieval("fig:qrkc_effect"))


@functools.cache
def _retrieval(label: str) -> Table:
    """What `park reproduce LABEL --draw` finds of the cells at 75,600 tokens."""
    found = lab("gpu_75600", guidances=(1.0,))
    asked = EXPERIMENTS[label].cells(found)
    table = EXPERIMENTS[label].result(CellRecords(asked, found.finished(asked), {})).table
    assert table is not None
    return table


@published
def attention_in_int8() -> str:
    """The newest run that timed both precisions, with borders as the presets round them."""
    found = [row for row in lines("gpu_attend_int8.jsonl") if row.get("benchmark") in ("attend", "dense")]
    commit = [row for row in found if row["kernel"] == "gluon int8"][-1]["environment"]["commit"]
    newest = {
        ("dense" if row["benchmark"] == "dense" else row["case"], row["kernel"]): row
        for row in found
        if row["environment"]["commit"] == commit and row.get("borders") != "as clustered"
    }
    rows = []
    for case, bars in INT8_BARS.items():
        names = ("ours", "ours, int8") if case == "dense" else ("gluon", "gluon int8")
        model, _, rest = ("wan2.1-14b", "", "dense") if case == "dense" else case.partition(", ")
        row = [f"{'HunyuanVideo' if model == 'hunyuan' else 'Wan2.1-14B'}, {rest}"]
        row.append(f"{newest[case, 'cudnn']['ms']:.1f} ms")
        for name, bar in zip(names, bars, strict=True):
            plain, compensated = newest[case, name], newest.get((case, name.replace("gluon", "gluon compensated")))
            if name.endswith("int8"):
                compensated = newest.get((case, "gluon int8 compensated"))
            row += [f"{plain['ms']:.1f} ms", f"{plain['ratio']:.3f}", bar]
            row.append(f"{compensated['ratio']:.3f}" if compensated and case != "dense" else "")
        rows.append(row)
    return page_table("case | cuDNN | bf16 | ratio | bar | compensated | INT8 | ratio | bar | compensated", rows)


@published
def official_kernels() -> str:
    columns: Columns = {
        "package": "{kernel} {version}", "its compiled kernel": _compiled,
        "what both compute": lambda row: OFFICIAL[row["kernel"]], "tokens": "{tokens:,}",
        "theirs, ms": "{official_ms:.1f}", "ours, ms": "{ours_ms:.1f}",
        "ours of theirs": lambda row: f"{row['ours_ms'] / row['official_ms']:.2f}",
        "our plan, ms": lambda row: f"{row['ours_plan_ms']:.1f}" if "ours_plan_ms" in row else "",
    }  # fmt: skip
    return table_of(columns, (row for row in lines("gpu_official.jsonl", "official") if "absent" not in row))


def _compiled(row: Record) -> str:
    if row["kernel"] not in FALL_BACK:
        return ""
    said: dict[bool | None, str] = {True: "yes", False: "no, its fallback"}
    return said.get(row.get("compiled"), "not recorded")


@published
def float8_linears() -> str:
    found = {row["linears"]: row for row in lines("e2e_float8.jsonl", "e2e float8")}
    before = found["bfloat16"]
    phases = phases_of_run(ParkConfig.profile("paper", model="wan2.1-14b"))

    def whole(row: Record) -> str:
        sparse = row["refresh_cold_s"], row["refresh_warm_s"], row["reuse_s"]
        return f"{composed(row['dense_compiled_s'], *sparse, phases)['park_s']:.0f} s"

    columns: Columns = {
        "linears": "{linears}", "dense s": "{dense_s:.2f}", "blocks compiled s": "{dense_compiled_s:.2f}",
        "PARK, reuse s": "{reuse_s:.2f}", "of bfloat16": lambda row: f"{row['reuse_s'] / before['reuse_s']:.2f}",
        "PARK, 50 steps": whole, "attention": "{split[reuse][attention_s]:.2f}",
        "products": "{split[reuse][linears_s]:.2f}", "rest": "{split[reuse][rest_s]:.2f}",
        "weights": "{memory[weights_gb]:.1f} GB", "peak, dense": "{memory[dense_peak_gb]:.1f} GB",
        "peak, PARK": "{memory[park_peak_gb]:.1f} GB",
    }  # fmt: skip
    return table_of(columns, found.values())
