"""Files that commands are given, made to hang, to fill memory or to pass for measurements.

CASES: name -> words of `park` (FILE is the file, GOOD a whole video of its kind), the file's ending, and how it is
made. Each must be refused in one line.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import resource
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch

from hangs import no_hang
from parklab import cli
from parklab.experiments.captures import ABOUT, FORMAT
from parklab.experiments.record_fields import FIELDS_OF_LINES
from parklab.sealed import sealed
from parklab.sprites.grammar import EXAMPLE

ROOT = Path(__file__).parents[1]
Damage = Callable[[Path], None]
ONE_LINE = re.compile(r"(park|failed): [^\n]*\S: expected [^\n]+, got[^\n]*; [^\n]+\.")
MEMORY = 2**31  # bytes beyond what is taken: an allocation above it is an error here, and not the end of the machine
SHAPE = (3, 32, 32, 3)
METRICS = ["metrics", "FILE", "GOOD"]
RECORDS = ["reproduce", "NAME", "--draw", "--records", "FILE"]
CAPTURE = [
    "reproduce", "tab:query_key_compression", "--capture-file", "FILE", "--set", "query_clusters=2", "--set",
    "key_clusters=2",
]  # fmt: skip
PROMPTS = ["generate", "--prompts", "FILE"]
PROFILE = ["generate", EXAMPLE, "--method", "svoo", "--set", "density_profile=FILE"]
FRONTIER_LINE = {
    "format": "parkattn.frontier.1", "setting": "fast", "prompt": "a", "seed": 0, "frames": 9, "height": 64, "width": 96, "steps": 4,
    "psnr": 30.0, "cost": 0.5, "seconds": 1.0, "guidance": 5.0,
}  # fmt: skip
LINES: dict[str, dict[str, Any]] = {
    "frontier": FRONTIER_LINE,
    "pama": {"benchmark": "pama", "shape": {"name": "wan"}, "kernel": "Triton", "ms": 1.0, "speedup": 2.0},
    "qrkc": {"benchmark": "qrkc", "shape": {"heads": 2, "tokens": 9}, "ms": 1.0}
    | dict.fromkeys(("metric_ms", "cholesky_ms", "transform_ms", "means_ms"), 0.1),
    "scaling": {"benchmark": "scaling", "over": "density", "part": "attention", "length": 9, "density": 0.5, "ms": 1.0},
}  # fmt: skip
EXPERIMENTS = {"pama": "tab:pama_kernel_overhead", "qrkc": "fig:qrkc_breakdown"}  # of lines under another name
ABSENT = object()
CELLS = {
    "quality": ("request", "request.density", "request.changes", "request.guidance", "row", "row.psnr", "row.cost", "row.error", "row.seconds",
                "environment"),
    "times": ("times", "times.attention_ms", "times.sparse_calls", "shape"),
    "budget": ("budget", "budget.value", "budget.density"),
    "retrieval": ("calls", "calls.0.tokens", "calls.0.tv", "calls.0.recall.Clustered.top_p.pama", "calls.0.keys.euclidean.key_mse"),
}  # fmt: skip
ALSO_EMPTY = ("environment", "request.changes")  # objects that may be
SITE = {
    "transformer": "t", "layer": 0, "step": 0, "branch": "cond", "total_steps": 4, "grid": [1, 4, 4], "text": None, "scale": None,
    "noise_levels": None,
}  # fmt: skip


def cell_of(kind: str) -> dict[str, Any]:
    """A cell that was measured."""
    of = "gpu_75600" if kind == "retrieval" else "matched_2k"
    texts = (ROOT / f"benchmarks/results/{of}.jsonl").read_text().splitlines()
    return next(record for text in texts if f".{kind}." in text and (record := json.loads(text)))


def put_cell(path: Path, kind: str, place: str, value: Any) -> None:
    """Sealed with another value at a place, or with none; a whole cell before it."""
    cell = cell_of(kind)
    *outer, last = place.split(".")
    held = functools.reduce(lambda held, name: held[0] if name == "0" else held[name], outer, cell)
    held.pop(last) if value is ABSENT else held.update({last: value})
    put(path, "".join(json.dumps(sealed(each)) + "\n" for each in (cell_of(kind), cell)))


def optional(line: dict[str, Any]) -> list[str]:
    """Fields that a line of this kind may lack."""
    return [name[:-1] for name in FIELDS_OF_LINES[line.get("format") or line["benchmark"]] if name.endswith("?")]


def put(path: Path, content: bytes | str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def npy(path: Path, header: str, body: bytes = b"") -> None:
    text = header.encode() + b"\n"
    put(path, b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + body)


def described(shape: Any, dtype: str = "|u1") -> str:
    return f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}}}"


def put_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("frames.npy", b"x")


def whole_mp4() -> bytes:
    from tempfile import TemporaryDirectory

    from parklab.studio.video import write_mp4

    coarse = np.random.default_rng(0).integers(0, 256, (9, 12, 16, 3), dtype=np.uint8)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.mp4"
        write_mp4(path, coarse.repeat(8, 1).repeat(8, 2), 16)
        return path.read_bytes()


def damaged_mp4(path: Path, damage: Callable[[bytes, int], bytes]) -> None:
    """damage(the file, where its pictures begin)."""
    data = whole_mp4()
    put(path, damage(data, data.index(b"mdat") + 4))


def without_middle(data: bytes, begin: int) -> bytes:
    middle = (begin + len(data)) // 2
    return data[:middle] + data[middle + 200 :]


def put_frames(path: Path, frames: torch.Tensor, name: str = "frames") -> None:
    put(path, safetensors.torch.save({name: frames}))


def lines(path: Path, line: Any, **changes: Any) -> None:
    put(path, json.dumps({**line, **changes}) + "\n" if isinstance(line, dict) else line)


def lacking(path: Path, line: dict[str, Any], field: str) -> None:
    lines(path, {name: value for name, value in line.items() if name != field})


def capture(
    path: Path, *, facts: Any = None, about: str | None = None, scale: Any = None, **tensors: torch.Tensor
) -> None:
    site = SITE | {"scale": scale}
    told = {"format": FORMAT, "sites": {"a": site}, "about": {}} if facts is None else facts
    parts = {"q": torch.ones(1, 2, 16, 4), "k": torch.ones(1, 2, 16, 4), **tensors}
    data = safetensors.torch.save(
        {f"a.{name}": part for name, part in parts.items()}, {ABOUT: about or json.dumps(told)}
    )
    put(path, data)


def profile(path: Path, mass: str) -> None:
    facts = {"format": "parkattn.density-profile.1", "mass": mass}
    put(path, safetensors.torch.save({"densities": torch.full((1, 1, 1), 0.5, dtype=torch.float64)}, facts))


def _cases() -> dict[str, tuple[list[str], str, Damage]]:
    """Name -> words, the file's ending, damage."""
    found: dict[str, tuple[list[str], str, Damage]] = {}
    given = {"npy": METRICS, "mp4": METRICS, "jsonl": [w.replace("NAME", "frontier") for w in RECORDS], "txt": PROMPTS}
    for what, words, ending in (*((e, w, e) for e, w in given.items()), ("frames", METRICS, "safetensors"),
                                ("capture", CAPTURE, "safetensors"), ("profile", PROFILE, "safetensors")):  # fmt: skip
        for kind, damage in {
            "a FIFO": os.mkfifo, "a folder": os.mkdir, "a device": lambda path: path.symlink_to("/dev/zero"),
            "a link to nothing": lambda path: path.symlink_to("nowhere"), "8 GiB": partial(sparse, size=2**33), "empty": partial(put, content=b""),
            "junk": partial(put, content=b"\xff\xfe\0junk" * 99),
        }.items():  # fmt: skip
            if (what, kind) != (
                "capture",
                "8 GiB",
            ):  # a capture may be as large; its header is empty then, as that of "empty"
                found[f"{what}: {kind}"] = words, ending, damage
    found |= {f"npy: {name}": (METRICS, "npy", damage) for name, damage in {
        "a junk header": partial(npy, header="{" * 60), "a header of code": partial(npy, header="__import__('os').mkdir('ran')"),
        "no shape": partial(npy, header="{'descr': '|u1'}"), "2**60 frames": partial(npy, header=described((2**60, 2, 2, 3))),
        "100 GB": partial(npy, header=described((10**9, 10, 10, 3))), "negative": partial(npy, header=described((-1, 2, 2, 3))),
        "objects": partial(npy, header=described((1,), "|O")), "floats": partial(npy, header=described((1, 1, 1, 3), "<f4"), body=bytes(12)),
        "a deep header": partial(npy, header="(" * 5000), "cut": partial(npy, header=described(SHAPE), body=bytes(99)), "a zip": put_zip,
    }.items()}  # fmt: skip
    found |= {f"mp4: {name}": (METRICS, "mp4", damage) for name, damage in {
        "cut": partial(damaged_mp4, damage=lambda data, begin: data[: (begin + len(data)) // 2]),
        "ones": partial(damaged_mp4, damage=lambda data, begin: data[: begin + 1500] + b"\xff" * 200 + data[begin + 1700 :]),
        "without its middle": partial(damaged_mp4, damage=without_middle),
        "a playlist": partial(put, content="#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n"),
        "a script": partial(put, content="ffconcat version 1.0\nfile /etc/passwd\n"),
    }.items()}  # fmt: skip
    found |= {f"frames: {name}": (METRICS, "safetensors", damage) for name, damage in {
        "floats": partial(put_frames, frames=torch.ones(SHAPE)), "two axes": partial(put_frames, frames=torch.ones(2, 2, dtype=torch.uint8)),
        "another name": partial(put_frames, frames=torch.ones(SHAPE, dtype=torch.uint8), name="x"),
        "a header past the end": partial(put, content=struct.pack("<Q", 2**40) + b"{}"),
    }.items()}  # fmt: skip
    for name, line in LINES.items():
        words = [word.replace("NAME", EXPERIMENTS.get(name, name)) for word in RECORDS]
        for field, value in line.items():
            if field in ("format", "benchmark"):
                continue
            if field not in optional(line):
                found[f"{name} lines: no {field}"] = words, "jsonl", partial(lacking, line=line, field=field)
            for wrong in (
                [],
                {"a": 1},
                True,
                *(("x", float("nan"), float("inf"), 10**400) if isinstance(value, (int, float)) else (1,)),
            ):
                changed = partial(lines, line=line, **{field: wrong})
                found[f"{name} lines: {field} {type(wrong).__name__} {str(wrong)[:9]}"] = words, "jsonl", changed
        found[f"{name} lines: environment a list"] = words, "jsonl", partial(lines, line=line, environment=[1])
        found[f"{name} lines: deep"] = words, "jsonl", partial(lines, line="[" * 100_000)
    words = [word.replace("NAME", "main_quality_efficiency") for word in RECORDS]
    for kind, places in CELLS.items():
        for place in places:
            for wrong in (ABSENT, "x", [], {}, True, float("nan"), float("inf"), 10**400):
                if (place.startswith("environment") and wrong is ABSENT) or (wrong == {} and place in ALSO_EMPTY):
                    continue
                changed = partial(put_cell, kind=kind, place=place, value=wrong)
                found[f"cells: {kind} {place} {type(wrong).__name__} {str(wrong)[:6]}"] = words, "jsonl", changed
    one = torch.ones(1, 2, 16, 4)
    found |= {f"capture: {name}": (CAPTURE, "safetensors", damage) for name, damage in {
        "no sites": partial(capture, facts={"format": FORMAT, "sites": {}, "about": {}}),
        "sites a list": partial(capture, facts={"format": FORMAT, "sites": [1], "about": {}}), "facts a list": partial(capture, facts=[1]),
        "about a list": partial(capture, facts={"format": FORMAT, "sites": {"a": SITE}, "about": [1]}),
        "deep facts": partial(capture, about="[" * 100_000), "2-d": partial(capture, q=torch.ones(4, 4), k=torch.ones(4, 4)),
        "other heads": partial(capture, k=torch.ones(1, 3, 16, 4)), "whole numbers": partial(capture, q=one.int(), k=one.int()),
        "NaN": partial(capture, q=one * float("nan")), "infinite": partial(capture, k=one * float("inf")),
        "values of NaN": partial(capture, v=one * float("nan")), "a huge scale": partial(capture, scale=1e30),
        "a scale of text": partial(capture, scale="x"), "no scale but NaN": partial(capture, scale=float("nan")),
        "padding of numbers": partial(capture, key_valid=torch.ones(1, 16)),
    }.items()}  # fmt: skip
    found |= {
        f"profile: mass {mass}": (PROFILE, "safetensors", partial(profile, mass=mass)) for mass in ("x", "nan", "2")
    }
    return found


CASES = _cases()


def run(*words: str) -> tuple[int, str]:
    """Exit code, and what `park` said on both streams."""
    out = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["park", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    raise AssertionError("park ends by SystemExit")


def fault(name: str, folder: Path) -> str:
    """How a case was not refused as it must be, or nothing."""
    words, ending, damage = CASES[name]
    path, good = folder / f"given.{ending}", folder / f"good.{ending}"
    damage(path)
    if ending == "mp4":
        put(good, whole_mp4())
    elif ending == "npy":
        np.save(good, np.zeros(SHAPE, np.uint8))
    else:
        put_frames(good, torch.zeros(SHAPE, dtype=torch.uint8))
    told = [word.replace("FILE", str(path)).replace("GOOD", str(good)) for word in words]
    told += [] if words[0] == "metrics" else ["--out", str(folder / "out")]
    try:
        with no_hang(), _bounded():
            code, said = run(*told)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    refusals = [line for line in said.splitlines() if line.startswith(("park: ", "failed: "))]
    if code in (1, 2) and refusals and all(map(ONE_LINE.fullmatch, refusals)) and "nan)" not in said:
        others = {path.name for path in folder.iterdir()} - {"out", path.name, good.name}
        return f"left {sorted(others)}" if others else ""
    return f"exit code {code}: {said[-300:]}"


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
