"""python -m parklab.solids.following --model FOLDER [--count 100] [--out FILE.jsonl]

Does the video show what was asked?

Videos of held-out sentences are judged by a classifier that was trained on renders alone (`parklab.solids.judge`):
colour, shape, material and motion of the first object. The result also says how often the classifier is right on true
renders of the same sentences, and on renders with the sentences exchanged.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parkattn.checks import expect_count, first_line
from parklab.files import read_file
from parklab.record import append_records, environment
from parklab.sprites.data import ClipSize
from parklab.sprites.following import video_options
from parklab.sprites.training_state import say

from .grammar import KINDS, Scene, held_out_scenes
from .judge import WEIGHTS, Judge, Verdict, accuracy, load_judge, rates, verdicts
from .packing import INDEX
from .recipe import EVALUATION_SIZE, GUIDANCE, SAMPLING_STEPS
from .samples import load_pipeline, videos

if TYPE_CHECKING:
    from diffusers import WanPipeline

BARS = {"colour": 0.9, "shape": 0.9, "material": 0.8, "motion": 0.7}
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
    """How long a checkpoint was trained, by its training.json; a packed one keeps it in its index."""
    packed = (folder / INDEX).is_file()
    path = folder / (INDEX if packed else "training.json")
    data = read_file("model", path, "the record of a training", most=LARGEST_RECORD)
    try:
        record = json.loads(json.loads(data)["files"]["training.json"] if packed else data)
        stages = {
            name: {"steps": stage["step"], "seconds": round(stage["elapsed"]), "loss": stage["history"][-1][1]}
            for name, stage in record["stages"].items()
            if stage["history"]
        }
        return {"parameters": record["parameters"], "vae_psnr_db": record["vae_psnr_db"], "stages": stages}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        wanted = f"model: expected the record of a training in {path}"
        raise ValueError(f"{wanted}, got another file ({first_line(error)}); export the model again.") from None


def follow(
    pipeline: WanPipeline,
    folder: Path,
    judge: Judge,
    size: ClipSize,
    *,
    count: int = 100,
    steps: int = SAMPLING_STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Videos of held-out sentences, and the record of what the judge saw in them; folder: the pipeline's own."""
    scenes = held_out_scenes(count, seed)
    began = time.monotonic()
    clips = videos(pipeline, scenes, size, steps=steps, guidance=guidance, seed=seed)
    say(f"{count} videos in {time.monotonic() - began:.0f} s")
    result = {"benchmark": "solids following"} | score(scenes, verdicts(judge, torch.stack(clips))) | {
        "size": [size.frames, size.height, size.width], "tokens": size.tokens, "steps": steps,
        "guidance": guidance, "seed": seed, "bars": BARS,
        "judge_on_renders": accuracy(judge, scenes, size, pipeline.device), "training": trained(folder),
        "environment": environment(),
    }  # fmt: skip
    return clips, result


def print_and_keep(result: dict[str, Any], out: Path | None) -> None:
    sys.stdout.write(json.dumps({k: v for k, v in result.items() if k != "rows"}) + "\n")
    if out:
        append_records(out, [result])


def main() -> None:
    reader = video_options(__doc__, size=EVALUATION_SIZE, steps=SAMPLING_STEPS, guidance=GUIDANCE)
    reader.add_argument("--judge", type=Path, default=WEIGHTS)
    reader.add_argument("--out", type=Path, help="file of JSON lines to append the result to")
    asked = reader.parse_args()
    expect_count("count", asked.count)
    device = torch.device(asked.device)
    judge = load_judge(asked.judge, device)
    trained(asked.model)  # refused before the work
    pipeline = load_pipeline(asked.model, device)
    options = {name: getattr(asked, name) for name in ("count", "steps", "guidance", "seed")}
    _, result = follow(pipeline, asked.model, judge, ClipSize(*asked.size), **options)
    print_and_keep(result, asked.out)


if __name__ == "__main__":
    main()
