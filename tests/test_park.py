"""Plans whose query blocks are cut into tiles, and budgets that rows and heads share."""

import pytest
import torch

from parkattn import build_plan, park_attention
from parkattn.ops.attend.definition import dense_attention
from parkattn.park import Park
from parkattn.plan import Plan
from parkattn.site import CallSite
from parklab.research import ResearchConfig
from plans import problem, token_mask
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
    assert torch.equal(outs[1].out, outs[0].out)
    assert torch.equal(outs[3].out, outs[2].out)


def test_tiles_survive_a_file(tmp_path):
    q, k, v = video(7)
    config = SMALL.replace(query_tile=5)
    plan = build_plan(q, k, config)
    plan.save(tmp_path / "plan.safetensors")
    again = Plan.load(tmp_path / "plan.safetensors")
    assert torch.equal(park_attention(q, k, v, plan=again), park_attention(q, k, v, plan=plan))


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


def test_tiles_out_of_a_file_tell_no_clusters_so_the_start_is_a_cold_one(tmp_path):
    q, k, _ = video(7)
    config = SMALL.replace(query_tile=5)
    build_plan(q, k, config).save(tmp_path / "plan.safetensors")
    begun, cold = (
        build_plan(q + 0.1, k, config, start=Plan.load(tmp_path / "plan.safetensors")),
        build_plan(q + 0.1, k, config),
    )
    assert torch.equal(begun.queries.labels, cold.queries.labels) and torch.equal(begun.mask, cold.mask)
