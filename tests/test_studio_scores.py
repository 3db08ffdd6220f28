"""The rows of a comparison: where the worst frame is, what "equal" means, and the sentence that says so."""

import numpy as np
import pytest

from parklab.metrics.fidelity import CAP, psnr_per_frame
from parklab.studio.scores import over_cases, variant_label, verdict, why_not_comparable, worst_frame


def row(frames, wanted, **changes) -> dict:
    psnr = psnr_per_frame(frames, wanted)
    equal = sum(np.array_equal(*pair) for pair in zip(frames, wanted, strict=True))
    found = {
        "label": "PARK, fast",
        "speedup": 1.27,
        "equal_frames": equal,
        "worst_frame": worst_frame(psnr, frames, wanted),
    }
    return found | {"psnr": {"mean": float(np.mean(psnr)), "worst": min(psnr), "per_frame": psnr}} | changes


@pytest.fixture
def clip():
    return np.full((10, 30, 30, 3), 100, np.uint8)


@pytest.mark.parametrize(
    ("line", "column", "place"),
    [(2, 2, "upper left"), (15, 15, "centre"), (15, 28, "middle right"), (28, 12, "lower centre")],
)
def test_the_worst_frame_has_a_number_and_a_place(clip, line, column, place):
    frames = clip.copy()
    frames[7, line, column] += 50
    frames[3, 0, 0] += 2
    found = worst_frame(psnr_per_frame(frames, clip), frames, clip)
    assert (found["frame"], found["place"], found["share"]) == (7, place, 1.0)


def test_an_error_without_a_place_is_said_to_be_everywhere(clip):
    frames = clip + 1
    assert worst_frame(psnr_per_frame(frames, clip), frames, clip)["place"] is None
    assert "all over the picture" in verdict(row(frames, clip), 10, rough=False)


def test_the_verdict_names_speed_worst_frame_and_place(clip):
    frames = clip.copy()
    frames[7, 2, 2] += 50
    text = verdict(row(frames, clip), 10, rough=False)
    assert text.startswith("PARK, fast: 1.27× the speed of dense; worst frame 8 of 10 (0.7 s) ")
    assert "dB, strongest in the upper left; mean " in text
    assert text.endswith("with 9 equal frames (no 8-bit value differs) at 100 dB.")
    assert "about 1.27×" in verdict(row(frames, clip), 10, rough=True)
    assert "(slower)" in verdict(row(frames, clip, speedup=0.8), 10, rough=False)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, None),
        ({"threads": 2}, "made with 2 threads, dense with 1"),
        ({"cpu": "B", "threads": 2}, "made on another machine"),
    ],
)
def test_a_speed_that_cannot_be_compared_says_why(clip, other, why):
    here = {"cpu": "A", "threads": 1, "gpu": None}
    assert why_not_comparable(here | other, here) == why
    if why is not None:
        text = verdict(row(clip + 1, clip, speedup=None) | {"not_comparable": why}, 10, rough=False)
        assert f"speed not comparable ({why})" in text


def test_equal_means_that_no_value_differs_not_that_psnr_reached_its_cap():
    clip = np.full((2, 400, 400, 3), 100, np.uint8)
    nearly = clip.copy()
    nearly[0, 0, 0, 0] += 1
    found = row(nearly, clip)
    assert found["psnr"]["mean"] == CAP and found["equal_frames"] == 1  # one value in 480,000 is beyond the cap
    assert "all 2 frames equal" not in verdict(found, 10, rough=False)
    assert "all 2 frames equal (no 8-bit value differs)." in verdict(row(clip, clip), 10, rough=False)


def test_one_case_is_its_own_mean():
    rows = [{"method": "dense"}]
    assert over_cases([rows]) is rows


def test_a_label_names_the_profile():
    assert variant_label("park", None) == "PARK, paper" and variant_label("park", "fast") == "PARK, fast"
    assert variant_label("sta", None) == "sta"
