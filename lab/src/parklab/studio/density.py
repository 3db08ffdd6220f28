"""`park profile`: the density profile of a model, from dense runs of it: what SVOO takes its floors from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from parkattn.files import explained, make_folder
from parkattn.settings import MethodConfig
from parklab.baselines.density_profile import DensityProfile, DensityProfiler
from parklab.store import Say
from parklab.studio import checkpoints
from parklab.studio.generate import Request, fit_to_pipeline, generate_frames, prepare


def measure_profile(
    request: Request,
    prompts: Sequence[str],
    out: Path,
    *,
    samples: int | None = None,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> DensityProfile:
    """One dense run of the request per prompt, without decoding; the file is written at the end."""
    if out.exists() and not overwrite:
        raise ValueError(f"out: expected a file that is not there yet, got {out}; pass --overwrite, or another name.")
    with explained(out):  # before the work, so that a bad folder costs nothing
        make_folder(out.parent)
    profiler = DensityProfiler(samples=samples)
    asked = [prepare(dataclasses.replace(request, prompt=prompt, method="dense", preset=None, changes={})) for prompt in prompts]
    first, folder = asked[0]
    pipe = checkpoints.load_pipeline(folder, device=first.device, dtype=first.dtype, offload=first.offload)
    for number, (one, _) in enumerate(asked, 1):
        fitted = fit_to_pipeline(one, pipe)
        generate_frames(pipe, fitted, MethodConfig(), method=profiler, recall_rows=0, decode=False)
        say(f"{number}/{len(asked)} {one.prompt}")
    profile = profiler.profile()
    profile.save(out)
    return profile
