"""The stock autoencoder on whole clips: one pass over all frames instead of a loop over chunks of four.

`AutoencoderKLWan` walks through a clip in chunks and keeps the last frames of every convolution. Its layers are causal,
so one pass over the whole clip computes the same numbers, with fewer and larger kernels: that is what training wants.
Only the changes of the frame rate know about chunks; they are stated here for whole clips. The norm is stated again
too, as the one fused kernel PyTorch has for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


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
