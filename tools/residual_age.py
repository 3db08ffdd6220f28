"""How a plan and its residual age: errors some steps after the anchor, and what spreads of anchors leave in all.

    python tools/residual_age.py --out benchmarks/results/residual_age.jsonl    # measures once, then prints the file

One dense run of the small model is captured. The plan and the residual of step s answer the calls of later steps t; e
is the relative error of the output, root mean square over the layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from records import argument_reader
from torch import Tensor

from parkattn.anchors import anchor_steps, log_signal_to_noise
from parkattn.ops import REFERENCE, attend
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.residual.definition import factor
from parkattn.park import Park
from parkattn.plan import Plan
from parkattn.planned import make_plan, values_of
from parklab.experiments.captures import CapturedCall, Selection, capture_calls
from parklab.record import environment
from parklab.research import ResearchConfig
from parklab.studio import checkpoints
from parklab.studio.request import Request, fit_to_pipeline, prepare

ASKED: dict[str, Any] = {
    "prompt": "a blue cross moves down over purple bricks", "steps": 50, "frames": 17, "height": 128, "width": 192,
    "guidance": 1.0,
}  # fmt: skip
LAYERS, RANK, REACH = (1, 3, 5), 12, 12  # REACH: steps after an anchor that are measured
TOP_P = ResearchConfig.PROFILES["fast"]["top_p"]
Errors = dict[tuple[int, int], float]


def measure() -> dict[str, object]:
    request, folder = prepare(Request(method="dense", device="cpu", dtype="float32", **ASKED))
    pipe = checkpoints.load_pipeline(folder, device="cpu", dtype="float32", offload="none")
    calls = capture_calls(
        pipe, fit_to_pipeline(request, pipe), Selection(layers=LAYERS, values=True, first_branch=True)
    )
    method = Park(ResearchConfig.profile("fast", top_p=TOP_P, residual_rank=RANK))
    squares: dict[tuple[int, int], list[float]] = {}
    for layer in LAYERS:
        by_step = {call.site.step: call for call in calls if call.site.layer == layer}
        exact = {
            step: dense_attention(call.q, call.k, values_of(call.q, call.k, call.site))
            for step, call in by_step.items()
        }
        for first, call in by_step.items():
            plan = make_plan(call.q, call.k, method.planner, call.site, None)

            def sparse(step: int, plan: Plan = plan, by_step: dict[int, CapturedCall] = by_step) -> Tensor:
                found = by_step[step]
                values = values_of(found.q, found.k, found.site)
                return attend.over_kept(REFERENCE, found.q, found.k, values, plan, compensate=True)

            kept = factor(exact[first] - sparse(first), RANK).expand()
            for step in range(first + 1, min(first + REACH, ASKED["steps"] - 1) + 1):
                error = (sparse(step) + kept - exact[step]).norm() / exact[step].norm()
                squares.setdefault((first, step), []).append(float(error) ** 2)
    errors = [[first, step, math.sqrt(sum(each) / len(each))] for (first, step), each in squares.items()]
    levels = list(calls[0].site.noise_levels or ())
    asked = ASKED | {"layers": LAYERS, "rank": RANK, "top_p": TOP_P}
    return {
        "benchmark": "residual age",
        "asked": asked,
        "noise_levels": levels,
        "errors": errors,
        "environment": environment(),
    }


def error_at(errors: Errors, anchor: int, step: int) -> float:
    """Beyond REACH e^2 goes on in proportion to the steps."""
    last = max(later for first, later in errors if first == anchor)
    return errors[anchor, step] if step <= last else errors[anchor, last] * math.sqrt((step - anchor) / (last - anchor))


def left_by(errors: Errors, anchors: tuple[int, ...], steps: int) -> float:
    """The sum of e^2 over the steps that are no anchors."""
    return sum(
        error_at(errors, max(a for a in anchors if a < step), step) ** 2 for step in range(steps) if step not in anchors
    )


def least_left(errors: Errors, count: int, steps: int) -> tuple[int, ...]:
    """The anchors, the first step among them, that leave the least, by dynamic programming."""
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 1): (0.0, (0,))}
    stretch = {
        (first, end): sum(error_at(errors, first, step) ** 2 for step in range(first + 1, end))
        for first in range(steps - 1)
        for end in range(first + 1, steps + 1)
    } | {(steps - 1, steps): 0.0}
    for used in range(2, count + 1):
        for step in range(used - 1, steps):
            ways = [
                (best[a, used - 1][0] + stretch[a, step], (*best[a, used - 1][1], step))
                for a in range(step)
                if (a, used - 1) in best
            ]
            best[step, used] = min(ways)
    return min((best[a, count][0] + stretch[a, steps], best[a, count][1]) for a in range(count - 1, steps))[1]


def spreads(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What spreads of anchors leave, of a record."""
    errors = {(first, step): error for first, step, error in found["errors"]}
    levels, steps = tuple(found["noise_levels"]), len(found["noise_levels"])
    visible = tuple(min(level, 0.99) for level in levels)
    for count in (6, 7, 8, 12):
        rules = {
            "equal distances": anchor_steps(count, steps, levels),
            "signal below a hundredth counts as a hundredth": anchor_steps(count, steps, visible),
            "least sum, by dynamic programming": least_left(errors, count, steps),
        }
        for name, anchors in rules.items():
            yield f"{count}, {name}", ", ".join(map(str, anchors)), f"{left_by(errors, anchors, steps):.2f}"


def main() -> None:
    parser = argument_reader(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    path = parser.parse_args().out
    if not path.exists():
        path.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
    for line in path.read_text(encoding="utf-8").splitlines():
        print_record(json.loads(line))


def print_record(found: dict[str, Any]) -> None:
    print(f"top_p {found['asked']['top_p']}")
    errors = {(first, step): error for first, step, error in found["errors"]}
    levels, steps = tuple(found["noise_levels"]), len(found["noise_levels"])
    reached = log_signal_to_noise(steps, levels)
    print("anchor  e after 1, 4, 8 steps  growth of e^2 over 4 steps, per step and per unit of log signal-to-noise")
    for first in (0, 1, 2, 3, 5, 8, 12, 20, 30, 38, 44):
        after = [f"{errors[first, first + k]:.3f}" if (first, first + k) in errors else "     " for k in (1, 4, 8)]
        grown = errors[first, first + 4] ** 2 - errors[first, first + 1] ** 2
        passed = reached[first + 4] - reached[first + 1]
        print(f"{first:6}  {'  '.join(after)}   {grown / 3:.4f}  {grown / passed:.3f}")
    print("| anchors | at | sum of e^2 |\n|---|---|---|")
    for row in spreads(found):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
