"""`park bench card`: a rehearsal without a GPU, sizes by memory, wrong results said, SageAttention only where it can."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from parkattn import CallSite, ParkConfig
from parkattn.ops import REFERENCE, attend
from parkattn.ops.attend import tiles
from parkattn.ops.attend.sage import attend_dense_sage, why_no_sage
from parkattn.park import Park
from parklab.bench import attend as kernels
from parklab.bench import card, dense
from parklab.bench.commands import app
from parklab.bench.problems import TINY, mixture, random_plan

CPU = torch.device("cpu")


def run_card(folder):
    path = folder / "new" / "card.json"
    done = CliRunner().invoke(app, ["card", "--out", str(path), "--repeats", "1"])
    return done, json.loads(path.read_text())


def test_a_file_that_cannot_be_written_is_refused_before_the_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "measure", lambda *_, **__: pytest.fail("something was measured"))
    for place in (tmp_path, "/proc/card.json"):
        done = CliRunner().invoke(app, ["card", "--out", str(place)])
        assert isinstance(done.exception, OSError) and str(done.exception).startswith("out: expected"), done.output


def test_without_a_gpu_it_is_a_rehearsal_with_every_row(tmp_path):
    done, kept = run_card(tmp_path)
    assert done.exit_code == 0 and "rehearsal" in done.stdout
    assert kept["environment"]["rehearsal"] and kept["environment"]["cpu"]
    measured = {(row["dtype"], row["work"], row["kernel"]): row for row in kept["rows"] if "ms" in row}
    assert all(row["ok"] and row["ms"] > 0 and row["ratio"] > 0 for row in measured.values())
    # of two roundings of the same inputs the coarser one is further away
    for case in itertools.product(("bf16", "fp16"), ("dense", "sparse 0.25", "sparse 0.10, compensated")):
        assert measured[*case, "definition"]["error"] < measured[*case, "definition int8"]["error"]


def test_a_wrong_result_is_said_and_fails_the_command(tmp_path, monkeypatch):
    right = attend.over_kept
    monkeypatch.setattr(attend, "over_kept", lambda *given, **how: right(*given, **how) * 1.2)
    done, kept = run_card(tmp_path)
    assert done.exit_code == 1 and "wrong: error above" in done.stdout
    wrong = {row["work"] for row in kept["rows"] if row.get("ok") is False}
    assert wrong == {"sparse 0.25", "sparse 0.10, compensated"}


def test_a_row_is_named_after_its_precision_and_is_there_where_a_kernel_has_it(monkeypatch):
    for bench in (card, dense, kernels):
        monkeypatch.setattr(bench, "PRECISIONS", ("bf16", "int8", "k16"))
    monkeypatch.setitem(tiles.TRITON_HEAD_DIMS, "k16", (64, 256))
    found = {
        dim: {label: (ours.precision, ours.hopper) for label, ours in kernels.in_precisions(names, dim).items()}
        for dim, names in ((64, ["gluon", "triton"]), (256, ["triton"]))
    }
    plain = {"triton": ("bf16", False), "triton k16": ("k16", False)}
    hopper = {"gluon": ("bf16", True), "gluon int8": ("int8", True)}
    assert found == {64: hopper | plain | {"triton int8": ("int8", False)}, 256: plain}
    engines = card.engines_for(torch.empty(1, 1, 1, 64))
    assert {label: ours.precision for label, ours in engines.items()} == {
        "definition": "bf16", "definition int8": "int8", "definition k16": "k16",
    }  # fmt: skip
    labels = ("ours", "ours, int8, padded", "ours, k16", "ours, k16, padded", "cudnn")
    assert [dense.bar_of(label) for label in labels] == [*dense.DENSE_BARS.values(), None, None, None]


@pytest.mark.parametrize("compensate", [False, True])
def test_sampled_errors_are_those_of_the_definition(compensate):
    q, k, v = (mixture(TINY, 4, CPU, torch.float64) for _ in range(3))
    plan = random_plan(TINY, 0.4, CPU)
    out = attend.over_kept(REFERENCE, q, k, v, plan, compensate=compensate)
    assert card.sampled_error(out, q, k, v, plan, compensate=compensate) < 1e-12
    assert card.sampled_error(out * 1.01, q, k, v, plan, compensate=compensate) == pytest.approx(0.01)


def test_heads_follow_the_free_memory_and_too_little_is_refused():
    gpu = torch.device("cuda")
    assert [card.shape_for(gpu, size * 10**9).heads for size in (139, 7, 3, 1)] == [40, 40, 24, 6]
    with pytest.raises(ValueError, match="close other programs"):
        card.shape_for(gpu, 10**8)


def test_rows_that_time_does_not_allow_say_so():
    rows = list(card.measure(CPU, budget_s=-1))
    assert rows and all("ms" not in row and row["note"] for row in rows)


@pytest.fixture
def sage(monkeypatch):
    """A stand-in for the package, and what it was asked."""
    calls = []

    def sageattn(q, k, v, **how):
        calls.append(how | {"contiguous": q.is_contiguous()})
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=how["sm_scale"])

    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=sageattn, __spec__=object()))
    return calls


def test_sage_attention_is_called_by_head_and_without_a_mask(sage):
    q, k, v = (mixture(TINY, 4, CPU, torch.float32) for _ in range(3))
    out = attend_dense_sage(q, k, v, scale=0.3)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3))
    assert sage == [{"tensor_layout": "HND", "is_causal": False, "sm_scale": 0.3, "contiguous": True}]


def on_gpu(head_dim=64, dtype=torch.bfloat16, gradient=False):
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 8, head_dim), requires_grad=gradient)


@pytest.mark.parametrize(
    ("q", "padded", "why"),
    [
        (on_gpu(), False, None),
        (on_gpu(), True, "no mask for padding"),
        (on_gpu(256), False, "head dims 64 and 128, not 256 and 256"),
        (on_gpu(dtype=torch.float32), False, "not torch.float32"),
        (on_gpu(gradient=True), False, "no gradient"),
        (torch.zeros(1, 2, 8, 64), False, "needs a CUDA GPU"),
    ],
)
def test_where_sage_attention_cannot_run_the_reason_says_so(sage, q, padded, why):
    found = why_no_sage(q, q, q, torch.ones(1, 8, dtype=torch.bool) if padded else None)
    assert found is None if why is None else why in found


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sageattention", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install sageattention" in why_no_sage(*[on_gpu()] * 3)


def test_dense_steps_by_sage_attention_where_it_can_and_a_reason_where_not(sage, monkeypatch):
    q, k, v = (mixture(TINY, 4, CPU, torch.float32) for _ in range(3))
    park = Park(ParkConfig(sage_dense=True, query_clusters=4, key_clusters=8))
    zeros, site = torch.zeros(q.shape), CallSite(step=0, total_steps=10, dense=lambda: torch.zeros(q.shape))
    made = park(q, k, v, site)
    assert torch.equal(made.out, zeros) and made.stats.backend == "SageAttention needs a CUDA GPU, and q is on cpu"
    monkeypatch.setattr("parkattn.planned.why_no_sage", lambda *given: None)
    made = park(q, k, v, site)
    assert made.out.any() and len(sage) == 1 and made.stats.backend.startswith("dense steps by SageAttention")
    plain = Park(ParkConfig(query_clusters=4, key_clusters=8))(q, k, v, site)
    assert torch.equal(plain.out, zeros) and plain.stats.backend == ""
