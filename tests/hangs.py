"""An end for what would block for ever."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

SECONDS = 60  # for one call: far above what any takes, so that only a hang meets it


class HangError(BaseException):
    """No command may take it for an error of its own."""


@contextlib.contextmanager
def no_hang(seconds: int = SECONDS) -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise HangError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
