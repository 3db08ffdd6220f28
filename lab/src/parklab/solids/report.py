"""python -m parklab.solids.report --model runs/solids/packed --out runs/report

Everything that docs/solids.md needs of a trained model, in one call. The judge is the one in the package; --judge names
another, which is trained for --judge-seconds where there is none. Then come 100 videos of held-out sentences and what
it saw in them (following.jsonl); sheets of them (held-out.png), of the contact sheet's sentences (samples.png), and of
the longest clips (long.png); the first videos to play (*.webp); clips that the device renders in a minute
(speed.jsonl), and seconds by purpose (times.json). Each part is written as soon as it is made.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from parkattn.files import write_atomically
from parklab.record import append_records
from parklab.sprites.data import ClipSize
from parklab.sprites.training_state import say

from . import following, speed
from .grammar import parse
from .judge import WEIGHTS, keep_measured, load_judge, train
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


class Clock:
    """Seconds of each part, written after each."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds, self.at = path, dict[str, float](), time.monotonic()

    def done(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part], self.at = round(now - self.at, 1), now
        write_atomically(self.path, json.dumps(self.seconds).encode())
        say(f"{part}: {self.seconds[part]} s")


def report(model: Path, judge_path: Path, out: Path, device: torch.device, asked: argparse.Namespace) -> None:
    out.mkdir(parents=True, exist_ok=True)
    clock = Clock(out / "times.json")
    if not judge_path.is_file():
        judge = train(asked.judge_seconds, asked.judge_clips, device)
        say(f"judge: {json.dumps(keep_measured(judge, judge_path, asked.judge_clips, device))}")
        clock.done("judge")
    pipeline, size = load_pipeline(model, device), ClipSize(*asked.size)
    clock.done("loading")
    sample_sheet(pipeline, out / "samples.png", size, steps=asked.steps)
    clock.done("samples")
    options = {"count": asked.count, "steps": asked.steps, "guidance": asked.guidance}
    clips, result = following.follow(pipeline, model, load_judge(judge_path, device), size, **options)
    following.print_and_keep(result, out / "following.jsonl")
    for name, bar in following.BARS.items():
        if (seen := result["judge_on_renders"][name]) < bar + JUDGE_ABOVE:
            say(f"{name}: the judge is right on {seen:.0%} of true renders, bar {bar:.0%}; train it for longer")
    shown = min(SHOWN, len(clips))
    sentences = [row["prompt"] for row in result["rows"]]
    write_sheet(out / "held-out.png", clips[:shown], sentences[:shown], frames=5)
    for index in range(min(4, len(clips))):
        write_video(out / f"held-out-{index}.webp", clips[index])
    clock.done("following")
    scenes = [parse(sentence) for sentence in SENTENCES[: asked.long]]
    if scenes:
        long = videos(pipeline, scenes, ClipSize(*asked.long_size), steps=asked.steps, guidance=asked.guidance)
        write_sheet(out / "long.png", long, [scene.sentence for scene in scenes], frames=5)
        for index, clip in enumerate(long[:4]):
            write_video(out / f"long-{index}.webp", clip)
        clock.done("long videos")
    if asked.speed_seconds:
        append_records(out / "speed.jsonl", [speed.measured(device, asked.speed_seconds)])
        clock.done("renderer's speed")


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--model", type=Path, required=True, help="diffusers folder, or a packed one")
    reader.add_argument("--judge", type=Path, default=WEIGHTS, help="weights, made where there are none")
    reader.add_argument("--out", type=Path, required=True)
    reader.add_argument("--judge-seconds", type=float, default=60.0)
    reader.add_argument("--judge-clips", type=int, default=12_288)
    reader.add_argument("--count", type=int, default=100)
    sizes = {"--size": EVALUATION_SIZE, "--long-size": LONG}
    for name, size in sizes.items():
        reader.add_argument(name, type=int, nargs=3, default=(size.frames, size.height, size.width))
    reader.add_argument("--long", type=int, default=8, help="of the longest videos")
    reader.add_argument("--steps", type=int, default=SAMPLING_STEPS)
    reader.add_argument("--guidance", type=float, default=GUIDANCE)
    reader.add_argument(
        "--speed-seconds", type=float, default=2.0, help="of each size the renderer is timed at; 0: not"
    )
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = reader.parse_args()
    following.trained(asked.model)  # refused before the work
    report(asked.model, asked.judge, asked.out, torch.device(asked.device), asked)


if __name__ == "__main__":
    main()
