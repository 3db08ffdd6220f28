"""Procedural clips: a sprite moves over a panning texture, for any sentence of the grammar, on any device.

Everything random is drawn on the CPU from a seed, so a clip is the same on every device up to rounding. The per-pixel
work is two table look-ups (a signed-distance table for the sprite, a periodic tile for the texture), so an H200 renders
thousands of clips a second. Backgrounds stay below a brightness of 0.66 and sprites above 0.8 (largest of red, green,
blue): that gap is what the prompt-following check relies on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .grammar import SHAPES, TEXTURES, Scene

SPRITE_RGB = (
    (0.95, 0.10, 0.10),
    (1.00, 0.52, 0.05),
    (1.00, 0.95, 0.12),
    (0.10, 0.92, 0.20),
    (0.10, 0.92, 0.96),
    (0.12, 0.28, 1.00),
    (0.72, 0.12, 0.95),
    (1.00, 1.00, 1.00),
)
GROUND_RGB = (
    (0.25, 0.45, 1.00),
    (0.25, 0.90, 0.35),
    (1.00, 0.28, 0.25),
    (0.68, 0.30, 1.00),
    (0.80, 0.52, 0.28),
    (0.75, 0.75, 0.75),
)
TILE = 192  # pixels of the periodic texture tile; the tile is magnified 0.8x to 1.4x
TABLE = 160  # pixels of a signed-distance table, which spans [-1.6, 1.6] sprite radii


@dataclass(frozen=True)
class ClipSize:
    """Pixels and frames of a clip. One token of the model is 8 x 8 pixels x 4 frames (the first frame stands alone).

    Height and width are even numbers of tokens, because WanPipeline asks for multiples of 16 pixels.
    """

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if self.frames % 4 != 1 or self.height % 16 or self.width % 16 or min(self.height, self.width, self.frames) < 1:
            raise ValueError(
                f"clip size: expected frames = 4k + 1 and height and width divisible by 16, got {self.frames} frames "
                f"of {self.height} x {self.width}; try 33 frames of 160 x 256"
            )

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)


def _polygon_distance(points: Tensor, corners: Tensor) -> Tensor:
    """Signed distance (negative inside) from points [..., 2] to a polygon with corners [n, 2]."""
    following = corners.roll(-1, 0)
    edge, from_corner = following - corners, points[..., None, :] - corners
    along = ((from_corner * edge).sum(-1) / (edge * edge).sum(-1)).clamp(0, 1)
    nearest = (from_corner - edge * along[..., None]).norm(dim=-1).amin(-1)
    x, y = points[..., 0, None], points[..., 1, None]
    crosses = (corners[:, 1] > y) != (following[:, 1] > y)
    slope = edge[:, 0] / torch.where(edge[:, 1] == 0, 1e-9, edge[:, 1])
    inside = (crosses & (x < from_corner.new_tensor(0) + corners[:, 0] + (y - corners[:, 1]) * slope)).sum(-1) % 2 == 1
    return torch.where(inside, -nearest, nearest)


def _regular(count: int, radii: tuple[float, ...], start: float = -math.pi / 2) -> Tensor:
    angles = start + torch.arange(count) * (2 * math.pi / count)
    return torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor(radii).repeat(count // len(radii))[:, None]


@lru_cache(maxsize=1)
def shape_tables() -> Tensor:
    """Signed distances of every shape, [shapes, TABLE, TABLE], in sprite radii (y points down)."""
    axis = torch.linspace(-1.6, 1.6, TABLE)
    points = torch.stack([axis[None, :].expand(TABLE, TABLE), axis[:, None].expand(TABLE, TABLE)], -1)
    radius, (x, y) = points.norm(dim=-1), points.unbind(-1)
    bar = lambda a, b: torch.maximum(a.abs() - 1.0, b.abs() - 0.34)  # noqa: E731
    tables = {
        "circle": radius - 0.95,
        "square": torch.maximum(x.abs(), y.abs()) - 0.84,
        "triangle": _polygon_distance(points - torch.tensor([0.0, 0.18]), _regular(3, (1.18,))),
        "star": _polygon_distance(points, _regular(10, (1.15, 0.47))),
        "cross": torch.minimum(bar(x, y), bar(y, x)),
        "ring": (radius - 0.76).abs() - 0.22,
    }
    return torch.stack([tables[shape] for shape in SHAPES])


def _texture_tiles(texture: Tensor, draw: Tensor, cells: Tensor, modes: Tensor) -> Tensor:
    """Periodic grey tiles [b, TILE, TILE] in [0, 1]; draw [b, 4] and cells [b, 8, 8] uniform, modes [b, 24, 4]."""
    u = torch.arange(TILE, device=draw.device) / TILE
    x, y = u[None, None, :], u[None, :, None]
    turn = 2 * math.pi
    few, many, tilt, warp = draw[:, :, None, None].unbind(1)
    n, m = 2 + (few * 3).floor(), 3 + (many * 3).floor()
    soft = lambda v: torch.sigmoid(6 * v)  # noqa: E731

    def at_cell(row: Tensor, column: Tensor) -> Tensor:
        index = (row % 8 * 8 + column % 8).long().expand(len(cells), TILE, TILE).flatten(1)
        return cells.flatten(1).gather(1, index).view(len(cells), TILE, TILE)

    phase = turn * (modes[:, :, 2, None, None] + modes[:, :, 0, None, None] * x + modes[:, :, 1, None, None] * y)
    clouds = torch.sigmoid(1.6 * (modes[:, :, 3, None, None] * phase.sin()).sum(1))
    lean = (tilt * 3).floor() - 1
    row, column = (y * 8).floor(), (x * 8).floor()
    dot = (((x * 8) % 1 - 0.5) ** 2 + ((y * 8) % 1 - 0.5) ** 2).sqrt()
    brick_row = (y * 8).floor()
    brick_x = x * 4 + brick_row % 2 / 2
    mortar = torch.minimum(((y * 8) % 1 - 0.5).abs().mul(-1).add(0.5), (brick_x % 1 - 0.5).abs().mul(-2).add(1.0))
    kinds = {
        "waves": 0.5 + 0.5 * (turn * (m * y + (0.12 + 0.2 * warp) * (turn * (n - 1) * x).sin())).sin(),
        "stripes": soft((turn * ((n + 1) * x + lean * m * y)).sin()),
        "checks": soft(2 * (turn * 2 * x).sin() * (turn * 2 * y).sin())
        * (0.55 + 0.45 * at_cell((y * 4).floor(), (x * 4).floor())),
        "dots": torch.sigmoid((0.16 + 0.2 * at_cell(row, column) - dot) * 30) * (0.5 + 0.5 * at_cell(column, row)),
        "clouds": clouds,
        "bricks": torch.sigmoid((mortar - 0.09) * 40) * (0.35 + 0.65 * at_cell(brick_row, brick_x.floor() * 2)),
    }
    stacked = torch.stack([kinds[name].expand(len(draw), TILE, TILE) for name in TEXTURES], 1)
    chosen = stacked[torch.arange(len(draw), device=draw.device), texture]
    return chosen * (0.8 + 0.2 * clouds)


def _sprite_centres(motion: Tensor, draw: Tensor, radius: Tensor, size: ClipSize) -> Tensor:
    """Centres [b, frames, 2] (x, y) in pixels; the sprite stays inside the frame."""
    time = torch.arange(size.frames, dtype=torch.float32)
    progress = (time / max(size.frames - 1, 1))[None]
    extent = torch.tensor([size.width, size.height], dtype=torch.float32)
    room = (extent - 2.4 * radius[:, None]).clamp(min=0) / 2  # how far a centre may be from the middle, each way
    sign, place, reach, swing = (
        (draw[:, :1] < 0.5).float() * 2 - 1,
        2 * draw[:, 1:2] - 1,
        0.75 + 0.25 * draw[:, 2:3],
        draw[:, 3:4],
    )
    sweep = (2 * progress - 1) * reach
    rest = place.expand_as(sweep)
    turn = 2 * math.pi * (time[None] / (28 + 12 * swing) + place)
    hop = 1 - 2 * (math.pi * (time[None] / (14 + 6 * swing) + place)).sin().abs()
    orbit = room.amin(1, keepdim=True) * reach * 0.9
    x_of = (sweep, -sweep, rest, rest, rest * 0.5 + 0.25 * sign * sweep, rest * 0)
    y_of = (rest, rest, -sweep, sweep, hop * reach, rest * 0)
    index = motion[:, None].expand(-1, size.frames)[None]
    x = torch.stack(x_of).gather(0, index)[0] * room[:, :1]
    y = torch.stack(y_of).gather(0, index)[0] * room[:, 1:]
    orbits = (motion == 5)[:, None]
    centre_x = (extent[0] / 2 - radius[:, None] * 1.2 - orbit).clamp(min=0) * place
    x = torch.where(orbits, centre_x + orbit * (sign * turn).cos(), x)
    y = torch.where(orbits, orbit * (sign * turn).sin(), y)
    return torch.stack([x, y], -1) + extent / 2


def render(scenes: list[Scene] | Tensor, size: ClipSize, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Clips [b, 3, frames, height, width] in [-1, 1]; scenes: Scene objects or their indices [b, 5]."""
    words = scenes.cpu() if isinstance(scenes, Tensor) else torch.tensor([scene.indices for scene in scenes])
    colour, shape, motion, ground, texture = words.unbind(1)
    count, drawn = len(words), torch.Generator().manual_seed(seed)
    uniform = lambda *shape: torch.rand(*shape, generator=drawn)  # noqa: E731
    radius = min(size.height, size.width) * (0.16 + 0.07 * uniform(count))
    centres = _sprite_centres(motion, uniform(count, 4), radius, size)
    heading, speed = 2 * math.pi * uniform(count), 0.5 + 1.5 * uniform(count)
    waves = torch.stack(
        [(uniform(count, 24) * 9).floor() - 4, (uniform(count, 24) * 9).floor() - 4, uniform(count, 24)], -1
    )
    strength = torch.randn(count, 24, generator=drawn) / (1 + waves[..., :2].norm(dim=-1))
    modes = torch.cat([waves, strength[..., None]], -1)
    corner, magnify = uniform(count, 2), 0.8 + 0.6 * uniform(count)
    tiles = _texture_tiles(
        texture.to(device), uniform(count, 4).to(device), uniform(count, 8, 8).to(device), modes.to(device)
    )
    shade_angle = 2 * math.pi * uniform(count)

    to = lambda v: v.to(device, non_blocking=True)  # noqa: E731
    time = torch.arange(size.frames, dtype=torch.float32, device=device)
    x = torch.arange(size.width, dtype=torch.float32, device=device)
    y = torch.arange(size.height, dtype=torch.float32, device=device)
    flow = to(torch.stack([heading.cos(), heading.sin()], 1) * speed[:, None])
    shift = to(corner)[:, None] * 512 + flow[:, None] * time[None, :, None]
    span = to(magnify)[:, None, None] * TILE
    # grid_sample has no wrap-around: the tile gets one wrapped pixel, and coordinates are taken modulo the tile
    wrapped = F.pad(tiles[:, None], (0, 1, 0, 1), mode="circular")
    across = ((x + shift[..., :1]) / span % 1) * 2 - 1
    down = ((y + shift[..., 1:]) / span % 1) * 2 - 1
    where = torch.stack(
        [across[:, :, None, :].expand(-1, -1, len(y), -1), down[..., None].expand(-1, -1, -1, len(x))], -1
    )
    grey = F.grid_sample(wrapped, where.flatten(1, 2), align_corners=True, mode="bilinear").view(
        count, 1, size.frames, len(y), len(x)
    )
    base = to(torch.tensor(GROUND_RGB)[ground])[:, :, None, None, None]
    clip = base * (0.20 + 0.45 * grey)

    centre, half = to(centres), to(radius)[:, None, None]
    right = (x - centre[..., :1]) / half
    below = (y - centre[..., 1:]) / half
    where = (
        torch.stack([right[:, :, None, :].expand(-1, -1, len(y), -1), below[..., None].expand(-1, -1, -1, len(x))], -1)
        / 1.6
    )
    tables = to(shape_tables())[to(shape)][:, None]
    distance = F.grid_sample(tables, where.flatten(1, 2), align_corners=True, padding_mode="border").view_as(grey)
    pixels = distance * half[..., None, None]
    cover = (0.5 - pixels / 1.5).clamp(0, 1)
    shadow = 1 - 0.45 * torch.exp(-((pixels.clamp(min=0) / (0.12 * half[..., None, None])) ** 2))
    light = to(torch.stack([shade_angle.cos(), shade_angle.sin()], 1))[:, None]
    lit = 0.94 + 0.05 * (right[:, :, None, :] * light[..., :1, None] + below[..., None] * light[..., 1:, None]).clamp(
        -1.2, 1.2
    )
    paint = to(torch.tensor(SPRITE_RGB)[colour])[:, :, None, None, None] * lit[:, None]
    return torch.lerp(clip * shadow, paint, cover) * 2 - 1
