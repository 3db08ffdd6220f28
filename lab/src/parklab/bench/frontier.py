"""Quality against cost: PSNR to the dense video for settings of one or several methods, over prompts, sizes and
guidance.

python -m parklab.bench.frontier --out frontier.jsonl --size 81x400x576 --steps 50 --prompts 8 --guidance 1 \\
    --guidance 5 --setting paper --setting quality --setting fast --setting "fast top_p=0.3 anchors=8" \\
    --setting "fast tolerance=0.004" --setting "dense tolerance=0.004" --setting "dense steps=25" \\
    --setting "dense cache=first-block threshold=0.1"

steps=25 makes the video in 25 steps and compares it with the one of --steps; cache: `step_caches.py`.

Cost is the attention computed over the whole run as a share of all-dense: dense steps and anchors count 1, a sparse
call its density. An anchor whose dense and sparse outputs come out of two passes costs its plan's density more
(cost_two_passes). One line per run is appended to --out; runs that are there already are not made again. Dense frames
are kept beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import io
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from parkattn.engine.summary import Summary
from parkattn.hosts.diffusers import Session, transformers_of
from parkattn.methods import configured_method
from parkattn.models import row_for
from parkattn.park import ParkConfig
from parkattn.planned import PlannedMethod
from parklab.bench import step_caches
from parklab.files import sha256_of, write_atomically
from parklab.metrics.fidelity import Frames, psnr_per_frame
from parklab.record import append_records, environment
from parklab.record import read_records as read_lines
from parklab.research import ResearchConfig, studied_entry

FORMAT = "parkattn.frontier.1"
DENSE = "dense"
TEXT_TOKENS = 32  # of the shipped model's sentences


@dataclass(frozen=True)
class Setting:
    """ "METHOD [PROFILE or preset] [field=value ...]"; a profile alone is PARK's.

    changes: of the method's config. steps: another number of them than the video it is compared with had. cache: a step
    cache of diffusers, with its fields.
    """

    label: str
    method: str
    config: str | None
    changes: Mapping[str, Any]
    steps: int | None = None
    cache: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Setting:
        words = text.split()
        names = [word for word in words if "=" not in word]
        changes = {name: _value(value) for name, value in (word.split("=", 1) for word in words if "=" in word)}
        if not 1 <= len(names) <= 2:
            raise ValueError(
                f"setting: expected METHOD or PROFILE and field=value pairs, got {text!r}; write 'fast top_p=0.3'."
            )
        if names[0] in ParkConfig.PROFILES:
            names.insert(0, "park")
        studied_entry(names[0])
        steps, cache = changes.pop("steps", None), {}
        if "cache" in changes:
            if names != [DENSE]:
                raise ValueError(f"cache: expected beside dense attention, got {text!r}; write 'dense cache=...'.")
            changes, cache = {}, changes
        return cls(text, names[0], names[1] if len(names) == 2 else None, changes, steps, cache)

    def facts(self, method: Any) -> dict[str, Any]:
        """What tells its runs from others."""
        if isinstance(method, PlannedMethod):
            config = method.config.to_dict()
        else:
            config = {name: value for name, value in self.changes.items() if value}
        return {**config, **({"steps": self.steps} if self.steps else {}), **self.cache}


@dataclass(frozen=True)
class Task:
    """One video that is to be made."""

    prompt: str
    frames: int
    height: int
    width: int
    steps: int
    guidance: float
    seed: int

    def key(self, **more: Any) -> str:
        return hashlib.sha256(json.dumps({**dataclasses.asdict(self), **more}, sort_keys=True).encode()).hexdigest()[
            :20
        ]


def measure_frontier(
    pipe: Any,
    prompts: Sequence[str],
    settings: Iterable[str],
    out: Path,
    *,
    sizes: Sequence[tuple[int, int, int]],
    steps: int = 50,
    guidances: Sequence[float] = (1.0, 5.0),
    seeds: Sequence[int] = (0,),
    model: str = "",
    timed: bool = True,
) -> Iterator[dict[str, Any]]:
    """One record per run, old ones of `out` included; sizes are (frames, height, width); model tells weights apart.
    timed: nothing else runs on the machine, so seconds are kept.
    """
    asked = [Setting.parse(text) for text in settings]
    known = {record["key"]: record for record in read_records(out)}
    facts = environment()
    for size in sizes:
        for guidance in guidances:
            for seed in seeds:
                for prompt in prompts:
                    task = Task(prompt, *size, steps, guidance, seed)
                    for setting in (Setting(DENSE, DENSE, None, {}), *asked):
                        method = _method(pipe, setting)
                        config = setting.facts(method)
                        # of the largest weight: some models keep small ones in float32
                        dtype = str(max(pipe.transformer.parameters(), key=torch.Tensor.numel).dtype).removeprefix(
                            "torch."
                        )
                        key = task.key(model=model, method=setting.method, config=config, dtype=dtype)
                        frames_file = out.parent / f"{out.stem}.dense" / f"{task.key(model=model, dtype=dtype)}.npy"
                        if key not in known or (setting.label == DENSE and not frames_file.exists()):
                            made, found = _run(pipe, task, setting, method)
                            if not timed:
                                found = {**found, "seconds": None, "attention_seconds": None}
                            if setting.label == DENSE:
                                frames_file.parent.mkdir(parents=True, exist_ok=True)
                                _write_frames(frames_file, made)
                            psnr = statistics.fmean(psnr_per_frame(made, np.load(frames_file, allow_pickle=False)))
                            known[key] = {
                                "format": FORMAT, "key": key, "model": model, "setting": setting.label,
                                "method": setting.method, **dataclasses.asdict(task), "dtype": dtype, "psnr": psnr,
                                **found, "config": config, "environment": facts,
                            }  # fmt: skip
                            append_records(out, [known[key]])
                        yield {**known[key], "setting": setting.label}


def costs(report: Summary) -> dict[str, Any]:
    """What a run computed."""
    assert report.density is not None
    return {
        **whole_run_cost(report.calls, report.density, report.forwards),
        "forecast_error": report.forwards.get("mean_error"),
        "steps_by_phase": report.steps,
        "attention_seconds": report.attention_seconds,
        "state_bytes": report.peak_state_bytes,
    }


def whole_run_cost(calls: Mapping[str, int], density: float, forwards: Mapping[str, Any]) -> dict[str, float]:
    """Attention over the whole run as a share of all-dense: dense calls and anchors count 1, a sparse call its density,
    forwards that were forecast nothing. density: the mean over calls; forwards: as a summary counts them.

    An anchor whose dense and sparse outputs come out of two passes costs its plan's density more (cost_two_passes).
    """
    asked = forwards["computed"] + forwards["forecast"] if forwards else 0
    share = forwards["computed"] / asked if asked else 1.0
    whole, anchors = sum(calls.values()), calls.get("anchor", 0)
    sparse = whole - calls["dense"] - anchors
    density_sparse = (density * whole - calls["dense"] - anchors) / sparse if sparse else 1.0
    return {
        "cost": share * density,
        "cost_two_passes": share * (density + (anchors / whole * density_sparse if anchors else 0.0)),
        "density_sparse": density_sparse,
        "share_computed": share,
    }


def changed_since(recorded: Mapping[str, Any], profile: str) -> dict[str, Any]:
    """Of the fields that profiles set, those with another value in the config of a record than the profile has now."""
    now, default = (
        ResearchConfig.profile(profile).to_dict(),
        ResearchConfig().to_dict(),
    )  # a field that is younger was at its default
    fields = sorted({field for changes in ResearchConfig.PROFILES.values() for field in changes})
    then = {field: recorded.get(field, default[field]) for field in fields}
    return {field: value for field, value in then.items() if value != now[field]}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Whole lines of our format."""
    return [record for record in read_lines(path) if record.get("format") == FORMAT and "key" in record]


def _run(pipe: Any, task: Task, setting: Setting, method: Any) -> tuple[Frames, dict[str, Any]]:
    """The video and its costs, as shares of a dense run of the task."""
    run = dataclasses.replace(task, steps=setting.steps or task.steps)
    more: dict[str, Any] = {}
    if setting.cache:
        frames, seconds, more = _run_cached(pipe, run, setting, method)
    else:
        begin = time.perf_counter()
        with Session(pipe, method) as session:
            frames = _frames(pipe, run)
            more = costs(session.summary())
        seconds = time.perf_counter() - begin
    for name in ("cost", "cost_two_passes", "share_computed"):
        more[name] *= run.steps / task.steps
    return frames, {"seconds": seconds, **more}


def _run_cached(pipe: Any, run: Task, setting: Setting, method: Any) -> tuple[Frames, float, dict[str, Any]]:
    transformer, ratios = pipe.transformer, None
    dtype = max(transformer.parameters(), key=torch.Tensor.numel).dtype
    if setting.cache["cache"] == "mag":
        ratios = _ratios(pipe, dataclasses.replace(run, prompt=step_caches.CALIBRATION, seed=0), dtype)
    config = step_caches.cache_config(setting.cache, run.steps, dtype, ratios)
    begin = time.perf_counter()
    with Session(pipe, method) as session, step_caches.cached(transformer, config) as count:
        frames = _frames(pipe, run)
        seconds, found = time.perf_counter() - begin, costs(session.summary())
        share = step_caches.computed(session.engine.log, count["forwards"])
    return frames, seconds, {**found, **share, "cost_two_passes": share["cost"], "calibrated": ratios}


@functools.lru_cache(maxsize=8)
def _ratios(pipe: Any, run: Task, dtype: torch.dtype) -> list[float]:
    return step_caches.calibrate(pipe.transformer, run.steps, dtype, lambda: _frames(pipe, run))


def _frames(pipe: Any, task: Task) -> Frames:
    accepted = inspect.signature(pipe.__call__).parameters
    more = {"max_sequence_length": TEXT_TOKENS} if "max_sequence_length" in accepted else {}
    frames = pipe(
        task.prompt, height=task.height, width=task.width, num_frames=task.frames, num_inference_steps=task.steps,
        guidance_scale=task.guidance, generator=torch.Generator("cpu").manual_seed(task.seed), output_type="np", **more,
    ).frames[0]  # fmt: skip
    return np.round(np.clip(frames, 0, 1) * 255).astype(np.uint8)


def _method(pipe: Any, setting: Setting) -> Any:
    model = row_for(next(iter(transformers_of(pipe).values()))).preset
    return configured_method(studied_entry(setting.method), setting.config, model=model, **setting.changes)


def _write_frames(path: Path, frames: Frames) -> None:
    buffer = io.BytesIO()
    np.save(buffer, frames, allow_pickle=False)
    write_atomically(path, buffer.getvalue())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(
    out: Annotated[Path, typer.Option(help="JSON lines, continued where they are.")],
    setting: Annotated[list[str], typer.Option(help="METHOD or PROFILE and field=value pairs.")],
    size: Annotated[list[str], typer.Option(help="FRAMESxHEIGHTxWIDTH")],
    model: Annotated[Path | None, typer.Option(help="A diffusers folder; the shipped model where left out.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out sentences of the shipped model.")] = 8,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompts instead.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 50,
    guidance: Annotated[list[float] | None, typer.Option(help="1 and 5 where left out.")] = None,
    seed: Annotated[list[int] | None, typer.Option()] = None,
    timed: Annotated[bool, typer.Option(help="--no-timed: others run beside it, so no seconds are kept.")] = True,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    name: Annotated[
        str | None, typer.Option(help="Of --model in the lines: the weights that its park reproduce report prints.")
    ] = None,
    lora: Annotated[str | None, typer.Option(help="A LoRA of that model, a safetensors file, or few-steps.")] = None,
) -> None:
    """Measure and keep every run."""
    import diffusers

    from parklab.sprites import CHECKPOINT, LORAS, grammar

    folder = model or CHECKPOINT
    kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
    parts: Any = {"default": kind, "vae": torch.float32}
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        str(folder), torch_dtype=parts, use_safetensors=True, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    weights = "" if model is None else name or str(folder)
    if lora is not None:
        file = Path(LORAS.get(lora, lora))
        pipe.load_lora_weights(str(file.parent), weight_name=file.name)
        weights += f"+lora:{(sha256_of(file) or '')[:16]}"
    sentences = prompt or [scene.sentence for scene in grammar.held_out_scenes(prompts)]
    sizes = [(int(f), int(h), int(w)) for f, h, w in (text.split("x") for text in size)]
    for record in measure_frontier(
        pipe.to(device), sentences, setting, out, sizes=sizes, steps=steps, guidances=guidance or (1.0, 5.0),
        seeds=seed or (0,), model=weights, timed=timed,
    ):  # fmt: skip
        typer.echo(
            f"{record['setting']}: cost {record['cost']:.3f}, forwards {record.get('share_computed', 1.0):.0%}, "
            f"{record['psnr']:.2f} dB, {'-' if record['seconds'] is None else round(record['seconds'])} s: "
            f"{record['prompt']}"
        )
    typer.echo(f"table and findings: park reproduce frontier --records {out}")


if __name__ == "__main__":
    typer.run(main)
