"""What a plan is made of: k-means beside flash-kmeans (where installed) and its GEMM alone, what QRKC adds to it, and
fused PAMA beside the materialised PyTorch one, the paper's table (Appendix D).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from parkattn.ops.cluster.definition import initial_tokens, stabilise
from parklab.bench.gates import Case, against_exact, repeated, verdict
from parklab.bench.problems import HUNYUAN, TINY, WAN_14B, Shape, mixture, offsets
from parklab.bench.timing import Calls, Peak, Record, Row, free_memory, in_two_rounds, measured

# N_Q = 256 as in the paper's table; above 1,024 key blocks fewer heads, so that the materialised baseline fits
PAPER = {
    "hunyuan": HUNYUAN._replace(query_blocks=256),
    "wan2.1-14b": WAN_14B._replace(query_blocks=256, key_blocks=1024),
    "wan2.1-14b, 512 key blocks": WAN_14B._replace(query_blocks=256),
    "2,048 key blocks": Shape(12, 115_200, 256, 2048),
    "4,096 key blocks": Shape(6, 115_200, 256, 4096),
}
BF16, FP16 = torch.bfloat16, torch.float16
FLOAT32_UNIT = torch.finfo(torch.float32).eps
# both dtypes at every head dim, one to eight chunks of the Hopper kernel, above Full-K's limit; the last one keeps
# every multiprocessor busy for many tiles: copies that overtake reads show there first
GATED = [
    *((Shape(3, 5000, 17, blocks), dtype)
      for blocks, dtype in ((1024, BF16), (1000, FP16), (700, BF16), (512, FP16), (70, BF16))),
    *((Shape(3, 5000, 17, 300, dim), dtype) for dim in (64, 256) for dtype in (BF16, FP16)),
    (Shape(3, 5000, 17, 2500), BF16),
    *((Shape(8, 75_600, 256, blocks), BF16) for blocks in (200, 512, 1024)),
]  # fmt: skip


# k-means ------------------------------------------------------------------------------------------------


def gate_kmeans(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Sort and permutation exact, means to float32, assignment at most twice as far from optimal as same-dtype
    PyTorch.
    """
    from parkattn.ops.cluster import triton as cluster
    from parkattn.ops.permute import triton as permute

    shape, count = (TINY, 8) if rehearse else (Shape(4, 20_000, 0, 0), 200)
    x = mixture(shape, count, device)
    kmeans = partial(cluster.kmeans, x, initial_tokens(shape.tokens, count, 0).to(device), iterations=2)
    labels, centroids, _, order, ends = kmeans()
    yield verdict("sort_labels", (order.long() != labels.long().argsort(dim=-1, stable=True)).sum(), 0)
    member = torch.nn.functional.one_hot(labels.long(), count).double()
    means = member.mT @ x.double() / member.sum(2)[..., None].clamp(min=1)
    yield verdict("segment_mean", (means - centroids).abs().max(), 1e-5 * x.abs().max())
    centre = centroids.view(shape.heads, count, -1).mean(1)
    found, centred, half = cluster.segment_mean(x, order, ends, mu=centre)
    found = found.view(1, shape.heads, count, -1)
    distance = torch.cdist(x.double(), found.double())

    def regret(chosen: Tensor) -> Tensor:
        return (distance.gather(-1, chosen.long()[..., None]).squeeze(-1) - distance.amin(-1)).max()

    plain = torch.cdist(x.float(), found.to(x.dtype).float()).argmin(-1)
    # one rounding of a centred centroid may add to it
    rounding = torch.finfo(x.dtype).eps * (found - centre.view(1, shape.heads, 1, -1)).norm(dim=-1).max()
    yield verdict("assign", regret(cluster.assign(x, centred, half)), 2 * regret(plain) + rounding)
    yield repeated("kmeans", kmeans, 2 if rehearse else 10)
    yield from _gate_borders(x, labels, centroids)
    back = permute.scatter_rows(permute.gather_rows(x, order), order)
    yield verdict("gather and scatter", (back != x).sum(), 0)


def _gate_borders(x: Tensor, labels: Tensor, centroids: Tensor) -> Iterator[Case]:
    """Borders where they belong, and the definition's labels but for tokens whose place is a matter of rounding."""
    from parkattn.ops.cluster import borders_triton as borders
    from parkattn.ops.cluster import triton as cluster
    from parkattn.ops.cluster.borders import round_labels
    from parkattn.segments import segment_sizes

    multiple, count = 32 if x.shape[2] > 1000 else 4, centroids.shape[2]
    found = borders.round_borders(x, labels, centroids, segment_sizes(labels, count), multiple)
    _, ends = cluster.sort_labels(found, count)
    off = (ends[..., :-1] % multiple > 0) & (ends[..., :-1] < x.shape[2])
    yield verdict("round_borders: borders off the multiple", off.sum(), 0)
    yield verdict("round_borders: tokens lost", (ends[..., -1] != x.shape[2]).sum(), 0)
    # one token per border may stand on the other side of a near tie
    differing = (found != round_labels(x, labels, centroids, multiple)).sum()
    yield verdict("round_borders: labels unlike the definition's", differing, count * x.shape[1])


def gate_large_kmeans(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """More than 2^31 elements: the last head of a large call equals the same head alone."""
    from parkattn.ops.cluster import triton as cluster
    from parkattn.ops.permute import triton as permute

    shape, count = (TINY, 8) if rehearse else (Shape(24, 720_000, 0, 0), 64)
    x = torch.randn(1, shape.heads, shape.tokens, shape.dim, device=device, dtype=BF16)
    first = initial_tokens(shape.tokens, count, 0).to(device)
    whole, alone = cluster.kmeans(x, first, iterations=2), cluster.kmeans(x[:, -1:], first, iterations=2)
    differing = sum(int((a[:, -1:] != b).sum()) for a, b in zip(whole, alone, strict=True))
    yield verdict("kmeans past 2^31 elements", differing, 0, elements=x.numel())
    order = whole[3]
    wrong = permute.gather_rows(x, order)[-1] != x[0, -1, order[0, -1].long()]
    yield verdict("gather past 2^31 elements", wrong.sum(), 0)


def measure_kmeans(device: torch.device, peak: Peak, *, repeats: int = 7, rehearse: bool = False) -> Iterator[Record]:
    from parkattn.ops.cluster import triton as cluster

    shape = TINY if rehearse else WAN_14B
    x = mixture(shape, 700, device)

    def iterate(centred: Tensor, half: Tensor, old: Tensor, centre: Tensor) -> object:
        order, ends = cluster.sort_labels(cluster.assign(x, centred, half), old.shape[1])
        return cluster.segment_mean(x, order, ends, old=old, mu=centre)

    for count in (8,) if rehearse else (128, 512, 1024):
        first = initial_tokens(shape.tokens, count, 0).to(device)
        _, centroids, _, order, ends = cluster.kmeans(x, first, iterations=1)
        old = centroids.view(shape.heads, count, -1)
        _, centred, half = cluster.segment_mean(x, order, ends, mu=old.mean(1))
        calls: Calls = {"ours": partial(iterate, centred, half, old, old.mean(1)), **_flash_kmeans(x[0], first)}
        ms = in_two_rounds(calls, repeats, settling_s=0)
        flops, other = 2 * shape.heads * shape.tokens * count * shape.dim, ms.get("flash-kmeans")
        yield {
            "benchmark": "kmeans", "shape": {**shape._asdict(), "clusters": count}, "iteration_ms": ms["ours"],
            "gemm_ms_at_roofline": flops / peak["tflops"] / 1e9,
            "flash_kmeans_ms": other, "speedup": other and other / ms["ours"],
        }  # fmt: skip


def _flash_kmeans(x: Tensor, first: Tensor) -> Calls:
    """flash-kmeans 0.3.1, one Euclidean iteration; empty where the package is absent."""
    try:
        iterate = importlib.import_module("flash_kmeans.kmeans_triton_impl")._euclid_iter
    except ImportError:
        return {}
    dense = x.contiguous()
    return {"flash-kmeans": partial(iterate, dense, (dense**2).sum(-1), dense[:, first].contiguous())}


# QRKC: the metric of the queries, its Cholesky factor, the transform of the keys, means in key space -----


def gate_qrkc(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    from parkattn.ops.cluster import triton as cluster

    shape = TINY if rehearse else Shape(4, 20_000, 0, 0)
    x = mixture(shape, 8 if rehearse else 200, device)
    exact = x.double().mT @ x.double() / shape.tokens
    yield verdict("query_metric", (cluster.query_metric(x) - exact).abs().max(), 1e-5 * exact.abs().max())
    root = torch.linalg.cholesky_ex(stabilise(exact.float()), check_errors=False).L
    sample = initial_tokens(shape.tokens, 8, 0).to(device)
    size = root.abs().amax((-2, -1), keepdim=True)
    centred = x.double() - x[:, :, sample].double().mean(2, keepdim=True)
    want = centred @ root.double() / size.double()
    plain = centred.to(x.dtype) @ (root / size).to(x.dtype)
    yield against_exact("transform_keys", cluster.transform_keys(x, root, sample), want, plain)


def measure_qrkc(device: torch.device, peak: Peak, *, repeats: int = 7, rehearse: bool = False) -> Iterator[Record]:
    from parkattn.ops.cluster import triton as cluster

    shape = TINY if rehearse else WAN_14B
    q, k = mixture(shape, 300, device), mixture(shape, 700, device)
    first = initial_tokens(shape.tokens, shape.key_blocks, 0).to(device)
    metric = stabilise(cluster.query_metric(q))
    root = torch.linalg.cholesky_ex(metric, check_errors=False).L
    _, _, _, order, ends = cluster.kmeans(k, first, iterations=1)
    parts: Calls = {
        "metric_ms": lambda: stabilise(cluster.query_metric(q)),
        "cholesky_ms": lambda: torch.linalg.cholesky_ex(metric, check_errors=False),
        "transform_ms": lambda: cluster.transform_keys(k, root, first),
        "means_ms": lambda: cluster.segment_mean(k, order, ends),
    }
    times = in_two_rounds(parts | {"ms": lambda: [call() for call in parts.values()]}, repeats, settling_s=0)
    # the bytes each part must move: q once, k read and written, k once
    moved = 4 * q.numel() * q.element_size()
    at_roofline = moved / peak["gbytes_per_s"] / 1e6
    yield {"benchmark": "qrkc", "shape": shape._asdict(), **times, "bytes_ms_at_roofline": at_roofline}


# PAMA ---------------------------------------------------------------------------------------------------


def pama_torch(q: Tensor, ends: Tensor, centroids: Tensor, sizes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The materialised definition: GEMM, softmax in at least float32, mean over each query block."""
    dtype = dtype or q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bh, n, d = q.shape
    logits = q.to(dtype) @ centroids.to(dtype).mT * d**-0.5 + sizes.to(wide).log().to(dtype)[:, None]
    weights = logits.softmax(-1, dtype=wide)
    starts = ends[:, :-1].long() + n * torch.arange(bh, device=q.device)[:, None]
    edges = torch.cat([starts.flatten(), torch.tensor([bh * n], device=q.device)])
    sums = torch.segment_reduce(weights.view(bh * n, -1), "sum", offsets=edges, axis=0, unsafe=True)
    return sums.view(bh, ends.shape[-1] - 1, -1) / ends.diff(dim=-1).clamp(min=1)[..., None]


def gate_pama(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    # a small case on a GPU is for the sanitizer: it takes the Hopper kernel along, with several tiles per block
    small = [(Shape(2, 90, 5, 20, 64), BF16)] + [(Shape(2, 600, 3, 300, 128), BF16)] * (device.type == "cuda")
    for shape, dtype in small if rehearse else GATED:
        yield from gate_pama_at(shape, dtype, device, repeats=2 if rehearse else 10)


def gate_pama_at(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, repeats: int, kernels: Collection[str] = ()
) -> Iterator[Case]:
    """The error, from poisoned outputs, and bit-equal repeats; kernels: some of `pama_kernels`, else all."""
    case = pama_case(shape, device, dtype)
    exact, plain = (pama_torch(*case, dtype=kind) for kind in (torch.float64, dtype))
    for label, kernel in pama_kernels(shape.key_blocks).items():
        if label in (kernels or (label,)):
            out = kernel(*case, out=torch.full_like(exact, torch.nan, dtype=torch.float32))
            name = f"{label}, {shape.tokens} queries, {shape.key_blocks} key blocks, d {shape.dim}, {str(dtype)[6:]}"
            yield against_exact(name, out, exact, plain, unit=FLOAT32_UNIT)
            yield repeated(name, partial(kernel, *case), repeats)


def gate_large_pama(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """More than 2^31 elements: the last head has the bits it has alone, and the error rule holds for it."""
    shape = TINY if rehearse else Shape(24, 720_000, 200, 300)
    case = pama_case(shape, device, BF16)
    q, ends, centroids, sizes = (part[-1:].contiguous() for part in case)
    exact, plain = (pama_torch(q, ends, centroids, sizes, dtype=kind) for kind in (torch.float64, BF16))
    for label, kernel in pama_kernels(shape.key_blocks).items():
        whole = kernel(*case, out=torch.full((shape.heads, *exact.shape[1:]), torch.nan, device=device))[-1:]
        name = f"{label} past 2^31 elements, last head"
        yield against_exact(name, whole, exact, plain, unit=FLOAT32_UNIT, elements=case[0].numel())
        yield verdict(f"{name}: other bits than alone", (whole != kernel(q, ends, centroids, sizes)).sum(), 0)


def measure_pama(device: torch.device, peak: Peak, *, repeats: int = 7, rehearse: bool = False) -> Iterator[Record]:
    for name, shape in ({"tiny": TINY} if rehearse else PAPER).items():
        case = pama_case(shape, device, BF16)
        gemm = 2 * shape.heads * shape.tokens * shape.key_blocks * shape.dim
        table = {"PyTorch": Row(partial(pama_torch, *case))}
        table |= {label: Row(partial(kernel, *case), gemm) for label, kernel in pama_kernels(shape.key_blocks).items()}
        about = {"name": name, **shape._asdict()}
        materialised = 0.0
        for found in measured("pama", table, repeats, peak, settling_s=0, shape=about):
            mb = found["extra_mb"]
            materialised = materialised or mb
            yield found | {"speedup": 1 / found["ratio"], "memory_reduction": materialised / mb if mb else None}
        del case, table
        free_memory()


def pama_kernels(key_blocks: int) -> dict[str, Callable[..., Tensor]]:
    from parkattn.ops.importance import triton as importance

    two_pass = {"Triton (two-pass)": importance.pama_two_pass}
    fits = key_blocks <= importance.FULL_KEY_LIMIT
    return two_pass | ({"Triton (Full-K)": importance.pama_full_key} if fits else {})


def pama_case(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q in block order, where its blocks end, centroids of keys, and how many keys each stands for."""
    q = 2 * torch.randn(shape.heads, shape.tokens, shape.dim, device=device, dtype=dtype)
    centroids = torch.randn(shape.heads, shape.key_blocks, shape.dim, device=device, dtype=dtype)
    ends = offsets(shape.heads, shape.tokens, shape.query_blocks, device, seed=1, empty=True)
    sizes = offsets(shape.heads, shape.tokens, shape.key_blocks, device, seed=2, empty=True).diff(dim=-1)
    return q, ends, centroids, sizes
