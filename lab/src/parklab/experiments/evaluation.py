"""What everything is measured on, the names of what is measured, and how measuring it can end."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parkattn.checks import expect_choice, expect_count, expect_fraction
from parkattn.methods import method_entry
from parkattn.settings import LARGEST_SEED
from parklab.experiments.quality import named_measures
from parklab.files import sha256_of
from parklab.store import Cell, Record, content_hash
from parklab.studio.request import expect_guidance

VERSIONS = {
    "reference": 1, "capture": 2, "retrieval": 1, "forwards": 1, "quality": 2, "frames": 1, "budget": 1, "times": 1,
    "bench": 1,
}  # fmt: skip
FORMATS = {kind: f"parkattn.reproduce.{kind}.{version}" for kind, version in VERSIONS.items()}
FLOOR = "dense again"
OWN_FLOOR = "dense by our kernel"  # of PARK's backend, on a GPU: as exact, and rounded otherwise
FLOORS = (FLOOR, OWN_FLOOR)
ALL_DENSE = {"dense_fraction": 1.0, "own_dense": True}  # settings of PARK
KEEPS = ("all", "records")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What everything is measured on; None: the model's own value."""

    prompts: tuple[str, ...]
    spare_prompt: str  # densities are calibrated on it
    seeds: tuple[int, ...] = (0,)
    guidances: tuple[float | None, ...] = (None,)
    methods: tuple[str, ...] = ()
    densities: tuple[float, ...] = (0.5,)
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)  # of every method that has the field
    method_changes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # of single methods, by name
    steps: int | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    offload: str = "none"
    # True: the blocks around attention run compiled, which pays in many runs that are each too small for it
    fuse: bool | None = None
    said: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the changes, those that hold for captures too
    measures: str | None = None  # of quality: names separated by commas, or all
    weights: Path | None = None  # of VBench's backbones
    captures: tuple[Path, ...] = ()  # retrieval is measured on these files instead
    records: tuple[Path, ...] = ()  # JSON lines of earlier measurements, for the experiments that can read them
    quick: bool = False  # of a series of settings only those that its findings compare
    # nothing is made: the report of the cells that are there, also those of a device this machine has not
    draw: bool = False
    # False: no seconds, no warm-up, and runs of one prompt share the dense steps that they begin with
    timed: bool = True
    # records: dense frames and captures are held in memory only, and made again when a later run needs them
    keep: str = "all"

    def __post_init__(self) -> None:
        expect_choice("keep", self.keep, KEEPS)
        for density in self.densities:
            expect_fraction("densities", density, zero=False)
        if not self.prompts or not self.seeds or not self.guidances or not self.densities:
            raise ValueError("prompts, seeds, guidance, densities: expected at least one of each, got none; name some.")
        for seed in self.seeds:
            expect_count("seeds", seed, least=0, most=LARGEST_SEED)
        for guidance in self.guidances:
            if guidance is not None:
                expect_guidance(guidance)
        for name in self.methods:
            method_entry(name)
        if self.measures is not None:
            named_measures(self.measures)


class CellError(Exception):
    def __init__(self, cell: Cell, reason: str, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.cell, self.reason, self.unreachable = cell, reason, unreachable


class UnreachableDensityError(ValueError):
    """No budget of a method gives the density at this size: a fact about the method, no failure."""


class FilledCells(NamedTuple):
    records: dict[str, Record]  # by cell name, as the others
    failures: dict[str, str]  # why it could not be made
    left_out: dict[str, str]  # why there is nothing to make


def named_cell(
    kind: str, label: str, asked: dict[str, Any], *, ending: str | None = None, group: str | None = None
) -> Cell:
    """Its name holds its hash: cells of other settings in the same folder are other files."""
    name = f"{kind}-{label}-{content_hash([FORMATS[kind], asked])[:16]}"
    return Cell(
        name=name, format=FORMATS[kind], request=asked, files=(f"{name}{ending}",) if ending else (), group=group
    )


def at_density(density: float | None) -> str:
    """As names of cells have it."""
    return "" if density is None else f"-at-{density:g}"


@functools.cache
def file_hash(path: Path) -> str:
    found = sha256_of(path)
    if found is None:
        raise ValueError(
            f"captures: expected a file written by park capture, got {path}, which cannot be read; check the path."
        )
    return found
