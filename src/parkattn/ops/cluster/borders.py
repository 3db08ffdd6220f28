"""Block borders on round positions, so that attention in tiles computes no padding.

Clusters end anywhere. In a kernel that takes keys in granules of 32 and queries in tiles of 64 rows, a border that lies
elsewhere wastes part of a tile. Here a few tokens per border change blocks instead: clusters are laid out along a chain
of nearest centroids, tokens inside a cluster from its predecessor's side to its successor's, and each border moves to
the nearest multiple. So a token that moves joins the block next to its own, and those nearest to it move. Not in the
paper: a multiple of 1 is exactly the paper. DESIGN.md has what it costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parkattn.checks import expect_count
from parkattn.ops.cluster.definition import Clustering
from parkattn.segments import by_head, compute_dtype, heads, segment_mean, segment_sizes

# a block must hold this many multiples on average, else the multiple is halved
MULTIPLES_PER_BLOCK = 2


def round_borders(x: Tensor, found: Clustering, multiple: int) -> Clustering:
    """The clusters of x [b h n d] as blocks that begin at multiples; 1 changes nothing."""
    if multiple == 1:
        return found
    labels = round_labels(x, found.labels, found.centroids, multiple)
    return Clustering(labels, *segment_mean(x, labels, found.clusters))


def round_labels(x: Tensor, labels: Tensor, centroids: Tensor, multiple: int) -> Tensor:
    """Labels [b h n] of x [b h n d] in clusters with these means [b h c d] -> labels of as many blocks, numbered along
    the chain.

    With tokens sorted by label, every block begins at a multiple; only the last ends elsewhere. Tokens that were not
    clustered (label c) stay so. Blocks may be empty.
    """
    expect_count("multiple", multiple)
    if multiple == 1:
        return labels
    rounded = [_round_head(x_h, labels_h, means_h, multiple) for x_h, labels_h, means_h in heads(x, labels, centroids)]
    return by_head(rounded, x)


def fitting_multiple(multiple: int, tokens: int, clusters: int) -> int:
    """The multiple, halved until blocks hold MULTIPLES_PER_BLOCK of it on average, so that small blocks stay."""
    while multiple > 1 and tokens < MULTIPLES_PER_BLOCK * multiple * clusters:
        multiple //= 2
    return multiple


def _round_head(x: Tensor, labels: Tensor, centroids: Tensor, multiple: int) -> Tensor:
    count, n = len(centroids), len(labels)
    sizes = segment_sizes(labels, count)
    chain = nearest_chain(centroids, sizes > 0)
    # where each token's cluster stands in the chain, and the token between the clusters before and after
    slot = torch.full((count + 1,), count, device=labels.device)
    slot[chain] = torch.arange(count, device=labels.device)
    slot = slot[labels.long()]
    between = (x.to(centroids.dtype) * directions(centroids, chain, sizes)[slot]).sum(-1)
    first = between.argsort(stable=True)
    order = first[slot[first].argsort(stable=True)]
    ends = sizes[chain].cumsum(0)
    rounded = ((ends + multiple // 2) // multiple * multiple).clamp(max=ends[-1])
    rounded = torch.where(ends == ends[-1], ends, rounded)
    block = torch.searchsorted(rounded, torch.arange(n, device=labels.device), right=True)
    return torch.empty_like(labels).scatter_(0, order, block.to(labels.dtype))


def nearest_chain(centroids: Tensor, occupied: Tensor) -> Tensor:
    """An order of the clusters [c]: from the one farthest from the mean always on to the nearest not yet visited, empty
    ones last.

    centroids [c d], occupied [c] bool. Ties go to the lower index.
    """
    points = centroids.to(compute_dtype(centroids.dtype))
    points = points - points[occupied].mean(0)
    squares = points.square().sum(-1)
    last = torch.finfo(points.dtype).max
    at, visited, chain = torch.where(occupied, squares, -1.0).argmax(), torch.zeros_like(occupied), []
    for _ in range(len(points)):
        chain.append(at)
        visited[at] = True
        # |x - y|^2 without the |x|^2 that all y share; NaN must still give an order
        distance = torch.addmv(squares, points, points[at], alpha=-2).nan_to_num(nan=last)
        at = torch.where(occupied, distance, last).masked_fill(visited, torch.inf).argmin()
    return torch.stack(chain)


def directions(centroids: Tensor, chain: Tensor, sizes: Tensor) -> Tensor:
    """From the centroid before to the one after, per place in the chain [c+1 d]; at its ends the cluster itself."""
    last = (sizes > 0).sum() - 1
    place = torch.arange(len(chain), device=chain.device)
    along = centroids[chain]
    return torch.nn.functional.pad(along[(place + 1).minimum(last)] - along[(place - 1).clamp(min=0)], (0, 0, 0, 1))
