"""python -m parklab.solids.judge --out FILE.safetensors --seconds 60   Trains a classifier of rendered clips.

`--weights FILE` takes trained weights instead, and measures and keeps those. Matrices are kept in 8 bits.

It names colour, material, shape and motion of the first object, and what else a sentence says. It is trained on renders
alone, of all sentences, and has never seen a video of the model that it judges. Before it looks, a clip is shrunk to 9
frames of 64 x 96. In training clips are shifted, mirrored ("left" becomes "right"), blurred, recoloured a little and
made noisy, so that a video of a model is judged by the things in it rather than by its sharpness.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from parkattn.checks import first_line
from parklab.files import read_file, write_atomically
from parklab.record import environment
from parklab.sprites.data import ClipSize
from parklab.sprites.gradients import autocast
from parklab.sprites.training_state import Stage, say

from .grammar import CAMERAS, COLOURS, MATERIALS, MOTIONS, SHAPES, Scene, held_out_scenes
from .library import shrunk
from .motion import Clip, any_clip, clip_of, words_of
from .packing import OTHER_BITS, STEP, Kind, in_numbers, restored
from .renderer import render

LOOK = ClipSize(9, 64, 96)
# what is asked, in the order of motion.words_of
QUESTIONS = (
    ("colour", COLOURS), ("material", MATERIALS), ("shape", SHAPES), ("other_material", MATERIALS),
    ("other_colour", COLOURS), ("other_shape", SHAPES), ("paired", ("alone", "paired")), ("motion", MOTIONS),
    ("camera", CAMERAS),
)  # fmt: skip
OF_OTHER = tuple(index for index, (name, _) in enumerate(QUESTIONS) if name.startswith("other_"))
PAIRED = 6
MIRRORED = (1, 0, 3, 2, 4, 5, 6)  # the motions of a mirrored clip
LARGEST_FILE = 2**26  # bytes of weights
WEIGHTS = Path(__file__).parent / "judge.safetensors"


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: tuple[int, int, int]) -> None:
        super().__init__()
        self.first = nn.Conv3d(inside, outside, 3, stride, 1)
        self.second = nn.Conv3d(outside, outside, 3, 1, 1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outside) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norms[0](self.first(x)))
        return x + F.gelu(self.norms[1](self.second(x)))


class Judge(nn.Module):
    """Convolutions, then attention from one token a question to all places and times."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, width // 4, (1, 3, 3), (1, 2, 2), (0, 1, 1)), nn.GELU(),
            _Block(width // 4, width // 2, (1, 2, 2)), _Block(width // 2, width, (1, 2, 2)),
            _Block(width, width, (2, 1, 1)),
        )  # fmt: skip
        places = math.ceil(LOOK.frames / 2) * (LOOK.height // 8) * (LOOK.width // 8)
        self.places = nn.Parameter(0.02 * torch.randn(places, width))
        self.questions = nn.Parameter(0.02 * torch.randn(len(QUESTIONS), width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.mixing = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.answers = nn.ModuleList([nn.Linear(width, len(options)) for _, options in QUESTIONS])

    def forward(self, clips: Tensor) -> list[Tensor]:
        """clips [b, 3, 9, 64, 96] in [-1, 1] -> scores [b, options] for each question."""
        seen = self.stem(clips).flatten(2).mT + self.places
        asked = self.questions.expand(len(clips), -1, -1)
        mixed = self.mixing(torch.cat([asked, seen], 1))
        return [answer(mixed[:, index]) for index, answer in enumerate(self.answers)]


@dataclass(frozen=True)
class Verdict:
    """What the judge sees of the first object."""

    colour: str
    material: str
    shape: str
    motion: str


def looked_at(clips: Tensor) -> Tensor:
    """Clips [b, 3, frames, h, w] as the judge takes them."""
    chosen = torch.linspace(0, clips.shape[2] - 1, LOOK.frames).round().long()
    return shrunk(clips[:, :, chosen.to(clips.device)].float(), LOOK)


@torch.no_grad()
def verdicts(judge: Judge, clips: Tensor) -> list[Verdict]:
    """clips [b, 3, frames, h, w] in [0, 1], of any size."""
    if clips.ndim != 5 or clips.shape[1] != 3:
        raise ValueError(
            f"clips: expected [count, 3, frames, height, width], got {tuple(clips.shape)}; permute the frames first"
        )
    device = judge.places.device
    names = []
    for part in clips.split(16):
        scores = judge(looked_at(part.to(device)) * 2 - 1)
        found = dict(zip((name for name, _ in QUESTIONS), (score.argmax(1).tolist() for score in scores), strict=True))
        for row in range(len(part)):
            said = {name: options[found[name][row]] for name, options in QUESTIONS}
            names.append(Verdict(said["colour"], said["material"], said["shape"], said["motion"]))
    return names


def disturbed(clips: Tensor, labels: Tensor, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Training's view of clips [b, 3, 9, 64, 96] in [-1, 1] and of their answers [b, questions]."""
    uniform = lambda *shape: torch.rand(*shape, generator=drawn, device=clips.device)  # noqa: E731
    count = len(clips)
    flip = uniform(count) < 0.5
    clips = torch.where(flip.view(-1, 1, 1, 1, 1), clips.flip(-1), clips)
    motion = [name for name, _ in QUESTIONS].index("motion")
    swapped = torch.tensor(MIRRORED, device=clips.device)[labels[:, motion]]
    labels = labels.clone()
    labels[:, motion] = torch.where(flip, swapped, labels[:, motion])
    scale, shift = 1 + 0.16 * (uniform(count, 1, 1) - 0.5), 0.12 * (uniform(count, 2, 1) - 0.5)
    turn = torch.zeros(count, 2, 3, device=clips.device)
    turn[:, 0, 0] = turn[:, 1, 1] = scale[:, 0, 0]
    turn[:, :, 2] = shift[:, :, 0]
    frames = clips.flatten(1, 2)
    grid = F.affine_grid(turn, list(frames.shape), align_corners=False)
    frames = F.grid_sample(frames, grid, padding_mode="reflection", align_corners=False)
    soft = F.avg_pool2d(F.pad(frames, (1, 1, 1, 1), mode="replicate"), 3, 1)
    frames = torch.lerp(frames, soft, uniform(count, 1, 1, 1))
    clips = frames.view_as(clips)
    clips = clips * (1 + 0.2 * (uniform(count, 3, 1, 1, 1) - 0.5)) + 0.16 * (uniform(count, 3, 1, 1, 1) - 0.5)
    noise = torch.randn(clips.shape, generator=drawn, device=clips.device)
    return clips + 0.06 * uniform(count, 1, 1, 1, 1) * noise, labels


def _loss(scores: list[Tensor], labels: Tensor) -> Tensor:
    """Mean over the questions; those about a second object count where there is one."""
    paired = labels[:, PAIRED].bool()
    total = torch.zeros((), device=labels.device)
    for index, score in enumerate(scores):
        each = F.cross_entropy(score.float(), labels[:, index], reduction="none", label_smoothing=0.02)
        total = total + (each * paired if index in OF_OTHER else each).mean()
    return total / len(scores)


def rendered(clips: list[Clip], device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes [n, 3, 9, 64, 96] and answers [n, questions]."""
    parts = []
    for start in range(0, len(clips), 256):
        shown = render(clips[start : start + 256], LOOK, device)
        parts.append(((shown * 0.5 + 0.5) * 255).round().to(torch.uint8))
    return torch.cat(parts), torch.tensor([words_of(clip.scene) for clip in clips], device=device)


def accuracy(
    judge: Judge, scenes: list[Scene], size: ClipSize, device: torch.device, seed: int = 0
) -> dict[str, float]:
    """Share of right answers on fresh renders of sentences, and on the same renders with other sentences."""
    found: list[Verdict] = []
    for start in range(0, len(scenes), 16):
        some = [clip_of(scene, seed + 1, start + i) for i, scene in enumerate(scenes[start : start + 16])]
        found += verdicts(judge, render(some, size, device) * 0.5 + 0.5)
    return {**rates(scenes, found), **{f"shuffled_{k}": v for k, v in rates(scenes[1:] + scenes[:1], found).items()}}


def rates(scenes: list[Scene], found: list[Verdict]) -> dict[str, float]:
    pairs = list(zip(scenes, found, strict=True))
    right = {
        "colour": [saw.colour == scene.first.colour for scene, saw in pairs],
        "shape": [saw.shape == scene.first.shape for scene, saw in pairs],
        "material": [saw.material == scene.first.material for scene, saw in pairs],
        "motion": [saw.motion == scene.motion for scene, saw in pairs],
    }
    return {name: sum(hits) / len(hits) for name, hits in right.items()}


def train(
    seconds: float, count: int, device: torch.device, seed: int = 0, steps: int = 100_000, batch: int = 64
) -> Judge:
    """Ends at its steps or its seconds, rendering not counted; the rate falls to the nearer of the two."""
    began = time.monotonic()
    clips, labels = rendered([any_clip(seed, i, "judge") for i in range(count)], device)
    say(f"judge: {count} clips rendered in {time.monotonic() - began:.1f} s")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        judge = Judge().to(device)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=0.0, weight_decay=0.05, betas=(0.9, 0.98))
    drawn = torch.Generator(device).manual_seed(seed)
    stage = Stage("judge", steps, seconds, report_every=100)
    stage.begin()
    while stage.running:
        for group in optimizer.param_groups:
            group["lr"] = stage.rate(1.5e-3, warmup=200)
        chosen = torch.randint(count, (batch,), generator=drawn, device=device)
        shown, answers = disturbed(clips[chosen].float() / 127.5 - 1, labels[chosen], drawn)
        with autocast(device):
            scores = judge(shown)
        loss = _loss(scores, answers)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        stage.record(loss)
    return judge.eval()


def save_judge(judge: Judge, path: Path, record: dict) -> None:
    """Matrices in 8 bits, everything else in half precision."""
    halves = {name: value.detach().cpu().contiguous().half() for name, value in judge.state_dict().items()}
    plain, _ = in_numbers(halves, OTHER_BITS)
    write_atomically(path, save(plain, {"record": json.dumps(record)}))


def judge_record(path: Path = WEIGHTS) -> dict[str, Any]:
    """How a judge was trained, and how often it is right on renders."""
    with safe_open(path, "pt") as file:
        found: dict[str, Any] = json.loads((file.metadata() or {})["record"])
    return found


def load_judge(path: Path = WEIGHTS, device: torch.device | str = "cpu") -> Judge:
    if not path.is_file():
        raise FileNotFoundError(
            f"judge: expected weights at {path}, got no file; run python -m parklab.solids.judge --out {path}"
        )
    judge, data = Judge(), read_file("judge", path, "weights of the judge", most=LARGEST_FILE)
    try:
        weights = _restored(load(data), {name: list(value.shape) for name, value in judge.state_dict().items()})
        judge.load_state_dict(weights)
        if broken := [name for name, value in weights.items() if not value.isfinite().all()]:
            raise ValueError(f"NaN or Inf in {broken[0]}")
    except (SafetensorError, ValueError, RuntimeError) as error:
        wanted = f"judge: expected weights of the judge in {path}"
        raise ValueError(f"{wanted}, got {first_line(error)}; train it again.") from None
    return judge.to(device).eval()


def _restored(held: dict[str, Tensor], shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """A file that anybody may have written: numbers and steps must be those of a judge's matrix."""
    weights = {}
    for name, value in held.items():
        if name.removesuffix(STEP) in shapes and name.endswith(STEP):
            continue
        step = held.get(name + STEP)
        if step is None:
            weights[name] = value.float()
            continue
        kind = Kind(OTHER_BITS, shapes.get(name, []))
        if not kind.fits(value, step):
            raise ValueError(f"numbers of another shape in {name}")
        weights[name] = restored(value, step, kind)
    return weights


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--out", type=Path, default=WEIGHTS)
    reader.add_argument("--seconds", type=float, default=60.0)
    reader.add_argument("--steps", type=int, default=100_000)
    reader.add_argument("--clips", type=int, default=12_288)
    reader.add_argument("--check", type=int, default=300, help="held-out sentences it is measured on")
    reader.add_argument("--seed", type=int, default=0)
    reader.add_argument("--weights", type=Path, help="of a trained judge, to measure and keep")
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = reader.parse_args()
    device = torch.device(asked.device)
    if asked.weights:
        judge = load_judge(asked.weights, device)
    else:
        judge = train(asked.seconds, asked.clips, device, asked.seed, asked.steps)
    say(json.dumps(keep_measured(judge, asked.out, asked.clips, device, asked.seed, asked.check)))


def keep_measured(
    judge: Judge, path: Path, clips: int, device: torch.device, seed: int = 0, sentences: int = 300
) -> dict[str, Any]:
    """Saves a judge, and beside its weights how often it is right as it is saved."""
    save_judge(judge, path, {})
    kept = load_judge(path, device)
    found = accuracy(kept, held_out_scenes(sentences, seed), LOOK, device, seed)
    record = {
        "clips": clips, "seed": seed, "sentences": sentences, "held_out_renders": found, "environment": environment()
    }  # fmt: skip
    save_judge(judge, path, record)
    return record


if __name__ == "__main__":
    main()
