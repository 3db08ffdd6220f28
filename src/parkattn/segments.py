"""Sums and means of rows that share a label, in which precision, and running a one-head definition over all heads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions are accumulated in float32; float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def segment_sum(x: Tensor, labels: Tensor, count: int) -> Tensor:
    """sum_v = sum of x_i with labels_i = v: x [... n d], labels [... n] -> [... count d]; labels >= count: left out."""
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    groups = lead.numel()
    # one spare row per group collects what takes no part
    first_row = torch.arange(groups, device=x.device).unsqueeze(1) * (count + 1)
    row = (labels.reshape(groups, n).long().clamp(max=count) + first_row).flatten()
    values = x.reshape(-1, d).to(compute_dtype(x.dtype))
    if x.is_cuda:
        # index_add_ uses float atomics on CUDA; sorting first makes the sum repeatable
        order = row.argsort(stable=True)
        lengths = segment_sizes(row, groups * (count + 1)).long()
        # unsafe: bincount and the check of lengths would each wait for the GPU
        sums = torch.segment_reduce(values[order], "sum", lengths=lengths, axis=0, unsafe=True)
    else:
        sums = values.new_zeros(groups * (count + 1), d).index_add_(0, row, values)
    return sums.view(*lead, count + 1, d)[..., :count, :]


def membership(labels: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """1 where a token has a label: labels [m] -> [m count]; x @ it sums the columns of x [n m] that share a label."""
    return torch.nn.functional.one_hot(labels.long().clamp(max=count), count + 1)[:, :count].to(dtype)


def segment_sizes(labels: Tensor, count: int) -> Tensor:
    """Members per label: labels [... n] -> int32 [... count]."""
    lead = labels.shape[:-1]
    index = labels.reshape(lead.numel(), -1).long().clamp(max=count)
    sizes = torch.zeros(lead.numel(), count + 1, dtype=torch.int64, device=labels.device)
    sizes.scatter_add_(1, index, torch.ones_like(index))
    return sizes[:, :count].to(torch.int32).view(*lead, count)


def segment_mean(x: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means [... count d] (0 where empty) and sizes [... count]."""
    sizes = segment_sizes(labels, count)
    return segment_sum(x, labels, count) / sizes.clamp(min=1).unsqueeze(-1), sizes


def heads(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Every [b, h] slice of the tensors, for a definition that is written for one attention head.

    One head at a time bounds memory, and makes a head's result independent of which other heads and batch elements
    share the call (batched GEMMs are not bit-equal to single ones), and of the memory layout it came in.
    """
    for i, j in itertools.product(range(tensors[0].shape[0]), range(tensors[0].shape[1])):
        yield tuple(aligned(tensor[i, j]) for tensor in tensors)


def by_head(results: list[Tensor], like: Tensor) -> Tensor:
    """Results of `heads`, one per head of like [b h ...], as one tensor [b h ...]."""
    return torch.stack(results).unflatten(0, like.shape[:2])


def aligned(x: Tensor) -> Tensor:
    """A fresh contiguous copy: GEMMs round differently when memory is strided or begins at another offset."""
    return x.clone(memory_format=torch.contiguous_format)
