"""Processes that get ready together and measure one at a time: compiling takes minutes of CPU, a measurement wants the
GPU alone.

    park bench e2e --record FILE [--full] [--budget SECONDS] [--only gate --only wan2.1-14b ...] [--profile fast]

A hang or a CUDA error costs one model. Every figure is in FILE as soon as it is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from parkattn.checks import expect_choice
from parklab.bench.e2e import MODELS, ROOM_FOR_ALL, SECTIONS, SectionOptions, run_section
from parklab.bench.e2e_profile import BASELINES
from parklab.bench.timing import bench_device
from parklab.record import read_records

READY = "ready"


def run_all(
    record: Path, options: SectionOptions, *, only: list[str] | None = None, budget_s: float = 1200
) -> dict[str, str]:
    """Section -> "passed", "failed" or "out of time". After a failed gate nothing is measured."""
    ends = time.monotonic() + budget_s
    names = only or list(SECTIONS)
    for name in names:
        expect_choice("only", name, (*SECTIONS, *MODELS))
    together = bench_device().type != "cuda" or torch.cuda.mem_get_info()[1] >= ROOM_FOR_ALL
    chosen = json.dumps(asdict(options))

    def start(name: str) -> _Section:
        return _Section(name, [sys.executable, "-m", "parklab.bench.e2e_turns", name, str(record), chosen])

    sections = {name: start(name) for name in names} if together else {}
    outcome: dict[str, str] = {}
    try:
        followers = [threading.Thread(target=section.get_ready, args=(ends,)) for section in sections.values()]
        for follower in followers:  # all at once, so that every line is shown when it is written
            follower.start()
        for follower in followers:
            follower.join()
        for name in names:
            section = sections.get(name) or start(name)
            sections[name] = section
            outcome[name] = section.take_turn(ends)
            _say(f"{name}: {outcome[name]}, {ends - time.monotonic():.0f} s left")
            if name == "gate" and outcome[name] != "passed":
                break
    finally:
        for section in sections.values():
            section.end()
    return outcome


def run_and_tabulate(
    record: Path | None, options: SectionOptions, **limits: Any
) -> tuple[dict[str, str], list[list[str]]]:
    """run_all, and the rows of columns_of(options) that this run (not an earlier one in the same file) came to."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines.jsonl") if record is None else record
        before = len(read_records(lines))
        outcome = run_all(lines, options, **limits)
        return outcome, _rows_of(options)(read_records(lines)[before:])


class _Section:
    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.ready = False
        self.killed = False
        self._began = time.monotonic()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def get_ready(self, ends: float) -> None:
        self._follow(ends, until_ready=True)

    def take_turn(self, ends: float) -> str:
        if not self.ready:
            self.get_ready(ends)
        if self.ready:
            stdin = self._process.stdin
            assert stdin is not None
            stdin.write(f"{ends - time.monotonic()}\n")
            stdin.flush()
            self._follow(ends, until_ready=False)
        return "passed" if self._process.wait() == 0 else "out of time" if self.killed else "failed"

    def end(self) -> None:
        with self._process:  # closes its pipes and waits
            if self._process.poll() is None:
                self._process.kill()

    def _follow(self, ends: float, *, until_ready: bool) -> None:
        alarm = threading.Timer(max(0.0, ends - time.monotonic()), self._kill)
        alarm.start()
        stdout: IO[str] | None = self._process.stdout
        assert stdout is not None
        try:
            for line in stdout:
                if until_ready and line.strip() == READY:
                    self.ready = True
                    _say(f"{self.name}: ready after {time.monotonic() - self._began:.0f} s")
                    return
                _say(f"{self.name}: {line.rstrip()}")
        finally:
            alarm.cancel()

    def _kill(self) -> None:
        self.killed = True
        self._process.kill()


COLUMNS = (
    "model", "density", "dense s", "refresh s", "warm s", "reuse s", "not fused",
    "50 steps", "saved s", "dense GB", "PARK GB", "plans GB",
)  # fmt: skip
PROFILE_COLUMNS = (
    "model", "profile", "density", "dense s", "compiled", "own s", "cold s", "warm s",
    "reuse s", "anchors", "x stock", "x compiled", "x own", "state GB",
)  # fmt: skip
FLOAT8_COLUMNS = (
    "model", "linears", "density", "dense s", "compiled", "refresh s", "reuse s", "of bf16",
    "attention", "products", "rest", "weights GB", "dense GB", "PARK GB",
)  # fmt: skip
BITS_COLUMNS = (
    "model", "linears", "attention", "density", "stock s", "compiled", "own s", "cold s", "warm s", "reuse s",
    "fast x stock", "x compiled", "quality x stock", "state GB", "peak GB",
)  # fmt: skip
Lines = list[dict[str, Any]]


def columns_of(options: SectionOptions) -> tuple[str, ...]:
    if options.precision != "bf16":
        return BITS_COLUMNS
    if options.float8:
        return FLOAT8_COLUMNS
    return COLUMNS if options.profile == "paper" else PROFILE_COLUMNS


def _rows_of(options: SectionOptions) -> Callable[[Lines], list[list[str]]]:
    rows = {COLUMNS: table_rows, PROFILE_COLUMNS: profile_rows, FLOAT8_COLUMNS: float8_rows, BITS_COLUMNS: bits_rows}
    return rows[columns_of(options)]


def table_rows(lines: Lines) -> list[list[str]]:
    """A row of COLUMNS per model; plans are those of both branches of guidance."""
    names = ("dense_s", "refresh_cold_s", "refresh_warm_s", "reuse_s", "reuse_unfused_s")
    return [
        [_model(line), f"{line['density']:.3f}", *_shown(line, names), f"{line['run']['speedup']:.2f}x",
         f"{line['run']['saved_s']:.1f}", *_shown(line["memory"], ("dense_peak_gb", "park_peak_gb"), ".1f"),
         *_shown(line["memory"], ("state_with_guidance_gb",))]
        for line in _measured(lines, "e2e")
    ]  # fmt: skip


def bits_rows(lines: Lines) -> list[list[str]]:
    """A row of BITS_COLUMNS per model, linears and precision."""
    rows = []
    for line in _measured(lines, "e2e bits"):
        fast, quality = (line["runs"].get(name, {"speedup": {}})["speedup"] for name in ("fast", "quality"))
        rows.append([
            line["model"], line["linears"], line["precision"], f"{line['density']:.3f}",
            *_shown(line["baselines"], ("stock", "compiled")),
            *_shown(line, ("own_dense_s", "anchor_cold_s", "anchor_warm_s", "reuse_s")),
            *_shown(fast, ("stock", "compiled"), unit="x"), *_shown(quality, ("stock",), unit="x"),
            *_shown(line["memory"], ("state_with_guidance_gb",)), *_shown(line["memory"], ("park_peak_gb",), ".1f"),
        ])  # fmt: skip
    return rows


def profile_rows(lines: Lines) -> list[list[str]]:
    """A row of PROFILE_COLUMNS per model and profile: its forwards, and 50 steps against three ways to run them dense.

    cold and warm: the forward that builds a plan, an anchor or the paper preset's refresh.
    """
    rows = []
    for line in _measured(lines, "e2e profile"):
        memory = line["memory"]
        for profile, run in sorted(line["runs"].items()):
            anchored = "anchor" in run["steps"]
            plain = ("refresh_cold_s", "refresh_warm_s", "plain_reuse_s")
            kinds = ("anchor_cold_s", "anchor_warm_s", "reuse_s") if anchored else plain
            won = _shown(run["speedup"], BASELINES, unit="x")
            won[0] += f", bar {line['speed_bar']}" if won[0] and line["speed_bar"] and profile == "fast" else ""
            state = f"{memory['state_with_guidance_gb' if anchored else 'plans_with_guidance_gb']:.2f}"
            state += f" of {memory['state_bar_gb']:g}" if memory["state_bar_gb"] else ""
            rows.append([
                _model(line), profile, f"{line['density' if anchored else 'plain_density']:.3f}",
                *_shown(line["baselines"], BASELINES), *_shown(line, kinds), str(run["steps"].get("anchor", "")), *won,
                state,
            ])  # fmt: skip
    return rows


def float8_rows(lines: Lines) -> list[list[str]]:
    """A row of FLOAT8_COLUMNS per model and kind of linears; attention, products and rest are parts of a reuse
    forward's kernels.
    """
    rows = []
    for line in _measured(lines, "e2e float8"):
        ratio = line.get("of_bfloat16")
        rows.append([
            line["model"], line["linears"], f"{line['density']:.3f}",
            *_shown(line, ("dense_s", "dense_compiled_s", "refresh_warm_s", "reuse_s")),
            "" if ratio is None else f"{ratio['reuse_s']:.2f}, bar {line['bar']['reuse_s']}",
            *_shown(line["split"]["reuse"], ("attention_s", "linears_s", "rest_s")),
            *_shown(line["memory"], ("weights_gb", "dense_peak_gb", "park_peak_gb"), ".1f"),
        ])  # fmt: skip
    return rows


def _measured(lines: Lines, benchmark: str) -> Lines:
    return [line for line in lines if line.get("benchmark") == benchmark]


def _model(line: dict[str, Any]) -> str:
    return line["model"] + (", compiled" if line.get("compiled") else "")


def _shown(values: dict[str, Any], names: tuple[str, ...], form: str = ".2f", unit: str = "") -> list[str]:
    """Nothing where a value is absent."""
    return ["" if values.get(name) is None else f"{values[name]:{form}}{unit}" for name in names]


def wait_for_turn() -> float:
    """In a section's process: the seconds it is given."""
    _say(READY)
    given = sys.stdin.readline()
    if not given:
        sys.exit("nobody gives turns any more")
    return float(given)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    section, lines, given = sys.argv[1:]  # as `run_all` starts it
    run_section(section, Path(lines), SectionOptions(**json.loads(given)), turn=wait_for_turn)
