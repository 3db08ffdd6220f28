"""The rules of the house that a reader can rely on. Import direction itself is checked by lint-imports in `make test`."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import parkattn
import parklab
from parklab import record

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for room in ("src", "lab/src", "tests") for path in (ROOT / room).rglob("*.py"))


def imported_by(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that runs `code`."""
    probe = f"{code}\nimport sys\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split())


def test_import_loads_nothing_heavy():
    beyond_torch = imported_by("import parkattn") - imported_by("import torch")
    assert not beyond_torch & {"triton", "diffusers", "transformers", "matplotlib", "typer", "rich"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_longer_than_about_400_lines(path):
    assert len(path.read_text().splitlines()) <= (420 if path.is_relative_to(ROOT / "tests") else 400)


def _holds_device_code(function: ast.AST) -> bool:
    """Triton and Gluon compile a function as a whole, so that its length is the kernel's."""
    inner = (node for node in ast.walk(function) if isinstance(node, ast.FunctionDef))
    marks = (ast.unparse(mark) for node in inner for mark in node.decorator_list)
    return any(re.search(r"\bjit\b", mark) for mark in marks)


@pytest.mark.parametrize("room", ["src", "lab/src", "tools"])
def test_no_function_outside_kernels_is_longer_than_60_lines(room):
    found = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _holds_device_code(node)
    }
    assert not {name: lines for name, lines in found.items() if lines > 60}
    assert len(found) > 50


def _lines_of_texts(source: str) -> set[int]:
    """Lines of strings in triple quotes that a program writes out as they stand, such as pages and style sheets."""
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr))
    return {
        number
        for node in texts
        if node not in docstrings and re.match('r?f?"""', ast.get_source_segment(source, node) or "")
        for number in range(node.lineno, node.end_lineno + 1)
    }


@pytest.mark.parametrize("room", ["src", "lab/src", "tools"])
def test_no_line_of_the_source_is_longer_than_120_columns(room):
    found = []
    for path in (ROOT / room).rglob("*.py"):
        text = path.read_text()
        long = {number for number, line in enumerate(text.splitlines(), 1) if len(line) > 120}
        if long:
            found += [f"{path.relative_to(ROOT)}:{number}" for number in long - _lines_of_texts(text)]
    assert not found


def test_records_are_few_files_and_in_no_distribution():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert not [
        path
        for target in build.values()
        for paths in target.values()
        for path in paths
        if path.startswith("benchmarks")
    ]
    assert len([path for path in (ROOT / "benchmarks").rglob("*") if path.is_file()]) < 50


def test_every_record_is_named_where_its_numbers_are_shown_or_tested():
    places = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tools").glob("*.py"),
        *(ROOT / "tests").glob("*.py"),
    ]
    text = "".join(path.read_text() for path in places)
    assert not [
        path.name for path in (ROOT / "benchmarks/results").glob("*.json*") if not re.search(rf"\b{path.stem}\b", text)
    ]


def test_no_room_is_called_utils():
    assert not [p for p in SOURCES if re.fullmatch(r"utils?|helpers?|common|misc|core|types", p.stem)]


def test_public_names_exist_and_are_documented():
    for name in parkattn.__all__:
        assert getattr(parkattn, name) is not None
        assert name in (ROOT / "README.md").read_text() + (ROOT / "DESIGN.md").read_text(), (
            f"{name} is public but no page mentions it"
        )


def test_package_says_it_is_typed():
    assert (Path(parkattn.__file__).parent / "py.typed").exists()


def test_a_copy_inside_another_repository_does_not_record_that_ones_commit(tmp_path, monkeypatch):
    """Copied alone, and copied to the very place where ours stands; the checkout itself is told by its own commit,
    whatever git is told.
    """
    monkeypatch.delenv("PARKATTN_COMMIT", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    for place in ("lab/src/parklab", "vendored/parklab"):
        shutil.copytree(
            Path(parklab.__file__).parent, tmp_path / place, ignore=shutil.ignore_patterns("*.safetensors", "*.pyc")
        )
    for words in (["init", "-q"], ["add", "pyproject.toml", "lab/src/parklab/record.py"], ["commit", "-qm", "theirs"]):
        subprocess.run([*git, *words], check=True)
    ask = "from parklab import record; print(record.__file__, record._commit())"
    for place in ("lab/src", "vendored"):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path / place), str(ROOT / "src")))}
        said = subprocess.run(
            [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        assert said == [str(tmp_path / place / "parklab" / "record.py"), "None"]
    own = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert record._commit() == (own or None)


def test_missing_extra_names_the_install_line():
    code = "import sys\nsys.modules['matplotlib'] = None\nfrom parklab import extras\nextras.pyplot('pictures')"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert failed.returncode != 0
    assert "pip install 'parklab[plots]'" in failed.stderr


def records_in(name):
    return [json.loads(line) for line in (ROOT / f"benchmarks/results/{name}.jsonl").read_text().splitlines()]


def test_figures_of_whole_models_in_the_text_are_the_recorded_ones():
    text = (ROOT / "docs/measured/models.md").read_text()
    records = records_in("e2e")
    slowest = max(r["fusing_s"] for r in records if r.get("fusing_s"))
    fastest = min(r["fusing_s"] for r in records if r.get("fusing_s"))
    assert f"once, {fastest:.0f} to {slowest:.0f} s here" in text
    park, dense = (r for r in records if r.get("benchmark") == "e2e run")
    assert (
        f"blocks not compiled, took {dense['denoise_s']:.1f} s dense and {park['denoise_s']:.1f} s with PARK ({dense['speedup']:.2f}x)"
        in " ".join(text.split())
    )
    assert dense["steps_done"] == 50 and f"{park['peak_gb']:.1f}" == f"{dense['peak_gb']:.1f}" == "6.8"


def test_every_tool_of_the_sanitizers_has_a_record_that_passed():
    from parklab.bench.sanitize import ROUNDS

    assert {r["tool"]: r["ok"] for r in records_in("gpu_sanitize")} == dict.fromkeys(ROUNDS, True)


def test_figures_of_the_small_model_in_the_text_are_the_recorded_ones():
    text = " ".join((ROOT / "docs/measured/cpu.md").read_text().split())
    papers, users, former = records_in("demo")
    dense, park = papers["methods"]
    assert f"denoising {dense['seconds']['denoise']:.1f} s dense, {park['seconds']['denoise']:.1f} s PARK" in text
    assert (
        f"({park['speedup']:.2f}x; {dense['seconds']['total'] / park['seconds']['total']:.2f}x with text and decoding)"
        in text
    )
    whole, default = users["methods"]
    took = [run["seconds"]["denoise"] for run in (default, whole)]
    assert f"in {took[0]:.1f} s against {took[1]:.1f} s dense ({default['speedup']:.2f}x," in text
    assert f"{former['methods'][1]['speedup']:.2f}x in a run with the sentence of the first line" in text
    assert f"{park['psnr']['mean']:.1f} dB PSNR against dense at {100 * park['density']:.0f} % of attention" in text
    assert (
        f"With `quality`, which `make demo` takes, {default['psnr']['mean']:.1f} dB at {100 * default['density']:.0f} %"
        in text
    )
    for found, said, last in zip(
        [line for line in records_in("ablation") if "lines" in line],
        ("PARK {}, without QRKC {}, without PAMA {}, centroid retrieval {}", "{}, {}, {} and {}"),
        (0, 3),  # where the unit stands
        strict=True,
    ):
        lines = {line["method"]: line for line in found["lines"]}
        order = ("park", "park-no-qrkc", "park-no-pama", "centroid")
        figures = [f"{lines[method]['psnr']:.1f}" for method in order]
        figures[last] += " dB"
        assert said.format(*figures) in text
