"""A model folder runs no code, hangs nothing and passes for nothing it is not: one line says what it holds that it must
not.
"""

import json
import os
import re
import shutil
import sys

import pytest
import torch

pytest.importorskip("diffusers")

import folder_damage as damage
import hostile_folders as hostile
import tiny_families as families
import tiny_pipelines as tiny
from hangs import no_hang
from parklab.sprites import CHECKPOINT
from parklab.studio import checkpoints, generate
from parklab.studio.model_files import expect_widths, read_header
from parklab.studio.model_folder import judge_folder
from parklab.studio.request import Request, config_for, prepare

ONE_LINE = re.compile(r"model: expected [^\n]+, got[^\n]+; [^\n]+\.")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "model"
    tiny.wan().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def refused(read, folder):
    modules = set(sys.modules)
    with no_hang(120), pytest.raises(ValueError) as error:
        read(folder)
    assert ONE_LINE.fullmatch(str(error.value)), str(error.value)
    assert not damage.ran(folder).exists()
    new = {name.partition(".")[0] for name in set(sys.modules) - modules}
    assert not new & {"evilmod", "antigravity", "pipeline", "None"}
    return str(error.value)


def test_the_campaign_holds_290_hostile_folders():
    assert len(hostile.JUDGED) + len(hostile.LOADED) >= 290


@pytest.mark.parametrize("name", hostile.JUDGED)
def test_a_hostile_folder_is_refused_before_any_loader_sees_it(folder, name):
    hostile.JUDGED[name](folder)
    refused(lambda path: checkpoints.find_model(str(path)), folder)


@pytest.mark.parametrize("name", hostile.LOADED)
def test_weights_that_are_not_the_models_are_refused_in_one_line(folder, name):
    hostile.LOADED[name](folder)
    refused(checkpoints.load_pipeline, folder)


@pytest.mark.parametrize("part", damage.WEIGHTS)
def test_missing_unexpected_and_broken_weights_are_named(folder, part):
    names = sorted(read_header(folder / damage.WEIGHTS[part]))
    damage.edit_tensors(folder, part, damage.remove_three)
    assert f"3 missing ({', '.join(names[:3])})" in refused(checkpoints.load_pipeline, folder)


def test_no_single_tensor_of_a_text_encoder_can_be_left_out(folder):
    path = folder / damage.WEIGHTS["text_encoder"]
    good = path.read_bytes()
    for name in read_header(path):
        path.write_bytes(good)
        damage.edit_tensors(folder, "text_encoder", lambda tensors, name=name: tensors.pop(name))
        assert name in refused(checkpoints.load_pipeline, folder)


@pytest.mark.parametrize("build", [tiny.wan, lambda: tiny.wan(2), tiny.hunyuan], ids=["wan", "two experts", "hunyuan"])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_saved_pipeline_passes_and_comes_back_bit_for_bit(tmp_path, build, size):
    pipe = build()
    pipe.save_pretrained(tmp_path / "model", max_shard_size=size)
    loaded = checkpoints.load_pipeline(checkpoints.find_model(str(tmp_path / "model")))
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            again = getattr(loaded, name).state_dict()
            assert part.state_dict().keys() == again.keys()
            assert all(torch.equal(value, again[key]) for key, value in part.state_dict().items())


@pytest.mark.parametrize(
    "family", ["wan_i2v", "wan_ti2v", "vace", "skyreels", "hunyuan15", "cogvideox", "ltx", "mochi"]
)
def test_configs_of_every_family_are_no_wider_than_their_weights(family):
    for name, part in getattr(families, family)().components.items():
        if isinstance(part, torch.nn.Module):
            config = dict(part.config) if isinstance(part.config, dict) else part.config.to_dict()
            expect_widths(config, name, {key: tuple(value.shape) for key, value in part.state_dict().items()})


def test_the_shipped_model_passes():
    assert {part.name for part in judge_folder(CHECKPOINT).components} == {
        "scheduler",
        "text_encoder",
        "tokenizer",
        "transformer",
        "vae",
    }


def test_a_snapshot_of_a_hub_cache_passes_and_one_that_leaves_it_does_not(folder, tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = shutil.copytree(folder, cache / "snapshots" / "0123")
    for i, path in enumerate(sorted(p for p in snapshot.rglob("*") if p.is_file())):
        path.rename(cache / "blobs" / str(i))
        path.symlink_to(os.path.relpath(cache / "blobs" / str(i), path.parent))
    assert judge_folder(snapshot).pipeline == "WanPipeline"
    checkpoints.load_pipeline(checkpoints.find_model(str(snapshot)))
    assert checkpoints.fingerprint(snapshot) == checkpoints.fingerprint(folder)
    shutil.copy(folder / "vae/config.json", tmp_path / "config.json")
    (snapshot / "vae/config.json").unlink()
    (snapshot / "vae/config.json").symlink_to(tmp_path / "config.json")
    assert "links that stay in" in refused(judge_folder, snapshot)


def test_a_download_fetches_no_code_and_nothing_before_the_index_is_judged(folder, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns=()):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert checkpoints.find_model("some/model") == folder
    assert asked[0] == ["model_index.json"] and not any(pattern.endswith((".py", "*", ".bin")) for pattern in asked[1])
    assert {pattern.partition("/")[0] for pattern in asked[1][1:]} == {
        "transformer",
        "vae",
        "text_encoder",
        "tokenizer",
        "scheduler",
    }
    del asked[:]
    damage.change(folder, "model_index.json", vae=["evilmod", "X"])
    refused(lambda _: checkpoints.find_model("some/model"), folder)
    assert asked == [["model_index.json"]]


@pytest.mark.parametrize("name", ["a" * 5000, "a/" + "b" * 5000, "a\0b", "a\0/b", "", "a/..", "../x", "a/b\n"])
def test_a_name_that_no_file_has_is_one_line(name):
    with pytest.raises(ValueError, match="model: expected a diffusers folder or a hub id"):
        checkpoints.find_model(name)


def test_an_edit_in_the_middle_of_a_file_changes_the_fingerprint_and_each_file_is_read_once(folder, monkeypatch):
    before = checkpoints.fingerprint(folder)
    read = checkpoints.content_digest.cache_info().misses
    assert checkpoints.fingerprint(folder) == before
    assert checkpoints.content_digest.cache_info().misses == read
    path = folder / damage.WEIGHTS["transformer"]
    # 3 MiB, so that neither end of the file holds the change
    damage.write_weights(
        path, {"a": {"dtype": "U8", "shape": [3 * 2**20], "data_offsets": [0, 3 * 2**20]}}, bytes(3 * 2**20)
    )
    before = checkpoints.fingerprint(folder)
    with path.open("r+b") as file:
        file.seek(3 * 2**19)
        file.write(b"\1")
    assert checkpoints.fingerprint(folder) != before
    (folder / "tokenizer" / "merges.txt").write_text("a b")
    assert checkpoints.fingerprint(folder) != before


def test_a_size_past_the_models_table_of_positions_is_one_line(folder):
    pipe = checkpoints.load_pipeline(folder)  # 64 positions per axis of 4 frames or 16 pixels
    checkpoints.expect_size(pipe, 253, 1024, 1024)
    for name, size in {"height": (9, 1040, 64), "width": (9, 64, 1040), "frames": (257, 64, 64)}.items():
        with pytest.raises(
            ValueError,
            match=rf"{name}: expected at most \d+, where this model's table of positions ends, got \d+; lower",
        ):
            checkpoints.expect_size(pipe, *size)


@pytest.mark.parametrize("name", ["height", "width"])
def test_a_size_of_nothing_is_one_line(folder, name):
    request = Request(prompt="a cat", model=str(folder), **{name: 0})
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        prepare(request)


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_numbers_that_are_not_finite_end_the_run_without_a_video(folder, tmp_path, monkeypatch, part):
    """Weights can be finite and a video not: here a layer that overflows."""
    load = checkpoints.load_pipeline

    def overflowing(*arguments, **options):
        pipe = load(*arguments, **options)
        layer = pipe.transformer.proj_out if part == "transformer" else pipe.vae.post_quant_conv
        layer.register_forward_hook(lambda module, inputs, output: output * float("inf"))
        return pipe

    monkeypatch.setattr(checkpoints, "load_pipeline", overflowing)
    request = Request(
        prompt="a cat", model=str(folder), method="dense", steps=2, height=32, width=32, frames=5, device="cpu"
    )
    said = {"transformer": "latents", "vae": "frames"}[part]
    with pytest.raises(ValueError, match=rf"{said}: expected finite numbers, got NaN or Inf at step \d; try"):
        generate.generate_video(request, tmp_path / "out" / "a.mp4")
    assert not list((tmp_path / "out").iterdir())


def test_a_cpu_without_memory_for_a_video_is_one_line(folder, tmp_path, monkeypatch):
    """PyTorch's own error, raised in the transformer (below our code) and in the decoder (in stock code alone)."""
    load = checkpoints.load_pipeline
    for part in ("transformer", "vae"):

        def without_room(*arguments, part=part, **options):
            pipe = load(*arguments, **options)
            layer = pipe.transformer.proj_out if part == "transformer" else pipe.vae.post_quant_conv
            layer.register_forward_hook(lambda *_: torch.empty(2**58))
            return pipe

        monkeypatch.setattr(checkpoints, "load_pipeline", without_room)
        request = Request(prompt="a cat", model=str(folder), steps=2, height=32, width=32, frames=5, device="cpu")
        with pytest.raises(
            ValueError,
            match="device: expected room for 5 frames of 32 x 32 on cpu, got out of memory; pass a smaller size",
        ):
            generate.generate_video(request, tmp_path / "out" / "a.mp4")


def test_a_special_tokens_path_that_no_loader_opens_is_let_through(folder):
    """Published tokenizers carry their author's path; a FIFO there would hang whoever opened it."""
    os.mkfifo(folder.parent / "pipe")
    path = folder / "tokenizer/tokenizer_config.json"
    author = {"special_tokens_map_file": str(folder.parent / "pipe"), "name_or_path": "/home/me/umt5"}
    path.write_text(json.dumps(json.loads(path.read_text()) | author))
    damage.change(folder, "text_encoder/config.json", _name_or_path="/raid/umt5")
    with no_hang(120):
        checkpoints.load_pipeline(checkpoints.find_model(str(folder)))


def test_a_failure_of_stock_code_in_a_run_is_one_line_and_ours_stays_whole(folder, tmp_path):
    """A tokenizer whose words the text encoder does not have: everything loads, the first lookup fails."""
    pipe = checkpoints.load_pipeline(folder)
    pipe.text_encoder.resize_token_embeddings(2)
    request = Request(prompt="a cat", method="dense", steps=2, height=32, width=32, frames=5, device="cpu")
    config = config_for(request, pipe)
    with pytest.raises(
        ValueError,
        match=r"model: expected WanPipeline to make a video of this request, got IndexError \(.+\); check its",
    ):
        generate.generate_frames(pipe, request, config)

    class Ours:
        def __getattr__(self, name):
            raise LookupError("ours")

    whole_pipe = checkpoints.load_pipeline(folder)
    with pytest.raises(LookupError, match="ours"):
        generate.generate_frames(whole_pipe, request, config, progress=lambda report: Ours().x)
