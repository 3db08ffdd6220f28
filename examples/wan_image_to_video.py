"""Wan2.1 image to video with PARK, compiled: regional compilation makes one graph for all blocks.

python examples/wan_image_to_video.py first_frame.png
"""

from __future__ import annotations

import sys

import torch
from diffusers import WanImageToVideoPipeline
from diffusers.utils import export_to_video, load_image

from parkattn import enable, summary


def generate(pipe, image, prompt: str, compiler: str = "inductor", **options):
    enable(pipe)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=compiler)
    frames = pipe(image=image, prompt=prompt, **options).frames[0]
    return frames, summary(pipe)


def main() -> None:
    model = "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"
    pipe = WanImageToVideoPipeline.from_pretrained(model, torch_dtype=torch.bfloat16).to("cuda")
    image = load_image(sys.argv[1]).resize((1280, 720))
    frames, report = generate(
        pipe, image, "the camera moves forward", height=720, width=1280, num_frames=81, num_inference_steps=50
    )
    export_to_video(frames, "wan-i2v.mp4", fps=16)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
