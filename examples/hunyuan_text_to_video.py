"""HunyuanVideo: text stays always on, padding is never attended; dense and PARK with the same seed, side by side.

python examples/hunyuan_text_to_video.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import HunyuanVideoPipeline

from parkattn import disable, enable, summary
from parklab.studio.video import as_bytes, write_mp4


def generate(pipe, prompt: str, seed: int = 0, **options):
    dense = pipe(prompt, generator=torch.Generator().manual_seed(seed), **options).frames[0]
    enable(pipe)
    sparse = pipe(prompt, generator=torch.Generator().manual_seed(seed), **options).frames[0]
    report = summary(pipe)
    disable(pipe)
    return dense, sparse, report


def main() -> None:
    pipe = HunyuanVideoPipeline.from_pretrained("hunyuanvideo-community/HunyuanVideo", torch_dtype=torch.bfloat16).to("cuda")
    pipe.vae.enable_tiling()
    dense, sparse, report = generate(
        pipe, "a cat walks on the grass", height=720, width=1280, num_frames=125, num_inference_steps=50, output_type="np"
    )
    write_mp4(Path("hunyuan-dense.mp4"), as_bytes(dense), fps=24)
    write_mp4(Path("hunyuan-park.mp4"), as_bytes(sparse), fps=24)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
