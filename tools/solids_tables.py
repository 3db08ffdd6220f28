"""The tables of docs/solids.md: how fast clips are rendered, and how well the model follows its sentences."""

from __future__ import annotations

from records import Record, lines, published

from parklab.experiments.tables import page_table
from parklab.solids.following import BARS

FILE = "solids.jsonl"


def _size(size: list[int]) -> str:
    return "{} x {} x {}".format(*size)


@published
def solids_speed() -> str:
    rows = []
    for record in lines(FILE, "solids speed"):
        where = record["environment"]
        machine = where["gpu"] if record["device"] == "cuda" else f"CPU, threads: {where['threads']}"
        rows.append((machine, *(f"{rate['clips_a_minute']:,.0f}" for rate in record["rates"])))
    sizes = [_size(rate["size"]) for rate in lines(FILE, "solids speed")[0]["rates"]]
    return page_table(" | ".join(("machine", *sizes)), rows)


def _row(name: str, bar: float, record: Record | None) -> tuple[str, ...]:
    if record is None:
        return (name, f"{bar:.0%}", "not run", "not run", "not run")
    judge = record["judge_on_renders"]
    return (name, f"{bar:.0%}", f"{record[name]:.0%}", f"{judge[name]:.0%}", f"{judge['shuffled_' + name]:.0%}")


@published
def solids_following() -> str:
    last = next(reversed(lines(FILE, "solids following")), None)
    rows = [_row(name, bar, last) for name, bar in BARS.items()]
    return page_table("of the first object | bar | videos | true renders | renders, other sentences", rows)
