"""Block borders on multiples: pair distances, the chain of nearest centroids, sort keys inside a cluster, labels by
position.

The definition is `parkattn.ops.cluster.borders`. Nothing here waits for the GPU, and a head's result does not depend on
other heads.
"""

import torch
import triton
import triton.language as tl

from .. import tiles
from ..triton_versions import FP_FUSION

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off

PAIR_TILE = 64
LAST = tl.constexpr(3.0e38)  # where a distance is NaN or a cluster empty: behind everything else


@triton.jit
def _pair_distances(points, out, count, D: tl.constexpr, TILE: tl.constexpr):
    """out[u, v] = |p_u - p_v|^2 for points [b*h d count], fp32, exactly symmetric.  Grid (tiles, tiles, b*h).
     Traffic: 4 count^2 bytes out per head.
    """
    bh = tl.program_id(2).to(tl.int64)
    u = tl.program_id(0) * TILE + tl.arange(0, TILE)
    v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    points += bh * count * D
    total = tl.zeros([TILE, TILE], tl.float32)
    for i in range(D):
        a = tl.load(points + i * count + u, mask=u < count, other=0.0)
        b = tl.load(points + i * count + v, mask=v < count, other=0.0)
        step = a[:, None] - b[None, :]
        total += step * step
    cell = bh * count * count + u.to(tl.int64)[:, None] * count + v[None, :]
    tl.store(out + cell, total, mask=(u < count)[:, None] & (v < count)[None, :])


@triton.jit
def _walk_chain(distance, far, sizes, chain, slot, ends, count, multiple, LANES: tl.constexpr):
    """chain[i] = the cluster at place i, slot its inverse, ends[i] = where block i ends, on a multiple.
     Grid (b*h): one row of distances per step.
    """
    bh = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, LANES)
    inside = v < count
    distance += bh * count * count
    sizes += bh * count
    chain += bh * count
    slot += bh * count
    ends += bh * count
    size = tl.load(sizes + v, mask=inside, other=0)
    occupied = size > 0
    members = tl.sum(size, 0)
    height = tl.where(occupied, tl.load(far + bh * count + v, mask=inside, other=0.0), -1.0)
    height = tl.where(height == height, height, LAST)
    at = tl.min(tl.where(height == tl.max(height, 0), v, LANES), 0)
    open_ = inside
    position = 0
    for i in range(count):
        position += tl.load(sizes + at)
        rounded = tl.minimum((position + multiple // 2) // multiple * multiple, members)
        tl.store(chain + i, at)
        tl.store(slot + at, i)
        tl.store(ends + i, tl.where(position == members, members, rounded))
        row = tl.load(distance + at.to(tl.int64) * count + v, mask=inside, other=0.0)
        open_ = open_ & (v != at)
        row = tl.where(occupied & (row < LAST), row, LAST)
        row = tl.where(open_, row, float("inf"))
        at = tl.minimum(tl.min(tl.where(row == tl.min(row, 0), v, LANES), 0), count - 1)


@triton.jit
def _sort_keys(x, labels, slot, direction, middle, keys, heads, n, count, xb, xh, xn, D: tl.constexpr,
               ROWS: tl.constexpr):
    """keys[i] = head, place of i's cluster in the chain, place of i between its neighbours (24 bits).
     Grid (row tiles, b*h).  Traffic: x once.
    """
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    column = tl.arange(0, D)
    label = tl.load(labels + bh * n + i, mask=live, other=count)
    clustered = label < count
    place = tl.where(clustered, tl.load(slot + bh * count + label, mask=clustered, other=0), count)
    rows = x + (bh // heads) * xb + (bh % heads) * xh + i.to(tl.int64)[:, None] * xn + column[None, :]
    row = tl.load(rows, mask=clustered[:, None], other=0.0).to(tl.float32)
    along = tl.load(direction + (bh * count + place)[:, None] * D + column[None, :], mask=clustered[:, None], other=0.0)
    where = tl.sum(row * along, 1) - tl.load(middle + bh * count + place, mask=clustered, other=0.0)
    where = where / (1.0 + tl.abs(where))  # keeps the order, in (-1, 1)
    where = tl.where(clustered & (where == where), where, 0.0)
    fine = tl.minimum(((where + 1.0) * 8388608.0).to(tl.int64), 16777215)
    tl.store(keys + bh * n + i, (bh << 44) | (place.to(tl.int64) << 24) | fine, mask=live)


@triton.jit
def _relabel(order, ends, labels, n, count, STEPS: tl.constexpr, TOKENS: tl.constexpr):
    """labels[order[i]] = the block position i lies in: the ends that are not above i.  Grid (chunks, b*h)."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = i < n
    low = tl.zeros([TOKENS], tl.int32)
    high = tl.zeros([TOKENS], tl.int32) + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        passed = tl.load(ends + bh * count + middle, mask=live & (low < high), other=0) <= i
        low = tl.where(passed & (low < high), middle + 1, low)
        high = tl.where(passed, high, middle)
    tl.store(labels + tl.load(order + bh * n + i, mask=live, other=0), low, mask=live)


def walk_chain(centroids: torch.Tensor, sizes: torch.Tensor, multiple: int) -> tuple[torch.Tensor, ...]:
    """centroids fp32 [b*h c d], sizes int32 [b*h c] -> (chain, slot, ends), int32 [b*h c] each."""
    bh, count, d = centroids.shape
    occupied = (sizes > 0).unsqueeze(-1)
    mean = (centroids * occupied).sum(1, keepdim=True) / occupied.sum(1, keepdim=True)
    far = (centroids - mean).square().sum(-1)
    distance = torch.empty(bh, count, count, device=centroids.device, dtype=torch.float32)
    side = triton.cdiv(count, PAIR_TILE)
    # column by column: neighbouring threads read neighbouring points
    _pair_distances[(side, side, bh)](centroids.mT.contiguous(), distance, count, D=d, TILE=PAIR_TILE, num_warps=4,
                                      **FP_FUSION)
    chain, slot, ends = torch.empty(3, bh, count, device=centroids.device, dtype=torch.int32).unbind(0)
    _walk_chain[(bh,)](distance, far, sizes, chain, slot, ends, count, multiple, LANES=triton.next_power_of_2(count),
                       num_warps=4, **FP_FUSION)
    return chain, slot, ends


def round_borders(x: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor, sizes: torch.Tensor,
                  multiple: int) -> torch.Tensor:
    """x [b h n d], labels int32 [b h n], centroids fp32 [b h c d], sizes int32 [b h c] -> labels int32 [b h n],
    numbered along the chain.
    """
    tiles.check_rows(x, "x")
    b, h, n, d = x.shape
    count = sizes.shape[-1]
    centroids, sizes = centroids.reshape(b * h, count, d).float().contiguous(), sizes.reshape(b * h, count).contiguous()
    chain, slot, ends = walk_chain(centroids, sizes, multiple)
    place = torch.arange(count, device=x.device).expand(b * h, count)
    last = (sizes > 0).sum(-1, keepdim=True) - 1
    along = centroids.gather(1, chain.long().unsqueeze(-1).expand(-1, -1, d))
    neighbours = (place + 1).minimum(last.clamp(min=0)), (place - 1).clamp(min=0)
    after, before = (along.gather(1, at.unsqueeze(-1).expand(-1, -1, d)) for at in neighbours)
    direction = after - before
    # a token at the next centroid is about half a step along
    direction = (direction / direction.square().sum(-1, keepdim=True).clamp(min=1e-30)).contiguous()
    middle = (along * direction).sum(-1)
    keys = torch.empty(b * h, n, device=x.device, dtype=torch.int64)
    rows = tiles.permute_tile(d, x.dtype, tiles.arch_of(x))
    labels = labels.contiguous()
    _sort_keys[(triton.cdiv(n, rows["ROWS"]), b * h)](
        x, labels, slot, direction, middle, keys, h, n, count, x.stride(0), x.stride(1), x.stride(2), D=d, **rows,
        **FP_FUSION)
    order = keys.view(-1).sort(stable=True).indices
    out = torch.empty_like(labels)
    _relabel[(triton.cdiv(n, 1024), b * h)](order, ends, out, n, count, STEPS=count.bit_length() + 1, TOKENS=1024,
                                            num_warps=4, **FP_FUSION)
    return out
