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


def table_rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """A row of COLUMNS per model; plans are those of both branches of guidance."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else f"{value:{form}}"

    rows = []
    for line in lines:
        if line.get("benchmark") == "e2e":
            run, memory = line["run"], line["memory"]
            times = [
                f"{line[name]:.2f}"
                for name in ("dense_s", "refresh_cold_s", "refresh_warm_s", "reuse_s", "reuse_unfused_s")
            ]
            peaks = [shown(memory[name], ".1f") for name in ("dense_peak_gb", "park_peak_gb")]
            saved = [f"{run['speedup']:.2f}x", f"{run['saved_s']:.1f}"]
            name = line["model"] + (", compiled" if line.get("compiled") else "")
            rows.append(
                [name, f"{line['density']:.3f}", *times, *saved, *peaks, f"{memory['state_with_guidance_gb']:.2f}"]
            )
    return rows


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


def bits_rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """A row of BITS_COLUMNS per model, linears and precision."""
    rows = []
    for line in lines:
        if line.get("benchmark") == "e2e bits":
            names = ("own_dense_s", "anchor_cold_s", "anchor_warm_s", "reuse_s")
            seconds = [line["baselines"].get(way) for way in ("stock", "compiled")] + [line[name] for name in names]
            fast, quality = (line["runs"].get(name, {"speedup": {}})["speedup"] for name in ("fast", "quality"))
            won = fast.get("stock"), fast.get("compiled"), quality.get("stock")
            peak = line["memory"]["park_peak_gb"]
            rows.append([
                line["model"], line["linears"], line["precision"], f"{line['density']:.3f}",
                *("" if s is None else f"{s:.2f}" for s in seconds), *("" if x is None else f"{x:.2f}x" for x in won),
                f"{line['memory']['state_with_guidance_gb']:.2f}", "" if peak is None else f"{peak:.1f}",
            ])  # fmt: skip
    return rows


def columns_of(options: SectionOptions) -> tuple[str, ...]:
    if options.precision != "bf16":
        return BITS_COLUMNS
    if options.float8:
        return FLOAT8_COLUMNS
    return COLUMNS if options.profile == "paper" else PROFILE_COLUMNS


def _rows_of(options: SectionOptions) -> Callable[[list[dict[str, Any]]], list[list[str]]]:
    rows = {COLUMNS: table_rows, PROFILE_COLUMNS: profile_rows, FLOAT8_COLUMNS: float8_rows, BITS_COLUMNS: bits_rows}
    return rows[columns_of(options)]


def profile_rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """A row of PROFILE_COLUMNS per model and profile: its forwards, and 50 steps against three ways to run them dense.

    cold and warm: the forward that builds a plan, an anchor or the paper preset's refresh.
    """

    def each(values: dict[str, float], unit: str = "") -> list[str]:
        return [f"{values[way]:.2f}{unit}" if way in values else "" for way in BASELINES]

    rows = []
    for line in lines:
        if line.get("benchmark") == "e2e profile":
            memory, name = line["memory"], line["model"] + (", compiled" if line["compiled"] else "")
            for profile, run in sorted(line["runs"].items()):
                anchored = "anchor" in run["steps"]
                kinds = (
                    ("anchor_cold_s", "anchor_warm_s", "reuse_s")
                    if anchored
                    else ("refresh_cold_s", "refresh_warm_s", "plain_reuse_s")
                )
                won = each(run["speedup"], "x")
                won[0] += f", bar {line['speed_bar']}" if won[0] and line["speed_bar"] and profile == "fast" else ""
                state = f"{memory['state_with_guidance_gb' if anchored else 'plans_with_guidance_gb']:.2f}"
                state += f" of {memory['state_bar_gb']:g}" if memory["state_bar_gb"] else ""
                density = f"{line['density' if anchored else 'plain_density']:.3f}"
                times = [f"{line[kind]:.2f}" for kind in kinds]
                rows.append(
                    [
                        name,
                        profile,
                        density,
                        *each(line["baselines"]),
                        *times,
                        str(run["steps"].get("anchor", "")),
                        *won,
                        state,
                    ]
                )
    return rows


def float8_rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """A row of FLOAT8_COLUMNS per model and kind of linears; attention, products and rest are parts of a reuse
    forward's kernels.
    """
    rows = []
    for line in lines:
        if line.get("benchmark") == "e2e float8":
            memory, part, ratio = line["memory"], line["split"]["reuse"], line.get("of_bfloat16")
            times = [f"{line[name]:.2f}" for name in ("dense_s", "dense_compiled_s", "refresh_warm_s", "reuse_s")]
            won = "" if ratio is None else f"{ratio['reuse_s']:.2f}, bar {line['bar']['reuse_s']}"
            parts = [f"{part[name]:.2f}" for name in ("attention_s", "linears_s", "rest_s")]
            peaks = [
                "" if memory[name] is None else f"{memory[name]:.1f}"
                for name in ("weights_gb", "dense_peak_gb", "park_peak_gb")
            ]
            rows.append([line["model"], line["linears"], f"{line['density']:.3f}", *times, won, *parts, *peaks])
    return rows


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
