"""python -m parklab.solids.report --model runs/solids/packed --out runs/report

Everything that docs/solids.md needs of a trained model, in one call: 100 videos of held-out sentences and what
it saw in them (following.jsonl); sheets of them (held-out.png), of the contact sheet's sentences (samples.png), and of
the longest clips (long.png); the first videos to play (*.webp); clips that the device renders in a minute
(speed.jsonl), and seconds by purpose (times.json). Each part is written as soon as it is made.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from parkattn.checks import first_line
from parklab.files import write_atomically
from parklab.record import append_records
from parklab.sprites.data import ClipSize
from parklab.sprites.following import video_options
from parklab.sprites.training_state import say

from . import following, speed
from .grammar import parse
from .judge import WEIGHTS, load_judge
from .recipe import EVALUATION_SIZE, GUIDANCE, LONG, SAMPLING_STEPS
from .samples import load_pipeline, sample_sheet, videos
from .sheet import SENTENCES, write_sheet

FRAMES_A_SECOND = 12
SHOWN = 20  # held-out videos on the sheet
JUDGE_ABOVE = 0.05  # a judge that is nearer to a bar on true renders cannot tell whether it is met


def write_video(path: Path, clip: Tensor, frames_a_second: int = FRAMES_A_SECOND) -> None:
    """An animated WebP, which browsers play and no codec is needed for; clip [3, frames, h, w] in [0, 1]."""
    from PIL import Image

    frames = (clip.clamp(0, 1) * 255).round().byte().permute(1, 2, 3, 0).numpy()
    images = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(
        buffer, "WEBP", save_all=True, append_images=images[1:], duration=1000 // frames_a_second, loop=0, quality=88
    )
    write_atomically(path, buffer.getvalue())


class Report:
    """Its parts in the order of their worth; one that fails is named and leaves the others alone."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.out, self.device = asked, asked.out, torch.device(asked.device)
        self.size, self.long_size = ClipSize(*asked.size), ClipSize(*asked.long_size)
        self.seconds: dict[str, float] = {}

    def write(self) -> list[str]:
        """The parts that failed."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.pipeline = load_pipeline(self.asked.model, self.device)
        failed = []
        for part in (self.samples, self.following, self.long, self.speed):
            name, began = part.__name__, time.monotonic()
            try:
                part()
            except Exception as error:  # of the disk, the device or a library
                failed.append(name)
                say(f"{name}: {first_line(error)}")
            self.seconds[name] = round(time.monotonic() - began, 1)
            write_atomically(self.out / "times.json", json.dumps(self.seconds).encode())
            say(f"{name}: {self.seconds[name]} s")
        return failed

    def samples(self) -> None:
        sample_sheet(self.pipeline, self.out / "samples.png", self.size, steps=self.asked.steps)

    def following(self) -> None:
        options = {name: getattr(self.asked, name) for name in ("count", "steps", "guidance", "seed")}
        judge = load_judge(self.asked.judge, self.device)
        clips, result = following.follow(self.pipeline, self.asked.model, judge, self.size, **options)
        following.print_and_keep(result, self.out / "following.jsonl")
        for name, bar in following.BARS.items():
            if (seen := result["judge_on_renders"][name]) < bar + JUDGE_ABOVE:
                say(f"{name}: the judge is right on {seen:.0%} of true renders, bar {bar:.0%}; train it for longer")
        self._shown("held-out", clips[:SHOWN], [row["prompt"] for row in result["rows"][:SHOWN]])

    def long(self) -> None:
        scenes = [parse(sentence) for sentence in SENTENCES[: self.asked.long]]
        if scenes:
            options = {name: getattr(self.asked, name) for name in ("steps", "guidance")}
            clips = videos(self.pipeline, scenes, self.long_size, **options)
            self._shown("long", clips, [scene.sentence for scene in scenes])

    def speed(self) -> None:
        if self.asked.speed_seconds:
            append_records(self.out / "speed.jsonl", [speed.measured(self.device, self.asked.speed_seconds)])

    def _shown(self, name: str, clips: list[Tensor], sentences: list[str]) -> None:
        write_sheet(self.out / f"{name}.png", clips, sentences, frames=5)
        for index, clip in enumerate(clips[:4]):
            write_video(self.out / f"{name}-{index}.webp", clip)


def main() -> None:
    reader = video_options(__doc__, size=EVALUATION_SIZE, steps=SAMPLING_STEPS, guidance=GUIDANCE)
    reader.add_argument("--judge", type=Path, default=WEIGHTS)
    reader.add_argument("--out", type=Path, required=True)
    reader.add_argument("--long-size", type=int, nargs=3, default=(LONG.frames, LONG.height, LONG.width))
    reader.add_argument("--long", type=int, default=8, help="of the longest videos")
    reader.add_argument(
        "--speed-seconds", type=float, default=2.0, help="of each size the renderer is timed at; 0: not"
    )
    asked = reader.parse_args()
    following.trained(asked.model)  # refused before the work
    if failed := Report(asked).write():
        sys.exit(f"report: expected all of it in {asked.out}, got none of {', '.join(failed)}; the reasons are above")


if __name__ == "__main__":
    main()
