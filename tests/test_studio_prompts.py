"""`park generate --prompts`: the same files for any number of processes, and nothing is made twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("av")
import tiny_pipelines as tiny
from parklab.studio import prompts
from parklab.studio.prompts import Shard, generate_videos
from parklab.studio.request import Request

PROMPTS = ["a cat", "a dog runs", "two ships\u2014at sea"]
SMALL = {"steps": 2, "height": 32, "width": 32, "frames": 5, "text_tokens": 32, "guidance": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "wan"
    tiny.wan().save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def asked(model, **changes) -> Request:
    blocks = {"query_clusters": 2, "key_clusters": 4}
    return Request(prompt="", model=str(model), preset="quality", changes=blocks, device="cpu", **(SMALL | changes))


def contents(folder) -> dict[str, bytes]:
    """Records hold times and are left out."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".mp4" or path.name == prompts.INDEX
    }


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """(folder, its files) made by one process."""
    folder = tmp_path_factory.mktemp("alone")
    path = folder / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    outcome = generate_videos(asked(model), path, folder / "out")
    assert (outcome.made, outcome.kept) == (3, 0)
    return folder / "out", contents(folder / "out")


def test_two_processes_make_the_files_of_one(model, file, alone, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable, "-c", "from parklab.cli import main; main()", "generate", "--prompts", str(file), "--out",
        str(out),
    ]  # fmt: skip
    command += ["--model", str(model), "--device", "cpu", "--set", "query_clusters=2", "--set", "key_clusters=4"]
    command += [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    workers = []
    for rank in (0, 1):
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        told |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(command, env=os.environ | told, **pipes))
    said = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert contents(out) == alone[1]
    assert "rank 0 of 2: 2 made, 0 done already" in said[0][0]
    assert "rank 1 of 2: 1 made, 0 done already" in said[1][0]
    assert "index in" in said[0][0] + said[1][0]


def test_the_index_lists_the_videos_in_the_order_of_the_file(alone):
    _, files = alone
    index = json.loads(files[prompts.INDEX])
    assert [row["prompt"] for row in index["videos"]] == PROMPTS
    assert [row["video"] for row in index["videos"]] == [prompts.video_name(prompt) for prompt in PROMPTS]
    assert {row["seed"] for row in index["videos"]} == {0}
    assert len({row["sha256"] for row in index["videos"]}) == 3
    assert set(files) == {row["video"] for row in index["videos"]} | {prompts.INDEX}


def test_an_item_is_the_video_of_its_prompt_alone(model, alone, tmp_path):
    from dataclasses import replace

    from parklab.studio.generate import generate_video

    generate_video(replace(asked(model), prompt=PROMPTS[1]), tmp_path / "one.mp4")
    assert (tmp_path / "one.mp4").read_bytes() == alone[1][prompts.video_name(PROMPTS[1])]


def test_finished_items_are_kept_interrupted_ones_made_again_and_new_lines_added(model, file, alone, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for path in alone[0].iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    (out / prompts.INDEX).unlink()
    (out / prompts.video_name(PROMPTS[0])).with_suffix(".json").unlink()  # killed between video and record
    kept = out / prompts.video_name(PROMPTS[2])
    before = kept.stat().st_mtime_ns
    file.write_text("\n".join(["a new first line", *PROMPTS]), encoding="utf-8")
    said = []
    outcome = generate_videos(
        asked(model), file, out, finished=lambda item, place, of, record: said.append((item.prompt, place, of))
    )
    assert said == [("a new first line", 1, 2), (PROMPTS[0], 2, 2)]
    assert (outcome.made, outcome.kept, outcome.index) == (2, 2, out / prompts.INDEX)
    assert kept.stat().st_mtime_ns == before
    made = contents(out)
    assert all(made[name] == data for name, data in alone[1].items() if name != prompts.INDEX)
    assert len(json.loads(made[prompts.INDEX])["videos"]) == 4
    with pytest.raises(ValueError, match=r"seed = 0, asked 1.*--overwrite"):
        generate_videos(asked(model, seed=1), file, out)


def test_a_prompt_that_would_be_cut_is_found_before_the_first_video(model, file, tmp_path):
    # one token a byte and one for the end: 6, 11 and 19
    assert file.read_text(encoding="utf-8").splitlines()[4] == PROMPTS[2]
    with pytest.raises(
        ValueError, match=r"prompts\.txt line 5: text_tokens: expected at least 19 for this prompt, got 18"
    ):
        generate_videos(asked(model, text_tokens=18), file, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ValueError, match=r"^height: expected a multiple of 16"):  # no line's fault
        generate_videos(asked(model, height=40), file, tmp_path / "out")


def test_the_index_waits_for_the_last_rank(model, file, tmp_path, monkeypatch):
    loaded = []
    load = prompts.checkpoints.load_pipeline
    monkeypatch.setattr(prompts.checkpoints, "load_pipeline", lambda *a, **o: loaded.append(1) or load(*a, **o))
    first = generate_videos(asked(model), file, tmp_path / "out", shard=Shard(0, 2))
    assert (first.made, first.index) == (2, None)
    assert generate_videos(asked(model), file, tmp_path / "out", shard=Shard(1, 2)).index is not None
    assert len(loaded) == 2, "one model per process, not per prompt"
    # a later run with another number of ranks finds everything done, without loading the model
    again = [generate_videos(asked(model), file, tmp_path / "out", shard=Shard(rank, 3)) for rank in range(3)]
    assert [(outcome.made, outcome.kept) for outcome in again] == [(0, 1)] * 3
    assert len(loaded) == 2


def test_overwriting_makes_everything_again(model, file, alone, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for path in alone[0].iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    half = generate_videos(asked(model, seed=1), file, out, shard=Shard(0, 2), overwrite=True)
    assert (half.made, half.kept, half.index) == (2, 0, None)
    other = generate_videos(asked(model, seed=1), file, out, shard=Shard(1, 2), overwrite=True)
    assert (other.made, other.index) == (1, out / prompts.INDEX)
    assert all(contents(out)[name] != data for name, data in alone[1].items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one prompt per line, got .* without any"),
        ("\n  \n", "expected one prompt per line, got .* without any"),
        ("a cat\n\na dog\n a cat \n", r"got lines 1 and 4 of .* with the same \('a cat'\); remove one"),
    ],
)
def test_a_file_without_prompts_or_with_one_twice_is_refused(tmp_path, text, message):
    (tmp_path / "prompts.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        prompts.read_prompts(tmp_path / "prompts.txt")


def test_only_ends_of_lines_end_a_prompt_and_a_mark_of_the_encoding_is_none_of_it(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff# two cats\r\na\u2028cat\rthe\x85dog\x0cruns\n  # nobody\n\n\u732b #2\n".encode())
    found = prompts.read_prompts(file)
    assert [(item.line, item.prompt) for item in found] == [
        (2, "a\u2028cat"),
        (3, "the\x85dog\x0cruns"),
        (6, "\u732b #2"),
    ]


def test_other_bad_input_is_one_line_before_a_model_is_loaded(model, file, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"prompts: expected a text file with one prompt per line, got .*missing.txt \(No such file or directory\); check",
    ):
        prompts.read_prompts(tmp_path / "missing.txt")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="expected a text file"):
        prompts.read_prompts(file)
    file.write_text("a red circle moves right over blue waves\na unicorn\n")
    with pytest.raises(ValueError, match=r"prompts.txt line 2: prompt"):
        generate_videos(Request(prompt=""), file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for told, message in (
        ({"RANK": "1"}, "expected whole numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "expected 0 to WORLD_SIZE - 1"),
    ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=message):
            prompts.shard_from_environment()


def test_every_rank_takes_its_own_gpu(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    prompts.take_device("auto", Shard(3, 4, local_rank=1))
    assert taken == [1]
    prompts.take_device("cpu", Shard(0, 2))
    prompts.take_device("cuda:1", Shard())
    assert taken == [1]
    with pytest.raises(ValueError, match=r"LOCAL_RANK: expected one of the 2 GPUs"):
        prompts.take_device("auto", Shard(2, 4, local_rank=2))
    with pytest.raises(ValueError, match="expected auto, cuda or cpu with 4 ranks"):
        prompts.take_device("cuda:0", Shard(2, 4))


def test_names_are_readable_and_differ_where_prompts_differ():
    assert prompts.video_name("A cat, on the grass!").startswith("a-cat-on-the-grass-")
    assert prompts.video_name("a cat") != prompts.video_name("a  cat")
    assert prompts.video_name("\u732b").endswith(".mp4") and not prompts.video_name("\u732b").startswith("-")
    assert len(prompts.video_name("word " * 100)) < 64


def test_the_command_wants_one_of_prompt_and_prompts(file, capsys):
    import typer.testing

    from parklab.cli import app

    runner = typer.testing.CliRunner()
    for words, said in (([], "neither"), (["a cat", "--prompts", str(file)], "both")):
        found = runner.invoke(app, ["generate", *words])
        assert isinstance(found.exception, ValueError) and said in str(found.exception)
