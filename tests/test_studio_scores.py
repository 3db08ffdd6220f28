"""The rows of a comparison: where the worst frame is, what "equal" means, and when their seconds cannot be trusted.
VBench's arithmetic on tiny random backbones, and what a folder of weights must hold.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from parklab.metrics import vbench
from parklab.metrics.fidelity import CAP, psnr_per_frame
from parklab.metrics.measures import Setting, choose_measures, measure_video
from parklab.studio.scores import (
    over_cases,
    steadiness,
    timing_warning,
    variant_label,
    verdict,
    why_not_comparable,
    worst_frame,
)


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


# Seconds that cannot be trusted: the reader is told beside the speed-up, and otherwise is not -----------


RECORDED = Path(__file__).parents[1] / "benchmarks" / "results" / "demo.jsonl"


def run(dense: list[float], around: list[float] = (), attention: list[float] | None = None) -> list[dict]:
    """Steps: dense ones with their seconds, then sparse ones with the seconds outside of attention and in it."""
    attention = [0.5] * len(around) if attention is None else attention
    rows = [{"phase": "dense", "seconds": s, "attention_seconds": s / 2} for s in dense]
    return rows + [
        {"phase": "reuse", "seconds": a + b, "attention_seconds": b} for a, b in zip(around, attention, strict=True)
    ]


def compared(dense: list[dict], park: list[dict], speedup: float | None = 1.3) -> list[dict]:
    return [
        {"method": "dense", "label": "dense", "speedup": 1.0, "steadiness": steadiness(dense, dense)},
        {"method": "park", "label": "PARK, fast", "speedup": speedup, "steadiness": steadiness(park, dense)},
    ]


QUIET = run([2.0] * 8), run([2.0] * 2, [1.0] * 6)


def test_equal_steps_have_no_spread_and_no_warning():
    rows = compared(*QUIET)
    assert [row["steadiness"] for row in rows] == [{"step_spread": 0.0, "dense_apart": 0.0}] * 2
    assert timing_warning(rows) is None


def test_density_that_changes_from_step_to_step_is_no_unsteadiness():
    park = run([2.0] * 2, [1.0] * 6, [0.25, 0.5, 0.75, 1.0, 1.25, 1.5])
    assert steadiness(park, QUIET[0])["step_spread"] == 0.0


@pytest.mark.parametrize(
    ("dense", "park", "share", "said"),
    [
        # one step of eight that hung: 12 s too much of 28
        (run([2.0] * 7 + [14.0]), QUIET[1], 12 / 28, "in the run of dense, steps of equal work differed by 43% on average"),
        # another job during half of the sparse steps: 3 s too much of 3 + 6 + 4
        (QUIET[0], run([2.0] * 2, [1.0] * 3 + [2.0] * 3), 3 / 13,
         "in the run of PARK, fast, steps of equal work differed by 23% on average"),
        # another job all through one run: nothing differs inside of it
        (QUIET[0], run([3.0] * 2, [1.5] * 6), 0.5,
         "dense steps in the run of PARK, fast and in that of dense differed by 50%"),
    ],
)  # fmt: skip
def test_each_kind_of_disturbance_is_seen_and_named(dense, park, share, said):
    rows = compared(dense, park)
    assert max(value for row in rows for value in row["steadiness"].values()) == pytest.approx(share)
    assert said in timing_warning(rows) and "--overwrite" in timing_warning(rows)


def test_a_tenth_is_the_limit():
    for slow, warned in ((1.09, False), (1.11, True)):
        assert (timing_warning(compared(QUIET[0], run([2.0 * slow] * 2, [1.0] * 6))) is not None) == warned


def test_without_a_speed_up_there_is_nothing_to_warn_of():
    dense, park = run([2.0] * 7 + [14.0]), QUIET[1]
    assert timing_warning(compared(dense, park, speedup=None)) is None
    assert timing_warning(compared(dense, park)[:1]) is None
    assert steadiness(park, None)["dense_apart"] is None
    assert steadiness([], dense) == {"step_spread": None, "dense_apart": None}


def test_the_demo_on_record_was_measured_on_a_quiet_machine():
    rows = json.loads(RECORDED.read_text().splitlines()[0])["methods"]
    assert timing_warning([row | {"steadiness": steadiness(row["steps"], rows[0]["steps"])} for row in rows]) is None


# VBench -----------------------------------------------------------------------------------------------


def clip_of(frames: int = 5, height: int = 60, width: int = 90, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Backbones of the right classes with a few channels and random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vit = transformers.ViTModel(transformers.ViTConfig(**small, image_size=224, patch_size=32), add_pooling_layer=False)
    vit.save_pretrained(tmp_path / vbench.FOLDERS["dino"])
    for size in ("clip_b", "clip_l"):
        config = transformers.CLIPVisionConfig(**small, image_size=224, patch_size=32, projection_dim=12)
        transformers.CLIPVisionModelWithProjection(config).save_pretrained(tmp_path / vbench.FOLDERS[size])
    save_file({"weight": torch.randn(1, 12), "bias": torch.randn(1)}, tmp_path / vbench.HEAD)
    return tmp_path


def test_consistency_is_the_mean_of_both_similarities_written_out():
    features = torch.nn.functional.normalize(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    expected = 0.0
    for t in range(1, 6):
        for other in (t - 1, 0):
            expected += max(0.0, torch.cosine_similarity(features[other], features[t], dim=0).item()) / 2 / 5
    assert vbench.feature_consistency(features) == pytest.approx(expected, rel=1e-6)


def test_a_still_video_is_perfectly_consistent_and_one_frame_is_refused(folder):
    still = clip_of(frames=1).repeat(4, 0)
    assert vbench.subject_consistency(still, vbench.load_dino(folder)) == pytest.approx(1.0, abs=1e-6)
    assert vbench.background_consistency(still, vbench.load_clip(folder, "clip_b")) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match="expected at least 2"):
        vbench.subject_consistency(still[:1], vbench.load_dino(folder))


def test_opposite_features_count_as_nothing():
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
    # frame 1: 0 and 0; frame 2: 0 with the one before, 1 with the first
    assert vbench.feature_consistency(features) == pytest.approx(0.25)


def test_networks_see_frames_of_vbenchs_size_and_colours():
    seen = []

    def network(images):
        seen.append(images)
        return torch.ones(len(images), 2)

    white = np.full((2, 120, 200, 3), 255, np.uint8)
    vbench.subject_consistency(white, network)
    vbench.background_consistency(white, network)
    assert seen[0].shape == (2, 3, 224, 373) and seen[1].shape == (2, 3, 224, 224)
    for images, mean, deviation in (
        (seen[0], vbench.DINO_MEAN, vbench.DINO_DEVIATION),
        (seen[1], vbench.CLIP_MEAN, vbench.CLIP_DEVIATION),
    ):
        expected = (1 - torch.tensor(mean)) / torch.tensor(deviation)
        assert torch.allclose(images, expected.view(1, 3, 1, 1).expand_as(images), atol=1e-6)


def test_resizing_is_torchvisions_of_8_bit_images():
    wrong = (ImportError, RuntimeError)  # absent, or built for another torch
    transforms = pytest.importorskip("torchvision.transforms", reason="no torchvision that loads", exc_type=wrong)
    frames = clip_of(frames=2, height=300, width=410)
    images = torch.from_numpy(frames).permute(0, 3, 1, 2)
    bicubic = transforms.InterpolationMode.BICUBIC
    shown = transforms.CenterCrop(224)(transforms.Resize(224, interpolation=bicubic, antialias=False)(images))
    expected = transforms.Normalize(vbench.CLIP_MEAN, vbench.CLIP_DEVIATION)(shown.float() / 255)
    # a value that lies at half a step may round either way
    assert (vbench.clip_images(frames) - expected).abs().max() <= 1 / 255 / min(vbench.CLIP_DEVIATION) * 1.01


def test_aesthetic_quality_is_the_heads_mean_over_ten(folder):
    frames, clip = clip_of(), vbench.load_clip(folder, "clip_l")
    weight, bias = vbench.load_head(folder)
    with torch.no_grad():
        features = torch.nn.functional.normalize(clip(vbench.clip_images(frames)), dim=-1)
    expected = (features @ weight.T + bias).mean() / 10
    assert vbench.aesthetic_quality(frames, clip, weight, bias) == pytest.approx(expected.item(), rel=1e-5)


def test_imaging_quality_is_the_mean_score_over_a_hundred_of_frames_no_longer_than_512():
    sizes = []

    def musiq(image):
        sizes.append(tuple(image.shape))
        return image.mean() * 100

    large, grey = np.zeros((2, 100, 1024, 3), np.uint8), np.full((3, 40, 50, 3), 51, np.uint8)
    vbench.imaging_quality(large, musiq)
    assert vbench.imaging_quality(grey, musiq) == pytest.approx(0.2)
    assert sizes == [(1, 3, 50, 512)] * 2 + [(1, 3, 40, 50)] * 3


def test_a_folder_of_weights_is_measured_by_name(folder):
    names = ["subject_consistency", "background_consistency", "aesthetic_quality"]
    setting = Setting(weights=folder)
    chosen, lacking = choose_measures("all", setting, reference=False)
    assert chosen == names and set(lacking) == {"imaging_quality"}
    found = measure_video(names, clip_of(), setting=setting)
    assert all(np.isfinite(found[name]["mean"]) for name in names)
    assert 0 <= found["subject_consistency"]["mean"] <= 1


@pytest.mark.parametrize(
    ("broken", "name", "said"),
    [
        ("dino-vitb16/model.safetensors", "subject_consistency", "expected config.json and safetensors"),
        ("clip-vit-base-patch32/config.json", "background_consistency", "expected a CLIPVisionModelWithProjection"),
    ],
)
def test_a_folder_that_lacks_a_file_is_one_line(folder, broken, name, said):
    (folder / broken).unlink()
    with pytest.raises(ValueError, match=said) as refused:
        measure_video([name], clip_of(), setting=Setting(weights=folder))
    assert "\n" not in str(refused.value)


def test_weights_that_run_code_are_not_opened(folder):
    torch.save({"weight": torch.zeros(1, 12), "bias": torch.zeros(1)}, folder / vbench.HEAD)
    with pytest.raises(ValueError, match="expected safetensors in"):
        vbench.load_head(folder)
