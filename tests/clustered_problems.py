"""Generated problems for methods that cluster tokens, and how their restatements are asked about one batch element."""

from dataclasses import replace
from random import Random

import torch

from parkattn.ops.cluster.definition import initial_tokens
from parkattn.site import CallSite
from plans import token_mask
from restated.cases import cases

COUNT = 200


def problems(count, seed):
    """The restatements' generated cases (text, padding, odd grids); their loops are slow, so most keep one head of
    theirs.
    """
    for i, case in enumerate(cases(count, seed)):
        yield case if i % 8 == 0 else replace(case, q=case.q[:, :1], k=case.k[:, :1], v=case.v[:, :1])


def site_of(case, **more):
    return CallSite(grid=case.grid, text=case.text, key_valid=case.key_valid, scale=case.scale, values=case.v, **more)


def first_tokens(case, b, clusters, seed=0):
    """Sequence positions of our first centroids of batch element b, as the restatements take them: [1, h, C]."""
    video = torch.tensor(video_tokens_of(case, b))
    chosen = video[initial_tokens(len(video), min(clusters, len(video)), seed)]
    return chosen.expand(1, case.q.shape[1], -1)


def video_tokens_of(case, b):
    text = range(*case.text.indices(case.q.shape[2])) if case.text is not None else ()
    return [
        i for i in range(case.q.shape[2]) if i not in text and (case.key_valid is None or bool(case.key_valid[b, i]))
    ]


def alone(case, b):
    """What a restatement takes of one batch element: it is treated as if it were alone, with as many clusters as it has
    tokens for.
    """
    valid = None if case.key_valid is None else case.key_valid[b : b + 1]
    tensors = (x[b : b + 1] for x in (case.q, case.k, case.v))
    return tuple(tensors), {"grid": case.grid, "text": case.text, "key_valid": valid, "scale": case.scale}


def chosen(case, *spread):
    """Clusters and settings that follow from the case's seed."""
    draw = Random(case.seed)
    n = case.q.shape[2]
    return (
        draw.choice([1, 2, 3, 5, 9, 2, 3, n]),
        draw.choice([1, 3, 5, 8, 14, 3, 5, n]),
        *(draw.choice(values) for values in spread),
    )


def matches(plan, b, result):
    return torch.equal(token_mask(plan)[b], result.allowed[0])
