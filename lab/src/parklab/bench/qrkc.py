"""What QRKC adds to k-means: the metric of the queries, its Cholesky factor, the transform of the keys, means in key
space.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parkattn.ops.cluster.definition import initial_tokens, stabilise
from parklab.bench.problems import TINY, WAN_14B, Case, Shape, mixture, verdict
from parklab.bench.timing import median_ms


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
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
    plain = (centred.to(x.dtype) @ (root / size).to(x.dtype)).double()
    allowed = 2 * (plain - want).abs().max() + torch.finfo(x.dtype).eps * want.abs().max()
    yield verdict("transform_keys", (cluster.transform_keys(x, root, sample).double() - want).abs().max(), allowed)


def measure(
    device: torch.device, peak: dict[str, float], *, repeats: int = 7, rehearse: bool = False
) -> Iterator[dict[str, Any]]:
    from parkattn.ops.cluster import triton as cluster

    shape = TINY if rehearse else WAN_14B
    q, k = mixture(shape, 300, device), mixture(shape, 700, device)
    first = initial_tokens(shape.tokens, shape.key_blocks, 0).to(device)
    metric = stabilise(cluster.query_metric(q))
    root = torch.linalg.cholesky_ex(metric, check_errors=False).L
    _, _, _, order, ends = cluster.kmeans(k, first, iterations=1)
    parts = {
        "metric_ms": lambda: stabilise(cluster.query_metric(q)),
        "cholesky_ms": lambda: torch.linalg.cholesky_ex(metric, check_errors=False),
        "transform_ms": lambda: cluster.transform_keys(k, root, first),
        "means_ms": lambda: cluster.segment_mean(k, order, ends),
    }
    times = {name: median_ms(call, repeats) for name, call in parts.items()}

    def together() -> None:
        for call in parts.values():
            call()

    # the bytes each part must move: q once, k read and written, k once
    moved = 4 * q.numel() * q.element_size()
    at_roofline = moved / peak["gbytes_per_s"] / 1e6
    yield {
        "benchmark": "qrkc",
        "shape": shape._asdict(),
        "ms": median_ms(together, repeats),
        **times,
        "bytes_ms_at_roofline": at_roofline,
    }
