"""The five solids as signed distances in their own coordinates: centre at the origin, axis along y, a size of about 1.

Vectors are tensors [3, n]: a component is then one contiguous row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .grammar import SHAPES

SPHERE = 0.82
CUBE, CUBE_ROUNDING = 0.58, 0.07
CONE, CONE_BASE, CONE_ROUNDING = 0.72, 0.78, 0.06  # half the height, radius of the base
TORUS, TORUS_TUBE = 0.66, 0.27
CAPSULE, CAPSULE_RADIUS = 0.52, 0.43  # half the length of the axis
BOUNDS = (0.84, 1.13, 1.16, 0.95, 0.97)  # radii of spheres around the solids, by shape
ROLLING = (0.82, 0.80, 0.80, 0.93, 0.76)  # radii of circles of about the same girth, by shape


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Written out: a sum over a dimension of three costs a pass more, and its order is not ours."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def unit(a: Tensor) -> Tensor:
    return a * torch.rsqrt(dot(a, a).clamp(min=1e-12))


def _sphere(p: Tensor) -> Tensor:
    return dot(p, p).sqrt() - SPHERE


def _cube(p: Tensor) -> Tensor:
    q = p.abs() - CUBE
    outside = q.clamp(min=0)
    return dot(outside, outside).sqrt() + q.amax(0).clamp(max=0) - CUBE_ROUNDING


def _cone(p: Tensor) -> Tensor:
    across, up = (p[0] * p[0] + p[2] * p[2]).sqrt(), p[1]
    slope = (CONE_BASE**2 + 4 * CONE**2) ** 0.5
    below = up - CONE
    along = ((across * CONE_BASE - below * 2 * CONE) / slope**2).clamp(0, 1)
    side = (across - CONE_BASE * along) ** 2 + (below + 2 * CONE * along) ** 2
    base = (across - CONE_BASE).clamp(min=0) ** 2 + (up + CONE) ** 2
    inside = (across * 2 * CONE + below * CONE_BASE < 0) & (up > -CONE)
    distance = torch.minimum(side, base).sqrt()
    return torch.where(inside, -distance, distance) - CONE_ROUNDING


def _torus(p: Tensor) -> Tensor:
    around = (p[0] * p[0] + p[2] * p[2]).sqrt() - TORUS
    return (around * around + p[1] * p[1]).sqrt() - TORUS_TUBE


def _capsule(p: Tensor) -> Tensor:
    along = p[1] - p[1].clamp(-CAPSULE, CAPSULE)
    return (p[0] * p[0] + along * along + p[2] * p[2]).sqrt() - CAPSULE_RADIUS


DISTANCES: tuple[Callable[[Tensor], Tensor], ...] = (_sphere, _cube, _cone, _torus, _capsule)
assert len(DISTANCES) == len(BOUNDS) == len(ROLLING) == len(SHAPES)


def normals(shape: int, p: Tensor, step: float = 2e-3) -> Tensor:
    """Unit gradients of the distance at p [3, n], by differences along the corners of a tetrahedron."""
    total = torch.zeros_like(p)
    for corner in ((1.0, -1.0, -1.0), (-1.0, -1.0, 1.0), (-1.0, 1.0, -1.0), (1.0, 1.0, 1.0)):
        way = p.new_tensor(corner)[:, None]
        total += way * DISTANCES[shape](p + step * way)
    return unit(total)


def reaches(shape: Tensor, way: Tensor) -> Tensor:
    """How far each solid reaches from its centre along unit directions of its own coordinates: [..., 3] -> [...]."""
    x, y, z = way.unbind(-1)
    flat = (x * x + z * z).sqrt()
    every = (
        torch.full_like(x, SPHERE),
        CUBE * (x.abs() + y.abs() + z.abs()) + CUBE_ROUNDING,
        torch.maximum(CONE * y, CONE_BASE * flat - CONE * y) + CONE_ROUNDING,
        TORUS * flat + TORUS_TUBE,
        CAPSULE * y.abs() + CAPSULE_RADIUS,
    )
    return torch.stack(every).gather(0, shape.expand_as(x)[None])[0]
