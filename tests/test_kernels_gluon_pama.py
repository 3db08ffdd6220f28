"""PAMA's Hopper kernel without a GPU: as in `test_kernels_gluon`."""

# ruff: noqa: F811 (a fixture is taken from another file)

from __future__ import annotations

import sys

import pytest
import torch

import gluon_on_cpu

pytest.importorskip("triton")
from gluon_on_cpu import on_cpu
from interpreted import run_interpreted
from test_kernels_attend import in_interpreter, offsets, on_compiler, pytestmark  # noqa: F401 (pytest reads it)
from test_kernels_gluon import ORDERS, module  # noqa: F401 (a fixture)


@on_compiler
def test_the_hopper_kernel_of_pama_on_the_cpu():
    run_interpreted(__file__, at_least=7)


def check_pama(module, change, key_blocks: int, dtype: torch.dtype) -> None:
    from parkattn.ops.importance import triton as importance
    from parklab.bench.pama import pama_torch

    generator = torch.Generator().manual_seed(key_blocks)
    q, centroids = (torch.randn(2, count, 128, generator=generator).to(dtype) for count in (330, key_blocks))
    ends, sizes = (
        offsets(2, 3, 330, generator),
        torch.randint(0, 9, (2, key_blocks), generator=generator, dtype=torch.int32),
    )
    exact, same = (pama_torch(q, ends, centroids, sizes, dtype=kind) for kind in (torch.float64, dtype))
    for order in ORDERS:
        kernels = module("importance.hopper", change)
        kernels.full_key_hopper = on_cpu(kernels.full_key_hopper, seed=key_blocks, **order)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "parkattn.ops.importance.hopper", kernels)
            poisoned = torch.full(exact.shape, torch.nan)
            found = importance.pama_full_key(q, ends, centroids, sizes, out=poisoned, tile={"GLUON": True, "stages": 2})
        if order is ORDERS[0]:
            first, error = found, (found.double() - exact).abs().max()
            assert error <= 2 * (same.double() - exact).abs().max() + torch.finfo(torch.float32).eps
        assert torch.equal(first, found)


@in_interpreter
@pytest.mark.parametrize(("key_blocks", "dtype"), [(70, torch.bfloat16), (300, torch.float16), (600, torch.bfloat16)])
def test_pama(module, key_blocks, dtype):
    """With one to three chunks of 128 key blocks per warpgroup; the last block of queries spans several tiles."""
    check_pama(module, None, key_blocks, dtype)


PAMA_FAULTS = {
    "a wait for centroids": ("            mbarrier.wait(c_full.index(g % STAGES), (g // STAGES) & 1)\n", ""),
    "the barrier": ('        barrier_sync("8")\n', ""),
    "a wait for queries": ("        mbarrier.wait(q_full, t & 1)\n", ""),
    "centroids given back before the product": (
        "                s = warpgroup_mma_wait(0, deps=(s, ))\n            mbarrier.arrive",
        "                mbarrier.arrive(c_empty.index(g % STAGES), count=1)\n                s = warpgroup_mma_wait(0, deps=(s, ))\n            if i == 0:\n                mbarrier.arrive",
    ),
}


@in_interpreter
@pytest.mark.parametrize("fault", PAMA_FAULTS)
def test_a_broken_pama_kernel_is_noticed(module, fault, monkeypatch):
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE_S", 1)
    with pytest.raises((AssertionError, TimeoutError)):
        check_pama(module, PAMA_FAULTS[fault], 600, torch.bfloat16)
