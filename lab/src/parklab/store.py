"""One store for results: a folder of cells, each finished or absent.

A cell is what was asked (a request with a content hash) under a name. It is finished when its record NAME.json is
there, sealed by a hash of itself, and every file the record names has the hash it says. All files of a cell are written
under temporary names; a journal then lists their names and hashes. The journal's own rename is the commit:

    temporary files, durable  ->  journal, durable  ->  renames, record last, durable  ->  journal removed

A stop before it leaves what was there; a stop after it is completed from the journal by the next process, which finds
the temporary files by their hashes. A folder may come from others: records and journals in it name files below it
alone, links are not followed, and what the store did not write is moved aside, never replaced. Several processes may
work on one folder: a cell is made under an advisory lock, and cells that another process holds come last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parklab import files
from parklab.sealed import RECORD_LIMIT as RECORD_LIMIT
from parklab.sealed import Record as Record
from parklab.sealed import content_hash as content_hash
from parklab.sealed import differences
from parklab.sealed import read_record as read_record
from parklab.sealed import record_in as record_in
from parklab.sealed import sealed as sealed

Say = Callable[[str], None]
Content = bytes | Callable[[Path], None]  # the bytes, or what writes them to a path
Make = Callable[["CellWriter"], None]

FINISHED, OTHER, ABSENT = "finished", "other", "absent"
JOURNAL = "parkattn.journal.2"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is asked for, and the names of what answers it: NAME.json and files, relative to the store's folder."""

    name: str
    format: str
    request: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    group: str | None = None  # cells of one group are made by one process, one after the other
    unsaid: Mapping[str, Any] = field(default_factory=dict)  # what earlier records mean by having no such name

    @property
    def mark(self) -> str:
        return files.mark_of(f"cell {self.group or self.name}")

    @property
    def hash(self) -> str:
        return content_hash(self.request)


@dataclass(frozen=True)
class CellState:
    state: str  # FINISHED; OTHER: a finished cell of another request; ABSENT
    record: Record | None = None
    reason: str = ""  # for people: what is there instead, nothing where nothing is


class Store:
    """The cells under one folder, or its part `below`. `say` is told what was repaired, moved or waited for."""

    def __init__(self, folder: Path, say: Say = lambda line: None, below: str = "") -> None:
        self.folder, self.say = folder / below, say
        if below and self.folder.is_symlink():
            raise OSError(f"out: expected a folder, got the link {self.folder}; remove it, or choose another place.")

    def find(self, cell: Cell) -> Record | None:
        """The record of a finished cell; None where it is absent; an error where the name is another request's."""
        return self._free_or_finished(cell, self.look(cell))

    def look(self, cell: Cell) -> CellState:
        """Reads and changes nothing. Every file is hashed: a cell is never finished by its names alone."""
        path = self._record_path(cell)
        record = self.read(cell)
        if record is None:
            there = [name for name in (path.name, *cell.files) if os.path.lexists(self.folder / name)]
            return CellState(ABSENT, reason=f"{there[0]} is not part of a finished result" if there else "")
        for name, expected in record["files"].items():
            if self._sha256(name) != expected:
                return CellState(ABSENT, record, f"{name} is not the file that {path.name} describes")
        asked = {"format": cell.format, "request": json.loads(json.dumps(dict(cell.request)))}
        told = record.get("request", {})
        request = {**cell.unsaid, **told} if isinstance(told, dict) else told
        before = {"format": record.get("format"), "request": request}
        if content_hash(asked) != content_hash(before):
            return CellState(OTHER, record, f"made with other settings ({differences(before, asked)})")
        lacking = [name for name in cell.files if name not in record["files"]]
        if lacking:
            return CellState(ABSENT, record, f"{path.name} does not describe {lacking[0]}")
        return CellState(FINISHED, record)

    def read(self, cell: Cell) -> Record | None:
        return read_record(self._record_path(cell))

    def fill(
        self,
        cells: Sequence[Cell],
        make: Make,
        *,
        overwrite: bool = False,
        kept: Callable[[Cell], None] = lambda cell: None,
    ) -> dict[str, Record]:
        """The record of every cell by name: found (kept is told), or made now by make(making), which ends with commit.

        What another process is making comes last and is waited for. overwrite makes again what was finished before.
        """
        self.tidy()
        before = {cell.name: self.look(cell) for cell in cells}
        done: dict[str, Record] = {}
        for cell in () if overwrite else cells:  # a name that is taken is found before any work
            if (record := self._free_or_finished(cell, before[cell.name])) is not None:
                done[cell.name] = record
        self.expect_place([cell for cell in cells if cell.name not in done])
        records: dict[str, Record] = {}
        waiting = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell.mark)]
        for wait in (False, True):
            busy = []
            for group in waiting:
                if all(cell.name in done for cell in group):
                    for cell in group:
                        records[cell.name] = done[cell.name]
                        kept(cell)
                    continue
                with self._locked(group[0], wait=wait) as state:
                    if state == files.BUSY:
                        busy.append(group)
                        continue
                    for cell in group:
                        records[cell.name] = self._fill_one(cell, make, before[cell.name] if overwrite else None, kept)
            waiting = busy
        return {cell.name: records[cell.name] for cell in cells}

    def put(self, cell: Cell, record: Record, contents: Mapping[str, Content]) -> Record:
        """What is derived from other cells, in the place of what this store wrote there before."""
        self.expect_place([cell])
        with self._locked(cell), CellWriter(self, cell) as making:
            for name, content in contents.items():
                making.write(name, content)
            return making.commit(record)

    def load(self, record: Record, name: str) -> bytes:
        """A file of a finished cell, the very bytes its record describes."""
        path = files.within(self.folder, name)
        data = None if path is None else files.read_regular(path, follow=False)
        if data is None or hashlib.sha256(data).hexdigest() != record.get("files", {}).get(name):
            raise ValueError(
                f"out: expected {self.folder / name} as recorded, got another file; run again to have it remade."
            )
        return data

    def tidy(self) -> None:
        """Completes what stopped processes had decided and removes what they had begun; living ones are left alone."""
        removed = 0
        with files.explained(self.folder):
            for mark in sorted(files.leftovers(self.folder)) if self.folder.is_dir() else ():
                try:
                    with files.locked(self.folder, mark, wait=False) as state:
                        if state == files.HELD:
                            removed += self._recover(mark)
                except OSError as error:
                    # finished cells can be read where nothing can be written, or where no lock of ours stands (None)
                    if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, None):
                        raise
        if removed:
            self.say(f"{self.folder}: removed {removed} temporary file{'s' * (removed > 1)} of a stopped run")

    def expect_place(self, cells: Sequence[Cell]) -> None:
        """Fails before minutes are spent on a result that could not be saved."""
        if not cells:
            return
        paths = [self._target(name) for cell in cells for name in (self._record_path(cell).name, *cell.files)]
        folder = self.folder
        try:
            files.make_folder(folder)
            with files.locked(folder, files.mark_of("can this folder be written")):
                pass
            for folder in {path.parent for path in paths if os.path.lexists(path.parent)}:
                if (folder / ".").stat().st_dev != self.folder.stat().st_dev:  # a rename would not be atomic
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        except OSError as error:
            if error.errno is None:  # explained further in
                raise
            if error.errno in files.FULL:
                raise OSError(files.NO_ROOM.format(folder)) from None
            why = f"{folder} ({error.strerror})"
            raise OSError(f"out: expected a folder that can be written, got {why}; choose another place.") from None

    def _free_or_finished(self, cell: Cell, found: CellState) -> Record | None:
        if found.state == OTHER:
            there = f"{self._shown(cell)} {found.reason}"
            raise ValueError(f"out: expected a free name, got {there}; pass --overwrite, or another --out.")
        return found.record if found.state == FINISHED else None

    def _fill_one(self, cell: Cell, make: Make, before: CellState | None, kept: Callable[[Cell], None]) -> Record:
        """Under the cell's lock. before: what was there when an overwriting run began, None for one that keeps."""
        found = self.look(cell)
        if before is None:
            record = self._free_or_finished(cell, found)
        else:  # overwriting: another process may have made it again already
            fresh = found.state == FINISHED and found.record is not None
            record = found.record if fresh and found.record != before.record else None
        if record is not None:
            kept(cell)
            return record
        if found.reason and before is None:
            self.say(f"{self._shown(cell)}: {found.reason}; it is made again")
        with CellWriter(self, cell, overwrite=before is not None) as making:
            make(making)
            assert making.committed is not None, f"{cell.name} was not committed"
            return making.committed

    @contextlib.contextmanager
    def _locked(self, cell: Cell, *, wait: bool = True) -> Iterator[str]:
        waiting = lambda: self.say(f"{self._shown(cell)}: another process is making it; waiting for it")  # noqa: E731
        with contextlib.ExitStack() as stack:
            with files.explained(self._record_path(cell)):
                state = stack.enter_context(files.locked(self.folder, cell.mark, wait=wait, waiting=waiting))
                if state == files.UNSUPPORTED:
                    self.say(f"{self.folder}: its file system has no locks; let one process at a time work in it")
                if state != files.BUSY:
                    self._recover(cell.mark)
                    if (journal := files.journal_path(self.folder, cell.mark)).is_dir():
                        raise OSError(
                            f"out: expected no folder at {journal}, got one; remove it, or choose another place."
                        )
            yield state

    def _recover(self, mark: str) -> int:
        """Under the mark's lock: its journal is carried out, other temporary files are removed; how many."""
        path = files.journal_path(self.folder, mark)
        journal = read_record(path) or {}
        names: dict[str, str] = journal.get("files", {}) if journal.get("format") == JOURNAL else {}
        lying: dict[str | None, list[Path]] = {}
        for temporary in files.temporaries(self.folder, mark) if names else ():
            lying.setdefault(files.sha256_of(temporary, follow=False), []).append(temporary)
        missing = {name: sha256 for name, sha256 in names.items() if self._sha256(name) != sha256}
        sources = {name: lying[sha256].pop() for name, sha256 in missing.items() if lying.get(sha256)}
        if names and sources.keys() == missing.keys() and all(files.within(self.folder, name) for name in names):
            self._put_in_place(names, sources, journal.get("of"))
            self.say(f"{self.folder / list(names)[-1]}: completed from what a stopped run had left")
        files.remove(path)
        return files.remove_temporaries(self.folder, mark)

    def _put_in_place(
        self, hashes: Mapping[str, str], sources: Mapping[str, Path], kind: Any, overwrite: bool = False
    ) -> None:
        """The record is last. What stands there and was not written by the store is kept aside. Can be repeated."""
        record = list(hashes)[-1]
        before = read_record(self._target(record)) or {}
        ours = before.get("older", {}) | before.get("files", {})
        if before and before.get("format") == kind:
            ours[record] = self._sha256(record)
        targets = {name: self._target(name) for name in sources}
        folders = {target.parent for target in targets.values()}
        for folder in folders:
            files.make_folder(folder)
        for name, target in targets.items():
            known = self._sha256(name) in {ours.get(name), hashes[name]} - {None}  # None for what is no ordinary file
            if os.path.lexists(target) and (target.is_dir() or not (known or overwrite)):
                other = files.free_name_beside(target)
                files.move(target, other)
                files.sync_folder(target.parent)
                self.say(f"{target}: not written by this store, or changed since; it is kept as {other.name}")
        for name, source in sources.items():
            files.move(source, targets[name])
        for folder in folders:
            files.sync_folder(folder)

    def _target(self, name: str) -> Path:
        """Where a file of this store goes."""
        path = self.folder / name
        try:
            path.lstat()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                got = f"{path.name} of {len(os.fsencode(path.name))} bytes"
                raise ValueError(f"out: expected a name that fits here, got {got}; shorten it.") from None
        if files.within(self.folder, name) is None:
            got = f"{path}, where a link or a file is in the way"
            raise ValueError(
                f"out: expected a place inside {self.folder}, got {got}; remove it, or choose another place."
            )
        return path

    def _sha256(self, name: str) -> str | None:
        """Of an ordinary file below the folder."""
        path = files.within(self.folder, name)
        return None if path is None else files.sha256_of(path, follow=False)

    def _record_path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def _shown(self, cell: Cell) -> Path:
        return self.folder / cell.files[0] if cell.files else self._record_path(cell)


class CellWriter:
    """One cell while it is made: files under temporary names until commit, nothing of them left without it."""

    def __init__(self, store: Store, cell: Cell, *, overwrite: bool = False) -> None:
        self.store, self.cell, self.overwrite = store, cell, overwrite
        self.hashes: dict[str, str] = {}
        self.committed: Record | None = None
        self._temporary: dict[str, Path] = {}

    def __enter__(self) -> CellWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.committed is None:
            for path in self._temporary.values():
                files.remove(path)

    def write(self, name: str, content: Content) -> None:
        """One of the cell's files, durable under a temporary name."""
        assert name in self.cell.files, name
        with files.explained(self.store.folder / name):
            path = self._temporary[name] = files.temporary_path(self.store.folder, self.cell.mark)
            if isinstance(content, bytes):
                files.write_new(path, content)
                self.hashes[name] = hashlib.sha256(content).hexdigest()
            else:
                content(path)
                files.sync_file(path)
                self.hashes[name] = files.sha256_of(path) or ""

    def commit(self, record: Record) -> Record:
        """The cell is finished once this has returned; the record as it was written."""
        assert set(self.hashes) == set(self.cell.files), f"{self.cell.name} has {set(self.hashes)}"
        folder, mark = self.store.folder, self.cell.mark
        target = folder / f"{self.cell.name}.json"
        record = sealed(record | {"cell": self.cell.hash, "files": self.hashes} | self._older(target))
        with files.explained(target):
            data = json.dumps(record, indent=1).encode()
            source = self._temporary[target.name] = files.temporary_path(folder, mark)
            files.write_new(source, data)
            hashes = self.hashes | {target.name: hashlib.sha256(data).hexdigest()}
            sources = {name: self._temporary[name] for name in hashes}
            journal = files.journal_path(folder, mark)
            if len(hashes) > 1:  # one rename is whole by itself
                path = self._temporary["journal"] = files.temporary_path(folder, mark)
                files.write_new(
                    path, json.dumps(sealed({"format": JOURNAL, "of": record.get("format"), "files": hashes})).encode()
                )
                files.move(path, journal)
                self.committed = record
                files.sync_folder(folder)
            self.store._put_in_place(hashes, sources, record.get("format"), self.overwrite)
            self.committed = record
            files.remove(journal)
        return record

    def _older(self, path: Path) -> Record:
        """What earlier records of this name listed and this one does not: still the store's own to replace."""
        before = read_record(path) or {}
        known = before.get("older", {}) | before.get("files", {})
        older = {name: sha256 for name, sha256 in known.items() if name not in self.hashes}
        return {"older": older} if older and before.get("format") == self.cell.format else {}
