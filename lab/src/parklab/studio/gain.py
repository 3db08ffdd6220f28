"""What PARK gains: seconds of whole runs, composed of measured forwards where a video was measured, by arithmetic
elsewhere.

forwards.json has the measured forwards of one GPU; tools/tables.py writes it from records, and makes README's table by
the same `composed_run`. Another GPU's seconds are scaled by its peak. The arithmetic gives every FLOP the same speed,
so it compares runs whose blocks are alike. `why_no_gain` reads the record of a run.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from parkattn.checks import expect_choice, shown
from parkattn.models import SIZES, ModelSize
from parkattn.park import ParkConfig
from parkattn.reuse import Schedule, count_phases
from parkattn.settings import PRECISIONS
from parklab.sprites import CHECKPOINT


class Gpu(NamedTuple):
    """By the vendors' data sheets. peak: dense bf16 in TFLOP/s; memory: as it is sold, in GB; float8: it multiplies
    them.
    """

    peak: float
    memory: tuple[int, ...]
    float8: bool = True


GPUS = {
    "B200": Gpu(2250.0, (180,)),
    "H200": Gpu(989.0, (141,)),
    "H100": Gpu(989.0, (80,)),
    "A100": Gpu(312.0, (40, 80), float8=False),
    "A800": Gpu(312.0, (40, 80), float8=False),
    "L40S": Gpu(362.0, (48,)),
    "RTX 5090": Gpu(209.0, (32,)),
    "RTX 4090": Gpu(165.0, (24,)),
    "RTX 3090": Gpu(71.0, (24,), float8=False),
}
UTILISATION = 0.5  # of the peak, for a rough time per step
FORECAST = "forecast"  # steps whose forwards are not run
LITTLE = 0.05  # of the time of denoising: less than this is said to be little


def shipped_size() -> ModelSize | None:
    paths = [Path(CHECKPOINT) / part / "config.json" for part in ("transformer", "vae")]
    if not all(path.exists() for path in paths):
        return None
    config, vae = (json.loads(path.read_text()) for path in paths)
    return ModelSize(
        transformer=config["_class_name"], layers=config["num_layers"], heads=config["num_attention_heads"],
        ffn=config["ffn_dim"], text=32, head_dim=config["attention_head_dim"], passes=1,
        frames=vae["scale_factor_temporal"], latent_pixels=vae["scale_factor_spatial"],
        pixels=vae["scale_factor_spatial"] * config["patch_size"][1],
    )  # fmt: skip


def model_size(name: str) -> ModelSize:
    shipped = shipped_size()
    known = SIZES | ({"sprites": shipped} if shipped else {})
    expect_choice("model", name, known)
    return known[name]


@functools.cache
def measured_forwards() -> dict[str, Any]:
    """By model: its video, and the seconds of a forward of each kind on `gpu`, with one sample."""
    found: dict[str, Any] = json.loads(resources.files("parklab.studio").joinpath("forwards.json").read_text())
    return found


def phases_of(profile: str, model: str, steps: int) -> Counter[str]:
    preset = model if model in ParkConfig.PRESETS else None  # the model in the box has none
    return count_phases(Schedule(ParkConfig.profile(profile, model=preset)), steps)


def phases_with_forecasts(
    profile: str, model: str, *, steps: int, forwards_per_step: int, tolerance: float | None
) -> tuple[Mapping[str, float], str | None]:
    """Steps of each phase, with those that the small model forecast in as many steps and forwards, at the nearest lower
    tolerance; and why none are where some are asked for. tolerance None: the profile's.
    """
    phases = phases_of(profile, model, steps)
    wanted = ParkConfig.profile(profile).tolerance if tolerance is None else tolerance
    if wanted == 0:
        return phases, None
    recorded = [
        row for row in measured_forwards().get("forecasts", {}).get(profile, [])
        if (row["steps"], row["forwards_per_step"]) == (steps, forwards_per_step) and row["tolerance"] <= wanted
    ]  # fmt: skip
    if not recorded:
        run = f"{steps} steps of {forwards_per_step} forward{'s' * (forwards_per_step > 1)}"
        return phases, f"no record of forecasts within {wanted:g} in {run}, so every forward is counted"
    return max(recorded, key=lambda row: row["tolerance"])["phases"], None


def composed_run(
    forwards: Mapping[str, Any],
    model: str,
    *,
    steps: int,
    forwards_per_step: int,
    factor: float = 1.0,
    tolerance: float | None = None,
    precision: str = "bf16",
) -> dict[str, Any]:
    """Seconds of a whole run, dense and with each profile. forwards: of a model, as in forwards.json; factor: of
    another GPU's seconds; tolerance: of forecasts; precision: of sparse attention and of the profiles' dense steps.
    """
    each = factor * forwards_per_step
    dense = {way: each * steps * seconds for way, seconds in forwards["dense"].items()}
    profiles = {}
    for name, plain in forwards["profiles"].items():
        rounded = forwards.get(precision, {}).get(name)
        own = plain if rounded is None else rounded
        phases, lacking = phases_with_forecasts(
            name, model, steps=steps, forwards_per_step=forwards_per_step, tolerance=tolerance
        )
        park = each * seconds_of_phases(own["seconds"], phases, forwards_per_step)
        profiles[name] = {
            "seconds": park,
            "phases": dict(phases),
            "no_forecasts": lacking,
            "no_precision": _why_bf16(precision, rounded is not None),
            "estimated": bool(phases.keys() & own["estimated"]),
            "speedup": {way: whole / park for way, whole in (dense | timed_beside(own, each * steps)).items()},
        }
    return {"dense_s": dense, "profiles": profiles}


def timed_beside(profile: Mapping[str, Any], forwards: float) -> dict[str, float]:
    """Seconds of dense runs that were timed in one run with a profile's forwards, where those of the model were not."""
    return {way: forwards * seconds for way, seconds in profile.get("dense", {}).items()}


def _why_bf16(precision: str, timed: bool) -> str | None:
    return None if timed or precision == "bf16" else f"no forward in {precision.upper()} was timed, so in bf16"


def seconds_of_phases(seconds: Mapping[str, float], phases: Mapping[str, float], branches: int = 1) -> float:
    """Of so many forwards of each phase; the first plan starts cold, and a forecast takes none. The mean over branches
    of guidance: all but the first take its plans, and where that was timed their anchors take less.
    """
    first = "anchor" if phases.get("anchor") else "refresh"
    cold = seconds[f"{first}_cold"] - seconds[first] if phases.get(first) and f"{first}_cold" in seconds else 0.0
    whole = cold + sum(count * seconds[phase] for phase, count in phases.items() if phase != FORECAST)
    anchors = phases.get("anchor", 0)
    if branches == 1 or not anchors or "anchor_second" not in seconds:
        return whole
    second = whole - cold - anchors * (seconds["anchor"] - seconds["anchor_second"])
    return (whole + (branches - 1) * second) / branches


def estimate(
    model: str,
    *,
    frames: int,
    height: int,
    width: int,
    gpu: str | None = None,
    steps: int = 50,
    guidance: float | None = None,
    density: float | None = None,
    tolerance: float | None = None,
    precision: str = "bf16",
) -> dict[str, Any]:
    """source: "measured" forwards of this video, "scaled" by the peak of another GPU, or "arithmetic". gpu, unless
    known: that of the forwards.

    guidance: 1 or less is one forward per step; None: what the model is run with. density: of the sparse steps; None:
    each profile's; tolerance: of forecasts, likewise. precision: of the profiles, where its forwards were timed.
    """
    expect_choice("precision", precision, PRECISIONS)
    size = model_size(model)
    n = size.tokens(frames, height, width)
    if n < 1:
        raise ValueError(
            f"height, width: expected at least {size.pixels} pixels each, got {height} x {width}; raise them."
        )
    attention, rest = flops(size, n)
    share, each = attention / (attention + rest), forwards_per_step(size, guidance)
    known = measured_forwards()
    same = [own for name, own in known["models"].items() if _is_of(own, name, size, [frames, height, width])]
    card = known_gpu(gpu)
    if same and density is None:
        card = card or known["gpu"]
        factor = GPUS[known["gpu"]].peak / GPUS[card].peak
        run = composed_run(
            same[0], model, steps=steps, forwards_per_step=each, factor=factor, tolerance=tolerance, precision=precision
        )
        source = "measured" if card == known["gpu"] else "scaled"
    else:
        run, source = _run_by_arithmetic(model, share, steps, each, density, tolerance, precision), "arithmetic"
        if card:
            whole = steps * each * (attention + rest) / (GPUS[card].peak * 1e12 * UTILISATION)
            run["dense_s"] = {"dense": whole}
            for park in run["profiles"].values():
                park["seconds"] = whole / park["speedup"]["dense"]
    return {
        "model": model, "video": [frames, height, width], "tokens": n, "attention_share": share, "steps": steps,
        "forwards_per_step": each, "precision": precision, "gpu": card, "source": source,
        "tflop_per_forward": (attention + rest) / 1e12, **run,
    }  # fmt: skip


def _is_of(own: Mapping[str, Any], name: str, size: ModelSize, video: list[int]) -> bool:
    """Two models may have transformers of one size."""
    return SIZES[own.get("model", name)] == size and own["video"] == video


def flops(size: ModelSize, tokens: int) -> tuple[float, float]:
    """Of one forward: attention, and everything else."""
    n, d = tokens, size.width
    in_attention = n if size.cross_attention else n + size.text
    cross = 4 * n * d**2 + 4 * size.text * d**2 + 4 * n * size.text * d if size.cross_attention else 0
    rest = 8 * in_attention * d**2 + cross + 4 * in_attention * d * size.ffn
    return size.layers * 4 * in_attention**2 * d, size.layers * rest


def forwards_per_step(size: ModelSize, guidance: float | None) -> int:
    return size.passes if guidance is None or guidance > 1 else 1


def _run_by_arithmetic(
    model: str,
    share: float,
    steps: int,
    each: int,
    density: float | None,
    tolerance: float | None,
    precision: str,
) -> dict[str, Any]:
    """Gains if sparse attention cost exactly its density (Amdahl); an anchor is a dense step that costs little more. A
    precision gains nothing: how fast it is on a card is not a matter of counting.
    """
    profiles = {}
    for name, own in next(iter(measured_forwards()["models"].values()))["profiles"].items():
        phases, lacking = phases_with_forecasts(name, model, steps=steps, forwards_per_step=each, tolerance=tolerance)
        saved = sum(
            phases.get(sparse, 0) * share * (1 - (kept if density is None else density))
            for sparse, kept in own["density"].items()
        )
        profiles[name] = {
            "phases": dict(phases),
            "no_forecasts": lacking,
            "no_precision": _why_bf16(precision, False),
            "estimated": True,
            "speedup": {"dense": steps / (steps - phases.get(FORECAST, 0) - saved)},
        }
    return {"dense_s": {}, "profiles": profiles}


def known_gpu(name: str | None) -> str | None:
    """A key of GPUS: its words are in what torch calls the GPU, or all words that were given are in it and in no other,
    such as 4090. Laptops have other GPUs of the same names.
    """
    given = _words(name or "")
    if not given or "laptop" in given:
        return None
    inside = [known for known in GPUS if set(_words(known)) <= set(given)]
    parts = [known for known in GPUS if set(given) <= set(_words(known))]
    return inside[0] if inside else parts[0] if len(parts) == 1 else None


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"rtx(?=\d)", "rtx ", name.lower()))


def expect_gpu(name: str) -> None:
    if known_gpu(name) is None:
        raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, got {shown(name)}; leave it out for this machine's.")


def what_was_saved(found: dict[str, Any]) -> str:
    """What attention saved in a run, and from which dense calls that is known. found: a record's "measured"."""
    saved = found["attention_seconds_saved"]
    if saved is None:
        return "what was saved is not known, since no dense call was timed"
    ways = {"run": "by the dense calls of this run", "sample": "by one dense call that was timed apart"}
    by = ways[found["attention_saved_against"]]
    return f"dense attention would take about {abs(saved):.1f} s {'more' if saved >= 0 else 'less'}, {by}"


def why_no_gain(record: dict[str, Any]) -> str | None:
    """One line for a record of `park generate` that saved nothing or little, with what to do; None where it gained."""
    found, asked = record["measured"], record["request"]
    saved, seconds = found["attention_seconds_saved"], found["seconds"]
    if asked["method"] == "dense" or saved is None or saved > LITTLE * seconds["denoise"]:
        return None
    took, dense = seconds["attention"], seconds["attention"] + saved
    how_much, steps = "Nothing" if saved <= 0 else "Little", len(found["steps"])
    return (
        f"{how_much} is gained at {record['tokens']:,} tokens and {steps} steps: "
        f"attention took {took:.1f} s, dense attention would take about {dense:.1f} s; "
        "make the video longer or larger, or pass --method dense."
    )
