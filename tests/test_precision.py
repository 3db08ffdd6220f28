"""Q K^T in INT8: what rounding may change, who rounds alike, and where it is left out with a reason."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch

from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from parkattn import ParkConfig, park_attention
from parkattn import backend as backend_module
from parkattn.backend import resolve
from parkattn.ops import Backend
from parkattn.ops import attend as attention
from parkattn.ops.attend import definition, tiles
from parkattn.ops.attend.definition import ROUNDINGS, Rounding, attend, attend_with_lse, dense_attention
from parkattn.plan import Blocks, Plan
from parkattn.settings import PRECISIONS
from parklab.research import ResearchConfig

pytestmark = quiet_numpy
CPU = torch.device("cpu")
DEFINED, KERNELS = (Backend(name, precision="int8") for name in ("reference", "triton"))


@outside
def test_the_triton_backend_in_int8_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__, at_least=5)


def problem(n: int = 90, m: int = 130, d: int = 64, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """q, k, v [1 2 n d] with uneven columns and keys that have a mean"""
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 2, t, d, generator=g, dtype=torch.float64) for t in (n, m, m))
    uneven = torch.linspace(0.1, 2, d, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (q * uneven, k * uneven + 3, v))


def blocks(tokens: int, ends: tuple[int, ...]) -> Blocks:
    order = torch.stack([torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])[
        None
    ]
    labels = torch.bucketize(torch.arange(tokens), torch.tensor(ends[1:]), right=True).expand(1, 2, tokens)
    offsets = torch.tensor(ends, dtype=torch.int32).expand(1, 2, -1).contiguous()
    return Blocks(torch.empty_like(labels).scatter_(2, order, labels).int(), order.int(), offsets)


def plan(padding: bool = False) -> Plan:
    mask = (
        torch.tensor([[True, False, True, False], [False, True, False, False], [True, True, True, False]])
        .expand(1, 2, 3, 4)
        .clone()
    )
    return Plan(
        blocks(90, (0, 20, 64, 90)),
        blocks(130, (0, 40, 77, 120, 130)),
        mask,
        3,
        3 if padding else 4,
        padding,
        torch.ones(1, 2),
    )


@outside
def test_scores_differ_by_half_steps_and_by_what_all_keys_of_a_row_share():
    q, k, _ = problem()
    rounding = Rounding.of_keys(k)
    scores = q @ k.mT - q @ k.mean(-2, keepdim=True).mT
    found = rounding.queries(q) @ rounding.keys(k).mT
    step = rounding.queries(q).abs().amax(-1, keepdim=True) / 127
    lengths = [x.abs().sum(-1) for x in (rounding.queries(q), rounding.keys(k))]
    allowed = rounding.step / 2 * lengths[0][..., None] + step / 2 * (
        lengths[1][..., None, :] + q.shape[-1] * rounding.step / 2
    )
    assert ((found - scores).abs() <= allowed * (1 + 1e-9)).all()
    whole = rounding.keys(k) / rounding.step
    assert (whole - whole.round()).abs().max() < 1e-9 and whole.abs().max().round() == 127


@outside
def test_what_all_keys_share_changes_no_output():
    q, k, v = problem()
    plain, shifted = (dense_attention(q, k + shift, v, precision="int8") for shift in (0.0, 50.0))
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-9)


@outside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_block_kept_is_dense_attention_in_int8(dtype):
    q, k, v = problem(dtype=dtype)
    sides = (
        Blocks(torch.zeros(1, 2, 90), None, torch.tensor([[[0, 30, 90]] * 2])),
        Blocks(torch.zeros(1, 2, 130), None, torch.tensor([[[0, 9, 130]] * 2])),
    )
    out, _ = attend_with_lse(q, k, v, *sides, torch.ones(1, 2, 2, 2, dtype=torch.bool), precision="int8")
    torch.testing.assert_close(out, dense_attention(q, k, v, precision="int8"))
    plain = attend(q, k, v, *sides, torch.ones(1, 2, 2, 2, dtype=torch.bool))
    torch.testing.assert_close(plain, dense_attention(q, k, v))
    assert 0 < (out - plain).double().norm() / plain.double().norm() < 0.05


@outside
def test_where_there_is_no_int8_the_reason_says_so(monkeypatch):
    assert resolve("auto", CPU, torch.float32, 64, "int8").reason.endswith("Q K^T in INT8")
    odd = resolve("reference", CPU, torch.float32, 96, "int8")
    assert odd.precision == "bf16" and "powers of two, not 96" in odd.reason
    monkeypatch.setattr(backend_module, "_attention_kernel", lambda *_: (False, "asked for"))
    wide = resolve("triton", CPU, torch.bfloat16, 256, "int8")
    assert wide.precision == "bf16" and "not in INT8, whose kernels have head dims 64 and 128, not 256" in wide.reason
    assert resolve("triton", CPU, torch.bfloat16, 128, "int8").precision == "int8"
    assert "INT8" not in resolve("triton", CPU, torch.bfloat16, 128).reason


@outside
def test_every_precision_of_the_settings_is_defined():
    assert set(PRECISIONS) == {"bf16", *ROUNDINGS}
    assert {*tiles.HOPPER_HEAD_DIMS} <= {*tiles.TRITON_HEAD_DIMS} <= {*PRECISIONS}


@outside
def test_a_precision_without_a_definition_is_refused_by_everyone_who_computes():
    q, k, v = problem()
    everything = torch.ones(1, 2, 3, 4, dtype=torch.bool)
    refused = {
        "resolve": lambda: resolve("reference", CPU, torch.float32, 64, "k16"),
        "dense": lambda: dense_attention(q, k, v, precision="k16"),
        "sparse": lambda: attend(q, k, v, plan().queries, plan().keys, everything, precision="k16"),
    }
    if importlib.util.find_spec("triton") is not None:
        from parkattn.ops.attend.kernels import KEY_ROUNDINGS, AttentionKernel

        assert {"bf16", *KEY_ROUNDINGS} == {*tiles.TRITON_HEAD_DIMS}
        refused |= {f"kernel, {hopper}": partial(AttentionKernel, hopper, "k16") for hopper in (False, True)}
    for call in refused.values():
        with pytest.raises(ValueError, match=r"precision: expected one of bf16, int8, got 'k16'; pick"):
            call()


@outside
def test_a_precision_says_which_kernels_have_it(monkeypatch):
    """Defined alone, then in the plain kernel, then in Hopper's."""
    monkeypatch.setitem(definition.ROUNDINGS, "k16", Rounding)
    monkeypatch.setattr(backend_module, "_attention_kernel", lambda *_: (True, "asked for"))
    assert resolve("reference", CPU, torch.float32, 64, "k16").reason.endswith("Q K^T in K16")

    def found() -> tuple[str, bool, str]:
        chosen = resolve("triton", CPU, torch.bfloat16, 64, "k16")
        return chosen.precision, chosen.hopper, chosen.reason.partition(": ")[2]

    gluon, triton = (f"Triton kernels, attention in {name} because" for name in ("Gluon", "Triton"))
    own = "Q K^T in bfloat16 and not in K16, which has no kernel"
    assert found() == ("bf16", True, f"{gluon} asked for; {own}")
    monkeypatch.setitem(tiles.TRITON_HEAD_DIMS, "k16", (64,))
    lacks = "the Hopper kernel has no K16 with head dim 64"
    assert found() == ("k16", False, f"{triton} {lacks}; Q K^T in K16")
    monkeypatch.setitem(tiles.HOPPER_HEAD_DIMS, "k16", (64,))
    assert found() == ("k16", True, f"{gluon} asked for; Q K^T in K16")


@outside
def test_precision_is_a_setting_of_a_method():
    q, k, v = problem(dtype=torch.float32)
    config = ResearchConfig(query_clusters=3, key_clusters=5, kmeans_iterations=2, top_p=0.6)
    outs = [park_attention(q, k, v, config.replace(precision=precision)) for precision in ("bf16", "int8")]
    assert torch.equal(outs[0], park_attention(q, k, v, config))
    assert 0 < (outs[1] - outs[0]).norm() / outs[0].norm() < 0.05
    with pytest.raises(ValueError, match=r"precision: expected .*bf16.*int8.*got 'fp8'"):
        ParkConfig(precision="fp8")


@outside
@pytest.mark.parametrize(
    ("head_dim", "said"),
    [(32, "Q K^T in INT8"), (24, "not in INT8, which is defined for head dims that are powers of two, not 24")],
)
def test_a_summary_names_the_precision_and_bf16_takes_it_out(head_dim, said):
    pytest.importorskip("diffusers")
    import tiny_pipelines as tiny
    from parkattn import enable, summary
    from test_hosts_diffusers import SPARSE

    pipe = tiny.wan(attention_head_dim=head_dim)
    runs = []
    for precision in ("bf16", "int8", "bf16"):
        enable(pipe, SPARSE, precision=precision)
        runs.append(tiny.run_wan(pipe))
        assert (said in str(summary(pipe))) == (precision == "int8")
    assert torch.equal(runs[0], runs[2]) and torch.equal(runs[0], runs[1]) == (head_dim == 24)


@in_interpreter
@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_triton_backend_rounds_as_the_definition_does(compensate, ordered):
    q, k, v = problem(dtype=torch.float16)
    at = plan()
    if not ordered:
        sides = (Blocks(side.labels.sort(-1).values, None, side.offsets) for side in (at.queries, at.keys))
        at = Plan(*sides, at.mask, 3, 4, False, torch.ones(1, 2))
    out = attention.over_kept(KERNELS, q, k, v, at, compensate=compensate)
    exact = attention.over_kept(DEFINED, q.double(), k.double(), v.double(), at, compensate=compensate)
    # weights and output are rounded to fp16, and stand-in values
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(torch.float16).eps * v.abs().max()


@in_interpreter
def test_dense_attention_and_an_anchor_in_int8():
    q, k, v = problem(dtype=torch.float16)
    valid = torch.arange(130)[None] < 111
    exact = attention.over_all(DEFINED, q.double(), k.double(), v.double(), key_valid=valid)
    out = attention.over_all(KERNELS, q, k, v, key_valid=valid)
    unit = 4 * torch.finfo(torch.float16).eps * v.abs().max()
    assert (out.double() - exact).abs().max() <= unit
    dense, residual = attention.over_both(KERNELS, q, k, v, plan(), compensate=True)
    sparse = attention.over_kept(KERNELS, q, k, v, plan(), compensate=True)
    exact = attention.over_all(DEFINED, q.double(), k.double(), v.double())
    assert (dense.double() - exact).abs().max() <= unit
    assert (residual.double() - (exact - sparse.double())).abs().max() <= 2 * unit
