"""python tests/campaign_store.py [--part stops|full|sigkill|shared|corrupt|all] [--only COMMAND] [--every N]

The long form of tests/test_store.py: generate, --prompts, compare and ablation (with frames that cost nothing) are cut
off before every file operation, in an empty folder and while a finished one is overwritten; by full disks; by SIGKILL;
several processes share a folder; finished folders are damaged. Every count but the runs must be 0, else exit code 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import disturbed_files as disturb
from disturbed_files import Tally, Trial

COMMANDS: dict[str, disturb.Command] = {"store": disturb.run_store, **disturb.COMMANDS}
Damage = Callable[[Path], None]


def report(part: str, name: str, found: Tally) -> bool:
    sys.stdout.write(
        f"{part:10} {name:9} {found.runs:4} runs: {found.lost} lost, {found.mixed} mixed, {found.refused} refused, "
        f"{found.other_bytes} with other bytes, {found.left} files left, {found.unclear} unclear errors\n"
    )
    sys.stdout.flush()
    return found.clean


def cut_off(trial: Trial, hows: tuple[str, ...], every: int) -> Tally:
    found = Tally()
    for how in hows:
        for at in range(0, trial.count, every):
            found += trial.fresh(at, how)
        for at in range(0, trial.count_overwrite, every):
            found += trial.overwriting(at, how)
    return found


def killed(trial: Trial, every: int) -> Tally:
    """Real processes that end themselves with SIGKILL before an operation; the next one goes on."""
    found = Tally()
    for at in range(0, trial.count, every):
        place = trial._place("killed")
        _in_processes([lambda place=place, at=at: _killed_at(trial.command, place, at)])
        tally = Tally(runs=1)
        trial._again(place, 0, False, tally, 0)
        found += tally
    return found


def _killed_at(command: disturb.Command, place: Path, at: int) -> None:
    with disturb.disturbed(at, disturb.KILL):
        command(place, 0)


def shared(trial: Trial, rounds: int) -> Tally:
    """Three processes on one folder: one folder's bytes, each result made once, nothing left behind."""
    found = Tally()
    for turn in range(rounds):
        place = trial._place("shared")
        log = trial.folder / f"made-{turn}"
        bad = _in_processes([lambda place=place, log=log: _logged(trial.command, place, log)] * 3)
        tally = Tally(runs=1, refused=bad)
        made = log.read_text().splitlines() if log.exists() else []
        # an ablation makes dense videos twice: the reference of a group and the floor
        tally.mixed += len(made) != len(set(made)) and trial.command is not disturb.run_ablation
        wanted = disturb.contents(place)
        tally.other_bytes += wanted != trial.expected[0]
        tally.left += sum(Path(name).name.startswith(".park-") for name in wanted)
        found += tally
    return found


def _logged(command: disturb.Command, place: Path, log: Path) -> None:
    with disturb.without_a_model() as made:
        command(place, 0)
    with log.open("a") as file:
        file.writelines(line + "\n" for line in made)


def _in_processes(works: list[Callable[[], None]]) -> int:
    """How many ended with an error; being killed is none."""
    processes = []
    for work in works:
        process = os.fork()
        if process == 0:
            try:
                work()
                os._exit(0)
            except BaseException as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                os._exit(1)
        processes.append(process)
    ended = [os.waitpid(process, 0)[1] for process in processes]
    return sum(os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL) for status in ended)


def _bytes(data: bytes) -> Damage:
    return lambda path: [path.write_bytes(data)].clear()


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _unreadable(path: Path) -> None:
    path.chmod(0)


DAMAGES: tuple[Damage, ...] = (
    Path.unlink, _flipped, _folder, _link, _fifo, _unreadable, lambda path: os.truncate(path, path.stat().st_size // 2),
    *map(_bytes, (b"", b"null", b"[]", b'{"request": null}', b'{"files": {"a": 3}}', b"[" * 50_000)),
    *map(_bytes, (b"\xff\xfe", b"\0" * 64)),
)  # fmt: skip


def corrupted(trial: Trial) -> Tally:
    """Every file of a finished folder, damaged in every way: the same command makes the folder whole again."""
    found = Tally()
    for name in trial.expected[0]:
        for damage in DAMAGES:
            place = trial._place("corrupted", start=0)
            damage(place / name)
            said: list[str] = []
            tally = Tally(runs=1)
            try:
                disturb.operations(lambda *arguments, say=said: trial.command(*arguments, False, say.append), place, 0)
                tally.other_bytes += disturb.contents(place) != trial.expected[0]
            except (ValueError, OSError):
                tally.refused += 1
            except Exception as error:
                sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
                tally.unclear += 1
            found += tally
    return found


def parts(trial: Trial, asked: str, every: int) -> Iterator[tuple[str, Tally]]:
    if asked in ("stops", "all"):
        yield "stops", cut_off(trial, (disturb.STOP, disturb.POWER_CUT, disturb.DISORDER), every)
    if asked in ("full", "all"):
        yield "full disk", cut_off(trial, (disturb.FULL_DISK,), every)
    if asked in ("sigkill", "all"):
        yield "SIGKILL", killed(trial, every)
    if asked in ("shared", "all"):
        yield "shared", shared(trial, 10)
    if asked in ("corrupt", "all"):
        yield "corrupt", corrupted(trial)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--part", choices=("stops", "full", "sigkill", "shared", "corrupt", "all"), default="all")
    reader.add_argument("--only", choices=tuple(COMMANDS))
    reader.add_argument("--every", type=int, default=1, help="every Nth operation")
    asked = reader.parse_args()
    clean = True
    for name in [asked.only] if asked.only else COMMANDS:
        folder = Path(tempfile.mkdtemp())
        try:
            with disturb.without_a_model():
                trial = Trial(COMMANDS[name], folder)
                for part, found in parts(trial, asked.part, asked.every):
                    clean &= report(part, name, found)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
