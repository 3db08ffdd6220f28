"""What a model folder may hold, judged from names, sizes, JSON and safetensors headers: nothing in it is imported or
unpickled.

A loader sees a folder only after this file has passed it, so that what is refused does not depend on a loader's
version.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parkattn.models import MODELS
from parklab.studio.model_files import (
    LARGEST_CONFIG,
    LARGEST_TOKENIZER,
    LARGEST_VOCABULARY,
    LONGEST_NAME,
    MIB,
    MODEL_AGAIN,
    SAVED,
    expect_plain_config,
    expect_widths,
    fault_in_rules,
    read_header,
    read_json,
    refusal,
)

INDEX = "model_index.json"
MOST_FILES, DEEPEST = 2000, 4
CODE = {".py", ".pyc", ".pyo", ".pyw", ".pyd", ".pyx", ".so", ".dll", ".dylib", ".egg", ".whl"}
OTHER_WEIGHTS = {
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".h5", ".msgpack", ".onnx", ".gguf",
    ".dduf",
}  # fmt: skip
# files that would send a loader to other weights or to code elsewhere
DETOURS = {"adapter_config.json", "modular_model_index.json", "flashpack_config.json"}


@dataclass(frozen=True)
class Role:
    """What may stand behind a component's name in model_index.json: a library, and the classes of the supported
    families.
    """

    library: str
    classes: str  # regular expression
    config: str | None = None  # the file a loader cannot do without
    weights: str | None = None  # stem of the weights' files


_DIFFUSION, _ENCODER = "diffusion_pytorch_model", "model"
ROLES = {
    "transformer": Role("diffusers", "|".join(MODELS), "config.json", _DIFFUSION),
    "vae": Role(
        "diffusers",
        r"AutoencoderKL(Wan|HunyuanVideo|HunyuanVideo15|CogVideoX|LTXVideo|LTX2Video|Mochi|Allegro|Magvit)",
        "config.json",
        _DIFFUSION,
    ),
    "audio_vae": Role("diffusers", "AutoencoderKLLTX2Audio", "config.json", _DIFFUSION),
    "connectors": Role("ltx2", "LTX2TextConnectors", "config.json", _DIFFUSION),
    "vocoder": Role("ltx2", r"LTX2Vocoder(WithBWE)?", "config.json", _DIFFUSION),
    "scheduler": Role("diffusers", r"\w+Scheduler", "scheduler_config.json"),
    "guider": Role("diffusers", r"\w+Guidance", "guider_config.json"),
    "text_encoder": Role(
        "transformers",
        r"(UM)?T5EncoderModel|LlamaModel|CLIPTextModel(WithProjection)?|LlavaForConditionalGeneration"
        r"|Qwen2_5_VL(TextModel|Model|ForConditionalGeneration)|Qwen2VLForConditionalGeneration|BertModel"
        r"|T5Gemma2Encoder|Gemma(3|4Unified)ForConditionalGeneration",
        "config.json",
        _ENCODER,
    ),
    "image_encoder": Role(
        "transformers", r"CLIPVisionModel(WithProjection)?|SiglipVisionModel", "config.json", _ENCODER
    ),
    "tokenizer": Role("transformers", r"\w*Tokenizer(Fast)?|TokenizersBackend|Qwen2(_5_)?VLProcessor"),
    "image_processor": Role("transformers", r"(CLIP|Siglip)(Image)?Processor(Fast|Pil)?"),
    "feature_extractor": Role("transformers", r"(CLIP|Siglip)(Image)?Processor(Fast|Pil)?"),
}
PIPELINES = (
    r"(Wan|SkyReelsV2|HunyuanVideo|HunyuanSkyreels|CogVideoX|LTX|Mochi|ChronoEdit|AnyFlow|Helios|Kandinsky[56]"
    r"|MotifVideo|Allegro|EasyAnimate|ConsisID)\w*Pipeline"
)
PIPELINE_AGAIN = "download or save the pipeline again"
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
        raise refusal(
            f"to read all of {root}", error.strerror or type(error).__name__, "check the path and its permissions"
        ) from None


def judge_index(root: Path) -> dict[str, tuple[Role, str]]:
    """component -> (role, class) of model_index.json; needs no other file, so a download can be planned from it."""
    index = read_json(root / INDEX, LARGEST_CONFIG, "a diffusers folder has one")
    expect_plain_config(index, INDEX, bounded=False)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str) or re.fullmatch(PIPELINES, pipeline) is None:
        raise refusal(
            f"_class_name in {INDEX} to be a supported video pipeline",
            pipeline,
            "pass a Wan, HunyuanVideo or similar T2V model",
        )
    found = {}
    for name, entry in index.items():
        if (
            entry is None
            or isinstance(entry, (bool, int, float))
            or entry == [None, None]
            or (name in NOTES and isinstance(entry, str))
        ):
            continue  # a setting of the pipeline, or a component it can do without
        role = ROLES.get(re.sub(r"_\d$", "", name))
        if role is None:
            raise refusal(f"components among {', '.join(ROLES)} in {INDEX}", name, SAVED)
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry)):
            raise refusal(f"[library, class] for {name} in {INDEX}", entry, SAVED)
        if entry[0] != role.library or re.fullmatch(role.classes, entry[1], re.ASCII) is None:
            raise refusal(
                f"{name} in {INDEX} to be a known class of {role.library}", entry, "pass a model of a supported family"
            )
        found[name] = role, entry[1]
    for name in NEEDED:
        if name not in found:
            raise refusal(f"component {name} in {INDEX}", index.get(name), "pass the whole pipeline")
    return found


def _judge(root: Path) -> ModelFolder:
    if not root.is_dir():
        raise refusal(
            f"{root} to be a folder",
            "a file" if root.exists() else "no such folder",
            SAVED,
        )
    inside = list(_entries(root))
    index = judge_index(root)
    components, files = [], [root / INDEX]
    for name, (role, class_name) in index.items():
        own = {path.name: path for path in inside if path.parent == root / name}
        if not own:
            raise refusal(f"component {name} in {root}", "no such folder", PIPELINE_AGAIN)
        _judge_configs(root, name, role, class_name, own)
        tensors = _judge_weights(root, name, role, own)
        if role.config is not None and tensors:
            expect_widths(read_json(own[role.config], LARGEST_CONFIG, "it was there"), f"{name}/{role.config}", tensors)
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
                raise refusal(f"at most {MOST_FILES} files in {root}", "more", "pass the model's folder alone")
            if (
                len(entry.name) > LONGEST_NAME
                or not entry.name.isprintable()
                or len(path.relative_to(root).parts) > DEEPEST
            ):
                raise refusal(
                    f"short plain names, {DEEPEST} deep, in {root}", inner[:LONGEST_NAME], "rename or delete it"
                )
            if entry.name in DETOURS:
                raise refusal(
                    f"a plain pipeline in {root}", f"{inner}, which leads a loader elsewhere", "merge it, or delete it"
                )
            suffixes = {suffix.lower() for suffix in path.suffixes}
            if suffixes & CODE or entry.name == "__pycache__":
                raise refusal(f"no code in {root}", inner, "delete it, if you know that the model does without")
            if path.suffix.lower() in OTHER_WEIGHTS:
                raise refusal(
                    f"safetensors only in {root}", f"{inner} (a pickle can run code)", "convert it, or delete it"
                )
            target = path
            if entry.is_symlink():
                target = Path(os.path.realpath(path))
                if not any(home in target.parents for home in allowed):
                    raise refusal(f"links that stay in {root}", f"{inner} to {target}", "copy the file in its place")
            try:
                kind = target.stat().st_mode
            except FileNotFoundError:
                raise refusal(f"files behind every link in {root}", f"{inner} to nothing", MODEL_AGAIN) from None
            if stat.S_ISDIR(kind) and not entry.is_symlink():
                folders.append(path)
            elif stat.S_ISREG(kind):
                yield path
            else:
                raise refusal(f"plain files and folders in {root}", f"{inner}, which is neither", "copy or delete it")


def _judge_configs(root: Path, name: str, role: Role, class_name: str, own: dict[str, Path]) -> None:
    if role.config is not None and role.config not in own:
        raise refusal(f"{role.config} in {root / name}", "no such file", PIPELINE_AGAIN)
    for file, path in own.items():
        size = path.stat().st_size
        if path.suffix != ".safetensors" and size > LARGEST_VOCABULARY:
            raise refusal(f"at most {LARGEST_VOCABULARY // MIB} MiB in {path}", f"{size} bytes", "download it again")
        if file == "tokenizer.json":
            found = path.stat()
            _judge_tokenizer(path, found.st_size, found.st_mtime_ns, found.st_ino)
        if path.suffix != ".json" or file in ("tokenizer.json", "vocab.json"):
            continue  # a vocabulary is data for its own parser; ours would take a second for a million words
        config = read_json(path, LARGEST_CONFIG, "it was there")
        if not file.endswith(".index.json"):
            expect_plain_config(config, f"{name}/{file}", bounded=file == role.config)
        # diffusers takes the class of the index and fills it from a config of another
        if (
            role.library == "diffusers"
            and role.weights
            and file == role.config
            and config.get("_class_name", class_name) != class_name
        ):
            raise refusal(f"_class_name {class_name} in {path}", config["_class_name"], PIPELINE_AGAIN)


@functools.lru_cache(maxsize=64)
def _judge_tokenizer(path: Path, size: int, changed_ns: int, inode: int) -> None:
    """The arguments tell versions of a file apart, so that a process parses one once. Reset: cache_clear."""
    if wrong := fault_in_rules(read_json(path, LARGEST_TOKENIZER, "it was there")):
        raise refusal(f"rules in {path} of bounded memory and time", wrong, "download it again")


def _judge_weights(root: Path, name: str, role: Role, own: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the component, once, in whole files with the names its loader looks for."""
    stems = [file for file in own if file.endswith(".safetensors")]
    if role.weights is None:
        if stems:
            raise refusal(f"no weights in {root / name}", stems[0], "delete it")
        return {}
    single, listing = f"{role.weights}.safetensors", f"{role.weights}.safetensors.index.json"
    if single not in own and listing not in own:
        others = f"only {stems[0]}" if stems else "none"
        raise refusal(f"a .safetensors file in {root / name} named {single}", others, PIPELINE_AGAIN)
    headers = {file: read_header(own[file]) for file in stems}
    if listing not in own:
        return headers[single]
    whole = read_json(own[listing], LARGEST_CONFIG, "it lists the shards").get("weight_map")
    if not isinstance(whole, dict) or not whole or not all(isinstance(shard, str) for shard in whole.values()):
        raise refusal(f"weight_map in {own[listing]} to give each tensor its file", whole, MODEL_AGAIN)
    for tensor, shard in whole.items():
        if shard not in headers:
            raise refusal(f"shard {shard} in {root / name}", "no such file", MODEL_AGAIN)
        if tensor not in headers[shard]:
            raise refusal(f"tensor {tensor} in {own[shard]}", "none of that name", MODEL_AGAIN)
    held = [tensor for shard in set(whole.values()) for tensor in headers[shard]]
    if len(held) != len(whole):
        raise refusal(f"each of {len(whole)} tensors once in the shards of {root / name}", len(held), MODEL_AGAIN)
    # with both forms in the folder the loader chooses
    return {tensor: headers[shard][tensor] for tensor, shard in whole.items()} | headers.get(single, {})
