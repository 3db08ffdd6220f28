"""Which half of PARK earns what: held-out prompts x seeds x methods at equal density, PSNR against dense attention.

Every method gets the budget (top_k or top_p) at which its density on calibration calls is the asked one. Those calls are
queries and keys of a dense run on a held-out prompt that is not in the table; the densities that really came out are in
the table beside the PSNR. The floor is dense attention against itself: what PSNR says when nothing was changed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from parkattn.checks import expect_choice, expect_count, expect_fraction
from parkattn.dense import Dense
from parkattn.methods import METHODS as ALL_METHODS
from parkattn.methods import make_method, method_entry
from parkattn.planned import PlannedMethod
from parkattn.reuse import dense_prefix
from parkattn.settings import LARGEST_SEED, MethodConfig, When
from parkattn.site import AttentionOutput, CallSite
from parklab.metrics import fidelity
from parklab.metrics.budget import density_of_sparse_calls, solve_budget
from parklab.record import environment
from parklab.sprites.grammar import held_out_scenes
from parklab.store import Cell, Content, Making, Record, Say, Store, content_hash
from parklab.studio import checkpoints, generate
from parklab.studio.generate import Request, config_for, expect_settings_used, fit_to_pipeline, for_method, generate_frames, prepare

METHODS = ("park", "park-no-pama", "park-no-qrkc", "centroid")
BUDGETS = ("top_k", "top_p")
FLOOR = "dense again"
# at the default size of 1,920 tokens; blocks of the paper's size would be 3 and 13
BLOCKS = {"query_clusters": 8, "key_clusters": 32}
CALIBRATION_STEPS, CALIBRATION_LAYERS = 3, 6
FAR = 0.05  # of density: from here on a row is not at the asked one
SETTINGS, ROW, TABLE = "parkattn.ablation.settings.1", "parkattn.ablation.row.1", "parkattn.ablation.table.1"


@dataclass(frozen=True, kw_only=True)
class AblationSettings:
    prompts: int = 8
    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] = METHODS
    density: float = 0.5
    budget: str = "top_p"

    def __post_init__(self) -> None:
        expect_count("prompts", self.prompts)
        expect_fraction("density", self.density, zero=False)
        expect_choice("budget", self.budget, BUDGETS)
        if not self.methods or not self.seeds:
            raise ValueError("methods, seeds: expected at least one of each, got none; name some, separated by commas.")
        for seed in self.seeds:
            expect_count("seeds", seed, least=0, most=LARGEST_SEED)
        for name in self.methods:
            if not method_entry(name).budgets:
                raise ValueError(f"methods: expected methods with a budget, got {name!r}, whose density cannot be set; leave it out.")


def budgeted_methods(asked: str | None) -> tuple[str, ...]:
    """Names out of "a,b"; "all": every method whose density can be set."""
    if asked == "all":
        return tuple(name for name, entry in ALL_METHODS.items() if entry.budgets)
    return tuple(asked.split(",")) if asked else METHODS


class CallRecorder(Dense):
    """Dense attention that keeps the queries and keys of a few calls."""

    def __init__(self, steps: set[int], layers: set[int]) -> None:
        self.steps, self.layers = steps, layers
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor, CallSite]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        if site.step in self.steps and site.layer in self.layers and site.key_valid is None:
            # the first branch of a step speaks for the others
            self.kept.setdefault((site.step, site.layer), (q.clone(), k.clone(), dataclasses.replace(site, dense=None, values=v.clone())))
        return super().__call__(q, k, v, site)


def run_ablation(
    request: Request, settings: AblationSettings, out: Path, *, overwrite: bool = False, say: Say = lambda line: None
) -> dict[str, Any]:
    """settings.json with the budgets, a record per run in rows/, and from them results.jsonl, table.json and table.md in `out`."""
    scenes = held_out_scenes(settings.prompts)
    spare = next(scene for scene in held_out_scenes(4, seed=1) if scene not in scenes)
    expect_settings_used(request, settings.methods)
    prepared, folder = prepare(dataclasses.replace(for_method(request, "dense"), prompt=spare.sentence))
    asked = {name: getattr(request, name) for name in ("method", "preset", "changes")}
    request = dataclasses.replace(prepared, **asked, file_hashes=generate.named_files(request.changes))
    for name in settings.methods:
        _expect_sparse_steps(for_method(request, name))
    if not checkpoints.is_shipped(folder):
        raise ValueError(
            f"model: expected the shipped model, whose held-out prompts are known, got {request.model}; use park compare for others."
        )
    facts = {"request": request.to_dict(), "settings": dataclasses.asdict(settings)}
    model = _Model(request, folder)

    def budget(making: Making) -> None:
        found = calibrate(model.pipe, model.request, settings, say)
        making.commit({"format": SETTINGS, "request": facts, "budgets": found, "environment": environment()})

    calibrated = Store(out, say).fill([Cell(name="settings", format=SETTINGS, request=facts)], budget, overwrite=overwrite)
    budgets = calibrated["settings"]["budgets"]
    cells = []
    for scene in scenes:
        for seed in settings.seeds:
            for name in [*([FLOOR] if seed == settings.seeds[0] else []), *settings.methods]:
                value = None if name == FLOOR else budgets[name]["value"]
                cells.append(_row_cell(facts, scene.sentence, seed, name, value))
    references: dict[tuple[str, int], Any] = {}

    def measure(making: Making) -> None:
        prompt, seed, name, value = (making.cell.request[part] for part in ("prompt", "seed", "method", "budget"))
        asked = dataclasses.replace(model.request, prompt=prompt, seed=seed)
        if (prompt, seed) not in references:
            references.clear()
            references[prompt, seed] = generate_frames(model.pipe, for_method(asked, "dense"), MethodConfig(), recall_rows=0)
        asked = for_method(asked, "dense" if name == FLOOR else name)
        config = config_for(asked, model.pipe)
        budgeted = config if name == FLOOR else _with_budget(name, config, settings.budget, value)
        made = generate_frames(model.pipe, asked, budgeted)
        row = _row(prompt, seed, name, made, references[prompt, seed])
        making.commit({"format": ROW, "request": dict(making.cell.request), "row": row, "environment": environment()})
        say(f"{prompt}, seed {seed}, {name}: {row['psnr']:.2f} dB at density {row['density'] or 1:.3f}")

    rows = Store(out, say, "rows").fill(cells, measure, overwrite=overwrite)
    return _write_table(list(rows.values()), settings, facts, budgets, Store(out, say))


def _expect_sparse_steps(request: Request) -> None:
    """Without one every method is dense, and its density is no density."""
    config = method_entry(request.method).config.for_model(None, **request.changes)
    if isinstance(config, When) and request.steps is not None:
        dense = dense_prefix(config, request.steps) + config.dense_last_steps
        if dense >= request.steps:
            raise ValueError(f"steps: expected more than the {dense} that are dense with these settings, got {request.steps}; raise it.")


class _Model:
    """The pipeline, loaded when the first run needs it: a finished ablation loads nothing."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.asked, self.folder = request, folder

    @functools.cached_property
    def pipe(self) -> Any:
        return generate.pipeline_for(self.asked, self.folder)

    @functools.cached_property
    def request(self) -> Request:
        return fit_to_pipeline(self.asked, self.pipe)


def _row_cell(facts: dict[str, Any], prompt: str, seed: int, method: str, budget: float | None) -> Cell:
    """One run. Its name holds its hash: rows of other settings in the same folder are other files."""
    asked = facts["request"] | {"prompt": prompt, "seed": seed, "method": method, "budget": budget, "by": facts["settings"]["budget"]}
    words = "-".join(f"{prompt} {seed}".split())
    name = f"{words}-{method.replace(' ', '-')}-{content_hash(asked)[:12]}"
    # a group shares its dense reference
    return Cell(name=name, format=ROW, request=asked, group=f"{prompt} {seed}")


def _write_table(
    records: list[Record], settings: AblationSettings, facts: dict[str, Any], budgets: dict[str, Any], store: Store
) -> dict[str, Any]:
    """Without what each row was made with, which stays in its line: a resumed run may have seen two machines."""
    lines = b"".join(json.dumps(r["row"] | {"environment": r["environment"]}, sort_keys=True).encode() + b"\n" for r in records)
    table = tabulate([r["row"] for r in records], settings) | {"settings": facts, "budgets": budgets, "environment": environment()}
    contents: dict[str, Content] = {"results.jsonl": lines, "table.md": to_markdown(table).encode()}
    return store.put(Cell(name="table", format=TABLE, files=tuple(contents)), {"format": TABLE, **table}, contents)


def calibrate(pipe: Any, request: Request, settings: AblationSettings, say: Say) -> dict[str, dict[str, float]]:
    """The budget of each method at which the recorded calls that it leaves sparse have the asked density."""
    assert request.steps
    park = config_for(for_method(request, "park"), pipe)
    assert isinstance(park, When)
    begin = dense_prefix(park, request.steps)
    steps = {round(begin + i * (request.steps - 1 - begin) / max(1, CALIBRATION_STEPS - 1)) for i in range(CALIBRATION_STEPS)}
    count = len(pipe.transformer.blocks)
    layers = {round(i * (count - 1) / max(1, min(count, CALIBRATION_LAYERS) - 1)) for i in range(min(count, CALIBRATION_LAYERS))}
    recorder = CallRecorder(steps, layers)
    generate_frames(pipe, request, MethodConfig(), method=recorder, recall_rows=0, decode=False)
    found = {}
    for name in settings.methods:
        config = config_for(for_method(request, name), pipe)

        def density(value: float, name: str = name, config: MethodConfig = config) -> float:
            method = make_method(name, _with_budget(name, config, settings.budget, value))
            assert isinstance(method, PlannedMethod)
            return density_of_sparse_calls(method, recorder.kept.values())

        value, reached = solve_budget(density, settings.density)
        found[name] = {"value": value, "density": reached}
        say(f"{name}: {_budget_of(name, settings.budget)} = {value:.4f} gives density {reached:.3f} on the calibration calls")
        if abs(reached - settings.density) > FAR:
            say(
                f"{name}: no {_budget_of(name, settings.budget)} comes nearer to density {settings.density}; read its row with its density."
            )
    return found


def tabulate(rows: list[dict[str, Any]], settings: AblationSettings) -> dict[str, Any]:
    """Means, spread, and the paired advantage of PARK over each method."""
    by_method = {name: {(r["prompt"], r["seed"]): r for r in rows if r["method"] == name} for name in (*settings.methods, FLOOR)}
    park = by_method.get("park", {})
    lines: list[dict[str, Any]] = []
    for name, runs in by_method.items():
        if not runs:
            continue
        values = [r["psnr"] for r in runs.values()]
        ahead = [park[key]["psnr"] - r["psnr"] for key, r in runs.items() if key in park] if name not in ("park", FLOOR) else []
        lines.append({
            "method": name, "runs": len(values), "psnr": statistics.fmean(values),
            "psnr_std": statistics.stdev(values) if len(values) > 1 else None,
            "ssim": statistics.fmean(r["ssim"] for r in runs.values()),
            "density": _mean([r["density"] for r in runs.values()]), "recall": _mean([r["recall"] for r in runs.values()]),
            "park_ahead_by": _mean(ahead), "park_ahead_in": sum(a > 0 for a in ahead) if ahead else None,
            "standard_error": statistics.stdev(ahead) / math.sqrt(len(ahead)) if len(ahead) > 1 else None,
        })  # fmt: skip
    mean = {line["method"]: line["psnr"] for line in lines}
    claims = {}
    for upper, lower in (("park", "park-no-pama"), ("park", "park-no-qrkc"), ("park-no-pama", "centroid"), ("park-no-qrkc", "centroid")):
        if upper in mean and lower in mean:
            claims[f"{upper} above {lower}"] = mean[upper] > mean[lower]
    return {"lines": lines, "claims": claims, "rows": rows}


def to_markdown(table: dict[str, Any]) -> str:
    def show(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    asked = table["settings"]["settings"]
    text = [
        f"Mean PSNR against dense attention at density {asked['density']} of the sparse steps ({asked['budget']}, or a method's own budget where it has none, calibrated per method).",
        "",
    ]
    text += [
        "| method | runs | PSNR dB | ± | SSIM | density | recall | PARK ahead by dB | standard error | PARK ahead in |",
        "|" + "---|" * 10,
    ]
    for line in table["lines"]:
        cells = [line["method"], str(line["runs"]), show(line["psnr"], 2), show(line["psnr_std"], 2), show(line["ssim"], 4)]
        cells += [show(line["density"], 3), show(line["recall"], 3), show(line["park_ahead_by"], 2), show(line["standard_error"], 2)]
        cells.append("" if line["park_ahead_in"] is None else f"{line['park_ahead_in']} of {line['runs']}")
        text.append("| " + " | ".join(cells) + " |")
    text += ["", *(f"- {claim}: {'yes' if holds else '**no**'}" for claim, holds in table["claims"].items()), ""]
    names = [line["method"] for line in table["lines"]]
    text += ["| prompt | seed | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 2)]
    for prompt, seed in dict.fromkeys((r["prompt"], r["seed"]) for r in table["rows"]):
        values = {r["method"]: r["psnr"] for r in table["rows"] if (r["prompt"], r["seed"]) == (prompt, seed)}
        text.append(f"| {prompt} | {seed} | " + " | ".join(show(values.get(name), 2) for name in names) + " |")
    return "\n".join(text) + "\n"


def _row(prompt: str, seed: int, name: str, made: Any, reference: Any) -> dict[str, Any]:
    found = made.measured
    return {
        "prompt": prompt,
        "seed": seed,
        "method": name,
        "psnr": statistics.fmean(fidelity.psnr_per_frame(made.frames, reference.frames)),
        "ssim": statistics.fmean(fidelity.ssim_per_frame(made.frames, reference.frames)),
        "density": found["density_sparse_steps"],
        "recall": found["recall"]["mean"] if found["recall"] else None,
        "denoise_seconds": found["seconds"]["denoise"],
        "dense_denoise_seconds": reference.measured["seconds"]["denoise"],
    }


def _budget_of(name: str, asked: str) -> str:
    """The field that sets a method's density: the one asked for where it has it."""
    budgets = method_entry(name).budgets
    return asked if asked in budgets else budgets[0]


def _with_budget(name: str, config: MethodConfig, asked: str, value: float) -> MethodConfig:
    return method_entry(name).with_budget(config, _budget_of(name, asked), value)


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None
