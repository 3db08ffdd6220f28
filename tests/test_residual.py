"""The residual of a sparse step: parts merge into dense attention, what a low rank in 8 bits leaves out is bounded."""

from __future__ import annotations

import pytest
import torch

from parkattn.ops.attend.definition import attend_with_lse, dense_attention
from parkattn.ops.residual.definition import add_residual, factor, iterate_directions, merge, quantise, top_directions
from parkattn.plan import Blocks


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
