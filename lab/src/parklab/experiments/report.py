"""What was measured beside what the paper prints: one page, and every table as Markdown, CSV and LaTeX."""

from __future__ import annotations

import base64
import hashlib
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
from parklab.studio.page import STYLE as PAGE_STYLE
from parklab.studio.page import THEME, page_part

FORMAT = "parkattn.reproduce.report.1"
NOT_ASKED = "not asked for in this run; run park reproduce {}"
NO_NUMBERS = "the paper prints no numbers of this figure"
HALF_A_SCREEN = 64  # letters
FEW_STATEMENTS = 12  # more are folded
FEW_ROWS = 16  # of what the paper prints; more are folded
UNSURE = "of both, less than their interval"
# beside the comparison page's own: a held statement is no success of ours, so neither colour is red or green
STYLE = """
th, td { padding: 8px 6px; } th.text, td.text, td.long { text-align: left; } td.long { white-space: normal; min-width: 11em; }
.tally th { white-space: normal; } .tally tbody th { min-width: 7em; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 14px; align-items: start; }
.sides > div, .stack > div { min-width: 0; } .picture { padding: 12px; margin-bottom: 12px; background: #fff; }
.picture img { display: block; max-width: 100%; height: auto; } a { color: var(--accent); }
main ul { list-style: none; padding: 0; margin: 0; } main li { padding: 6px 0; overflow-wrap: anywhere; }
.chip { border: 1px solid var(--edge); border-radius: 7px; padding: 1px 8px; font-size: .8rem; margin-right: 6px; white-space: nowrap; }
.held .chip { border-color: var(--accent); color: var(--accent); } .not-held .chip { border-color: var(--warn); color: var(--warn); }
@media (max-width: 720px) { .tally thead th { font-size: .68rem; padding: 8px 3px; } .picture { overflow-x: auto; } .picture img { max-width: none; width: 640px; } }
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

    @property
    def findings(self) -> tuple[tables.Finding, ...]:
        return () if self.result is None else self.result.findings

    @property
    def why_empty(self) -> str | None:
        """Why it has no records; None where it has some."""
        if self.result is None:
            return self.reason
        return None if self.result.table is not None else self.result.note.removeprefix("not run: ")


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


def write_report(store: Store, sections: Sequence[Section], about: Mapping[str, Any], judged: bool = True) -> Record:
    """judged: whether the runs can carry a verdict. index.html, report.md and findings.csv,
    and for every table that was run its .csv and .tex in tables/.
    """
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
            contents[f"tables/{section.file}.tex"] = tables.to_latex(
                section.result.table, caption, section.label
            ).encode()
    contents["findings.csv"] = tables.to_csv(finding_table(sections)).encode()
    contents["report.md"] = to_markdown(sections, about).encode()
    contents["index.html"] = to_page(sections, about, figures, judged).encode()
    cell = Cell(name="report", format=FORMAT, files=tuple(contents))
    found = {
        section.label: [finding.line() for finding in section.result.findings] for section in sections if section.result
    }
    return store.put(
        cell, {"format": FORMAT, "about": dict(about), "findings": found, "environment": environment()}, contents
    )


def finding_table(sections: Sequence[Section]) -> tables.Table:
    columns = tables.columns_of("experiment | verdict | margin:4 | ±:4 | unit | statement | reason")
    rows = [
        (section.label, each.verdict, each.margin, each.spread, each.unit, each.statement,
         "" if each.held is not None else each.reason)
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
            text += [f"**not run**: {section.why_empty}", ""]
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


def to_page(
    sections: Sequence[Section], about: Mapping[str, Any], figures: Mapping[str, bytes], judged: bool = True
) -> str:
    """One file with everything inside, in the comparison page's design. Its one script, the theme, runs by its hash."""
    script = page_part(THEME)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; img-src data:"
    facts = "".join(
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(str(value))}</dd>" for name, value in about.items()
    )
    filled = [section for section in sections if section.why_empty is None]
    folded = "".join(_folded(section) for section in sections if section.why_empty is not None)
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        'initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>PARK, measured again</title><style>{page_part(PAGE_STYLE)}{STYLE}</style></head><body>",
        "<header><h1>The paper's tables and figures, measured again</h1>",
        '<button id="theme" class="small" aria-pressed="false">Dark</button></header><main>',
        _tally(filled, about, judged),
        f'<details class="card"><summary>How it was measured</summary><dl>{facts}</dl></details>',
        *(_shown(section, figures.get(section.label), judged) for section in filled),
        f"<h2>Without records</h2>{folded}" if folded else "",
        f"</main><script>{script}</script></body></html>", "",
    ])  # fmt: skip


def _counts(findings: Sequence[tables.Finding], judged: bool) -> dict[str, int]:
    measured = [each for each in findings if each.margin is not None]
    held = sum(bool(each.held) for each in measured)
    verdicts = {"held": held, "not held": len(measured) - held, UNSURE: sum(each.unsure for each in measured)}
    return (verdicts if judged else {"computed": len(measured)}) | {"not measured": len(findings) - len(measured)}


def _tally(filled: Sequence[Section], about: Mapping[str, Any], judged: bool) -> str:
    """How many statements held, what that rests on, and in which table or figure."""
    sums = _counts([each for section in filled for each in section.findings], judged)
    first = "A test that everything works: no statement is judged by it."
    if judged:
        first = f"{sums['held']} of {sums['held'] + sums['not held']} measured statements held."
    cards = "".join(f'<div class="card"><b>{count}</b><small>{name}</small></div>' for name, count in sums.items())
    rests = ", ".join(html.escape(str(about[name])) for name in ("model", "video", "runs", "device") if name in about)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("table or figure", *sums))
    rows = "".join(
        f'<tr><th scope="row"><a href="#{section.file}">{html.escape(section.title)}</a></th>'
        + "".join(f"<td>{count or ''}</td>" for count in _counts(section.findings, judged).values())
        + "</tr>"
        for section in filled
    )
    table = f'<table class="tally"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return (
        f'<p id="verdict">{first}</p><p class="soft">It rests on: {rests or "nothing"}.</p>'
        f'<section class="figures" aria-label="Tally">{cards}</section><h2>Tables and figures</h2>'
        '<div class="card scroll" tabindex="0" role="region" aria-label="Statements by '
        f'table">{table if rows else "none: nothing was run"}</div>'
    )


def _statements(findings: Sequence[tables.Finding], judged: bool) -> str:
    """Folded where they are many."""
    if not findings:
        return ""
    listed = ""
    for found in findings:
        verdict = found.verdict if judged or found.margin is None else ""
        chip = f'<span class="chip">{verdict}</span>' if verdict else ""
        told = f'{html.escape(found.statement)} <span class="soft">{html.escape(found.told)}</span>'
        listed += f'<li class="{verdict.replace(" ", "-")}">{chip}{told}</li>\n'
    counts = ", ".join(f"{count} {name}" for name, count in _counts(findings, judged).items() if count)
    start = " open" if len(findings) <= FEW_STATEMENTS else ""
    return f'<details class="card"{start}><summary>Statements: {counts}</summary><ul>{listed}</ul></details>'


def _shown(section: Section, figure: bytes | None, judged: bool) -> str:
    assert section.result is not None and section.result.table is not None
    picture = ""
    if figure is not None:
        data = base64.b64encode(figure).decode()
        picture = (
            f'<div class="card picture"><img alt="{html.escape(section.title)}" '
            f'src="data:image/png;base64,{data}"></div>'
        )
    table, unrun = _without_unrun(section.result.table)
    told = [*filter(None, (section.result.note, unrun)), *([f"{NO_NUMBERS}."] if _prints_nothing(section) else [])]
    note = "".join(f'<p class="soft">{html.escape(each[0].upper() + each[1:])}</p>' for each in told)
    side = "sides" if _fit_side_by_side(section) else "stack"
    return (
        f'<section id="{section.file}"><h2>{html.escape(section.title)}</h2>'
        f'<p class="soft"><code>{html.escape(section.label)}</code></p>{picture}'
        f'<div class="{side}"><div><h3>measured</h3>{tables.to_html(table)}{note}</div>'
        f"{_printed(section)}</div>{_statements(section.findings, judged)}</section>"
    )


def _folded(section: Section) -> str:
    why = f'<p class="not-run"><b>not run</b>: {html.escape(section.why_empty or "")}</p>'
    named = f"{html.escape(section.title)} <code class='soft'>{html.escape(section.label)}</code>"
    return f'<details class="card" id="{section.file}"><summary>{named}</summary>{why}{_printed(section)}</details>\n'


def _printed(section: Section) -> str:
    if section.label in PAPER:
        printed = PAPER[section.label]
        table = tables.to_html(tables.text_table(printed.columns, printed.rows))
        told = f"printed in the paper: {html.escape(printed.caption)}"
        if len(printed.rows) > FEW_ROWS:
            return f'<details class="card"><summary>{told} ({len(printed.rows)} rows)</summary>{table}</details>'
        return f"<div><h3>{told}</h3>{table}</div>"
    return ""


def _prints_nothing(section: Section) -> bool:
    return section.label in LABELS and section.label not in PAPER


def _without_unrun(table: tables.Table) -> tuple[tables.Table, str]:
    """Rows of what was run, and what is said of the others: a page of empty rows hides those."""
    names = [column.name for column in table.columns]
    if not {"runs", "note"} <= set(names):
        return table, ""
    runs, note = names.index("runs"), names.index("note")
    empty = [row for row in table.rows if row[runs] == 0]
    if not empty or len(empty) == len(table.rows):
        return table, ""
    kept = tuple(row for row in table.rows if row[runs] != 0)
    reasons = "; ".join(dict.fromkeys(str(row[note]).removeprefix("not run: ") for row in empty))
    rest = tables.without_empty(tables.Table(table.columns, kept), runs)
    return rest, f"{len(empty)} row{'s' * (len(empty) > 1)} without runs: {reasons}."


def _fit_side_by_side(section: Section) -> bool:
    both = [section.result.table] if section.result is not None and section.result.table is not None else []
    if section.label in PAPER:
        both.append(tables.text_table(PAPER[section.label].columns, PAPER[section.label].rows))
    return all(_letters(table) <= HALF_A_SCREEN for table in both)


def _letters(table: tables.Table) -> int:
    """About how wide a table is: its longest values and words of its heads, and two more per column."""
    heads = [max(map(len, column.name.split() or [""])) for column in table.columns]
    return sum(max([head, *(len(row[i]) for row in table.shown())]) + 2 for i, head in enumerate(heads))
