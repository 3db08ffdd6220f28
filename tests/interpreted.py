"""A test file in a pytest of its own, where Triton interprets its kernels: that must be chosen before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys


def run_interpreted(file: str, at_least: int) -> None:
    """Fails where a test of the file fails there, or fewer than `at_least` ran."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-x", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= at_least, f"{passed and passed[0]}, expected at least {at_least}"
