"""How close two videos are, frame by frame: uint8 [frames, height, width, 3] against a reference of the same shape.

Papers disagree on the protocol, so this one is spelled out. Frames are compared as given: raw, before any video codec,
in `park compare`, `park ablation` and `park reproduce`; `park metrics` also reads mp4 files, and names which. A video's
value is the mean over frames of the frame's value.

psnr   10 log10(255^2 / mse), mse over all pixels and channels of the frame; equal frames give CAP instead of infinity
ssim   Wang et al. 2004: Gaussian window 11 x 11, sigma 1.5, K1 = 0.01, K2 = 0.03, biased moments, windows that lie
       inside the frame only; the mean over windows, then over the three channels
lpips  the `lpips` package, AlexNet, frames scaled to [-1, 1]; only where package and weights are on this
       machine already
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CAP = 100.0  # dB
LPIPS_WEIGHTS = """python -c "import torchvision; torchvision.models.alexnet(weights='IMAGENET1K_V1')" """.strip()
WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03

Frames = NDArray[np.uint8]


def psnr_per_frame(frames: Frames, reference: Frames) -> list[float]:
    expect_pair(frames, reference)
    values = []
    for frame, wanted in zip(frames, reference, strict=True):
        mse = np.mean((frame.astype(np.float64) - wanted.astype(np.float64)) ** 2)
        values.append(CAP if mse == 0 else min(CAP, float(10 * np.log10(255.0**2 / mse))))
    return values


def ssim_per_frame(frames: Frames, reference: Frames, device: str = "cpu") -> list[float]:
    """device: where it is computed, in float64 on each."""
    expect_pair(frames, reference)
    if min(frames.shape[1:3]) < WINDOW:
        raise ValueError(
            f"frames: expected at least {WINDOW} x {WINDOW} pixels for SSIM, got {frames.shape[1]} x "
            f"{frames.shape[2]}; use larger frames."
        )
    pairs = zip(frames, reference, strict=True)
    return [1.0 if np.array_equal(*pair) else _ssim(*(_planes(frame, device) for frame in pair)) for pair in pairs]


def lpips_per_frame(frames: Frames, reference: Frames, device: str = "cpu") -> list[float] | None:
    """None where it cannot be measured; `lpips_reason` says why. Never downloads."""
    expect_pair(frames, reference)
    if lpips_reason() is not None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package names torchvision's weights in an old way
        network: Any = importlib.import_module("lpips").LPIPS(net="alex", verbose=False).to(device).eval()
    with torch.no_grad():
        pairs = zip(frames, reference, strict=True)
        return [float(network(*(as_network_input(x, device) for x in pair))) for pair in pairs]


def lpips_reason() -> str | None:
    """Why LPIPS cannot be measured here, None where it can."""
    missing = [name for name in ("lpips", "torchvision") if importlib.util.find_spec(name) is None]
    if missing:
        return f"no package {missing[0]}; install it with: pip install 'parklab[metrics]'"
    weights = Path(torch.hub.get_dir()) / "checkpoints"
    if not list(weights.glob("alexnet-owt-*.pth")):
        return f"no AlexNet weights in {weights}; get them with: {LPIPS_WEIGHTS}"
    return None


def as_network_input(frame: NDArray[np.uint8], device: str) -> Tensor:
    """[1, 3, h, w] in [-1, 1], as the networks of LPIPS take it."""
    return torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].to(device) / 127.5 - 1


def _ssim(x: Tensor, y: Tensor) -> float:
    """x, y: [3, h, w] float64 in 0..255."""
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    bell = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    window: list[float] = (bell / bell.sum()).tolist()

    def mean(z: Tensor) -> Tensor:
        # the Gaussian is separable; weighted shifts are several times faster than conv2d in double precision
        for axis in (-2, -1):
            length = z.shape[axis] - WINDOW + 1
            z = sum(
                (w * z.narrow(axis, i, length) for i, w in enumerate(window[1:], 1)),
                window[0] * z.narrow(axis, 0, length),
            )
        return z

    c1, c2 = (K1 * 255) ** 2, (K2 * 255) ** 2
    mean_x, mean_y = mean(x), mean(y)
    variance_x, variance_y, covariance = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2, mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float((luminance * (2 * covariance + c2) / (variance_x + variance_y + c2)).mean())


def _planes(frame: NDArray[np.uint8], device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(frame)).to(device).permute(2, 0, 1).double()


def expect_pair(frames: Frames, reference: Frames) -> None:
    for name, value in (("frames", frames), ("reference", reference)):
        if value.dtype != np.uint8 or value.ndim != 4 or value.shape[-1] != 3:
            raise ValueError(
                f"{name}: expected uint8 [frames, height, width, 3], got {value.dtype} {list(value.shape)}; "
                "round to 8 bits first."
            )
    if frames.shape != reference.shape:
        raise ValueError(
            f"frames: expected the reference's shape {list(reference.shape)}, got {list(frames.shape)}; "
            "compare videos of one size and length."
        )
