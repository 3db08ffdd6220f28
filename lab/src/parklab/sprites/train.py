"""python -m parklab.sprites.train --out runs/sprites --graphs --compile   Trains the model in the box on one GPU.

Three stages: the autoencoder; its decoder alone, on slightly noisy latents; text encoder and transformer, small clips
first.

Run the same command again to resume: the state (weights, moving average, optimizers, history) is one safetensors file
that is replaced atomically. `--start FOLDER` begins with the weights of a checkpoint folder instead, or with those of
its parts that are there (`vae` alone, say); add `--autoencoder-seconds 0 --decoder-seconds 0` to keep its autoencoder.
Clips are rendered and encoded while training; each step's random draws depend on the seed and the step alone. A stage
ends at its step count or its seconds, whichever comes first, and the learning rate follows whichever is nearer. Writes
OUT/checkpoint (the diffusers folder with its records), OUT/loss.svg, OUT/samples.png.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .card import loss_plot, write_card
from .corpus import SpriteCorpus
from .data import ClipSize, render
from .evaluation import evaluate
from .flow import Corpus, Flow
from .model import (
    SpriteModelConfig,
    build_autoencoder,
    build_pipeline,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
)
from .recipe import AUTOENCODER_SIZES, TrainConfig, draw_scenes, mixture, train_scenes
from .reconstruction import Autoencoding
from .training_state import begun, load_state, option_reader, prefixed, save_state, say, unprefixed

WEIGHTS = {
    "vae": "diffusion_pytorch_model.safetensors",
    "transformer": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
STATE = "state.safetensors"


class Trainer:
    """Both halves of the model, their common state and what comes out of them."""

    def __init__(self, out: Path, model: SpriteModelConfig, config: TrainConfig, device: torch.device) -> None:
        self.out, self.model, self.config, self.device = out, model, config, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.autoencoding = self._autoencoding()
            self.corpus = self._corpus()
            self.tokenizer = build_tokenizer(self.corpus.words)
            self.flow = Flow(model, config, device, self.tokenizer, self.corpus)
        self.stages = (*self.autoencoding.stages, self.flow.stage)
        self.descents = (*self.autoencoding.descents, self.flow.descent)
        self.parameters = {**self.autoencoding.parameters, **self.flow.parameters}
        self.notes: list[str] = []  # what the figures of earlier runs do not say
        self.saved_at = time.monotonic()

    def _autoencoding(self) -> Autoencoding:
        config, table = self.config, train_scenes()
        sizes = ((ClipSize(5, 48, 64), 1.0),) if config.small else AUTOENCODER_SIZES

        def clips(count: int, size: ClipSize, seed: int) -> Tensor:
            return render(draw_scenes(table, count, seed), size, seed, self.device)

        measured = tuple(size for size, _, _ in mixture(config))
        return Autoencoding(self.model, config, self.device, clips, sizes, measured)

    def _corpus(self) -> Corpus:
        def encode(scenes: Tensor, size: ClipSize, seed: int) -> Tensor:
            return self.autoencoding.latents(render(scenes, size, seed, self.device))

        return SpriteCorpus(self.model, self.config, self.device, train_scenes(), encode)

    def train(self) -> None:
        self.autoencoding.train(self.save_when_due)
        self.flow.train(self.save_when_due)
        self.save()

    # --- state
    def save(self) -> None:
        moving = {f"average.{name}": p for name, p in self.flow.average.items()}
        running = max((i for i, stage in enumerate(self.stages) if stage.step), default=None)
        # the moments of finished stages are not needed again
        moments = {} if running is None else prefixed(f"optimizer{running}", self.descents[running].tensors())
        latents = {"latents.mean": self.autoencoding.mean, "latents.std": self.autoencoding.std}
        record = {
            "model": self.model.to_dict(), "seed": self.config.seed, "vae_psnr": self.autoencoding.psnr,
            "stages": [stage.to_dict() for stage in self.stages], "notes": self.notes,
        }  # fmt: skip
        self._write({**self.parameters, **moving, **moments, **latents}, record)
        self.saved_at = time.monotonic()

    def _write(self, tensors: dict[str, Tensor], record: dict) -> None:
        save_state(self.out / STATE, tensors, record)

    def save_when_due(self) -> None:
        if time.monotonic() - self.saved_at > self.config.save_every:
            self.save()

    def resume(self) -> bool:
        """Whether there was a state to go on from."""
        path = self.out / STATE
        if not path.exists():
            return False
        tensors, record = load_state(path)
        self._expect("model", self.model.to_dict(), record["model"], path)
        self._expect("seed", self.config.seed, record["seed"], path)
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(tensors[name])
            for name, p in self.flow.average.items():
                p.copy_(tensors[f"average.{name}"])
        self.autoencoding.mean, self.autoencoding.std = (
            tensors[f"latents.{name}"].to(self.device) for name in ("mean", "std")
        )
        self.autoencoding.psnr, self.notes = record["vae_psnr"], record["notes"]
        for index, (stage, descent) in enumerate(zip(self.stages, self.descents, strict=True)):
            stage.restore(record["stages"][index])
            if moments := unprefixed(f"optimizer{index}", tensors):
                descent.restore(moments)
        say("resumed at " + ", ".join(f"{stage.name} step {stage.step}" for stage in self.stages))
        return True

    def start_from(self, folder: Path) -> None:
        """The weights of a checkpoint folder, or of those parts that it has; optimizers and clocks begin anew."""
        record = json.loads((folder / "training.json").read_text())
        self._expect("model", self.model.to_dict(), record["model"], folder)
        modules = {"vae": self.autoencoding.vae, "transformer": self.flow.transformer, "text_encoder": self.flow.text}
        for name, module in modules.items():
            if (folder / name / WEIGHTS[name]).is_file():
                # tied weights are stored once
                absent = module.load_state_dict(load_file(folder / name / WEIGHTS[name]), strict=False)
                if absent.unexpected_keys:
                    raise ValueError(
                        f"start: {folder / name} has weights this model lacks, such as {absent.unexpected_keys[0]}; "
                        "use its code"
                    )
                say(f"{name} from {folder}")
        with torch.no_grad():
            for name, p in self.flow.average.items():
                p.copy_(self.flow.parameters[name])
        numbers = json.loads((folder / "vae" / "config.json").read_text())
        self.autoencoding.mean, self.autoencoding.std = (
            torch.tensor(numbers[name], device=self.device) for name in ("latents_mean", "latents_std")
        )
        self.autoencoding.psnr, self.notes = record["vae_psnr_db"], record.get("notes", [])
        for stage in self.stages:
            stage.earlier = record["stages"][stage.name]

    def _expect(self, what: str, expected: object, got: object, where: Path) -> None:
        if expected != got:
            raise ValueError(
                f"{what}: {where} was trained with {got}, this run asks for {expected}; "
                "choose another --out or the same settings"
            )

    # --- results
    @torch.no_grad()
    def export(self) -> Path:
        """The diffusers folder with the averaged weights, put in place by one rename."""
        vae = build_autoencoder(self.model, self.autoencoding.mean.tolist(), self.autoencoding.std.tolist())
        vae.load_state_dict(self.autoencoding.vae.state_dict())
        transformer, text = build_transformer(self.model), build_text_encoder(self.model, self.corpus.words)
        for module, name in ((transformer, "transformer"), (text, "text")):
            averaged = {k[len(name) + 1 :]: v for k, v in self.flow.average.items() if k.startswith(name + ".")}
            module.load_state_dict(averaged, strict=False)
        parts = {
            "vae": vae.half(),
            "transformer": transformer.half(),
            "text_encoder": text.float(),
            "tokenizer": self.tokenizer,
        }
        final, partial = self.out / "checkpoint", self.out / "checkpoint.partial"
        shutil.rmtree(partial, ignore_errors=True)
        build_pipeline(self.model, **parts).save_pretrained(partial, safe_serialization=True)
        record = {
            "model": self.model.to_dict(), "training": asdict(self.config), "vae_psnr_db": self.autoencoding.psnr,
            "sizes": [[s.frames, s.height, s.width, early, late] for s, early, late in self.corpus.mixture],
            "parameters": {name: sum(p.numel() for p in parts[name].parameters()) for name in WEIGHTS},
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu", "torch": torch.__version__,
            "stages": {stage.name: stage.whole() for stage in self.stages}, "notes": self.notes,
        }  # fmt: skip
        (partial / "training.json").write_text(json.dumps(record))
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        return final


def main() -> None:
    reader = option_reader(__doc__, TrainConfig())
    reader.add_argument("--start", type=Path, help="checkpoint folder to take weights from")
    asked = vars(reader.parse_args())
    (out, device), start = begun(asked), asked.pop("start")
    config = TrainConfig(**asked)
    small = SpriteModelConfig(
        heads=1, head_dim=32, layers=1, ffn_dim=64, encoder_dim=8, decoder_dim=8, latent_channels=8
    )
    trainer = Trainer(out, small if config.small else SpriteModelConfig(), config, device)
    if not trainer.resume() and start:
        trainer.start_from(start)
    trainer.train()
    folder = trainer.export()
    loss_plot(out / "loss.svg", {stage.name: stage.whole()["history"] for stage in trainer.stages})
    evaluate(folder, out / "samples.png", config, device)
    write_card(folder)


if __name__ == "__main__":
    main()
