"""What metadata, pins and install commands promise to who installs the package, by pip's resolver; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from parklab.extras import install_command, package

ROOT = Path(__file__).parents[1]
PROJECTS = {
    name: tomllib.loads((ROOT / path).read_text())["project"]
    for name, path in {"parkattn": "pyproject.toml", "parklab": "lab/pyproject.toml"}.items()
}
EVERY = [
    f"{name}[{extra}]"
    for name, project in PROJECTS.items()
    for extra in project["optional-dependencies"]
    if extra != "lab"
]
CONSTRAINTS = ROOT / "constraints.txt"
THEIRS = {"click", "huggingface-hub", "tokenizers", "pyparsing"}  # required by packages that we require
PINS = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)


def requirements(*packages: str) -> set[str]:
    """What our packages, "parkattn[video]", ask of others; one that names another of ours stands for it."""
    asked = set()
    for asked_for in packages:
        name, _, extras = asked_for.removesuffix("]").partition("[")
        optional = PROJECTS[name]["optional-dependencies"]
        lines = [
            *PROJECTS[name]["dependencies"],
            *(line for extra in extras.split(",") if extra for line in optional[extra]),
        ]
        ours = [line for line in lines if line.partition("[")[0] in PROJECTS]
        asked |= {line for line in lines if line not in ours} | (requirements(*ours) if ours else set())
    return asked


def pip(*arguments: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """A dry run that sees neither this machine's settings nor what is installed; fast-deps reads metadata from afar."""
    dry = "install --quiet --dry-run --use-feature=fast-deps --ignore-installed --only-binary=:all:"
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", *dry.split(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


def no_answer() -> str | None:
    """Why no resolver can be asked here, or None."""
    if importlib.util.find_spec("pip") is None:
        return "pip is not installed in this environment"
    if int(version("pip").partition(".")[0]) < 25:
        return f"pip {version('pip')} downloads whole packages to read what they require; 25 does not"
    try:
        probe = pip("--retries=0", "--timeout=5", "--no-deps", "typer", seconds=30)
    except subprocess.TimeoutExpired:
        return "no package index answers within 30 s"
    return None if probe.returncode == 0 else f"pip finds no package index: {probe.stderr.strip().splitlines()[-1]}"


def resolve(folder: Path, pins: str, *arguments: str) -> dict[str, str] | str:
    """The set that pip would install, {name: version}, or its complaint."""
    (folder / "pins.txt").write_text(pins)
    report = folder / "report.json"
    run = pip("--report", str(report), "-c", str(folder / "pins.txt"), *arguments, seconds=240)
    if run.returncode:
        return run.stderr
    found = (package["metadata"] for package in json.loads(report.read_text())["install"])
    return {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in found}


def cpu_build(folder: Path) -> Path:
    """A folder that offers the pinned torch as a CPU build, which requires no triton: its metadata only."""
    version = f"{PINS['torch']}+cpu"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Three questions at once, since the resolver mostly waits for the index -> the answer to one of them."""
    if reason := no_answer():
        pytest.skip(reason)
    pins, cpu = CONSTRAINTS.read_text(), cpu_build(tmp_path_factory.mktemp("cpu"))
    questions = {
        "every extra": (pins, *requirements(*EVERY)),
        "CPU build": (pins, "--find-links", str(cpu), *requirements("parkattn[triton]", "parklab"), "peft"),
        "another torch's triton": ("torch==2.13.0\ntriton==3.6.0\n", "torch", "triton"),
    }
    with ThreadPoolExecutor(len(questions)) as pool:
        folder = tmp_path_factory.mktemp
        asked = {name: pool.submit(resolve, folder("pip"), *question) for name, question in questions.items()}

        def answer(name: str) -> dict[str, str] | str:
            try:
                return asked[name].result()
            except subprocess.TimeoutExpired:
                pytest.skip("the package index answers too slowly: no set within 240 s")

        yield answer


def number(of: str) -> list[int]:
    return [int(part) for part in of.split(".")]


def test_an_extra_that_names_others_stands_for_them():
    assert {"diffusers", "av", "torch"} <= {re.split(r"[<>=;]", line)[0] for line in requirements("parklab")}


def test_the_pins_and_all_extras_resolve_together_on_the_plain_index(answers):
    """A set for all extras is one for each, since it meets every requirement of each."""
    found = answers("every extra")
    assert isinstance(found, dict), found
    assert {name: found.get(name) for name in PINS} == PINS


def test_the_pins_resolve_where_a_cpu_build_of_torch_is_offered(answers):
    found = answers("CPU build")
    assert isinstance(found, dict), found
    taken = {name: pinned for name, pinned in PINS.items() if name in found}
    assert taken.keys() >= {"torch", "triton", "diffusers", "transformers", "peft", "safetensors"}
    assert {name: found[name] for name in taken} == {**taken, "torch": f"{PINS['torch']}+cpu"}
    assert not [name for name in found if name.startswith("nvidia")]


def test_pins_that_do_not_belong_together_are_noticed(answers):
    """torch 2.13.0 comes with triton 3.7.1."""
    assert "ResolutionImpossible" in answers("another torch's triton")


def test_every_pin_is_within_the_bounds_of_the_metadata():
    bounds = {re.split(r"[<>=;]", line)[0]: line for line in requirements(*EVERY)}
    for name, pinned in PINS.items():
        if name not in THEIRS:
            lowest = re.search(r">=([\d.]+)", bounds[name])
            assert lowest and number(pinned) >= number(lowest[1]), name


def test_what_set_up_installs_is_pinned_to_one_released_version():
    """The suite turns warnings into errors and compares formatted text: a version that floats breaks it without a
    change here.
    """
    asked = {re.split(r"[<>=;]", line)[0] for line in requirements("parklab[test]")}
    assert asked | THEIRS == set(PINS)
    assert all(re.fullmatch(r"[\d.]+", pinned) for pinned in PINS.values())  # no local build, such as +cpu


def test_every_dependency_names_its_lowest_version():
    assert not [
        line for line in requirements("parkattn[video,triton]", "parklab[plots]") if not re.search(r">=\d", line)
    ]


def test_the_matrix_names_tests_that_exist():
    named = set(re.findall(r'"(test_\w+)"', (ROOT / "tools/matrix_environments.py").read_text()))
    assert "test_park" in named and not {name for name in named if not (ROOT / f"tests/{name}.py").is_file()}


def test_the_matrix_needs_no_package():
    """-S: without site-packages, as the Python of `make matrix` may be."""
    command = [sys.executable, "-S", "-E", str(ROOT / "tools/matrix.py"), "--help"]
    assert "versions" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_extra_has_a_job_in_the_matrix():
    jobs = (ROOT / "tools/matrix_environments.py").read_text().partition("\nEXTRAS = {")[2].partition("\n}")[0]
    assert {*EVERY, *PROJECTS} == set(re.findall(r'^    "([\w\[\]]*)":', jobs, re.MULTILINE))


def test_the_library_needs_torch_and_safetensors_alone():
    assert {re.split(r"[<>=;]", line)[0] for line in requirements("parkattn")} == {"torch", "safetensors"}


def test_the_laboratory_requires_what_loading_needs():
    assert {"accelerate", "diffusers", "av"} <= {re.split(r"[<>=;~!\[ ]", line)[0] for line in requirements("parklab")}


# Install commands, in errors and in docs ----------------------------------------------------------------


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = {name: set(project["optional-dependencies"]) for name, project in PROJECTS.items()}


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
        for requirement in map(Requirement, requirements(f"parkattn[{extras}]")):
            there = ALREADY_THERE.get(requirement.name)
            assert there is not None and requirement.specifier.contains(there), requirement
