"""Methods out of a planner and a schedule: anchors are dense, what they show to be missing is added later, and when it is dropped."""

import pytest
import torch

from parkattn import CallSite, Park, ParkConfig
from parkattn.backend import resolve_for
from parkattn.ops import attend
from parkattn.ops.attend.definition import dense_attention
from parkattn.park import build_plan
from parkattn.plan import arrange, cut_blocks
from parkattn.planned import sampled_error
from parkattn.site import SiteKey
from parklab.research import ResearchConfig

SMALL = ResearchConfig(query_clusters=4, key_clusters=9, top_p=0.4, compensate=True, residual_rank=8, anchors=4)
STEPS = 16


def tokens(n=120, heads=2, dim=32, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(3, heads, 6, dim, generator=random)
    owner = torch.randint(6, (n,), generator=random)
    return (centers[:, :, owner] + torch.randn(3, heads, n, dim, generator=random)).to(dtype).unsqueeze(1).unbind(0)


def site(step=0, **more):
    return CallSite(step=step, total_steps=STEPS, **more)


@pytest.mark.parametrize("text", [None, slice(100, 120)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_backend_gives_dense_attention_and_what_the_plan_misses_of_it(text, padded):
    q, k, v = tokens()
    key_valid = torch.arange(120)[None] < 110 if padded else None
    plan = build_plan(q, k, SMALL, text=text, key_valid=key_valid, scale=0.2)
    assert plan.density().max() < 0.9
    backend = resolve_for(q, "reference")
    dense, missed = attend.over_both(backend, q, k, v, plan, scale=0.2, compensate=True)
    torch.testing.assert_close(dense, dense_attention(q, k, v, scale=0.2, key_valid=key_valid))
    torch.testing.assert_close(dense - missed, attend.over_kept(backend, q, k, v, plan, scale=0.2, compensate=True))


def test_an_anchor_returns_dense_attention():
    q, k, v = tokens()
    made = Park(SMALL)(q, k, v, site())
    assert (
        made.stats.phase == "anchor"
        and torch.equal(made.out, dense_attention(q, k, v))
        and (made.stats.density == 1).all()
    )


def test_an_anchor_without_a_residual_returns_the_models_own_dense_output():
    q, k, v = tokens()
    own = torch.randn(q.shape)
    park = Park(SMALL.replace(residual_rank=0))
    assert torch.equal(park(q, k, v, site(dense=lambda: own)).out, own)
    assert park(q, k, v, site(1)).stats.phase == "reuse"


@pytest.mark.parametrize("padded", [False, True])
def test_dense_steps_by_the_backend_are_dense_attention_and_say_who_computed_them(padded):
    q, k, v = tokens()
    key_valid = torch.arange(120)[None] < 110 if padded else None
    park = Park(ResearchConfig(own_dense=True, query_clusters=4, key_clusters=9))
    made = park(q, k, v, site(key_valid=key_valid, scale=0.2, dense=lambda: torch.zeros(q.shape)))
    torch.testing.assert_close(made.out, dense_attention(q, k, v, scale=0.2, key_valid=key_valid))
    assert made.stats.phase == "dense" and "reference" in made.stats.backend
    assert not Park(ParkConfig())(q, k, v, site(dense=lambda: torch.zeros(q.shape))).out.any()


@pytest.mark.parametrize("share", [False, True])
def test_the_density_that_is_kept_with_a_plan_is_the_plans(share):
    park = Park(SMALL.replace(share_branches=share))
    batch = [torch.cat([x, x.flip(2)]) for x in tokens()]
    park(*batch, site(0, paired=True))
    stats = park(*batch, site(1, paired=True)).stats
    assert stats.phase == "reuse" and stats.density.shape == (2, 2) and (stats.density < 1).all()
    assert torch.equal(stats.density, stats.plan.density())


def test_the_density_of_a_plan_follows_its_padding():
    q, k, v = tokens()
    park = Park(SMALL)
    park(q, k, v, site(0, key_valid=torch.arange(120)[None] < 110))
    stats = park(q, k, v, site(1, key_valid=torch.arange(120)[None] < 90)).stats
    assert stats.phase == "reuse" and torch.equal(stats.density, stats.plan.density())


def test_what_is_not_finite_at_an_anchor_is_returned_and_keeps_nothing():
    q, k, v = tokens()
    v[0, 0, 3] = torch.nan
    park = Park(SMALL)
    assert park(q, k, v, site(0)).out.isnan().any()
    v[0, 0, 3] = 0.0
    assert park(q, k, v, site(1)).out.isfinite().all()


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
    assert [park(q, k, v, site(step)).stats.phase for step in range(8)] == ["dense"] * 2 + ["anchor"] + [
        "reuse"
    ] * 3 + ["anchor", "reuse"]


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


def test_short_videos_may_have_a_rank_of_their_own():
    config = SMALL.replace(short_residual_rank=32)
    assert (config.rank_for(16_383), config.rank_for(16_384), SMALL.rank_for(10)) == (32, 8, 8)
    q, k, v = tokens()
    few, many = Park(SMALL), Park(config)
    for park in (few, many):
        park(q, k, v, site(0))
    heads, n, dim = 2, 120, 32
    assert many.state_bytes - few.state_bytes == heads * 24 * (n + 4 + 4 * dim)


def test_branches_layers_and_transformers_keep_residuals_apart():
    (q, k, v), (other, _, _) = tokens(), tokens(seed=5)
    park, alone = Park(SMALL), Park(SMALL)
    for call in (park, alone):
        call(q, k, v, site(0))
    for elsewhere in ({"branch": "uncond"}, {"layer": 1}, {"transformer": "transformer_2"}):
        park(other, k, v, site(0, **elsewhere))
    assert torch.equal(park(q, k, v, site(1)).out, alone(q, k, v, site(1)).out)


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


SHARED = SMALL.replace(share_branches=True)


def test_branches_that_share_a_plan_hold_it_once_and_each_its_residual():
    (q, k, v), (other, _, _) = tokens(), tokens(seed=5)
    one, both, apart = Park(SHARED), Park(SHARED), Park(SHARED)
    one(q, k, v, site(0))
    plan = Park(SHARED.replace(residual_rank=0))
    plan(q, k, v, site(0))
    for park in (both, apart):
        park(q, k, v, site(0))
        park(other, k, v, site(0, branch="uncond"))
    assert both.state_bytes == 2 * one.state_bytes - plan.state_bytes
    # a copy of its own gives the same outputs
    held = apart.plans.get(SiteKey("transformer", 0, "uncond"))
    apart.plans.put(SiteKey("transformer", 0, "uncond"), held.plan, held.step, held.text, held.residual)
    assert apart.state_bytes == 2 * one.state_bytes
    for step in (1, 2):
        for x, branch in ((q, "cond"), (other, "uncond")):
            made, wanted = (park(x + 0.1 * step, k, v, site(step, branch=branch)) for park in (both, apart))
            assert torch.equal(made.out, wanted.out) and made.stats.phase == wanted.stats.phase


def test_two_branches_in_one_batch_are_two_calls_that_share_a_plan():
    parts = [tokens(), tokens(seed=5)]
    together, apart = Park(SHARED), Park(SHARED)
    for step in range(5):
        moved = [(q + 0.1 * step, k, v) for q, k, v in parts]
        batch = together(*(torch.cat(x) for x in zip(*moved, strict=True)), site(step, paired=True))
        each = [apart(*x, site(step, branch=branch)) for x, branch in zip(moved, ("uncond", "cond"), strict=True)]
        assert torch.equal(batch.out, torch.cat([made.out for made in each]))
        assert batch.stats.phase == each[0].stats.phase == each[1].stats.phase
        assert torch.equal(batch.stats.density, torch.cat([made.stats.density for made in each]))
    assert together.state_bytes == apart.state_bytes
    alone = Park(SMALL)
    batch = [torch.cat(x) for x in zip(*parts, strict=True)]
    alone(*batch, site(0, paired=True))
    first, second = alone(*batch, site(1, paired=True)).stats.density
    assert not torch.equal(first, second), "without share_branches each has a plan of its own"


def test_videos_never_share_a_plan():
    (q, k, v), (other, _, _) = tokens(), tokens(seed=5)
    park, alone = Park(SHARED), Park(SHARED)
    park(q, k, v, site(0))
    park(other, k, v, site(0, branch="cond, part 1", video=1))
    alone(other, k, v, site(0))
    assert torch.equal(park(other, k, v, site(1, branch="cond, part 1", video=1)).out, alone(other, k, v, site(1)).out)


def as_laid_out(batch=1, paired=False, n=120, width=32, padded=False, **where):
    """A call of some batch, pairing and layout, by step."""
    parts = zip(*(tokens(n, seed=seed) for seed in range(batch)), strict=True)
    q, k, v = (torch.cat(part) for part in parts)
    key_valid = (torch.arange(n) < 100).expand(batch, n) if padded else None
    return lambda park, step: park(
        q + 0.01 * step, k, v[..., :width], site(step, paired=paired, key_valid=key_valid, **where)
    )


LAYOUTS = {
    **{f"{batch}{', paired' * paired}": {"batch": batch, "paired": paired} for batch in (1, 2, 4) for paired in (False, True)[: batch]},
    "fewer tokens": {"n": 100},
    "text": {"text": slice(100, 120)},
    "padding": {"padded": True},
    "padding of a pair": {"padded": True, "batch": 2, "paired": True},
    "grid": {"grid": (2, 6, 10)},
    "narrower values": {"width": 24},
}  # fmt: skip


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("first", LAYOUTS)
def test_neither_plan_nor_residual_outlives_a_change_of_batch_pairing_or_layout(first, share):
    """What comes after another layout is what a fresh method gives; what comes back is that, or what it would be
    without the other.
    """
    config = SMALL.replace(share_branches=share)
    one = as_laid_out(**LAYOUTS[first])
    alone = Park(config)
    one(alone, 0)
    again = [one(alone, 2).out, one(Park(config), 2).out]
    for second in LAYOUTS.keys() - {first}:
        other, park = as_laid_out(**LAYOUTS[second]), Park(config)
        one(park, 0)
        assert torch.equal(other(park, 1).out, other(Park(config), 1).out), second
        back = one(park, 2).out
        assert any(torch.equal(back, wanted) for wanted in again), second


# Blocks cut into tiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("others", [0, 2])
def test_tiles_cover_each_block_in_order_and_move_no_token(size, others):
    labels = torch.randint(0, 5 + others, (2, 3, 40), generator=torch.Generator().manual_seed(size), dtype=torch.int32)
    labels[labels == 2] = 3  # an empty block
    blocks = arrange(labels, 5 + others)
    cut, owner = cut_blocks(blocks, 5, size)
    tiles = owner.shape[-1]
    assert tiles == 40 // size + 5
    assert torch.equal(cut.order, blocks.order)
    again = arrange(cut.labels, tiles + others)
    assert torch.equal(again.order, cut.order)
    assert torch.equal(again.offsets, cut.offsets)
    own = labels < 5
    assert torch.equal(owner.gather(-1, cut.labels.long().clamp(max=tiles - 1))[own], labels[own])
    assert torch.equal((cut.labels - tiles)[~own], (labels - 5)[~own])
    # as few tiles as hold a block, all of them full but the last
    full = (cut.sizes[..., :tiles] == size).long()
    of_each = torch.zeros(2, 3, 5, dtype=torch.long).scatter_add_(-1, owner.long(), full)
    assert torch.equal(of_each, blocks.sizes[..., :5].long() // size)
