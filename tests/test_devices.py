"""Methods and devices: on the Triton backend, interpreted, on the GPU of their tensors, without waiting for it, in how much of its memory."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from parkattn import Park, backend, park
from parkattn.backend import resolve_for
from parkattn.methods import make_method
from parkattn.ops import REFERENCE, Backend, attend, cluster
from parkattn.ops.cluster.definition import Clustering
from parkattn.ops.importance.definition import score_spread
from parkattn.ops.residual.definition import add_residual, factor
from parkattn.plan import arrange
from parkattn.planned import make_plan
from parkattn.segments import segment_mean
from parkattn.site import CallSite
from parklab import baselines
from parklab.baselines import radial, sparsepr, svg2, svg_ear, svoo, token_groups
from parklab.research import ResearchConfig
from strategies import clustered, normal

pytestmark = quiet_numpy
METHODS = {module.ENTRIES[0].name: module for module in (svg2, svoo, svg_ear, sparsepr)}
PLANNED = [entry.name for module in (park, baselines) for entry in module.ENTRIES]


@outside
def test_the_triton_backend_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__, at_least=5)


def found_nothing(x, clusters, **_):
    (b, h, n, d), count, zeros = x.shape, min(clusters, x.shape[2]), x.new_zeros
    return Clustering(
        zeros(b, h, n, dtype=torch.int32), zeros(b, h, count, d).float(), zeros(b, h, count, dtype=torch.int32)
    )


# stand for kernels that fake tensors cannot run; what planners do around them is theirs
SHAPES_ONLY = {
    "cluster": {
        "kmeans": found_nothing,
        "cluster_keys": lambda k, q, clusters, metric, **_: found_nothing(k, clusters),
        "first_centroids": lambda x, clusters, **_: found_nothing(x, clusters).centroids,
        "lloyd": lambda x, centroids, **_: found_nothing(x, centroids.shape[2]),
        "round_borders": lambda x, found, multiple: found,
        "arrange": arrange,
    },
    "importance": {
        "estimate": lambda kind, q, k, query_blocks, queries, keys, *, scale: q.new_zeros(
            *q.shape[:2], queries.clusters, keys.clusters
        ).float(),
        "score_spread": score_spread,
    },
    "residual": {"factor": factor, "add_residual": add_residual},
    "attend": {
        "AttentionKernel": lambda *_: SimpleNamespace(
            over_kept=lambda q, k, v, plan, **_: torch.empty_like(q),
            over_all=lambda q, k, v, **_: torch.empty_like(q),
            over_both=lambda q, k, v, plan, **_: (torch.empty_like(q), torch.empty_like(q)),
        )
    },
}


@pytest.fixture
def no_values(monkeypatch):
    """A GPU whose tensors have no values: .item(), nonzero, unique, masked_select and boolean indexing of one are
    errors.
    """
    monkeypatch.setattr(backend, "resolve", lambda *_: Backend("triton"))
    for name, kernels in SHAPES_ONLY.items():
        monkeypatch.setitem(sys.modules, f"parkattn.ops.{name}.kernels", SimpleNamespace(**kernels))
    # gathers as many keys as the device says
    monkeypatch.setattr(token_groups, "attend_gathered", lambda q, *_: torch.empty_like(q))
    monkeypatch.setattr(FakeTensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    radial.kept_blocks.cache_clear()
    with FakeTensorMode():
        yield
    radial.kept_blocks.cache_clear()


def fake_call(heads, grid, words):
    n = grid[0] * grid[1] * grid[2] + words
    q, k, v = (torch.empty(1, n, heads, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    valid = torch.empty(1, n, dtype=torch.bool) if words else None
    text = slice(n - words, n) if words else None
    return q, k, v, CallSite(step=30, total_steps=50, grid=grid, text=text, key_valid=valid, values=v)


@outside
@pytest.mark.parametrize("words", [0, 20])
@pytest.mark.parametrize("name", PLANNED)
def test_plans_and_their_reuse_ask_the_gpu_nothing(no_values, name, words):
    q, k, v, site = fake_call(2, (3, 8, 8), words)
    short = {"least_tokens": 1} if name == "mc-sparse" else {}
    every, seldom = (make_method(name, {"dense_layers": (), "refresh_interval": at, **short}) for at in (1, 50))
    first = "anchor" if name in ("mc-sparse", "chipmunk") else "refresh"
    for method, later in ((every, first), (seldom, "reuse")):
        phases = [method(q, k, v, dataclasses.replace(site, step=step)).stats.phase for step in (30, 31)]
        assert phases == [first, later]


class Memory(TorchDispatchMode):
    """Bytes of the tensors that exist at once, beyond those given."""

    def __init__(self, *given):
        super().__init__()
        self.known, self.now, self.most = {x.untyped_storage()._cdata for x in given}, 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def freed(self, key, size):
        self.known.discard(key)
        self.now -= size


@outside
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_for_wan_14b_at_720p_holds_less_than_3_gb_beside_the_inputs(no_values, name):
    """From 8 heads on, the most that a planner takes at once, each further head adds as much as the one before; from 2
    on where it goes head by head.
    """

    def most(heads):
        q, k, v, site = fake_call(heads, (21, 45, 80), 0)
        with Memory(q, k, v) as memory:
            make_plan(q, k, make_method(name).planner, site, None)
        return memory.most

    heads = 2 if name in ("mc-sparse", "chipmunk") else 8
    few, more = most(heads), most(heads + 1)
    assert few > 0 and few + (40 - heads) * max(0, more - few) < 3e9


def problem(batch, tokens, *, padded, text=0):
    q, k = (clustered(1, batch, 1, tokens, 64, draw=draw) for draw in (2, 3))
    q, k, v = (x.bfloat16() for x in (2 * q, k, normal(4, batch, 1, tokens, 64)))
    valid = torch.ones(batch, tokens, dtype=torch.bool)
    valid[-1, tokens - padded :] = False
    return q, k, v, CallSite(text=slice(0, text) if text else None, key_valid=valid, values=v)


@in_interpreter
def test_lloyd_is_the_definition():
    _, k, _, site = problem(2, 60, padded=30)
    chosen = resolve_for(k, "triton")
    assert chosen.name == "triton"
    start, expected = (cluster.first_centroids(who, k, 40, seed=3, valid=site.key_valid) for who in (chosen, REFERENCE))
    assert torch.equal(start.isnan(), expected.isnan()) and torch.equal(start.nan_to_num(), expected.nan_to_num())
    found, defined = (cluster.lloyd(who, k, start, iterations=2, valid=site.key_valid) for who in (chosen, REFERENCE))
    # tokens that lie as near to two centroids as bf16 tells them apart may change sides
    assert (found.labels != defined.labels).float().mean() < 0.02
    means, sizes = segment_mean(k, found.labels, 40)
    assert torch.equal(found.sizes, sizes) and not found.sizes[start[..., 0].isnan()].any()
    full = sizes > 0
    torch.testing.assert_close(found.centroids[full], means[full], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.centroids.isnan(), start.isnan())


@in_interpreter
@pytest.mark.parametrize("name", ["svoo", "svg-ear", "sparsepr"])
def test_a_method_on_the_triton_backend_computes_what_the_definitions_make_of_its_plan(name):
    q, k, v, site = problem(1, 70, padded=20, text=9)
    entry = METHODS[name].ENTRIES[0]
    clusters = {"query_clusters": 3, "key_clusters": 6, "kmeans_iterations": 2, "warm_iterations": 1}
    # a repair from three rows extrapolates from their rounding; it is the same code on every backend
    more = {"repair": False} if name == "sparsepr" else {}
    method = entry.make(entry.config(**clusters, **more, dense_steps=0, backend="triton"))
    first, (out, stats) = (method(q, k, v, dataclasses.replace(site, step=step)) for step in (0, 1))
    assert first.stats.phase == stats.phase == "refresh" and float(stats.density) < 1
    compensate = method.config.compensate
    defined = attend.over_kept(REFERENCE, q.double(), k.double(), v.double(), stats.plan, compensate=compensate)
    # bf16 has 8 bits: probabilities are rounded, then the output
    torch.testing.assert_close(out.double(), defined, rtol=0, atol=2 * 2**-8 * float(v.abs().max()))


# Kernels run on the GPU of their tensors, also where another GPU is the current one ---------------------


@in_interpreter
def test_every_launch_of_a_run_happens_on_the_gpu_of_its_tensors(monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    launch, current, launches = GridExecutor.__call__, [], []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    def watched(self, *args, **kwargs):
        given = {x.device for x in args if isinstance(x, torch.Tensor)}
        launches.append(self.fn.__name__)
        assert current and given == {current[-1]}, launches[-1]
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    q, k, v = (torch.randn(1, 1, 40, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3))
    config = ResearchConfig(
        query_clusters=2,
        key_clusters=3,
        kmeans_iterations=1,
        query_multiple=4,
        key_multiple=4,
        dense_steps=0,
        backend="triton",
    )
    for compensate in (False, True):
        park = Park(config.replace(compensate=compensate))
        assert [park(q, k, v, CallSite(step=step, total_steps=50)).stats.phase for step in range(2)] == [
            "refresh",
            "reuse",
        ]
    assert {"attend_kernel", "_gather_rows", "_place", "_assign", "_walk_chain"} <= set(launches)
