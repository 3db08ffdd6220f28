"""What was measured beside what the paper prints: one page, and every table as Markdown, CSV and LaTeX."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parklab.experiments import tables
from parklab.experiments.catalogue import EXPERIMENTS, NOT_BUILT, in_the_papers_order
from parklab.experiments.figures import draw
from parklab.experiments.paper_numbers import LABELS, PAPER
from parklab.experiments.results import Result
from parklab.record import environment
from parklab.store import Cell, Content, Record, Store

FORMAT = "parkattn.reproduce.report.1"
NOT_ASKED = "not asked for in this run; run park reproduce {}"
NO_NUMBERS = "the paper prints no numbers of this figure"
HALF_A_SCREEN = 64  # letters
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; color: #1c2733; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; border-top: 1px solid #d5dce3; padding-top: 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .55rem; text-align: left; border-bottom: 1px solid #e4e9ee; } th { background: #f3f6f8; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; align-items: start; }
.pair > div { min-width: 0; } h3 { font-size: .9rem; margin: .6rem 0 .2rem; color: #51606e; font-weight: 600; }
.held { color: #17693a; } .not-held { color: #a3271f; } .not-run { color: #6b7680; } img { max-width: 100%; height: auto; }
@media (max-width: 48rem) {
  thead { display: none; } tr { display: block; border-bottom: 1px solid #d5dce3; padding: .3rem 0; }
  td { display: inline-block; border: 0; padding: 0 .7rem 0 0; overflow-wrap: anywhere; } td:empty { display: none; }
  td::before { content: attr(data-name) " "; color: #6b7680; }
}
p, li { overflow-wrap: anywhere; } code { font-size: .85em; } nav a { margin-right: .8rem; font-size: .85rem; }
"""


@dataclass(frozen=True)
class Section:
    label: str
    title: str
    result: Result | None  # None: it was not asked for
    reason: str = ""  # why nothing was run

    @property
    def file(self) -> str:
        return self.label.replace(":", "-")


def sections_of(results: Mapping[str, Result]) -> list[Section]:
    """Every experiment there is, run or not, in the paper's order."""
    found = []
    for label in in_the_papers_order([*EXPERIMENTS, *NOT_BUILT]):
        if label in NOT_BUILT:
            found.append(Section(label, NOT_BUILT[label].title, None, NOT_BUILT[label].reason))
        else:
            reason = "" if label in results else NOT_ASKED.format(label)
            found.append(Section(label, EXPERIMENTS[label].title, results.get(label), reason))
    return found


def write_report(store: Store, sections: Sequence[Section], about: Mapping[str, Any]) -> Record:
    """index.html, report.md and findings.csv, and for every table that was run its .csv and .tex in tables/."""
    contents: dict[str, Content] = {}
    figures: dict[str, bytes] = {}
    for section in sections:
        if section.result is None:
            continue
        if section.result.figure is not None and (drawn := draw(section.result.figure)) is not None:
            contents[f"figures/{section.file}.png"] = figures[section.label] = drawn
        if section.result.table is not None:
            contents[f"tables/{section.file}.csv"] = tables.to_csv(section.result.table).encode()
            caption = f"{section.title}. {section.result.note}".strip()
            contents[f"tables/{section.file}.tex"] = tables.to_latex(section.result.table, caption, section.label).encode()
    contents["findings.csv"] = tables.to_csv(finding_table(sections)).encode()
    contents["report.md"] = to_markdown(sections, about).encode()
    contents["index.html"] = to_page(sections, about, figures).encode()
    cell = Cell(name="report", format=FORMAT, files=tuple(contents))
    found = {section.label: [finding.line() for finding in section.result.findings] for section in sections if section.result}
    return store.put(cell, {"format": FORMAT, "about": dict(about), "findings": found, "environment": environment()}, contents)


def finding_table(sections: Sequence[Section]) -> tables.Table:
    columns = (
        tables.Column("experiment"),
        tables.Column("verdict"),
        tables.Column("margin", 4),
        tables.Column("±", 4),
        *map(tables.Column, ("unit", "statement", "reason")),
    )
    rows = [
        (section.label, each.verdict, each.margin, each.spread, each.unit, each.statement, "" if each.held is not None else each.reason)
        for section in sections if section.result is not None for each in section.result.findings
    ]  # fmt: skip
    return tables.Table(columns, tuple(rows))


def to_markdown(sections: Sequence[Section], about: Mapping[str, Any]) -> str:
    text = [
        "# The paper's tables and figures, measured again",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
    ]
    text += ["## Findings", "", tables.to_markdown(finding_table(sections))]
    for section in sections:
        text += [f"## {section.label}", "", f"{section.title}.", ""]
        result = section.result
        if result is None or result.table is None:
            text += [f"**not run**: {section.reason if result is None else result.note.removeprefix('not run: ')}", ""]
        else:
            text += [*([result.note, ""] if result.note else []), tables.to_markdown(result.table)]
            if result.figure is not None:
                text += [f"Figure: figures/{section.file}.png (where matplotlib is installed).", ""]
        if section.label in PAPER:
            printed = PAPER[section.label]
            text += [
                f"Printed in the paper: {printed.caption}.",
                "",
                tables.to_markdown(tables.text_table(printed.columns, printed.rows)),
            ]
        elif section.label in LABELS:
            text += [f"{NO_NUMBERS[0].upper()}{NO_NUMBERS[1:]}.", ""]
    return "\n".join(text)


def to_page(sections: Sequence[Section], about: Mapping[str, Any], figures: Mapping[str, bytes]) -> str:
    """One file with everything inside."""
    facts = "".join(f"<li>{html.escape(str(name))}: {html.escape(str(value))}</li>" for name, value in about.items())
    links = "".join(f'<a href="#{section.file}">{html.escape(section.label)}</a> ' for section in sections)
    found = "".join(
        f'<li class="{each.verdict.replace(" ", "-")}"><b>{each.verdict}</b>{html.escape(each.line().removeprefix(each.verdict))} '
        f'<a href="#{section.file}">{html.escape(section.label)}</a></li>'
        for section in sections if section.result is not None for each in section.result.findings
    )  # fmt: skip
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">""",
        f"<title>PARK, measured again</title><style>{STYLE}</style></head><body>",
        f"<h1>The paper's tables and figures, measured again</h1><ul>{facts}</ul><nav>{links}</nav>",
        f"<h2>Findings</h2><ul>{found or '<li>none: nothing was run</li>'}</ul>",
    ]
    for section in sections:
        parts.append(f'<h2 id="{section.file}">{html.escape(section.label)}</h2><p>{html.escape(section.title)}.</p>')
        side = "pair" if _fit_side_by_side(section) else "stack"
        parts.append(f'<div class="{side}"><div><h3>measured</h3>{_measured(section, figures.get(section.label))}</div>')
        if section.label in PAPER:
            printed = PAPER[section.label]
            table = tables.to_html(tables.text_table(printed.columns, printed.rows))
            parts.append(f"<div><h3>printed in the paper: {html.escape(printed.caption)}</h3>{table}</div>")
        elif section.label in LABELS:
            parts.append(f"<div><h3>{NO_NUMBERS}</h3></div>")
        parts.append("</div>")
    return "\n".join([*parts, "</body></html>", ""])


def _fit_side_by_side(section: Section) -> bool:
    both = [section.result.table] if section.result is not None and section.result.table is not None else []
    if section.label in PAPER:
        both.append(tables.text_table(PAPER[section.label].columns, PAPER[section.label].rows))
    return all(_letters(table) <= HALF_A_SCREEN for table in both)


def _letters(table: tables.Table) -> int:
    """About how wide a table is: its longest values and words of its heads, and two more per column."""
    heads = [max(map(len, column.name.split() or [""])) for column in table.columns]
    return sum(max([head, *(len(row[i]) for row in table.shown())]) + 2 for i, head in enumerate(heads))


def _measured(section: Section, figure: bytes | None) -> str:
    result = section.result
    if result is None or result.table is None:
        reason = section.reason if result is None else result.note.removeprefix("not run: ")
        return f'<p class="not-run"><b>not run</b>: {html.escape(reason)}</p>'
    image = ""
    if figure is not None:
        image = f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{base64.b64encode(figure).decode()}">'
    return f"{image}{tables.to_html(result.table)}<p>{html.escape(result.note)}</p>"
