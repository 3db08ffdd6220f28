"""python -m parklab.sprites.evaluation FOLDER --sheet FILE.png

What a finished checkpoint can do; also writes its card.
Prompt following on held-out prompts, alone and with guidance, the rule on true renders, and on their reconstructions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parklab.files import write_atomically

from . import following
from .card import sample_sheet, write_card
from .data import ClipSize, render
from .following import check_the_rule, look, score
from .gradients import autocast
from .grammar import Scene, held_out_scenes
from .recipe import EVALUATION_SIZES, TrainConfig
from .training_state import say

GUIDANCES = (1.0, 2.0, 3.0, 4.0)
TOKENS_AT_ONCE = 150_000
STEPS = 16


def reconstructed(pipeline: Any, scenes: list[Scene], size: ClipSize, device: torch.device) -> dict[str, float]:
    """The rule on true renders that went through the autoencoder: the best any transformer could reach with it."""
    seen, errors = [], []
    for start in range(0, len(scenes), 10):
        clips = torch.cat(
            [render([s], size, 50_000 + start + i, device) for i, s in enumerate(scenes[start : start + 10])]
        )
        with torch.no_grad(), autocast(device):
            decoded = pipeline.vae.decode(pipeline.vae.encode(clips).latent_dist.mode()).sample.float()
        errors += (-10 * ((decoded - clips) / 2).square().flatten(1).mean(1).log10()).tolist()
        seen += [look(clip) for clip in decoded / 2 + 0.5]
    rates = score(scenes, seen)
    return {name: rates[name] for name in ("colour", "shape", "colour_and_shape", "motion")} | {
        "psnr_db": sum(errors) / len(errors)
    }


def evaluate(folder: Path, sheet: Path, config: TrainConfig, device: torch.device) -> None:
    """following.json in the checkpoint folder, written after each measurement, and the sample sheet.

    What the file already holds is kept, and after `config.evaluation_seconds` nothing new begins: run it again for the
    rest.
    """
    from diffusers import WanPipeline

    began, small = time.monotonic(), config.small
    pipeline = WanPipeline.from_pretrained(folder).to(device)
    pipeline.set_progress_bar_config(disable=True)
    sizes = (ClipSize(5, 48, 64),) if small else EVALUATION_SIZES
    steps = 2 if small else STEPS
    scenes, path = held_out_scenes(config.evaluate), folder / "following.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"results": [], "with_guidance": []}

    def follow(size: ClipSize, guidance: float) -> None:
        # rows only where the bar is judged: without guidance
        name = "results" if guidance == 1 else "with_guidance"
        if any((r["size"], r["guidance"]) == ([size.frames, size.height, size.width], guidance) for r in found[name]):
            return
        with autocast(device):
            batch = max(2, TOKENS_AT_ONCE // size.tokens)
            clips, result = following.follow(pipeline, scenes, size, steps=steps, guidance=guidance, batch=batch)
        rates = {k: v for k, v in result.items() if k != "rows"}
        found[name].append(result if guidance == 1 else rates)
        say(json.dumps(rates))
        if guidance == 1 and size == sizes[0]:
            sample_sheet(sheet, clips[::5][:10], [s.sentence for s in scenes[::5][:10]])

    def judge_the_rule() -> None:
        if "rule" not in found:
            found["rule"] = check_the_rule(scenes[:: 1 if small else 3], sizes[-1])

    def judge_the_autoencoder() -> None:
        if "reconstructions" not in found:
            found["reconstructions"] = reconstructed(pipeline, scenes, sizes[0], device)
            say(json.dumps(found["reconstructions"]))

    plain = [partial(follow, size, 1.0) for size in sizes]
    guided = [partial(follow, size, guidance) for size in sizes[::-1] for guidance in GUIDANCES[1:]]
    measures: list[Callable[[], None]] = [*plain, judge_the_rule, judge_the_autoencoder, *guided]
    for measure in measures:
        if time.monotonic() - began < config.evaluation_seconds:
            measure()
            write_atomically(path, json.dumps(found, indent=1).encode())


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("folder", type=Path, help="checkpoint folder")
    reader.add_argument(
        "--sheet", type=Path, required=True, help="PNG for the sample sheet, written with the first measurement"
    )
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    reader.add_argument("--seconds", type=float, default=1e9)
    asked = reader.parse_args()
    evaluate(asked.folder, asked.sheet, TrainConfig(evaluation_seconds=asked.seconds), torch.device(asked.device))
    write_card(asked.folder)


if __name__ == "__main__":
    main()
