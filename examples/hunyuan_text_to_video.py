"""HunyuanVideo: text stays always on, padding is never attended; dense and PARK with the same seed, side by side.

python examples/hunyuan_text_to_video.py
"""

from __future__ import annotations

import sys

import torch
from diffusers import HunyuanVideoPipeline
from diffusers.utils import export_to_video

from parkattn import disable, enable, summary


def generate(pipe, prompt: str, seed: int = 0, **options):
    dense = pipe(prompt, generator=torch.Generator().manual_seed(seed), **options).frames[0]
    enable(pipe)
    sparse = pipe(prompt, generator=torch.Generator().manual_seed(seed), **options).frames[0]
    report = summary(pipe)
    disable(pipe)
    return dense, sparse, report


def main() -> None:
    pipe = HunyuanVideoPipeline.from_pretrained("hunyuanvideo-community/HunyuanVideo", torch_dtype=torch.bfloat16).to(
        "cuda"
    )
    pipe.vae.enable_tiling()
    dense, sparse, report = generate(
        pipe,
        "a cat walks on the grass",
        height=720,
        width=1280,
        num_frames=125,
        num_inference_steps=50,
        output_type="np",
    )
    export_to_video(dense, "hunyuan-dense.mp4", fps=24)
    export_to_video(sparse, "hunyuan-park.mp4", fps=24)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
