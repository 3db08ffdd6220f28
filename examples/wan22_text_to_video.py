"""Wan2.2 A14B, two experts: one call covers both, and dense steps are spread over the whole run.

python examples/wan22_text_to_video.py
"""

from __future__ import annotations

import sys

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

from parkattn import enable


def generate(pipe, prompt: str, **options):
    with enable(pipe) as session:  # leaving the block disables PARK again
        frames = pipe(prompt, **options).frames[0]
        report = session.summary()
    return frames, report


def main() -> None:
    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.2-T2V-A14B-Diffusers", torch_dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()  # plans are released at the end of a run, so they do not stay on the GPU
    frames, report = generate(
        pipe, "two boats in a storm", height=720, width=1280, num_frames=81, num_inference_steps=40
    )
    export_to_video(frames, "wan22.mp4", fps=16)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
