"""What methods cost, each through the blocks of real transformers, the authors' kernels beside ours, and `park bench
models`: its gate, phases and record; here with tiny transformers of the same classes on a CPU.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers")

from parkattn.methods import METHODS
from parklab.bench import methods, models, official
from parklab.bench.problems import TINY, rows
from parklab.bench.real_models import REAL
from parklab.bench.real_models import TINY as TINY_MODELS
from parklab.bench.whole_models import SMALL
from parklab.research import ResearchConfig

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # stock Kandinsky in bfloat16
CPU = torch.device("cpu")


@pytest.fixture
def newer_models():
    pytest.importorskip("diffusers", minversion="0.42")


@pytest.mark.parametrize("label", methods.TWO_BLOCKS)
def test_each_method_has_sparse_calls_and_finite_outputs(label):
    found = {each["method"]: each for each in methods.through_model(SMALL[label], label, torch.device("cpu"))}
    assert list(found) == list(METHODS)
    assert all(each["ok"] for each in found.values()), {name: each for name, each in found.items() if not each["ok"]}
    layers = 2
    for name, each in found.items():
        assert sum(each["calls"].values()) == methods.STEPS * layers and len(each["seconds"]) == methods.STEPS
        dense = each["calls"]["dense"]
        assert dense == methods.STEPS * layers if name == "dense" else layers <= dense < methods.STEPS * layers


def test_a_method_that_fails_says_so_and_the_others_go_on(monkeypatch):
    def broken(name, rehearse):
        if name == "park":
            raise ValueError("broken: expected nothing.\nMore")
        return methods.make_method(name)

    monkeypatch.setattr(methods, "_method", broken)
    monkeypatch.setattr(methods, "METHODS", {name: METHODS[name] for name in ("park", "sta")})
    park, sta = methods.through_model(SMALL["wan2.1-14b"], "wan2.1-14b", torch.device("cpu"))
    assert park["failure"] == "ValueError: broken: expected nothing." and not park["ok"] and sta["ok"]


# The authors' kernels: what is not there is said, and what fails costs no other -------------------------


def test_a_package_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(official.importlib.util, "find_spec", lambda name: None)
    assert not list(official.gate(CPU, rehearse=True))
    records = list(official.measure(CPU, {}, rehearse=True))
    assert [row["kernel"] for row in records] == list(official.PACKAGES)
    assert all(row["absent"] == f"not installed: {official.PACKAGES[row['kernel']].install}" for row in records)


@pytest.fixture
def one_package(monkeypatch):
    """Our own attention as if another package had it."""

    def make(call):
        package = official.Package("parkattn", "dense", "", call, 0.0)
        monkeypatch.setattr(official, "PACKAGES", {"theirs": package})
        monkeypatch.setattr(official.Package, "absence", lambda package, device: None)

    return make


@pytest.mark.parametrize("compiled", [None, True, False])
def test_kernels_are_timed_on_the_same_tensors_and_a_record_says_which_one_of_a_package(one_package, compiled):
    one_package(lambda q, k, v: official.Call(lambda: q, lambda: q.clone(), lambda: None, compiled=compiled))
    (row,) = official.measure(CPU, {}, repeats=1, rehearse=True)
    assert row["tokens"] == TINY.tokens and {"official_ms", "ours_ms", "ours_plan_ms"} <= set(row)
    assert row.get("compiled") is compiled and ("compiled" in row) == (compiled is not None) and "absent" not in row


@pytest.mark.parametrize("loaded", [True, False])
def test_packages_that_fall_back_in_silence_are_asked(monkeypatch, loaded):
    q, k, v = (x.float() for x in rows(TINY, CPU))
    sol = SimpleNamespace(sol_attn=None, sol_attn_is_available=lambda device: loaded)
    sta = SimpleNamespace(sliding_tile_attention=list, sta_fwd=object() if loaded else None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", sol)
    assert official.with_comfy_kitchen(q, k, v).compiled is loaded
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fastvideo_kernel.ops", sta)
    monkeypatch.setattr(official, "STA_GRID", (1, 1, q.shape[2]))
    monkeypatch.setattr(official, "_planned", lambda *asked: (None, None))
    assert official.with_fastvideo(q, k, v).compiled is loaded


def test_a_gate_compares_rows_in_the_order_that_theirs_come_in(one_package):
    order = torch.arange(4096).flip(0)
    for told in (order.expand(1, 2, -1), None):
        one_package(lambda q, k, v, told=told: official.Call(lambda: q[:, :, order], lambda: q, order=told))
        assert [case["ok"] for case in official.gate(CPU)] == [told is not None]


def test_a_kernel_that_fails_says_so_in_its_row(one_package):
    def broken(q, k, v):
        raise RuntimeError("no kernel image\nfor this device")

    one_package(broken)
    (row,) = official.measure(CPU, {}, rehearse=True)
    assert row["absent"] == "failed: RuntimeError: no kernel image"


def test_our_side_of_every_pair_runs():
    """STA's grid is too large for a CPU; its tile order is tested with the method."""
    q, k, v = rows(TINY, CPU)
    site = official.CallSite(step=3, total_steps=5)
    attend, plan = official._planned("sol", {"topk": 0.5}, q.float(), k.float(), v.float(), site)
    assert attend().shape == q.shape and plan().density().max() <= 1


# park bench models ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("newer_models")
@pytest.mark.parametrize("name", TINY_MODELS)
def test_each_model_passes_its_gate_and_has_every_phase(name):
    *cases, found = [
        record
        for record in models.of_model(name, TINY_MODELS[name], CPU, math.inf, rehearse=False)
        if "whole" not in record["benchmark"]
    ]
    assert len(cases) == 3 and all(case["ok"] for case in cases), cases
    assert found["ok"] and found["tokens"] == TINY_MODELS[name].tokens
    assert {profile: set(found[profile]["block_s"]) for profile in models.PHASES} == {
        profile: set(phases) for profile, phases in models.PHASES.items()
    }


@pytest.mark.usefixtures("newer_models")
def test_the_whole_model_has_as_many_blocks_as_fit():
    *_, whole = models.of_model(models.WHOLE, TINY_MODELS[models.WHOLE], CPU, math.inf, rehearse=False)
    assert whole["blocks"] == TINY_MODELS[models.WHOLE].blocks and set(whole["seconds"]) == {
        "dense",
        "refresh",
        "reuse",
    }


@pytest.mark.usefixtures("newer_models")
def test_without_time_the_whole_model_is_left_out_with_a_reason():
    *_, whole = models.of_model(models.WHOLE, TINY_MODELS[models.WHOLE], CPU, 0.0, rehearse=False)
    assert not whole["ok"] and "out of time" in whole["failure"] and "seconds" not in whole


@pytest.mark.usefixtures("newer_models")
def test_a_wrong_attention_is_not_timed(monkeypatch):
    whole = ResearchConfig.profile
    monkeypatch.setattr(  # leaves blocks out where all should be kept
        ResearchConfig, "profile", lambda name, **changes: whole(name, **{**changes, "top_p": None, "top_k": 0.25})
    )
    records = list(models.of_model("cosmos-2.5-14b", TINY_MODELS["cosmos-2.5-14b"], CPU, math.inf, rehearse=False))
    assert [record["gate"] for record in records if not record["ok"]] == ["every block kept is stock"]
    assert len(records) == 3


@pytest.mark.usefixtures("newer_models")
def test_a_model_that_fails_says_so_and_the_others_go_on(monkeypatch):
    def broken(name, *_, **__):
        if name == "ltx-2.5":
            raise ValueError("broken: expected nothing.\nMore")
        yield {"ok": True}

    monkeypatch.setattr(models, "of_model", broken)
    records = []
    assert not models.run_models(["ltx-2.5", "minimax-h3"], CPU, records.append, budget_s=0)
    assert records == [
        {"model": "ltx-2.5", "ok": False, "failure": "ValueError: broken: expected nothing."},
        {"model": "minimax-h3", "ok": True},
    ]


@pytest.mark.usefixtures("newer_models")
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("minimax-h3", 104_179), ("ltx-2.5", 109_120), ("kandinsky-5-pro", 119_040), ("cosmos-2.5-14b", 84_480)],
)
def test_sizes_are_those_of_released_videos(name, tokens):
    assert REAL[name].tokens == tokens
