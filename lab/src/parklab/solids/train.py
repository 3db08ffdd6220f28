"""python -m parklab.solids.train --out runs/solids --minutes 9 --graphs --compile   Trains the model on one GPU.

Three stages: the autoencoder; its decoder alone; text encoder and transformer, small clips first. Learning rate and
sizes follow the planned seconds of each stage, over as many calls as it takes: a call ends after about `--minutes`,
whatever stage it is in, and the same command goes on from there. `--finish` lets the rate fall to its end within this
call, planned or not. The state is one file, replaced atomically; each step's draws depend on the seed and the step
alone. `--start FOLDER` begins with the weights of a checkpoint folder, or of a packed one, instead.

At the end of a call, every `--show-every` seconds and on SIGTERM it writes, in OUT: checkpoint (a diffusers folder),
packed (the same in 6 and 8 bits, in files below 15 MiB), samples.png, loss.svg and times.json.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from parkattn.checks import first_line
from parklab.files import write_atomically
from parklab.sprites.card import loss_plot
from parklab.sprites.flow import Corpus
from parklab.sprites.model import SpriteModelConfig
from parklab.sprites.recipe import AUTOENCODER_SIZES, SMALL_MIXTURE
from parklab.sprites.reconstruction import Autoencoding
from parklab.sprites.train import STATE, Trainer
from parklab.sprites.training_state import begun, option_reader, save_state, say

from .library import Bank, Library, fresh_clips
from .packing import INDEX, pack, unpack
from .recipe import (
    BANKS,
    LONG,
    MIXTURE,
    RENDERED,
    RENDERING,
    SAMPLING_STEPS,
    SHRUNK,
    TOY_BANKS,
    TOY_LONG,
    TOY_RENDERED,
    SolidsTrainConfig,
    late_fall,
    model_of,
)
from .samples import load_pipeline, sample_sheet

SHOW_SECONDS, TOY_SHOW_SECONDS = 45.0, 5.0  # kept free at the end of a call, until writing everything was timed
RETURNS = 3  # to the last state after a loss that is not finite, each time at half the rate
START_SECONDS = 100.0  # a stage of less is not begun: compiling and the first clips of the library take about as long


class SolidsTrainer(Trainer):
    """The trainer of sprites with rendered solids.

    deadline: on the monotonic clock, None where steps and seconds decide; finish: the rate falls until then.
    """

    config: SolidsTrainConfig

    def __init__(
        self,
        out: Path,
        model: SpriteModelConfig,
        config: SolidsTrainConfig,
        device: torch.device,
        deadline: float | None = None,
        finish: bool = False,
    ) -> None:
        self.deadline, self.finish = deadline, finish
        self.bank = Bank(TOY_BANKS if config.small else BANKS, config.seed, device)
        self.writer = ThreadPoolExecutor(1, "state")
        self.writing: Future[None] | None = None
        super().__init__(out, model, config, device)
        stage = self.flow.stage
        stage.falling = late_fall
        self.library.allowed = lambda: RENDERING[0] * stage.seconds + RENDERING[1] * stage.elapsed
        for stage in self.stages:
            stage.paused = lambda: self._left() <= 0
        self.began = self.shown_at = time.monotonic()
        self.least_showing = TOY_SHOW_SECONDS if config.small else SHOW_SECONDS
        self.seconds = {"saving": 0.0, "showing": 0.0, "last_showing": self.least_showing}

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
        mixture = SMALL_MIXTURE if small else MIXTURE
        self.library = Library(
            self.config, self.device, shelves, mixture, self.autoencoding.latents, self._encoder_version,
            self.out / "library",
        )  # fmt: skip
        return self.library

    def _encoder_version(self) -> str:
        numbers = torch.cat([self.autoencoding.mean, self.autoencoding.std]).cpu()
        return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]

    # --- time
    def _left(self) -> float:
        """Seconds until this call must begin to write its results."""
        if self.deadline is None:
            return float("inf")
        return self.deadline - time.monotonic() - self.seconds["last_showing"]

    def stop(self, *_: object) -> None:
        """Ends the call at the next step, in order."""
        self.deadline = time.monotonic()

    def train(self) -> None:
        if self._left() > 0 and not (self.out / STATE).is_file():
            self.save(wait=False)
        for returns_left in reversed(range(RETURNS + 1)):
            try:
                self._train()
                return
            except FloatingPointError as error:
                if not returns_left:
                    raise
                self._go_back(error)

    def _train(self) -> None:
        self.autoencoding.train(self.save_when_due)
        self.bank.clear()
        stage = self.flow.stage
        begun = all(earlier.progress == 1 for earlier in self.autoencoding.stages)
        if begun and self._left() > (0 if self.config.small else START_SECONDS):
            self.save(wait=False)  # compiling comes next, where a run may break
            if self.finish and self.deadline is not None:
                stage.seconds = stage.elapsed + self._left()
            self.flow.train(self.save_when_due)
        self.library.close()
        self.save()

    def _go_back(self, error: FloatingPointError) -> None:
        """To the last state, at half the rate."""
        slower = replace(self.config, rate=self.config.rate / 2, autoencoder_rate=self.config.autoencoder_rate / 2)
        self.config = self.flow.config = self.autoencoding.config = slower
        say(f"{error}; from the last state at half the rate")
        for descent in self.descents:
            descent.forget_graphs()  # they read the statistics of latents where these were
            for optimizer in descent.optimizers:
                optimizer.state.clear()  # a state from before a stage has no moments for it
        self._wait_for_state()
        self.resume()

    # --- what a call leaves behind
    def save(self, wait: bool = True) -> None:
        began = time.monotonic()
        self._expect_finite()
        self._wait_for_state()
        super().save()
        if wait:
            self._wait_for_state()
        self.seconds["saving"] += time.monotonic() - began

    def _expect_finite(self) -> None:
        sizes = torch.stack(torch._foreach_norm([p.detach() for p in self.parameters.values()]))
        if not sizes.isfinite().all():
            raise FloatingPointError("weights are NaN or Inf")

    def _write(self, tensors: dict[str, Tensor], record: dict) -> None:
        """A copy, by another thread: 1.6 GB, while training goes on."""
        copied = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
        self.writing = self.writer.submit(save_state, self.out / STATE, copied, record)

    def _wait_for_state(self) -> None:
        """A disk that is full, say, ends no run."""
        try:
            if self.writing is not None:
                self.writing.result()
        except OSError as error:
            say(f"state: {first_line(error)}; a resumed run goes on from an earlier one")
        self.writing = None

    def save_when_due(self) -> None:
        """Results in the midst of a run, which goes on where they cannot be made."""
        if time.monotonic() - self.saved_at > self.config.save_every:
            self.save(wait=False)
        # not shortly before the end, where they are made in any case
        if time.monotonic() - self.shown_at > self.config.show_every and self._left() > self.config.show_every / 2:
            self._expect_finite()
            try:
                self.show()
            except Exception as error:  # of the disk or of a library
                say(f"results: {first_line(error)}; the run goes on without them")
                self.shown_at = time.monotonic()

    def show(self) -> Path:
        """Everything that a look at the run needs, in the order of its worth."""
        began = time.monotonic()
        loss_plot(self.out / "loss.svg", {s.name: s.whole()["history"] for s in self.stages if s.whole()["history"]})
        folder = self.export()
        pack(folder, self.out / "packed")
        if self.flow.stage.whole()["step"]:
            try:
                self._samples(folder)
            except Exception as error:  # a picture that fails, for want of memory say, ends no run
                say(f"samples.png: {first_line(error)}")
        self.shown_at = time.monotonic()
        took = self.shown_at - began
        self.seconds["showing"] += took
        self.seconds["last_showing"] = max(1.3 * took, self.least_showing / 2)
        self._times()
        return folder

    def _samples(self, folder: Path) -> None:
        small = self.config.small
        pipeline = load_pipeline(folder, self.device)
        size, steps = (TOY_RENDERED, 2) if small else (RENDERED, SAMPLING_STEPS)
        sample_sheet(pipeline, self.out / "samples.png", size, steps=steps, count=2 if small else 10)

    def _times(self) -> None:
        """Seconds of this call by purpose; rendering and encoding are within those of the stages."""
        record = {
            "seconds": round(time.monotonic() - self.began, 1),
            "stages": {s.name: {"steps": s.step, "seconds": round(s.elapsed, 1)} for s in self.stages},
            **{name: round(value, 1) for name, value in self.seconds.items()},
            "library": [
                {"shelf": s.name, "made": s.made, "rendered": s.rendered_clips, "seconds": round(s.seconds, 1)}
                for s in self.library.shelves
            ],
            "gigabytes": round(torch.cuda.max_memory_allocated() / 1e9, 1) if self.device.type == "cuda" else None,
        }
        write_atomically(self.out / "times.json", json.dumps(record).encode())
        say("times " + json.dumps(record))


def main() -> None:
    began = time.monotonic()
    reader = option_reader(__doc__, SolidsTrainConfig())
    time_given = reader.add_mutually_exclusive_group()
    time_given.add_argument("--minutes", type=float, help="of this call; without it stages run to their end")
    time_given.add_argument("--until", type=float, help="the same as a moment: seconds since 1970")
    reader.add_argument("--finish", action="store_true", help="the rate falls to its end within this call's minutes")
    reader.add_argument("--start", type=Path, help="checkpoint folder to take weights from, packed or not")
    asked = vars(reader.parse_args())
    out, device = begun(asked)
    start, finish, minutes, until = (asked.pop(name) for name in ("start", "finish", "minutes", "until"))
    config = SolidsTrainConfig(**asked)
    deadline = None if minutes is None else began + 60 * minutes
    if until is not None:
        deadline = time.monotonic() + until - time.time()
    trainer = SolidsTrainer(out, model_of(config), config, device, deadline, finish)
    signal.signal(signal.SIGTERM, trainer.stop)
    if not trainer.resume() and start:
        trainer.start_from(unpack(start, out / "start") if (start / INDEX).is_file() else start)
    trainer.train()
    folder = trainer.show()
    say(f"{folder}: {trainer.flow.stage.step} steps of the transformer, {time.monotonic() - began:.0f} s in this call")


if __name__ == "__main__":
    main()
