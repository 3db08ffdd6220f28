"""PARK's plans: query blocks that are cut into tiles, budgets that rows and heads share, the schedule of a run, and what
is held between its steps.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parkattn import CallSite, Park, ParkConfig, build_plan, park_attention
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.residual.definition import factor
from parkattn.plan import Plan, arrange
from parkattn.reuse import History, PlanStore, Schedule, pack_bits, unpack_bits
from parkattn.site import AttentionMethod, SiteKey
from parklab.research import ResearchConfig
from plans import phases, problem, token_mask
from strategies import clustered

SMALL = ResearchConfig(
    query_clusters=4, key_clusters=6, kmeans_iterations=3, top_p=0.5, dense_steps=0, refresh_steps=(2,)
)
RULES = [
    {"budget": "mass"},
    {"budget": "error", "compensate": True},
    {"query_tile": 5},
    {"budget": "error", "compensate": True, "query_tile": 5},
]


def video(seed, heads=2, tokens=60):
    return [clustered(seed, 1, heads, tokens, 8, draw=seed + part, groups=5, spread=0.7).float() for part in (1, 3, 5)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(12))
def test_everything_kept_is_dense_attention_with_text_and_padding(rule, seed):
    given = problem(seed)
    where = {"text": given.text, "key_valid": given.key_valid, "scale": given.scale}
    out = park_attention(*given.tensors, SMALL.replace(top_p=1.0, **rule), **where)
    dense = dense_attention(*given.tensors, scale=given.scale, key_valid=given.key_valid)
    # rows that are padding themselves attend in both; float64 sums in another order
    assert torch.allclose(out, dense, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_head_has_the_same_plan_whatever_heads_are_beside_it(rule):
    q, k, _ = video(1, heads=3)
    config = SMALL.replace(**rule)
    together = token_mask(build_plan(q, k, config))
    for h in range(3):
        assert torch.equal(token_mask(build_plan(q[:, h : h + 1], k[:, h : h + 1], config))[:, 0], together[:, h])


def test_error_is_another_rule_than_mass():
    q, k, _ = video(8)
    assert not torch.equal(
        *(build_plan(q, k, SMALL.replace(budget=budget, compensate=True)).mask for budget in ("mass", "error"))
    )


@pytest.mark.parametrize("budget", ["row", "mass", "error"])
def test_tiles_that_hold_a_whole_block_change_nothing(budget):
    q, k, _ = video(2)
    whole, cut = (
        build_plan(q, k, SMALL.replace(budget=budget, query_tile=tile, compensate=True)) for tile in (None, 60)
    )
    assert torch.equal(token_mask(whole), token_mask(cut))
    assert torch.equal(whole.density(), cut.density())
    assert torch.equal(whole.estimated_mass, cut.estimated_mass)


@pytest.mark.parametrize("importance", ["pama", "query-centroid", "full-key", "exact"])
def test_a_tile_keeps_what_its_own_queries_need(importance):
    q, k, _ = video(3)
    config = SMALL.replace(importance=importance, query_tile=5)
    plan = build_plan(q, k, config)
    assert int(plan.queries.sizes.max()) == 5
    rows = {tuple(row.tolist()) for row in plan.mask[0, 0][plan.queries.sizes[0, 0] > 0]}
    assert len(rows) > SMALL.query_clusters


def test_tiles_stop_where_their_own_queries_have_enough():
    q, k, _ = video(4, tokens=200)
    whole = build_plan(q, k, SMALL.replace(top_p=0.6))
    cut = build_plan(q, k, SMALL.replace(top_p=0.6, query_tile=8))
    assert float(cut.density().mean()) < float(whole.density().mean())


def test_a_warm_start_begins_from_the_clusters_that_tiles_were_cut_from():
    q, k, _ = video(5)
    later_q, later_k = q + 0.1, k * 1.1
    config = SMALL.replace(query_tile=5)
    plain = build_plan(later_q, later_k, SMALL, start=build_plan(q, k, SMALL))
    tiled = build_plan(later_q, later_k, config, start=build_plan(q, k, config))
    clusters = tiled.memory["cluster_of_tile"].gather(-1, tiled.queries.labels.long())
    assert torch.equal(clusters, plain.queries.labels)


@pytest.mark.parametrize("rule", RULES)
def test_a_held_plan_gives_the_output_of_the_plan_that_was_built(rule):
    q, k, v = video(6)
    config = SMALL.replace(**rule)
    method = Park(config)
    outs = [method(q, k, v, CallSite(step=step, total_steps=4)) for step in range(4)]
    assert [out.stats.phase for out in outs] == ["refresh", "reuse", "refresh", "reuse"]
    assert torch.equal(outs[0].out, park_attention(q, k, v, config))
    assert torch.equal(outs[1].out, outs[0].out) and "step 0" in outs[1].stats.reason
    assert torch.equal(outs[3].out, outs[2].out)


def test_tiles_survive_a_file_which_tells_no_clusters_to_start_from(tmp_path):
    q, k, v = video(7)
    config = SMALL.replace(query_tile=5)
    plan = build_plan(q, k, config)
    plan.save(tmp_path / "plan.safetensors")
    again = Plan.load(tmp_path / "plan.safetensors")
    assert torch.equal(park_attention(q, k, v, plan=again), park_attention(q, k, v, plan=plan))
    begun, cold = build_plan(q + 0.1, k, config, start=again), build_plan(q + 0.1, k, config)
    assert torch.equal(begun.queries.labels, cold.queries.labels) and torch.equal(begun.mask, cold.mask)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": "head"}, "budget: expected one of"),
        ({"budget": "mass", "top_p": None, "top_k": 0.2}, "budget: expected row beside top_k=0.2, got mass"),
        ({"query_tile": 0}, "query_tile: expected"),
    ],
)
def test_budgets_that_cannot_be_are_refused_in_one_line(changes, said):
    with pytest.raises(ValueError, match="^" + said) as refused:
        SMALL.replace(**changes)
    assert "\n" not in str(refused.value)


# The schedule of a run and the plans held between its steps -------------------------------------------


def test_the_papers_run_is_ten_dense_steps_and_refreshes_at_10_20_30_40():
    names = phases(Schedule(ParkConfig.preset("hunyuanvideo")), 50)
    assert names[:10] == ["dense"] * 10
    assert [step for step, name in enumerate(names) if name == "refresh"] == [10, 20, 30, 40]
    assert names.count("reuse") == 36


@pytest.mark.parametrize("total", [1, 2, 4, 8, 16, 50, 100])
def test_short_runs_begin_dense_and_still_refresh(total):
    names = phases(Schedule(ParkConfig()), total)
    dense = names.count("dense")
    assert dense == max(1, -(-total // 5))
    assert names[:dense] == ["dense"] * dense
    if total > dense:
        assert names[dense] == "refresh"
    # the share of the run between refreshes is the paper's 10 of 50, or finer
    refreshes = [step for step, name in enumerate(names) if name == "refresh"]
    gaps = [b - a for a, b in itertools.pairwise(refreshes)]
    assert all(gap <= max(1, round(total / 5)) for gap in gaps)


def test_explicit_refresh_steps_replace_the_interval():
    names = phases(Schedule(ResearchConfig(refresh_steps=(10, 30))), 50)
    assert [step for step, name in enumerate(names) if name == "refresh"] == [10, 30]


@pytest.mark.parametrize("config", [ParkConfig(), ResearchConfig(refresh_steps=(10, 20, 30, 40))])
def test_a_skipped_refresh_step_is_made_up_at_the_next_step_that_runs(config):
    ran = [step for step in range(50) if step not in (20, 21)]
    names = dict(zip(ran, phases(Schedule(config), 50, ran=ran), strict=True))
    assert names[22] == "refresh"


def test_dense_steps_override_the_fraction_and_last_steps_are_dense():
    names = phases(Schedule(ResearchConfig(dense_steps=3, dense_last_steps=2)), 10)
    assert names[:3] == ["dense"] * 3 and names[-2:] == ["dense"] * 2 and names[3] == "refresh"


def test_a_step_past_the_last_is_dense_and_says_that_the_number_of_steps_is_wrong():
    phase = Schedule(ParkConfig()).phase(CallSite(step=4, total_steps=4), History(1))
    assert phase.name == "dense" and "not one of 4 steps" in phase.reason and "total_steps" in phase.reason


def test_dense_layers_are_always_dense_and_say_why():
    phase = Schedule(ParkConfig(dense_layers=(0, 5))).phase(CallSite(step=30, layer=5, total_steps=50), History())
    assert phase.name == "dense" and "dense_layers" in phase.reason


def test_a_plan_of_an_earlier_run_is_never_reused():
    assert Schedule(ParkConfig()).phase(CallSite(step=12, total_steps=50), History(40)).name == "refresh"


def test_a_fraction_without_the_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="total_steps"):
        Schedule(ParkConfig()).phase(CallSite(), History())
    assert Schedule(ParkConfig(dense_steps=0)).phase(CallSite(), History()).name == "refresh"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**31))
def test_packed_bits_come_back(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    assert torch.equal(unpack_bits(pack_bits(mask), mask.shape), mask)


def inputs(n=96, heads=2, dim=16, seed=0):
    return torch.randn(3, 1, heads, n, dim, generator=torch.Generator().manual_seed(seed)).unbind(0)


HELD = ParkConfig(query_clusters=4, key_clusters=8, top_p=0.6, dense_steps=0)


def test_a_stored_plan_is_the_plan():
    q, k, _ = inputs()
    plan, store, key = build_plan(q, k, HELD, text=slice(90, 96)), PlanStore(), SiteKey("transformer", 0, "cond")
    store.put(key, plan, 3)
    held = store.get(key)
    assert held.step == store.refreshed_at(key) == 3
    for side in ("queries", "keys"):
        for part in ("labels", "order", "offsets"):
            assert torch.equal(getattr(getattr(held.plan, side), part), getattr(getattr(plan, side), part))
    assert torch.equal(held.plan.mask, plan.mask)
    assert 0 < store.nbytes < plan.queries.order.nbytes + plan.keys.order.nbytes
    store.reset()
    assert store.get(key) is None and len(store) == 0 and store.nbytes == 0


@pytest.mark.parametrize(("rank", "most"), [(0, 1e9), (8, 4e9)])
def test_state_of_wan_14b_at_720p_fits_one_gigabyte_and_with_residuals_four(rank, most):
    """40 layers, 2 branches, 40 heads, 75,600 tokens: measured on one head and multiplied, as heads are alike."""
    heads_in_all, tokens = 40 * 2 * 40, 75_600
    labels = torch.arange(tokens, dtype=torch.int32)[None, None]
    sides = arrange(labels % 128, 128), arrange(labels % 512, 512)
    plan = Plan(*sides, torch.ones(1, 1, 128, 512, dtype=torch.bool), 128, 512, False, torch.ones(1, 1))
    residual = factor(torch.zeros(1, 1, tokens, 128), rank) if rank else None
    store = PlanStore()
    store.put(SiteKey("transformer", 0, "cond"), plan, 0, residual=residual)
    assert store.nbytes * heads_in_all < most


def test_branches_layers_and_transformers_keep_plans_apart():
    q, k, v = inputs()
    park = Park(HELD)
    for site in (CallSite(), CallSite(branch="uncond"), CallSite(layer=1), CallSite(transformer="transformer_2")):
        assert park(q, k, v, site).stats.phase == "refresh"
        assert park(q, k, v, site).stats.phase == "reuse"
    assert len(park.plans) == 4


def test_the_second_run_equals_the_first_after_reset():
    q, k, v = inputs()
    park = Park(HELD)

    def run():
        return [park(q * (1 + 0.1 * step), k, v, CallSite(step=step, total_steps=12)).out for step in range(12)]

    first = run()
    park.reset()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_another_number_of_tokens_makes_a_new_plan():
    park = Park(HELD)
    park(*inputs(), CallSite(step=0))
    stats = park(*inputs(n=64), CallSite(step=1)).stats
    assert stats.phase == "refresh" and "tokens" in stats.reason


def test_dense_steps_are_dense_attention_with_density_one():
    q, k, v = inputs()
    out, stats = Park(HELD.replace(dense_steps=1))(q, k, v, CallSite())
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert stats.phase == "dense" and stats.reason and bool((stats.density == 1).all())


def test_every_method_keeps_the_interface():
    from parkattn import METHODS, make_method

    q, k, v = inputs()
    for name in METHODS:
        method = make_method(name)
        assert isinstance(method, AttentionMethod) and method.name == name
        out, stats = method(q, k, v, CallSite(total_steps=50))
        assert out.shape == q.shape and stats.density.shape == q.shape[:2] and stats.reason
        method.reset()


def test_text_and_padding_are_the_plans_and_not_given_twice():
    from parkattn import park_attention

    q, k, v = inputs()
    plan = build_plan(q, k, HELD, text=slice(90, 96))
    with pytest.raises(ValueError, match="text, key_valid"):
        park_attention(q, k, v, HELD, plan=plan, text=slice(90, 96))


@pytest.mark.parametrize("text, padded", [(slice(0, 6), False), (None, False), (slice(90, 96), True)])
def test_a_plan_is_not_reused_for_other_text_or_newly_padded_keys(text, padded):
    q, k, v = inputs()
    key_valid = (torch.arange(q.shape[2]) < 80).expand(q.shape[0], -1) if padded else None
    park = Park(HELD)
    park(q, k, v, CallSite(step=0, text=slice(90, 96)))
    assert park(q, k, v, CallSite(step=1, text=slice(90, 96))).stats.phase == "reuse"
    changed = park(q, k, v, CallSite(step=2, text=text, key_valid=key_valid))
    assert changed.stats.phase == "refresh" and "text or padding" in changed.stats.reason
    assert torch.equal(changed.out, Park(HELD)(q, k, v, CallSite(step=2, text=text, key_valid=key_valid)).out)
    assert park(q, k, v, CallSite(step=3, text=text, key_valid=key_valid)).stats.phase == "reuse"


def test_what_no_backend_can_run_is_refused_at_the_first_step_not_after_the_dense_ones():
    pytest.importorskip("triton")
    with pytest.raises((TypeError, ValueError), match="use backend='reference'"):
        Park(HELD.replace(dense_steps=5, backend="triton"))(*inputs(), CallSite(step=0))
