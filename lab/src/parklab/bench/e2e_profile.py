"""`park bench e2e --profile fast`: anchors and corrected reuse instead of a dense prefix and refreshes.

    50 steps = anchor_cold_s + (anchors - 1) x anchor_warm_s + the rest x reuse_s

With guidance the second branch takes the plans of the first, so that its anchors take anchor_second_s.

against three ways to run all of them dense: stock diffusers, its blocks compiled, and our own kernel in blocks that
enable fuses. The paper preset's refresh and reuse at the same density are timed in the same process: what corrections
cost.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from parkattn.engine.summary import Summary
from parkattn.park import ParkConfig
from parklab.bench.e2e import (
    PHASES_MEASURED,
    RUN_STEPS,
    Keep,
    Phases,
    PreparedModel,
    SectionOptions,
    compile_blocks,
    compile_phases,
    composed,
    largest,
    memory_record,
    naming,
    paper_config,
    phases_of_run,
    prepare,
    run_facts,
    timed_forward,
    timed_phases,
)
from parklab.bench.e2e_run import phases_with_forecasts, sparse_density, whole_run
from parklab.bench.timing import free_memory
from parklab.bench.whole_models import WholeModel, first_blocks, run_forward
from parklab.research import ResearchConfig

BASELINES = ("stock", "compiled", "own kernel")
# dense in our own kernel; the second anchor is warm-started, and last, where the second branch may take its plan
PHASES_TIMED = ("dense", "anchor", "reuse", "reuse", "anchor")
COMPOSED = "dense x own_dense_s + anchor_cold_s + (anchor - 1) x anchor_warm_s + reuse x reuse_s, one forward per step"
GUIDED = "the mean of both branches of guidance, of which the second has anchor x anchor_second_s: " + COMPOSED
# what the fast profile is held to: a whole run against stock diffusers, and all state with guidance, in GB
SPEED_BARS = {"wan2.1-14b": 2.4, "wan2.1-1.3b": 3.0, "hunyuanvideo": 4.0}
STATE_BARS = {"wan2.1-14b": 4.0}


def profile_config(model: WholeModel, profile: str, top_k: float, **changes: Any) -> ParkConfig:
    """A profile at a fixed density; dense steps, if any, in our own kernel, and no forward is forecast by its error.

    Blocks are chosen per row: with random weights all of them are worth the same, and a threshold would keep all or
    none.
    """
    fixed = {"top_p": None, "top_k": top_k, "budget": "row", "own_dense": True, "tolerance": 0.0}
    return ResearchConfig.profile(profile, model=model.name, **{**model.settings, **fixed, **changes})


def timed_config(ready: PreparedModel, profile: str) -> ParkConfig:
    """The phases of PHASES_TIMED: with a residual a plan is built at an anchor, so a refresh is one."""
    first, second = (step for step, phase in enumerate(PHASES_TIMED) if phase == "anchor")
    return profile_config(ready.model, profile, ready.top_k, anchors=None, dense_steps=first, refresh_steps=(second,))


def profiles_timed_alike(ready: PreparedModel, profile: str) -> list[str]:
    """The profile and those whose forwards are the same at a fixed density: they differ in how many are anchors."""
    wanted = timed_config(ready, profile)
    known = ParkConfig.long_run_profiles()
    others = [name for name in known if name != profile and timed_config(ready, name) == wanted]
    return [profile, *others]


@dataclass
class PreparedProfile:
    ready: PreparedModel
    profile: str
    compiled_calls: dict[torch.nn.Module, Any]  # of blocks, put back to time dense compiled; empty: all is compiled


def prepare_profile(
    model: WholeModel, device: torch.device, profile: str, density: float, *, compiled: bool = False,
    done: Callable[[str], None] = lambda part: None,
) -> PreparedProfile:  # fmt: skip
    """Also runs each kind of forward once, on the first blocks, which compiles its kernels. done(part): is told what is
    ready.
    """
    ready = prepare(model, device, compiled=compiled, density=density, done=done)
    compile_phases(ready, timed_config(ready, profile), PHASES_TIMED, done)
    calls: dict[torch.nn.Module, Any] = {}
    if not compiled:
        calls = compiled_dense(ready)
        done("compiled blocks")
    free_memory()
    return PreparedProfile(ready, profile, calls)


def compiled_dense(ready: PreparedModel) -> dict[torch.nn.Module, Any]:
    """The calls of blocks compiled for a dense forward, taken off again; compiled_again puts them back."""
    compile_blocks(ready.transformer, ready.device)
    with first_blocks(ready.transformer, 1):
        run_forward(ready.transformer, ready.inputs, 999.0)
    return _take_compiled_calls(ready.transformer)


def _take_compiled_calls(transformer: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    taken: dict[torch.nn.Module, Any] = {}
    for module in transformer.modules():
        if module._compiled_call_impl is not None:
            taken[module] = module._compiled_call_impl
            del module._compiled_call_impl
    return taken


@contextlib.contextmanager
def compiled_again(calls: dict[torch.nn.Module, Any]) -> Iterator[None]:
    try:
        for module, call in calls.items():
            module._compiled_call_impl = call
        yield
    finally:
        for module in calls:
            del module._compiled_call_impl


def measure_profile(prepared: PreparedProfile, note: Keep = lambda part: None) -> dict[str, Any]:
    """One forward of each kind. Dense comes last and stock: what enable changed is undone by then."""
    ready, profile = prepared.ready, prepared.profile
    model, config = ready.model, timed_config(ready, profile)
    timed = timed_phases(ready, config, PHASES_TIMED, note)
    plain, plain_report, *_ = timed_phases(ready, paper_config(ready), PHASES_MEASURED, naming(note, corrected=False))
    dense = {}
    if prepared.compiled_calls:
        with compiled_again(prepared.compiled_calls):
            dense["compiled"] = timed_forward(ready, 999.0, "dense, compiled", note)
    usual = "compiled" if ready.compiled else "stock"
    dense[usual] = timed_forward(ready, 999.0, "dense", note)
    refresh_cold, plain_first, refresh_warm, plain_second = (run.seconds for run in plain)
    seconds = {
        **anchored_seconds(timed), "refresh_cold_s": refresh_cold, "refresh_warm_s": refresh_warm,
        "plain_reuse_s": statistics.median((plain_first, plain_second)),
    }  # fmt: skip
    baselines = {**{way: run.seconds for way, run in dense.items()}, "own kernel": seconds["own_dense_s"]}
    peaks = {"dense_peak_gb": dense[usual].peak_gb, "park_peak_gb": largest([run.peak_gb for run in timed.runs])}
    composed_runs = {
        name: anchored_run(seconds, phases_of_run(profile_config(model, name, ready.top_k)), baselines)
        for name in profiles_timed_alike(ready, profile)
    }
    phases = phases_of_run(model.config())
    paper = composed(baselines[usual], refresh_cold, refresh_warm, seconds["plain_reuse_s"], phases)
    composed_runs["paper"] = {
        **{key: paper[key] for key in ("steps", "formula", "park_s")},
        "speedup": speedups(paper["park_s"], baselines),
    }
    return {
        "benchmark": "e2e profile", "profile": profile, **run_facts(ready, config, timed.report),
        "compiled": ready.compiled, "density": sparse_density(timed.report.layers),
        "plain_density": sparse_density(plain_report.layers), "baselines": baselines, **seconds,
        "plain_attention_s": plain_report.attention_seconds, "runs": composed_runs,
        "finite": all(run.finite for run in [*timed.runs, *plain, *dense.values()]),
        "memory": state_record(ready, config, timed, plain_report, **peaks),
    }  # fmt: skip


def anchored_seconds(timed: Phases) -> dict[str, float]:
    """Of the forwards of PHASES_TIMED, as records have them and `anchored_run` composes them."""
    own, cold, first_reuse, second_reuse, warm = (run.seconds for run in timed.runs)
    second = {} if timed.second is None else {"anchor_second_s": timed.second.seconds}
    reuse = statistics.median((first_reuse, second_reuse))
    return {"own_dense_s": own, "anchor_cold_s": cold, "anchor_warm_s": warm, "reuse_s": reuse, **second}


def anchored_run(seconds: dict[str, float], phases: Counter[str], baselines: dict[str, float]) -> dict[str, Any]:
    """What a run with anchors takes by the parts measured here, and how many times as long each way to run it dense."""
    anchors, formula = seconds["anchor_cold_s"] + (phases["anchor"] - 1) * seconds["anchor_warm_s"], COMPOSED
    if "anchor_second_s" in seconds:
        anchors, formula = (anchors + phases["anchor"] * seconds["anchor_second_s"]) / 2, GUIDED
    park = phases["dense"] * seconds["own_dense_s"] + anchors + phases["reuse"] * seconds["reuse_s"]
    speedup = speedups(park, baselines, phases.total())
    return {"steps": dict(phases), "formula": formula, "park_s": park, "speedup": speedup}


def speedups(park_s: float, baselines: dict[str, float], steps: int = RUN_STEPS) -> dict[str, float]:
    return {way: steps * dense_s / park_s for way, dense_s in baselines.items()}


def state_record(
    ready: PreparedModel, config: ParkConfig, timed: Phases, plain: Summary, **peaks: float | None
) -> dict[str, Any]:
    """Of one branch's state what are no residuals are plans. plans_with_guidance_gb: of the paper preset (plain), whose
    branches share nothing.
    """
    report, residual = timed.report, timed.residual_bytes
    plans = (1 if config.share_branches else 2) * (report.peak_state_bytes - residual)
    rank = config.rank_for(ready.model.tokens)
    return {
        **memory_record(ready.transformer, report, **peaks),
        "state_with_guidance_gb": (plans + 2 * residual) / 1e9,
        "plans_with_guidance_gb": 2 * plain.peak_state_bytes / 1e9,
        "residual_with_guidance_gb": 2 * residual / 1e9,
        "residual_rank": rank,
    }


def state_sentence(memory: dict[str, Any]) -> str:
    bar = "" if memory["state_bar_gb"] is None else f" of at most {memory['state_bar_gb']:g} GB"
    per_rank = memory["residual_with_guidance_gb"] / memory["residual_rank"]
    return (
        f"state with guidance, two branches: {memory['state_with_guidance_gb']:.3f} GB{bar}; "
        f"plans {memory['state_with_guidance_gb'] - memory['residual_with_guidance_gb']:.3f} GB, "
        f"residual {memory['residual_with_guidance_gb']:.3f} GB at rank {memory['residual_rank']}; "
        f"a lower residual_rank takes {per_rank:.3f} GB less per unit."
    )


def run_profile(
    name: str, model: WholeModel, device: torch.device, keep: Keep, options: SectionOptions, turn: Callable[[], float]
) -> None:
    """One model's section, as `run_section` does it for the paper preset.

    Every part of the preparation is a line too: where a run was stopped, they say how far it came.
    """
    profile, began, note = options.profile, time.monotonic(), naming(keep, model=name, profile=options.profile)

    def done(part: str) -> None:
        note({"benchmark": "e2e preparation", "part": part, "seconds": time.monotonic() - began})

    prepared = prepare_profile(model, device, profile, options.reuse_density, compiled=options.compiled, done=done)
    given = turn()  # waits, so the clock is read after it
    ends = time.monotonic() + given
    found = measure_profile(prepared, note)
    found["memory"]["state_bar_gb"] = STATE_BARS.get(name)
    note({"speed_bar": SPEED_BARS.get(name), **found})
    sys.stdout.write(state_sentence(found["memory"]) + "\n")
    sys.stdout.flush()
    run_whole(name, prepared.ready, options, found, ends - time.monotonic(), note)


def run_whole(
    name: str, ready: PreparedModel, options: SectionOptions, forwards: dict[str, Any], left: float, note: Keep
) -> None:
    """All 50 steps of the one model that is small enough, where they are asked for, beside what they should take by
    these forwards of this process.
    """
    config = profile_config(ready.model, options.profile, ready.top_k, precision=options.precision)
    guided, rounded = options.guidance > 1, options.precision != "bf16"
    timed = {part: value for part, value in forwards.items() if guided or part != "anchor_second_s"}
    run = anchored_run(timed, phases_with_forecasts(config, RUN_STEPS, options.forecast), forwards["baselines"])
    composed_s = (2 if guided else 1) * run["park_s"]
    # a run that cannot be finished says nothing
    if not options.full or name != "wan2.1-1.3b" or left <= composed_s:
        return
    for line in whole_run(
        ready, seconds=left, rehearse=options.rehearse, alone=options.alone, config=config, forecast=options.forecast,
        benchmark=f"e2e {'bits' if rounded else 'profile'} run", guidance=options.guidance,
    ):  # fmt: skip
        note({"precision": options.precision, "composed_s": composed_s, "composed": run, **line})
