"""One file of a model folder: JSON without what would lead a loader elsewhere, and headers of safetensors,
whole and bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parkattn.checks import first_line

# advice of refusals
SAVED, AGAIN = "pass a folder saved by save_pretrained", "download or save it again"
MODEL_AGAIN = "download the model again"
MIB, GIB = 2**20, 2**30
# the largest known: 35 MiB of tokenizer.json, 57 GiB of weights in one file; headers hold about 100 bytes per tensor
LARGEST_CONFIG, LARGEST_VOCABULARY, LARGEST_WEIGHTS, LARGEST_HEADER = 8 * MIB, 128 * MIB, 96 * GIB, 16 * MIB
LARGEST_TOKENIZER = 64 * MIB
LONGEST_NAME, MOST_TENSORS = 200, 100_000
# in a model's or scheduler's config: vocabularies and position tables of known models stay below
LARGEST_NUMBER = 2**20
LARGEST_BASE = 1e9  # of rotary frequencies, which no memory depends on
# tables of positions are made while a model is built, from numbers that no weights confirm; known: 2**17 and 7 million
TABLES = {("rope_max_seq_len", "attention_head_dim"): 2**22, ("sample_width", "sample_height", "sample_frames"): 2**24}
# no wider than the widest weights; CLIP's config names a projection that the encoder may not have
WIDTH = re.compile(r"(?!.*projection_dim)(.*_)?(dim|channels|heads|hidden_size|d_model|d_ff|d_kv)")

# names in any JSON that ask a loader for code, for another repository or for a quantiser's classes
FORBIDDEN = {
    "auto_map", "custom_pipeline", "custom_pipelines", "trust_remote_code", "custom_generate", "quantization_config",
    "kernel_config", "use_kernels", "hub_kernel_config", "base_model_name_or_path", "gguf_file",
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


def read_json(path: Path, largest: int, why: str) -> dict[str, Any]:
    """One object, no larger than a known model's, no name twice."""
    try:
        with path.open("rb") as file:
            text = file.read(largest + 1)
    except FileNotFoundError:
        raise refusal(str(path), f"no such file ({why})", SAVED) from None
    if len(text) > largest:
        raise refusal(f"at most {largest // MIB} MiB in {path}", f"{path.stat().st_size} bytes", AGAIN)
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
        raise refusal(f"JSON in {where}", f"a broken file ({first_line(error)})", AGAIN) from None
    if not isinstance(found, dict):
        raise refusal(f"a JSON object in {where}", f"a {type(found).__name__}", AGAIN)
    return found


def expect_plain_config(config: dict[str, Any], where: str, *, bounded: bool) -> None:
    """No names that ask for code or for files elsewhere; with `bounded`, no number that would only fill memory."""
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if key in FORBIDDEN and value not in (None, False):
            raise refusal(f"no {key} in {where}", value, "pass a model of plain weights and no code")
        if "attn_implementation" in key and value not in ATTENTIONS:
            raise refusal(f"{key} in {where} to be built in", value, "remove that line")
        if (key.endswith(("_file", "_files")) and key not in UNREAD) or key == "init_inputs":
            names = value if isinstance(value, list) else [value]
            if not all(
                name is None or (isinstance(name, str) and name not in (".", "..") and "/" not in name)
                for name in names
            ):
                raise refusal(f"{key} in {where} to be a file's name", value, "remove that line")
        words = key in UNREAD | TOKENS or key.endswith(("_token", "_tokens"))
        if isinstance(value, str) and (key in OPENED or (not words and LEAVES.match(value))):
            raise refusal(f"no path under {key} in {where}", value, "remove that line")
        if (
            bounded
            and isinstance(value, (int, float))
            and abs(value) > (LARGEST_BASE if "theta" in key else LARGEST_NUMBER)
        ):
            raise refusal(f"{key} in {where} to be at most {LARGEST_NUMBER}", value, "correct it")
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, item) for item in value if item is not None]


def expect_widths(config: dict[str, Any], where: str, tensors: dict[str, tuple[int, ...]]) -> None:
    """Memory that is taken while a model is built, before its weights are compared with it: widths, and tables of
    positions.
    """
    widest = max((size for shape in tensors.values() for size in shape), default=0)
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, item) for item in value]
        elif isinstance(value, (int, float)) and WIDTH.fullmatch(key) and value > widest:
            raise refusal(f"{key} in {where} to be at most {widest}, as wide as its weights", value, "correct it")
    for names, most in TABLES.items():
        sizes = [config[name] for name in names if isinstance(config.get(name), (int, float))]
        if len(sizes) > 1 and abs(math.prod(sizes)) > most:
            raise refusal(f"{' x '.join(names)} in {where} to be at most {most}", math.prod(sizes), "correct it")


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape: 8 bytes of length, JSON, then the tensors' bytes without a gap (safetensors' format)."""
    size = path.stat().st_size

    def broken(expected: str, got: object) -> ValueError:
        return refusal(f"whole weights in {path}", f"a broken file ({expected}: {got})", "download it again")

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
        numbers = (
            [*shape, *offsets]
            if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
            else [None]
        )
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


def refusal(expected: str, got: object, advice: str) -> ValueError:
    """One line, whatever the folder calls its files: control characters and line ends are escaped, long values cut."""
    said = (
        got
        if isinstance(got, str)
        else f"{len(got)} entries"
        if isinstance(got, (dict, list)) and len(got) > 50
        else repr(got)
    )
    plain = ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in text) for text in (expected, said[:300])]
    return ValueError(f"model: expected {plain[0]}, got {plain[1]}; {advice}.")


# Rules of a tokenizer.json that replace text: each may lengthen what the one before it left, until Rust aborts for
# memory

MOST_GROWTH, MOST_RULES, LONGEST_PATTERN = 256, 64, 2000  # known tokenizers: 2, 12 and 300
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def fault_in_rules(tokenizer: Mapping[str, Any]) -> str:
    """Why a tokenizer's rules could fill memory, or nothing."""
    rules, growth = 0, 1
    waiting = [tokenizer.get(name) for name in PARTS]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        rules += "type" in part
        growth *= _growth(part)
        if rules > MOST_RULES:
            return f"more than {MOST_RULES} rules"
        if len(_pattern(part)) > LONGEST_PATTERN:
            return f"a pattern of {len(_pattern(part))} letters"
        if growth > MOST_GROWTH:
            return f"rules that lengthen a text {growth} times or more"
    return ""


def _growth(rule: Mapping[str, Any]) -> int:
    """How many times as long as before a text can be, at most."""
    if rule.get("type") == "Prepend":
        return 1 + len(str(rule.get("prepend", "")))
    if rule.get("type") != "Replace":
        return 1
    length, pattern = len(str(rule.get("content", ""))), _pattern(rule)
    if pattern and "Regex" not in (rule.get("pattern") or {}):
        return max(1, math.ceil(length / len(pattern)))
    return max(1, length + _matches_nothing(pattern))


def _pattern(rule: Mapping[str, Any]) -> str:
    found = rule.get("pattern")
    return str(next(iter(found.values()), "")) if isinstance(found, dict) else found if isinstance(found, str) else ""


def _matches_nothing(pattern: str) -> bool:
    """Then it matches between any two letters."""
    try:
        return re.match(pattern, "") is not None
    except (re.error, RecursionError, OverflowError):  # of another dialect
        return True
