"""The commands `park ablation`, `park reproduce` and `park capture`: parsing, one call, printing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from parklab.studio.commands import changes_from, numbers_from
from parklab.studio.options import Device, Dtype, Offload, Overwrite, Settings
from parklab.studio.terminal import console, interruptible, say

if TYPE_CHECKING:
    from parklab.experiments.reproduce import Outcome

app = typer.Typer(add_completion=False)

Model = Annotated[str, typer.Option(help="tiny (the shipped model), a diffusers folder or a hub id.")]
EverySetting = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="One setting of every method that has it.")
]
Scales = Annotated[
    list[str] | None,
    typer.Option(help="Guidance scales, separated by commas or repeated; the model's own when not given."),
]
Densities = Annotated[
    list[str] | None,
    typer.Option(
        "--densities",
        "--density",
        help="Of matched_densities and matched_costs, separated by commas; 0.5 when not given.",
    ),
]
Measures = Annotated[
    str | None,
    typer.Option(help="Of quality, separated by commas, or all (park metrics); what is installed when not given."),
]
Records = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSON lines of park bench pama, qrkc, scaling, parklab.bench.frontier or --pack to draw instead of "
        "measuring; repeatable."
    ),
]
Fuse = Annotated[
    bool, typer.Option("--fuse", help="Compile the blocks around attention: pays where many videos are made on a GPU.")
]
Labels = Annotated[list[str] | None, typer.Argument(help="Labels of the paper (park reproduce --list), or all.")]
Listed = Annotated[bool, typer.Option("--list", help="Print what there is, and what is not built and why.")]
PromptCount = Annotated[int | None, typer.Option(min=1, help="Number of prompts; 2 when not given.")]
PromptFile = Annotated[Path | None, typer.Option(help="One prompt per line; for models other than the shipped one.")]
Seeds = Annotated[list[str] | None, typer.Option(help="Seeds, separated by commas or repeated; 0 when not given.")]
Methods = Annotated[
    str | None, typer.Option(help="Names separated by commas, for the tables of methods; all when not given.")
]
Size = Annotated[str | None, typer.Option(metavar="FRAMESxHEIGHTxWIDTH", help="For --frames, --height and --width.")]
Weights = Annotated[
    Path | None, typer.Option(help="Folder with the backbones of VBench's dimensions (docs/metrics.md).")
]
CaptureFiles = Annotated[list[Path] | None, typer.Option(help="Retrieval is measured on these files of park capture.")]
Untimed = Annotated[
    bool,
    typer.Option(
        "--untimed",
        help="No seconds and no warm-up, and runs of one prompt share the dense steps that they begin with: "
        "for several processes on one GPU.",
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="One prompt, 64 x 96 x 9, 4 steps, a few methods: does everything work?")
]
Shard = Annotated[
    str | None, typer.Option(metavar="I/N", help="Part I of N, counted from 0; torchrun's rank when not given.")
]
Draw = Annotated[
    bool,
    typer.Option(
        "--draw", help="Make nothing: the report of the cells that are there, also another machine's with its --device."
    ),
]
Pack = Annotated[
    Path | None,
    typer.Option(
        help="Make nothing: all cells of --out (and of --records) into one file of JSON lines, for --records."
    ),
]
Keep = Annotated[
    str,
    typer.Option(help="all, or records: dense frames and captures are held in memory only and made again when needed."),
]


@app.command()
def ablation(
    out: Annotated[Path, typer.Option(help="Folder for results and the table.")] = Path("out/ablation"),
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts of the shipped model.")] = 8,
    seeds: Annotated[str, typer.Option(help="Seeds separated by commas.")] = "0",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Names separated by commas, or all whose density can be set; PARK and its ablations when not given."
        ),
    ] = None,
    density: Annotated[float, typer.Option(help="Density of the sparse steps, the same for every method.")] = 0.5,
    budget: Annotated[str, typer.Option(help="What is calibrated to reach it: top_p or top_k.")] = "top_p",
    settings: Settings = None,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 12,
    height: Annotated[int, typer.Option(help="Pixels, a multiple of 16.")] = 128,
    width: Annotated[int, typer.Option(help="Pixels, a multiple of 16.")] = 192,
    frames: Annotated[int, typer.Option(help="4n + 1 frames.")] = 17,
    device: Device = "auto",
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
) -> None:
    """PARK, its ablations and centroid retrieval at equal density on held-out prompts: PSNR against dense.
    Resumable.
    """
    from parklab.experiments.ablation import ablation_of, budgeted_methods, run_ablation, to_markdown
    from parklab.experiments.reproduce import BLOCKS

    evaluation = ablation_of(
        prompts, seeds=numbers_from(seeds), methods=budgeted_methods(methods), densities=(density,),
        changes=BLOCKS | changes_from(settings), steps=steps, height=height, width=width, frames=frames, device=device,
        dtype=dtype,
    )  # fmt: skip
    with interruptible(f"finished runs are kept in {out}; run again to go on"):
        table = run_ablation(evaluation, out, budget=budget, overwrite=overwrite, say=say)
    say(to_markdown(table))


@app.command()
def reproduce(
    names: Labels = None,
    listed: Listed = False,
    model: Model = "tiny",
    prompts: PromptCount = None,
    prompt_file: PromptFile = None,
    seeds: Seeds = None,
    guidance: Scales = None,
    methods: Methods = None,
    densities: Densities = None,
    size: Size = None,
    steps: Annotated[int | None, typer.Option()] = None,
    frames: Annotated[int | None, typer.Option()] = None,
    height: Annotated[int | None, typer.Option()] = None,
    width: Annotated[int | None, typer.Option()] = None,
    settings: EverySetting = None,
    measures: Measures = None,
    weights: Weights = None,
    capture_file: CaptureFiles = None,
    records: Records = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    offload: Offload = "none",
    fuse: Fuse = False,
    untimed: Untimed = False,
    quick: Quick = False,
    draw: Draw = False,
    pack: Pack = None,
    keep: Keep = "all",
    shard: Shard = None,
    out: Annotated[Path, typer.Option(help="Folder for cells and the report.")] = Path("out/reproduce"),
) -> None:
    """The paper's tables and figures again, on any model: finished cells are kept, so that a second run does no
    work.
    """
    from parklab.experiments.reproduce import evaluation_for, parse_shard, run_experiments

    if listed:
        _list_experiments()
        return
    if pack is not None:
        _pack_cells(pack, out, records or [])
        return
    if not names:
        raise ValueError("name: expected labels of the paper, or all, got none; see park reproduce --list.")
    evaluation = evaluation_for(
        model=model, prompts=prompts, prompt_file=prompt_file, quick=quick, steps=steps, draw=draw, keep=keep,
        seeds=_numbers("seeds", seeds or ["0"], int), densities=_numbers("densities", densities or ["0.5"], float),
        guidances=_numbers("guidance", guidance, float) if guidance else (None,), changes=changes_from(settings),
        methods=tuple(methods.split(",")) if methods else (),
        **_lengths(size, frames=frames, height=height, width=width), device=device, dtype=dtype, offload=offload,
        fuse=fuse or None, timed=not untimed, measures=measures, weights=weights, captures=tuple(capture_file or ()),
        records=tuple(records or ()),
    )  # fmt: skip
    with interruptible(f"finished cells are kept in {out}, run again to go on"), _cells_bar() as advance:
        outcome = run_experiments(names, evaluation, out, part=parse_shard(shard), advance=advance, say=say)
    _show(outcome, out, quick)


def _lengths(size: str | None, **given: int | None) -> dict[str, int | None]:
    """Frames, height and width, either from --size or each from its own option."""
    from parklab.experiments.reproduce import parse_size

    if size is None:
        return given
    if any(value is not None for value in given.values()):
        raise ValueError("size: expected it alone, got --frames, --height or --width beside it; leave those out.")
    return {**parse_size(size)}


def _pack_cells(target: Path, out: Path, records: list[Path]) -> None:
    from parklab.experiments.campaign import CampaignStore

    packed, left = CampaignStore(out, say, "cells", records).pack(target)
    stay = f"; {left} with files of their own stay in {out / 'cells'}" if left else ""
    say(f"wrote {target}: {packed} cells{stay}")


@contextlib.contextmanager
def _cells_bar() -> Iterator[Callable[[int, int], None]]:
    """Calling it with what is done, and of how many, moves the bar."""
    parts = (
        TextColumn("cells"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*parts, console=console) as progress:
        task = progress.add_task("cells", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _list_experiments() -> None:
    from parklab.experiments.catalogue import EXPERIMENTS, NOT_BUILT, in_the_papers_order

    # a name that is cut or broken could not be asked for
    table = Table(Column("name", no_wrap=True), "what it is", "runs here")
    for label in in_the_papers_order([*EXPERIMENTS, *NOT_BUILT]):
        if label in NOT_BUILT:
            table.add_row(label, NOT_BUILT[label].title, f"no: {NOT_BUILT[label].reason}")
        else:
            needs = EXPERIMENTS[label].needs
            table.add_row(label, EXPERIMENTS[label].title, f"with {needs}" if needs else "yes")
    console.print(table)


def _show(outcome: Outcome, out: Path, quick: bool = False) -> None:
    if quick:
        say("--quick tests that everything works; findings of one short video say nothing about methods")
    for section in outcome.sections:
        for finding in section.result.findings if section.result else ():
            say(f"{section.label}: {finding.line()}")
    left_out = f", {outcome.left_out} left out" if outcome.left_out else ""
    failed = f", {len(outcome.failures)} failed" if outcome.failures else ""
    say(f"{outcome.made} cells made, {outcome.kept} there already{left_out}{failed}; report in {out / 'index.html'}")
    for name, reason in outcome.failures.items():
        say(f"failed: {name}: {reason}")
    if outcome.failures:
        raise typer.Exit(1)


@app.command()
def capture(
    prompt: Annotated[str, typer.Argument(help="What to show.")],
    out: Annotated[Path, typer.Option(help="The safetensors file.")] = Path("out/capture.safetensors"),
    model: Model = "tiny",
    layers: Annotated[str | None, typer.Option(help="Layers from 0, separated by commas; all when not given.")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads from 0; all when not given.")] = None,
    capture_steps: Annotated[str | None, typer.Option(help="Denoising steps from 0; all when not given.")] = None,
    branches: Annotated[
        str | None, typer.Option(help="Names of guidance branches; the first of each step when not given.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="v beside q and k.")] = False,
    limit_mib: Annotated[int, typer.Option(min=1, help="More than this is refused.")] = 2048,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option()] = None,
    frames: Annotated[int | None, typer.Option()] = None,
    height: Annotated[int | None, typer.Option()] = None,
    width: Annotated[int | None, typer.Option()] = None,
    guidance: Annotated[float | None, typer.Option()] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    offload: Offload = "none",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Queries and keys of chosen attention calls of a dense run, in one safetensors file of bounded size."""
    from parklab.experiments.captures import Selection
    from parklab.experiments.reproduce import capture_file, known_model
    from parklab.studio.request import Request

    chosen: dict[str, Any] = {
        name: None if text is None else _numbers(name, [text], int)
        for name, text in (("layers", layers), ("heads", heads), ("steps", capture_steps))
    }
    names = tuple(branches.split(",")) if branches else None
    selection = Selection(**chosen, branches=names, first_branch=names is None, values=values, limit=limit_mib * 2**20)
    request = Request(
        prompt=prompt, model=known_model(model), method="dense", seed=seed, steps=steps, frames=frames, height=height,
        width=width, guidance=guidance, device=device, dtype=dtype, offload=offload,
    )  # fmt: skip
    calls, size = capture_file(request, selection, out, overwrite=overwrite, say=say)
    say(f"wrote {out}: {calls} calls, {size / 2**20:.1f} MiB")


def _numbers(name: str, texts: list[str], kind: Any) -> tuple[Any, ...]:
    """Each once, in the order given."""
    try:
        return tuple(dict.fromkeys(kind(part) for text in texts for part in text.split(",")))
    except ValueError:
        raise ValueError(
            f"{name}: expected numbers separated by commas, got {','.join(texts)!r}; write 0,1,2."
        ) from None
