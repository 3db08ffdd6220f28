"""Sky, sun and floor of a clip: colours in linear light, for directions and points given as [3, n]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .motion import Happening
from .shapes import dot, unit

# horizon, zenith, colour of the sun
SKIES = (
    ((0.62, 0.80, 0.98), (0.05, 0.22, 0.66), (1.00, 0.95, 0.84)),  # noon
    ((1.00, 0.62, 0.34), (0.20, 0.22, 0.58), (1.00, 0.82, 0.60)),  # evening
    ((0.96, 0.56, 0.66), (0.24, 0.14, 0.48), (1.00, 0.88, 0.86)),  # dusk
    ((0.62, 0.88, 0.78), (0.05, 0.34, 0.46), (1.00, 0.97, 0.86)),  # mint
)
# light and dark part of the floor's pattern; muted, so that the objects' colours stand out
FLOORS = (
    ((0.46, 0.44, 0.41), (0.20, 0.19, 0.19)),
    ((0.50, 0.38, 0.26), (0.27, 0.18, 0.11)),
    ((0.34, 0.39, 0.45), (0.14, 0.17, 0.22)),
    ((0.42, 0.42, 0.33), (0.18, 0.20, 0.15)),
)
PATTERNS = 4  # tiles, planks, stone, mat
FOG = 24.0  # how far one sees the floor


@dataclass(frozen=True)
class Surroundings:
    """Of every frame: colours [frames, 3], light directions [frames, 2, 3] and strengths [frames, 2]."""

    horizon: Tensor
    zenith: Tensor
    sun: Tensor
    light: Tensor
    strength: Tensor
    pattern: Tensor
    pale: Tensor
    dark: Tensor
    turn: Tensor  # [frames, 2]: cosine and sine of the pattern's angle
    grain: Tensor  # [frames]: shifts the pattern


def surroundings(scene: Happening, frames: int, device: torch.device | str) -> Surroundings:
    """The same in every frame of a clip; rows are frames, clip after clip."""
    d = scene.draws
    sky = torch.tensor(SKIES)[(d["sky"] * len(SKIES)).long()]
    floor = torch.tensor(FLOORS)[(d["floor_colour"] * len(FLOORS)).long()]
    # the key light comes over the camera's shoulder, left or right; the other from the opposite side
    side = torch.where(d["light"] < 0.5, -1.0, 1.0)
    azimuth = side * (0.45 + 0.9 * (2 * d["light"] % 1))
    other = -side * (0.7 + 0.8 * d["other_light"])
    height = 0.72 + 0.3 * d["light_height"]
    aim = lambda a, h: torch.stack([a.sin() * h.cos(), h.sin(), a.cos() * h.cos()], -1)  # noqa: E731
    light = torch.stack([aim(azimuth, height), aim(other, height * 0.8)], 1)
    strength = torch.stack([torch.ones_like(side), torch.where(d["lights"] < 0.5, 0.42, 0.0)], 1)
    angle = 0.5 * math.pi * (d["floor_turn"] - 0.5)
    parts = (
        *sky.unbind(1), light, strength, (d["floor"] * PATTERNS).long(), *floor.unbind(1),
        torch.stack([angle.cos(), angle.sin()], -1), d["grain"],
    )  # fmt: skip
    return Surroundings(*(part.repeat_interleave(frames, 0).to(device) for part in parts))


def sky_colour(around: Surroundings, frame: Tensor, way: Tensor) -> Tensor:
    """Of directions way [3, n] in frames [n]: a gradient from horizon to zenith, with a glow around the sun."""
    high = way[1].clamp(min=0).sqrt()
    horizon, zenith = around.horizon.T[:, frame], around.zenith.T[:, frame]
    near = dot(way, around.light[:, 0].T[:, frame]).clamp(min=0)
    glow = 0.35 * near**8 + 0.5 * near**64
    return torch.lerp(horizon, zenith, high * 0.95) + around.sun.T[:, frame] * glow


def wobble(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Smooth noise in about [-1, 1]: a few sines of unrelated lengths."""
    slow = (1.3 * x + 1.7 * (0.9 * y).sin() + 0.4 * z).sin() * (1.1 * z + 1.3 * (0.7 * x).cos()).sin()
    fast = (2.9 * x - 2.3 * z + 2.1 * y).sin() * (3.1 * z + 1.9 * x - 1.3 * y).cos()
    return 0.6 * slow + 0.4 * fast


def _steps(at: Tensor, blur: Tensor) -> Tensor:
    """A square wave of period 2 between -1 and 1, its edges as soft as a pixel is wide there."""
    wave = 1 - 2 * ((at % 2) - 1).abs()  # from -1 to 1 and back
    return (wave / blur.clamp(min=0.02)).clamp(-1, 1)


def floor_colour(around: Surroundings, frame: Tensor, point: Tensor, blur: Tensor) -> Tensor:
    """The floor's own colour at points [3, n]; blur: about half a pixel's width there."""
    cosine, sine = around.turn[frame].unbind(-1)
    grain = 40 * around.grain[frame]
    x, z = cosine * point[0] - sine * point[2] + grain, sine * point[0] + cosine * point[2] + 0.37 * grain
    fade = 1 / (1 + (2.5 * blur) ** 2)  # far away a pattern is finer than a pixel
    tiles = 0.5 + 0.5 * _steps(x, 2 * blur) * _steps(z, 2 * blur) * fade
    row = (z * 1.25).floor()
    plank = 0.5 + 0.45 * (row * 12.9898 + 3.1 * (x / 3.2 + row * 0.37).floor()).sin()
    seam = ((z * 1.25) % 1 - 0.5).abs()
    rings = 0.12 * (9 * z + 2.5 * wobble(0.5 * x, row, 2 * z)).sin() * fade
    planks = (0.25 + 0.6 * plank + rings) * (1 - 0.7 * (1 - (0.5 - seam) / 0.06).clamp(0, 1) * fade)
    stone = 0.5 + 0.32 * wobble(0.8 * x, grain, 0.8 * z) + 0.28 * wobble(2.6 * x, grain, 2.6 * z) * fade
    radius = (point[0] ** 2 + point[2] ** 2).sqrt()
    mat = 0.5 + 0.35 * _steps(1.3 * radius, 2.6 * blur) * fade
    kinds = torch.stack([tiles, planks, stone, mat])
    share = kinds.gather(0, around.pattern[frame][None])[0].clamp(0, 1)
    speck = 1 + 0.05 * wobble(7 * x, grain, 7 * z) * fade
    return torch.lerp(around.dark.T[:, frame], around.pale.T[:, frame], share) * speck


def fog(distance: Tensor) -> Tensor:
    """The share of the horizon's colour in what is seen at a distance."""
    return 1 - torch.exp(-((distance / FOG) ** 2))


def mirrored(way: Tensor, normal: Tensor) -> Tensor:
    return unit(way - 2 * dot(way, normal) * normal)
