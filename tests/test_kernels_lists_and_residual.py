"""Work lists: every kept pair once, in buffers whose size follows from the shapes and stays below a limit. Kernels of
an anchor step and of the residual: under the interpreter against the definitions, and compiled ahead of time.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from gluon_on_cpu import on_cpu
from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from machine_code import compiled
from parkattn.ops.attend import worklist
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.attend.tiles import TritonTile
from parkattn.ops.residual.definition import LowRank, add_residual, factor, merge
from parkattn.plan import Blocks, Plan
from strategies import reproducible
from test_kernels_attend import assert_close, orders, pair_mask, problem, stand_ins_of
from test_kernels_attend_builds import SHARED_MEMORY
from test_kernels_gluon import ORDERS, module  # noqa: F401 (a fixture)

pytestmark = quiet_numpy
TOKENS = {"query_tokens": 75_600, "key_tokens": 75_600, "query_tile": 128, "key_tile": 128, "tail_bias": True}


@outside
def test_the_lists_and_the_residual_under_the_interpreter():
    run_interpreted(__file__, at_least=36)


def listed_pairs(work, bh, qb, n, m, key_tile, tail):
    """int [bh n m]: how often the lists visit each token pair; checks that unmasked tiles are full."""
    seen = torch.zeros(bh, n, m, dtype=torch.int32)
    per_tile = key_tile // 32
    for head, which, first, rows, wide, plain, tiles, _ in work.tiles[: work.count[0]].tolist():
        assert which // qb == head
        for j in range(tiles):
            starts, records = [], []
            if j < wide:
                starts = work.wide[which, j * per_tile : (j + 1) * per_tile].tolist()
            else:
                records = work.tails[which, (j - wide) * key_tile // tail : (j - wide + 1) * key_tile // tail].tolist()
            assert j >= plain or all(record & 31 == tail for record in records)
            if work.bias is not None and j >= plain:
                valid_rows = torch.tensor(records)[:, None] & 31 > torch.arange(tail)
                assert torch.equal(
                    work.bias[which, (j - plain) * key_tile :][:key_tile],
                    torch.where(valid_rows, 0.0, -torch.inf).flatten(),
                )
            assert 32 * len(starts) + tail * len(records) == key_tile
            for start, valid in [(s, 32) for s in starts] + [(r >> 5, r & 31) for r in records]:
                seen[head, first : first + rows, start : start + valid] += 1
    return seen


def expect_listed(work, qb, n, m, key_tile, tail, pairs):
    """Every kept pair of two heads once, all rows, and of each head the longest lists first."""
    assert torch.equal(listed_pairs(work, 2, qb, n, m, key_tile, tail), pairs.int())
    records = work.tiles[: work.count[0]]
    assert records[:, 3].sum() == 2 * n
    assert all((records[records[:, 0] == head, 6].diff() <= 0).all() for head in range(2))


@in_interpreter
@settings(reproducible, max_examples=10)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 200), m=st.integers(1, 400), qb=st.integers(1, 9), kb=st.integers(1, 40),
    density=st.floats(0, 1), tiles=st.sampled_from([(128, 128, 8), (192, 64, 8), (64, 64, 8), (128, 128, 16), (32, 32, 8)]),
)  # fmt: skip
def test_every_kept_pair_is_listed_once(seed, n, m, qb, kb, density, tiles):
    _, _, _, query_offsets, key_offsets, mask = problem(seed, n, m, 1, qb, kb, density, torch.float32)
    query_tile, key_tile, tail = tiles
    sizes = {"query_tokens": n, "key_tokens": m, "query_tile": query_tile, "key_tile": key_tile, "tail": tail}
    work = worklist.build_worklist(query_offsets, key_offsets, mask, **sizes, tail_bias=True)
    expect_listed(work, qb, n, m, key_tile, tail, pair_mask(query_offsets, key_offsets, mask))
    assert (work.tiles[: work.count[0], 0].diff() >= 0).all()


@in_interpreter
@pytest.mark.parametrize(
    ("rows", "tile", "dealt"), [(256, 192, [128, 128]), (400, 192, [192, 128, 80]), (300, 128, [128, 128, 44])]
)
def test_the_warpgroups_of_a_block_are_dealt_out_evenly(rows, tile, dealt):
    ends = torch.tensor([[0, rows]], dtype=torch.int32), torch.tensor([[0, 64]], dtype=torch.int32)
    work = worklist.build_worklist(
        *ends, torch.ones(1, 1, 1, dtype=torch.bool), query_tokens=rows, key_tokens=64, query_tile=tile, key_tile=64
    )
    tiles = work.tiles[: work.count[0]]
    assert tiles[:, 3].tolist() == dealt
    assert tiles[:, 2].tolist() == [sum(dealt[:i]) for i in range(len(dealt))]


@in_interpreter
def test_lists_longer_than_a_chunk_and_blocks_of_several_programs():
    """1,250 wide granules, of which a step lists 512; 70 query blocks, of which a program ranks 64."""
    n, m, qb, kb = 70, 40_000, 70, 30
    _, _, _, query_offsets, key_offsets, mask = problem(5, n, m, 1, qb, kb, 0.8, torch.float32)
    mask[:, 0] = True
    work = worklist.build_worklist(
        query_offsets, key_offsets, mask, query_tokens=n, key_tokens=m, query_tile=128, key_tile=128, tail_bias=True
    )
    expect_listed(work, qb, n, m, 128, 8, pair_mask(query_offsets, key_offsets, mask))


@pytest.mark.parametrize(("rows", "keys"), [(64, 128), (128, 128), (128, 64), (64, 64)])
@pytest.mark.parametrize("compensated", [False, True])
def test_scratch_of_fixed_tiles_stays_below_300_megabytes(rows, keys, compensated):
    """At 40 heads and 75,600 tokens."""
    blocks = -(-75_600 // rows), -(-75_600 // keys)
    at_once = worklist.heads_at_once(*blocks, compensated=compensated, **TOKENS)
    assert 1 <= at_once < 40
    assert worklist.scratch_bytes(at_once, *blocks, compensated=compensated, **TOKENS) < 300e6


def test_the_lists_of_128_by_512_blocks_are_built_in_one_launch():
    assert worklist.heads_at_once(129, 514, compensated=True, **TOKENS) >= 40


@in_interpreter
def test_scratch_bytes_are_those_of_the_buffers():
    _, _, _, *blocks = problem(1, 300, 500, 1, 5, 150, 0.4, torch.float32)
    tokens = {"query_tokens": 300, "key_tokens": 500, "query_tile": 128, "key_tile": 128, "tail_bias": True}
    work = worklist.build_worklist(*blocks, compensate=torch.ones(2, 150, dtype=torch.bool), **tokens)
    summary = 2 * 5 * 4 * 4
    assert sum(x.nbytes for x in work) + summary == worklist.scratch_bytes(2, 5, 150, compensated=True, **tokens)


def test_groups_hold_every_head_once():
    for batch, heads, at_once in ((2, 7, 3), (1, 40, 9), (3, 4, 5), (2, 3, 6), (2, 3, 1)):
        groups = worklist.head_groups(batch, heads, at_once)
        flat = torch.arange(batch * heads)
        both = [(flat.view(batch, heads)[elements, some].flatten(), flat[group]) for elements, some, group in groups]
        assert all(torch.equal(a, b) and len(a) <= at_once for a, b in both)
        assert torch.equal(torch.cat([b for _, b in both]), flat)


@in_interpreter
def test_heads_in_groups_have_the_bits_of_all_at_once(monkeypatch):
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(4, 90, 150, 64, 4, 9, 0.5, torch.float16, bh=6)
    q, k, v = (x.view(2, 3, -1, 64) for x in (q, k, v))
    given = (q, k, v, *blocks)
    order = torch.stack([torch.randperm(90) for _ in range(6)]).int()
    more = {"query_order": order, "with_lse": True, "tile": TritonTile(32, 32, 4, 2)}
    expected = attend_ragged(*given, **more)
    size = worklist.scratch_bytes(1, 4, 9, query_tokens=90, key_tokens=150, query_tile=32, key_tile=32)
    monkeypatch.setattr(worklist, "SCRATCH_LIMIT", 2 * size)
    assert all(torch.equal(a, b) for a, b in zip(attend_ragged(*given, **more), expected, strict=True))


@in_interpreter
def test_a_bias_per_block_pair_stands_for_log_n():
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(6, 90, 150, 64, 4, 9, 0.4, torch.float16)
    bias = torch.randn(2, 4, 9).masked_fill(torch.rand(2, 4, 9) < 0.2, -torch.inf)
    stand_ins = stand_ins_of(6, 9, 64, torch.float16) | {"pair_bias": bias}
    out, lse = attend_ragged(q, k, v, *blocks, with_lse=True, tile=TritonTile(32, 32, 4, 2), **stand_ins)
    assert_close(out, lse, q, k, v, *blocks, **stand_ins)


# An anchor step and the residual ----------------------------------------------------------------------


HALF = torch.finfo(torch.float16).eps


def by_token(tokens: int, seed: int, heads: int = 2) -> torch.Tensor:
    """A [b h n d] view of [b n h d] memory, as models have it"""
    return torch.randn(1, tokens, heads, 64, generator=torch.Generator().manual_seed(seed)).half().transpose(1, 2)


@in_interpreter
@pytest.mark.parametrize("with_stand_ins", [False, True])
def test_parts_merge_into_dense_and_residual(with_stand_ins):
    from parkattn.ops.residual.triton import merge_parts

    parts = [(by_token(70, i), 3 * torch.randn(2, 70)) for i in range(3 if with_stand_ins else 2)]
    for out, lse in (parts[0], parts[1]):  # rows that keep nothing, and one that skips nothing
        lse[0, 5 : 7 if out is parts[0][0] else 6] = -torch.inf
        out[0, 0, 5 : 7 if out is parts[0][0] else 6] = 0
    dense, residual = merge_parts(*parts)
    exact = [(out.double(), lse.double().view(1, 2, 70)) for out, lse in parts]
    whole, sparse = merge(exact[:2])[0], merge([exact[0], *exact[2:]])[0]
    size = whole.abs().max()
    assert dense.stride() == parts[0][0].stride()
    assert (dense.double() - whole).abs().max() <= HALF * size
    assert (residual.double() - (whole - sparse)).abs().max() <= HALF * (whole - sparse).abs().max()


@in_interpreter
@pytest.mark.parametrize(
    ("rank", "tokens"), [(8, 70), (3, 70), (20, 70), (12, 1100)]
)  # 64 rows a tile here, 16 tiles a program
def test_a_low_rank_is_added_in_place(rank, tokens):
    from parkattn.ops.residual.triton import add_low_rank

    out, residual = by_token(tokens, 1), factor(by_token(tokens, 2), rank)
    exact = out.double() + residual.expand().double()
    plain = (add_residual(out, residual).double() - exact).abs().max()
    changed = out.clone(memory_format=torch.preserve_format)
    assert add_low_rank(changed, residual.a, residual.step, residual.b) is changed
    assert (changed.double() - exact).abs().max() <= 2 * plain


def plan_of(tokens: int, keys: int, *, padding: bool) -> Plan:
    *_, query_offsets, key_offsets, mask = problem(5, tokens, keys, 64, 4, 9, 0.4, torch.float16)
    if padding:
        mask[..., -1] = False
    sides = (
        Blocks(torch.zeros(1, 2, t), orders(t), ends[None])
        for t, ends in ((tokens, query_offsets), (keys, key_offsets))
    )
    return Plan(*sides, mask[None], 4, 9 - padding, padding, torch.ones(1, 2))


@in_interpreter
@pytest.mark.parametrize(("compensate", "padding"), [(False, False), (True, False), (True, True)])
def test_an_anchor_is_dense_attention_and_what_the_sparse_one_misses(compensate, padding):
    from parkattn.ops.attend.kernels import AttentionKernel

    kernel, plan = AttentionKernel(hopper=False), plan_of(90, 150, padding=padding)
    q, k, v = by_token(90, 1), by_token(150, 2), by_token(150, 3)
    dense, residual = kernel.over_both(q, k, v, plan, scale=None, compensate=compensate)
    attendable = torch.ones(1, 2, 150, dtype=torch.bool)
    if padding:
        for head in range(2):
            attendable[0, head, plan.keys.order[0, head, plan.keys.offsets[0, head, -2] :].long()] = False
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=attendable[:, :, None]
    )
    unit = HALF * exact.abs().max()
    # each of two parts is rounded, and so is their sum
    assert (dense.double() - exact).abs().max() <= 2 * unit
    sparse = kernel.over_kept(q, k, v, plan, scale=None, compensate=compensate)
    assert (residual.double() - (exact - sparse.double())).abs().max() <= 4 * unit


@in_interpreter
def test_dense_attention_leaves_out_keys_that_are_not_valid():
    from parkattn.ops.attend.kernels import AttentionKernel

    q, k, v = by_token(90, 1), by_token(150, 2), by_token(150, 3)
    kernel = AttentionKernel(hopper=False)
    scattered = torch.rand(1, 150, generator=torch.Generator().manual_seed(4)) < 0.6
    for valid in (None, torch.arange(150)[None] < 100, scattered):
        out, lse = kernel.over_all_with_lse(q, k, v, scale=None, key_valid=valid)
        exact = dense_attention(q.double(), k.double(), v.double(), key_valid=valid)
        plain = (dense_attention(q, k, v, key_valid=valid).double() - exact).abs().max()
        assert (out.double() - exact).abs().max() <= 2 * plain + HALF * exact.abs().max()
        scores = (q.double() @ k.double().mT / 8).masked_fill(
            torch.zeros(1, 150, dtype=torch.bool) if valid is None else ~valid, -torch.inf
        )
        assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-4)


@pytest.fixture
def hopper(module, monkeypatch):  # noqa: F811 (a fixture)
    """Attention in the Hopper kernels on the CPU"""
    from parkattn.ops.attend.kernels import AttentionKernel

    def make(order: dict, precision: str = "bf16"):
        for name, kernel in (("attend.hopper", "attend_hopper_kernel"), ("attend.hopper_dense", "attend_dense_kernel")):
            kernels = module(name)
            setattr(kernels, kernel, on_cpu(getattr(kernels, kernel), **order))
            monkeypatch.setitem(sys.modules, f"parkattn.ops.{name}", kernels)
        return AttentionKernel(hopper=True, precision=precision)

    return make


@in_interpreter
def test_the_hopper_kernel_takes_tokens_in_block_order_as_they_lie_copied_once_at_most(hopper, monkeypatch):
    from parkattn.ops.permute import triton as permute

    plan, (q, k, v) = plan_of(90, 150, padding=False), (by_token(90, 1), by_token(150, 2), by_token(150, 3))

    def run(order):
        sides = (dataclasses.replace(side, order=order(side.tokens)) for side in (plan.queries, plan.keys))
        plain = dataclasses.replace(plan, **dict(zip(("queries", "keys"), sides, strict=True)))
        return hopper(ORDERS[0]).over_kept(q, k, v, plain, scale=None, compensate=True)

    expected = run(lambda tokens: torch.arange(tokens).int().expand(1, 2, -1))
    gather = permute.gather_rows
    orders_asked = []
    monkeypatch.setattr(permute, "gather_rows", lambda x, order: orders_asked.append(order) or gather(x, order))
    assert torch.equal(run(lambda tokens: None), expected)
    assert orders_asked == [None] * 3, "q, k and v, once each"


@in_interpreter
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("tokens", [40, 300], ids=["a tile of few rows", "three tiles"])
def test_dense_attention_in_the_hopper_kernel(hopper, tokens, precision):
    q, k, v = (by_token(t, t).bfloat16() for t in (tokens, 500, 500))
    valid = torch.arange(500)[None] < 430
    exact = dense_attention(q.double(), k.double(), v.double(), key_valid=valid, precision=precision)
    plain = (
        (
            dense_attention(q, k, v, key_valid=valid).double()
            - dense_attention(q.double(), k.double(), v.double(), key_valid=valid)
        )
        .abs()
        .max()
    )
    runs = [hopper(order, precision).over_all_with_lse(q, k, v, scale=None, key_valid=valid) for order in ORDERS[:4]]
    assert all(torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1]) for out, lse in runs)
    assert (runs[0][0].double() - exact).abs().max() <= 2 * plain + torch.finfo(torch.bfloat16).eps * exact.abs().max()


@in_interpreter
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_an_anchor_in_the_hopper_kernel(hopper, precision):
    plan, (q, k, v) = plan_of(90, 150, padding=True), (by_token(90, 1), by_token(150, 2), by_token(150, 3))
    kernel = hopper(ORDERS[1], precision)
    dense, residual = kernel.over_both(q, k, v, plan, scale=None, compensate=True)
    sparse = kernel.over_kept(q, k, v, plan, scale=None, compensate=True)
    unit = HALF * dense.abs().max()
    assert (dense.double() - residual.double() - sparse.double()).abs().max() <= 4 * unit


@in_interpreter
def test_factors_made_without_a_synchronisation_hold_what_the_definition_holds():
    from parkattn.ops.residual import kernels

    residual = by_token(200, 6) * torch.linspace(2, 0.1, 64).half()
    left = [
        (residual.double() - found.expand().double()).square().sum()
        for found in (kernels.factor(residual, 8), factor(residual, 8))
    ]
    assert isinstance(factor(residual, 8), LowRank)
    assert left[0] <= left[1] + 0.01 * residual.double().square().sum()
    residual[0, 0, 3, 5], residual[0, 0, 4] = torch.inf, torch.nan
    assert kernels.factor(residual, 8).expand().isfinite().all()


@outside
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_residual_kernels_build(arch):
    from parkattn.ops.residual import triton as residual
    from parkattn.ops.tiles import low_rank_tile, residual_tile

    rows = dict.fromkeys(("kept", "skipped", "stand_ins", "dense", "residual", "out"), "*bf16")
    small = {**dict.fromkeys(("kept_lse", "skipped_lse", "stand_ins_lse", "step", "b"), "*fp32"), "a": "*i8"}
    for kernel, tile, constants in (
        (residual._merge_parts, residual_tile(128), {"STAND_INS": True}),
        (residual._add_low_rank, low_rank_tile(128), {"RANK": 12, "WIDTH": 16}),
        (residual._add_low_rank, low_rank_tile(128), {"RANK": 32, "WIDTH": 32}),
    ):
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        assert compiled(kernel, rows | small, {"D": 128, **tile, **constants}, arch, **options)[1] == 0
