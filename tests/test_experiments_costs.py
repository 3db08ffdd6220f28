"""Profiles against methods at equal attention over the whole run, and what their calls take."""

import dataclasses

import pytest

pytest.importorskip("diffusers")

import torch

from parkattn.methods import make_method
from parkattn.park import ParkConfig
from parkattn.site import CallSite
from parklab.experiments import costs, reproduce, runner, times
from parklab.experiments.calibration import cost_at
from parklab.experiments.captures import CapturedCall
from parklab.experiments.catalogue import EXPERIMENTS
from parklab.experiments.evaluation import FLOOR
from parklab.experiments.results import CellRecords, quality_table
from parklab.experiments.tables import to_markdown
from parklab.research import ResearchConfig
from parklab.store import read_record
from parklab.studio import checkpoints
from reproduce_cases import gathered, matched_2k, quality, quick

PROFILES = [name for name in ParkConfig.long_run_profiles() if name != "paper"]
LABEL = "matched_costs"


def _pair(prompt, setting, psnr, cost, density=0.5, guidance=1.0):
    """A cell and its record, of a profile or a method."""
    method = "park" if setting in ParkConfig.PROFILES else setting
    cell, record = quality(prompt, method, psnr)
    cell.request.update(density=density, guidance=guidance, **({"profile": setting} if setting in PROFILES else {}))
    record["row"] |= {"cost": cost, "density": density}
    return dataclasses.replace(cell, name=f"{prompt} {setting} {density} {guidance}"), record


def _result(*pairs, share=0.2, **more):
    found = dataclasses.replace(gathered(*pairs, **more), cost=lambda asked: cost_at(asked["density"], share))
    return EXPERIMENTS[LABEL].result(found)


def test_methods_run_in_the_cells_of_matched_densities_and_profiles_at_each_cost_of_those(tmp_path):
    lab = runner.Lab(matched_2k(), tmp_path)
    cells, matched = (EXPERIMENTS[label].cells(lab) for label in (LABEL, "matched_densities"))
    others = [cell for cell in cells if "profile" not in cell.request]
    assert {cell.name for cell in others} < {cell.name for cell in matched}
    assert {cell.request["method"] for cell in others} == {FLOOR, "park", *costs.RIVALS}
    # 3 of 12 steps are dense in the paper's schedule; three methods also leave one of 6 layers dense
    wanted = {
        *(0.25 + 0.75 * d for d in lab.evaluation.densities),
        *(0.375 + 0.625 * d for d in lab.evaluation.densities),
    }
    wanted = {round(cost, 5) for cost in wanted}
    assert {round(lab.cost(cell.request), 5) for cell in others if cell.request["density"]} == wanted
    for name in PROFILES:
        asked = [lab.cost(cell.request) for cell in cells if cell.request.get("profile") == name]
        assert len(asked) == 16 * 9 and {round(cost, 5) for cost in asked} == wanted


def test_methods_that_are_chosen_are_the_ones_with_a_budget(tmp_path):
    lab = runner.Lab(quick(methods=("sta", "svg", "svg2")), tmp_path)
    asked = [(cell.request.get("profile"), cell.request["method"]) for cell in EXPERIMENTS[LABEL].cells(lab)]
    assert [method for profile, method in asked if profile is None] == [FLOOR, "park", "svg", "svg2"]


def test_a_profile_above_a_method_at_its_cost_holds_and_one_below_does_not():
    rows = (("fast", 30.0, 0.6), ("svg2", 28.0, 0.61), ("sol", 31.0, 0.58))
    pairs = [_pair(prompt, *row) for prompt in "ab" for row in rows]
    found = {finding.statement: finding for finding in _result(*pairs).findings}
    assert list(found) == ["fast above svg2 at cost 0.6", "fast above sol at cost 0.6"]
    assert [(each.verdict, each.margin, each.spread) for each in found.values()] == [
        ("held", 2.0, 0.0),
        ("not held", -1.0, 0.0),
    ]


def test_beyond_a_methods_runs_only_what_is_near_is_compared_and_the_finding_says_so():
    near, far = ([_pair("a", "fast", 30.0, 0.6), _pair("a", "svg2", 28.0, 0.6 + apart)] for apart in (0.029, 0.031))
    assert _result(*near).findings[0].held
    finding = _result(*far).findings[0]
    assert finding.held is None
    assert finding.reason == "costs 0.600 of all-dense, and the other 0.631 to 0.631"


def test_between_two_runs_a_method_has_what_lies_on_the_line_between_them():
    svg2 = [_pair("a", "svg2", 20.0, 0.5, 0.3), _pair("a", "svg2", 30.0, 0.7, 0.7), _pair("a", "svg2", 90.0, 0.9, 0.9)]
    for cost, margin in ((0.6, 2.0), (0.7, -3.0), (0.5, 7.0)):
        (finding,) = _result(_pair("a", "fast", 27.0, cost), *svg2).findings
        assert finding.margin == pytest.approx(margin)


@pytest.mark.parametrize("inside", [1, 2, 3])
def test_fewer_than_half_of_the_prompts_say_nothing(inside):
    prompts = "abcd"
    pairs = [_pair(prompt, "fast", 27.0, 0.6 if place < inside else 0.99) for place, prompt in enumerate(prompts)]
    pairs += [
        _pair(prompt, "svg2", 20.0, cost, density) for prompt in prompts for cost, density in ((0.5, 0.3), (0.7, 0.7))
    ]
    assert _result(*pairs).findings[0].margin == (7.0 if inside >= 2 else None)


def test_findings_pair_prompts_at_one_guidance_and_one_cost():
    rows = [("a", 1.0, 0.5), ("b", 1.0, 0.5), ("a", 5.0, 0.5), ("a", 1.0, 0.25)]
    pairs = [
        _pair(prompt, name, 20.0 + 10 * density + scale + ahead, 0.2 + 0.8 * density, density, scale)
        for prompt, scale, density in rows
        for name, ahead in (("fast", density), ("paper", 0))
    ]
    pairs.append(_pair("c", "fast", 90.0, 0.6))
    result = _result(*pairs)
    assert {each.statement: each.margin for each in result.findings} == {
        "fast above paper at cost 0.4, guidance 1": 0.25,
        "fast above paper at cost 0.4, guidance 5": None,
        "fast above paper at cost 0.6, guidance 1": 0.5,
        "fast above paper at cost 0.6, guidance 5": 0.5,
    }
    panel = result.figure.rows[0][0]
    points = next(series.points for series in panel.series if series.name == "paper")
    assert panel.x.startswith("attention") and [label for *_, label in points] == ["0.4", "0.6"]


def test_a_row_says_the_cost_asked_and_measured_and_a_missing_one_why():
    good, bad = _pair("a", "fast", 30.0, 0.63), _pair("a", "svg2", 28.0, 0.6)
    result = _result(good, bad, failures={bad[0].name: "grid: too small"})
    shown = [dict(zip((c.name for c in result.table.columns), row, strict=True)) for row in result.table.shown()]
    assert (shown[0]["setting"], shown[0]["cost asked"], shown[0]["cost"], shown[0]["PSNR"]) == (
        "fast",
        "0.600",
        "0.630",
        "30.00",
    )
    assert shown[1]["note"] == "not run: grid: too small" and "grid: too small" in result.findings[0].reason
    assert "svg2" in to_markdown(result.table)


def test_a_cost_below_a_profiles_dense_calls_is_left_out_with_a_reason_and_makes_nothing(tmp_path, monkeypatch):
    loaded = "a cost that cannot be had loaded the model"
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *_, **__: pytest.fail(loaded))
    lab = runner.Lab(matched_2k(), tmp_path)
    fast = [cell for cell in EXPERIMENTS[LABEL].cells(lab) if cell.request.get("profile") == "fast"]
    cells = [cell for cell in fast if cell.request["density"] <= 0]
    records, failures, left_out = lab.fill(cells)
    assert cells and not records and not failures and set(left_out) == {cell.name for cell in cells}
    share, cost = (lab.dense_share(cells[0].request), lab.cost(cells[0].request))
    wanted = f"cost: expected one between {share:.3g}, the dense calls of fast, and 1"
    assert set(left_out.values()) == {f"{wanted}, got {cost:.3g}; ask for another density."}


def test_a_profile_reaches_a_density_by_its_own_plans_and_keeps_its_other_settings(tmp_path):
    lab = runner.Lab(quick(measures="psnr"), tmp_path)
    cell = lab.quality_cell(lab.requests()[0], "park", density=0.5, profile="fast")
    records, failures, left_out = lab.fill([cell])
    assert not failures and not left_out
    record, found = records[cell.name], read_record(next(tmp_path.glob("cells/budget-fast-at-0.5-*.json")))
    budget, config, row = record["budget"], record["config"], record["row"]
    assert found["budget"] == budget and found["request"]["profile_settings"] == ResearchConfig.PROFILES["fast"]
    own = ResearchConfig.profile("fast", **{budget["field"]: budget["value"]})
    assert all(config[field] == getattr(own, field) for field in ResearchConfig.PROFILES["fast"])
    # means of float32 densities
    assert row["cost"] == pytest.approx(cost_at(row["density"], lab.dense_share(cell.request)), abs=1e-6)


# call_times: what is timed, how plans are shared out among calls, where times stand beside quality ------


NAMES = ["call_times", "matched_densities"]
FIRST_DENSE = {"dense_layers": (0,)}


def captured(layer, step=5, total=12):
    q, k, v = torch.randn(3, 1, 2, 96, 16, generator=torch.Generator().manual_seed(layer)).unbind()
    return CapturedCall(q, k, CallSite(layer=layer, step=step, total_steps=total, grid=(4, 4, 6), values=v))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("times")
    return out, reproduce.run_experiments(NAMES, quick(methods=("park", "sta")), out)


@pytest.mark.parametrize(
    "name, changes, plans, first, calls",
    [
        ("park", {}, 4 * 6, 6, 40 * 6),  # steps 10, 20, 30 and 40 of every layer
        ("svg2", FIRST_DENSE, 40 * 5, 5, 40 * 5),  # every sparse step
        ("radial", FIRST_DENSE, 5, 5, 38 * 5),  # static: one plan per sparse layer
    ],
)
def test_plans_of_a_run_are_those_of_its_schedule(name, changes, plans, first, calls):
    found = times.plans_in_run(make_method(name, changes), 50, 6)
    assert found == {"plans": plans, "first_plans": first, "sparse_calls": calls}


def test_plans_are_shared_among_the_calls_that_use_them():
    found = {
        "plan_ms": 10.0,
        "later_plan_ms": 4.0,
        "attention_ms": 2.0,
        "plans": 4,
        "first_plans": 1,
        "sparse_calls": 8,
    }
    assert times.sparse_call_ms(found) == 2 + (10 + 3 * 4) / 8
    assert times.sparse_call_ms({"attention_ms": 2.0}) == 2, "dense attention has no plans"


def test_times_are_means_over_the_calls_that_are_sparse_and_a_repair_counts_as_attention(monkeypatch):
    taken = {"plan": 8.0, "later_plan": 4.0, "attend": 2.0, "repair": 1.0}
    calls = [captured(layer) for layer in range(3)]
    parts_of_call = times.parts_of_call

    def numbered(method, q, k, v, site):
        plan, parts = parts_of_call(method, q, k, v, site)
        return plan, {part: (part, site.layer) for part in parts}

    monkeypatch.setattr(times, "parts_of_call", numbered)
    monkeypatch.setattr(times, "_timed", lambda part, on: taken[part[0]] * (1 + part[1]))
    repaired = times.time_method(make_method("sparsepr"), calls, 12, 3)
    assert (repaired["plan_ms"], repaired["later_plan_ms"], repaired["attention_ms"], repaired["calls"]) == (
        16.0,
        8.0,
        6.0,
        3,
    )
    first_dense = times.time_method(make_method("svg2", FIRST_DENSE), calls, 12, 3)
    assert (first_dense["attention_ms"], first_dense["calls"]) == (2.0 * 2.5, 2)


def test_a_method_without_a_sparse_call_among_those_captured_is_refused_in_one_line():
    with pytest.raises(ValueError, match="method: expected one with sparse calls among those captured, got svg2"):
        times.time_method(make_method("svg2", FIRST_DENSE), [captured(0)], 12, 3)


def test_a_plan_after_the_last_step_is_not_asked_for(monkeypatch):
    asked = []
    parts_of_call = times.parts_of_call

    def watched(method, q, k, v, site):
        asked.append(site.step)
        return parts_of_call(method, q, k, v, site)

    monkeypatch.setattr(times, "parts_of_call", watched)
    monkeypatch.setattr(times, "_timed", lambda part, on: 1.0)
    times.time_method(make_method("park"), [captured(1, step=11), captured(1, step=4)], 12, 3)
    assert asked == [10, 4]


def test_every_method_is_timed_at_its_own_settings_and_at_each_density(run):
    out, outcome = run
    found = next(section.result for section in outcome.sections if section.label == "call_times")
    assert [row[:2] for row in found.table.rows] == [
        ("dense", ""), ("park", ""), ("sta", ""),
        ("park", "0.5"), ("park-no-pama", "0.5"), ("park-no-qrkc", "0.5"), ("centroid", "0.5"),
    ]  # fmt: skip
    shown = dict(zip((column.name for column in found.table.columns), found.table.rows[3], strict=True))
    assert shown["sparse call, ms"] > shown["attention, ms"] > 0 and shown["first plan, ms"] > 0
    assert 0 < shown["density"] < 1
    assert len(list(out.glob("cells/times-*.json"))) == 7


def test_times_stand_beside_quality_and_a_second_run_takes_none(run):
    out, _ = run
    again = reproduce.run_experiments(["matched_densities"], quick(methods=("park", "sta")), out)
    table = next(section.result.table for section in again.sections if section.label == "matched_densities")
    heads = [column.name for column in table.columns]
    rows = {row[0]: dict(zip(heads, row, strict=True)) for row in table.rows}
    assert rows["park"]["plan, ms"] > 0 and rows["park"]["attention, ms"] > 0
    assert rows["dense again"]["plan, ms"] is None and rows["dense again"]["attention, ms"] > 0
    before = {path.name: path.read_bytes() for path in out.glob("cells/times-*.json")}
    assert reproduce.run_experiments(NAMES, quick(methods=("park", "sta")), out).made == 0
    assert before == {path.name: path.read_bytes() for path in out.glob("cells/times-*.json")}


def test_an_untimed_run_takes_no_times_and_says_so(tmp_path):
    outcome = reproduce.run_experiments(["call_times"], quick(timed=False), tmp_path)
    found = next(section.result for section in outcome.sections if section.label == "call_times")
    assert found.table is None and "--untimed takes no times" in found.note and outcome.made == 0


def test_times_of_another_density_or_setting_or_of_a_profile_are_not_shown():
    cell, record = quality("p", "park", 30.0)
    timed = {
        "request": {"method": "park", "density": 0.5, "changes": {}},
        "times": {"later_plan_ms": 3.0, "attention_ms": 2.0},
    }

    def shown(**other):
        request = cell.request | other
        return CellRecords([], {}, {}, timed=[record, timed]).times_of(request)

    assert shown() == timed["times"]
    assert (
        not shown(density=0.25)
        and not shown(changes={"seed": 1})
        and not shown(method="svg2")
        and not shown(profile="fast")
    )
    table = quality_table(gathered((cell, record)), ("method",), lambda request: (request["method"],)).table
    assert "plan, ms" not in [column.name for column in table.columns], "a column that nothing was measured for"
