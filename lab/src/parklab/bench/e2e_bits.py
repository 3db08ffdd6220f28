"""`park bench e2e --profile fast --precision int8`: attention in the model's dtype and in INT8, in one process.

    park bench e2e --profile fast --precision int8 [--float8] --only wan2.1-14b --record FILE

Every kind of forward of a profile, in bf16 and in the precision; with --float8 the latter again with float8 linears.
Runs of 50 steps are composed of them, and compared with stock diffusers and with its blocks compiled, both in
bfloat16 and timed beside them. `quality` computes more than `fast` in a reuse step, so its reuse is timed at a
density of its own.

    park bench e2e --profile fast --precision int8 --alone [--full --guidance 5 --forecast STEP] --record FILE
    park bench e2e --profile fast --precision int8 --alone --float8 --only wan2.1-14b --record FILE

For a short lease: stock and `fast` in the precision. The second command times float8 linears alone, and compares them
with the stock forward that the first one left in FILE.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parkattn.park import ParkConfig
from parklab.bench.e2e import (
    Keep,
    PreparedModel,
    SectionOptions,
    WholeModel,
    compile_phases,
    find_top_k,
    largest,
    naming,
    phases_of_run,
    run_facts,
    seconds_of_fusing,
    timed_forward,
    timed_phases,
)
from parklab.bench.e2e_float8 import change_to_float8, make_float8, weights_bytes
from parklab.bench.e2e_profile import (
    PHASES_TIMED,
    PreparedProfile,
    anchored_run,
    anchored_seconds,
    compiled_again,
    prepare_profile,
    profile_config,
    run_whole,
    state_record,
    timed_config,
)
from parklab.bench.e2e_run import sparse_density
from parklab.bench.timing import gpu_environment
from parklab.bench.whole_models import forward_inputs, random_transformer
from parklab.record import read_records

QUALITY_DENSITY = 0.25  # near that of quality's reuse steps in the small model
QUALITY_PHASES = ("anchor", "reuse")


def run_bits(
    name: str, model: WholeModel, device: torch.device, keep: Keep, options: SectionOptions, turn: Callable[[], float]
) -> None:
    """One model's section: baselines, bf16 and the precision, and float8 linears."""
    profile, precision = options.profile, options.precision
    note = naming(keep, model=name, profile=profile)
    prepared = prepare_profile(model, device, profile, options.reuse_density)
    ready = prepared.ready
    quality = replace(ready, top_k=find_top_k(ready.transformer, ready.inputs, model, QUALITY_DENSITY))
    rounded = timed_config(ready, profile).replace(precision=precision)
    compile_phases(ready, rounded, PHASES_TIMED)
    ends = time.monotonic() + turn()
    baselines = time_baselines(prepared, note)
    for taken in ("bf16", precision):
        found = measure_bits(ready, quality, profile, taken, "bfloat16", baselines, note)
        note(found)
    run_whole(name, ready, options, found, ends - time.monotonic(), note)
    if options.float8:
        made = change_to_float8(ready, prepared.compiled_calls, rounded, PHASES_TIMED)
        note({"made_by": made, **measure_bits(ready, quality, profile, precision, "float8", baselines, note)})


def run_alone(
    name: str, model: WholeModel, device: torch.device, keep: Keep, options: SectionOptions, turn: Callable[[], float],
    record: Path,
) -> None:  # fmt: skip
    """Stock and the precision; or float8 linears with it, whose stock forward is this commit's last in `record`."""
    profile, began = options.profile, time.monotonic()
    note = naming(keep, model=name, profile=profile, alone=True)

    def done(part: str) -> None:
        note({"benchmark": "e2e preparation", "part": part, "seconds": time.monotonic() - began})

    transformer = random_transformer(model, device)
    made = {"made_by": make_float8(transformer, device)} if options.float8 else {}
    inputs = forward_inputs(model, transformer, device)
    done("weights")
    fusing_s = seconds_of_fusing(transformer, inputs, model, device)
    done("fused blocks")
    top_k = options.top_k or find_top_k(transformer, inputs, model, options.reuse_density)
    ready = PreparedModel(model, device, transformer, inputs, top_k, fusing_s=fusing_s)
    config = timed_config(ready, profile).replace(precision=options.precision)
    compile_phases(ready, config, PHASES_TIMED, done)
    ends = time.monotonic() + turn()
    if options.float8:
        baselines = stock_before(name, record)
    else:
        baselines = {"stock": timed_forward(ready, 999.0, "dense", note).seconds}
    found = measure_fast(ready, config, "float8" if options.float8 else "bfloat16", baselines, note)
    note({**made, **found})
    run_whole(name, ready, options, found, ends - time.monotonic(), note)


def stock_before(name: str, record: Path) -> dict[str, float]:
    commit = gpu_environment()["commit"]
    found = [
        line["seconds"]
        for line in read_records(record)
        if line.get("model") == name and line.get("benchmark") == "e2e forward" and line["phase"] == "dense"
        and "precision" not in line and line["environment"]["commit"] == commit
    ]  # fmt: skip
    return {"stock": found[-1]} if found else {}


def time_baselines(prepared: PreparedProfile, note: Keep) -> dict[str, float]:
    """Seconds of a dense forward: stock, and with its blocks compiled."""
    found = {"stock": timed_forward(prepared.ready, 999.0, "dense", note).seconds}
    with compiled_again(prepared.compiled_calls):
        found["compiled"] = timed_forward(prepared.ready, 999.0, "dense, compiled", note).seconds
    return found


def measure_bits(
    ready: PreparedModel, quality: PreparedModel, profile: str, precision: str, linears: str,
    baselines: dict[str, float], note: Keep,
) -> dict[str, Any]:  # fmt: skip
    """`fast`, and quality's reuse at its own density."""
    config = timed_config(ready, profile).replace(precision=precision)
    found = measure_fast(ready, config, linears, baselines, note)
    denser = timed_config(quality, "quality").replace(precision=precision, dense_steps=0, refresh_steps=())
    note_bits = naming(note, precision=precision, linears=linears)
    (anchor, reuse), report, *_ = timed_phases(quality, denser, QUALITY_PHASES, note_bits)
    phases = phases_of_run(profile_config(ready.model, "quality", ready.top_k))
    found["runs"]["quality"] = anchored_run({**found, "reuse_s": reuse.seconds}, phases, found["baselines"])
    found["memory"]["plans_with_guidance_gb"] = 2 * report.peak_state_bytes / 1e9
    return {
        **found,
        "quality_density": sparse_density(report.layers),
        "quality_reuse_s": reuse.seconds,
        "finite": found["finite"] and anchor.finite and reuse.finite,
    }


def other_prompt(ready: PreparedModel) -> dict[str, Any] | None:
    """Of the second branch; None where the model takes guidance as a number."""
    if "guidance" in ready.inputs:
        return None
    return {"encoder_hidden_states": ready.inputs["encoder_hidden_states"].flip(1)}


def measure_fast(
    ready: PreparedModel, config: ParkConfig, linears: str, baselines: dict[str, float], note: Keep
) -> dict[str, Any]:
    """One forward of each kind, and the run of `fast` that they make."""
    note_bits = naming(note, precision=config.precision, linears=linears)
    timed = timed_phases(ready, config, PHASES_TIMED, note_bits, other_prompt(ready))
    seconds = anchored_seconds(timed)
    ways = {**baselines, "own kernel": seconds["own_dense_s"]}
    fast = anchored_run(seconds, phases_of_run(profile_config(ready.model, "fast", ready.top_k)), ways)
    peak = largest([run.peak_gb for run in timed.runs])
    return {
        "benchmark": "e2e bits", "precision": config.precision, "linears": linears,
        **run_facts(ready, config, timed.report), "reasons": timed.report.dense_because,
        "density": sparse_density(timed.report.layers), **seconds, "baselines": ways, "runs": {"fast": fast},
        "finite": all(run.finite for run in timed.runs), "memory": {
            **state_record(ready, config, timed, timed.report, park_peak_gb=peak),
            "weights_gb": weights_bytes(ready.transformer) / 1e9,
        },
    }  # fmt: skip
