"""The runner: cells of several kinds, each with a content hash, made once by whichever process comes to it first.

reference  a prompt and a seed with dense attention: raw frames, the video that every other one is compared with
capture    queries and keys of a dense run
retrieval  what compressing queries and keys costs, on a capture
forwards   a dense run: how each forward differs from the one before, densities of plans
quality    a prompt, a seed and a method: how far it is from the reference, density, recall, cost, seconds
frames     a few frames of one video, for people
times      a method and a density: what a plan and a call of attention take, on a capture
bench      lines of park bench, of kernels alone

A density that is asked for is reached by a budget, found once per method on the capture of a prompt that is in no table
(`budget`). What a cell needs is made when the cell is: a finished cell needs nothing. With keep="records" references
and captures, which are large, are held in memory while cells need them, and never written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parkattn.checks import first_line
from parkattn.methods import make_method
from parkattn.settings import MethodConfig
from parklab.experiments.calibration import (
    budget_cell,
    budget_field,
    captured_steps,
    cost_refusal,
    density_refusal,
    find_budget,
)
from parklab.experiments.captures import (
    MODEL,
    CapturedCall,
    Selection,
    capture_calls,
    pack_captures,
    preset_in,
    read_captures,
    spread_layers,
)
from parklab.experiments.cells import Cells
from parklab.experiments.evaluation import (
    FLOORS,
    FORMATS,
    CellError,
    Evaluation,
    FilledCells,
    UnreachableDensityError,
    file_hash,
    named_cell,
)
from parklab.experiments.forwards import WatchedForwards, plan_steps
from parklab.experiments.mismatches import measure_call
from parklab.experiments.opening import Openings
from parklab.experiments.quality import measure_frames, takeable_measures, video_row
from parklab.experiments.record_fields import Line
from parklab.experiments.times import time_method
from parklab.metrics.measures import MEASURES, Setting
from parklab.record import environment
from parklab.research import ResearchConfig, studied_entry
from parklab.store import OTHER, Cell, CellWriter, Record, Say, content_hash
from parklab.studio.compare import warm_up
from parklab.studio.generate import generate_frames
from parklab.studio.request import Request, config_for, fit_to_pipeline
from parklab.studio.video import Frames, to_npy

UNTIMED = dict.fromkeys(("total", "denoise", "attention"))


class Lab(Cells):
    """Makes cells of one evaluation in one folder."""

    def __init__(self, evaluation: Evaluation, out: Path, say: Say = lambda line: None) -> None:
        super().__init__(evaluation, out, say)
        self.made: list[str] = []
        self._held: dict[str, tuple[str, Any]] = {}  # kind: the cell and the content of the last one
        self._warm: set[str] = set()
        self._openings = Openings(timed=evaluation.timed)
        if evaluation.measures is not None and not evaluation.draw:
            _ = self.measures  # one that is asked for and cannot be taken ends the run before it begins

    def fill(self, cells: Sequence[Cell], advance: Callable[[], None] = lambda: None) -> FilledCells:
        """One that fails leaves the others alone."""
        failures: dict[str, str] = {}
        left_out: dict[str, str] = {}
        done: set[str] = set()
        rest = list({cell.name: cell for cell in cells}.values())

        def finished(cell: Cell) -> None:
            if cell.name not in done:
                done.add(cell.name)
                advance()

        def give_up(cell: Cell, reason: str, *, unreachable: bool = False) -> None:
            nonlocal rest
            (left_out if unreachable else failures)[cell.name] = reason
            finished(cell)
            self.say(f"{cell.name}: {reason}")
            rest = [other for other in rest if other.name != cell.name]

        def make(making: CellWriter) -> None:
            if making.cell.format != FORMATS["bench"] and "file" not in making.cell.request:
                _ = self.pipe  # a model that cannot be loaded ends the run: no cell could be made
            try:
                self._make(making)
            except (ValueError, NotImplementedError, RuntimeError, ImportError) as error:
                raise CellError(
                    making.cell, first_line(error), unreachable=isinstance(error, UnreachableDensityError)
                ) from error
            finished(making.cell)

        known = self.unreachable(rest)
        for cell in list(rest):
            if cell.name in known:
                give_up(cell, known[cell.name], unreachable=True)
            elif (found := self.store.look(cell)).state == OTHER:
                wanted = f"out: expected {self.store.folder / cell.name}.json to answer its name"
                give_up(cell, f"{wanted}, got one {found.reason}; remove it, or pass another --out.")
        while True:
            try:
                return FilledCells(self.store.fill(rest, make, kept=finished), failures, left_out)
            except CellError as failure:
                give_up(failure.cell, failure.reason, unreachable=failure.unreachable)

    def unreachable(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Why cells were left out, as far as budgets that are there tell."""
        asked = [cell for cell in cells if cell.request.get("density") is not None and "method" in cell.request]
        return {cell.name: reason for cell in asked if (reason := self._refusal(cell))}

    def _refusal(self, cell: Cell) -> str:
        density, name = cell.request["density"], cell.request.get("profile") or cell.request["method"]
        if not 0 < density < 1 and "profile" in cell.request:
            return cost_refusal(name, density, self.dense_share(cell.request))
        record = self.store.look(self._budget_cell(cell)).record
        return "" if record is None else density_refusal(record["budget"], name, density)

    @functools.cached_property
    def measures(self) -> list[str]:
        names, lacking = takeable_measures(self.evaluation.measures, self._setting())
        for name, reason in lacking.items():
            self.say(f"not measured: {MEASURES[name].title}: {reason}")
        return names

    def _setting(self) -> Setting:
        return Setting(device=self.base.device, weights=self.evaluation.weights)

    def _make(self, making: CellWriter) -> Record:
        makers = {
            "reference": self._make_reference, "capture": self._make_capture, "retrieval": self._make_retrieval,
            "quality": self._make_quality, "frames": self._make_frames, "budget": self._make_budget,
            "times": self._make_times, "forwards": self._make_forwards,
            "bench": lambda making: {"lines": measure_benchmark(making.cell.request["benchmark"])},
        }  # fmt: skip
        kinds = {FORMATS[kind]: maker for kind, maker in makers.items()}
        found = kinds[making.cell.format](making)
        asked = {"format": making.cell.format, "request": dict(making.cell.request)}
        record = making.commit({**asked, **found, "environment": environment()})
        self.made.append(making.cell.name)
        return record

    def _make_reference(self, making: CellWriter) -> Record:
        frames, found = self._dense_video(making.cell)
        making.write(making.cell.files[0], to_npy(frames))
        return found

    def _dense_video(self, cell: Cell) -> tuple[Frames, Record]:
        request = self._fitted(cell)
        self._warm_up(request, MethodConfig())
        opening = self._openings.begin(cell.name, request.steps or 0)
        made = generate_frames(
            self.pipe, request, MethodConfig(), method=opening, recall_rows=0, fuse=self.evaluation.fuse
        )
        return made.frames, {"seconds": made.measured["seconds"] if self.evaluation.timed else UNTIMED}

    def _warm_up(self, request: Request, config: MethodConfig) -> None:
        """Once for a method and its settings: what its kernels need is compiled for every prompt, seed and density."""
        what = content_hash([request.method, request.preset, request.changes, request.guidance])
        if self.evaluation.timed and request.device.startswith("cuda") and what not in self._warm:
            warm_up(self.pipe, request, config, fuse=self.evaluation.fuse)
            self._warm.add(what)

    def _make_times(self, making: CellWriter) -> Record:
        request, config, budget = self._within_budget(making.cell)
        captured = self._captured(making.cell)[-making.cell.request.get("calls", 0) :]
        calls = [call.to(self.base.device) for call in captured]
        method = make_method(studied_entry(making.cell.request["method"]), config)
        times = time_method(method, calls, request.steps or 0, self._layers)
        return {"times": times, "budget": budget, "config": config.to_dict(), "shape": list(calls[0].q.shape[1:3])}

    def _make_frames(self, making: CellWriter) -> Record:
        asked = making.cell.request
        request = self._set_for(self._fitted(making.cell), asked)
        made = generate_frames(
            self.pipe, request, config_for(request, self.pipe), recall_rows=0, fuse=self.evaluation.fuse
        )
        shown = np.linspace(0, len(made.frames) - 1, min(asked["shown"], len(made.frames))).round().astype(int)
        making.write(making.cell.files[0], to_npy(made.frames[shown]))
        return {"shown": shown.tolist()}

    def _make_quality(self, making: CellWriter) -> Record:
        name = making.cell.request["method"]
        # first, so that a density that cannot be reached costs nothing
        request, config, budget = self._within_budget(making.cell)
        reference, dense = self._reference(making.cell)
        self._warm_up(request, config)
        resumed = None
        if name not in FLOORS:  # which compute their own dense steps
            held, _ = self._held[FORMATS["reference"]]
            resumed = self._openings.resumed(held, lambda: make_method(studied_entry(name), config))
        made = generate_frames(self.pipe, request, config, method=resumed, fuse=self.evaluation.fuse)
        found = made.measured if self.evaluation.timed else made.measured | {"seconds": UNTIMED}
        quality = measure_frames(self.measures, made.frames, reference, self._setting())
        return {
            "row": video_row(quality, found, dense["seconds"]),
            "by_frame": quality.by_frame,
            "not_measured": quality.reasons,
            "measured_with": {name: MEASURES[name].version for name in self.measures if MEASURES[name].package},
            "budget": budget,
            "config": config.to_dict(),
            "resolved": request.to_dict() | {"model": None},
        }

    def _make_capture(self, making: CellWriter) -> Record:
        calls = self._capture(making.cell)
        asked = {name: value for name, value in making.cell.request.items() if name != "capture"}
        about = asked | {MODEL: preset_in(self.folder)}
        making.write(making.cell.files[0], pack_captures(calls, about))
        return {"calls": [call.name for call in calls], "heads": calls[0].q.shape[1]}

    def _capture(self, cell: Cell) -> list[CapturedCall]:
        request, asked = self._fitted(cell), cell.request["capture"]
        rest = {name: value for name, value in asked.items() if name != "steps"}
        return capture_calls(self.pipe, request, Selection(**rest, steps=captured_steps(asked["steps"], request.steps)))

    def _make_retrieval(self, making: CellWriter) -> Record:
        config = ResearchConfig.from_dict(making.cell.request["config"])
        calls = self._captured(making.cell)
        return {"calls": [measure_call(call, config, self.base.device) for call in calls]}

    def _make_forwards(self, making: CellWriter) -> Record:
        request = self._fitted(making.cell)
        watched = WatchedForwards(ResearchConfig.from_dict(making.cell.request["config"]), plan_steps(request.steps))
        with watched.on(self.pipe):
            run: dict[str, Any] = {"method": watched, "recall_rows": 0, "decode": False, "fuse": False}
            generate_frames(self.pipe, request, MethodConfig(), **run)
        return watched.record()

    def _make_budget(self, making: CellWriter) -> Record:
        name, density = making.cell.request["method"], making.cell.request["density"]
        budget_field(name)  # a method without one needs no capture
        calls = [call.to(self.base.device) for call in self._captured(making.cell)]
        request = self._set_for(self._fitted(making.cell), making.cell.request)
        return {"budget": find_budget(name, config_for(request, self.pipe), density, calls)}

    # what cells need of each other

    def _reference(self, cell: Cell) -> tuple[Frames, Record]:
        wanted = named_cell("reference", "dense", self._plain(cell), ending=".npy")
        read = lambda record: (self.load_frames(record), record)  # noqa: E731
        found: tuple[Frames, Record] = self._hold(wanted, self._dense_video, read)
        return found

    def _plain(self, cell: Cell) -> dict[str, Any]:
        """The part of a cell's request that the dense run of its prompt shares."""
        return {name: value for name, value in cell.request.items() if name in self._asked(self.base)} | {
            "method": "dense"
        }

    def _captured(self, cell: Cell) -> list[CapturedCall]:
        if "file" in cell.request:
            path = next(path for path in self.evaluation.captures if file_hash(path) == cell.request["file"])
            return read_captures(path)[0]
        own = cell.format == FORMATS["retrieval"]
        capture: dict[str, Any] = {"steps": "first" if own else "spread", "values": not own}
        capture |= {"thin_heads": True, "first_branch": True} | ({} if own else {"layers": spread_layers(self.pipe)})
        wanted = named_cell("capture", "dense", self._plain(cell) | {"capture": capture}, ending=".safetensors")
        read = lambda record: read_captures(self.store.folder / wanted.files[0])[0]  # noqa: E731
        found: list[CapturedCall] = self._hold(wanted, self._capture, read)
        return found

    def _hold(self, cell: Cell, make: Callable[[Cell], Any], read: Callable[[Record], Any]) -> Any:
        """The content of a large cell: what was last asked of its format, from the store, or made, and kept there if
        things are.
        """
        if self._held.get(cell.format, ("", None))[0] != cell.name:
            self._held.pop(cell.format, None)
            record = self.store.find(cell) if self.evaluation.keep == "records" else self.need([cell])[cell.name]
            self._held[cell.format] = cell.name, make(cell) if record is None else read(record)
        return self._held[cell.format][1]

    def need(
        self, cells: Sequence[Cell], *, overwrite: bool = False, made: Callable[[Record], None] = lambda record: None
    ) -> dict[str, Record]:
        """By cell name; one that cannot be made is an error. made: told of each that was not there."""

        def make(making: CellWriter) -> None:
            made(self._make(making))

        return self.store.fill(cells, make, overwrite=overwrite)

    def _within_budget(self, cell: Cell) -> tuple[Request, MethodConfig, dict[str, Any] | None]:
        """What a cell asks for, and the budget that gives its density."""
        budget = None if cell.request["density"] is None else self._matched_budget(cell)
        request = self._set_for(self._fitted(cell), cell.request)
        config = config_for(request, self.pipe)
        if budget is not None:
            config = studied_entry(cell.request["method"]).with_budget(config, budget["field"], budget["value"])
        return request, config, budget

    def _matched_budget(self, cell: Cell) -> dict[str, Any]:
        wanted = self._budget_cell(cell)
        budget: dict[str, Any] = self.need([wanted])[wanted.name]["budget"]
        if reason := self._refusal(cell):
            raise UnreachableDensityError(reason)
        return budget

    def _budget_cell(self, cell: Cell) -> Cell:
        return budget_cell(self._asked(self.spare()), cell.request)

    def _fitted(self, cell: Cell) -> Request:
        fields = {field.name for field in dataclasses.fields(Request)} - {"changes", "method"}
        asked = {name: value for name, value in cell.request.items() if name in fields}
        return fit_to_pipeline(Request(**asked, method="dense", model=self.base.model), self.pipe)


def measure_benchmark(name: str) -> list[Line]:
    """What park bench NAME measures here, after its gate; each line says where it was measured."""
    from parklab.bench.gates import expect_all_pass
    from parklab.bench.registry import BENCHES
    from parklab.bench.timing import bench_device, gpu_environment, roofline

    device, bench = bench_device(), BENCHES[name]
    torch.manual_seed(0)
    expect_all_pass(bench.gate(device))
    facts, peak = gpu_environment(), roofline(device)
    return [{**line, "environment": facts} for line in bench.measure(device, peak)]
