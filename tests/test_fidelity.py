"""PSNR and SSIM against values worked out by hand, and their edges."""

import math

import numpy as np
import pytest

from parklab.metrics import fidelity


def noise(seed: int = 0, frames: int = 2, height: int = 24, width: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def test_psnr_is_that_of_a_known_error_frame_by_frame():
    reference = np.full((2, 16, 16, 3), 100, np.uint8)
    frames = reference.copy()
    frames[0] += 5
    frames[1, :8] += 10  # half of the pixels: mse 50
    assert fidelity.psnr_per_frame(frames, reference) == pytest.approx(
        [10 * math.log10(255**2 / 25), 10 * math.log10(255**2 / 50)]
    )


def test_equal_frames_reach_the_cap_and_nothing_exceeds_it():
    frames = noise()
    assert fidelity.psnr_per_frame(frames, frames) == [fidelity.CAP] * 2
    assert fidelity.ssim_per_frame(frames, frames) == pytest.approx([1.0, 1.0])
    almost = frames.copy()
    almost[0, 0, 0, 0] ^= 1
    assert fidelity.psnr_per_frame(almost, frames)[0] < fidelity.CAP


def test_ssim_of_constant_frames_is_the_luminance_term():
    a, b = np.full((1, 16, 16, 3), 60, np.uint8), np.full((1, 16, 16, 3), 90, np.uint8)
    c1 = (0.01 * 255) ** 2
    assert fidelity.ssim_per_frame(a, b)[0] == pytest.approx((2 * 60 * 90 + c1) / (60**2 + 90**2 + c1))


def test_ssim_equals_the_definition_written_out_for_one_window():
    x, y = (noise(seed, frames=1, height=11, width=11) for seed in (1, 2))
    axis = np.exp(-((np.arange(11) - 5.0) ** 2) / (2 * 1.5**2))
    window = np.outer(axis, axis) / np.outer(axis, axis).sum()
    expected = []
    for channel in range(3):
        p, q = x[0, ..., channel].astype(float), y[0, ..., channel].astype(float)
        mean_p, mean_q = (window * p).sum(), (window * q).sum()
        var_p, var_q = (window * (p - mean_p) ** 2).sum(), (window * (q - mean_q) ** 2).sum()
        both = (window * (p - mean_p) * (q - mean_q)).sum()
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        expected.append(
            (2 * mean_p * mean_q + c1) * (2 * both + c2) / ((mean_p**2 + mean_q**2 + c1) * (var_p + var_q + c2))
        )
    assert fidelity.ssim_per_frame(x, y)[0] == pytest.approx(np.mean(expected), rel=1e-9)


def test_lpips_is_absent_with_a_reason_rather_than_downloaded(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert fidelity.lpips_reason() is not None
    assert fidelity.lpips_per_frame(noise(), noise(1)) is None


@pytest.mark.parametrize(
    ("frames", "reference", "said"),
    [
        (noise().astype(np.float32), noise(), "uint8"),
        (noise()[0], noise(), "uint8 [frames, height, width, 3]"),
        (noise(height=20), noise(), "reference's shape"),
        (noise(height=8), noise(height=8), "at least 11 x 11"),
    ],
)
def test_what_cannot_be_compared_is_refused(frames, reference, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        fidelity.ssim_per_frame(frames, reference)


def test_ssim_on_a_named_device_is_that_of_the_default_one():
    frames, reference = noise(), noise(1)
    assert fidelity.ssim_per_frame(frames, reference, device="cpu") == fidelity.ssim_per_frame(frames, reference)
    with pytest.raises(RuntimeError, match="nowhere"):
        fidelity.ssim_per_frame(frames, reference, device="nowhere")  # it is no argument that is passed over
