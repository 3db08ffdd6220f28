"""The model of solids: its library, its training, its export in 8 bits, and the judge of its videos."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parklab.solids import following, grammar, judge
from parklab.solids.grammar import Scene, Thing
from parklab.solids.library import Bank, Library, fresh_clips, shrunk
from parklab.solids.motion import any_clip, clip_of, training_clip, words_of
from parklab.solids.packing import INDEX, SHARD_BYTES, pack, restored, rounded, unpack
from parklab.solids.recipe import (
    MODEL,
    TOY,
    TOY_BANKS,
    TOY_LONG,
    TOY_MIXTURE,
    TOY_RENDERED,
    SolidsTrainConfig,
    library_at,
)
from parklab.solids.renderer import render
from parklab.solids.train import SolidsTrainer
from parklab.sprites.data import ClipSize
from parklab.sprites.model import build_tokenizer, build_transformer
from parklab.sprites.training_state import load_state

CPU = torch.device("cpu")
QUICK = SolidsTrainConfig(
    small=True,
    autoencoder_steps=3,
    decoder_steps=2,
    steps=4,
    tokens_per_batch=96,
    autoencoder_batch=2,
    library=64,
    library_first=4,
    autoencoder_seconds=1e9,
    decoder_seconds=1e9,
    seconds=1e9,
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def trainer_in(folder, config=QUICK):
    folder.mkdir(exist_ok=True)
    return SolidsTrainer(folder, TOY, config, CPU)


# --- what it learns from
def library_in(folder, encode, version="v1"):
    shelves = ((TOY_RENDERED, (TOY_RENDERED,)), (TOY_LONG, (TOY_LONG,)))
    return Library(QUICK, CPU, shelves, TOY_MIXTURE, encode, lambda: version, folder)


def test_the_library_grows_with_the_steps_and_a_resumed_one_is_the_same(tmp_path):
    encoded = []

    def encode(clips):
        encoded.append(len(clips))
        return clips[:, :, :1, ::16, ::16].bfloat16()

    library = library_in(tmp_path, encode)
    first = library.pool(TOY_RENDERED, 2, 0)
    assert first.made == library_at(QUICK, 0) == 4
    later = library.pool(TOY_RENDERED, 2, 3)
    assert later.made == library_at(QUICK, 3) == 10
    for i in (0, 9):  # clip i is a function of seed and i
        clip = training_clip(QUICK.seed, i, "library 0")
        assert torch.equal(later.latents[i], encode(render([clip], TOY_RENDERED))[0])
        assert library.sentences[later.rows[i]] == clip.scene.sentence
    rendered = sum(encoded)
    again = library_in(tmp_path, encode).pool(TOY_RENDERED, 2, 3)
    assert torch.equal(again.latents[:10], later.latents[:10]) and sum(encoded) == rendered  # read, not rendered
    library_in(tmp_path, encode, "v2").pool(TOY_RENDERED, 2, 3)
    assert sum(encoded) == rendered + 10  # another encoder, so they are made anew
    assert not any(grammar.parse(sentence).held_out for sentence in library.sentences)


def test_shrunk_clips_are_means_of_areas():
    clips = fresh_clips(1, ClipSize(1, 64, 96), 0, CPU)
    small = shrunk(clips, ClipSize(1, 32, 48))
    torch.testing.assert_close(small, clips.view(1, 3, 1, 32, 2, 48, 2).mean((4, 6)))


def test_the_bank_cuts_parts_of_its_clips_by_seed():
    bank = Bank(TOY_BANKS, 0, CPU)
    one, same, other = (bank.cut(2, ClipSize(5, 32, 32), seed) for seed in (1, 1, 2))
    assert one.shape == (2, 3, 5, 32, 32) and torch.equal(one, same) and not torch.equal(one, other)


def test_the_tokenizer_knows_every_sentence():
    tokenizer = build_tokenizer(grammar.WORDS)
    for i in range(60):
        ids = tokenizer(any_clip(0, i, "words").scene.sentence).input_ids
        assert tokenizer.unk_token_id not in ids
        assert len(ids) <= grammar.LONGEST and ids[-1] == tokenizer.eos_token_id


def test_the_model_is_as_large_as_the_page_says():
    with torch.device("meta"):
        count = sum(p.numel() for p in build_transformer(MODEL).parameters())
    page = (Path(__file__).parents[1] / "docs/solids.md").read_text()
    assert f"{MODEL.layers} layers with {MODEL.heads} heads of {MODEL.head_dim} ({count / 1e6:.1f} M weights)" in page
    assert (
        f"{MODEL.layers * 8 * 1024**2 / 1e6:.0f} M weights for attention alone" in page
    )  # two attentions of 4 matrices


# --- training
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_state(tmp_path):
    """Stopped in every stage, after its state was saved; between a last step and its measurement too."""
    whole = trainer_in(tmp_path / "whole")
    whole.train()
    for index, (stage, step) in enumerate([(0, 2), (0, 3), (1, 1), (2, 1), (2, 3)]):
        part = trainer_in(tmp_path / "parts")
        assert part.resume() == (index > 0)

        def stop(part=part, stage=stage, step=step):
            part.save()
            if part.stages[stage].step == step:
                raise KeyboardInterrupt

        part.save_when_due = stop
        with pytest.raises(KeyboardInterrupt):
            part.train()
    last = trainer_in(tmp_path / "parts")
    assert last.resume()
    last.train()
    assert [stage.step for stage in last.stages] == [3, 2, 4]
    ours, theirs = (load_state(tmp_path / name / "state.safetensors")[0] for name in ("whole", "parts"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_killed_command_goes_on_from_its_state(tmp_path):
    options = "--small --autoencoder-steps 2 --decoder-steps 1 --tokens-per-batch 96 --autoencoder-batch 2 --device cpu"
    command = [sys.executable, "-m", "parklab.solids.train", "--out", str(tmp_path), *options.split()]
    command += ["--library", "64", "--library-first", "4", "--save-every", "0"]
    state = tmp_path / "state.safetensors"
    running = subprocess.Popen([*command, "--steps", "100000"], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        ends = time.monotonic() + 120
        while not (state.exists() and load_state(state)[1]["stages"][2]["step"] >= 3):
            assert running.poll() is None and time.monotonic() < ends
            time.sleep(0.2)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    stopped_at = load_state(state)[1]["stages"][2]["step"]
    done = subprocess.run([*command, "--steps", str(stopped_at + 2)], capture_output=True, text=True, check=True)
    assert f"transformer step {stopped_at}" in done.stdout
    assert load_state(state)[1]["stages"][2]["step"] == stopped_at + 2
    assert (tmp_path / "packed" / "packed.json").is_file() and not list(tmp_path.rglob("*.partial"))


def test_a_deadline_ends_a_run_that_has_steps_left(tmp_path):
    trainer = trainer_in(tmp_path / "short", replace(QUICK, steps=10**6))
    trainer.deadline = time.monotonic()  # already over
    trainer.train()
    assert [stage.step for stage in trainer.stages] == [0, 0, 0]
    assert (tmp_path / "short" / "state.safetensors").is_file()


# --- export
def test_rounding_keeps_every_weight_within_half_a_step_of_its_row():
    weights = torch.randn(20, 3, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 20).view(
        -1, 1, 1
    )
    numbers, step = rounded(weights)
    assert numbers.dtype == torch.int8 and numbers.shape == weights.shape
    error = (restored(numbers, step) - weights).abs().flatten(1)
    assert (error <= 0.5001 * step[:, None]).all()
    assert restored(*rounded(torch.zeros(2, 3))).abs().max() == 0


@pytest.mark.parametrize("name", ["../outside.json", "/outside.json", "a/../../outside.json"])
def test_names_of_a_packed_folder_reach_nothing_outside(tmp_path, name):
    packed = tmp_path / "in/packed"
    packed.mkdir(parents=True)
    (packed / INDEX).write_text(json.dumps({"files": {"model_index.json": "{}", name: "{}"}, "shards": []}))
    with pytest.raises(ValueError, match="packed: expected names below"):
        unpack(packed, tmp_path / "in/out")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [INDEX]


HOSTILE_INDEXES = {
    "a list": b"[]", "no shards": b'{"files": {}}', "shards of text": b'{"files": {}, "shards": "abc"}', "deep": b"[" * 100_000,
    "a number as text": b'{"files": {"a.json": 3}, "shards": []}', "junk": b"\xff\xfe", "half a letter": b'{"files": {"a.json": "\\ud800"}, "shards": []}',
    "a hook": b'{"files": {".git/hooks/pre-commit": "x"}, "shards": []}', "a hidden config": b'{"files": {".a.json": "x"}, "shards": []}',
    "code": b'{"files": {"transformer/model.py": "x"}, "shards": []}', "a shard that is a FIFO": b'{"files": {}, "shards": ["fifo.safetensors"]}',
    "a shard of junk": b'{"files": {}, "shards": ["junk.safetensors"]}', "a tensor of no file": b'{"files": {}, "shards": ["stray.safetensors"]}',
    "other steps": b'{"files": {}, "shards": ["steps.safetensors"]}', "weights as a hook": b'{"files": {}, "shards": ["hook.safetensors"]}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_INDEXES)
def test_a_hostile_packed_folder_is_refused_in_one_line_and_brings_configs_and_weights_alone(tmp_path, name):
    (tmp_path / INDEX).write_bytes(HOSTILE_INDEXES[name])
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk" * 99)
    numbers = {"a.safetensors:w": torch.ones(2, 3, dtype=torch.int8)}
    save_file({"w": torch.ones(2)}, tmp_path / "stray.safetensors")
    save_file(numbers | {"a.safetensors:w.step": torch.ones(5)}, tmp_path / "steps.safetensors")
    save_file({".git/hooks/a.safetensors:w": torch.ones(2)}, tmp_path / "hook.safetensors")
    with pytest.raises(ValueError, match=r"^packed: expected [^\n]*, got [^\n]*; [^\n]*\.$"):
        unpack(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_packed_folder_is_not_unpacked_through_a_link(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / INDEX).write_text(json.dumps({"files": {"authorized_keys.json": "x"}, "shards": []}))
    (tmp_path / "unpacked").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="packed: expected a folder to unpack to, got the link"):
        unpack(tmp_path, tmp_path / "unpacked")
    assert not list((tmp_path / "outside").iterdir())


def test_a_packed_folder_unpacks_to_a_pipeline_that_makes_videos(tmp_path):
    from diffusers import WanPipeline

    trainer = trainer_in(tmp_path / "run")
    trainer.train()
    folder = trainer.export()
    files = pack(folder, tmp_path / "packed")
    assert all(file.stat().st_size <= SHARD_BYTES + 2**16 for file in files)
    assert len(list((tmp_path / "packed").iterdir())) == len(files)
    unpacked = unpack(tmp_path / "packed", tmp_path / "unpacked")
    before, after = (WanPipeline.from_pretrained(each) for each in (folder, unpacked))
    for part in ("transformer", "vae", "text_encoder"):
        weights = dict(getattr(before, part).named_parameters())
        for name, p in getattr(after, part).named_parameters():
            row = weights[name].abs().flatten(1).amax(1) if p.ndim > 1 else weights[name].abs().amax()[None]
            error = (
                (p - weights[name]).abs().flatten(1).amax(1) if p.ndim > 1 else (p - weights[name]).abs().amax()[None]
            )
            assert (error <= row / 127).all()
    after.set_progress_bar_config(disable=True)
    frames = after(grammar.EXAMPLE, height=48, width=64, num_frames=5, num_inference_steps=2).frames
    assert frames.shape == (1, 5, 48, 64, 3)
    begun = trainer_in(tmp_path / "begun", replace(QUICK, autoencoder_steps=0, decoder_steps=0))
    begun.start_from(unpacked)
    begun.train()
    assert [stage.whole()["step"] for stage in begun.stages] == [3, 2, 8]
    with pytest.raises(FileNotFoundError, match=r"packed\.json"):
        unpack(folder, tmp_path / "nothing")


# --- the judge
def test_mirrored_clips_have_mirrored_answers():
    scene = Scene(Thing("red", "matte", "cube"), "rolls left", None, "stays")
    clips = render([clip_of(scene, 0)], judge.LOOK).expand(64, -1, -1, -1, -1)
    labels = torch.tensor([words_of(scene)]).expand(64, -1)
    shown, answers = judge.disturbed(clips, labels, torch.Generator().manual_seed(0))
    assert shown.shape == clips.shape
    motion = [name for name, _ in judge.QUESTIONS].index("motion")
    assert set(answers[:, motion].tolist()) == {grammar.MOTIONS.index(name) for name in ("rolls left", "rolls right")}
    redness = (shown[:, 0] - shown[:, 2]).clamp(min=0.3).sub(0.3)
    across = (redness.sum(2) * torch.arange(96)).sum(2) / redness.sum((2, 3)).clamp(min=1e-6)
    goes_left = across[:, -1] < across[:, 0]
    assert torch.equal(goes_left, answers[:, motion] == grammar.MOTIONS.index("rolls left"))
    assert all(len(options) > label for (_, options), label in zip(judge.QUESTIONS, words_of(scene), strict=True))


@pytest.mark.parametrize("kind", ["nothing", "junk", "other weights", "NaN", "a FIFO"])
def test_what_holds_no_judge_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "judge.safetensors"
    nan = {name: value.detach() * float("nan") for name, value in judge.Judge().state_dict().items()}
    make = {
        "nothing": path.touch, "junk": lambda: path.write_bytes(b"junk" * 99), "a FIFO": lambda: os.mkfifo(path),
        "other weights": lambda: save_file({"x": torch.ones(2)}, path), "NaN": lambda: save_file(nan, path),
    }  # fmt: skip
    make[kind]()
    with pytest.raises((ValueError, FileNotFoundError), match=r"^judge: expected weights[^\n]*, got [^\n]*$"):
        judge.load_judge(path, CPU)


@pytest.mark.parametrize("text", [None, "[]", '{"stages": {"a": null}}', "[" * 100_000])
def test_a_model_without_the_record_of_its_training_is_refused_before_the_work(tmp_path, text):
    if text is not None:
        (tmp_path / "training.json").write_text(text)
    with pytest.raises(ValueError, match=r"^model: expected the record of a training[^\n]*, got [^\n]*\.$"):
        following.trained(tmp_path)


def test_the_judge_learns_from_renders_and_keeps_its_weights(tmp_path):
    device = CPU
    clips, labels = judge.rendered([any_clip(0, i, "judge") for i in range(8)], device)
    assert clips.dtype == torch.uint8 and clips.shape[1:] == (3, 9, 64, 96)
    torch.manual_seed(0)
    model = judge.Judge(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses = []
    for _ in range(25):
        loss = judge._loss(model(clips.float() / 127.5 - 1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    whole = judge.Judge().eval()
    judge.save_judge(whole, tmp_path / "judge.safetensors", {"clips": 8})
    loaded = judge.load_judge(tmp_path / "judge.safetensors")
    shown = clips[:3].float() / 255
    assert judge.verdicts(loaded, shown) == judge.verdicts(whole.half().float(), shown)
    with pytest.raises(FileNotFoundError, match="judge"):
        judge.load_judge(tmp_path / "none")
    with pytest.raises(ValueError, match="clips"):
        judge.verdicts(whole, shown[0])


def test_scores_count_each_answer_by_kind():
    scenes = grammar.held_out_scenes(6)
    right = [judge.Verdict(s.first.colour, s.first.material, s.first.shape, s.motion) for s in scenes]
    found = [replace(right[0], colour="none"), *right[1:]]
    result = following.score(scenes, found)
    assert result["colour"] == pytest.approx(5 / 6) and result["motion"] == result["shape"] == result["material"] == 1
    assert result["by_kind"]["pair"]["colour"] == 0.5 and result["by_kind"]["sentence"]["colour"] == 1
    assert json.loads(json.dumps(result))["rows"][0]["prompt"] == scenes[0].sentence
