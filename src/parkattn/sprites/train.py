"""python -m parkattn.sprites.train --out runs/sprites --graphs --compile   Trains the model in the box on one GPU.

Three stages: the autoencoder; its decoder alone, on longer clips and slightly noisy latents; text encoder and transformer.

Run the same command again to resume: the state (weights, moving average, optimizer, history) is one safetensors file that is
replaced atomically. Clips are rendered and encoded while training; each step's random draws depend on the seed and the step
alone. A stage ends at its step count or its seconds, whichever comes first, and the learning rate follows whichever is nearer.
Writes OUT/checkpoint (the diffusers folder with its records), OUT/loss.svg, OUT/samples.png.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .card import loss_plot, sample_sheet, write_card
from .data import ClipSize, render
from .following import check_the_rule, generate, look, score
from .gradients import GraphedGradients, adam, autocast, descend
from .grammar import GROUNDS, MOTIONS, SHAPES, TEXTURES, every_scene, held_out_scenes
from .model import SpriteModelConfig, build_autoencoder, build_pipeline, build_text_encoder, build_tokenizer, build_transformer
from .training_state import Stage, load_state, optimizer_tensors, prefixed, restore_optimizer, save_state, say, unprefixed

RADIX = torch.tensor([len(slot) for slot in (SHAPES, MOTIONS, GROUNDS, TEXTURES)] + [1]).flip(0).cumprod(0).flip(0)
# every size the transformer sees, with its share of the batches at the start and at the end of training
MIXTURE = (
    (ClipSize(17, 192, 256), 0.50, 0.10),
    (ClipSize(17, 256, 384), 0.30, 0.25),
    (ClipSize(33, 256, 256), 0.15, 0.15),
    (ClipSize(33, 320, 480), 0.05, 0.30),
    (ClipSize(49, 384, 512), 0.00, 0.10),
    (ClipSize(17, 480, 832), 0.00, 0.10),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    seed: int = 0
    autoencoder_steps: int = 8000
    autoencoder_seconds: float = 300.0
    decoder_steps: int = 2500
    decoder_seconds: float = 100.0
    decoder_noise: float = 0.08  # in deviations of the latents: what the transformer makes is never exact
    autoencoder_batch: int = 8
    autoencoder_rate: float = 1.5e-3
    kl_weight: float = 2e-4
    steps: int = 20_000
    seconds: float = 1200.0
    tokens_per_batch: int = 65_536
    rate: float = 1e-3
    warmup: int = 150
    average: float = 0.999
    prompt_dropout: float = 0.1
    fresh: float = 0.15  # share of a batch that is newly rendered and encoded; the rest is drawn again with new noise
    pool: int = 6144  # encoded clips kept per size
    graphs: bool = False  # replay the autoencoder's step as a CUDA graph: its many small kernels are bound by launches
    compile: bool = False  # compile the transformer's blocks: half a minute, then about twice as fast
    small: bool = False  # a few tiny clips: for checking the script on a CPU
    save_every: float = 90.0
    evaluate: int = 50


def mixture(config: TrainConfig) -> tuple[tuple[ClipSize, float, float], ...]:
    return ((ClipSize(5, 48, 64), 0.6, 0.4), (ClipSize(9, 48, 48), 0.4, 0.6)) if config.small else MIXTURE


def train_scenes() -> Tensor:
    return torch.tensor([scene.indices for scene in every_scene() if scene.held_out is None])


def draw_scenes(table: Tensor, count: int, seed: int) -> Tensor:
    return table[torch.randint(len(table), (count,), generator=torch.Generator().manual_seed(seed))]


@dataclass
class Pool:
    """Encoded clips of one size, the oldest replaced first."""

    latents: Tensor
    scenes: Tensor
    made: int = 0
    owed: float = 0.0


class Trainer:
    def __init__(self, out: Path, model: SpriteModelConfig, config: TrainConfig, device: torch.device) -> None:
        self.out, self.model, self.config, self.device = out, model, config, device
        self.scenes, self.tokenizer = train_scenes(), build_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.vae, self.transformer, self.text = (
                build(model).to(device) for build in (build_autoencoder, build_transformer, build_text_encoder)
            )
        if device.type == "cuda":  # the layout the tensor cores want: no transposes around the convolutions
            for module in self.vae.modules():
                if isinstance(module, nn.Conv3d) and min(module.kernel_size) > 1:
                    module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
        with torch.no_grad():  # start with a nearly noiseless posterior, or reconstruction learns nothing for a long time
            self.vae.quant_conv.bias[model.latent_channels :] -= 5.0
        named = lambda **modules: {f"{m}.{n}": p for m, module in modules.items() for n, p in module.named_parameters()}  # noqa: E731
        self.vae_parameters, self.parameters = named(vae=self.vae), named(transformer=self.transformer, text=self.text)
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        report = 2 if config.small else 20
        self.stages = (
            Stage("autoencoder", config.autoencoder_steps, config.autoencoder_seconds, report),
            Stage("decoder", config.decoder_steps, config.decoder_seconds, report),
            Stage("transformer", config.steps, config.seconds, report),
        )
        self.decoder_parameters = {n: p for n, p in self.vae_parameters.items() if n.startswith(("vae.decoder.", "vae.post_quant_conv."))}
        self.trained = (self.vae_parameters, self.decoder_parameters, self.parameters)
        self.optimizers = tuple(adam(parameters) for parameters in self.trained)
        self.mean, self.std = (make(model.latent_channels, device=device) for make in (torch.zeros, torch.ones))
        self.vae_psnr: float | None = None
        sentences = self.tokenizer([s.sentence for s in every_scene()] + [""], padding="max_length", max_length=12, return_tensors="pt")
        self.token_table, self.mask_table = sentences.input_ids.to(device), sentences.attention_mask.to(device)
        self.pools: dict[ClipSize, Pool] = {}
        self.saved_at = time.monotonic()

    # --- state -----------------------------------------------------------------------------------------------------------
    def save(self) -> None:
        moving = {f"average.{k}": v for k, v in self.average.items()}
        optimizers = {}
        running = max((i for i, stage in enumerate(self.stages) if stage.step), default=None)
        if running is not None:  # the moments of finished stages are not needed again
            optimizers = prefixed(f"optimizer{running}", optimizer_tensors(self.optimizers[running], self.trained[running]))
        tensors = {**self.vae_parameters, **self.parameters, **moving, **optimizers, "latents.mean": self.mean, "latents.std": self.std}
        record = {
            "model": self.model.to_dict(), "seed": self.config.seed, "vae_psnr": self.vae_psnr,
            "stages": [stage.to_dict() for stage in self.stages],
        }  # fmt: skip
        save_state(self.out / "state.safetensors", tensors, record)
        self.saved_at = time.monotonic()

    def resume(self) -> None:
        path = self.out / "state.safetensors"
        if not path.exists():
            return
        tensors, record = load_state(path)
        for what, expected, got in (("model", self.model.to_dict(), record["model"]), ("seed", self.config.seed, record["seed"])):
            if expected != got:
                raise ValueError(
                    f"{what}: {path} was trained with {got}, this run asks for {expected}; choose another --out or the same settings"
                )
        with torch.no_grad():
            for name, p in {**self.vae_parameters, **self.parameters}.items():
                p.copy_(tensors[name])
            for name, p in self.average.items():
                p.copy_(tensors[f"average.{name}"])
        self.mean, self.std = (tensors[f"latents.{name}"].to(self.device) for name in ("mean", "std"))
        self.vae_psnr = record["vae_psnr"]
        for index, (optimizer, parameters) in enumerate(zip(self.optimizers, self.trained, strict=True)):
            self.stages[index].restore(record["stages"][index])
            if saved := unprefixed(f"optimizer{index}", tensors):
                restore_optimizer(optimizer, parameters, saved)
        say("resumed at " + ", ".join(f"{stage.name} step {stage.step}" for stage in self.stages))

    def save_when_due(self) -> None:
        if time.monotonic() - self.saved_at > self.config.save_every:
            self.save()

    # --- autoencoder -----------------------------------------------------------------------------------------------------
    def reconstruction_loss(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Of the whole autoencoder: the loss, and its L1 part for the record."""
        with autocast(self.device, cache=False):
            posterior = self.vae.encode(clips).latent_dist
            decoded = self.vae.decode(posterior.sample()).sample
        error = (decoded.float() - clips).abs().mean()
        kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
        return error + self.config.kl_weight * kl, error.detach()

    def decoding_loss(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Of the decoder alone, from slightly noisy latents."""
        with autocast(self.device, cache=False):
            with torch.no_grad():
                latents = self.vae.encode(clips).latent_dist.mode()
            spread = self.config.decoder_noise * self.std.view(1, -1, 1, 1, 1)
            decoded = self.vae.decode(latents + spread * torch.randn_like(latents)).sample
        error = (decoded.float() - clips).abs().mean()
        return error, error.detach()

    def train_autoencoder(self) -> None:
        # few frames make fast steps; the longest clips keep the causal convolutions from drifting where clips go on
        sizes = ((ClipSize(9, 192, 192), 2.0), (ClipSize(17, 160, 192), 1.0), (ClipSize(33, 128, 160), 1.0))
        self.reconstruct(0, self.reconstruction_loss, sizes)
        if self.stages[1].step == 0:
            self.measure_latents()
        self.reconstruct(1, self.decoding_loss, sizes[1:])
        self.measure_latents(keep=True)
        self.save()

    def reconstruct(
        self, index: int, compute: Callable[[Tensor], tuple[Tensor, Tensor]], sizes: tuple[tuple[ClipSize, float], ...]
    ) -> None:
        config, stage, optimizer = self.config, self.stages[index], self.optimizers[index]
        sizes = ((ClipSize(5, 48, 64), 1.0),) if config.small else sizes
        graphs, parameters = {}, list(self.trained[index].values())
        for p in self.vae.parameters():
            p.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)
        stage.begin()
        while stage.progress < 1:
            seed = config.seed * 10**7 + index * 10**6 + stage.step
            size, share = sizes[stage.step % len(sizes)]
            clips = render(draw_scenes(self.scenes, round(share * config.autoencoder_batch), seed), size, seed, self.device)
            if config.graphs:
                if size not in graphs:
                    graphs[size] = GraphedGradients(compute, clips, parameters)
                error = graphs[size](clips)
            else:
                optimizer.zero_grad(set_to_none=True)
                loss, error = compute(clips)
                loss.backward()
            descend(optimizer, stage.rate(config.autoencoder_rate, 100))
            stage.record(error)
            self.save_when_due()
        stage.end()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def measure_latents(self, keep: bool = False) -> None:
        """The reconstruction's PSNR and, unless `keep`, mean and deviation of each latent channel (Wan's config holds them)."""
        latents, psnr = [], []
        for size, _, _ in mixture(self.config)[:4]:
            clips = render(draw_scenes(self.scenes, 4 if self.config.small else 24, 99_991 + size.tokens), size, size.tokens, self.device)
            with autocast(self.device):
                posterior = self.vae.encode(clips).latent_dist
                decoded = self.vae.decode(posterior.mode()).sample.float()
            # drawn, not modes: a channel the autoencoder leaves unused then keeps deviation 1 instead of being blown up
            latents.append(posterior.sample().float().transpose(0, 1).flatten(1).cpu())
            errors = ((decoded - clips) / 2).square().flatten(1).mean(1)
            psnr += (-10 * errors.log10()).tolist()
        every = torch.cat(latents, 1)
        if not keep:
            self.mean, self.std = every.mean(1).to(self.device), every.std(1).clamp(min=1e-4).to(self.device)
        self.vae_psnr = sum(psnr) / len(psnr)
        say(f"autoencoder PSNR {self.vae_psnr:.2f} dB, latent deviation {self.std.min():.2f} to {self.std.max():.2f}")

    # --- transformer -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def encode(self, scenes: Tensor, size: ClipSize, seed: int) -> Tensor:
        clips = render(scenes, size, seed, self.device)
        with autocast(self.device):
            latents = self.vae.encode(clips).latent_dist.mode().float()
        shape = (1, -1, 1, 1, 1)
        return ((latents - self.mean.view(shape)) / self.std.view(shape)).bfloat16()

    def batch(self, size: ClipSize, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Latents and scene indices; renews part of the pool of this size."""
        if size not in self.pools:
            shape = (self.config.pool, self.model.latent_channels, *size.grid)
            self.pools[size] = Pool(
                torch.empty(shape, dtype=torch.bfloat16, device=self.device), torch.zeros(self.config.pool, 5, dtype=torch.long)
            )
        pool = self.pools[size]
        pool.owed += self.config.fresh * count
        # encoding is bound by launches, so new clips come 24 at a time
        wanted = max(count, 48) if pool.made < count else 24 if pool.owed >= 24 else 0
        pool.owed = pool.owed if not wanted else 0.0
        for part in range(0, wanted, 24):
            some = draw_scenes(self.scenes, min(24, wanted - part), seed + 7 * part)
            slots = (torch.arange(len(some)) + pool.made) % self.config.pool
            pool.latents[slots.to(self.device)] = self.encode(some, size, seed + 11 * part)
            pool.scenes[slots] = some
            pool.made += len(some)
        filled = min(pool.made, self.config.pool)
        chosen = torch.randperm(filled, generator=torch.Generator().manual_seed(seed))[:count]
        return pool.latents[chosen.to(self.device)].float(), pool.scenes[chosen]

    def text_states(self, scenes: Tensor, keep: Tensor, length: int) -> Tensor:
        """Prompt embeddings as WanPipeline makes them: encoded, then zero beyond the prompt, up to `length`."""
        row = torch.where(keep, (scenes * RADIX).sum(1), len(self.token_table) - 1).to(self.device)
        mask = self.mask_table[row]
        states = self.text(self.token_table[row], mask).last_hidden_state * mask[..., None]
        return nn.functional.pad(states, (0, 0, 0, length - states.shape[1]))

    def flow_loss(self, size: ClipSize, seed: int, drawn: random.Random) -> Tensor:
        config = self.config
        count = max(2, config.tokens_per_batch // size.tokens)
        clean, scenes = self.batch(size, count, seed)
        count = len(clean)
        cpu, on_device = torch.Generator().manual_seed(seed + 1), torch.Generator(self.device).manual_seed(seed + 2)
        level = (torch.rand(1, generator=cpu) + torch.arange(count) / count) % 1  # one draw per stratum of [0, 1)
        sigma = self.model.flow_shift * level / (1 + (self.model.flow_shift - 1) * level)
        keep = torch.rand(count, generator=cpu) >= config.prompt_dropout
        sigma = sigma.to(self.device)
        noise = torch.randn(clean.shape, device=self.device, generator=on_device)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1, 1))
        with autocast(self.device):
            # lengths: a caller's max_sequence_length must not matter, and 512 is WanPipeline's default
            states = self.text_states(scenes, keep, drawn.choice((32, 32, 64, 512)))
            predicted = self.transformer(hidden_states=noisy, timestep=sigma * 1000, encoder_hidden_states=states, return_dict=False)[0]
        return (predicted.float() - (noise - clean)).square().mean()

    def train_transformer(self) -> None:
        config, stage, optimizer = self.config, self.stages[2], self.optimizers[2]
        self.vae.requires_grad_(False)
        if config.compile:
            self.transformer.compile_repeated_blocks(dynamic=True)
        stage.begin()
        while stage.progress < 1:
            drawn = random.Random(config.seed * 10**7 + stage.step)
            sizes = mixture(config)
            weights = [early + (late - early) * stage.progress for _, early, late in sizes]
            size = drawn.choices([size for size, _, _ in sizes], weights)[0]
            loss = self.flow_loss(size, config.seed * 10**7 + 10**6 + 101 * stage.step, drawn)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            descend(optimizer, stage.rate(config.rate, config.warmup))
            keep = min(config.average, (1 + stage.step) / (10 + stage.step))
            torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.parameters.values()], 1 - keep)
            stage.record(loss)
            self.save_when_due()
        stage.end()
        self.save()

    # --- results ---------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def export(self) -> Path:
        """The diffusers folder with the averaged weights, put in place by one rename."""
        vae = build_autoencoder(self.model, self.mean.tolist(), self.std.tolist())
        vae.load_state_dict(self.vae.state_dict())
        transformer, text = build_transformer(self.model), build_text_encoder(self.model)
        for module, name in ((transformer, "transformer"), (text, "text")):
            module.load_state_dict({k[len(name) + 1 :]: v for k, v in self.average.items() if k.startswith(name + ".")}, strict=False)
        pipeline = build_pipeline(
            self.model, vae=vae.half(), transformer=transformer.half(), text_encoder=text.float(), tokenizer=self.tokenizer
        )
        final, partial = self.out / "checkpoint", self.out / "checkpoint.partial"
        shutil.rmtree(partial, ignore_errors=True)
        pipeline.save_pretrained(partial, safe_serialization=True)
        record = {
            "model": self.model.to_dict(), "training": asdict(self.config), "vae_psnr_db": self.vae_psnr,
            "sizes": [[s.frames, s.height, s.width, early, late] for s, early, late in mixture(self.config)],
            "parameters": {"transformer": sum(p.numel() for p in transformer.parameters()), "vae": sum(p.numel() for p in vae.parameters()),
                           "text_encoder": sum(p.numel() for p in text.parameters())},
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu", "torch": torch.__version__,
            "stages": {stage.name: stage.to_dict() for stage in self.stages},
        }  # fmt: skip
        (partial / "training.json").write_text(json.dumps(record))
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        return final

    def evaluate(self, folder: Path) -> None:
        from diffusers import WanPipeline

        pipeline = WanPipeline.from_pretrained(folder).to(self.device)
        pipeline.set_progress_bar_config(disable=True)
        small = self.config.small
        sizes = (ClipSize(5, 48, 64),) if small else (ClipSize(33, 320, 480), ClipSize(17, 256, 384))
        scenes, results = held_out_scenes(self.config.evaluate), []
        for size in sizes:
            with autocast(self.device):
                clips = list(generate(pipeline, scenes, size, steps=2 if small else 16, batch=2 if small else 10))
            result = score(scenes, [look(clip) for clip in clips])
            result |= {"size": [size.frames, size.height, size.width], "tokens": size.tokens, "steps": 2 if small else 16, "guidance": 1.0}
            results.append(result)
            say(json.dumps({k: v for k, v in result.items() if k != "rows"}))
            (folder / "following.json").write_text(json.dumps({"results": results}, indent=1))
            if size is sizes[0]:
                sample_sheet(self.out / "samples.png", clips[::5][:10], [s.sentence for s in scenes[::5][:10]])
        rule = check_the_rule(scenes[:: 1 if small else 3], sizes[-1])
        (folder / "following.json").write_text(json.dumps({"results": results, "rule": rule}, indent=1))


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--out", type=Path, required=True)
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in asdict(TrainConfig()).items():
        kind = {"action": "store_true"} if isinstance(value, bool) else {"type": type(value), "default": value}
        reader.add_argument("--" + name.replace("_", "-"), **kind)
    asked = vars(reader.parse_args())
    out, device = asked.pop("out"), torch.device(asked.pop("device"))
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    config = TrainConfig(**asked)
    small = SpriteModelConfig(heads=1, head_dim=32, layers=1, ffn_dim=64, encoder_dim=8, decoder_dim=8, latent_channels=8)
    trainer = Trainer(out, small if config.small else SpriteModelConfig(), config, device)
    trainer.resume()
    trainer.train_autoencoder()
    trainer.train_transformer()
    folder = trainer.export()
    loss_plot(out / "loss.svg", {stage.name: stage.history for stage in trainer.stages})
    trainer.evaluate(folder)
    write_card(folder)


if __name__ == "__main__":
    main()
