"""The objects' colours and materials under the lights of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .grammar import MATERIALS, SHAPES
from .shapes import CUBE, dot, unit
from .surroundings import Surroundings, floor_colour, fog, mirrored, sky_colour, wobble

# as they are displayed, in the order of COLOURS
RGB = (
    (0.93, 0.10, 0.10),
    (1.00, 0.50, 0.05),
    (1.00, 0.87, 0.08),
    (0.12, 0.74, 0.20),
    (0.08, 0.84, 0.88),
    (0.10, 0.28, 0.96),
    (0.52, 0.14, 0.86),
    (1.00, 0.42, 0.70),
)
CHECK = 0.34  # side of a check, in sizes of the object


@dataclass(frozen=True)
class Seen:
    """Points of objects that rays met, [3, n] each; frame, colour and shape are indices [n]."""

    point: Tensor
    normal: Tensor
    local: Tensor  # the point in the object's coordinates
    way: Tensor  # of the ray
    frame: Tensor
    colour: Tensor
    shape: Tensor


def _own_colour(seen: Seen, material: Tensor) -> Tensor:
    """Matte and metal are even, checks alternate with near white, wood has rings around the object's axis."""
    even = (torch.tensor(RGB, device=material.device) ** 2.2).T[:, seen.colour]
    x, y, z = seen.local
    cells = ((x / CHECK).floor() + (y / CHECK).floor() + (z / CHECK).floor()) % 2
    checked = torch.where(cells > 0.5, even, 0.82)
    # a log's centre runs aslant, so that rings show on every side
    bent = 0.12 * wobble(1.7 * x, 1.1 * y, 1.7 * z)
    rings = 0.5 + 0.5 * (30 * ((x - 0.5 * y - 0.1) ** 2 + (z + 0.35 * y + 0.15) ** 2).sqrt() + 30 * bent).sin()
    fibre = 0.5 + 0.5 * wobble(11 * x, 2 * y, 11 * z)
    dark = even * 0.16 + 0.035 * torch.tensor([[1.0], [0.5], [0.2]], device=even.device)
    grained = torch.lerp(dark, 1.1 * even, rings) * (0.84 + 0.16 * fibre)
    wooden, checkered = (material == MATERIALS.index(name) for name in ("wooden", "checkered"))
    return torch.where(wooden, grained, torch.where(checkered, checked, even))


def _reflected(seen: Seen, around: Surroundings) -> Tensor:
    """What a mirror at the points would show: sky with a bright band above the horizon, and the floor."""
    way = mirrored(seen.way, seen.normal)
    sky = sky_colour(around, seen.frame, way)
    band = torch.exp(-(((way[1] - 0.55) / 0.22) ** 2))
    down = way[1] < -0.02
    far = torch.where(down, seen.point[1].clamp(min=0) / (-way[1]).clamp(min=0.02), 0.0)
    below = seen.point + way * far
    floor = floor_colour(around, seen.frame, below, 0.05 + 0.02 * far) * 0.95
    floor = torch.lerp(floor, around.horizon.T[:, seen.frame], fog(4 * far))
    strips = 0.92 + 0.18 * (9 * way[0] + 4 * way[1]).sin()  # bright and dark windows, weak: wood has stronger rings
    return torch.where(down, floor, (sky + 0.9 * band) * strips)


def _streak(seen: Seen) -> Tensor:
    """Bright tubes around the scene, seen in flat faces alone: there a mirror of a plain floor would look matte."""
    way = mirrored(seen.way, seen.normal)
    tubes = (21 * way[0] + 12 * way[1] + 5 * way[2]).sin().clamp(min=0) ** 6
    flat = (seen.local.abs() > CUBE).sum(0) == 1  # not on an edge, where they would be finer than a pixel
    return tubes * (flat & (seen.shape == SHAPES.index("cube")))


def paint(seen: Seen, material: Tensor, around: Surroundings, lights: list[Tensor]) -> Tensor:
    """Colours [3, n] in linear light; lights: strength of each light at the points."""
    own, normal, frame = _own_colour(seen, material), seen.normal, seen.frame
    metal = material == MATERIALS.index("metal")
    facing = (-dot(seen.way, normal)).clamp(0, 1)
    rim = (1 - facing) ** 4
    sky = torch.lerp(around.horizon, around.zenith, 0.4).T[:, frame]
    ground = torch.lerp(around.dark, around.pale, 0.5).T[:, frame]
    contact = (0.35 + seen.point[1] * 1.2).clamp(max=1.0)  # less light comes from below near the floor
    ambient = torch.lerp(ground * contact * 0.55, sky * 0.62, 0.5 + 0.5 * normal[1])
    diffuse, shine = ambient, torch.zeros_like(own)
    sharpness = torch.where(metal, 90.0, torch.where(material == MATERIALS.index("matte"), 12.0, 38.0))
    gloss = torch.where(metal, 1.6, torch.where(material == MATERIALS.index("matte"), 0.05, 0.28))
    for light, strength in enumerate(lights):
        toward = around.light[:, light].T[:, frame]
        sun = around.sun.T[:, frame] * strength
        lit = dot(normal, toward).clamp(min=0)
        diffuse = diffuse + sun * (1.15 * lit)
        halfway = dot(normal, unit(toward - seen.way)).clamp(min=0)
        shine = shine + sun * (gloss * (lit > 0) * halfway**sharpness)
    plain = own * diffuse + shine + 0.12 * rim * sky
    tint = torch.lerp(own, torch.ones_like(own), 0.55 * rim)
    polished = tint * (0.12 * diffuse + 1.0 * _reflected(seen, around)) + shine
    polished = torch.lerp(polished, 0.3 * polished + 0.9, 0.6 * _streak(seen))
    return torch.where(metal, polished, plain)
