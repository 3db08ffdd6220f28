"""VBench's arithmetic on tiny random backbones, and what a folder of weights must hold."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from parklab.metrics import vbench
from parklab.metrics.measures import Setting, choose_measures, measure_video

transformers = pytest.importorskip("transformers")


def clip_of(frames: int = 5, height: int = 60, width: int = 90, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Backbones of the right classes with a few channels and random weights."""
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
        (
            "clip-vit-base-patch32/config.json",
            "background_consistency",
            "weights: expected a CLIPVisionModelWithProjection",
        ),
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
