"""The command `park`: the parts' own commands under one name."""

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
from parkattn.bench import commands as bench
from parkattn.methods import METHODS, register_installed
from parkattn.studio import commands as studio

app = typer.Typer(no_args_is_help=True, add_completion=False, help="PARK: block-sparse attention for video diffusion transformers.")
app.registered_commands += studio.app.registered_commands
app.add_typer(bench.app, name="bench")
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


@app.command()
def methods(as_json: Annotated[bool, typer.Option("--json", help="All settings and presets, for programs.")] = False) -> None:
    """Every method: PARK, what it is compared with, and what installed packages bring along."""
    register_installed()
    if as_json:
        known = {
            name: {
                "line": e.line,
                "paper": e.paper,
                "budgets": e.budgets,
                "settings": e.config().to_dict(),
                "presets": sorted(e.config.PRESETS),
            }
            for name, e in METHODS.items()
        }
        console.print_json(json.dumps(known))
        return
    table = Table("method", "what it is", "density set by", "described in")
    for name, entry in METHODS.items():
        table.add_row(name, entry.line, ", ".join(entry.budgets), entry.paper)
    console.print(table)


@app.command()
def presets() -> None:
    """The paper's settings by name, with round block borders."""
    console.print_json(json.dumps({name: parkattn.ParkConfig.preset(name).to_dict() for name in sorted(parkattn.ParkConfig.PRESETS)}))


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
        Console(stderr=True).print(f"park: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
