"""`park bench cpu | decisions | methods | official | pama | kmeans | qrkc | attend | layer | scaling | flashinfer |
models | sanitize | card | gpu`: gate, measure, table, record.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

from parklab.bench.display import console, run_measures, show_and_keep, shown_in

app = typer.Typer(
    no_args_is_help=True, help="Measure speed; every result has a correctness gate before it and a record beside it."
)

Record = Annotated[Path | None, typer.Option(help="Append the results to this JSON-lines file.")]
Repeats = Annotated[int, typer.Option(min=1, help="Calls per median.")]
Rehearse = Annotated[bool, typer.Option(help="Tiny sizes; with TRITON_INTERPRET=1 on the CPU.")]


@app.command("cpu")
def cpu(record: Record = None, repeats: Repeats = 5, threads: Annotated[int, typer.Option(min=1)] = 2) -> None:
    """Sparse against dense attention on the CPU at densities 0.5, 0.25 and 0.1."""
    from parklab.bench.cpu import DENSITIES, measure_cpu, rounds

    with Progress(
        TextColumn("{task.description:28}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("scene", total=rounds(len(DENSITIES), repeats))

        def advance(doing: str) -> None:
            progress.update(task, advance=1, description=doing)
            if not console.is_terminal:  # a log shows lines, no bar
                console.print(doing, highlight=False)

        records = list(measure_cpu(repeats=repeats, threads=threads, advance=advance))
    table = Table(
        "density",
        "dense ms",
        "sparse ms",
        "speed-up",
        "plan ms",
        "calls to break even",
        title="4 heads, 8,192 tokens, dim 64",
    )
    for row in records:
        table.add_row(
            *(
                str(row[name])
                for name in ("density", "dense_ms", "sparse_ms", "speedup", "plan_ms", "calls_to_break_even")
            )
        )
    show_and_keep(table, records, record)


@app.command("decisions")
def decisions(record: Record = None) -> None:
    """The settings the paper leaves open (iterations, seed, warm start, ...), one at a time, by recall."""
    from parklab.bench.decisions import measure_decisions

    records = list(track(measure_decisions(), "measuring", total=42, console=console, transient=True))
    table = Table("choice", "value", "recall", "density", "QK-score error")
    for row in records:
        value = ", ".join(f"{name} = {setting}" for name, setting in row["value"].items())
        table.add_row(row["choice"], value, *(str(row[name]) for name in ("recall", "density", "score_error")))
    show_and_keep(table, records, record)


@app.command("pama")
def pama(record: Record = None, repeats: Repeats = 7, rehearse: Rehearse = False) -> None:
    """Fused PAMA against PyTorch: the paper's table, TileLang's rows included where the extra is installed."""
    run_measures(
        "pama",
        record,
        repeats,
        rehearse,
        ("shape.name", "kernel", "ms", "speedup", "extra_mb", "memory_reduction", "share_of_roofline"),
    )


@app.command("kmeans")
def kmeans(record: Record = None, repeats: Repeats = 7, rehearse: Rehearse = False) -> None:
    """One k-means iteration against flash-kmeans (where installed) and the GEMM alone."""
    run_measures(
        "kmeans",
        record,
        repeats,
        rehearse,
        ("shape.clusters", "iteration_ms", "flash_kmeans_ms", "speedup", "gemm_ms_at_roofline"),
    )


@app.command("qrkc")
def qrkc(record: Record = None, repeats: Repeats = 7, rehearse: Rehearse = False) -> None:
    """What QRKC adds to k-means."""
    run_measures("qrkc", record, repeats, rehearse, ("ms", "metric_ms", "cholesky_ms", "transform_ms", "means_ms"))


@app.command("attend")
def attend(
    record: Record = None,
    repeats: Repeats = 7,
    rehearse: Rehearse = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A case, as 'wan2.1-14b, density 0.25', with the presets' borders alone; repeatable."),
    ] = None,
) -> None:
    """A reuse step's sparse attention against dense attention, FlashAttention-3 and FlashInfer (where installed)."""
    from parkattn.checks import expect_choice
    from parklab.bench.attend import CASES

    for name in only or ():
        expect_choice("only", name, CASES)
    columns = ("case", "kernel", "ms", "ratio", "useful_tflops", "share_of_roofline")
    run_measures("attend", record, repeats, rehearse, columns, measured={"only": tuple(only or ())})


@app.command("dense")
def dense(
    record: Record = None,
    repeats: Repeats = 7,
    rehearse: Rehearse = False,
    full_gate: Annotated[
        bool, typer.Option("--full-gate", help="Check every head dimension and dtype, not only what is timed.")
    ] = False,
    barred: Annotated[bool, typer.Option("--barred", help="Dense attention of Wan2.1-14B's shape alone.")] = False,
) -> None:
    """Dense attention in our kernel beside cuDNN's and FlashAttention-3's, an anchor step, the cost of the residual."""
    columns, measured = ("case", "kernel", "ms", "ratio"), {"barred": barred}
    run_measures("dense", record, repeats, rehearse, columns, measured=measured, full=full_gate)


@app.command("methods")
def methods(
    record: Record = None,
    repeats: Repeats = 3,
    rehearse: Rehearse = False,
    method: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:ENTRY", help="A method of yours beside the others; repeatable.")
    ] = None,
) -> None:
    """What each method's plan, attention and a forward of two blocks cost at the sizes of real videos, at its authors'
    settings.
    """
    from parkattn.methods import register_from

    for where in method or ():
        register_from(where)
    costs = (
        "density",
        "plan_ms",
        "later_plan_ms",
        "attend_ms",
        "repair_ms",
        "plan_mb",
        "attend_mb",
        "forward_s",
        "failure",
    )
    run_measures("methods", record, repeats, rehearse, ("shape", "method", *costs))


@app.command("official")
def official(record: Record = None, repeats: Repeats = 7, rehearse: Rehearse = False) -> None:
    """The authors' own kernels beside ours, for time only: FlashInfer, comfy-kitchen, sageattention, fastvideo-kernel,
    where installed.
    """
    columns = ("kernel", "version", "compiled", "method", "tokens", "official_ms", "ours_ms", "ours_plan_ms", "absent")
    run_measures("official", record, repeats, rehearse, columns)


@app.command("layer")
def layer(record: Record = None, repeats: Repeats = 5, rehearse: Rehearse = False) -> None:
    """One whole layer: plan, refresh step, reuse step."""
    run_measures("layer", record, repeats, rehearse, ("part", "ms", "ratio", "density", "extra_mb"))


@app.command("scaling")
def scaling(
    record: Record = None,
    repeats: Repeats = 5,
    rehearse: Rehearse = False,
    plot: Annotated[Path | None, typer.Option(help="Draw to this file (svg, png, pdf).")] = None,
    drawn_from: Annotated[Path | None, typer.Option("--from", help="Draw these records and measure nothing.")] = None,
) -> None:
    """Cost over density and over length, with fitted exponents and a plot."""
    from parklab.bench.scaling import draw

    if drawn_from is None:
        if plot is not None and record is None:
            raise typer.BadParameter("--plot draws what --record holds: give --record too, or --from.")
        run_measures(
            "scaling", record, repeats, rehearse, ("over", "part", "density", "length", "ms", "exponent"), gate="attend"
        )
        drawn_from = record
    if plot is not None and drawn_from is not None:
        draw(drawn_from, plot)
        console.print(f"wrote {plot}", markup=False)


@app.command("flashinfer")
def flashinfer(record: Record = None, repeats: Repeats = 7) -> None:
    """FlashInfer's variable-block attention behind our seam: its plan, its kernel, a whole reuse step."""
    run_measures("flashinfer", record, repeats, False, ("part", "ms", "ratio", "useful_tflops"))


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

    from parkattn.files import expect_place, write_atomically
    from parklab.bench.card import COLUMNS, card_device, facts_of, measure, shape_for

    expect_place(out)  # before the minutes
    device = card_device()
    shape, facts = shape_for(device), facts_of(device)
    if facts["rehearsal"]:
        console.print("rehearsal: no CUDA GPU is used, sizes are tiny and times mean nothing", highlight=False)
    title = f"{facts.get('gpu', facts['cpu'])}: {shape.heads} heads, {shape.tokens:,} tokens, head dim {shape.dim}"
    rows, table = [], Table(*COLUMNS, title=title)
    for row in measure(device, repeats=repeats, budget_s=budget, advance=partial(console.print, highlight=False)):
        rows.append(row)
        table.add_row(*(shown_in(row, column) for column in COLUMNS))
    console.print(table)
    for row in rows:
        if row["note"]:
            console.print(f"{row['dtype']} {row['work']} {row['kernel']}: {row['note']}", highlight=False)
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
    from parkattn.checks import expect_choice
    from parklab.bench.sanitize import ROUNDS, run_rounds
    from parklab.record import append_records

    for name in only or ():
        expect_choice("only", name, ROUNDS)
    table, ok = Table("tool", "errors", "must find", "checks passed", "ok"), True
    for line in track(run_rounds(only, limit), "watching", total=len(only or ROUNDS), console=console, transient=True):
        ok &= line["ok"]
        table.add_row(*(shown_in(line, column) for column in ("tool", "errors", "must_find", "checks_passed", "ok")))
        if record is not None:
            append_records(record, [line])
    console.print(table)
    if not ok:
        raise typer.Exit(1)
