"""Which half of PARK earns what: held-out prompts x seeds x methods at equal density, PSNR against dense attention.

Every method gets the budget (top_k or top_p) at which its density on calibration calls is the asked one. Those calls
are queries and keys of a dense run on a held-out prompt that is not in the table; the densities that really came out
are in the table beside the PSNR. The floor is dense attention against itself: what PSNR says when nothing was changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

from parkattn.checks import expect_choice, expect_count
from parkattn.methods import METHODS as ALL_METHODS
from parkattn.methods import method_entry
from parkattn.reuse import dense_prefix
from parkattn.settings import Timetable
from parklab.experiments.calibration import MATCHED, budget_field, find_budget
from parklab.experiments.captures import Selection, capture_calls, spread_layers
from parklab.experiments.evaluation import FLOOR, Evaluation
from parklab.experiments.runner import Lab
from parklab.experiments.tables import Column, Table, columns_of
from parklab.experiments.tables import to_markdown as table_markdown
from parklab.record import environment
from parklab.research import studied_entry
from parklab.sprites.grammar import held_out_scenes
from parklab.store import Cell, CellWriter, Content, Record, Say, Store
from parklab.studio.request import Request, config_for, expect_settings_used, fit_to_pipeline, for_method, named_files

METHODS = ("park", "park-no-pama", "park-no-qrkc", "centroid")
BUDGETS = ("top_k", "top_p")
MEASURES = "psnr,ssim"
CALIBRATION_STEPS = 3
SETTINGS, TABLE = "parkattn.ablation.settings.1", "parkattn.ablation.table.1"
COLUMNS = columns_of(
    "method | runs | PSNR dB:2 | ±:2 | SSIM:4 | density:3 | recall:3 | PARK ahead by dB:2 | standard error:2 | "
    "PARK ahead in"
)
# of those columns
FIELDS = ("method", "runs", "psnr", "psnr_std", "ssim", "density", "recall", "park_ahead_by", "standard_error")


def ablation_of(prompts: int, **given: Any) -> Evaluation:
    """Held-out prompts of the shipped model, and one to calibrate on."""
    expect_count("prompts", prompts)
    scenes = held_out_scenes(prompts)
    spare = next(scene for scene in held_out_scenes(4, seed=1) if scene not in scenes)
    sentences = tuple(scene.sentence for scene in scenes)
    return Evaluation(prompts=sentences, spare_prompt=spare.sentence, measures=MEASURES, keep="records", **given)


def budgeted_methods(asked: str | None) -> tuple[str, ...]:
    """Names out of "a,b"; "all": every method whose density can be set."""
    if asked == "all":
        return tuple(name for name, entry in ALL_METHODS.items() if entry.budgets)
    return tuple(asked.split(",")) if asked else METHODS


def run_ablation(
    evaluation: Evaluation, out: Path, *, budget: str = "top_p", overwrite: bool = False, say: Say = lambda line: None
) -> dict[str, Any]:
    """settings.json with the budgets, a cell per run in cells/, and from them results.jsonl, table.json and table.md in
    `out`.
    """
    e = evaluation
    expect_choice("budget", budget, BUDGETS)
    for name in e.methods:
        budget_field(name, budget)
    lab = Lab(e, out, say)
    request = dataclasses.replace(lab.spare(), method="park", changes=e.changes, file_hashes=named_files(e.changes))
    expect_settings_used(request, e.methods)
    for name in e.methods:
        _expect_sparse_steps(for_method(request, name))
    asked = {"prompts": len(e.prompts), "seeds": e.seeds, "methods": e.methods, "density": e.densities[0]}
    facts = {"request": request.to_dict(), "settings": {**asked, "budget": budget}}

    def calibrated(making: CellWriter) -> None:
        found = calibrate(lab, request, budget, say)
        making.commit({"format": SETTINGS, "request": facts, "budgets": found, "environment": environment()})

    store = Store(out, say)
    settings = Cell(name="settings", format=SETTINGS, request=facts)
    budgets = store.fill([settings], calibrated, overwrite=overwrite)["settings"]["budgets"]
    changes: dict[str, dict[str, Any]] = {FLOOR: {}} | {
        name: method_entry(name).budget(budget_field(name, budget), budgets[name]["value"]) for name in e.methods
    }
    cells = [
        lab.quality_cell(each, name, **changes[name])
        for each in lab.requests() for name in [*([FLOOR] if each.seed == e.seeds[0] else []), *e.methods]
    ]  # fmt: skip

    def made(record: Record) -> None:
        row = _row(record)
        say(
            f"{row['prompt']}, seed {row['seed']}, {row['method']}: "
            f"{row['psnr']:.2f} dB at density {row['density'] or 1:.3f}"
        )

    records = list(lab.need(cells, overwrite=overwrite, made=made).values())
    # what each row was made with stays in its line: a resumed run may have seen two machines
    lines = b"".join(
        json.dumps(_row(r) | {"environment": r["environment"]}, sort_keys=True).encode() + b"\n" for r in records
    )
    table = tabulate([_row(r) for r in records], e.methods)
    table |= {"settings": facts, "budgets": budgets, "environment": environment()}
    contents: dict[str, Content] = {"results.jsonl": lines, "table.md": to_markdown(table).encode()}
    return store.put(Cell(name="table", format=TABLE, files=tuple(contents)), {"format": TABLE, **table}, contents)


def _expect_sparse_steps(request: Request) -> None:
    """Without one every method is dense, and its density is no density."""
    config = studied_entry(request.method).config.for_model(None, **request.changes)
    if isinstance(config, Timetable) and request.steps is not None:
        dense = dense_prefix(config, request.steps) + config.dense_last_steps
        if dense >= request.steps:
            raise ValueError(
                f"steps: expected more than the {dense} that are dense with these settings, got {request.steps}; "
                "raise it."
            )


def calibrate(lab: Lab, request: Request, budget: str, say: Say) -> dict[str, dict[str, float]]:
    """The budget of each method at which the captured calls that it leaves sparse have the asked density."""
    request, density = fit_to_pipeline(request, lab.pipe), lab.evaluation.densities[0]
    assert request.steps
    park = config_for(for_method(request, "park"), lab.pipe)
    assert isinstance(park, Timetable)
    begin = dense_prefix(park, request.steps)
    apart = (request.steps - 1 - begin) / max(1, CALIBRATION_STEPS - 1)
    steps = tuple(sorted({round(begin + i * apart) for i in range(CALIBRATION_STEPS)}))
    layers = tuple(spread_layers(lab.pipe))
    chosen = Selection(steps=steps, layers=layers, values=True, first_branch=True, thin_heads=True)
    calls = [call.to(request.device) for call in capture_calls(lab.pipe, for_method(request, "dense"), chosen)]
    found = {}
    for name in lab.evaluation.methods:
        each = find_budget(
            name, config_for(for_method(request, name), lab.pipe), density, calls, budget_field(name, budget)
        )
        found[name] = {"value": each["value"], "density": each["density"]}
        got = f"{each['value']:.4f} gives density {each['density']:.3f}"
        say(f"{name}: {each['field']} = {got} on the calibration calls")
        if abs(each["density"] - density) > MATCHED:
            say(f"{name}: no {each['field']} comes nearer to density {density}; read its row with its density.")
    return found


def tabulate(rows: list[dict[str, Any]], methods: tuple[str, ...]) -> dict[str, Any]:
    """Means, spread, and the paired advantage of PARK over each method."""
    by_method = {name: {(r["prompt"], r["seed"]): r for r in rows if r["method"] == name} for name in (*methods, FLOOR)}
    park = by_method.get("park", {})
    lines: list[dict[str, Any]] = []
    for name, runs in by_method.items():
        if not runs:
            continue
        rivals = {} if name in ("park", FLOOR) else park
        ahead = [rivals[key]["psnr"] - r["psnr"] for key, r in runs.items() if key in rivals]
        psnr = [r["psnr"] for r in runs.values()]
        lines.append({
            "method": name, "runs": len(psnr), "psnr": statistics.fmean(psnr),
            "psnr_std": statistics.stdev(psnr) if len(psnr) > 1 else None,
            "ssim": statistics.fmean(r["ssim"] for r in runs.values()),
            "density": _mean([r["density"] for r in runs.values()]),
            "recall": _mean([r["recall"] for r in runs.values()]), "park_ahead_by": _mean(ahead),
            "park_ahead_in": sum(a > 0 for a in ahead) if ahead else None,
            "standard_error": statistics.stdev(ahead) / math.sqrt(len(ahead)) if len(ahead) > 1 else None,
        })  # fmt: skip
    mean = {line["method"]: line["psnr"] for line in lines}
    halves = ("park-no-pama", "park-no-qrkc")
    pairs = [*(("park", half) for half in halves), *((half, "centroid") for half in halves)]
    claims = {f"{up} above {low}": mean[up] > mean[low] for up, low in pairs if up in mean and low in mean}
    return {"lines": lines, "claims": claims, "rows": rows}


def to_markdown(table: dict[str, Any]) -> str:
    asked, lines = table["settings"]["settings"], table["lines"]
    budget = f"{asked['budget']}, or a method's own budget where it has none, calibrated per method"
    counts = ["" if line["park_ahead_in"] is None else f"{line['park_ahead_in']} of {line['runs']}" for line in lines]
    means = Table(
        COLUMNS, tuple((*(line[name] for name in FIELDS), count) for line, count in zip(lines, counts, strict=True))
    )
    psnr: dict[tuple[str, int], dict[str, float]] = {}
    for row in table["rows"]:
        psnr.setdefault((row["prompt"], row["seed"]), {})[row["method"]] = row["psnr"]
    names = [line["method"] for line in lines]
    heads = (*columns_of("prompt | seed"), *(Column(name, 2) for name in names))
    runs = Table(heads, tuple((*case, *(values.get(name) for name in names)) for case, values in psnr.items()))
    return "\n".join([
        f"Mean PSNR against dense attention at density {asked['density']} of the sparse steps ({budget}).\n",
        table_markdown(means),
        *(f"- {claim}: {'yes' if holds else '**no**'}" for claim, holds in table["claims"].items()),
        "", table_markdown(runs),
    ])  # fmt: skip


def _row(record: Record) -> dict[str, Any]:
    asked, found = record["request"], record["row"]
    names = ("psnr", "ssim", "density", "recall", "denoise_seconds", "dense_denoise_seconds")
    row = {name: asked[name] for name in ("prompt", "seed", "method")} | {name: found[name] for name in names}
    return row | {"density": None} if asked["method"] == FLOOR else row


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None
