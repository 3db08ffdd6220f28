"""A quick evaluation, and cells with made-up records, for the tests of `park reproduce`."""

import pytest

pytest.importorskip("diffusers")

from parklab.experiments import reproduce
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
        "psnr": psnr,
        "ssim": 0.9,
        "lpips": None,
        "density": 0.5,
        "density_all_steps": 0.6,
        "recall": None,
        "error": 0.1,
        "cost": 0.6,
        "cost_two_passes": 0.7,
        "seconds": 2.0,
        "dense_seconds": 3.0,
    }
    cell = Cell(name=f"{prompt} {method} {changes}", format="f", request=asked)
    return cell, {"request": asked, "row": row}


def gathered(*pairs, failures=None):
    missing = failures or {}
    return CellRecords([cell for cell, _ in pairs], {c.name: r for c, r in pairs if c.name not in missing}, missing)
