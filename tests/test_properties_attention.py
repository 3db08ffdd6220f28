"""Sparse attention, plans and the whole of PARK against the float64 definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import definitions
import strategies
from parkattn.ops.attend.definition import attend, attend_with_lse
from parkattn.ops.cluster.definition import cluster_keys, kmeans
from parkattn.ops.permute.definition import gather, scatter
from parkattn.park import ParkConfig, build_plan, park_attention
from parkattn.plan import Plan, arrange
from parklab.metrics import retrieval
from parklab.research import ResearchConfig
from strategies import attention_cases, cases, half_cases, self_attention_cases


def small_config(case, **changes):
    """Few clusters, so that a plan for a few tokens is really sparse."""
    settings = {
        "query_clusters": case.query_blocks, "key_clusters": case.key_blocks, "top_p": 0.6, "kmeans_iterations": 2,
        "seed": case.seed % 1000,
    }  # fmt: skip
    return ResearchConfig(**(settings | changes))


def blocked(case):
    """q, k, v, the labels of both and a mask."""
    query_labels, key_labels = case.labels()
    return *case.qkv(), query_labels, key_labels, case.block_mask(key_labels)


def attend_in_token_order(q, k, v, query_labels, key_labels, mask, **options):
    """The permutation around `attend`, done with the library's own operations."""
    queries, keys = arrange(query_labels, mask.shape[2]), arrange(key_labels, mask.shape[3])
    return scatter(
        attend(gather(q, queries), gather(k, keys), gather(v, keys), queries, keys, mask, **options), queries
    )


def plan_token_mask(plan):
    return definitions.per_head(definitions.token_mask, plan.queries.labels, plan.keys.labels, plan.mask)


def plan_tensors(plan):
    """Every tensor a plan is made of, in a fixed order."""
    parts = [plan.mask, plan.estimated_mass]
    for blocks in (plan.queries, plan.keys):
        parts += [blocks.labels, blocks.order, blocks.offsets]
    return parts


def same_plan(one, other):
    counts = (one.query_clusters, one.key_clusters) == (other.query_clusters, other.key_clusters)
    pairs = zip(plan_tensors(one), plan_tensors(other), strict=True)
    return counts and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def within(actual, expected, bound):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)


# attend ---------------------------------------------------------------------------------------------------


@cases(200)
@given(attention_cases())
def test_attend_is_softmax_over_the_selected_blocks(case):
    q, k, v, query_labels, key_labels, mask = blocked(case)
    out = attend_in_token_order(q, k, v, query_labels, key_labels, mask, scale=case.scale)
    expected = definitions.per_head(
        definitions.sparse_attention, q, k, v, query_labels, key_labels, mask, scale=case.scale
    )
    assert out.dtype == case.dtype
    within(out, expected, definitions.output_rounding(q, k, v, case.scale, case.dtype))


@cases(80)
@given(attention_cases())
def test_attend_returns_the_log_of_the_normaliser(case):
    q, k, v, query_labels, key_labels, mask = blocked(case)
    queries, keys = arrange(query_labels, case.query_blocks), arrange(key_labels, case.key_blocks)
    ordered = gather(q, queries), gather(k, keys), gather(v, keys), queries, keys, mask
    out, lse = attend_with_lse(*ordered, scale=case.scale)
    assert torch.equal(out, attend(*ordered, scale=case.scale))
    expected = definitions.per_head(
        definitions.sparse_log_normaliser, q, k, query_labels, key_labels, mask, scale=case.scale
    )
    # The normaliser is returned in float32 whatever the input, so it also carries that rounding of its own size.
    rounding = torch.finfo(torch.float32).eps * max(expected.abs().max().item(), 1.0)
    bound = definitions.weight_rounding(q, k, case.scale, case.dtype) + rounding
    within(scatter(lse[..., None], queries)[..., 0], expected, bound)


@cases(120)
@given(attention_cases())
def test_compensated_attend_lets_skipped_blocks_take_part_as_one_token(case):
    q, k, v, query_labels, key_labels, mask = blocked(case)
    compensate = (
        torch.rand(mask.shape[0], mask.shape[1], mask.shape[3], generator=strategies.generator(case.seed)) < 0.6
    )
    blocks = query_labels, key_labels, mask
    out = attend_in_token_order(q, k, v, *blocks, scale=case.scale, compensate=compensate)
    expected = definitions.per_head(definitions.compensated_attention, q, k, v, *blocks, compensate, scale=case.scale)
    within(out, expected, definitions.output_rounding(q, k, v, case.scale, case.dtype))


@cases(60)
@given(attention_cases(dtype=torch.float64))
def test_relabelling_the_blocks_does_not_change_the_output(case):
    q, k, v, query_labels, key_labels, mask = blocked(case)
    rows = torch.randperm(case.query_blocks, generator=strategies.generator(case.seed))
    columns = torch.randperm(case.key_blocks, generator=strategies.generator(case.seed + 1))
    renamed = torch.empty_like(mask)
    renamed[:, :, rows[:, None], columns[None]] = mask
    one = attend_in_token_order(q, k, v, query_labels, key_labels, mask)
    other = attend_in_token_order(q, k, v, rows[query_labels.long()].int(), columns[key_labels.long()].int(), renamed)
    within(one, other, definitions.output_rounding(q, k, v, None, case.dtype))


# The whole method -----------------------------------------------------------------------------------------


@cases(120)
@given(attention_cases())
def test_park_with_every_block_is_dense_attention(case):
    q, k, v = case.qkv()
    out = park_attention(q, k, v, small_config(case, top_p=1.0), scale=case.scale)
    expected = definitions.per_head(definitions.dense_attention, q, k, v, scale=case.scale)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    within(out, expected, definitions.output_rounding(q, k, v, case.scale, case.dtype))


@cases(120)
@given(attention_cases(), st.sampled_from(["pama", "query-centroid", "full-key", "exact"]))
def test_plan_keeps_the_top_p_of_the_defined_importance(case, importance):
    q, k, _ = case.qkv()
    config = small_config(case, importance=importance)
    plan = build_plan(q, k, config, scale=case.scale)
    names = {"query-centroid": "query_centroid", "full-key": "full_key", "exact": "exact_importance", "pama": "pama"}
    blocks = plan.queries.labels, plan.queries.count, plan.keys.labels, plan.keys.count
    weights = definitions.per_head(getattr(definitions, names[importance]), q, k, *blocks, scale=case.scale)
    slack = plan.keys.count * (definitions.weight_rounding(q, k, case.scale, case.dtype) + 1e-7)
    filled = plan.queries.sizes > 0
    mass = (weights * plan.mask).sum(-1)
    smallest = weights.masked_fill(~plan.mask, 2.0).amin(-1)
    assert (mass[filled] >= 0.6 - slack).all()
    assert ((mass - smallest)[filled] < 0.6 + slack).all()
    assert (smallest >= weights.masked_fill(plan.mask, 0.0).amax(-1) - slack)[filled].all()
    share = plan.queries.sizes / case.queries
    within(plan.estimated_mass, (share * mass).sum(-1), slack)
    assert plan.estimated_mass.dtype == torch.float32


@cases(100)
@given(attention_cases(), st.booleans())
def test_park_is_sparse_attention_under_its_plan(case, padded):
    q, k, v = case.qkv()
    valid = case.key_padding() if padded else None
    config = small_config(case)
    plan = build_plan(q, k, config, key_valid=valid, scale=case.scale)
    out = park_attention(q, k, v, config, plan=plan, scale=case.scale)
    labels = plan.queries.labels, plan.keys.labels
    expected = definitions.per_head(definitions.sparse_attention, q, k, v, *labels, plan.mask, scale=case.scale)
    within(out, expected, definitions.output_rounding(q, k, v, case.scale, case.dtype))
    assert torch.equal(out, park_attention(q, k, v, config, key_valid=valid, scale=case.scale))


@cases(100)
@given(attention_cases(), st.booleans())
def test_density_and_recall_are_their_definitions(case, padded):
    q, k, _ = case.qkv()
    valid = case.key_padding() if padded else torch.ones(case.batch, case.keys, dtype=torch.bool)
    plan = build_plan(q, k, small_config(case), key_valid=valid if padded else None)
    heads = valid[:, None].expand(-1, case.heads, -1)
    labels = plan.queries.labels, plan.keys.labels
    density = definitions.per_head(definitions.density, *labels, plan.mask, heads)
    within(plan.density(), density, 4 * torch.finfo(torch.float32).eps)
    recall = retrieval.attention_recall(q, k, plan)
    expected = definitions.per_head(definitions.attention_recall, q, k, *labels, plan.mask, heads)
    within(recall, expected, case.keys * definitions.weight_rounding(q, k, None, case.dtype) + 1e-6)


@cases(100)
@given(self_attention_cases(), st.data())
def test_text_tokens_are_never_clustered_and_always_on(case, draw):
    q, k, v = case.qkv()
    text = draw.draw(strategies.text_spans(case.queries))
    config = small_config(case, top_p=0.3)
    plan = build_plan(q, k, config, text=text)
    inside = torch.zeros(case.queries, dtype=torch.bool)
    inside[text] = True
    assert torch.equal(plan.queries.labels >= plan.query_clusters, inside.expand_as(plan.queries.labels))
    assert torch.equal(plan.keys.labels >= plan.key_clusters, inside.expand_as(plan.keys.labels))
    allowed = plan_token_mask(plan)
    assert allowed[:, :, inside].all()
    assert allowed[..., inside].all()
    out = park_attention(q, k, v, config, text=text)
    dense = definitions.per_head(definitions.dense_attention, q, k, v)
    within(out[:, :, inside], dense[:, :, inside], definitions.output_rounding(q, k, v, None, case.dtype))


@cases(100)
@given(self_attention_cases(), st.data())
def test_padding_is_never_attended_and_influences_nothing(case, draw):
    q, k, v = case.qkv()
    valid = case.key_padding()
    text = draw.draw(st.none() | strategies.text_spans(case.queries))
    if text is not None:
        valid[:, text.stop % case.queries if text.start == 0 else 0] = True
    config = small_config(case)
    plan = build_plan(q, k, config, text=text, key_valid=valid)
    assert not plan_token_mask(plan)[~valid[:, None, None].expand(-1, case.heads, case.queries, -1)].any()
    out = park_attention(q, k, v, config, text=text, key_valid=valid)
    loud = [strategies.laid_out(torch.where(valid[:, None, :, None], x, 1e6), case.layout) for x in (k, v)]
    assert same_plan(build_plan(q, loud[0], config, text=text, key_valid=valid), plan)
    assert torch.equal(park_attention(q, *loud, config, text=text, key_valid=valid), out)
    every = park_attention(q, k, v, small_config(case, top_p=1.0), text=text, key_valid=valid)
    allowed = valid[:, None, None].expand(-1, case.heads, case.queries, -1)
    weights = definitions.per_head(
        lambda q, k, allowed: definitions.attention_weights(q, k, None, allowed), q, k, allowed
    )
    within(every, weights @ v.double(), definitions.output_rounding(q, k, v, None, case.dtype))


@cases(50)
@given(attention_cases(batch=2, heads=2, layout="contiguous"), st.booleans())
def test_batch_elements_and_heads_do_not_influence_each_other(case, padded):
    q, k, v = case.qkv()
    valid = case.key_padding() if padded else None
    config = small_config(case)
    plan, out = build_plan(q, k, config, key_valid=valid), park_attention(q, k, v, config, key_valid=valid)
    others = torch.ones(2, 2, 1, 1, dtype=torch.bool)
    others[1, 0] = False
    q2, k2, v2 = (torch.where(others, x.flip(-1) * 3 + 1, x) for x in (q, k, v))
    plan2, out2 = build_plan(q2, k2, config, key_valid=valid), park_attention(q2, k2, v2, config, key_valid=valid)
    assert torch.equal(out2[1, 0], out[1, 0])
    for one, other in zip(plan_tensors(plan), plan_tensors(plan2), strict=True):
        assert torch.equal(one[1, 0], other[1, 0])


@cases(60)
@given(attention_cases(batch=2, heads=1, dtype=torch.float64, kind=st.sampled_from(["gaussian", "clustered"])))
def test_a_batch_element_alone_gets_the_plan_it_gets_in_a_batch(case):
    q, k, _ = case.qkv()
    config = small_config(case)
    both, alone = build_plan(q, k, config), build_plan(q[1:], k[1:], config)
    assert torch.equal(both.queries.labels[1:], alone.queries.labels)
    assert torch.equal(both.keys.labels[1:], alone.keys.labels)


@cases(50)
@given(attention_cases())
def test_same_seed_gives_the_same_plan_and_leaves_the_callers_random_state_alone(case):
    q, k, _ = case.qkv()
    config = small_config(case)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_plan(q, k, config)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same_plan(build_plan(q, k, config), first)


@cases(60)
@given(attention_cases(dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16])))
def test_non_contiguous_views_give_the_bits_of_contiguous_input(case):
    q, k, v = case.qkv()
    config = small_config(case)
    packed = [x.contiguous() for x in (q, k, v)]
    assert same_plan(build_plan(q, k, config), build_plan(*packed[:2], config))
    assert torch.equal(park_attention(q, k, v, config), park_attention(*packed, config))


@cases(10)
@given(attention_cases())
def test_the_default_device_is_not_where_anything_happens(case):
    from parkattn.ops.cluster.kernels import first_tokens

    q, k, v = case.qkv()
    config, valid = small_config(case, query_multiple=2, key_multiple=2), case.key_padding()
    out, first = park_attention(q, k, v, config, key_valid=valid), first_tokens(k, 2, case.seed, valid)
    with torch.device("meta"):
        assert torch.equal(park_attention(q, k, v, config, key_valid=valid), out)
        assert torch.equal(first_tokens(k, 2, case.seed, valid), first)


@cases(30)
@given(attention_cases(dtype=st.sampled_from([torch.float32, torch.bfloat16])))
def test_neither_autocast_nor_gradients_change_a_plan_or_an_output(case):
    q, k, v = case.qkv()
    config = small_config(case)
    plan, out = build_plan(q, k, config), park_attention(q, k, v, config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_plan(build_plan(q, k, config), plan)
        assert torch.equal(park_attention(q, k, v, config), out)
    learnt = [x.clone().requires_grad_() for x in (q, k, v)]
    kept = build_plan(*learnt[:2], config)
    assert same_plan(kept, plan) and not kept.estimated_mass.requires_grad
    park_attention(*learnt, config).sum().backward()
    assert all(x.grad is not None for x in learnt)


@pytest.mark.parametrize("which", range(3))
def test_gradients_of_one_side_alone_are_those_of_masked_attention(which):
    q, k, v = (
        torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in range(3)
    )
    config = ParkConfig(query_clusters=4, key_clusters=8, top_p=0.5)
    plan = build_plan(q, k, config)
    masked = {"attn_mask": plan_token_mask(plan).bool()}
    found = []
    for attention in (
        lambda *x: park_attention(*x, config, plan=plan),
        lambda *x: scaled_dot_product_attention(*x, **masked),
    ):
        sides = [x.clone().requires_grad_(place == which) for place, x in enumerate((q, k, v))]
        attention(*sides).square().sum().backward()
        found.append(sides[which].grad)
    assert torch.allclose(*found, rtol=0, atol=1e-10 * found[1].abs().max().item())


@cases(40)
@given(attention_cases(), st.booleans())
def test_a_saved_plan_loads_as_the_same_plan(tmp_path_factory, case, padded):
    q, k, v = case.qkv()
    valid = case.key_padding() if padded else None
    config = small_config(case)
    plan = build_plan(q, k, config, key_valid=valid)
    path = tmp_path_factory.mktemp("plan") / "plan.safetensors"
    plan.save(path)
    loaded = Plan.load(path)
    assert same_plan(loaded, plan)
    assert torch.equal(loaded.density(), plan.density())
    assert torch.equal(park_attention(q, k, v, config, plan=loaded), park_attention(q, k, v, config, plan=plan))


@cases(60)
@given(attention_cases(dtype=torch.float64, kind=st.sampled_from(["gaussian", "clustered"])))
def test_an_earlier_plan_starts_the_clusters_of_the_next_one(case):
    q, k, _ = case.qkv()
    config = small_config(case, kmeans_iterations=2, warm_iterations=1)
    plan = build_plan(q, k, config)
    following = build_plan(q, k, config, start=plan)
    warm = {"iterations": 1, "seed": config.seed}
    queries = kmeans(q, config.query_clusters, start=plan.queries.labels, **warm)
    keys = cluster_keys(k, q, config.key_clusters, start=plan.keys.labels, **warm)
    assert torch.equal(following.queries.labels, queries.labels)
    assert torch.equal(following.keys.labels, keys.labels)


@cases(150)
@given(half_cases())
def test_error_is_at_most_twice_that_of_torch_under_the_same_mask(case):
    q, k, v = case.qkv()
    config = small_config(case)
    plan = build_plan(q, k, config, scale=case.scale)
    out = park_attention(q, k, v, config, plan=plan, scale=case.scale)
    labels = plan.queries.labels, plan.keys.labels
    exact = definitions.per_head(definitions.sparse_attention, q, k, v, *labels, plan.mask, scale=case.scale)
    torchs = scaled_dot_product_attention(q, k, v, attn_mask=plan_token_mask(plan), scale=case.scale)
    unit = torch.finfo(case.dtype).eps * exact.abs().max()
    assert out.dtype == case.dtype
    assert (out.double() - exact).abs().max() <= 2 * (torchs.double() - exact).abs().max() + unit


@pytest.mark.parametrize("name", ["top_p", "top_k"])
def test_compensated_park_is_closer_to_dense_on_clustered_data(name):
    """Keys close to their centroids: what the skipped blocks lose comes back up to second order."""
    case = strategies.Case(kind="clustered", queries=61, keys=67, query_blocks=4, key_blocks=8, heads=2)
    q, k, v = case.qkv()
    chosen = {"top_p": 0.3} if name == "top_p" else {"top_p": None, "top_k": 0.25}
    dense = definitions.per_head(definitions.dense_attention, q, k, v)
    plain, compensated = (
        (park_attention(q, k, v, small_config(case, compensate=c, **chosen)) - dense).norm() for c in (False, True)
    )
    assert compensated < plain
