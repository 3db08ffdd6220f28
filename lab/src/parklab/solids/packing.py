"""A diffusers folder in 8 bits and small files, and back: half the size of half precision.

    python -m parklab.solids.packing pack FOLDER PACKED
    python -m parklab.solids.packing unpack PACKED FOLDER

Matrices and convolutions become whole numbers from -127 to 127 with one step per row; everything else stays in half
precision, and the text encoder in single precision. Unpacked weights are ordinary half-precision files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from parkattn.checks import shown
from parkattn.files import make_folder, within, write_atomically

INDEX = "packed.json"
SHARD_BYTES = 15 * 2**20
LEAST_ROUNDED = 4096  # weights; smaller tensors gain nothing
STEP = ".step"


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
    """The diffusers folder of a packed one."""
    if not (packed / INDEX).is_file():
        raise FileNotFoundError(
            f"packed: expected {packed / INDEX}, got a folder without it; name a folder that `packing pack` wrote."
        )
    index = json.loads((packed / INDEX).read_text())
    tensors: dict[str, Tensor] = {}
    for name in index["shards"]:
        tensors |= load_file(_inside(packed, name))
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.endswith(STEP):
            continue
        part, name = key.split(":", 1)
        whole = restored(value, tensors[key + STEP]).half() if key + STEP in tensors else value
        parts.setdefault(part, {})[name] = whole
    made = {name: text.encode() for name, text in index["files"].items()}
    made |= {part: save(weights, {"format": "pt"}) for part, weights in parts.items()}
    places = {name: _inside(folder, name) for name in made}
    for name, data in made.items():
        make_folder(places[name].parent)
        write_atomically(places[name], data)
    return folder


def _inside(folder: Path, name: str) -> Path:
    """A packed folder may come from anywhere: its names reach nothing outside."""
    path = within(folder, name)
    if path is None:
        raise ValueError(f"packed: expected names below {folder}, got {shown(name)}; pack the model again.")
    return path


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("verb", choices=("pack", "unpack"))
    reader.add_argument("source", type=Path)
    reader.add_argument("target", type=Path)
    asked = reader.parse_args()
    (pack if asked.verb == "pack" else unpack)(asked.source, asked.target)


if __name__ == "__main__":
    main()
