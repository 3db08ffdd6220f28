"""Which key blocks a query block needs: how much attention it gives to each, estimated, and which of them are kept.

PAMA and the three estimators it is compared with:

|                 | queries   | keys      |
|-----------------|-----------|-----------|
| pama            | all       | centroids |
| query_centroid  | centroids | centroids |
| full_key        | centroids | all       |
| exact           | all       | all       |

Each returns [b h qb kb] in float32 (float64 for float64 input) whose rows sum to 1 (0 for an empty query block). Tokens
with a label >= count (text, padding) take no part: their blocks are decided by role, not by score.

Selection turns importance [b h qb kb] into a bool mask of the same shape. Its sums are float32: in bfloat16 a running
sum over a flat row stops growing and everything is kept.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_fraction
from parkattn.ops.cluster.definition import Clustering
from parkattn.plan import Blocks
from parkattn.segments import by_head, compute_dtype, heads, membership, segment_mean

QUERIES_AT_ONCE = 1024  # bounds the [queries, keys] scores of the full-key estimators
Crossing = Literal["include", "exclude"]  # of the block whose mass crosses p


def centroid_log_mass(q: Tensor, centroids: Tensor, sizes: Tensor, *, scale: float | None = None) -> Tensor:
    """S^_iv = q_i . c_v / sqrt(d) + log n_v (eq. pama_block_score). [... n d], [... c d], [... c] -> [... n c]"""
    scale = _scale(q, scale)
    dtype = compute_dtype(q.dtype)
    return q.to(dtype) @ centroids.to(dtype).mT * scale + sizes.to(dtype).log().unsqueeze(-2)


def exact_log_mass(q: Tensor, k: Tensor, key_labels: Tensor, key_count: int, *, scale: float | None = None) -> Tensor:
    """S*_iv = log sum_{j in K_v} exp(q_i . k_j / sqrt(d)) (eq. key_logmass_estimates). -> [b h n c]"""
    scale = _scale(q, scale)

    def one_head(queries: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
        scores = _scores(queries, keys, scale)
        blocks = [scores[:, labels == v] for v in range(key_count)]
        return torch.stack([block.logsumexp(-1) for block in blocks], -1)

    return by_head([one_head(*head) for head in heads(q, k, key_labels)], q)


def pama(
    q: Tensor, k: Tensor, query_labels: Tensor, query_count: int, key_labels: Tensor, key_count: int, *,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Each query's softmax over key-block centroids, averaged inside its query block (eq. pama_block_importance)."""
    centroids, sizes = segment_mean(k, key_labels, key_count)

    def one_head(queries: Tensor, labels: Tensor, centers: Tensor, members: Tensor) -> Tensor:
        weights = centroid_log_mass(queries, centers, members, scale=_scale(q, scale)).softmax(-1)
        return segment_mean(weights, labels, query_count)[0]

    return by_head([one_head(*head) for head in heads(q, query_labels, centroids, sizes)], q)


def query_centroid(
    q: Tensor, k: Tensor, query_labels: Tensor, query_count: int, key_labels: Tensor, key_count: int, *,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The query block's mean, one softmax over key-block centroids: what PAMA replaces."""
    centers, members = segment_mean(q, query_labels, query_count)
    centroids, sizes = segment_mean(k, key_labels, key_count)

    def one_head(centers: Tensor, members: Tensor, centroids: Tensor, sizes: Tensor) -> Tensor:
        weights = centroid_log_mass(centers, centroids, sizes, scale=_scale(q, scale)).softmax(-1)
        return weights * (members > 0).unsqueeze(-1)

    return by_head([one_head(*head) for head in heads(centers, members, centroids, sizes)], centers)


def full_key(
    q: Tensor, k: Tensor, query_labels: Tensor, query_count: int, key_labels: Tensor, key_count: int, *,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """phi_v at the query block's mean, over every key (eq. app_query_estimators)."""
    centers, members = segment_mean(q, query_labels, query_count)

    def one_head(queries: Tensor, sizes: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
        return _block_weights(queries, keys, labels, key_count, _scale(q, scale)) * (sizes > 0).unsqueeze(-1)

    return by_head([one_head(*head) for head in heads(centers, members, k, key_labels)], centers)


def exact(
    q: Tensor, k: Tensor, query_labels: Tensor, query_count: int, key_labels: Tensor, key_count: int, *,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """W_uv, the attention that dense queries of block u really give to block v (eq. block_importance)."""

    def one_head(queries: Tensor, query_label: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
        weights = _block_weights(queries, keys, labels, key_count, _scale(q, scale))
        return segment_mean(weights, query_label, query_count)[0]

    return by_head([one_head(*head) for head in heads(q, query_labels, k, key_labels)], q)


def score_spread(
    q: Tensor,
    k: Tensor,
    keys: Clustering,
    *,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """How far scores lie from those of their blocks' centroids, root mean square over a head's queries and keys [b h]:

        s^2 = mean_ij (q_i . (k_j - c_v(j)) / sqrt(d))^2 = <Q^T Q, E^T E> / (n m d),    E_j = k_j - c_v(j).

    QRKC makes it small. Queries not in query_valid [b n], keys not in valid [b m] and keys with a label >= c take no
    part.
    """
    factor = abs(_scale(q, scale))  # a spread has no sign

    def of_every_head(chosen: Tensor | None, x: Tensor) -> Tensor:
        everyone = x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool)
        return (everyone if chosen is None else chosen).unsqueeze(1).expand(x.shape[:3])

    def one_head(queries: Tensor, rows: Tensor, keys: Tensor, member: Tensor, labels: Tensor, at: Tensor) -> Tensor:
        at, count = at.to(compute_dtype(q.dtype)), len(at)
        queries, member = queries.to(at.dtype) * rows.unsqueeze(-1), member & (labels < count)
        errors = (keys.to(at.dtype) - at[labels.long().clamp(max=count - 1)]) * member.unsqueeze(-1)
        total = ((queries.T @ queries) * (errors.T @ errors)).sum()
        return (total / (rows.sum() * member.sum()).clamp(min=1)).sqrt() * factor

    sides = q, of_every_head(query_valid, q), k, of_every_head(valid, k)
    return by_head([one_head(*head) for head in heads(*sides, keys.labels, keys.centroids)], q).float()


ESTIMATORS = {"pama": pama, "query-centroid": query_centroid, "full-key": full_key, "exact": exact}


def estimate(
    kind: str, q: Tensor, k: Tensor, query_blocks: Blocks, queries: Clustering, keys: Clustering, *, scale: float | None
) -> Tensor:
    """Attention between clusters [b h c_q c_k]; the first c_q of query_blocks are the clusters."""
    estimator = ESTIMATORS[kind]
    return estimator(q, k, queries.labels, queries.clusters, keys.labels, keys.clusters, scale=scale)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    dtype = compute_dtype(queries.dtype)
    return queries.to(dtype) @ keys.to(dtype).T * scale


def _block_weights(queries: Tensor, keys: Tensor, labels: Tensor, count: int, scale: float) -> Tensor:
    """Dense attention weights summed inside key blocks: [n d], [m d], [m] -> [n count]"""
    member = labels < count
    keys, blocks = keys[member], membership(labels[member], count, compute_dtype(keys.dtype))
    return torch.cat([_scores(chunk, keys, scale).softmax(-1) @ blocks for chunk in queries.split(QUERIES_AT_ONCE)])


def select_top_p(
    importance: Tensor, p: float, *, sizes: Tensor | None = None, floor: float = 0.0, crossing: Crossing = "include"
) -> Tensor:
    """Keep blocks in descending importance until their mass reaches p; the block that crosses p is kept (or, as some
    baselines do, dropped with crossing="exclude"). p = 1 keeps every non-empty block.

    sizes [b h kb] marks empty blocks, which are never kept; floor keeps at least that share of the non-empty ones.
    """
    expect_fraction("p", p, zero=False)
    expect_fraction("floor", floor, zero=True)
    expect_choice("crossing", crossing, get_args(Crossing))
    occupied = _occupied(importance, sizes)
    ranked, order = _rank(importance, occupied)
    mass = ranked.clamp(min=0).cumsum(-1)
    before = torch.nn.functional.pad(mass, (1, 0))[..., :-1]
    # written as "not reached" so that a NaN row keeps everything and shows as NaN in the output, as in dense attention
    keep = ~(before >= p) if crossing == "include" else ~(mass > p)
    keep[..., 0] = True
    if p == 1:
        keep[:] = True
    if floor > 0:
        keep |= _first(keep, _share(occupied, floor))
    return _kept(torch.zeros_like(keep).scatter_(-1, order, keep), occupied, importance)


def select_top_k(importance: Tensor, ratio: float, *, sizes: Tensor | None = None) -> Tensor:
    """Keep the ceil(ratio * non-empty blocks) most important blocks, at least one."""
    expect_fraction("ratio", ratio, zero=False)
    occupied = _occupied(importance, sizes)
    count = _share(occupied, ratio).int()
    # a row of NaN keeps its first blocks, as a sort would have it
    weights = importance.float().masked_fill(~occupied, -1.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # the least weight that is kept; no more blocks than this are kept in any head, and no sort of whole rows is needed
    best = weights.topk(math.ceil(max(weights.shape[-1] * ratio - 1e-9, 1)), dim=-1).values
    least = best.gather(-1, (count - 1).long().expand(*best.shape[:-1], 1))
    above, equal = weights > least, weights == least
    # of equal weights the first
    room = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    keep = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
    return _kept(keep, occupied, importance)


def select_shared(
    importance: Tensor, p: float, *, sizes: Tensor, floor: float = 0.0, spread: Tensor | None = None
) -> Tensor:
    """Keep blocks whose keys draw at least (1 - p) / p times the attention of the mean key, and each row's heaviest:

        s W_uv / n_v >= tau / m,    tau = (1 - p) / p,    m = sum_v n_v,    s = 1 without `spread`.

    W_uv / n_v is mass per cost: but for rows whose heaviest block is below it, no mask of as many pairs keeps more
    mass. With `spread` [b h] (`score_spread`) it is error per cost: what a stand-in gets wrong is its mass times s. The
    threshold is a number and not a rank among the others: a head's mask does not depend on the heads beside it. p = 1
    keeps every non-empty block. sizes [b h kb]; floor: as in `select_top_p`.
    """
    expect_fraction("p", p, zero=False)
    expect_fraction("floor", floor, zero=True)
    occupied = _occupied(importance, sizes)
    members = sizes.unsqueeze(-2).float()
    relative = importance.float() * (members.sum(-1, keepdim=True) / members.clamp(min=1))
    if spread is not None:
        relative = relative * spread[..., None, None]
    # written as "not below" so that a NaN row keeps everything, as in select_top_p
    mask = ~(relative < (1 - p) / p)
    mask = mask | (torch.arange(mask.shape[-1], device=mask.device) == importance.argmax(-1, keepdim=True))
    if floor > 0:
        ranked, order = _rank(importance, occupied)
        mask = mask | torch.zeros_like(mask).scatter_(-1, order, _first(ranked, _share(occupied, floor)))
    return _kept(mask, occupied, importance)


def kept_mass(importance: Tensor, mask: Tensor, query_sizes: Tensor) -> Tensor:
    """Share of the importance that a mask keeps, mean over query tokens: [b h qb kb], [b h qb] -> [b h]"""
    rows = query_sizes.to(importance.dtype)
    return (((importance * mask).sum(-1) * rows).sum(-1) / rows.sum(-1)).float()


def _occupied(importance: Tensor, sizes: Tensor | None) -> Tensor:
    """[b h 1 kb] bool"""
    return torch.ones_like(importance[..., :1, :], dtype=torch.bool) if sizes is None else (sizes > 0).unsqueeze(-2)


def _rank(importance: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Descending importance and the block at each rank; empty blocks last, ties to the lower index."""
    return importance.float().masked_fill(~occupied, -1.0).sort(dim=-1, descending=True, stable=True)


def _share(occupied: Tensor, ratio: float) -> Tensor:
    """ceil(ratio * non-empty blocks) [b h 1 1], at least 1."""
    counts = occupied.sum(-1, keepdim=True)
    # 0.1 * 30 must be 3, not the 4 that the binary 0.1 rounds up to
    return (counts.double() * ratio - 1e-9).ceil().clamp(min=1)


def _first(like: Tensor, count: Tensor) -> Tensor:
    return (torch.arange(like.shape[-1], device=like.device) < count).expand(like.shape)


def _kept(mask: Tensor, occupied: Tensor, importance: Tensor) -> Tensor:
    """The mask without blocks that have no key or no query."""
    return mask & occupied & ~(importance.sum(-1, keepdim=True) == 0)
