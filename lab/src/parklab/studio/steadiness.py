"""Was the machine quiet while a speed-up was measured? Read off the seconds of steps that did the same work."""

from __future__ import annotations

import statistics
from typing import Any

# the recorded demo, on a quiet machine, is at 0.04; beside a second job it was at 0.11, and 1.27x became 1.14x
UNSTEADY = 0.1


def steadiness(steps: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> dict[str, float | None]:
    """Two shares, 0 on an ideal machine. steps: of one run; reference: of the dense run beside it, None if it was made
    elsewhere.

    step_spread: mean distance of steps of equal work from their median. A few slow steps do not move the median, and
    the mean distance sees one very slow step as well as a run that was slow for half its time. Dense steps are equal as
    a whole, sparse ones outside of attention only: their densities differ by right. dense_apart: by how much the dense
    steps of this run and of the reference differ, in the median. They are the same work, so a load that stayed for all
    of one run shows here, and only here.
    """
    timed = [row for row in steps if "seconds" in row]
    dense = [row["seconds"] for row in timed if row["phase"] == "dense"]
    around = [row["seconds"] - row["attention_seconds"] for row in timed if row["phase"] != "dense"]
    away = sum(abs(value - statistics.median(group)) for group in (dense, around) for value in group)
    theirs = [row["seconds"] for row in reference or () if row["phase"] == "dense" and "seconds" in row]
    return {
        "step_spread": away / sum(dense + around) if timed else None,
        "dense_apart": abs(statistics.median(dense) / statistics.median(theirs) - 1) if dense and theirs else None,
    }


def timing_warning(rows: list[dict[str, Any]]) -> str | None:
    """One sentence to stand beside the speed-ups, or None. rows: of a comparison, the reference first."""
    if not any(row["speedup"] is not None for row in rows[1:]):
        return None
    spread, whose = max((row["steadiness"]["step_spread"] or 0.0, _title(row)) for row in rows)
    apart, other = max((row["steadiness"]["dense_apart"] or 0.0, _title(row)) for row in rows)
    if max(spread, apart) <= UNSTEADY:
        return None
    if spread >= apart:
        found = f"in the run of {whose}, steps of equal work differed by {spread:.0%} on average"
    else:
        found = f"dense steps in the run of {other} and in that of {_title(rows[0])} differed by {apart:.0%}"
    return (
        f"The speed-up is rough, because timing was unsteady ({found}): "
        "to measure it well, run again on a quiet machine with --overwrite."
    )


def _title(row: dict[str, Any]) -> str:
    """Rows that were recorded before there were labels have none."""
    return row.get("label", row["method"])
