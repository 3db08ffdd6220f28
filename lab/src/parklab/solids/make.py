"""python -m parklab.solids.make --out runs/solids --minutes 25 [options of parklab.solids.train]

The whole model in one command that ends in time: training, its report, and parcels to carry away.

Training is a process of its own. If it ends early or falls silent, the next one goes on from its last state, without
graphs, then uncompiled as well. Results come early and again: OUT/packed and OUT/samples.png at about a third and two
thirds of the time and at its end, then OUT/report. OUT/parcels/N holds files that are new or changed since N - 1, in
folders 1, 2, ... of at most 8 files and 60 MiB, each with its SHA256SUMS. --gather PARCELS puts them together in OUT.
SIGTERM ends it early and in order: what was trained is packed and put into parcels, without a report.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from parkattn.checks import first_line
from parklab.files import make_folder, within, write_atomically
from parklab.sprites.training_state import say

from .packing import INDEX

WAYS = (("--graphs", "--compile"), ("--compile",), ())  # graphs save the least here, and are the likeliest to fail
REPORT_SECONDS = 150.0
LEAST_SECONDS = 90.0  # a training process with less time only packs what there is
SILENCE = 240.0  # a process that says nothing for so long is stuck; compiling may take two minutes
GRACE = 60.0  # beyond its time, then it is killed
POLL = 1.0
PARCEL_FILES, PARCEL_BYTES = 7, 60 * 2**20  # and the sums
ORDER = (f"packed/{INDEX}", "samples.png", "times.json", "packed", "loss.svg", "train.log", "report", "report.log")


class Parcels:
    """Files below OUT, in the order of their worth, in folders that are never written again."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / "parcels"
        self.sent: dict[str, str] = {}
        self.generation = len(list(self.folder.glob("[0-9]*")))
        for sums in sorted(self.folder.glob("*/*/SHA256SUMS"), key=lambda path: int(path.parts[-3])):
            self.sent |= {
                name: digest for digest, name in (line.split("  ", 1) for line in sums.read_text().splitlines())
            }

    def write(self) -> None:
        """Of everything that changed since the last time; whole at once."""
        found = {str(path.relative_to(self.out)): path for path in self._files()}
        sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
        changed = [name for name, digest in sums.items() if self.sent.get(name) != digest]
        if not changed:
            return
        partial, number = self.folder / ".partial", self.generation + 1
        shutil.rmtree(partial, ignore_errors=True)
        for index, names in enumerate(self._split({name: found[name].stat().st_size for name in changed}), 1):
            parcel = partial / str(index)
            for name in names:
                (parcel / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found[name], parcel / name)
            lines = "".join(f"{sums[name]}  {name}\n" for name in names)
            (parcel / "SHA256SUMS").write_text(lines)
        partial.rename(self.folder / str(number))
        self.generation, self.sent = number, self.sent | {name: sums[name] for name in changed}
        say(f"parcels/{number}: {len(changed)} files in {index} folders")

    def _files(self) -> list[Path]:
        every: list[Path] = []
        for name in ORDER:
            path = self.out / name
            every += sorted(path.iterdir()) if path.is_dir() else [path]
        return [path for path in dict.fromkeys(every) if path.is_file()]

    @staticmethod
    def _split(sizes: dict[str, int]) -> list[list[str]]:
        """Each file in the first folder that has room."""
        parcels: list[list[str]] = []
        for name, size in sizes.items():
            room = (p for p in parcels if len(p) < PARCEL_FILES and sum(sizes[n] for n in p) + size <= PARCEL_BYTES)
            fitting = next(room, None)
            if fitting is None:
                parcels.append([name])
            else:
                fitting.append(name)
        return parcels


def gather(parcels: Path, out: Path) -> None:
    """The files of parcels as they last were; each must be whole."""
    every = sorted(parcels.glob("*/*/SHA256SUMS"), key=lambda path: tuple(map(int, path.parts[-3:-1])))
    if not every:
        raise FileNotFoundError(
            f"gather: expected parcels in {parcels}, such as 1/1/SHA256SUMS, got none; name OUT/parcels"
        )
    for sums in every:
        for digest, name in (line.split("  ", 1) for line in sums.read_text().splitlines()):
            source, target = within(sums.parent, name), within(out, name)
            data = source.read_bytes() if source is not None and source.is_file() else b""
            if target is None or hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(
                    f"gather: expected {name} whole in {sums.parent}, got another file or none; fetch it again"
                )
            make_folder(target.parent)
            write_atomically(target, data)


class Making:
    """The processes of a run, its end on the wall clock, and its parcels."""

    def __init__(self, out: Path, ends: float, device: str, options: list[str], report_options: list[str]) -> None:
        self.out, self.ends, self.device = out, ends, device
        self.options, self.report_options = options, report_options
        self.parcels = Parcels(out)
        self.running: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.shown = self._shown()

    def stop(self, *_: object) -> None:
        self.stopped = True
        if self.running is not None:
            self.running.terminate()

    def run(self) -> bool:
        """Whether a model was made."""
        training_ends, ended = self.ends - REPORT_SECONDS, False
        for way in WAYS:
            if not ended and not self.stopped and training_ends - time.time() > LEAST_SECONDS:
                ended = self._train(way, training_ends)
        if not ended:
            self._train(WAYS[-1], time.time())  # trains nothing and packs the last state
        self._carry()
        made = (self.out / "packed" / INDEX).is_file()
        if made and not self.stopped:
            report = ["report", "--model", self.out / "packed", "--out", self.out / "report", *self.report_options]
            self._process(report, self.ends, quiet=lambda: False)
        self._carry()
        return made

    def _train(self, way: tuple[str, ...], ends: float) -> bool:
        say(f"training {' '.join(way) or 'plainly'} for {max(0.0, ends - time.time()):.0f} s")
        words = ["train", "--out", self.out, *self.options, *way, "--until", str(ends), "--finish"]
        log = self.out / "train.log"
        began = time.time()

        def quiet() -> bool:
            last = max(began, log.stat().st_mtime if log.is_file() else 0.0)
            if self._shown() != self.shown:
                self.shown = self._shown()
                self._carry()
            return time.time() - last > SILENCE

        killed = ends + GRACE if ends > began else self.ends + GRACE  # only to pack is worth more than a report
        return self._process(words, killed, quiet)

    def _process(self, words: list[object], ends: float, quiet: Callable[[], bool]) -> bool:
        """Whether it ended well; it is killed at its end, or when it is quiet."""
        name = str(words[0])
        command = [sys.executable, "-m", f"parklab.solids.{name}", *map(str, words[1:]), "--device", self.device]
        with (self.out / f"{name}.log").open("ab") as log:
            self.running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            while self.running.poll() is None:
                if time.time() > ends or quiet():
                    say(f"{name}: {'its time is over' if time.time() > ends else 'silent for too long'}; killed")
                    self.running.kill()
                    self.running.wait()
                    break
                time.sleep(POLL)
        code, self.running = self.running.returncode, None
        say(f"{name}: exit status {code}")
        return code == 0

    def _shown(self) -> int:
        """Changes when training has written its results, of which this file is the last."""
        path = self.out / "times.json"
        return path.stat().st_mtime_ns if path.is_file() else 0

    def _carry(self) -> None:
        try:
            self.parcels.write()
        except OSError as error:  # a full disk, or a file that is being replaced: the next parcels have it
            say(f"parcels: {first_line(error)}")


def main() -> None:
    began = time.time()
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--out", type=Path, required=True)
    reader.add_argument("--minutes", type=float, default=25.0, help="of everything, the report included")
    reader.add_argument("--device", default="cuda")
    reader.add_argument("--report", default="", help="options of parklab.solids.report, in one word")
    reader.add_argument("--gather", type=Path, help="parcels to put together in OUT, instead of training")
    asked, options = reader.parse_known_args()
    if asked.gather:
        gather(asked.gather, asked.out)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    ends = began + 60 * asked.minutes
    making = Making(asked.out.resolve(), ends, asked.device, options, asked.report.split())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, making.stop)
    if not making.run():
        sys.exit(f"make: expected a model in {asked.out}, got none; read {asked.out / 'train.log'}")
    say(f"{asked.out / 'packed'} in {(time.time() - began) / 60:.1f} minutes of {asked.minutes:g}")


if __name__ == "__main__":
    main()
