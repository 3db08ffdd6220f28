"""Cells by name: what can be asked of one evaluation in one folder, and what is there already."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from parkattn.methods import configured_method
from parklab.experiments.calibration import cost_at, dense_share, layers_in, named_profile
from parklab.experiments.campaign import CampaignStore, is_campaign
from parklab.experiments.captures import blocks_for, preset_in, preset_of_capture, settings_of_plans
from parklab.experiments.evaluation import ALL_DENSE, FLOOR, OWN_FLOOR, Evaluation, at_density, file_hash, named_cell
from parklab.experiments.mismatches import TOP_P
from parklab.experiments.quality import named_measures
from parklab.experiments.record_fields import FRONTIER, Line, read_lines
from parklab.research import studied_entry
from parklab.store import FINISHED, Cell, Record, Say
from parklab.studio import checkpoints, generate
from parklab.studio.request import Request, fit_to_pipeline, for_method, named_files, prepare, understood
from parklab.studio.video import Frames, from_npy

SHOWN = 5  # frames of a video
QUICK_CALLS = 2  # that are timed, of the last layers: some methods leave the first dense


class Cells:
    """The pipeline is loaded when the first cell needs it."""

    def __init__(self, evaluation: Evaluation, out: Path, say: Say = lambda line: None) -> None:
        self.evaluation, self.say = evaluation, say
        self.store = CampaignStore(out, say, "cells", records=evaluation.records)
        wanted = ("steps", "frames", "height", "width", "model", "device", "dtype", "offload")
        base = Request(
            prompt=evaluation.prompts[0], method="dense", **{name: getattr(evaluation, name) for name in wanted}
        )
        # records of another machine's device can be drawn on any
        self.base, self.folder = prepare(dataclasses.replace(base, device="cpu") if evaluation.draw else base)
        if evaluation.draw and base.device != "auto":
            self.base = dataclasses.replace(
                self.base, device=base.device, dtype=checkpoints.choose_dtype(base.dtype, base.device)
            )
        lines = read_lines(path for path in evaluation.records if not is_campaign(path))
        self.lines = [line for line in lines if self._is_own(line)]

    def _is_own(self, line: Line) -> bool:
        """Videos of another model are left out; kernels are of none."""
        model = str(line.get("model", "")).partition("+lora:")[0]
        names = {self.base.weights, self.evaluation.model} | ({""} if checkpoints.is_shipped(self.folder) else set())
        return line.get("format") != FRONTIER or model in names

    def quality_cell(
        self, request: Request, method: str, *, density: float | None = None, profile: str | None = None, **changes: Any
    ) -> Cell:
        """density: of the sparse steps, reached by the budget of the method or profile; None: by its own settings."""
        asked = self._asked(request, self._changes(method) | changes) | {"method": method, "density": density}
        asked |= named_profile(profile)
        if self.evaluation.measures is not None:
            asked["measures"] = named_measures(self.evaluation.measures)
        label = (profile or method).replace(" ", "-") + at_density(density)
        # a group shares its reference
        return named_cell("quality", label, asked, group=f"{request.prompt} {request.seed} {request.guidance}")

    def frames_cell(self, request: Request, method: str) -> Cell:
        asked = self._asked(request, self._changes(method)) | {"method": method, "shown": SHOWN}
        return named_cell("frames", method, asked, ending=".npy")

    def times_cell(self, method: str, density: float | None = None) -> Cell:
        """On calls of the prompt that budgets are found on."""
        asked = self._asked(self.spare(), self._changes(method)) | {"method": method, "density": density}
        asked |= {"calls": QUICK_CALLS} if self.evaluation.quick else {}
        return named_cell("times", method + at_density(density), asked)

    def bench_cells(self, benchmark: str) -> list[Cell]:
        """Of this machine's GPU; where nothing is made, of every GPU that is there."""
        if self.evaluation.draw:
            asked = [record["request"] for record in self.store.records("bench").values()]
            return [named_cell("bench", benchmark, each) for each in asked if each["benchmark"] == benchmark]
        return [named_cell("bench", benchmark, {"benchmark": benchmark, "gpu": torch.cuda.get_device_name()})]

    def load_frames(self, record: Record) -> Frames:
        return from_npy(self.store.load(record, next(iter(record["files"]))))

    def retrieval_cells(self) -> list[Cell]:
        e = self.evaluation
        if e.captures:
            given = None if e.model is None else preset_in(self.folder)
            blocks = {path: blocks_for(given or preset_of_capture(path, e.said), e.said) for path in e.captures}
            return [
                named_cell("retrieval", path.stem, {"config": settings_of_plans(config), "file": file_hash(path)})
                for path, config in blocks.items()
            ]
        own = {"config": settings_of_plans(blocks_for(preset_in(self.folder), e.changes))}
        return [named_cell("retrieval", "captured", self._asked(request) | own) for request in self.requests()]

    def forwards_cell(self, request: Request) -> Cell:
        config = blocks_for(preset_in(self.folder), self.evaluation.changes).replace(top_p=TOP_P, top_k=None)
        return named_cell("forwards", "dense", self._asked(request) | {"config": settings_of_plans(config)})

    def requests(self) -> list[Request]:
        """Every prompt, guidance and seed."""
        e = self.evaluation
        guidances = [self.base.guidance if guidance is None else guidance for guidance in e.guidances]
        return [
            dataclasses.replace(self.base, prompt=understood(prompt, self.folder), seed=seed, guidance=guidance)
            for prompt in e.prompts for guidance in guidances for seed in e.seeds
        ]  # fmt: skip

    def cost(self, asked: Mapping[str, Any]) -> float:
        """Attention of the whole run as a share of all-dense, by the density that a quality cell asks for."""
        return cost_at(asked["density"], self.dense_share(asked))

    def dense_share(self, asked: Mapping[str, Any]) -> float:
        """Of the calls of a quality cell's run, by its method's schedule."""
        request = self._set_for(self.base, asked)
        method = configured_method(
            studied_entry(request.method), request.preset, model=preset_in(self.folder), **request.changes
        )
        return dense_share(method, self.base.steps or fit_to_pipeline(self.base, self.pipe).steps or 0, self._layers)

    @functools.cached_property
    def _layers(self) -> int:
        return layers_in(self.folder)

    @functools.cached_property
    def pipe(self) -> Any:
        return generate.pipeline_for(self.base, self.folder)

    def finished(self, cells: Sequence[Cell]) -> dict[str, Record]:
        """What is there already, by cell name."""
        found = {cell.name: self.store.look(cell) for cell in cells}
        return {name: each.record for name, each in found.items() if each.state == FINISHED and each.record is not None}

    def spare(self) -> Request:
        """What is in no table."""
        return dataclasses.replace(self.base, prompt=understood(self.evaluation.spare_prompt, self.folder))

    def _changes(self, method: str) -> dict[str, Any]:
        return self.evaluation.changes | self.evaluation.method_changes.get(method, {}) | self.evaluation.said

    def _asked(self, request: Request, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Without where the weights lie: their fingerprint tells models apart, and records can move."""
        left_out = ("model", "changes", "preset", "fps")
        younger = ("quantise", "quantise_hash")  # than the records: absent there, where nothing is quantised
        given = {name: value for name, value in request.to_dict().items() if name not in left_out}
        asked = {name: value for name, value in given.items() if value is not None or name not in younger}
        hashes = named_files(changes or {})
        asked |= ({} if changes is None else {"changes": changes}) | ({"file_hashes": hashes} if hashes else {})
        return asked if self.evaluation.fuse is None else asked | {"fuse": self.evaluation.fuse}

    def _set_for(self, request: Request, asked: Mapping[str, Any]) -> Request:
        """With the method, profile and settings of what a cell asks."""
        changes = ALL_DENSE if asked["method"] == OWN_FLOOR else dict(asked["changes"])
        method = {FLOOR: "dense", OWN_FLOOR: "park"}.get(asked["method"], asked["method"])
        return for_method(dataclasses.replace(request, changes=changes, preset=asked.get("profile")), method)
