"""`park reproduce likeness`: what a dense run is measured for, and what is said of it beside real models."""

import json
import math

import pytest
import torch

pytest.importorskip("diffusers")

import tiny_families
from parkattn.dense import Dense
from parkattn.hosts.diffusers import Session
from parkattn.settings import MethodConfig
from parklab.bench import step_caches
from parklab.experiments import reproduce
from parklab.experiments.catalogue import EXPERIMENTS
from parklab.experiments.forwards import TOKENS_AT_ONCE, WatchedForwards, compared, plan_steps
from parklab.experiments.likeness import CONDITIONAL, GUIDED, PUBLISHED, STEPS, UNCONDITIONAL
from parklab.experiments.mismatches import REPRESENTATIONS
from parklab.experiments.runner import Lab
from parklab.research import ResearchConfig
from parklab.sprites.grammar import EXAMPLE
from parklab.store import Cell
from parklab.studio.generate import generate_frames, pipeline_for
from parklab.studio.request import Request, prepare
from reproduce_cases import gathered, quick

SMALL = {"steps": 4, "frames": 9, "height": 64, "width": 96, "guidance": 1.0}


def _retrieval(values, prompt="a"):
    asked = {"prompt": prompt, "guidance": 1.0}
    recall = dict.fromkeys(REPRESENTATIONS, values)
    orders = {order: {"top_k": recall, "top_p": recall} for order in ("Clustered", "Original")}
    call = {"tokens": [75_600, 75_600], "blocks": [128, 512], "recall": orders}
    return Cell(name=f"retrieval {prompt}", format="f", request=asked), {"request": asked, "calls": [call]}


def _run(ratios, prompt="a", branch="cond"):
    asked = {"prompt": prompt, "guidance": 5.0}
    later = {"ratio_std": 0.1, "cosine_distance": 0.2, "output_change": 0.3}
    rows = [{"transformer": "transformer", "branch": branch, "step": 0}]
    rows += [{**rows[0], "step": step, "ratio": ratio, **later} for step, ratio in enumerate(ratios, start=1)]
    record = {"request": asked, "forwards": rows, "densities": {"10": [[0.1, 0.2], [0.3, 0.4]], "49": [[0.6, 0.8]]}}
    return Cell(name=f"forwards {prompt}", format="f", request=asked), record


def _result(*pairs):
    return EXPERIMENTS["likeness"].result(gathered(*pairs))


def _rows(result, *wanted):
    return [dict(zip([c.name for c in result.table.columns], row, strict=True)) for row in result.table.rows
            if all(value in row for value in wanted)]  # fmt: skip


def _findings(result):
    return {finding.statement.partition(":")[0]: finding for finding in result.findings}


def test_a_model_that_moves_as_wan_does_is_near_it_and_one_that_stands_still_is_not():
    wan = PUBLISHED["Wan2.1-1.3B"][CONDITIONAL]
    same, other = (_findings(_result(_run(ratios))) for ratios in (wan, [1.05] * (STEPS - 1)))
    assert {name: finding.verdict for name, finding in same.items()} == {
        "ratio of residuals, conditional, first fifth": "held",
        "ratio of residuals, conditional, middle": "held",
        "ratio of residuals, conditional, last fifth": "held",
    }
    assert {finding.verdict for finding in other.values()} == {"not held"}
    row = _rows(_result(_run(wan)), "ratio of residuals", "last step")[0]
    assert row["measured"] == pytest.approx(wan[-1]) and row["Wan2.1-1.3B"] == pytest.approx(wan[-1])
    assert row["HunyuanVideo"] == pytest.approx(PUBLISHED["HunyuanVideo"][CONDITIONAL][-1])


def test_in_fewer_steps_the_published_ratios_are_those_of_the_same_stretch_of_the_run():
    wan = PUBLISHED["Wan2.1-14B"][CONDITIONAL]
    # the step at a tenth of the run has the noise of theirs at a tenth
    every_fifth = [math.prod(wan[place : place + 5]) for place in range(0, STEPS - 5, 5)]
    result = _result(_run(every_fifth))
    assert _rows(result, "last step")[0]["Wan2.1-14B"] == pytest.approx(every_fifth[-1])
    assert _findings(result)["ratio of residuals, conditional, middle"].held


def test_recall_between_the_papers_models_holds_and_recall_far_below_both_does_not():
    between, below = (_findings(_result(_retrieval(values))) for values in ([0.75, 0.75], [0.2, 0.2]))
    name = "recall of top-k 0.1, clustered, mean"
    assert between[name].margin == pytest.approx(0.7705 - 0.7348)
    assert (between[name].verdict, below[name].verdict) == ("held", "not held")
    row = _rows(_result(_retrieval([0.2, 0.4, 0.6])), "recall of top-k 0.1", "clustered, Full x Full", "heads: mean")[0]
    assert (row["measured"], row["Wan2.1-14B"], row["HunyuanVideo"]) == pytest.approx((0.4, 0.7348, 0.7705))


def test_intervals_are_over_videos_and_quantiles_over_heads():
    result = _result(_run([0.9] * 4, "a"), _run([0.7] * 4, "b"))
    middle = _rows(result, "ratio of residuals", "middle")[0]
    assert middle["measured"] == pytest.approx(0.8) and middle["±"] == pytest.approx(12.71 * 0.1, rel=1e-3)
    spread = {row["at"]: row["measured"] for row in _rows(result, "density at p = 0.9", "step 10")}
    assert spread["heads: median"] == pytest.approx(0.25) and spread["heads: P95"] == pytest.approx(0.4)
    assert [row["measured"] for row in _rows(result, "density at p = 0.9", "step 49")] == pytest.approx([0.7])


def test_a_branch_that_nobody_published_is_measured_and_compared_with_nothing():
    result = _result(_run([0.9, 0.8], branch="uncond_stg"))
    assert _rows(result, "uncond_stg") and not result.findings
    assert "measured, uncond_stg" in {series.name for panel in result.figure.rows[0] for series in panel.series}


def test_cells_that_are_missing_are_named_in_the_note():
    cell, record = _run([0.9, 0.8])
    other, _ = _run([0.9], "b")
    result = EXPERIMENTS["likeness"].result(gathered((cell, record), (other, {}), failures={other.name: "no room"}))
    assert "1 of 2 cells not run: no room" in result.note
    assert "not run" in EXPERIMENTS["likeness"].result(gathered((other, {}), failures={other.name: "no room"})).note


def test_two_residuals_are_compared_token_by_token_over_any_number_of_them():
    torch.manual_seed(0)
    before = torch.randn(1, TOKENS_AT_ONCE + 3, 8)
    doubled = compared(2 * before, before)
    # rounding of float32: a norm of 8 numbers and a quotient
    assert doubled["ratio"] == pytest.approx(2.0, abs=1e-6) and doubled["ratio_std"] < 1e-6
    assert abs(doubled["cosine_distance"]) < 1e-6
    assert compared(-before, before)["cosine_distance"] == pytest.approx(2.0, abs=1e-6)
    half = torch.cat([before[:, :2], 3 * before[:, 2:4]], 1)
    assert compared(half, before[:, :4])["ratio_std"] == pytest.approx(torch.tensor([1.0, 1, 3, 3]).std().item())


def test_ratios_are_those_that_diffusers_calibrates_its_own_cache_with():
    request, folder = prepare(Request(prompt=EXAMPLE, method="dense", device="cpu", **SMALL))
    pipe = pipeline_for(request, folder)
    watched = WatchedForwards(ResearchConfig(query_clusters=2, key_clusters=4), ())

    def run(method=None):
        generate_frames(
            pipe, request, MethodConfig(), method=method or Dense(), recall_rows=0, decode=False, fuse=False
        )

    with watched.on(pipe):
        run(watched)
    theirs = step_caches.calibrate(pipe.transformer, SMALL["steps"], torch.float32, run)
    ours = [row["ratio"] for row in watched.rows if "ratio" in row and row["branch"] == "cond"]
    # they mean in float32 and add 1e-8 to a norm
    assert theirs[1:] == pytest.approx(ours, rel=1e-5) and not watched.densities
    count = len(watched.rows)
    run()
    assert len(watched.rows) == count, "nothing stays on the pipeline"


@pytest.mark.parametrize(
    ("name", "layers", "branches"),
    [
        ("wan vace", 3, {"conditional", "unconditional"}),
        ("hunyuan i2v, latent concat", 3, {"conditional", "unconditional"}),
        ("hunyuan 1.5", 2, {"conditional", "unconditional"}),
        ("cogvideox", 2, {"cond_uncond"}),
        ("ltx", 2, {"cond_uncond"}),
    ],
)
def test_other_families_are_measured_by_the_branches_that_they_have(name, layers, branches):
    family = tiny_families.FAMILIES[name]
    pipe, watched = family.build(), WatchedForwards(ResearchConfig(query_clusters=2, key_clusters=4), (1,))
    with watched.on(pipe), Session(pipe, watched, fuse=False):
        family.run(pipe)
    assert [len(found) for found in watched.densities.values()] == [layers]
    assert len(watched.rows) == family.forwards * tiny_families.STEPS
    record = watched.record() | {"request": {"guidance": None}}
    rows = _rows(_result((Cell(name="a", format="f", request={}), record)), "ratio of residuals", "last step")
    assert {row["of"] for row in rows} == branches


def test_published_curves_have_a_ratio_for_each_step_after_the_first():
    assert {len(ratios) for branches in PUBLISHED.values() for ratios in branches.values()} == {STEPS - 1}
    assert set(PUBLISHED["Wan2.1-1.3B"]) == {CONDITIONAL, UNCONDITIONAL}


def test_without_a_guidance_that_is_asked_for_both_branches_run_and_retrieval_keeps_its_cells(tmp_path):
    lab = Lab(quick(), tmp_path)
    retrieval, forwards = EXPERIMENTS["likeness"].cells(lab)
    assert [retrieval] == lab.retrieval_cells() and forwards.request["guidance"] == GUIDED
    lab = Lab(quick(guidances=(1.0,)), tmp_path)
    assert [cell.request["guidance"] for cell in EXPERIMENTS["likeness"].cells(lab)] == [1.0, 1.0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("likeness")
    return out, reproduce.run_experiments(["likeness"], quick(), out)


def test_a_run_of_the_small_model_measures_every_step_of_both_branches_and_every_head(tiny):
    out, outcome = tiny
    assert not outcome.failures
    record = json.loads(next((out / "cells").glob("forwards-*.json")).read_text())
    places = [(row["branch"], row["step"]) for row in record["forwards"]]
    assert places == [(branch, step) for step in range(4) for branch in ("cond", "uncond")]
    assert all(("ratio" in row) == (row["step"] > 0) for row in record["forwards"])
    assert set(record["densities"]) == {str(step) for step in plan_steps(4)}
    assert {(len(layers), len(layers[0])) for layers in record["densities"].values()} == {(6, 3)}
    assert all(0 < value <= 1 for layers in record["densities"].values() for layer in layers for value in layer)
    section = next(section for section in outcome.sections if section.label == "likeness")
    assert {row[0] for row in section.result.table.rows} >= {"ratio of residuals", "density at p = 0.9"}


def test_a_second_run_measures_nothing_again(tiny):
    out, first = tiny
    again = reproduce.run_experiments(["likeness"], quick(), out)
    assert first.made > 0 and (again.made, again.kept) == (0, 2)
