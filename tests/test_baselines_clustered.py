"""SVG2, SVOO, SVG-EAR and SparsePR against their restatements by another author, and by the properties that define them."""

import itertools
from dataclasses import replace
from random import Random

import torch
from torch.nn.functional import scaled_dot_product_attention

from parkattn.baselines import svg2
from parkattn.cluster import first_centroids, initial_tokens, lloyd
from parkattn.planned import make_plan
from parkattn.site import CallSite
from restated import svg2 as restated_svg2
from restated.cases import cases

COUNT = 200
torch.set_num_threads(1)


def problems(count, seed):
    """The restatements' generated cases (text, padding, odd grids); their loops are slow, so most keep one head of theirs."""
    for i, case in enumerate(cases(count, seed)):
        yield case if i % 8 == 0 else replace(case, q=case.q[:, :1], k=case.k[:, :1], v=case.v[:, :1])


def seen_tokens(plan):
    """The plan as a mask [b h n m] over token pairs."""
    rows = plan.mask.gather(2, plan.queries.labels.long().unsqueeze(-1).expand(-1, -1, -1, plan.mask.shape[3]))
    return rows.gather(3, plan.keys.labels.long().unsqueeze(2).expand(-1, -1, rows.shape[2], -1))


def site_of(case, **more):
    return CallSite(grid=case.grid, text=case.text, key_valid=case.key_valid, scale=case.scale, values=case.v, **more)


def first_tokens(case, b, clusters, seed=0):
    """Sequence positions of our first centroids of batch element b, as the restatements take them: [1, h, C]."""
    video = torch.tensor(video_tokens_of(case, b))
    chosen = video[initial_tokens(len(video), min(clusters, len(video)), seed)]
    return chosen.expand(1, case.q.shape[1], -1)


def video_tokens_of(case, b):
    text = range(*case.text.indices(case.q.shape[2])) if case.text is not None else ()
    return [i for i in range(case.q.shape[2]) if i not in text and (case.key_valid is None or bool(case.key_valid[b, i]))]


def alone(case, b):
    """What a restatement takes of one batch element: it is treated as if it were alone, with as many clusters as it has tokens for."""
    valid = None if case.key_valid is None else case.key_valid[b : b + 1]
    tensors = (x[b : b + 1] for x in (case.q, case.k, case.v))
    return tuple(tensors), {"grid": case.grid, "text": case.text, "key_valid": valid, "scale": case.scale}


def chosen(case, *spread):
    """Clusters and settings that follow from the case's seed."""
    draw = Random(case.seed)
    n = case.q.shape[2]
    return draw.choice([1, 2, 5, 9, n]), draw.choice([1, 3, 8, 14, n]), *(draw.choice(values) for values in spread)


def matches(plan, b, result):
    return torch.equal(seen_tokens(plan)[b], result.allowed[0])


def test_svg2_sees_what_its_restatement_sees_cold_and_warm():
    for i, case in enumerate(problems(COUNT, seed=21)):
        query_clusters, key_clusters, top_p, floor = chosen(case, [0.3, 0.6, 0.9, 1.0], [0.0, 0.1, 0.35])
        config = svg2.Svg2Config(
            query_clusters=query_clusters, key_clusters=key_clusters, top_p=top_p, floor=floor, kmeans_iterations=3, backend="reference"
        )
        planner, site = svg2.Svg2Planner(config), site_of(case)
        cold = make_plan(case.q, case.k, planner, site, None)
        later = case.q + 0.1 * case.k, case.k - 0.1 * case.v
        warm = make_plan(*later, planner, site, cold)
        for b in range(len(case.q)):
            tensors, inputs = alone(case, b)
            settings = {"p": top_p, "min_kc_ratio": floor}
            starts = {"initial_queries": first_tokens(case, b, query_clusters), "initial_keys": first_tokens(case, b, key_clusters)}
            first = restated_svg2.restate(*tensors, **inputs, **settings, **starts, iters=3)
            assert matches(cold, b, first), (case.seed, b)
            if i % 4:
                continue
            again = restated_svg2.restate(*(x[b : b + 1] for x in later), tensors[2], **inputs, **settings, earlier=first)
            assert matches(warm, b, again), (case.seed, b)


def test_svg2_with_a_cluster_for_every_token_is_top_p_of_the_attention_itself():
    for case in itertools.islice(problems(60, seed=22), 30):
        if case.text is not None or case.key_valid is not None:
            continue
        n = case.q.shape[2]
        config = svg2.Svg2Config(query_clusters=n, key_clusters=n, top_p=0.7, floor=0.0, kmeans_iterations=1, backend="reference")
        plan = make_plan(case.q, case.k, svg2.Svg2Planner(config), site_of(case), None)
        scale = case.q.shape[-1] ** -0.5 if case.scale is None else case.scale
        weights, order = (case.q @ case.k.mT * scale).softmax(-1).sort(descending=True)
        kept = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, weights.cumsum(-1) - weights <= 0.7)
        assert torch.equal(seen_tokens(plan), kept)


def test_svg2_keeps_everything_with_top_p_one():
    for case in problems(20, seed=23):
        method = svg2.ENTRIES[0].make(svg2.Svg2Config(query_clusters=4, key_clusters=6, top_p=1.0, dense_steps=0))
        valid = None if case.key_valid is None else case.key_valid[:, None, None]
        dense = scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=valid, scale=case.scale)
        # a convex combination of values: rounding of a few hundred additions in float64
        torch.testing.assert_close(method(case.q, case.k, case.v, site_of(case)).out, dense, rtol=0, atol=1e-12 * float(case.v.abs().max()))


def test_a_warm_start_goes_on_where_the_iterations_ended():
    for case in problems(20, seed=24):
        valid = None if case.key_valid is None else case.key_valid
        start = first_centroids(case.k, 7, valid=valid)
        half, whole = lloyd(case.k, start, iterations=3, valid=valid), lloyd(case.k, start, iterations=5, valid=valid)
        again = lloyd(case.k, half.centroids, iterations=2, valid=valid)
        assert torch.equal(again.labels, whole.labels)
        torch.testing.assert_close(again.centroids, whole.centroids, equal_nan=True)


def test_an_empty_cluster_keeps_its_centroid_and_the_others_are_means():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [10.0, 0.0]], dtype=torch.float64)[None, None]
    far = torch.tensor([[0.0, 1.0], [500.0, 3.0], [9.0, 0.0], [torch.nan, torch.nan]], dtype=torch.float64)[None, None]
    found = lloyd(points, far, iterations=2)
    assert found.labels.tolist() == [[[0, 0, 2]]] and found.sizes.tolist() == [[[2, 0, 1, 0]]]
    assert found.centroids[0, 0, :3].tolist() == [[0.5, 0.0], [500.0, 3.0], [10.0, 0.0]]
    assert found.centroids[0, 0, 3].isnan().all()


def test_svg2_plans_at_every_sparse_step_from_the_centroids_before():
    case = next(problems(1, seed=25))
    method = svg2.ENTRIES[0].make(svg2.Svg2Config.preset("wan2.1-14b", query_clusters=4, key_clusters=6))
    sites = [site_of(case, layer=1, step=step, total_steps=50) for step in (9, 10, 11, 12)]
    assert [method(case.q, case.k, case.v, site).stats.phase for site in sites] == ["dense", "refresh", "refresh", "refresh"]
    assert method(case.q, case.k, case.v, site_of(case, step=12, total_steps=50)).stats.phase == "dense"  # layer 0
    assert method.state_bytes > 0
    held = method.plans.get(sites[0].key).plan.memory
    assert held["query_centroids"].shape[2:] == (4, case.q.shape[-1]) and held["key_centroids"].shape[2] == 6
