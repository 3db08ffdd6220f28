"""The authors' kernels beside ours: what is not there is said, with how to get it, and what fails costs no other."""

import pytest
import torch

from parkattn.bench import official
from parkattn.bench.problems import TINY, rows

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
    assert row["tokens"] == TINY.tokens and {"official_ms", "ours_ms", "ours_plan_ms"} <= set(row) and "absent" not in row


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
    attend, plan = official._planned("sol", {"topk": 0.5}, q.float(), k.float(), v.float(), official.CallSite(step=3, total_steps=5))
    assert attend().shape == q.shape and plan().density().max() <= 1
