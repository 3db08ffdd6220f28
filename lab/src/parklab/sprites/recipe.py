"""What a training run is: the stages' lengths, the sizes of the clips, and which sentences may be seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .data import ClipSize
from .grammar import every_scene

# every size the transformer sees, with its share of the steps at the start and at the end of training
Mixture = tuple[tuple[ClipSize, float, float], ...]
MIXTURE: Mixture = (
    (ClipSize(17, 64, 96), 0.75, 0.05),
    (ClipSize(17, 96, 144), 0.15, 0.15),
    (ClipSize(17, 128, 192), 0.10, 0.35),
    (ClipSize(33, 160, 256), 0.00, 0.45),
)
SMALL_MIXTURE: Mixture = ((ClipSize(5, 48, 64), 0.6, 0.4), (ClipSize(9, 48, 48), 0.4, 0.6))
# few pixels make fast steps; the longest clips keep the causal convolutions from drifting where clips go on
AUTOENCODER_SIZES = ((ClipSize(9, 96, 96), 2.0), (ClipSize(33, 64, 96), 1.0))
# where prompt following is measured; the first is the size of the demo
EVALUATION_SIZES = (ClipSize(33, 160, 256), ClipSize(17, 128, 192))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    seed: int = 0
    autoencoder_steps: int = 20_000
    autoencoder_seconds: float = 90.0
    decoder_steps: int = 10_000
    decoder_seconds: float = 30.0
    decoder_noise: float = 0.08  # in deviations of the latents: what the transformer makes is never exact
    autoencoder_batch: int = 8
    autoencoder_rate: float = 3e-3
    kl_weight: float = 2e-4
    steps: int = 100_000
    seconds: float = 600.0
    tokens_per_batch: int = 32_768
    least_clips: int = 10  # of the larger sizes, which then have more tokens in a batch
    rate: float = 4e-3
    warmup: int = 200
    muon: int = 1  # orthogonalised updates for the matrices; 0: AdamW for everything
    average: float = 0.05  # width of the moving average of the weights, as a share of the steps so far
    prompt_dropout: float = 0.1
    fresh: float = 0.06  # share of a batch that is newly rendered and encoded; the rest is drawn again with new noise
    pool: int = 16_384  # encoded clips of the smallest size; larger ones in proportion to their tokens
    graphs: bool = False  # replay each step as a CUDA graph: its many small kernels are bound by launches
    compile: bool = False  # compile the transformer's blocks: half a minute, then about twice as fast
    small: bool = False  # a few tiny clips: for checking the script on a CPU
    save_every: float = 120.0
    evaluate: int = 50
    evaluation_seconds: float = 60.0  # no further measurement begins after these


def mixture(config: TrainConfig) -> Mixture:
    return SMALL_MIXTURE if config.small else MIXTURE


def train_scenes() -> Tensor:
    """Indices of the sentences that training may use, [sentences, 5]."""
    return torch.tensor([scene.indices for scene in every_scene() if scene.held_out is None])


def draw_scenes(table: Tensor, count: int, seed: int) -> Tensor:
    return table[torch.randint(len(table), (count,), generator=torch.Generator().manual_seed(seed))]
