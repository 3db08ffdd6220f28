"""Everything a user can get wrong with the video commands: one line, exit code 2, nothing half-written."""

import contextlib
import json
import os
import resource
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

pytest.importorskip("diffusers")
pytest.importorskip("av")

from parkattn.park import ParkConfig
from parklab import cli
from parklab.sprites import CHECKPOINT
from parklab.store import Cell, CellWriter, Store
from parklab.studio import checkpoints, commands, doctor, gain, generate, video

SENTENCE = "a red circle moves right over blue waves"


@pytest.fixture
def park(monkeypatch, capsys):
    """The command as a user types it: (exit code, stdout, stderr)."""
    if "generate" not in {command.callback.__name__ for command in cli.app.registered_commands}:
        monkeypatch.setattr(
            cli.app, "registered_commands", cli.app.registered_commands + commands.app.registered_commands
        )

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["park", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return run


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped checkpoint that a test may break."""
    return shutil.copytree(CHECKPOINT, tmp_path / "model")


def refused(park, tmp_path, *arguments) -> str:
    out = tmp_path / "out"
    code, _, error = park("generate", *arguments, "--out", out / "a.mp4")
    assert code == 2 and error.startswith("park: ") and "Traceback" not in error
    assert not out.exists() or not list(out.iterdir())
    return error


def holds(error: str, said: str) -> bool:
    """A terminal may wrap the line anywhere."""
    return "".join(said.split()) in "".join(error.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a red elephant moves right over blue waves"], "unknown word 'elephant'; allowed words: a, an, over, red"),
        ([SENTENCE, "--height", "100"], "height: expected a multiple of 16 for this model, got 100; try 96."),
        ([SENTENCE, "--width", "8"], "width: expected a multiple of 16 for this model, got 8; try 16."),
        ([SENTENCE, "--frames", "16"], "frames: expected a multiple of 4 plus 1 for this model, got 16; try 17."),
        ([SENTENCE, "--method", "parc"], "method: expected one of centroid, chipmunk, dense, mc-sparse, park"),
        ([SENTENCE, "--profile", "wan9"], "profile: expected one of paper, quality, fast, turbo, hunyuanvideo"),
        ([SENTENCE, "--profile", "fats"], "got 'fats'; did you mean fast?"),
        (
            [SENTENCE, "--method", "dense", "--profile", "fast"],
            "profile: expected none, since dense has no profiles, got 'fast'",
        ),
        ([SENTENCE, "--set", "top_q=0.9"], "got top_q; did you mean top_p?"),
        ([SENTENCE, "--set", "top_p"], "--set: expected NAME=VALUE, got 'top_p'"),
        ([SENTENCE, "--device", "cuda:7"], "device: expected one this machine has"),
        ([SENTENCE, "--device", "tpu"], "device: expected auto, cpu, cuda or cuda:N, got 'tpu'; leave it out"),
        ([SENTENCE, "--dtype", "int4"], "dtype: expected one of bfloat16, float16, float32"),
        ([SENTENCE, "--offload", "model", "--device", "cpu"], "offload: expected none on cpu"),
        ([SENTENCE, "--steps", "0"], "steps: expected at least 1, got 0"),
        ([SENTENCE, "--guidance", "nan"], "guidance: expected a number from 0 to 1000, got nan"),
        ([SENTENCE, "--negative", "blue"], "negative: expected guidance above 1 beside it, got 1.0"),
        (
            [SENTENCE, "--text-tokens", "4"],
            "text_tokens: expected at least 9 for this prompt, got 4, which would cut it; leave out",
        ),
        ([SENTENCE, "--text-tokens", "0"], "text_tokens: expected at least 1, got 0"),
        ([SENTENCE, "--model", "no-such-folder"], "model: expected a diffusers folder or a hub id"),
    ],
)
def test_a_wrong_argument_is_one_line(park, tmp_path, arguments, said):
    assert holds(refused(park, tmp_path, *arguments), said)


def break_index(folder):
    (folder / "model_index.json").write_text("{")


def drop_component(folder):
    shutil.rmtree(folder / "vae")


def cut_weights(folder):
    os.truncate(folder / "transformer" / "diffusion_pytorch_model.safetensors", 10_000)


def only_pickle(folder):
    weights = folder / "text_encoder" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))


def drop_weights(folder):
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()


def drop_index(folder):
    (folder / "model_index.json").unlink()


def wrong_shape(folder):
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 7, "ffn_dim": 512}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (break_index, "expected JSON in"),
        (drop_index, "model_index.json, got no such file"),
        (drop_component, "expected component vae in"),
        (cut_weights, "expected whole weights in"),
        (only_pickle, "got text_encoder/pytorch_model.bin (a pickle can run code)"),
        (drop_weights, "expected a .safetensors file in"),
        (wrong_shape, "to load as a diffusers pipeline, got:"),
    ],
)
def test_a_broken_checkpoint_is_one_line(park, tmp_path, folder, damage, said):
    damage(folder)
    assert holds(refused(park, tmp_path, SENTENCE, "--model", folder), said)


def test_retrained_weights_have_another_fingerprint(folder):
    before = checkpoints.fingerprint(folder)
    assert before == checkpoints.fingerprint(CHECKPOINT)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert checkpoints.fingerprint(folder) != before


def test_an_output_that_cannot_be_written_is_found_before_the_work(park, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, error = park("generate", SENTENCE, "--out", tmp_path / "file" / "a.mp4")
    assert code == 2 and holds(error, "out: expected a folder that can be written")
    code, _, error = park("compare", SENTENCE, "--out", tmp_path / "file")
    assert code == 2 and holds(error, "out: expected a folder that can be written")
    code, _, error = park("generate", SENTENCE, "--out", tmp_path / "a.gif")
    assert code == 2 and holds(error, "ending in .mp4")


def test_a_refused_comparison_leaves_nothing_behind(park, tmp_path):
    code, _, error = park("compare", SENTENCE, "--text-tokens", "4", "--out", tmp_path / "out")
    assert code == 2 and holds(error, "text_tokens: expected at least 9 for this prompt, got 4")
    assert not list((tmp_path / "out").iterdir())


def test_a_gpu_this_machine_has_not_is_refused_by_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert checkpoints.choose_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="expected cuda:0 to cuda:1, got 'cuda:2'"):
        checkpoints.choose_device("cuda:2")


def test_slower_than_dense_is_explained_only_where_attention_is_small():
    def report(attention: float, speedup: float | None) -> dict:
        rows = [
            {"label": "dense", "speedup": 1.0, "seconds": {"attention": attention, "denoise": 10.0}},
            {"label": "PARK, fast", "speedup": speedup},
        ]
        return {"tokens": 1288, "methods": rows}

    said = commands._why_slower(report(1.0, 0.7))
    assert "PARK, fast, because at 1,288 tokens attention is only 10% of dense denoising" in said
    assert [commands._why_slower(report(*case)) for case in ((1.0, 1.2), (7.0, 0.7), (1.0, None))] == [None] * 3


def test_a_full_disk_leaves_no_piece_of_a_video(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (8, 128, 128, 3), dtype=np.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # files of this process end here, as on a full disk
    try:
        cell = Cell(name="a", format="test", files=("a.mp4",))
        with (
            pytest.raises(OSError, match=r"out: expected room for .*a\.mp4, got a full disk"),
            CellWriter(Store(tmp_path), cell) as making,
        ):
            making.write("a.mp4", lambda path: video.write_mp4(path, frames, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["av", "diffusers", "transformers", "accelerate"])
def test_a_missing_extra_names_the_install_line(park, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    error = refused(park, tmp_path, SENTENCE)
    assert holds(error, f"park: {missing}: expected for") and holds(error, "pip install parklab")


def test_ctrl_c_is_one_line_and_exit_code_130(park, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "load_pipeline", interrupted)
    code, text, error = park("generate", SENTENCE, "--out", tmp_path / "out" / "a.mp4")
    assert code == 130 and holds(text, "a.mp4 is as it was, or finished; run again to go on") and not error
    assert not list((tmp_path / "out").iterdir())


def test_running_out_of_gpu_memory_is_one_line(park, tmp_path, monkeypatch):
    class Full:
        def __call__(
            self,
            height=32,
            width=48,
            num_frames=5,
            num_inference_steps=2,
            guidance_scale=1.0,
            max_sequence_length=32,
            **options,
        ):
            raise torch.OutOfMemoryError

        class transformer:  # noqa: N801 (a pipeline's attribute)
            config = type("Config", (), {"patch_size": (1, 1, 1)})

    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *arguments, **options: Full())
    monkeypatch.setattr(generate, "config_for", lambda *arguments: ParkConfig())
    monkeypatch.setattr(
        generate,
        "Session",
        lambda *arguments, **options: contextlib.nullcontext(SimpleNamespace(engine=SimpleNamespace())),
    )
    assert holds(
        refused(park, tmp_path, SENTENCE, "--height", "32", "--width", "48"), "got out of memory; pass --offload group"
    )


def test_an_ffmpeg_without_h264_is_one_line(park, tmp_path, monkeypatch):
    monkeypatch.setattr(video.video_library(), "codecs_available", {"mpeg4"})
    assert holds(refused(park, tmp_path, SENTENCE), "ffmpeg: expected one with libx264")


def test_doctor_is_healthy_here_and_says_what_to_gain(park):
    code, text, _ = park("doctor", "--json", "--model", "wan2.1-14b", "--gpu", "NVIDIA H200")
    found = json.loads(text)
    assert code == 0 and found["healthy"] and found["self_test"]["passed"]
    assert {stage["stage"] for stage in found["stages"]} == {"cluster", "importance", "selection", "permute", "attend"}
    assert all(stage["uses"] and stage["why"] for stage in found["stages"])
    assert found["estimate"]["tokens"] == 75_600 and found["estimate"]["source"] == "measured"
    assert "50 steps of 2 forwards on H200" in " ".join(park("doctor")[1].split())


def test_doctor_names_what_generate_lacks(park, monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "accelerate" else "1")
    missing = json.loads(park("doctor", "--json")[1])["missing"]
    assert [(row["package"], row["for"]) for row in missing] == [("accelerate", "generate, compare")]


def test_doctor_fails_when_the_definition_does(park, monkeypatch):
    monkeypatch.setattr(doctor, "park_attention", lambda q, k, v, config: v * 1.01)
    code, text, _ = park("doctor", "--json")
    assert code == 1 and json.loads(text)["problems"]


def test_the_arithmetic_is_amdahls():
    video = {"frames": 49, "height": 480, "width": 832}
    guess = gain.estimate("wan2.1-14b", **video, gpu="H200", guidance=1)
    n, d, ffn, text = 20_280, 5120, 13_824, 512
    attention = 4 * n * n * d
    rest = 8 * n * d * d + (4 * n + 4 * text) * d * d + 4 * n * text * d + 4 * n * d * ffn
    share = attention / (attention + rest)
    assert guess["attention_share"] == pytest.approx(share) and guess["source"] == "arithmetic"
    assert guess["dense_s"]["dense"] == pytest.approx(50 * 40 * (attention + rest) / (989e12 / 2))
    # of 50 steps paper has 10 dense ones, quality 12 with its anchors, fast 7; densities are those of the measured
    # forwards
    for name, dense, kept in (("paper", 10, 0.25), ("quality", 12, 0.25), ("fast", 7, 0.1)):
        wanted = 1 / (1 - share * (50 - dense) / 50 * (1 - kept))
        assert guess["profiles"][name]["speedup"]["dense"] == pytest.approx(wanted, rel=0.01)
    dense = gain.estimate("wan2.1-14b", **video, density=1.0)["profiles"].values()
    assert [each["speedup"]["dense"] for each in dense] == pytest.approx([1.0] * 3)


def test_doctor_says_what_was_measured_and_scales_it_by_the_peak_for_other_gpus():
    video = {"frames": 81, "height": 720, "width": 1280}
    here, other, same = (
        gain.estimate("wan2.1-14b", **video, gpu=gpu, steps=20) for gpu in ("H200", "4090", "NVIDIA H100 PCIe")
    )
    assert [each["source"] for each in (here, other, same)] == ["measured", "scaled", "scaled"]
    for name, park in here["profiles"].items():
        assert other["profiles"][name]["seconds"] == pytest.approx(park["seconds"] * 989 / 165)
    without = gain.estimate("wan2.1-14b", **video, gpu="H200", steps=20, guidance=1)
    assert (here["forwards_per_step"], without["forwards_per_step"]) == (2, 1)
    assert here["dense_s"]["stock"] == pytest.approx(2 * without["dense_s"]["stock"])
    assert gain.estimate("wan2.2-14b", **video, gpu="H200")["source"] == "measured"  # its transformers are of that size


def test_doctor_shows_the_profile_that_was_asked_for_alone(park):
    text = " ".join(park("doctor", "--profile", "fast", "--steps", "4", "--guidance", "1", "--gpu", "h200")[1].split())
    assert "4 steps of 1 forward on H200" in text and "with the state of fast" in text and "(estimated)" in text
    assert "1 anchor, 3 refresh" in text and "36 reuse" not in text
    turbo = park("doctor", "--profile", "turbo", "--steps", "4", "--guidance", "1", "--gpu", "h200")[1]
    assert "1 anchor, 3 refresh" in " ".join(turbo.split()) and "with the state of turbo" in " ".join(turbo.split())
    code, _, error = park("doctor", "--profile", "swift")
    assert code == 2 and holds(error, "profile: expected one of")


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("h200", "H200"),
        ("b200", "B200"),
        ("l40s", "L40S"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
    ],
)
def test_a_gpu_is_known_by_a_part_of_its_name_that_no_other_has(given, known):
    assert gain.known_gpu(given) == known


@pytest.mark.parametrize(
    "given",
    ["200", "rtx", "H20", "A10", "L4", "L40", "3", "s", "", "NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090 Laptop GPU"],
)
def test_another_gpu_is_not_taken_for_one_whose_name_begins_like_its_own(given):
    assert gain.known_gpu(given) is None


def test_an_unknown_gpu_is_refused_with_the_known_ones(park):
    code, _, error = park("doctor", "--gpu", "foo")
    assert code == 2 and holds(error, "gpu: expected one of B200, H200") and holds(error, "got 'foo'")


def test_doctor_fits_80_columns_whole_and_names_the_model_it_estimates(park, monkeypatch):
    monkeypatch.setattr(commands, "console", Console(width=80))
    text = park("doctor", "--gpu", "H200")[1]
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    words = " ".join(text.split())
    for told in (
        str(doctor.CHECKPOINT),
        "Estimate for wan2.1-14b, the default; --model NAME",
        "measured on an H200, as in README's table",
        "float8, group offload",
    ):
        assert told.replace(" ", "") in words.replace(" ", "")
    assert "the default" not in park("doctor", "--model", "hunyuanvideo")[1]


def test_an_estimate_counts_what_forecasts_left_out_or_says_that_nothing_is_known(monkeypatch):
    known = gain.measured_forwards()
    phases = {"dense": 1, "anchor": 6, "reuse": 18, "forecast": 25}
    recorded = {"steps": 50, "forwards_per_step": 2, "tolerance": 0.006, "phases": phases}
    monkeypatch.setattr(gain, "measured_forwards", lambda: known | {"forecasts": {"fast": [recorded]}})
    video = {"frames": 81, "height": 720, "width": 1280, "gpu": "H200"}
    every, some, fewer, other = (
        gain.estimate("wan2.1-14b", **video, steps=steps, tolerance=tolerance)["profiles"]["fast"]
        for steps, tolerance in ((50, 0.0), (50, 0.007), (50, 0.005), (20, 0.007))
    )
    reuse = known["models"]["wan2.1-14b"]["profiles"]["fast"]["seconds"]["reuse"]
    assert every["seconds"] - some["seconds"] == pytest.approx(2 * 25 * reuse) and some["no_forecasts"] is None
    assert fewer["seconds"] == every["seconds"] and "every forward is counted" in fewer["no_forecasts"]
    assert "in 20 steps of 2 forwards, so" in other["no_forecasts"]
    # by arithmetic a forecast costs nothing either
    small = {"frames": 41, "height": 480, "width": 832}
    some = gain.estimate("wan2.1-14b", **small, tolerance=0.006)["profiles"]["fast"]["speedup"]["dense"]
    assert some > gain.estimate("wan2.1-14b", **small, tolerance=0)["profiles"]["fast"]["speedup"]["dense"] > 1


def test_a_precision_is_estimated_where_its_forwards_were_timed_and_named_where_they_were_not():
    video = {"frames": 81, "height": 720, "width": 1280, "gpu": "H200"}
    plain, rounded = (gain.estimate("wan2.1-14b", **video, precision=each)["profiles"] for each in ("bf16", "int8"))
    assert rounded["fast"]["seconds"] < plain["fast"]["seconds"] and rounded["fast"]["no_precision"] is None
    untimed = gain.estimate("hunyuanvideo", **video | {"frames": 125}, precision="int8")["profiles"]["fast"]
    for told in (rounded["paper"], untimed):
        assert told["no_precision"] == "no forward in INT8 was timed, so in bf16"
    assert rounded["paper"] | {"no_precision": None} == plain["paper"]
    with pytest.raises(ValueError, match="precision: expected"):
        gain.estimate("wan2.1-14b", **video, precision="fp4")
