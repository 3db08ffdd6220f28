"""What happens in a clip: where its objects, its camera and its lights are in every frame.

A clip is a sentence and some uniform draws, both a function of (seed, index) alone. The floor is y = 0, x points right
and z towards the camera. Time runs from 0 to 1 over the clip, whatever its number of frames.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from .grammar import CAMERAS, COLOURS, MATERIALS, MOTIONS, SHAPES, Scene, draw_scene, draw_training_scene
from .shapes import ROLLING, reaches

DRAWN = (
    "size", "other_size", "way", "reach", "lane", "place", "yaw", "other_yaw", "phase", "amount", "speed",
    "camera_way", "camera_amount", "camera_yaw", "camera_pitch", "camera_distance",
    "light", "light_height", "lights", "other_light", "sky", "floor", "floor_turn", "floor_colour", "grain",
)  # fmt: skip


@dataclass(frozen=True)
class Clip:
    """A sentence and the draws for what it leaves open, each uniform in [0, 1), in the order of DRAWN."""

    scene: Scene
    draws: tuple[float, ...]


def training_clip(seed: int, index: int, stream: str = "train") -> Clip:
    """Clip `index` of a stream: its sentence is none of the held-out ones."""
    drawn = random.Random(f"{stream} {seed} {index}")
    return Clip(draw_training_scene(drawn), tuple(drawn.random() for _ in DRAWN))


def any_clip(seed: int, index: int, stream: str) -> Clip:
    """Clip `index` of a stream whose sentences may be held-out ones: for measurements, never for the model."""
    drawn = random.Random(f"{stream} {seed} {index}")
    return Clip(draw_scene(drawn), tuple(drawn.random() for _ in DRAWN))


def clip_of(scene: Scene, seed: int, index: int = 0) -> Clip:
    """A clip of a given sentence."""
    drawn = random.Random(f"scene {seed} {index}")
    return Clip(scene, tuple(drawn.random() for _ in DRAWN))


@dataclass(frozen=True)
class Happening:
    """Clips as tensors: b clips, two slots for objects, f frames. Where there is no second object, `present` is 0."""

    present: Tensor  # [b, 2]
    shape: Tensor  # [b, 2]
    colour: Tensor  # [b, 2]
    material: Tensor  # [b, 2]
    size: Tensor  # [b, 2]
    centre: Tensor  # [b, 2, f, 3]
    turn: Tensor  # [b, 2, f, 3, 3]: from an object's coordinates to the world's
    eye: Tensor  # [b, f, 3]
    axes: Tensor  # [b, f, 3, 3]: rows are the camera's right, up and forward
    draws: dict[str, Tensor]  # [b] each


def _rotation(angle: Tensor, axis: int) -> Tensor:
    """Rotations [..., 3, 3] about an axis of the world, counter-clockwise seen from its positive end."""
    a, b = [(1, 2), (2, 0), (0, 1)][axis]
    turn = torch.zeros(*angle.shape, 3, 3)
    turn[..., axis, axis] = 1
    turn[..., a, a] = turn[..., b, b] = angle.cos()
    turn[..., a, b], turn[..., b, a] = -angle.sin(), angle.sin()
    return turn


def _times(first: Tensor, second: Tensor) -> Tensor:
    """Products of 3 x 3 matrices, written out: a batched product may round differently in another batch."""
    return (first[..., :, :, None] * second[..., None, :, :]).sum(-2)


def _reach_along(shape: Tensor, turn: Tensor, axis: int, sign: float) -> Tensor:
    """How far solids [b, 2] reach along an axis of the world, turned by [b, 2, f, 3, 3]."""
    return reaches(shape[..., None], sign * turn[..., axis, :])


def _turns(motion: Tensor, shape: Tensor, yaw: Tensor, roll: Tensor) -> Tensor:
    """Rings stand on their edge and capsules upright, except that sliding ones lie; then roll about z, then yaw."""
    slides = torch.zeros_like(shape, dtype=torch.bool)
    slides[:, 0] = (motion == 2) | (motion == 3)
    tilt = (math.pi / 2) * ((shape == SHAPES.index("torus")) & ~slides)
    lie = (math.pi / 2) * ((shape == SHAPES.index("capsule")) & slides)
    base = _times(_rotation(lie.float(), 2), _rotation(tilt.float(), 0))[:, :, None]
    return _times(_rotation(yaw, 1), _times(_rotation(roll, 2), base))


def _sizes(words: Tensor, draw: dict[str, Tensor]) -> Tensor:
    drawn = torch.stack([draw["size"], draw["other_size"]], 1)
    alone = words[:, 6:7] == 0
    return torch.where(alone, 0.86 + 0.24 * drawn, 0.72 + 0.18 * drawn)


def _paths(words: Tensor, draw: dict[str, Tensor], size: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Centres [b, 2, f, 3] and turns [b, 2, f, 3, 3] of both objects."""
    time = (torch.arange(frames) / max(frames - 1, 1))[None]
    motion, shape = words[:, 7], words[:, [2, 5]]
    paired = (words[:, 6] == 1)[:, None]
    d = {name: value[:, None] for name, value in draw.items()}
    either = torch.where(d["way"] < 0.5, -1.0, 1.0)
    index = motion[:, None]
    way = torch.where((index == 0) | (index == 2), -1.0, torch.where((index == 1) | (index == 3), 1.0, either))
    zero = torch.zeros_like(time) + 0 * way

    reach = torch.where(paired, 1.5, 1.35) + 0.15 * d["reach"]
    roll_x = way * reach * (2 * time - 1)
    slide_x = way * reach * (1 - 2 * (1 - time) ** 2)  # comes to rest: a matte sphere's rolling looks like sliding
    hops = 2 + (d["amount"] * 2).floor() + 0.4 * d["speed"]
    within = (hops * time + d["phase"]) % 1
    hop = (0.6 + 0.3 * d["reach"]) * 4 * within * (1 - within)
    bounce_x = torch.where(paired, 1.15 * either, 1.2 * (d["place"] - 0.5)) + 0.5 * (d["speed"] - 0.5) * (2 * time - 1)
    ring = torch.where(paired, 1.4, 1.05) + 0.15 * d["reach"]
    phase = 2 * math.pi * (d["phase"] + either * (0.8 + 0.3 * d["amount"]) * time)

    side = torch.where(d["lane"] < 0.65, 1.0, -1.0)  # more often in front of the other object than behind it
    lane = torch.where(paired, 0.75 * side, 0.8 * (d["lane"] - 0.7))
    paths_x = (roll_x, roll_x, slide_x, slide_x, bounce_x, ring * phase.cos(), zero)
    paths_z = (lane, lane, lane, lane, 0.7 * (d["lane"] - 0.5), ring * phase.sin(), zero)

    def pick(options: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([o.expand_as(zero) for o in options]).gather(0, index.expand_as(zero)[None])[0]

    x, z = pick(paths_x), pick(paths_z)

    rolling = torch.tensor(ROLLING)[shape[:, :1]] * size[:, :1]
    roll = torch.where(index <= 1, -(x - x[:, :1]) / rolling + 0.6 * (d["yaw"] - 0.5), 0.0)
    yaw = torch.where(index <= 1, 0.0, 1.2 * (d["yaw"] - 0.5))
    spin = torch.where(index == 5, -phase, torch.where(index == 4, 1.5 * either * time, 0.0))
    still = (1.2 * (d["other_yaw"] - 0.5)).expand_as(zero)
    turn = _turns(motion, shape, torch.stack([yaw + spin, still], 1), torch.stack([roll, zero], 1))

    other_x = torch.where(index == 4, -1.15 * either, torch.where(index == 5, 0.0, 1.8 * (d["place"] - 0.5)))
    other_z = torch.where(index <= 3, -0.85 * side, 0.0)
    first, other = _collision(shape, turn, size, time, either, d["speed"])
    hits = index == 6
    centre = torch.zeros(len(words), 2, frames, 3)
    centre[:, 0, :, 0], centre[:, 0, :, 2] = torch.where(hits, first, x), torch.where(hits, 0.0, z)
    centre[:, 1, :, 0], centre[:, 1, :, 2] = torch.where(hits, other, other_x), torch.where(hits, 0.0, other_z)
    centre[..., 1] = _reach_along(shape, turn, 1, -1.0) * size[..., None]
    centre[:, 0, :, 1] += torch.where(index == 4, hop, 0.0)
    return centre, turn


def _collision(
    shape: Tensor, turn: Tensor, size: Tensor, time: Tensor, way: Tensor, speed: Tensor
) -> tuple[Tensor, Tensor]:
    """x of both objects: the first comes at an even speed, touches the second, and all but stops;
    that one slides off.
    """
    ahead, behind = (_reach_along(shape, turn, 0, sign) * size[..., None] for sign in (1.0, -1.0))
    right = way > 0
    gap = torch.where(right, ahead[:, 0] + behind[:, 1], behind[:, 0] + ahead[:, 1])[:, :1]
    touch = 0.38 + 0.12 * speed
    rest, start = 0.35 * way, -1.6 * way
    meet = rest - way * gap
    after = ((time - touch) / (1 - touch)).clamp(min=0)
    first = start + (meet - start) * (time / touch).clamp(max=1) + 0.12 * way * (1 - (1 - after) ** 2)
    return first, rest + 1.05 * way * (1 - (1 - after) ** 2)


def _camera(words: Tensor, draw: dict[str, Tensor], frames: int) -> tuple[Tensor, Tensor]:
    """Eye [b, f, 3] and axes [b, f, 3, 3]; pans turn the camera on the spot, orbits carry it around the middle."""
    sweep = 2 * (torch.arange(frames) / max(frames - 1, 1))[None] - 1
    d = {name: value[:, None] for name, value in draw.items()}
    signed = torch.where(d["camera_way"] < 0.5, -1.0, 1.0) * sweep
    kind = words[:, 8:9]
    around = torch.where(kind == CAMERAS.index("orbits"), (0.38 + 0.17 * d["camera_amount"]) * signed, 0.0)
    aside = torch.where(kind == CAMERAS.index("pans"), (0.06 + 0.04 * d["camera_amount"]) * signed, 0.0)
    yaw = 0.24 * (d["camera_yaw"] - 0.5) + around
    pitch = (0.25 + 0.10 * d["camera_pitch"]).expand_as(yaw)
    distance = 5.9 + 0.5 * d["camera_distance"]
    eye = torch.stack([yaw.sin() * pitch.cos(), pitch.sin(), yaw.cos() * pitch.cos()], -1) * distance[..., None]
    eye[..., 1] += 0.75
    look, down = yaw + aside, pitch - 0.03  # a little above the objects, so that the horizon is in the picture
    forward = -torch.stack([look.sin() * down.cos(), down.sin(), look.cos() * down.cos()], -1)
    right = torch.stack([look.cos(), torch.zeros_like(look), -look.sin()], -1)
    up = torch.linalg.cross(right, forward)
    return eye, torch.stack([right, up, forward], -2)


def words_of(scene: Scene) -> tuple[int, ...]:
    """Colour, material and shape of both objects, whether there is a second, motion, camera, as indices."""
    first, second = scene.first, scene.second or scene.first
    order = (first.colour, first.material, first.shape, second.material, second.colour, second.shape)
    slots = (COLOURS, MATERIALS, SHAPES, MATERIALS, COLOURS, SHAPES)
    named = [slot.index(word) for slot, word in zip(slots, order, strict=True)]
    return (*named, int(scene.second is not None), MOTIONS.index(scene.motion), CAMERAS.index(scene.camera))


def happening(clips: list[Clip], frames: int) -> Happening:
    """The clips' objects and cameras in `frames` frames, on the CPU."""
    words = torch.tensor([words_of(clip.scene) for clip in clips])
    draw = dict(zip(DRAWN, torch.tensor([clip.draws for clip in clips]).unbind(1), strict=True))
    size = _sizes(words, draw)
    centre, turn = _paths(words, draw, size, frames)
    eye, axes = _camera(words, draw, frames)
    present = torch.stack([torch.ones(len(clips)), words[:, 6].float()], 1)
    colour, material, shape = words[:, [0, 4]], words[:, [1, 3]], words[:, [2, 5]]
    return Happening(present, shape, colour, material, size, centre, turn, eye, axes, draw)
