"""PARK computes what it computed before it moved into the seam: two source trees, the same bits.

Hashes of one machine mean nothing on another, so the tree of that commit is taken out of git and run beside this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KINDS = ("reference", "video", "triton")
BEFORE = "6164e5117b93a75caa1c9e3fddb3a5c178ee234a"  # the last commit in which PARK was the only method


@pytest.fixture(scope="module")
def tree_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    packed = subprocess.run(["git", "archive", BEFORE, "src"], cwd=HERE.parent, capture_output=True)
    if packed.returncode:
        pytest.skip(f"commit {BEFORE} is not in this checkout; fetch the whole history")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def hashes(tree: Path) -> dict[str, dict[str, object]]:
    """{kind: {case: hash}} of a source tree, in a process of its own; the definitions and videos know nothing of the interpreter."""
    environment = os.environ | {"PYTHONPATH": str(tree), "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, str(HERE / "golden_cases.py"), *KINDS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


def test_plans_outputs_and_videos_are_bit_equal_to_before(tree_before: Path) -> None:
    before, now = hashes(tree_before), hashes(HERE.parent / "src")
    for kind in KINDS:
        different = [case for case, found in before[kind].items() if now[kind].get(case) != found]
        assert len(before[kind]) >= 5 and not different
