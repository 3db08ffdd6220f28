"""Records in benchmarks/results as the makers of pages read them, and the tables that are made of them."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from of_models import is_read

from parklab.bench.frontier import read_records
from parklab.experiments.campaign import read_campaign
from parklab.experiments.evaluation import FORMATS
from parklab.experiments.reproduce import evaluation_for
from parklab.experiments.runner import Lab
from parklab.experiments.tables import page_table
from parklab.files import write_atomically
from parklab.record import environment

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
H200 = {"device": "cuda", "steps": 50, "fuse": True}
# of the H200's videos
SIZES = {"gpu_75600": (81, 400, 576), "gpu_75600_same_schedule": (81, 400, 576), "gpu_7168": (29, 224, 256)}

# fields that say what a line of `park bench` measured
MEASURED = {
    "attend": ("case", "kernel", "borders"), "dense": ("case", "kernel"), "layer": ("part", "borders"),
    "pama": ("shape", "kernel"), "kmeans": ("shape",), "qrkc": ("shape",), "flashinfer": ("part",),
    "official": ("kernel",), "methods": ("shape", "method"), "sanitize": ("tool",), "cpu": ("asked_density",),
    "decisions": ("choice", "value"), "e2e": ("model", "compiled"),
    "e2e bits": ("model", "linears", "precision", "alone"), "e2e float8": ("model", "linears"), "models": ("model",),
    "models gate": ("model", "gate"), "models whole": ("model",),
}  # fmt: skip

Record = dict[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]
TABLES: dict[str, Callable[[], str]] = {}  # by the name that a page has in its marker


def published(table: Callable[[], str]) -> Callable[[], str]:
    TABLES[table.__name__] = table
    return table


def table_of(columns: Columns, rows: Iterable[Any], form: Callable[..., str] = page_table) -> str:
    """A column is a format of a record's fields, or a function of a row."""
    shown = (
        [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows
    )
    return form(" | ".join(columns), shown)


def lines(name: str, benchmark: str | None = None) -> list[Record]:
    """Of a file of JSON lines, those of a benchmark, and of the model that is read.

    A benchmark in MEASURED has one of each thing that it measures: the last.
    """
    found = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    chosen = [record for record in found if benchmark is None or record.get("benchmark") == benchmark]
    read = [record for record in chosen if is_read(record) and not record.get("rehearsal")]
    return last_of_each(read, MEASURED[benchmark]) if benchmark in MEASURED else read


def last_of_each(found: list[Record], names: tuple[str, ...]) -> list[Record]:
    """By these fields, in the order of the first ones."""
    return list({json.dumps([record.get(name) for name in names]): record for record in found}.values())


def argument_reader(doc: str | None) -> argparse.ArgumentParser:
    """Of a tool, whose help is its docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def write_rows(name: str, rows: list[Record], **more: Any) -> None:
    """A file of rows, with where they were measured."""
    facts = {"rows": rows, **more}
    facts.setdefault("environment", environment())
    write_atomically(RESULTS / f"{name}.json", json.dumps(facts, indent=1).encode())


def table_rows(name: str) -> list[Record]:
    """Of a file of rows, which a tool wrote whole."""
    found: list[Record] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def frontier_lines(path: Path) -> list[Record]:
    """Lines of the frontier, of the model that is read."""
    return [record for record in read_records(path) if is_read(record)]


def cells(campaign: str, kind: str) -> dict[str, Record]:
    """By key, of the model that is read."""
    found = {key: record for key, record in _campaign(campaign).items() if record["format"] == FORMATS[kind]}
    return {key: record for key, record in found.items() if is_read(record)}


def every_cell(campaign: str) -> dict[str, Record]:
    """By key, of all models."""
    return _campaign(campaign)


@functools.cache
def _campaign(name: str) -> dict[str, Record]:
    """Every seal is checked."""
    return read_campaign(RESULTS / f"{name}.jsonl")


def lab(campaign: str, **asked: Any) -> Lab:
    """What `park reproduce --draw` reads the cells of a campaign with: 8 prompts of the small model."""
    if campaign in SIZES:
        asked |= H200 | dict(zip(("frames", "height", "width"), SIZES[campaign], strict=True))
    given: dict[str, Any] = {
        "model": "tiny",
        "prompts": 8,
        "prompt_file": None,
        "quick": False,
        "draw": True,
        "keep": "records",
    }
    place = RESULTS / campaign  # no folder: all cells are in the file
    return Lab(evaluation_for(**given, **asked, records=(place.with_suffix(".jsonl"),)), place)
