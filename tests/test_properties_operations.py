"""The operations against their float64 definitions: segments, clustering, permutation, importance, selection, measures."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import definitions
import strategies
from parkattn.ops.cluster.definition import cluster_keys, kmeans, metric_root, query_metric, stabilise
from parkattn.ops.importance.definition import ESTIMATORS, centroid_log_mass, exact_log_mass, select_top_k, select_top_p
from parkattn.ops.permute.definition import gather, scatter
from parkattn.plan import arrange
from parkattn.segments import segment_mean, segment_sum
from parkattn.settings import KeyMetric
from parklab.metrics import retrieval
from strategies import attention_cases, cases

DEFINED = {
    "pama": definitions.pama,
    "query-centroid": definitions.query_centroid,
    "full-key": definitions.full_key,
    "exact": definitions.exact_importance,
}
SMOOTH = st.sampled_from(["gaussian", "clustered", "far outlier"])


def within(actual, expected, bound):
    """Equal up to an absolute bound; infinities must agree."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)


def mean_rounding(x):
    """A sum of n terms and one division, in the dtype of x."""
    return (x.shape[-2] + 2) * torch.finfo(x.dtype).eps * x.double().abs().max().item()


def distance_rounding(x):
    """Rounding of |c|^2 - 2 x.c and of the means inside it: n + d operations on numbers up to (2 |x|)^2."""
    return 2 * sum(x.shape[-2:]) * torch.finfo(x.dtype).eps * 4 * x.double().norm(dim=-1).max().item() ** 2


def filled_start(case, tokens, clusters):
    """Labels that leave no cluster empty."""
    return strategies.labels_of("cyclic", case.seed + 8, case.batch, case.heads, tokens, clusters)


# Segments and permutation ---------------------------------------------------------------------------------


@cases(100)
@given(attention_cases())
def test_segments_are_sums_and_means_and_leave_out_labels_past_the_count(case):
    _, k, _ = case.qkv()
    labels = case.labels()[1]
    kept = max(1, case.key_blocks - 1)
    sums, (means, sizes) = segment_sum(k, labels, kept), segment_mean(k, labels, kept)
    expected = definitions.per_head(definitions.block_means, k, labels, kept)
    counts = definitions.per_head(definitions.block_sizes, labels, kept)
    within(means, expected, mean_rounding(k))
    within(sums, expected * counts[..., None], case.keys * mean_rounding(k))
    assert torch.equal(sizes.long(), counts)


@cases(100)
@given(attention_cases(dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])))
def test_scatter_undoes_gather_bit_for_bit(case):
    q, *_ = case.qkv()
    # No NaN: torch's own bfloat16 gather rewrites the payload.
    q = torch.where(q.abs() < 0.1, -0.0, torch.where(q.abs() > 2, float("inf"), q))
    blocks = arrange(case.labels()[0], case.query_blocks)
    bits = torch.int64 if q.element_size() == 8 else torch.int32 if q.element_size() == 4 else torch.int16
    for restored in (scatter(gather(q, blocks), blocks), gather(scatter(q, blocks), blocks)):
        assert torch.equal(restored.contiguous().view(bits), q.contiguous().view(bits))


@cases(100)
@given(attention_cases())
def test_arranged_order_is_stable_and_offsets_count_the_blocks(case):
    labels = case.labels()[0]
    blocks = arrange(labels, case.query_blocks)
    for b in range(case.batch):
        for h in range(case.heads):
            expected = sorted(range(case.queries), key=labels[b, h].tolist().__getitem__)
            assert blocks.order[b, h].tolist() == expected
    sizes = definitions.per_head(definitions.block_sizes, labels, case.query_blocks)
    ends = torch.nn.functional.pad(sizes.cumsum(-1), (1, 0))
    assert torch.equal(blocks.sizes.long(), sizes)
    assert torch.equal(blocks.offsets.long(), ends)
    assert torch.equal(blocks.labels, labels)
    assert blocks.count == case.query_blocks
    q, *_ = case.qkv()
    assert torch.equal(gather(q, blocks), q.gather(2, blocks.order.long()[..., None].expand_as(q)))


# Clustering -----------------------------------------------------------------------------------------------


@cases(40)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
def test_cold_start_takes_one_token_from_each_equal_stretch_of_the_sequence(length, clusters, seed):
    """Stretches lie far apart, so that a first centroid in each of them is what makes every stretch one cluster."""
    stretch = torch.arange(clusters).repeat_interleave(length)
    x = 1e3 * stretch[None, None, :, None] + strategies.normal(seed, 1, 1, clusters * length, 16)
    assert torch.equal(kmeans(x, clusters, seed=seed).labels[0, 0], stretch.int())


@cases(100)
@given(attention_cases(), st.integers(1, 40), st.integers(1, 4))
def test_kmeans_returns_labels_in_range_and_the_means_of_those_labels(case, clusters, iterations):
    _, k, _ = case.qkv()
    found = kmeans(k, clusters, iterations=iterations, seed=case.seed)
    count = min(clusters, case.keys)
    assert found.labels.min() >= 0
    assert found.labels.max() < count
    assert found.centroids.shape == (case.batch, case.heads, count, case.dim)
    assert torch.equal(found.sizes.long(), definitions.per_head(definitions.block_sizes, found.labels, count))
    assert found.sizes.sum(-1).eq(case.keys).all()
    within(found.centroids, definitions.per_head(definitions.block_means, k, found.labels, count), mean_rounding(k))


@cases(100)
@given(attention_cases(), st.integers(1, 9))
def test_one_warm_iteration_assigns_every_token_to_a_nearest_mean_of_the_start(case, clusters):
    _, k, _ = case.qkv()
    count = min(clusters, case.keys)
    start = filled_start(case, case.keys, count)
    labels = kmeans(k, clusters, iterations=1, start=start).labels
    for b in range(case.batch):
        for h in range(case.heads):
            distances = torch.cdist(k[b, h].double(), definitions.block_means(k[b, h], start[b, h], count)) ** 2
            chosen = distances.gather(1, labels[b, h].long()[:, None])[:, 0]
            assert (chosen - distances.min(1).values).max() <= distance_rounding(k)


@cases(60)
@given(attention_cases(dtype=torch.float64, kind=SMOOTH), st.integers(1, 6), st.integers(1, 4))
def test_warm_kmeans_follows_lloyd(case, clusters, iterations):
    _, k, _ = case.qkv()
    count = min(clusters, case.keys)
    start = filled_start(case, case.keys, count)
    found = kmeans(k, clusters, iterations=iterations, start=start)
    for b in range(case.batch):
        for h in range(case.heads):
            centroids = definitions.block_means(k[b, h], start[b, h], count)
            for _ in range(iterations):
                labels, centroids = definitions.lloyd_step(k[b, h], centroids)
            assert found.labels[b, h].tolist() == labels.tolist()


@cases(60)
@given(attention_cases(dtype=torch.float64, kind=SMOOTH), st.integers(1, 6), st.sampled_from([0.0, 0.05, 0.7]))
def test_warm_response_clustering_follows_lloyd_on_transformed_keys(case, clusters, alpha):
    q, k, _ = case.qkv()
    count = min(clusters, case.keys)
    start = filled_start(case, case.keys, count)
    found = cluster_keys(k, q, clusters, KeyMetric(alpha=alpha, epsilon=1e-2), iterations=2, start=start)
    for b in range(case.batch):
        for h in range(case.heads):
            metric = definitions.stabilised_metric(definitions.query_metric(q[b, h]), alpha, 1e-2)
            features = k[b, h] @ torch.linalg.cholesky(metric)
            centroids = definitions.block_means(features, start[b, h], count)
            for _ in range(2):
                labels, centroids = definitions.lloyd_step(features, centroids)
            assert found.labels[b, h].tolist() == labels.tolist()
    within(found.centroids, definitions.per_head(definitions.block_means, k, found.labels, count), mean_rounding(k))


@cases(60)
@given(attention_cases(), st.integers(1, 9))
def test_more_iterations_never_raise_the_kmeans_objective(case, clusters):
    _, k, _ = case.qkv()
    count = min(clusters, case.keys)
    trail = [
        definitions.per_head(definitions.euclidean_objective, k, kmeans(k, clusters, iterations=t).labels, count)
        for t in (1, 2, 4, 8)
    ]
    for before, after in itertools.pairwise(trail):
        assert (after - before).max() <= case.keys * distance_rounding(k)


@cases(80)
@given(attention_cases(), st.integers(1, 9), st.sampled_from(["euclidean", "response"]))
def test_invalid_tokens_get_the_label_past_the_last_and_influence_nothing(case, clusters, metric):
    q, k, _ = case.qkv()
    valid = case.key_padding()
    changed = strategies.laid_out(torch.where(valid[:, None, :, None], k, 1e4), case.layout)
    if metric == "euclidean":
        one, other = (kmeans(x, clusters, valid=valid) for x in (k, changed))
    else:
        one, other = (cluster_keys(x, q, clusters, valid=valid) for x in (k, changed))
    count = min(clusters, case.keys)
    padded = ~valid[:, None].expand_as(one.labels)
    assert one.labels[padded].eq(count).all()
    assert one.labels[~padded].lt(count).all()
    assert torch.equal(one.sizes.sum(-1), valid.sum(-1, dtype=torch.int32)[:, None].expand(-1, case.heads))
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


@cases(50)
@given(attention_cases(), st.sampled_from([0.0, 0.05, 1.0]), st.data())
def test_metric_and_roots_are_their_definitions(case, alpha, draw):
    q, *_ = case.qkv()
    valid = draw.draw(st.sampled_from([None, case.with_(keys=case.queries).key_padding()]))
    expected = torch.stack(
        [
            torch.stack([definitions.query_metric(x if valid is None else x[valid[b]]) for x in q[b]])
            for b in range(case.batch)
        ]
    )
    found = query_metric(q, valid=valid)
    size = max(expected.abs().max().item(), 1e-12)
    rounding = (case.queries + case.dim + 8) * torch.finfo(case.dtype).eps * size
    within(found, expected, rounding)
    stable = stabilise(found, alpha=alpha, epsilon=1e-3)
    within(stable, definitions.per_head(definitions.stabilised_metric, expected, alpha, 1e-3), 4 * rounding)
    for kind in ("cholesky", "sqrt"):
        factor = metric_root(stable, kind)
        # Both factorisations are backward stable: R R^T is the metric up to O(d eps) of its norm, at most d * size.
        within(factor @ factor.transpose(-1, -2), stable, 8 * case.dim * rounding)


# Importance and measures ----------------------------------------------------------------------------------


@cases(200)
@given(attention_cases(), st.sampled_from(sorted(DEFINED)))
def test_importance_is_its_definition_and_empty_query_blocks_are_zero(case, name):
    q, k, _ = case.qkv()
    query_labels, key_labels = case.labels()
    blocks = (query_labels, case.query_blocks, key_labels, case.key_blocks)
    found = ESTIMATORS[name](q, k, *blocks, scale=case.scale)
    bound = definitions.weight_rounding(q, k, case.scale, case.dtype)
    within(found, definitions.per_head(DEFINED[name], q, k, *blocks, scale=case.scale), bound)
    filled = definitions.per_head(definitions.block_sizes, query_labels, case.query_blocks) > 0
    within(found.sum(-1), filled.double(), case.key_blocks * bound)
    assert found[~filled].eq(0).all()


@cases(80)
@given(attention_cases(labelling="random", query_blocks=st.integers(2, 5), key_blocks=st.integers(2, 7)))
def test_tokens_past_the_count_take_no_part_in_importance(case):
    q, k, _ = case.qkv()
    query_labels, key_labels = case.labels()
    query_labels[..., 0], key_labels[..., 0] = 0, 0
    blocks = (query_labels, case.query_blocks - 1, key_labels, case.key_blocks - 1)
    bound = definitions.weight_rounding(q, k, None, case.dtype)
    for name, defined in DEFINED.items():
        within(ESTIMATORS[name](q, k, *blocks), definitions.per_head(defined, q, k, *blocks), bound)


@cases(100)
@given(attention_cases())
def test_log_masses_are_their_definitions_and_minus_infinity_when_empty(case):
    q, k, _ = case.qkv()
    labels = case.labels()[1]
    bound = definitions.logit_rounding(q, k, case.scale, case.dtype)
    expected = definitions.per_head(definitions.exact_log_mass, q, k, labels, case.key_blocks, scale=case.scale)
    within(exact_log_mass(q, k, labels, case.key_blocks, scale=case.scale), expected, 2 * bound)
    means, sizes = segment_mean(k, labels, case.key_blocks)
    expected = definitions.per_head(definitions.centroid_log_mass, q, means, sizes, scale=case.scale)
    within(centroid_log_mass(q, means, sizes, scale=case.scale), expected, 2 * bound)


@cases(100)
@given(attention_cases())
def test_clustering_measures_are_their_definitions(case):
    q, k, _ = case.qkv()
    query_labels, labels = case.labels()
    count, reach = case.key_blocks, distance_rounding(k)
    steer = max(q.double().norm(dim=-1).max().item(), 1.0) ** 2
    keys_only, both = (k, labels, count), (q, k, labels, count)
    blocks = (query_labels, case.query_blocks, labels, count)
    estimate, reference = ESTIMATORS["pama"](q, k, *blocks), ESTIMATORS["exact"](q, k, *blocks)
    weights = (estimate, reference, arrange(query_labels, case.query_blocks).sizes)
    for name, arguments, bound in (
        ("key_mse", keys_only, reach),
        ("euclidean_objective", keys_only, case.keys * reach),
        ("score_error", both, 4 * steer * reach / case.dim),
        ("qrkc_objective", both, 4 * case.keys * steer * reach),
        # The root of a mean square moves by at most the largest movement of its entries.
        ("centered_log_mass_rmse", both, 6 * definitions.logit_rounding(q, k, None, case.dtype)),
        ("weight_tv", weights, (count + case.query_blocks + 4) * torch.finfo(estimate.dtype).eps),
    ):
        expected = definitions.per_head(getattr(definitions, name), *arguments)
        within(getattr(retrieval, name)(*arguments), expected, bound)


def test_recall_summary_is_mean_fifth_percentile_and_worst():
    summary = retrieval.recall_summary(torch.linspace(0, 1, 101)[torch.randperm(101)].reshape(1, 101))
    assert summary == pytest.approx({"mean": 0.5, "p05": 0.05, "worst": 0.0}, abs=1e-6)


# Selection ------------------------------------------------------------------------------------------------


def kept_weights(mask, importance):
    """Importances of the kept blocks, sorted: equal blocks may replace each other."""
    return sorted(importance[mask].tolist())


@cases(150)
@given(strategies.dyadic_rows(), st.integers(1, 128), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_top_p_keeps_the_defined_blocks_to_the_last_bit(row, sixtyfourths, floor):
    importance, sizes = row
    p = sixtyfourths / 128
    mask = select_top_p(importance, p, sizes=sizes, floor=floor)
    expected = definitions.top_p(importance[0, 0, 0], p, sizes[0, 0], floor)
    assert kept_weights(mask, importance) == sorted(importance[0, 0, 0, expected].tolist())
    assert not mask[sizes[:, :, None].expand_as(mask) == 0].any()


@cases(60)
@given(strategies.dyadic_rows(), st.integers(0, 63))
def test_top_p_excluding_the_crossing_block_stays_below_p(row, odd):
    importance, sizes = row
    # An odd multiple of 1/128 is never met exactly by multiples of 1/64.
    p = (2 * odd + 1) / 128
    mask = select_top_p(importance, p, sizes=sizes, crossing="exclude")
    expected = definitions.top_p(importance[0, 0, 0], p, sizes[0, 0], crossing="exclude")
    assert kept_weights(mask, importance) == sorted(importance[0, 0, 0, expected].tolist())


@cases(100)
@given(attention_cases(), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_top_p_is_monotone_minimal_and_takes_the_largest(case, one, other):
    q, k, _ = case.qkv()
    query_labels, key_labels = case.labels()
    importance = ESTIMATORS["pama"](q, k, query_labels, case.query_blocks, key_labels, case.key_blocks)
    sizes = arrange(key_labels, case.key_blocks).sizes
    low, high = sorted((one, other))
    small, large = select_top_p(importance, low, sizes=sizes), select_top_p(importance, high, sizes=sizes)
    assert not (small & ~large).any()
    rounding = (case.key_blocks + 1) * torch.finfo(torch.float32).eps
    filled = importance.sum(-1) > 0.5
    mass = (importance * small).sum(-1)
    assert (mass[filled] >= low - rounding).all()
    smallest = importance.masked_fill(~small, math.inf).amin(-1)
    several = filled & (small.sum(-1) > 1)
    assert ((mass - smallest)[several] < low + rounding).all() or low == 1
    largest_left = importance.masked_fill(small, -1).amax(-1)
    assert (smallest >= largest_left - rounding)[filled].all()


@cases(60)
@given(strategies.dyadic_rows())
def test_p_of_one_keeps_every_block_with_tokens(row):
    importance, sizes = row
    assert torch.equal(select_top_p(importance, 1.0, sizes=sizes)[:, :, 0], sizes > 0)


@cases(80)
@given(strategies.dyadic_rows(), st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0]))
def test_top_k_keeps_the_ceiling_of_the_ratio_of_blocks_with_tokens(row, ratio):
    importance, sizes = row
    mask = select_top_k(importance, ratio, sizes=sizes)
    expected = definitions.top_k(importance[0, 0, 0], ratio, sizes[0, 0])
    assert kept_weights(mask, importance) == sorted(importance[0, 0, 0, expected].tolist())
    assert not mask[sizes[:, :, None].expand_as(mask) == 0].any()
