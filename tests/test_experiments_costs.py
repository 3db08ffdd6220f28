"""Profiles against methods at equal attention over the whole run."""

import dataclasses

import pytest

pytest.importorskip("diffusers")

from parkattn.park import ParkConfig
from parklab.experiments import costs, runner
from parklab.experiments.calibration import cost_at
from parklab.experiments.catalogue import EXPERIMENTS
from parklab.experiments.evaluation import FLOOR
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
