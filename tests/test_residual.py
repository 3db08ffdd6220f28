"""What a dense step shows to be missing: exact at the anchor, what the rank leaves out, and when it is dropped."""

import pytest
import torch

from parkattn import CallSite, Park, ParkConfig
from parkattn.attend import dense_attention
from parkattn.backend import resolve_for
from parkattn.park import build_plan
from parkattn.planned import sampled_error
from parkattn.residual import LEVELS, LowRank, add_low_rank, expand, factor, merge, subspace_iteration

SMALL = ParkConfig(query_clusters=4, key_clusters=9, top_p=0.4, compensate=True, residual_rank=8, anchors=4)
STEPS = 16


def tokens(n=120, heads=2, dim=32, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(3, heads, 6, dim, generator=random)
    owner = torch.randint(6, (n,), generator=random)
    return (centers[:, :, owner] + torch.randn(3, heads, n, dim, generator=random)).to(dtype).unsqueeze(1).unbind(0)


def site(step=0, **more):
    return CallSite(step=step, total_steps=STEPS, **more)


def low_rank_matrix(n=90, dim=32, rank=3, seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, n, rank, generator=random) @ torch.randn(1, 2, rank, dim, generator=random)


def rounding_bound(kept: LowRank) -> torch.Tensor:
    """Columns are moved by at most half a step each, and the basis is orthonormal: |error| <= half a step * sqrt(n r), per head."""
    return (kept.scale.square().sum(-1) * kept.a.shape[2] / 4).sqrt()


def test_a_matrix_of_no_more_than_the_rank_comes_back_up_to_eight_bits():
    matrix = low_rank_matrix(rank=3)
    kept = factor(matrix, 8)
    assert kept.a.dtype == torch.int8 and kept.a.shape == (1, 2, 90, 8) and kept.a.abs().max() <= LEVELS
    error = (expand(kept) - matrix).flatten(2).norm(dim=-1)
    float32 = 1e-5 * matrix.flatten(2).norm(dim=-1)
    assert (error <= rounding_bound(kept) + float32).all()


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_what_the_rank_leaves_out_is_the_sum_of_the_other_eigenvalues(rank):
    matrix = torch.randn(1, 2, 90, 32, generator=torch.Generator().manual_seed(2))
    kept = factor(matrix, rank)
    left_out = (matrix - expand(kept)).double().flatten(2).norm(dim=-1)
    others = torch.linalg.eigvalsh(matrix.double().mT @ matrix.double())[..., :-rank].sum(-1).sqrt()
    assert ((left_out - others).abs() <= rounding_bound(kept).double() + 1e-5 * others).all()


def test_a_rank_above_the_head_dimension_keeps_everything():
    matrix = torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(3))
    kept = factor(matrix, 64)
    assert kept.b.shape == (1, 1, 8, 8)
    assert ((expand(kept) - matrix).flatten(2).norm(dim=-1) <= rounding_bound(kept) + 1e-5).all()


def test_factors_take_a_32th_of_an_output_in_half_precision():
    n, dim = 4096, 128
    kept = factor(torch.randn(1, 1, n, dim), 8)
    assert kept.nbytes <= n * dim * 2 / 32 + 4 * (dim * 8 + 8)


def test_no_residual_adds_nothing_and_what_is_not_finite_stays_visible():
    out = torch.randn(1, 1, 20, 8)
    assert torch.equal(add_low_rank(out, factor(torch.zeros_like(out), 4)), out)
    broken = torch.zeros_like(out)
    broken[0, 0, 3] = torch.nan
    assert add_low_rank(out, factor(broken, 4)).isnan().any()


@pytest.mark.parametrize("decay", [0.5, 0.8, 0.95])
def test_the_iteration_for_gpus_keeps_what_the_eigenvectors_keep(decay):
    """All but 2 % of the energy, even where each eigenvalue is only 5 % below the one before and a wrong choice costs little."""
    random = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(3, 32, 32, generator=random))[0]
    spectrum = decay ** torch.arange(32)
    gram = (basis * spectrum) @ basis.mT
    found = subspace_iteration(gram, 8)
    assert torch.allclose(found.mT @ found, torch.eye(8).expand(3, 8, 8), atol=1e-5)
    energy = (found * (gram @ found)).sum((-1, -2))
    assert (energy >= 0.98 * spectrum[:8].sum()).all()


def test_the_iteration_survives_a_matrix_of_rank_one_and_of_zeros():
    one = torch.ones(1, 16, 1)
    for gram in (one @ one.mT, torch.zeros(1, 16, 16)):
        found = subspace_iteration(gram, 4)
        assert found.isfinite().all()
        assert torch.allclose((found.mT @ gram @ found).diagonal(dim1=-2, dim2=-1).sum(), gram.diagonal(dim1=-2, dim2=-1).sum(), rtol=1e-4)


@pytest.mark.parametrize("text", [None, slice(100, 120)])
@pytest.mark.parametrize("padded", [False, True])
def test_kept_and_skipped_blocks_merge_into_dense_attention(text, padded):
    q, k, v = tokens()
    key_valid = torch.arange(120)[None] < 110 if padded else None
    plan = build_plan(q, k, SMALL, text=text, key_valid=key_valid, scale=0.2)
    assert plan.density().max() < 0.9
    backend = resolve_for(q, "reference")
    dense, sparse = backend.attend_anchor(q, k, v, plan, scale=0.2, compensate=True, dense=None)
    torch.testing.assert_close(dense, dense_attention(q, k, v, scale=0.2, key_valid=key_valid), rtol=1e-5, atol=1e-5)
    assert torch.equal(sparse, backend.attend(q, k, v, plan, scale=0.2, compensate=True))


def test_a_part_without_keys_changes_nothing_in_a_merge():
    out, lse = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    assert torch.equal(merge((out, lse), nothing), out)
    assert torch.equal(merge(nothing, nothing), nothing[0])


def test_an_anchor_returns_the_models_own_dense_output():
    q, k, v = tokens()
    own = torch.randn(q.shape)
    made = Park(SMALL)(q, k, v, site(dense=lambda: own))
    assert made.stats.phase == "anchor" and torch.equal(made.out, own) and (made.stats.density == 1).all()


def test_right_after_an_anchor_only_what_the_rank_leaves_out_is_missing():
    """Unchanged input: sparse + L(R) misses dense by |R - L(R)|, and by nothing more than rounding at full rank."""
    q, k, v = tokens()
    dense = dense_attention(q, k, v)
    missed = {}
    for rank in (0, 2, 8, 32):
        park = Park(SMALL.replace(residual_rank=rank))
        park(q, k, v, site(0))
        again = park(q, k, v, site(1))
        assert again.stats.phase == "reuse"
        missed[rank] = (again.out - dense).norm() / dense.norm()
    assert missed[0] > 1.05 * missed[2] > 1.05**2 * missed[8] > 1.05**3 * missed[32]
    assert missed[32] < 0.02


def test_a_residual_is_as_stale_as_the_input_has_moved():
    q, k, v = tokens()
    other, _, _ = tokens(seed=9)
    park = Park(SMALL.replace(guard_rows=120))
    park(q, k, v, site(0))
    errors = [park(torch.lerp(q, other, moved), k, v, site(1)).stats.error.mean() for moved in (0.0, 0.05, 0.2, 0.8)]
    assert errors == sorted(errors) and errors[-1] > 2 * errors[0]


def test_refreshes_are_anchors_where_a_residual_is_wanted():
    q, k, v = tokens()
    park = Park(SMALL.replace(anchors=None, dense_steps=2, refresh_steps=(2, 6)))
    assert [park(q, k, v, site(step)).stats.phase for step in range(8)] == ["dense"] * 2 + ["anchor"] + ["reuse"] * 3 + ["anchor", "reuse"]


def test_a_residual_goes_with_its_plan():
    q, k, v = tokens()
    park = Park(SMALL)
    park(q, k, v, site(0))
    with_residual = park.state_bytes
    rank, heads, n, dim = 8, 2, 120, 32
    without = Park(SMALL.replace(residual_rank=0))
    without(q, k, v, site(0))
    assert with_residual - without.state_bytes == heads * (n * rank + 4 * rank + 4 * dim * rank)
    # other tokens: the residual is of no use, so this call is an anchor again
    fewer = [x[:, :, :100] for x in (q, k, v)]
    made = park(*fewer, site(1))
    assert made.stats.phase == "anchor" and "tokens" in made.stats.reason
    assert park(*fewer, site(1, text=slice(90, 100))).stats.phase == "anchor"
    park.reset()
    assert park.state_bytes == 0


def test_branches_layers_and_transformers_keep_residuals_apart():
    (q, k, v), (other, _, _) = tokens(), tokens(seed=5)
    park, alone = Park(SMALL), Park(SMALL)
    for call in (park, alone):
        call(q, k, v, site(0))
    for elsewhere in ({"branch": "uncond"}, {"layer": 1}, {"transformer": "transformer_2"}):
        park(other, k, v, site(0, **elsewhere))
    assert torch.equal(park(q, k, v, site(1)).out, alone(q, k, v, site(1)).out)


def test_state_of_wan_14b_at_720p_with_residuals_fits_four_gigabytes():
    """40 layers, 2 branches, 40 heads, 75,600 tokens: a head's labels, mask and residual of rank 8, multiplied."""
    plan, residual = 75_600 * (1 + 2) + 128 * 512 // 8, 75_600 * 8 + 4 * 8 + 4 * 128 * 8
    assert (plan + residual) * 40 * 2 * 40 < 4e9


def test_gradients_flow_past_a_residual():
    q, k, v = tokens()
    park = Park(SMALL)
    park(q, k, v, site(0))
    q = q.requires_grad_()
    park(q, k, v, site(1)).out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_the_sampled_error_is_the_error_when_every_query_is_sampled():
    q, k, v = tokens()
    out = Park(SMALL)(q, k, v, site(0)).out
    worse = out + 0.1 * torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    exact = dense_attention(q, k, v)
    wanted = (worse - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    torch.testing.assert_close(sampled_error(q, k, v, worse, 120), wanted)
    assert sampled_error(q, k, v, worse, 7).shape == (1, 2)
    assert (sampled_error(q, k, v, out, 500) < 1e-5).all()


def test_half_precision_in_half_precision_out():
    q, k, v = tokens(dtype=torch.bfloat16)
    park = Park(SMALL)
    assert park(q, k, v, site(0)).out.dtype == park(q, k, v, site(1)).out.dtype == torch.bfloat16
