"""Tables of `park bench`: a gate, the measurements behind it, and their records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(markup=False, emoji=False)


def run_measures(
    name: str,
    record: Path | None,
    repeats: int,
    rehearse: bool,
    columns: tuple[str, ...],
    *,
    gate: str | None = None,
    measured: Mapping[str, Any] | None = None,
    **checked: bool,
) -> None:
    """measured, checked: what else the measurement and the gate are told."""
    import torch

    from parklab.bench.gpu import GATES, MEASURES
    from parklab.bench.problems import expect_all_pass
    from parklab.bench.timing import bench_device, gpu_environment, roofline
    from parklab.record import append_records

    device = bench_device()
    torch.manual_seed(0)
    passed = expect_all_pass(_shown_as_they_come(GATES[f"gate-{gate or name}"](device, rehearse=rehearse, **checked)))
    console.print(f"gate: {len(passed)} checks passed")
    peak, facts = roofline(device), gpu_environment()
    if record is not None:
        append_records(
            record,
            [
                {"section": f"gate-{gate or name}", "rehearsal": rehearse, **case, "environment": facts}
                for case in passed
            ],
        )
    table = Table(
        *columns,
        title=f"{facts.get('gpu', facts['cpu'])}: {peak['tflops']:.0f} TFLOP/s, {peak['gbytes_per_s']:.0f} GB/s "
        "measured in this run",
    )
    for row in MEASURES[name](device, peak, repeats=repeats, rehearse=rehearse, **(measured or {})):
        table.add_row(*(shown_in(row, column) for column in columns))
        if record is not None:
            append_records(record, [{**row, "roofline": peak, "rehearsal": rehearse, "environment": facts}])
    console.print(table)
    if record is not None:
        console.print(f"appended to {record}", markup=False)


def _shown_as_they_come(cases: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A gate's checks, a line each: what runs out of time shows how far it came."""
    began = time.monotonic()
    for case in cases:
        console.print(f"{time.monotonic() - began:6.1f} s  {case['gate']}", highlight=False, markup=False)
        yield case


def show_and_keep(table: Table, records: list[dict[str, Any]], record: Path | None) -> None:
    from parklab.record import append_records

    console.print(table)
    if record is not None:
        append_records(record, records)
        console.print(f"appended to {record}", markup=False)


def shown_in(row: dict[str, Any], column: str) -> str:
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
