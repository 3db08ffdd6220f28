"""`park bench e2e --float8` at tiny size on the CPU: linears are what they are called, a forward's parts add up."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("diffusers")
from parkattn.hosts.diffusers.session import session_of
from parkattn.models import row_for
from parklab.bench import e2e, e2e_float8, e2e_turns, whole_models
from test_bench_e2e import CPU, TINY


def linear(ins: int = 64, outs: int = 48, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(ins, outs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def test_rows_of_float8_values_are_rounded_to_themselves():
    """Times a power of two per row, which a scale per row takes out; zeros stay zeros."""
    values = torch.arange(126, dtype=torch.uint8).view(e2e_float8.FLOAT8).float()
    x = torch.stack([values, -values, torch.zeros_like(values)])
    x[:, -1] = torch.tensor([448.0, -448.0, 0.0])
    x *= torch.tensor([[1.0], [2**-9], [1.0]])
    rounded, scale = e2e_float8.by_row(x)
    assert torch.equal(rounded.float() * scale, x)


@pytest.mark.parametrize("bias", [True, False])
def test_a_float8_linear_errs_by_rounding_only(bias):
    plain = linear(bias=bias)
    made = e2e_float8.ScaledLinear(plain)
    assert 0 < e2e_float8.error_of(made, plain) <= e2e_float8.LARGEST_ERROR
    assert made(torch.zeros(2, 3, 64, dtype=torch.bfloat16)).shape == (2, 3, 48)


def test_linears_that_err_more_are_refused(monkeypatch):
    transformer = whole_models.random_transformer(TINY["wan2.1-1.3b"], CPU)
    monkeypatch.setattr(e2e_float8, "by_row", lambda x: (x.to(e2e_float8.FLOAT8), 2 * torch.ones(len(x), 1)))
    with pytest.raises(RuntimeError, match=r"float8 linear attn1\.to_q errs by"):
        e2e_float8.make_float8(transformer, CPU)


@pytest.fixture(scope="module", params=["wan2.1-14b"])
def lines(request):
    kept: list = []
    e2e_float8.run_float8(request.param, TINY[request.param], CPU, kept.append, density=None, turn=lambda: 60.0)
    return json.loads(json.dumps(kept))


def test_each_kind_of_linears_has_every_forward_at_the_same_density(lines):
    forwards = [(line["linears"], line["phase"]) for line in lines if line["benchmark"] == "e2e forward"]
    each = ["refresh", "reuse", "refresh", "reuse", "refresh", "dense, compiled", "dense"]
    assert forwards == [(linears, phase) for linears in ("bfloat16", "float8") for phase in each]
    plain, rounded = (line for line in lines if line["benchmark"] == "e2e float8")
    assert (plain["linears"], rounded["linears"]) == ("bfloat16", "float8")
    assert "_scaled_mm" in rounded["made_by"]
    assert plain["finite"] and rounded["finite"]
    assert plain["config"] == rounded["config"]
    # 16 key blocks come in steps of a sixteenth
    assert rounded["density"] == pytest.approx(plain["density"], abs=0.5 / 16)
    assert rounded["of_bfloat16"]["reuse_s"] == rounded["reuse_s"] / plain["reuse_s"]
    assert rounded["bar"]["met"] == (rounded["of_bfloat16"]["reuse_s"] <= 0.8)


def test_the_parts_of_a_forward_add_up(lines):
    for line in lines:
        if line["benchmark"] == "e2e float8":
            assert set(line["split"]) == {"reuse", "dense, compiled"}
            for part in line["split"].values():
                assert part["attention_s"] > 0 and part["linears_s"] > 0
                parts = [part[name] for name in ("attention_s", "linears_s", "rest_s")]
                assert sum(parts) == pytest.approx(part["kernels_s"])


def test_float8_weights_take_half_the_memory_of_those_in_blocks(lines):
    plain, rounded = (line["memory"]["weights_gb"] for line in lines if line["benchmark"] == "e2e float8")
    model = whole_models.random_transformer(TINY[lines[0]["model"]], CPU)
    in_blocks = [x for block in row_for(model).all_blocks(model) for x in e2e_float8.linears_of(block).values()]
    # one byte of two, less a float32 scale per row
    saved = sum(x.weight.numel() - 4 * x.out_features for x in in_blocks)
    assert plain - rounded == pytest.approx(saved / 1e9)


def test_every_linear_of_a_forward_is_timed_alone(lines):
    products = [line for line in lines if line["benchmark"] == "e2e float8 product"]
    sizes = {(line["rows"], line["in"], line["out"]): line["calls_per_forward"] for line in products}
    model = whole_models.random_transformer(TINY[lines[0]["model"]], CPU)
    in_blocks = [x for block in row_for(model).all_blocks(model) for x in e2e_float8.linears_of(block).values()]
    assert sum(sizes.values()) == len(in_blocks)
    assert {size[1:] for size in sizes} == {(x.in_features, x.out_features) for x in in_blocks}


def test_the_table_has_a_row_for_each_kind_of_linears(lines):
    rows = e2e_turns.float8_rows(lines)
    assert [row[1] for row in rows] == ["bfloat16", "float8"]
    assert all(len(row) == len(e2e_turns.columns_of(e2e.SectionOptions(float8=True))) for row in rows)
    assert rows[1][7].endswith("bar 0.8")


@pytest.mark.parametrize("option", [{"compiled": True}, {"full": True}, {"profile": "fast"}])
def test_float8_is_measured_by_itself(option):
    with pytest.raises(ValueError, match="float8: expected it alone, got --"):
        e2e.SectionOptions(float8=True, **option)


@pytest.mark.filterwarnings("ignore")  # torchao's own, on import
def test_torchaos_linears_are_made_and_checked(monkeypatch):
    missing = "torchao is not installed: pip install -e '.[quant]'"
    quant_api = pytest.importorskip("torchao.quantization.quant_api", reason=missing)
    # it asks for a GPU; its arithmetic does not
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    model = TINY["wan2.1-14b"]
    transformer = whole_models.random_transformer(model, CPU)
    before = e2e_float8.weights_bytes(transformer)
    made = e2e_float8.make_float8(transformer, torch.device("cuda"))  # the linears stay where they are
    assert made.startswith("torchao ")
    assert type(transformer.blocks[1].ffn.net[2].weight).__name__ == "Float8Tensor"
    assert e2e_float8.weights_bytes(transformer) < before
    assert session_of(transformer) is None
    assert (
        whole_models.run_forward(transformer, whole_models.forward_inputs(model, transformer, CPU), 999.0)
        .isfinite()
        .all()
    )
