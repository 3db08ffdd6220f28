"""python tools/campaign.py [store|reproduce|folders|files|calls|commands|soak|diffusers ...] [--diffusers PATH]

The long tests, one line with counts each; the exit code is 1 where one fails. Short forms of all parts are in `make
test`. store, reproduce: commands cut off before every file operation; store also on full and bad disks, in damaged and
received folders. folders, files: hostile model folders and files. calls, commands: fuzzed API calls and command lines.
soak: 200 videos in one process. diffusers: its own CPU tests of the supported models (PATH is its source), stock and
with every block kept.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))

VIDEOS, WARM_UP = 200, 20
# of resident memory after the warm-up: the allocator's slack. Plans of such small videos would hide in it, and are
# counted apart
GROWTH_MIB = 16
HANG_SECONDS = 120
FAMILIES = ("wan", "skyreels", "hunyuan", "cogvideo", "ltx", "mochi")
NOT_OURS = ("hunyuan_dit", "hunyuandit", "hunyuan_image_", "hunyuanimage", "ltx2", "wan_animate")


# parts that are a program of their own
PROGRAMS = {
    "store": "campaign_store.py",
    "reproduce": "reproduce_cases.py",
    "calls": "fuzz_calls.py",
    "commands": "fuzz_commands.py",
}


def _program(part: str) -> bool:
    return subprocess.run([sys.executable, str(TESTS / PROGRAMS[part])], cwd=ROOT).returncode == 0


def folders() -> bool:
    """Every hostile folder is refused in one line; nothing in it runs, and none hangs its reader."""
    import hostile_folders as hostile
    import tiny_pipelines as tiny
    from folder_damage import ran
    from fuzz_calls import ONE_LINE
    from parklab.studio import checkpoints

    def hangs(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, hangs)
    counts = dict.fromkeys(("folders", "accepted", "ran code", "hung", "other errors"), 0)
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place) / "whole", Path(place) / "case" / "model"
        tiny.wan().save_pretrained(whole)
        readers = [
            (name, lambda path: checkpoints.find_model(str(path)), damage) for name, damage in hostile.JUDGED.items()
        ]
        readers += [(name, checkpoints.load_pipeline, damage) for name, damage in hostile.LOADED.items()]
        for name, read, damage in readers:
            shutil.rmtree(folder.parent, ignore_errors=True)
            shutil.copytree(whole, folder)
            damage(folder)
            counts["folders"] += 1
            signal.alarm(HANG_SECONDS)
            try:
                read(folder)
                outcome = "accepted"
            except TimeoutError:
                outcome = "hung"
            except ValueError as error:
                outcome = "" if ONE_LINE.fullmatch(str(error)) else "other errors"
            except BaseException:
                outcome = "other errors"
            finally:
                signal.alarm(0)
            if ran(folder).exists():
                outcome = "ran code"
            if outcome:
                counts[outcome] += 1
                print(f"  {name}: {outcome}")
    print("folders: " + ", ".join(f"{count} {what}" for what, count in counts.items()), flush=True)
    return not any(count for what, count in counts.items() if what != "folders")


def files() -> bool:
    """Every hostile file that a command is given is refused in one line; none hangs it, fills memory or becomes a
    verdict.
    """
    import hostile_files as hostile

    kinds: dict[str, list[int]] = {}
    for name in hostile.CASES:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            wrong = hostile.fault(name, Path(place))
        count = kinds.setdefault(name.partition(": ")[0], [0, 0])
        count[0] += 1
        count[1] += bool(wrong)
        if wrong:
            print(f"  {name}: {wrong}")
    told = ", ".join(f"{runs} {kind} ({bad} not refused)" for kind, (runs, bad) in kinds.items())
    print(f"files: {len(hostile.CASES)} files: {told}", flush=True)
    return not any(bad for _, bad in kinds.values())


def soak(videos: int = VIDEOS, warm_up: int = WARM_UP) -> bool:
    """Videos of two families and profiles in one process, enabled anew now and then: memory stays flat, a video repeats
    to the bit.
    """
    import torch

    import parkattn
    import tiny_pipelines as tiny

    torch.set_num_threads(1)
    blocks = {"query_clusters": 4, "key_clusters": 6}
    runs = (
        (tiny.wan(), tiny.run_wan, {"config": "paper", **blocks, "top_p": None, "top_k": 0.4, "dense_steps": 1}),
        (tiny.hunyuan(), tiny.run_hunyuan, {"config": "quality", **blocks}),
    )
    first: dict[int, torch.Tensor] = {}
    memory, held, different = [], 0, 0
    for number in range(warm_up + videos):
        if number % 20 == 0:
            for pipe, _, settings in runs:
                parkattn.enable(pipe, **settings)
        pipe, run, _ = runs[number % 2]
        latents = run(pipe, seed=number // 2 % 3, prompt="a cat " * (1 + number % 5))
        case = number % 30
        different += not torch.equal(first.setdefault(case, latents), latents)
        held = max(held, parkattn.summary(pipe).state_bytes)
        if number in (warm_up, warm_up + videos // 2, warm_up + videos - 1):
            gc.collect()
            memory.append(_resident_mib())
    growth = memory[-1] - memory[0]
    print(
        f"soak: {videos} videos, resident memory {memory[0]:.0f}, {memory[1]:.0f}, {memory[2]:.0f} MiB at start, "
        f"middle and end (at most {GROWTH_MIB} more allowed), {held} bytes of plans held between videos, {different} "
        "videos that did not repeat",
        flush=True,
    )
    return growth <= GROWTH_MIB and held == 0 and different == 0


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def own_tests_of_diffusers(source: Path | None) -> bool | None:
    """Every test that passes with stock attention passes with every block kept; text encoders of the hub are made up in
    both runs.
    """
    if source is None:
        print(
            "diffusers: skipped, no source given; make campaign DIFFUSERS_SOURCE=PATH, a clone of the installed "
            "version",
            flush=True,
        )
        return None
    files = sorted(
        path
        for part in ("models/transformers", "pipelines")
        for path in (source / "tests" / part).rglob("test_*.py")
        if any(name in path.as_posix().lower() for name in FAMILIES)
        and not any(name in path.as_posix() for name in NOT_OURS)
    )
    if not files:
        print(f"diffusers: expected its tests under {source}, got none; pass a clone of its repository", flush=True)
        return False
    stock, kept = _outcomes(source, files, []), _outcomes(source, files, ["--keep-every-block"])
    passed = {name for name, outcome in stock.items() if outcome == "passed"}
    lost = sorted(name for name in passed if kept.get(name) != "passed")
    for name in lost:
        print(f"  {name}: {kept.get(name, 'did not run')} with every block kept")
    print(
        f"diffusers: {len(stock)} tests in {len(files)} files, {len(passed)} pass with stock attention, "
        f"{len(passed) - len(lost)} of them with every block kept",
        flush=True,
    )
    return bool(passed) and not lost


def _outcomes(source: Path, files: list[Path], options: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        words = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "diffusers_own_tests", *options,
            f"--junitxml={report}", *map(str, files),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(TESTS), str(source / "src"), os.environ.get("PYTHONPATH"))))
        offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        ended = subprocess.run(words, cwd=source, env={**os.environ, **offline}, capture_output=True, text=True)
        if not report.exists():
            print(f"  pytest wrote no report: {ended.stdout[-500:]} {ended.stderr[-500:]}")
            return {}
        if ended.returncode > 1:  # neither passed nor failed: a test file could not be read
            print(f"  pytest ended with {ended.returncode}: {ended.stdout[-500:]}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("parts", nargs="*", metavar="PART")
    reader.add_argument("--diffusers", type=Path, default=None, metavar="PATH")
    asked = reader.parse_args()
    parts: dict[str, Callable[[], bool | None]] = {
        "store": partial(_program, "store"), "reproduce": partial(_program, "reproduce"), "folders": folders,
        "files": files, "calls": partial(_program, "calls"), "commands": partial(_program, "commands"), "soak": soak,
        "diffusers": lambda: own_tests_of_diffusers(asked.diffusers),
    }  # fmt: skip
    unknown = sorted(set(asked.parts) - parts.keys())
    if unknown:
        reader.error(f"part: expected some of {', '.join(parts)}, got {', '.join(unknown)}; leave it out for all.")
    outcome = {}
    for name in asked.parts or parts:
        begin = time.perf_counter()
        outcome[name] = parts[name]()
        word = {True: "passed", False: "FAILED", None: "skipped"}[outcome[name]]
        print(f"campaign: {name} {word}, {time.perf_counter() - begin:.0f} s", flush=True)
    sys.exit(1 if False in outcome.values() else 0)


if __name__ == "__main__":
    main()
