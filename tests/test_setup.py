"""What the package's metadata and the pins promise to an installer, by pip's own resolver and the packages' metadata: nothing is downloaded."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = ROOT / "constraints.txt"
PINS = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)


def requirements(*extras: str) -> set[str]:
    """What the package and these extras ask for; an extra that names others of the package stands for them."""
    asked = {*PROJECT["dependencies"]}
    for requirement in (line for extra in extras for line in EXTRAS[extra]):
        named = re.fullmatch(r"parkattn\[(.*)\]", requirement)
        asked |= requirements(*named[1].split(",")) if named else {requirement}
    return asked


def pip(*arguments: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """A dry run that sees neither this machine's settings nor what is installed."""
    dry = ("install", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "--isolated", *dry, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


@functools.cache
def no_answer() -> str | None:
    """Why no resolver can be asked here, or None."""
    if importlib.util.find_spec("pip") is None:
        return "pip is not installed in this environment"
    from pip import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < (23, 2):
        return f"pip {__version__} downloads whole packages for their metadata; 23.2 does not"
    try:
        probe = pip("--retries=0", "--timeout=5", "--no-deps", "typer", seconds=30)
    except subprocess.TimeoutExpired:
        return "no package index answers within 30 s"
    return None if probe.returncode == 0 else f"no package index answers: {probe.stderr.strip().splitlines()[-1]}"


def resolved(tmp_path: Path, *arguments: str, pins: Path = CONSTRAINTS) -> dict[str, str]:
    """The set pip would install -> {name: version}; its complaint is the failure."""
    if reason := no_answer():
        pytest.skip(reason)
    report = tmp_path / "report.json"
    try:
        run = pip("--report", str(report), "-c", str(pins), *arguments, seconds=180)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index answers too slowly: no set within 180 s")
    assert run.returncode == 0, run.stderr[-3000:]
    found = (package["metadata"] for package in json.loads(report.read_text())["install"])
    return {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in found}


def cpu_build(folder: Path) -> Path:
    """A folder that offers the pinned torch as a CPU build, which requires no triton: its metadata only."""
    version = f"{PINS['torch']}+cpu"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def test_an_extra_that_names_others_stands_for_them():
    assert {"diffusers", "av", "torch"} <= {re.split(r"[<>=;]", line)[0] for line in requirements("video")}


def test_the_pins_and_all_extras_resolve_together_on_the_plain_index(tmp_path):
    """A set for all extras is one for each, since it meets every requirement of each."""
    found = resolved(tmp_path, *requirements(*EXTRAS))
    assert {name: found[name] for name in PINS} == PINS


def test_the_pins_resolve_where_a_cpu_build_of_torch_is_offered(tmp_path):
    found = resolved(tmp_path, "--find-links", str(cpu_build(tmp_path)), *requirements("test"))
    assert {name: found[name] for name in PINS} == {**PINS, "torch": f"{PINS['torch']}+cpu"}
    assert not [name for name in found if name.startswith("nvidia")]


def test_pins_that_do_not_belong_together_are_noticed(tmp_path):
    """The pins of the release before: this triton is another torch's."""
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==2.13.0\ntriton==3.6.0\n")
    with pytest.raises(AssertionError, match="ResolutionImpossible"):
        resolved(tmp_path, "torch", "triton", pins=pins)


def test_every_pin_is_within_the_bounds_of_the_metadata():
    bounds = {re.split(r"[<>=;]", line)[0]: line for line in requirements(*EXTRAS)}
    for name, version in PINS.items():
        lowest = re.search(r">=([\d.]+)", bounds[name])
        assert lowest and [int(part) for part in version.split(".")] >= [int(part) for part in lowest[1].split(".")], name


def test_everything_installed_has_a_lower_bound_that_was_tried():
    assert not [line for line in requirements("video", "plots", "triton") if not re.search(r">=\d", line)]
