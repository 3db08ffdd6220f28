"""What experiments read of records that anybody may have written: lines of park bench and of python -m
parklab.bench.frontier, and sealed cells of park reproduce.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from parkattn.checks import shown
from parklab.bench.frontier import FORMAT as FRONTIER
from parklab.experiments.mismatches import REPRESENTATIONS
from parklab.files import read_file

Line = Mapping[str, Any]
BENCHMARKS = ("pama", "qrkc", "scaling")
LARGEST_FILE = 2**28  # bytes
LARGEST_VALUE = 1e12  # sums and products of such numbers stay finite
Shape = Any
"""A type, float being any number; a rule; {name: shape}, where name? may be null (in a line also absent) and * is every
other name; [shape], a list that is not empty; (shape, shape), a list of two.
"""
# fields of a line that experiments read
FIELDS_OF_LINES: dict[str, dict[str, Shape]] = {
    FRONTIER: {
        **dict.fromkeys(("setting", "prompt"), str),
        **dict.fromkeys(("seed", "frames", "height", "width", "steps"), int),
        **dict.fromkeys(("psnr", "cost", "seconds?", "guidance?"), float),
        **dict.fromkeys(("cost_two_passes?", "error?", "share_computed?"), float),
    },
    "pama": {
        "shape": {"name": str, "*": object}, "kernel": str, "speedup": float,
        **dict.fromkeys(("ms?", "extra_mb?", "memory_reduction?"), float),
    },
    "qrkc": {
        "shape": {"heads": int, "tokens": int, "*": object},
        **dict.fromkeys(("metric_ms", "cholesky_ms", "transform_ms", "means_ms", "ms"), float),
    },
    "scaling": {"over": str, "part": str, "length": int, "density": float, "ms": float},
    "scaling fit": {"over": str, "part": str, "exponent": float},
}  # fmt: skip


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """Those that an experiment can use; a file without any is refused. A line that a stop cut off is skipped."""
    found: list[Line] = []
    for path in paths:
        kinds = f"park bench {', '.join(BENCHMARKS)} or parklab.bench.frontier"
        wanted = f"records: expected JSON lines of {kinds}, got {path}"
        data = read_file("records", path, f"JSON lines of {kinds}", most=LARGEST_FILE)
        known = []
        for number, text in enumerate(data.decode(errors="replace").splitlines(), 1):
            line = _parsed(text)
            if line is None or line.get("rehearsal"):
                continue
            if wrong := fault_of_line(line):
                raise ValueError(f"{wanted}, whose line {number} {wrong}; measure again.")
            known.append(line)
        if not known:
            raise ValueError(f"{wanted}, which holds none; measure first.")
        found += known
    return found


def fault_of_line(line: Line) -> str:
    """What is wrong with a line that an experiment would read, or nothing."""
    kind = FRONTIER if line.get("format") == FRONTIER else line["benchmark"]
    shape = FIELDS_OF_LINES["scaling fit" if kind == "scaling" and "exponent" in line else kind]
    absent = {name[:-1]: None for name in shape if name.endswith("?")}
    return _fault(absent | {"environment": {}} | dict(line), {**shape, "environment": {"*": object}, "*": object}, "")


def _parsed(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    return line if line.get("format") == FRONTIER or line.get("benchmark") in BENCHMARKS else None


# Cells ---------------------------------------------------------------------------------------------------


def is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_line(value: Any) -> bool:
    """Of `park bench`: one that no table knows is left out of them."""
    return isinstance(value, dict) and (value.get("benchmark") not in BENCHMARKS or not fault_of_line(value))


_BY_HEAD = {key: [float] for key in REPRESENTATIONS}
_KEYS = {key: [float] for key in ("log_mass", "key_mse", "score_error", "pama_recall")}
_ASKED = {"method": str, "prompt": str, "seed": int, "guidance?": float, "changes": {"*": object}}
_SIZE = dict.fromkeys(("frames?", "height?", "width?", "steps?"), int)
_PLANNED = {"plans": int, "first_plans": int, "plan_ms": float, "later_plan_ms": float, "sparse_calls": is_positive}
FIELDS: dict[str, dict[str, Shape]] = {
    "quality": {
        "request": {**_ASKED, **_SIZE, "density?": float, "*": object},
        "row": {
            **dict.fromkeys(("psnr", "error", "cost", "density", "seconds?", "dense_seconds?"), float),
            "*?": float,
        },
    },
    "times": {
        "request": {**_ASKED, "device": str, "density?": float, "*": object},
        "times": {"attention_ms": float, "density": float, "calls": int, "*": float},
        "shape": (int, int),
    },
    "budget": {"budget": {"field": str, "value": float, "density": float}},
    "retrieval": {
        "calls": [
            {
                "tokens": (int, int),
                "blocks": (int, int),
                "recall": dict.fromkeys(("Clustered", "Original"), dict.fromkeys(("top_p", "top_k"), _BY_HEAD)),
                "tv": _BY_HEAD,
                "keys": dict.fromkeys(("euclidean", "query-response"), _KEYS),
                "*": object,
            }
        ]
    },
    "frames": {"request": {"method": str, "prompt": str, "seed": int, "*": object}, "shown": [int]},
    "bench": {"request": {"benchmark": str, "*": object}, "lines": [is_line]},
}


def fault_of_cell(record: Mapping[str, Any]) -> str:
    """Which field of a cell's record is not what an experiment reads there, or nothing."""
    asked = record.get("request")
    named = {"method?": str, "profile?": str, "density?": float, "*": object}  # what names of cells are made of
    optional = dict.fromkeys(("method", "profile", "density"))
    kind = str(record.get("format")).split(".")[-2:][0]
    whole = {**FIELDS.get(kind, {}), "*": object}
    found = _fault({**optional, **asked} if isinstance(asked, dict) else asked, named, "request")
    found = found or _fault(record, whole, "") or _fault(record.get("environment", {}), {"*": object}, "environment")
    if not found and kind == "times" and "plans" in record["times"]:
        found = _fault(record["times"], {**_PLANNED, "*": object}, "times")
    return found


def _fault(value: Any, shape: Shape, at: str) -> str:
    if isinstance(shape, dict):
        return _fault_of_object(value, shape, at)
    if isinstance(shape, (list, tuple)):
        count = len(shape) if isinstance(shape, tuple) else None
        if not isinstance(value, list) or not value or count not in (None, len(value)):
            return f"has {at} = {shown(value)} where a list{f' of {count}' if count else ''} is expected"
        return next(filter(None, (_fault(each, shape[0], at) for each in value)), "")
    if shape is object:
        return ""
    if not isinstance(shape, type):
        rule: Callable[[Any], bool] = shape
        return "" if rule(value) else f"has {at} = {shown(value)}, which no table can read"
    kinds = (int, float) if shape is float else shape
    if not isinstance(value, kinds) or isinstance(value, bool):
        return f"has {at} = {shown(value)} where {shape.__name__} is expected"
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST_VALUE:  # not so for NaN
        return f"has {at} = {shown(value)}, which is no measurement"
    return ""


def _fault_of_object(value: Any, shape: Mapping[str, Shape], at: str) -> str:
    if not isinstance(value, dict):
        return f"has {at} = {shown(value)} where an object is expected"
    names = {name.rstrip("?"): name for name in shape if not name.startswith("*")}
    rest = next((name for name in shape if name.startswith("*")), None)
    for name in dict.fromkeys((*names, *(value if rest else ()))):
        declared = names.get(name, rest)
        assert declared is not None
        path = f"{at}.{name}" if at else name
        if name not in value:
            return f"has no {path}"
        if value[name] is None and declared.endswith("?"):
            continue
        if found := _fault(value[name], shape[declared], path):
            return found
    return ""
