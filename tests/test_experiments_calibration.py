"""Which density makes a run cost what is asked for, counted on schedules and held against measured runs."""

import functools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers")

from parkattn.anchors import anchor_count
from parkattn.methods import configured_method, make_method, method_entry
from parkattn.park import ParkConfig
from parkattn.planned import make_plan
from parkattn.reuse import History, Schedule, dense_prefix
from parkattn.site import CallSite
from parklab.experiments import calibration, runner
from parklab.experiments.calibration import MATCHED, cost_at, dense_share, density_at, find_budget, layers_in
from parklab.experiments.campaign import read_campaign
from parklab.experiments.captures import CapturedCall
from parklab.metrics.budget import CLOSE_ENOUGH, density_of_sparse_calls
from parklab.research import ResearchConfig
from parklab.studio import checkpoints
from reproduce_cases import matched_2k, quick

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
# keys in multiples of 128: 7 of 15 where half was asked for
FURTHER_OFF = {"matched_2k": {("mc-sparse", 1.0, 0.5), ("mc-sparse", 5.0, 0.5)}}
STEPS = (1, 2, 4, 12, 16, 30, 50, 80)
PROFILES = [name for name in ParkConfig.PROFILES if name != "paper"]


@functools.cache
def campaign(name):
    return read_campaign(RESULTS / f"{name}.jsonl")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return runner.Lab(matched_2k(), tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("steps", STEPS)
def test_the_share_of_dense_calls_is_that_of_the_prefix_the_anchors_and_the_dense_layers(steps):
    prefix = dense_prefix(ParkConfig(), steps)
    assert dense_share(make_method("park"), steps, 6) == pytest.approx(prefix / steps)
    two_layers = configured_method("park", dense_layers=(0, 3))
    assert dense_share(two_layers, steps, 6) == pytest.approx((2 + 4 * prefix / steps) / 6)
    for name in PROFILES:
        config = ParkConfig.profile(name)
        assert dense_share(make_method("park", config), steps, 6) == pytest.approx(anchor_count(config, steps) / steps)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
def test_noise_levels_move_anchors_and_leave_their_number(steps, shift):
    times = [1 - step / steps for step in range(steps)]
    levels = tuple(shift * t / (1 + (shift - 1) * t) for t in times)
    for name in PROFILES:
        config = ParkConfig.profile(name)
        schedule, refreshed, dense = Schedule(config), None, 0
        for step in range(steps):
            phase = schedule.phase(CallSite(step=step, total_steps=steps, noise_levels=levels), History(refreshed)).name
            refreshed = step if phase in ("anchor", "refresh") else refreshed
            dense += phase in ("dense", "anchor")
        assert dense_share(make_method("park", config), steps, 1) == dense / steps


def test_a_density_at_a_cost_gives_that_cost():
    for share in (0.0, 0.14, 1 / 3, 0.375):
        for cost in (0.4, 0.4375, 0.95):
            # densities are rounded to six digits
            assert cost_at(density_at(cost, share), share) == pytest.approx(cost, abs=5e-7)
    assert density_at(0.325, 1 / 3) < 0 and density_at(1.0, 1.0) == 0.0


@pytest.mark.parametrize("method", ["park", "svg2", "svg-ear", "sparsepr", "sol", "xattention"])
def test_measured_runs_cost_what_the_schedule_says(lab, method):
    records = [record for key, record in campaign("matched_2k").items() if key.startswith(f"quality-{method}-at-0.1-")]
    assert records
    for record in records:
        row = record["row"]
        # means of float32 densities
        assert row["cost"] == pytest.approx(cost_at(row["density"], lab.dense_share(record["request"])), abs=1e-6)


@pytest.mark.parametrize("folder", ["matched_2k", "gpu_7168", "gpu_75600", "gpu_75600_same_schedule"])
def test_measured_runs_have_the_density_that_park_has_there(folder):
    """Budgets come from one other prompt, so what was asked for is met nearly; by all methods alike, but for those of
    FURTHER_OFF, which docs/measured/cpu.md names.
    """
    reached = {}
    for record in campaign(folder).values():
        asked = record["request"]
        if "row" in record and asked["density"] is not None and "profile" not in asked:
            what = asked["method"], asked["guidance"], asked["density"]
            reached.setdefault(what, []).append(record["row"]["density"])
    means = {what: statistics.fmean(found) for what, found in reached.items()}
    apart = {what: mean - means["park", *what[1:]] for what, mean in means.items() if ("park", *what[1:]) in means}
    assert len(apart) >= 20
    assert {what for what, off in apart.items() if abs(off) > MATCHED} == FURTHER_OFF.get(folder, set())


def captured_layers(dense_layer_scale):
    """Calls of two layers; attention of the first is spread or sharp by its scale."""
    draw = torch.Generator().manual_seed(0)
    calls = []
    for layer, scale in enumerate((dense_layer_scale, 1.0)):
        q, k = (scale * 2 * torch.randn(1, 2, 256, 16, generator=draw) for _ in range(2))
        calls.append(CapturedCall(q, k, CallSite(layer=layer, step=30, total_steps=50, values=k)))
    return calls


@pytest.mark.parametrize("method", ["park", "svg2", "svg-ear"])
def test_a_budget_gives_its_density_to_the_calls_that_stay_sparse(method):
    config = method_entry(method).config.from_dict({"dense_layers": [0]})
    found = [find_budget(method, config, 0.5, captured_layers(scale)) for scale in (0.01, 3.0)]
    assert found[0] == found[1]  # whatever the first layer attends to
    planner = make_method(
        method, method_entry(method).with_budget(config, found[0]["field"], found[0]["value"])
    ).planner
    _, sparse = captured_layers(0.01)
    reached = make_plan(sparse.q, sparse.k, planner, sparse.site, None).density().mean().item()
    assert reached == pytest.approx(found[0]["density"]) and abs(reached - 0.5) < 10 * CLOSE_ENOUGH
    # with the layer counted in, the budget is another
    everywhere = find_budget(method, config.replace(dense_layers=[]), 0.5, captured_layers(0.01))
    assert everywhere["value"] != found[0]["value"]


def test_a_density_needs_a_call_that_stays_sparse():
    method = make_method("park", {"dense_layers": [0, 1]})
    with pytest.raises(
        ValueError,
        match=r"expected one with sparse calls among those captured, got park, .*; ask for more steps or fewer dense_layers",
    ):
        density_of_sparse_calls(method, [(call.q, call.k, call.site) for call in captured_layers(1.0)])


def test_layers_are_counted_by_the_names_of_weights(monkeypatch):
    folder = checkpoints.find_model(None)
    assert layers_in(folder) == json.loads((folder / "transformer/config.json").read_text())["num_layers"]
    names = [f"transformer_blocks.{i}.attn.to_q.{part}" for i in range(2) for part in ("weight", "bias")]
    names += [f"single_transformer_blocks.{i}.attn.to_q.weight" for i in range(3)]
    names += [
        "context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight",
        "transformer_blocks.0.ff.net.0.proj.weight",
    ]
    tensors = dict.fromkeys(names, (1,))
    part = SimpleNamespace(name="transformer", class_name="HunyuanVideoTransformer3DModel", tensors=tensors)
    monkeypatch.setattr(calibration, "judge_folder", lambda root: SimpleNamespace(components=(part,)))
    assert layers_in(folder) == 5


def test_cells_and_budgets_of_methods_keep_the_names_that_records_have(lab):
    names = set()
    for request in lab.requests():
        asked = [(name, density) for name in ("park", "svg2") for density in (0.1, 0.2)]
        cells = [lab.quality_cell(request, name, density=density) for name, density in asked]
        names |= {each.name for cell in cells for each in (cell, lab._budget_cell(cell))}
        names.add(lab.quality_cell(request, "sol").name)
    assert names >= {
        "quality-park-at-0.2-0535170b2b792143", "quality-svg2-at-0.2-03a1c0058b497072",
        "budget-park-at-0.1-7f90191be9c86318", "budget-svg2-at-0.1-dc893c55f364b174",
    }  # fmt: skip


def test_a_profiles_budget_is_found_again_when_the_profile_changes(tmp_path, monkeypatch):
    lab = runner.Lab(quick(), tmp_path)
    request = lab.requests()[0]

    def names():
        cells = [lab.quality_cell(request, "park", density=0.5, profile=name) for name in (None, "fast")]
        return [lab._budget_cell(cell).name for cell in cells]

    before = names()
    assert before[0].startswith("budget-park-at-0.5-") and before[1].startswith("budget-fast-at-0.5-")
    monkeypatch.setitem(ResearchConfig.PROFILES, "fast", {**ResearchConfig.PROFILES["fast"], "anchors": 9})
    assert [old == new for old, new in zip(before, names(), strict=True)] == [True, False]
