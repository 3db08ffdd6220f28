"""One k-means iteration against flash-kmeans (where installed) and against its GEMM alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parkattn.ops.cluster.definition import initial_tokens
from parklab.bench.problems import TINY, WAN_14B, Case, Shape, mixture, repeats_equal, verdict
from parklab.bench.timing import median_ms


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Sort and permutation exact, means to float32, assignment at most twice as far from optimal as same-dtype
    PyTorch.
    """
    from parkattn.ops.cluster import triton as cluster
    from parkattn.ops.permute import triton as permute

    shape, count = (TINY, 8) if rehearse else (Shape(4, 20_000, 0, 0), 200)
    x = mixture(shape, count, device)
    first = initial_tokens(shape.tokens, count, 0).to(device)
    labels, centroids, _, order, ends = cluster.kmeans(x, first, iterations=2)
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
    same = repeats_equal(lambda: cluster.kmeans(x, first, iterations=2), 2 if rehearse else 10)
    yield verdict("kmeans repeats bit-equal", 0 if same else 1, 0)
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
    yield verdict(
        "round_borders: borders off the multiple",
        ((ends[..., :-1] % multiple > 0) & (ends[..., :-1] < x.shape[2])).sum(),
        0,
    )
    yield verdict("round_borders: tokens lost", (ends[..., -1] != x.shape[2]).sum(), 0)
    # one token per border may stand on the other side of a near tie
    differing = (found != round_labels(x, labels, centroids, multiple)).sum()
    yield verdict("round_borders: labels unlike the definition's", differing, count * x.shape[1])


def gate_large(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """More than 2^31 elements: the last head of a large call equals the same head alone."""
    from parkattn.ops.cluster import triton as cluster
    from parkattn.ops.permute import triton as permute

    shape, count = (TINY, 8) if rehearse else (Shape(24, 720_000, 0, 0), 64)
    x = torch.randn(1, shape.heads, shape.tokens, shape.dim, device=device, dtype=torch.bfloat16)
    first = initial_tokens(shape.tokens, count, 0).to(device)
    whole, alone = cluster.kmeans(x, first, iterations=2), cluster.kmeans(x[:, -1:], first, iterations=2)
    differing = sum(int((a[:, -1:] != b).sum()) for a, b in zip(whole, alone, strict=True))
    yield verdict("kmeans past 2^31 elements", differing, 0, elements=x.numel())
    order = whole[3]
    yield verdict(
        "gather past 2^31 elements", (permute.gather_rows(x, order)[-1] != x[0, -1, order[0, -1].long()]).sum(), 0
    )


def measure(
    device: torch.device, peak: dict[str, float], *, repeats: int = 7, rehearse: bool = False
) -> Iterator[dict[str, Any]]:
    from parkattn.ops.cluster import triton as cluster

    shape = TINY if rehearse else WAN_14B
    x = mixture(shape, 700, device)
    dense = x[0].contiguous()
    for count in (8,) if rehearse else (128, 512, 1024):
        first = initial_tokens(shape.tokens, count, 0).to(device)
        _, centroids, _, order, ends = cluster.kmeans(x, first, iterations=1)
        old = centroids.view(shape.heads, count, -1)
        centre = old.mean(1)
        _, centred, half = cluster.segment_mean(x, order, ends, mu=centre)

        def iteration(
            centred: Any = centred, half: Any = half, count: int = count, old: Any = old, centre: Any = centre
        ) -> object:
            labels = cluster.assign(x, centred, half)
            return cluster.segment_mean(x, *cluster.sort_labels(labels, count), old=old, mu=centre)

        ms = median_ms(iteration, repeats)
        flops = 2 * shape.heads * shape.tokens * count * shape.dim
        yield {
            "benchmark": "kmeans",
            "shape": {**shape._asdict(), "clusters": count},
            "iteration_ms": ms,
            "gemm_ms_at_roofline": flops / peak["tflops"] / 1e9,
            **_flash_kmeans(dense, first, repeats, ms),
        }


def _flash_kmeans(dense: Tensor, first: Tensor, repeats: int, ms: float) -> dict[str, Any]:
    """flash-kmeans 0.3.1, one Euclidean iteration; absent where the package is."""
    try:
        iterate = importlib.import_module("flash_kmeans.kmeans_triton_impl")._euclid_iter
    except ImportError:
        return {"flash_kmeans_ms": None, "speedup": None}
    squares, start = (dense**2).sum(-1), dense[:, first].contiguous()
    other = median_ms(lambda: iterate(dense, squares, start), repeats)
    return {"flash_kmeans_ms": other, "speedup": other / ms}
