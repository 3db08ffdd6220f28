"""Writes docs/methods.md: every method with its paper, equations, settings and what its plan costs. No figure is typed in.

python tools/methods_page.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import sys
from pathlib import Path

from parkattn import methods
from parkattn.files import write_atomically
from parkattn.registry import MethodEntry
from parkattn.settings import PlannedConfig

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks/results/gpu_methods.jsonl"
HEAD = """# Methods

`park methods` lists them; `enable(pipe, method=name)` runs one, `park compare --methods dense,NAME` shows it. All of them attend through the
same kernels, at their authors' settings. This page is written by `tools/methods_page.py`.
"""


def page() -> str:
    costs = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    parts = [HEAD]
    for module in methods.MODULES:
        about = inspect.getdoc(module) or ""
        for number, entry in enumerate(module.ENTRIES):
            parts.append(f"## {entry.name}\n\n{entry.line[0].upper()}{entry.line[1:]}.\n")
            parts.append(_cost(entry, costs))
            if number == 0:
                parts.append(f"```text\n{about}\n```\n")
                parts.append(_settings(entry))
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _cost(entry: MethodEntry, costs: list[dict]) -> str:
    rows = [row for row in costs if row["method"] == entry.name]
    if not rows:
        return ""
    said = "; ".join(
        f"{row['shape']}: plan {row['plan_ms']:.1f} ms, attention {row['attend_ms']:.1f} ms at density {row['density']:.2f}"
        for row in rows
    )
    return f"On one H200, Gaussian mixtures, defaults ({said}; `benchmarks/results/gpu_methods.jsonl`, by a script with the calls of `park bench methods`).\n"


def _settings(entry: MethodEntry) -> str:
    shared = {field.name for field in dataclasses.fields(PlannedConfig)}
    explained = {name: text for kind in reversed(entry.config.__mro__) for name, text in _docstrings(kind).items()}
    lines = [
        f"| `{field.name}` | `{field.default!r}` | {explained.get(field.name, '')} |"
        for field in dataclasses.fields(entry.config)
        if field.name not in shared
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *lines]) + "\n" if lines else ""


def _docstrings(kind: type) -> dict[str, str]:
    """Field -> the string below it."""
    if not dataclasses.is_dataclass(kind):
        return {}
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0].body
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


if __name__ == "__main__":
    write_atomically(ROOT / "docs/methods.md", page().encode())
    sys.stdout.write("wrote docs/methods.md\n")
