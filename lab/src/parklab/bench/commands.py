"""`park bench NAME`: gate, measure, table, record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True, help="Measure speed; every result has a correctness gate before it and a record beside it."
)
console = Console(markup=False, emoji=False)

Record = Annotated[Path | None, typer.Option(help="Append the results to this JSON-lines file.")]
Repeats = Annotated[int, typer.Option(min=1, help="Calls per median.")]
Rehearse = Annotated[bool, typer.Option(help="Tiny sizes; with TRITON_INTERPRET=1 on the CPU.")]


@app.command("cpu")
def cpu(record: Record = None, repeats: Repeats = 5, threads: Annotated[int, typer.Option(min=1)] = 2) -> None:
    """Sparse against dense attention on the CPU at densities 0.5, 0.25 and 0.1."""
    from parklab.bench.cpu import DENSITIES, measure_cpu, rounds

    bar = TextColumn("{task.description:28}"), BarColumn(), TimeElapsedColumn()
    with Progress(*bar, console=console, transient=True) as progress:
        task = progress.add_task("scene", total=rounds(len(DENSITIES), repeats))

        def advance(doing: str) -> None:
            progress.update(task, advance=1, description=doing)
            if not console.is_terminal:  # a log shows lines, no bar
                console.print(doing, highlight=False)

        records = list(measure_cpu(repeats=repeats, threads=threads, advance=advance))
    columns = "density", "dense_ms", "sparse_ms", "speedup", "plan_ms", "calls_to_break_even"
    _show_and_keep(records, columns, record, "4 heads, 8,192 tokens, dim 64")


@app.command("decisions")
def decisions(record: Record = None) -> None:
    """The settings the paper leaves open (iterations, seed, warm start, ...), one at a time, by recall."""
    from parklab.bench.cpu import measure_decisions

    records = track(measure_decisions(), "measuring", total=43, console=console, transient=True)
    _show_and_keep(records, ("choice", "value", "recall", "density", "score_error"), record)


def _add(name: str, line: str, calls: int) -> None:
    """A bench without options of its own."""

    def bench(record: Record = None, repeats: Repeats = calls, rehearse: Rehearse = False) -> None:
        _run_bench(name, record, repeats, rehearse)

    app.command(name, help=line)(bench)


_add("pama", "Fused PAMA against PyTorch: the paper's table.", 7)
_add("kmeans", "One k-means iteration against flash-kmeans (where installed) and the GEMM alone.", 7)
_add("qrkc", "What QRKC adds to k-means.", 7)
_add("layer", "One whole layer: plan, refresh step, reuse step.", 5)
_add("official", "The authors' own kernels beside ours, for time only: FlashInfer, comfy-kitchen, sageattention, "
     "fastvideo-kernel, where installed.", 7)  # fmt: skip


@app.command("flashinfer")
def flashinfer(record: Record = None, repeats: Repeats = 7) -> None:
    """FlashInfer's variable-block attention behind our seam: its plan, its kernel, a whole reuse step."""
    _run_bench("flashinfer", record, repeats, False)


@app.command("attend")
def attend(
    record: Record = None, repeats: Repeats = 7, rehearse: Rehearse = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A case, as 'wan2.1-14b, density 0.25', with the presets' borders alone; repeatable."),
    ] = None,
) -> None:  # fmt: skip
    """A reuse step's sparse attention against dense attention, FlashAttention-3 and FlashInfer (where installed)."""
    from parklab.bench.attend import CASES

    _run_bench("attend", record, repeats, rehearse, only=_expect_known(only, CASES))


@app.command("dense")
def dense(
    record: Record = None, repeats: Repeats = 7, rehearse: Rehearse = False,
    full_gate: Annotated[
        bool, typer.Option("--full-gate", help="Check every head dimension and dtype, not only what is timed.")
    ] = False,
    barred: Annotated[bool, typer.Option("--barred", help="Dense attention of Wan2.1-14B's shape alone.")] = False,
) -> None:  # fmt: skip
    """Dense attention in our kernel beside cuDNN's and FlashAttention-3's, an anchor step, the cost of the residual."""
    _run_bench("dense", record, repeats, rehearse, checked={"full": full_gate}, barred=barred)


@app.command("methods")
def methods(
    record: Record = None, repeats: Repeats = 3, rehearse: Rehearse = False,
    method: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:ENTRY", help="A method of yours beside the others; repeatable.")
    ] = None,
) -> None:  # fmt: skip
    """What each method's plan, attention and a forward of two blocks cost at the sizes of real videos, at its authors'
    settings.
    """
    from parkattn.methods import register_from

    for where in method or ():
        register_from(where)
    _run_bench("methods", record, repeats, rehearse)


@app.command("scaling")
def scaling(
    record: Record = None, repeats: Repeats = 5, rehearse: Rehearse = False,
    plot: Annotated[Path | None, typer.Option(help="Draw to this file (svg, png, pdf).")] = None,
    drawn_from: Annotated[Path | None, typer.Option("--from", help="Draw these records and measure nothing.")] = None,
) -> None:  # fmt: skip
    """Cost over density and over length, with fitted exponents and a plot."""
    from parklab.bench.layer import draw

    if drawn_from is None:
        if plot is not None and record is None:
            raise typer.BadParameter("--plot draws what --record holds: give --record too, or --from.")
        _run_bench("scaling", record, repeats, rehearse)
        drawn_from = record
    if plot is not None and drawn_from is not None:
        draw(drawn_from, plot)
        console.print(f"wrote {plot}", markup=False)


@app.command("e2e")
def e2e(
    record: Record = None,
    full: Annotated[bool, typer.Option("--full", help="With all 50 steps of Wan2.1-1.3B, PARK and dense.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="After compile_repeated_blocks, dense and PARK alike.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="gate, gate-around, wan2.1-1.3b, wan2.1-14b, wan2.1-14b-480p or hunyuanvideo; repeatable."),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="paper: a dense prefix and refreshes; fast, quality: anchors, corrected reuse.")
    ] = "paper",
    density: Annotated[
        float | None, typer.Option(help="Of a reuse forward; default: 0.25, and 0.10 of fast and quality.")
    ] = None,
    float8: Annotated[
        bool, typer.Option("--float8", help="With float8 linears beside bfloat16 ones; by itself or with --precision.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="int8: attention in the model's dtype and in INT8; needs --profile fast.")
    ] = "bf16",
    forecast: Annotated[
        list[int] | None, typer.Option(help="With --full: a step that is forecast; repeatable.")
    ] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="With --precision: stock and that precision; with --float8 those linears alone."),
    ] = False,
    top_k: Annotated[
        float | None, typer.Option(help="With --precision: the share of key blocks, as a record has it; else found.")
    ] = None,
    guidance: Annotated[float, typer.Option(help="With --precision and --full: above 1, two forwards a step.")] = 1.0,
    budget: Annotated[float, typer.Option(help="Seconds for everything.")] = 1200,
    rehearse: Rehearse = False,
) -> None:
    """Whole models at 720p with random weights: forwards of every kind, memory, and what a run gains."""
    from parklab.bench.e2e_turns import SectionOptions, columns_of, run_and_tabulate

    options = SectionOptions(
        full=full, compiled=compiled, rehearse=rehearse, profile=profile, density=density, float8=float8,
        precision=precision, forecast=tuple(forecast or ()), alone=alone, top_k=top_k, guidance=guidance,
    )  # fmt: skip
    outcome, rows = run_and_tabulate(record, options, only=only, budget_s=budget)
    paper = "one forward in each phase; 50 steps: 20 % dense, a refresh every 10 steps"
    anchored = "one forward of each kind; 50 steps against dense: stock, in compiled blocks, in our own kernel"
    linears = (
        "bfloat16 and float8 linears, one forward in each phase; "
        "attention, products and rest of a reuse forward in seconds"
    )
    bits = "one forward of each kind in each precision; 50 steps against stock dense in bfloat16"
    plain = linears if float8 else paper if profile == "paper" else anchored
    title = plain if precision == "bf16" else bits
    table = Table(*columns_of(options), title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if any(result != "passed" for result in outcome.values()):
        raise typer.Exit(1)


@app.command("models")
def models(
    record: Record = None,
    only: Annotated[
        list[str] | None, typer.Option(help="minimax-h3, ltx-2.5, kandinsky-5-pro or cosmos-2.5-14b; repeatable.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds; what is left decides on the forward of all blocks.")] = 200,
    rehearse: Rehearse = False,
) -> None:
    """Two blocks of newer models at real size, random weights: dense, dense in our kernel, sparse; MiniMax-H3 whole."""
    from parkattn.checks import expect_choice
    from parklab.bench.models import run_models
    from parklab.bench.real_models import REAL
    from parklab.bench.timing import bench_device, gpu_environment
    from parklab.extras import package
    from parklab.record import append_records

    for name in only or ():
        expect_choice("only", name, REAL)
    package("diffusers", "park bench models")
    facts = gpu_environment()

    def keep(line: dict[str, Any]) -> None:
        console.print_json(data=line)
        if record is not None:
            append_records(record, [{"rehearsal": rehearse, **line, "environment": facts}])

    # the model with a second part comes last, when it is known how much time is left
    names = sorted(only or REAL, key=lambda name: name == "minimax-h3")
    if not run_models(names, bench_device(), keep, budget_s=budget, rehearse=rehearse):
        raise typer.Exit(1)


@app.command("card")
def card(
    out: Annotated[Path, typer.Option(help="The file to send.")] = Path("card.json"),
    repeats: Repeats = 5,
    budget: Annotated[float, typer.Option(help="Seconds after which no row is begun.")] = 240,
) -> None:
    """Your card in under five minutes: our kernels beside PyTorch's attention and SageAttention, and a file to send."""
    import json

    from parklab.bench.card import COLUMNS, card_device, facts_of, measure, shape_for
    from parklab.files import expect_place, write_atomically

    expect_place(out)  # before the minutes
    device = card_device()
    shape, facts = shape_for(device), facts_of(device)
    if facts["rehearsal"]:
        console.print("rehearsal: no CUDA GPU is used, sizes are tiny and times mean nothing", highlight=False)
    title = f"{facts.get('gpu', facts['cpu'])}: {shape.heads} heads, {shape.tokens:,} tokens, head dim {shape.dim}"
    say = partial(console.print, highlight=False)
    rows = list(measure(device, repeats=repeats, budget_s=budget, advance=say))
    console.print(_table(COLUMNS, rows, title))
    for row in rows:
        if row["note"]:
            say(f"{row['dtype']} {row['work']} {row['kernel']}: {row['note']}")
    write_atomically(out, json.dumps({"environment": facts, "rows": rows}, indent=1, sort_keys=True).encode())
    console.print(f"wrote {out}: docs/cards.md says where to send it", markup=False)
    if not all(row.get("ok", True) for row in rows if row["kernel"].split()[0] in ("gluon", "triton", "definition")):
        raise typer.Exit(1)


@app.command("gpu")
def gpu(
    out: Annotated[Path, typer.Option(help="Folder for gpu.jsonl.")],
    budget: Annotated[float, typer.Option(help="Seconds for all sections.")] = 570,
    rehearse: Rehearse = False,
) -> None:
    """Every gate and every figure in one command of at most ten minutes."""
    from parklab.bench.gpu import run_all

    outcome = run_all(out, budget_s=budget, rehearse=rehearse)
    console.print(f"wrote {out / 'gpu.jsonl'}", markup=False)
    if any(result != "passed" for result in outcome.values()):
        raise typer.Exit(1)


@app.command("sanitize")
def sanitize(
    record: Record = None,
    only: Annotated[list[str] | None, typer.Option(help="memcheck, synccheck, racecheck, ...; repeatable.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds for each.")] = 600,
) -> None:
    """compute-sanitizer and Triton's ConSan over every kernel at small sizes."""
    from parklab.bench.sanitize import ROUNDS, run_rounds

    total = len(_expect_known(only, ROUNDS) or ROUNDS)
    lines = track(run_rounds(only, limit), "watching", total=total, console=console, transient=True)
    columns = "tool", "errors", "must_find", "checks_passed", "ok"
    if not all(line["ok"] for line in _show_and_keep(lines, columns, record)):
        raise typer.Exit(1)


def _run_bench(
    name: str, record: Path | None, repeats: int, rehearse: bool, checked: dict[str, Any] | None = None, **measured: Any
) -> None:
    """checked, measured: what else the gate and the measurement are told."""
    import torch

    from parklab.bench.gates import expect_all_pass
    from parklab.bench.registry import BENCHES
    from parklab.bench.timing import bench_device, gpu_environment, roofline
    from parklab.record import append_records

    device, bench = bench_device(), BENCHES[name]
    torch.manual_seed(0)
    passed = expect_all_pass(_shown_as_they_come(bench.gate(device, rehearse=rehearse, **(checked or {}))))
    console.print(f"gate: {len(passed)} checks passed")
    peak, facts = roofline(device), gpu_environment()
    about = {"rehearsal": rehearse, "environment": facts}
    if record is not None:
        append_records(record, [{"section": next(iter(bench.gates)), **case, **about} for case in passed])
    rows = bench.measure(device, peak, repeats=repeats, rehearse=rehearse, **measured)
    reached = f"{peak['tflops']:.0f} TFLOP/s, {peak['gbytes_per_s']:.0f} GB/s measured in this run"
    title = f"{facts.get('gpu', facts['cpu'])}: {reached}"
    _show_and_keep(rows, bench.columns, record, title, roofline=peak, **about)


def _expect_known(only: list[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    from parkattn.checks import expect_choice

    for name in only or ():
        expect_choice("only", name, known)
    return tuple(only or ())


def _shown_as_they_come(cases: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A gate's checks, a line each: what runs out of time shows how far it came."""
    began = time.monotonic()
    for case in cases:
        console.print(f"{time.monotonic() - began:6.1f} s  {case['gate']}", highlight=False, markup=False)
        yield case


def _show_and_keep(
    rows: Iterable[dict[str, Any]], columns: Iterable[str], record: Path | None, title: str | None = None, **about: Any
) -> list[dict[str, Any]]:
    """Each is kept as soon as it is there; about: what all records say besides."""
    from parklab.record import append_records

    found = []
    for row in rows:
        found.append(row)
        if record is not None:
            append_records(record, [row | about])
    console.print(_table(columns, found, title))
    if record is not None:
        console.print(f"appended to {record}", markup=False)
    return found


def _table(columns: Iterable[str], rows: Iterable[dict[str, Any]], title: str | None = None) -> Table:
    """A column is the name of a field; `a.b` is field b of field a."""
    table = Table(*(column.replace("_", " ") for column in columns), title=title)
    for row in rows:
        table.add_row(*(_shown(row, column) for column in columns))
    return table


def _shown(row: dict[str, Any], column: str) -> str:
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        return ", ".join(f"{name} = {setting}" for name, setting in value.items())
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
