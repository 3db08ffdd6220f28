"""`park reproduce call_times`: what is timed, how plans are shared out among calls, and where times stand beside
quality.
"""

import pytest
import torch

pytest.importorskip("diffusers")

from parkattn.methods import make_method
from parkattn.site import CallSite
from parklab.experiments import reproduce, times
from parklab.experiments.captures import CapturedCall
from parklab.experiments.results import CellRecords, quality_table
from reproduce_cases import gathered, quality, quick

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
