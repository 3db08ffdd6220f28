"""Every quantity of the paper once more, in float64, slow and plain, without the library.

One head at a time: q [n d], k [m d], v [m d], labels [n]. `per_head` lifts a definition to [b h ...].
Equation names are the labels in the paper's source.
"""

import math
from fractions import Fraction

import torch


def per_head(definition, *arguments, **options):
    """Apply a one-head definition to every batch element and head; tensors are split, the rest is passed on."""
    batch, heads = next(a for a in arguments if isinstance(a, torch.Tensor)).shape[:2]
    rows = []
    for b in range(batch):
        for h in range(heads):
            split = [a[b, h] if isinstance(a, torch.Tensor) else a for a in arguments]
            result = definition(*split, **options)
            rows.append(result if isinstance(result, torch.Tensor) else torch.tensor(result, dtype=torch.float64))
    return torch.stack(rows).reshape(batch, heads, *rows[0].shape)


def members(labels, block):
    return [i for i, label in enumerate(labels.tolist()) if label == block]


def block_sizes(labels, count):
    return torch.tensor([len(members(labels, block)) for block in range(count)])


def block_means(x, labels, count):
    """Mean of each block; an empty block has the mean 0."""
    x = x.double()
    means = torch.zeros(count, x.shape[-1], dtype=torch.float64)
    for block in range(count):
        inside = members(labels, block)
        if inside:
            means[block] = x[inside].sum(0) / len(inside)
    return means


def default_scale(d, scale):
    return 1 / math.sqrt(d) if scale is None else scale


# Attention ------------------------------------------------------------------------------------------------


def attention_weights(q, k, scale=None, allowed=None):
    """A of eq. full_attention, over the allowed [n m] token pairs, one query after the other."""
    q, k = q.double(), k.double()
    weights = torch.zeros(len(q), len(k), dtype=torch.float64)
    for i in range(len(q)):
        scores = (k @ q[i]) * default_scale(q.shape[-1], scale)
        if allowed is not None:
            scores = scores.masked_fill(~allowed[i], -math.inf)
        exponentials = torch.exp(scores - scores.max())
        weights[i] = exponentials / exponentials.sum()
    return weights


def dense_attention(q, k, v, scale=None):
    return attention_weights(q, k, scale) @ v.double()


def token_mask(query_labels, key_labels, mask):
    """M_ij: whether the block pair of query i and key j is computed."""
    allowed = torch.zeros(len(query_labels), len(key_labels), dtype=torch.bool)
    for i, u in enumerate(query_labels.tolist()):
        for j, w in enumerate(key_labels.tolist()):
            allowed[i, j] = mask[u, w]
    return allowed


def sparse_attention(q, k, v, query_labels, key_labels, mask, scale=None):
    """Softmax over the keys of the selected blocks only."""
    allowed = token_mask(query_labels, key_labels, mask)
    return attention_weights(q, k, scale, allowed) @ v.double()


def sparse_log_normaliser(q, k, query_labels, key_labels, mask, scale=None):
    allowed = token_mask(query_labels, key_labels, mask)
    scores = (q.double() @ k.double().T) * default_scale(q.shape[-1], scale)
    return torch.stack([torch.logsumexp(scores[i][allowed[i]], 0) for i in range(len(q))])


def compensated_attention(q, k, v, query_labels, key_labels, mask, compensate, scale=None):
    """Skipped blocks named by `compensate` [kb] take part as one token: logit q.c*scale + log n, value = mean value."""
    q, k, v = q.double(), k.double(), v.double()
    scale = default_scale(q.shape[-1], scale)
    count = mask.shape[-1]
    centroids, values = block_means(k, key_labels, count), block_means(v, key_labels, count)
    out = torch.zeros(len(q), v.shape[-1], dtype=torch.float64)
    for i in range(len(q)):
        logits, entries = [], []
        for block in range(count):
            inside = members(key_labels, block)
            if not inside:
                continue
            if mask[query_labels[i], block]:
                logits += [(q[i] @ k[j]) * scale for j in inside]
                entries += [v[j] for j in inside]
            elif compensate[block]:
                logits.append((q[i] @ centroids[block]) * scale + math.log(len(inside)))
                entries.append(values[block])
        out[i] = torch.softmax(torch.stack(logits), 0) @ torch.stack(entries)
    return out


# Clustering -----------------------------------------------------------------------------------------------


def nearest(x, centroids):
    """Index of the nearest centroid of every token; ties go to the lowest index."""
    labels = []
    for token in x.double():
        distances = [((token - centroid) ** 2).sum().item() for centroid in centroids.double()]
        labels.append(distances.index(min(distances)))
    return torch.tensor(labels)


def lloyd_step(x, centroids):
    """One assignment and one update; an empty cluster keeps its centroid."""
    labels = nearest(x, centroids)
    moved = centroids.double().clone()
    for cluster in range(len(centroids)):
        inside = members(labels, cluster)
        if inside:
            moved[cluster] = x.double()[inside].sum(0) / len(inside)
    return labels, moved


def query_metric(q):
    """G_Q, eq. app_query_second_moment."""
    metric = torch.zeros(q.shape[-1], q.shape[-1], dtype=torch.float64)
    for row in q.double():
        metric += torch.outer(row, row)
    return metric / len(q)


def metric_scale(metric, s_min=1e-12):
    """s_Q, eq. app_query_metric_scale."""
    return max(metric.double().trace().item() / len(metric), s_min)


def stabilised_metric(metric, alpha, epsilon, s_min=1e-12):
    """eq. app_regularized_query_metric."""
    identity = torch.eye(len(metric), dtype=torch.float64)
    return (1 - alpha) * metric.double() + (alpha + epsilon) * metric_scale(metric, s_min) * identity


def deviations(k, labels, count):
    """delta_j = k_j - c_v(j); tokens without a block deviate by 0."""
    means = block_means(k, labels, count)
    rows = [
        token - means[label] if label < count else torch.zeros_like(token)
        for token, label in zip(k.double(), labels.tolist(), strict=True)
    ]
    return torch.stack(rows)


def metric_objective(k, labels, count, metric):
    """Sum of the squared metric distances of the keys to their centroids."""
    return sum((delta @ metric.double() @ delta).item() for delta in deviations(k, labels, count))


def euclidean_objective(k, labels, count):
    return metric_objective(k, labels, count, torch.eye(k.shape[-1], dtype=torch.float64))


def qrkc_objective(q, k, labels, count):
    """First form of eq. qrkc_objective: the squared QK-score errors, query by query."""
    residuals = deviations(k, labels, count)
    return sum(((residuals @ row) ** 2).sum().item() for row in q.double()) / len(q)


def key_mse(k, labels, count):
    """D_key of eq. key_score_errors."""
    return (deviations(k, labels, count) ** 2).sum().item() / len(k)


def score_error(q, k, labels, count):
    """D_QK of eq. key_score_errors."""
    residuals = deviations(k, labels, count)
    total = sum(((residuals @ row) ** 2).sum().item() / q.shape[-1] for row in q.double())
    return total / (len(q) * len(k))


# Block importance -----------------------------------------------------------------------------------------


def exact_log_mass(q, k, key_labels, count, scale=None):
    """S* of eq. key_logmass_estimates."""
    scores = (q.double() @ k.double().T) * default_scale(q.shape[-1], scale)
    mass = torch.full((len(q), count), -math.inf, dtype=torch.float64)
    for block in range(count):
        inside = members(key_labels, block)
        if inside:
            mass[:, block] = torch.logsumexp(scores[:, inside], 1)
    return mass


def centroid_log_mass(q, centroids, sizes, scale=None):
    """S^ of eq. pama_block_score."""
    mass = torch.full((len(q), len(centroids)), -math.inf, dtype=torch.float64)
    for block in range(len(centroids)):
        if sizes[block] > 0:
            product = (q.double() @ centroids[block].double()) * default_scale(q.shape[-1], scale)
            mass[:, block] = product + math.log(int(sizes[block]))
    return mass


def _block_average(weights, query_labels, query_count):
    return block_means(weights, query_labels, query_count)


def exact_importance(q, k, query_labels, query_count, key_labels, key_count, scale=None):
    """W of eq. block_importance, from the token weights; keys without a block take no part."""
    used = torch.tensor([label < key_count for label in key_labels.tolist()])
    weights = attention_weights(q, k, scale, used.expand(len(q), len(k)))
    blocks = torch.zeros(len(q), key_count, dtype=torch.float64)
    for block in range(key_count):
        blocks[:, block] = weights[:, members(key_labels, block)].sum(1)
    return _block_average(blocks, query_labels, query_count)


def pama(q, k, query_labels, query_count, key_labels, key_count, scale=None):
    """eq. pama_block_importance: full queries, key centroids."""
    centroids, sizes = block_means(k, key_labels, key_count), block_sizes(key_labels, key_count)
    weights = torch.softmax(centroid_log_mass(q, centroids, sizes, scale), 1)
    return _block_average(weights, query_labels, query_count)


def query_centroid(q, k, query_labels, query_count, key_labels, key_count, scale=None):
    """Query centroids, key centroids."""
    centroids, sizes = block_means(k, key_labels, key_count), block_sizes(key_labels, key_count)
    pooled = block_means(q, query_labels, query_count)
    weights = torch.softmax(centroid_log_mass(pooled, centroids, sizes, scale), 1)
    return _empty_rows_zero(weights, query_labels)


def full_key(q, k, query_labels, query_count, key_labels, key_count, scale=None):
    """eq. app_query_pool_final: query centroids, all keys."""
    pooled = block_means(q, query_labels, query_count)
    weights = torch.softmax(exact_log_mass(pooled, k, key_labels, key_count, scale), 1)
    return _empty_rows_zero(weights, query_labels)


def _empty_rows_zero(weights, query_labels):
    return weights * (block_sizes(query_labels, len(weights)) > 0)[:, None]


def query_hessian(query, k, key_labels, block):
    """H_v of eq. app_softmax_hessian at one query vector."""
    scaled = k.double() / math.sqrt(k.shape[-1])
    weights = attention_weights(query[None], k)[0]
    centered = scaled - weights @ scaled
    covariance = sum(p * torch.outer(a, a) for p, a in zip(weights, centered, strict=True))
    hessian = torch.zeros_like(covariance)
    for j in members(key_labels, block):
        hessian += weights[j] * (torch.outer(centered[j], centered[j]) - covariance)
    return hessian


# Selection ------------------------------------------------------------------------------------------------


def top_p(importance, p, sizes, floor=0.0, crossing="include"):
    """One row: the blocks kept, in descending importance, until their mass reaches p."""
    order = sorted((j for j in range(len(importance)) if sizes[j] > 0), key=lambda j: -importance[j].item())
    if not any(importance[j] > 0 for j in order):
        return []
    kept, mass = [], 0.0
    for j in order:
        if p < 1 and mass >= p:
            break
        if crossing == "exclude" and kept and mass + importance[j].item() > p:
            break
        kept.append(j)
        mass += importance[j].item()
    least = math.ceil(Fraction(floor) * len(order))
    return kept if len(kept) >= least else order[:least]


def top_k(importance, ratio, sizes):
    """One row: the ceil(ratio * non-empty) most important blocks, the ratio read as the decimal the caller wrote."""
    order = sorted((j for j in range(len(importance)) if sizes[j] > 0), key=lambda j: -importance[j].item())
    return order[: max(1, math.ceil(Fraction(str(ratio)) * len(order)))]


# Measures -------------------------------------------------------------------------------------------------


def density(query_labels, key_labels, mask, attendable):
    """Token pairs computed / token pairs dense attention computes; `attendable` [m] names the keys that are no padding."""
    allowed = token_mask(query_labels, key_labels, mask)
    return allowed.sum().item() / (len(query_labels) * int(attendable.sum()))


def attention_recall(q, k, query_labels, key_labels, mask, attendable, scale=None):
    """eq. attention_recall."""
    weights = attention_weights(q, k, scale, attendable.expand(len(q), len(k)))
    return (weights * token_mask(query_labels, key_labels, mask)).sum().item() / weights.sum().item()


def weight_tv(estimate, exact, query_sizes):
    """E_TV of eq. appendix_mismatch_tv."""
    total = 0.0
    for u in range(len(query_sizes)):
        total += int(query_sizes[u]) * 0.5 * (estimate[u].double() - exact[u].double()).abs().sum().item()
    return total / int(query_sizes.sum())


def centered_log_mass_rmse(q, k, key_labels, count, scale=None):
    """E_LM of eq. appendix_mismatch_centered_rmse, over the non-empty key blocks."""
    sizes = block_sizes(key_labels, count)
    used = [block for block in range(count) if sizes[block] > 0]
    estimate = centroid_log_mass(q, block_means(k, key_labels, count), sizes, scale)
    error = (exact_log_mass(q, k, key_labels, count, scale) - estimate)[:, used]
    return sum(((row - row.mean()) ** 2).mean().sqrt().item() for row in error) / len(q)


# Rounding bounds ------------------------------------------------------------------------------------------


def logit_rounding(q, k, scale, dtype):
    """Bound on the error of one logit q.k*scale + log m: a d-term dot product of means over at most n and m tokens."""
    n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
    largest = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * abs(default_scale(d, scale))
    return (n + m + d + 8) * torch.finfo(dtype).eps * (largest.item() + math.log(m) + 1)


def weight_rounding(q, k, scale, dtype):
    """Bound on the error of a softmax weight or an average of them: numerator, normaliser, and sums of n or m terms."""
    terms = q.shape[-2] + k.shape[-2] + 8
    return 2 * logit_rounding(q, k, scale, dtype) + terms * torch.finfo(dtype).eps


def output_rounding(q, k, v, scale, dtype):
    """Bound on the error of an attention output: the weights' relative error times the largest value."""
    return 2 * weight_rounding(q, k, scale, dtype) * max(v.double().abs().max().item(), 1e-30)
