"""`park bench e2e --profile fast --precision int8`: attention in the model's dtype and in INT8, in one process.

    park bench e2e --profile fast --precision int8 [--float8] --only wan2.1-14b --record FILE

Every kind of forward of a profile, in bf16 and in the precision; with --float8 the latter again with float8 linears.
Runs of 50 steps are composed of them, and compared with stock diffusers and with its blocks compiled, both in
bfloat16 and timed beside them. `quality` computes more than `fast` in a reuse step, so its reuse is timed at a
density of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from parklab.bench.e2e import (
    Keep,
    PreparedModel,
    SectionOptions,
    WholeModel,
    compile_phases,
    find_top_k,
    largest,
    phases_of_run,
    seconds_of_fusing,
    timed_forward,
    timed_phases,
)
from parklab.bench.e2e_float8 import make_float8, weights_bytes
from parklab.bench.e2e_profile import (
    DENSITY,
    PHASES_TIMED,
    PreparedProfile,
    anchored_run,
    compiled_again,
    prepare_profile,
    profile_config,
    state_record,
    timed_config,
)
from parklab.bench.e2e_run import sparse_density, whole_run

QUALITY_DENSITY = 0.25  # near that of quality's reuse steps in the small model
QUALITY_PHASES = ("anchor", "reuse")


def run_bits(
    name: str, model: WholeModel, device: torch.device, keep: Keep, options: SectionOptions, turn: Callable[[], float]
) -> None:
    """One model's section: baselines, bf16 and the precision, and float8 linears."""
    profile, precision = options.profile, options.precision
    prepared = prepare_profile(model, device, profile, DENSITY if options.density is None else options.density)
    ready = prepared.ready
    quality = replace(ready, top_k=find_top_k(ready.transformer, ready.inputs, model, QUALITY_DENSITY))
    compile_phases(ready, timed_config(ready, profile).replace(precision=precision), PHASES_TIMED)
    ends = time.monotonic() + turn()

    def note(part: dict[str, Any]) -> None:
        keep({"model": name, "profile": profile, **part})

    baselines = time_baselines(prepared, note)
    for taken in ("bf16", precision):
        note(measure_bits(ready, quality, profile, taken, "bfloat16", baselines, note))
    left = ends - time.monotonic()
    if options.full and name == "wan2.1-1.3b":
        config = profile_config(model, profile, ready.top_k, precision=precision)
        how: dict[str, Any] = {"config": config, "benchmark": "e2e bits run"}
        for line in whole_run(ready, seconds=left, rehearse=options.rehearse, **how):
            note(line)
    if options.float8:
        prepared.compiled_calls.clear()
        torch._dynamo.reset()  # graphs of the other linears
        made = make_float8(ready.transformer, device)
        ready.fusing_s = seconds_of_fusing(ready.transformer, ready.inputs, model, device)
        compile_phases(ready, timed_config(ready, profile).replace(precision=precision), PHASES_TIMED)
        note({"made_by": made, **measure_bits(ready, quality, profile, precision, "float8", baselines, note)})


def time_baselines(prepared: PreparedProfile, note: Keep) -> dict[str, float]:
    """Seconds of a dense forward: stock, and with its blocks compiled."""
    found = {"stock": timed_forward(prepared.ready, 999.0, "dense", note).seconds}
    with compiled_again(prepared.compiled_calls):
        found["compiled"] = timed_forward(prepared.ready, 999.0, "dense, compiled", note).seconds
    return found


def measure_bits(
    ready: PreparedModel,
    quality: PreparedModel,
    profile: str,
    precision: str,
    linears: str,
    baselines: dict[str, float],
    note: Keep,
) -> dict[str, Any]:
    config = timed_config(ready, profile).replace(precision=precision)

    def note_bits(part: dict[str, Any]) -> None:
        note({**part, "precision": precision, "linears": linears})

    runs, report, residual_bytes = timed_phases(ready, config, PHASES_TIMED, note_bits)
    own, cold, first_reuse, warm, second_reuse = (run.seconds for run in runs)
    seconds = {
        "own_dense_s": own,
        "anchor_cold_s": cold,
        "anchor_warm_s": warm,
        "reuse_s": statistics.median((first_reuse, second_reuse)),
    }
    denser = timed_config(quality, "quality").replace(precision=precision, dense_steps=0, refresh_steps=())
    (_, dense_reuse), quality_report, _ = timed_phases(quality, denser, QUALITY_PHASES, note_bits)
    ways = {**baselines, "own kernel": own}
    quality_seconds = {**seconds, "reuse_s": dense_reuse.seconds}
    composed = {
        name: anchored_run(found, phases_of_run(profile_config(ready.model, name, ready.top_k)), ways)
        for name, found in (("fast", seconds), ("quality", quality_seconds))
    }
    return {
        "benchmark": "e2e bits", "transformer": ready.model.transformer, "precision": precision, "linears": linears,
        "video": ready.model.video, "tokens": ready.model.tokens, "text_tokens": ready.model.text_tokens,
        "valid_text_tokens": ready.model.valid_text, "layers": len(report.layers), "config": config.to_dict(),
        "fused": report.fused, "fusing_s": ready.fusing_s, "reasons": report.dense_because,
        "density": sparse_density(report.layers), **seconds,
        "quality_density": sparse_density(quality_report.layers), "quality_reuse_s": dense_reuse.seconds,
        "baselines": ways, "attention_s": report.attention_seconds, "runs": composed,
        "finite": all(run.finite for run in runs), "memory": {
            **state_record(
                ready, config, report, residual_bytes, quality_report,
                park_peak_gb=largest([run.peak_gb for run in runs])
            ),
            "weights_gb": weights_bytes(ready.transformer) / 1e9,
        },
    }  # fmt: skip
