"""python tests/fuzz_commands.py [--lines N] [--seed N]

Wrong command lines of `park`. Each may succeed or end with exit code 2 and one line `park: name: expected X, got Y; do
Z.`; anything else is a raw error. They run in this process with frames that cost nothing, in a temporary folder,
without a network or a measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import random
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import hostile_files
import reproduce_cases
from fuzz_calls import Tally, report
from parklab import cli, demo
from parklab.baselines.density_profile import DensityProfile
from parklab.bench import cpu, e2e_turns, gpu, sanitize
from parklab.experiments import ablation
from parklab.scene import clustered_scene
from parklab.sprites.grammar import EXAMPLE
from parklab.studio import checkpoints, density, doctor

MEMORY = 8 * 2**30  # bytes of address space, most of it the libraries'
NUMBERS = (
    "0", "1", "-1", "2", "7", "16", "0.5", "1.5", "-0.5", "nan", "inf", "1e400", "x", "", "1e3", "0x10", str(2**31),
    str(2**63), str(2**64), "9" * 5000, "None", "True", "1,2", " 1", "١", "1_0",
)  # fmt: skip
WORDS = (
    "", " ", "x", "park", "prak", "dense,park", "dense,,park", "all", "auto", "cpu", "cuda", "cuda:7", "cuda:x",
    "float32", "float8", "none", "model", "wan2.1-14b", "wan2.1-1.3b", "wan2.1", "hunyuanvideo", "NVIDIA H200", "H100", "top_p", "top_k",
    "topp", "\udcff", "é" * 300, "a\nb", "[red]", "[/]", "--", "-", "-x", "../..", "/dev/null", "/proc/self/mem", "no/such", ".", "~",
    "a;b", "%s", "{}",
)  # fmt: skip
PROMPTS = (
    EXAMPLE, EXAMPLE.upper(), EXAMPLE + ".", "a cat", "a red circle", "", " ", "a red circle moves right over red red",
    "\udcff", "x" * 9999, "a cat [/red] sits", "__VIDEOS__ and __DATA__",
)  # fmt: skip
SETTINGS = (
    "top_p=0.8", "top_p=2", "topp=0.8", "top_p", "=", "top_p=", "=1", "top_k=0.1", "seed=-1", f"seed={2**64}",
    "dense_layers=[99]",
    "dense_layers=3", "dense_steps=1e9", "key_metric=euclidian", "backend=triton", "check_finite=yes", "top_p=NaN",
    "\udcff=1", "top_p=[[[[",
    "refresh_steps=[1,2]", "query_clusters=null", "long_video_blocks=[1]", "top_p=" + "9" * 5000, "method=park",
    "compensate=true",
    "compensate=True", "top_p=.5", "anchors=None", "top_p=None", "density_profile=pipe", "density_profile=nan.jsonl",
    "x=[/b]", "top_p=" + "[" * 5000,
)  # fmt: skip
LABELS = (
    "all", "frontier", "tab:module_ablation", "query_key_compression", "tab:module_ablatoin", "fig:overview", "scaling",
    "", "\udcff",
)  # fmt: skip
MEASURES = ("all", "psnr", "psnr,ssim", "psnr,,ssim", "pnsr", "vmaf", "imaging_quality", "", ",", "psnr, ssim")
SIZES = ("9x64x96", "9x64", "x", "0x0x0", "9x64x96x3", "١x64x96", "-1x2x3", f"{2**64}x1x1")
GIVEN = ("pipe.mp4", "nan.jsonl", "deep.jsonl", "huge.npy", "cut.mp4", "nan.safetensors")
SHARDS = ("0/1", "1/2", "2/2", "a/b", "0/0", "1", "/", "-1/2", f"0/{2**64}")


class Lines:
    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        (folder / "file").write_text("a file")
        (folder / "prompts.txt").write_text(f"# two\n{EXAMPLE}\n{EXAMPLE.replace('red', 'green')}\n")
        (folder / "bad.txt").write_bytes(b"\xff\xfe\0")
        (folder / "twice.txt").write_text(f"{EXAMPLE}\n{EXAMPLE}\n")
        (folder / "model").mkdir(exist_ok=True)
        os.mkfifo(folder / "pipe.mp4")
        for name, case in {"nan.jsonl": "frontier lines: psnr float nan", "deep.jsonl": "pama lines: deep", "huge.npy": "npy: 2**60 frames",
                           "cut.mp4": "mp4: cut", "nan.safetensors": "capture: NaN"}.items():  # fmt: skip
            hostile_files.CASES[case][2](folder / name)
        names = ("out", "out/a.mp4", "b.mp4", "file", "file/x", "model", "prompts.txt", "bad.txt", "twice.txt", *GIVEN)
        self.paths = tuple(str(folder / name) for name in names)
        self.paths += (
            "relative", "relative/c.mp4", "é" * 300 + ".mp4", "d.mp4", "\udcff.mp4", "a\nb.mp4", "", ".",
            "/proc/nothing/x.mp4", "/dev/full",
        )  # fmt: skip

    def pick(self, values: Any) -> Any:
        return values[self.random.randrange(len(values))]

    def __iter__(self) -> Iterator[list[str]]:
        while True:
            yield self.line()

    def line(self) -> list[str]:
        often = ("generate", "compare", "ablation", "doctor", "reproduce", "reproduce", "metrics", "capture")
        command = self.pick((*COMMANDS, *often))
        words = command.split()
        if self.random.random() < 0.05:
            words[-1] = self.pick(("generat", "bench x", "", "-h", "--helpp", "\udcff", "doctor "))
        if command in ("generate", "capture") and self.random.random() < 0.9:
            words.append(self.pick(PROMPTS) if self.random.random() < 0.6 else EXAMPLE)
        if command == "reproduce":
            words += [self.pick(LABELS) for _ in range(self.random.randrange(3))]
        if command == "metrics":
            words += [self.pick(self.paths), self.pick(self.paths)]
        options = OPTIONS.get(command, {"record": "path", "repeats": "number"})
        for name in self.random.sample(sorted(options), self.random.randrange(min(4, len(options) + 1))):
            words += self.option(name, options[name])
        if self.random.random() < 0.1:
            words.append(self.pick((*WORDS, "--overwrit", "--sead=1", "--help", "--version", "--json")))
        ending = {"generate": ".mp4", "capture": ".safetensors", "profile": ".safetensors"}.get(command, "")
        writes = ("generate", "compare", "ablation", "demo", "scene", "reproduce", "capture", "profile")
        if command in writes and "--out" not in words:
            words += ["--out", str(self.folder / f"{self.random.randrange(10**6)}{ending}")]
        return words

    def option(self, name: str, kind: str) -> list[str]:
        if kind == "flag":
            return [f"--{name}"]
        kinds = {
            "number": NUMBERS, "path": self.paths, "word": WORDS, "setting": SETTINGS, "measures": MEASURES,
            "size": SIZES, "shard": SHARDS,
        }  # fmt: skip
        usual = self.random.random() < 0.85
        value = self.pick(kinds[kind] if usual else self.pick((NUMBERS, WORDS, self.paths, SETTINGS)))
        return [f"--{name}={value}"] if self.random.random() < 0.5 else [f"--{name}", value]


_RUN = dict.fromkeys(("seed", "steps", "height", "width", "frames", "fps", "guidance", "text-tokens"), "number")
_RUN |= {
    "model": "word", "preset": "word", "set": "setting", "negative": "word", "device": "word", "dtype": "word",
    "offload": "word",
}  # fmt: skip
_RUN |= {"overwrite": "flag", "out": "path", "image": "path", "lora": "path", "profile": "word"}
_VIDEO = {
    name: _RUN[name] for name in ("model", "steps", "frames", "height", "width", "device", "dtype", "offload", "out")
}


def of_run(*names: str) -> dict[str, str]:
    return {name: _RUN[name] for name in names}


OPTIONS: dict[str, dict[str, str]] = {
    "generate": _RUN | {"prompts": "path", "method": "word"},
    "compare": _RUN | {"methods": "word", "recall-rows": "number", "prompts": "path", "seeds": "number"},
    "ablation": of_run("steps", "height", "width", "frames", "device", "dtype", "out", "overwrite", "set")
    | {"prompts": "number", "seeds": "number", "methods": "word", "density": "number", "budget": "word"},
    "reproduce": _VIDEO | dict.fromkeys(("prompts", "seeds", "guidance", "densities"), "number") | dict.fromkeys(("methods", "keep"), "word")
    | dict.fromkeys(("prompt-file", "capture-file", "records", "weights"), "path") | dict.fromkeys(("list", "quick", "draw"), "flag")
    | {"set": "setting", "measures": "measures", "size": "size", "shard": "shard"},
    "capture": _VIDEO | dict.fromkeys(("layers", "heads", "capture-steps", "limit-mib", "seed", "guidance"), "number")
    | {"branches": "word", "values": "flag"},
    "profile": _VIDEO | dict.fromkeys(("samples", "seed", "guidance"), "number") | {"prompt": "word", "overwrite": "flag"},
    "metrics": {"measures": "measures", "frames": "word", "fps": "number", "weights": "path", "device": "word", "out": "path"},
    "doctor": {"json": "flag"} | dict.fromkeys(("model", "gpu", "profile"), "word")
    | dict.fromkeys(("frames", "height", "width", "density", "steps", "guidance"), "number"),
    "demo": {"out": "path", "seed": "number", "overwrite": "flag"},
    "scene": {"out": "path", "seed": "number"},
    "methods": {"json": "flag"},
    "presets": {"json": "flag"},
    "bench cpu": {"record": "path", "repeats": "number", "threads": "number"},
    "bench sanitize": {"record": "path", "only": "word", "limit": "number"},
    "bench scaling": {"record": "path", "plot": "path", "from": "path", "repeats": "number", "rehearse": "flag"},
    "bench e2e": {"record": "path", "only": "word", "budget": "number", "full": "flag", "profile": "word", "density": "number", "float8": "flag"},
    "bench gpu": {"out": "path", "budget": "number", "rehearse": "flag"},
}  # fmt: skip
COMMANDS = (*OPTIONS, "bench attend", "bench pama", "bench layer", "bench decisions", "bench flashinfer", "bench")


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """No model, no network, no measurement: what is left is what words mean."""

    def offline(name: str) -> Path:
        raise ValueError(
            f"model: expected a folder or a reachable hub id, got {name!r} (offline); check the name and the network."
        )

    find_model = checkpoints.find_model
    tested = doctor.self_test()
    with contextlib.ExitStack() as stack:
        stack.enter_context(reproduce_cases.without_a_model())
        for module, name, value in (
            (checkpoints, "_download", offline),
            (checkpoints, "find_model", lambda model: find_model(model)),
            (
                ablation,
                "calibrate",
                lambda lab, *_: {key: {"value": 0.5, "density": 0.5} for key in lab.evaluation.methods},
            ),
            (density, "fit_to_pipeline", lambda request, pipe: request),
            (density, "generate_frames", lambda *arguments, **options: None),
            (density.DensityProfiler, "profile", lambda profiler: DensityProfile(torch.full((1, 1, 1), 0.5))),
            (demo, "clustered_scene", functools.partial(clustered_scene, heads=1, grid=(2, 8, 8))),
            (demo, "_picture", lambda results, scene: b"a picture"),
            (doctor, "self_test", lambda: tested),
            (cpu, "measure_cpu", lambda **options: iter(())),
            (cpu, "measure_decisions", lambda: iter(())),
            (sanitize, "run_rounds", lambda only, limit: iter(())),
            (e2e_turns, "run_and_tabulate", lambda record, options, **limits: ({}, [])),
            (gpu, "run_all", lambda out, **options: {}),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def run_line(words: list[str]) -> None:
    """Raises for what is neither success nor a refusal in one line."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["park", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
    said = err.getvalue().rstrip("\n")
    if code == 2 and said.startswith("park: "):
        raise ValueError(said)
    if code == 2 and "Usage: park" in out.getvalue() + said:  # a group without a command shows its help
        return
    if code not in (0, 1) or "Traceback" in said:
        raise AssertionError(f"exit code {code}: {said[-300:]}")


def fuzz_commands(count: int, seed: int = 0) -> Tally:
    tally, before = Tally(), Path.cwd()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(), nothing_runs():
        warnings.simplefilter("ignore")
        lines = iter(Lines(seed, Path(place)))
        os.chdir(place)
        try:
            for _ in range(count):
                words = next(lines)
                tally.add(f"park {' '.join(word[:60] for word in words)!r}", lambda words=words: run_line(words))
        finally:
            os.chdir(before)
    return tally


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--lines", type=int, default=1_000)
    reader.add_argument("--seed", type=int, default=0)
    asked = reader.parse_args()
    # a command that reads without an end is an error here, and not the end of the machine
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.exit(report("command lines", fuzz_commands(asked.lines, asked.seed)))


if __name__ == "__main__":
    main()
