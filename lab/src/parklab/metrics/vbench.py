"""Four dimensions of VBench (Huang et al. 2024), of one video: its arithmetic (package 0.1.5), backbones from a folder.

f_t: normalised features of frame t, c(a, b) = max(0, a . b)

subject_consistency      mean over t >= 1 of (c(f_{t-1}, f_t) + c(f_0, f_t)) / 2 with DINO ViT-B/16, frames with a
                         shorter side of 224
background_consistency   the same with the image features of CLIP ViT-B/32, centre of 224 x 224
aesthetic_quality        mean over frames of (w . f_t + b) / 10: LAION's linear head on CLIP ViT-L/14
imaging_quality          mean over frames of MUSIQ (trained on SPAQ) / 100, frames with a longer side of at most 512

Backbones are safetensors in the layout of transformers (docs/metrics.md says how each file is made), in float32; the
package's own run in the precision and with the position embeddings of their own code, so that last digits differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from parkattn.checks import first_line, shown
from parklab.extras import package
from parklab.metrics.fidelity import Frames

FOLDERS = {"dino": "dino-vitb16", "clip_b": "clip-vit-base-patch32", "clip_l": "clip-vit-large-patch14"}
HEAD, MUSIQ = "aesthetic_head.safetensors", "musiq_spaq.safetensors"
SIDE, LONGEST, AT_ONCE = 224, 512, 16
DINO_MEAN, DINO_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PYIQA = "pip install pyiqa"

Network = Callable[[Tensor], Tensor]


def subject_consistency(frames: Frames, dino: Network) -> float:
    """dino: [n 3 h w] -> [n d]."""
    images = _normalised(_resized(_planes(frames), SIDE, "bilinear"), DINO_MEAN, DINO_DEVIATION)
    return feature_consistency(_features(images, dino))


def background_consistency(frames: Frames, clip: Network) -> float:
    """clip: [n 3 224 224] -> [n d]."""
    return feature_consistency(_features(clip_images(frames), clip))


def aesthetic_quality(frames: Frames, clip: Network, weight: Tensor, bias: Tensor) -> float:
    """weight [1 d], bias [1]."""
    return float(functional.linear(_features(clip_images(frames), clip), weight, bias).mean() / 10)


def imaging_quality(frames: Frames, musiq: Network) -> float:
    """musiq: [1 3 h w] in [0, 1] -> a score in 0..100."""
    images = _planes(frames)
    height, width = images.shape[-2:]
    scale = min(1.0, LONGEST / max(height, width))
    if scale < 1:
        images = _as_bytes(functional.interpolate(images, (int(scale * height), int(scale * width)), mode="bilinear"))
    with torch.no_grad():
        return float(np.mean([float(musiq(image[None] / 255)) for image in images])) / 100


def feature_consistency(features: Tensor) -> float:
    """features [n d], each of length 1."""
    if len(features) < 2:
        raise ValueError(f"frames: expected at least 2 for a consistency, got {len(features)}; use a longer video.")
    before, first = (features[:-1] * features[1:]).sum(-1), (features[:1] * features[1:]).sum(-1)
    return float((before.clamp(min=0) + first.clamp(min=0)).mean() / 2)


def clip_images(frames: Frames) -> Tensor:
    """[n 3 224 224]: the shorter side to 224 by bicubic interpolation without antialiasing, then the centre."""
    images = _resized(_planes(frames), SIDE, "bicubic")
    top, left = (round((size - SIDE) / 2) for size in images.shape[-2:])
    return _normalised(images[..., top : top + SIDE, left : left + SIDE], CLIP_MEAN, CLIP_DEVIATION)


# backbones from a folder


def load_dino(folder: Path, device: str = "cpu") -> Network:
    model = _pretrained("ViTModel", folder / FOLDERS["dino"], device, add_pooling_layer=False)
    return lambda images: model(images.to(device), interpolate_pos_encoding=True).last_hidden_state[:, 0].cpu()


def load_clip(folder: Path, size: str, device: str = "cpu") -> Network:
    """size: clip_b or clip_l."""
    model = _pretrained("CLIPVisionModelWithProjection", folder / FOLDERS[size], device)
    return lambda images: model(images.to(device)).image_embeds.cpu()


def load_head(folder: Path) -> tuple[Tensor, Tensor]:
    found = _tensors(folder / HEAD)
    if set(found) != {"weight", "bias"}:
        got = ", ".join(sorted(found))
        raise ValueError(f"weights: expected weight and bias in {folder / HEAD}, got {got}; {_MAKE}")
    return found["weight"].float(), found["bias"].float()


def load_musiq(folder: Path, device: str = "cpu") -> Network:
    """The network is pyiqa's, whose licence allows no commercial use: it is installed by who wants it."""
    state = _tensors(folder / MUSIQ)
    try:
        module = package("pyiqa.archs.musiq_arch", "imaging_quality")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing.name}: expected for imaging_quality, got no such package; install it with: {PYIQA}",
            name=missing.name,
        ) from None
    model = module.MUSIQ(pretrained=False)
    model.load_state_dict(state)
    model = model.to(device).eval()
    return lambda image: model(image.to(device)).cpu()


def weights_reason(folder: Path | None, *needed: str) -> str | None:
    """Why a dimension cannot be measured with this folder, None where its files are there."""
    if folder is None:
        return "no folder of weights; pass --weights DIR (docs/metrics.md says what is in it)"
    try:
        present = {path.name for path in folder.iterdir()}
    except (OSError, ValueError):
        present = set()
    lacking = [name for name in needed if name not in present]
    return f"no {lacking[0]} in {shown(str(folder))}; {_MAKE}" if lacking else None


_MAKE = "make it as docs/metrics.md says."


def _pretrained(kind: str, folder: Path, device: str, **arguments: Any) -> Any:
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"weights: expected config.json and safetensors in {folder}, got none; {_MAKE}")
    transformers = package("transformers", "VBench's dimensions")
    try:
        model = getattr(transformers, kind).from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            torch_dtype=torch.float32,
            **arguments,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"weights: expected a {kind} in {folder}, got {first_line(error)}; {_MAKE}") from None
    return model.to(device).eval()


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights: expected safetensors in {path}, got {error}; {_MAKE}") from None


def _planes(frames: Frames) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()


def _resized(images: Tensor, side: int, mode: str) -> Tensor:
    """The shorter side becomes side; 8 bits again afterwards, as resizing 8-bit images leaves them."""
    height, width = images.shape[-2:]
    short, long = min(height, width), max(height, width)
    other = int(side * long / short)
    size = (side, other) if height <= width else (other, side)
    if size == (height, width):
        return images
    return _as_bytes(functional.interpolate(images, size, mode=mode, align_corners=False))


def _as_bytes(images: Tensor) -> Tensor:
    return images.clamp(0, 255).round()


def _normalised(images: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    return (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)


def _features(images: Tensor, network: Network) -> Tensor:
    with torch.no_grad():
        return functional.normalize(torch.cat([network(part).float() for part in images.split(AT_ONCE)]), dim=-1)
