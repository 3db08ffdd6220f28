"""Several methods on one prompt and seed: each video, the side-by-side, the metrics and the page."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from parkattn.checks import did_you_mean
from parkattn.methods import METHODS
from parkattn.metrics import fidelity
from parkattn.record import environment
from parkattn.settings import MethodConfig, When
from parkattn.sprites.grammar import EXAMPLE
from parkattn.store import Cell, Content, Making, Record, Say, Store
from parkattn.studio import checkpoints
from parkattn.studio.generate import FORMAT as GENERATION
from parkattn.studio.generate import (
    Progress,
    Request,
    config_for,
    expect_settings_used,
    fit_to_pipeline,
    for_method,
    generate_frames,
    prepare,
    write_video,
)
from parkattn.studio.observe import RECALL_ROWS
from parkattn.studio.page import render_page
from parkattn.studio.steadiness import steadiness, timing_warning
from parkattn.studio.video import Frames, side_by_side, video_library, write_mp4

DEFAULT_PROMPT = EXAMPLE
DEFAULT_METHODS = ("dense", "park", "park-no-pama", "park-no-qrkc", "centroid")
REFERENCE = "dense"
FORMAT = "parkattn.comparison.1"

Announce = Callable[[str, str], None]  # (method, "start" | "done" | "kept")


def choose_methods(asked: str | None) -> list[str]:
    """Names out of "a,b" or "all"; dense comes first, because the others are measured against it."""
    names = list(DEFAULT_METHODS if asked is None else METHODS if asked == "all" else filter(None, map(str.strip, asked.split(","))))
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise ValueError(
            f"methods: expected all or some of {', '.join(METHODS)}, got {', '.join(unknown) or repr(asked)}; "
            + did_you_mean(unknown[0] if unknown else asked, METHODS, "separate names by commas.")
        )
    return [REFERENCE, *dict.fromkeys(name for name in names if name != REFERENCE)]


def compare(
    request: Request,
    methods: list[str],
    out: Path,
    *,
    overwrite: bool = False,
    recall_rows: int = RECALL_ROWS,
    progress: Progress | None = None,
    announce: Announce = lambda method, event: None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Everything under `out`; methods that are finished there are kept."""
    video_library()
    expect_settings_used(request, methods)
    requests = {}
    for method in methods:
        requests[method], folder = prepare(for_method(request, method))
    store, pipe = Store(out, say), None

    def make(making: Making) -> None:
        nonlocal pipe
        method = making.cell.name
        asked = requests[method]
        announce(method, "start")
        if pipe is None:
            pipe = checkpoints.load_pipeline(folder, device=asked.device, dtype=asked.dtype, offload=asked.offload)
        _run(pipe, asked, making, recall_rows, progress)
        announce(method, "done")

    cells = [method_cell(asked) for asked in requests.values()]
    records = store.fill(cells, make, overwrite=overwrite, kept=lambda cell: announce(cell.name, "kept"))
    return write_report(records, out, say)


def method_cell(request: Request) -> Cell:
    """A prepared request under the name of its method; raw frames are a part of it, so that they are never another request's."""
    method = request.method
    return Cell(name=method, format=GENERATION, request=request.to_dict(), files=(f"{method}.mp4", raw_name(method)))


def write_report(records: dict[str, Record], out: Path, say: Say = lambda line: None) -> dict[str, Any]:
    """side_by_side.mp4, metrics.json, metrics.csv, heads.csv and index.html from the finished methods in `out`."""
    store = Store(out, say)
    clips = {method: _load_raw(store, records[method], method) for method in records}
    resolved = records[REFERENCE]["resolved"]
    rows = [_row(method, records, clips) for method in records]
    report = {
        "format": FORMAT,
        "settings": {name: value for name, value in resolved.items() if name not in ("method", "config")},
        "tokens": records[REFERENCE]["tokens"],
        "lpips": fidelity.lpips_reason() or "measured",
        "protocol": (fidelity.__doc__ or "").strip(),
        "timing_warning": timing_warning(rows),
        "methods": rows,
        "environment": environment(),
    }
    heads = [line for row in rows for line in _head_lines(row)] or [{"method": "", "layer": "", "head": ""}]
    videos = {method: store.load(records[method], f"{method}.mp4") for method in records}
    sheet = side_by_side(clips, REFERENCE)
    contents: dict[str, Content] = {
        "side_by_side.mp4": lambda path: write_mp4(path, sheet, resolved["fps"]),
        "metrics.csv": _csv([_flat(row) for row in rows]),
        "heads.csv": _csv(heads),
        "index.html": render_page(report, videos).encode(),
    }
    return store.put(Cell(name="metrics", format=FORMAT, files=tuple(contents)), report, contents)


def warm_up(pipe: Any, request: Request, config: MethodConfig) -> None:
    """Lazy initialisation (and, on a GPU, kernel compilation) happens here and in nobody's time."""
    steps = 3 if request.device.startswith("cuda") else 1
    short = dataclasses.replace(request, steps=steps, frames=request.frames if steps > 1 else 1)
    if isinstance(config, When):
        config = config.replace(dense_steps=1, dense_fraction=0.0)
    generate_frames(pipe, short, config, recall_rows=0)


def _run(pipe: Any, request: Request, making: Making, recall_rows: int, progress: Progress | None) -> dict[str, Any]:
    fitted = fit_to_pipeline(request, pipe)
    config = config_for(fitted, pipe)
    warm_up(pipe, fitted, config)
    made = generate_frames(pipe, fitted, config, recall_rows=recall_rows, progress=progress)
    assert fitted.frames and fitted.height and fitted.width
    tokens = checkpoints.token_count(pipe, fitted.frames, fitted.height, fitted.width)
    making.write(raw_name(request.method), safetensors.numpy.save({"frames": np.ascontiguousarray(made.frames)}))
    return write_video(making, made, request, fitted, config, tokens)


def _row(method: str, records: dict[str, dict[str, Any]], clips: dict[str, Frames]) -> dict[str, Any]:
    found, base = records[method]["measured"], records[REFERENCE]["measured"]
    row: dict[str, Any] = {"method": method, "config": records[method]["resolved"]["config"]}
    for name, measure in (("psnr", fidelity.psnr_per_frame), ("ssim", fidelity.ssim_per_frame)):
        values = measure(clips[method], clips[REFERENCE])
        row[name] = {"mean": float(np.mean(values)), "worst": min(values), "per_frame": values}
    lpips = fidelity.lpips_per_frame(clips[method], clips[REFERENCE])
    row["lpips"] = None if lpips is None else {"mean": float(np.mean(lpips)), "worst": max(lpips), "per_frame": lpips}
    # a method that was kept from an earlier run may have been timed on another machine
    here, there = ({n: records[m]["environment"].get(n) for n in ("cpu", "threads", "gpu")} for m in (method, REFERENCE))
    row["speedup"] = base["seconds"]["denoise"] / found["seconds"]["denoise"] if here == there else None
    row["steadiness"] = steadiness(found["steps"], base["steps"] if here == there else None)
    return row | {name: value for name, value in found.items() if name != "summary"}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    recall = row["recall"] or {}
    flat = {
        "method": row["method"],
        "psnr_db": row["psnr"]["mean"],
        "psnr_worst_frame_db": row["psnr"]["worst"],
        "ssim": row["ssim"]["mean"],
    }
    flat |= {
        "lpips": row["lpips"]["mean"] if row["lpips"] else "",
        "density": row["density"],
        "density_sparse_steps": row["density_sparse_steps"],
    }
    flat |= {f"recall_{name}": recall.get(name, "") for name in ("mean", "p05", "worst")} | {"speedup_denoise": row["speedup"]}
    flat |= {"timing_step_spread": row["steadiness"]["step_spread"], "timing_dense_apart": row["steadiness"]["dense_apart"]}
    flat |= {f"seconds_{name}": value for name, value in row["seconds"].items()}
    return flat | {f"seconds_{phase}_steps": value for phase, value in row["phase_seconds"].items()}


def _head_lines(row: dict[str, Any]) -> list[dict[str, Any]]:
    density, recall = row["heat"]["density"] or [], row["heat"]["recall"]
    return [
        {"method": row["method"], "layer": layer, "head": head, "density": value, "recall": recall[layer][head] if recall else ""}
        for layer, heads in enumerate(density)
        for head, value in enumerate(heads)
    ]


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def raw_name(method: str) -> str:
    return f"raw/{method}.safetensors"


def _load_raw(store: Store, record: Record, method: str) -> Frames:
    """The very frames of the record: hashes of both are compared, names prove nothing."""
    return safetensors.numpy.load(store.load(record, raw_name(method)))["frames"]
