"""In what form a pipeline's weights are kept, and where they wait: as `park doctor` and docs/quantised.md name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from parkattn.checks import expect_choice, first_line
from parklab.extras import package
from parklab.files import sha256_of
from parklab.studio.model_folder import judge_index

OFFLOADS = ("none", "model", "group", "sequential")
ROUNDED = ("float8", "int8")  # by torchao: weights and activations, a scale per row; weights alone
GGUF = ".gguf"
MULTIPLIES_FLOAT8 = (8, 9)  # compute capability: Ada, Hopper and later


def expect_offload(offload: str, device: str) -> None:
    expect_choice("offload", offload, OFFLOADS)
    if offload != "none" and not device.startswith("cuda"):
        raise ValueError(
            f"offload: expected none on {device}, got {offload!r}; offloading moves weights between CPU and GPU."
        )


def expect_together(offload: str, quantise: str | None) -> None:
    if offload == "sequential" and (quantise or "").endswith(GGUF):
        raise ValueError(
            f"offload: expected none, model or group with a {GGUF} file, got 'sequential', by which accelerate cannot "
            "move its weights; pass group."
        )


def place(pipe: Any, device: str, offload: str) -> Any:
    if offload == "none":
        return pipe.to(device)
    if device == "cuda":
        # offloading would take the first GPU, also in a process that was given another
        device = f"cuda:{torch.cuda.current_device()}"
    if offload == "group":
        offload_groups(pipe, torch.device(device))
    elif offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.enable_sequential_cpu_offload(device=device)
    return pipe


def offload_groups(pipe: Any, device: torch.device) -> None:
    """One block of a transformer at a time, the next on its way; encoders by leaves; decoders stay."""
    hooks = package("diffusers.hooks", "group offload")
    waits = {"onload_device": device, "offload_device": torch.device("cpu"), "use_stream": device.type == "cuda"}
    parts: dict[str, Any] = {n: part for n, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    for name, part in parts.items():
        if name.startswith("transformer"):
            part.enable_group_offload(offload_type="block_level", num_blocks_per_group=1, **waits)
        elif "vae" in name or name == "vocoder":
            part.to(device)
        else:
            hooks.apply_group_offloading(part, offload_type="leaf_level", **waits)


def judge_quantise(scheme: str, device: str, folder: Path) -> str | None:
    """The hash of a GGUF file; None for weights that are rounded as they are loaded."""
    if scheme.endswith(GGUF):
        package("gguf", "GGUF files", "quant")
        found = sha256_of(Path(scheme))
        if found is None:
            raise ValueError(f"quantise: expected a file, got {scheme!r}, which is none; check the path.")
        if sum(name.startswith("transformer") for name in judge_index(folder)) > 1:
            raise ValueError(
                "quantise: expected float8 or int8 for a model of two transformers, got one file; pass float8."
            )
        return found[:16]
    if scheme not in ROUNDED:
        raise ValueError(
            f"quantise: expected {', '.join(ROUNDED)} or a {GGUF} file, got {scheme!r}; pick one of these."
        )
    package("torchao", f"{scheme} weights", "quant")
    if scheme == "float8" and not device.startswith("cuda"):
        raise ValueError(f"quantise: expected int8 or a {GGUF} file on {device}, got float8; float8 needs a GPU.")
    if scheme == "float8" and torch.cuda.get_device_capability(device) < MULTIPLIES_FLOAT8:
        raise ValueError(
            f"quantise: expected int8 or a {GGUF} file on {torch.cuda.get_device_name(device)}, got float8; "
            "float8 products need sm_89 or newer."
        )
    return None


def rounding(scheme: str) -> dict[str, Any]:
    """Arguments by which from_pretrained rounds the linears of a transformer."""
    from torchao import quantization

    per_row = quantization.Float8DynamicActivationFloat8WeightConfig
    config = per_row(granularity=quantization.PerRow()) if scheme == "float8" else quantization.Int8WeightOnlyConfig()
    return {"quantization_config": package("diffusers", "video pipelines").TorchAoConfig(config)}


def from_gguf(cls: Any, folder: Path, file: str, known: str | None, dtype: torch.dtype) -> Any:
    """The transformer of a GGUF file, whose sizes the folder's config says.
    known: the file's hash when the run began.
    """
    if (sha256_of(Path(file)) or "")[:16] != known:
        raise ValueError(f"quantise: expected {file} as it was when the run began, got other bytes; run again.")
    if not hasattr(cls, "from_single_file"):
        raise ValueError(
            f"quantise: expected a model that diffusers reads from one file, got {cls.__name__}; leave it out."
        )
    config = package("diffusers", "video pipelines").GGUFQuantizationConfig(compute_dtype=dtype)
    try:
        made = cls.from_single_file(
            file, config=str(folder), quantization_config=config, torch_dtype=dtype, local_files_only=True
        )
    except (torch.OutOfMemoryError, ModuleNotFoundError):
        raise
    except Exception as error:  # loaders have no common error
        wanted = f"quantise: expected weights of {cls.__name__} in {file}"
        raise ValueError(f"{wanted}, got {first_line(error)}; pass a GGUF file of this model.") from None
    lacking = sorted(name for name, value in made.state_dict().items() if value.is_meta)
    if lacking:
        raise ValueError(
            f"quantise: expected all weights of {cls.__name__} in {file}, got none for {lacking[0]}; check it."
        )
    return made.eval()


def ran_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a type for a GPU's memory only; the CPU's allocator is known by its name in the message."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
