"""Rounded block borders: what the definition promises, that the kernels give the same, and that plans made with them
still hold.

The interpreter must be chosen before triton is imported, so what runs kernels runs in a pytest of its own.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from machine_code import compiled
from parkattn import ParkConfig, build_plan, park_attention
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.cluster.borders import (
    MULTIPLES_PER_BLOCK,
    fitting_multiple,
    nearest_chain,
    round_borders,
    round_labels,
)
from parkattn.ops.cluster.definition import Clustering
from parkattn.segments import segment_mean, segment_sizes
from parklab.research import ResearchConfig
from strategies import reproducible

pytestmark = quiet_numpy


@outside
def test_the_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__, at_least=3)


def clustered(seed: int, n: int, count: int, d: int = 8, dtype: torch.dtype = torch.float64, heads: int = 2):
    """x [1 h n d] and labels [1 h n] in [0, count]: uneven clusters, some empty, some tokens not clustered."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.rand(heads, count + 1, generator=g) ** 2 + 1e-3
    weight[:, torch.rand(count + 1, generator=g) < 0.2] = 0
    weight[:, 0] += 0.1
    labels = torch.multinomial(weight, n, replacement=True, generator=g)[None]
    labels[..., 0] = 0
    centre = torch.randn(1, heads, count + 1, d, generator=g)
    x = centre.gather(2, labels[..., None].expand(-1, -1, -1, d)) + 0.3 * torch.randn(1, heads, n, d, generator=g)
    x = x.to(dtype)
    return x, labels.int(), segment_mean(x, labels, count)[0]


# ---------------------------------------------------------------------------------------------- the definition


@outside
@settings(reproducible, max_examples=150)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 300), count=st.integers(1, 20), multiple=st.integers(2, 40))
def test_borders_lie_on_multiples_and_no_token_is_lost(seed, n, count, multiple):
    x, labels, centroids = clustered(seed, n, count)
    rounded = round_labels(x, labels, centroids, multiple)
    before, after = segment_sizes(labels, count), segment_sizes(rounded, count)
    assert torch.equal(rounded == count, labels == count)  # who was not clustered still is not
    assert torch.equal(before.sum(-1), after.sum(-1))
    assert (rounded >= 0).all() and rounded.dtype == labels.dtype
    ends, members = after.cumsum(-1), after.sum(-1, keepdim=True)
    assert ((ends % multiple == 0) | (ends == members)).all()
    # a border moves by half a multiple at most, so along the chain no more tokens than that leave a cluster at either
    # end
    for head in range(2):
        chain = nearest_chain(centroids[0, head], before[0, head] > 0)
        moved = (before[0, head][chain].cumsum(0) - ends[0, head]).abs()
        assert (moved <= multiple / 2).all()


@outside
def test_a_multiple_of_one_changes_nothing():
    x, labels, centroids = clustered(0, 100, 7)
    found = Clustering(labels, centroids, segment_sizes(labels, 7))
    assert round_labels(x, labels, centroids, 1) is labels and round_borders(x, found, 1) is found


@outside
def test_rounded_clusters_have_the_means_and_sizes_of_their_own_tokens():
    x, labels, centroids = clustered(0, 100, 7)
    rounded = round_borders(x, Clustering(labels, centroids, segment_sizes(labels, 7)), 8)
    assert torch.equal(rounded.labels, round_labels(x, labels, centroids, 8)) and (rounded.labels != labels).any()
    means, sizes = segment_mean(x, rounded.labels, 7)
    assert torch.equal(rounded.centroids, means) and torch.equal(rounded.sizes, sizes)


@outside
def test_tokens_move_to_the_neighbour_and_the_nearest_of_them_move_first():
    # three clusters on a line, of 5, 5 and 3 tokens; the chain begins at 0, the farthest from the mean: borders 5, 10
    # -> 4, 12
    x = torch.tensor([0.9, 0.0, 0.1, 0.2, 0.3, 10.9, 10.0, 10.1, 10.2, 10.3, 20.2, 20.0, 20.1])[
        None, None, :, None
    ].double()
    labels = torch.tensor([2] * 5 + [0] * 5 + [1] * 3)[None, None].int()
    rounded = round_labels(x, labels, segment_mean(x, labels, 3)[0], 4)
    # 0.9 is nearest to the cluster at 10 and joins it; so do 20.0 and 20.1
    assert rounded[0, 0].tolist() == [1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 1, 1]


@outside
@settings(reproducible, max_examples=60)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 30))
def test_the_chain_goes_on_to_the_nearest_left_and_ends_with_the_empty(seed, count):
    g = torch.Generator().manual_seed(seed)
    points, occupied = torch.randn(count, 5, generator=g, dtype=torch.float64), torch.rand(count, generator=g) < 0.8
    occupied[seed % count] = True
    chain = nearest_chain(points, occupied).tolist()
    assert sorted(chain) == list(range(count))
    used = int(occupied.sum())
    assert all(occupied[v] for v in chain[:used]) and chain[used:] == [v for v in range(count) if not occupied[v]]
    mean = points[occupied].mean(0)
    assert (points[chain[0]] - mean).norm() >= max((points[v] - mean).norm() for v in chain[:used]) - 1e-12
    for i in range(used - 1):
        step = [(points[v] - points[chain[i]]).norm() for v in chain[i + 1 : used]]
        assert step[0] <= min(step) + 1e-12


@outside
def test_equal_centroids_are_visited_by_index_and_nan_still_gives_an_order():
    assert nearest_chain(torch.zeros(5, 3), torch.ones(5, dtype=torch.bool)).tolist() == [0, 1, 2, 3, 4]
    broken = torch.randn(6, 3)
    broken[2] = torch.nan
    assert sorted(nearest_chain(broken, torch.ones(6, dtype=torch.bool)).tolist()) == list(range(6))


@outside
def test_a_head_does_not_depend_on_the_others():
    x, labels, centroids = clustered(3, 200, 9, heads=3)
    whole = round_labels(x, labels, centroids, 16)
    for head in range(3):
        alone = slice(head, head + 1)
        assert torch.equal(round_labels(x[:, alone], labels[:, alone], centroids[:, alone], 16), whole[:, alone])


@outside
@given(tokens=st.integers(1, 200_000), clusters=st.integers(1, 2000), multiple=st.sampled_from([1, 32, 64, 100, 128]))
def test_small_blocks_take_a_smaller_multiple(tokens, clusters, multiple):
    found = fitting_multiple(multiple, tokens, clusters)
    assert found == 1 or tokens >= MULTIPLES_PER_BLOCK * found * clusters
    assert found == multiple or tokens < MULTIPLES_PER_BLOCK * 2 * (found + 1) * clusters
    assert multiple == 1 or fitting_multiple(multiple, MULTIPLES_PER_BLOCK * multiple * clusters, clusters) == multiple


# ---------------------------------------------------------------------------------------------- plans


def on_multiples(blocks, clusters: int, multiple: int) -> bool:
    """Whether clusters begin at multiples; what follows them (text, padding) begins where they end."""
    begins, end = blocks.offsets[..., :clusters], blocks.offsets[..., clusters : clusters + 1]
    return bool(((begins % multiple == 0) | (begins == end)).all())


CALLS = {
    "plain": {},
    "text": {"text": slice(5, 30)},
    "both": {"text": slice(0, 9), "key_valid": torch.arange(700)[None] < 640},
}


@outside
@pytest.mark.parametrize("name", CALLS)
def test_plans_have_their_borders_on_multiples(name):
    q, k, v = torch.randn(3, 1, 2, 700, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    config = ResearchConfig(query_clusters=4, key_clusters=9, top_p=None, top_k=0.3, query_multiple=32, key_multiple=16)
    plan = build_plan(q, k, config, **CALLS[name])
    assert on_multiples(plan.queries, 4, 32) and on_multiples(plan.keys, 9, 16)
    assert plan.queries.sizes.sum() == plan.keys.sizes.sum() == 1400
    warm = build_plan(q, k, config, start=plan, **CALLS[name])
    assert on_multiples(warm.keys, 9, 16)
    everything = park_attention(q, k, v, config.replace(top_p=1.0, top_k=None), **CALLS[name])
    torch.testing.assert_close(
        everything, dense_attention(q, k, v, key_valid=CALLS[name].get("key_valid")), rtol=1e-4, atol=1e-5
    )


@outside
def test_the_plan_of_multiple_one_is_the_paper_s():
    q, k = torch.randn(2, 1, 2, 500, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    config = ResearchConfig(query_clusters=4, key_clusters=8)
    plain, rounded = build_plan(q, k, config), build_plan(q, k, config.replace(query_multiple=16, key_multiple=16))
    assert (plain.queries.sizes % 16 != 0).any() and not torch.equal(plain.keys.labels, rounded.keys.labels)
    assert config.counts(500, 500)[2:] == (1, 1)


@outside
def test_presets_round_and_one_override_gives_the_paper_back():
    for name in ParkConfig.PRESETS:
        ours, paper = ParkConfig.preset(name), ResearchConfig.preset(name, query_multiple=1, key_multiple=1)
        assert ours.counts(75_600, 75_600) == ResearchConfig.preset(name).counts(75_600, 75_600)
        assert min(ours.counts(75_600, 75_600)[2:]) > 1 and paper.counts(75_600, 75_600)[2:] == (1, 1)
    with pytest.raises(ValueError, match="key_multiple"):
        ResearchConfig(key_multiple=0)


# ---------------------------------------------------------------------------------------------- the kernels


@in_interpreter
@settings(reproducible, max_examples=12)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 200), count=st.integers(1, 24), multiple=st.sampled_from([2, 8, 32])
)
def test_kernels_give_the_definition_s_labels(seed, n, count, multiple):
    from parkattn.ops.cluster import borders_triton as borders

    x, labels, _ = clustered(seed, n, count, d=64, dtype=torch.bfloat16)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)  # as models have it
    centroids, sizes = segment_mean(x, labels, count)
    found = borders.round_borders(x, labels, centroids, sizes, multiple)
    assert found.dtype == torch.int32
    assert torch.equal(found, round_labels(x, labels, centroids, multiple))


@in_interpreter
def test_the_chain_kernel_breaks_ties_by_index_and_takes_nan():
    from parkattn.ops.cluster import borders_triton as borders

    centroids, sizes = torch.zeros(2, 9, 64), torch.ones(2, 9, dtype=torch.int32)
    sizes[:, 4] = 0
    centroids[1, 3] = torch.nan
    chain, slot, ends = borders.walk_chain(centroids, sizes, 4)
    assert chain[0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 4]
    assert sorted(chain[1].tolist()) == list(range(9))
    assert torch.equal(slot.gather(1, chain.long()), torch.arange(9).int().expand(2, 9))
    assert ends[0].tolist() == [0, 4, 4, 4, 4, 8, 8, 8, 8]


@in_interpreter
def test_the_backends_make_the_same_rounded_plan():
    g = torch.Generator().manual_seed(5)
    group = torch.arange(96) * 6 // 96
    q, k = (
        (2 * torch.randn(1, 6, 1, 64, generator=g)[:, group] + 0.02 * torch.randn(1, 96, 1, 64, generator=g))
        .bfloat16()
        .transpose(1, 2)
        for _ in range(2)
    )
    config = ResearchConfig(
        query_clusters=6, key_clusters=6, kmeans_iterations=2, top_p=None, top_k=0.4, query_multiple=5, key_multiple=5
    )
    ours, theirs = (build_plan(q, k, config.replace(backend=backend)) for backend in ("triton", "reference"))
    assert torch.equal(ours.keys.labels, theirs.keys.labels) and torch.equal(ours.queries.labels, theirs.queries.labels)
    assert torch.equal(ours.mask, theirs.mask)
    assert on_multiples(ours.keys, 6, 5) and (ours.keys.sizes != 16).any()


# ---------------------------------------------------------------------------------------------- ahead of time


@outside
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_kernels_compile_ahead_of_time(arch):
    pytest.importorskip("triton")
    from parkattn.ops.cluster import borders_triton as borders

    types = dict.fromkeys(("points", "distance", "far", "direction", "middle"), "*fp32")
    types |= {"x": "*bf16", "keys": "*i64", "order": "*i64"}
    types |= dict.fromkeys(("sizes", "chain", "slot", "ends", "labels"), "*i32")
    for kernel, constants, more in (
        (borders._pair_distances, {"D": 128, "TILE": borders.PAIR_TILE}, {"out": "*fp32"}),
        (borders._walk_chain, {"LANES": 1024}, {}),
        (borders._sort_keys, {"D": 128, "ROWS": 32}, {}),
        (borders._relabel, {"STEPS": 11, "TOKENS": 1024}, {}),
    ):
        assert compiled(kernel, types | more, constants, arch, num_warps=4).shared <= 48 * 1024
