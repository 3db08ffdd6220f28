"""What the model of solids is and how it is trained: sizes of clips, lengths of the stages, clips in the library."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parklab.sprites.data import ClipSize
from parklab.sprites.model import SpriteModelConfig
from parklab.sprites.recipe import SMALL_MIXTURE, Mixture, TrainConfig

# attention alone has 101 M weights; a feed-forward part as narrow as the model keeps all of it within 120 MB in 6 bits
MODEL = SpriteModelConfig(heads=8, layers=12, ffn_dim=1024, text_layers=4, decoder_dim=48)
TOY = SpriteModelConfig(heads=1, head_dim=32, layers=2, ffn_dim=64, encoder_dim=8, decoder_dim=8, latent_channels=8)
RENDERED = ClipSize(17, 128, 192)  # once, and then shrunk to the smaller sizes
SHRUNK = (ClipSize(17, 64, 96), ClipSize(17, 96, 144), RENDERED)
LONG = ClipSize(33, 160, 256)
# share of the steps at the start and at the end of training
MIXTURE: Mixture = ((SHRUNK[0], 0.80, 0.05), (SHRUNK[1], 0.15, 0.15), (RENDERED, 0.05, 0.60), (LONG, 0.00, 0.20))
TOY_RENDERED, TOY_LONG = (size for size, _, _ in SMALL_MIXTURE)
BANKS = ((ClipSize(33, 128, 192), 320), (ClipSize(33, 64, 96), 480))  # clips the autoencoder trains on
TOY_BANKS = ((ClipSize(9, 48, 64), 4),)
EVALUATION_SIZE = RENDERED
GUIDANCE, SAMPLING_STEPS = 3.0, 20  # of videos that are looked at or judged
RENDERING = 0.05, 0.20  # at most so much of the transformer's planned time, and of its time so far, renders clips
CONSTANT = 0.6  # of the transformer's time its rate stays at the peak


@dataclass(frozen=True, kw_only=True)
class SolidsTrainConfig(TrainConfig):
    autoencoder_seconds: float = 160.0
    decoder_seconds: float = 30.0
    decoder_noise: float = 0.10
    seconds: float = 1050.0
    heads: int = MODEL.heads
    tokens_per_batch: int = 24_576
    least_clips: int = 6
    rate: float = 3e-3
    save_every: float = 300.0
    show_every: float = 420.0  # packed weights, samples, loss and times are written so often, and at the end
    library: int = 12_288  # clips rendered in all; of the longest a sixteenth
    library_first: int = 1_024  # before the first step
    library_step: float = 1.5  # and then a step


def model_of(config: SolidsTrainConfig) -> SpriteModelConfig:
    return TOY if config.small else replace(MODEL, heads=config.heads)


def library_at(config: SolidsTrainConfig, step: int) -> int:
    """Clips of the library that step `step` draws from: a resumed run draws from the same."""
    return int(min(config.library, config.library_first + config.library_step * step))


def late_fall(progress: float) -> float:
    """Learning rate as a share of its peak: even, then falling in a line. A stop before the fall wastes none of it."""
    return min(1.0, max(0.01, (1 - progress) / (1 - CONSTANT)))
