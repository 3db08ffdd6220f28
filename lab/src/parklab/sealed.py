"""Records that are sealed by a hash of themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parklab import files

Record = dict[str, Any]
RECORD_LIMIT = 2**26  # bytes; a page of a hundred prompts and six methods comes near it


def content_hash(value: Any) -> str:
    """Equal for equal JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict).encode()).hexdigest()


def sealed(record: Mapping[str, Any]) -> Record:
    """The record as JSON holds it, with the hash of all the rest of it."""
    plain = json.loads(json.dumps({name: value for name, value in record.items() if name != "hash"}))
    return {**plain, "hash": content_hash(plain)}


def read_record(path: Path) -> Record | None:
    """A record that this store sealed and nobody has changed; None for anything else."""
    return record_in(files.read_regular(path, RECORD_LIMIT, follow=False))


def record_in(data: bytes | None) -> Record | None:
    try:
        record = json.loads(data) if data is not None else None
        if not isinstance(record, dict) or sealed(record)["hash"] != record.get("hash"):
            return None
    except (ValueError, RecursionError):
        return None
    listed = [record.get("files"), record.get("older", {})]
    return record if all(isinstance(names, dict) and all(map(_is_entry, names.items())) for names in listed) else None


def _is_entry(entry: tuple[str, Any]) -> bool:
    """A name below a folder, and a hash. Hidden folders (.git) and the store's own names are no place for a result."""
    *folders, last = entry[0].split("/")
    hidden = any(part.startswith(".") for part in folders) or last.startswith(files.OWN)
    return not hidden and not {"", ".", ".."} & {*folders, last} and isinstance(entry[1], str)


def differences(before: Record, asked: Record) -> str:
    """For people: a setting that is not there is not the same as null."""
    old, new = ({name: json.dumps(value) for name, value in flatten(each).items()} for each in (before, asked))
    names = [name for name in dict.fromkeys((*new, *old)) if old.get(name) != new.get(name)]
    shown = [
        f"{name.removeprefix('request.')} = {old.get(name, 'not set')}, asked {new.get(name, 'not set')}"
        for name in names
    ]
    return "; ".join(shown) or "another request"


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by points: {"a": {"b": 1}} is {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for name, part in value.items():
        flat |= flatten(part, f"{prefix}{name}.") if isinstance(part, Mapping) else {f"{prefix}{name}": part}
    return flat
