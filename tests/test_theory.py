"""The theory of the paper, executed on random and on clustered float64 data.

Tolerance: every identity below is exact in real numbers and evaluated with sums of fewer than 10^4 float64 terms
of order one, so a relative 1e-10 leaves four orders for rounding and none for a wrong formula.
"""

import math

import pytest
import torch

import definitions
import strategies
from parkattn.ops.attend.definition import attend
from parkattn.ops.cluster.definition import cluster_keys, kmeans, metric_root, query_metric, stabilise
from parkattn.ops.importance.definition import centroid_log_mass, exact, exact_log_mass, full_key, pama, query_centroid
from parkattn.ops.permute.definition import gather, scatter
from parkattn.plan import arrange
from parkattn.segments import segment_mean
from parkattn.settings import KeyMetric
from parklab.metrics.retrieval import euclidean_objective, qrkc_objective, score_error

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SHRINKING = [2.0**-n for n in range(4, 9)]

data = pytest.mark.parametrize("kind", ["gaussian", "clustered"])


def problem(kind, **changes):
    settings = {"batch": 2, "heads": 2, "queries": 41, "keys": 37, "query_blocks": 3, "key_blocks": 5, "seed": 11}
    case = strategies.Case(kind=kind, **(settings | changes))
    return case, *case.qkv(), *case.labels()


def close(actual, expected, **tolerance):
    torch.testing.assert_close(actual.double(), expected.double(), **(tolerance or EXACT))


def squared_distances(features, labels, count):
    """Euclidean k-means objective of the features, with the library's own means."""
    means, _ = segment_mean(features, labels, count)
    own = means.gather(2, labels.long()[..., None].expand_as(features))
    return ((features - own) ** 2).sum((-1, -2))


def order_of(errors):
    """Least-squares slope of log error against log t."""
    t = torch.tensor(SHRINKING, dtype=torch.float64).log()
    e = torch.stack(errors).log()
    return (((t - t.mean()) * (e - e.mean())).sum() / ((t - t.mean()) ** 2).sum()).item()


# Objective ------------------------------------------------------------------------------------------------


@data
def test_mean_squared_score_error_is_the_metric_distance_sum(kind):
    case, q, k, _, _, labels = problem(kind)
    summed = definitions.per_head(definitions.qrkc_objective, q, k, labels, case.key_blocks)
    metric = query_metric(q)
    distance = definitions.per_head(
        lambda k, labels, metric: definitions.metric_objective(k, labels, case.key_blocks, metric), k, labels, metric
    )
    close(distance, summed)
    close(qrkc_objective(q, k, labels, case.key_blocks), summed)
    close(score_error(q, k, labels, case.key_blocks), summed / (case.dim * case.keys))


@data
def test_every_key_pair_has_the_same_distance_in_all_three_realisations(kind):
    case, q, k, _, _, _ = problem(kind)
    metric = query_metric(q)
    direct = torch.cdist(*[k @ q.transpose(-1, -2) / math.sqrt(case.queries)] * 2) ** 2
    for root in ("cholesky", "sqrt"):
        transformed = k @ metric_root(metric, root)
        # cdist subtracts squares of size |k|^2, hence an absolute tolerance at that size.
        close(torch.cdist(transformed, transformed) ** 2, direct, rtol=1e-9, atol=1e-10 * direct.max().item())


@data
def test_the_metric_and_its_square_root_are_symmetric(kind):
    _, q, *_ = problem(kind)
    metric = query_metric(q)
    assert torch.equal(metric, metric.transpose(-1, -2))
    root = metric_root(stabilise(metric), "sqrt")
    close(root, root.transpose(-1, -2))


@data
@pytest.mark.parametrize("alpha,epsilon", [(0.0, 1e-6), (0.05, 1e-6), (0.5, 1e-2), (1.0, 1e-6)])
def test_stabilised_objective_is_the_blend_of_response_and_euclidean(kind, alpha, epsilon):
    case, q, k, _, _, labels = problem(kind)
    metric = query_metric(q)
    features = k @ metric_root(stabilise(metric, alpha=alpha, epsilon=epsilon), "cholesky")
    scale = definitions.per_head(definitions.metric_scale, metric)
    blend = (1 - alpha) * qrkc_objective(q, k, labels, case.key_blocks)
    blend = blend + (alpha + epsilon) * scale * euclidean_objective(k, labels, case.key_blocks)
    close(squared_distances(features, labels, case.key_blocks), blend)


def test_stabilised_metric_of_zero_queries_is_the_floor_times_identity():
    metric = stabilise(
        query_metric(torch.zeros(1, 2, 7, 16, dtype=torch.float64)), alpha=0.05, epsilon=1e-6, s_min=1e-3
    )
    close(metric, (0.05 + 1e-6) * 1e-3 * torch.eye(16, dtype=torch.float64).expand(1, 2, 16, 16))


@data
def test_objective_is_2d_times_the_size_weighted_leading_error(kind):
    case, q, k, _, _, labels = problem(kind, batch=1, heads=1)
    total = 0.0
    residuals = definitions.deviations(k[0, 0], labels[0, 0], case.key_blocks)
    for block in range(case.key_blocks):
        inside = residuals[definitions.members(labels[0, 0], block)]
        covariance = inside.T @ inside / len(inside)
        leading = [(row @ covariance @ row).item() / (2 * case.dim) for row in q[0, 0]]
        total += len(inside) * sum(leading) / len(leading)
    close(qrkc_objective(q, k, labels, case.key_blocks), torch.tensor([[2 * case.dim * total]], dtype=torch.float64))


# Key side -------------------------------------------------------------------------------------------------


@data
@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_centroid_log_mass_never_exceeds_the_exact_one(kind, strength):
    case, q, k, _, _, labels = problem(kind)
    means, sizes = segment_mean(k, labels, case.key_blocks)
    gap = exact_log_mass(strength * q, k, labels, case.key_blocks) - centroid_log_mass(strength * q, means, sizes)
    rounding = definitions.logit_rounding(strength * q, k, None, torch.float64)
    assert gap.min() >= -2 * rounding
    assert gap.max() > 2 * rounding


def key_side_errors(kind, t):
    """(full error, error minus the leading term) when the keys of every block are pulled to their centroid by t."""
    case, q, k, _, _, labels = problem(kind, batch=1, heads=1, dim=16)
    residuals = definitions.deviations(k[0, 0], labels[0, 0], case.key_blocks)
    pulled = (k[0, 0] - residuals + t * residuals)[None, None]
    means, sizes = segment_mean(pulled, labels, case.key_blocks)
    error = exact_log_mass(q, pulled, labels, case.key_blocks) - centroid_log_mass(q, means, sizes)
    leading = torch.zeros_like(error)
    for block in range(case.key_blocks):
        inside = t * residuals[definitions.members(labels[0, 0], block)]
        covariance = inside.T @ inside / len(inside)
        leading[0, 0, :, block] = torch.einsum("nd,de,ne->n", q[0, 0], covariance, q[0, 0]) / (2 * case.dim)
    return error.norm(), (error - leading).norm()


@data
def test_key_mismatch_has_second_order_and_its_remainder_third(kind):
    full, remainder = zip(*(key_side_errors(kind, t) for t in SHRINKING), strict=True)
    # The next term of each series changes the fitted slope by O(t) <= 0.1; a wrong order changes it by 1.
    assert abs(order_of(full) - 2) < 0.2
    assert abs(order_of(remainder) - 3) < 0.2


# Query side -----------------------------------------------------------------------------------------------


def query_side(kind, t):
    """One query block pulled to its centroid by t: (exact - query centroid importance, Hessian term), each [kb]."""
    case, q, k, _, _, labels = problem(kind, batch=1, heads=1, dim=16, query_blocks=1)
    centre = q[0, 0].mean(0)
    offsets = t * (q[0, 0] - centre)
    pulled = (centre + offsets)[None, None]
    blocks = (torch.zeros(1, 1, case.queries, dtype=torch.int32), 1, labels, case.key_blocks)
    error = exact(pulled, k, *blocks) - full_key(pulled, k, *blocks)
    covariance = offsets.T @ offsets / len(offsets)
    hessians = [definitions.query_hessian(centre, k[0, 0], labels[0, 0], v) for v in range(case.key_blocks)]
    return error[0, 0, 0], torch.stack([0.5 * (h * covariance).sum() for h in hessians])


@data
def test_query_mismatch_has_second_order_and_its_remainder_third(kind):
    measured = [query_side(kind, t) for t in SHRINKING]
    assert abs(order_of([error.norm() for error, _ in measured]) - 2) < 0.2
    assert abs(order_of([(error - leading).norm() for error, leading in measured]) - 3) < 0.2


@data
def test_explicit_hessian_is_the_derivative_of_the_block_weight(kind):
    case, q, k, _, _, labels = problem(kind, batch=1, heads=1, dim=16)
    for block in range(case.key_blocks):
        inside = definitions.members(labels[0, 0], block)
        derived = torch.autograd.functional.hessian(
            lambda query, inside=inside: torch.softmax(k[0, 0] @ query / math.sqrt(case.dim), 0)[inside].sum(),
            q[0, 0, 0],
        )
        close(definitions.query_hessian(q[0, 0, 0], k[0, 0], labels[0, 0], block), derived)


@data
def test_leading_query_error_is_bounded_by_curvature_times_variance(kind):
    case, q, k, _, _, labels = problem(kind, batch=1, heads=1, dim=16)
    _, leading = query_side(kind, 1.0)
    centre = q[0, 0].mean(0)
    variance = ((q[0, 0] - centre) ** 2).sum(1).mean()
    for block in range(case.key_blocks):
        hessian = definitions.query_hessian(centre, k[0, 0], labels[0, 0], block)
        assert leading[block].abs() <= 0.5 * torch.linalg.matrix_norm(hessian, 2) * variance * (1 + 1e-10)


# Estimators -----------------------------------------------------------------------------------------------


def same_within_blocks(x, labels, count):
    means, _ = segment_mean(x, labels, count)
    return means.gather(2, labels.long()[..., None].expand_as(x))


@data
def test_pama_is_exact_when_the_keys_of_a_block_are_identical(kind):
    case, q, k, _, query_labels, labels = problem(kind)
    blocks = (query_labels, case.query_blocks, labels, case.key_blocks)
    same = same_within_blocks(k, labels, case.key_blocks)
    close(pama(q, same, *blocks), exact(q, same, *blocks))
    assert (pama(q, k, *blocks) - exact(q, k, *blocks)).abs().max() > 1e-4


@data
def test_query_centroid_is_full_query_when_the_queries_of_a_block_are_identical(kind):
    case, q, k, _, query_labels, labels = problem(kind)
    blocks = (query_labels, case.query_blocks, labels, case.key_blocks)
    same = same_within_blocks(q, query_labels, case.query_blocks)
    close(query_centroid(same, k, *blocks), pama(same, k, *blocks))
    close(full_key(same, k, *blocks), exact(same, k, *blocks))
    assert (query_centroid(q, k, *blocks) - pama(q, k, *blocks)).abs().max() > 1e-4


# Clustering and compensation ------------------------------------------------------------------------------


@data
def test_full_shrinkage_is_euclidean_clustering(kind):
    _, q, k, *_ = problem(kind)
    response = cluster_keys(k, q, 6, KeyMetric(alpha=1.0), iterations=5, seed=3)
    euclidean = kmeans(k, 6, iterations=5, seed=3)
    assert torch.equal(response.labels, euclidean.labels)
    close(response.centroids, euclidean.centroids)


@data
def test_response_clustering_does_not_depend_on_the_root(kind):
    _, q, k, *_ = problem(kind)
    one, other = (
        cluster_keys(k, q, 6, KeyMetric(metric_root=root), iterations=5, seed=3) for root in ("cholesky", "sqrt")
    )
    assert torch.equal(one.labels, other.labels)


def test_response_clustering_lowers_the_objective_it_names():
    """Queries look along one axis; the keys spread more along another: only the response metric splits the first."""
    spread = torch.tensor([1.0, 5.0] + [0.0] * 14, dtype=torch.float64)
    look = torch.tensor([3.0, 0.01] + [0.01] * 14, dtype=torch.float64)
    k, q = strategies.normal(5, 1, 1, 200, 16) * spread, strategies.normal(6, 1, 1, 200, 16) * look
    response, euclidean = cluster_keys(k, q, 8, KeyMetric(alpha=0.0)), kmeans(k, 8)
    assert qrkc_objective(q, k, response.labels, 8) < qrkc_objective(q, k, euclidean.labels, 8)
    assert euclidean_objective(k, response.labels, 8) > euclidean_objective(k, euclidean.labels, 8)


@pytest.mark.parametrize("queries", [1, 3, 15])
def test_rank_deficient_metric_works_with_the_square_root(queries):
    q, k = strategies.normal(1, 1, 2, queries, 16), strategies.normal(2, 1, 2, 37, 16)
    factor = metric_root(query_metric(q), "sqrt")
    close(factor @ factor.transpose(-1, -2), query_metric(q))
    unseen = torch.linalg.svd(q, full_matrices=True)[2][..., -1:, :]
    # A null eigenvalue is known to eps * largest; its root, the size left of an unseen direction, to sqrt(eps).
    limit = 10 * math.sqrt(torch.finfo(torch.float64).eps) * torch.linalg.matrix_norm(factor, 2).max()
    assert (unseen @ factor).abs().max() <= limit
    found = cluster_keys(k, q, 5, KeyMetric(alpha=0.0, metric_root="sqrt"))
    assert found.sizes.sum(-1).eq(37).all()
    assert found.centroids.isfinite().all()


@data
def test_compensation_is_exact_when_keys_and_values_of_the_skipped_blocks_are_equal(kind):
    case, q, k, v, query_labels, labels = problem(kind)
    skipped = torch.arange(case.key_blocks) % 2 == 1
    uniform = skipped[labels.long()][..., None]
    k = torch.where(uniform, same_within_blocks(k, labels, case.key_blocks), k)
    v = torch.where(uniform, same_within_blocks(v, labels, case.key_blocks), v)
    queries, keys = arrange(query_labels, case.query_blocks), arrange(labels, case.key_blocks)
    ordered = gather(q, queries), gather(k, keys), gather(v, keys), queries, keys
    mask = (~skipped).expand(2, 2, case.query_blocks, case.key_blocks).contiguous()
    everywhere = torch.ones(2, 2, case.key_blocks, dtype=torch.bool)
    dense = definitions.per_head(definitions.dense_attention, q, k, v)
    close(scatter(attend(*ordered, mask, compensate=everywhere), queries), dense)
    assert (scatter(attend(*ordered, mask), queries) - dense).abs().max() > 1e-3
