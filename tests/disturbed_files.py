"""Stops, power cuts and full disks at a chosen file operation, and fast stand-ins for the video commands.

`parklab.files` does every file operation through `os` and `fcntl`; a Disturbed stands in for both. A stopped process
does nothing more: after the stop every further operation stops too, and what it held open is closed by the kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from parkattn.park import ParkConfig
from parkattn.site import CallSite
from parklab import files, store
from parklab.baselines.density_profile import DensityProfile, DensityProfiler
from parklab.experiments import ablation, reproduce, runner
from parklab.experiments.captures import CapturedCall, Selection
from parklab.store import Cell, CellWriter, Store
from parklab.studio import checkpoints, compare, density, generate, prompts, video
from parklab.studio.generate import Generation
from parklab.studio.request import Request

STOP, POWER_CUT, DISORDER, KILL, NFS = "stop", "power cut", "power cut, renames out of order", "SIGKILL", "NFS"
FULL_DISK, BAD_DISK = "full disk", "bad disk"
REFUSALS = {
    FULL_DISK: (errno.ENOSPC, "full disk or quota; free some space and run again."),
    BAD_DISK: (errno.EIO, "Input/output error"),
}
WHEN = {"time": "2026-01-01T00:00:00+00:00", "commit": None, "torch": "2", "cpu": "one", "threads": 1}
SENTENCES = ("a red circle moves right over blue waves", "a blue square orbits over green stripes")


class Stopped(BaseException):
    """The process is no more."""


class Disturbed:
    """`os` and `fcntl` for parklab.files: counts operations; from number `at` on, what `how` says happens."""

    def __init__(self, at: int | None = None, how: str = STOP) -> None:
        self.at, self.how, self.count = at, how, 0
        self.lock_answer: int | None = None  # the error number that every lock meets
        self.handles: dict[int, Path] = {}
        self.unsynced: dict[tuple[int, int], Path] = {}
        # (target, source, what the target held) of renames and removals whose folder is not synced yet
        self.moved: list[tuple[Path, Path | None, bytes | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl if name in ("flock", "LOCK_EX", "LOCK_NB") else os, name)

    def happens(self, allocates: bool = True) -> bool:
        """Whether this operation is cut off; raises where it does not even begin."""
        self.count += 1
        if self.at is None or self.count <= self.at:
            return False
        if self.how in REFUSALS:
            return allocates
        if self.how == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def cut(self) -> BaseException:
        if self.how not in REFUSALS:
            return Stopped()
        return OSError(REFUSALS[self.how][0], os.strerror(REFUSALS[self.how][0]))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if self.happens(allocates=bool(flags & os.O_CREAT) and not os.path.lexists(path)):
            raise self.cut()
        handle = os.open(path, flags, mode)
        self.handles[handle] = Path(path)
        return handle

    def close(self, handle: int) -> None:
        self.handles.pop(handle, None)
        os.close(handle)

    def write(self, handle: int, data: memoryview) -> int:
        found = os.fstat(handle)
        self.unsynced[found.st_dev, found.st_ino] = self.handles[handle]
        if self.happens():
            os.write(handle, data[: len(data) // 2])
            raise self.cut()
        return os.write(handle, data)

    def fsync(self, handle: int) -> None:
        if self.happens():
            raise self.cut()
        found = os.fstat(handle)
        self.unsynced.pop((found.st_dev, found.st_ino), None)
        self.moved = [entry for entry in self.moved if entry[0].parent != self.handles[handle]]

    def replace(self, source: Path, target: Path) -> None:
        if self.happens():
            raise self.cut()
        found = source.lstat()
        if (found.st_dev, found.st_ino) in self.unsynced:
            self.unsynced[found.st_dev, found.st_ino] = target
        self.moved.append((target, source, files.read_regular(target)))
        source.replace(target)

    def unlink(self, path: Path) -> None:
        if self.happens(allocates=False):
            raise self.cut()
        if path.suffix == ".journal":
            self.moved.append((path, None, files.read_regular(path)))
        path.unlink()

    def mkdir(self, path: Path) -> None:
        if self.happens():
            raise self.cut()
        path.mkdir()

    def flock(self, handle: int, operation: int) -> None:
        if self.happens(allocates=False):
            raise self.cut()
        if self.lock_answer is not None:
            raise OSError(self.lock_answer, os.strerror(self.lock_answer))
        if self.how == NFS and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as flock(2) says
        fcntl.flock(handle, operation)

    def write_mp4(self, path: Path, frames: Any, fps: int) -> None:
        """One operation, cut off in the middle of the file."""
        cut = self.happens()
        video.write_mp4(path, frames, fps)
        found = path.stat()
        self.unsynced[found.st_dev, found.st_ino] = path
        if cut:
            os.truncate(path, path.stat().st_size // 2)
            raise self.cut()

    def bury(self) -> None:
        """What the kernel does for a process that is gone; after a power cut, what was not synced is lost.

        A file then loses its end, and renames and removals whose folder was not synced have not happened: all of them,
        or, out of order, the first of them only.
        """
        for handle in list(self.handles):
            self.close(handle)
        if self.how in (POWER_CUT, DISORDER):
            for path in self.unsynced.values():
                if path.is_file():
                    os.truncate(path, path.stat().st_size // 2)
            for target, source, held in reversed(self.moved if self.how == POWER_CUT else self.moved[:1]):
                if source is not None and os.path.lexists(target):
                    target.replace(source)
                if held is not None:
                    target.write_bytes(held)


@contextlib.contextmanager
def disturbed(at: int | None = None, how: str = STOP) -> Iterator[Disturbed]:
    """The operations of this block, cut off at one of them."""
    through = Disturbed(at, how)
    with contextlib.ExitStack() as stack:
        for name in ("os", "fcntl"):
            stack.enter_context(mock.patch.object(files, name, through))
        for module in (generate, compare):
            stack.enter_context(mock.patch.object(module, "write_mp4", through.write_mp4))
        try:
            yield through
        except Stopped:
            pass
        finally:
            through.bury()


@contextlib.contextmanager
def without_a_model() -> Iterator[list[str]]:
    """The video commands with frames drawn from the request's hash; the list says what was made."""
    made: list[str] = []

    def frames_of(pipe: Any, request: Request, config: ParkConfig, **options: Any) -> Generation:
        made.append(f"{request.method} {request.prompt} {request.seed}")
        # methods differ a little from the dense one, seeds and prompts altogether
        plain = np.random.default_rng(int(store.content_hash([request.prompt, request.seed])[:8], 16))
        apart = np.random.default_rng(int(store.content_hash(request.to_dict())[:8], 16))
        frames = plain.integers(8, 248, (2, 32, 32, 3))
        if request.method != "dense":
            frames += apart.integers(-8, 8, frames.shape)
        steps = [{"phase": "dense", "seconds": 1.0, "attention_seconds": 0.5, "density": 1.0} for _ in range(2)]
        seconds = {"text": 0.0, "denoise": 2.0, "decode": 0.0, "attention": 1.0, "total": 2.0}
        found = {
            "steps": steps, "density": 1.0, "density_sparse_steps": 0.5, "recall": None, "seconds": seconds,
            "summary": {"calls": {"dense": 1, "reuse": 1}}, "phase_seconds": {"dense": 2.0}, "attention_seconds_saved": None, "heat": {"density": None, "recall": None},
        }  # fmt: skip
        return Generation(frames.astype(np.uint8), found)

    def budgets(lab: Any, *asked: Any) -> dict[str, Any]:
        return {name: {"value": 0.5, "density": 0.5} for name in lab.evaluation.methods}

    stands_in: list[tuple[Any, str, Any]] = [
        (checkpoints, "find_model", lambda model: checkpoints.CHECKPOINT),
        (checkpoints, "fingerprint", lambda folder: "0" * 16),
        (checkpoints, "load_pipeline", lambda *arguments, **options: None),
        (checkpoints, "token_count", lambda *arguments: 64),
        (prompts, "expect_whole_prompts", lambda *arguments: None),
        (compare, "warm_up", lambda *arguments: None),
        (generate, "repeat_command", lambda request, video: video.name),  # the same record in every folder
        (ablation, "calibrate", budgets),
        (ablation, "held_out_scenes", functools.cache(ablation.held_out_scenes)),
    ]
    for module in (generate, compare, runner, density):
        stands_in.append((module, "fit_to_pipeline", lambda request, pipe: request))
        stands_in.append((module, "generate_frames", frames_of))
        stands_in.append((module, "environment", lambda: dict(WHEN)))
    stands_in += [(module, "config_for", lambda request, pipe: ParkConfig()) for module in (generate, compare, runner)]
    stands_in.append((ablation, "environment", lambda: dict(WHEN)))
    stands_in.append((reproduce, "fit_to_pipeline", lambda request, pipe: request))
    call = CapturedCall(*(torch.full((1, 1, 4, 2), value) for value in (1.0, 2.0)), CallSite())
    stands_in.append((reproduce, "capture_calls", lambda *arguments: [call]))
    stands_in.append((DensityProfiler, "profile", lambda self: DensityProfile(torch.full((1, 1, 1), 0.5).double())))
    with contextlib.ExitStack() as stack:
        for module, name, value in stands_in:
            stack.enter_context(mock.patch.object(module, name, value))
        yield made


Command = Callable[..., None]  # (folder, seed, overwrite, say)


def run_generate(folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None) -> None:
    generate.generate_video(Request(prompt=SENTENCES[0], seed=seed), folder / "a.mp4", overwrite=overwrite, say=say)


def run_prompts(folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None) -> None:
    listed = folder.parent / "prompts.txt"
    if not listed.exists():
        listed.write_text("\n".join(SENTENCES))
    request = Request(prompt="", seed=seed)
    prompts.generate_videos(request, listed, folder, shard=prompts.Shard(), overwrite=overwrite, say=say)


def run_compare(folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None) -> None:
    compare.compare(Request(prompt=SENTENCES[0], seed=seed), ["dense", "park"], folder, overwrite=overwrite, say=say)


def run_ablation(folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None) -> None:
    evaluation = ablation.ablation_of(2, seeds=(seed,), methods=("park", "centroid"))
    ablation.run_ablation(evaluation, folder, overwrite=overwrite, say=say)


def run_capture(folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None) -> None:
    chosen, out = Selection(layers=(0,)), folder / "c.safetensors"
    reproduce.capture_file(Request(prompt=SENTENCES[0], seed=seed), chosen, out, overwrite=overwrite, say=say)


def run_profile(folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None) -> None:
    request = Request(prompt="", seed=seed)
    density.measure_profile(request, SENTENCES, folder / "d.safetensors", overwrite=overwrite, say=say)


COMMANDS: dict[str, Command] = {
    "generate": run_generate, "prompts": run_prompts, "compare": run_compare, "ablation": run_ablation,
    "capture": run_capture, "profile": run_profile,
}  # fmt: skip


def run_store(folder: Path, seed: int, overwrite: bool = False, say: Any = lambda line: None) -> None:
    """A cell with two files, one of them in a folder below, a cell without files, and one derived from both."""

    def make(making: CellWriter) -> None:
        for name in making.cell.files:
            making.write(name, f"{name} of seed {seed}\n".encode() * 40)
        making.commit({"format": "test", "request": making.cell.request})

    named = {"a": ("a.bin", "raw/a.bin"), "b": ()}
    cells = [Cell(name=name, format="test", request={"seed": seed}, files=named[name]) for name in named]
    keep = Store(folder, say)
    records = keep.fill(cells, make, overwrite=overwrite)
    text = json.dumps({name: record["cell"] for name, record in records.items()}).encode()
    keep.put(Cell(name="sum", format="test", files=("sum.md",)), {"format": "test"}, {"sum.md": text})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name, temporary ones included, those that were set aside left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".aside-" not in path.name:
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def operations(command: Command, folder: Path, *arguments: Any) -> int:
    """Of an undisturbed run (whose fsync is none, for speed)."""
    with disturbed() as through:
        command(folder, *arguments)
    return through.count


@dataclasses.dataclass
class Tally:
    """What a campaign found; every count but the first must be 0."""

    runs: int = 0
    lost: int = 0  # finished before the stop and not after it
    mixed: int = 0  # a cell that is neither request's
    refused: int = 0  # the same command again did not go on
    other_bytes: int = 0  # it went on to something else than an undisturbed run gives
    left: int = 0  # temporary files or locks after it
    unclear: int = 0  # an error that is not one line about room

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def clean(self) -> bool:
        return self.runs > 0 and not any(dataclasses.astuple(self)[1:])


def finished_cells(folder: Path) -> dict[str, str]:
    """Whole cells after recovery, and the seal of each."""
    found = {}
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())] if folder.is_dir() else []:
        with disturbed():
            Store(place).tidy()
        for path in place.glob("*.json"):
            record = store.read_record(path)
            if record and all(files.sha256_of(place / name) == sha256 for name, sha256 in record["files"].items()):
                found[str(path.relative_to(folder))] = record["hash"]
    return found


class Trial:
    """One command with two requests, and what it gives when nothing happens."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command, self.folder = command, folder
        self.expected: list[dict[str, bytes]] = []
        self.seals: list[dict[str, str]] = []
        for seed in (0, 1):
            place = folder / f"undisturbed-{seed}" / "out"
            place.parent.mkdir(parents=True)
            operations(command, place, seed)
            self.expected.append(contents(place))
            self.seals.append(finished_cells(place))
        self.count = operations(command, self._place("counted"), 0)
        again = self._place("counted-overwrite", start=0)
        self.count_overwrite = operations(command, again, 1, True)

    def fresh(self, at: int, how: str) -> Tally:
        """Cut off in an empty folder, then the same command again."""
        place, tally = self._place("disturbed"), Tally(runs=1)
        self._disturb(place, 0, False, at, how, tally)
        before = finished_cells(shutil.copytree(place, self._place("looked"))) if place.is_dir() else {}
        kept = [name for name in before if (place / name).exists() and not _derived(name)]
        stamps = {name: (place / name).stat().st_mtime_ns for name in kept}
        self._again(place, 0, False, tally, 0)
        tally.lost += sum((place / name).stat().st_mtime_ns != stamp for name, stamp in stamps.items())
        tally.mixed += sum(self.seals[0].get(name) != seal for name, seal in before.items())
        return tally

    def overwriting(self, at: int, how: str) -> Tally:
        """Cut off while another request's finished cells are replaced: each stays one of the two, whole."""
        place, tally = self._place("disturbed", start=0), Tally(runs=1)
        self._disturb(place, 1, True, at, how, tally)
        looked = shutil.copytree(place, self._place("looked"))
        found = finished_cells(looked)
        tally.lost += sum(name not in found for name in self.seals[0])
        for name, seal in found.items():
            tally.mixed += not _derived(name) and seal not in [seals.get(name) for seals in self.seals]
        first = shutil.copytree(place, self._place("first"))
        try:
            operations(self.command, first, 0)  # the first request again: all of it is there, or a cell is the second's
            tally.other_bytes += contents(first) != self.expected[0]
        except ValueError as error:
            tally.refused += "made with other settings" not in str(error) or found == self.seals[0]
        self._again(place, 1, True, tally, 1)
        return tally

    def _disturb(self, place: Path, seed: int, overwrite: bool, at: int, how: str, tally: Tally) -> None:
        with disturbed(at, how):
            try:
                self.command(place, seed, overwrite)
            except OSError as error:
                explained = how in REFUSALS and REFUSALS[how][1] in str(error)
                tally.unclear += not explained or "\n" in str(error)
                if not list(place.rglob("*.journal")):
                    tally.left += sum(name.endswith(".tmp") for name in contents(place))

    def _again(self, place: Path, seed: int, overwrite: bool, tally: Tally, expected: int) -> None:
        try:
            operations(self.command, place, seed, overwrite)
        except (ValueError, OSError):
            tally.refused += 1
            return
        found = contents(place)
        tally.left += sum(Path(name).name.startswith(".park-") for name in found)
        wanted = self.expected[expected]
        tally.other_bytes += {name: found.get(name) for name in wanted} != wanted

    def _place(self, name: str, start: int | None = None) -> Path:
        parent = self.folder / name
        shutil.rmtree(parent, ignore_errors=True)
        if start is None:
            parent.mkdir()
        else:
            shutil.copytree(self.folder / f"undisturbed-{start}", parent)
        return parent / "out"


def _derived(name: str) -> bool:
    """Made of several cells: between two requests it may describe both, and is made again by any run that ends."""
    return Path(name).name in ("sum.json", "metrics.json", "index.json", "table.json")
