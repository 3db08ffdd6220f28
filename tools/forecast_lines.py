"""Which line forecasts are best: its order and its variable, on outputs of whole runs in which every forward ran.

python tools/forecast_lines.py --measure --size 29x224x256 --prompts 4   # writes benchmarks/results/forecast_lines.json

A row of n forecasts stands between computed steps that are n + 1 apart, so lines go through the last of those. Errors
are |line - y| / |y| at the end of the row, over both branches and all rows from step FIRST on. A damped line goes as
far as a share of the change expected at the last computed step came true, by least squares, at most all of the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, Record, published
from torch import Tensor

from parkattn.anchors import log_signal_to_noise
from parkattn.hosts.diffusers import Session
from parkattn.methods import configured_method
from parklab.experiments.reproduce import parse_size
from parklab.experiments.tables import page_table
from parklab.files import write_atomically
from parklab.record import environment

FILE = RESULTS / "forecast_lines.json"
FIRST, ROWS, ORDERS = 8, (1, 2, 3, 4), (0, 1, 2)
METHODS = {"dense": ("dense", None), "quality": ("park", "quality"), "fast": ("park", "fast")}
VARIABLES = {"t": "t", "u": "log signal-to-noise"}
NAMES = ("last output again", "line", "parabola")
DAMPED = "u damped"


def extrapolated(points: list[tuple[float, Tensor]], at: float) -> Tensor:
    """Lagrange's polynomial through the points."""
    made = torch.zeros_like(points[0][1])
    for i, (x, y) in enumerate(points):
        weight = 1.0
        for j, (other, _) in enumerate(points):
            weight *= (at - other) / (x - other) if i != j else 1.0
        made += weight * y
    return made


def errors(outputs: list[list[Tensor]], places: dict[str, list[float]]) -> dict[str, float]:
    """Mean over rows, by "variable order row"; outputs: by step, of each branch."""
    found = {}
    for variable, x in places.items():
        for order in ORDERS:
            for row in ROWS:
                apart = row + 1
                missed = [
                    ((extrapolated([(x[s - i * apart], outputs[s - i * apart][b]) for i in range(order + 1)],
                                   x[s + row]) - y).norm() / y.norm()).item()
                    for s in range(max(FIRST, max(ORDERS) * apart), len(outputs) - 1 - row) for b,
                    y in enumerate(outputs[s + row])
                ]  # fmt: skip
                found[f"{variable} {order} {row}"] = statistics.fmean(missed)
    return found | {f"{DAMPED} {row}": damped_error(outputs, places["u"], row + 1) for row in ROWS}


def damped_error(outputs: list[list[Tensor]], u: list[float], apart: int) -> float:
    missed = []
    for s in range(max(FIRST, max(ORDERS) * apart), len(outputs) - apart):
        before, last, end = s - apart, s, s + apart - 1
        for first, y1, y2, y in zip(outputs[before - apart], outputs[before], outputs[last], outputs[end], strict=True):
            expected = (y1 - first) * ((u[last] - u[before]) / (u[before] - u[before - apart]))
            share = (((y2 - y1) * expected).sum() / expected.square().sum()).clamp(0, 1)
            line = y2 + share * (y2 - y1) * ((u[end] - u[last]) / (u[last] - u[before]))
            missed.append(((line - y).norm() / y.norm()).item())
    return statistics.fmean(missed)


def run_outputs(pipe: Any, method: Any, asked: dict[str, Any], prompt: str) -> tuple[list[list[Tensor]], list[float]]:
    """What every forward of a run returned, and the noise levels of its steps."""
    outputs: list[Tensor] = []
    hook = pipe.transformer.register_forward_hook(lambda module, args, out: outputs.append(out[0].float().cpu()))
    generator = torch.Generator("cpu").manual_seed(0)
    with Session(pipe, method):
        pipe(prompt, guidance_scale=5.0, generator=generator, output_type="latent", max_sequence_length=32, **asked)
    hook.remove()
    steps = asked["num_inference_steps"]
    each = len(outputs) // steps
    return [outputs[i * each : (i + 1) * each] for i in range(steps)], pipe.scheduler.sigmas.tolist()[:steps]


def measure(size: str, steps: int, prompts: int) -> Record:
    from parklab.sprites import CHECKPOINT, grammar
    from parklab.studio.checkpoints import choose_dtype, load_pipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = load_pipeline(CHECKPOINT, device=device, dtype=choose_dtype("auto", device))
    video = parse_size(size)
    sides = {"height": video["height"], "width": video["width"], "num_frames": video["frames"]}
    asked = {**sides, "num_inference_steps": steps}
    sentences = [scene.sentence for scene in grammar.held_out_scenes(prompts)]
    found: Record = {}
    for name, (method, config) in METHODS.items():
        videos = []
        for sentence in sentences:
            outputs, levels = run_outputs(pipe, configured_method(method, config), asked, sentence)
            videos.append(errors(outputs, {"t": levels, "u": log_signal_to_noise(steps, tuple(levels))}))
        found[name] = {key: statistics.fmean(video[key] for video in videos) for key in videos[0]}
    return {"size": size, "steps": steps, "prompts": sentences, "errors": found, "environment": environment()}


@published
def forecast_lines() -> str:
    """Mean relative error at the end of a row, by attention, variable and order."""
    if not FILE.exists():
        return "not run: `python tools/forecast_lines.py --measure`\n"
    found = json.loads(FILE.read_text())["errors"]
    # the last output has no variable
    kinds = [(f"{variable} {order}", NAMES[order]) for order in ORDERS for variable in (VARIABLES if order else ("u",))]
    kinds.insert(3, (DAMPED, "damped line"))
    rows = [
        (name, VARIABLES[kind[0]], shown, *(f"{found[name][f'{kind} {row}']:.4f}" for row in ROWS))
        for name in found
        for kind, shown in kinds
        if f"{kind} {ROWS[0]}" in found[name]
    ]
    return page_table(f"attention | variable | forecast | {' | '.join(f'{row} in a row' for row in ROWS)}", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--size", default="29x224x256")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path, default=FILE)
    asked = parser.parse_args()
    if asked.measure:
        made = measure(asked.size, asked.steps, asked.prompts)
        write_atomically(asked.out, (json.dumps(made, indent=1, ensure_ascii=False) + "\n").encode())
    print(forecast_lines())


if __name__ == "__main__":
    main()
