"""Files that are whole or absent."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """The file appears whole or not at all, also when the disk is full."""
    temporary = path.with_name(f".parkattn-{os.urandom(8).hex()}.tmp")
    try:
        if path.exists() and not path.is_file():  # a rename would put a file in the place of a device or a FIFO
            raise OSError(0, "no ordinary file")
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"path: expected to write {path}, got {error.strerror}; choose another place.") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
