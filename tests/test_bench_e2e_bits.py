"""`park bench e2e --precision int8` at tiny size on the CPU: both precisions and float8 linears in one process."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("diffusers")
from parklab.bench import e2e, e2e_turns
from test_bench_e2e import CPU
from test_bench_e2e_profile import ALIKE

# numpy's complaint about schedulers of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation", "ignore::DeprecationWarning")


def test_both_precisions_and_float8_linears_are_timed_beside_the_same_stock_forward(tmp_path, monkeypatch):
    monkeypatch.setattr(e2e, "bench_device", lambda: CPU)
    monkeypatch.setitem(e2e.SMALL, "wan2.1-1.3b", ALIKE["wan2.1-1.3b"])
    record = tmp_path / "r.jsonl"
    how = {"full": False, "rehearse": True, "profile": "fast", "precision": "int8", "float8": True}
    e2e.run_section("wan2.1-1.3b", record, e2e.SectionOptions(**how), turn=lambda: 60.0)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    found = [line for line in lines if line["benchmark"] == "e2e bits"]
    kinds = [("bfloat16", "bf16"), ("bfloat16", "int8"), ("float8", "int8")]
    assert [(line["linears"], line["precision"]) for line in found] == kinds
    assert [line["config"]["precision"] for line in found] == ["bf16", "int8", "int8"]
    assert len({line["baselines"]["stock"] for line in found}) == 1, "all are compared with one stock forward"
    assert found[2]["memory"]["weights_gb"] < found[1]["memory"]["weights_gb"]
    for line in found:
        run = line["runs"]["fast"]
        assert run["speedup"]["stock"] == pytest.approx(50 * line["baselines"]["stock"] / run["park_s"])
        assert line["quality_reuse_s"] > 0 and line["finite"]
    assert [len(row) for row in e2e_turns.bits_rows(lines)] == [len(e2e_turns.BITS_COLUMNS)] * 3


def test_int8_without_a_profile_that_has_it_is_refused():
    with pytest.raises(ValueError, match="precision: expected --profile fast or quality"):
        e2e.SectionOptions(precision="int8")
