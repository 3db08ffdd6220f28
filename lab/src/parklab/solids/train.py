"""python -m parklab.solids.train --out runs/solids --minutes 8 --graphs --compile   Trains the model on one GPU.

Three stages: the autoencoder; its decoder alone; text encoder and transformer, small clips first. The command ends
after about `--minutes`, whatever stage it is in. Run it again to go on: the state is one file, replaced atomically
every minute, and each step's draws depend on the seed and the step alone. The learning rate falls until the end of a
call. `--start FOLDER` begins with the weights of a checkpoint folder, or of a packed one, instead.

Writes OUT/checkpoint (a diffusers folder), OUT/packed (the same in 8 bits, in files below 15 MiB) and OUT/loss.svg.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from pathlib import Path

import torch

from parklab.sprites.card import loss_plot
from parklab.sprites.flow import Corpus
from parklab.sprites.model import SpriteModelConfig
from parklab.sprites.reconstruction import Autoencoding
from parklab.sprites.train import Trainer
from parklab.sprites.training_state import option_reader, say

from .library import Bank, Library, fresh_clips
from .packing import INDEX, pack, unpack
from .recipe import (
    AUTOENCODER_SIZES,
    BANKS,
    LONG,
    MIXTURE,
    MODEL,
    RENDERED,
    SHRUNK,
    TOY,
    TOY_BANKS,
    TOY_LONG,
    TOY_MIXTURE,
    TOY_RENDERED,
    SolidsTrainConfig,
)

EXPORT_SECONDS = 12.0  # to save the state and write the folder: kept free at the end of a call


class SolidsTrainer(Trainer):
    """The trainer of sprites with rendered solids. deadline: on the monotonic clock, None where steps decide."""

    config: SolidsTrainConfig

    def __init__(
        self,
        out: Path,
        model: SpriteModelConfig,
        config: SolidsTrainConfig,
        device: torch.device,
        deadline: float | None = None,
    ) -> None:
        self.deadline = deadline
        self.bank = Bank(TOY_BANKS if config.small else BANKS, config.seed, device)
        super().__init__(out, model, config, device)

    def _autoencoding(self) -> Autoencoding:
        small = self.config.small
        return Autoencoding(
            self.model, self.config, self.device, self.bank.cut,
            ((TOY_RENDERED, 1.0),) if small else AUTOENCODER_SIZES,
            (TOY_RENDERED,) if small else (*SHRUNK, LONG),
            partial(fresh_clips, device=self.device),
        )  # fmt: skip

    def _corpus(self) -> Corpus:
        small = self.config.small
        shelves = (
            ((TOY_RENDERED, (TOY_RENDERED,)), (TOY_LONG, (TOY_LONG,)))
            if small
            else ((RENDERED, SHRUNK), (LONG, (LONG,)))
        )
        mixture = TOY_MIXTURE if small else MIXTURE
        return Library(
            self.config, self.device, shelves, mixture, self.autoencoding.latents, self._encoder_version,
            self.out / "library",
        )  # fmt: skip

    def _encoder_version(self) -> str:
        numbers = torch.cat([self.autoencoding.mean, self.autoencoding.std]).cpu()
        return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]

    def train(self) -> None:
        if self.deadline is not None:
            for stage in self.autoencoding.stages:
                stage.seconds = min(stage.seconds, stage.elapsed + self._left())
        self.autoencoding.train(self.save_when_due)
        self.bank.clear()
        if self.deadline is not None:
            self.flow.stage.seconds = self.flow.stage.elapsed + self._left()
        self.flow.train(self.save_when_due)
        self.save()

    def _left(self) -> float:
        assert self.deadline is not None
        return max(0.0, self.deadline - EXPORT_SECONDS - time.monotonic())


def main() -> None:
    began = time.monotonic()
    reader = option_reader(__doc__, SolidsTrainConfig())
    reader.add_argument(
        "--minutes", type=float, help="of this call; without it the stages' own steps and seconds count"
    )
    reader.add_argument("--start", type=Path, help="checkpoint folder to take weights from, packed or not")
    asked = vars(reader.parse_args())
    out, start, device, minutes = (asked.pop(name) for name in ("out", "start", "device", "minutes"))
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    config = SolidsTrainConfig(**asked)
    deadline = None if minutes is None else began + 60 * minutes
    trainer = SolidsTrainer(out, TOY if config.small else MODEL, config, torch.device(device), deadline)
    if not trainer.resume() and start:
        trainer.start_from(unpack(start, out / "start") if (start / INDEX).is_file() else start)
    trainer.train()
    folder = trainer.export()
    pack(folder, out / "packed")
    loss_plot(out / "loss.svg", {stage.name: stage.whole()["history"] for stage in trainer.stages})
    say(f"{folder}: {trainer.flow.stage.step} steps of the transformer, {time.monotonic() - began:.0f} s in this call")


if __name__ == "__main__":
    main()
