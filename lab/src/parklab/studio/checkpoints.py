"""From a folder or hub id to a pipeline: judged before anything is loaded, compared with its files after."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import os
import re
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from parkattn.checks import expect_choice, first_line
from parklab.extras import package
from parklab.sprites import CHECKPOINT
from parklab.studio.components import component_class, expect_kinds, load_weights, public_class
from parklab.studio.model_folder import INDEX, judge_folder, judge_index
from parklab.studio.placement import expect_offload, place, ran_out_of_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PIPELINE_MULTIPLE = 16  # stock pipelines refuse other heights and widths, also for models whose tokens are smaller
CHUNK = 2**22  # bytes per read of a fingerprint


def find_model(model: str | None) -> Path:
    """The folder of a model: the shipped one, a path, or a hub id (downloaded, safetensors only)."""
    if model is None:
        folder = CHECKPOINT
    elif os.path.exists(model):  # noqa: PTH110 - a name that no file system takes is False here and an error in pathlib
        folder = Path(os.path.realpath(model))
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model, re.ASCII) and len(model) <= 200:
        folder = _download(model)
    else:
        raise ValueError(
            f"model: expected a diffusers folder or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers, got {model!r}; "
            "check the path."
        )
    judge_folder(folder)
    return folder


def is_shipped(folder: Path) -> bool:
    return folder.resolve() == CHECKPOINT.resolve()


def fingerprint(folder: Path) -> str:
    """Tells retrained or edited weights apart: names and contents of every file a pipeline loads."""
    files = judge_folder(folder).files
    stats = [path.stat() for path in files]
    keys = [
        (path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in zip(files, stats, strict=True)
    ]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading leave the interpreter's lock
        digests = pool.map(lambda key: content_digest(*key), keys)
    whole = "".join(f"{path.relative_to(folder)} {digest}\n" for path, digest in zip(files, digests, strict=True))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=4096)
def content_digest(path: Path, size: int, changed_ns: int, inode: int) -> str:
    """sha256 of a file; the arguments tell its versions apart, so that one process reads a file once. Reset:
    cache_clear.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def choose_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ValueError(
            f"device: expected auto, cpu, cuda or cuda:N, got {device!r}; leave it out for the best this machine has."
        )
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"device: expected one this machine has, got {device!r} without a CUDA GPU; pass --device cpu."
        )
    if device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        raise ValueError(
            f"device: expected cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {device!r}; pass one of these."
        )
    return device


def choose_dtype(dtype: str, device: str) -> str:
    if dtype == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    expect_choice("dtype", dtype, DTYPES)
    return dtype


def load_pipeline(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    offload: str = "none",
    quantise: tuple[str, str | None] | None = None,
) -> Any:
    """The pipeline on its device, quiet, every weight from its files. Autoencoders stay in float32, which Wan's needs.

    quantise: the scheme, and the hash of the file if it is one.
    """
    expect_offload(offload, device)
    package("diffusers", "video pipelines")
    package("transformers", "text encoders")
    package("accelerate", "loading weights")
    judged = judge_folder(folder)
    with _one_line(folder), _quiet():
        for part in judged.components:
            expect_kinds(part, component_class(part))
        parts = {
            part.name: load_weights(part, torch.float32 if "vae" in part.name else DTYPES[dtype], quantise)
            for part in judged.components
            if part.role.weights is not None
        }
        cls = public_class("diffusers", judged.pipeline, "DiffusionPipeline")
        pipe = cls.from_pretrained(folder, use_safetensors=True, local_files_only=True, **parts)
        pipe.set_progress_bar_config(disable=True)
    return place(pipe, device, offload)


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """A checkpoint can be wrong in as many ways as there are loaders: whatever one of them raises becomes our form."""
    try:
        yield
    except (ModuleNotFoundError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a parser in Rust is no Exception
        first = first_line(error)
        if isinstance(error, ValueError) and first.startswith(("model: expected", "quantise: expected")):
            raise
        raise ValueError(
            f"model: expected {folder} to load as a diffusers pipeline, got: {first}; download or save it again."
        ) from error


@contextlib.contextmanager
def stock_failures_in_one_line(pipe: Any) -> Iterator[None]:
    """Configs and vocabularies that load and yet do not fit end a run in stock code; a failure through our code stays
    as it is.
    """
    try:
        yield
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        below = frames[2:]  # this and its caller
        if any(name.partition(".")[0] in ("parkattn", "parklab") for name in below):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"model: expected {type(pipe).__name__} to make a video of this request, got {type(error).__name__} "
            f"({first}); check its configs."
        ) from error


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
    every, stride = _strides(pipe)
    pixels = math.lcm(stride, PIPELINE_MULTIPLE)
    for name, value in (("height", height), ("width", width)):
        if value < pixels or value % pixels:
            near = max(pixels, round(value / pixels) * pixels)
            raise ValueError(f"{name}: expected a multiple of {pixels} for this model, got {value}; try {near}.")
    if frames < 1 or frames % every != 1 % every:
        near = max(1, round((frames - 1) / every) * every + 1)
        raise ValueError(f"frames: expected a multiple of {every} plus 1 for this model, got {frames}; try {near}.")
    # rotary positions come from a table that the model brings; other families compute them for any size
    table = getattr(pipe.transformer.config, "rope_max_seq_len", None)
    if table is None:
        return
    for name, value, most in (
        ("frames", frames, (table - 1) * every + 1),
        ("height", height, table * stride // pixels * pixels),
        ("width", width, table * stride // pixels * pixels),
    ):
        if value > most:
            raise ValueError(
                f"{name}: expected at most {most}, where this model's table of positions ends, got {value}; lower it."
            )


def expect_whole_text(pipe: Any, name: str, text: str, room: int) -> None:
    """Refused, because stock pipelines cut a longer text without a word: minutes later the video would show something
    else.
    """
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
    advice = (
        "leave out --text-tokens"
        if fits
        else f"shorten the {name}, or pass --text-tokens {needed} if this model reads so many"
    )
    raise ValueError(
        f"text_tokens: expected at least {needed} for this {name}, got {room}, which would cut it; {advice}."
    )


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
    frames = (
        getattr(pipe, "vae_scale_factor_temporal", None) or getattr(pipe, "vae_temporal_compression_ratio", None) or 4
    )
    pixels = (
        getattr(pipe, "vae_scale_factor_spatial", None) or getattr(pipe, "vae_spatial_compression_ratio", None) or 8
    )
    strides = frames * patch_frames, pixels * patch_pixels
    if not all(type(stride) is int and stride > 0 for stride in strides):
        raise ValueError(
            f"model: expected whole frames and pixels per token in its configs, got {strides}; "
            "download or save it again."
        )
    return strides


def _download(name: str) -> Path:
    """Data files of the components that model_index.json names, after it was judged: code is not even fetched."""
    hub = package("huggingface_hub", "model downloads")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=[INDEX]))
        parts = judge_index(folder)
        wanted = [
            INDEX,
            *(
                f"{part}/{files}"
                for part in parts
                for files in ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
            ),
        ]
        # a second dot marks a variant, such as model.fp16.safetensors
        return Path(hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*.*.safetensors"]))
    except Exception as error:  # the hub's errors have no common base
        first = first_line(error)
        if first.startswith(("model: expected", "quantise: expected")):
            raise
        raise ValueError(
            f"model: expected a folder or a reachable hub id, got {name!r} ({first}); check the name and the network."
        ) from None
