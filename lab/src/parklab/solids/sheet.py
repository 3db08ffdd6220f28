"""python -m parklab.solids.sheet FILE.png   A contact sheet of renders with their sentences."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from parklab.sprites.card import sample_sheet
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


def write_sheet(path: Path, clips: list[Tensor], labels: list[str], frames: int = 3) -> None:
    sample_sheet(path, clips, labels, frames, width=192, across=2)


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
