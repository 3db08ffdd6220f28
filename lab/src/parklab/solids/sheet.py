"""python -m parklab.solids.sheet FILE.png   A contact sheet of renders with their sentences, or of given clips."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import torch
from torch import Tensor

from parklab.files import write_atomically
from parklab.sprites.data import ClipSize

from .grammar import parse
from .motion import clip_of
from .renderer import render

SENTENCES = (
    "a red metal sphere rolls left past a blue matte cube, the camera orbits",
    "a yellow wooden cube rolls right, the camera stays",
    "a purple matte torus slides right, the camera orbits",
    "a cyan checkered cone bounces, the camera stays",
    "an orange metal torus rolls left past a green wooden sphere, the camera pans",
    "a pink checkered sphere collides with a cyan metal cube, the camera stays",
    "a green metal capsule orbits around a red checkered cone, the camera stays",
    "a blue wooden cone slides left past a yellow matte sphere, the camera pans",
    "a red wooden torus bounces beside a purple metal capsule, the camera orbits",
    "an orange matte capsule rolls right, the camera pans",
)
SIZE = ClipSize(5, 128, 192)


def write_sheet(path: Path, clips: list[Tensor], labels: list[str], frames: int = 3, width: int = 192) -> None:
    """A PNG, two clips ([3, frames, h, w] in [0, 1]) a row: some frames and below them the sentence."""
    from PIL import Image, ImageDraw

    height, label = round(width * clips[0].shape[2] / clips[0].shape[3]), 17
    across = frames * (width + 2) + 8
    sheet = Image.new("RGB", (2 * across - 8, (len(clips) + 1) // 2 * (height + label)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (clip, sentence) in enumerate(zip(clips, labels, strict=True)):
        left, top = index % 2 * across, index // 2 * (height + label)
        for column in range(frames):
            frame = clip[:, round(column * (clip.shape[1] - 1) / max(frames - 1, 1))]
            image = Image.fromarray((frame.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())
            sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (left + column * (width + 2), top))
        pen.text((left + 2, top + height + 2), sentence, fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    write_atomically(path, buffer.getvalue())


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("path", type=Path, help="PNG to write")
    reader.add_argument("--seed", type=int, default=4)
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = reader.parse_args()
    clips = [clip_of(parse(sentence), asked.seed, index) for index, sentence in enumerate(SENTENCES)]
    shown = [render([clip], SIZE, asked.device, samples=3)[0] / 2 + 0.5 for clip in clips]
    write_sheet(asked.path, shown, list(SENTENCES))


if __name__ == "__main__":
    main()
