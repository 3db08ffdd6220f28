"""Several methods and profiles on the same prompts and seeds: each video, the side-by-side,
the metrics and the page.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from parkattn.checks import did_you_mean, expect_count
from parkattn.methods import METHODS
from parkattn.park import ParkConfig
from parkattn.settings import LARGEST_SEED, MethodConfig, Timetable
from parklab.metrics import fidelity
from parklab.record import environment
from parklab.sprites.grammar import EXAMPLE
from parklab.store import FINISHED, Cell, CellWriter, Content, Record, Say, Store
from parklab.studio.generate import FORMAT as GENERATION
from parklab.studio.generate import LOADING, READING, Progress, Stage, generate_frames, pipeline_for, write_video
from parklab.studio.observe import RECALL_ROWS
from parklab.studio.page import page_digest, render_page
from parklab.studio.prompts import read_prompts, video_name
from parklab.studio.request import (
    UNSAID,
    Request,
    config_for,
    expect_profile,
    expect_settings_used,
    fit_to_pipeline,
    for_method,
    option_words,
    prepare,
    tokens_of,
    understood,
)
from parklab.studio.scores import (
    flat_line,
    head_lines,
    method_row,
    over_cases,
    timing_warning,
    to_csv,
    variant_label,
    variant_name,
    verdict,
)
from parklab.studio.video import Frames, side_by_side, still, video_library, write_mp4

DEFAULT_PROMPT = EXAMPLE
DEFAULT_METHODS = ("dense", "park", "park-no-pama", "park-no-qrkc", "centroid")
REFERENCE, MAIN = "dense", "park"
SHORT_METHODS = f"{REFERENCE},{MAIN}"  # where none are asked for and there are several profiles
FORMAT = "parkattn.comparison.1"
# what a report reads of a record
WRITTEN = {
    "resolved": ("method", "preset", "changes", "config", "prompt", "fps"),
    "measured": ("steps", "heat", "density", "density_sparse_steps", "recall", "phase_seconds", "seconds"),
    "environment": (), "tokens": (), "command": (),
}  # fmt: skip

Announce = Callable[[str, str], None]  # (cell: a variant, or prompt, seed and variant; "start" | "done" | "kept")


@dataclass(frozen=True)
class Case:
    """One prompt and one seed. name: begins the names of its files; "" where there is one case only."""

    name: str
    prompt: str
    seed: int

    def file(self, rest: str) -> str:
        return f"{self.name}-{rest}" if self.name else rest


def choose_methods(asked: str | None) -> list[str]:
    """Names out of "a,b" or "all"; dense comes first, because the others are measured against it."""
    names = list(
        DEFAULT_METHODS
        if asked is None
        else METHODS
        if asked == "all"
        else filter(None, map(str.strip, asked.split(",")))
    )
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise ValueError(
            f"methods: expected all or some of {', '.join(METHODS)}, got {', '.join(unknown) or repr(asked)}; "
            + did_you_mean(unknown[0] if unknown else asked, METHODS, "separate names by commas.")
        )
    return [REFERENCE, *dict.fromkeys(name for name in names if name != REFERENCE)]


def choose_profiles(asked: str | None) -> list[str]:
    """Names out of "a,b", each once."""
    names = list(dict.fromkeys(filter(None, map(str.strip, (asked or "").split(",")))))
    if asked is not None and not names:
        raise ValueError(f"profile: expected names separated by commas, got {asked!r}; write for example quality,fast.")
    return names


def default_profiles(methods: Sequence[str]) -> list[str]:
    """Where none are asked for: what hosts take, unless no method has profiles."""
    default = ParkConfig.DEFAULT_PROFILE
    return [default] if any(default in METHODS[name].config.PROFILES for name in methods) else []


def choose_variants(request: Request, methods: Sequence[str], profiles: Sequence[str]) -> dict[str, Request]:
    """Name -> the request of every method with every profile that it has; a method that has none of them comes once."""
    variants: dict[str, Request] = {}
    used = set[str | None]()
    for method in methods:
        asked = [for_method(dataclasses.replace(request, preset=profile), method) for profile in profiles or (None,)]
        for each in [own for own in asked if own.preset is not None] or asked[:1]:
            name = variant_name(method, each.preset)
            if name in variants and variants[name] != each:
                raise ValueError(
                    f"profile: expected names that tell methods apart, got {name} twice; leave one of them out."
                )
            variants[name] = each
            used.add(each.preset)
    for profile in profiles:
        if profile not in used:
            expect_profile(MAIN if MAIN in methods else methods[-1], profile)
    return variants


def choose_cases(request: Request, prompts: Path | None = None, seeds: Sequence[int] = ()) -> list[Case]:
    """Every prompt with every seed, the request's own where none are given; names do not depend on a line's place."""
    for seed in seeds:
        expect_count("seeds", seed, least=0, most=LARGEST_SEED)
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds: expected each once, got {', '.join(map(str, seeds))}; remove the second.")
    if prompts is None and len(seeds) <= 1:
        return [Case("", request.prompt, seeds[0] if seeds else request.seed)]
    sentences = [item.prompt for item in read_prompts(prompts)] if prompts is not None else [request.prompt]
    names = {sentence: video_name(sentence).removesuffix(".mp4") for sentence in sentences}
    return [Case(f"{names[text]}-seed-{seed}", text, seed) for text in sentences for seed in seeds or (request.seed,)]


def compare(
    request: Request,
    methods: list[str],
    out: Path,
    *,
    profiles: Sequence[str] = (),
    prompts: Path | None = None,
    seeds: Sequence[int] = (),
    overwrite: bool = False,
    recall_rows: int = RECALL_ROWS,
    progress: Progress | None = None,
    announce: Announce = lambda method, event: None,
    stage: Stage = lambda what: None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Everything under `out`; what is finished there is kept, a report whose videos did not change among it.

    profiles: each in a video of its own, for every method that has it; the request's where none are given, or else the
    default.
    """
    video_library()
    expect_settings_used(request, methods)
    profiles = profiles or (default_profiles(methods) if request.preset is None else [request.preset])
    variants = choose_variants(request, methods, profiles)
    stage(READING)
    cases = choose_cases(request, prompts, seeds)
    requests, folder = prepare_cases(variants, cases)
    places = {case.file(variant): (case, variant) for variant in variants for case in cases}
    store, pipe, warm = Store(out, say), None, set[str]()

    def make(making: CellWriter) -> None:
        nonlocal pipe
        name = making.cell.name
        asked = requests[name]
        announce(name, "start")
        if pipe is None:
            stage(LOADING)
            pipe = pipeline_for(asked, folder)
            for each in requests.values():  # a prompt that is too long is found before the first video
                fit_to_pipeline(each, pipe)
        variant = places[name][1]
        if variant not in warm:
            stage("warming up, untimed" + (": kernels are compiled" if asked.device.startswith("cuda") else ""))
        _run(pipe, asked, making, recall_rows, progress, warm=variant in warm)
        warm.add(variant)
        announce(name, "done")

    cells = [variant_cell(requests[case.file(variant)], case, recall_rows) for case in cases for variant in variants]
    records = store.fill(cells, make, overwrite=overwrite, kept=lambda cell: announce(cell.name, "kept"))
    found: dict[Case, dict[str, Record]] = {case: {} for case in cases}
    for name, record in records.items():
        expect_written(record, out / f"{name}.json")
        case, variant = places[name]
        found[case][variant] = record
    command = repeat_comparison(requests[cells[0].name], request, methods, profiles, out, prompts, seeds, recall_rows)
    stage("measuring the videos and writing the page")
    return write_report(found, out, say, command=command)


def prepare_cases(variants: Mapping[str, Request], cases: Sequence[Case]) -> tuple[dict[str, Request], Path]:
    """The request of every variant in every case, by name, and the folder of their model."""
    requests, folder = {}, Path()
    for variant, own in variants.items():
        asked, folder = prepare(dataclasses.replace(own, prompt=cases[0].prompt, seed=cases[0].seed))
        for case in cases:
            requests[case.file(variant)] = dataclasses.replace(
                asked, prompt=understood(case.prompt, folder), seed=case.seed
            )
    return requests, folder


def expect_written(record: Record, path: Path) -> None:
    """A seal says that nobody changed a record, and not that this version wrote it."""
    for name, fields in WRITTEN.items():
        part = record.get(name)
        lacking = [field for field in fields if not isinstance(part, dict) or field not in part] or (
            [name] if part is None else []
        )
        if lacking:
            raise ValueError(
                f"out: expected {path} as park compare writes it, got none of {lacking[0]}; pass --overwrite."
            )


def variant_cell(request: Request, case: Case, recall_rows: int) -> Cell:
    """A prepared request under its variant's name; raw frames are a part of it, and so never another request's."""
    name = case.file(variant_name(request.method, request.preset))
    asked = request.to_dict() | {"recall_rows": recall_rows}
    return Cell(name=name, format=GENERATION, request=asked, files=(f"{name}.mp4", raw_name(name)), unsaid=UNSAID)


def repeat_comparison(
    resolved: Request,
    request: Request,
    methods: list[str],
    profiles: Sequence[str],
    out: Path,
    prompts: Path | None,
    seeds: Sequence[int],
    recall_rows: int,
) -> str:
    """The command that makes the comparison again. resolved: one of its requests, for what was filled in."""
    words = ["park", "compare", *([resolved.prompt] if prompts is None else ["--prompts", str(prompts)])]
    words += ["--methods", ",".join(methods), "--out", out.name if out.is_absolute() else str(out)]
    words += ["--seeds", ",".join(map(str, seeds))] if seeds else []
    words += ["--profile", ",".join(profiles)] if profiles else []
    words += ["--recall-rows", str(recall_rows)] if recall_rows != RECALL_ROWS else []
    left_out = ("method", "preset", *(["seed"] if seeds else []))
    return shlex.join([*words, *option_words(resolved.to_dict(), request.changes, *left_out)])


def write_report(
    found: Mapping[Case, Mapping[str, Record]], out: Path, say: Say = lambda line: None, *, command: str = ""
) -> dict[str, Any]:
    """side_by_side.mp4, metrics.json, metrics.csv, heads.csv and index.html from the finished variants in `out`, by
    name.
    """
    store = Store(out, say)
    sheets = {case: case.file("side_by_side.mp4") for case in found}
    asked = {
        "records": {case.file(name): each["hash"] for case, records in found.items() for name, each in records.items()},
        "page": page_digest(),
        "lpips": fidelity.lpips_reason() or "measured",
        "command": command,
    }
    files = ("metrics.csv", "heads.csv", "index.html", *sheets.values())
    cell = Cell(name="metrics", format=FORMAT, request=asked, files=files)
    there = store.look(cell)
    if there.state == FINISHED and there.record is not None:
        return there.record
    cases = [_case_report(store, case, records) for case, records in found.items()]
    first = next(iter(found.values()))[REFERENCE]
    report = {
        "format": FORMAT, "request": asked,
        "settings": {name: value for name, value in first["resolved"].items() if name not in ("method", "config")},
        "command": command, "tokens": first["tokens"], "lpips": asked["lpips"],
        "protocol": (fidelity.__doc__ or "").strip(),
        "timing_warning": next((case["timing_warning"] for case in cases if case["timing_warning"]), None),
        "methods": over_cases([case["methods"] for case in cases]), "main": main_variant(cases[0]["methods"]),
        "cases": cases, "environment": environment(),
    }  # fmt: skip
    videos = [
        {name: store.load(record, case.file(f"{name}.mp4")) for name, record in records.items()}
        for case, records in found.items()
    ]  # fmt: skip
    shown = {case: records[report["main"]] for case, records in found.items()}
    stills = [still(_load_raw(store, record, case)) for case, record in shown.items()]
    named = [{"case": case["name"]} for case in cases]
    facts = [{"prompt": case["prompt"], "seed": case["seed"]} for case in cases]
    lines = [flat_line(row) | facts[i] | named[i] for i, case in enumerate(cases) for row in case["methods"]]
    heads = [line | named[i] for i, case in enumerate(cases) for row in case["methods"] for line in head_lines(row)]
    contents: dict[str, Content] = {
        "metrics.csv": to_csv(lines),
        "heads.csv": to_csv(heads or [{"method": "", "profile": "", "layer": "", "head": ""}]),
        "index.html": render_page(report, videos, stills).encode(),
    }
    for case, records in found.items():
        contents[sheets[case]] = lambda path, case=case, records=records: write_mp4(  # type: ignore[misc]
            path,
            side_by_side({_label_of(record): _load_raw(store, record, case) for record in records.values()}, REFERENCE),
            first["resolved"]["fps"],
        )
    return store.put(cell, report, contents)


def _case_report(store: Store, case: Case, records: Mapping[str, Record]) -> dict[str, Any]:
    """A case's rows and verdicts; its frames are let go on return."""
    reference = records[REFERENCE]
    wanted = _load_raw(store, reference, case)
    rows = [method_row(record, reference, _load_raw(store, record, case), wanted) for record in records.values()]
    warning = timing_warning(rows)
    for row in rows[1:]:
        row["verdict"] = verdict(row, reference["resolved"]["fps"], rough=warning is not None)
    files = {name: case.file(f"{name}.mp4") for name in records}
    return {
        "name": case.name, "prompt": reference["resolved"]["prompt"], "seed": case.seed, "tokens": reference["tokens"],
        "timing_warning": warning, "videos": files, "side_by_side": case.file("side_by_side.mp4"), "methods": rows,
    }  # fmt: skip


def warm_up(pipe: Any, request: Request, config: MethodConfig, *, fuse: bool | None = None) -> None:
    """Lazy initialisation (and, on a GPU, kernel compilation) happens here and in nobody's time."""
    steps = 3 if request.device.startswith("cuda") else 1
    short = dataclasses.replace(request, steps=steps, frames=request.frames if steps > 1 else 1)
    if isinstance(config, Timetable) and config.anchors is None:
        config = config.replace(dense_steps=1, dense_fraction=0.0)
    generate_frames(pipe, short, config, recall_rows=0, fuse=fuse)


def _run(
    pipe: Any, request: Request, making: CellWriter, recall_rows: int, progress: Progress | None, *, warm: bool
) -> None:
    fitted = fit_to_pipeline(request, pipe)
    config = config_for(fitted, pipe)
    if not warm:
        warm_up(pipe, fitted, config)
    made = generate_frames(pipe, fitted, config, recall_rows=recall_rows, progress=progress)
    making.write(raw_name(making.cell.name), safetensors.numpy.save({"frames": np.ascontiguousarray(made.frames)}))
    write_video(making, made, request, fitted, config, tokens_of(fitted, pipe))


def raw_name(name: str) -> str:
    return f"raw/{name}.safetensors"


def _load_raw(store: Store, record: Record, case: Case) -> Frames:
    """The very frames of the record: hashes of both are compared, names prove nothing."""
    name = variant_name(record["resolved"]["method"], record["resolved"]["preset"])
    return safetensors.numpy.load(store.load(record, raw_name(case.file(name))))["frames"]


def _label_of(record: Record) -> str:
    return variant_label(record["resolved"]["method"], record["resolved"]["preset"])


def main_variant(rows: Sequence[Mapping[str, Any]]) -> str:
    """The one that a page opens on: PARK with the default profile, else PARK's first, else the last."""
    ours = [row["name"] for row in rows if row["method"] == MAIN]
    default = variant_name(MAIN, ParkConfig.DEFAULT_PROFILE)
    return str(default if default in ours else ours[0] if ours else rows[-1]["name"])
