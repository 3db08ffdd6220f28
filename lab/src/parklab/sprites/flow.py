"""Training text encoder and transformer together by flow matching, on encoded clips of any corpus."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .data import ClipSize
from .gradients import Descent, autocast
from .model import SpriteModelConfig, build_text_encoder, build_transformer
from .recipe import Mixture, TrainConfig
from .training_state import Stage

TEXT_LENGTHS = (32,) * 7 + (512,)  # a caller's max_sequence_length must not matter, and 512 is WanPipeline's default


@dataclass
class Pool:
    """Encoded clips of one size, `made` of them so far; rows are their sentences' places in the corpus."""

    latents: Tensor
    rows: Tensor
    made: int = 0
    owed: float = 0.0


class Corpus(Protocol):
    """Clips to learn from, with their sentences."""

    words: tuple[str, ...]  # of all sentences
    sentences: list[str]
    longest: int  # tokens of the longest sentence, its end included
    mixture: Mixture

    def pool(self, size: ClipSize, count: int, step: int) -> Pool:
        """Encoded clips for a step that takes `count` of a size."""
        ...


class Flow:
    """Text encoder and transformer with their stage, their moving average and their data."""

    def __init__(
        self,
        model: SpriteModelConfig,
        config: TrainConfig,
        device: torch.device,
        tokenizer: Any,
        corpus: Corpus,
    ) -> None:
        self.model, self.config, self.device, self.corpus = model, config, device, corpus
        self.transformer = build_transformer(model).to(device)
        self.text = build_text_encoder(model, corpus.words).to(device)
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
            [*corpus.sentences, ""], padding="max_length", max_length=corpus.longest, return_tensors="pt"
        )
        self.token_table, self.mask_table = sentences.input_ids.to(device), sentences.attention_mask.to(device)

    def draw(self, size: ClipSize, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A batch: clean latents, noise, noise levels, rows of the sentences (the last row is the empty prompt)."""
        config = self.config
        seed = config.seed * 10**7 + 10**6 + 101 * step
        count = max(2 if config.small else config.least_clips, config.tokens_per_batch // size.tokens)
        pool = self.corpus.pool(size, count, step)
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
        if config.compile and stage.running:
            torch._dynamo.config.suppress_errors = True  # it warns and goes on uncompiled: slower, but a run
            self.transformer.compile_repeated_blocks(dynamic=True)
        stage.begin()
        while stage.running:
            drawn = random.Random(config.seed * 10**7 + stage.step)
            sizes = self.corpus.mixture
            weights = [early + (late - early) * stage.progress for _, early, late in sizes]
            size = drawn.choices([size for size, _, _ in sizes], weights)[0]
            # one length for the larger sizes: every pair of size and length is a graph of its own
            length = drawn.choice(TEXT_LENGTHS) if size in (sizes[0][0], sizes[len(sizes) // 2][0]) else TEXT_LENGTHS[0]
            self._step(size, length, self.draw(size, stage.step))
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
