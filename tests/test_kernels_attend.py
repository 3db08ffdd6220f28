"""Attention kernels without a GPU: the Triton kernel under the interpreter against float64, and every kernel compiled ahead of time.

The interpreter must be chosen before triton is imported, so those tests run in a pytest of their own.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import subprocess
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from interpreted import run_interpreted
from machine_code import barriers, before_arrivals, given_back_unread, key_loops

pytestmark = [  # the interpreter's numpy: rows without keys give -inf - 0, loop bounds are arrays of one element
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own pytest")
on_compiler = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
one_by_one = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None, phases=[Phase.generate])


@on_compiler
def test_the_kernel_under_the_interpreter():
    run_interpreted(__file__, at_least=7)


# ---------------------------------------------------------------------------------------------- ragged problems


def offsets(bh: int, blocks: int, tokens: int, generator: torch.Generator, empty: float = 0.2) -> torch.Tensor:
    """Uneven blocks, some empty -> int32 [bh blocks+1]"""
    weight = torch.rand(bh, blocks, generator=generator, dtype=torch.float64) ** 3 + 1e-6
    weight[torch.rand(bh, blocks, generator=generator) < empty] = 0
    weight[:, 0] += 1e-9
    ends = (weight.cumsum(1) / weight.sum(1, keepdim=True) * tokens).round().int()
    ends[:, -1] = tokens
    return torch.nn.functional.pad(ends, (1, 0))


def labels_of(block_offsets: torch.Tensor) -> torch.Tensor:
    blocks = torch.arange(block_offsets.shape[1] - 1)
    return torch.stack([blocks.repeat_interleave(row.diff()) for row in block_offsets])


def pair_mask(query_offsets, key_offsets, mask):
    """bool [bh n m]: the token pairs that are kept."""
    rows = torch.take_along_dim(mask, labels_of(query_offsets)[:, :, None], dim=1)
    return torch.take_along_dim(rows, labels_of(key_offsets)[:, None, :], dim=2)


def problem(seed: int, n: int, m: int, d: int, qb: int, kb: int, density: float, dtype: torch.dtype, bh: int = 2):
    generator = torch.Generator().manual_seed(seed)
    query_offsets, key_offsets = offsets(bh, qb, n, generator), offsets(bh, kb, m, generator)
    mask = torch.rand(bh, qb, kb, generator=generator) < density
    mask[0, -1] = False  # a query block that keeps nothing
    q, k, v = (torch.randn(bh, t, d, generator=generator).to(dtype) for t in (n, m, m))
    return 2 * q, k, v, query_offsets, key_offsets, mask


def definition(
    q, k, v, query_offsets, key_offsets, mask, dtype, compensate=None, centroids=None, mean_values=None, pair_bias=None
):  # fmt: skip
    """softmax over the kept keys, and over the stand-ins of skipped flagged blocks, in `dtype` -> out, lse (float64)"""
    scale = q.shape[-1] ** -0.5
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scores = (q @ k.transpose(1, 2)).double() * scale
    scores = scores.masked_fill(~pair_mask(query_offsets, key_offsets, mask), -torch.inf)
    if compensate is not None:
        sizes = key_offsets.diff(dim=1)
        enters = (compensate & (sizes > 0))[:, None, :] & ~mask
        enters = torch.take_along_dim(enters, labels_of(query_offsets)[:, :, None], dim=1)
        bias = sizes.double().log()[:, None, :]
        if pair_bias is not None:
            bias = torch.take_along_dim(pair_bias.double(), labels_of(query_offsets)[:, :, None], dim=1)
        stand_in = (q @ centroids.to(dtype).transpose(1, 2)).double() * scale + bias
        scores = torch.cat([scores, stand_in.masked_fill(~enters, -torch.inf)], 2)
        v = torch.cat([v, mean_values.to(dtype)], 1)
    weights = torch.softmax(scores, -1).nan_to_num(0)  # a row without keys
    return (weights.to(dtype) @ v).double(), torch.logsumexp(scores, -1)


def assert_close(out, q, k, v, query_offsets, key_offsets, mask, **stand_ins):
    """Error at most twice that of the same-dtype PyTorch computation plus one rounding unit."""
    exact, lse = definition(q, k, v, query_offsets, key_offsets, mask, torch.float64, **stand_ins)
    same, _ = definition(q, k, v, query_offsets, key_offsets, mask, q.dtype, **stand_ins)
    unit = torch.finfo(q.dtype).eps * exact.abs().max()
    assert not out.isnan().any()
    assert (out.double() - exact).abs().max() <= 2 * (same - exact).abs().max() + unit
    return lse


@in_interpreter
@settings(one_by_one, max_examples=8)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 130), m=st.integers(1, 300), d=st.sampled_from([64, 64, 128, 256]), qb=st.integers(1, 6),
    kb=st.integers(1, 20), density=st.floats(0, 1), half=st.booleans(), compensated=st.booleans(),
)  # fmt: skip
def test_ragged_attention(seed, n, m, d, qb, kb, density, half, compensated):
    from parkattn.ops.attend.tiles import TritonTile
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(seed, n, m, d, qb, kb, density, torch.float16 if half else torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    stand_ins = {}
    if compensated:
        centroids, mean_values = (torch.randn(2, kb, d, generator=generator).to(q.dtype) for _ in range(2))
        stand_ins = {"compensate": torch.rand(2, kb, generator=generator) < 0.7, "centroids": centroids, "mean_values": mean_values}
    runs = []
    for _ in range(2):
        poisoned = torch.full_like(q, torch.nan)
        runs.append(attend_ragged(q, k, v, *blocks, out=poisoned, with_lse=True, tile=TritonTile(64, 64, 4, 2), **stand_ins))
    (out, lse), again = runs
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    expected = assert_close(out, q, k, v, *blocks, **stand_ins)
    assert torch.equal(lse.isinf(), expected.isinf())
    assert torch.allclose(lse.double(), expected, atol=1e-4)
    assert (out[expected.isinf()] == 0).all()


@in_interpreter
def test_token_order_is_folded_into_loads_and_stores():
    from parkattn.ops.attend.tiles import TritonTile
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(3, 90, 150, 64, 4, 9, 0.5, torch.bfloat16, bh=4)
    tile = TritonTile(32, 32, 4, 2)
    expected, expected_lse = attend_ragged(q, k, v, *blocks, with_lse=True, tile=tile)
    query_order = torch.stack([torch.randperm(90) for _ in range(4)])

    def tokens(x, order):  # [bh t d] in block order -> a [b h t d] view of [b t h d] memory in token order
        unsorted = torch.empty_like(x).scatter_(1, order[..., None].expand_as(x), x)
        return unsorted.reshape(2, 2, *x.shape[1:]).transpose(1, 2).contiguous().transpose(1, 2)

    k, v = (x.reshape(2, 2, *x.shape[1:]) for x in (k, v))
    out, lse = attend_ragged(tokens(q, query_order), k, v, *blocks, query_order=query_order.int(), with_lse=True, tile=tile)
    assert out.stride() == tokens(q, query_order).stride()
    assert torch.equal(out, tokens(expected, query_order))
    assert torch.equal(lse.gather(1, query_order), expected_lse)


@in_interpreter
@pytest.mark.parametrize("compensate", [False, True])
def test_tokens_in_block_order_are_read_in_place(compensate, monkeypatch):
    """Blocks without an order give what the order 0, 1, 2, ... gives, in either memory layout, and gather nothing."""
    from parkattn.backend.triton import TritonBackend
    from parkattn.ops.permute import triton as permute
    from parkattn.plan import Blocks, Plan

    *_, query_offsets, key_offsets, mask = problem(5, 90, 150, 64, 4, 9, 0.4, torch.float16, bh=4)
    q, k, v = (torch.randn(2, t, 2, 64).half().transpose(1, 2) for t in (90, 150, 150))

    def run(ordered: bool) -> torch.Tensor:
        sides = []
        for ends in (query_offsets, key_offsets):
            labels = labels_of(ends).view(2, 2, -1).int()
            order = torch.arange(labels.shape[-1]).int().expand_as(labels) if ordered else None
            sides.append(Blocks(labels, order, ends.view(2, 2, -1)))
        plan = Plan(*sides, mask.view(2, 2, 4, 9), 4, 9, False, torch.ones(2, 2))
        return TritonBackend("interpreted", gluon=False).attend(q, k, v, plan, scale=None, compensate=compensate)

    expected = run(True)
    monkeypatch.delattr(permute, "gather_rows")
    out = run(False)
    assert torch.equal(out, expected) and out.stride() == q.stride()


@in_interpreter
def test_no_queries_and_no_keys():
    from parkattn.ops.attend.triton import attend_ragged

    q, k, v, *blocks = problem(0, 20, 30, 64, 2, 3, 0.5, torch.float16)
    none = torch.zeros(2, 4, dtype=torch.int32)
    out, lse = attend_ragged(q, k[:, :0], v[:, :0], blocks[0], none, blocks[2], with_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert attend_ragged(q[:, :0], k, v, none[:, :3], blocks[1], blocks[2])[0].shape == (2, 0, 64)


# ---------------------------------------------------------------------------------------------- block order


@in_interpreter
def test_rows_into_block_order_and_back():
    from parkattn.ops.permute.triton import gather_rows, scatter_rows

    x, order = torch.randn(1, 200, 2, 128).bfloat16().transpose(1, 2), orders(200)
    rows = gather_rows(x, order, out=torch.full((2, 200, 128), torch.nan, dtype=x.dtype))
    assert torch.equal(rows.view(1, 2, 200, 128), x.gather(2, order.long()[..., None].expand(-1, -1, -1, 128)))
    assert torch.equal(scatter_rows(rows, order, out=torch.full_like(x, torch.nan)), x)


@in_interpreter
def test_rows_of_a_head_are_copied_together_once():
    from parkattn.ops.permute.triton import gather_rows

    x = torch.randn(2, 70, 3, 128).bfloat16().transpose(1, 2)
    rows = gather_rows(x, None)
    assert rows.is_contiguous() and torch.equal(rows, x.reshape(6, 70, 128))
    assert gather_rows(rows.view(2, 3, 70, 128), None).data_ptr() == rows.data_ptr()


@in_interpreter
def test_keys_and_values_in_block_order_with_the_means_of_their_blocks():
    from parkattn.ops.permute.triton import gather_rows, gather_with_means

    # fp16, since the interpreter rounds bf16 down
    k, v, order = torch.randn(1, 200, 2, 128).add(6).half().transpose(1, 2), torch.randn(1, 2, 200, 128).half(), orders(200)
    ends = torch.tensor([[[0, 0, 70, 71, 71, 200], [0, 130, 131, 131, 199, 200]]], dtype=torch.int32)
    keys, values, *means = gather_with_means(k, v, order, ends)
    assert torch.equal(keys, gather_rows(k, order)) and torch.equal(values, gather_rows(v, order))
    for rows, found in zip((keys, values), means, strict=True):
        exact = [rows[u, a:b].double().sum(0) / max(b - a, 1) for u in range(2) for a, b in itertools.pairwise(ends[0, u].tolist())]
        torch.testing.assert_close(found.view(10, 128).double(), torch.stack(exact), rtol=2**-11, atol=1e-6)


def orders(tokens: int) -> torch.Tensor:
    return torch.stack([torch.randperm(tokens), torch.randperm(tokens)])[None].int()


# ---------------------------------------------------------------------------------------------- ahead of time

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


def compiled(kernel, types: dict[str, str], constants: dict, arch: int, *, gluon: bool = False, **options):
    """The kernel for an absent GPU -> (shared memory, stack frame in bytes, PTX, machine code); a stack frame means spills."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from parkattn.ops.triton_versions import FP_FUSION

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    place = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    aligned = {
        place[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*" or name.startswith(("stride", "out_"))
    }
    source = (GluonASTSource if gluon else ASTSource)(kernel, signature, {place[name]: value for name, value in constants.items()}, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options | FP_FUSION)
    reader = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([str(reader), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([str(reader.with_name("nvdisasm")), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return binary.metadata.shared, int(re.search(r"STACK:(\d+)", usage)[1]), binary.asm["ptx"], code


TRITON_TYPES = {
    **dict.fromkeys(("q", "k", "v", "centroids", "mean_values", "out"), "*bf16"),
    **dict.fromkeys(("wide_lists", "tail_lists", "tiles", "count", "query_order"), "*i32"),
    "bias": "*fp32",
    "lse": "*fp32",
    "factor": "fp32",
}


@on_compiler
@pytest.mark.parametrize(
    ("arch", "d", "everything"),
    [
        (80, 128, False),
        (89, 128, False),
        (90, 128, False),
        (90, 128, True),
        (90, 256, False),
        (100, 128, False),
        (100, 256, True),
        (120, 64, False),
        (120, 128, True),
        (120, 256, False),
    ],
)
def test_triton_kernel_builds_and_fits(arch, d, everything):
    from parkattn.ops.attend.tiles import triton_tile
    from parkattn.ops.attend.triton import attend_kernel

    tile = triton_tile(d, arch)
    switches = dict.fromkeys(("GATHER_Q", "COMPENSATE", "LSE"), everything)
    constants = {"D": d, "QUERIES": tile.queries, "KEYS": tile.keys, "WIDE": 32, "TAIL": 8, **switches}
    shared, stack, ptx, _ = compiled(attend_kernel, TRITON_TYPES, constants, arch, num_warps=tile.warps, num_stages=tile.stages)
    assert shared <= SHARED_MEMORY[arch]
    assert stack <= (128 if everything else 0)
    assert ("wgmma.mma_async" in ptx) == (arch == 90)


@on_compiler
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_work_list_kernels_build(arch):
    from parkattn.ops.attend.worklist import list_keys_kernel, list_queries_kernel

    types = dict.fromkeys(("key_offsets", "query_offsets", "wide", "tails", "summary", "tiles", "count"), "*i32")
    types |= {"mask": "*u8", "compensate": "*u8", "bias": "*fp32", "pair_bias": "*fp32", "inverse_scale": "fp32"}
    constants = {
        "KEY_TILE": 128,
        "WIDE": 32,
        "TAIL": 8,
        "LANES": 1024,
        "CHUNK": 512,
        "TAIL_BIAS": True,
        "COMPENSATE": True,
    }  # 512 key blocks
    for paired in (False, True):
        assert compiled(list_keys_kernel, types, constants | {"PAIR_BIAS": paired}, arch, num_warps=4)[1] == 0
    assert compiled(list_queries_kernel, types, {"QUERY_TILE": 128, "LANES": 64, "CHUNK": 1024}, arch, num_warps=4)[1] == 0


@on_compiler
@pytest.mark.parametrize(
    ("d", "element", "everything", "quick", "share"),
    [
        (64, "fp16", True, False, True),
        (128, "bf16", False, True, True),
        (128, "bf16", True, True, True),
        (128, "bf16", False, False, True),
        (128, "bf16", True, True, False),
    ],
)
def test_gluon_kernel_builds_and_fits(d, element, everything, quick, share):
    from parkattn.ops.triton_versions import ALWAYS_SHARE

    if ALWAYS_SHARE and not share:
        pytest.skip("never launched with this Triton")
    build_gluon(d, element, everything, quick, numbers={"8", "9"} if share else set(), share=share)


def build_gluon(d: int, element: str, everything: bool, quick: bool, numbers: set[str], share: bool = True) -> None:
    from parkattn.ops.attend.hopper import LINEAR, SWIZZLED, attend_hopper_kernel
    from parkattn.ops.attend.tiles import gluon_tile
    from parkattn.ops.triton_versions import NUMBER

    tile = gluon_tile(d)
    boxes = {
        "q_desc": (64, d),
        "k_tail": (tile.tail, 64),
        "v_tail": (tile.tail, 64),
        **dict.fromkeys(("k_wide", "v_wide"), (32, 64)),
        **dict.fromkeys(("c_desc", "u_desc"), (tile.keys, 64)),
    }
    types = {name: f"tensordesc<{element}[{height}, {width}],{SWIZZLED!r}>" for name, (height, width) in boxes.items()}
    types |= dict.fromkeys(("wide_lists", "tail_lists", "tiles", "count", "record_buffers", "order", "lost_tiles"), "*i32")
    types |= {"bias_desc": f"tensordesc<fp32[1, {tile.keys}],{LINEAR!r}>", "lse": "*fp32", "out": f"*{element}", "factor": "fp32"}
    constants = {**tile.constants(d), "COMPENSATE": everything, "SCATTER": True, "LSE": everything, "QUICK": quick, "SHARE": share}
    shared, stack, ptx, code = compiled(attend_hopper_kernel, types, constants, 90, gluon=True, num_warps=4, maxnreg=168)
    assert shared <= SHARED_MEMORY[90]
    # a few words are kept on the stack and read once per query tile, none of them in the loops over keys
    assert stack <= 64
    loops = key_loops(code)
    assert len(loops) == 4  # of two warpgroups: two tiles per turn, and one
    spills = [sum(bool(re.search(r"\b(LDL|STL)\b", instruction)) for instruction in loop) for loop in loops]
    # Triton 3.8 keeps addresses in ordinary registers, and reloads one per key tile in one warpgroup
    assert max(spills) <= (2 if NUMBER == (3, 8) else 0)
    # where ptxas cannot keep products in flight it waits after every one, and says so only to who runs it by hand
    assert all(0 < sum("WARPGROUP.DEPBAR" in i for i in loop) * 6 <= sum("HGMMA" in i for i in loop) for loop in loops)
    # sums are exchanged in the place of the queries, and a bias comes with its keys
    assert "LDS.64" in code and not given_back_unread(code)
    # what the sums are written over is copied to next, by the engine that does not wait for ordinary stores
    assert (
        not numbers
        or re.findall(r"st\.shared|fence\.proxy\.async|barrier\.arrive 9", ptx.partition("barrier.arrive 9")[0])[-1] == "fence.proxy.async"
    )
    # quick exponentials look for no maximum
    assert all(any("FMNMX" in i for i in loop) != quick for loop in loops)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    assert before_arrivals(ptx) == {"bar.sync", "bar.warp.sync"}
    ours, tritons = barriers(ptx)
    assert ours == numbers and tritons and not ours & tritons
