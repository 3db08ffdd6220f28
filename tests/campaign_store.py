"""python tests/campaign_store.py [--part PART] [--only COMMAND] [--every N]

The long form of tests/test_store.py and test_store_received.py: generate, --prompts, compare, ablation, capture and
profile (with frames that cost nothing) are cut off before every file operation, in an empty folder and while a finished
one is overwritten (stops); by full and bad disks (full); by SIGKILL; several processes share a folder; finished folders
are damaged (corrupt); folders come with journals, locks, links and FIFOs of others (received); locks follow
NFS's rule, or there are none (network); requests differ in null, absent and true alone (requests). Every count but the runs must be 0, else exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import disturbed_files as disturb
from disturbed_files import Tally, Trial
from hangs import HangError, no_hang
from parklab import files, store
from parklab.store import Cell, Store

COMMANDS: dict[str, disturb.Command] = {"store": disturb.run_store, **disturb.COMMANDS}
PARTS = ("stops", "full", "sigkill", "shared", "corrupt", "received", "network", "requests")
Damage = Callable[[Path], None]
Plant = Callable[[Path, Path, str], None]  # (folder, another folder beside it, mark of one of its cells)
PLANTED = b"planted"
SHA256 = hashlib.sha256(PLANTED).hexdigest()


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


def _replaced(make: Callable[[Path], object]) -> Damage:
    return lambda path: [path.unlink(), make(path)].clear()


DAMAGES: tuple[Damage, ...] = (
    Path.unlink, _flipped, *map(_replaced, (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere"))),
    lambda path: path.chmod(0), lambda path: os.truncate(path, path.stat().st_size // 2),
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


def _journal(names: Any, form: str = store.JOURNAL) -> Plant:
    """A sealed journal and a temporary file that fits it; OUTSIDE stands for the other folder. form: of an earlier
    version.
    """

    def plant(folder: Path, outside: Path, mark: str) -> None:
        (folder / f".park-{mark}-0badc0de.tmp").write_bytes(PLANTED)
        (folder / "link").symlink_to(outside)
        told = (
            {name.replace("OUTSIDE", str(outside)): value for name, value in names.items()}
            if isinstance(names, dict)
            else names
        )
        moves = [[f".park-{mark}-0badc0de.tmp", name, SHA256] for name in told] if isinstance(told, dict) else told
        journal = store.sealed(
            {"format": form, "files": told if form == store.JOURNAL else {}, "moves": moves, "of": "test"}
        )
        files.journal_path(folder, mark).write_text(json.dumps(journal))

    return plant


def _node(ending: str, make: Callable[[Path, Path], object]) -> Plant:
    return lambda folder, outside, mark: [make(folder / f".park-{mark}{ending}", outside)].clear()


def _in_the_way(make: Callable[[Path, Path], object]) -> Plant:
    return lambda folder, outside, mark: [
        make(folder / name, outside) for name in ("raw", "tables", "cells", "rows")
    ].clear()


NODES: dict[str, Callable[[Path, Path], object]] = {
    "a FIFO": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
    "a link": lambda path, outside: path.symlink_to(outside / "mine.txt"),
    "a link to a folder": lambda path, outside: path.symlink_to(outside),
    "a link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
}
JOURNALS: dict[str, Any] = {
    "up": {"../outside/mine.txt": SHA256}, "absolute": {"OUTSIDE/mine.txt": SHA256}, "through a link": {"link/mine.txt": SHA256},
    "up to a new file": {"../outside/new.txt": SHA256}, "itself": {".": SHA256}, "no name": {"": SHA256}, "no files": {},
    "null": None, "a list": [], "a number": 3, "a pair": [["a"]], "no hash": {"a.bin": None}, "a list as hash": {"a.bin": [SHA256]},
    "a long name": {"x" * 300: SHA256}, "a NUL": {"a\0b": SHA256}, "a surrogate": {"\ud800": SHA256}, "a file as folder": {"a.bin/b": SHA256},
    "another hash": {"a.bin": "0" * 64}, "a hidden folder": {".git/hooks/pre-commit": SHA256}, "a hidden folder below": {"raw/.git/config": SHA256},
    "a lock": {".park-0123456789abcdef.lock": SHA256},
}  # fmt: skip
# what came with a folder: by name how it is put there, and whether a run may end with one line about it
RECEIVED: dict[str, tuple[Plant, bool]] = {
    f"journal, {name}": (_journal(told), False) for name, told in JOURNALS.items()
}
for _name in ("up", "absolute", "null", "a number"):
    RECEIVED[f"older journal, {_name}"] = _journal(JOURNALS[_name], "parkattn.journal.1"), False
for _what, _make in NODES.items():
    RECEIVED[f"{_what} as lock"] = _node(".lock", _make), True
    RECEIVED[f"{_what} as journal"] = _node(".journal", _make), _what == "a folder"
    RECEIVED[f"{_what} as temporary file"] = _node("-0badc0de.tmp", _make), False
    RECEIVED[f"{_what} as a folder of results"] = _in_the_way(_make), _what != "a folder"


def received(trial: Trial) -> Tally:
    """Nothing outside changes, nothing hangs, and the command ends with its bytes or, where it may, with one line."""
    found = Tally()
    stems = [Path(name).stem for name in trial.expected[0] if name.endswith(".json") and "/" not in name]
    for what, (plant, may_refuse) in RECEIVED.items():
        for mark, own in (*((files.mark_of(f"cell {stem}"), True) for stem in stems), (files.mark_of("others"), False)):
            found += receive(trial, what, plant, mark, may_refuse and (own or "results" in what))
    return found


def receive(trial: Trial, what: str, plant: Plant, mark: str, may_refuse: bool) -> Tally:
    place, tally = trial._place("received"), Tally(runs=1)
    outside = place.parent / "outside"
    for folder in (place, outside):
        folder.mkdir()
    (outside / "mine.txt").write_bytes(b"mine")
    plant(place, outside, mark)
    try:
        with no_hang():
            disturb.operations(trial.command, place, 0)
        there = disturb.contents(place)
        tally.other_bytes += {name: there.get(name) for name in trial.expected[0]} != trial.expected[0]
    except (ValueError, OSError) as error:
        tally.refused += not may_refuse
        tally.unclear += re.fullmatch(r"out: expected .*, got .*; .*\.", str(error)) is None
        sys.stderr.write("" if may_refuse else f"{what}: {error}\n")
    except (Exception, HangError) as error:
        sys.stderr.write(f"{what}: {type(error).__name__}: {error}\n")
        tally.unclear += 1
    hidden = [path for path in place.rglob("*") if any(part.startswith(".") for part in path.relative_to(place).parts)]
    tally.mixed += any(path.is_file() and path.read_bytes() == PLANTED for path in hidden)
    tally.lost += disturb.contents(outside) != {"mine.txt": b"mine"} or len(list(outside.iterdir())) != 1
    return tally


def over_network(trial: Trial) -> Tally:
    """NFS locks files that are open for writing, and ours are; file systems without locks are written, and said to have
    none.
    """
    found = Tally()
    for answer in (None, *files.NO_LOCKS):
        place, said, tally = trial._place("network"), list[str](), Tally(runs=1)
        try:
            with disturb.disturbed(how=disturb.NFS) as through:
                through.lock_answer = answer
                trial.command(place, 0, False, said.append)
        except (ValueError, OSError):
            tally.refused += 1
        tally.unclear += any("no locks" in line for line in said) != (answer is not None)
        tally.other_bytes += disturb.contents(place) != trial.expected[0]
        found += tally
    return found


# two requests each that a comparison by value, or one of flattened names, takes for one
ALIKE: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"a": None}, {}), ({"a": {"b": None}}, {"a": {}}), ({"a": {}}, {}), ({"a": True}, {"a": 1}), ({"a": False}, {"a": 0.0}), ({"a": [None]}, {"a": []}),
    ({"a": {"b.c": 1}}, {"a": {"b": {"c": 1}}}), ({"a": "null"}, {"a": None}), ({"a": "1"}, {"a": 1}),
)  # fmt: skip


def mistaken(trial: Trial) -> Tally:
    """A finished cell of one request is never the answer to another."""
    found = Tally()
    for pair in ALIKE:
        for asked, other in (pair, pair[::-1]):
            keep, tally = Store(trial._place("requests")), Tally(runs=1)
            cells = [Cell(name="a", format="test", request=request) for request in (asked, other)]
            keep.fill(
                cells[:1], lambda making: [making.commit({"format": "test", "request": making.cell.request})].clear()
            )
            tally.lost += keep.look(cells[0]).state != store.FINISHED
            tally.mixed += keep.look(cells[1]).state != store.OTHER
            found += tally
    return found


def parts(trial: Trial, asked: str, every: int) -> Iterator[tuple[str, Tally]]:
    if asked in ("stops", "all"):
        yield "stops", cut_off(trial, (disturb.STOP, disturb.POWER_CUT, disturb.DISORDER), every)
    if asked in ("full", "all"):
        yield "full disk", cut_off(trial, (disturb.FULL_DISK,), every)
        yield "bad disk", cut_off(trial, (disturb.BAD_DISK,), every)
    if asked in ("sigkill", "all"):
        yield "SIGKILL", killed(trial, every)
    if asked in ("shared", "all"):
        yield "shared", shared(trial, 10)
    if asked in ("corrupt", "all"):
        yield "corrupt", corrupted(trial)
    if asked in ("received", "all"):
        yield "received", received(trial)
    if asked in ("network", "all"):
        yield "network", over_network(trial)
    if asked in ("requests", "all") and trial.command is disturb.run_store:
        yield "requests", mistaken(trial)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--part", choices=(*PARTS, "all"), default="all")
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
