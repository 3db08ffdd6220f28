"""Every method computes what it computed before the laboratory moved out of the library: two source trees, the same
bits.

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
BEFORE = "3741f5478675bdcd0fe3261aee7084a9854da8c1"  # the last commit before the laboratory moved out


@pytest.fixture(scope="module")
def tree_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    packed = subprocess.run(["git", "archive", BEFORE, "src"], cwd=HERE.parent, capture_output=True)
    if packed.returncode:
        pytest.skip(f"commit {BEFORE} is not in this checkout; fetch the whole history")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def hashes(*trees: Path) -> dict[str, dict[str, object]]:
    """{kind: {case: hash}} of source trees, in a process of its own; the definitions and videos know nothing of the
    interpreter.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, trees)),
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(
        [sys.executable, str(HERE / "golden_cases.py"), *KINDS], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


def test_plans_outputs_and_videos_are_bit_equal_to_before(tree_before: Path) -> None:
    before, now = hashes(tree_before), hashes(HERE.parent / "src", HERE.parent / "lab/src")
    for kind in KINDS:
        different = [case for case, found in before[kind].items() if now[kind].get(case) != found]
        assert len(before[kind]) >= 5 and not different
