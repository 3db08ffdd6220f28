"""The seam between the definitions and the kernels: all backends agree.

The interpreter must be chosen before triton is imported, so what runs kernels runs in a pytest of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from parkattn import CallSite, Park, ParkConfig, build_plan, park_attention
from parkattn.backend import resolve
from parkattn.ops import REFERENCE, Backend, cluster, importance
from parkattn.ops.attend.definition import attend, dense_attention
from parkattn.ops.cluster.definition import Clustering
from parkattn.ops.importance.definition import ESTIMATORS
from parkattn.ops.permute.definition import gather, scatter
from parkattn.plan import Blocks, arrange
from parkattn.reuse import PlanStore
from parkattn.segments import segment_mean
from parklab.research import ResearchConfig
from strategies import reproducible

pytestmark = quiet_numpy


@outside
def test_the_triton_backend_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__, at_least=24)


# ---------------------------------------------------------------------------------------------- the backends agree


def tokens(seed: int, centres: int, n: int, d: int, valid: torch.Tensor | None = None, h: int = 2) -> torch.Tensor:
    """[b h n d] as a view of [b n h d] memory: tight groups, one per stretch of the valid tokens.

    Each group then holds one first token and rounding moves no token to another group: every backend must find them.
    """
    g = torch.Generator().manual_seed(seed)
    valid = torch.ones(1, n, dtype=torch.bool) if valid is None else valid
    group = (valid.cumsum(-1) - 1).clamp(min=0) * centres // valid.sum(-1, keepdim=True)
    centre = 2 * torch.randn(len(valid), centres, h, d, generator=g)
    x = centre.gather(1, group[..., None, None].expand(-1, -1, h, d)) + 0.02 * torch.randn(
        len(valid), n, h, d, generator=g
    )
    return x.bfloat16().transpose(1, 2)


def config_for(**changes) -> ParkConfig:
    return ResearchConfig(query_clusters=4, key_clusters=6, kmeans_iterations=2, top_p=None, top_k=0.4, **changes)


def expect_same_plan(ours, theirs) -> None:
    assert torch.equal(ours.mask, theirs.mask)
    for side in ("queries", "keys"):
        for part in ("labels", "order", "offsets"):
            assert torch.equal(getattr(getattr(ours, side), part), getattr(getattr(theirs, side), part)), (side, part)
    torch.testing.assert_close(ours.estimated_mass, theirs.estimated_mass, rtol=1e-2, atol=1e-2)
    assert (ours.query_clusters, ours.key_clusters, ours.padding) == (
        theirs.query_clusters,
        theirs.key_clusters,
        theirs.padding,
    )


KEY_VALID = torch.arange(48)[None] < torch.tensor([[48], [37]])
CALLS = {"text": {"text": slice(40, 48)}, "text and padding": {"text": slice(0, 7), "key_valid": KEY_VALID}}


@in_interpreter
@pytest.mark.parametrize("name", CALLS)
def test_plans_equal_those_of_the_definitions(name):
    call = CALLS[name]
    clustered = call.get("key_valid", torch.ones(1, 48, dtype=torch.bool)).clone()
    clustered[:, call.get("text", slice(0, 0))] = False
    q, k = tokens(1, 4, 48, 64, clustered, h=1), tokens(2, 6, 48, 64, clustered, h=1)
    ours, theirs = (build_plan(q, k, config_for(backend=backend), **call) for backend in ("triton", "reference"))
    expect_same_plan(ours, theirs)
    assert (ours.keys.sizes[..., :6] > 0).all()


@in_interpreter
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"key_metric": "euclidean", "importance": "query-centroid"},
        {"alpha": 0.0},
        {"query_tile": 5, "importance": "query-centroid"},
        {"top_p": 0.8, "top_k": None, "budget": "error", "compensate": True, "query_tile": 8},
    ],
    ids=str,
)
def test_every_setting_with_a_kernel_equals_the_definition(changes):
    q, k = tokens(3, 4, 50, 64), tokens(4, 6, 40, 64)
    ours, theirs = (
        build_plan(q, k, config_for(backend=backend).replace(**changes)) for backend in ("triton", "reference")
    )
    expect_same_plan(ours, theirs)


@in_interpreter
@pytest.mark.parametrize("scale", [None, -0.3])
def test_the_spread_of_scores_is_that_of_the_definition(scale):
    q, k = tokens(3, 4, 50, 64).expand(2, -1, -1, -1), tokens(4, 6, 48, 64, KEY_VALID)
    query_valid = torch.arange(50).expand(2, -1) < torch.tensor([[50], [31]])
    labels = torch.where(KEY_VALID.unsqueeze(1), torch.arange(48) % 5, 5).int().expand(2, 2, 48)
    keys = Clustering(labels, *segment_mean(k, labels, 5))
    how = {"valid": KEY_VALID, "query_valid": query_valid, "scale": scale}
    found = importance.score_spread(Backend("triton"), q, k, keys, **how)
    assert (found > 0).all()
    # sums of squares in fp32, one taken from the other
    assert torch.allclose(
        found, importance.score_spread(REFERENCE, q.double(), k.double(), keys, **how).float(), rtol=1e-4
    )


@in_interpreter
@pytest.mark.parametrize(
    "changes",
    [
        {"key_metric": "euclidean"},
        {"key_clusters": 40},
        {"query_multiple": 4, "key_multiple": 4},
        {"budget": "error", "compensate": True},
    ],
)
def test_what_stands_in_padding_changes_nothing(changes):
    clean = tokens(2, 6, 48, 64, KEY_VALID, h=1)
    short = {"kmeans_iterations": 1, "warm_iterations": 1}
    config = ResearchConfig(**({"query_clusters": 4, "key_clusters": 6} | changes), **short, backend="triton")
    dirty = clean.clone()
    dirty[1, :, 37:] = torch.nan
    build = lambda k: build_plan(clean, k, config, key_valid=KEY_VALID)  # noqa: E731
    cold, spoilt = build(clean), build(dirty)
    expect_same_plan(spoilt, cold)
    again = lambda k: build_plan(clean, k, config, key_valid=KEY_VALID, start=cold)  # noqa: E731
    expect_same_plan(again(dirty), again(clean))


@in_interpreter
def test_a_warm_start_follows_the_earlier_labels():
    """Labels renamed in the earlier plan: only a start from them gives the new plan those names."""
    q, k = tokens(5, 4, 40, 64, h=1), tokens(6, 6, 40, 64, h=1)
    config = config_for(backend="reference", warm_iterations=1)
    earlier = build_plan(q, k, config)
    renamed = replace(earlier, queries=arrange(3 - earlier.queries.labels, 4), keys=arrange(5 - earlier.keys.labels, 6))
    ours, theirs = (
        build_plan(q, k, config.replace(backend=backend), start=renamed) for backend in ("triton", "reference")
    )
    expect_same_plan(ours, theirs)
    assert torch.equal(ours.keys.labels, renamed.keys.labels) and not torch.equal(ours.keys.labels, earlier.keys.labels)


@in_interpreter
@settings(reproducible, max_examples=4)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 90), m=st.integers(1, 150), d=st.sampled_from([64, 128]), b=st.integers(1, 2),
    half=st.booleans(), compensate=st.booleans(), scale=st.sampled_from([None, 0.3]),
)  # fmt: skip
def test_attention_error_is_at_most_twice_that_of_pytorch(seed, n, m, d, b, half, compensate, scale):
    dtype = torch.float16 if half else torch.bfloat16
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, t, 2, d, generator=g).to(dtype).transpose(1, 2) for t in (n, m, m))
    valid = torch.rand(b, m, generator=g) < 0.8
    valid[:, 0] = True
    config = ResearchConfig(
        query_clusters=3, key_clusters=7, kmeans_iterations=1, top_p=None, top_k=0.4, compensate=compensate
    )
    plan = build_plan(q, k, config.replace(backend="reference"), key_valid=valid)
    out = park_attention(q, k, v, config.replace(backend="triton"), plan=plan, scale=scale)

    def definition(dtype):
        x = (gather(t.to(dtype), side) for t, side in ((q, plan.queries), (k, plan.keys), (v, plan.keys)))
        flags = plan.compensable() if compensate else None
        return scatter(
            attend(*x, plan.queries, plan.keys, plan.mask, scale=scale, compensate=flags), plan.queries
        ).double()

    exact = definition(torch.float64)
    allowed = 2 * (definition(dtype) - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert out.dtype == dtype and out.shape == q.shape
    assert (out.double() - exact).abs().max() <= allowed


@in_interpreter
def test_with_every_block_kept_the_output_is_dense_attention():
    q, k, v = (tokens(seed, 5, 60, 64, h=1) for seed in (5, 6, 7))
    out = park_attention(
        q, k, v, ResearchConfig(query_clusters=3, key_clusters=5, kmeans_iterations=1, top_p=1.0, backend="triton")
    )
    exact = dense_attention(q.double(), k.double(), v.double())
    plain = dense_attention(q, k, v).double()
    assert (out.double() - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2 * torch.finfo(
        q.dtype
    ).eps * exact.abs().max()


@in_interpreter
def test_a_stored_plan_is_sorted_again_by_the_kernels():
    q, k = tokens(8, 4, 70, 64, h=1), tokens(9, 6, 70, 64, h=1)
    plan = build_plan(q, k, config_for(backend="reference"), text=slice(60, 70))
    store = PlanStore()
    store.put(("transformer", 0, "branch"), plan, 3)
    held = store.get(("transformer", 0, "branch"), resolve("triton", q.device, q.dtype, 64))
    expect_same_plan(held.plan, plan)
    expected = arrange(plan.keys.labels, plan.keys.count)
    assert torch.equal(held.plan.keys.order, expected.order) and held.plan.keys.order.dtype == torch.int32


@in_interpreter
def test_park_runs_its_phases_on_the_kernels():
    q, k, v = (tokens(seed, centres, 48, 64, h=1) for seed, centres in ((10, 4), (11, 6), (12, 6)))
    outputs = {}
    for backend in ("triton", "reference"):
        park = Park(config_for(backend=backend, dense_steps=1, refresh_interval=5, reference_steps=1))
        outputs[backend] = [park(q, k, v, CallSite(layer=0, step=step, total_steps=10)) for step in range(3)]
    for ours, theirs in zip(*outputs.values(), strict=True):
        assert ours.stats.phase == theirs.stats.phase
        torch.testing.assert_close(ours.stats.density, theirs.stats.density)
        torch.testing.assert_close(ours.out, theirs.out, rtol=2e-2, atol=2e-2)
    assert [output.stats.phase for output in outputs["triton"]] == ["dense", "refresh", "reuse"]


@in_interpreter
def test_importance_rows_sum_to_one_and_match_their_definition():
    q, k = (torch.randn(1, 1, 70, 64, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    backend = resolve("triton", q.device, q.dtype, 64)
    config = config_for()
    options = {"iterations": 1, "seed": config.seed}
    queries, keys = (
        cluster.kmeans(backend, q, config.query_clusters, **options),
        cluster.cluster_keys(backend, k, q, config.key_clusters, config, **options),
    )
    blocks = cluster.arrange(backend, queries.labels, queries.clusters)
    for kind in ("pama", "query-centroid"):
        found = importance.estimate(backend, kind, q, k, blocks, queries, keys, scale=None)
        exact = ESTIMATORS[kind](q.double(), k.double(), queries.labels, queries.clusters, keys.labels, keys.clusters)
        # scores move by one rounding of a centroid, |q| |c| eps / sqrt(d), and weights by at most that share
        slack = torch.finfo(q.dtype).eps * q.double().norm(dim=-1).max() * keys.centroids.norm(dim=-1).max() / 8
        assert (found - exact).abs().max() <= 2 * slack * exact.max()
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


@in_interpreter
def test_what_has_no_kernel_is_refused_with_the_alternative():
    q, config = tokens(13, 4, 40, 64), config_for(backend="triton")
    plan = build_plan(q, q, config.replace(backend="reference"))
    nothing = Clustering(q[..., 0].int(), q[:, :, :1], q[..., :1, 0].int())
    backend = resolve("triton", q.device, q.dtype, 64)
    for kind in ("exact", "full-key"):
        with pytest.raises(ValueError, match=r"importance: .* use backend='reference'"):
            importance.estimate(backend, kind, q, q, plan.queries, nothing, nothing, scale=None)
    with pytest.raises(ValueError, match=r"v: .* use backend='reference'"):
        park_attention(q, q, q[..., :32], config, plan=plan)
    with pytest.raises(ValueError, match=r"scale: .* use backend='reference'"):
        park_attention(q, q, q, config, plan=plan, scale=-1.0)


@in_interpreter
def test_gradients_are_refused_by_the_function_and_dense_in_the_method():
    q, k, v = (tokens(seed, 4, 40, 64, h=1).requires_grad_() for seed in (1, 2, 3))
    config, site = config_for(backend="triton", dense_steps=0), CallSite(step=5, total_steps=10)
    with pytest.raises(ValueError, match=r"q, k, v: .* torch.no_grad\(\), or use backend='reference'"):
        park_attention(q, k, v, config)
    out, stats = Park(config)(q, k, v, site)
    assert (
        stats.phase == "dense"
        and "gradients" in stats.reason
        and torch.equal(out, dense_attention(q, k, v))
        and out.requires_grad
    )
    with torch.no_grad():
        assert Park(config)(q, k, v, site).stats.phase == "refresh"


@in_interpreter
def test_other_memory_layouts_give_the_same_or_are_refused():
    q, k, v = (tokens(seed, 4, 48, 64, KEY_VALID, h=1) for seed in (1, 2, 3))
    config, strided = config_for(backend="triton"), lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)
    plan = build_plan(q, k, config, key_valid=KEY_VALID)
    expect_same_plan(build_plan(q, k, config, key_valid=strided(KEY_VALID)), plan)
    sides = (Blocks(*map(strided, (side.labels, side.order, side.offsets))) for side in (plan.queries, plan.keys))
    same = replace(plan, **dict(zip(("queries", "keys"), sides, strict=True)), mask=strided(plan.mask))
    assert torch.equal(park_attention(q, k, v, config, plan=same), park_attention(q, k, v, config, plan=plan))
    for at, name in enumerate("qkv"):
        with pytest.raises(
            ValueError, match=rf"{name}: expected a last dimension of stride 1 .* call {name}.contiguous\(\)"
        ):
            park_attention(*(strided(x) if i == at else x for i, x in enumerate((q, k, v))), config, plan=plan)


# ---------------------------------------------------------------------------------------------- benchmarks behind the
# same seam


@outside
def test_a_gpu_benchmark_without_a_gpu_is_refused_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    from typer.testing import CliRunner

    from parklab.bench.commands import app

    for name in ("pama", "kmeans", "qrkc", "attend", "layer"):
        failure = CliRunner().invoke(app, [name]).exception
        assert isinstance(failure, ValueError) and "expected a CUDA GPU" in str(failure) and "\n" not in str(failure)


def test_a_gate_that_fails_or_gives_nan_stops_the_measurement():
    from parklab.bench.gates import expect_all_pass, verdict

    assert len(expect_all_pass(iter([verdict("equal", 0.5, 0.5)]))) == 1
    for error in (0.6, torch.tensor(torch.nan)):
        with pytest.raises(RuntimeError, match="gate 'worse'"):
            expect_all_pass(iter([verdict("fine", 0, 0), verdict("worse", error, 0.5)]))


@in_interpreter
def test_the_gpu_gates_hold_at_tiny_sizes():
    from parklab.bench import plans
    from parklab.bench.gates import expect_all_pass

    for gate, checks in ((plans.gate_pama, 4), (plans.gate_qrkc, 2)):
        assert len(expect_all_pass(gate(torch.device("cpu"), rehearse=True))) == checks
