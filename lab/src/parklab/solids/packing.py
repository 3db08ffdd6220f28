"""A diffusers folder in 8 bits and small files, and back: half the size of half precision.

    python -m parklab.solids.packing pack FOLDER PACKED
    python -m parklab.solids.packing unpack PACKED FOLDER

Matrices and convolutions become whole numbers from -127 to 127 with one step per row; everything else stays in half
precision, and the text encoder in single precision. Unpacked weights are ordinary half-precision files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from parkattn.checks import first_line, read_file, shown
from parkattn.files import make_folder, within, write_atomically

INDEX = "packed.json"
SHARD_BYTES = 15 * 2**20
LEAST_ROUNDED = 4096  # weights; smaller tensors gain nothing
STEP = ".step"
ENDINGS = (".json", ".safetensors")
LARGEST_INDEX, LARGEST_SHARD = 2**24, 2**28  # bytes; one tensor may be larger than SHARD_BYTES


def rounded(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers like weights [rows, ...] and the step of each row."""
    rows = weights.float().flatten(1)
    step = (rows.abs().amax(1) / 127).clamp(min=1e-12)
    return (rows / step[:, None]).round().to(torch.int8).view(weights.shape), step


def restored(numbers: Tensor, step: Tensor) -> Tensor:
    return (numbers.flatten(1).float() * step[:, None]).view(numbers.shape)


def pack(folder: Path, packed: Path) -> list[Path]:
    """Writes shards and the index last: a packed folder with an index is whole."""
    texts = {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.json"))}
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        part = str(file.relative_to(folder))
        for name, value in load_file(file).items():
            key = f"{part}:{name}"
            if value.ndim >= 2 and value.numel() >= LEAST_ROUNDED and value.dtype == torch.float16:
                tensors[key], tensors[key + STEP] = rounded(value)
            else:
                tensors[key] = value
    packed.mkdir(parents=True, exist_ok=True)
    for stale in (*packed.glob("weights-*.safetensors"), packed / INDEX):
        stale.unlink(missing_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for key, value in tensors.items():
        size = value.numel() * value.element_size()
        if filled + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][key] = value.contiguous()
        filled += size
    names = [f"weights-{index}.safetensors" for index in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_atomically(packed / name, save(shard))
    write_atomically(packed / INDEX, json.dumps({"files": texts, "shards": names}).encode())
    return [packed / name for name in (*names, INDEX)]


def unpack(packed: Path, folder: Path) -> Path:
    """The diffusers folder of a packed one, which may come from anywhere: it names its own files alone, and what it
    brings are configs and weights.
    """
    if not (packed / INDEX).is_file():
        raise FileNotFoundError(
            f"packed: expected {packed / INDEX}, got a folder without it; name a folder that `packing pack` wrote."
        )
    if folder.is_symlink():
        raise ValueError(f"packed: expected a folder to unpack to, got the link {folder}; remove it.")
    texts, shards = _index(packed)
    tensors: dict[str, Tensor] = {}
    for name in shards:
        data = read_file("packed", _inside(packed, name), "a file of weights", most=LARGEST_SHARD)
        try:
            tensors |= load(data)
        except (SafetensorError, ValueError) as error:
            raise _refusal(packed / name, first_line(error)) from None
    made = {name: text.encode() for name, text in texts.items()}
    made |= {part: save(weights, {"format": "pt"}) for part, weights in _parts(packed, tensors).items()}
    places = {name: _inside(folder, name) for name in made}
    for name, data in made.items():
        make_folder(places[name].parent)
        write_atomically(places[name], data)
    return folder


def _index(packed: Path) -> tuple[dict[str, str], list[str]]:
    """Texts by name, and the names of shards."""
    path = packed / INDEX
    data = read_file("packed", path, "the index of a packed folder", most=LARGEST_INDEX)
    try:
        index = json.loads(data)
        texts, shards = index["files"], index["shards"]
        whole = isinstance(texts, dict) and isinstance(shards, list) and all(isinstance(name, str) for name in shards)
        if not whole or not all(isinstance(text, str) and text.encode() is not None for text in texts.values()):
            raise ValueError("other fields than texts and names of shards")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(path, first_line(error)) from None
    return texts, shards


def _parts(packed: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Weights by file and name."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        part, colon, name = key.partition(":")
        step = tensors.get(key + STEP)
        if not colon or (step is not None and (value.ndim < 2 or step.shape != value.shape[:1])):
            raise _refusal(packed, f"a tensor {shown(key)} that is none of a file, or has other steps than rows")
        if not key.endswith(STEP):
            parts.setdefault(part, {})[name] = value if step is None else restored(value, step).half()
    return parts


def _inside(folder: Path, name: str) -> Path:
    path = within(folder, name)
    if path is None or not name.endswith(ENDINGS) or any(part.startswith(".") for part in name.split("/")):
        wanted = f"names below {folder} that end with {' or '.join(ENDINGS)}"
        raise ValueError(f"packed: expected {wanted}, got {shown(name)}; pack the model again.")
    return path


def _refusal(path: Path, got: str) -> ValueError:
    return ValueError(f"packed: expected what `packing pack` wrote in {path}, got {got}; pack the model again.")


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("verb", choices=("pack", "unpack"))
    reader.add_argument("source", type=Path)
    reader.add_argument("target", type=Path)
    asked = reader.parse_args()
    (pack if asked.verb == "pack" else unpack)(asked.source, asked.target)


if __name__ == "__main__":
    main()
