"""SparsePR (arXiv 2608.18484): each side clustered by how the other responds to it, a fixed density, and a repair from
probe rows.

Per head, video tokens only; s the scale, N video queries:

    M_K = mean of q q^T over sampled queries; F_K = V sqrt(lambda / mean lambda) of its top key_rank eigenpairs
    key clusters: k-means of F_K^T k over one root mean square;  kbar_v, vbar_v their means in the original space
    M_Q = covariance of the non-empty kbar_v; F_Q likewise from its top query_rank
    query clusters: k-means of F_Q^T q, each row over its own root mean square;  c_u their means in the original space

    score_uv  "value_error": log(E_uv / n_v), E as in svg_ear.py; "attention_mass": log sum_{j in v} e^{s c_u.k_j}
    u keeps key clusters by falling score until their tokens reach
        ceil((density - probes / N) (video and text keys)) - text keys

Repair (ProbeRepair): one probe query in each of the `probes` largest query clusters, the token nearest to the cluster's
mean feature, weight w = cluster size / mean of these sizes. With O the sparse output, R = dense row - O at the probes:

    X = (O - mean_w O) / std_w O,  Y = R - mean_w R,  B = argmin sum w |Y - X B|^2 + ridge |B|^2
    Psi = top repair_rank right singular vectors of sqrt(w) Y
    out = O + mean_w R + X B Psi Psi^T for every video row; probe rows get their dense rows.

Defaults are those of the authors' configurations: 300 and 1000 clusters, 25 Lloyd iterations at first and 2 warm ones
at every later step, density 0.22, 2048 sampled queries, ranks 48 and 64, 64 probes, ridge 0.1, repair rank 16, score
"value_error" (Wan2.2 "attention_mass"), 20 % dense steps (HunyuanVideo 10 %). They name no settings for Wan2.1.

Differences from the authors' code:
- the first centroids are distinct tokens, one per stretch of the sequence;
- a warm start begins from the means under earlier labels in the current feature space, theirs from earlier centroids;
- eigenpairs are exact off the GPU. On CUDA, where that would wait for the GPU, their span is followed by subspace
  iteration: 30 steps at first, later 2 from the plan before (theirs: exact at first, then 2), and Psi's by 30 steps;
- log(E / n) is held at 1e-12 before the factor e^{2t} (svg_ear.py), theirs at 1e-30, which is below rounding;
- the budget counts the probes that are really taken, and density 1 keeps every block;
- with fewer clusters than probes there are fewer probes, theirs takes first tokens instead;
- of tokens equally near to a mean, up to 1e-5 of the distance, the first is the probe;
- text is exact for every query, and is not repaired; padding is in nothing;
- not here, for they are no sparsity: their fused blocks, and reuse of the first layer's attention between guidance
  branches;
- below 16,384 tokens the clusters hold as many tokens as theirs do at 75,600.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from parkattn.checks import expect_choice, expect_count, expect_flag, expect_fraction, expect_positive
from parkattn.ops import cluster, outside_autocast
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.cluster.definition import Clustering
from parkattn.plan import Blocks, Plan, Roles, assign_roles
from parkattn.planned import values_of
from parkattn.segments import by_head, compute_dtype, heads, segment_mean
from parkattn.site import CallSite
from parklab.baselines.planners import ConfiguredPlanner, planned_entry
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.subspace import metric_factor, onto_leading
from parklab.baselines.svg2 import AuthorsClusters, centroid_weights, planned_blocks, with_borders
from parklab.baselines.svg_ear import fill_blocks, reduce_blocks, replacement_error

Score = Literal["value_error", "attention_mass"]
SCORES = get_args(Score)
LEAST_ERROR = 1e-12
NEARLY = 1 + 1e-5


@dataclass(frozen=True, kw_only=True)
class SparsePrConfig(AuthorsClusters, StudiedConfig):
    """Defaults are the authors'."""

    kmeans_iterations: int = 25
    refresh_interval: int | None = 1
    density: float = 0.22
    """Share of the keys that a video query sees, text and probes included."""
    samples: int = 2048
    """Evenly spaced queries that the key metric is measured on."""
    key_rank: int = 48
    """Dimensions of the space that keys are clustered in."""
    query_rank: int = 64
    """Dimensions of the space that queries are clustered in."""
    score: Score = "value_error"
    """value_error: keep blocks that their centroid would replace worst. attention_mass: keep what the mean query
    attends to.
    """
    repair: bool = True
    """Whether exact probe rows correct the output."""
    probes: int = 64
    """Exact query rows per head."""
    repair_rank: int = 16
    """Directions in which the output is corrected."""
    ridge: float = 0.1
    """Regularisation of the correction."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "wan2.2-14b": {"score": "attention_mass", "dense_layers": (0,)},
        "hunyuanvideo": {"dense_fraction": 0.1},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("density", self.density, zero=False)
        for name in ("samples", "key_rank", "query_rank", "probes", "repair_rank"):
            expect_count(name, getattr(self, name))
        expect_choice("score", self.score, SCORES)
        expect_flag("repair", self.repair)
        expect_positive("ridge", self.ridge)


class SparsePrPlanner(ConfiguredPlanner[SparsePrConfig]):
    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        config, backend = self.config, self.backend(q, site)
        roles = assign_roles(q, k, site.text, site.key_valid)
        counts = config.counts_in(q, k, site)
        warm = earlier if config.warm_start else None
        held = {} if warm is None else warm.memory
        kmeans = partial(
            cluster.kmeans,
            backend,
            iterations=config.kmeans_iterations if warm is None else config.warm_iterations,
            seed=config.seed,
        )

        metric = second_moment(*sampled(q, config.samples, roles.clustered_queries))
        factor, key_basis = metric_factor(metric, config.key_rank, held.get("key_basis"))
        features = key_features(k, factor, roles.clustered_keys)
        found = kmeans(
            features, counts.keys, start=None if warm is None else warm.keys.labels, valid=roles.clustered_keys
        )
        keys = in_original_space(k, with_borders(backend, features, found, counts.key_multiple))

        factor, query_basis = metric_factor(centroid_covariance(keys), config.query_rank, held.get("query_basis"))
        features = query_features(q, factor)
        found = kmeans(
            features, counts.queries, start=None if warm is None else warm.queries.labels, valid=roles.clustered_queries
        )
        found = with_borders(backend, features, found, counts.query_multiple)
        queries = in_original_space(q, found)

        taken = (queries.sizes > 0).sum(-1).clamp(max=config.probes if config.repair else 0)
        sizes = keys.sizes.long().unsqueeze(-2).expand(*keys.sizes.shape[:2], queries.clusters, -1)
        score = self._score(
            queries, keys, cluster.arrange(backend, *roles.key_blocks(keys.labels, keys.clusters)), q, k, site
        )
        budget = key_budget(q, k, site, roles, config.density, taken)[..., None, None]
        mask = fill_blocks(score.masked_fill(sizes == 0, -torch.inf), sizes, budget)
        bases = {"key_basis": key_basis, "query_basis": query_basis}
        memory = {name: basis for name, basis in bases.items() if basis is not None}
        if config.repair:
            memory |= probe_rows(features, found, config.probes)
        return planned_blocks(backend, roles, queries, keys, mask, centroid_weights(queries, keys, site.scale), memory)

    def _score(
        self, queries: Clustering, keys: Clustering, blocks: Blocks, q: Tensor, k: Tensor, site: CallSite
    ) -> Tensor:
        """[b h c_q c_k]"""
        if self.config.score == "attention_mass":
            return block_log_mass(queries, keys, blocks, k, site.scale)
        error = replacement_error(queries, keys, blocks, k, values_of(q, k, site), site.scale)
        members = keys.sizes.clamp(min=1).unsqueeze(-2)
        return (error.scaled / members).clamp(min=LEAST_ERROR).log() + 2 * error.largest


def sampled(q: Tensor, samples: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Evenly spaced video queries [b h s d], each once, and whether a place is used [b s]: all of them if there are not
    more.
    """
    b, h, n, d = q.shape
    place = torch.arange(min(samples, n), device=q.device).expand(b, -1)
    total = torch.full((b, 1), n, device=q.device) if valid is None else valid.sum(-1, keepdim=True)
    spread = (2 * place * (total - 1) + samples - 1) // max(1, 2 * (samples - 1))
    spread = spread if samples > 1 else torch.zeros_like(place)
    chosen = torch.where(total <= samples, place, spread)
    used = chosen < total
    if valid is not None:
        # video queries first, in their order
        chosen = (~valid).to(torch.uint8).argsort(stable=True).gather(1, chosen)
    return q.gather(2, chosen[:, None, :, None].expand(b, h, -1, d)), used


def second_moment(rows: Tensor, used: Tensor) -> Tensor:
    """mean of x x^T over used rows: [b h s d], [b s] -> [b h d d] float64, not centred"""
    x = rows.to(compute_dtype(rows.dtype)) * used[:, None, :, None]
    return (x.mT @ x).double() / used.sum(-1).view(-1, 1, 1, 1)


def centroid_covariance(found: Clustering) -> Tensor:
    """Covariance of the means of non-empty clusters, each counted once: [b h d d] float64"""
    filled = (found.sizes > 0).double().unsqueeze(-1)
    centroids = found.centroids.double()
    off = (centroids - (centroids * filled).sum(-2, True) / filled.sum(-2, True)) * filled
    return off.mT @ off / filled.sum(-2, True)


def key_features(k: Tensor, factor: Tensor, valid: Tensor | None) -> Tensor:
    """F^T k over the root mean square of all video keys and features, in k's dtype; a power of two of columns, for the
    kernels.
    """

    def one_head(keys: Tensor, root: Tensor, member: Tensor) -> Tensor:
        features = keys.to(compute_dtype(k.dtype)) @ root.to(compute_dtype(k.dtype))
        square = (features.square() * member.unsqueeze(-1)).sum() / (member.sum() * root.shape[-1])
        return _widened(features / square.sqrt().clamp(min=1e-8)).to(k.dtype)

    member = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if valid is None else valid
    return by_head([one_head(*head) for head in heads(k, factor, member.unsqueeze(1).expand(-1, k.shape[1], -1))], k)


def query_features(q: Tensor, factor: Tensor) -> Tensor:
    """F^T q, each row over its own root mean square, in q's dtype."""

    def one_head(queries: Tensor, root: Tensor) -> Tensor:
        features = queries.to(compute_dtype(q.dtype)) @ root.to(compute_dtype(q.dtype))
        return _widened(features / features.square().mean(-1, True).sqrt().clamp(min=1e-6)).to(q.dtype)

    return by_head([one_head(*head) for head in heads(q, factor)], q)


def _widened(features: Tensor) -> Tensor:
    """Zero columns up to a power of two from 16 on: they change no distance."""
    columns = features.shape[-1]
    return pad(features, (0, max(16, 1 << (columns - 1).bit_length()) - columns))


def in_original_space(x: Tensor, found: Clustering) -> Clustering:
    means = by_head([segment_mean(tokens, labels, found.clusters)[0] for tokens, labels in heads(x, found.labels)], x)
    return found._replace(centroids=means)


def block_log_mass(queries: Clustering, keys: Clustering, blocks: Blocks, k: Tensor, scale: float | None) -> Tensor:
    """log of what the mean query of u gives to all keys of v, before the softmax's normaliser: [b h c_q c_k], -inf for
    an empty block
    """
    factor, dtype = k.shape[-1] ** -0.5 if scale is None else scale, compute_dtype(k.dtype)

    def one_head(tokens: Tensor, order: Tensor, labels: Tensor, lengths: Tensor, centroids: Tensor) -> Tensor:
        order = order.long()
        logits = tokens[order].to(dtype) @ centroids.to(dtype).T * factor
        top = reduce_blocks(logits, lengths.long(), "max")
        mass = reduce_blocks((logits - top[labels.long()[order]]).exp(), lengths.long(), "sum")
        return (mass.log() + top.nan_to_num(neginf=0.0))[: keys.clusters].T

    return by_head(
        [one_head(*head) for head in heads(k, blocks.permutation(), blocks.labels, blocks.sizes, queries.centroids)], k
    )


def key_budget(q: Tensor, k: Tensor, site: CallSite, roles: Roles, density: float, taken: Tensor) -> Tensor:
    """Key tokens that every query cluster may keep [b h]; taken [b h]: probe rows, which the density pays for."""
    if density >= 1:
        return torch.full_like(taken, k.shape[2])

    def members(valid: Tensor | None, every: int) -> Tensor:
        """[b 1]"""
        return (
            torch.full((q.shape[0], 1), every, device=q.device).double()
            if valid is None
            else valid.sum(-1, True).double()
        )

    queries = members(roles.clustered_queries, q.shape[2] - site.text_tokens)
    video = members(roles.clustered_keys, k.shape[2] - site.text_tokens)
    valid = None if site.text is None or roles.key_valid is None else roles.key_valid[:, site.text]
    text = members(valid, site.text_tokens)
    return (((density - taken / queries) * (video + text) - 1e-9).ceil() - text).long().clamp(min=1)


def probe_rows(features: Tensor, found: Clustering, probes: int) -> dict[str, Tensor]:
    """The token nearest to the mean feature of each of the largest clusters, and its weight: [b h p], weight 0 where
    clusters ran out.
    """
    sizes, largest = (x[..., :probes] for x in found.sizes.sort(dim=-1, descending=True, stable=True))
    token = by_head(
        [_nearest_members(*head) for head in heads(features, found.labels, found.centroids)], features
    ).gather(-1, largest)
    filled = sizes > 0
    # a probe that does not exist repeats the first, with no weight
    token = torch.where(filled, token, token[..., :1])
    weight = sizes.double() * filled.sum(-1, True) / sizes.sum(-1, True)
    return {"probes": token.to(torch.int32), "probe_weights": weight.to(compute_dtype(features.dtype))}


def _nearest_members(features: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """The first member of each cluster that is nearly as near as the nearest: [n r], [n], [c r] -> [c] int64, n for an
    empty one
    """
    n, count = len(labels), len(centroids)
    label = labels.long()
    middle = pad(centroids, (0, 0, 0, 1))[label.clamp(max=count)]
    distance = (features.to(centroids.dtype) - middle).square().sum(-1)
    least = distance.new_full((count + 1,), torch.inf).scatter_reduce(0, label.clamp(max=count), distance, "amin")
    near = distance <= NEARLY * least[label.clamp(max=count)]
    token = torch.where(near, torch.arange(n, device=label.device), n)
    return torch.full((count + 1,), n, device=label.device).scatter_reduce(0, label.clamp(max=count), token, "amin")[
        :count
    ]


class ProbeRepair:
    """Exact rows of a few queries say how the sparse output is wrong, and a low-rank map carries it over to the
    others.
    """

    def __init__(self, config: SparsePrConfig) -> None:
        self.config = config

    @torch.no_grad()
    def repair(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, site: CallSite) -> Tensor:
        if "probes" not in plan.memory:
            return out
        # a cluster without a finite token has no probe, and marks it by a token past the last
        at, weight = plan.memory["probes"].long().clamp(max=q.shape[2] - 1).unsqueeze(-1), plan.memory["probe_weights"]
        rows = q.gather(2, at.expand(-1, -1, -1, q.shape[-1]))
        exact = dense_attention(rows, k, v, scale=site.scale, key_valid=site.key_valid)
        sparse = out.gather(2, at.expand(-1, -1, -1, out.shape[-1]))
        slope, offset = correction(sparse, exact, weight, self.config.repair_rank, self.config.ridge)
        video = plan.queries.labels < plan.query_clusters

        def one_head(found: Tensor, change: Tensor, shift: Tensor, member: Tensor) -> Tensor:
            precise = found.to(change.dtype)
            return torch.where(member.unsqueeze(-1), precise + precise @ change + shift, precise).to(found.dtype)

        repaired = by_head([one_head(*head) for head in heads(out, slope, offset, video)], out)
        return repaired.scatter(2, at.expand_as(exact), exact.to(out.dtype))


def correction(sparse: Tensor, exact: Tensor, weight: Tensor, rank: int, ridge: float) -> tuple[Tensor, Tensor]:
    """The repair as O + O slope + offset: probes' rows [b h p d] twice and their weights [b h p] -> [b h d d], [b h 1
    d]
    """
    with outside_autocast(sparse):
        sparse, share = sparse.to(weight.dtype), (weight / weight.sum(-1, True)).unsqueeze(-1)
        residual = exact.to(weight.dtype) - sparse
        middle, shift = (sparse * share).sum(-2, True), (residual * share).sum(-2, True)
        spread = ((sparse - middle).square() * share).sum(-2, True).sqrt().clamp(min=1e-5)
        x, y, w = (sparse - middle) / spread, residual - shift, weight.unsqueeze(-1)
        normal = x.mT @ (w * x) + ridge * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        # no check of errors and no cholesky_solve, which would wait for the GPU: the ridge keeps it positive definite
        root = torch.linalg.cholesky_ex(normal).L
        half = torch.linalg.solve_triangular(root, x.mT @ (w * y), upper=False)
        fit = torch.linalg.solve_triangular(root.mT, half, upper=True)
        slope = onto_leading(fit, w.sqrt() * y, rank) / spread.mT
        return slope, shift - middle @ slope


ENTRIES = (
    planned_entry("sparsepr", SparsePrPlanner, SparsePrConfig,
        "clusters of each side in the metric of the other, a fixed density, and a low-rank repair from exact probe "
        "rows",
        "SparsePR, arXiv 2608.18484", "density", repair=lambda config: ProbeRepair(config) if config.repair else None),
)  # fmt: skip
