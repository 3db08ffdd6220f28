"""The rules of the house that a reader can rely on. Import direction itself is checked by lint-imports in `make test`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parkattn

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.py"))


def imported_by(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that runs `code`."""
    probe = f"{code}\nimport sys\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split())


def test_import_loads_nothing_heavy():
    beyond_torch = imported_by("import parkattn") - imported_by("import torch")
    assert not beyond_torch & {"triton", "diffusers", "transformers", "matplotlib", "typer", "rich"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_longer_than_about_400_lines(path):
    assert len(path.read_text().splitlines()) <= 420


def test_no_room_is_called_utils():
    assert not [p for p in SOURCES if re.fullmatch(r"utils?|helpers?|common|misc|core|types", p.stem)]


def test_public_names_exist_and_are_documented():
    for name in parkattn.__all__:
        assert getattr(parkattn, name) is not None
        assert name in (ROOT / "README.md").read_text() + (ROOT / "DESIGN.md").read_text(), f"{name} is public but no page mentions it"


def test_package_says_it_is_typed():
    assert (Path(parkattn.__file__).parent / "py.typed").exists()


def test_missing_extra_names_the_install_line():
    code = "import sys\nsys.modules['matplotlib'] = None\nfrom parkattn import extras\nextras.pyplot('pictures')"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert failed.returncode != 0
    assert "pip install 'parkattn[plots]'" in failed.stderr


def test_figures_in_the_readme_are_the_recorded_ones():
    records = [json.loads(line) for line in (ROOT / "benchmarks/results/cpu.jsonl").read_text().splitlines()]
    columns = ("density", "dense_ms", "sparse_ms", "speedup", "plan_ms", "calls_to_break_even")
    table = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d.]+) \| (.*) \|$", table, flags=re.MULTILINE)
    assert len(rows) == 3
    for first, rest in rows:
        assert [first, *rest.split(" | ")] in [[str(record[name]) for name in columns] for record in records]


def test_gpu_figures_in_the_readme_are_the_recorded_ones():
    records = [json.loads(line) for line in (ROOT / "benchmarks/results/gpu_attend.jsonl").read_text().splitlines()]
    rows = re.findall(
        r"^\| (\w[^|]*, density [\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) == 4
    for case, dense, sparse, share in rows:
        of_case = [r for r in records if r.get("case") == case]
        dense_ms = [f"{r['ms']:.1f}" for r in of_case if r["kernel"] == "cudnn"]
        ours = [(f"{r['ms']:.1f}", f"{r['ratio']:.3f}") for r in of_case if r["kernel"] == "gluon" and r["borders"] == "rounded"]
        assert dense in dense_ms and (sparse, share) in ours


def test_figures_of_whole_models_in_the_readme_are_the_recorded_ones():
    text = (ROOT / "README.md").read_text()
    records = [json.loads(line) for line in (ROOT / "benchmarks/results/e2e.jsonl").read_text().splitlines()]
    recorded = [
        (
            r["model"] + (", both compiled" if r["compiled"] else ""),
            *(f"{r[name]:.2f}" for name in ("dense_s", "refresh_warm_s", "reuse_s")),
            "" if r["compiled"] else f"{r['reuse_unfused_s']:.2f} ",
            f"{r['run']['speedup']:.2f}x",
        )
        for r in records
        if r.get("benchmark") == "e2e"
    ]
    told = re.findall(r"^\| (\w[^|]*) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+ )?\| ([\d.]+x) \|$", text, flags=re.MULTILINE)
    assert sorted(told) == sorted(recorded)
    slowest = max(r["fusing_s"] for r in records if r.get("fusing_s"))
    fastest = min(r["fusing_s"] for r in records if r.get("fusing_s"))
    assert f"once, {fastest:.0f} to {slowest:.0f} s here" in text
    park, dense = (r for r in records if r.get("benchmark") == "e2e run")
    assert (
        f"blocks not compiled, took {dense['denoise_s']:.1f} s dense and {park['denoise_s']:.1f} s with PARK ({dense['speedup']:.2f}x)"
        in " ".join(text.split())
    )
    assert dense["steps_done"] == 50 and f"{park['peak_gb']:.1f}" == f"{dense['peak_gb']:.1f}" == "6.8"


def test_pama_figures_in_the_docs_are_the_recorded_ones():
    records = [json.loads(line) for line in (ROOT / "benchmarks/results/gpu_pama.jsonl").read_text().splitlines()]
    text = (ROOT / "docs/kernels.md").read_text()
    rows = [r for r in records if r.get("benchmark") == "pama"]
    assert len(rows) == 21
    for r in rows:
        shape = "({heads}, {tokens:,}, {key_blocks:,})".format(**r["shape"])
        line = next(line for line in text.splitlines() if line.startswith(f"| {shape} |"))
        told = f"{r['ms']:.1f} ms |" if r["kernel"] == "PyTorch" else f"{r['ms']:.2f} ms, {r['speedup']:.1f}x, {r['extra_mb']:.0f} MB"
        assert told in line


def test_attention_figures_in_the_docs_are_the_recorded_ones():
    records = [json.loads(line) for line in (ROOT / "benchmarks/results/gpu_attend.jsonl").read_text().splitlines()]
    ms: dict[str, dict[tuple[str, str | None], dict]] = {}
    for r in records:
        if r.get("benchmark") == "attend":
            ms.setdefault(r["case"].replace("hunyuan", "hunyuanvideo"), {})[r["kernel"], r.get("borders")] = r
    rows = re.findall(r"^\| (\w[^|]*, density [\d.]+) \| (.*) \|$", (ROOT / "docs/kernels.md").read_text(), flags=re.MULTILINE)
    assert sorted(case.lower() for case, _ in rows) == sorted(ms)
    for case, rest in rows:
        of_case = ms[case.lower()]
        told = [f"{of_case['cudnn', None]['ms']:.1f} ms"]
        for borders in ("rounded", "as clustered"):
            plain, compensated = (of_case[kernel, borders] for kernel in ("gluon", "gluon compensated"))
            told += [f"{plain['ms']:.1f} ms", f"{plain['ratio']:.3f}"] + ([f"{plain['useful_tflops']:.0f}"] if borders == "rounded" else [])
            told += [f"+{100 * (compensated['ms'] / plain['ms'] - 1):.1f} %"]
        cells = rest.split(" | ")
        assert cells[:3] + cells[4:] == told  # the fourth is the bar
        assert float(cells[2]) <= float(cells[3])


def test_every_tool_of_the_sanitizers_has_a_record_that_passed():
    from parkattn.bench.sanitize import ROUNDS

    records = [json.loads(line) for line in (ROOT / "benchmarks/results/gpu_sanitize.jsonl").read_text().splitlines()]
    assert {r["tool"]: r["ok"] for r in records} == dict.fromkeys(ROUNDS, True)


def test_figures_of_the_small_model_in_the_readme_are_the_recorded_ones():
    text = " ".join((ROOT / "README.md").read_text().split())
    dense, park = json.loads((ROOT / "benchmarks/results/demo.json").read_text())["methods"]
    assert f"denoising {dense['seconds']['denoise']:.1f} s dense, {park['seconds']['denoise']:.1f} s PARK" in text
    assert f"({park['speedup']:.2f}x; {dense['seconds']['total'] / park['seconds']['total']:.2f}x with text and decoding)" in text
    for name, said in (
        ("ablation", "PARK {}, without QRKC {}, without PAMA {}, centroid retrieval {}"),
        ("ablation_top_k", "{}, {}, {} and {}"),
    ):
        lines = {line["method"]: line for line in json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["lines"]}
        order = ("park", "park-no-qrkc", "park-no-pama", "centroid")
        figures = [f"{lines[method]['psnr']:.1f}" for method in order]
        figures[0 if name == "ablation" else 3] += " dB"
        assert said.format(*figures) in text


def test_figures_of_the_profiles_in_the_readme_are_the_recorded_ones():
    from parkattn.bench.frontier import read_records, tabulate

    text = (ROOT / "README.md").read_text()
    rows = tabulate(read_records(ROOT / "benchmarks/results/frontier.jsonl"))
    assert {row["setting"] for row in rows} == {"paper", "quality", "fast"}
    for row in rows:
        counted = f"| {row['setting']} | {row['guidance']:g} | {row['runs']} | {row['cost']:.1%} "
        assert counted + f"| {row['psnr']:.1f} dB | {row['worst_psnr']:.1f} dB |" in text
