"""A diffusers folder in 6 and 8 bits and small files, and back.

    python -m parklab.solids.packing pack FOLDER PACKED
    python -m parklab.solids.packing unpack PACKED FOLDER

Matrices and convolutions become whole numbers, of 6 bits in the transformer and 8 in the autoencoder, with one step for
each 64 neighbours of a row; the step is a bfloat16. Everything else stays in half precision, and the text encoder in
single precision. Unpacked weights are ordinary half-precision files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from parkattn.checks import shown
from parkattn.files import make_folder, within, write_atomically

INDEX = "packed.json"
SHARD_BYTES = 15 * 2**20
LEAST_ROUNDED = 4096  # weights; smaller tensors gain nothing
GROUP = 64  # weights of one step
STEP = ".step"
BITS = {"transformer": 6}
OTHER_BITS = 8


def rounded(weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Bytes of whole numbers like weights [rows, ...], and the steps [rows, groups]."""
    rows = weights.float().flatten(1)
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = 2 ** (bits - 1) - 1
    # a little above what is needed, so that rounding the step itself pushes no number over the largest
    step = ((groups.abs().amax(2) / largest) * (1 + 2**-8)).clamp(min=1e-30).bfloat16()
    numbers = (groups / step.float()[..., None]).round().clamp(-largest, largest).to(torch.int16) + largest
    return _bytes(numbers.flatten(), bits), step


def restored(numbers: Tensor, step: Tensor, shape: list[int], bits: int) -> Tensor:
    largest = 2 ** (bits - 1) - 1
    whole = _numbers(numbers, bits, step.numel() * GROUP).view(*step.shape, GROUP) - largest
    rows = (whole.float() * step.float()[..., None]).flatten(1)
    return rows[:, : math.prod(shape[1:])].reshape(shape)


def _bytes(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of 6 bits: four in three bytes; the upper bits of the fourth go around."""
    if bits == 8:
        return numbers.to(torch.uint8)
    a, b, c, d = numbers.view(-1, 4).unbind(1)
    packed = torch.stack([a | (d & 3) << 6, b | (d >> 2 & 3) << 6, c | (d >> 4) << 6], 1)
    return packed.to(torch.uint8).flatten()


def _numbers(packed: Tensor, bits: int, count: int) -> Tensor:
    if bits == 8:
        return packed[:count].to(torch.int16)
    a, b, c = packed.to(torch.int16).view(-1, 3).unbind(1)
    return torch.stack([a & 63, b & 63, c & 63, a >> 6 | (b >> 6) << 2 | (c >> 6) << 4], 1).flatten()[:count]


def pack(folder: Path, packed: Path) -> list[Path]:
    """Writes shards and then the index; shards of an earlier one go last, so a folder with an index is always whole."""
    texts = {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.json"))}
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, dict[str, object]] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        part = str(file.relative_to(folder))
        bits = BITS.get(file.parent.name, OTHER_BITS)
        for name, value in load_file(file).items():
            key = f"{part}:{name}"
            if value.ndim >= 2 and value.numel() >= LEAST_ROUNDED and value.dtype == torch.float16:
                tensors[key], tensors[key + STEP] = rounded(value, bits)
                kinds[key] = {"bits": bits, "shape": list(value.shape)}
            else:
                tensors[key] = value
    packed.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for key, value in tensors.items():
        size = value.numel() * value.element_size()
        if filled + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][key] = value.contiguous()
        filled += size
    names = []
    for number, shard in enumerate(shards):
        data = save(shard)
        names.append(f"weights-{number}.{hashlib.sha256(data).hexdigest()[:8]}.safetensors")
        write_atomically(packed / names[-1], data)
    write_atomically(packed / INDEX, json.dumps({"files": texts, "shards": names, "rounded": kinds}).encode())
    for stale in packed.glob("weights-*.safetensors"):
        if stale.name not in names:
            stale.unlink()
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
        kind = index["rounded"].get(key)
        whole = restored(value, tensors[key + STEP], **kind).half() if kind else value
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
