"""Runs of one prompt share the dense steps that they begin with, and give the same videos."""

import dataclasses

import pytest
import torch

pytest.importorskip("diffusers")

from parkattn.dense import Dense
from parkattn.methods import configured_method
from parkattn.site import CallSite
from parklab.experiments import opening, reproduce
from parklab.store import read_record
from reproduce_cases import quick

NAMES = ["tab:main_quality_efficiency"]
TIMES = {
    "seconds",
    "dense_seconds",
    "denoise_seconds",
    "dense_denoise_seconds",
    "attention_seconds",
    "dense_attention_seconds",
}


def _rows(folder):
    found = map(read_record, folder.glob("cells/quality-*.json"))
    return {(r["request"]["method"], r["request"]["prompt"], r["request"]["guidance"]): r["row"] for r in found}


def _evaluation(**given):
    """Two prompts, so that one's steps could be taken for the other's."""
    return dataclasses.replace(
        quick(methods=("park",), guidances=(5.0,), **given),
        prompts=tuple(reproduce.held_out_prompts(2)[0]),
    )


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    out = tmp_path_factory.mktemp("timed")
    reproduce.run_experiments(NAMES, _evaluation(keep="records"), out)
    return _rows(out)


@pytest.mark.parametrize("keep", ["records", "all"])
def test_untimed_rows_are_the_timed_ones_without_seconds(timed, tmp_path, monkeypatch, keep):
    taken = []

    class Watched(opening.ResumedMethod):
        def __call__(self, *call):
            found = super().__call__(*call)
            taken.append(self.taken)
            return found

    monkeypatch.setattr(opening, "ResumedMethod", Watched)
    outcome = reproduce.run_experiments(NAMES, _evaluation(timed=False, keep=keep), tmp_path)
    found = _rows(tmp_path)
    assert len(found) == 4 and timed.keys() == found.keys()
    for which, row in found.items():
        measured, expected = (
            {name: value for name, value in each.items() if name not in TIMES} for each in (row, timed[which])
        )
        assert measured == expected
        assert all(row[name] is None and timed[which][name] is not None for name in TIMES)
    assert max(taken) == 2 * 6  # one step, two branches, six layers
    table = next(section.result.table for section in outcome.sections if section.result is not None)
    columns = [column.name for column in table.columns]
    assert "PSNR" in columns and "seconds" not in columns and "speedup" not in columns
    # what a later run finds in the store it does not take for its own
    for path in (tmp_path / "cells").glob("quality-park-*.json"):
        path.unlink()
    reproduce.run_experiments(NAMES, _evaluation(timed=False, keep=keep), tmp_path)
    assert all(_rows(tmp_path)[which]["psnr"] == row["psnr"] for which, row in timed.items())


def test_nothing_is_taken_after_a_sparse_call_nor_beyond_the_limit():
    q, k, v = (torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    kept = opening.DenseOpening(40, limit=3 * q.nbytes)
    for step in range(4):
        kept(q, k, v, CallSite(step=step, total_steps=40))
    assert len(kept.outputs) == 3
    resumed = opening.ResumedMethod(Dense(), kept)
    computed = []
    site = CallSite(total_steps=40, dense=lambda: computed.append(1) or torch.zeros_like(q))
    out = [resumed(q, k, v, dataclasses.replace(site, step=step)).out for step in range(4)]
    assert (
        torch.equal(out[2], kept.outputs[opening._place(CallSite(step=2))])
        and len(computed) == 1
        and resumed.taken == 3
    )
    out[0].zero_()
    assert kept.outputs[opening._place(CallSite())].abs().sum() > 0  # what a run does with its copy is its own affair

    sparse = opening.ResumedMethod(configured_method("park", dense_steps=1, query_clusters=4, key_clusters=4), kept)
    phases = [sparse(q, k, v, dataclasses.replace(site, step=step)).stats.phase for step in (0, 1, 0)]
    assert phases[:2] == ["dense", "refresh"] and sparse.taken == 1
