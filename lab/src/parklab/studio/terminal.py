"""What a video command shows while it works: a bar of steps, lines, and on stderr what takes long before the first
bar.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable

    from parklab.studio.generate import StepReport

console = Console(markup=False, emoji=False)  # prompts, paths and names are text
LONG = 1.5  # seconds of silence after which a user asks whether anything happens


class WaitingNotice:
    """One stage at a time: what it is, on stderr, once it has taken LONG seconds; nothing where it is over sooner."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def begin(self, stage: str) -> None:
        self.end()
        self._timer = threading.Timer(LONG, tell, (f"{stage} ...",))
        self._timer.daemon = True  # a command that ends meanwhile does not wait for it
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextlib.contextmanager
def waiting(stage: str) -> Iterator[None]:
    wait = WaitingNotice()
    wait.begin(stage)
    try:
        yield
    finally:
        wait.end()


class StepBars:
    """A line per video, which begins with its first step, so that a command which refuses leaves no empty one."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:14}", markup=False),
            BarColumn(),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}  {task.fields[state]:24}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._waiting = WaitingNotice()
        self.stage = self._waiting.begin

    def begin(self, title: str) -> Callable[[StepReport], None]:
        """What this returns moves the bar."""
        task: TaskID | None = None

        def move(report: StepReport) -> None:
            nonlocal task
            self._waiting.end()
            state = "done" if report.phase == "done" else f"{report.phase}, density {report.density:.0%}"
            if task is None:
                self._progress.start()
                task = self._progress.add_task(title, total=report.total, state=state)
            self._progress.update(task, completed=report.step, total=report.total, state=state)

        return move

    def close(self) -> None:
        self._waiting.end()
        if self._progress.tasks:
            self._progress.stop()


@contextlib.contextmanager
def step_bars() -> Iterator[StepBars]:
    bars = StepBars()
    try:
        yield bars
    finally:
        bars.close()


def say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def warn(line: str | None) -> None:
    if line:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """On stderr, beside the results."""
    Console(stderr=True, emoji=False).print(f"park: {line}", style="dim", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def interruptible(left: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped; {left}")
        raise typer.Exit(130) from None
