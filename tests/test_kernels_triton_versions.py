"""What kernels need of a version of Triton: names that differ, and FP fusion as we say it, not as its default has it."""

from __future__ import annotations

import ast
import pathlib

import pytest
import torch

pytest.importorskip("triton")
from parkattn.backend import resolve
from parkattn.ops import triton_versions
from parkattn.ops.triton_versions import why_no_gluon

KERNELS = pathlib.Path(triton_versions.__file__).parent


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.0+git1234"])
def test_versions_with_the_hopper_kernel(version):
    assert why_no_gluon(version) is None


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_other_versions_step_aside_with_a_reason(version):
    assert why_no_gluon(version) == f"the Hopper kernel builds with Triton 3.6 to 3.9, not with {version}"


def test_an_unknown_version_takes_the_plain_kernels_on_hopper(monkeypatch):
    from parkattn.ops import tiles

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    taken = resolve("triton", torch.device("cuda"), torch.bfloat16, 128)
    assert taken.hopper and tiles.full_key_tile(128, torch.bfloat16, 90, 512)["GLUON"]
    for place in (triton_versions, tiles):
        monkeypatch.setattr(place, "why_no_gluon", lambda: why_no_gluon("3.10.0"))
    taken = resolve("triton", torch.device("cuda"), torch.bfloat16, 128)
    assert not taken.hopper and taken.reason.endswith("not with 3.10.0")
    assert "GLUON" not in tiles.full_key_tile(128, torch.bfloat16, 90, 512)


def launches(tree: ast.AST) -> list[ast.Call]:
    """Calls of the form kernel[grid](...)."""
    return [x for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Subscript)]


def test_every_launch_says_whether_operations_are_fused():
    found = 0
    for file in KERNELS.rglob("*.py"):
        for call in launches(ast.parse(file.read_text())):
            found += 1
            options = {x.value.id for x in call.keywords if x.arg is None and isinstance(x.value, ast.Name)}
            assert options & {"FP_FUSION", "OPTIONS"}, f"{file.name}:{call.lineno} leaves FP fusion to Triton's default"
    assert found > 20
