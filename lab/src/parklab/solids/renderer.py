"""Renders clips by marching rays through signed distances, in plain batched PyTorch, on any device.

Everything random is drawn on the CPU from a clip's seed and index, so a clip is the same in any batch, and the same on
every device up to rounding. Only rays that meet a sphere around an object are marched, and only points whose way to a
light meets one are shadowed: a march is a loop over lists of rays, not over pictures. Linear light is tone-mapped, then
the samples of a pixel are averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from parklab.sprites.data import ClipSize

from .materials import Seen, paint
from .motion import Clip, Happening, happening
from .shapes import BOUNDS, DISTANCES, SHAPES, dot, normals
from .surroundings import Surroundings, floor_colour, fog, sky_colour, surroundings

STEPS, SHADOW_STEPS = 28, 14
NEAR = 4e-3  # a ray this close to a solid has hit it
HARDNESS = 7.0  # of shadows: their edges widen by 1 / HARDNESS of the distance
HALF_WIDTH = math.tan(math.radians(22.0))  # of the picture, at distance 1
NOBODY = 2  # owner of a ray that meets no object
RAYS_AT_ONCE = {"cpu": 1_000_000, "cuda": 48_000_000}  # a CPU is faster with few; the GPU's is not tuned


@dataclass(frozen=True)
class Bodies:
    """Objects of every frame: n frames, two slots."""

    shape: Tensor  # [2, n]; -1 where there is none
    size: Tensor  # [2, n]
    centre: Tensor  # [2, 3, n]
    turn: Tensor  # [2, 3, 3, n]: columns of the world's coordinates to rows of the object's
    colour: Tensor  # [2, n]
    material: Tensor  # [2, n]


def _bodies(scene: Happening, frames: int, device: torch.device | str) -> Bodies:
    per_frame = lambda v: v.T.repeat_interleave(frames, 1).to(device)  # noqa: E731
    shape = torch.where(scene.present > 0, scene.shape, -1)
    centre = scene.centre.permute(1, 3, 0, 2).flatten(2)
    turn = scene.turn.permute(1, 4, 3, 0, 2).flatten(3)  # transposed: the inverse of a rotation
    return Bodies(
        per_frame(shape), per_frame(scene.size), centre.contiguous().to(device), turn.contiguous().to(device),
        per_frame(scene.colour), per_frame(scene.material),
    )  # fmt: skip


def _rays(scene: Happening, size: ClipSize, samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Eyes [3, n] and unit directions [3, n, pixels], pixels row by row, each with samples x samples rays."""
    width, height = size.width * samples, size.height * samples
    x = ((torch.arange(width, device=device) + 0.5) / width * 2 - 1) * HALF_WIDTH
    y = (1 - (torch.arange(height, device=device) + 0.5) / height * 2) * HALF_WIDTH * size.height / size.width
    right, up, forward = scene.axes.flatten(0, 1).permute(1, 2, 0).to(device)[..., None, None]
    way = right * x + up * y[:, None] + forward
    way = way * torch.rsqrt(dot(way, way))
    return scene.eye.flatten(0, 1).T.contiguous().to(device), way.flatten(2)


def _to_object(bodies: Bodies, slot: int, frame: Tensor, vector: Tensor) -> Tensor:
    turn = bodies.turn[slot][:, :, frame]
    return turn[:, 0] * vector[0] + turn[:, 1] * vector[1] + turn[:, 2] * vector[2]


def _to_world(bodies: Bodies, slot: int, frame: Tensor, vector: Tensor) -> Tensor:
    turn = bodies.turn[slot][:, :, frame]
    return turn[0] * vector[0] + turn[1] * vector[1] + turn[2] * vector[2]


def _entering(origin: Tensor, way: Tensor, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which rays meet a sphere ahead of them, and where they enter and leave it."""
    away = origin - centre
    along = dot(away, way)
    inside = along * along - dot(away, away) + radius * radius
    half = inside.clamp(min=0).sqrt()
    return (inside > 0) & (half > along), -along - half, half - along


@dataclass(frozen=True)
class Hits:
    """Rays that hit the object of a slot: index and distance [n], and where, in the object's coordinates [3, n]."""

    ray: Tensor
    distance: Tensor
    local: Tensor
    normal: Tensor


def _march(bodies: Bodies, slot: int, eye: Tensor, way: Tensor) -> Hits:
    pixels = way.shape[2]
    bound = torch.tensor((*BOUNDS, 0.0), device=way.device)[bodies.shape[slot]] * bodies.size[slot]
    centre = bodies.centre[slot][:, :, None]
    meets, enter, leave = _entering(eye[:, :, None], way, centre, bound[:, None])
    chosen = meets.flatten().nonzero()[:, 0]
    shapes = bodies.shape[slot][chosen // pixels]
    found = []
    for shape in range(len(SHAPES)):
        ray = chosen[shapes == shape]
        frame = ray // pixels
        scale = bodies.size[slot][frame]
        origin = _to_object(bodies, slot, frame, (eye - bodies.centre[slot])[:, frame]) / scale
        heading = _to_object(bodies, slot, frame, way.flatten(1)[:, ray])
        at, end = enter.flatten()[ray].clamp(min=0) / scale, leave.flatten()[ray] / scale
        for _ in range(STEPS if len(ray) else 0):
            at = at + DISTANCES[shape](origin + heading * at)
        hit = ((DISTANCES[shape](origin + heading * at) < NEAR) & (at < end)).nonzero()[:, 0]
        local = (origin + heading * at)[:, hit]
        found.append((ray[hit], (at * scale)[hit], local, normals(shape, local)))
    return Hits(*(torch.cat(parts, -1) for parts in zip(*found, strict=True)))


def _light_left(bodies: Bodies, slot: int, frame: Tensor, point: Tensor, light: Tensor) -> Tensor:
    """Share of a light that the object of a slot lets through to points [3, n]."""
    left = torch.ones_like(point[0])
    kind = bodies.shape[slot][frame]
    bound = torch.tensor((*BOUNDS, 0.0), device=point.device)[kind] * bodies.size[slot][frame]
    # around the object, as wide as its penumbra may be
    meets, enter, leave = _entering(point, light, bodies.centre[slot][:, frame], 1.35 * bound)
    chosen = (meets & (kind >= 0)).nonzero()[:, 0]
    for shape in range(len(SHAPES)):
        some = chosen[kind[chosen] == shape]
        if not len(some):
            continue
        of, scale = frame[some], bodies.size[slot][frame[some]]
        origin = _to_object(bodies, slot, of, point[:, some] - bodies.centre[slot][:, of]) / scale
        heading = _to_object(bodies, slot, of, light[:, some])
        at, end = (enter[some] / scale).clamp(min=0.02), leave[some] / scale
        least = torch.ones_like(at)
        for _ in range(SHADOW_STEPS):
            near = DISTANCES[shape](origin + heading * at)
            least = torch.minimum(least, torch.where(at < end, HARDNESS * near / at, 1.0))
            at = at + near.clamp(0.04, 0.5)
        soft = least.clamp(0, 1)
        left[some] = soft * soft * (3 - 2 * soft)
    return left


def _nearness(bodies: Bodies, slot: int, frame: Tensor, point: Tensor) -> Tensor:
    """Share of the sky that points [3, n] beside the object of a slot still see."""
    open_sky = torch.ones_like(point[0])
    kind = bodies.shape[slot][frame]
    away = point - bodies.centre[slot][:, frame]
    scale = bodies.size[slot][frame]
    chosen = ((dot(away, away) < (2.2 * scale) ** 2) & (kind >= 0)).nonzero()[:, 0]
    for shape in range(len(SHAPES)):
        some = chosen[kind[chosen] == shape]
        local = _to_object(bodies, slot, frame[some], away[:, some]) / scale[some]
        open_sky[some] = 1 - 0.75 * torch.exp(-3.2 * DISTANCES[shape](local).clamp(min=0))
    return open_sky


def _lights(bodies: Bodies, around: Surroundings, frame: Tensor, point: Tensor, itself: int | None) -> list[Tensor]:
    """Strength of both lights [n] at points; an object does not shade itself."""
    strengths = []
    for light in range(2):
        left = around.strength[:, light][frame]
        some = (left > 0).nonzero()[:, 0]  # half of the clips have no second light
        heading = around.light[:, light].T[:, frame[some]]
        for slot in range(2):
            if slot != itself:
                left[some] = left[some] * _light_left(bodies, slot, frame[some], point[:, some], heading)
        strengths.append(left)
    return strengths


def _floor(bodies: Bodies, around: Surroundings, frame: Tensor, eye: Tensor, way: Tensor, pixel: float) -> Tensor:
    """Colour of the floor where rays [3, n] that point down meet it."""
    far = (eye[1][frame] / -way[1]).clamp(max=200.0)
    point = eye[:, frame] + way * far
    own = floor_colour(around, frame, point, 0.5 * pixel * far / (-way[1]).sqrt())
    ambient = torch.lerp(around.horizon, around.zenith, 0.5).T[:, frame] * 0.55
    for slot in range(2):
        ambient = ambient * _nearness(bodies, slot, frame, point)
    lit = ambient
    for light, strength in enumerate(_lights(bodies, around, frame, point, None)):
        lit = lit + around.sun.T[:, frame] * (1.25 * strength * around.light[:, light, 1][frame])
    return torch.lerp(own * lit, around.horizon.T[:, frame], fog(far))


def _tone(colour: Tensor) -> Tensor:
    """Linear light to display values in [0, 1]: highlights roll off, darker colours stay saturated."""
    rolled = colour * (1 + colour / 6.0) / (1 + 0.62 * colour)
    return rolled.clamp(0, 1) ** (1 / 2.2)


def _picture(bodies: Bodies, around: Surroundings, eye: Tensor, way: Tensor) -> Tensor:
    """Colours [3, n, pixels] of all rays."""
    frames, pixels = way.shape[1:]
    flat, depth = way.flatten(1), torch.full((frames * pixels,), torch.inf, device=way.device)
    owner = torch.full((frames * pixels,), NOBODY, dtype=torch.int8, device=way.device)
    hits = [_march(bodies, slot, eye, way) for slot in range(2)]
    for slot, hit in enumerate(hits):
        owner[hit.ray] = torch.where(hit.distance < depth[hit.ray], slot, owner[hit.ray])
        depth[hit.ray] = torch.minimum(hit.distance, depth[hit.ray])
    colour = torch.empty_like(flat)
    pixel = 2 * HALF_WIDTH / math.sqrt(pixels * 1.5)
    up = flat[1] > -1e-3
    for mask, kind in ((up, "sky"), (~up, "floor")):
        ray = (mask & (owner == NOBODY)).nonzero()[:, 0]
        frame, some = ray // pixels, flat[:, ray]
        colour[:, ray] = (
            sky_colour(around, frame, some) if kind == "sky" else _floor(bodies, around, frame, eye, some, pixel)
        )
    for slot, hit in enumerate(hits):
        kept = (owner[hit.ray] == slot).nonzero()[:, 0]
        ray = hit.ray[kept]
        frame = ray // pixels
        point = eye[:, frame] + flat[:, ray] * hit.distance[kept]
        normal = _to_world(bodies, slot, frame, hit.normal[:, kept])
        lights = _lights(bodies, around, frame, point + 0.01 * normal, slot)
        local, kinds = hit.local[:, kept], (bodies.colour[slot][frame], bodies.shape[slot][frame])
        seen = Seen(point, normal, local, flat[:, ray], frame, *kinds)
        colour[:, ray] = paint(seen, bodies.material[slot][frame], around, lights)
    return colour.view_as(way)


@torch.no_grad()
def render(clips: list[Clip], size: ClipSize, device: torch.device | str = "cpu", samples: int = 2) -> Tensor:
    """Clips [b, 3, frames, height, width] in [-1, 1]; samples: rays a pixel, each way."""
    at_once = max(1, RAYS_AT_ONCE[torch.device(device).type] // (size.frames * size.height * size.width * samples**2))
    made = []
    for start in range(0, len(clips), at_once):
        scene = happening(clips[start : start + at_once], size.frames)
        bodies, around = _bodies(scene, size.frames, device), surroundings(scene, size.frames, device)
        eye, way = _rays(scene, size, samples, device)
        shown = _tone(_picture(bodies, around, eye, way))
        shown = shown.view(3, -1, size.frames, size.height, samples, size.width, samples)
        mean = sum(shown[..., i, :, j] for i, j in product(range(samples), repeat=2)) / samples**2
        made.append((mean * 2 - 1).transpose(0, 1))  # type: ignore[union-attr]  # a sum of tensors
    return torch.cat(made)
