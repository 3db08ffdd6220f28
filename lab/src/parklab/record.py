"""Where and with what a number was measured, and keeping it: one JSON line per result."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from parklab.files import append, explained, make_folder, read_regular


def environment() -> dict[str, Any]:
    """Hardware, versions and commit: what a figure needs beside it to be believed."""
    facts: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "parkattn": installed("parkattn") or "not installed",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def append_records(path: Path, records: list[dict[str, Any]]) -> None:
    """One JSON line each, all of them or none."""
    with explained(path):
        make_folder(path.parent)
        append(path, b"".join(json.dumps(record, sort_keys=True).encode() + b"\n" for record in records))


def read_records(path: Path) -> list[dict[str, Any]]:
    """What append_records wrote; a line that a stopped process tore is skipped, a file that is not there has none."""
    found = []
    for line in (read_regular(path, 2**28) or b"").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def installed(package: str) -> str | None:
    """Its version; None where it is not installed, or runs from a source tree on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the source tree this runs from; None when installed from a wheel. A copy without git is told by
    PARKATTN_COMMIT.
    """
    told = os.environ.get("PARKATTN_COMMIT")
    if told:
        return told
    root = Path(__file__).resolve().parents[3]

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, env=plain, capture_output=True, text=True, check=True
        ).stdout.strip()

    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        # a copy of the package may lie inside another repository, whose commit says nothing about it
        ours = 'name = "parkattn"' in (root / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        return (
            ask("describe", "--always", "--dirty")
            if ours and Path(ask("rev-parse", "--show-toplevel")) == root
            else None
        )
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()
