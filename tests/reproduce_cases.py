"""A quick evaluation, and cells with made-up records, for the tests of `park reproduce`. And its long test:

python tests/reproduce_cases.py [--every N]

`park reproduce` (with frames that cost nothing) is cut off before every file operation: by a stop, a power cut, a full
disk and SIGKILL; three processes share a folder; finished folders are damaged. The same command again must then give
the same bytes. Every count but the runs must be 0, else exit code 1. A few of the same trials are in
tests/test_experiments.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("diffusers")

import campaign_store
import disturbed_files as disturb
from disturbed_files import Tally, Trial
from parkattn.site import CallSite
from parklab.experiments import calibration, report, reproduce, runner
from parklab.experiments.captures import CapturedCall
from parklab.experiments.results import CellRecords
from parklab.store import Cell


def quick(**given):
    asked = {
        "model": "tiny",
        "prompts": None,
        "prompt_file": None,
        "device": "cpu",
        "methods": ("park", "svg"),
        **given,
    }
    return reproduce.evaluation_for(quick=True, **asked)


def matched_2k(**given):
    """What the records in benchmarks/results/matched_2k.jsonl were asked."""
    asked = {"prompts": 8, "guidances": (1.0, 5.0), "densities": (0.1, 0.2, 0.3, 0.4, 0.5), "keep": "records", **given}
    return reproduce.evaluation_for(model="tiny", prompt_file=None, quick=False, device="cpu", **asked)


def quality(prompt, method, psnr, **changes):
    asked = {"prompt": prompt, "seed": 0, "guidance": 1.0, "method": method, "changes": changes, "density": 0.5}
    row = {
        "psnr": psnr, "ssim": 0.9, "lpips": None, "density": 0.5, "density_all_steps": 0.6, "recall": None,
        "error": 0.1, "cost": 0.6, "cost_two_passes": 0.7, "seconds": 2.0, "dense_seconds": 3.0,
    }  # fmt: skip
    cell = Cell(name=f"{prompt} {method} {changes}", format="f", request=asked)
    return cell, {"request": asked, "row": row}


def gathered(*pairs, failures=None):
    missing = failures or {}
    return CellRecords([cell for cell, _ in pairs], {c.name: r for c, r in pairs if c.name not in missing}, missing)


# The long test ------------------------------------------------------------------------------------------


NAMES = ["tab:module_ablation", "matched_densities", "fig:generation_example"]
# cells that finished ones no longer need: a damaged one is made again when a new cell asks for it
ON_DEMAND = ("reference-", "capture-", "budget-")


def run_reproduce(
    folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None, keep: str = "all"
) -> None:
    """Cells of another seed are other files: nothing is ever overwritten."""
    asked = {"seeds": (seed,), "methods": ("park", "svg2"), "device": "cpu", "keep": keep}
    evaluation = reproduce.evaluation_for(model="tiny", prompts=1, prompt_file=None, quick=True, **asked)
    outcome = reproduce.run_experiments(NAMES, evaluation, folder, say=say)
    if outcome.failures:
        raise AssertionError(outcome.failures)


@contextlib.contextmanager
def without_a_model() -> Iterator[None]:
    """disturbed_files' stand-ins, and those of the runner."""
    with disturb.without_a_model(), contextlib.ExitStack() as stack:
        q, k, v = (torch.full((1, 1, 4, 2), value) for value in (1.0, 2.0, 3.0))
        call = CapturedCall(q, k, CallSite(values=v))
        stands_in: list[tuple[Any, str, Any]] = [
            (runner, "capture_calls", lambda *arguments: [call]),
            (runner, "spread_layers", lambda pipe: [0, 1]),
            (calibration, "solve_budget", lambda density, target: (0.5, target)),
            (report, "environment", lambda: dict(disturb.WHEN)),
            (report, "draw", lambda figure: None),
            (reproduce, "held_out_scenes", functools.cache(reproduce.held_out_scenes)),
            (disturb, "_derived", lambda name: Path(name).name == "report.json"),
        ]
        for module, name, value in stands_in:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def cut_off(trial: Trial, every: int, hows: tuple[str, ...]) -> Tally:
    found = Tally()
    for how in hows:
        for at in range(0, trial.count, every):
            found += trial.fresh(at, how)
    return found


def shared(trial: Trial, rounds: int) -> Tally:
    """Three processes on one folder give one folder's bytes and leave nothing behind."""
    found = Tally()
    for _ in range(rounds):
        place = trial._place("shared")
        tally = Tally(runs=1, refused=campaign_store._in_processes([lambda place=place: trial.command(place, 0)] * 3))
        there = disturb.contents(place)
        tally.other_bytes += there != trial.expected[0]
        tally.left += sum(Path(name).name.startswith(".park-") for name in there)
        found += tally
    return found


def damaged(trial: Trial, every: int) -> Tally:
    """Every file that the report needs, damaged in every way: the same command makes the folder whole again."""
    found = Tally()
    names = [name for name in trial.expected[0] if not Path(name).name.startswith(ON_DEMAND)]
    cases = [(name, damage) for name in names for damage in campaign_store.DAMAGES]
    for name, damage in cases[::every]:
        place = trial._place("damaged", start=0)
        damage(place / name)
        tally = Tally(runs=1)
        trial._again(place, 0, False, tally, 0)
        found += tally
    return found


def trials(every: int) -> Iterator[tuple[str, Tally]]:
    folder = Path(tempfile.mkdtemp())
    try:
        with without_a_model():
            trial = Trial(run_reproduce, folder)
            yield "stops", cut_off(trial, every, (disturb.STOP, disturb.POWER_CUT, disturb.DISORDER))
            yield "full disk", cut_off(trial, every, (disturb.FULL_DISK,))
            yield "SIGKILL", campaign_store.killed(trial, every)
            yield "shared", shared(trial, max(1, 10 // every))
            yield "damaged", damaged(trial, every)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--every", type=int, default=1, help="every Nth operation and damage")
    asked = reader.parse_args()
    clean = True
    for part, found in trials(asked.every):
        clean &= campaign_store.report(part, "reproduce", found)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
