"""k-means, label sort, segment means and the QRKC metric and transform, batched over heads.

Distances.  With mu any vector per head and c' = round(c - mu) in the input dtype, the effective centroid is mu + c':
  |x - (mu + c')|^2 / 2 = |x|^2 / 2 - x.mu + |mu|^2 / 2   (the same for every cluster)   + (|c'|^2 / 2 + mu.c') - x.c'.
So only centroids are centred: x is read as it is, and a large offset common to all tokens costs no bf16 precision.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .. import tiles
from ..products import dot
from ..triton_versions import FP_FUSION

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off



@triton.jit
def _assign(x, centred, half, valid, labels, heads, n, clusters, xb, xh, xn, HAS_VALID: tl.constexpr, D: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr):
    """labels[i] = argmin_v half[v] - x[i].centred[v], the lowest v among equals; `clusters` where the token is not
    valid.

    Grid (token tiles, b*h).  Traffic: n d elements read once, the centroids of a head from L2 once per tile, 4 n bytes
    out.
    """
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    live = i < n
    column = tl.arange(0, D)
    rows = x + (bh // heads) * xb + (bh % heads) * xh + i.to(tl.int64)[:, None] * xn + column[None, :]
    tile = tl.load(rows, mask=live[:, None], other=0.0)
    v = tl.arange(0, BN)
    centred += bh * clusters * D
    half += bh * clusters
    least = tl.full([BM], float("inf"), tl.float32)
    label = tl.zeros([BM], tl.int32)
    for first in range(0, clusters, BN):
        inside = first + v < clusters
        c = tl.load(centred + (first + v)[:, None] * D + column[None, :], mask=inside[:, None], other=0.0)
        h = tl.load(half + first + v, mask=inside, other=float("inf"))
        score = h[None, :] - dot(tile, tl.trans(c))
        low = tl.min(score, 1)
        at = tl.min(tl.where(score == low[:, None], (first + v)[None, :], clusters - 1), 1)
        label = tl.where(low < least, at, label)
        least = tl.minimum(low, least)
    if HAS_VALID:
        ok = tl.load(valid + (bh // heads) * n + i, mask=live, other=0)
        label = tl.where(ok != 0, label, clusters)
    tl.store(labels + bh * n + i, label, mask=live)


@triton.jit
def _count_labels(labels, counts, starts, n, chunks, count, BINS: tl.constexpr, TOKENS: tl.constexpr):
    """Per chunk of TOKENS tokens: counts[chunk, label] and its exclusive prefix over labels.  Grid (chunks, b*h)."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # tokens past the end go to bin count + 1, behind those that are not clustered (bin count)
    label = tl.load(labels + bh * n + i, mask=i < n, other=count + 1)
    histogram = tl.histogram(label, BINS)
    row = (bh * chunks + tl.program_id(0)) * BINS + tl.arange(0, BINS)
    tl.store(counts + row, histogram)
    tl.store(starts + row, tl.cumsum(histogram, 0) - histogram)


@triton.jit
def _scan_chunks(counts, starts, totals, chunks, BINS: tl.constexpr, CHUNKS: tl.constexpr, BB: tl.constexpr):
    """starts[chunk, label] <- tokens of that label in earlier chunks - starts; totals[label].
     Grid (bins / BB, b*h).
    """
    bh = tl.program_id(1).to(tl.int64)
    bin_ = tl.program_id(0) * BB + tl.arange(0, BB)
    running = tl.zeros([BB], tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        cell = (bh * chunks + chunk.to(tl.int64))[:, None] * BINS + bin_[None, :]
        live = (chunk < chunks)[:, None] & (bin_ < BINS)[None, :]
        here = tl.load(counts + cell, mask=live, other=0)
        inside = tl.load(starts + cell, mask=live, other=0)
        tl.store(starts + cell, running[None, :] + tl.cumsum(here, 0) - here - inside, mask=live)
        running += tl.sum(here, 0)
    tl.store(totals + bh * BINS + bin_, running, mask=bin_ < BINS)


@triton.jit
def _scan_totals(totals, offsets, count, BINS: tl.constexpr):
    """offsets = exclusive prefix of totals.  Grid (b*h)."""
    bh = tl.program_id(0).to(tl.int64)
    label = tl.arange(0, BINS)
    total = tl.load(totals + bh * BINS + label)
    tl.store(offsets + bh * (count + 1) + label, tl.cumsum(total, 0) - total, mask=label <= count)


@triton.jit
def _place(labels, shifts, offsets, order, n, chunks, count, BINS: tl.constexpr, TOKENS: tl.constexpr):
    """order[offsets[label] + rank] = token, ranks in token order.  Grid (chunks, b*h).

    A chunk is sorted by label * TOKENS + token: position i of the sorted chunk lands at i + shifts[chunk, label] +
    offsets[label].
    """
    bh = tl.program_id(1).to(tl.int64)
    here = tl.arange(0, TOKENS)
    first = tl.program_id(0) * TOKENS
    label = tl.load(labels + bh * n + first + here, mask=first + here < n, other=count + 1)
    key = tl.sort(label * TOKENS + here)
    label = key // TOKENS
    live = label <= count
    shift = tl.load(shifts + (bh * chunks + tl.program_id(0)) * BINS + label, mask=live, other=0)
    start = tl.load(offsets + bh * (count + 1) + label, mask=live, other=0)
    tl.store(order + bh * n + here + shift + start, first + key % TOKENS, mask=live)


@triton.jit
def _segment_sum(x, order, offsets, sums, heads, n, count, xb, xh, xn, SPLITS: tl.constexpr, D: tl.constexpr,
                 ROWS: tl.constexpr):
    """sums[segment, split] = sum of x over the split's share of rows order[offsets[v] : offsets[v+1]], fp32, in sorted
    order.

    Grid (segments * SPLITS): long segments are shared by SPLITS programs.  Traffic: n d elements gathered once.
    """
    segment = (tl.program_id(0) // SPLITS).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    bh = segment // count
    v = segment % count
    begin = tl.load(offsets + bh * (count + 1) + v)
    end = tl.load(offsets + bh * (count + 1) + v + 1)
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), ROWS) * ROWS
    begin += split * share
    end = tl.minimum(end, begin + share)
    column = tl.arange(0, D)
    r = tl.arange(0, ROWS)
    x += (bh // heads) * xb + (bh % heads) * xh
    order += bh * n
    total = tl.zeros([ROWS, D], tl.float32)
    # tokens are fetched one step early: the row loads depend on them
    token = tl.load(order + begin + r, mask=begin + r < end, other=0)
    for first in range(begin, end, ROWS):
        coming = tl.load(order + first + ROWS + r, mask=first + ROWS + r < end, other=0)
        live = (first + r < end)[:, None]
        row = tl.load(x + token.to(tl.int64)[:, None] * xn + column[None, :], mask=live, other=0.0)
        total += row.to(tl.float32)
        token = coming
    tl.store(sums + (segment * SPLITS + split) * D + column, tl.sum(total, 0))


@triton.jit
def _segment_finish(sums, offsets, old, mu, means, centred, half, segments, count, HAS_OLD: tl.constexpr,
                    CENTRE: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """means = sums / size (old or 0 where empty); on request c' = round(mean - mu) and |c'|^2 / 2 + mu.c'.
     Grid (segments / ROWS).
    """
    segment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = segment < segments
    bh = segment // count
    at = bh * (count + 1) + segment % count
    size = tl.load(offsets + at + 1, mask=live, other=0) - tl.load(offsets + at, mask=live, other=0)
    column = tl.arange(0, D)
    cell = segment.to(tl.int64)[:, None] * D + column[None, :]
    mean = tl.zeros([ROWS, D], tl.float32)
    for split in tl.static_range(SPLITS):
        mean += tl.load(sums + (segment.to(tl.int64) * SPLITS + split)[:, None] * D + column[None, :],
                        mask=live[:, None], other=0.0)
    mean = mean / tl.maximum(size, 1).to(tl.float32)[:, None]
    if HAS_OLD:
        mean = tl.where((size > 0)[:, None], mean, tl.load(old + cell, mask=live[:, None], other=0.0))
    tl.store(means + cell, mean, mask=live[:, None])
    if CENTRE:
        m = tl.load(mu + bh[:, None] * D + column[None, :], mask=live[:, None], other=0.0)
        rounded = (mean - m).to(centred.dtype.element_ty)
        c = rounded.to(tl.float32)
        tl.store(centred + cell, rounded, mask=live[:, None])
        tl.store(half + segment, tl.sum(c * (0.5 * c + m), 1), mask=live)


@triton.jit
def _metric_partial(
    q, valid, partial, heads, n, rows_per_split, qb, qh, qn, HAS_VALID: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr
):
    """partial[split, bh] = sum of q q^T over the split's rows, fp32.  Grid (splits, b*h, (d/BM)^2).
    Traffic: n d elements.
    """
    bh = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = D // BM
    a = (tl.program_id(2) // across) * BM + tl.arange(0, BM)
    b = (tl.program_id(2) % across) * BM + tl.arange(0, BM)
    q += (bh // heads) * qb + (bh % heads) * qh
    begin = tl.program_id(0) * rows_per_split
    end = tl.minimum(begin + rows_per_split, n)
    total = tl.zeros([BM, BM], tl.float32)
    for first in range(begin, end, BK):
        i = first + tl.arange(0, BK)
        live = i < end
        if HAS_VALID:
            live = live & (tl.load(valid + (bh // heads) * n + i, mask=live, other=0) != 0)
        row = q + i.to(tl.int64)[:, None] * qn
        left = tl.load(row + a[None, :], mask=live[:, None], other=0.0)
        right = tl.load(row + b[None, :], mask=live[:, None], other=0.0)
        total += dot(tl.trans(left), right)
    cell = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + bh) * D * D + a[:, None] * D + b[None, :]
    tl.store(partial + cell, total)


@triton.jit
def _transform(x, root, shift, out, heads, n, xb, xh, xn, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               STEPS: tl.constexpr):
    """out = x root - shift, fp32 until the store.  Grid (row tiles / STEPS, b*h, d/BN):
    R is loaded once per STEPS tiles.  Traffic: 2 n d elements.
    """
    bh = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)
    target = tl.program_id(2) * BN + tl.arange(0, BN)
    cell = bh * D * D + column[:, None] * D + target[None, :]
    right = tl.load(root + cell)
    offset = tl.load(shift + bh * D + target)
    x += (bh // heads) * xb + (bh % heads) * xh
    out += bh * n * D
    begin = tl.program_id(0) * (BM * STEPS)
    for row in range(begin, tl.minimum(begin + BM * STEPS, n), BM):
        i = row + tl.arange(0, BM)
        rows = tl.load(x + i.to(tl.int64)[:, None] * xn + column[None, :], mask=(i < n)[:, None], other=0.0)
        y = dot(rows, right) - offset[None, :]
        tl.store(out + i.to(tl.int64)[:, None] * D + target[None, :], y.to(out.dtype.element_ty), mask=(i < n)[:, None])


def assign(x: torch.Tensor, centred: torch.Tensor, half: torch.Tensor, valid: torch.Tensor | None = None
           ) -> torch.Tensor:
    """x [b h n d], centred [b*h c d] in x's dtype, half fp32 [b*h c], valid bool [b n] -> labels int32 [b h n]."""
    b, h, n, d = x.shape
    clusters = half.shape[-1]
    labels = torch.empty(b, h, n, device=x.device, dtype=torch.int32)
    tile = tiles.assign_tile(d, x.dtype, tiles.arch_of(x))
    flags = labels if valid is None else valid.to(torch.int8)
    _assign[(triton.cdiv(n, tile["BM"]), b * h)](
        x, centred, half, flags, labels, h, n, clusters, x.stride(0), x.stride(1), x.stride(2),
        HAS_VALID=valid is not None, D=d, **tile, **FP_FUSION
    )
    return labels


def sort_labels(labels: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """labels int32 [b h n] in [0, count] -> (order int32 [b h n], offsets int32 [b h count+1]).

    Stable counting sort.  Tokens labelled `count` (not clustered) come last, after offsets[count].
    """
    b, h, n = labels.shape
    tile = tiles.sort_tile(tiles.arch_of(labels))
    chunks, bins = triton.cdiv(n, tile["TOKENS"]), triton.next_power_of_2(count + 2)
    labels = labels.contiguous()
    counts, starts = torch.empty(2, b * h, chunks, bins, device=labels.device, dtype=torch.int32).unbind(0)
    totals = torch.empty(b * h, bins, device=labels.device, dtype=torch.int32)
    order = torch.empty(b, h, n, device=labels.device, dtype=torch.int32)
    offsets = torch.empty(b, h, count + 1, device=labels.device, dtype=torch.int32)
    _count_labels[(chunks, b * h)](labels, counts, starts, n, chunks, count, BINS=bins, **tile, **FP_FUSION)
    _scan_chunks[(triton.cdiv(bins, 32), b * h)](counts, starts, totals, chunks, BINS=bins, CHUNKS=64, BB=32,
                                                 num_warps=4, **FP_FUSION)
    _scan_totals[(b * h,)](totals, offsets, count, BINS=bins, num_warps=4, **FP_FUSION)
    _place[(chunks, b * h)](labels, starts, offsets, order, n, chunks, count, BINS=bins, **tile, **FP_FUSION)
    return order, offsets


def segment_mean(x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, *, old: torch.Tensor | None = None,
                 mu: torch.Tensor | None = None) -> Any:
    """x [b h n d], order int32 [b h n], offsets int32 [b h c+1] -> means fp32 [b*h c d]; empty segments take `old` or
    0.

    With mu fp32 [b*h d]: (means, centred in x's dtype [b*h c d], half fp32 [b*h c]), what `assign` takes.
    """
    b, h, n, d = x.shape
    count = offsets.shape[-1] - 1
    segments = b * h * count
    means = torch.empty(b * h, count, d, device=x.device, dtype=torch.float32)
    centred = torch.empty(b * h, count, d, device=x.device, dtype=x.dtype) if mu is not None else means
    half = torch.empty(b * h, count, device=x.device, dtype=torch.float32) if mu is not None else means
    tile = tiles.segment_tile(d, x.dtype, tiles.arch_of(x))
    splits = tiles.segment_splits(segments, tiles.arch_of(x))
    sums = torch.empty(segments, splits, d, device=x.device, dtype=torch.float32)
    _segment_sum[(segments * splits,)](x, order, offsets, sums, h, n, count, x.stride(0), x.stride(1), x.stride(2),
                                       SPLITS=splits, D=d, **tile, **FP_FUSION)
    _segment_finish[(triton.cdiv(segments, 16),)](sums, offsets, means if old is None else old,
                                                  means if mu is None else mu, means, centred, half, segments, count,
                                                  HAS_OLD=old is not None, CENTRE=mu is not None, SPLITS=splits, D=d,
                                                  ROWS=16, num_warps=4, **FP_FUSION)
    return means if mu is None else (means, centred, half)


def kmeans(x: torch.Tensor, initial: torch.Tensor, *, iterations: int = 10, start: torch.Tensor | None = None,
           valid: torch.Tensor | None = None) -> Any:
    """x [b h n d], initial int64 [c] or [b c] (token of each first centroid), start int32 [b h n] (labels to start
    from), valid bool [b n]

    -> (labels int32 [b h n], centroids fp32 [b h c d], sizes int32 [b h c], order int32 [b h n], offsets int32 [b h
    c+1]). Centroids are the means of the returned labels, 0 where empty; an empty cluster keeps its centroid while
    iterating.
    """
    tiles.check_rows(x, "x")
    b, h, _, d = x.shape
    clusters = initial.shape[-1]
    centroids = _tokens_at(x, initial).reshape(b * h, clusters, d).float()
    if start is not None:
        centroids = segment_mean(x, *sort_labels(start, clusters), old=centroids)
    labels, order, offsets, _ = lloyd(x, centroids, centroids.mean(1), iterations=iterations, valid=valid)
    centroids = segment_mean(x, order, offsets)
    return labels, centroids.view(b, h, clusters, d), offsets.diff(dim=-1), order, offsets


def lloyd(x: torch.Tensor, centroids: torch.Tensor, mu: torch.Tensor, *, iterations: int,
          valid: torch.Tensor | None = None, absent: torch.Tensor | None = None) -> Any:
    """x [b h n d], centroids fp32 [b*h c d], mu fp32 [b*h d] near their mean, valid bool [b n], absent bool [b*h c]:
    takes no token

    -> (labels int32 [b h n], order int32 [b h n], offsets int32 [b h c+1], the centroids fp32 [b*h c d] that gave these
    labels).
    """
    centred = (centroids - mu[:, None]).to(x.dtype)
    rounded = centred.float()
    half = (rounded * (0.5 * rounded + mu[:, None])).sum(-1)
    for step in range(iterations):
        labels = assign(x, centred, half if absent is None else half.masked_fill(absent, torch.inf), valid)
        order, offsets = sort_labels(labels, centroids.shape[1])
        if step < iterations - 1:
            centroids, centred, half = segment_mean(x, order, offsets, old=centroids, mu=mu)
    return labels, order, offsets, centroids


def query_metric(q: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """q [b h n d], valid bool [b n] -> G = Q^T Q / L, fp32 [b h d d], symmetric; L counts valid queries."""
    tiles.check_rows(q, "q")
    b, h, n, d = q.shape
    tile = tiles.metric_tile(d, q.dtype, tiles.arch_of(q))
    block = min(d, 128)
    splits = max(1, min(triton.cdiv(1024, b * h), triton.cdiv(n, 1024)))
    rows = triton.cdiv(triton.cdiv(n, splits), tile["BK"]) * tile["BK"]
    partial = torch.empty(splits, b * h, d, d, device=q.device, dtype=torch.float32)
    flags = partial if valid is None else valid.to(torch.int8)
    _metric_partial[(splits, b * h, (d // block) ** 2)](
        q, flags, partial, h, n, rows, q.stride(0), q.stride(1), q.stride(2), HAS_VALID=valid is not None, D=d,
        BM=block, **tile, **FP_FUSION
    )
    total = partial.sum(0).view(b, h, d, d)
    total = total / n if valid is None else total / valid.sum(-1).clamp(min=1).view(b, 1, 1, 1)
    return (total + total.mT) / 2


def transform_keys(k: torch.Tensor, root: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """k [b h n d], root fp32 [b h d d], sample int64 [s] or [b s] (tokens whose mean is subtracted) -> (k - mean) R /
    max|R| in k's dtype.

    Scale and shift per head change no assignment; they keep bf16 and fp16 features near one, whatever the metric's
    size.
    """
    tiles.check_rows(k, "k")
    b, h, n, d = k.shape
    # Cholesky factors come column-major
    root = (root / root.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)).to(k.dtype).contiguous()
    shift = (_tokens_at(k, sample).float().mean(2, keepdim=True) @ root.float()).view(b * h, d)
    out = torch.empty(b, h, n, d, device=k.device, dtype=k.dtype)
    tile = tiles.transform_tile(d, k.dtype, tiles.arch_of(k))
    block = min(d, 128)
    _transform[(triton.cdiv(n, tile["BM"] * tile["STEPS"]), b * h, d // block)](
        k, root, shift, out, h, n, k.stride(0), k.stride(1), k.stride(2), D=d, BN=block, **tile, **FP_FUSION
    )
    return out


def _tokens_at(x, tokens) -> torch.Tensor:
    """x [b h n d] at tokens [s], the same for every batch element, or [b s] -> [b h s d]."""
    b, h, _, d = x.shape
    return x[:, :, tokens] if tokens.ndim == 1 else x.gather(2, tokens[:, None, :, None].expand(b, h, -1, d))
