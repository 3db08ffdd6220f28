"""The clustering baselines beyond the definitions: on the Triton backend, interpreted, and without waiting for a GPU."""

import dataclasses
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from interpreted import run_interpreted
from parkattn.backend import ReferenceBackend, resolve_for
from parkattn.baselines import sparsepr, svg2, svg_ear, svoo
from parkattn.cluster import Clustering, lloyd
from parkattn.segments import segment_mean
from parkattn.site import CallSite
from strategies import clustered, normal

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [  # the interpreter's numpy: rows without keys give -inf - 0, loop bounds are arrays of one element
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own pytest")
outside = pytest.mark.skipif(INTERPRETED, reason="about a process without the interpreter")
METHODS = {module.ENTRIES[0].name: module for module in (svg2, svoo, svg_ear, sparsepr)}
PLANNERS = {"svg2": svg2.Svg2Planner, "svoo": svoo.SvooPlanner, "svg-ear": svg_ear.SvgEarPlanner, "sparsepr": sparsepr.SparsePrPlanner}


@outside
def test_the_triton_backend_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__, at_least=4)


class ShapesOnly(ReferenceBackend):
    """Stands for kernels that fake tensors cannot run; what planners do around them is theirs."""

    def kmeans(self, x, clusters, **_):
        b, h, n, d = x.shape
        zeros = x.new_zeros
        return Clustering(zeros(b, h, n, dtype=torch.int32), zeros(b, h, clusters, d).float(), zeros(b, h, clusters, dtype=torch.int32))

    def first_centroids(self, x, clusters, **_):
        return self.kmeans(x, clusters).centroids

    def lloyd(self, x, centroids, **_):
        return self.kmeans(x, centroids.shape[2])


@outside
@pytest.mark.parametrize("name", METHODS)
def test_planning_asks_the_gpu_nothing(monkeypatch, name):
    """A fake tensor has no values: .item(), nonzero and boolean indexing of one are errors."""
    module, config = METHODS[name], METHODS[name].ENTRIES[0].config(query_clusters=6, key_clusters=11)
    monkeypatch.setattr(module, "resolve_for", lambda q, backend: ShapesOnly("fake"))
    monkeypatch.setattr(FakeTensor, "is_cuda", True)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 300, 64, dtype=torch.bfloat16) for _ in range(3))
        planner, site = PLANNERS[name](config), CallSite(step=10, total_steps=50, text=slice(290, 300), values=v)
        first = planner.plan(q, k, site, None)
        later = planner.plan(q, k, dataclasses.replace(site, step=11), first)
        assert later.mask.shape == (1, 2, 7, 12)
        if name == "sparsepr":
            assert sparsepr.ProbeRepair(config).repair(q, k, v, later, q.clone(), site).shape == q.shape


def problem(batch, tokens, *, padded, text=0):
    q, k = (clustered(1, batch, 1, tokens, 64, draw=draw) for draw in (2, 3))
    q, k, v = (x.bfloat16() for x in (2 * q, k, normal(4, batch, 1, tokens, 64)))
    valid = torch.ones(batch, tokens, dtype=torch.bool)
    valid[-1, tokens - padded :] = False
    return q, k, v, CallSite(text=slice(0, text) if text else None, key_valid=valid, values=v)


@in_interpreter
def test_lloyd_is_the_definition():
    _, k, _, site = problem(2, 60, padded=30)
    verbs = resolve_for(k, "triton")
    assert verbs.name == "triton"
    start = verbs.first_centroids(k, 40, seed=3, valid=site.key_valid)
    expected = ReferenceBackend("").first_centroids(k, 40, seed=3, valid=site.key_valid)
    assert torch.equal(start.isnan(), expected.isnan()) and torch.equal(start.nan_to_num(), expected.nan_to_num())
    found, defined = (step(k, start, iterations=2, valid=site.key_valid) for step in (verbs.lloyd, lloyd))
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
    defined = ReferenceBackend("").attend(q.double(), k.double(), v.double(), stats.plan, scale=None, compensate=compensate)
    # bf16 has 8 bits: probabilities are rounded, then the output
    torch.testing.assert_close(out.double(), defined, rtol=0, atol=2 * 2**-8 * float(v.abs().max()))
