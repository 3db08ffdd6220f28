"""Videos on disk in pairs, every measure by name, and `park metrics`."""

import importlib
import json
import math
import shutil
import sys

import numpy as np
import pytest
import safetensors.numpy

from parklab import cli
from parklab.metrics import fidelity, perceptual
from parklab.metrics.measures import MEASURES, SINGLE, Setting, choose_measures, measure_video
from parklab.metrics.pairs import DECODED, RAW, Clip, Pair, find_pairs, measure_pair, read_clip
from parklab.store import Cell, CellWriter, Store, read_record


def scene(seed: int = 0, frames: int = 4, height: int = 48, width: int = 64) -> np.ndarray:
    """Blocks of colour, as smooth as a video is."""
    coarse = np.random.default_rng(seed).integers(0, 256, (frames, height // 8, width // 8, 3), dtype=np.uint8)
    return coarse.repeat(8, 1).repeat(8, 2)


def noisy(frames: np.ndarray, amplitude: int, seed: int = 1) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(-amplitude, amplitude + 1, frames.shape)
    return np.clip(frames.astype(int) + noise, 0, 255).astype(np.uint8)


def park(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["park", "metrics", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def never(path):
    raise AssertionError(f"{path} is no mp4")


def need(name: str):
    """Skipped where the measure cannot be taken, with what it says itself."""
    reason = MEASURES[name].reason(Setting())
    if reason is not None:
        pytest.skip(reason)


# measures by name


def test_values_are_those_of_the_functions_frame_by_frame():
    reference = scene()
    video = noisy(reference, 9)
    found = measure_video(["psnr", "ssim"], video, reference)
    assert found["psnr"]["per_frame"] == fidelity.psnr_per_frame(video, reference)
    assert found["psnr"]["mean"] == pytest.approx(np.mean(found["psnr"]["per_frame"]))
    assert found["ssim"]["worst"] == min(fidelity.ssim_per_frame(video, reference))


@pytest.mark.parametrize("name", [name for name in MEASURES if MEASURES[name].kind != SINGLE])
@pytest.mark.filterwarnings("ignore")  # of the packages
def test_more_noise_is_worse_and_an_equal_video_is_best(name):
    need(name)
    reference = scene(frames=3, height=96, width=128)
    videos = [noisy(reference, amplitude) for amplitude in (0, 8, 60)]
    best, near, far = (measure_video([name], video, reference)[name]["mean"] for video in videos)
    assert (best > near > far) if MEASURES[name].higher_is_better else (best < near < far)
    # VMAF's model gives an equal video somewhat less than 100
    wanted = {"psnr": fidelity.CAP, "ssim": 1.0, "lpips": 0.0, "st_lpips": 0.0, "cvvdp": 10.0}.get(name)
    assert wanted is None or best == pytest.approx(wanted, abs=1e-6)


def test_what_is_asked_by_name_and_missing_is_one_line_with_the_install_command(monkeypatch):
    missing = lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name=name))  # noqa: E731
    monkeypatch.setattr(perceptual.importlib, "import_module", missing)
    for name, install in (
        ("vmaf", "parklab[metrics]"),
        ("st_lpips", "parklab[metrics]"),
        ("cvvdp", "pip install cvvdp"),
    ):
        with pytest.raises(ModuleNotFoundError, match=f"{name}: expected what it needs, got no package") as said:
            choose_measures(name, Setting(), reference=True)
        assert install in str(said.value) and "\n" not in str(said.value)
    with pytest.raises(ModuleNotFoundError, match="VMAF: expected its package, got no package imageio_ffmpeg"):
        perceptual.vmaf_per_frame(scene(), scene())


def test_a_package_that_is_there_and_does_not_load_is_missing_too(monkeypatch):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr(perceptual.importlib, "import_module", broken)
    reason = perceptual.st_lpips_reason()
    assert reason.startswith("stlpips_pytorch that does not load (operator torchvision::nms does not exist)")


def test_all_takes_what_can_be_taken_and_says_why_the_rest_is_not():
    chosen, lacking = choose_measures("all", Setting(), reference=True)
    assert {"psnr", "ssim"} <= set(chosen) and not set(chosen) & set(lacking)
    assert {*chosen, *lacking} == set(MEASURES)
    assert "--weights DIR" in lacking["subject_consistency"]
    assert choose_measures(None, Setting(), reference=True) == (["psnr", "ssim"], {})


@pytest.mark.parametrize(
    ("asked", "reference", "said"),
    [
        ("psnrr", True, "did you mean psnr?"),
        ("psnr", False, "got 'psnr'; pass a reference video too."),
        (",", True, "separate names by commas."),
        (None, False, "expected one that can be taken here, got none (no folder of weights"),
    ],
)
def test_measures_that_do_not_exist_are_refused_in_one_line(asked, reference, said):
    with pytest.raises(ValueError) as refused:
        choose_measures(asked, Setting(), reference=reference)
    assert said in str(refused.value)


def test_lpips_weights_have_a_line_that_gets_them(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(fidelity.importlib.util, "find_spec", lambda name: object())
    assert 'get them with: python -c "import torchvision;' in fidelity.lpips_reason()


# pairs on disk


def test_equal_names_of_two_folders_make_pairs_and_the_others_are_named(tmp_path):
    for side, names in (("a", ("x.npy", "y.npy", "z.mp4")), ("b", ("x.npy", "z.npy"))):
        (tmp_path / side).mkdir()
        for name in names:
            (tmp_path / side / name).write_bytes(b"")
    pairs, alone = find_pairs(tmp_path / "a", tmp_path / "b", read_record)
    assert [pair.name for pair in pairs] == ["x"]
    assert set(alone) == {"y", "z"}
    assert "got none in" in alone["y"] and f"got {DECODED} and {RAW}" in alone["z"]


def test_a_folder_of_the_store_gives_the_videos_of_its_records_raw_before_decoded(tmp_path):
    frames = scene()
    cell = Cell(name="park", format="parkattn.generation.1", files=("park.mp4", "raw/park.safetensors"))
    sheet = Cell(name="metrics", format="parkattn.comparison.1", files=("side_by_side.mp4",))

    def make(making: CellWriter) -> None:
        for name in making.cell.files:
            making.write(name, safetensors.numpy.save({"frames": frames}))
        making.commit({"format": making.cell.format, "request": {}})

    Store(tmp_path).fill([cell, sheet], make)
    (tmp_path / "foreign.mp4").write_bytes(b"")
    pairs, alone = find_pairs(tmp_path, tmp_path, read_record)
    assert [(pair.name, pair.video.kind) for pair in pairs] == [("park", RAW)] and not alone
    assert np.array_equal(read_clip(pairs[0].video, never), frames)
    decoded, _ = find_pairs(tmp_path, tmp_path, read_record, only=DECODED)
    assert decoded[0].video.path.name == "park.mp4"
    (tmp_path / "raw/park.safetensors").write_bytes(safetensors.numpy.save({"frames": scene(1)}))
    with pytest.raises(ValueError, match="expected the file that its record describes, got another"):
        read_clip(pairs[0].video, never)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", b""),
        ("a.npy", b"\x93NUMPY torn"),
        ("a.safetensors", b"\x08\0\0\0\0\0\0\0{}      "),
        ("a.safetensors", b"torn"),
        ("a.npy", None),
    ],
)
def test_a_corrupt_file_is_one_line(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="expected raw frames, got") as said:
        read_clip(Clip(path), never)
    assert "\n" not in str(said.value)


def test_pickled_arrays_are_not_opened(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"code": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="expected raw frames"):
        read_clip(Clip(tmp_path / "a.npy"), never)


def test_raw_frames_are_not_compared_with_decoded_ones(tmp_path):
    np.save(tmp_path / "a.npy", scene())
    pair = Pair("a", Clip(tmp_path / "a.npy"), Clip(tmp_path / "b.mp4"))
    with pytest.raises(ValueError, match=f"got {RAW} and {DECODED}; pass two of a kind"):
        measure_pair(pair, ["psnr"], Setting(), never)


# the command


def test_one_bad_pair_is_a_line_and_an_exit_code_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    for side, amplitude in (("sparse", 9), ("dense", 0)):
        (tmp_path / side).mkdir()
        for name, frames in (
            ("good", scene()),
            ("longer", scene(frames=4 if side == "dense" else 5)),
            ("torn", scene()),
        ):
            np.save(tmp_path / side / f"{name}.npy", noisy(frames, amplitude))
        np.save(tmp_path / side / "smaller.npy", scene(height=48 if side == "dense" else 40))
    (tmp_path / "sparse/torn.npy").write_bytes(b"torn")
    out = tmp_path / "m.json"
    out.write_text("my own")
    assert park(monkeypatch, tmp_path / "sparse", tmp_path / "dense", "--out", out) == 1
    shown = capsys.readouterr()
    assert "it is kept as m.aside-1.json" in shown.out and (tmp_path / "m.aside-1.json").read_text() == "my own"
    lines = shown.err.strip().splitlines()
    assert len(lines) == 3 and all(line.startswith("park: ") for line in lines)
    assert sum("compare videos of one size and length" in line for line in lines) == 2
    assert {line.split(": ")[1] for line in lines} == {"longer", "smaller", "torn"}
    record = read_record(out)
    assert [pair["name"] for pair in record["pairs"]] == ["good"] and set(record["failures"]) == {
        "longer",
        "smaller",
        "torn",
    }
    expected = fidelity.psnr_per_frame(noisy(scene(), 9), scene())
    assert record["pairs"][0]["values"]["psnr"]["per_frame"] == expected
    assert f"{np.mean(expected):.2f}" in shown.out and RAW in shown.out


def test_mp4_files_are_compared_after_their_codec(tmp_path, monkeypatch, capsys):
    video = pytest.importorskip("parklab.studio.video")
    pytest.importorskip("av")
    for name, amplitude in (("a", 12), ("b", 0)):
        video.write_mp4(tmp_path / f"{name}.mp4", noisy(scene(), amplitude), 16)
    assert park(monkeypatch, tmp_path / "a.mp4", tmp_path / "b.mp4", "--json", tmp_path / "m.json") == 0
    entry = json.loads((tmp_path / "m.json").read_text())["pairs"][0]
    decoded = [video.read_mp4(tmp_path / f"{name}.mp4") for name in "ab"]
    assert entry["frames"] == DECODED and entry["values"]["psnr"]["per_frame"] == fidelity.psnr_per_frame(*decoded)
    shutil.copy(tmp_path / "m.json", tmp_path / "c.mp4")
    assert park(monkeypatch, tmp_path / "c.mp4", tmp_path / "b.mp4") == 1
    assert "c.mp4: expected a whole video, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such", "b"], "got 'no/such', which does not exist"),
        (["x" * 300, "b"], "expected a file or a folder"),
        (["a\nb", "b"], "got 'a\\nb', which does not exist"),
        (["{}/a.npy", "{}"], "expected two files or two folders"),
        (["{}/a.txt", "{}/a.npy"], "expected a file that ends with .npy, .safetensors, .mp4"),
        (["{}/empty", "{}/empty"], "got {}/empty without any"),
        (["{}/a.npy", "{}/a.npy", "--frames", "row"], "did you mean raw?"),
        (["{}/a.npy", "{}/a.npy", "--fps", "0"], "fps: expected a positive number"),
        (["{}/a.npy", "{}/a.npy", "--out", "{}/m.txt"], "ends with .json"),
        (["{}/a.npy", "{}/a.npy", "--device", "cuda:9"], "device: expected a device that this machine has"),
    ],
)
def test_what_cannot_be_understood_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, words, said):
    np.save(tmp_path / "a.npy", scene())
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "empty").mkdir()
    assert park(monkeypatch, *(word.format(tmp_path) for word in words)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and said.format(tmp_path) in line


def test_the_packages_of_the_extra_are_those_the_measures_name():
    """Whoever has the extra has every measure but ColorVideoVDP, LPIPS's weights and VBench's."""
    names = {"stlpips_pytorch": "st_lpips", "imageio_ffmpeg": "vmaf"}
    for package, measure in names.items():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no package {package}; install it with: {perceptual.INSTALL}")
        assert MEASURES[measure].reason(Setting()) is None


# PSNR and SSIM against values worked out by hand, and their edges ---------------------------------------


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
