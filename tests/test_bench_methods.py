"""What methods cost: each through the blocks of real transformers, here small ones on a CPU, and the authors' kernels beside ours."""

import pytest
import torch

pytest.importorskip("diffusers")

import sys
from types import SimpleNamespace

from parkattn.methods import METHODS
from parklab.bench import methods, official
from parklab.bench.problems import TINY, rows
from parklab.bench.whole_models import SMALL


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


CPU = torch.device("cpu")


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


def test_official_kernels_and_ours_are_timed_on_the_same_tensors(one_package):
    one_package(lambda q, k, v: official.Call(lambda: q, lambda: q.clone(), lambda: None))
    (row,) = official.measure(CPU, {}, repeats=1, rehearse=True)
    assert (
        row["tokens"] == TINY.tokens and {"official_ms", "ours_ms", "ours_plan_ms"} <= set(row) and "absent" not in row
    )


@pytest.mark.parametrize("compiled", [None, True, False])
def test_a_record_says_which_kernel_of_a_package_was_timed(one_package, compiled):
    one_package(lambda q, k, v: official.Call(lambda: q, lambda: q, compiled=compiled))
    (row,) = official.measure(CPU, {}, repeats=1, rehearse=True)
    assert row.get("compiled") is compiled and ("compiled" in row) == (compiled is not None)


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
    one_package(lambda q, k, v: official.Call(lambda: q[:, :, order], lambda: q, order=order.expand(q.shape[:3])))
    assert [case["ok"] for case in official.gate(CPU)] == [True]
    one_package(lambda q, k, v: official.Call(lambda: q[:, :, order], lambda: q))
    assert [case["ok"] for case in official.gate(CPU)] == [False]


def test_a_kernel_that_fails_says_so_in_its_row(one_package):
    def broken(q, k, v):
        raise RuntimeError("no kernel image\nfor this device")

    one_package(broken)
    (row,) = official.measure(CPU, {}, rehearse=True)
    assert row["absent"] == "failed: RuntimeError: no kernel image"


def test_our_side_of_every_pair_runs():
    """STA's grid is too large for a CPU; its tile order is tested with the method."""
    q, k, v = rows(TINY, CPU)
    attend, plan = official._planned(
        "sol", {"topk": 0.5}, q.float(), k.float(), v.float(), official.CallSite(step=3, total_steps=5)
    )
    assert attend().shape == q.shape and plan().density().max() <= 1
