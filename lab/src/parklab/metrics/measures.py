"""Every measure of videos by name: what it is of, what it needs, and which way is better.

REFERENCE: a video against another one of the same size and length. SINGLE: one video alone.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from parkattn.checks import did_you_mean, expect_device, expect_positive
from parklab.metrics import fidelity, perceptual, vbench
from parklab.metrics.fidelity import Frames

REFERENCE, SINGLE = "against a reference", "of one video"
PLAIN = ("psnr", "ssim")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What measuring depends on besides the frames."""

    fps: float = 16.0  # at which a viewer sees them; ColorVideoVDP's only
    device: str = "cpu"  # of the networks
    weights: Path | None = None  # of VBench's backbones

    def __post_init__(self) -> None:
        expect_positive("fps", self.fps)
        expect_device("device", self.device)


@dataclass(frozen=True, kw_only=True)
class Measure:
    title: str
    kind: str
    higher_is_better: bool
    digits: int
    run: Callable[..., list[float] | float | None]  # (video, reference, setting) or (video, setting)
    reason: Callable[[Setting], str | None] = lambda setting: None  # why it cannot be measured here, None where it can
    package: str | None = None  # whose version belongs to its values

    @property
    def version(self) -> str | None:
        return None if self.package is None else f"{self.package} {version(self.package)}"

    def value(self, setting: Setting, *clips: Frames) -> dict[str, Any]:
        """mean; worst and per_frame too where there is a value per frame."""
        found = self.run(*clips, setting)
        if found is None:
            raise ValueError(f"{self.title}: expected what it needs, got {self.reason(setting)}")
        if isinstance(found, float):
            return {"mean": found}
        worst = min(found) if self.higher_is_better else max(found)
        return {"mean": statistics.fmean(found), "worst": worst, "per_frame": found}


def _folder(setting: Setting) -> Path:
    assert setting.weights
    return setting.weights


def _aesthetic(video: Frames, setting: Setting) -> float:
    clip = vbench.load_clip(_folder(setting), "clip_l", setting.device)
    return vbench.aesthetic_quality(video, clip, *vbench.load_head(_folder(setting)))


def _weights(*needed: str) -> Callable[[Setting], str | None]:
    return lambda setting: vbench.weights_reason(setting.weights, *needed)


_against = functools.partial(Measure, kind=REFERENCE)
_alone = functools.partial(Measure, kind=SINGLE, higher_is_better=True, digits=4, package="transformers")

MEASURES: dict[str, Measure] = {
    "psnr": _against(
        title="PSNR dB", higher_is_better=True, digits=2,
        run=lambda video, reference, setting: fidelity.psnr_per_frame(video, reference),
    ),
    "ssim": _against(
        title="SSIM", higher_is_better=True, digits=4,
        run=lambda video, reference, setting: fidelity.ssim_per_frame(video, reference, setting.device),
    ),
    "lpips": _against(
        title="LPIPS", higher_is_better=False, digits=4,
        run=lambda video, reference, setting: fidelity.lpips_per_frame(video, reference, setting.device),
        reason=lambda setting: fidelity.lpips_reason(), package="lpips",
    ),
    "st_lpips": _against(
        title="ST-LPIPS", higher_is_better=False, digits=4,
        run=lambda video, reference, setting: perceptual.st_lpips_per_frame(video, reference, setting.device),
        reason=lambda setting: perceptual.st_lpips_reason(), package="stlpips_pytorch",
    ),
    "vmaf": _against(
        title="VMAF", higher_is_better=True, digits=2,
        run=lambda video, reference, setting: perceptual.vmaf_per_frame(video, reference),
        reason=lambda setting: perceptual.vmaf_reason(), package="imageio-ffmpeg",
    ),
    "cvvdp": _against(
        title="ColorVideoVDP JOD", higher_is_better=True, digits=3,
        run=lambda video, reference, setting: perceptual.color_video_vdp(video, reference, setting.fps, setting.device),
        reason=lambda setting: perceptual.color_video_vdp_reason(), package="cvvdp",
    ),
    "subject_consistency": _alone(
        title="subject consistency", reason=_weights(vbench.FOLDERS["dino"]),
        run=lambda video, at: vbench.subject_consistency(video, vbench.load_dino(_folder(at), at.device)),
    ),
    "background_consistency": _alone(
        title="background consistency", reason=_weights(vbench.FOLDERS["clip_b"]),
        run=lambda video, at: vbench.background_consistency(video, vbench.load_clip(_folder(at), "clip_b", at.device)),
    ),
    "imaging_quality": _alone(
        title="imaging quality", reason=_weights(vbench.MUSIQ), package="pyiqa",
        run=lambda video, at: vbench.imaging_quality(video, vbench.load_musiq(_folder(at), at.device)),
    ),
    "aesthetic_quality": _alone(
        title="aesthetic quality", run=_aesthetic, reason=_weights(vbench.FOLDERS["clip_l"], vbench.HEAD)
    ),
}  # fmt: skip


def choose_measures(asked: str | None, setting: Setting, *, reference: bool) -> tuple[list[str], dict[str, str]]:
    """Names to measure, and why others of "all" are not. None: PSNR and SSIM, or what one video alone has.

    A measure that is asked for by name and cannot be taken is an error.
    """
    kinds = (REFERENCE, SINGLE) if reference else (SINGLE,)
    possible = [name for name, measure in MEASURES.items() if measure.kind in kinds]
    if asked is None and reference:
        return list(PLAIN), {}
    if asked in (None, "all"):
        reasons = {name: MEASURES[name].reason(setting) for name in possible}
        lacking = {name: reason for name, reason in reasons.items() if reason is not None}
        chosen = [name for name in possible if name not in lacking]
        if not chosen:
            why = next(iter(lacking.values()))
            raise ValueError(
                f"measures: expected one that can be taken here, got none ({why}); "
                "pass a reference video or name another measure."
            )
        return chosen, lacking
    assert asked is not None
    names = list(dict.fromkeys(filter(None, map(str.strip, asked.split(",")))))
    for name in names or [asked]:
        if name not in possible:
            advice = did_you_mean(name, possible, "separate names by commas.")
            if name in MEASURES:
                advice = "pass a reference video too."
            raise ValueError(f"measures: expected all or some of {', '.join(possible)}, got {name!r}; {advice}")
        reason = MEASURES[name].reason(setting)
        if reason is not None:
            raise ModuleNotFoundError(f"{name}: expected what it needs, got {reason}")
    return names, {}


def measure_video(
    names: Iterable[str], video: Frames, reference: Frames | None = None, setting: Setting | None = None
) -> dict[str, dict[str, Any]]:
    """The values by name, against the reference and of the video alone; what differs in size is refused at once."""
    setting = Setting() if setting is None else setting
    if reference is not None:
        fidelity.expect_pair(video, reference)
    found = {}
    with torch.no_grad():
        for name in names:
            measure = MEASURES[name]
            if measure.kind == SINGLE:
                found[name] = measure.value(setting, video)
            else:
                if reference is None:
                    raise ValueError(f"reference: expected a video for {name}, got none; pass one.")
                found[name] = measure.value(setting, video, reference)
    return found
