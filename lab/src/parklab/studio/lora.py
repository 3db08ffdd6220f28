"""A LoRA file: judged by its header and values before diffusers' loader sees it, and counted afterwards.

Effective weights are W + s B A. diffusers would read the scale s out of the file's metadata as a PEFT config, which can
name modules to import. Here s = alpha / r (or alpha / sqrt(r)) is read as two numbers and multiplied into B; no config
is passed on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from parklab.extras import package
from parklab.sprites import LORAS
from parklab.studio.model_files import read_header

ADAPTER = "lora"
LARGEST_RANK = 1024
FIRST, SECOND = (
    r"\.lora_A\.(?:\w+\.)?weight|\.lora_down\.weight|\.lora\.down\.weight",
    r"\.lora_B\.|\.lora_up\.|\.lora\.up\.",
)
TENSORS = re.compile(rf"(?:{FIRST}|{SECOND}|\.alpha$|\.diff$|\.diff_b$)")
METADATA = "lora_adapter_metadata"


def judge_lora(path: str) -> str:
    """The hash of a file that holds a LoRA and nothing else, or one line that says what it is instead."""
    path = str(LORAS.get(path, path))
    file = Path(path)
    # a name that no file system takes is False here and an error in pathlib
    if file.suffix != ".safetensors" or not os.path.isfile(path):  # noqa: PTH113
        there = os.path.exists(path)  # noqa: PTH110
        got = "a file of another kind (a pickle can run code)" if there else "no such file"
        raise _refusal(path, got, "pass a .safetensors file")
    with _in_one_line(path):
        shapes = read_header(file)
    others = [name for name in shapes if TENSORS.search(name) is None]
    if others:
        kinds = f"{len(others)} tensors of other kinds ({others[0][:80]})"
        raise _refusal(path, kinds, "pass a LoRA, not a whole model")
    firsts = [shape for name, shape in shapes.items() if re.search(FIRST, name)]
    if not firsts or any(len(shape) < 2 or shape[0] > LARGEST_RANK for shape in firsts):
        raise _refusal(
            path,
            f"{len(firsts)} first matrices, ranks {sorted({shape[0] for shape in firsts if shape})}",
            "pass a LoRA",
        )
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


def add_lora(pipe: Any, path: str, expected_hash: str | None) -> None:
    """The file's LoRA in the pipeline's transformer; every pair of matrices must find its layer."""
    package("peft", "LoRA files", "lora")
    path = str(LORAS.get(path, path))
    if expected_hash is not None and judge_lora(path) != expected_hash:
        raise ValueError(f"lora: expected {path} as it was when the run began, got other bytes; run again.")
    if not hasattr(pipe, "load_lora_weights"):
        raise ValueError(f"lora: expected a pipeline that takes one, got {type(pipe).__name__}; leave out --lora.")
    with safetensors.safe_open(path, "pt") as file:
        scale = _scale_of(path, file.metadata() or {})
    tensors = _scaled(safetensors.torch.load_file(path), scale)
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise _refusal(path, f"NaN or Inf in {name} (at a scale of {scale:g})", "download it again")
    with _in_one_line(path), _silent_loader():
        pipe.load_lora_weights(tensors, adapter_name=ADAPTER)
    pairs = sum(re.search(FIRST, name) is not None for name in tensors)
    found = sum(ADAPTER in getattr(module, "lora_A", {}) for module in pipe.transformer.modules())
    if found < pairs:
        raise _refusal(
            path,
            f"{pairs} pairs of matrices, of which {found} found their layer in {type(pipe.transformer).__name__}",
            "pass one of this model",
        )


def _scale_of(path: str, metadata: dict[str, str]) -> float:
    """1 where the metadata says nothing, as in diffusers."""
    try:
        told = json.loads(metadata.get(METADATA, "{}"))
        told = {name.removeprefix("transformer."): value for name, value in told.items()}
        rank, alpha = told.get("r"), told.get("lora_alpha")
        if any(told.get(name) for name in ("rank_pattern", "alpha_pattern", "use_dora")):
            raise ValueError("ranks or scales of single layers, or DoRA")
        if rank is None or alpha is None:
            return 1.0
        scale = float(alpha) / (math.sqrt(rank) if told.get("use_rslora") else float(rank))
        if not math.isfinite(scale):
            raise ValueError(f"a scale of {scale}")
        return scale
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        got = f"metadata that is not one rank and one alpha ({error})"
        raise _refusal(path, got, "save it with one of each") from None


def _scaled(tensors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {name: value * scale if scale != 1 and re.search(SECOND, name) else value for name, value in tensors.items()}


@contextlib.contextmanager
def _silent_loader() -> Iterator[None]:
    """diffusers logs whole lists of shapes before it raises."""
    log = package("diffusers.utils.logging", "video pipelines")
    before = log.get_verbosity()
    log.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        log.set_verbosity(before)


@contextlib.contextmanager
def _in_one_line(path: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, ModuleNotFoundError):
        raise
    except Exception as error:  # loaders have no common error
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        why = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise _refusal(path, why, "pass one of this model") from None


def _refusal(path: str, got: str, advice: str) -> ValueError:
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in f"{path}: {got}"[:400])
    return ValueError(f"lora: expected a LoRA in a safetensors file, got {plain}; {advice}.")
