"""Other kinds of Hopper kernels without a GPU, as in `test_kernels_gluon`: attention in INT8, dense attention, PAMA."""

# ruff: noqa: F811 (a fixture is taken from another file)

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("triton")
from gluon_on_cpu import on_cpu
from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from test_kernels_attend import assert_close, offsets, problem, whole_numbers
from test_kernels_gluon import (
    FAULTS,
    ORDERS,
    SHARED,
    both_tiles,
    check_attention,
    counted,
    given_and_shown,
    module,  # noqa: F401 (a fixture)
    noticed,
)

pytestmark = quiet_numpy


@outside
def test_these_hopper_kernels_on_the_cpu():
    run_interpreted(__file__, at_least=43)


# rows of query blocks decide how many warpgroups there are: three from 140 on
INT8_CASES = [
    pytest.param(700, 500, 64, 2, 8, 0.5, torch.bfloat16, False, id="three warpgroups"),
    pytest.param(
        600, 400, 128, 2, 140, 0.3, torch.bfloat16, True, id="three warpgroups, three tiles of stand-ins, d128"
    ),
    pytest.param(260, 400, 64, 4, 9, 0.4, torch.bfloat16, True, id="two warpgroups, shared tiles"),
    pytest.param(500, 300, 128, 2, 9, 0.5, torch.float16, True, id="fp16"),
]
THREE = [*ORDERS, {"late": True, "slow": 4}]


@in_interpreter
@pytest.mark.parametrize(("n", "m", "d", "qb", "kb", "density", "dtype", "compensated"), INT8_CASES)
def test_int8_attention(module, n, m, d, qb, kb, density, dtype, compensated):
    check_attention(module, None, n, m, d, qb, kb, density, dtype, compensated, orders=THREE, int8=True)


INT8_FAULTS = {name: fault for name, fault in FAULTS.items() if not name.startswith("sums")} | {
    "the step of another head": ("gl.load(k_steps + head)", "gl.load(k_steps + (head + 1) % 2)"),
    "the steps of other rows": (
        "steps_of_rows(q_steps, head, row, n, S)",
        "steps_of_rows(q_steps, head, row + 1, n, S)",
    ),
}


@in_interpreter
@pytest.mark.parametrize("fault", INT8_FAULTS)
def test_a_broken_int8_kernel_is_noticed(module, fault):
    shape = (600, 700, 64, 2, 600, 0.4, torch.bfloat16, True)
    with noticed():
        check_attention(module, INT8_FAULTS[fault], *shape, orders=THREE, int8=True)


@in_interpreter
def test_int8_sums_read_before_they_are_written_are_noticed(module):
    """Of the faults of shared tiles the other one is none here: INT8 sums have a buffer beside the queries."""
    with noticed():
        check_attention(module, FAULTS["sums read before they are written"], *SHARED, int8=True)


@in_interpreter
@both_tiles
def test_a_query_that_is_not_finite_spoils_its_own_row_alone(module, n):
    """Its step is NaN (`test_what_is_not_finite_makes_steps_nan`)."""
    q, k, *others = problem(n, n, 600, 64, 2, 12, 0.6, torch.bfloat16)
    (rows, keys, given), _ = whole_numbers(q, k, {})
    clean = counted(module, rows, keys, *others, **given)[0]
    steps = given["steps"][0].clone()
    steps[1, 7] = torch.nan
    out = counted(module, rows, keys, *others, steps=(steps, given["steps"][1]))[0]
    spoilt = torch.zeros(2, n, dtype=torch.bool)
    spoilt[1, 7] = True
    assert out[spoilt].isnan().all() and out[~spoilt].isfinite().all()
    torch.testing.assert_close(out[~spoilt], clean[~spoilt], rtol=0.01, atol=0.01)  # rows beside it are computed again


def check_dense(module, change, n, m, d, dtype, int8, counts, size=1.0):
    """Two heads; size: of the queries of one of them, whose scores may leave the range of quick exponentials."""
    q, k, v = problem(n, n, m, d, 1, 1, 1.0, dtype)[:3]
    q[1] *= size
    (rows, keys, steps), shown = given_and_shown(q, k, {}, int8)
    ends = [torch.tensor([[0, n], [0, n]]).int(), torch.tensor([[0, count, m] for count in counts]).int()]
    mask = torch.tensor([[[True, False]]] * 2)
    kernels = module("attend.hopper_dense", change)
    plain, first = kernels.attend_dense_kernel, None
    for order in THREE:
        kernels.attend_dense_kernel = on_cpu(plain, seed=n, **order)
        poisoned = torch.full_like(q, torch.nan)
        found = kernels.attend_dense_hopper(
            rows, keys, v, torch.tensor(counts).int(), out=poisoned, with_lse=True, **steps
        )
        if first is None:
            first = found
            assert_close(*found, *shown[:2], v, *ends, mask, rtol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@in_interpreter
@pytest.mark.parametrize("size", [1.0, 200.0], ids=["", "steep"])
@pytest.mark.parametrize(
    ("n", "m", "d", "dtype", "int8", "counts"),
    [
        (300, 400, 64, torch.bfloat16, False, (400, 333)),
        (200, 130, 128, torch.float16, False, (130, 1)),
        (450, 300, 64, torch.bfloat16, True, (300, 65)),
        (70, 200, 128, torch.bfloat16, True, (0, 200)),
        (150, 300, 64, torch.float16, True, (128, 300)),
    ],
)
def test_dense_attention(module, n, m, d, dtype, int8, counts, size):
    check_dense(module, None, n, m, d, dtype, int8, counts, size)


DENSE_FAULTS = {
    name: FAULTS[name]
    for name in ("a wait for keys", "a wait for values", "a slot never given back", "a product not waited for")
} | {
    "padding that counts": (
        '    else:\n        s = gl.where((gl.arange(0, KEYS, layout=gl.SliceLayout(0, S)) < edge)[None, :], s, -float("inf"))\n',
        "",
    ),
    "queries given back before the last product": (
        "        where = (begin, end, n >> 31)\n",
        "        where = (begin, end, n >> 31)\n        mbarrier.arrive(q_empty.index(W), count=1)\n",
    ),
    "lost rows left as they are": ("        launch(0, True)\n", "        pass\n"),
    "another tile computed again": (
        "        return gl.load(lost + 1 + i)\n",
        "        return gl.load(lost + 1 + i) * 0\n",
    ),
}


@in_interpreter
@pytest.mark.parametrize("fault", DENSE_FAULTS)
def test_a_broken_dense_kernel_is_noticed(module, fault):
    with noticed():
        check_dense(module, DENSE_FAULTS[fault], 700, 900, 64, torch.bfloat16, True, (900, 333), size=200.0)


# PAMA ---------------------------------------------------------------------------------------------------


def check_pama(module, change, key_blocks: int, dtype: torch.dtype) -> None:
    from parkattn.ops.importance import triton as importance
    from parklab.bench.plans import pama_torch

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
def test_a_broken_pama_kernel_is_noticed(module, fault):
    with noticed():
        check_pama(module, PAMA_FAULTS[fault], 600, torch.bfloat16)
