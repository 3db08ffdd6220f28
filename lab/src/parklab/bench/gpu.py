"""Everything that wants a GPU, in one command of at most ten minutes: the gates of each bench, then its figures.

    park bench gpu --out DIR
    TRITON_INTERPRET=1 park bench gpu --out DIR --rehearse    the same at tiny sizes on the CPU, before a GPU is spent

Every section is a process of its own with a time limit: a hang or a CUDA error costs that section alone. One JSON line
per result goes to DIR/gpu.jsonl as soon as it is there. `park bench sanitize` looks for races and stray accesses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from parklab.bench import official, sanitize
from parklab.bench.registry import BENCHES
from parklab.bench.timing import Record, bench_device, gpu_environment, roofline
from parklab.record import append_records

GATES = {name: gate for bench in BENCHES.values() for name, (gate, _) in bench.gates.items()}


def _sections() -> Iterator[tuple[str, int]]:
    """With their seconds. A budget that runs out costs the last benches, not the figures of all."""
    for name, bench in BENCHES.items():
        yield from ((gate, seconds) for gate, (_, seconds) in bench.gates.items())
        yield name, bench.seconds


SECTIONS = {name: seconds for name, seconds in _sections() if seconds}


def run_all(out: Path, *, budget_s: float = 570, rehearse: bool = False) -> dict[str, str]:
    """Section -> "passed", "failed" or "out of time"; the records are in out/gpu.jsonl."""
    without = "flashinfer" if official.PACKAGES[official.FLASHINFER].absence(bench_device()) else None
    out.mkdir(parents=True, exist_ok=True)
    began, outcome = time.monotonic(), {}
    for name in (name for name in SECTIONS if name.removeprefix("gate-") != without):
        left = budget_s - (time.monotonic() - began)
        if left < 5:
            outcome[name] = "out of time"
            continue
        command = [sys.executable, "-m", "parklab.bench.gpu", "--out", str(out), "--section", name]
        command += ["--rehearse"] if rehearse else []
        try:
            limit = left if rehearse else min(SECTIONS[name], left)
            done = subprocess.run(command, timeout=limit, stderr=subprocess.PIPE, text=True)
            outcome[name] = "passed" if done.returncode == 0 else "failed"
            if done.returncode:
                append_records(out / "gpu.jsonl", [{"section": name, "ok": False, "stderr": done.stderr[-1500:]}])
        except subprocess.TimeoutExpired:
            outcome[name] = "out of time"
        sys.stdout.write(f"{name}: {outcome[name]} after {time.monotonic() - began:.0f} s in all\n")
        sys.stdout.flush()
    seconds = round(time.monotonic() - began, 1)
    append_records(out / "gpu.jsonl", [{"sections": outcome, "seconds": seconds, "environment": gpu_environment()}])
    return outcome


def run_section(name: str, out: Path, *, rehearse: bool = False) -> bool:
    """Whether every gate of the section held."""
    device, facts, passed = bench_device(), gpu_environment(), True
    torch.manual_seed(0)
    for record in _records(name, device, rehearse):
        passed &= record.get("ok", True)
        append_records(out / "gpu.jsonl", [{"section": name, "rehearsal": rehearse, **record, "environment": facts}])
        sys.stdout.write(json.dumps(record, default=str) + "\n")
        sys.stdout.flush()
    return passed


def _records(name: str, device: torch.device, rehearse: bool) -> Iterator[Record]:
    if name in sanitize.SECTIONS:
        yield from sanitize.checks(name, device)
    elif name in GATES:
        yield from GATES[name](device, rehearse=rehearse)
    else:
        peak = roofline(device)
        yield {"benchmark": "roofline", **peak}
        yield from BENCHES[name].measure(device, peak, repeats=1 if rehearse else 7, rehearse=rehearse)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parklab.bench.gpu", description="A section in this process.")
    parser.add_argument("--section", choices=[*SECTIONS, *sanitize.SECTIONS], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    sys.exit(not run_section(options.section, options.out, rehearse=options.rehearse))


if __name__ == "__main__":
    main()
