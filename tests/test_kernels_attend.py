"""Attention kernels without a GPU: the Triton kernel under the interpreter against float64.
`test_kernels_attend_builds` compiles.

The interpreter must be chosen before triton is imported, so those tests run in a pytest of their own.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from strategies import reproducible

pytestmark = quiet_numpy


@outside
def test_the_kernel_under_the_interpreter():
    run_interpreted(__file__, at_least=15)


# ---------------------------------------------------------------------------------------------- ragged problems


def offsets(bh: int, blocks: int, tokens: int, generator: torch.Generator, empty: float = 0.2) -> torch.Tensor:
    """Uneven blocks, some empty -> int32 [bh blocks+1]"""
    weight = torch.rand(bh, blocks, generator=generator, dtype=torch.float64) ** 3 + 1e-6
    weight[torch.rand(bh, blocks, generator=generator) < empty] = 0
    weight[:, 0] += 1e-9
    ends = (weight.cumsum(1) / weight.sum(1, keepdim=True) * tokens).round().int()
    ends[:, -1] = tokens
    return torch.nn.functional.pad(ends, (1, 0))


def labels_of(block_offsets: torch.Tensor) -> torch.Tensor:
    blocks = torch.arange(block_offsets.shape[1] - 1)
    return torch.stack([blocks.repeat_interleave(row.diff()) for row in block_offsets])


def pair_mask(query_offsets, key_offsets, mask):
    """bool [bh n m]: the token pairs that are kept."""
    rows = torch.take_along_dim(mask, labels_of(query_offsets)[:, :, None], dim=1)
    return torch.take_along_dim(rows, labels_of(key_offsets)[:, None, :], dim=2)


def problem(seed: int, n: int, m: int, d: int, qb: int, kb: int, density: float, dtype: torch.dtype, bh: int = 2):
    generator = torch.Generator().manual_seed(seed)
    query_offsets, key_offsets = offsets(bh, qb, n, generator), offsets(bh, kb, m, generator)
    mask = torch.rand(bh, qb, kb, generator=generator) < density
    mask[0, -1] = False  # a query block that keeps nothing
    q, k, v = (torch.randn(bh, t, d, generator=generator).to(dtype) for t in (n, m, m))
    return 2 * q, k, v, query_offsets, key_offsets, mask


def definition(
    q, k, v, query_offsets, key_offsets, mask, dtype, compensate=None, centroids=None, mean_values=None, pair_bias=None, weigh_in=None
):  # fmt: skip
    """softmax over the kept keys, and over the stand-ins of skipped flagged blocks, in `dtype` -> out, lse (float64);
    weigh_in: a dtype for the weights alone
    """
    scale = q.shape[-1] ** -0.5
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scores = (q @ k.transpose(1, 2)).double() * scale
    scores = scores.masked_fill(~pair_mask(query_offsets, key_offsets, mask), -torch.inf)
    if compensate is not None:
        sizes = key_offsets.diff(dim=1)
        enters = (compensate & (sizes > 0))[:, None, :] & ~mask
        enters = torch.take_along_dim(enters, labels_of(query_offsets)[:, :, None], dim=1)
        bias = sizes.double().log()[:, None, :]
        if pair_bias is not None:
            bias = torch.take_along_dim(pair_bias.double(), labels_of(query_offsets)[:, :, None], dim=1)
        stand_in = (q @ centroids.to(dtype).transpose(1, 2)).double() * scale + bias
        scores = torch.cat([scores, stand_in.masked_fill(~enters, -torch.inf)], 2)
        v = torch.cat([v, mean_values.to(dtype)], 1)
    weights = torch.softmax(scores, -1).nan_to_num(0)  # a row without keys
    return (weights.to(weigh_in or dtype).to(dtype) @ v).double(), torch.logsumexp(scores, -1)


def assert_close(out, lse, q, k, v, query_offsets, key_offsets, mask, rtol=1e-5, **stand_ins):
    """Error at most twice that of the same-dtype PyTorch computation plus one rounding unit; of whole numbers in
    float32, weights are rounded. Rows without keys are 0; rtol: of the log-sum-exp.
    """
    exact, exact_lse = definition(q, k, v, query_offsets, key_offsets, mask, torch.float64, **stand_ins)
    how = {"dtype": q.dtype} if q.dtype == v.dtype else {"dtype": torch.float64, "weigh_in": v.dtype}
    same, _ = definition(q, k, v, query_offsets, key_offsets, mask, **how, **stand_ins)
    unit = torch.finfo(v.dtype).eps * exact.abs().max()
    assert not out.isnan().any()
    assert (out.double() - exact).abs().max() <= 2 * (same - exact).abs().max() + unit
    assert torch.equal(lse.isinf(), exact_lse.isinf()) and (out[lse.isinf()] == 0).all()
    assert torch.allclose(lse.double(), exact_lse, rtol=rtol, atol=1e-4)


def stand_ins_of(seed: int, kb: int, d: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centroids, mean_values = torch.randn(2, 2, kb, d, generator=generator).to(dtype)
    flags = torch.rand(2, kb, generator=generator) < 0.7
    return {"compensate": flags, "centroids": centroids, "mean_values": mean_values}


def whole_numbers(q, k, stand_ins):
    """INT8 q, k, stand-ins and their steps, as kernels take them; and the same in float32, as the definition does."""
    q_steps, k_steps = q.float().abs().amax(-1) / 127, k.float().abs().amax((1, 2)) / 127
    rows = (q.float() / q_steps[..., None]).round()
    keys, *means = (
        (x.float() / k_steps[:, None, None]).round().clamp(-127, 127)
        for x in (k, stand_ins.get("centroids"))
        if x is not None
    )
    given, shown = (
        (
            {**stand_ins, **({"centroids": x} if means else {})}
            for x in (means[0].to(torch.int8), means[0] * k_steps[:, None, None])
        )
        if means
        else ({}, {})
    )
    as_floats = rows * q_steps[..., None], keys * k_steps[:, None, None]
    return (rows.to(torch.int8), keys.to(torch.int8), given | {"steps": (q_steps, k_steps)}), (*as_floats, shown)


@in_interpreter
@settings(reproducible, max_examples=6)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 130), m=st.integers(1, 300), d=st.sampled_from([64, 128]), qb=st.integers(1, 6),
    kb=st.integers(1, 20), density=st.floats(0, 1), half=st.booleans(), compensated=st.booleans(),
)  # fmt: skip
def test_ragged_int8_attention(seed, n, m, d, qb, kb, density, half, compensated):
    from parkattn.ops.attend.tiles import TritonTile
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(seed, n, m, d, qb, kb, density, torch.float16 if half else torch.bfloat16)
    stand_ins = stand_ins_of(seed, kb, d, q.dtype) if compensated else {}
    (q8, k8, given), (rows, keys, shown) = whole_numbers(q, k, stand_ins)
    out, lse = attend_ragged(
        q8, k8, v, *blocks, out=torch.full_like(q, torch.nan), with_lse=True, tile=TritonTile(64, 64, 4, 2), **given
    )
    assert_close(out, lse, rows, keys, v, *blocks, **shown)


@in_interpreter
def test_steps_multiply_scores_of_every_element_type():
    """Whole numbers up to 127 are exact in float16, and so are their products in float32."""
    from parkattn.ops.attend.tiles import TritonTile
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(3, 90, 200, 64, 3, 8, 0.5, torch.float16)
    (q8, k8, given), _ = whole_numbers(q, k, stand_ins_of(3, 8, 64, torch.float16))
    tile = TritonTile(64, 64, 4, 2)
    halves = given | {"centroids": given["centroids"].half()}
    whole, _ = attend_ragged(q8, k8, v, *blocks, tile=tile, **given)
    assert torch.equal(attend_ragged(q8.half(), k8.half(), v, *blocks, tile=tile, **halves)[0], whole)
    plain, _ = attend_ragged(q8.half(), k8.half(), v, *blocks, tile=tile, **(halves | {"steps": None}))
    assert not torch.allclose(plain, whole, atol=1e-2)


@in_interpreter
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_rounding_is_that_of_the_definition(gathered, d):
    """At most one step apart where float32 sums put an entry on the other side of a half."""
    from parkattn.ops.attend.definition import Rounding
    from parkattn.ops.permute import triton as permute

    q, k, v = (torch.randn(1, 200, 2, d).half().transpose(1, 2) for _ in range(3))
    k = k * torch.linspace(0.2, 3, d).half() + 4
    order, ends = (
        orders(200),
        torch.tensor([[[0, 0, 70, 71, 71, 200], [0, 130, 131, 131, 199, 200]]], dtype=torch.int32),
    )
    found, rounding = Rounding.of_keys(k.double()), permute.key_rounding(k)
    torch.testing.assert_close(rounding[1].double() * d**-0.5, found.step.flatten(), rtol=1e-5, atol=0)
    rows, row_steps = permute.round_rows(q, order if gathered else None)
    keys = (
        permute.gather_with_means(k, v, order, ends, rounding)[0]
        if gathered
        else permute.round_rows(k, None, rounding)[0]
    )
    steps = row_steps[..., None].double() * d**-0.5, found.step[0]
    for x, whole, step, exact in (
        (q, rows, steps[0], found.queries(q.double())),
        (k, keys, steps[1], found.keys(k.double())),
    ):
        exact = exact[0].gather(1, order[0, :, :, None].long().expand_as(x[0])) if gathered else exact[0]
        apart = (whole.double() * step - exact).abs() / step
        assert apart.max() < 1.01 and (apart > 0.01).double().mean() < 0.01


@in_interpreter
def test_what_is_not_finite_makes_steps_nan():
    from parkattn.ops.permute import triton as permute

    q = torch.zeros(1, 2, 70, 64).half()
    q[0, 0, 3, 5], q[0, 1, 6, 0] = torch.nan, torch.inf
    steps = permute.round_rows(q, None)[1]
    assert torch.equal(steps.isnan().nonzero(), torch.tensor([[0, 3], [1, 6]]))
    assert permute.key_rounding(q)[1].isnan().all() and permute.key_rounding(torch.ones_like(q))[1].isfinite().all()


@in_interpreter
@settings(reproducible, max_examples=8)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 130), m=st.integers(1, 300), d=st.sampled_from([64, 64, 128, 256]), qb=st.integers(1, 6),
    kb=st.integers(1, 20), density=st.floats(0, 1), half=st.booleans(), compensated=st.booleans(),
)  # fmt: skip
def test_ragged_attention(seed, n, m, d, qb, kb, density, half, compensated):
    from parkattn.ops.attend.tiles import TritonTile
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(seed, n, m, d, qb, kb, density, torch.float16 if half else torch.bfloat16)
    stand_ins = stand_ins_of(seed, kb, d, q.dtype) if compensated else {}
    how = {"with_lse": True, "tile": TritonTile(64, 64, 4, 2), **stand_ins}
    (out, lse), again = (attend_ragged(q, k, v, *blocks, out=torch.full_like(q, torch.nan), **how) for _ in range(2))
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert_close(out, lse, q, k, v, *blocks, **stand_ins)


@in_interpreter
def test_token_order_is_folded_into_loads_and_stores():
    from parkattn.ops.attend.tiles import TritonTile
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(3, 90, 150, 64, 4, 9, 0.5, torch.bfloat16, bh=4)
    tile = TritonTile(32, 32, 4, 2)
    expected, expected_lse = attend_ragged(q, k, v, *blocks, with_lse=True, tile=tile)
    query_order = torch.stack([torch.randperm(90) for _ in range(4)])

    def tokens(x, order):  # [bh t d] in block order -> a [b h t d] view of [b t h d] memory in token order
        unsorted = torch.empty_like(x).scatter_(1, order[..., None].expand_as(x), x)
        return unsorted.reshape(2, 2, *x.shape[1:]).transpose(1, 2).contiguous().transpose(1, 2)

    k, v = (x.reshape(2, 2, *x.shape[1:]) for x in (k, v))
    out, lse = attend_ragged(
        tokens(q, query_order), k, v, *blocks, query_order=query_order.int(), with_lse=True, tile=tile
    )
    assert out.stride() == tokens(q, query_order).stride()
    assert torch.equal(out, tokens(expected, query_order))
    assert torch.equal(lse.gather(1, query_order), expected_lse)


@in_interpreter
@pytest.mark.parametrize("compensate", [False, True])
def test_tokens_in_block_order_are_read_in_place(compensate, monkeypatch):
    """Blocks without an order give what the order 0, 1, 2, ... gives, in either memory layout, and gather nothing."""
    from parkattn.ops.attend.kernels import AttentionKernel
    from parkattn.ops.permute import triton as permute
    from parkattn.plan import Blocks, Plan

    *_, query_offsets, key_offsets, mask = problem(5, 90, 150, 64, 4, 9, 0.4, torch.float16, bh=4)
    q, k, v = (torch.randn(2, t, 2, 64).half().transpose(1, 2) for t in (90, 150, 150))

    def run(ordered: bool) -> torch.Tensor:
        sides = []
        for ends in (query_offsets, key_offsets):
            labels = labels_of(ends).view(2, 2, -1).int()
            order = torch.arange(labels.shape[-1]).int().expand_as(labels) if ordered else None
            sides.append(Blocks(labels, order, ends.view(2, 2, -1)))
        plan = Plan(*sides, mask.view(2, 2, 4, 9), 4, 9, False, torch.ones(2, 2))
        return AttentionKernel(hopper=False).over_kept(q, k, v, plan, scale=None, compensate=compensate)

    expected = run(True)
    monkeypatch.delattr(permute, "gather_rows")
    out = run(False)
    assert torch.equal(out, expected) and out.stride() == q.stride()


@in_interpreter
def test_no_queries_and_no_keys():
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(0, 20, 30, 64, 2, 3, 0.5, torch.float16)
    none = torch.zeros(2, 4, dtype=torch.int32)
    out, lse = attend_ragged(q, k[:, :0], v[:, :0], blocks[0], none, blocks[2], with_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert attend_ragged(q[:, :0], k, v, none[:, :3], blocks[1], blocks[2])[0].shape == (2, 0, 64)


# ---------------------------------------------------------------------------------------------- block order


@in_interpreter
def test_rows_into_block_order_and_back():
    from parkattn.ops.permute.triton import gather_rows, scatter_rows

    x, order = torch.randn(1, 200, 2, 128).bfloat16().transpose(1, 2), orders(200)
    rows = gather_rows(x, order, out=torch.full((2, 200, 128), torch.nan, dtype=x.dtype))
    assert torch.equal(rows.view(1, 2, 200, 128), x.gather(2, order.long()[..., None].expand(-1, -1, -1, 128)))
    assert torch.equal(scatter_rows(rows, order, out=torch.full_like(x, torch.nan)), x)


@in_interpreter
def test_rows_of_a_head_are_copied_together_once():
    from parkattn.ops.permute.triton import gather_rows

    x = torch.randn(2, 70, 3, 128).bfloat16().transpose(1, 2)
    rows = gather_rows(x, None)
    assert rows.is_contiguous() and torch.equal(rows, x.reshape(6, 70, 128))
    assert gather_rows(rows.view(2, 3, 70, 128), None).data_ptr() == rows.data_ptr()


@in_interpreter
def test_keys_and_values_in_block_order_with_the_means_of_their_blocks():
    from parkattn.ops.permute.triton import gather_rows, gather_with_means

    # fp16, since the interpreter rounds bf16 down
    k, v, order = (
        torch.randn(1, 200, 2, 128).add(6).half().transpose(1, 2),
        torch.randn(1, 2, 200, 128).half(),
        orders(200),
    )
    ends = torch.tensor([[[0, 0, 70, 71, 71, 200], [0, 130, 131, 131, 199, 200]]], dtype=torch.int32)
    keys, values, *means = gather_with_means(k, v, order, ends)
    assert torch.equal(keys, gather_rows(k, order)) and torch.equal(values, gather_rows(v, order))
    for rows, found in zip((keys, values), means, strict=True):
        exact = [
            rows[u, a:b].double().sum(0) / max(b - a, 1)
            for u in range(2)
            for a, b in itertools.pairwise(ends[0, u].tolist())
        ]
        torch.testing.assert_close(found.view(10, 128).double(), torch.stack(exact), rtol=2**-11, atol=1e-6)


def orders(tokens: int) -> torch.Tensor:
    return torch.stack([torch.randperm(tokens), torch.randperm(tokens)])[None].int()
