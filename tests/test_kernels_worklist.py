"""Work lists: every kept pair once, in buffers whose size follows from the shapes and stays below a limit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from interpreted import run_interpreted
from parkattn.ops.attend import worklist
from parkattn.ops.attend.tiles import TritonTile
from test_kernels_attend import assert_close, in_interpreter, on_compiler, one_by_one, pair_mask, problem, pytestmark  # noqa: F401 (pytest reads it)

TOKENS = {"query_tokens": 75_600, "key_tokens": 75_600, "query_tile": 128, "key_tile": 128, "tail_bias": True}


@on_compiler
def test_the_lists_under_the_interpreter():
    run_interpreted(__file__, at_least=6)


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


@in_interpreter
@settings(one_by_one, max_examples=10)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 200), m=st.integers(1, 400), qb=st.integers(1, 9), kb=st.integers(1, 40),
    density=st.floats(0, 1), tiles=st.sampled_from([(128, 128, 8), (192, 64, 8), (64, 64, 8), (128, 128, 16), (32, 32, 8)]),
)  # fmt: skip
def test_every_kept_pair_is_listed_once(seed, n, m, qb, kb, density, tiles):
    _, _, _, query_offsets, key_offsets, mask = problem(seed, n, m, 1, qb, kb, density, torch.float32)
    query_tile, key_tile, tail = tiles
    work = worklist.build_worklist(
        query_offsets,
        key_offsets,
        mask,
        query_tokens=n,
        key_tokens=m,
        query_tile=query_tile,
        key_tile=key_tile,
        tail=tail,
        tail_bias=True,
    )
    assert torch.equal(
        listed_pairs(work, 2, qb, n, m, key_tile, tail), pair_mask(query_offsets, key_offsets, mask).int()
    )
    records = work.tiles[: work.count[0]]
    assert records[:, 3].sum() == 2 * n
    assert (records[:, 0].diff() >= 0).all()
    for head in range(2):
        assert (records[records[:, 0] == head, 6].diff() <= 0).all()  # longest lists first


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
    assert torch.equal(listed_pairs(work, 2, qb, n, m, 128, 8), pair_mask(query_offsets, key_offsets, mask).int())
    records = work.tiles[: work.count[0]]
    assert records[:, 3].sum() == 2 * n
    for head in range(2):
        assert (records[records[:, 0] == head, 6].diff() <= 0).all()


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
    centroids, mean_values = (torch.randn(2, 9, 64).half() for _ in range(2))
    bias = torch.randn(2, 4, 9).masked_fill(torch.rand(2, 4, 9) < 0.2, -torch.inf)
    stand_ins = {
        "compensate": torch.rand(2, 9) < 0.7,
        "centroids": centroids,
        "mean_values": mean_values,
        "pair_bias": bias,
    }
    out, lse = attend_ragged(q, k, v, *blocks, with_lse=True, tile=TritonTile(32, 32, 4, 2), **stand_ins)
    expected = assert_close(out, q, k, v, *blocks, **stand_ins)
    assert torch.allclose(lse.double(), expected, atol=1e-4)
