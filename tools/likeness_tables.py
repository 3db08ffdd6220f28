"""Tables of docs/measured/likeness.md: what `park reproduce likeness` finds of every model that has records."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from of_models import FIRST, NAMES, model_of
from records import every_cell, published

from parklab.experiments.evaluation import FORMATS
from parklab.experiments.likeness import REAL, likeness_result
from parklab.experiments.results import CellRecords, Result
from parklab.experiments.tables import Finding, grouped, page_table
from parklab.store import Cell

CAMPAIGNS = ("likeness", "gpu_75600")  # the second has retrieval alone
NEAR = "near"
KINDS = ("retrieval", "forwards")
# of these the page has only what the paper prints too
COMPARED = "clustered, Full x Centroid", "original, Full x Full", "original, Full x Centroid"
STEP_MEASURES = "residuals", "spread over tokens", "outputs"


class Run(NamedTuple):
    model: str
    tokens: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.tokens:,} tokens, {self.steps} steps"


@functools.cache
def _results() -> dict[Run, Result]:
    """Short videos last, the first model first."""
    every = (record for campaign in CAMPAIGNS for record in every_cell(campaign).values())
    of_kinds = (record for record in every if record["format"] in [FORMATS[kind] for kind in KINDS])
    places = ("frames", "height", "width", "steps")
    found = grouped(of_kinds, lambda one: (model_of(one), *(one["request"][name] for name in places)))
    made = {}
    for (model, *_, steps), group in found.items():
        tokens = next(record["calls"][0]["tokens"][0] for record in group if "calls" in record)
        ours = [
            Cell(name=str(place), format=record["format"], request=record["request"])
            for place, record in enumerate(group)
        ]
        records = {cell.name: record for cell, record in zip(ours, group, strict=True)}
        made[Run(model, tokens, steps)] = likeness_result(CellRecords(ours, records, {}))
    return dict(sorted(made.items(), key=lambda item: (-item[0].tokens, -item[0].steps, item[0].model != FIRST)))


@published
def likeness_findings() -> str:
    """Where a model is unlike the real ones first, then where it is like them."""
    rows = [
        (NAMES.get(run.model, run.model), run.name, finding.statement, _number(finding.margin) + (
            "" if finding.spread is None else f" ± {finding.spread:.4f}"), _verdict(finding))
        for run, result in _results().items() for finding in result.findings
    ]  # fmt: skip
    return page_table(
        "model | run | statement | margin | verdict", sorted(rows, key=lambda row: row[-1].startswith(NEAR))
    )


def _verdict(finding: Finding) -> str:
    return (NEAR if finding.held else "unlike") + (", within ±" if finding.unsure else "")


@published
def likeness_heads() -> str:
    return _beside(steps=False)


@published
def likeness_steps() -> str:
    return _beside(steps=True)


def _beside(*, steps: bool) -> str:
    """Every measured row once, with a column for each model."""
    models = list(dict.fromkeys(run.model for run in _results()))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for run, result in _results().items():
        assert result.table is not None
        columns = [column.name for column in result.table.columns]
        for values in result.table.rows:
            row = dict(zip(columns, values, strict=True))
            measure, of, at = (str(row[name]) for name in ("measure", "of", "at"))
            plain = not steps and of in COMPARED and not any(row.get(name) for name in REAL)
            if measure.endswith(STEP_MEASURES) != steps or plain:
                continue
            told = rows.setdefault((run.name, measure, of, at.removeprefix("heads: ")), {})
            half = row.get("±")
            told[run.model] = _number(row["measured"]) + ("" if half is None else f" ± {half:.4f}")
            told |= {name: _number(row.get(name)) for name in REAL}
    heads = ("run", "measure", "of", "part of the run" if steps else "over heads")
    shown = [name for name in (*models, *REAL) if any(told.get(name) for told in rows.values())]
    return page_table(
        " | ".join((*heads, *(NAMES.get(name, name) for name in shown))),
        ((*place, *(told.get(name, "") for name in shown)) for place, told in rows.items()),
    )


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}"
