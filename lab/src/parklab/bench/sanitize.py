"""Every kernel at small sizes under the tools that look for stray accesses, misused barriers and races.

    pip install 'parklab[sanitize]' && park bench sanitize --record FILE

compute-sanitizer watches all kernels: memcheck, synccheck, racecheck. racecheck sees what warps hand to each other
through shared memory, not what TMA copies and asynchronous products do there (a missing wait for a copy goes
unreported): the two kernels that use these are given to ConSan as well, Triton's own sanitizer, which knows them and
mbarriers. ConSan in turn does not see the hardware barriers of `ops/barriers.py` and is given copies that use mbarriers
there. That each sees a race where there is one is checked on copies of the PAMA kernel that lack a barrier, or a wait.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from parkattn.backend import INT8_HEAD_DIMS
from parklab.bench import attend, dense, plans
from parklab.bench.gates import Case
from parklab.bench.problems import Shape
from parklab.bench.registry import BENCHES
from parklab.bench.timing import Record, gpu_environment

WATCHED = ("pama", "kmeans", "qrkc", "attend")  # benches whose gates run every kernel but dense attention in INT8
ALL_RAN = "all checks ran"  # what a watched process says last
OLDEST = (2026, 3)
WARP_SPECIALISED = "kns=hopper"  # both have it in their names
Changes = dict[str, str]  # text of a kernel, which it has once -> what stands there instead
PAMA, ATTENTION = "parkattn.ops.importance.hopper", "parkattn.ops.attend.hopper"
FORGET_THE_BARRIER: Changes = {'        barrier_sync("8")\n': ""}
FORGET_A_WAIT: Changes = {"            mbarrier.wait(c_full.index(g % STAGES), (g // STAGES) & 1)\n": ""}
# ConSan sees mbarriers and no hardware barriers, and its checks need more registers than the copying warp has
FOR_CONSAN: dict[str, Changes] = {
    PAMA: {
        "[240, 24]": "[168, 168]",
        "    bars = (q_full, q_empty, c_full, c_empty)\n": (
            "    met = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())\n"
            "    for i in gl.static_range(4):\n"
            "        mbarrier.init(met.index(i), count=1)\n"
            "    bars = (q_full, q_empty, c_full, c_empty, met)\n"
        ),
        "c_empty = bars\n    for t in": "c_empty, met = bars\n    for t in",
        "c_empty = bars\n    columns": "c_empty, met = bars\n    columns",
        '        barrier_sync("8")\n': (
            "        thread_barrier()\n"
            "        mbarrier.arrive(met.index(W * 2 + (t & 1)), count=1)\n"
            "        mbarrier.wait(met.index((1 - W) * 2 + (t & 1)), (t >> 1) & 1)\n"
        ),
    },
    ATTENTION: {
        "exchange = (x_acc, x_rows)\n": "exchange = (x_acc, x_rows, make_barriers(1, 1), make_barriers(1, 1))\n",
        "x_acc, x_rows = exchange\n": "x_acc, x_rows, free, written = exchange\n    shared_tiles = 0\n",
        "barrier_arrive(FREE)\n": "mbarrier.arrive(free.index(0), count=1)\n",
        "barrier_sync(FREE)\n": "mbarrier.wait(free.index(0), shared_tiles & 1)\n",
        "barrier_arrive(WRITTEN)\n": "mbarrier.arrive(written.index(0), count=1)\n",
        "barrier_sync(WRITTEN)\n": "mbarrier.wait(written.index(0), shared_tiles & 1)\n",
        "            if shared:  # not before": (
            "            shared_tiles += gl.where(shared, 1, 0)\n            if shared:  # not before"
        ),
    },
}
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*?(\d+) error")
ASSERTION = re.compile(r"Assertion `(.*?)` failed")
PLACE = re.compile(r"(?:access at|at) (\w+)\+0x\w+ in (\w+\.py:\d+)")


class Round(NamedTuple):
    """One run of one tool: of compute-sanitizer with these options, else of ConSan."""

    options: tuple[str, ...] = ()
    section: str = "sanitize"
    finds: str = ""  # what it has to print about a kernel that was broken for it


ROUNDS = {
    "memcheck": Round(("memcheck",)),
    "synccheck": Round(("synccheck",)),
    "racecheck": Round(("racecheck", "--kernel-name-exclude", WARP_SPECIALISED)),
    "racecheck, warp-specialised kernels": Round(("racecheck", "--kernel-name", WARP_SPECIALISED)),
    "racecheck, PAMA without a meeting": Round(
        ("racecheck", "--kernel-name", WARP_SPECIALISED), "race-control",
        r"Race reported between .* at full_key_hopper\S* in hopper\.py",
    ),
    "ConSan, PAMA": Round(section="consan-pama"),
    "ConSan, attention": Round(section="consan-attend"),
    "ConSan, compensated attention": Round(section="consan-compensated"),
    "ConSan, PAMA without a wait": Round(
        (), "consan-control",
        "Assertion `(Buffer being accessed has outstanding writes|Accessing buffer with pending access)",
    ),
}  # fmt: skip
SECTIONS = tuple(dict.fromkeys(wanted.section for wanted in ROUNDS.values()))  # of parklab.bench.gpu


def checks(section: str, device: torch.device) -> Iterator[Case]:
    """In the process that a tool watches: gates, so that what was watched is also right."""
    if section == "race-control":
        exchange(PAMA, FORGET_THE_BARRIER)
    elif section.startswith("consan"):
        _prepare_for_consan(forget_a_wait=section == "consan-control")
    # PyTorch's own fused attention reads past the end of a mask: the definitions must not use it under a sanitizer
    with sdpa_kernel(SDPBackend.MATH):
        if section == "sanitize":
            for name in WATCHED:
                yield from BENCHES[name].gate(device, rehearse=True)
            for dim in INT8_HEAD_DIMS if device.type == "cuda" else ():
                yield from dense.gate_int8(Shape(20, 700, 4, 8, dim), torch.bfloat16, device)
        elif section in ("consan-attend", "consan-compensated"):
            # one head dim and dtype: ConSan takes minutes to compile a kernel
            stand_ins = section == "consan-compensated"
            dtype = torch.float16 if stand_ins else torch.bfloat16
            yield from attend.gate_kernel("gluon", 64, dtype, stand_ins, device, rehearse=True)
        else:
            # several tiles per block, and two chunks of keys: with more of them ConSan takes minutes to compile
            shape = Shape(2, 600, 3, 200, 128)
            yield from plans.gate_pama_at(shape, torch.bfloat16, device, repeats=2, kernels=("Triton (Full-K)",))
    sys.stdout.write(f"{ALL_RAN}\n")


def compute_sanitizer() -> tuple[str, str]:
    """The program and its version: of the installed package, which may be newer than the CUDA toolkit's, else on the
    PATH.
    """

    def refusal(why: str) -> ValueError:
        return ValueError(f"park bench sanitize: expected compute-sanitizer{why}; pip install 'parklab[sanitize]'.")

    package = importlib.util.find_spec("nvidia")
    folders = [str(Path(folder, "cu13", "bin")) for folder in (package and package.submodule_search_locations) or ()]
    places = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    program = shutil.which("compute-sanitizer", path=places)
    if program is None:
        raise refusal(", got none on the PATH")
    try:
        printed = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    except OSError as failure:
        raise refusal(f" to run, got {failure}") from failure
    version = re.search(r"Version (\d+)\.(\d+)\S*", printed)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        # 2025.3 reports how Triton starts the partitions of any warp-specialised kernel
        found = f"{version[0] if version else 'no version'} from {Path(program).name}"
        newer = f"{OLDEST[0]}.{OLDEST[1]} or newer, whose racecheck follows warp-specialised kernels"
        raise refusal(f" {newer}, got {found}")
    return program, version[0].removeprefix("Version ")


def run_rounds(only: list[str] | None = None, limit_s: float = 600) -> Iterator[Record]:
    """A record per tool. All run at once, since nothing is timed."""
    program, version = compute_sanitizer()
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder, f"{i}.log") for i, name in enumerate(only or ROUNDS)}
        started = {name: _start(ROUNDS[name], log, program) for name, log in logs.items()}
        try:
            facts, ends = gpu_environment(), time.monotonic() + limit_s
            for name, process in started.items():
                late = ""
                try:
                    process.wait(max(0.0, ends - time.monotonic()))
                except subprocess.TimeoutExpired:
                    _end(process)
                    late = "out of time"
                printed = logs[name].read_text(encoding="utf-8", errors="replace") + late
                watcher = {"compute_sanitizer": version} if ROUNDS[name].options else {}
                yield {"benchmark": "sanitize", **judge(name, printed), **watcher, "environment": facts}
        finally:
            for process in started.values():
                _end(process)


def judge(name: str, printed: str) -> Record:
    """What a tool found, from what it printed."""
    wanted, summary, found = ROUNDS[name], SUMMARY.search(printed), sorted(set(ASSERTION.findall(printed)))
    failed, passed = (printed.count(f'"ok": {word}') for word in ("false", "true"))
    errors: int | None = len(found)  # ConSan stops the program at the first thing it finds, and says so in every thread
    if wanted.options:
        errors = int(summary[1]) if summary else None
    # compute-sanitizer's own status hides the program's, and its summary comes also after a program that died
    finished = errors is not None and "out of time" not in printed and ALL_RAN in printed
    ok = finished and passed > 0 and failed == 0 and errors == 0
    if wanted.finds:
        finished = ok = re.search(wanted.finds, printed) is not None
    places = sorted({f"{kernel} {place}" for kernel, place in PLACE.findall(printed)})
    last = "" if finished else printed[-1500:]
    return {"tool": name, "ok": ok, "errors": errors, "must_find": "something" if wanted.finds else "nothing",
            "checks_passed": passed, "checks_failed": failed, "found": found or places,
            **({"stopped": last} if last else {})}  # fmt: skip


def _start(wanted: Round, log: Path, program: str) -> subprocess.Popen[bytes]:
    out = log.with_suffix("")
    command = [sys.executable, "-m", "parklab.bench.gpu", "--out", str(out), "--section", wanted.section]
    # rounds run beside each other: each on a core of its own
    variables = {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(out / "cache"), "TRITON_INTERPRET": "0"}
    if wanted.options:
        command = [program, "--error-exitcode", "99", "--tool", *wanted.options, *command]
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    else:
        variables["TRITON_INSTRUMENTATION_MODE"] = "consan"
    surroundings = os.environ | variables
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=surroundings, start_new_session=True
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what it started: a sanitizer is the parent of the program it watches."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _prepare_for_consan(*, forget_a_wait: bool) -> None:
    """Kernels of this process as ConSan can watch them. forget_a_wait: and PAMA reads centroids that may not have
    arrived.
    """
    importlib.import_module("parkattn.ops").keep_scratch_in_torch()
    exchange(PAMA, FOR_CONSAN[PAMA] | (FORGET_A_WAIT if forget_a_wait else {}))
    exchange(ATTENTION, FOR_CONSAN[ATTENTION])
    tiles = importlib.import_module("parkattn.ops.attend.tiles")
    for choice in ("gluon_tile", "int8_tile"):
        setattr(sys.modules[ATTENTION], choice, lambda *_: tiles.GluonTile(producer_registers=168))
    # the fewest slots there are: each takes a quarter of a minute to compile
    tiles_of_pama: Any = importlib.import_module("parkattn.ops.tiles")
    tiles_of_pama.full_key_tile = lambda *_: {"GLUON": True, "stages": 2}


def exchange(name: str, changes: Changes) -> None:
    """Puts a changed copy in the place of a module of this process."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    for old, new in changes.items():
        if (times := source.count(old)) != 1:
            advice = "bring the change into line with the kernel"
            raise RuntimeError(f"{name}: expected {old.strip()!r} once, got it {times} times; {advice}.")
        source = source.replace(old, new)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # Triton reads a kernel's source when it compiles it
    copy = Path(folder, Path(found.origin).name)
    copy.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, copy)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
