"""From a folder or hub id to a pipeline: every way a checkpoint can be wrong is found before anything is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from parkattn.checks import expect_choice
from parkattn.extras import package
from parkattn.sprites import CHECKPOINT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OFFLOADS = ("none", "model", "sequential")
PIPELINE_MULTIPLE = 16  # stock pipelines refuse other heights and widths, also for models whose tokens are smaller
SAMPLE = 2**20  # bytes at each end of a weights file that enter the fingerprint


def find_model(model: str | None) -> Path:
    """The folder of a model: the shipped one, a path, or a hub id (downloaded, safetensors only)."""
    if model is None:
        folder = CHECKPOINT
    elif Path(model).exists():
        folder = Path(model).resolve()
    elif model.count("/") == 1 and not model.startswith((".", "/", "~")):
        folder = _download(model)
    else:
        raise ValueError(
            f"model: expected a diffusers folder or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers, got {model!r}; check the path."
        )
    check_folder(folder)
    return folder


def is_shipped(folder: Path) -> bool:
    return folder.resolve() == CHECKPOINT.resolve()


def check_folder(folder: Path) -> None:
    """An ordinary diffusers folder with every component, weights in whole safetensors files."""
    index = _json(folder / "model_index.json", "a diffusers folder has one")
    for name, entry in index.items():
        if name.startswith("_") or not (isinstance(entry, list) and len(entry) == 2 and entry[0]):
            continue
        part = folder / name
        if not part.is_dir() or not any(part.iterdir()):
            raise ValueError(f"model: expected component {name} in {folder}, got no such folder; download or save the pipeline again.")
        config = part / "config.json"
        if config.exists():
            _json(config, "every component has one")
        _check_weights(part, needs_weights=config.exists())


def fingerprint(folder: Path) -> str:
    """Tells retrained or edited weights apart: names, sizes and both ends of every file a pipeline loads."""
    digest = hashlib.sha256()
    for path in sorted([folder / "model_index.json", *folder.glob("*/*.json"), *folder.glob("*/*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]


def choose_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {device!r}; leave it out for the best this machine has.")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one this machine has, got {device!r} without a CUDA GPU; pass --device cpu.")
    if device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        raise ValueError(f"device: expected cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {device!r}; pass one of these.")
    return device


def choose_dtype(dtype: str, device: str) -> str:
    if dtype == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    expect_choice("dtype", dtype, DTYPES)
    return dtype


def load_pipeline(folder: Path, *, device: str = "cpu", dtype: str = "float32", offload: str = "none") -> Any:
    """The pipeline on its device, quiet. Autoencoders stay in float32, which Wan's needs."""
    expect_choice("offload", offload, OFFLOADS)
    diffusers = package("diffusers", "video pipelines")
    package("transformers", "text encoders")
    kinds = {"default": DTYPES[dtype], "vae": torch.float32}
    try:
        with _quiet():
            # newer releases call it dtype and warn; the older name works in all of them
            pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=kinds, use_safetensors=True, local_files_only=True)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # a checkpoint can be wrong in as many ways as there are loaders
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model: expected {folder} to load as a diffusers pipeline, got: {first}; download or save it again.") from error
    pipe.set_progress_bar_config(disable=True)
    if offload == "none":
        return pipe.to(device)
    if not device.startswith("cuda"):
        raise ValueError(f"offload: expected none on {device}, got {offload!r}; offloading moves weights between CPU and GPU.")
    package("accelerate", "offloading")
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"  # offloading would take the first GPU, also in a process that was given another
    pipe.enable_model_cpu_offload(device=device) if offload == "model" else pipe.enable_sequential_cpu_offload(device=device)
    return pipe


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading without the loaders' own bars and warnings: errors still come through."""
    logs = [package(f"{name}.utils.logging", "video pipelines") for name in ("diffusers", "transformers")]
    levels = [log.get_verbosity() for log in logs]
    for log in logs:
        log.set_verbosity_error()
        log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.set_verbosity(level)
            log.enable_progress_bar()


def expect_size(pipe: Any, frames: int, height: int, width: int) -> None:
    every, pixels = _strides(pipe)
    pixels = math.lcm(pixels, PIPELINE_MULTIPLE)
    for name, value in (("height", height), ("width", width)):
        if value < pixels or value % pixels:
            near = max(pixels, round(value / pixels) * pixels)
            raise ValueError(f"{name}: expected a multiple of {pixels} for this model, got {value}; try {near}.")
    if frames < 1 or frames % every != 1 % every:
        near = max(1, round((frames - 1) / every) * every + 1)
        raise ValueError(f"frames: expected a multiple of {every} plus 1 for this model, got {frames}; try {near}.")


def expect_whole_text(pipe: Any, name: str, text: str, room: int) -> None:
    """Refused, because stock pipelines cut a longer text without a word: minutes later the video would show something else."""
    tokenizer, accepted = getattr(pipe, "tokenizer", None), inspect.signature(pipe.__call__).parameters
    if tokenizer is None or "max_sequence_length" not in accepted:
        return
    # HunyuanVideo writes the prompt into a template, whose beginning it then takes away again
    template = accepted["prompt_template"].default if "prompt_template" in accepted else {}
    whole = tokenizer(template.get("template", "{}").replace("{}", text), verbose=False).input_ids
    needed = len(whole) - (template.get("crop_start") or 0)
    if needed <= room:
        return
    own = accepted["max_sequence_length"].default
    fits = isinstance(own, int) and needed <= own
    advice = "leave out --text-tokens" if fits else f"shorten the {name}, or pass --text-tokens {needed} if this model reads so many"
    raise ValueError(f"text_tokens: expected at least {needed} for this {name}, got {room}, which would cut it; {advice}.")


def token_count(pipe: Any, frames: int, height: int, width: int) -> int:
    """Video tokens in one attention call."""
    every, pixels = _strides(pipe)
    return math.prod(((frames - 1) // every + 1, height // pixels, width // pixels))


def _strides(pipe: Any) -> tuple[int, int]:
    """(frames, pixels) per token, the first frame apart."""
    config = pipe.transformer.config
    patch = getattr(config, "patch_size", 1)
    patch_frames, patch_pixels = (
        (patch[0], patch[1]) if isinstance(patch, (tuple, list)) else (getattr(config, "patch_size_t", 1) or 1, patch)
    )
    frames = getattr(pipe, "vae_scale_factor_temporal", None) or getattr(pipe, "vae_temporal_compression_ratio", None) or 4
    pixels = getattr(pipe, "vae_scale_factor_spatial", None) or getattr(pipe, "vae_spatial_compression_ratio", None) or 8
    return frames * patch_frames, pixels * patch_pixels


def _download(name: str) -> Path:
    diffusers = package("diffusers", "video pipelines")
    try:
        return Path(diffusers.DiffusionPipeline.download(name, use_safetensors=True))
    except Exception as error:  # the hub's errors have no common base
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model: expected a folder or a reachable hub id, got {name!r} ({first}); check the name and the network."
        ) from None


def _json(path: Path, why: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ValueError(f"model: expected {path}, got no such file ({why}); pass a folder saved by save_pretrained.") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"model: expected JSON in {path}, got a broken file ({error}); download or save it again.") from None


def _check_weights(part: Path, *, needs_weights: bool) -> None:
    from safetensors import SafetensorError, safe_open

    files = sorted(part.glob("*.safetensors"))
    for listing in part.glob("*.safetensors.index.json"):
        shards = set(_json(listing, "it lists the shards").get("weight_map", {}).values())
        for shard in sorted(shards - {file.name for file in files}):
            raise ValueError(f"model: expected shard {shard} in {part}, got no such file; download the model again.")
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for p in part.glob(pattern)]
    if pickles and not files:
        raise ValueError(
            f"model: expected safetensors in {part}, got pickle only ({pickles[0]}), which can run code; convert it to safetensors first."
        )
    if needs_weights and not files and part.name not in ("scheduler", "tokenizer", "tokenizer_2"):
        raise ValueError(f"model: expected a .safetensors file in {part}, got none; download or save the pipeline again.")
    for file in files:
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model: expected whole weights in {file}, got a broken file ({error}); download it again.") from None
