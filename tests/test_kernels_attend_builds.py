"""Every attention kernel compiled ahead of time, for GPUs that are not there: memory, spills, instructions, barriers."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")
from interpreted import outside
from machine_code import (
    Build,
    barriers,
    before_arrivals,
    compiled,
    given_back_unread,
    key_loops,
    plain_attention,
    products,
)

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# P V, and Q K^T of whole numbers; before Triton 3.9 sm_100 has no INT8 product of its own and takes that of the warps
WARPS = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32"
PRODUCT = {90: "wgmma.mma_async.sync.aligned.m64n{1}k16.f32.{0}.{0}", 100: "tcgen05.mma.cta_group::1.kind::f16"}
INT8_WARPS = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
INT8_PRODUCT = {90: "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8", 100: "tcgen05.mma.cta_group::1.kind::i8"}


@outside
@pytest.mark.parametrize(
    ("d", "everything", "element"), [(64, True, "bf16"), (128, False, "bf16"), (128, True, "bf16"), (128, True, "fp16")]
)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_triton_kernel_in_int8_builds_and_fits(arch, d, everything, element):
    from parkattn.ops.triton_versions import NUMBER

    built = plain_attention(arch, d, int8=True, everything=everything, element=element)
    assert built.shared <= min(SHARED_MEMORY[arch], 99 * 1024) and built.stack == 0
    whole = INT8_PRODUCT if NUMBER >= (3, 9) or arch != 100 else {}
    assert products(built.ptx) == {
        whole.get(arch, INT8_WARPS),
        PRODUCT.get(arch, WARPS).format(element.replace("fp", "f"), d),
    }


@outside
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_rounding_kernels_build(arch, d):
    from parkattn.ops import tiles
    from parkattn.ops.permute import triton as permute
    from parkattn.ops.triton_versions import NUMBER

    types = dict.fromkeys(("k", "x", "v", "values", "value_means"), "*bf16") | dict.fromkeys(
        ("out", "keys", "key_means"), "*i8"
    )
    types |= dict.fromkeys(("partial", "steps", "mean"), "*fp32") | dict.fromkeys(("order", "offsets"), "*i32")
    blocks = tiles.segment_tile(d, torch.bfloat16, arch) | {"INT8": True, "BLOCKS": 4}
    builds = [
        (permute._key_range, tiles.key_range_tile(d)),
        (permute._round_rows, tiles.rounding_tile(d) | {"ORDERED": True, "KEYS": False}),
        (permute._round_rows, tiles.rounding_tile(d) | {"ORDERED": False, "KEYS": True}),
        (permute._gather_with_means, blocks),
    ]
    for kernel, tile in builds:
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        built = compiled(kernel, types, tile | {"D": d}, arch, **options)
        assert built.shared <= 99 * 1024 and built.stack <= (72 if NUMBER == (3, 9) else 16)


@outside
@pytest.mark.parametrize(
    ("arch", "d", "everything"),
    [
        (80, 128, False), (80, 128, True), (86, 128, True), (89, 128, False), (89, 128, True), (90, 128, False),
        (90, 128, True), (90, 256, False), (100, 128, True), (100, 256, True), (120, 64, False), (120, 128, True),
        (120, 256, False),
    ],
)  # fmt: skip
def test_triton_kernel_builds_and_fits(arch, d, everything):
    from parkattn.ops.triton_versions import NUMBER

    built = plain_attention(arch, d, int8=False, everything=everything)
    assert built.shared <= SHARED_MEMORY[arch]
    # Triton 3.9 keeps a few words on the stack, none of them in the loops over keys
    assert built.stack <= (48 if NUMBER == (3, 9) else 0)
    assert not sum(spills_of(key_loops(built.code)))
    wanted, found = PRODUCT.get(arch, WARPS), products(built.ptx)
    assert found and found <= {wanted.format("bf16", width) for width in (32, 64, 128, 256)}


@outside
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_work_list_kernels_build(arch):
    from parkattn.ops.attend.worklist import list_keys_kernel, list_queries_kernel

    types = dict.fromkeys(("key_offsets", "query_offsets", "wide", "tails", "summary", "tiles", "count"), "*i32")
    types |= {"mask": "*u8", "compensate": "*u8", "bias": "*fp32", "pair_bias": "*fp32", "inverse_scale": "fp32"}
    sizes = {"KEY_TILE": 128, "WIDE": 32, "TAIL": 8, "LANES": 1024, "CHUNK": 512}  # 512 key blocks
    of_keys = sizes | {"TAIL_BIAS": True, "COMPENSATE": True}
    of_queries = {"QUERY_TILE": 128, "GROUP_ROWS": 64, "LANES": 64, "CHUNK": 1024}
    for kernel, constants in (
        (list_keys_kernel, of_keys | {"PAIR_BIAS": False}),
        (list_keys_kernel, of_keys | {"PAIR_BIAS": True}),
        (list_queries_kernel, of_queries),
    ):
        assert compiled(kernel, types, constants, arch, num_warps=4).stack == 0


@outside
@pytest.mark.parametrize(
    ("d", "element", "everything", "quick", "share", "rows"),
    [
        (64, "fp16", True, False, True, None), (128, "bf16", False, True, True, None),
        (128, "bf16", True, True, True, None), (128, "bf16", False, False, True, None),
        (128, "bf16", True, True, False, None), (64, "bf16", True, True, False, 500),
        (128, "bf16", False, True, False, 500), (128, "bf16", True, True, False, 500),
        (128, "bf16", True, True, True, 128), (128, "bf16", True, False, True, 500),
    ],
)  # fmt: skip
def test_gluon_kernel_builds_and_fits(d, element, everything, quick, share, rows):
    from parkattn.ops.triton_versions import ALWAYS_SHARE

    if ALWAYS_SHARE and not share:
        pytest.skip("never launched with this Triton")
    build_gluon(d, element, everything, quick, numbers={"8", "9"} if share else set(), share=share, rows=rows)


def build_gluon(
    d: int, element: str, everything: bool, quick: bool, numbers: set[str], share: bool = True, rows: int | None = None
) -> None:
    """rows: with INT8 keys, for query blocks of so many rows."""
    from parkattn.ops.attend.hopper import LINEAR, attend_hopper_kernel, swizzled
    from parkattn.ops.attend.tiles import gluon_tile, int8_tile

    tile = gluon_tile(d) if rows is None else int8_tile(d, rows, True)
    tile = tile if quick else tile.for_lost_rows()
    boxes = {
        "q_desc": (64, d), "k_tail": (tile.tail, 64), "v_tail": (tile.tail, 64),
        **dict.fromkeys(("k_wide", "v_wide"), (32, 64)), **dict.fromkeys(("c_desc", "u_desc"), (tile.keys, 64)),
    }  # fmt: skip
    types = {
        name: f"tensordesc<{element}[{height}, {width}],{swizzled(torch.float16, d)!r}>"
        for name, (height, width) in boxes.items()
    }
    if rows is not None:
        int8 = {
            name: f"tensordesc<i8[{boxes[name][0]}, {d}],{swizzled(torch.int8, d)!r}>"
            for name in ("q_desc", "k_tail", "k_wide", "c_desc")
        }
        types |= int8
    types |= dict.fromkeys(
        ("wide_lists", "tail_lists", "tiles", "count", "record_buffers", "order", "lost_tiles"), "*i32"
    )
    types |= {"bias_desc": f"tensordesc<fp32[1, {tile.keys}],{LINEAR!r}>", "out": f"*{element}", "unit": "fp32"}
    types |= dict.fromkeys(("lse", "q_steps", "k_steps"), "*fp32")
    constants = {
        **tile.constants(d), "COMPENSATE": everything, "SCATTER": True, "LSE": everything, "SHARE": share,
        "INT8": rows is not None,
    }  # fmt: skip
    constants["QUICK"] = tile.quick if quick else 0
    built = compiled(attend_hopper_kernel, types, constants, 90, gluon=True, num_warps=4, maxnreg=tile.launch_registers)
    ptx, code = built.ptx, built.code
    check_consumers(built, tile.groups, quick)
    # sums are exchanged in shared memory, and a bias comes with its keys
    assert ("LDS.64" in code or not share) and not given_back_unread(code)
    # what the sums are written over is copied to next, by the engine that does not wait for ordinary stores
    assert (
        not numbers
        or re.findall(r"st\.shared|fence\.proxy\.async|barrier\.arrive 9", ptx.partition("barrier.arrive 9")[0])[-1]
        == "fence.proxy.async"
    )
    ours, tritons = barriers(ptx)
    assert ours == numbers and tritons and not ours & tritons


@outside
@pytest.mark.parametrize(
    ("d", "int8", "quick"),
    [(64, True, True), (128, False, True), (128, True, True), (128, False, False), (128, True, False)],
)
def test_dense_gluon_kernel_builds_and_fits(d, int8, quick):
    from parkattn.ops.attend.hopper import swizzled
    from parkattn.ops.attend.hopper_dense import attend_dense_kernel
    from parkattn.ops.attend.tiles import dense_tile

    tile, kind = dense_tile(int8, True), torch.int8 if int8 else torch.bfloat16
    rows = {"q_desc": (64, kind), "k_desc": (tile.keys, kind), "v_desc": (tile.keys, torch.bfloat16)}
    names = {torch.int8: "i8", torch.bfloat16: "bf16"}
    types = {
        name: f"tensordesc<{names[dtype]}[{height}, {d}],{swizzled(dtype, d)!r}>"
        for name, (height, dtype) in rows.items()
    }
    types |= dict.fromkeys(("lse", "q_steps", "k_steps"), "*fp32") | {
        "key_counts": "*i32", "lost": "*i32", "out": "*bf16", "unit": "fp32",
    }  # fmt: skip
    constants = {name: value for name, value in tile.constants(d).items() if name not in ("WIDE", "TAIL")}
    constants |= {"LSE": True, "QUICK": tile.quick if quick else 0, "AGAIN": not quick, "INT8": int8}
    built = compiled(attend_dense_kernel, types, constants, 90, gluon=True, num_warps=4, maxnreg=tile.launch_registers)
    check_consumers(built, tile.groups, quick)


@pytest.mark.parametrize(("size", "groups"), [(128, 2), (192, 3)])
def test_a_plan_in_tiles_takes_the_warpgroups_that_they_fill(size, groups):
    """Wan2.1-14B's 75,600 queries in 128 clusters; `cut_blocks` leaves some tiles empty."""
    from parkattn.ops.attend.tiles import int8_tile

    assert int8_tile(128, 75_600 / (75_600 // size + 128), True).groups == groups


def spills_of(loops: list[list[str]]) -> list[int]:
    return [sum(bool(re.search(r"\b(LDL|STL)\b", instruction)) for instruction in loop) for loop in loops]


def check_consumers(built: Build, groups: int, quick: bool) -> None:
    from parkattn.ops.triton_versions import NUMBER

    ptx = built.ptx
    assert built.shared <= SHARED_MEMORY[90]
    # a few words are kept on the stack and read once per query tile, none of them in the loops over keys
    assert built.stack <= (120 if NUMBER == (3, 9) else 64)
    loops = key_loops(built.code)
    assert len(loops) == 2 * groups  # of each warpgroup: two tiles per turn, and one
    # Triton 3.8 keeps addresses in ordinary registers, and reloads one per key tile in one warpgroup
    assert max(spills_of(loops)) <= (2 if NUMBER == (3, 8) else 0)
    # where ptxas cannot keep products in flight it waits after every one, and says so only to who runs it by hand
    assert all(0 < sum("WARPGROUP.DEPBAR" in i for i in loop) * 3 <= sum("GMMA" in i for i in loop) for loop in loops)
    # quick exponentials look for no maximum
    assert all(any("FMNMX" in i for i in loop) != quick for loop in loops)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    assert {"bar.sync"} <= before_arrivals(ptx) <= {"bar.sync", "bar.warp.sync"}
