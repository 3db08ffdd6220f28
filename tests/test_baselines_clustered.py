"""SVG2 and SVOO against their restatements by another author, and by the properties that define them."""

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from parkattn.ops.cluster.definition import first_centroids, lloyd
from parkattn.planned import make_plan, plan_key
from parkattn.site import CallSite
from parklab.baselines import svg2, svoo
from parklab.baselines.density_profile import DensityProfile, DensityProfiler, required_density
from plans import COUNT, alone, chosen, first_tokens, matches, problems, site_of
from restated import svg2 as restated_svg2
from restated import svoo as restated_svoo


def test_svg2_sees_what_its_restatement_sees_cold_and_warm():
    for i, case in enumerate(problems(COUNT, seed=21)):
        query_clusters, key_clusters, top_p, floor = chosen(case, [0.3, 0.6, 0.9, 1.0], [0.0, 0.1, 0.35])
        config = svg2.Svg2Config(
            query_clusters=query_clusters,
            key_clusters=key_clusters,
            top_p=top_p,
            floor=floor,
            kmeans_iterations=3,
            backend="reference",
        )
        planner, site = svg2.Svg2Planner(config), site_of(case)
        cold = make_plan(case.q, case.k, planner, site, None)
        later = case.q + 0.1 * case.k, case.k - 0.1 * case.v
        warm = make_plan(*later, planner, site, cold)
        for b in range(len(case.q)):
            tensors, inputs = alone(case, b)
            settings = {"p": top_p, "min_kc_ratio": floor}
            starts = {
                "initial_queries": first_tokens(case, b, query_clusters),
                "initial_keys": first_tokens(case, b, key_clusters),
            }
            first = restated_svg2.restate(*tensors, **inputs, **settings, **starts, iters=3)
            assert matches(cold, b, first), (case.seed, b)
            if i % 4:
                continue
            again = restated_svg2.restate(
                *(x[b : b + 1] for x in later), tensors[2], **inputs, **settings, earlier=first
            )
            assert matches(warm, b, again), (case.seed, b)


@pytest.mark.parametrize("module", [svg2, svoo])
def test_everything_is_kept_with_top_p_one(module):
    for case in problems(20, seed=23):
        entry = module.ENTRIES[0]
        method = entry.make(entry.config(query_clusters=4, key_clusters=6, top_p=1.0, dense_steps=0))
        valid = None if case.key_valid is None else case.key_valid[:, None, None]
        dense = scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=valid, scale=case.scale)
        # a convex combination of values: rounding of a few hundred additions in float64
        torch.testing.assert_close(
            method(case.q, case.k, case.v, site_of(case)).out, dense, rtol=0, atol=1e-12 * float(case.v.abs().max())
        )


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


def test_svg2_hands_on_the_centroids_of_empty_clusters():
    """Two first tokens alike: the second cluster gets nothing at first, and what moves near its centroid later."""
    x = torch.tensor([3.0, 3.0, 12.0, 12.2], dtype=torch.float64).view(1, 1, 4, 1).expand(-1, -1, -1, 2).contiguous()
    config = svg2.Svg2Config(query_clusters=4, key_clusters=4, kmeans_iterations=1, backend="reference")
    cold = make_plan(x, x, svg2.Svg2Planner(config), CallSite(), None)
    assert cold.keys.labels.tolist() == [[[0, 0, 2, 3]]]
    assert torch.equal(cold.memory["key_centroids"], x)
    moved = x.clone()
    moved[:, :, 0] -= 5
    held = {name: centroids - torch.tensor([5.0, 0, 0, 0]).view(1, 1, 4, 1) for name, centroids in cold.memory.items()}
    warm = make_plan(moved, moved, svg2.Svg2Planner(config), CallSite(), replace(cold, memory=held))
    assert warm.keys.labels.tolist() == [[[0, 1, 2, 3]]]


def test_svg2_plans_at_every_sparse_step_from_the_centroids_before():
    case = next(problems(1, seed=25))
    method = svg2.ENTRIES[0].make(svg2.Svg2Config.preset("wan2.1-14b", query_clusters=4, key_clusters=6))
    sites = [site_of(case, layer=1, step=step, total_steps=50) for step in (9, 10, 11, 12)]
    assert [method(case.q, case.k, case.v, site).stats.phase for site in sites] == [
        "dense",
        "refresh",
        "refresh",
        "refresh",
    ]
    assert method(case.q, case.k, case.v, site_of(case, step=12, total_steps=50)).stats.phase == "dense"  # layer 0
    assert method.state_bytes > 0
    held = method.plans.get(plan_key(sites[0])).plan.memory
    assert held["query_centroids"].shape[2:] == (4, case.q.shape[-1]) and held["key_centroids"].shape[2] == 6


def svoo_problem(case):
    """A config, a profile of steps 10 and 11, and the settings of the restatement at both."""
    query_clusters, key_clusters, top_p, floor, clip = chosen(
        case, [0.3, 0.88, 1.0], [0.0, 0.1, 0.35], [(0.15, 0.2), (0.0, 1.0), (0.3, 0.3)]
    )
    heads = case.q.shape[1]
    draw = Random(case.seed + 1)
    densities = torch.tensor([[[draw.uniform(0.01, 1) for _ in range(heads)]] for _ in range(12)], dtype=torch.float64)
    if draw.random() < 0.2:
        densities[10, 0, draw.randrange(heads)] = torch.nan
    config = svoo.SvooConfig(
        query_clusters=query_clusters,
        key_clusters=key_clusters,
        top_p=top_p,
        floor=floor,
        floor_clip=clip,
        backend="reference",
        dense_steps=10,
    )
    settings = [
        {"p": top_p, "min_kc_ratio": floor, "floor_clip": clip, "profile": densities[step, 0].tolist()}
        for step in (10, 11)
    ]
    if draw.random() < 0.2:
        for setting in settings:
            setting["profile"] = None
        return config, None, settings
    return config, DensityProfile(densities), settings


def test_svoo_sees_what_its_restatement_sees_at_a_reclustering_and_after():
    for i, case in enumerate(problems(COUNT, seed=31)):
        config, profile, settings = svoo_problem(case)
        planner = svoo.SvooPlanner(config, profile)
        first = make_plan(case.q, case.k, planner, site_of(case, step=10), None)
        later = case.q + 0.3 * case.k, case.k - 0.3 * case.v
        reused = make_plan(*later, planner, site_of(case, step=11), first)
        for b in range(len(case.q)):
            tensors, inputs = alone(case, b)
            starts = {
                "initial_queries": first_tokens(case, b, config.query_clusters, seed=10),
                "initial_keys": first_tokens(case, b, config.key_clusters, seed=10),
            }
            expected = restated_svoo.restate(*tensors, **inputs, **settings[0], **starts)
            assert matches(first, b, expected), (case.seed, b)
            if i % 4:
                continue
            again = restated_svoo.restate(
                *(x[b : b + 1] for x in later), tensors[2], **inputs, **settings[1], earlier=expected
            )
            assert matches(reused, b, again), (case.seed, b)


def test_required_density_is_the_restatements():
    for case in problems(40, seed=32):
        expected = restated_svoo.required_density(
            case.q, case.k, text=case.text, key_valid=case.key_valid, scale=case.scale
        )
        found = required_density(case.q, case.k, text=case.text, key_valid=case.key_valid, scale=case.scale)
        torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_svoo_clusters_again_at_its_interval_and_makes_the_map_of_old_centroids_between():
    case = next(problems(1, seed=33))
    config = svoo.SvooConfig(query_clusters=4, key_clusters=6, dense_steps=3, recluster_interval=2, backend="reference")
    method, reclustered, labels = svoo.ENTRIES[0].make(config), [], None
    for step in range(3, 9):
        moving = case.q + 0.5 * step * case.v, case.k.roll(step, 2), case.v
        stats = method(*moving, site_of(case, step=step, total_steps=20)).stats
        reclustered.append(labels is None or not torch.equal(labels, stats.plan.keys.labels))
        labels = stats.plan.keys.labels
    assert reclustered == [restated_svoo.reclusters(step + 1, 4, 2) for step in range(3, 9)] == [True, False] * 3


def test_one_head_missing_from_the_profile_gives_all_heads_the_fallback():
    densities = torch.tensor([[[0.4, torch.nan, 0.9]], [[0.4, 0.01, 0.9]]], dtype=torch.float64)
    planner = svoo.SvooPlanner(svoo.SvooConfig(floor=0.1, floor_clip=(0.15, 0.5)), DensityProfile(densities))
    q = torch.zeros(1, 3, 4, 8)
    assert planner.floors(q, CallSite(step=0)).expand(3).tolist() == [0.1, 0.1, 0.1]
    assert planner.floors(q, CallSite(step=1)).tolist() == [0.4, 0.15, 0.5]
    assert planner.floors(q, CallSite(step=2)) == 0.1


def test_a_density_profile_holds_the_largest_density_of_every_head_and_survives_its_file(tmp_path):
    some, other = itertools.islice((c for c in problems(99, seed=34) if c.q.shape[1] == 1), 2)
    calls = [
        (some.q, some.k, site_of(some, step=1, layer=2, total_steps=4)),
        (other.q, other.k, site_of(other, step=1, layer=2)),
    ]
    profiler = DensityProfiler()
    for call in calls:
        profiler.note(*call)
    profile = profiler.profile()
    assert profile.densities.shape == (4, 3, 1) and int(profile.densities.isnan().sum()) == 11
    most = max(
        float(required_density(q, k, text=site.text, key_valid=site.key_valid, scale=site.scale).amax())
        for q, k, site in calls
    )
    assert float(profile.densities[1, 2]) == most
    profile.save(tmp_path / "profile.safetensors")
    assert torch.equal(
        DensityProfile.load(tmp_path / "profile.safetensors").densities.nan_to_num(), profile.densities.nan_to_num()
    )
    planner = svoo.SvooPlanner(
        svoo.SvooConfig(density_profile=str(tmp_path / "profile.safetensors"), floor_clip=(0.0, 1.0))
    )
    assert planner.floors(some.q, calls[0][2]).tolist() == [most]
    # half way through a run of any length
    assert torch.equal(profile.at(CallSite(step=10, total_steps=40, layer=2)), profile.densities[1, 2])
    assert profile.at(CallSite(step=1, layer=3)) is None


def test_a_profiler_computes_dense_attention():
    case = next(problems(1, seed=35))
    site = site_of(case, dense=lambda: case.v)
    assert DensityProfiler()(case.q, case.k, case.v, site).out is case.v


def test_a_profile_of_other_heads_or_no_profile_at_all_is_refused(tmp_path):
    case = next(problems(1, seed=36))
    planner = svoo.SvooPlanner(svoo.SvooConfig(), DensityProfile(torch.full((50, 1, 7), 0.2, dtype=torch.float64)))
    with pytest.raises(ValueError, match="profile: expected one density per head"):
        planner.plan(case.q, case.k, site_of(case), None)
    with pytest.raises(FileNotFoundError, match="profile: expected a file"):
        svoo.SvooPlanner(svoo.SvooConfig(density_profile=str(tmp_path / "none")))
    (tmp_path / "other").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="expected a density profile"):
        DensityProfile.load(tmp_path / "other")


def test_the_profile_of_the_model_in_the_box_is_known_by_name():
    found = DensityProfile.load("sprites").densities
    # steps of its default run, layers, heads
    assert found.shape == (16, 6, 3) and not found.isnan().any()
    assert svoo.SvooConfig(density_profile="sprites").replace(top_p=0.5).density_profile == "sprites"
