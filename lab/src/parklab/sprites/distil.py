"""python -m parklab.sprites.distil --out runs/few

Distils a LoRA that makes the shipped model's videos in 4 to 8 steps.
The teacher is the shipped model with guidance, in many steps; its own samples are the data, from sentences of training.
The student is the model with a LoRA and without guidance. It is rolled out in few steps by the pipeline's own
scheduler, and at each step its velocity is regressed to the one that leads from where it is straight to the teacher's
sample of the same noise (reflow's coupling: Liu et al., 2209.03003; states of the student's own rollout: Ross et al.,
1011.0686).

Run the same command again to resume. Writes OUT/pytorch_lora_weights.safetensors (`pipe.load_lora_weights(OUT)`),
OUT/distillation.json, OUT/MODEL_CARD.md, OUT/loss.svg and OUT/samples.png.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from parklab.files import write_atomically

from . import CHECKPOINT
from .card import loss_plot, sample_sheet
from .corpus import RADIX
from .data import ClipSize
from .flow import TEXT_LENGTHS
from .following import look, score
from .gradients import Descent, autocast
from .grammar import Scene, every_scene, held_out_scenes
from .recipe import EVALUATION_SIZES, MIXTURE, SMALL_MIXTURE, draw_scenes, train_scenes
from .training_state import Stage, load_state, option_reader, prefixed, save_state, say, unprefixed

FILE = "pytorch_lora_weights.safetensors"
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
STUDENT_STEPS = (4, 4, 8)  # drawn anew for each rollout
# size, share of the teacher's tokens, share of the rollouts; the longest are those of a video of 480p and of 720p
SIZES = (
    *((size, share, share) for (size, _, _), share in zip(MIXTURE, (0.15, 0.15, 0.30, 0.26), strict=True)),
    (ClipSize(49, 240, 352), 0.10, 0.13),
    (ClipSize(81, 400, 576), 0.04, 0.01),
)
SMALL_SIZES = tuple((size, 0.5, 0.5) for size, _, _ in SMALL_MIXTURE)
TOKENS_AT_ONCE = 98_304  # of the teacher's batch
TEXT = TEXT_LENGTHS[0]


@dataclass(frozen=True, kw_only=True)
class DistilConfig:
    seed: int = 0
    rank: int = 32
    guidance: float = 5.0  # of the teacher; the student has none
    teacher_steps: int = 20
    pool_tokens: int = 4_000_000  # of the teacher's samples
    pool_seconds: float = 60.0  # no further batch begins after these, beyond one of each size
    steps: int = 100_000
    seconds: float = 100.0
    tokens_per_batch: int = 32_768
    rate: float = 1e-3
    warmup: int = 50
    save_every: float = 60.0
    evaluate: int = 48
    reference_steps: int = 50  # of the sample that students are compared with
    small: bool = False  # tiny clips: for checking the script on a CPU


@dataclass
class Pool:
    """The teacher's samples of one size: noise, where it ends, and the rows of the sentences in `every_scene`."""

    noise: Tensor
    ends: Tensor
    rows: Tensor


class Distillation:
    """A teacher, a student that differs by its LoRA, their samples and the state of the run."""

    def __init__(self, out: Path, config: DistilConfig, device: torch.device, model: Path = CHECKPOINT) -> None:
        from diffusers import WanPipeline

        self.out, self.config, self.device = out, config, device
        self.pipe = WanPipeline.from_pretrained(model).to(device)
        self.transformer = self.pipe.transformer.float().requires_grad_(False)
        self.sizes = SMALL_SIZES if config.small else SIZES
        drawn = torch.Generator().manual_seed(config.seed)
        self.base: dict[str, Tensor] = {}
        self.factors: dict[str, nn.Parameter] = {}
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.Linear) and name.startswith("blocks.") and name.endswith(LAYERS):
                self.base[name] = module.weight
                first = torch.randn(config.rank, module.in_features, generator=drawn) / math.sqrt(module.in_features)
                self.factors[f"{name}.lora_A"] = nn.Parameter(first.to(device))
                second = torch.zeros(module.out_features, config.rank, device=device)
                self.factors[f"{name}.lora_B"] = nn.Parameter(second)
        self.descent = Descent(self.factors, set())
        self.stage = Stage("student", config.steps, config.seconds, 2 if config.small else 20)
        self.pools: dict[ClipSize, Pool] = {}
        self.teacher_seconds, self.saved_at = 0.0, time.monotonic()
        self.sentences = [scene.sentence for scene in every_scene()]

    # --- teacher, student, rollout
    def states(self, sentences: list[str], length: int = TEXT) -> Tensor:
        """Prompt embeddings as the pipeline makes them."""
        with torch.no_grad():
            return self.pipe.encode_prompt(
                sentences, do_classifier_free_guidance=False, max_sequence_length=length, device=self.device
            )[0].float()

    def student_weights(self) -> dict[str, Tensor]:
        factors = self.factors
        return {
            f"{name}.weight": weight + factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"]
            for name, weight in self.base.items()
        }

    def velocity(self, x: Tensor, t: Tensor, states: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        inputs = {"hidden_states": x, "timestep": t.expand(len(x)), "encoder_hidden_states": states}
        with autocast(self.device):
            out = torch.func.functional_call(self.transformer, weights or {}, kwargs={**inputs, "return_dict": False})
        return out[0].float()

    def rollout(self, noise: Tensor, steps: int, velocity: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The pipeline's scheduler from noise to a sample; velocity of (state, timestep, noise level)."""
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(steps, device=self.device)
        x = noise
        for t, level in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
            x = scheduler.step(velocity(x, t, level), t, x, return_dict=False)[0]
        return x

    @torch.no_grad()
    def sample(self, noise: Tensor, states: Tensor, steps: int, guidance: float = 1.0, student: bool = False) -> Tensor:
        weights = self.student_weights() if student else None
        empty = self.states([""]).expand(len(noise), -1, -1)

        def velocity(x: Tensor, t: Tensor, _: Tensor) -> Tensor:
            towards = self.velocity(x, t, states, weights)
            if guidance == 1:
                return towards
            away = self.velocity(x, t, empty, weights)
            return away + guidance * (towards - away)

        return self.rollout(noise, steps, velocity)

    def noise(self, count: int, size: ClipSize, seed: int) -> Tensor:
        drawn = torch.Generator(self.device).manual_seed(seed)
        channels = self.transformer.config.in_channels
        return torch.randn(count, channels, *size.grid, generator=drawn, device=self.device)

    # --- the teacher's samples
    def fill_pools(self) -> None:
        """Batches of each size in turn, up to the tokens or the seconds that the teacher has."""
        config, table, began = self.config, train_scenes(), time.monotonic()
        plan: list[tuple[float, int, ClipSize, int, int]] = []
        for index, (size, share, _) in enumerate(self.sizes):
            wanted = max(2, round(share * config.pool_tokens / size.tokens))
            at_once = max(1, min(wanted, TOKENS_AT_ONCE // size.tokens))
            batches = math.ceil(wanted / at_once)
            plan += [((b + 0.5) / batches if b else 0.0, index, size, b, at_once) for b in range(batches)]
        made: dict[ClipSize, list[tuple[Tensor, Tensor, Tensor]]] = {size: [] for size, _, _ in self.sizes}
        for due, index, size, batch, at_once in sorted(plan, key=lambda item: item[:2]):
            if due and time.monotonic() - began > config.pool_seconds:
                break
            seed = config.seed * 10**7 + 10**5 * index + batch
            rows = (draw_scenes(table, at_once, seed) * RADIX).sum(1)
            noise, states = self.noise(at_once, size, seed), self.states([self.sentences[row] for row in rows])
            made[size].append((noise, self.sample(noise, states, config.teacher_steps, config.guidance), rows))
        for size, parts in made.items():
            self.pools[size] = Pool(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.teacher_seconds = time.monotonic() - began
        counts = ", ".join(f"{len(pool.rows)} of {size.tokens:,} tokens" for size, pool in self.pools.items())
        say(f"teacher: {counts} in {self.teacher_seconds:.0f} s")
        tensors = {f"{i}/{k}": v for i, pool in enumerate(self.pools.values()) for k, v in vars(pool).items()}
        save_state(self.out / "pool.safetensors", tensors, {"seconds": self.teacher_seconds, "config": self._kind()})

    def _load_pools(self) -> bool:
        path = self.out / "pool.safetensors"
        if not path.exists():
            return False
        tensors, record = load_state(path)
        if record["config"] != self._kind():
            got = f"got {record['config']}; choose another --out or the same settings"
            raise ValueError(f"config: expected that of {path}, {self._kind()}, {got}.")
        for index, (size, _, _) in enumerate(self.sizes):
            noise, ends, rows = (tensors[f"{index}/{part}"] for part in ("noise", "ends", "rows"))
            self.pools[size] = Pool(noise.to(self.device), ends.to(self.device), rows)
        self.teacher_seconds = record["seconds"]
        return True

    def _kind(self) -> dict[str, Any]:
        """What a resumed run must share with the one it goes on with."""
        names = ("seed", "rank", "guidance", "teacher_steps", "pool_tokens", "small")
        return {name: getattr(self.config, name) for name in names}

    # --- training
    def train(self) -> None:
        if not self._load_pools():
            self.fill_pools()
        path = self.out / "state.safetensors"
        if path.exists():
            tensors, record = load_state(path)
            with torch.no_grad():
                for name, p in self.factors.items():
                    p.copy_(tensors[name])
            self.descent.restore(unprefixed("optimizer", tensors))
            self.stage.restore(record["stage"])
            say(f"resumed at step {self.stage.step}")
        self.stage.begin()
        while self.stage.progress < 1:
            self._student_rollout(random.Random(self.config.seed * 10**7 + self.stage.step))
            if time.monotonic() - self.saved_at > self.config.save_every:
                self.save()
        self.stage.end()
        self.save()

    def save(self) -> None:
        """Between two rollouts."""
        tensors = {**self.factors, **prefixed("optimizer", self.descent.tensors())}
        save_state(self.out / "state.safetensors", tensors, {"stage": self.stage.to_dict()})
        self.saved_at = time.monotonic()

    def _student_rollout(self, drawn: random.Random) -> None:
        """One descent at each of its steps; no gradient goes from a step to the one before."""
        size = drawn.choices([size for size, _, _ in self.sizes], [share for _, _, share in self.sizes])[0]
        pool, steps = self.pools[size], drawn.choice(STUDENT_STEPS)
        count = min(len(pool.rows), max(1, self.config.tokens_per_batch // size.tokens))
        chosen = drawn.sample(range(len(pool.rows)), count)
        # long texts with small clips alone: attention to padding costs time
        length = drawn.choice(TEXT_LENGTHS) if size in (self.sizes[0][0], self.sizes[1][0]) else TEXT
        states = self.states([self.sentences[row] for row in pool.rows[chosen]], length)
        ends = pool.ends[chosen]

        def descended(x: Tensor, t: Tensor, level: Tensor) -> Tensor:
            wanted = (x - ends) / level

            def compute(x: Tensor) -> tuple[Tensor, Tensor]:
                found = self.velocity(x, t, states, self.student_weights())
                # times the noise level: an error of the sample counts by one over it, not over its square
                return level * (found - wanted).square().mean(), found.detach()

            found = self.descent.gradients(compute, (x,), None)
            self.descent.step(self.stage.rate(self.config.rate, self.config.warmup))
            self.stage.record(level * (found - wanted).square().mean())
            return found

        self.rollout(pool.noise[chosen], steps, descended)

    # --- results
    def export(self) -> Path:
        """Diffusers' names, bfloat16, scale 1; the student goes on with the same rounding."""
        tensors = {}
        with torch.no_grad():
            for name, p in self.factors.items():
                p.copy_(p.bfloat16())
                tensors[f"transformer.{name}.weight"] = p.detach().bfloat16().cpu().contiguous()
        write_atomically(self.out / FILE, save(tensors, {"format": "pt"}))
        return self.out / FILE

    def evaluate(self) -> list[dict[str, Any]]:
        """Held-out prompts: following, and the error against the teacher's sample of the same noise in many steps."""
        config, rows = self.config, []
        scenes = held_out_scenes(config.evaluate)  # an even count, half of each kind
        runs = {
            "teacher": (config.reference_steps, config.guidance, False),
            "base": (4, 1.0, False),
            "LoRA": (4, 1.0, True),
            "base, guided": (4, config.guidance, False),
            "base in 8": (8, 1.0, False),
            "LoRA in 8": (8, 1.0, True),
        }
        for place, size in enumerate((self.sizes[0][0],) if config.small else EVALUATION_SIZES[::-1]):
            reference: list[Tensor] = []
            # the larger size with the first three alone
            for name, (steps, guidance, student) in [*runs.items()][: 3 if place else None]:
                latents = self._latents(scenes, size, steps, guidance, student)
                clips = [clip for part in latents for clip in self._decoded(part)]
                reference = reference or latents
                error = torch.cat(
                    [(a - b).square().flatten(1).mean(1) for a, b in zip(latents, reference, strict=True)]
                )
                found = score(scenes, [look(clip) for clip in clips])
                rows.append(
                    {"name": name, "steps": steps, "guidance": guidance, "lora": student, "mse": error.mean().item(),
                     "size": [size.frames, size.height, size.width], "tokens": size.tokens}
                    | {k: v for k, v in found.items() if k != "rows"}
                )  # fmt: skip
                say(json.dumps(rows[-1]))
                if name == "LoRA":
                    some = slice(None, None, max(1, len(clips) // 8))
                    sample_sheet(self.out / "samples.png", clips[some], [s.sentence for s in scenes[some]], width=160)
        return rows

    def _latents(self, scenes: list[Scene], size: ClipSize, steps: int, guidance: float, student: bool) -> list[Tensor]:
        at_once = max(1, TOKENS_AT_ONCE // size.tokens)
        parts = []
        for start in range(0, len(scenes), at_once):
            part = scenes[start : start + at_once]
            noise = self.noise(len(part), size, 10**6 + start)
            parts.append(self.sample(noise, self.states([s.sentence for s in part]), steps, guidance, student))
        return parts

    @torch.no_grad()
    def _decoded(self, latents: Tensor) -> list[Tensor]:
        """Clips in [0, 1] on the CPU."""
        vae = self.pipe.vae
        mean, std = (
            torch.tensor(numbers, device=self.device).view(1, -1, 1, 1, 1)
            for numbers in (vae.config.latents_mean, vae.config.latents_std)
        )
        with autocast(self.device):
            clips = vae.decode((latents * std + mean).to(vae.dtype)).sample
        return list((clips.float() / 2 + 0.5).clamp(0, 1).cpu())

    def write_results(self) -> None:
        file = self.export()
        loss_plot(self.out / "loss.svg", {"student": self.stage.history})
        record = {
            "config": asdict(self.config), "stage": self.stage.to_dict(), "teacher_seconds": self.teacher_seconds,
            "samples": [[size.frames, size.height, size.width, len(p.rows)] for size, p in self.pools.items()],
            "parameters": sum(p.numel() for p in self.factors.values()), "bytes": file.stat().st_size,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu", "torch": torch.__version__,
            "results": self.evaluate(),
        }  # fmt: skip
        write_atomically(self.out / "distillation.json", json.dumps(record, indent=1).encode())
        write_atomically(self.out / "MODEL_CARD.md", card_text(record).encode())


def card_text(record: dict[str, Any]) -> str:
    """Every figure comes from the record."""
    config, stage = record["config"], record["stage"]
    samples = ", ".join(f"{count:,} of {f} x {h} x {w}" for f, h, w, count in record["samples"])
    rows = "\n".join(
        f"| {r['tokens']:,} | {'shipped model with the LoRA' if r['lora'] else 'shipped model'} | {r['steps']} | "
        f"{r['guidance']:g} | {r['prompts']} | {100 * r['colour_and_shape']:.0f} % | {100 * r['motion']:.0f} % | "
        f"{'-' if r['name'] == 'teacher' else format(r['mse'], '.4f')} |"
        for r in record["results"]
    )
    return f"""# Sprites in few steps: a LoRA of the small video model in the box

<!-- written by `python -m parklab.sprites.distil`; do not edit -->

With it the shipped model makes a video in 4 to 8 steps without guidance, so that sparse attention can be measured on a
model made for few steps. Scheduler and its settings stay those of the pipeline.

    from diffusers import WanPipeline
    from parklab.sprites import CHECKPOINT, FEW_STEPS
    pipe = WanPipeline.from_pretrained(CHECKPOINT)
    pipe.load_lora_weights(FEW_STEPS)
    frames = pipe("a red circle moves right over blue waves", height=160, width=256, num_frames=33,
                  num_inference_steps=4, guidance_scale=1.0, max_sequence_length=32).frames[0]

## How it was made

Rank {config["rank"]} on the linears of attention and FFN ({record["parameters"] / 1e6:.2f} M parameters, {record["bytes"] / 2**20:.1f} MiB in bfloat16).
The teacher is the shipped model with guidance {config["guidance"]:g} in {config["teacher_steps"]} steps; it made {samples}
(frames x height x width) from sentences of training in {record["teacher_seconds"]:.0f} s. The student was rolled out in 4 or 8 steps by the
pipeline's scheduler; at each step its velocity was regressed to the one that leads straight to the teacher's sample of the same
noise: {stage["step"]:,} descents in {stage["elapsed"]:.0f} s on one {record["device"]} (torch {record["torch"]}), seed {config["seed"]}.
The coupling is reflow's (Liu et al., 2209.03003), training on the student's own states is DAgger's (Ross et al., 1011.0686).

## What it does

Held-out prompts, judged by the rule in `parklab.sprites.following`; the error is the mean square of the latents (whose variance
is about 1) against the teacher's sample of the same noise in {config["reference_steps"]} steps.

| tokens | model | steps | guidance | prompts | colour and shape | motion | error |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}
"""


def main() -> None:
    reader = option_reader(__doc__, DistilConfig())
    reader.add_argument("--model", type=Path, default=CHECKPOINT, help="diffusers folder of the teacher")
    asked = vars(reader.parse_args())
    out, model, device = asked.pop("out"), asked.pop("model"), torch.device(asked.pop("device"))
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    run = Distillation(out, DistilConfig(**asked), device, model)
    run.train()
    run.write_results()


if __name__ == "__main__":
    main()
