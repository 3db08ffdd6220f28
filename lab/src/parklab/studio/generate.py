"""A prompt, a pipeline and a method: frames, measurements, an mp4 and the record that repeats it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parkattn.hosts.diffusers import Session
from parkattn.methods import make_method
from parkattn.settings import MethodConfig
from parkattn.site import AttentionMethod, AttentionStats, CallSite
from parklab.record import environment
from parklab.research import studied_entry
from parklab.store import Cell, CellWriter, Say, Store
from parklab.studio import checkpoints
from parklab.studio.lora import add_lora
from parklab.studio.observe import RECALL_ROWS, Observer, measured, synchronise
from parklab.studio.placement import ran_out_of_memory
from parklab.studio.request import (
    OPTIONAL,
    UNSAID,
    Request,
    config_for,
    fit_to_pipeline,
    named_files,
    prepare,
    repeat_command,
    tokens_of,
)
from parklab.studio.video import Frames, as_bytes, load_picture, video_library, write_mp4

FORMAT = "parkattn.generation.1"


@dataclass(frozen=True)
class StepReport:
    step: int
    total: int
    phase: str
    density: float


@dataclass(frozen=True)
class Generation:
    frames: Frames
    measured: dict[str, Any]


Progress = Callable[[StepReport], None]
Stage = Callable[[str], None]  # told what begins before the first step, in words for people
READING, LOADING = "reading the model's files", "loading the model"


def pipeline_for(request: Request, folder: Path) -> Any:
    """The pipeline of a prepared request, its LoRA among the weights."""
    quantise = None if request.quantise is None else (request.quantise, request.quantise_hash)
    pipe = checkpoints.load_pipeline(
        folder, device=request.device, dtype=request.dtype, offload=request.offload, quantise=quantise
    )
    if checkpoints.fingerprint(folder) != request.weights:
        raise ValueError(f"model: expected {folder} as it was when the run began, got other files; run again.")
    if request.lora is not None:
        add_lora(pipe, request.lora, request.lora_hash)
    return pipe


def first_stage(request: Request) -> str:
    """What happens between a loaded model and the end of its first attention call."""
    compiling = ", then compiling kernels for the first step" if request.device.startswith("cuda") else ""
    return f"encoding the prompt{compiling}"


def generate_frames(
    pipe: Any,
    request: Request,
    config: MethodConfig,
    *,
    method: AttentionMethod | None = None,
    recall_rows: int = RECALL_ROWS,
    decode: bool = True,
    last_step: int | None = None,
    fuse: bool | None = None,
    progress: Progress | None = None,
) -> Generation:
    """One video with one method (the request's, unless one is given); the pipeline is left as it was. fuse: as in
    `enable`.

    last_step: the steps after it are left out, by a pipeline that can be interrupted.
    """
    ends: list[float] = []
    total = request.steps
    assert total is not None

    def begun(site: CallSite, stats: AttentionStats) -> None:
        # the first call of a step tells what the step will be
        if progress is not None and site.layer == 0:
            progress(StepReport(len(ends), total, stats.phase, stats.density.mean().item()))

    def ended(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        synchronise(request.device)
        ends.append(time.perf_counter())
        expect_finite_video("latents", tensors.get("latents"), step)
        if step == last_step and hasattr(pipeline, "_interrupt"):
            pipeline._interrupt = True
        return tensors

    observer = Observer(recall_rows=recall_rows, on_call=begun)
    if request.file_hashes and named_files(request.changes) != request.file_hashes:
        names = ", ".join(request.file_hashes)
        raise ValueError(f"{names}: expected the file as it was when the run began, got other bytes; run again.")
    begin = time.perf_counter()
    with Session(pipe, method or make_method(studied_entry(request.method), config), fuse=fuse) as session:
        session.engine.watch = observer
        options = _call_options(request) | ({} if decode else {"output_type": "latent"})
        with _out_of_memory_in_one_line(request), checkpoints.stock_failures_in_one_line(pipe):
            frames = pipe(**options, callback_on_step_end=ended).frames[0]
        calls, summary = list(session.engine.log.calls), session.summary()
    if last_step is not None and hasattr(pipe, "_interrupt"):
        pipe._interrupt = False
    expect_finite_video("frames", frames, len(ends))
    done = time.perf_counter()
    if progress is not None:
        progress(StepReport(total, total, "done", 1.0))
    found = measured(calls, summary, observer, ends, total)
    found["seconds"] = {
        "text": (calls[0].began if calls else begin) - begin,
        "denoise": sum(row.get("seconds", 0.0) for row in found["steps"]),
        "decode": done - (ends[-1] if ends else begin),
        "attention": sum(found["attention_seconds"].values()),
    }
    found["seconds"]["total"] = sum(found["seconds"][name] for name in ("text", "denoise", "decode"))
    return Generation(as_bytes(frames) if decode else np.empty((0, 0, 0, 3), np.uint8), found)


@contextlib.contextmanager
def _out_of_memory_in_one_line(request: Request) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        advice = (
            "--offload group, --quantise float8, or a smaller size"
            if isinstance(error, torch.OutOfMemoryError)
            else "a smaller size"
        )
        raise ValueError(
            f"device: expected room for {request.frames} frames of {request.height} x {request.width} on "
            f"{request.device}, got out of memory; pass {advice}."
        ) from None


def expect_finite_video(name: str, values: Any, step: int) -> None:
    """No video is better than a black one: NaN would be clipped to some colour without a word."""
    if values is None or bool(torch.isfinite(torch.as_tensor(values)).all()):
        return
    raise ValueError(
        f"{name}: expected finite numbers, got NaN or Inf at step {step}; try --dtype float32, or another model."
    )


def generate_video(
    request: Request,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    stage: Stage = lambda what: None,
    say: Say = lambda line: None,
) -> tuple[dict[str, Any], bool]:
    """out and out.with_suffix(".json"); the record, and whether it was made now (False: it was there already)."""
    if out.suffix != ".mp4":
        raise ValueError(f"out: expected a file name ending in .mp4, got {out}; rename it.")
    video_library()
    stage(READING)
    request, folder = prepare(request)
    cell, made = video_cell(request, out.name), []

    def make(making: CellWriter) -> None:
        stage(LOADING)
        pipe = pipeline_for(request, folder)
        stage(first_stage(request))
        made.append(make_video(pipe, request, making, progress=progress))

    records = Store(out.parent, say).fill([cell], make, overwrite=overwrite)
    return records[cell.name], bool(made)


def video_cell(request: Request, video: str) -> Cell:
    """A prepared request under the name of its mp4."""
    return Cell(
        name=video.removesuffix(".mp4"), format=FORMAT, request=request.to_dict(), files=(video,), unsaid=UNSAID
    )


def make_video(pipe: Any, request: Request, making: CellWriter, *, progress: Progress | None = None) -> dict[str, Any]:
    """The video and its record, of a prepared request on its loaded pipeline."""
    fitted = fit_to_pipeline(request, pipe)
    config = config_for(fitted, pipe)
    made = generate_frames(pipe, fitted, config, recall_rows=0, progress=progress)
    return write_video(making, made, request, fitted, config, tokens_of(fitted, pipe))


def write_video(
    making: CellWriter, made: Generation, request: Request, fitted: Request, config: MethodConfig, tokens: int
) -> dict[str, Any]:
    """The cell's first file is the mp4; its record ends the cell."""
    video = making.cell.files[0]
    making.write(video, lambda path: write_mp4(path, made.frames, request.fps))
    return making.commit({
        "format": FORMAT,
        "request": dict(making.cell.request),
        "resolved": fitted.to_dict() | {"config": config.to_dict()},
        "tokens": tokens,
        "command": repeat_command(fitted, making.store.folder / video),
        "video": {"file": video, "sha256": making.hashes[video]},
        "measured": made.measured,
        "environment": environment(),
    })  # fmt: skip


def _call_options(request: Request) -> dict[str, Any]:
    options: dict[str, Any] = {
        "prompt": request.prompt, "height": request.height, "width": request.width, "num_frames": request.frames,
        "num_inference_steps": request.steps, "output_type": "np",
        # on the CPU, so that a seed means the same noise on every device
        "generator": torch.Generator("cpu").manual_seed(request.seed),
    }  # fmt: skip
    options |= {theirs: value for ours, theirs in OPTIONAL.items() if (value := getattr(request, ours)) is not None}
    if request.image is not None:
        assert request.width and request.height
        options["image"] = load_picture(request.image, request.width, request.height, request.image_hash)
    return options
