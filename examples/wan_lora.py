"""A few-step LoRA with PARK: with 4 steps the first is dense and every other refreshes its plan.

python examples/wan_lora.py path/to/lora.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import WanPipeline

from parkattn import enable, summary
from parklab.studio.video import as_bytes, write_mp4


def generate(pipe, prompt: str, load_lora, **options):
    enable(pipe)
    load_lora(pipe)  # before or after enable: the projections are the model's own
    frames = pipe(prompt, num_inference_steps=4, guidance_scale=1.0, **options).frames[0]
    return frames, summary(pipe)


def main() -> None:
    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-14B-Diffusers", torch_dtype=torch.bfloat16).to("cuda")
    frames, report = generate(pipe, "a cat walks on the grass", lambda p: p.load_lora_weights(sys.argv[1]), height=720, width=1280)
    write_mp4(Path("wan-lora.mp4"), as_bytes(frames), fps=16)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
