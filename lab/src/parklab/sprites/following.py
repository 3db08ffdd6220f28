"""python -m parklab.sprites.following [--model FOLDER] [--count 50] [--out FILE.json]

Does the video show what was asked?

The rule, on decoded frames in [0, 1] (five frames, evenly spread):

1. Sprite pixels are those whose largest channel is above 0.74 (backgrounds of the training data stay below 0.66,
   sprites above 0.8), after a 5 x 5 mean filter that removes specks. A frame counts if they cover 0.5 % to 40 % of it.
2. Colour: the mean RGB of the sprite pixels, divided by its largest channel, is nearest to the asked palette entry.
3. Shape: the sprite's silhouette, centred at its centroid and scaled to unit area, has its largest intersection over
   union with the asked shape's template (summed over the frames; frames where the sprite touches the border are left
   out while others remain).
4. Motion (reported, not part of the bar): the centroid track over all frames. A straight track (net / length > 0.8)
   that covers over 0.12 of the frame is named by its direction; otherwise it bounces if its vertical extent is over
   twice the horizontal one or its vertical direction turns sharply at the bottom, else it orbits.

"Follows" means colour and shape are both right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parklab.files import write_atomically

from .data import SPRITE_RGB, ClipSize, render, shape_tables
from .grammar import COLOURS, SHAPES, Scene, held_out_scenes

THRESHOLD = 0.74
SILHOUETTE = 56  # pixels of a normalised silhouette, which spans 3 x sqrt(area)


@dataclass(frozen=True)
class Seen:
    """What the rule sees in a clip; None where no frame shows a sprite."""

    colour: str | None
    shape: str | None
    motion: str | None

    def follows(self, scene: Scene) -> bool:
        return self.colour == scene.colour and self.shape == scene.shape


def _silhouette(mask: Tensor) -> Tensor:
    """mask [h, w] in {0, 1} -> the same figure centred at its centroid and scaled to unit area."""
    height, width = mask.shape
    rows, columns = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    area = mask.sum()
    y, x, half = (mask * rows).sum() / area, (mask * columns).sum() / area, 1.5 * area.sqrt()
    axis = torch.linspace(-1, 1, SILHOUETTE) * half
    where = torch.stack(
        [
            ((x + axis) / (width - 1) * 2 - 1)[None, :].expand(SILHOUETTE, -1),
            ((y + axis) / (height - 1) * 2 - 1)[:, None].expand(-1, SILHOUETTE),
        ],
        -1,
    )
    return F.grid_sample(mask[None, None], where[None], align_corners=True)[0, 0]


@lru_cache(maxsize=1)
def _templates() -> Tensor:
    return torch.stack([_silhouette((table < 0).float()) for table in shape_tables()])


def _sprite_masks(clip: Tensor) -> Tensor:
    """clip [3, frames, h, w] in [0, 1] -> [frames, h, w] in {0, 1}."""
    bright = (clip.amax(0) > THRESHOLD).float()
    return (F.avg_pool2d(bright[:, None], 5, stride=1, padding=2)[:, 0] > 0.5).float()


def _motion(masks: Tensor) -> str | None:
    shown = masks.sum((1, 2)) > 0.003 * masks[0].numel()
    if shown.sum() < 3:
        return None
    masks = masks[shown]
    height, width = masks.shape[1:]
    area = masks.sum((1, 2))
    x = (masks.sum(1) * torch.arange(width)).sum(1) / area / min(height, width)
    y = (masks.sum(2) * torch.arange(height)).sum(1) / area / min(height, width)
    step = torch.stack([x.diff(), y.diff()], 1)
    net = step.sum(0)
    if net.norm() > 0.8 * step.norm(dim=1).sum() and net.abs().amax() > 0.12:
        if net[0].abs() > net[1].abs():
            return "moves right" if net[0] > 0 else "moves left"
        return "moves down" if net[1] > 0 else "moves up"
    turning = step[1:, 1] - step[:-1, 1]
    sharp = turning.abs().amax() > 3 * turning.abs().median() + 1e-4
    tall = (y.amax() - y.amin()) > 2 * (x.amax() - x.amin())
    return "bounces" if tall or sharp else "orbits"


def look(clip: Tensor) -> Seen:
    """clip [3, frames, h, w] in [0, 1]."""
    if clip.ndim != 4 or clip.shape[0] != 3:
        raise ValueError(
            f"clip: expected [3, frames, height, width], got {tuple(clip.shape)}; permute the frames first"
        )
    clip = clip.float().cpu()
    all_masks = _sprite_masks(clip)
    chosen = torch.linspace(0, clip.shape[1] - 1, 5).round().long()
    frames, masks = clip[:, chosen], all_masks[chosen]
    share = masks.mean((1, 2))
    usable = (share > 0.005) & (share < 0.40)
    if not usable.any():
        return Seen(None, None, None)
    frames, masks = frames[:, usable], masks[usable]
    mean = (frames * masks).sum((1, 2, 3)) / masks.sum()
    palette = torch.tensor(SPRITE_RGB)
    colour = ((mean / mean.amax()) - palette / palette.amax(1, keepdim=True)).norm(dim=1).argmin()
    border = masks[:, 0].amax(1) + masks[:, -1].amax(1) + masks[:, :, 0].amax(1) + masks[:, :, -1].amax(1)
    whole = masks[border == 0] if (border == 0).any() else masks
    figures = torch.stack([_silhouette(mask) for mask in whole])[:, None]
    overlap = torch.minimum(figures, _templates()).sum((2, 3)) / torch.maximum(figures, _templates()).sum((2, 3))
    return Seen(COLOURS[colour], SHAPES[overlap.sum(0).argmax()], _motion(all_masks))


def score(scenes: list[Scene], seen: list[Seen]) -> dict:
    """Rates over a set of prompts, with a row per prompt."""
    count = len(scenes)
    rate = lambda hits: sum(hits) / count  # noqa: E731
    kinds = {kind: [i for i, s in enumerate(scenes) if s.held_out == kind] for kind in ("pair", "sentence")}
    follows = [saw.follows(scene) for scene, saw in zip(scenes, seen, strict=True)]
    return {
        "prompts": count,
        "colour": rate(s.colour == scene.colour for scene, s in zip(scenes, seen, strict=True)),
        "shape": rate(s.shape == scene.shape for scene, s in zip(scenes, seen, strict=True)),
        "colour_and_shape": rate(follows),
        "motion": rate(s.motion == scene.motion for scene, s in zip(scenes, seen, strict=True)),
        **{f"colour_and_shape_held_out_{kind}": sum(follows[i] for i in rows) / len(rows) for kind,
           rows in kinds.items() if rows},
        "rows": [
            {"prompt": scene.sentence, "held_out": scene.held_out, "colour": s.colour, "shape": s.shape,
             "motion": s.motion, "follows": ok} for scene, s, ok in zip(scenes, seen, follows, strict=True)
        ],
    }  # fmt: skip


def check_the_rule(scenes: list[Scene], size: ClipSize, seed: int = 0) -> dict:
    """The rule on true renders: it should be right on the sentences they show, and at chance on shuffled sentences."""
    seen = [look(render([scene], size, seed + i)[0] / 2 + 0.5) for i, scene in enumerate(scenes)]
    shuffled = scenes[len(scenes) // 2 :] + scenes[: len(scenes) // 2]
    names = ("colour", "shape", "colour_and_shape", "motion")
    true, chance = score(scenes, seen), score(shuffled, seen)
    return {
        "true_renders": {n: true[n] for n in names},
        "shuffled_prompts": {n: chance[n] for n in names},
        "prompts": len(scenes),
    }


class DescribedScene(Protocol):
    """A scene of any grammar."""

    @property
    def sentence(self) -> str: ...


def generate(
    pipeline: Any,
    scenes: Sequence[DescribedScene],
    size: ClipSize,
    *,
    steps: int = 16,
    seed: int = 0,
    guidance: float = 1.0,
    batch: int = 1,
) -> Iterator[Tensor]:
    """Clips [3, frames, h, w] in [0, 1], one at a time; the noise of prompt i depends on seed and i alone."""
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        noise = [torch.Generator("cpu").manual_seed(seed * 100_003 + start + i) for i in range(len(part))]
        frames = pipeline(
            prompt=[scene.sentence for scene in part], height=size.height, width=size.width, num_frames=size.frames,
            num_inference_steps=steps, guidance_scale=guidance, generator=noise, output_type="pt",
            max_sequence_length=32,
        ).frames  # fmt: skip
        yield from frames.float().transpose(1, 2).cpu()


def follow(
    pipeline: Any, scenes: list[Scene], size: ClipSize, *, steps: int, guidance: float, seed: int = 0, batch: int = 1
) -> tuple[list[Tensor], dict[str, Any]]:
    """Videos of sentences, and what the rule sees in them."""
    clips = []
    for clip in generate(pipeline, scenes, size, steps=steps, seed=seed, guidance=guidance, batch=batch):
        clips.append(clip)
        sys.stderr.write(f"\r{len(clips)}/{len(scenes)}")
    made = {"size": [size.frames, size.height, size.width], "tokens": size.tokens, "steps": steps}
    return clips, score(scenes, [look(clip) for clip in clips]) | made | {"seed": seed, "guidance": guidance}


def video_options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """--model, and how many videos of it are made, how large and by how many steps; `model` absent: required."""
    reader = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = {"count": 100, "seed": 0, "device": "cuda" if torch.cuda.is_available() else "cpu"} | defaults
    size: ClipSize = given.pop("size")
    model = {"default": given.pop("model")} if "model" in given else {"required": True}
    reader.add_argument("--model", type=Path, help="diffusers folder, of solids also a packed one", **model)
    sides = ("FRAMES", "HEIGHT", "WIDTH")
    reader.add_argument("--size", type=int, nargs=3, default=(size.frames, size.height, size.width), metavar=sides)
    for name, value in given.items():
        reader.add_argument(f"--{name}", type=type(value), default=value)
    return reader


def main() -> None:
    from . import CHECKPOINT

    reader = video_options(
        __doc__, model=CHECKPOINT, count=50, size=ClipSize(17, 128, 192), steps=16, guidance=1.0, device="cpu"
    )
    reader.add_argument("--out", type=Path, help="JSON file for the result")
    asked = reader.parse_args()
    from diffusers import WanPipeline

    size, scenes = ClipSize(*asked.size), held_out_scenes(asked.count, asked.seed)
    pipeline = WanPipeline.from_pretrained(asked.model).to(asked.device)
    pipeline.set_progress_bar_config(disable=True)
    options = {name: getattr(asked, name) for name in ("steps", "seed", "guidance")}
    _, result = follow(pipeline, scenes, size, **options)
    result |= {"rule": check_the_rule(scenes, size)}
    sys.stdout.write("\n" + json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1) + "\n")
    if asked.out:
        write_atomically(asked.out, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
