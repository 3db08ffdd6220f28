"""Operations beyond their definitions: the residual of a sparse step, what top-k keeps, one threshold over rows, heads and layers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from parkattn.ops.attend.definition import attend_with_lse, dense_attention
from parkattn.ops.cluster.definition import Clustering
from parkattn.ops.importance.definition import pama, score_spread, select_shared, select_top_k, select_top_p
from parkattn.ops.residual.definition import add_residual, factor, iterate_directions, merge, quantise, top_directions
from parkattn.plan import Blocks
from parkattn.segments import segment_mean
from strategies import normal

# Residual -----------------------------------------------------------------------------------------------


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def blocks(*ends: int) -> Blocks:
    """One head's blocks, its tokens in block order."""
    offsets = torch.tensor(ends, dtype=torch.int32)[None, None]
    labels = torch.arange(len(ends) - 1).repeat_interleave(offsets.flatten().diff())
    return Blocks(labels[None, None].int(), torch.arange(ends[-1])[None, None].int(), offsets)


def test_kept_and_skipped_keys_attended_apart_merge_into_dense_attention():
    q, k, v = rows(1, 1, 40, 16), rows(1, 1, 60, 16, seed=1), rows(1, 1, 60, 16, seed=2)
    queries, keys = blocks(0, 13, 30, 40), blocks(0, 7, 7, 41, 60)
    # one keeps nothing, one everything
    mask = torch.tensor([[[[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]]], dtype=torch.bool)
    parts = [attend_with_lse(q, k, v, queries, keys, kept) for kept in (mask, ~mask)]
    out, lse = merge(parts)
    assert torch.allclose(out, dense_attention(q, k, v), rtol=0, atol=1e-12)
    assert torch.allclose(lse, (q @ k.mT / 4).logsumexp(-1), rtol=0, atol=1e-12)


def test_rows_without_any_key_merge_into_zero():
    out, lse = merge([(torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf))] * 2)
    assert not out.any() and lse.isneginf().all()


def test_a_residual_of_the_rank_is_kept_up_to_8_bits():
    residual = rows(1, 2, 300, 5) @ rows(1, 2, 5, 64, seed=1)
    kept = factor(residual, 5)
    error = (kept.expand().double() - residual).norm(dim=-1)
    bound = kept.step.double().square().sum(-1).sqrt() / 2
    # float32 storage of the factors adds its own rounding, of the size of a row
    assert (error <= bound[..., None] + 4 * torch.finfo(torch.float32).eps * residual.norm(dim=-1)).all()


def test_what_the_rank_leaves_out_are_the_discarded_eigenvalues():
    residual = rows(1, 2, 300, 32) * torch.linspace(3, 0.1, 32, dtype=torch.float64)
    directions = top_directions(residual.mT @ residual, 8).double()
    left = (residual - residual @ directions.mT @ directions).square().sum((-2, -1))
    discarded = torch.linalg.eigvalsh(residual.mT @ residual)[..., :-8].sum(-1)
    assert torch.allclose(left, discarded, rtol=1e-5)
    assert torch.allclose((directions @ directions.mT), torch.eye(8).double(), atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.02, 0.2, 1.0])
def test_iterated_directions_hold_what_the_eigenvectors_hold(decay):
    """Of flat and of steep spectra, at most a hundredth less of the energy."""
    residual = rows(2, 3, 500, 128) * torch.exp(-decay * torch.arange(128.0))
    gram = residual.mT @ residual
    both = (found(gram, 8).double() for found in (iterate_directions, top_directions))
    held, best = ((residual @ directions.mT).square().sum((-2, -1)) for directions in both)
    assert (held >= best - 0.01 * residual.square().sum((-2, -1))).all()


def test_iterated_directions_of_a_deficient_residual_are_exact_and_of_none_are_finite():
    residual = rows(1, 2, 300, 3) @ rows(1, 2, 3, 64, seed=1)
    residual[:, 1] = 0
    directions = iterate_directions(residual.mT @ residual, 8)
    assert directions.isfinite().all()
    kept = residual @ directions.double().mT @ directions.double()
    assert torch.allclose(kept, residual, rtol=0, atol=1e-5 * residual.abs().max())
    assert not quantise(residual, directions).expand()[:, 1].any()


def test_the_sum_is_rounded_once_and_costs_a_32nd_of_the_output():
    residual, out = rows(1, 2, 4096, 128).bfloat16(), rows(1, 2, 4096, 128, seed=1).bfloat16()
    kept = factor(residual, 8)
    assert add_residual(out, kept).dtype == torch.bfloat16
    assert torch.equal(add_residual(out, kept), (out.float() + kept.expand()).bfloat16())
    factors = 2 * 8 * (128 + 1) * 4
    assert kept.nbytes == out.nbytes // 32 + factors


@pytest.mark.parametrize("dim", [16, 128, 256])
@pytest.mark.parametrize("directions", [iterate_directions, top_directions])
def test_a_residual_near_the_largest_number_of_its_type_is_kept(dim, directions):
    """All entries at the largest of fp16: a row's sum is sqrt(d) times as large."""
    residual = torch.full((1, 1, 40, dim), torch.finfo(torch.float16).max, dtype=torch.float16)
    rows = residual.float()
    kept = quantise(residual, directions(rows.mT @ rows, 4)).expand()
    # fp16 rounds each entry of a direction and the sum once more, 8 bits round by half a step of 127
    torch.testing.assert_close(kept, rows, rtol=2 * torch.finfo(torch.float16).eps + 1 / 254, atol=0)


# Selection ----------------------------------------------------------------------------------------------


def importances(seed, *shape):
    return (2 * normal(seed, *shape)).softmax(-1)


def sizes_of(seed, *shape):
    return torch.randint(1, 9, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.parametrize("spread", [None, torch.tensor([[0.25, 4.0]])])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.75])
def test_blocks_above_the_threshold_and_the_heaviest_of_a_row_are_kept(p, spread):
    importance, sizes = importances(1, 1, 2, 5, 7), sizes_of(2, 1, 2, 7)
    mask = select_shared(importance, p, sizes=sizes, spread=spread)
    for h, u, v in itertools.product(range(2), range(5), range(7)):
        row, n = importance[0, h, u], sizes[0, h]
        drawn = float(row[v] / n[v] * n.sum()) * (1 if spread is None else float(spread[0, h]))
        assert bool(mask[0, h, u, v]) == (drawn >= (1 - p) / p or v == int(row.argmax()))


def test_no_mask_with_as_many_token_pairs_keeps_more_mass():
    importance, sizes = importances(3, 1, 1, 2, 5), sizes_of(4, 1, 1, 5)
    queries = torch.tensor([3.0, 5.0], dtype=torch.float64)
    kept = select_shared(importance, 0.6, sizes=sizes)[0, 0]
    mass, cost = importance[0, 0] * queries[:, None], queries[:, None] * sizes[0, 0]
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=10)), dtype=torch.float64).view(-1, 2, 5)
    as_many = (every * cost).sum((1, 2)) <= (kept * cost).sum()
    assert (every * mass).sum((1, 2))[as_many].max() <= (kept * mass).sum() + 1e-12
    assert 0 < int(kept.sum()) < 10


def test_rows_and_heads_share_what_top_p_gives_to_each():
    sharp, flat = torch.tensor([0.91, 0.03, 0.03, 0.03]), torch.full((4,), 0.25)
    rows, sizes = torch.stack([sharp, flat]).view(1, 2, 1, 4), torch.full((1, 2, 4), 8, dtype=torch.int32)
    assert select_top_p(rows, 0.9, sizes=sizes).sum(-1).flatten().tolist() == [1, 4]
    assert select_shared(rows, 0.45, sizes=sizes).sum(-1).flatten().tolist() == [1, 1]
    assert select_shared(rows, 0.55, sizes=sizes).sum(-1).flatten().tolist() == [1, 4]


def test_empty_blocks_are_never_kept_and_p_of_one_keeps_all_others():
    importance, sizes = importances(5, 1, 2, 4, 6), sizes_of(6, 1, 2, 6)
    sizes[0, 0, 2] = 0
    importance[0, 1, 3] = 0
    mask = select_shared(importance, 1.0, sizes=sizes)
    expected = (sizes > 0).unsqueeze(-2).expand_as(mask).clone()
    expected[0, 1, 3] = False
    assert torch.equal(mask, expected)


def test_a_floor_keeps_that_share_of_every_row():
    importance, sizes = importances(7, 1, 2, 5, 8), sizes_of(8, 1, 2, 8)
    mask = select_shared(importance, 0.01, sizes=sizes, floor=0.5)
    assert torch.equal(mask.sum(-1), torch.full((1, 2, 5), 4))
    assert torch.equal(mask & (importance >= importance.sort(-1).values[..., 4:5]), mask)


def test_a_row_of_nan_keeps_every_block():
    importance, sizes = importances(9, 1, 1, 2, 4), sizes_of(10, 1, 1, 4)
    importance[0, 0, 1] = torch.nan
    assert select_shared(importance, 0.3, sizes=sizes)[0, 0, 1].all()


def test_the_spread_is_the_mean_squared_distance_of_scores_from_those_of_centroids():
    q, k = normal(11, 2, 2, 9, 4), normal(12, 2, 2, 12, 4)
    labels = torch.randint(0, 4, (2, 2, 12), generator=torch.Generator().manual_seed(13), dtype=torch.int32)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, 6:] = False
    centroids, sizes = segment_mean(k, labels, 3)  # label 3 takes no part
    found = score_spread(q, k, Clustering(labels, centroids, sizes), query_valid=valid)
    for b, h in itertools.product(range(2), range(2)):
        squares = [
            float(q[b, h, i] @ (k[b, h, j] - centroids[b, h, labels[b, h, j]])) ** 2 / 4
            for i in range(9)
            for j in range(12)
            if valid[b, i] and labels[b, h, j] < 3
        ]
        # sums in float64, the result rounded once to float32
        assert float(found[b, h]) == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=2**-23)


def test_what_a_stand_in_gets_wrong_vanishes_with_the_spread():
    q, labels = normal(14, 1, 1, 6, 4), torch.arange(8).view(1, 1, 8).int() // 2
    k = normal(15, 1, 1, 4, 4).repeat_interleave(2, dim=2)
    assert float(score_spread(q, k, Clustering(labels, *segment_mean(k, labels, 4)))) == 0
    importance = pama(q, k, torch.zeros(1, 1, 6, dtype=torch.int32), 1, labels, 4)
    kept = select_shared(importance, 0.9, sizes=torch.full((1, 1, 4), 2), spread=torch.zeros(1, 1))
    assert int(kept.sum()) == 1


@pytest.mark.parametrize("seed", range(30))
def test_top_k_is_the_first_of_a_stable_sort_with_ties_nan_and_empty_blocks(seed):
    random = torch.Generator().manual_seed(seed)
    importance = torch.rand(2, 2, 4, 23, generator=random)
    if seed % 2:
        importance = (4 * importance).round() / 4  # many equal weights
    importance[0, 0, 0] = torch.nan
    importance[0, 1, 1, 5] = torch.nan
    sizes = torch.randint(0, 3, (2, 2, 23), generator=random)
    for ratio in (0.01, 0.1, 1 / 3, 0.5, 0.999, 1.0):
        kept = select_top_k(importance, ratio, sizes=sizes)
        for head in range(4):
            weights, occupied = (
                importance.flatten(0, 1)[head],
                (sizes.flatten(0, 1)[head] > 0).nonzero().flatten().tolist(),
            )
            count = max(1, math.ceil(len(occupied) * ratio - 1e-9))
            for row, found in zip(weights.tolist(), kept.flatten(0, 1)[head], strict=True):
                ranked = sorted(
                    occupied, key=lambda block: (-math.inf if math.isnan(row[block]) else -row[block], block)
                )
                assert found.nonzero().flatten().tolist() == sorted(ranked[:count])
