"""PAMA, clustering and permutation kernels: under the Triton interpreter against float64, and compiled ahead of time
for GPUs that are not here.
"""

# formatted by hand: one argument per line would double the tables below
# fmt: off

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from interpreted import in_interpreter, outside, quiet_numpy, run_interpreted
from machine_code import barriers, before_arrivals, compiled
from parkattn.ops import tiles
from parkattn.ops.cluster import triton as cluster
from parkattn.ops.importance import triton as importance
from parkattn.ops.permute import triton as permute
from strategies import reproducible

pytestmark = quiet_numpy
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
HALVES = st.sampled_from([torch.bfloat16, torch.float16])


@outside
def test_kernels_match_float64_under_the_interpreter():
    run_interpreted(__file__, at_least=8)


def ragged(generator, bh, n, blocks):
    """Offsets [bh blocks+1] with empty blocks among them."""
    cuts = torch.randint(0, n + 1, (bh, blocks - 1), generator=generator).sort(-1).values
    if blocks > 3:
        cuts[:, 1] = cuts[:, 0]
    edge = torch.zeros(bh, 1, dtype=cuts.dtype)
    return torch.cat([edge, cuts, edge + n], 1).int()


def pama_definition(q, offsets, centroids, sizes, dtype):
    """softmax(q.c / sqrt(d) + log n) averaged over each query block, every step in `dtype`."""
    logits = (q.to(dtype) @ centroids.to(dtype).mT * (1 / math.sqrt(q.shape[-1])) + sizes.double().log().to(dtype)[:, None]).to(dtype)
    p = logits.softmax(-1).nan_to_num(0.0)
    out = torch.zeros(q.shape[0], offsets.shape[1] - 1, centroids.shape[1], dtype=torch.float64)
    for head, row in enumerate(offsets.tolist()):
        for block, (begin, end) in enumerate(itertools.pairwise(row)):
            if end > begin:
                out[head, block] = p[head, begin:end].double().mean(0).to(dtype).double()
    return out


def check_pama(seed, n, d, query_blocks, key_blocks, dtype):
    g = torch.Generator().manual_seed(seed)
    q, c = (torch.randn(2, m, d, generator=g).mul(2).to(dtype) for m in (n, key_blocks))
    offsets, sizes = ragged(g, 2, n, query_blocks), torch.randint(0, 50, (2, key_blocks), generator=g, dtype=torch.int32)
    sizes[:, 0] = 7
    exact = pama_definition(q, offsets, c, sizes, torch.float64)
    plain = (pama_definition(q, offsets, c, sizes, dtype) - exact).abs().max()
    for kernel in (importance.pama_full_key, importance.pama_two_pass):
        out = kernel(q, offsets, c, sizes, out=torch.full_like(exact, float("nan"), dtype=torch.float32))
        error = (out.double() - exact).abs().max()
        assert error <= 2 * plain + torch.finfo(torch.float32).eps, (kernel.__name__, error, plain)
        assert torch.equal(out, kernel(q, offsets, c, sizes)), "a second run gave other bits"
        alone = kernel(*(x[1:].contiguous() for x in (q, offsets, c, sizes)))
        assert torch.equal(out[1:], alone), "a head's bits depend on the other heads of the call"


@in_interpreter
@settings(reproducible, max_examples=6)
@given(st.integers(0, 999), st.integers(1, 250), st.sampled_from([64, 128, 256]), st.integers(1, 9), st.integers(1, 140), HALVES)
def test_pama_of_ragged_sizes(seed, n, d, query_blocks, key_blocks, dtype):
    check_pama(seed, n, d, query_blocks, key_blocks, dtype)


@in_interpreter
def test_pama_edges():
    """A block cut into several chunks; more key blocks than one tile; blocks that are all empty give rows of zeros; a
    refusal.
    """
    check_pama(5, 600, 64, 1, 20, torch.bfloat16)
    offsets, sizes = ragged(torch.Generator().manual_seed(8), 3, 5000, 70), torch.tensor([[4, 0, 1]] * 3, dtype=torch.int32)
    items, log_sizes, partial, chunk = importance._work(offsets, sizes, 5000)
    rows = torch.zeros(3, 5000)
    for bh, first, here, *_ in items.tolist():
        rows[bh, first : first + here] += 1
    assert (rows == 1).all() and items[:, 2].max() <= chunk and partial.shape[0] * chunk <= 3 * 5000, "every row in one item, none too long"
    blocks = items[items[:, 4] < 0].view(70, 3, 8)
    assert (blocks[1:, :, 3] <= blocks[:-1, :, 3]).all() and (blocks[..., 0] == torch.arange(3)).all(), "of every head the longest first"
    assert torch.equal(log_sizes[:, :3], torch.tensor([[2.0, -math.inf, 0.0]] * 3)) and log_sizes[:, 3:].isneginf().all()
    check_pama(6, 40, 64, 2, 300, torch.float16)
    q, c = torch.randn(1, 20, 64).bfloat16(), torch.randn(1, 3, 64).bfloat16()
    nothing = torch.zeros(1, 3, dtype=torch.int32)
    for kernel in (importance.pama_full_key, importance.pama_two_pass):
        assert not kernel(q, torch.tensor([[0, 20]], dtype=torch.int32), c, nothing).any()
    with pytest.raises(ValueError, match="use pama_two_pass"):
        importance.pama_full_key(q, torch.tensor([[0, 20]], dtype=torch.int32), torch.randn(1, 1025, 64).bfloat16(), torch.ones(1, 1025, dtype=torch.int32))
    with pytest.raises(ValueError, match="head dim must be one of"):
        importance.pama_two_pass(q[..., :48].contiguous(), nothing, c, nothing)


def tokens(seed, n, d, dtype, heads=2, spread=0.5):
    """[1 heads n d], not contiguous, around a large offset common to all tokens."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(1, n, heads, d, generator=g) * spread + 6 * torch.randn(1, 1, heads, d, generator=g)).to(dtype).transpose(1, 2)


def regret(x, centroids, labels):
    distance = torch.cdist(x.double(), centroids.double())
    return (distance.gather(-1, labels.long()[..., None]).squeeze(-1) - distance.amin(-1)).max()


@in_interpreter
@settings(reproducible, max_examples=4)
@given(st.integers(0, 999), st.integers(2, 200), st.sampled_from([64, 128, 256]), st.integers(1, 150), HALVES)
def test_the_chosen_centroid_is_nearly_the_nearest(seed, n, d, clusters, dtype):
    """At most twice as far from optimal as the same-dtype PyTorch choice plus one rounding of a centroid."""
    x = tokens(seed, n, d, dtype)
    centroids = tokens(seed + 1, clusters, d, torch.float32) + (x[:, :, :1].float() - tokens(seed + 1, 1, d, torch.float32))
    flat = centroids.reshape(2, clusters, d)
    mu = flat.mean(1)
    centred = (flat - mu[:, None]).to(dtype)
    half = (centred.float() * (0.5 * centred.float() + mu[:, None])).sum(-1)
    rounded = centroids.to(dtype)
    plain = ((rounded * rounded).sum(-1)[:, :, None] - 2 * (x @ rounded.mT)).argmin(-1)
    labels = cluster.assign(x, centred, half)
    rounding = torch.finfo(dtype).eps * (flat - mu[:, None]).norm(dim=-1).max()
    assert regret(x, centroids, labels) <= 2 * regret(x, centroids, plain) + rounding


@in_interpreter
def test_ties_go_to_the_lowest_index_and_tokens_that_are_not_valid_past_the_last():
    x = tokens(0, 70, 64, torch.bfloat16)
    same, zero = torch.zeros(2, 200, 64, dtype=torch.bfloat16), torch.zeros(2, 200)
    assert not cluster.assign(x, same, zero).any()
    valid = torch.arange(70)[None] < 40
    assert (cluster.assign(x, same, zero, valid)[..., 40:] == 200).all()


@in_interpreter
def test_kmeans():
    """Well separated clusters are found; returned centroids are the means of the returned labels; empty clusters; warm
    start; valid.
    """
    g = torch.Generator().manual_seed(0)
    truth = torch.arange(160) % 8
    x = (20 * torch.randn(1, 2, 8, 64, generator=g)[:, :, truth] + torch.randn(1, 2, 160, 64, generator=g)).bfloat16()
    labels, centroids, sizes, order, offsets = cluster.kmeans(x, torch.arange(8), iterations=2)
    assert torch.equal(labels, truth.int().expand(1, 2, -1)) and (sizes == 20).all()
    want = torch.stack([x.double()[:, :, truth == v].mean(2) for v in range(8)], 2)
    torch.testing.assert_close(centroids.double(), want, rtol=1e-6, atol=1e-5)
    twice = cluster.kmeans(x, torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 7]), iterations=1)
    assert (twice[2][..., 1] == 0).all() and not twice[1][:, :, 1].any(), "an empty cluster has size 0 and centroid 0"
    assert all(torch.equal(a, b) for a, b in zip(cluster.kmeans(x, torch.arange(8), iterations=2), (labels, centroids, sizes, order, offsets), strict=True))
    warm = cluster.kmeans(x, torch.zeros(8, dtype=torch.long), iterations=1, start=labels)
    assert torch.equal(warm[0], labels)
    valid = torch.arange(160)[None] < 90
    masked = cluster.kmeans(x, torch.arange(8), iterations=2, valid=valid)
    assert (masked[0][..., 90:] == 8).all() and (masked[2].sum(-1) == 90).all() and (masked[4][..., -1] == 90).all()


@in_interpreter
@settings(reproducible, max_examples=4)
@given(st.integers(0, 999), st.integers(1, 200), st.integers(1, 40))
def test_labels_are_sorted_stably(seed, n, count):
    labels = torch.randint(0, count + 1, (1, 2, n), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    order, offsets = cluster.sort_labels(labels, count)
    assert torch.equal(order.long(), labels.argsort(dim=-1, stable=True))
    assert torch.equal(offsets.diff(dim=-1), torch.stack([(labels == v).sum(-1) for v in range(count)], -1).int())


@in_interpreter
def test_segment_means():
    for d, dtype in ((64, torch.bfloat16), (256, torch.float16)):
        x, labels = tokens(3, 130, d, dtype), torch.randint(0, 6, (1, 2, 130), dtype=torch.int32)
        labels[labels == 4] = 0
        order, offsets = cluster.sort_labels(labels, 6)
        old = torch.randn(2, 6, d)
        exact = torch.stack([x.double().mul(labels[..., None] == v).sum(2) / (labels == v).sum(-1, keepdim=True).clamp(min=1) for v in range(6)], 2)
        exact[:, :, 4] = old.view(1, 2, 6, d)[:, :, 4]
        torch.testing.assert_close(cluster.segment_mean(x, order, offsets, old=old).view(1, 2, 6, d).double(), exact, rtol=1e-6, atol=1e-6)


@in_interpreter
def test_the_metric_and_the_features_of_qrkc():
    for d, dtype in ((64, torch.bfloat16), (256, torch.float16)):
        x = tokens(4, 150, d, dtype)
        valid = torch.arange(150)[None] < 110
        for mask, rows in ((None, 150), (valid, 110)):
            kept = x[:, :, :rows].double()
            exact = kept.mT @ kept / rows
            torch.testing.assert_close(cluster.query_metric(x, mask).double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
        root = torch.linalg.cholesky(exact.float() + 0.05 * torch.eye(d))
        sample = torch.arange(0, 150, 30)
        want = (x.double() - x[:, :, sample].double().mean(2, keepdim=True)) @ root.double() / root.abs().amax((-2, -1), keepdim=True).double()
        error = (cluster.transform_keys(x, root, sample).double() - want).abs().max()
        plain = ((x - x[:, :, sample].mean(2, keepdim=True)) @ (root / root.abs().amax((-2, -1), keepdim=True)).to(dtype)).double().sub(want).abs().max()
        assert error <= 2 * plain + torch.finfo(dtype).eps * want.abs().max()


TYPES = {
    **dict.fromkeys(("x", "q", "k", "v", "centroids", "centred", "root", "keys", "values", "key_means", "value_means"), "*{0}"),
    **dict.fromkeys(("old", "mu", "means", "half", "shift", "partial", "log_sizes", "lse", "sums"), "*fp32"),
    **dict.fromkeys(("labels", "order", "offsets", "counts", "starts", "shifts", "totals", "items", "sizes"), "*i32"),
    "valid": "*i8", "scale": "fp32", "mean": "*fp32", "steps": "*fp32",
}


def kernels_and_tiles(arch, d, torch_dtype):
    """(kernel, constants, tile, whether `out` has the input's dtype) for everything that ships."""
    key = (d, torch_dtype, arch)
    one, two = tiles.two_pass_tiles(*key)
    sort_tile, block = tiles.sort_tile(arch), {"D": d}
    yield importance._row_lse, block | {"EVEN": True}, one, False
    yield importance._block_mass, block | {"EVEN": False}, two, False
    yield cluster._assign, block | {"HAS_VALID": False}, tiles.assign_tile(*key), False
    yield cluster._segment_sum, block | {"SPLITS": 4}, tiles.segment_tile(*key), False
    yield permute._gather_with_means, block | {"INT8": False, "BLOCKS": 1}, tiles.segment_tile(*key), False
    yield permute._block_means, block, tiles.segment_tile(*key), False
    yield cluster._metric_partial, block | {"HAS_VALID": False, "BM": min(d, 128)}, tiles.metric_tile(*key), False
    yield cluster._transform, block | {"BN": min(d, 128)}, tiles.transform_tile(*key), True
    for width in (256, 1024) if d == 128 else (512,):
        tile = tiles.full_key_tile(d, torch_dtype, 80 if arch == 90 else arch, width)
        yield importance._full_key, block | {"BN": width}, tile, False
    if d == 128:
        yield permute._gather_rows, block | {"ORDERED": True}, tiles.permute_tile(*key), True
        yield permute._gather_rows, block | {"ORDERED": False}, tiles.permute_tile(*key), True
        yield permute._scatter_rows, block, tiles.permute_tile(*key), True
        yield importance._list_work, {"BLOCKS": 64, "KEYS": 256}, {"num_warps": 4}, False
        yield importance._add_partials, {"BN": 1024}, {"num_warps": 4}, False
        yield cluster._segment_finish, block | {"SPLITS": 4, "HAS_OLD": True, "CENTRE": True, "ROWS": 16}, {"num_warps": 4}, False
        yield cluster._count_labels, {"BINS": 1024}, sort_tile, False
        yield cluster._place, {"BINS": 1024}, sort_tile, False
        yield cluster._scan_chunks, {"BINS": 1024, "CHUNKS": 64, "BB": 32}, {"num_warps": 4}, False
        yield cluster._scan_totals, {"BINS": 1024}, {"num_warps": 4}, False


@outside
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_kernel_compiles_ahead_of_time(arch):
    variants = ((128, "bf16", torch.bfloat16), (256, "bf16", torch.bfloat16), (64, "fp16", torch.float16))
    # tiles of other head dims are the same everywhere but on sm_120, whose shared memory is the smallest
    for d, name, dtype in variants if arch == 120 else variants[:1]:
        for kernel, constants, tile, same in kernels_and_tiles(arch, d, dtype):
            options = {k: tile[k] for k in ("num_warps", "num_stages") if k in tile}
            constants = constants | {k: v for k, v in tile.items() if k not in options}
            types = {a: t.format(name) for a, t in (TYPES | {"out": "*{0}" if same else "*fp32"}).items()}
            built = compiled(kernel, types, constants, arch, sixteens=("xb", "xh", "xn", "qb", "qh", "qn", "key_blocks"), **options)
            what = f"{kernel.__name__} d={d} sm_{arch} {tile}"
            assert built.shared <= SHARED_MEMORY[arch], f"{what}: {built.shared} bytes of shared memory"
            assert built.stack == 0, f"{what}: spills"


def gluon_builds(target):
    """(chunks of 128 keys, the PAMA kernel for Hopper built for them)"""
    from parkattn.ops.importance import hopper

    layout = repr(hopper.SWIZZLED)
    for chunks, dtype in ((8, "bf16"), (4, "fp16"), (2, "bf16")):
        constants = {"CHUNKS": chunks, "STAGES": tiles.full_key_tile(128, None, 90, chunks * 128)["stages"]}
        types = {"q_desc": f"tensordesc<{dtype}[64, 128],{layout}>", "c_desc": f"tensordesc<{dtype}[128, 128],{layout}>", "items": "*i32",
                 "scale": "fp32", **dict.fromkeys(("log_sizes", "out", "partial"), "*fp32")}
        yield chunks, compiled(hopper.full_key_hopper, types, constants, target.arch, gluon=True, sixteens=("key_blocks",), **hopper.OPTIONS)


@outside
def test_the_hopper_kernel_compiles_ahead_of_time():
    from triton.backends.compiler import GPUTarget

    for chunks, built in gluon_builds(GPUTarget("cuda", 90, 32)):
        assert built.shared <= SHARED_MEMORY[90]
        # at 8 chunks the compiler parks addresses of E and F on the stack, before the tile loop
        assert built.stack <= (256 if chunks == 8 else 0)
        # where ptxas cannot keep GEMMs in flight it waits after every one, and says so only to who runs it by hand
        code = built.code
        gemms, waits = (code.count(name) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
        assert 0 < waits < gemms / 2, f"{gemms} GEMM instructions, {waits} waits"
        assert before_arrivals(built.ptx) == {"bar.sync"}
        ours, tritons = barriers(built.ptx)
        assert ours == {"8"} and tritons and not ours & tritons
        # queries are read into registers: until a product has used them nothing says that the reads are done, not even
        # a barrier
        events = re.findall(r"LDSM|SYNCS\.ARRIVE|WARPGROUP\.DEPBAR", code)
        after_loads = [b for a, b in itertools.pairwise(events) if a == "LDSM" and b != "LDSM"]
        assert after_loads == ["WARPGROUP.DEPBAR"] * 2, f"{after_loads}: the buffer of the queries is given back too early"
