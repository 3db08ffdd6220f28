"""Every step of a 50-step video at real size, through the stock pipeline: dense, then PARK, then the autoencoder's
decoder.

Prompt embeddings are random and given directly, since a text encoder would only add weights. Guidance, a second forward
per step, is off unless asked for.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parkattn.engine.summary import PHASES, Summary
from parkattn.hosts.diffusers import enable, summary
from parkattn.park import ParkConfig
from parklab.bench.e2e import RUN_STEPS, PreparedModel, memory_record, phases_of_run
from parklab.bench.timing import free_memory, watched
from parklab.bench.whole_models import WholeModel
from parklab.research import GivenForecasts

FORECAST = "forecast"  # steps whose forward is not run


def pipeline(transformer: Any, device: torch.device, vae: Any = None) -> Any:
    import diffusers

    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        transformer=transformer,
    ).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def whole_run(
    ready: PreparedModel,
    *,
    seconds: float,
    steps: int = RUN_STEPS,
    rehearse: bool = False,
    config: ParkConfig | None = None,
    forecast: Sequence[int] = (),
    benchmark: str = "e2e run",
    alone: bool = False,
    guidance: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """A line for PARK, one for dense, one for the decoded video.

    seconds: what there is for all of it; PARK comes first, and a dense run that has no time left stops at a step, and
    says so. config: None is the model's preset at the density found. forecast: steps whose forward is not run. alone:
    PARK's line is all.
    """
    ends = time.monotonic() + seconds
    model, device = ready.model, ready.device
    pipe = pipeline(ready.transformer, device)
    config = config or model.config(top_p=None, top_k=ready.top_k)
    with enable(pipe, method=GivenForecasts(config, forecast)) if forecast else enable(pipe, config):
        park = generate(pipe, model, steps, guidance=guidance)
        report = summary(pipe)
    latents, layers = park.pop("latents"), len(report.layers)
    expected = _expect_run(report, config, steps, forecast, branches=2 if guidance > 1 else 1, finite=park["finite"])
    by_phase = {
        phase: statistics.median(park["each_s"][step] for step in took) for phase, took in report.steps.items() if took
    }
    run = {
        "benchmark": benchmark,
        "video": model.video,
        "tokens": model.tokens,
        "steps": steps,
        "guidance_scale": guidance,
        "layers": layers,
    }
    yield {
        **run, "method": "park", "config": config.to_dict(), **park, "calls": report.calls, "expected_calls": expected,
        "steps_by_phase": report.steps, "dense_calls_because": len(report.dense_because), "density": report.density,
        "median_step_s": by_phase, "density_sparse_steps": sparse_density(report.layers),
        "attention_s": report.attention_seconds, "saved_s_by_summary": report.seconds_saved,
        "memory": memory_record(ready.transformer, report, park_peak_gb=park["peak_gb"]),
    }  # fmt: skip
    if alone:
        return
    dense = generate(pipe, model, steps, guidance=guidance, ends=ends)
    dense.pop("latents")
    whole = len(dense["each_s"]) == steps
    speedup = {"park_s": park["denoise_s"], "speedup": dense["denoise_s"] / park["denoise_s"]} if whole else {}
    yield {**run, "method": "dense", "steps_done": len(dense["each_s"]), **dense, **speedup}
    free_memory()
    if time.monotonic() < ends:
        yield decoded(latents, device, rehearse=rehearse)


def _expect_run(
    report: Summary, config: ParkConfig, steps: int, forecast: Sequence[int], *, branches: int, finite: bool
) -> dict[str, int]:
    """Attention calls of each phase, which are what the schedule says; else an error."""
    phases = phases_with_forecasts(config, steps, forecast)
    calls = branches * len(report.layers)
    expected = {phase: phases[phase] * calls for phase in (*PHASES, *phases) if phase != FORECAST}
    left_out = report.steps.get(FORECAST, [])
    problems = [
        *([f"forecast steps {left_out}, expected {sorted(forecast)}"] if left_out != sorted(forecast) else []),
        *([f"attention calls {report.calls}, expected {expected}"] if report.calls != expected else []),
        *([f"{report.state_bytes} bytes of plans are left"] if report.state_bytes else []),
        *([] if finite else ["latents are not finite"]),
    ]
    if problems:
        raise RuntimeError(f"e2e: {'; '.join(problems)}, so nothing was recorded.")
    return expected


def phases_with_forecasts(config: ParkConfig, steps: int, forecast: Sequence[int]) -> Counter[str]:
    """How many steps of each phase a run has; a forecast one takes the place of a reuse."""
    phases = phases_of_run(config, steps)
    return phases + Counter({FORECAST: len(forecast)}) - Counter({"reuse": len(forecast)}) if forecast else phases


def generate(
    pipe: Any,
    model: WholeModel,
    steps: int,
    *,
    guidance: float = 1.0,
    device: torch.device | None = None,
    ends: float = math.inf,
) -> dict[str, Any]:
    """Latents, and the time of each step. device: where it runs, if its weights wait elsewhere; ends: no step begins
    after that.
    """
    device = pipe.transformer.device if device is None else device
    generator = torch.Generator().manual_seed(2)
    words, others = (
        torch.randn(1, model.text_tokens, pipe.transformer.config.text_dim, generator=generator) for _ in range(2)
    )
    embeds = {"prompt_embeds": words.to(device, torch.bfloat16)}
    embeds |= {"negative_prompt_embeds": others.to(device, torch.bfloat16)} if guidance > 1 else {}
    frames, height, width = model.video
    clock: list[float] = []
    made: list[torch.Tensor] = []

    def ended(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock.append(time.perf_counter())
        pipeline._interrupt = time.monotonic() > ends  # how diffusers skips the steps that are left
        return tensors

    def run() -> torch.Tensor:
        clock.append(time.perf_counter())
        made.append(
            pipe(
                **embeds, height=height, width=width, num_frames=frames, num_inference_steps=steps,
                guidance_scale=guidance, generator=torch.Generator().manual_seed(0), output_type="latent",
                callback_on_step_end=ended,
            ).frames
        )  # fmt: skip
        return made[0]

    found = watched(run, device)
    each = [round(end - begin, 4) for begin, end in itertools.pairwise(clock)]
    return {
        "denoise_s": clock[-1] - clock[0],
        "each_s": each,
        "peak_gb": found.peak_gb,
        "finite": found.finite,
        "latents": made[0],
    }


def sparse_density(layers: list[dict[str, Any]]) -> float:
    """The mean over refresh and reuse calls: a layer's mean counts its dense calls and its anchors as 1."""
    sparse = [row["refresh"] + row["reuse"] for row in layers]
    whole = [row["dense"] + row.get("anchor", 0) for row in layers]
    summed = [row["density"] * (m + n) - m for row, m, n in zip(layers, whole, sparse, strict=True)]
    return sum(summed) / sum(sparse)


def decoded(latents: torch.Tensor, device: torch.device, *, rehearse: bool) -> dict[str, Any]:
    """The latents through Wan's autoencoder, with random weights of the real size."""
    import diffusers

    sizes = {"base_dim": 8, "num_res_blocks": 1} if rehearse else {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            vae = diffusers.AutoencoderKLWan(**sizes).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    mean, spread = (
        torch.tensor(values, device=device, dtype=vae.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    frames: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        with torch.no_grad():
            frames.append(vae.decode(latents.to(vae.dtype) * spread + mean, return_dict=False)[0])
        return frames[0]

    found = watched(run, device)
    if not found.finite:
        raise RuntimeError("e2e: the decoded video is not finite, so nothing was recorded.")
    return {
        "benchmark": "e2e decode",
        "frames": list(frames[0].shape),
        "decode_s": found.seconds,
        "peak_gb": found.peak_gb,
        "finite": True,
    }
