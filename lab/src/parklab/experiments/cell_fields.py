"""What tables and figures read of a cell's record. A record is sealed by its writer, who may be anybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parkattn.checks import shown
from parklab.experiments.bench_lines import BENCHMARKS, LARGEST_VALUE, fault_of_line
from parklab.experiments.mismatches import REPRESENTATIONS

Shape = Any
"""A type; a rule; {name: shape}, where name? may be null and * is every other name; [shape], a list that is not empty;
(shape, shape), a list of two.
"""


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
