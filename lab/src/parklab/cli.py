"""The command `park`: the parts' own commands under one name. --help imports nothing that needs PyTorch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from typer.core import TyperCommand, TyperGroup

import parkattn
from parklab.bench import commands as bench
from parklab.experiments import commands as experiments
from parklab.studio import commands as studio
from parklab.studio import options
from parklab.studio.terminal import say


class _PlainFlags:
    """Help that shows a flag as it is typed, by its name alone; newer versions of typer put <bool> beside it."""

    def get_params(self, context: Any) -> list[Any]:
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class PlainCommand(_PlainFlags, TyperCommand):
    pass


class PlainGroup(_PlainFlags, TyperGroup):
    pass


app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=False,
    help="PARK: block-sparse attention for video diffusion transformers.",
)
app.registered_commands += studio.app.registered_commands + experiments.app.registered_commands
app.add_typer(bench.app, name="bench", cls=PlainGroup)
console = Console(markup=False, emoji=False)
# typer brings its own copy of click, or uses the installed one: the classes are asked of typer itself
CommandLineError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


@app.command()
def scene(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON record.")] = Path("out/scene"),
    seed: Annotated[int, typer.Option(help="Seed of the scene.")] = 0,
) -> None:
    """PARK, its ablations and dense attention on a built-in scene, without a model: recall, density, time, and a
    picture.
    """
    from parkattn.checks import expect_count
    from parkattn.settings import LARGEST_SEED
    from parklab.demo import METHOD_ORDER, Truth, run_method, save_report, scene_for
    from parklab.extras import pyplot
    from parklab.files import explained, make_folder

    expect_count("seed", seed, least=0, most=LARGEST_SEED)
    pyplot("pictures")  # before the work, as the folder: what is missing or bad costs nothing then
    with explained(out):
        make_folder(out)
    built = scene_for(seed)
    truth = Truth(built)
    results = [
        run_method(name, truth) for name in track(METHOD_ORDER, "running methods", console=console, transient=True)
    ]
    table = Table(
        "method", "density", "recall", "output error", "plan ms", "attention ms", title="8,192 tokens, 4 heads, p = 0.9"
    )
    for row in results:
        times = f"{row.plan_ms:.0f}", f"{row.attention_ms:.0f}"
        table.add_row(row.method, f"{row.density:.2f}", f"{row.recall['mean']:.3f}", f"{row.error:.3f}", *times)
    console.print(table)
    for path in save_report(results, built, out, say):
        say(f"wrote {path}")


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="All settings and presets, for programs.")] = False,
) -> None:
    """Every method: PARK, what it is compared with, and what installed packages bring along."""
    from parkattn.methods import METHODS

    if as_json:
        known = {
            name: {"line": e.line, "paper": e.paper, "budgets": e.budgets, "settings": e.config().to_dict(),
                   "presets": sorted(e.config.PRESETS)}
            for name, e in METHODS.items()
        }  # fmt: skip
        console.print_json(json.dumps(known))
        return
    table = Table("method", "what it is", "density set by", "described in")
    for name, entry in METHODS.items():
        table.add_row(name, entry.line, ", ".join(entry.budgets), entry.paper)
    console.print(table)


@app.command("profile")
def density_profile(
    out: Annotated[Path, typer.Option(help="The safetensors file.")] = Path("out/density.safetensors"),
    model: options.Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to show; repeatable: the most that any of them needs counts.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Queries of a head that are looked at; all when not given.")
    ] = None,
    seed: options.Seed = 0,
    steps: options.Steps = None,
    height: options.Height = None,
    width: options.Width = None,
    frames: options.Frames = None,
    guidance: options.Guidance = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offload: options.Offload = "none",
    overwrite: options.Overwrite = False,
) -> None:
    """How many keys each head of a model needs, from dense runs: the file that SVOO's density_profile takes."""
    from parklab.studio.compare import DEFAULT_PROMPT
    from parklab.studio.density import measure_profile
    from parklab.studio.request import Request

    request = Request(
        prompt="", model=model, seed=seed, steps=steps, height=height, width=width, frames=frames, guidance=guidance,
        device=device, dtype=dtype, offload=offload,
    )  # fmt: skip
    found = measure_profile(
        request, prompt or [DEFAULT_PROMPT], out, samples=samples, overwrite=overwrite, say=say
    ).densities
    needed, (steps_in, layers, heads) = found[~found.isnan()], found.shape
    console.print(
        f"{steps_in} steps, {layers} layers, {heads} heads need {needed.min():.1%} to {needed.max():.1%} of the keys, "
        f"{needed.mean():.1%} on average"
    )
    say(f"the profile is in {out}")


@app.command()
def metrics(
    video: Annotated[Path, typer.Argument(help="A video (mp4, npy, safetensors), or a folder of videos or results.")],
    reference: Annotated[Path | None, typer.Argument(help="What it is compared with.")] = None,
    measures: Annotated[str | None, typer.Option(help="Names separated by commas, or all that can be taken.")] = None,
    frames: Annotated[str | None, typer.Option(help="raw or decoded, where folders have both; raw else.")] = None,
    fps: Annotated[float, typer.Option(help="Frames per second at which they are seen; ColorVideoVDP's only.")] = 16.0,
    weights: Annotated[Path | None, typer.Option(help="Folder of VBench's backbones (docs/metrics.md).")] = None,
    device: Annotated[str, typer.Option(help="Device of the networks: cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[Path | None, typer.Option("--out", "--json", help="JSON with the values of every frame.")] = None,
) -> None:
    """How close videos are to others (PSNR, SSIM, LPIPS, VMAF, ...), and how good alone (VBench's dimensions)."""
    from parkattn.checks import expect_choice, first_line, shown
    from parklab.metrics.measures import MEASURES, SINGLE, Setting, choose_measures
    from parklab.metrics.pairs import DECODED, RAW, find_pairs, mean_values, measure_pair
    from parklab.record import environment
    from parklab.store import Cell, Store, read_record
    from parklab.studio.video import read_mp4

    if frames is not None:
        expect_choice("frames", frames, ("raw", "decoded"))
    if out is not None and out.suffix != ".json":
        raise ValueError(f"out: expected a file that ends with .json, got {shown(out.name)}; name it so.")
    setting = Setting(fps=fps, weights=weights, device=device)
    names, not_measured = choose_measures(measures, setting, reference=reference is not None)
    only = {None: None, "raw": RAW, "decoded": DECODED}[frames]
    pairs, failures = find_pairs(video, reference, read_record, only=only)
    entries = []
    for pair in track(pairs, "measuring", console=console, transient=True):
        try:
            entries.append(measure_pair(pair, names, setting, read_mp4))
        except (ValueError, OSError, ModuleNotFoundError, RuntimeError) as error:
            failures[pair.name] = first_line(error)
    table = Table(Column("video", overflow="fold"), "frames", *(MEASURES[name].title for name in names))
    alone = [name for name in names if MEASURES[name].kind == SINGLE]

    def add(title: str, kind: str, values: dict[str, float]) -> None:
        table.add_row(title, kind, *(f"{values[n]:.{MEASURES[n].digits}f}" if n in values else "" for n in names))

    for entry in entries:
        add(entry["name"], entry["frames"], mean_values([entry], names))
        if reference is not None and alone:
            add(f"{entry['name']}, reference", entry["frames"], mean_values([entry], alone, "values_of_reference"))
    means = mean_values(entries, names)
    if len(entries) > 1:
        add(f"mean of {len(entries)}", "", means)
    if entries:
        console.print(table)
    for name, reason in not_measured.items():
        console.print(f"{name} was not measured: {reason}", markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        used = {name: MEASURES[name] for name in names}
        told = {name: {"title": m.title, "kind": m.kind, "package": m.version} for name, m in used.items()}
        record: dict[str, Any] = {"format": "parkattn.metrics.1", "measures": told, "not_measured": not_measured}
        record |= {"pairs": entries, "mean": means, "failures": failures, "fps": fps, "environment": environment()}
        Store(out.parent, say).put(Cell(name=out.stem, format="parkattn.metrics.1"), record, {})
    for name, reason in failures.items():
        _complain(f"{name}: {reason}")
    raise typer.Exit(1 if failures else 0)


@app.command()
def presets(as_json: Annotated[bool, typer.Option("--json", help="All settings, for programs.")] = False) -> None:
    """Models and profiles by name, and where their settings differ from the defaults."""
    config = parkattn.ParkConfig
    known = {name: config.preset(name).to_dict() for name in sorted(config.PRESETS)}
    known |= {name: config.profile(name).to_dict() for name in config.PROFILES}
    if as_json:
        console.print_json(json.dumps(known))
        return
    usual = config().to_dict()
    table = Table("name", "differs from the defaults in")
    for name, settings in known.items():
        own = (f"{field}={value}" for field, value in settings.items() if value != usual[field])
        table.add_row(name, ", ".join(own) or "nothing")
    console.print(table)


def _version(asked: bool) -> None:
    if asked:
        console.print(parkattn.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for registered in (*app.registered_commands, *bench.app.registered_commands):
    registered.cls = PlainCommand


def main() -> None:
    """What a user can cause is one line and exit code 2; anything else is a defect and keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a letter must not end a finished run
            stream.reconfigure(errors="backslashreplace")
    try:
        ended = app(prog_name="park", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        _refuse(in_one_line(error, sys.argv[1:]))
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        _refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        from parklab.studio.placement import ran_out_of_memory

        if not ran_out_of_memory(error):
            raise
        _refuse("memory: expected room for this command, got out of memory; ask for fewer or smaller videos.")
    sys.exit(ended if isinstance(ended, int) else 0)


def in_one_line(error: Any, words: Sequence[str]) -> str:
    """What typer refuses in the words of a command line, in the form of every other error."""
    from parkattn.checks import did_you_mean, shown

    context = error.ctx
    command = "park" if context is None else context.command_path
    message, see = " ".join(error.format_message().split()).rstrip("."), f"see {command} --help."
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        options = [name for parameter in context.command.params for name in parameter.opts]
        given = error.option_name
        return (
            f"{shown(given)[1:-1]}: expected an option of {command}, got none of them; "
            f"{did_you_mean(given, options, see)}"
        )
    names = sorted(getattr(getattr(context, "command", None), "commands", ()))
    parameter = getattr(error, "param", None)
    if names and parameter is None:
        given = next((word for word in words[len(command.split()) - 1 :] if not word.startswith("-")), "")
        return f"{command}: expected one of {', '.join(names)}, got {shown(given)}; {did_you_mean(given, names, see)}"
    what = f"{command}: expected its arguments" if parameter is None else f"{parameter.opts[-1]}: expected a value"
    return f"{what} as its help says, got another ({shown(message)[1:-1]}); {see}"


def _refuse(line: str) -> NoReturn:
    _complain(line)
    sys.exit(2)


def _complain(line: str) -> None:
    # words of a command line that is no UTF-8 cannot be printed as they are
    printable = line.encode("utf-8", "backslashreplace").decode()
    Console(stderr=True, emoji=False).print(
        f"park: {printable}", style="red", markup=False, highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    main()
