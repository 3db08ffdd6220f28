"""The command `park`: parsing, one call, printing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import parkattn

app = typer.Typer(no_args_is_help=True, add_completion=False, help="PARK: block-sparse attention for video diffusion transformers.")
bench = typer.Typer(no_args_is_help=True, help="Measure speed; every result has a correctness gate before it and a record beside it.")
app.add_typer(bench, name="bench")
console = Console()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON record.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the scene.")] = 0,
) -> None:
    """PARK, its ablations and dense attention on a built-in scene: quality, density, time, and a picture."""
    from parkattn.demo import METHOD_ORDER, run_method, save_report, scene_for

    out.mkdir(parents=True, exist_ok=True)  # before the work, so that a bad folder costs nothing
    scene = scene_for(seed)
    results = [run_method(name, scene) for name in track(METHOD_ORDER, "running methods", console=console, transient=True)]
    table = Table("method", "density", "recall", "output error", "plan ms", "attention ms", title="8,192 tokens, 4 heads, p = 0.9")
    for row in results:
        table.add_row(
            row.method,
            f"{row.density:.2f}",
            f"{row.recall['mean']:.3f}",
            f"{row.error:.3f}",
            f"{row.plan_ms:.0f}",
            f"{row.attention_ms:.0f}",
        )
    console.print(table)
    for path in save_report(results, scene, out):
        console.print(f"wrote {path}")


@bench.command("cpu")
def bench_cpu(
    record: Annotated[Path | None, typer.Option(help="Append the results to this JSON-lines file.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Sparse against dense attention on the CPU at densities 0.5, 0.25 and 0.1."""
    from parkattn.bench.cpu import measure_cpu
    from parkattn.record import append_records

    records = list(track(measure_cpu(repeats=repeats, threads=threads), "measuring", total=3, console=console, transient=True))
    table = Table("density", "dense ms", "sparse ms", "speed-up", "plan ms", "calls to break even", title="4 heads, 8,192 tokens, dim 64")
    for row in records:
        table.add_row(*(str(row[name]) for name in ("density", "dense_ms", "sparse_ms", "speedup", "plan_ms", "calls_to_break_even")))
    console.print(table)
    if record is not None:
        append_records(record, records)
        console.print(f"appended to {record}")


@bench.command("decisions")
def bench_decisions(record: Annotated[Path | None, typer.Option(help="Append the results to this JSON-lines file.")] = None) -> None:
    """The settings the paper leaves open (iterations, seed, warm start, ...), one at a time, by recall."""
    from parkattn.bench.decisions import measure_decisions
    from parkattn.record import append_records

    records = list(track(measure_decisions(), "measuring", total=32, console=console, transient=True))
    table = Table("choice", "value", "recall", "density", "QK-score error")
    for row in records:
        value = ", ".join(f"{name} = {setting}" for name, setting in row["value"].items())
        table.add_row(row["choice"], value, *(str(row[name]) for name in ("recall", "density", "score_error")))
    console.print(table)
    if record is not None:
        append_records(record, records)
        console.print(f"appended to {record}")


@app.command()
def presets() -> None:
    """The paper's settings by name."""
    console.print_json(json.dumps({name: parkattn.ParkConfig.preset(name).to_dict() for name in sorted(parkattn.config.PRESETS)}))


def _version(asked: bool) -> None:
    if asked:
        console.print(parkattn.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def main() -> None:
    """What a user can cause is one line and exit code 2; anything else is a defect and keeps its traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        Console(stderr=True).print(f"park: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
