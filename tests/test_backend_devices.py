"""Kernels run on the GPU of their tensors, also where another GPU is the current one. Needs no GPU: the interpreter's
launches are watched.

The interpreter must be chosen before triton is imported, so the watching runs in a pytest of its own.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from interpreted import run_interpreted
from parkattn import CallSite, Park
from parklab.research import ResearchConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.skipif(INTERPRETED, reason="about a process without the interpreter")
def test_launches_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__, at_least=1)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own pytest")
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
