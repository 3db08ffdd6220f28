"""Training text encoder and transformer together by flow matching, on pools of encoded clips."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .data import ClipSize
from .gradients import Descent, autocast
from .grammar import GROUNDS, MOTIONS, SHAPES, TEXTURES, every_scene
from .model import SpriteModelConfig, build_text_encoder, build_transformer
from .recipe import TrainConfig, draw_scenes, mixture
from .training_state import Stage

RADIX = torch.tensor([len(slot) for slot in (SHAPES, MOTIONS, GROUNDS, TEXTURES)] + [1]).flip(0).cumprod(0).flip(0)
PIXELS_AT_ONCE = 24_000_000  # rendered and encoded in one go: enough to fill a GPU
TEXT_LENGTHS = (32,) * 7 + (512,)  # a caller's max_sequence_length must not matter, and 512 is WanPipeline's default

Encode = Callable[[Tensor, ClipSize, int], Tensor]  # scenes, size, seed -> normalised latents


@dataclass
class Pool:
    """Encoded clips of one size, the oldest replaced first; rows are their sentences' places in `every_scene`."""

    latents: Tensor
    rows: Tensor
    made: int = 0
    owed: float = 0.0


class Flow:
    """Text encoder and transformer with their stage, their moving average and their data."""

    def __init__(
        self,
        model: SpriteModelConfig,
        config: TrainConfig,
        device: torch.device,
        scenes: Tensor,
        tokenizer: Any,
        encode: Encode,
    ) -> None:
        self.model, self.config, self.device, self.scenes, self.encode = model, config, device, scenes, encode
        self.transformer, self.text = build_transformer(model).to(device), build_text_encoder(model).to(device)
        modules = {"transformer": self.transformer, "text": self.text}
        self.parameters = {f"{m}.{n}": p for m, module in modules.items() for n, p in module.named_parameters()}
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        # not the text encoder: UMT5 does not scale its scores, and Muon's steps saturate them: word order is lost
        inside = {
            name
            for name, p in self.parameters.items()
            if config.muon and name.startswith("transformer.blocks.") and p.ndim == 2
        }
        self.descent = Descent(self.parameters, inside)
        self.stage = Stage("transformer", config.steps, config.seconds, 2 if config.small else 50)
        sentences = tokenizer(
            [s.sentence for s in every_scene()] + [""], padding="max_length", max_length=12, return_tensors="pt"
        )
        self.token_table, self.mask_table = sentences.input_ids.to(device), sentences.attention_mask.to(device)
        self.pools: dict[ClipSize, Pool] = {}

    def _pool(self, size: ClipSize, count: int, seed: int) -> Pool:
        """The pool of a size, part of it renewed."""
        smallest = min(s.tokens for s, _, _ in mixture(self.config))
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

    def draw(self, size: ClipSize, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A batch: clean latents, noise, noise levels, rows of the sentences (the last row is the empty prompt)."""
        config = self.config
        count = max(2 if config.small else config.least_clips, config.tokens_per_batch // size.tokens)
        pool = self._pool(size, count, seed)
        cpu, on_device = torch.Generator().manual_seed(seed + 1), torch.Generator(self.device).manual_seed(seed + 2)
        chosen = torch.randperm(min(pool.made, len(pool.rows)), generator=cpu)[:count].to(self.device)
        level = (torch.rand(1, generator=cpu) + torch.arange(count) / count) % 1  # one draw per stratum of [0, 1)
        sigma = self.model.flow_shift * level / (1 + (self.model.flow_shift - 1) * level)
        keep = (torch.rand(count, generator=cpu) >= config.prompt_dropout).to(self.device)
        clean = pool.latents[chosen].float()
        noise = torch.randn(clean.shape, device=self.device, generator=on_device)
        rows = torch.where(keep, pool.rows[chosen], len(self.token_table) - 1)
        return clean, noise, sigma.to(self.device), rows

    def text_states(self, rows: Tensor, length: int) -> Tensor:
        """Prompt embeddings as WanPipeline makes them: encoded, then zero beyond the prompt, up to `length`."""
        mask = self.mask_table[rows]
        states = self.text(self.token_table[rows], mask).last_hidden_state * mask[..., None]
        return nn.functional.pad(states, (0, 0, 0, length - states.shape[1]))

    def loss(self, clean: Tensor, noise: Tensor, sigma: Tensor, rows: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
        """Squared error of the predicted velocity noise - clean; twice, the second for the record."""
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1, 1))
        with autocast(self.device, cache=not self.config.graphs):
            states = self.text_states(rows, length)
            predicted = self.transformer(
                hidden_states=noisy, timestep=sigma * 1000, encoder_hidden_states=states, return_dict=False
            )[0]
        error = (predicted.float() - (noise - clean)).square().mean()
        return error, error.detach()

    def train(self, save_when_due: Callable[[], None]) -> None:
        config, stage = self.config, self.stage
        if config.compile and stage.progress < 1:
            self.transformer.compile_repeated_blocks(dynamic=True)
        stage.begin()
        while stage.progress < 1:
            drawn = random.Random(config.seed * 10**7 + stage.step)
            sizes = mixture(config)
            weights = [early + (late - early) * stage.progress for _, early, late in sizes]
            size = drawn.choices([size for size, _, _ in sizes], weights)[0]
            # one length for the larger sizes: every pair of size and length is a graph of its own
            length = drawn.choice(TEXT_LENGTHS) if size in (sizes[0][0], sizes[len(sizes) // 2][0]) else TEXT_LENGTHS[0]
            self._step(size, length, self.draw(size, config.seed * 10**7 + 10**6 + 101 * stage.step))
            save_when_due()
        stage.end()

    def _step(self, size: ClipSize, length: int, batch: tuple[Tensor, ...]) -> None:
        error = self.descent.gradients(
            partial(self.loss, length=length), batch, (size, length) if self.config.graphs else None
        )
        self.descent.step(self.stage.rate(self.config.rate, self.config.warmup))
        # an average whose width grows with the steps: it forgets the start without a horizon to be chosen
        keep = (1 - 1 / (self.stage.step + 1)) ** (1 / self.config.average)
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.parameters.values()], 1 - keep)
        self.stage.record(error)
