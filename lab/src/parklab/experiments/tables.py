"""Tables and findings as values, and their forms: Markdown, CSV, LaTeX and HTML. Nothing here measures."""

from __future__ import annotations

import csv
import html
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parklab.studio.scores import plain_cell

Value = str | float | int | None
Item = TypeVar("Item")
Key = TypeVar("Key")
NUMBER = re.compile(r"(?:[-+]?[\d.,]*\d ?(?:%|×|s|ms|GB)?|–)?")
LONG = 32  # letters; a longer value goes over several lines
# two-sided 95 % of Student's t by degrees of freedom; from 30 on the normal's
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True)
class Column:
    name: str
    digits: int | None = None  # after the point; None: text and whole numbers as they are

    def show(self, value: Value) -> str:
        if value is None:
            return ""
        return f"{value:.{self.digits}f}" if isinstance(value, float) and self.digits is not None else str(value)


def columns_of(told: str) -> tuple[Column, ...]:
    """Names separated by " | ", each with its digits behind a colon where it has some."""
    parts = (each.partition(":") for each in told.split(" | "))
    return tuple(Column(name, int(digits) if digits else None) for name, _, digits in parts)


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{row} under {[column.name for column in self.columns]}"
            for column, value in zip(self.columns, row, strict=True):
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(
                        f"table: expected finite numbers under {column.name!r}, got {value}; "
                        "look for NaN in what was measured."
                    )

    def shown(self) -> list[list[str]]:
        return [[column.show(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]


def without_empty(table: Table, heads: int = 0) -> Table:
    """A column that nothing was measured for says nothing. heads: the first columns, which stay."""
    kept = [i for i in range(len(table.columns)) if i < heads or any(row[i] not in (None, "") for row in table.rows)]
    return Table(tuple(table.columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in table.rows))


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return None
    t = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else 2.04 if len(values) <= 30 else 1.96
    return t * statistics.stdev(values) / math.sqrt(len(values))


def within(values: Sequence[float], digits: int = 2) -> str:
    """Half the width of that interval behind its sign; nothing where there is none."""
    half = interval(values)
    return "" if half is None else f" ± {half:.{digits}f}"


def mean(rows: Iterable[Mapping[str, Any]], part: str) -> float:
    return statistics.fmean(row[part] for row in rows)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """In the order in which keys are met."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


@dataclass(frozen=True)
class Finding:
    """A statement of the paper, and what was measured: it holds where the margin is above 0, or 0 where a tie is
    enough.
    """

    statement: str
    margin: float | None  # None: not measured
    unit: str = ""
    spread: float | None = None  # half the 95 % interval of the margin, where several runs were made
    reason: str = ""  # why it was not measured
    tie: bool = False  # a margin of 0 is enough

    def __post_init__(self) -> None:
        if not all(value is None or math.isfinite(value) for value in (self.margin, self.spread)):
            got = f"{self.margin} ± {self.spread}"
            raise ValueError(
                f"finding: expected a finite margin of {self.statement!r}, got {got}; "
                "look for NaN in what was measured."
            )

    @property
    def held(self) -> bool | None:
        return None if self.margin is None else self.margin > 0 or (self.tie and self.margin == 0)

    @property
    def verdict(self) -> str:
        return {True: "held", False: "not held", None: "not run"}[self.held]

    @property
    def unsure(self) -> bool:
        return self.margin is not None and self.spread is not None and self.spread >= abs(self.margin)

    @property
    def told(self) -> str:
        """The margin, or why there is none."""
        if self.margin is None:
            return self.reason
        spread = "" if self.spread is None else f" ± {self.spread:.4g}"
        unit = f" {self.unit}" if self.unit else ""
        return f"margin {self.margin:+.4g}{spread}{unit}{', less than its interval' if self.unsure else ''}"

    def line(self) -> str:
        return f"{self.verdict}: {self.statement} ({self.told})"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(tuple(Column(name) for name in columns), tuple(tuple(row) for row in rows))


def to_markdown(table: Table) -> str:
    lines = ["| " + " | ".join(column.name for column in table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(value.replace("|", "\\|") for value in row) + " |" for row in table.shown()]
    return "\n".join(lines) + "\n"


def page_table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Markdown for a page; columns: names separated by " | ". An empty value is one space."""
    return re.sub(r"\|  (?=\|)", "| ", to_markdown(text_table(columns.split(" | "), [tuple(row) for row in rows])))


def to_csv(table: Table) -> str:
    """Every digit, for programs."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([["" if value is None else plain_cell(value) for value in row] for row in table.rows])
    return buffer.getvalue()


def to_latex(table: Table, caption: str, label: str) -> str:
    """A float of the package booktabs."""
    numbers = [column.digits is not None for column in table.columns]
    lines = ["\\begin{table}", "  \\centering", f"  \\caption{{{_tex(caption)}}}", f"  \\label{{{label}}}"]
    lines.append(f"  \\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numbers)}}}")
    lines += [
        "    \\toprule",
        "    " + " & ".join(_tex(column.name) for column in table.columns) + " \\\\",
        "    \\midrule",
    ]
    lines += ["    " + " & ".join(_tex(value) for value in row) + " \\\\" for row in table.shown()]
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


def to_html(table: Table) -> str:
    """In a box that scrolls, as the comparison page has them."""
    shown = table.shown()
    # numbers stand below each other by their last digit, those of texts too; a row's first column is its name
    number = [
        column.digits is not None or (i > 0 and all(NUMBER.fullmatch(row[i]) for row in shown))
        for i, column in enumerate(table.columns)
    ]
    kinds = ["" if each else "text" for each in number]
    head = "".join(
        f'<th scope="col" class="{kind}">{html.escape(column.name)}</th>'
        for kind, column in zip(kinds, table.columns, strict=True)
    )
    body = ""
    for first, *rest in shown:
        cells = "".join(
            f'<td class="{"long" if len(value) > LONG else kind}">{html.escape(value)}</td>'
            for kind, value in zip(kinds[1:], rest, strict=True)
        )
        body += f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>\n'
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
    return f'<div class="card scroll" tabindex="0" role="region" aria-label="table">{inner}</div>'


def _tex(text: str) -> str:
    special = {
        "\\": "\\textbackslash{}", "%": "\\%", "&": "\\&", "_": "\\_", "#": "\\#", "$": "\\$", "{": "\\{", "}": "\\}",
        "^": "\\^{}", "~": "\\~{}",
    }  # fmt: skip
    return "".join(special.get(letter, letter) for letter in text).replace("×", "$\\times$").replace("±", "$\\pm$")
