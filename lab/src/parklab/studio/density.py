"""`park profile`: the density profile of a model, from dense runs of it: what SVOO takes its floors from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from parkattn.settings import MethodConfig
from parklab.baselines.density_profile import DensityProfile, DensityProfiler
from parklab.record import environment
from parklab.store import Cell, CellWriter, Say, Store
from parklab.studio.generate import generate_frames, pipeline_for
from parklab.studio.request import Request, fit_to_pipeline, prepare

FORMAT = "parkattn.density-profile.record.1"


def measure_profile(
    request: Request,
    prompts: Sequence[str],
    out: Path,
    *,
    samples: int | None = None,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> DensityProfile:
    """One dense run of the request per prompt, without decoding; out and out.with_suffix(".json") are written at the
    end.
    """
    if out.suffix != ".safetensors":
        raise ValueError(f"out: expected a file name ending in .safetensors, got {out}; rename it.")
    asked = [
        prepare(dataclasses.replace(request, prompt=prompt, method="dense", preset=None, changes={}))
        for prompt in prompts
    ]
    first, folder = asked[0]
    wanted = {"runs": [one.to_dict() for one, _ in asked], "samples": samples}

    def make(making: CellWriter) -> None:
        profiler, pipe = DensityProfiler(samples=samples), pipeline_for(first, folder)
        for number, (one, _) in enumerate(asked, 1):
            generate_frames(
                pipe, fit_to_pipeline(one, pipe), MethodConfig(), method=profiler, recall_rows=0, decode=False
            )
            say(f"{number}/{len(asked)} {one.prompt}")
        making.write(out.name, profiler.profile().packed())
        making.commit({"format": FORMAT, "request": wanted, "environment": environment()})

    cell = Cell(name=out.stem, format=FORMAT, request=wanted, files=(out.name,))
    done = f"{out} is done already, with these settings; pass --overwrite to make it again."
    Store(out.parent, say).fill([cell], make, overwrite=overwrite, kept=lambda cell: say(done))
    return DensityProfile.load(out)
