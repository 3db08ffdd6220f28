"""The state of a training run: stages with their clocks, one atomically replaced safetensors file."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from parklab.files import write_atomically

SAY_SECONDS = 30.0  # a slow stage says so often where it is


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def option_reader(description: str | None, defaults: Any) -> argparse.ArgumentParser:
    """--out, --device, and an option for each field of a training's config."""
    reader = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--out", type=Path, required=True)
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in asdict(defaults).items():
        kind = {"action": "store_true"} if isinstance(value, bool) else {"type": type(value), "default": value}
        reader.add_argument("--" + name.replace("_", "-"), **kind)
    return reader


def begun(asked: dict[str, Any]) -> tuple[Path, torch.device]:
    """--out and --device, taken from what was asked: the folder is made, and kernels are the device's fastest."""
    asked["out"].mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    return asked.pop("out"), torch.device(asked.pop("device"))


def cosine(progress: float) -> float:
    """Learning rate as a share of its peak: falls all the time."""
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


class Stage:
    """Steps, clock, learning rate and history of one stage; knows nothing of what is trained.

    falling: the learning rate by progress, as a share of its peak; paused: whether the call ends before the stage does.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        seconds: float,
        report_every: int,
        falling: Callable[[float], float] = cosine,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name, self.steps, self.seconds, self.report_every = name, steps, seconds, report_every
        self.falling, self.paused = falling, paused
        self.step, self.before = 0, 0.0
        self.began: float | None = None
        self.history: list[list[float]] = []
        self.earlier: dict = {"step": 0, "elapsed": 0.0, "history": []}  # of runs whose weights this one began with
        self.sum: Tensor | None = None
        self.said = 0.0

    @property
    def elapsed(self) -> float:
        return self.before + (time.monotonic() - self.began if self.began else 0.0)

    def begin(self) -> None:
        """Starts the clock: a stage that waits for another must not age."""
        self.began = time.monotonic()

    def end(self) -> None:
        self.before, self.began = self.elapsed, None

    @property
    def progress(self) -> float:
        return (
            min(1.0, max(self.step / self.steps, self.elapsed / self.seconds))
            if self.steps > 0 and self.seconds > 0
            else 1.0
        )

    @property
    def running(self) -> bool:
        return self.progress < 1 and not self.paused()

    def rate(self, peak: float, warmup: int) -> float:
        return peak * min(1.0, (self.step + 1) / warmup) * self.falling(self.progress)

    def record(self, loss: Tensor) -> None:
        self.sum = loss.detach() if self.sum is None else self.sum + loss.detach()
        self.step += 1
        if self.step % self.report_every == 0:
            mean = self.sum.item() / self.report_every
            if not math.isfinite(mean):
                raise FloatingPointError(
                    f"{self.name}: loss is {mean} at step {self.step}; lower the learning rate and resume"
                )
            self.sum = None
            self.history.append([self.step, mean, round(self.elapsed, 1)])
            if len(self.history) % 5 == 0 or self.elapsed - self.said > SAY_SECONDS:
                self.said = self.elapsed
                say(f"{self.name} step {self.step} loss {mean:.4f} {self.elapsed:.0f} s {100 * self.progress:.0f} %")

    def to_dict(self) -> dict:
        return {"step": self.step, "elapsed": self.elapsed, "history": self.history, "earlier": self.earlier}

    def whole(self) -> dict:
        """Steps, seconds and history, those of earlier runs included."""
        step, elapsed = self.earlier["step"], self.earlier["elapsed"]
        moved = [[step + s, loss, round(elapsed + t, 1)] for s, loss, t in self.history]
        return {"step": step + self.step, "elapsed": elapsed + self.elapsed, "history": self.earlier["history"] + moved}

    def restore(self, saved: dict) -> None:
        self.step, self.before, self.history, self.earlier = (
            saved[name] for name in ("step", "elapsed", "history", "earlier")
        )
        self.began = self.sum = None  # of a run that goes back to a state of its own


def save_state(path: Path, tensors: dict[str, Tensor], record: dict) -> None:
    plain = {k: v.detach().contiguous().cpu().clone() for k, v in tensors.items()}
    write_atomically(path, save(plain, {"record": json.dumps(record)}))


def load_state(path: Path) -> tuple[dict[str, Tensor], dict]:
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return {key: file.get_tensor(key) for key in names}, json.loads(file.metadata()["record"])


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{key}": value for key, value in tensors.items()}


def unprefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[len(prefix) + 1 :]: value for key, value in tensors.items() if key.startswith(prefix + "/")}
