"""Tables of quality on every model that has records for them: a table each, and first where two of them disagree.

A cell of `park reproduce` names its model by the fingerprint of its weights, a line of the frontier by `model`, which
is empty for the small model in the package. Everything else belongs to no model and stands in every table.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from parklab.bench.frontier import FORMAT as FRONTIER

FIRST = "8fc49a584bc9efab"  # the small model's fingerprint
NAMES = {FIRST: "sprites"}  # of models on pages; another one is called by its fingerprint

Record = dict[str, Any]


class _Reading:
    """Whose records are read, and whose there are."""

    def __init__(self) -> None:
        self.model = FIRST
        self.met: dict[str, None] = {}


_reading = _Reading()


def model_of(record: Record) -> str | None:
    """None: a record of no model's quality."""
    if record.get("format") == FRONTIER:
        return str(record.get("model", "")).partition("+lora:")[0] or FIRST
    request = record.get("request")
    return request.get("weights") if isinstance(request, dict) else None


def is_read(record: Record) -> bool:
    """Whether it is of the model that is read, or of none."""
    model = model_of(record)
    if model is not None:
        _reading.met[model] = None
    return model in (None, _reading.model)


@contextlib.contextmanager
def reading(model: str) -> Iterator[None]:
    before, _reading.model = _reading.model, model
    try:
        yield
    finally:
        _reading.model = before


class Compared(NamedTuple):
    """Rows of a table are told apart by its first columns. name: which of them is ranked, the others make groups.

    ranked: columns in which more is better; empty: all that follow. signed: those whose sign says which is better.
    """

    heads: int
    name: int = -1
    ranked: tuple[str, ...] = ()
    signed: str = r"above|PARK above"


def of_models(
    heads: int, name: int = -1, ranked: tuple[str, ...] = ("PSNR",)
) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """The table of the first model, unless others have rows in it."""
    how = Compared(heads, name % heads, ranked)

    def decorate(table: Callable[[], str]) -> Callable[[], str]:
        @functools.wraps(table)
        def every() -> str:
            _reading.met.clear()
            found = {FIRST: table()}
            for model in [model for model in _reading.met if model != FIRST]:
                with reading(model):
                    other = table()
                if _parsed(other)[1]:
                    found[model] = other
            return found[FIRST] if len(found) == 1 else _together(found, how)

        return every

    return decorate


def _together(found: dict[str, str], how: Compared) -> str:
    names = {model: NAMES.get(model, model) for model in found}
    others = [model for model in found if model != FIRST]
    told = [
        f"- {line}"
        for model in others
        for line in disagreements({names[each]: found[each] for each in (FIRST, model)}, how)
    ]
    first = ["Where models disagree:", "", *told] if told else ["The models agree in every order and sign."]
    parts = ["\n".join(first), *(f"Model `{names[model]}`:\n\n{text.rstrip()}" for model, text in found.items())]
    return "\n" + "\n\n".join(parts) + "\n"


def disagreements(two: dict[str, str], how: Compared) -> list[str]:
    """Pairs of rows in another order, by group and column, the clearest of them named; and rows of another sign."""
    (one, text), (other, second) = two.items()
    columns, rows = _parsed(text)
    also, others = _parsed(second)
    keys = [{tuple(row[: how.heads]): row for row in each} for each in (rows, others)]
    both = [key for key in keys[0] if key in keys[1]]
    told = []
    for column in columns[how.heads :]:
        if column not in also:
            continue
        places = columns.index(column), also.index(column)
        values = {
            key: (_number(keys[0][key][places[0]]), _number(keys[1][key][places[1]]))
            for key in both
        }  # fmt: skip
        known = {key: (a, b) for key, (a, b) in values.items() if a is not None and b is not None}
        if re.match(how.signed, column):
            told += [
                f"{', '.join(key)}, {column}: {a:+g} with {one}, {b:+g} with {other}"
                for key, (a, b) in known.items() if a * b < 0
            ]  # fmt: skip
        elif column in how.ranked or not how.ranked:
            told += _reordered(known, how, column, (one, other))
    return told


def _reordered(
    known: dict[tuple[str, ...], tuple[float, float]], how: Compared, column: str, names: tuple[str, str]
) -> list[str]:
    groups: dict[tuple[str, ...], list[tuple[str, float, float]]] = {}
    for key, (a, b) in known.items():
        group = tuple(part for place, part in enumerate(key) if place != how.name)
        groups.setdefault(group, []).append((key[how.name], a, b))
    told = []
    for group, rows in groups.items():
        pairs = [(x, y) for place, x in enumerate(rows) for y in rows[:place]]
        changed = [(x, y) for x, y in pairs if (x[1] - y[1]) * (x[2] - y[2]) < 0]
        if changed:
            x, y = max(changed, key=lambda pair: min(abs(pair[0][1] - pair[1][1]), abs(pair[0][2] - pair[1][2])))
            where = ", ".join((*group, column))
            told.append(
                f"{where}: {len(changed)} of {len(pairs)} pairs in another order; {x[0]} less {y[0]} is "
                f"{x[1] - y[1]:+.1f} with {names[0]}, {x[2] - y[2]:+.1f} with {names[1]}"
            )
    return told


def _parsed(table: str) -> tuple[list[str], list[list[str]]]:
    lines = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return (cells[0], cells[2:]) if cells else ([], [])


def _number(text: str) -> float | None:
    """What a value begins with."""
    found = re.match(r"[+-]?\d[\d,]*\.?\d*", text)
    return None if found is None else float(found[0].replace(",", ""))
