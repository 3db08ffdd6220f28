"""One video on several GPUs: diffusers splits the tokens (Ulysses), PARK runs on each GPU's heads.

torchrun --nproc-per-node 4 examples/multi_gpu.py
"""

from __future__ import annotations

import sys

import torch
from diffusers import ContextParallelConfig, HunyuanVideoPipeline
from diffusers.utils import export_to_video

from parkattn import enable, sequence_parallel_plan, summary


def split_over_ranks(pipe, **changes) -> None:
    """ulysses_degree must divide the heads (24 for HunyuanVideo, 40 or 12 for Wan) and the tokens of video and text."""
    degree = ContextParallelConfig(ulysses_degree=torch.distributed.get_world_size())
    # diffusers has a plan for Wan; for HunyuanVideo it is ours
    pipe.transformer.enable_parallelism(config=degree, cp_plan=sequence_parallel_plan(pipe))
    enable(pipe, **changes)


def main() -> None:
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    pipe = HunyuanVideoPipeline.from_pretrained("hunyuanvideo-community/HunyuanVideo", torch_dtype=torch.bfloat16).to(
        "cuda"
    )
    pipe.vae.enable_tiling()
    split_over_ranks(pipe)
    seed = torch.Generator().manual_seed(0)  # every rank must draw the same noise
    frames = pipe(
        "a cat walks on the grass", height=720, width=1280, num_frames=125, generator=seed, output_type="np"
    ).frames[0]
    if rank == 0:
        export_to_video(frames, "hunyuan.mp4", fps=24)
        sys.stdout.write(f"{summary(pipe)}\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
