"""Install commands, in errors and in docs: each names an extra that exists, and works without a package index."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from parklab.extras import install_command, package

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = {
    name: set(tomllib.loads((ROOT / path).read_text())["project"]["optional-dependencies"])
    for name, path in {"parkattn": "pyproject.toml", "parklab": "lab/pyproject.toml"}.items()
}


def test_a_missing_package_is_refused_with_the_command_of_its_extra():
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("plots"))):
        package("no_such_package", "a picture", "plots")


def test_sources_name_the_one_command_and_extras_that_exist():
    sources = "".join(
        path.read_text() for room in ("src", "lab/src") for path in sorted((ROOT / room).rglob("*.py"))
    ).replace("\\", "")
    named = re.findall(r"(pip install \S*(parkattn|parklab)\[(\w+)\]\S?)", sources)
    assert len(named) >= 6
    for command, distribution, extra in named:
        assert command == f"pip install '{distribution}[{extra}]'" and extra in EXTRAS[distribution]


def test_the_command_takes_the_installed_package_and_no_index():
    command = install_command("lora").replace("'", "").split()
    options = ["--dry-run", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run([sys.executable, "-m", *command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_install_from_a_clone_or_a_wheel_or_into_what_is_installed(path):
    """What readers type before anything is installed must not ask an index for parkattn."""
    text = path.read_text()
    for target, extras in re.findall(r"pip install (?:-e )?(?:\. )?(?:-e )?['\"]([^'\"\[]*)\[([\w,]+)\]", text):
        distribution = {".": "parkattn", "./lab": "parklab"}.get(target, target)
        assert set(extras.split(",")) <= EXTRAS[distribution]
        # an extra by the package's name is for those who have the package: such a page says where to begin
        assert target not in EXTRAS or "quickstart.md#install" in text or "pip install '.[" in text


def test_the_quick_start_lists_every_extra():
    rows = [line for line in (ROOT / "docs/quickstart.md").read_text().splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == set().union(*EXTRAS.values())


# an older environment of ComfyUI or LightX2V
ALREADY_THERE = {"torch": "2.9.1", "triton": "3.5.1", "safetensors": "0.5.3", "numpy": "1.26.4"}


@pytest.mark.parametrize("page", ["comfyui.md", "hosts.md"])
def test_lines_for_the_environment_of_another_program_replace_nothing_there(page):
    lines = re.findall(r"`pip install ([^`]+)`", (ROOT / "docs" / page).read_text())
    assert lines
    for line in lines:
        target, _, extras = line.strip("'").rstrip("]").partition("[")
        assert target == "/path/to/parkattn"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        asked = [
            *project["dependencies"],
            *(r for e in extras.split(",") if e for r in project["optional-dependencies"][e]),
        ]
        for requirement in map(Requirement, asked):
            assert requirement.name in ALREADY_THERE and requirement.specifier.contains(
                ALREADY_THERE[requirement.name]
            ), requirement
