"""What a model folder may hold, judged from names, sizes, JSON and safetensors headers: nothing in it is imported or unpickled.

A loader sees a folder only after this file has passed it, so that what is refused does not depend on a loader's version.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkattn.models import MODELS
from parklab.studio.tokenizer_rules import fault_in_rules

INDEX = "model_index.json"
MIB, GIB = 2**20, 2**30
# the largest known: 35 MiB of tokenizer.json, 57 GiB of weights in one file; headers hold about 100 bytes per tensor
LARGEST_CONFIG, LARGEST_VOCABULARY, LARGEST_WEIGHTS, LARGEST_HEADER = 8 * MIB, 128 * MIB, 96 * GIB, 16 * MIB
LARGEST_TOKENIZER = 64 * MIB
MOST_FILES, DEEPEST, LONGEST_NAME, MOST_TENSORS = 2000, 4, 200, 100_000
LARGEST_NUMBER = 2**20  # in a model's or scheduler's config: vocabularies and position tables of known models stay below
LARGEST_BASE = 1e9  # of rotary frequencies, which no memory depends on
# tables of positions are made while a model is built, from numbers that no weights confirm; known: 2**17 and 7 million
TABLES = {("rope_max_seq_len", "attention_head_dim"): 2**22, ("sample_width", "sample_height", "sample_frames"): 2**24}
# no wider than the widest weights; CLIP's config names a projection that the encoder may not have
WIDTH = re.compile(r"(?!.*projection_dim)(.*_)?(dim|channels|heads|hidden_size|d_model|d_ff|d_kv)")

CODE = {".py", ".pyc", ".pyo", ".pyw", ".pyd", ".pyx", ".so", ".dll", ".dylib", ".egg", ".whl"}
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".h5", ".msgpack", ".onnx", ".gguf", ".dduf"}
# files that would send a loader to other weights or to code elsewhere
DETOURS = {"adapter_config.json", "modular_model_index.json", "flashpack_config.json"}
# names in any JSON that ask a loader for code, for another repository or for a quantiser's classes
FORBIDDEN = {
    "auto_map", "custom_pipeline", "custom_pipelines", "trust_remote_code", "custom_generate", "quantization_config", "kernel_config",
    "use_kernels", "hub_kernel_config", "base_model_name_or_path", "gguf_file",
}  # fmt: skip
# published tokenizers and encoders carry their author's path here; no loader opens it
UNREAD = {"special_tokens_map_file", "_name_or_path", "name_or_path"}
OPENED = {"vocab", "merges", "init_inputs"}  # a tokenizer takes a string here as the path of a file
TOKENS = {"content", "chat_template"}  # any text
LEAVES = re.compile(r"[/~]\S|file:|(\S*/)?\.\.(/|$)")  # begins a path that is not in the folder
ATTENTIONS = (None, True, False, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What may stand behind a component's name in model_index.json: a library, and the classes of the supported families."""

    library: str
    classes: str  # regular expression
    config: str | None = None  # the file a loader cannot do without
    weights: str | None = None  # stem of the weights' files


_DIFFUSION, _ENCODER = "diffusion_pytorch_model", "model"
ROLES = {
    "transformer": Role("diffusers", "|".join(MODELS), "config.json", _DIFFUSION),
    "vae": Role("diffusers", r"AutoencoderKL(Wan|HunyuanVideo|HunyuanVideo15|CogVideoX|LTXVideo|Mochi)", "config.json", _DIFFUSION),
    "scheduler": Role("diffusers", r"\w+Scheduler", "scheduler_config.json"),
    "guider": Role("diffusers", r"\w+Guidance", "guider_config.json"),
    "text_encoder": Role(
        "transformers",
        r"(UM)?T5EncoderModel|LlamaModel|CLIPTextModel(WithProjection)?|LlavaForConditionalGeneration"
        r"|Qwen2_5_VL(TextModel|Model|ForConditionalGeneration)",
        "config.json",
        _ENCODER,
    ),
    "image_encoder": Role("transformers", r"CLIPVisionModel(WithProjection)?|SiglipVisionModel", "config.json", _ENCODER),
    "tokenizer": Role("transformers", r"\w*Tokenizer(Fast)?|TokenizersBackend"),
    "image_processor": Role("transformers", r"(CLIP|Siglip)(Image)?Processor(Fast|Pil)?"),
    "feature_extractor": Role("transformers", r"(CLIP|Siglip)(Image)?Processor(Fast|Pil)?"),
}
PIPELINES = r"(Wan|SkyReelsV2|HunyuanVideo|HunyuanSkyreels|CogVideoX|LTX|Mochi)\w*Pipeline"
NOTES = ("_class_name", "_diffusers_version", "_name_or_path")
NEEDED = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")  # a prompt becomes a video through these


@dataclass(frozen=True)
class Component:
    name: str
    role: Role
    class_name: str
    folder: Path
    tensors: dict[str, tuple[int, ...]]  # name -> shape, of every weights file


@dataclass(frozen=True)
class ModelFolder:
    root: Path
    pipeline: str
    components: tuple[Component, ...]
    files: tuple[Path, ...]  # all that a loader may read, in order


def judge_folder(root: Path) -> ModelFolder:
    """The folder as its loader will see it, or one line that says what it holds that it must not."""
    try:
        return _judge(root)
    except OSError as error:
        raise _refusal(f"to read all of {root}", error.strerror or type(error).__name__, "check the path and its permissions") from None


def judge_index(root: Path) -> dict[str, tuple[Role, str]]:
    """component -> (role, class) of model_index.json; needs no other file, so a download can be planned from it."""
    index = read_json(root / INDEX, LARGEST_CONFIG, "a diffusers folder has one")
    _expect_plain_config(index, INDEX, bounded=False)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str) or re.fullmatch(PIPELINES, pipeline) is None:
        raise _refusal(
            f"_class_name in {INDEX} to be a supported video pipeline", pipeline, "pass a Wan, HunyuanVideo or similar T2V model"
        )
    found = {}
    for name, entry in index.items():
        if entry is None or isinstance(entry, (bool, int, float)) or entry == [None, None] or (name in NOTES and isinstance(entry, str)):
            continue  # a setting of the pipeline, or a component it can do without
        role = ROLES.get(re.sub(r"_\d$", "", name))
        if role is None:
            raise _refusal(f"components among {', '.join(ROLES)} in {INDEX}", name, "pass a folder saved by save_pretrained")
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry)):
            raise _refusal(f"[library, class] for {name} in {INDEX}", entry, "pass a folder saved by save_pretrained")
        if entry[0] != role.library or re.fullmatch(role.classes, entry[1], re.ASCII) is None:
            raise _refusal(f"{name} in {INDEX} to be a known class of {role.library}", entry, "pass a model of a supported family")
        found[name] = role, entry[1]
    for name in NEEDED:
        if name not in found:
            raise _refusal(f"component {name} in {INDEX}", index.get(name), "pass the whole pipeline")
    return found


def _judge(root: Path) -> ModelFolder:
    if not root.is_dir():
        raise _refusal(f"{root} to be a folder", "a file" if root.exists() else "no such folder", "pass a folder saved by save_pretrained")
    inside = list(_entries(root))
    index = judge_index(root)
    components, files = [], [root / INDEX]
    for name, (role, class_name) in index.items():
        own = {path.name: path for path in inside if path.parent == root / name}
        if not own:
            raise _refusal(f"component {name} in {root}", "no such folder", "download or save the pipeline again")
        _judge_configs(root, name, role, class_name, own)
        tensors = _judge_weights(root, name, role, own)
        if role.config is not None and tensors:
            _expect_widths(read_json(own[role.config], LARGEST_CONFIG, "it was there"), f"{name}/{role.config}", tensors)
        components.append(Component(name, role, class_name, root / name, tensors))
        files += [path for path in inside if root / name in path.parents]
    pipeline = read_json(root / INDEX, LARGEST_CONFIG, "it was read before")["_class_name"]
    return ModelFolder(root, pipeline, tuple(components), tuple(sorted(files)))


def _entries(root: Path) -> Iterator[Path]:
    """Every plain file. Judged by lstat alone: a FIFO that is opened would block for ever."""
    allowed = [root.resolve()]
    cache = root.resolve().parent.parent
    if root.resolve().parent.name == "snapshots" and cache.name.startswith("models--"):
        allowed.append(cache / "blobs")  # a hub cache keeps files there and links to them
    folders, seen = [root], 0
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as listing:
            here = sorted(itertools.islice(listing, MOST_FILES + 1), key=lambda entry: entry.name)
        for entry in here:
            path, seen = Path(entry.path), seen + 1
            inner = str(path.relative_to(root))
            if folder == root and entry.name.startswith("."):
                continue  # what git and downloads keep for themselves: no loader looks there
            if seen > MOST_FILES:
                raise _refusal(f"at most {MOST_FILES} files in {root}", "more", "pass the model's folder alone")
            if len(entry.name) > LONGEST_NAME or not entry.name.isprintable() or len(path.relative_to(root).parts) > DEEPEST:
                raise _refusal(f"short plain names, {DEEPEST} deep, in {root}", inner[:LONGEST_NAME], "rename or delete it")
            if entry.name in DETOURS:
                raise _refusal(f"a plain pipeline in {root}", f"{inner}, which leads a loader elsewhere", "merge it, or delete it")
            suffixes = {suffix.lower() for suffix in path.suffixes}
            if suffixes & CODE or entry.name == "__pycache__":
                raise _refusal(f"no code in {root}", inner, "delete it, if you know that the model does without")
            if path.suffix.lower() in OTHER_WEIGHTS:
                raise _refusal(f"safetensors only in {root}", f"{inner} (a pickle can run code)", "convert it, or delete it")
            target = path
            if entry.is_symlink():
                target = Path(os.path.realpath(path))
                if not any(home in target.parents for home in allowed):
                    raise _refusal(f"links that stay in {root}", f"{inner} to {target}", "copy the file in its place")
            try:
                kind = target.stat().st_mode
            except FileNotFoundError:
                raise _refusal(f"files behind every link in {root}", f"{inner} to nothing", "download the model again") from None
            if stat.S_ISDIR(kind) and not entry.is_symlink():
                folders.append(path)
            elif stat.S_ISREG(kind):
                yield path
            else:
                raise _refusal(f"plain files and folders in {root}", f"{inner}, which is neither", "copy or delete it")


def read_json(path: Path, largest: int, why: str) -> dict[str, Any]:
    """One object, no larger than a known model's, no name twice."""
    again = "download or save it again"
    try:
        with path.open("rb") as file:
            text = file.read(largest + 1)
    except FileNotFoundError:
        raise _refusal(str(path), f"no such file ({why})", "pass a folder saved by save_pretrained") from None
    if len(text) > largest:
        raise _refusal(f"at most {largest // MIB} MiB in {path}", f"{path.stat().st_size} bytes", again)
    return _parsed(text, str(path))


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice in one object")
        return found

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    try:
        found = json.loads(text.decode(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"JSON in {where}", f"a broken file ({_first_line(error)})", "download or save it again") from None
    if not isinstance(found, dict):
        raise _refusal(f"a JSON object in {where}", f"a {type(found).__name__}", "download or save it again")
    return found


def _judge_configs(root: Path, name: str, role: Role, class_name: str, own: dict[str, Path]) -> None:
    if role.config is not None and role.config not in own:
        raise _refusal(f"{role.config} in {root / name}", "no such file", "download or save the pipeline again")
    for file, path in own.items():
        size = path.stat().st_size
        if path.suffix != ".safetensors" and size > LARGEST_VOCABULARY:
            raise _refusal(f"at most {LARGEST_VOCABULARY // MIB} MiB in {path}", f"{size} bytes", "download it again")
        if file == "tokenizer.json":
            found = path.stat()
            _judge_tokenizer(path, found.st_size, found.st_mtime_ns, found.st_ino)
        if path.suffix != ".json" or file in ("tokenizer.json", "vocab.json"):
            continue  # a vocabulary is data for its own parser; ours would take a second for a million words
        config = read_json(path, LARGEST_CONFIG, "it was there")
        if not file.endswith(".index.json"):
            _expect_plain_config(config, f"{name}/{file}", bounded=file == role.config)
        # diffusers takes the class of the index and fills it from a config of another
        if role.library == "diffusers" and role.weights and file == role.config and config.get("_class_name", class_name) != class_name:
            raise _refusal(f"_class_name {class_name} in {path}", config["_class_name"], "download or save the pipeline again")


@functools.lru_cache(maxsize=64)
def _judge_tokenizer(path: Path, size: int, changed_ns: int, inode: int) -> None:
    """The arguments tell versions of a file apart, so that a process parses one once. Reset: cache_clear."""
    if wrong := fault_in_rules(read_json(path, LARGEST_TOKENIZER, "it was there")):
        raise _refusal(f"rules in {path} of bounded memory and time", wrong, "download it again")


def _expect_plain_config(config: dict[str, Any], where: str, *, bounded: bool) -> None:
    """No names that ask for code or for files elsewhere; with `bounded`, no number that would only fill memory."""
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if key in FORBIDDEN and value not in (None, False):
            raise _refusal(f"no {key} in {where}", value, "pass a model of plain weights and no code")
        if "attn_implementation" in key and value not in ATTENTIONS:
            raise _refusal(f"{key} in {where} to be built in", value, "remove that line")
        if (key.endswith(("_file", "_files")) and key not in UNREAD) or key == "init_inputs":
            names = value if isinstance(value, list) else [value]
            if not all(name is None or (isinstance(name, str) and name not in (".", "..") and "/" not in name) for name in names):
                raise _refusal(f"{key} in {where} to be a file's name", value, "remove that line")
        words = key in UNREAD | TOKENS or key.endswith(("_token", "_tokens"))
        if isinstance(value, str) and (key in OPENED or (not words and LEAVES.match(value))):
            raise _refusal(f"no path under {key} in {where}", value, "remove that line")
        if bounded and isinstance(value, (int, float)) and abs(value) > (LARGEST_BASE if "theta" in key else LARGEST_NUMBER):
            raise _refusal(f"{key} in {where} to be at most {LARGEST_NUMBER}", value, "correct it")
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, item) for item in value if item is not None]


def _expect_widths(config: dict[str, Any], where: str, tensors: dict[str, tuple[int, ...]]) -> None:
    """Memory that is taken while a model is built, before its weights are compared with it: widths, and tables of positions."""
    widest = max((size for shape in tensors.values() for size in shape), default=0)
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, item) for item in value]
        elif isinstance(value, (int, float)) and WIDTH.fullmatch(key) and value > widest:
            raise _refusal(f"{key} in {where} to be at most {widest}, as wide as its weights", value, "correct it")
    for names, most in TABLES.items():
        sizes = [config[name] for name in names if isinstance(config.get(name), (int, float))]
        if len(sizes) > 1 and abs(math.prod(sizes)) > most:
            raise _refusal(f"{' x '.join(names)} in {where} to be at most {most}", math.prod(sizes), "correct it")


def _judge_weights(root: Path, name: str, role: Role, own: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the component, once, in whole files with the names its loader looks for."""
    stems = [file for file in own if file.endswith(".safetensors")]
    if role.weights is None:
        if stems:
            raise _refusal(f"no weights in {root / name}", stems[0], "delete it")
        return {}
    single, listing = f"{role.weights}.safetensors", f"{role.weights}.safetensors.index.json"
    if single not in own and listing not in own:
        others = f"only {stems[0]}" if stems else "none"
        raise _refusal(f"a .safetensors file in {root / name} named {single}", others, "download or save the pipeline again")
    headers = {file: read_header(own[file]) for file in stems}
    if listing not in own:
        return headers[single]
    whole = read_json(own[listing], LARGEST_CONFIG, "it lists the shards").get("weight_map")
    if not isinstance(whole, dict) or not whole or not all(isinstance(shard, str) for shard in whole.values()):
        raise _refusal(f"weight_map in {own[listing]} to give each tensor its file", whole, "download the model again")
    for tensor, shard in whole.items():
        if shard not in headers:
            raise _refusal(f"shard {shard} in {root / name}", "no such file", "download the model again")
        if tensor not in headers[shard]:
            raise _refusal(f"tensor {tensor} in {own[shard]}", "none of that name", "download the model again")
    held = [tensor for shard in set(whole.values()) for tensor in headers[shard]]
    if len(held) != len(whole):
        raise _refusal(f"each of {len(whole)} tensors once in the shards of {root / name}", len(held), "download the model again")
    # with both forms in the folder the loader chooses
    return {tensor: headers[shard][tensor] for tensor, shard in whole.items()} | headers.get(single, {})


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape: 8 bytes of length, JSON, then the tensors' bytes without a gap (safetensors' format)."""
    size = path.stat().st_size

    def broken(expected: str, got: object) -> ValueError:
        return _refusal(f"whole weights in {path}", f"a broken file ({expected}: {got})", "download it again")

    if not 8 <= size <= LARGEST_WEIGHTS:
        raise broken(f"8 bytes to {LARGEST_WEIGHTS // GIB} GiB", size)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LARGEST_HEADER, size - 8):
            raise broken("a header inside the file", f"{length} bytes")
        header = _parsed(file.read(length), f"the header of {path}")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or notes.get("format", "pt") != "pt":
        raise broken("metadata of format pt", notes)
    if not 0 < len(header) <= MOST_TENSORS:
        raise broken(f"1 to {MOST_TENSORS} tensors", len(header))
    spans, shapes = [], {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"} or len(name) > LONGEST_NAME:
            raise broken(f"dtype, shape and data_offsets for {name}", entry)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise broken(f"a plain dtype for {name}", dtype)
        numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 else [None]
        if not all(type(number) is int and 0 <= number <= size for number in numbers) or len(shape) > 8:
            raise broken(f"a shape and two offsets for {name}", entry)
        if offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[dtype]:
            raise broken(f"as many bytes for {name} as its shape has", entry)
        spans.append((offsets[0], offsets[1]))
        shapes[name] = tuple(shape)
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise broken(f"a tensor at byte {end}", begin)
        end = stop
    if 8 + length + end != size:
        raise broken(f"{8 + length + end} bytes", size)
    return shapes


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refusal(expected: str, got: object, advice: str) -> ValueError:
    """One line, whatever the folder calls its files: control characters and line ends are escaped, long values cut."""
    said = got if isinstance(got, str) else f"{len(got)} entries" if isinstance(got, (dict, list)) and len(got) > 50 else repr(got)
    plain = ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in text) for text in (expected, said[:300])]
    return ValueError(f"model: expected {plain[0]}, got {plain[1]}; {advice}.")
