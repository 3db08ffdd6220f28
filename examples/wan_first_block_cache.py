"""PARK under a cache that skips blocks: a layer refreshes when its own plan is old, however many steps it sat out.

python examples/wan_first_block_cache.py
"""

from __future__ import annotations

import sys

import torch
from diffusers import FirstBlockCacheConfig, WanPipeline
from diffusers.utils import export_to_video

from parkattn import enable, summary


def generate(pipe, prompt: str, threshold: float = 0.1, **options):
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    enable(pipe)
    frames = pipe(prompt, **options).frames[0]
    report = summary(pipe)
    pipe.transformer.disable_cache()
    return frames, report


def main() -> None:
    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-14B-Diffusers", torch_dtype=torch.bfloat16).to("cuda")
    frames, report = generate(
        pipe, "a cat walks on the grass", height=720, width=1280, num_frames=81, num_inference_steps=50
    )
    export_to_video(frames, "wan-cached.mp4", fps=16)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
