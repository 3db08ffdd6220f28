"""What is done to a good model folder: one small function each. Code that runs leaves the file `ran` beside it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]

INDEX = "model_index.json"
WEIGHTS = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}


class Marker:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def ran(folder: Path) -> Path:
    return folder.parent / "ran"


def put_code(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    source = "Pipeline = X = WanPipeline = type('X', (), {'from_pretrained': classmethod(lambda *a, **o: None)})\n"
    path.write_text(f"import pathlib\npathlib.Path({str(ran(folder))!r}).touch()\n{source}")


def put_pickle(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(Marker(ran(folder))))


def only_pickle(folder: Path) -> None:
    drop(folder, WEIGHTS["text_encoder"])
    put_pickle(folder, "text_encoder/pytorch_model.bin")


def put(folder: Path, name: str, content: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def replaces(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def set_rules(folder: Path, part: str, rules: list[Any]) -> None:
    change(folder, "tokenizer/tokenizer.json", **{part: {"type": "Sequence", f"{part}s": rules}})


def name_component(folder: Path, part: str, entry: Any, code: str | None = None) -> None:
    change(folder, INDEX, **{part: entry})
    if code is not None:
        put_code(folder, code)


def drop(folder: Path, name: str) -> None:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_by_fifo(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def put_socket(folder: Path, name: str) -> None:
    here = Path.cwd()
    os.chdir(folder)  # a socket's path has 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    finally:
        os.chdir(here)


def link(folder: Path, name: str, target: str) -> None:
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        shutil.move(path, folder.parent / "outside")
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def move_out(folder: Path, name: str) -> None:
    """The good file, behind a link that leaves the folder."""
    outside = folder.parent / "outside.file"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)


def link_to_fifo(folder: Path, name: str) -> None:
    os.mkfifo(folder / "pipe")
    link(folder, name, str(folder / "pipe"))


def many_files(folder: Path) -> None:
    for i in range(2001):
        (folder / f"{i}.txt").touch()


def nest(folder: Path, depth: int) -> None:
    (folder / "/".join("d" * depth)).mkdir(parents=True)


def read_weights(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_weights(path: Path, header: Any, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], Any], part: str = "transformer") -> None:
    header, body = read_weights(folder / WEIGHTS[part])
    made = edit(header)
    write_weights(folder / WEIGHTS[part], header if made is None else made, body)


def first(header: dict[str, Any]) -> dict[str, Any]:
    return header[min(name for name in header if name != "__metadata__")]


def set_entry(**values: Any) -> Damage:
    return partial(edit_header, edit=lambda header: first(header).update(values))


def raw_header(folder: Path, text: bytes, length: int | None = None) -> None:
    write_weights(folder / WEIGHTS["transformer"], text, b"", length)


def twice(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()[:-1] + b"," + json.dumps(header).encode()[1:]


def shard(folder: Path, weight_map: Any = None, part: str = "transformer", **extra: Any) -> None:
    """The single file under a shard's name, with a list of it; `weight_map` maps the good list to the one that is
    written.
    """
    path = folder / WEIGHTS[part]
    header, _ = read_weights(path)
    name = "diffusion_pytorch_model-00001-of-00001.safetensors"
    path.rename(path.with_name(name))
    good = {tensor: name for tensor in header if tensor != "__metadata__"}
    made = {"metadata": {}, "weight_map": weight_map(good) if callable(weight_map) else weight_map} | extra
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(made))


def edit_tensors(folder: Path, part: str, edit: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / WEIGHTS[part]
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def remove_three(tensors: dict[str, Any]) -> None:
    for name in sorted(tensors)[:3]:
        del tensors[name]


def fill(value: float) -> Callable[[dict[str, Any]], None]:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[max(tensors)].view(-1)[-1] = value

    return edit
