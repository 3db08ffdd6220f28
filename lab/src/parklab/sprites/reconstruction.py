"""Training the autoencoder: all of it, then its decoder alone on slightly noisy latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .data import ClipSize
from .gradients import Descent, autocast, untried_kernels
from .model import SpriteModelConfig, build_autoencoder
from .recipe import TrainConfig
from .training_state import Stage, say

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

Clips = Callable[[int, ClipSize, int], Tensor]  # count, size, seed -> clips in [-1, 1] on the device of training


class Autoencoding:
    """The autoencoder with its two stages, and what was measured of it.

    sizes: what it trains on by turns, with the number of clips as a share of the batch; measured: where it is judged,
    on fresh clips.
    """

    def __init__(
        self,
        model: SpriteModelConfig,
        config: TrainConfig,
        device: torch.device,
        clips: Clips,
        sizes: tuple[tuple[ClipSize, float], ...],
        measured: tuple[ClipSize, ...],
        fresh: Clips | None = None,
    ) -> None:
        self.config, self.device, self.clips, self.fresh = config, device, clips, fresh or clips
        self.sizes, self.measured = sizes, measured
        self.vae = build_autoencoder(model).to(device)
        if device.type == "cuda":  # the layout the tensor cores want: no transposes around the convolutions
            for module in self.vae.modules():
                if isinstance(module, nn.Conv3d) and min(module.kernel_size) > 1:
                    module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
        with (
            torch.no_grad()
        ):  # start with a nearly noiseless posterior, or reconstruction learns nothing for a long time
            self.vae.quant_conv.bias[model.latent_channels :] -= 5.0
        self.whole = WholeClips(self.vae)
        self.parameters = {f"vae.{name}": p for name, p in self.vae.named_parameters()}
        self.decoder_parameters = {
            name: p for name, p in self.parameters.items() if name.startswith(("vae.decoder.", "vae.post_quant_conv."))
        }
        inside = {
            name
            for name, p in self.parameters.items()
            if config.muon and p.ndim >= 4 and "conv_out" not in name and len(p) > 1
        }
        self.trained = (self.parameters, self.decoder_parameters)
        self.descents = tuple(Descent(parameters, inside) for parameters in self.trained)
        report = 2 if config.small else 50
        self.stages = (
            Stage("autoencoder", config.autoencoder_steps, config.autoencoder_seconds, report),
            Stage("decoder", config.decoder_steps, config.decoder_seconds, report),
        )
        self.mean, self.std = (make(model.latent_channels, device=device) for make in (torch.zeros, torch.ones))
        self.psnr: float | None = None

    def loss(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Of the whole autoencoder; its L1 part for the record."""
        with autocast(self.device, cache=False):
            posterior = self.whole.encode(clips)
            decoded = self.whole.decode(posterior.sample())
        error = (decoded.float() - clips).abs().mean()
        kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
        return error + self.config.kl_weight * kl, error.detach()

    def decoding_loss(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Of the decoder alone, from slightly noisy latents."""
        with autocast(self.device, cache=False):
            with torch.no_grad():
                latents = self.whole.encode(clips).mode()
            spread = self.config.decoder_noise * self.std.view(1, -1, 1, 1, 1)
            decoded = self.whole.decode(latents + spread * torch.randn_like(latents))
        error = (decoded.float() - clips).abs().mean()
        return error, error.detach()

    def train(self, save_when_due: Callable[[], None]) -> None:
        """Both stages; one that is over, by steps or seconds, is passed by."""
        for index, compute in enumerate((self.loss, self.decoding_loss)):
            stage = self.stages[index]
            if began := stage.running:
                self._descend(index, compute, save_when_due)
            if stage.progress < 1:
                return  # paused
            # the statistics belong to the encoder, which the second stage leaves alone
            if began:
                self.measure(statistics=index == 0)
            elif self.psnr is None and stage.step:  # stopped between the last step and its measurement
                self.measure(statistics=True)

    def _descend(
        self, index: int, compute: Callable[[Tensor], tuple[Tensor, Tensor]], save_when_due: Callable[[], None]
    ) -> None:
        config, stage, descent, parameters = self.config, self.stages[index], self.descents[index], self.trained[index]
        self.vae.requires_grad_(False)
        for p in parameters.values():
            p.requires_grad_(True)
        stage.begin()
        while stage.running:
            seed = config.seed * 10**7 + index * 10**6 + stage.step
            size, share = self.sizes[stage.step % len(self.sizes)]
            clips = self.clips(round(share * config.autoencoder_batch), size, seed)
            torch.manual_seed(seed)  # posteriors are drawn from the global generator, which no state holds
            error = descent.gradients(compute, (clips,), size if config.graphs else None)
            descent.step(stage.rate(config.autoencoder_rate, 100))
            stage.record(error)
            save_when_due()
        stage.end()
        descent.clear()
        descent.forget_graphs()
        self.vae.requires_grad_(False)

    @torch.no_grad()
    def measure(self, statistics: bool) -> None:
        """The reconstruction's PSNR and, if asked, mean and deviation of each latent channel (Wan's config holds
        them).
        """
        latents, psnr = [], []
        for size in self.measured:
            clips = self.fresh(4 if self.config.small else 24, size, 99_991 + size.tokens)
            with autocast(self.device), untried_kernels():
                posterior = self.whole.encode(clips)
                decoded = self.whole.decode(posterior.mode()).float().clamp(-1, 1)
            # drawn, not modes: a channel the autoencoder leaves unused then keeps deviation 1 instead of being blown up
            latents.append(posterior.sample().float().transpose(0, 1).flatten(1).cpu())
            psnr += (-10 * ((decoded - clips) / 2).square().flatten(1).mean(1).log10()).tolist()
        every = torch.cat(latents, 1)
        if statistics:
            self.mean, self.std = every.mean(1).to(self.device), every.std(1).clamp(min=1e-4).to(self.device)
        self.psnr = sum(psnr) / len(psnr)
        say(f"autoencoder PSNR {self.psnr:.2f} dB, latent deviation {self.std.min():.2f} to {self.std.max():.2f}")

    @torch.no_grad()
    def latents(self, clips: Tensor) -> Tensor:
        """Normalised latents of clips, as the transformer sees them."""
        with autocast(self.device):
            modes = self.whole.encode(clips).mode().float()
        shape = (1, -1, 1, 1, 1)
        return ((modes - self.mean.view(shape)) / self.std.view(shape)).bfloat16()


# The stock autoencoder on whole clips. `AutoencoderKLWan` walks through a clip in chunks of four frames and keeps the
# last frames of every convolution. Its layers are causal, so one pass over all frames computes the same numbers, with
# fewer and larger kernels. Only the changes of the frame rate know about chunks; they are stated here for whole clips,
# and the norm again as the one fused kernel PyTorch has for it.


def _resample(module: Any, x: Tensor, feat_cache: None = None, feat_idx: Any = None) -> Tensor:
    """Of x [b, c, frames, h, w]; the first frame keeps its rate."""
    if module.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], x[:, :, 1:]
        batch, channels, frames, height, width = rest.shape
        doubled = module.time_conv(rest).view(batch, 2, channels, frames, height, width).permute(0, 2, 3, 1, 4, 5)
        x = torch.cat([first, doubled.reshape(batch, channels, 2 * frames, height, width)], 2)
    batch, _, frames = x.shape[:3]
    x = module.resample(x.transpose(1, 2).flatten(0, 1))
    x = x.unflatten(0, (batch, frames)).transpose(1, 2)
    if module.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], module.time_conv(x)], 2)
    return x


def _norm(module: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x.movedim(1, -1), (x.shape[1],), module.gamma.flatten().to(x.dtype), 1e-12).movedim(-1, 1)


class WholeClips:
    """Encodes and decodes without chunks. The autoencoder it is given must not be used in chunks afterwards."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, WanRMS_norm

        self.vae = vae
        for module in vae.modules():
            if isinstance(module, WanResample | WanRMS_norm):
                module.forward = partial(_resample if isinstance(module, WanResample) else _norm, module)

    def encode(self, clips: Tensor) -> Any:
        """clips [b, 3, frames, h, w] -> the posterior of the latents."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        return DiagonalGaussianDistribution(
            self.vae.quant_conv(self.vae.encoder(patchify(clips, self.vae.config.patch_size)))
        )

    def decode(self, latents: Tensor) -> Tensor:
        """Clips, not clamped: a clamped pixel would have no gradient."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        return unpatchify(
            self.vae.decoder(self.vae.post_quant_conv(latents), first_chunk=True), self.vae.config.patch_size
        )
