"""The clips that the model of sprites learns from: rendered and encoded while it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .data import ClipSize
from .flow import Pool
from .grammar import GROUNDS, MOTIONS, SHAPES, TEXTURES, WORDS, every_scene
from .model import SpriteModelConfig
from .recipe import TrainConfig, draw_scenes, mixture

RADIX = torch.tensor([len(slot) for slot in (SHAPES, MOTIONS, GROUNDS, TEXTURES)] + [1]).flip(0).cumprod(0).flip(0)
PIXELS_AT_ONCE = 24_000_000  # rendered and encoded in one go: enough to fill a GPU

Encode = Callable[[Tensor, ClipSize, int], Tensor]  # scenes, size, seed -> normalised latents


class SpriteCorpus:
    """A pool for each size, the oldest clips replaced first."""

    words, longest = WORDS, 12

    def __init__(
        self, model: SpriteModelConfig, config: TrainConfig, device: torch.device, scenes: Tensor, encode: Encode
    ) -> None:
        self.model, self.config, self.device, self.scenes, self.encode = model, config, device, scenes, encode
        self.sentences = [scene.sentence for scene in every_scene()]
        self.mixture = mixture(config)
        self.pools: dict[ClipSize, Pool] = {}

    def pool(self, size: ClipSize, count: int, step: int) -> Pool:
        """The pool of a size, part of it renewed."""
        seed = self.config.seed * 10**7 + 10**6 + 101 * step
        smallest = min(s.tokens for s, _, _ in self.mixture)
        room = max(2 * count, self.config.pool * smallest // size.tokens)
        at_once = max(2, min(room, PIXELS_AT_ONCE // (size.frames * size.height * size.width)))
        if size not in self.pools:
            shape = (room, self.model.latent_channels, *size.grid)
            rows = torch.zeros(room, dtype=torch.long, device=self.device)
            # a quarter at the start, so that no clip is seen too often
            self.pools[size] = Pool(
                torch.empty(shape, dtype=torch.bfloat16, device=self.device), rows, owed=max(count, room // 4)
            )
        pool = self.pools[size]
        pool.owed += self.config.fresh * count
        while pool.owed >= at_once or pool.made < count:
            some = draw_scenes(self.scenes, at_once, seed + pool.made)
            slots = (torch.arange(at_once) + pool.made) % room
            pool.latents[slots.to(self.device)] = self.encode(some, size, seed + 11 * pool.made)
            pool.rows[slots.to(self.device)] = (some * RADIX).sum(1).to(self.device)
            pool.made += at_once
            pool.owed -= at_once
        return pool
