"""Wan2.1 text to video with PARK: one line more than stock diffusers.

python examples/wan_text_to_video.py "a cat walks on the grass"
"""

from __future__ import annotations

import sys

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

from parkattn import enable, summary


def generate(pipe, prompt: str, **options):
    enable(pipe)  # the profile quality; enable(pipe, "fast") takes another, enable(pipe, top_p=0.8) changes one setting
    frames = pipe(prompt, **options).frames[0]
    return frames, summary(pipe)


def main() -> None:
    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", torch_dtype=torch.bfloat16).to("cuda")
    prompt = sys.argv[1] if len(sys.argv) > 1 else "a cat walks on the grass"
    frames, report = generate(
        pipe, prompt, height=720, width=1280, num_frames=81, num_inference_steps=50, guidance_scale=5.0
    )
    export_to_video(frames, "wan.mp4", fps=16)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
