"""The commands `park generate`, `park compare`, `park demo` and `park doctor`: parsing, one call, printing."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from parklab.studio.options import (
    Methods,
    Overwrite,
    Preset,
    Profiles,
    Seed,
    Settings,
    VideoOptions,
    with_video_options,
)
from parklab.studio.terminal import console, interruptible, say, step_bars, waiting, warn

if TYPE_CHECKING:
    from parklab.studio.prompts import Item
    from parklab.studio.request import Request

app = typer.Typer(add_completion=False)
IMPORTING = "importing PyTorch"
DEMO_SIZE = 176, 288  # 7,128 tokens: attention is most of a step
DEMO_PROMPT = "a cyan star moves down over grey checks"  # among those that it draws best
PYTHON = re.compile(r"(?:[\s\d.,()\[\]+-]|\de[+-]?\d|True|False|None)*", re.ASCII | re.IGNORECASE)  # .5, (0.7, 0.9)
ESTIMATED_MODEL = "wan2.1-14b"  # by `park doctor`, when none is named


@app.command()
@with_video_options
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help='What to show, e.g. "a red circle moves right over blue waves".')
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file with one prompt per line (# begins a comment), shared out over the ranks of torchrun."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The mp4 (out/video.mp4), with --prompts a folder (out/videos).")
    ] = None,
    method: Annotated[str, typer.Option(help="dense, park or another method's name.")] = "park",
    preset: Preset = None,
    settings: Settings = None,
    *,
    video: VideoOptions,
    overwrite: Overwrite = False,
) -> None:
    """A prompt in, an mp4 out, and a JSON record that repeats it; with --prompts a folder of them,
    finished ones kept.
    """
    if (prompt is None) == (prompts is None):
        raise ValueError(
            "prompt: expected either a prompt or --prompts FILE, got "
            + ("neither" if prompt is None else "both")
            + "; pass one."
        )
    with waiting(IMPORTING):
        from parkattn.park import ParkConfig
        from parklab.studio.generate import generate_video
        from parklab.studio.request import Request

    preset = ParkConfig.DEFAULT_PROFILE if preset is None and method == "park" else preset
    changes = changes_from(settings)
    request = Request(prompt=prompt or "", method=method, preset=preset, changes=changes, **asdict(video))
    if prompts is not None:
        _generate_many(request, prompts, out if out is not None else Path("out/videos"), overwrite)
        return
    out = out if out is not None else Path("out/video.mp4")
    with interruptible(f"{out} is as it was, or finished; run again to go on"), step_bars() as bars:
        record, made = generate_video(
            request, out, overwrite=overwrite, progress=bars.begin(method), stage=bars.stage, say=say
        )
    if made:
        _show_generated(record, method)
        say(f"wrote {out} and {out.with_suffix('.json').name}")
    else:
        say(f"{out} is done already, with these settings; pass --overwrite to make it again.")


def _show_generated(record: dict[str, Any], method: str) -> None:
    from parklab.studio.gain import what_was_saved, why_no_gain

    found = record["measured"]
    seconds = found["seconds"]
    saved = "" if method == "dense" else f"; {what_was_saved(found)}"
    say(
        f"{method}: {found['density']:.0%} of attention computed, {seconds['denoise']:.1f} s denoising, "
        f"{seconds['decode']:.1f} s decoding{saved}"
    )
    warn(why_no_gain(record))


def _generate_many(request: Request, prompts: Path, out: Path, overwrite: bool) -> None:
    from parklab.studio.gain import why_no_gain
    from parklab.studio.prompts import generate_videos, shard_from_environment

    shard = shard_from_environment()
    who = f"rank {shard.rank} of {shard.ranks}: " if shard.ranks > 1 else ""

    too_short: str | None = None

    def finished(item: Item, place: int, of: int, record: dict[str, Any]) -> None:
        nonlocal too_short
        too_short = why_no_gain(record)
        spent = record["measured"]["seconds"]["total"]
        say(f"{who}{place}/{of} {item.video}, {spent:.1f} s")

    with interruptible(f"finished videos are kept in {out}; run again to go on"), step_bars() as bars:
        # the bars of several processes would write over each other
        steps = (lambda item, place, of: bars.begin(f"{place}/{of}")) if shard.ranks == 1 else None
        outcome = generate_videos(
            request, prompts, out, shard=shard, overwrite=overwrite, progress=steps, finished=finished,
            stage=bars.stage, say=say,
        )  # fmt: skip
    warn(too_short)
    index = f"; index in {outcome.index}" if outcome.index is not None else ""
    say(f"{who}{outcome.made} made, {outcome.kept} done already{index}")


@app.command()
@with_video_options
def compare(
    prompt: Annotated[
        str | None, typer.Argument(help="What to show; a sentence of the shipped model when not given.")
    ] = None,
    methods: Methods = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one prompt per line (# begins a comment): a gallery.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds separated by commas, in the place of --seed: every prompt with each.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for videos, metrics and the page.")] = Path("out/compare"),
    profiles: Profiles = None,
    settings: Settings = None,
    *,
    video: VideoOptions,
    recall_rows: Annotated[
        int, typer.Option(min=0, help="Queries per call on which recall is measured; 0: none.")
    ] = 128,
    overwrite: Overwrite = False,
) -> None:
    """Methods and profiles side by side on the same prompts and seeds: videos, metrics and a page to look at. What is
    finished is kept.
    """
    with waiting(IMPORTING):
        from parklab.studio.compare import DEFAULT_PROMPT, SHORT_METHODS, choose_methods, choose_profiles
        from parklab.studio.compare import compare as run
        from parklab.studio.request import Request

    wanted = choose_profiles(profiles)
    names = choose_methods(SHORT_METHODS if methods is None and len(wanted) > 1 else methods)
    if prompt is not None and prompts is not None:
        raise ValueError("prompt: expected either a prompt or --prompts FILE, got both; pass one.")
    if seeds is not None and video.seed != 0:
        raise ValueError(f"seeds: expected either --seed or --seeds, got {video.seed} and {seeds}; pass one.")
    sentence = DEFAULT_PROMPT if prompt is None else prompt
    request = Request(prompt=sentence, changes=changes_from(settings), **asdict(video))
    with interruptible(f"methods that were finished are kept in {out}; run again to go on"), step_bars() as bars:
        current = {"show": bars.begin(names[0])}

        def announce(method: str, event: str) -> None:
            if event == "kept":
                console.print(f"{method}: done already, kept", highlight=False)
            elif event == "start":
                current["show"] = bars.begin(method)

        report = run(
            request, names, out, profiles=wanted, prompts=prompts, seeds=() if seeds is None else numbers_from(seeds),
            overwrite=overwrite, recall_rows=recall_rows, progress=lambda s: current["show"](s), announce=announce,
            stage=bars.stage, say=say,
        )  # fmt: skip
    _show_comparison(report, request.prompt)
    say(f"open {(out / 'index.html').resolve().as_uri()}")


def _show_comparison(report: dict[str, Any], prompt: str) -> None:
    cases = report.get("cases", [])
    shown = prompt if len(cases) <= 1 else f"means over {len(cases)} prompts and seeds"
    table = Table(
        "method", "PSNR dB", "SSIM", "density", "recall", "denoise s", "speed-up",
        title=f"{report['tokens']:,} tokens: {shown}",
    )  # fmt: skip
    rough = "~" if report["timing_warning"] else ""
    for row in report["methods"]:
        psnr = "equal" if row["psnr"]["mean"] >= 100 else f"{row['psnr']['mean']:.2f}"
        recall = f"{row['recall']['mean']:.3f}" if row["recall"] else ""
        speedup = "" if row["speedup"] is None else f"{rough}{row['speedup']:.2f}x"
        closeness = psnr, f"{row['ssim']['mean']:.4f}", f"{row['density']:.0%}", recall
        table.add_row(row["label"], *closeness, f"{row['seconds']['denoise']:.1f}", speedup)
    console.print(table)
    for row in cases[0]["methods"][1:] if len(cases) == 1 else ():
        say(row["verdict"])
    for note in (report["timing_warning"], _why_slower(report)):
        warn(note)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for videos, metrics and the page.")] = Path("out/demo"),
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Dense attention against PARK with the shipped model on this machine: two videos, their metrics and a page.
    Minutes on a CPU.
    """
    height, width = DEMO_SIZE
    compare(DEMO_PROMPT, methods="dense,park", out=out, seed=seed, height=height, width=width, overwrite=overwrite)


def _why_slower(report: dict[str, Any]) -> str | None:
    """Where attention is a small part of a step, planning costs more than sparse attention can save."""
    dense, *others = report["methods"]
    share = dense["seconds"]["attention"] / dense["seconds"]["denoise"]
    slower = [row["label"] for row in others if row["speedup"] is not None and row["speedup"] < 1]
    if not slower or share > 0.5:
        return None
    return (
        f"Slower than dense: {' and '.join(slower)}, because at {report['tokens']:,} tokens attention is only "
        f"{share:.0%} of dense denoising; make the video longer or larger to see a gain."
    )


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    model: Annotated[str, typer.Option(help="Model of the estimate.")] = ESTIMATED_MODEL,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of its video; the model's when not given.")] = None,
    height: Annotated[int, typer.Option(min=16, help="Pixels.")] = 720,
    width: Annotated[int, typer.Option(min=16, help="Pixels.")] = 1280,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Denoising steps.")] = 50,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale; 1 is one forward per step.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="paper, quality, fast or turbo; the first three when not given.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of the estimate, such as H200 or 4090; this machine's when not given.")
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Of the sparse steps, by arithmetic; each profile's when not given."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of forecasts; each profile's when not given.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Of Q K^T in the profiles: bf16 or int8.")] = "bf16",
) -> None:
    """Is this machine ready, what will each stage use, and what is to be gained? Exit code 1 where something is
    broken.
    """
    from parklab.studio.doctor import examine, shown_examination

    found = examine(
        model=model, frames=frames, height=height, width=width, gpu=gpu, steps=steps, guidance=guidance,
        profile=profile, density=density, tolerance=tolerance, precision=precision,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for part in shown_examination(found, ESTIMATED_MODEL):
            console.print(part, highlight=False)
    raise typer.Exit(0 if found["healthy"] else 1)


def numbers_from(seeds: str) -> tuple[int, ...]:
    try:
        return tuple(int(seed) for seed in seeds.split(","))
    except ValueError:
        raise ValueError(f"seeds: expected whole numbers separated by commas, got {seeds!r}; write 0,1,2.") from None


def changes_from(settings: list[str] | None) -> dict[str, Any]:
    """The settings of --set NAME=VALUE."""
    changes = {}
    for entry in settings or []:
        name, sign, value = entry.partition("=")
        if not sign:
            raise ValueError(f"--set: expected NAME=VALUE, got {entry!r}; write for example --set top_p=0.8.")
        changes[name.strip()] = value_from(value)
    return changes


def value_from(text: str) -> Any:
    """As JSON or as Python writes it; what neither reads is a text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if PYTHON.fullmatch(text) is None:
        return text
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))  # tuples as records have them
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
