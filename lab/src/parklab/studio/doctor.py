"""Is this machine ready, and what is to be gained on it? Facts, a self-test and arithmetic."""

from __future__ import annotations

import importlib.util
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from rich.table import Column, Table
from rich.text import Text

from parkattn.backend import resolve
from parkattn.checks import expect_choice, first_line
from parkattn.ops.attend.definition import dense_attention
from parkattn.park import ParkConfig, park_attention
from parkattn.settings import PRECISIONS, Precision
from parklab.extras import install_command
from parklab.record import environment, installed
from parklab.scene import clustered_scene
from parklab.sprites import CHECKPOINT
from parklab.studio.gain import (
    FORECAST,
    UTILISATION,
    estimate,
    expect_gpu,
    forwards_per_step,
    known_gpu,
    measured_forwards,
    model_size,
)
from parklab.studio.memory import memory, on_gpu
from parklab.studio.model_folder import judge_folder
from parklab.studio.request import expect_guidance
from parklab.studio.video import CODEC

STAGES = {
    "cluster": "k-means of queries, query-response clustering of keys",
    "importance": "PAMA: how much each query block wants each key block",
    "selection": "top-p or top-k",
    "permute": "gather into block order and back",
    "attend": "attention over the kept blocks",
}
HEAD_DIM = 128  # of Wan, HunyuanVideo and the shipped model
NEEDED = {"torch": "everything", "numpy": "everything", "safetensors": "plans and checkpoints"}
OPTIONAL = {
    "diffusers": ("generate, compare", install_command()),
    "transformers": ("generate, compare", install_command()),
    "av": ("mp4 files", install_command()),
    "pillow": ("labels in side-by-side videos", install_command()),
    "triton": ("GPU kernels", "pip install 'parkattn[triton]'"),
    "accelerate": ("generate, compare", install_command()),
    "lpips": ("the LPIPS column", install_command("metrics")),
    "matplotlib": ("park scene", install_command("plots")),
}


def examine(
    *,
    model: str,
    frames: int | None = None,
    height: int = 720,
    width: int = 1280,
    gpu: str | None = None,
    steps: int = 50,
    guidance: float | None = None,
    profile: str | None = None,
    density: float | None = None,
    tolerance: float | None = None,
    precision: str = "bf16",
) -> dict[str, Any]:
    """Everything `park doctor` shows; "healthy" decides the exit code. frames: the model's own when not given; profile:
    all of them. precision: of attention, in the estimate and in what each stage uses.
    """
    expect_choice("precision", precision, PRECISIONS)
    if gpu is not None:
        expect_gpu(gpu)
    if profile is not None:
        expect_choice("profile", profile, ParkConfig.PROFILES)
    if guidance is not None:
        expect_guidance(guidance)
    size = model_size(model)
    video: dict[str, Any] = {"frames": frames or size.video[0], "height": height, "width": width}
    here = gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    run: dict[str, Any] = {"steps": steps, "guidance": guidance, "density": density, "tolerance": tolerance}
    told = estimate(model, **video, gpu=here, precision=precision, **run)
    test = self_test()
    problems = [f"{name}: missing, needed for {why}" for name, why in NEEDED.items() if installed(name) is None]
    stages = stage_choices(cast(Precision, precision))
    problems += [f"{stage['stage']}: {stage['why']}" for stage in stages if stage["uses"] == "nothing"]
    problems += [] if test["passed"] else [f"self-test: {test['detail']}"]
    missing = [
        {"package": name, "for": why, "install": line}
        for name, (why, line) in OPTIONAL.items() if installed(name) is None
    ]  # fmt: skip
    run_size = replace(size, passes=forwards_per_step(size, guidance))
    needed = memory(model, run_size, **video, profile=profile or ParkConfig.DEFAULT_PROFILE)
    return {
        "healthy": not problems,
        "problems": problems,
        "environment": environment() | {"platform": platform.platform()},
        "packages": {name: installed(name) for name in (*NEEDED, *OPTIONAL)},
        "missing": missing,
        "gpu": gpu_facts(),
        "video": video_facts(),
        "shipped_model": shipped_facts(),
        "stages": stages,
        "self_test": test,
        "estimate": asked_for(told, profile),
        "memory": on_gpu(needed, known_gpu(here)),
    }


def asked_for(guess: dict[str, Any], profile: str | None) -> dict[str, Any]:
    if profile is None:
        return guess
    # turbo has the steps of fast, and no plan of it keeps more
    known = guess["profiles"]
    return guess | {"profiles": {profile: known[profile] if profile in known else known["fast"] | {"estimated": True}}}


def stage_choices(precision: Precision = "bf16") -> list[dict[str, str]]:
    """Which implementation each stage uses on this machine, and why."""
    device, dtype = _device()
    try:
        backend = resolve("auto", torch.device(device), dtype, HEAD_DIM, precision)
        uses, why = backend.name, backend.reason
    except (ValueError, TypeError, ImportError, OSError) as error:
        uses, why = "nothing", str(error)
    found = [{"stage": stage, "what": what, "uses": uses, "why": why} for stage, what in STAGES.items()]
    sort = {"uses": "reference", "why": "a sort of the block importances, in PyTorch everywhere"}
    return [row | sort if row["stage"] == "selection" else row for row in found]


def self_test() -> dict[str, Any]:
    """With every block kept PARK equals dense attention, on the CPU and, where there is one, on the GPU."""
    begin = time.perf_counter()
    kinds = [("cpu", torch.float32)] if _device()[0] == "cpu" else [("cpu", torch.float32), _device()]
    keep_all = ParkConfig(query_clusters=4, key_clusters=8, top_p=1.0, dense_fraction=0.0)
    reports, passed = [], True
    for device, dtype in kinds:
        q, k, v = (x.to(device, dtype) for x in clustered_scene(heads=2, grid=(4, 8, 8), dim=64)[:3])
        try:
            apart = park_attention(q, k, v, keep_all).float() - dense_attention(q.float(), k.float(), v.float())
        except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
            passed = False
            reports.append(f"{device}: {first_line(error)}")
            continue
        # float32: another order of summation over 256 keys; bfloat16: weights and output are rounded to 8 bits each
        bound = 256 * torch.finfo(dtype).eps if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        error_share = apart.abs().max().item() / v.abs().max().item()
        passed = passed and error_share <= bound
        reports.append(f"{device}: largest error {error_share:.1e} of the largest value, at most {bound:.1e} allowed")
    detail = "all blocks kept against dense attention; " + "; ".join(reports)
    return {"passed": passed, "detail": detail, "seconds": time.perf_counter() - begin}


def _device() -> tuple[str, torch.dtype]:
    """Where a user's model would run, and in what."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def gpu_facts() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [
        {"name": p.name, "architecture": f"sm_{p.major}{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)}
        for p in found
    ]


def video_facts() -> dict[str, Any]:
    if importlib.util.find_spec("av") is None:
        return {"mp4": False, "why": f"no package av; install it with: {install_command()}"}
    import av

    ready = CODEC in av.codecs_available
    return {"mp4": ready, "why": f"PyAV {av.__version__} {'with' if ready else 'without'} {CODEC}"}


def shipped_facts() -> dict[str, Any]:
    try:
        judge_folder(CHECKPOINT)
    except ValueError as error:
        return {"whole": False, "why": str(error)}
    size = sum(f.stat().st_size for f in CHECKPOINT.rglob("*") if f.is_file())
    return {"whole": True, "why": f"{size / 2**20:.0f} MiB in {CHECKPOINT}"}


def shown_examination(found: dict[str, Any], default_model: str) -> Iterator[Table | str]:
    """What `examine` found, for a console of any width: long texts go on below themselves."""
    where, test = found["environment"], found["self_test"]
    threads = f"{where['threads']} thread{'s' * (where['threads'] != 1)}"
    python = f"{where['python']}, {where['torch']}, {threads} on {where['cpu']}"
    gpus = [f"{gpu['name']}, {gpu['architecture']}, {gpu['memory_gib']} GiB" for gpu in found["gpu"]]
    rows: list[tuple[bool | None, str, str]] = [(True, "python, torch", python)]
    rows += [(True, "gpu", gpu) for gpu in gpus] or [(None, "gpu", "none: everything runs on the CPU")]
    rows += [(found["video"]["mp4"], "video", found["video"]["why"])]
    rows += [(found["shipped_model"]["whole"], "shipped model", found["shipped_model"]["why"])]
    rows += [(test["passed"], "self-test", f"{test['detail']}, {test['seconds']:.1f} s")]
    kinds: dict[tuple[str, str], list[str]] = {}
    for stage in found["stages"]:
        kinds.setdefault((stage["uses"], stage["why"]), []).append(stage["stage"])
    rows += [(None, "kernels", f"{', '.join(stages)}: {uses}; {why}") for (uses, why), stages in kinds.items()]
    rows += [(None, "not here", f"{row['package']} (for {row['for']}): {row['install']}") for row in found["missing"]]
    rows += [(False, "problem", problem) for problem in found["problems"]]
    yield _grid(rows)
    guess = found["estimate"]
    frames, height, width = guess["video"]
    chosen = ", the default; --model NAME takes another" if guess["model"] == default_model else ""
    yield f"\nEstimate for {guess['model']}{chosen}\n{frames} frames of {height} x {width}: {guess['tokens']:,} tokens"
    yield _grid([(None, name, text) for name, text in (*_gain_rows(guess), *_memory_rows(found["memory"]))])
    if found["memory"] is not None:
        yield _cards(found["memory"])


WAYS = {"stock": "stock", "compiled": "compiled blocks", "own kernel": "our kernel", "dense": "dense"}


def _gain_rows(guess: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "attention", f"{guess['attention_share']:.0%} of the work"
    each, source, measured_on = guess["forwards_per_step"], guess["source"], measured_forwards()["gpu"]
    sources = {
        "measured": f"composed of forwards that were measured on an {measured_on}, as in README's table",
        "scaled": f"estimated: seconds composed of forwards on an {measured_on}, times the ratio of the peaks",
        "arithmetic": f"not measured: estimated by arithmetic, at {UTILISATION:.0%} of the GPU's peak",
    }
    where = f" on {guess['gpu']}" if guess["gpu"] else ""
    rounded = "" if guess["precision"] == "bf16" else f", Q K^T of the profiles in {guess['precision'].upper()}"
    steps = f"{guess['steps']} step{'s' * (guess['steps'] > 1)} of {each} forward{'s' * (each > 1)}"
    yield "run", f"{steps}{where}{rounded}; {sources[source]}"
    if guess["dense_s"]:
        yield "dense", ", ".join(f"{WAYS[way]} {_duration(seconds)}" for way, seconds in guess["dense_s"].items())
    for name, park in guess["profiles"].items():
        seconds = [_duration(park["seconds"])] if "seconds" in park else []
        gains = [
            f"{park['speedup'][way]:.2f}x against {WAYS[way]}"
            for way in ("compiled", "stock", "dense")
            if way in park["speedup"]
        ]
        rough = " (estimated)" if park["estimated"] and source != "arithmetic" else ""
        phases = ", ".join(f"{count:.3g} {phase}" for phase, count in park["phases"].items())
        lacking = f"; {park['no_forecasts']}" if park["no_forecasts"] else ""
        lacking += "; as many forecasts as the small model's" if FORECAST in park["phases"] else ""
        lacking += f"; {park['no_precision']}" if park["no_precision"] else ""
        yield name, f"{', '.join(seconds + gains)}{rough}; steps: {phases}{lacking}"


def _duration(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _memory_rows(memory: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if memory is None:
        return
    weights, active, plans = memory["weights_gb"], memory["activations_gb"], memory["plans_gb"]
    several = f"{memory['transformers']} transformers of " if memory["transformers"] > 1 else ""
    decode = "not known, use enable_tiling()" if memory["decode_gb"] is None else f"{memory['decode_gb']:.1f}"
    yield (
        "memory, in GB",
        f"transformer {several}{weights['bfloat16']:.1f} (float8 {weights['float8']:.1f}), "
        f"its activations {active['stock']:.1f} ({active['compiled']:.1f} in compiled blocks), "
        f"state of PARK {plans['quality']:.2f} ({plans['fast']:.2f} with fast, {plans['paper']:.2f} with paper), "
        f"text encoders {memory['text_encoders_gb']:.1f}, VAE {memory['autoencoder_gb']:.1f}, decoding {decode}",
    )
    parts = (
        "every part but decoding" if memory["decode_gb"] is None else "every part (activations and decoding take turns)"
    )
    yield (
        "of these",
        f"{memory['transformer_forward_gb']:.1f} are a dense forward of the transformer alone; "
        f"the table below has whole videos: {parts}, with the state of {memory['profile']}",
    )
    here = memory.get("on_gpu", {"fits": {}})
    for size, ways in here["fits"].items():
        lacking = "" if here["float8"] else "; it multiplies no float8"
        yield f"fits {size} GB", f"{here['gpu']}: {'; '.join(ways) or 'none of the ways below'}{lacking}"


def _cards(memory: dict[str, Any]) -> Table:
    """Ways to run the model, and the cards that hold each."""
    table = Table("weights, offload", Column("peak GB", justify="right"), "fits a card of, in GB")
    for way, peak in memory["peaks_gb"].items():
        cards = ", ".join(card for card, ways in memory["fits"].items() if way in ways)
        table.add_row(way, f"{peak:.0f}", cards or "none of these")
    return table


def _grid(rows: Iterable[tuple[bool | None, str, str]]) -> Table:
    marks = {True: Text("ok", "green"), False: Text("no", "red"), None: Text("")}
    grid = Table.grid(Column(width=2), Column(width=13), Column(overflow="fold"), padding=(0, 1))
    for good, name, text in rows:
        grid.add_row(marks[good], Text(name, "bold"), Text(text))
    return grid
