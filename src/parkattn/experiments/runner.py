"""The runner: cells of five kinds, each with a content hash, made once by whichever process comes to it first.

reference  a prompt and a seed with dense attention: raw frames, the video that every other one is compared with
capture    queries and keys of a dense run
retrieval  what compressing queries and keys costs, on a capture
quality    a prompt, a seed and a method: PSNR and SSIM against the reference, density, recall, seconds
frames     a few frames of one video, for people

A density that is asked for is reached by a budget, found once per method on the capture of a prompt that is in no table
(`budget`). What a cell needs is made when the cell is: a finished cell needs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parkattn.experiments.captures import Capture, Captured, Selection, read_captures, write_captures
from parkattn.experiments.evaluation import FLOOR, FORMATS, Evaluation, file_hash, named_cell
from parkattn.experiments.mismatches import measure_call
from parkattn.hosts.diffusers.session import transformers_of
from parkattn.methods import make_method, method_entry
from parkattn.metrics import fidelity
from parkattn.metrics.budget import solve_budget
from parkattn.models import row_for
from parkattn.park import ParkConfig
from parkattn.planned import PlannedMethod, make_plan
from parkattn.record import environment
from parkattn.reuse import dense_prefix
from parkattn.settings import MethodConfig
from parkattn.store import Cell, Making, Record, Say, Store
from parkattn.studio import checkpoints
from parkattn.studio.compare import warm_up
from parkattn.studio.generate import (
    Request,
    config_for,
    fit_to_pipeline,
    for_method,
    generate_frames,
    prepare,
    understood,
)
from parkattn.studio.video import Frames

CALIBRATION_LAYERS = 6
SHOWN = 5  # frames of a video
MATCHED = 0.05  # a density further off is not the one that was asked for


class CellError(Exception):
    def __init__(self, cell: Cell, reason: str) -> None:
        super().__init__(reason)
        self.cell, self.reason = cell, reason


class Lab:
    """Cells of one evaluation in one folder; the pipeline is loaded when the first cell needs it."""

    def __init__(self, evaluation: Evaluation, out: Path, say: Say = lambda line: None) -> None:
        self.evaluation, self.say = evaluation, say
        self.store = Store(out / "cells", say)
        wanted = ("steps", "frames", "height", "width", "model", "device", "dtype", "offload")
        base = Request(prompt=evaluation.prompts[0], method="dense", **{name: getattr(evaluation, name) for name in wanted})
        self.base, self.folder = prepare(base)
        self.made: list[str] = []
        self._held: dict[str, Any] = {}  # the last reference and the last captures read

    # what can be asked for

    def quality_cell(self, request: Request, method: str, *, density: float | None = None, **changes: Any) -> Cell:
        """density: of the sparse steps, reached by the method's budget; None: by its own settings."""
        asked = self._asked(request) | {
            "method": method,
            "changes": self.evaluation.changes | changes,
            "density": density,
        }
        label = f"{method.replace(' ', '-')}" if density is None else f"{method.replace(' ', '-')}-at-{density:g}"
        # a group shares its reference
        return named_cell("quality", label, asked, group=f"{request.prompt} {request.seed} {request.guidance}")

    def frames_cell(self, request: Request, method: str) -> Cell:
        asked = self._asked(request) | {"method": method, "changes": self.evaluation.changes, "shown": SHOWN}
        return named_cell("frames", method, asked, ending=".npy")

    def load_frames(self, record: Record) -> Frames:
        return _as_frames(self.store.load(record, next(iter(record["files"]))))

    def retrieval_cells(self) -> list[Cell]:
        if self.evaluation.captures:
            return [named_cell("retrieval", path.stem, self._blocks() | {"file": file_hash(path)}) for path in self.evaluation.captures]
        return [named_cell("retrieval", "captured", self._asked(request) | self._blocks()) for request in self.requests()]

    def requests(self) -> list[Request]:
        """Every prompt, guidance and seed."""
        e = self.evaluation
        guidances = [self.base.guidance if guidance is None else guidance for guidance in e.guidances]
        return [
            dataclasses.replace(self.base, prompt=understood(prompt, self.folder), seed=seed, guidance=guidance)
            for prompt in e.prompts for guidance in guidances for seed in e.seeds
        ]  # fmt: skip

    # how it is made

    def fill(self, cells: Sequence[Cell], advance: Callable[[], None] = lambda: None) -> tuple[dict[str, Record], dict[str, str]]:
        """Records by cell name, and why others could not be made: one that fails leaves the others alone."""
        failures: dict[str, str] = {}
        done: set[str] = set()
        rest = list({cell.name: cell for cell in cells}.values())

        def finished(cell: Cell) -> None:
            if cell.name not in done:
                done.add(cell.name)
                advance()

        def make(making: Making) -> None:
            try:
                self._make(making)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                raise CellError(making.cell, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
            finished(making.cell)

        while True:
            try:
                return self.store.fill(rest, make, kept=finished), failures
            except CellError as failure:
                failures[failure.cell.name] = failure.reason
                finished(failure.cell)
                self.say(f"{failure.cell.name}: {failure.reason}")
                rest = [cell for cell in rest if cell.name not in failures]

    def finished(self, cells: Sequence[Cell]) -> dict[str, Record]:
        """What is there already, by cell name."""
        found = {cell.name: self.store.find(cell) for cell in cells}
        return {name: record for name, record in found.items() if record is not None}

    @functools.cached_property
    def pipe(self) -> Any:
        return checkpoints.load_pipeline(self.folder, device=self.base.device, dtype=self.base.dtype, offload=self.base.offload)

    def _make(self, making: Making) -> None:
        makers = {
            "reference": self._make_reference, "capture": self._make_capture, "retrieval": self._make_retrieval,
            "quality": self._make_quality, "frames": self._make_frames, "budget": self._make_budget,
        }  # fmt: skip
        kinds = {FORMATS[kind]: maker for kind, maker in makers.items()}
        found = kinds[making.cell.format](making)
        making.commit({"format": making.cell.format, "request": dict(making.cell.request), **found, "environment": environment()})
        self.made.append(making.cell.name)

    def _make_reference(self, making: Making) -> Record:
        request = self._fitted(making.cell)
        if request.device.startswith("cuda"):
            warm_up(self.pipe, request, MethodConfig())
        made = generate_frames(self.pipe, request, MethodConfig(), recall_rows=0)
        making.write(making.cell.files[0], _as_npy(made.frames))
        return {"seconds": made.measured["seconds"]}

    def _make_frames(self, making: Making) -> Record:
        asked = making.cell.request
        request = dataclasses.replace(self._fitted(making.cell), changes=dict(asked["changes"]))
        request = for_method(request, asked["method"])
        made = generate_frames(self.pipe, request, config_for(request, self.pipe), recall_rows=0)
        shown = np.linspace(0, len(made.frames) - 1, min(asked["shown"], len(made.frames))).round().astype(int)
        making.write(making.cell.files[0], _as_npy(made.frames[shown]))
        return {"shown": shown.tolist()}

    def _make_quality(self, making: Making) -> Record:
        name, density = making.cell.request["method"], making.cell.request["density"]
        changes = dict(making.cell.request["changes"])
        # first, so that a density that cannot be reached costs nothing
        budget = None if density is None else self._matched_budget(name, density, changes)
        reference, dense = self._reference(making.cell)
        request = dataclasses.replace(self._fitted(making.cell), changes=changes)
        request = for_method(request, "dense" if name == FLOOR else name)
        config = config_for(request, self.pipe)
        if budget is not None:
            config = method_entry(name).with_budget(config, budget["field"], budget["value"])
        if request.device.startswith("cuda"):
            warm_up(self.pipe, request, config)
        made = generate_frames(self.pipe, request, config)
        found, lpips = made.measured, fidelity.lpips_per_frame(made.frames, reference)
        row = {
            "psnr": statistics.fmean(fidelity.psnr_per_frame(made.frames, reference)),
            "ssim": statistics.fmean(fidelity.ssim_per_frame(made.frames, reference)),
            "lpips": None if lpips is None else statistics.fmean(lpips),
            "density": 1.0 if found["density_sparse_steps"] is None else found["density_sparse_steps"],
            "density_all_steps": found["density"],
            "recall": found["recall"]["mean"] if found["recall"] else None,
            "seconds": found["seconds"]["total"],
            "dense_seconds": dense["seconds"]["total"],
            "denoise_seconds": found["seconds"]["denoise"],
            "dense_denoise_seconds": dense["seconds"]["denoise"],
        }
        return {
            "row": row,
            "budget": budget,
            "config": config.to_dict(),
            "resolved": request.to_dict() | {"model": None},
        }

    def _make_capture(self, making: Making) -> Record:
        request, asked = self._fitted(making.cell), making.cell.request["capture"]
        selection = Selection(
            **{name: value for name, value in asked.items() if name != "steps"},
            steps=self._captured_steps(request, asked["steps"]),
        )
        calls = capture_calls(self.pipe, request, selection)
        about = {name: value for name, value in making.cell.request.items() if name != "capture"}
        making.write(making.cell.files[0], lambda path: write_captures(path, calls, about))
        return {"calls": [call.name for call in calls], "heads": calls[0].q.shape[1]}

    def _make_retrieval(self, making: Making) -> Record:
        config = ParkConfig.from_dict(making.cell.request["config"])
        calls = self._captured(making.cell)
        return {"calls": [measure_call(call, config, self.base.device) for call in calls]}

    def _make_budget(self, making: Making) -> Record:
        name, density = making.cell.request["method"], making.cell.request["density"]
        entry = method_entry(name)
        if not entry.budgets:
            raise ValueError(f"method: expected one whose density can be set, got {name!r}; compare it at its own settings.")
        calls = [call.to(self.base.device) for call in self._captured(making.cell)]
        request = for_method(dataclasses.replace(self._fitted(making.cell), changes=dict(making.cell.request["changes"])), name)
        config, field = config_for(request, self.pipe), entry.budgets[0]

        def reached(value: float) -> float:
            method = make_method(name, entry.with_budget(config, field, value))
            if not isinstance(method, PlannedMethod):
                raise ValueError(f"method: expected one that plans blocks, got {name!r}; compare it at its own settings.")
            plans = [make_plan(call.q, call.k, method.planner, call.site, None) for call in calls]
            return statistics.fmean(plan.density().mean().item() for plan in plans)

        value, got = solve_budget(reached, density)
        return {"budget": {"field": field, "value": value, "density": got}}

    # what cells need of each other

    def _reference(self, cell: Cell) -> tuple[Frames, Record]:
        asked = {name: value for name, value in cell.request.items() if name not in ("changes", "density")} | {"method": "dense"}
        wanted = named_cell("reference", "dense", asked, ending=".npy")
        if wanted.name not in self._held:
            self._held.clear()
            record = self._need(wanted)
            self._held[wanted.name] = self.load_frames(record), record
        return self._held[wanted.name]

    def _captured(self, cell: Cell) -> list[Captured]:
        if "file" in cell.request:
            path = next(path for path in self.evaluation.captures if file_hash(path) == cell.request["file"])
            return read_captures(path)[0]
        own = cell.format == FORMATS["retrieval"]
        capture: dict[str, Any] = {
            "steps": "first" if own else "spread",
            "values": not own,
            "thin_heads": True,
            "first_branch": True,
        }
        if not own:
            capture["layers"] = self._spread_layers()
        asked = {name: value for name, value in cell.request.items() if name in self._asked(self.base)}
        wanted = named_cell("capture", "dense", asked | {"method": "dense", "capture": capture}, ending=".safetensors")
        if wanted.name not in self._held:
            self._held.clear()
            self._need(wanted)
            self._held[wanted.name] = read_captures(self.store.folder / wanted.files[0])[0]
        return self._held[wanted.name]

    def _need(self, cell: Cell) -> Record:
        return self.store.fill([cell], self._make)[cell.name]

    def _matched_budget(self, method: str, density: float, changes: dict[str, Any]) -> dict[str, Any]:
        budget: dict[str, Any] = self._need(self._budget_cell(method, density, changes))["budget"]
        if abs(budget["density"] - density) > MATCHED:
            raise ValueError(
                f"density: expected a {budget['field']} of {method} that gives {density:g} at this size, got {budget['density']:.2f} "
                "at best; compare it at its own settings."
            )
        return budget

    def _budget_cell(self, method: str, density: float, changes: dict[str, Any]) -> Cell:
        spare = dataclasses.replace(self.base, prompt=understood(self.evaluation.spare_prompt, self.folder))
        return named_cell(
            "budget",
            f"{method}-at-{density:g}",
            self._asked(spare) | {"method": method, "density": density, "changes": changes},
        )

    def _asked(self, request: Request) -> dict[str, Any]:
        """Without where the weights lie: their fingerprint tells models apart, and records can move."""
        left_out = ("model", "changes", "preset", "fps")
        return {name: value for name, value in request.to_dict().items() if name not in left_out}

    def _blocks(self) -> dict[str, Any]:
        known = {field.name for field in dataclasses.fields(ParkConfig)}
        return {"config": ParkConfig(**{name: value for name, value in self.evaluation.changes.items() if name in known}).to_dict()}

    def _fitted(self, cell: Cell) -> Request:
        fields = {field.name for field in dataclasses.fields(Request)} - {"changes", "method"}
        asked = {name: value for name, value in cell.request.items() if name in fields}
        return fit_to_pipeline(Request(**asked, method="dense", model=self.base.model), self.pipe)

    def _captured_steps(self, request: Request, which: str) -> tuple[int, ...]:
        """The first sparse step of the paper's schedule, where a plan is made, and for calibration the last one too."""
        assert request.steps
        first = min(dense_prefix(ParkConfig(), request.steps), request.steps - 1)
        return (first,) if which == "first" else tuple(sorted({first, request.steps - 1}))

    def _spread_layers(self) -> list[int]:
        count = layer_count(self.pipe)
        chosen = min(count, CALIBRATION_LAYERS)
        return [round(i * (count - 1) / max(1, chosen - 1)) for i in range(chosen)]


def layer_count(pipe: Any) -> int:
    return max(len(row_for(transformer).attentions(transformer)) for transformer in transformers_of(pipe).values())


def capture_calls(pipe: Any, request: Request, selection: Selection) -> list[Captured]:
    """The chosen calls of a dense run of a request that fits the pipeline."""
    assert request.steps
    capture = Capture(selection, layer_count(pipe), request.steps)
    generate_frames(pipe, request, MethodConfig(), method=capture, recall_rows=0, decode=False)
    return list(capture.kept.values())


def _as_npy(frames: Frames) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, frames, allow_pickle=False)
    return buffer.getvalue()


def _as_frames(data: bytes) -> Frames:
    frames: Frames = np.load(io.BytesIO(data), allow_pickle=False)
    return frames
