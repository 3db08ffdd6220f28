"""What the recall of a plan at one density depends on: the rule that keeps blocks, and how many blocks there are.

    park capture "a red circle moves right over blue waves" --frames 33 --height 320 --width 400 --steps 50 \
        --layers 1,3,5 --capture-steps 10 --out out/calls.safetensors
    python tools/recall_by_rule.py out/calls.safetensors

writes benchmarks/results/recall_by_rule.json. Every setting gets the budget with which these calls have the density on
average.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from records import argument_reader, write_rows

from parkattn.methods import make_method
from parkattn.planned import PlannedMethod, make_plan
from parklab.experiments.captures import CapturedCall, read_captures
from parklab.metrics.budget import density_of_sparse_calls, solve_budget
from parklab.research import studied_entry
from parklab.studio.observe import sampled_recall

DENSITIES = (0.1, 0.25)
ROWS = 256  # queries per head on which recall is measured
COARSE, FINE = (128, 512), (300, 1000)  # blocks of PARK and of SVG2
SETTINGS = [
    *(("park", blocks, budget) for blocks in (COARSE, FINE) for budget in ("top_p", "top_k")),
    ("svg2", FINE, "top_p"),
]


def measure(
    calls: list[CapturedCall], method: str, blocks: tuple[int, int], budget: str, density: float
) -> dict[str, Any]:
    entry = studied_entry(method)
    config = entry.config.from_dict({"long_video_blocks": blocks})
    kept = [(call.q, call.k, call.site) for call in calls]

    def budgeted(value: float) -> PlannedMethod:
        made = make_method(entry, entry.with_budget(config, budget, value))
        assert isinstance(made, PlannedMethod)
        return made

    value, reached = solve_budget(lambda value: density_of_sparse_calls(budgeted(value), kept), density, evaluations=6)
    planner, recalls, densities = budgeted(value).planner, [], []
    for q, k, site in kept:
        plan = make_plan(q, k, planner, site, None)
        recalls += sampled_recall(q, k, plan, ROWS, scale=site.scale).flatten().tolist()
        densities += plan.density().flatten().tolist()
    return {
        "method": method, "blocks": list(blocks), "budget": budget, "value": value, "asked": density,
        "density": reached, "recall": statistics.fmean(recalls), "least_recall": min(recalls),
        "least_density": min(densities), "most_density": max(densities),
    }  # fmt: skip


def main() -> None:
    parser = argument_reader(__doc__)
    parser.add_argument("calls", type=Path, help="file of park capture")
    calls, about = read_captures(parser.parse_args().calls)
    rows = []
    for density in DENSITIES:
        for setting in SETTINGS:
            rows.append(measure(calls, *setting, density))
            print(json.dumps(rows[-1]), flush=True)
    write_rows("recall_by_rule", rows, about=about, calls=[call.name for call in calls])


if __name__ == "__main__":
    main()
