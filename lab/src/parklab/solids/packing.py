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
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from parkattn.checks import first_line, shown
from parklab.files import make_folder, read_file, within, write_atomically

INDEX = "packed.json"
SHARD_BYTES = 15 * 2**20
LEAST_ROUNDED = 4096  # weights; smaller tensors gain nothing
GROUP = 64  # weights of one step
STEP = ".step"
BITS = {"transformer": 6}
OTHER_BITS = 8
ENDINGS = (".json", ".safetensors")
LARGEST_INDEX, LARGEST_SHARD = 2**24, 2**28  # bytes; one tensor may be larger than SHARD_BYTES
MOST_WEIGHTS = 2**31  # of one tensor, which a few bytes of an index can claim


def rounded(weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Bytes of whole numbers like weights [rows, ...], and the steps [rows, groups]."""
    rows = weights.float().flatten(1)
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = 2 ** (bits - 1) - 1
    # a little above what is needed, so that rounding the step itself pushes no number over the largest
    step = ((groups.abs().amax(2) / largest) * (1 + 2**-8)).clamp(min=1e-30).bfloat16()
    numbers = (groups / step.float()[..., None]).round().clamp(-largest, largest).to(torch.int16) + largest
    return _bytes(numbers.flatten(), bits), step


class Kind(NamedTuple):
    """Of a rounded tensor."""

    bits: int
    shape: list[int]

    @classmethod
    def read(cls, bits: Any, shape: Any) -> Self:
        """From an index that anybody may have written."""
        if bits not in (*BITS.values(), OTHER_BITS):
            raise ValueError(f"{shown(bits)} bits")
        whole = isinstance(shape, list) and len(shape) >= 2 and all(type(n) is int and n > 0 for n in shape)
        if not whole or math.prod(shape) > MOST_WEIGHTS:
            raise ValueError(f"the shape {shown(shape)}")
        return cls(bits, shape)

    def fits(self, numbers: Tensor, step: Tensor) -> bool:
        """Whether these are the numbers and steps of such a tensor."""
        groups = math.ceil(math.prod(self.shape[1:]) / GROUP)
        bytes_ = self.shape[0] * groups * GROUP * self.bits // 8
        return (
            (numbers.dtype, step.dtype) == (torch.uint8, torch.bfloat16)
            and tuple(numbers.shape) == (bytes_,)
            and tuple(step.shape) == (self.shape[0], groups)
        )


def restored(numbers: Tensor, step: Tensor, kind: Kind) -> Tensor:
    largest = 2 ** (kind.bits - 1) - 1
    whole = _numbers(numbers, kind.bits, step.numel() * GROUP).view(*step.shape, GROUP) - largest
    rows = (whole.float() * step.float()[..., None]).flatten(1)
    return rows[:, : math.prod(kind.shape[1:])].reshape(kind.shape)


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


def in_numbers(weights: Mapping[str, Tensor], bits: int) -> tuple[dict[str, Tensor], dict[str, Kind]]:
    """Weights by name with the large ones of half precision as numbers and steps, and the kinds of these."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Kind] = {}
    for name, value in weights.items():
        if value.ndim >= 2 and value.numel() >= LEAST_ROUNDED and value.dtype == torch.float16:
            tensors[name], tensors[name + STEP] = rounded(value, bits)
            kinds[name] = Kind(bits, list(value.shape))
        else:
            tensors[name] = value
    return tensors, kinds


def pack(folder: Path, packed: Path) -> list[Path]:
    """Writes shards and then the index; shards of an earlier one go last, so a folder with an index is always whole."""
    texts = {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.json"))}
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Kind] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        part = str(file.relative_to(folder))
        held = {f"{part}:{name}": value for name, value in load_file(file).items()}
        numbers, rounded_ones = in_numbers(held, BITS.get(file.parent.name, OTHER_BITS))
        tensors, kinds = tensors | numbers, kinds | rounded_ones
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
    index = {"files": texts, "shards": names, "rounded": {key: kind._asdict() for key, kind in kinds.items()}}
    write_atomically(packed / INDEX, json.dumps(index).encode())
    for stale in packed.glob("weights-*.safetensors"):
        if stale.name not in names:
            stale.unlink()
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
    texts, shards, kinds = _index(packed)
    tensors: dict[str, Tensor] = {}
    for name in shards:
        data = read_file("packed", _inside(packed, name), "a file of weights", most=LARGEST_SHARD)
        named = re.fullmatch(r"weights-\d+\.([0-9a-f]{8})\.safetensors", name)
        if named and not hashlib.sha256(data).hexdigest().startswith(named[1]):
            raise _refusal(packed / name, "other contents than its name says")
        try:
            tensors |= load(data)
        except (SafetensorError, ValueError) as error:
            raise _refusal(packed / name, first_line(error)) from None
    made = {name: text.encode() for name, text in texts.items()}
    made |= {part: save(weights, {"format": "pt"}) for part, weights in _parts(packed, tensors, kinds).items()}
    places = {name: _inside(folder, name) for name in made}
    for name, data in made.items():
        make_folder(places[name].parent)
        write_atomically(places[name], data)
    return folder


def _index(packed: Path) -> tuple[dict[str, str], list[str], dict[str, Kind]]:
    """Texts by name, the names of shards, and bits and shape of the tensors that are rounded."""
    path = packed / INDEX
    data = read_file("packed", path, "the index of a packed folder", most=LARGEST_INDEX)
    try:
        index = json.loads(data)
        texts, shards, rounded_ones = index["files"], index["shards"], index["rounded"]
        if not all(isinstance(text, str) and text.encode() is not None for text in texts.values()):
            raise ValueError("other fields than texts")
        if not isinstance(shards, list) or not all(isinstance(name, str) for name in shards):
            raise ValueError("other fields than names of shards")
        kinds = {key: Kind.read(each["bits"], each["shape"]) for key, each in rounded_ones.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(path, first_line(error)) from None
    return texts, shards, kinds


def _parts(packed: Path, tensors: Mapping[str, Tensor], kinds: Mapping[str, Kind]) -> dict[str, dict[str, Tensor]]:
    """Weights by file and name."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        part, colon, name = key.partition(":")
        if not colon:
            raise _refusal(packed, f"a tensor {shown(key)} that is none of a file")
        if key.endswith(STEP):
            continue
        kind, step = kinds.get(key), tensors.get(key + STEP)
        if (kind is None) != (step is None) or (kind is not None and step is not None and not kind.fits(value, step)):
            raise _refusal(packed, f"{shown(key)} with other numbers or steps than its bits and shape ask for")
        whole = value if kind is None or step is None else restored(value, step, kind).half()
        parts.setdefault(part, {})[name] = whole
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
