"""A built-in q/k/v scene with the structure PARK is made for, so that every part can be tried without a model.

A small film of drifting objects on a background. Keys carry the object, a position and nuisance directions that queries
hardly look at; queries of one object disagree about which neighbours they want. So keys cluster, Euclidean distance
between keys is not what queries see, and a block's mean query does not speak for its members.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scene(NamedTuple):
    q: Tensor  # [1 h n d]
    k: Tensor
    v: Tensor
    grid: tuple[int, int, int]
    objects: Tensor  # [n] the object each token shows


def clustered_scene(
    *,
    heads: int = 4,
    grid: tuple[int, int, int] = (8, 32, 32),
    dim: int = 64,
    objects: int = 12,
    sharpness: float = 10.0,
    seed: int = 0,
) -> Scene:
    """sharpness scales the scores: larger is sparser."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    owner, place = _film(grid, objects, random)
    n = owner.numel()
    shared = dim * 3 // 4  # directions that both queries and keys use
    spread = dim - shared  # directions where keys vary and queries barely look
    queries, keys = [], []
    for _ in range(heads):
        identity = torch.nn.functional.normalize(normal(objects, shared), dim=-1)
        where = torch.nn.functional.normalize(normal(place.shape[1], shared), dim=-1)
        taste = normal(n, 1)  # a query's own balance of object and place
        signal = identity[owner] * 2 + place @ where * 0.6
        wish = identity[owner] * (2 + taste) + place @ where * (0.6 - 0.4 * taste)
        keys.append(torch.cat([signal + 0.15 * normal(n, shared), 0.35 * normal(n, spread)], -1))
        queries.append(sharpness * torch.cat([wish + 0.25 * normal(n, shared), 0.05 * normal(n, spread)], -1))
    values = normal(heads, objects, dim)[:, owner] + 0.3 * normal(heads, n, dim)
    return Scene(torch.stack(queries)[None], torch.stack(keys)[None], values[None], grid, owner)


def _film(grid: tuple[int, int, int], objects: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """The object shown by each token [n] and smooth position features [n 12]: nearest of drifting centres."""
    frames, height, width = grid
    t, y, x = torch.meshgrid(*(torch.linspace(0, 1, s) for s in (frames, height, width)), indexing="ij")
    centre = torch.rand(objects, 2, generator=random)
    drift = 0.4 * (torch.rand(objects, 2, generator=random) - 0.5)
    where = centre + t[..., None, None] * drift
    distance = (y[..., None] - where[..., 0]).square() + (x[..., None] - where[..., 1]).square()
    angles = torch.pi * torch.stack([t, y, x], -1).reshape(-1, 3, 1) * torch.tensor([1.0, 2.0])
    return distance.argmin(-1).flatten(), torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
