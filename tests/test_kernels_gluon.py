"""The Hopper kernels without a GPU: their Python against float64, with copies, products and warpgroups in any order
that barriers leave open.

Their work lists are made by Triton kernels in the interpreter, which must be chosen before triton is imported: a pytest
of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import pathlib
import sys
import types
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import gluon_on_cpu
from gluon_on_cpu import Descriptor, on_cpu
from interpreted import in_interpreter, outside, run_interpreted
from strategies import reproducible
from test_kernels_attend import assert_close, problem, stand_ins_of, whole_numbers


@outside
def test_the_hopper_kernels_on_the_cpu():
    run_interpreted(__file__, at_least=37)


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A module of kernels, with what a GPU would have to be there for; `change`: a text of it and what stands there
    instead
    """

    def copy_of(name: str, called: str, change: tuple[str, str] | None):
        source = pathlib.Path(importlib.util.find_spec(f"parkattn.ops.{name}").origin).read_text()
        if change is not None:
            if source.count(change[0]) != 1:
                raise LookupError(f"{change[0]!r} stands {source.count(change[0])} times in {name}")
            source = source.replace(*change)
        copy = tmp_path / f"{name}.py"
        copy.write_text(source)
        spec = importlib.util.spec_from_file_location(f"parkattn.ops.{called}", copy)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    def load(name: str, change: tuple[str, str] | None = None):
        step = "attend.hopper_step"  # what the attention kernels share is changed for the one that is loaded
        if (
            change is not None
            and change[0] in pathlib.Path(importlib.util.find_spec(f"parkattn.ops.{step}").origin).read_text()
        ):
            copy_of(step, step, change)
            change = None
        module = copy_of(name, f"{name}_here", change)
        monkeypatch.setattr(module, "TensorDescriptor", Descriptor)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=2)
        )
        return module

    return load


# when products read, and who falls behind: nobody, a warpgroup, the warp that copies, the copies
ORDERS = [
    {"late": False},
    {"late": True, "slow": 0},
    {"late": False, "slow": 1},
    {"late": True, "slow": 2},
    {"late": False, "slow": 3},
]


# (tokens of queries, of keys, head dim, blocks of queries, of keys, density, dtype, stand-ins); blocks are uneven, some
# are empty
CASES = [
    pytest.param(300, 700, 64, 4, 9, 0.5, torch.bfloat16, False, id="plain"),
    pytest.param(150, 400, 128, 3, 6, 0.6, torch.float16, False, id="d128"),
    pytest.param(40, 300, 64, 3, 12, 0.4, torch.bfloat16, False, id="tiles of at most 64 rows"),
    pytest.param(200, 60, 64, 3, 5, 0.5, torch.bfloat16, False, id="less than a tile of keys"),
    pytest.param(260, 500, 64, 4, 8, 0.3, torch.float16, True, id="one tile of stand-ins"),
    pytest.param(260, 900, 64, 4, 300, 0.3, torch.float16, True, id="three tiles of stand-ins"),
    pytest.param(200, 900, 128, 3, 513, 0.1, torch.bfloat16, True, id="five tiles of stand-ins, d128"),
    pytest.param(50, 600, 64, 2, 400, 0.05, torch.float16, True, id="stand-ins for tiles of at most 64 rows"),
]


@in_interpreter
@pytest.mark.parametrize(("n", "m", "d", "qb", "kb", "density", "dtype", "compensated"), CASES)
def test_attention(module, n, m, d, qb, kb, density, dtype, compensated):
    check_attention(module, None, n, m, d, qb, kb, density, dtype, compensated)


@in_interpreter
@settings(reproducible, max_examples=8)
@given(
    n=st.integers(1, 200), m=st.integers(1, 400), d=st.sampled_from([64, 128]), qb=st.integers(1, 6), kb=st.integers(1, 150),
    density=st.floats(0, 1), half=st.booleans(), compensated=st.booleans(),
)  # fmt: skip
def test_ragged_attention(module, n, m, d, qb, kb, density, half, compensated):
    dtype = torch.float16 if half else torch.bfloat16
    check_attention(module, None, n, m, d, qb, kb, density, dtype, compensated, orders=ORDERS[1:3])


@in_interpreter
def test_rows_go_to_their_tokens(module):
    q, k, v, *blocks = problem(3, 200, 300, 64, 4, 9, 0.5, torch.bfloat16, bh=4)
    kernels = module("attend.hopper")
    kernels.attend_hopper_kernel = on_cpu(kernels.attend_hopper_kernel)
    expected, expected_lse = kernels.attend_hopper(q, k, v, *blocks, with_lse=True)
    order = torch.stack([torch.randperm(200) for _ in range(4)])
    memory = torch.full((2, 200, 2, 64), torch.nan, dtype=q.dtype)  # [b n h d], as models have it
    out, lse = kernels.attend_hopper(q, k, v, *blocks, out_order=order.int(), out=memory.transpose(1, 2), with_lse=True)
    by_block = out.reshape(4, 200, 64).gather(1, order[..., None].expand(-1, -1, 64))
    assert torch.equal(by_block, expected) and torch.equal(lse.gather(1, order), expected_lse)


@in_interpreter
def test_heads_in_groups_have_the_bits_of_all_at_once(module, monkeypatch):
    from parkattn.ops.attend import worklist

    q, k, v, *blocks = problem(3, 100, 300, 64, 4, 9, 0.5, torch.bfloat16, bh=4)
    stand_ins = dict(zip(("centroids", "mean_values"), torch.randn(2, 4, 9, 64).bfloat16(), strict=True))
    stand_ins |= {"compensate": torch.ones(4, 9, dtype=torch.bool), "pair_bias": torch.randn(4, 4, 9)}
    kernels = module("attend.hopper")
    kernels.attend_hopper_kernel = on_cpu(kernels.attend_hopper_kernel)

    def run():
        memory = torch.full((2, 100, 2, 64), torch.nan, dtype=q.dtype)
        return kernels.attend_hopper(q, k, v, *blocks, out=memory.transpose(1, 2), with_lse=True, **stand_ins)

    out, lse = run()
    assert_close(out.reshape(4, 100, 64), lse, q, k, v, *blocks, **stand_ins)
    monkeypatch.setattr(worklist, "SCRATCH_LIMIT", 1)
    assert all(torch.equal(a, b) for a, b in zip(run(), (out, lse), strict=True))


def check_attention(module, change, n, m, d, qb, kb, density, dtype, compensated, orders=ORDERS, int8=False):
    q, k, v, *blocks = problem(n + m, n, m, d, qb, kb, density, dtype)
    given, shown = given_and_shown(q, k, stand_ins_of(n, kb, d, dtype) if compensated else {}, int8)
    kernels, kept = module("attend.hopper", change), []
    plain, build = kernels.attend_hopper_kernel, kernels.build_worklist

    def build_once(*given, **sizes):
        """The interpreter's lists do not depend on the order of copies and products; the kernel writes into its own
        copy.
        """
        kept.append(kept[0] if kept else build(*given, **sizes))
        return type(kept[0])(*(None if part is None else part.clone() for part in kept[0]))

    kernels.build_worklist = build_once
    for order in orders:
        poisoned = torch.full_like(q, torch.nan)
        kernels.attend_hopper_kernel = on_cpu(plain, seed=n, **order)
        found = kernels.attend_hopper(*given[:2], v, *blocks, out=poisoned, with_lse=True, **given[2])
        if order is orders[0]:
            out, lse = found
            assert_close(out, lse, *shown[:2], v, *blocks, **shown[2])
        assert torch.equal(out, found[0]) and torch.equal(lse, found[1])


def given_and_shown(q, k, stand_ins, int8: bool):
    """What the kernels are given, and what the definition is."""
    return whole_numbers(q, k, stand_ins) if int8 else ((q, k, stand_ins), (q, k, stand_ins))


@contextlib.contextmanager
def noticed():
    """A fault shows as a wrong number, or as a wait that nobody ends."""
    with mock.patch.object(gluon_on_cpu, "PATIENCE_S", 1), pytest.raises((AssertionError, TimeoutError)):
        yield


def steep(module, size: float, n: int, int8: bool, change=None):
    """Attention with the queries of one head made `size` times larger -> output, log-sum-exp, how many tiles were
    computed again, and the problem as the definition takes it.
    """
    q, k, *others = problem(n, n, 600, 64, 2, 12, 0.6, torch.bfloat16)
    q[1] *= size
    (rows, keys, steps), shown = given_and_shown(q, k, {}, int8)
    return *counted(module, rows, keys, *others, change=change, **steps), (*shown[:2], *others)


def counted(module, *problem_of, change=None, **more):
    """-> output, log-sum-exp, and how many tiles were computed again"""
    kernels, lists = module("attend.hopper", change), []
    kernels.attend_hopper_kernel = on_cpu(kernels.attend_hopper_kernel, seed=1, late=True)
    build = kernels.build_worklist
    kernels.build_worklist = lambda *blocks, **sizes: lists.append(build(*blocks, **sizes)) or lists[0]
    poisoned = torch.full_like(problem_of[0], torch.nan, dtype=problem_of[2].dtype)
    out, lse = kernels.attend_hopper(*problem_of, out=poisoned, with_lse=True, **more)
    return out, lse, int(lists[0].count[2])


both_kinds = pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
# in INT8 three warpgroups have 400 rows
both_tiles = pytest.mark.parametrize("n", [400, 50], ids=["whole tiles", "tiles of at most 64 rows"])


@in_interpreter
@both_kinds
@both_tiles
def test_rows_whose_scores_leave_the_range_are_computed_again(module, n, int8):
    empty_tiles = steep(module, 1, n, int8)[2]  # of the block that keeps nothing
    out, lse, again, given = steep(module, 200, n, int8)
    assert again > empty_tiles
    assert_close(out, lse, *given, rtol=1e-6)


@in_interpreter
def test_scores_that_differ_by_dozens_stay_in_the_range(module):
    empty_tiles = steep(module, 1, 400, False)[2]
    out, lse, again, given = steep(module, 10, 400, False)
    assert again == empty_tiles
    assert_close(out, lse, *given, rtol=1e-6)
    exact_scores = given[0].double() @ given[1].double().mT / 8
    assert (exact_scores.amax(-1) - exact_scores.amin(-1)).max() > 100


def by_levels(module, levels: torch.Tensor, rows: int, value: float = 1.0):
    """levels [heads tiles]: the scores of every tile of 128 keys, as powers of two; its values are 1, 2, ... times
    `value`

    -> (out / value, lse in powers of two), exact ones, how many tiles were computed again.
    """
    heads, tiles = levels.shape
    q, k, v = torch.zeros(heads, rows, 64), torch.zeros(heads, tiles * 128, 64), torch.zeros(heads, tiles * 128, 64)
    q[..., 0], k[..., 0], v[:] = (
        1,
        levels.repeat_interleave(128, 1),
        value * torch.arange(1.0, tiles + 1).repeat_interleave(128)[:, None],
    )
    ends = [torch.tensor([0, n]).repeat(heads, 1).int() for n in (rows, tiles * 128)]
    given = [x.to(torch.bfloat16) for x in (q, k, v)]
    (out, lse), again = listed(module, *given, *ends, torch.ones(heads, 1, 1, dtype=torch.bool), scale=math.log(2))
    return (out / value, lse), exactly(levels), again


def exactly(levels: torch.Tensor):
    """levels [heads tiles] -> what `by_levels` should find"""
    weights = torch.softmax(levels.double() * math.log(2), 1)
    return weights @ torch.arange(1.0, levels.shape[1] + 1).double(), levels.double().exp2().sum(1).log2() + 7


def listed(module, *problem_of, **more):
    """-> (out, lse in powers of two) of the first row of every head, all rows being alike, and how many tiles were
    computed again
    """
    out, lse, again = counted(module, *problem_of, **more)
    assert torch.equal(out, out[:, :1, :1].expand_as(out)) and torch.equal(lse, lse[:, :1].expand_as(lse))
    return (out[:, 0, 0].double(), lse[:, 0].double() / math.log(2)), again


@in_interpreter
@pytest.mark.parametrize("rows", [10, 70], ids=["one tile for both warpgroups", "a tile of 128 rows"])
def test_tiles_whose_scores_lie_far_apart(module, rows):
    """Also where the references of two warpgroups do: what is large must not be multiplied by a factor that was flushed
    to zero.
    """
    known = torch.tensor(
        [
            [0, -150, 0, 20],
            [0, -150, 0, 30],
            [-150, 0, 30, 0],
            [0, -80, 0, 100],
            [0, 127, 0, 0],
            [0, -128, 0, -8],
            [-120, 0, 0, 0],
        ]
    )
    steps = torch.tensor([-150, -100, -60, -20, 0, 20, 50, 64, 100, 150])
    drawn = steps[torch.randint(10, (40, 4), generator=torch.Generator().manual_seed(rows))]
    # with values so large that sums overflow, before they are joined or at any rate
    large = torch.tensor([[0, 0, 0, 170], [0, 0, 170, 0], [0, 0, 150, 150]])
    for levels, value in ((torch.cat([known, drawn]), 1.0), (large, 2.0**40), (large, 2.0**80), (large, 2.0**-30)):
        (out, lse), (exact, exact_lse), _ = by_levels(module, levels, rows, value)
        assert torch.allclose(out, exact, rtol=2**-6)
        assert torch.allclose(lse, exact_lse, atol=1e-4)


@in_interpreter
def test_which_rows_are_computed_again(module):
    def again(*levels):
        return by_levels(module, torch.tensor([levels]), 100)[2]

    assert again(0, 145, -100, 0) == again(40, 180, 0, 0) == again(0, -200, -200, -200) == 0
    assert again(0, 170, 0, 0) == again(0, 0, 0, 250) == 2  # two warpgroups have 100 rows


@in_interpreter
@pytest.mark.parametrize("rows", [10, 70])
def test_rows_that_keep_nothing_and_have_stand_ins(module, rows):
    """Their first tile is masked, so their reference is 0, whatever the scores of stand-ins: also those that are
    flushed to zero.
    """
    alike = torch.tensor([-200, -140, -100, -60, 0, 50, 66, 100, 150])[:, None].expand(-1, 4)
    # sums of the same size relative to references 110 and 130 apart; sums of which a fifth was flushed to zero
    apart = [
        [-190, -80, -80, -200],
        [-190, -60, -60, -60],
        [-250, -125, -250, -127],
        [-140, -200, -140, -140],
        [150, 0, 150, 0],
        [0, 100, 0, 0],
    ]
    levels = torch.cat([alike, torch.tensor(apart)])
    heads = len(levels)
    q, k, c, u = (torch.zeros(heads, count, 64) for count in (rows, 512, 512, 512))
    q[..., 0], c[..., 0], u[:] = (
        1,
        levels.repeat_interleave(128, 1),
        torch.arange(1.0, 5).repeat_interleave(128)[:, None],
    )
    blocks = (
        torch.tensor([0, rows]).repeat(heads, 1).int(),
        torch.arange(513).repeat(heads, 1).int(),
        torch.zeros(heads, 1, 512, dtype=torch.bool),
    )
    q, k, c, u = (x.to(torch.bfloat16) for x in (q, k, c, u))
    flags = torch.ones(heads, 512, dtype=torch.bool)
    (out, lse), _ = listed(module, q, k, k, *blocks, scale=math.log(2), compensate=flags, centroids=c, mean_values=u)
    exact, exact_lse = exactly(levels)
    assert torch.allclose(out, exact, rtol=2**-7)
    assert torch.allclose(lse, exact_lse, atol=1e-4)


LOST = {
    "lost rows left as they are": (
        "        launch(lost_tiles, work.count[LOST.value :], tile.for_lost_rows(), quick=0, share=True)\n",
        "        pass\n",
    ),
    "the rows of the other warpgroup": ("        gl.store(tile + TILE_ROW, row)\n", ""),
    "more rows than were lost": ("        gl.store(tile + TILE_ROWS, rows)\n", ""),
}


@in_interpreter
@pytest.mark.parametrize(
    ("fault", "n", "int8"),
    [*((fault, 400, False) for fault in LOST), *(("lost rows left as they are", n, True) for n in (400, 50))],
)
def test_a_broken_second_pass_is_noticed(module, fault, n, int8):
    with pytest.raises(AssertionError):
        out, lse, _, given = steep(module, 200, n, int8, LOST[fault])
        assert_close(out, lse, *given)


SHARED = (260, 900, 64, 4, 300, 0.3, torch.float16, True)  # both kinds of query tiles, three tiles of stand-ins
BIAS = """    if BIASED:  # noqa: SIM102 (the outer one is decided at compile time)
        if at >= biased:
            s = add_bias(s, bias_ring.index(slot), factor, unit, KEYS, INT8, S)
"""
FAULTS = {
    "a wait for keys": ("    mbarrier.wait(k_full.index(slot), (at // STAGES) & 1)\n", ""),
    "a wait for values": ("    mbarrier.wait(v_full.index(before), (earlier // STAGES) & 1)\n", ""),
    "values given back before the product": (
        "    acc = warpgroup_mma_wait(0, deps=(acc,))\n    mbarrier.arrive(v_empty.index(before), count=1)\n    if not QUICK",
        "    mbarrier.arrive(v_empty.index(before), count=1)\n    acc = warpgroup_mma_wait(0, deps=(acc,))\n    if not QUICK",
    ),
    "a slot never given back": ("    mbarrier.arrive(k_empty.index(slot), count=1)\n", ""),
    "sums read before they are written": (
        "                    barrier_sync(WRITTEN)\n",
        "                    barrier_arrive(WRITTEN)\n",
    ),
    "sums written over queries in use": (
        "                    barrier_sync(FREE)\n",
        "                    barrier_arrive(FREE)\n",
    ),
    "keys given back before their bias is read": (
        BIAS + "    mbarrier.arrive(k_empty.index(slot), count=1)\n",
        "    mbarrier.arrive(k_empty.index(slot), count=1)\n" + BIAS,
    ),
    "a bias left out": (BIAS, ""),
    "a bias one tile late": (BIAS, BIAS.replace("at >= biased", "at > biased")),
    "the bias of another tile": (BIAS, BIAS.replace("index(slot)", "index((at + 1) % STAGES)")),
    "a product not waited for": (
        "    s = warpgroup_mma_wait(1, deps=(s,))\n",
        "    s = warpgroup_mma_wait(2, deps=(s,))\n",
    ),
}


@in_interpreter
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_attention_kernel_is_noticed(module, fault):
    with noticed():
        check_attention(module, FAULTS[fault], *SHARED)
