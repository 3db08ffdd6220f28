"""python -m parklab.solids.following --model FOLDER [--count 100] [--out FILE.jsonl]

Does the video show what was asked?

Videos of held-out sentences are judged by a classifier that was trained on renders alone (`parklab.solids.judge`):
colour, shape, material and motion of the first object. The result also says how often the classifier is right on true
renders of the same sentences, and on renders with the sentences exchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from parkattn.checks import expect_count, first_line, read_file
from parklab.record import append_records, environment
from parklab.sprites.data import ClipSize
from parklab.sprites.following import generate
from parklab.sprites.gradients import autocast

from .grammar import KINDS, Scene, held_out_scenes
from .judge import WEIGHTS, Verdict, accuracy, load_judge, rates, verdicts
from .packing import INDEX, unpack
from .recipe import EVALUATION_SIZE
from .sheet import write_sheet

BARS = {"colour": 0.9, "shape": 0.9, "material": 0.8, "motion": 0.7}
TOKENS_AT_ONCE = 60_000
LARGEST_RECORD = 2**26  # bytes


def score(scenes: list[Scene], found: list[Verdict]) -> dict:
    """Rates over all sentences and over each kind of held-out ones, with a row per sentence."""
    by_kind = {}
    for kind in KINDS:
        chosen = [i for i, scene in enumerate(scenes) if scene.held_out == kind]
        if chosen:
            by_kind[kind] = rates([scenes[i] for i in chosen], [found[i] for i in chosen])
    rows = [{"prompt": s.sentence, "held_out": s.held_out, **asdict(f)} for s, f in zip(scenes, found, strict=True)]
    return {"prompts": len(scenes), **rates(scenes, found), "by_kind": by_kind, "rows": rows}


def trained(folder: Path) -> dict:
    """How long a checkpoint was trained, by its training.json."""
    path = folder / "training.json"
    data = read_file("model", path, "the record of a training", most=LARGEST_RECORD)
    try:
        record = json.loads(data)
        stages = {
            name: {"steps": stage["step"], "seconds": round(stage["elapsed"]), "loss": stage["history"][-1][1]}
            for name, stage in record["stages"].items()
            if stage["history"]
        }
        return {"parameters": record["parameters"], "vae_psnr_db": record["vae_psnr_db"], "stages": stages}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        wanted = f"model: expected the record of a training in {path}"
        raise ValueError(f"{wanted}, got another file ({first_line(error)}); export the model again.") from None


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--model", type=Path, required=True, help="diffusers folder, or a packed one")
    reader.add_argument("--judge", type=Path, default=WEIGHTS)
    reader.add_argument("--count", type=int, default=100)
    size = EVALUATION_SIZE
    reader.add_argument("--size", type=int, nargs=3, default=(size.frames, size.height, size.width))
    reader.add_argument("--steps", type=int, default=20)
    reader.add_argument("--guidance", type=float, default=3.0)
    reader.add_argument("--seed", type=int, default=0)
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    reader.add_argument("--out", type=Path, help="file of JSON lines to append the result to")
    reader.add_argument("--sheet", type=Path, help="PNG file for the first videos")
    reader.add_argument("--shown", type=int, default=8, help="videos of the sheet")
    asked = reader.parse_args()
    from diffusers import WanPipeline

    expect_count("count", asked.count)
    device, size = torch.device(asked.device), ClipSize(*asked.size)
    scenes, judge = held_out_scenes(asked.count, asked.seed), load_judge(asked.judge, device)
    folder = unpack(asked.model, asked.model / "unpacked") if (asked.model / INDEX).is_file() else asked.model
    training = trained(folder)  # before the work
    pipeline = WanPipeline.from_pretrained(folder, use_safetensors=True, local_files_only=True).to(device)
    pipeline.set_progress_bar_config(disable=True)
    batch = max(1, TOKENS_AT_ONCE // size.tokens) if device.type == "cuda" else 1
    options = {"steps": asked.steps, "seed": asked.seed, "guidance": asked.guidance, "batch": batch}
    with autocast(device):
        clips = list(generate(pipeline, scenes, size, **options))
    result = {"benchmark": "solids following"} | score(scenes, verdicts(judge, torch.stack(clips))) | {
        "size": [size.frames, size.height, size.width], "tokens": size.tokens, "steps": asked.steps,
        "guidance": asked.guidance, "seed": asked.seed, "bars": BARS,
        "judge_on_renders": accuracy(judge, scenes, size, device), "training": training,
        "environment": environment(),
    }  # fmt: skip
    sys.stdout.write(json.dumps({k: v for k, v in result.items() if k != "rows"}) + "\n")
    if asked.out:
        append_records(asked.out, [result])
    if asked.sheet:
        write_sheet(asked.sheet, clips[: asked.shown], [scene.sentence for scene in scenes[: asked.shown]])


if __name__ == "__main__":
    main()
