"""Perceptual measures against a reference video whose packages bring their weights: nothing is downloaded.

ST-LPIPS       Ghildyal and Liu 2022, package stlpips_pytorch: a shift-tolerant AlexNet, one value per frame, 0 for
               equal frames. Its networks are other ones than LPIPS's, so its values are not LPIPS's.
VMAF           Netflix's libvmaf with its model vmaf_v0.6.1, in the ffmpeg of the package imageio-ffmpeg; frames are
               converted to yuv420p by that ffmpeg; one value per frame, 0 to 100
ColorVideoVDP  Mantiuk et al. 2024, package cvvdp: one value for the whole video in just-objectionable differences, 10
               for no visible one, on its display standard_4k
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from parkattn.checks import first_line
from parklab.metrics.fidelity import Frames, as_network_input, expect_pair

DISPLAY = "standard_4k"
VMAF_MODEL = "vmaf_v0.6.1"
INSTALL = "pip install 'parklab[metrics]'"
# a requirement of cvvdp is published as source only, so that it is no part of an extra
INSTALL_CVVDP = "pip install cvvdp"


def st_lpips_per_frame(frames: Frames, reference: Frames, device: str = "cpu") -> list[float]:
    expect_pair(frames, reference)
    module = _package("stlpips_pytorch.stlpips", "ST-LPIPS", INSTALL)
    network = module.LPIPS(net="alex", variant="shift_tolerant", verbose=False).to(device).eval()
    pairs = zip(frames, reference, strict=True)
    with torch.no_grad():
        return [float(network(*(as_network_input(x, device) for x in pair))) for pair in pairs]


def vmaf_per_frame(frames: Frames, reference: Frames) -> list[float]:
    expect_pair(frames, reference)
    ffmpeg = _package("imageio_ffmpeg", "VMAF", INSTALL).get_ffmpeg_exe()
    _, height, width, _ = frames.shape
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"]
    luma = "[0:v]format=yuv420p[video];[1:v]format=yuv420p[reference];[video][reference]"
    graph = f"{luma}libvmaf=model=version={VMAF_MODEL}:log_fmt=json:log_path=vmaf.json"
    with tempfile.TemporaryDirectory() as folder:
        frames.tofile(f"{folder}/video.rgb")
        reference.tofile(f"{folder}/reference.rgb")
        inputs = [*raw, "-i", "video.rgb", *raw, "-i", "reference.rgb"]
        command = [ffmpeg, "-nostdin", "-loglevel", "error", *inputs, "-lavfi", graph, "-f", "null", "-"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        log = Path(folder) / "vmaf.json"
        if done.returncode or not log.is_file():
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ValueError(f"vmaf: expected frames that libvmaf takes, got {said}; use larger frames.")
        return [frame["metrics"]["vmaf"] for frame in json.loads(log.read_text())["frames"]]


def color_video_vdp(frames: Frames, reference: Frames, fps: float | Fraction, device: str = "cpu") -> float:
    expect_pair(frames, reference)
    module = _package("pycvvdp", "ColorVideoVDP", INSTALL_CVVDP)
    with contextlib.redirect_stdout(io.StringIO()):
        metric = module.cvvdp(display_name=DISPLAY, quiet=True, device=torch.device(device))
        value, _ = metric.predict(frames, reference, dim_order="FHWC", frames_per_second=float(fps))
    return float(value)


def st_lpips_reason() -> str | None:
    """Why it cannot be measured here, None where it can; likewise below."""
    return _reason("stlpips_pytorch.stlpips", INSTALL)


def vmaf_reason() -> str | None:
    return _reason("imageio_ffmpeg", INSTALL)


def color_video_vdp_reason() -> str | None:
    return _reason("pycvvdp", INSTALL_CVVDP)


def _package(name: str, purpose: str, install: str) -> Any:
    module, problem = _load(name)
    if problem is not None:
        line = f"{purpose}: expected its package, got {problem}; install it with: {install}"
        raise ModuleNotFoundError(line, name=name)
    return module


def _reason(name: str, install: str) -> str | None:
    _, problem = _load(name)
    return None if problem is None else f"{problem}; install it with: {install}"


def _load(name: str) -> tuple[Any, str | None]:
    """The module, or what is wrong; by importing it, so that a package that is there and does not load is found too."""
    try:
        return importlib.import_module(name), None
    except ModuleNotFoundError as missing:
        return None, f"no package {(missing.name or name).partition('.')[0]}"
    except (ImportError, RuntimeError, OSError) as error:  # such as a torchvision that was built for another torch
        return None, f"{name.partition('.')[0]} that does not load ({first_line(error)})"
