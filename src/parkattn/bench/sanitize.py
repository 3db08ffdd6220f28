"""Every kernel at small sizes under the tools that look for stray accesses, misused barriers and races.

    park bench sanitize --record FILE

compute-sanitizer, of the CUDA toolkit, watches all kernels: memcheck, synccheck, racecheck. What racecheck reports on the two
warp-specialised kernels, whose warps hand data to each other through mbarriers, is recorded apart, and those kernels are given to
ConSan as well, Triton's own sanitizer, which knows mbarriers, copies by TMA and asynchronous products. That ConSan sees a race where there is one
is checked on a copy of the PAMA kernel that lacks a wait.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from parkattn.bench import attend, kmeans, pama, qrkc
from parkattn.bench.problems import Case, Shape
from parkattn.bench.timing import gpu_environment

SECTIONS = ("sanitize", "consan-pama", "consan-attend", "consan-control")
ALL_RAN = "all checks ran"  # what a watched process says last
WARP_SPECIALISED = "kns=hopper"  # both have it in their names
WAIT = "            mbarrier.wait(c_full.index(g % STAGES), (g // STAGES) & 1)\n"
REGISTERS = "[240, 24]"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*?(\d+) error")
ASSERTION = re.compile(r"Assertion `(.*?)` failed")
PLACE = re.compile(r"(?:access at|at) (\w+)\+0x\w+ in (\w+\.py:\d+)")
CONSAN = {"TRITON_INSTRUMENTATION_MODE": "consan"}
COMPUTE_SANITIZER = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclass(frozen=True)
class Round:
    """One run of one tool. must: what it has to find: "nothing", "something", or None where its reports are kept as they are."""

    section: str = "sanitize"
    options: tuple[str, ...] = ()  # of compute-sanitizer
    variables: dict[str, str] = field(default_factory=dict)
    must: str | None = "nothing"


ROUNDS = {
    "memcheck": Round(options=("--tool", "memcheck"), variables=COMPUTE_SANITIZER),
    "synccheck": Round(options=("--tool", "synccheck"), variables=COMPUTE_SANITIZER),
    "racecheck": Round(options=("--tool", "racecheck", "--kernel-name-exclude", WARP_SPECIALISED), variables=COMPUTE_SANITIZER),
    "racecheck, warp-specialised kernels": Round(
        options=("--tool", "racecheck", "--kernel-name", WARP_SPECIALISED), variables=COMPUTE_SANITIZER, must=None
    ),
    "ConSan, PAMA": Round("consan-pama", variables=CONSAN),
    "ConSan, attention": Round("consan-attend", variables=CONSAN),
    "ConSan, PAMA without a wait": Round("consan-control", variables=CONSAN, must="something"),
}


def checks(section: str, device: torch.device) -> Iterator[Case]:
    """In the process that a tool watches: gates, so that what was watched is also right."""
    if section != "sanitize":
        importlib.import_module("parkattn.kernels").keep_scratch_in_torch()
        _share_registers(forget_a_wait=section == "consan-control")
    # PyTorch's own fused attention reads past the end of a mask: the definitions must not use it under a sanitizer
    with sdpa_kernel(SDPBackend.MATH):
        if section == "sanitize":
            for gate in (pama.gate, kmeans.gate, qrkc.gate, attend.gate):
                yield from gate(device, rehearse=True)
        elif section == "consan-attend":
            yield from attend.gate(device, rehearse=True, kernels=["gluon"])
        else:
            # several tiles per block, and two chunks of keys: more of them take minutes to compile
            yield from pama.gate(device, rehearse=True, shapes=[(Shape(2, 600, 3, 200, 128), torch.bfloat16)], only="Full-K")
    sys.stdout.write(f"{ALL_RAN}\n")


def run_rounds(only: list[str] | None = None, limit_s: float = 600) -> Iterator[dict[str, Any]]:
    """A record per tool. All run at once, since nothing is timed."""
    if shutil.which("compute-sanitizer") is None:
        raise ValueError("park bench sanitize: expected compute-sanitizer on the PATH, got none; install the CUDA toolkit.")
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder, f"{i}.log") for i, name in enumerate(only or ROUNDS)}
        started = {name: _start(ROUNDS[name], log) for name, log in logs.items()}
        facts, ends = gpu_environment(), time.monotonic() + limit_s
        for name, process in started.items():
            late = ""
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late = "out of time"
            printed = logs[name].read_text(encoding="utf-8", errors="replace") + late
            yield {"benchmark": "sanitize", **judge(name, printed), "environment": facts}


def judge(name: str, printed: str) -> dict[str, Any]:
    """What a tool found, from what it printed."""
    wanted, summary, found = ROUNDS[name], SUMMARY.search(printed), sorted(set(ASSERTION.findall(printed)))
    failed, passed = (printed.count(f'"ok": {word}') for word in ("false", "true"))
    errors: int | None = len(found)  # ConSan stops the program at the first thing it finds, and says so in every thread
    if wanted.options:
        errors = int(summary[1]) if summary else None
    # compute-sanitizer's own status hides the program's, and its summary comes also after a program that died
    finished = errors is not None and "out of time" not in printed and ALL_RAN in printed
    ok = finished and failed == 0 and (errors == 0 or wanted.must != "nothing")
    if wanted.must == "something":
        finished = ok = bool(errors)
    places = sorted({f"{kernel} {place}" for kernel, place in PLACE.findall(printed)})
    last = "" if finished else printed[-1500:]
    return {"tool": name, "ok": ok, "errors": errors, "must_find": wanted.must, "checks_passed": passed, "checks_failed": failed,
            "found": found or places, **({"stopped": last} if last else {})}  # fmt: skip


def _start(wanted: Round, log: Path) -> subprocess.Popen[bytes]:
    out = log.with_suffix("")
    command = [sys.executable, "-m", "parkattn.bench.gpu", "--out", str(out), "--section", wanted.section]
    if wanted.options:
        command = ["compute-sanitizer", "--error-exitcode", "99", *wanted.options, *command]
    variables = {**os.environ, **wanted.variables, "TRITON_CACHE_DIR": str(out / "cache")}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables)


def _share_registers(*, forget_a_wait: bool) -> None:
    """Kernels of this process as ConSan can watch them: its checks need more registers than the warp that copies is left with.

    forget_a_wait: and PAMA reads centroids that may not have arrived.
    """
    tiles = importlib.import_module("parkattn.kernels.tiles_attend")
    kernel: Any = importlib.import_module("parkattn.kernels.attend_gluon")
    kernel.gluon_tile = lambda d: tiles.GluonTile(producer_registers=168)
    # the fewest slots there are: each takes a quarter of a minute to compile
    tiles_of_pama: Any = importlib.import_module("parkattn.kernels.tiles_retrieval")
    tiles_of_pama.full_key_tile = lambda *_: {"GLUON": True, "stages": 2}
    name = "parkattn.kernels.importance_hopper"
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    for old, new in {REGISTERS: "[168, 168]", **({WAIT: ""} if forget_a_wait else {})}.items():
        if source.count(old) != 1:
            raise RuntimeError(
                f"{name}: expected {old.strip()!r} once, got it {source.count(old)} times; bring it into line with the kernel."
            )
        source = source.replace(old, new)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # Triton reads a kernel's source when it compiles it
    copy = Path(folder, "importance_hopper.py")
    copy.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, copy)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
