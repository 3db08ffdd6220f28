"""Rules of a tokenizer.json that replace text: each may lengthen what the one before it left, until Rust aborts for
memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

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
