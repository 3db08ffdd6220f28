"""Tables of kernels, from lines of park bench: those that --records names, or of this GPU, measured as one cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parklab.experiments.results import NOT_RUN, CellRecords, Dots, Panel, Plot, Result, Series, machines_in
from parklab.experiments.runner import Lab
from parklab.experiments.tables import Finding, Table, columns_of
from parklab.store import Cell

PARTS = {
    "metric_ms": "metric",
    "cholesky_ms": "Cholesky factor",
    "transform_ms": "transform of keys",
    "means_ms": "means in key space",
}
PAPER_QRKC_MS = 2.0  # "remains below 2 ms"
Line = Mapping[str, Any]


def bench_cells(benchmark: str, lab: Lab) -> list[Cell]:
    """None where lines are given, or where there is no GPU to measure."""
    given = any(line.get("benchmark") == benchmark for line in lab.lines)
    return [] if given or not lab.base.device.startswith("cuda") else lab.bench_cells(benchmark)


def pama_result(gathered: CellRecords) -> Result:
    lines = _lines(gathered, "pama", lambda line: (line["shape"]["name"], line["kernel"]))
    if not lines:
        return _without(gathered, "pama")
    parts = ("ms", "speedup", "extra_mb", "memory_reduction")
    rows = [(line["shape"]["name"], line["kernel"], *map(line.get, parts)) for line in lines]
    columns = columns_of("Shape | Implementation | ms:2 | Speedup:2 | MB:2 | Reduction:1")
    fused = [line for line in lines if line["kernel"] != "PyTorch"]
    slowest = min(fused, key=lambda line: line["speedup"], default=None)
    nearest = "" if slowest is None else f"; nearest {slowest['kernel']}"
    statement = f"every fused kernel of PAMA is faster than PyTorch{nearest}"
    margin = None if slowest is None else slowest["speedup"] - 1
    finding = Finding(statement, margin, "times", reason="no fused kernel")
    return Result(Table(columns, tuple(rows)), (finding,), note=_machine(lines))


def qrkc_result(gathered: CellRecords) -> Result:
    lines = _lines(gathered, "qrkc", lambda line: tuple(sorted(line["shape"].items())))
    if not lines:
        return _without(gathered, "qrkc")
    shapes = ["{heads} heads, {tokens:,} tokens".format(**line["shape"]) for line in lines]
    rows = [(shape, *(line[part] for part in PARTS), line["ms"]) for shape, line in zip(shapes, lines, strict=True)]
    columns = columns_of(" | ".join(["Shape", *(f"{name}, ms:3" for name in (*PARTS.values(), "together"))]))
    names = tuple(PARTS.values())
    panels = [(f"{row[0]}, ms", names, row[1:-1]) for row in rows]
    longest = max(line["ms"] for line in lines)
    finding = Finding(f"QRKC adds less than {PAPER_QRKC_MS:g} ms", PAPER_QRKC_MS - longest, "ms")
    return Result(Table(columns, tuple(rows)), (finding,), Dots(tuple(panels)), _machine(lines))


def scaling_result(gathered: CellRecords) -> Result:
    lines = _lines(
        gathered,
        "scaling",
        lambda line: (line["over"], line["part"], line.get("length"), round(line.get("density", 0), 2)),
    )
    points = [line for line in lines if "ms" in line]
    if not points:
        return _without(gathered, "scaling")
    fits = [line for line in lines if "exponent" in line]
    exponents = {(line["over"], line["part"].removesuffix(": fit")): line["exponent"] for line in fits}
    rows = [(line["over"], line["part"], line["length"], line["density"], line["ms"]) for line in points]
    columns = columns_of("over | part | tokens | density:3 | ms:2")
    panels = []
    for over, title in (("density", "density"), ("length", "tokens")):
        here = [line for line in points if line["over"] == over]
        series = []
        for part in dict.fromkeys(line["part"] for line in here):
            found = sorted((line[over], line["ms"], None, "") for line in here if line["part"] == part)
            series.append(Series(part, tuple(found)))
        if series:
            panels.append(Panel(title, "ms", tuple(series), logarithmic=over == "length"))
    powers = ", ".join(f"{part} over {over} {value:.2f}" for (over, part), value in exponents.items())
    note = _machine(points) + (f" Fitted exponents: {powers}." if powers else "")
    return Result(Table(columns, tuple(rows)), (), Plot((tuple(panels),)), note)


def _lines(gathered: CellRecords, benchmark: str, which: Any) -> list[Line]:
    """One for each shape and kernel: the last one measured."""
    own = [line for record in gathered.of(gathered.cells) for line in record["lines"]]
    found: dict[Any, Line] = {}
    for line in (*own, *gathered.lines):
        if line.get("benchmark") == benchmark:
            try:
                found[which(line)] = line
            except (KeyError, TypeError):
                wanted = f"records: expected whole lines of park bench {benchmark}"
                raise ValueError(f"{wanted}, got one that is not; measure again.") from None
    return list(found.values())


def _without(gathered: CellRecords, benchmark: str) -> Result:
    if gathered.cells:
        return Result(None, note=f"{NOT_RUN}: {gathered.why_not(gathered.cells)}")
    advice = f"run it there, or pass --records with lines of park bench {benchmark}"
    return Result(None, note=f"{NOT_RUN}: needs a GPU; {advice}")


def _machine(lines: list[Line]) -> str:
    names = machines_in(lines)
    return f"Measured on {', '.join(names)}." if names else ""
