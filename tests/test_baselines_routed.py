"""SVG-EAR and SparsePR against their restatements by another author, and by the properties that define them."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from parkattn.ops.cluster.definition import Clustering
from parkattn.plan import arrange
from parkattn.planned import make_plan
from parkattn.segments import segment_mean
from parklab.baselines import sparsepr, subspace, svg_ear
from plans import COUNT, alone, chosen, first_tokens, matches, problems, site_of
from restated import sparsepr as restated_sparsepr
from restated import svg_ear as restated_ear


def dense(case):
    valid = None if case.key_valid is None else case.key_valid[:, None, None]
    return scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=valid, scale=case.scale)


def clusters_of(x, labels, count):
    return Clustering(labels, *segment_mean(x, labels, count))


def ear_problem(case):
    query_clusters, key_clusters, top_p, floor, gamma, compensate = chosen(
        case, [0.1, 0.5, 0.9, 1.0], [0.0, 0.05, 0.2], [1.0, 1.0, 0.0, 0.5], [True, True, False]
    )
    settings = {"top_p": top_p, "floor": floor, "gamma": gamma, "compensate": compensate}
    clusters = {"query_clusters": query_clusters, "key_clusters": key_clusters}
    config = svg_ear.SvgEarConfig(**clusters, **settings, kmeans_iterations=3, dense_steps=0, backend="reference")
    return config, {**settings, **clusters, "iterations": 3}


def sparsepr_problem(case):
    query_clusters, key_clusters, density, samples, ranks, score, probes, repair_rank, repair = chosen(
        case,
        [0.2, 0.5, 0.8, 1.0],
        [1, 7, 16, 2048],
        [(3, 5), (8, 4), (48, 64)],
        sparsepr.SCORES,
        [1, 3, 64],
        [1, 4, 16],
        [True, True, False],
    )
    settings = {
        "query_clusters": query_clusters, "key_clusters": key_clusters, "density": density, "samples": samples, "key_rank": ranks[0],
        "query_rank": ranks[1], "score": score, "probes": probes, "repair_rank": repair_rank, "repair": repair,
    }  # fmt: skip
    config = sparsepr.SparsePrConfig(**settings, kmeans_iterations=3, dense_steps=0, backend="reference")
    return config, {**settings, "iterations": 3}


# of the largest value: a convex combination of values rounds as a few hundred additions in float64 do; SparsePR divides
# by standard deviations of no less than 1e-5
@pytest.mark.parametrize(
    ("method", "asked", "restate", "seed", "rounding"),
    [
        (svg_ear, ear_problem, restated_ear.restate, 41, 1e-12),
        (sparsepr, sparsepr_problem, restated_sparsepr.restate, 51, 1e-11),
    ],
    ids=["svg-ear", "sparsepr"],
)
def test_a_method_sees_and_computes_what_its_restatement_does(method, asked, restate, seed, rounding):
    for case in problems(COUNT, seed=seed):
        config, settings = asked(case)
        out, stats = method.ENTRIES[0].make(config)(case.q, case.k, case.v, site_of(case))
        for b in range(len(case.q)):
            tensors, inputs = alone(case, b)
            starts = {
                "initial_queries": first_tokens(case, b, config.query_clusters),
                "initial_keys": first_tokens(case, b, config.key_clusters),
            }
            expected = restate(*tensors, **inputs, **settings, **starts)
            assert matches(stats.plan, b, expected), (case.seed, b)
            torch.testing.assert_close(out[b], expected.out[0], rtol=0, atol=rounding * float(case.v.abs().max()))


def test_svg_ear_is_dense_where_a_cluster_holds_equal_keys_and_values():
    """A stand-in key with weight n is then n keys, so nothing that is skipped is missing: the normaliser covers all
    keys.
    """
    for case in problems(20, seed=43):
        if case.text is not None or case.key_valid is not None:
            continue
        copies = torch.arange(case.k.shape[2]) % 5
        k, v = case.k[:, :, copies], case.v[:, :, copies]
        config = svg_ear.SvgEarConfig(
            query_clusters=3, key_clusters=case.k.shape[2], top_p=0.2, floor=0.0, dense_steps=0, backend="reference"
        )
        out, stats = svg_ear.ENTRIES[0].make(config)(case.q, k, v, site_of(case))
        assert float(stats.density.max()) < 1
        exact = scaled_dot_product_attention(case.q, k, v, scale=case.scale)
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-12 * float(v.abs().max()))


@pytest.mark.parametrize("entry", [svg_ear.ENTRIES[0], sparsepr.ENTRIES[0]], ids=lambda entry: entry.name)
def test_a_whole_budget_is_dense_attention(entry):
    for case in problems(20, seed=44):
        config = entry.config(
            query_clusters=4, key_clusters=6, dense_steps=0, backend="reference", **{entry.budgets[0]: 1.0}
        )
        out = entry.make(config)(case.q, case.k, case.v, site_of(case)).out
        torch.testing.assert_close(out, dense(case), rtol=0, atol=1e-11 * float(case.v.abs().max()))


def test_replacement_error_is_its_definition_and_does_not_overflow():
    case = next(c for c in problems(99, seed=45) if c.text is None and c.key_valid is None)
    labels = torch.arange(case.q.shape[2]).remainder(5).to(torch.int32).expand(case.q.shape[:3])
    queries, keys = clusters_of(case.q, labels, 5), clusters_of(case.k, labels, 5)
    found = svg_ear.replacement_error(queries, keys, arrange(labels, 5), case.k, case.v, 0.3)
    for v in range(5):
        inside = labels[0, 0] == v
        weight = (0.3 * queries.centroids @ case.k[:, :, inside].mT).exp()
        mean_weight = (0.3 * queries.centroids @ keys.centroids[:, :, v : v + 1].mT).exp()
        terms = (
            weight.unsqueeze(-1) * case.v[:, :, None, inside]
            - mean_weight.unsqueeze(-1) * case.v[:, :, inside].mean(2)[:, :, None, None]
        )
        expected = terms.square().sum((-1, -2))
        torch.testing.assert_close(
            found.scaled[..., v] * (2 * found.largest[..., v]).exp(), expected, rtol=1e-11, atol=0
        )
    hot = svg_ear.replacement_error(queries, keys, arrange(labels, 5), case.k.float(), case.v.float(), 200.0)
    assert (2 * hot.largest).max() > 100 and all(part.isfinite().all() for part in hot)


def test_planners_that_read_values_say_so_where_there_are_none():
    case = next(problems(1, seed=46))
    site = site_of(case)
    for planner in (svg_ear.SvgEarPlanner(svg_ear.SvgEarConfig()), sparsepr.SparsePrPlanner(sparsepr.SparsePrConfig())):
        with pytest.raises(ValueError, match=r"site.values: expected the values"):
            planner.plan(case.q, case.k, type(site)(), None)


def test_sparsepr_repair_leaves_a_right_output_alone_and_makes_probe_rows_dense():
    for case in problems(30, seed=53):
        config = sparsepr.SparsePrConfig(
            query_clusters=5, key_clusters=8, density=0.3, probes=3, dense_steps=0, backend="reference"
        )
        out, stats = sparsepr.ENTRIES[0].make(config)(case.q, case.k, case.v, site_of(case))
        exact, at = dense(case), stats.plan.memory["probes"].long().unsqueeze(-1).expand(-1, -1, -1, case.v.shape[-1])
        torch.testing.assert_close(
            out.gather(2, at), exact.gather(2, at), rtol=0, atol=1e-12 * float(case.v.abs().max())
        )
        again = sparsepr.ProbeRepair(config).repair(case.q, case.k, case.v, stats.plan, exact, site_of(case))
        torch.testing.assert_close(again, exact, rtol=0, atol=1e-10 * float(case.v.abs().max()))


def test_sparsepr_repair_undoes_an_error_that_is_linear_in_the_output():
    """With as many probes as it needs and next to no ridge, R = O A + c is found from the probes and removed
    everywhere.
    """
    generator = torch.Generator().manual_seed(54)
    sparse, change = (
        torch.randn(1, 2, *shape, generator=generator, dtype=torch.float64) for shape in ((40, 6), (6, 6))
    )
    exact = sparse + sparse @ (0.1 * change) + 0.5
    slope, offset = sparsepr.correction(
        sparse[:, :, :20], exact[:, :, :20], torch.ones(1, 2, 20, dtype=torch.float64), 6, 1e-9
    )
    torch.testing.assert_close(sparse + sparse @ slope + offset, exact, rtol=1e-8, atol=1e-8)


def test_sparsepr_warm_plans_begin_from_the_labels_before():
    for case in problems(10, seed=55):
        settings = {"query_clusters": 3, "key_clusters": 4, "backend": "reference"}
        planner = sparsepr.SparsePrPlanner(sparsepr.SparsePrConfig(**settings, kmeans_iterations=60))
        settled = make_plan(case.q, case.k, planner, site_of(case), None)
        again = make_plan(case.q, case.k, planner, site_of(case), settled)
        # k-means that has come to rest stays there
        assert torch.equal(again.keys.labels, settled.keys.labels) and torch.equal(again.mask, settled.mask)


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_a_followed_subspace_is_the_exact_one(start):
    """What runs on CUDA, here: the same product F F^T and the same projection, to what 30 steps over a gap of 2 leave."""
    generator = torch.Generator().manual_seed(56)
    vectors = torch.linalg.qr(torch.randn(2, 3, 12, 12, generator=generator, dtype=torch.float64)).Q
    metric = vectors * torch.tensor([16.0, 11, 9, 8, 7, *[2.0, 1, 1, 0.5, 0.1, 0, 0]], dtype=torch.float64) @ vectors.mT
    exact, _ = subspace.metric_factor(metric, 5)
    factor, basis = subspace.followed_factor(metric, 5, None)
    if start == "warm":
        factor, basis = subspace.followed_factor(metric, 5, basis)
    left = (2 / 7) ** subspace.COLD_STEPS + 5 * subspace.LEAST_EIGENVALUE
    torch.testing.assert_close(factor @ factor.mT, exact @ exact.mT, rtol=0, atol=10 * left)
    torch.testing.assert_close(basis @ basis.mT, vectors[..., :5] @ vectors[..., :5].mT, rtol=0, atol=1e-9)


def test_a_followed_subspace_survives_matrices_of_lower_rank():
    for matrix in (
        torch.zeros(1, 1, 8, 8),
        torch.ones(1, 1, 8, 8),
        torch.diag(torch.tensor([1e9, *[1e-9] * 7])).expand(1, 1, 8, 8),
    ):
        factor, basis = subspace.followed_factor(matrix.double(), 4, None)
        assert factor.isfinite().all()
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(4, dtype=torch.float64).expand(1, 1, 4, 4), rtol=0, atol=1e-8
        )
