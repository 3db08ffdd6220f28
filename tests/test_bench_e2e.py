"""`park bench e2e` at tiny size on the CPU: what it measures is what it says, and a process that fails costs one model."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")
from parkattn.hosts.diffusers.session import session_of
from parkattn.models import row_for
from parkattn.park import ParkConfig
from parklab.bench import e2e, e2e_run, e2e_turns, whole_models

# numpy's complaint about schedulers of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
CPU = torch.device("cpu")
TINY = {
    name: replace(model, video=(17, 128, 128), settings={"query_clusters": 8, "key_clusters": 16})
    for name, model in whole_models.SMALL.items()
}
WHOLE = e2e.SectionOptions(full=True, rehearse=True)


@pytest.fixture(scope="module", params=["wan2.1-1.3b", "hunyuanvideo"])
def ready(request):
    return e2e.prepare(TINY[request.param], CPU)


def test_the_models_are_the_real_ones():
    import diffusers

    assert {name: model.tokens for name, model in whole_models.MODELS.items()} == {
        "wan2.1-1.3b": 75_600,
        "wan2.1-14b": 75_600,
        "wan2.1-14b-480p": 32_760,
        "hunyuanvideo": 115_200,
    }
    millions = {}
    for name, model in whole_models.MODELS.items():
        with torch.device("meta"):
            transformer = getattr(diffusers, model.transformer)(**model.sizes)
        millions[name] = sum(p.numel() for p in transformer.parameters()) / 1e6
    assert 1_300 < millions["wan2.1-1.3b"] < 1_500
    assert 14_000 < millions["wan2.1-14b"] < 14_500
    assert 12_500 < millions["hunyuanvideo"] < 13_500


def test_one_measurement_has_every_phase_at_the_density_asked_for(ready):
    parts = []
    found = e2e.measure(ready, parts.append)
    assert [part["phase"] for part in parts] == [
        "refresh",
        "reuse",
        "refresh",
        "reuse",
        "refresh, not fused",
        "reuse, not fused",
        "dense",
    ]
    assert found["each_s"] == {
        "dense": [parts[6]["seconds"]],
        **{p: [x["seconds"] for x in parts if x["phase"] == p] for p in ("refresh", "reuse")},
    }
    # 16 blocks come in steps of a sixteenth
    assert found["density"] == pytest.approx(e2e.DENSITY, abs=0.5 / 16)
    assert found["finite"]
    assert all(found[name] > 0 for name in ("dense_s", "refresh_cold_s", "refresh_warm_s", "reuse_s"))
    assert (found["fused"], found["fusing_s"], found["reuse_unfused_s"]) == (
        {"no, not on a GPU": 4 * found["layers"]},
        None,
        parts[5]["seconds"],
    )
    assert found["reuse_speedup"] == found["dense_s"] / found["reuse_s"]
    assert found["layers"] == {"WanTransformer3DModel": 2, "HunyuanVideoTransformer3DModel": 3}[found["transformer"]]
    assert found["memory"]["state_with_guidance_gb"] == 2 * found["memory"]["state_gb"] > 0
    assert found["config"]["top_p"] is None
    assert json.loads(json.dumps(found))["tokens"] == ready.model.tokens == 320
    assert session_of(ready.transformer) is None, "stock again"


def test_blocks_are_compiled_before_anything_is_timed(ready, monkeypatch):
    """Getting ready asks the question that the measurement will ask, for as many steps and blocks; else compiling would
    be timed.
    """
    from parkattn.hosts.diffusers.fused import BlockFusion

    asked = []

    def why_not(self, hidden, blocks):
        asked.append((self._steps(), blocks, tuple(hidden.shape)))
        return "looked at"

    monkeypatch.setattr(BlockFusion, "_why_not", why_not)
    e2e.seconds_of_fusing(ready.transformer, ready.inputs, ready.model, ready.device)
    before, layers = set(asked), len(row_for(ready.transformer).all_blocks(ready.transformer))
    asked.clear()
    e2e.measure(ready)
    assert set(asked) == before and {(steps, blocks) for steps, blocks, _ in asked} == {(e2e.RUN_STEPS, layers)}


def test_the_cut_to_the_first_blocks_is_undone(ready):
    names = [blocks for blocks, _ in row_for(ready.transformer).blocks]
    before = [getattr(ready.transformer, name) for name in names]
    with pytest.raises(KeyError), whole_models.first_blocks(ready.transformer, 1):
        assert all(len(getattr(ready.transformer, name)) == 1 for name in names)
        raise KeyError
    assert all(
        now is then for now, then in zip((getattr(ready.transformer, name) for name in names), before, strict=True)
    )


def test_a_run_is_composed_of_its_phases():
    phases = e2e.phases_of_run(ParkConfig.preset("wan2.1-14b"))
    assert phases == {"dense": 10, "refresh": 4, "reuse": 36}
    found = e2e.composed(10.0, 6.0, 5.0, 4.0, phases)
    assert found["park_s"] == 10 * 10 + 6 + 3 * 5 + 36 * 4
    assert found["dense_s"] == 500
    assert found["speedup"] == 500 / found["park_s"]
    assert found["saved_s"] == 500 - found["park_s"]


def test_figures_of_another_phase_than_they_are_named_after_are_refused():
    e2e.expect_phases({"dense": [], "refresh": [0, 2], "reuse": [1, 3]}, e2e.PHASES_MEASURED)
    with pytest.raises(RuntimeError, match="so nothing was recorded"):
        e2e.expect_phases({"dense": [0], "refresh": [0, 2], "reuse": [1, 3]}, e2e.PHASES_MEASURED)


@pytest.fixture(scope="module")
def wan():
    return e2e.prepare(TINY["wan2.1-1.3b"], CPU)


def test_a_whole_run_counts_every_call_and_compares_with_dense(wan):
    park, dense, video = e2e_run.whole_run(wan, seconds=math.inf, rehearse=True)
    assert park["calls"] == park["expected_calls"] == {"dense": 20, "refresh": 8, "reuse": 72}
    assert len(park["each_s"]) == len(dense["each_s"]) == dense["steps_done"] == 50
    assert dense["speedup"] == dense["denoise_s"] / park["denoise_s"]
    assert park["finite"] and dense["finite"] and video["finite"]
    assert 0 < park["density_sparse_steps"] < park["density"] < 1
    assert (
        sorted(park["each_s"][10:50:10])[1] <= park["median_step_s"]["refresh"] <= sorted(park["each_s"][10:50:10])[2]
    )
    assert video["frames"] == [1, 3, 17, 128, 128]
    assert park["saved_s_by_summary"] is not None
    json.dumps([park, dense, video])


def test_a_dense_run_without_time_stops_and_says_where(wan):
    park, dense = e2e_run.whole_run(wan, seconds=0.0, rehearse=True)  # and none for the decoder
    assert len(park["each_s"]) == 50
    assert dense["steps_done"] == 1
    assert "speedup" not in dense


def test_a_section_keeps_its_lines_with_commit_and_versions(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PARKATTN_COMMIT", "abc1234")
    monkeypatch.setattr(e2e, "bench_device", lambda: CPU)
    monkeypatch.setitem(whole_models.SMALL, "wan2.1-1.3b", TINY["wan2.1-1.3b"])
    e2e.run_section("wan2.1-1.3b", tmp_path / "r.jsonl", WHOLE, turn=lambda: 60.0)
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["benchmark"] for line in lines] == ["e2e forward"] * 7 + ["e2e", "e2e run", "e2e run", "e2e decode"]
    assert {line["environment"]["commit"] for line in lines} == {"abc1234"}
    assert {(line["model"], line["rehearsal"]) for line in lines} == {("wan2.1-1.3b", True)}
    assert [row[0] for row in e2e_turns.table_rows(lines)] == ["wan2.1-1.3b"]
    e2e.run_section("wan2.1-1.3b", tmp_path / "short.jsonl", WHOLE, turn=lambda: 0.0)
    assert "e2e run" not in (tmp_path / "short.jsonl").read_text()


def test_waiting_for_a_turn_costs_none_of_its_seconds(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(e2e, "bench_device", lambda: CPU)
    monkeypatch.setitem(whole_models.SMALL, "wan2.1-1.3b", TINY["wan2.1-1.3b"])
    clock = [0.0]
    monkeypatch.setattr(e2e.time, "monotonic", lambda: clock[0])

    def turn() -> float:
        clock[0] += 1000.0  # the others came first
        return 500.0

    e2e.run_section("wan2.1-1.3b", tmp_path / "r.jsonl", WHOLE, turn=turn)
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line.get("steps_done") for line in lines if line.get("method") == "dense"] == [50]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_forwards_are_marked_and_go_through_the_same_phases():
    ready = e2e.prepare(TINY["wan2.1-1.3b"], CPU, compiled=True)
    found = e2e.measure(ready)
    assert found["compiled"] and found["finite"]
    assert e2e_turns.table_rows([{"model": "wan2.1-1.3b", **found}])[0][0] == "wan2.1-1.3b, compiled"


def test_sparse_density_leaves_dense_calls_out():
    rows = [
        {"dense": 2, "refresh": 1, "reuse": 1, "density": (2 + 0.2 + 0.4) / 4},
        {"dense": 0, "refresh": 1, "reuse": 1, "density": 0.5},
    ]
    assert e2e_run.sparse_density(rows) == pytest.approx((0.2 + 0.4 + 0.5 + 0.5) / 4)
    anchored = {"dense": 1, "anchor": 1, "refresh": 0, "reuse": 2, "density": (1 + 1 + 0.1 + 0.3) / 4}
    assert e2e_run.sparse_density([anchored]) == pytest.approx(0.2)


def worker(monkeypatch, code: dict[str, str]) -> None:
    """Sections become these lines of Python."""
    header = "import sys, time\ndef wait_for_turn():\n    print('ready', flush=True)\n    return float(sys.stdin.readline())\n"
    stock = e2e_turns._Section.__init__

    def start(self, name, command):
        stock(self, name, [sys.executable, "-c", header + code[name]])

    monkeypatch.setattr(e2e_turns._Section, "__init__", start)
    monkeypatch.setattr(e2e_turns, "bench_device", lambda: CPU)


def test_everybody_gets_ready_first_and_a_failure_costs_one_section(tmp_path, monkeypatch, capfd):
    code = {
        "gate": "wait_for_turn()",
        "wan2.1-14b": "wait_for_turn(); sys.exit('out of memory')",
        "gate-around": "wait_for_turn()",
        "hunyuanvideo": "time.sleep(1); given = wait_for_turn(); print(0 < given < 8)",
        "wan2.1-1.3b": "wait_for_turn(); time.sleep(600)",
    }
    worker(monkeypatch, code)
    began = time.monotonic()
    outcome = e2e_turns.run_all(tmp_path / "r.jsonl", e2e.SectionOptions(), budget_s=8)
    good = dict.fromkeys(("gate", "hunyuanvideo", "gate-around"), "passed")
    assert outcome == good | {"wan2.1-14b": "failed", "wan2.1-1.3b": "out of time"}
    assert time.monotonic() - began < 30
    said = capfd.readouterr().out
    assert "hunyuanvideo: True" in said and all(f"{name}: ready after " in said for name in code)


def test_after_a_failed_gate_nothing_is_measured(tmp_path, monkeypatch):
    worker(monkeypatch, {"gate": "sys.exit('wrong')", "wan2.1-14b": "wait_for_turn(); sys.exit(0)"})
    outcome = e2e_turns.run_all(tmp_path / "r.jsonl", e2e.SectionOptions(), only=["gate", "wan2.1-14b"], budget_s=60)
    assert outcome == {"gate": "failed"}


def test_a_section_that_nobody_waits_for_ends(monkeypatch, capfd):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("12.5\n"))
    assert e2e_turns.wait_for_turn() == 12.5
    assert capfd.readouterr().out == "ready\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit):
        e2e_turns.wait_for_turn()


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo"])
def test_the_gate_can_fail(name, monkeypatch):
    """A method that loses key blocks must not pass as dense attention."""
    from parklab.bench import e2e_gate

    monkeypatch.setattr(e2e_gate, "_BACKENDS", ("reference",))
    good = list(e2e_gate._gate_model(name, TINY[name], CPU))
    assert all(case["ok"] for case in good)
    monkeypatch.setattr(e2e_gate, "_EVERY_BLOCK", 0.9)
    bad = [case["gate"] for case in e2e_gate._gate_model(name, TINY[name], CPU) if not case["ok"]]
    assert bad[0] == f"{name}, reference: every block kept is stock dense"


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo"])
def test_the_gate_of_anchors_can_fail(name, monkeypatch):
    from parkattn.ops.residual.definition import LowRank
    from parklab.bench import e2e_gate

    monkeypatch.setattr(e2e_gate, "_BACKENDS", ("reference",))
    assert all(case["ok"] for case in e2e_gate._gate_anchored(name, TINY[name], CPU))
    monkeypatch.setattr(LowRank, "expand", lambda self: torch.tensor(0.05))
    bad = [case["gate"] for case in e2e_gate._gate_anchored(name, TINY[name], CPU) if not case["ok"]]
    assert bad == [f"{name}, reference: own dense, anchor and corrected reuse are stock dense"]


def test_the_gate_sees_padding(monkeypatch):
    """Stock attention without its mask must not pass."""
    from parkattn.hosts.diffusers import processor
    from parklab.bench import e2e_gate

    monkeypatch.setattr(e2e_gate, "_BACKENDS", ("reference",))
    monkeypatch.setattr(processor, "_key_valid", lambda mask, q: (None, None))
    bad = [case["gate"] for case in e2e_gate._gate_model("hunyuanvideo", TINY["hunyuanvideo"], CPU) if not case["ok"]]
    assert "hunyuanvideo, reference: padding is not seen" in bad


def test_the_table_has_a_line_per_model():
    from parklab.bench.e2e_turns import table_rows

    line = {
        "benchmark": "e2e", "model": "m", "density": 0.25, "dense_s": 2.0, "refresh_cold_s": 1.5, "refresh_warm_s": 1.4, "reuse_s": 1.0, "reuse_unfused_s": 1.1,
        "run": {"speedup": 1.6, "saved_s": 30.0}, "memory": {"dense_peak_gb": None, "park_peak_gb": 3.0, "state_with_guidance_gb": 0.5},
    }  # fmt: skip
    assert table_rows([{"gate": "x"}, line]) == [
        ["m", "0.250", "2.00", "1.50", "1.40", "1.00", "1.10", "1.60x", "30.0", "", "3.0", "0.50"]
    ]
