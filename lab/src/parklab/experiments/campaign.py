"""Campaign files: finished cells of a folder as JSON lines, one sealed record each, in the order of their keys.

Cells that have files of their own (videos, captures) stay in their folder: a line holds a record alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parklab.experiments.evaluation import FORMATS, at_density
from parklab.experiments.record_fields import LARGEST_FILE, fault_of_cell
from parklab.files import read_regular, write_atomically
from parklab.store import Cell, Record, Say, Store, content_hash, read_record, record_in

FORMAT = "parkattn.reproduce."  # what the formats of all cells begin with


class CampaignStore(Store):
    """A folder of cells, and cells of campaign files beside it, which count as finished; new ones go to the folder."""

    def __init__(
        self, folder: Path, say: Say = lambda line: None, below: str = "", records: Iterable[Path] = ()
    ) -> None:
        """records: files of JSON lines, some of them campaign files."""
        super().__init__(folder, say, below)
        self.packed = {
            key: record for path in records if is_campaign(path) for key, record in read_campaign(path).items()
        }

    def read(self, cell: Cell) -> Record | None:
        own = super().read(cell)
        if own is not None and _is_cell(own) and content_hash(own["request"]) == cell.hash and fault_of_cell(own):
            own = None  # the folder may come from others
        return own or self.packed.get(key_of(cell.format, cell.request))

    def records(self, kind: str = "*") -> dict[str, Record]:
        """By key: all of one kind, those of the folder before those of campaign files."""
        there = (read_record(path) for path in sorted(self.folder.glob(f"{kind}-*.json")))
        sound = [each for each in there if each is not None and _is_cell(each) and not fault_of_cell(each)]
        own = {key_of(each["format"], each["request"]): each for each in sound}
        packed = {key: each for key, each in self.packed.items() if kind == "*" or each["format"] == FORMATS[kind]}
        return packed | own

    def pack(self, path: Path) -> tuple[int, int]:
        """Writes a campaign file; how many cells it holds, and how many stay behind with files of their own."""
        found = self.records()
        alone = {key: record for key, record in found.items() if not record["files"]}
        if not alone:
            raise ValueError(
                f"out: expected finished cells in {self.folder}, got none that are records alone; run some first."
            )
        lines = (json.dumps(record, separators=(",", ":"), ensure_ascii=False) for _, record in sorted(alone.items()))
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
        return len(alone), len(found) - len(alone)


def read_campaign(path: Path) -> dict[str, Record]:
    """By key, in the order of keys; one line that is not as it was sealed, or that no table can read, refuses the
    file.
    """
    found: dict[str, Record] = {}
    for number, line in enumerate((read_regular(path, LARGEST_FILE) or b"").splitlines(), 1):
        record = record_in(line)
        fault = "is another" if record is None or not _is_cell(record) else fault_of_cell(record)
        if record is None or fault:
            wanted = f"records: expected a sealed cell in line {number} of {path}"
            raise ValueError(f"{wanted}, got one that {fault}; restore the file.")
        found[key_of(record["format"], record["request"])] = record
    if not found:
        raise ValueError(f"records: expected cells of park reproduce --pack in {path}, got none; check the path.")
    return found


def is_campaign(path: Path) -> bool:
    """By its first line."""
    try:
        first = json.loads((read_regular(path, LARGEST_FILE) or b"").partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and _is_cell(first)


def key_of(cell_format: str, asked: Mapping[str, Any]) -> str:
    """Kind, method or profile, density, hash of all that was asked: as in the names of cells."""
    kind, label = cell_format.split(".")[-2], asked.get("profile") or asked.get("method") or ""
    at = at_density(asked.get("density"))
    return f"{kind}-{label.replace(' ', '-')}{at}-{content_hash([cell_format, asked])[:16]}"


def _is_cell(record: Record) -> bool:
    return str(record.get("format")).startswith(FORMAT) and isinstance(record.get("request"), dict)
