"""Whole models at real size, through `parkattn.enable`, against stock diffusers in the same run: per forward and over a
run.

    park bench e2e --record FILE            gate, then the three models, each in a process of its own
    park bench e2e --full --record FILE     with every one of the 50 steps of Wan2.1-1.3B at 720p, PARK and dense
    park bench e2e --compiled --record FILE     after compile_repeated_blocks(fullgraph=True), dense and PARK alike
    park bench e2e --profile fast --record FILE     anchors and corrected reuse at density 0.10 (e2e_profile.py)
    park bench e2e --profile fast --full --forecast 6 --forecast 8 --record FILE    without the forwards of these steps
    park bench e2e --float8 --record FILE       with float8 linears beside bfloat16 ones (e2e_float8.py)

Weights are random, so nothing is downloaded. Their attention is nearly uniform and a share of its mass would keep
almost every block: density is fixed by top-k instead, and every record says which density was reached.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parkattn.checks import expect_choice, expect_fraction, expect_indices
from parkattn.engine.summary import PHASES, Summary
from parkattn.hosts.diffusers import enable, summary
from parkattn.hosts.diffusers.fused import FUSED
from parkattn.park import ParkConfig
from parkattn.planned import PlannedMethod
from parkattn.reuse import Schedule, count_phases
from parkattn.settings import PRECISIONS
from parklab.bench.timing import Measurement, bench_device, free_memory, gpu_environment, watched
from parklab.bench.whole_models import (
    MODELS,
    SMALL,
    WholeModel,
    first_blocks,
    forward_inputs,
    random_transformer,
    run_forward,
)
from parklab.metrics.budget import solve_budget
from parklab.record import append_records

DENSITY, SPARSER = 0.25, 0.10  # of a reuse forward of the paper preset, and of a profile with anchors
RUN_STEPS = 50
# what one measurement runs: a first plan, the plan reused, a plan warm-started from it, reused again
PHASES_MEASURED = ("refresh", "reuse", "refresh", "reuse")
COMPOSED = "dense x dense_s + refresh_cold_s + (refresh - 1) x refresh_warm_s + reuse x reuse_s, one forward per step"
SECTIONS = ("gate", "wan2.1-14b", "hunyuanvideo", "gate-around", "wan2.1-1.3b")
ROOM_FOR_ALL = 120e9  # bytes of GPU memory from which on all models get ready at once
Keep = Callable[[dict[str, Any]], None]  # is given a record's line as soon as it is there


def naming(keep: Keep, **names: Any) -> Keep:
    """Every line says these too."""
    return lambda line: keep({**line, **names})


def find_top_k(transformer: Any, inputs: dict[str, Any], model: WholeModel, density: float = DENSITY) -> float:
    """The share of key blocks that computes `density` of the token pairs; also what compiles kernels and warms the
    allocator.

    Under uniform attention the heaviest blocks are the largest ones, so a quarter of the blocks is more than a quarter
    of the pairs.
    """

    def reached(top_k: float) -> float:
        config = model.config(top_p=None, top_k=top_k, dense_steps=0, refresh_steps=(2,))
        with enable(transformer, config, total_steps=3):
            for timestep in (999.0, 998.0, 997.0):  # every kind of step that will be timed
                run_forward(transformer, inputs, timestep)
            found = summary(transformer).density
        assert found is not None
        return found

    with first_blocks(transformer, 1):
        run_forward(transformer, inputs, 999.0)
        return solve_budget(reached, density, evaluations=4, close=0.01 * density)[0]


def phases_of_run(config: ParkConfig, steps: int = RUN_STEPS) -> Counter[str]:
    return count_phases(Schedule(config), steps)


def composed(dense_s: float, cold_s: float, warm_s: float, reuse_s: float, phases: Counter[str]) -> dict[str, Any]:
    """What a whole run takes by the parts measured here."""
    steps = phases.total()
    park = phases["dense"] * dense_s + cold_s + (phases["refresh"] - 1) * warm_s + phases["reuse"] * reuse_s
    dense = steps * dense_s
    return {
        "steps": {phase: phases[phase] for phase in PHASES}, "formula": COMPOSED,
        "dense_s": dense, "park_s": park, "saved_s": dense - park, "speedup": dense / park,
    }  # fmt: skip


@dataclass
class PreparedModel:
    """A model with its weights made, its kernels compiled and its top-k found: everything that must not be timed."""

    model: WholeModel
    device: torch.device
    transformer: Any
    inputs: dict[str, Any]
    top_k: float
    compiled: bool = False
    fusing_s: float | None = None  # what enable takes to compile the blocks, once; None where it does not


def prepare(
    model: WholeModel, device: torch.device, *, compiled: bool = False, density: float = DENSITY,
    done: Callable[[str], None] = lambda part: None,
) -> PreparedModel:  # fmt: skip
    """done(part): is told what is ready."""
    transformer = random_transformer(model, device)
    if compiled:
        compile_blocks(transformer, device)
    inputs = forward_inputs(model, transformer, device)
    done("weights")
    fusing_s = seconds_of_fusing(transformer, inputs, model, device)
    done("fused blocks")
    top_k = find_top_k(transformer, inputs, model, density)
    done("kernels of the paper preset, top-k")
    free_memory()
    return PreparedModel(model, device, transformer, inputs, top_k, compiled, fusing_s)


def compile_phases(
    ready: PreparedModel, config: ParkConfig, phases: tuple[str, ...], done: Callable[[str], None] = lambda part: None
) -> None:
    """Each kind of forward once, on the first blocks, before it is timed. done(part): is told what is ready."""
    with enable(ready.transformer, config, total_steps=RUN_STEPS), first_blocks(ready.transformer, 1):
        for step, phase in enumerate(phases):
            run_forward(ready.transformer, ready.inputs, 999.0 - step)
            done(f"kernels of step {step}: {phase}")
    free_memory()


def compile_blocks(transformer: Any, device: torch.device) -> None:
    transformer.compile_repeated_blocks(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")


def seconds_of_fusing(
    transformer: Any, inputs: dict[str, Any], model: WholeModel, device: torch.device
) -> float | None:
    """How much longer the first forward takes than the second: the same one block of each kind, dense."""
    with first_blocks(transformer, 1):
        run_forward(transformer, inputs, 999.0)
    # enabled whole, because the number of blocks has a say in whether they are fused
    with enable(transformer, model.config(dense_steps=2), total_steps=RUN_STEPS):
        with first_blocks(transformer, 1):
            first, second = (watched(lambda: run_forward(transformer, inputs, 999.0), device).seconds for _ in range(2))
        return first - second if not summary(transformer).fused.keys().isdisjoint(FUSED) else None


def measure(ready: PreparedModel, note: Keep = lambda part: None) -> dict[str, Any]:
    """One forward of each kind: refresh and reuse through enable on the bare transformer, counted by its timesteps, and
    stock dense.

    note: is told every forward as soon as it is done.
    """
    model, transformer = ready.model, ready.transformer
    config = paper_config(ready)
    runs, report, *_ = timed_phases(ready, config, PHASES_MEASURED, note)
    with enable(transformer, config, total_steps=RUN_STEPS, fuse=False):
        unfused = [
            timed_forward(ready, 999.0 - step, f"{phase}, not fused", note)
            for step, phase in enumerate(PHASES_MEASURED[:2])
        ]
    stock = timed_forward(ready, 999.0, "dense", note)
    seconds = {
        phase: [run.seconds for run, p in zip(runs, PHASES_MEASURED, strict=True) if p == phase] for phase in PHASES
    }
    dense_s, reuse_s = stock.seconds, statistics.median(seconds["reuse"])
    cold_s, *warm = seconds["refresh"]
    warm_s = statistics.median(warm)
    return {
        "benchmark": "e2e", **run_facts(ready, config, report), "dense_s": dense_s, "refresh_cold_s": cold_s,
        "refresh_warm_s": warm_s, "reuse_s": reuse_s, "each_s": {**seconds, "dense": [dense_s]},
        "reuse_speedup": dense_s / reuse_s,
        "run": composed(dense_s, cold_s, warm_s, reuse_s, phases_of_run(model.config())),
        "compiled": ready.compiled, "reuse_unfused_s": unfused[-1].seconds, "density": report.density,
        "finite": all(run.finite for run in [stock, *runs, *unfused]),
        "memory": memory_record(
            transformer, report, dense_peak_gb=stock.peak_gb, park_peak_gb=largest([run.peak_gb for run in runs])
        ),
    }  # fmt: skip


def paper_config(ready: PreparedModel) -> ParkConfig:
    """The preset at the density that was found, with the phases of PHASES_MEASURED."""
    return ready.model.config(
        top_p=None, top_k=ready.top_k, dense_steps=0, refresh_steps=(PHASES_MEASURED.index("refresh", 1),)
    )


class Phases(NamedTuple):
    runs: list[Measurement]
    report: Summary
    residual_bytes: int  # held after the last of them
    second: Measurement | None = None  # the last of them in the other branch of guidance


def timed_phases(
    ready: PreparedModel, config: ParkConfig, phases: tuple[str, ...], note: Keep, other: dict[str, Any] | None = None
) -> Phases:
    """One forward in each of these phases, which are those of the config's first steps. other: what the second branch
    of guidance has in place of the inputs; it runs after the last phase.
    """
    second = None
    # as in a whole run, whose length decides whether blocks are fused
    with enable(ready.transformer, config, total_steps=RUN_STEPS) as session:
        runs = [timed_forward(ready, 999.0 - step, phase, note) for step, phase in enumerate(phases)]
        report = summary(ready.transformer)
        residuals = session.method.plans.residual_nbytes if isinstance(session.method, PlannedMethod) else 0
        if other:
            branch = replace(ready, inputs={**ready.inputs, **other})
            second = timed_forward(branch, 1000.0 - len(phases), f"{phases[-1]}, second branch", note)
            expect_phases(summary(ready.transformer).steps, phases)
    expect_phases(report.steps, phases)
    return Phases(runs, report, residuals, second)


def timed_forward(ready: PreparedModel, timestep: float, phase: str, note: Keep) -> Measurement:
    found = watched(lambda: run_forward(ready.transformer, ready.inputs, timestep), ready.device)
    note({
        "benchmark": "e2e forward", "phase": phase, "compiled": ready.compiled, "seconds": found.seconds,
        "peak_gb": found.peak_gb, "top_k": ready.top_k,
    })  # fmt: skip
    return found


def run_facts(ready: PreparedModel, config: ParkConfig, report: Summary) -> dict[str, Any]:
    """Of the video and of the session that its forwards were timed in."""
    model = ready.model
    return {
        "transformer": model.transformer, "video": model.video, "tokens": model.tokens,
        "text_tokens": model.text_tokens, "valid_text_tokens": model.valid_text, "layers": len(report.layers),
        "config": config.to_dict(), "fused": report.fused, "fusing_s": ready.fusing_s,
        "attention_s": report.attention_seconds,
    }  # fmt: skip


def memory_record(transformer: Any, report: Summary, **peaks: float | None) -> dict[str, Any]:
    return {
        "weights_gb": sum(weights.nbytes for weights in transformer.parameters()) / 1e9,
        **peaks,
        "state_gb": report.peak_state_bytes / 1e9,
        # guidance has a second branch, whose plans have the same shapes
        "state_with_guidance_gb": 2 * report.peak_state_bytes / 1e9,
    }


def expect_phases(steps: dict[str, list[int]], expected: tuple[str, ...]) -> None:
    """Every layer did the same in every step, and that was what the figures are named after."""
    wanted = {phase: [step for step, name in enumerate(expected) if name == phase] for phase in (*PHASES, *expected)}
    if steps != wanted:
        raise RuntimeError(f"e2e: expected the steps {wanted}, got {steps}, so nothing was recorded.")


def largest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class SectionOptions:
    """Which forwards of a model are measured, and how; the options of `park bench e2e`."""

    full: bool = False
    compiled: bool = False
    rehearse: bool = False
    profile: str = "paper"
    density: float | None = None
    float8: bool = False
    precision: str = "bf16"
    forecast: Sequence[int] = ()
    alone: bool = False
    top_k: float | None = None
    guidance: float = 1.0

    @property
    def reuse_density(self) -> float:
        return (DENSITY if self.profile == "paper" else SPARSER) if self.density is None else self.density

    def __post_init__(self) -> None:
        anchored, eight_bits = self.profile != "paper", self.precision != "bf16"
        expect_choice("profile", self.profile, ParkConfig.PROFILES)
        expect_choice("precision", self.precision, PRECISIONS)
        if eight_bits and (self.compiled or not anchored):
            raise ValueError(
                "precision: expected --profile fast or quality beside it, without --compiled; add --profile fast."
            )
        beside = {"--full": self.full, "--compiled": self.compiled, "--profile": anchored}
        if self.float8 and any(beside.values()) and not eight_bits:
            others = ", ".join(name for name, chosen in beside.items() if chosen)
            raise ValueError(f"float8: expected it alone, got {others} beside it; run them one after the other.")
        if self.density is not None:
            expect_fraction("density", self.density, zero=False)
        if self.forecast and not (anchored and self.full):
            raise ValueError("forecast: expected --full and --profile fast or quality beside it; add both.")
        expect_indices("forecast", tuple(self.forecast))
        if (self.alone or self.top_k is not None) and not eight_bits:
            raise ValueError(
                "alone, top_k: expected --precision int8 beside them; add --profile fast --precision int8."
            )
        if self.top_k is not None:
            expect_fraction("top_k", self.top_k, zero=False)
        if self.guidance != 1 and not (self.full and eight_bits):
            raise ValueError(
                "guidance: expected --full and --precision int8 beside it; add --profile fast --precision int8 --full."
            )


def run_section(
    name: str, record: Path, options: SectionOptions, *, turn: Callable[[], float] = lambda: math.inf
) -> None:
    """One process: the gate, or one model. turn() is called when everything is ready, waits, and returns the seconds it
    is given.
    """
    device, facts = bench_device(), gpu_environment()

    def keep(line: dict[str, Any]) -> None:
        append_records(record, [{"section": name, "rehearsal": options.rehearse, **line, "environment": facts}])
        sys.stdout.write(json.dumps(line, default=str) + "\n")
        sys.stdout.flush()

    if name.startswith("gate"):
        _run_gate(name, device, keep, options, turn)
        return
    model = (SMALL if options.rehearse else MODELS)[name]
    if options.precision != "bf16":
        from parklab.bench.e2e_bits import run_alone, run_bits

        if options.alone:
            run_alone(name, model, device, keep, options, turn, record)
        else:
            run_bits(name, model, device, keep, options, turn)
    elif options.float8:
        from parklab.bench.e2e_float8 import run_float8

        run_float8(name, model, device, keep, density=options.reuse_density, turn=turn)
    elif options.profile != "paper":
        from parklab.bench.e2e_profile import run_profile

        run_profile(name, model, device, keep, options, turn)
    else:
        _run_paper(name, model, device, keep, options, turn)


def _run_gate(name: str, device: torch.device, keep: Keep, options: SectionOptions, turn: Callable[[], float]) -> None:
    from parklab.bench import e2e_gate

    rehearse = options.rehearse
    if name == "gate-around":
        turn()  # says nothing about the figures, and would disturb them
        cases = e2e_gate.gate_around(device, rehearse=rehearse)
    else:
        corrected = () if options.profile == "paper" else e2e_gate.gate_corrected(device, rehearse=rehearse)
        cases = itertools.chain(e2e_gate.gate(device, rehearse=rehearse), corrected)
    failed = []
    for case in cases:
        keep(case)
        failed += [] if case["ok"] else [case["gate"]]
    if failed:
        raise RuntimeError(f"{name}: {', '.join(failed)} failed.")
    if name == "gate":
        turn()


def _run_paper(
    name: str, model: WholeModel, device: torch.device, keep: Keep, options: SectionOptions, turn: Callable[[], float]
) -> None:
    note = naming(keep, model=name)
    ready = prepare(model, device, compiled=options.compiled, density=options.reuse_density)
    ends = turn() + time.monotonic()  # waits, so the clock is read after it
    found = measure(ready, note)
    note(found)
    left = ends - time.monotonic()
    # a run that cannot be finished says nothing
    if options.full and name == "wan2.1-1.3b" and left > found["run"]["park_s"]:
        from parklab.bench.e2e_run import whole_run

        for line in whole_run(ready, seconds=left, rehearse=options.rehearse):
            note(line)
