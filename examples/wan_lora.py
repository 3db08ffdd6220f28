"""A few-step LoRA with PARK: with 4 steps the first is dense and every other refreshes its plan.

python examples/wan_lora.py path/to/lora.safetensors
"""

from __future__ import annotations

import sys

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

from parkattn import enable, summary


def generate(pipe, prompt: str, load_lora, **options):
    enable(pipe)
    load_lora(pipe)  # before or after enable: the projections are the model's own
    frames = pipe(prompt, num_inference_steps=4, guidance_scale=1.0, **options).frames[0]
    return frames, summary(pipe)


def main() -> None:
    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-14B-Diffusers", torch_dtype=torch.bfloat16).to("cuda")
    frames, report = generate(
        pipe, "a cat walks on the grass", lambda p: p.load_lora_weights(sys.argv[1]), height=720, width=1280
    )
    export_to_video(frames, "wan-lora.mp4", fps=16)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
