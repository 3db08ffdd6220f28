"""Both example methods on a GPU, in our kernels: python tools/examples_on_gpu.py

Through `enable` on the shipped model at 7,168 and 75,600 tokens, and at the size of Wan2.1-14B against rows in float64.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

import parkattn
from parkattn.backend import resolve_for
from parkattn.ops import attend
from parkattn.planned import make_plan
from parkattn.site import CallSite
from parklab.bench.problems import Shape, mixture
from parklab.bench.timing import median_ms
from parklab.sprites import CHECKPOINT

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "methods"))
VIDEOS = ((29, 224, 256), (81, 400, 576))
TOKENS, GRID, HEADS, DIM = 75_600, (21, 45, 80), 40, 128


def through_enable(pipe: Any, name: str) -> None:
    for frames, height, width in VIDEOS:
        with parkattn.enable(pipe, method=name, dense_steps=1) as session:
            pipe("a cyan star moves down over grey checks", height=height, width=width, num_frames=frames,
                 num_inference_steps=6, guidance_scale=1.0, generator=torch.Generator("cpu").manual_seed(0),
                 max_sequence_length=32, output_type="np")  # fmt: skip
            report = session.summary()
        print(
            f"enable, {name}, {frames}x{height}x{width}: density {report.density:.3f}, calls {report.calls}", flush=True
        )


def at_full_size(entry: Any) -> None:
    q, k, v = (
        mixture(Shape(HEADS, TOKENS, 128, 512, DIM), centres, torch.device("cuda")) for centres in (300, 700, 700)
    )
    method = entry.make(entry.config())
    plan = make_plan(q, k, method.planner, CallSite(step=30, total_steps=50, grid=GRID, values=v), None)
    backend = resolve_for(q, "auto")
    sparse = partial(attend.over_kept, backend, q, k, v, plan)
    out, worst = sparse(), 0.0
    for head in (0, HEADS - 1):
        blocks, key_blocks = plan.queries.labels[0, head].long(), plan.keys.labels[0, head].long()
        for row in (0, 12_345, TOKENS - 1):
            kept = plan.mask[0, head, blocks[row]][key_blocks]
            scores = (k[0, head].double() @ q[0, head, row].double() / DIM**0.5).masked_fill(~kept, -torch.inf)
            exact = scores.softmax(-1) @ v[0, head].double()
            worst = max(worst, ((out[0, head, row].double() - exact).norm() / exact.norm()).item())
    density = plan.density().mean().item()
    print(
        f"14B size, {entry.name}: density {density:.4f}, worst row {worst:.1e}, {median_ms(sparse, 3):.1f} ms; "
        f"{backend.reason}",
        flush=True,
    )


def main() -> None:
    import tile_top_k
    import window

    kinds: Any = {"default": torch.bfloat16, "vae": torch.float32}
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        str(CHECKPOINT), torch_dtype=kinds, use_safetensors=True, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.to("cuda")
    for entry in (window.ENTRY, tile_top_k.ENTRY):
        parkattn.register(entry)
        through_enable(pipe, entry.name)
        at_full_size(entry)


if __name__ == "__main__":
    main()
