"""What rounding Q K^T or P V to 8 bits costs beside what bf16 costs already, scheme by scheme, in the definitions
alone.

    park capture "a red circle moves right over blue waves" --frames 29 --height 160 --width 192 --steps 10 \
        --capture-steps 2,6 --values --guidance 1 --out out/calls.safetensors
    python tools/rounding_errors.py out/calls.safetensors

writes benchmarks/results/rounding.json. Inputs are rounded to bf16 first. Every error is relative, against float64 of
the same inputs and the same plan; all schemes round the weights, once more than the sum of weights, and the output to
bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from records import argument_reader, write_rows
from torch import Tensor

from parkattn.methods import make_method
from parkattn.ops.attend.definition import LEVELS, _turned
from parkattn.planned import PlannedMethod, make_plan
from parkattn.segments import segment_mean
from parkattn.settings import KEY_GRANULE
from parkattn.site import CallSite
from parklab.bench.problems import Shape, mixture
from parklab.experiments.captures import read_captures

DENSITIES, ONE_DENSITY = (1.0, 0.25, 0.10), (0.25,)
LARGER, ONE_KEY = (4, 16), 7  # times as large as it was, and which key of each head
ROWS = 64  # queries per head whose output is compared
GAUSSIAN = Shape(3, 4096, 8, 32)


class Head(NamedTuple):
    """One head in float64, every value one of bf16; blocks by name."""

    q: Tensor  # [n d]
    k: Tensor  # [m d]
    v: Tensor
    query_block: Tensor  # [n]
    key_block: Tensor  # [m]
    kept: Tensor  # [query blocks, key blocks]


Factors = list[tuple[Tensor, Tensor]]
"""Scores are the sum of q k^T over these."""


def rounded(x: Tensor, over: tuple[int, ...] | Tensor = (-1,), levels: int = LEVELS) -> Tensor:
    """x by steps of which `levels` reach the largest entry: of each row, of all, or of the rows that share a name."""
    if isinstance(over, Tensor):
        reach = torch.zeros(int(over.max()) + 1, dtype=x.dtype).scatter_reduce(0, over, x.abs().amax(-1), "amax")
        reach = reach[over].unsqueeze(-1)
    else:
        reach = x.abs().amax(over, keepdim=True)
    step = reach.clamp(min=1e-12) / levels
    return (x / step + 0.5).floor() * step


def block_means(x: Tensor, names: Tensor) -> Tensor:
    return segment_mean(x, names, int(names.max()) + 1)[0][names].bfloat16().double()


def directions(head: Head, count: int) -> Tensor:
    """[d count]: orthonormal, along which q and k together are largest."""
    k = head.k - head.k.mean(0)
    q_moments, k_moments = head.q.T @ head.q, k.T @ k
    return torch.linalg.eigh(q_moments / q_moments.trace() + k_moments / k_moments.trace())[1][:, -count:]


def exact(head: Head) -> Factors:
    return [(head.q, head.k)]


def int8(head: Head, steps: tuple[int, ...] | Tensor = (-2, -1), turn: bool = True) -> Factors:
    q, k = (_turned(x) if turn else x for x in (head.q, head.k))
    return [(rounded(q), rounded(k - k.mean(0), steps))]


def granules(head: Head, size: int = KEY_GRANULE) -> Tensor:
    """Of each key, the number of the run of that many keys that it is in, in the order of blocks."""
    place = torch.empty_like(head.key_block)
    place[head.key_block.argsort(stable=True)] = torch.arange(len(place))
    return place // size


def without_block_means(head: Head, queries: bool, each: bool) -> Factors:
    """q.k = q.c + q.(k - c), c the mean of the key's block in bf16; with `queries` also q.(k - c) = a.(k - c) + (q -
    a).(k - c). The products with means are not rounded.
    """
    c = block_means(head.k, head.key_block)
    a = block_means(head.q, head.query_block) if queries else torch.zeros_like(head.q)
    q, k = rounded(_turned(head.q - a)), rounded(_turned(head.k - c), (-1,) if each else head.key_block)
    return [(q, k), (head.q, c), (a, head.k - c)]


def two_terms(head: Head, queries: bool, keys: bool) -> Factors:
    """A rounded part and the rounded rest: as many more products."""
    q, k = _turned(head.q), _turned(head.k - head.k.mean(0))
    fine = LEVELS * 2 * LEVELS
    return [(rounded(q, levels=fine if queries else LEVELS), rounded(k, (-2, -1), fine if keys else LEVELS))]


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Of a symmetric matrix with positive eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values**exponent @ vectors.T


def balanced(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q T and k T^-1, whose products are those of q and k, with T symmetric and equal second moments: of all T the one
    with the least sum of squares of q T times that of k T^-1, to which the error of one step for all columns grows.
    """

    def moments(x: Tensor) -> Tensor:
        found = x.T @ x / len(x)
        return found + 1e-3 * found.diagonal().mean() * torch.eye(len(found), dtype=x.dtype)

    of_q = moments(q)
    root, inverse = power(of_q, 0.5), power(of_q, -0.5)
    square = inverse @ power(root @ moments(k) @ root, 0.5) @ inverse  # T T, from T Cq T = T^-1 Ck T^-1
    return q @ power(square, 0.5), k @ power(square, -0.5)


def int8_balanced(head: Head, steps: tuple[int, ...] | Tensor = (-2, -1), centred: bool = False) -> Factors:
    """centred: also q minus its mean, whose products with the keys are not rounded."""
    mean = head.q.mean(0) if centred else torch.zeros_like(head.q[0])
    k = head.k - head.k.mean(0)
    q, keys = balanced(head.q - mean, k)
    return [(rounded(_turned(q)), rounded(_turned(keys), steps)), (mean.expand_as(q), k)]


def without_query_mean(head: Head) -> Factors:
    """q.k = a.k + (q - a).k, a the mean of the head's queries. The product with the mean is not rounded."""
    mean, k = head.q.mean(0), head.k - head.k.mean(0)
    return [(rounded(_turned(head.q - mean)), rounded(_turned(k), (-2, -1))), (mean.expand_as(head.q), k)]


def scaled_columns(head: Head) -> Factors:
    """Columns of q times what columns of k are divided by: both then have equal second moments."""
    k = head.k - head.k.mean(0)
    factor = (k.square().mean(0) / head.q.square().mean(0)).sqrt().sqrt()
    return [(rounded(_turned(head.q * factor)), rounded(_turned(k / factor), (-2, -1)))]


def cut_off(head: Head, share: float) -> Factors:
    """127 steps reach `share` of the largest entry of k, and what is larger is cut off."""
    q, k = _turned(head.q), _turned(head.k - head.k.mean(0))
    step = k.abs().max() * share / LEVELS
    return [(rounded(q), (k / step + 0.5).floor().clamp(-LEVELS, LEVELS) * step)]


def strong_apart(head: Head, count: int, kind: torch.dtype = torch.float16, balance: bool = False) -> Factors:
    """The strongest directions of a head in another dtype, the rest in INT8."""
    along, k = directions(head, count), head.k - head.k.mean(0)
    strong_q, strong_k = (x @ along for x in (head.q, k))
    q, rest = head.q - strong_q @ along.T, k - strong_k @ along.T
    strong = strong_q.to(kind).double(), strong_k.to(kind).double()
    q, rest = balanced(q, rest) if balance else (q, rest)
    return [(rounded(_turned(q)), rounded(_turned(rest), (-2, -1))), strong]


SCHEMES: dict[str, Callable[[Head], Factors]] = {
    "bf16": exact,
    "INT8, as it is": int8,
    "INT8, no turn": lambda head: int8(head, turn=False),
    "INT8, a step per key": lambda head: int8(head, (-1,)),
    "INT8, a step per 32 keys": lambda head: int8(head, granules(head)),
    "INT8, a step per key block": lambda head: int8(head, head.key_block),
    "INT8, a step per head that reaches 85 % of the largest key": lambda head: cut_off(head, 0.85),
    "INT8, columns of q and k balanced": scaled_columns,
    "INT8, second moments of q and k balanced": int8_balanced,
    "INT8, second moments balanced, a step per key": lambda head: int8_balanced(head, (-1,)),
    "INT8, second moments balanced, a step per key block": lambda head: int8_balanced(head, head.key_block),
    "INT8, Q minus its mean": without_query_mean,
    "INT8, Q minus its mean, second moments balanced": lambda head: int8_balanced(head, centred=True),
    "INT8, K minus its block's mean": lambda head: without_block_means(head, False, False),
    "INT8, K minus its block's mean, a step per key": lambda head: without_block_means(head, False, True),
    "INT8, K and Q minus their blocks' means": lambda head: without_block_means(head, True, False),
    "INT8, q in two terms": lambda head: two_terms(head, True, False),
    "INT8, q and k in two terms": lambda head: two_terms(head, True, True),
    "INT8, 8 directions in fp16": lambda head: strong_apart(head, 8),
    "INT8, 8 directions in fp16, the rest balanced": lambda head: strong_apart(head, 8, balance=True),
    "INT8, 16 directions in bf16": lambda head: strong_apart(head, 16, torch.bfloat16),
    "INT8, 16 directions in fp16": lambda head: strong_apart(head, 16),
    "INT8, 32 directions in fp16": lambda head: strong_apart(head, 32),
}
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def weighted_bf16(weights: Tensor, v: Tensor) -> Tensor:
    return weights.bfloat16().double() @ v


def weighted_fp8(weights: Tensor, v: Tensor, centred: bool) -> Tensor:
    """P V with both in FP8 and exact sums: the largest weight of a row is 1, a column of v has a step of its own."""
    centre = v.mean(0) if centred else torch.zeros_like(v[0])
    reach = (v - centre).abs().amax(0).clamp(min=1e-12) / LARGEST
    p = (weights.float() * LARGEST).to(FP8).double() / LARGEST
    return p @ (((v - centre) / reach).float().to(FP8).double() * reach) + p.sum(-1, keepdim=True) * centre


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "FP8 P V": lambda p, v: weighted_fp8(p, v, False),
    "FP8 P V, V minus its mean": lambda p, v: weighted_fp8(p, v, True),
}


def outputs(head: Head, rows: Tensor, scheme: str) -> Tensor:
    """The output of some rows as a kernel with this rounding would have it; `exact` in float64."""
    scores = torch.stack([q[rows] @ k.T for q, k in SCHEMES.get(scheme, exact)(head)]).sum(0) * head.q.shape[-1] ** -0.5
    scores = scores.masked_fill(~head.kept[head.query_block[rows]][:, head.key_block], -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    if scheme == "exact":
        return weights @ head.v / weights.sum(-1, keepdim=True)
    found = PRODUCTS.get(scheme, weighted_bf16)(weights, head.v) / weights.sum(-1, keepdim=True)
    return found.bfloat16().double()


def heads_of(q: Tensor, k: Tensor, v: Tensor, density: float) -> Iterator[Head]:
    """Blocks and plan are PARK's; at density 1 every block is kept."""
    q, k, v = (x.bfloat16() for x in (q, k, v))
    method = make_method("park", top_p=None, top_k=density)
    assert isinstance(method, PlannedMethod)
    plan = make_plan(q.float(), k.float(), method.planner, CallSite(step=3, total_steps=10), None)
    for h in range(q.shape[1]):
        names = plan.queries.labels[0, h].long(), plan.keys.labels[0, h].long()
        yield Head(q[0, h].double(), k[0, h].double(), v[0, h].double(), *names, plan.mask[0, h])


def problems(calls: Path) -> Iterator[tuple[str, tuple[float, ...], list[tuple[Tensor, Tensor, Tensor]]]]:
    """With the densities that each is computed at."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    q, k, v = (mixture(GAUSSIAN, 64, cpu) for _ in range(3))
    yield "Gaussian mixtures", DENSITIES, [(q, k, v)]
    for times in LARGER:
        larger = k.clone()
        larger[:, :, ONE_KEY] *= times
        yield f"mixtures, one key x {times}", ONE_DENSITY, [(q, larger, v)]
    found = []
    for call in read_captures(calls)[0]:
        assert call.site.values is not None
        found.append((call.q, call.k, call.site.values))
    yield "captures", DENSITIES, found


def main() -> None:
    parser = argument_reader(__doc__)
    parser.add_argument("calls", type=Path, help="file of park capture --values")
    table = []
    for problem, densities, tensors in problems(parser.parse_args().calls):
        for density in densities:
            wrong, whole = dict.fromkeys([*SCHEMES, *PRODUCTS], 0.0), 0.0
            for head in (head for given in tensors for head in heads_of(*given, density)):
                picked = torch.linspace(0, len(head.q) - 1, ROWS).long()
                wanted = outputs(head, picked, "exact")
                whole += wanted.square().sum().item()
                for scheme in wrong:
                    wrong[scheme] += (outputs(head, picked, scheme) - wanted).square().sum().item()
            for scheme, square in wrong.items():
                row = {"problem": problem, "density": density, "scheme": scheme, "error": (square / whole) ** 0.5}
                table.append(row | {"ratio": (square / wrong["bf16"]) ** 0.5})
                print(json.dumps(table[-1]), flush=True)
    write_rows("rounding", table)


if __name__ == "__main__":
    main()
