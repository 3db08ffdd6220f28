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
from torch.utils.flop_counter import FlopCounterMode

from parklab.solids import grammar, judge
from parklab.solids.library import Bank, Library, fresh_clips, shrunk
from parklab.solids.motion import any_clip, training_clip
from parklab.solids.packing import GROUP, INDEX
from parklab.solids.recipe import (
    CONSTANT,
    LONG,
    MODEL,
    SHRUNK,
    TOY,
    TOY_BANKS,
    TOY_LONG,
    TOY_RENDERED,
    SolidsTrainConfig,
    late_fall,
    library_at,
)
from parklab.solids.renderer import render
from parklab.solids.train import SolidsTrainer
from parklab.sprites import gradients
from parklab.sprites.data import ClipSize
from parklab.sprites.model import build_autoencoder, build_text_encoder, build_tokenizer, build_transformer
from parklab.sprites.recipe import SMALL_MIXTURE
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
    library_step=2.0,
    autoencoder_seconds=1e9,
    decoder_seconds=1e9,
    seconds=1e9,
)


def trainer_in(folder, config=QUICK):
    folder.mkdir(exist_ok=True)
    return SolidsTrainer(folder, TOY, config, CPU)


# --- what it learns from
def library_in(folder, encode, version="v1"):
    shelves = ((TOY_RENDERED, (TOY_RENDERED,)), (TOY_LONG, (TOY_LONG,)))
    return Library(QUICK, CPU, shelves, SMALL_MIXTURE, encode, lambda: version, folder)


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
    library.close()
    again = library_in(tmp_path, encode).pool(TOY_RENDERED, 2, 3)
    assert torch.equal(again.latents[:10], later.latents[:10]) and sum(encoded) == rendered  # read, not rendered
    library_in(tmp_path, encode, "v2").pool(TOY_RENDERED, 2, 3)
    assert sum(encoded) == rendered + 10  # another encoder, so they are made anew
    assert not any(grammar.parse(sentence).held_out for sentence in library.sentences)


def test_a_library_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    library = library_in(tmp_path / "file", lambda clips: clips[:, :, :1, ::16, ::16].bfloat16())
    assert library.pool(TOY_RENDERED, 2, 3).made == 10
    library.close()
    assert "a resumed run will render its clips again" in capsys.readouterr().out


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
    assert f"{MODEL.layers} layers with {MODEL.heads} heads of {MODEL.head_dim} ({count / 1e6:.1f} M weights, " in page
    width = MODEL.heads * MODEL.head_dim
    attention = MODEL.layers * 8 * width**2  # two attentions of 4 matrices
    assert f"{attention / 1e6:.0f} M of them in attention" in page
    assert 60e6 <= count <= 150e6 and MODEL.heads >= 8 and MODEL.layers >= 12
    with torch.device("meta"):
        vae = sum(p.numel() for p in build_autoencoder(MODEL).parameters())
        text = sum(p.numel() for p in build_text_encoder(MODEL, grammar.WORDS).parameters())
    packed = count * (6 + 16 / GROUP) / 8 + vae * (8 + 16 / GROUP) / 8 + 4 * text
    assert packed <= 120e6 and f"in files below 15 MiB: {packed / 1e6:.0f} MB" in page


def test_the_page_says_how_much_a_step_computes():
    """Forward and backward, three times the forward pass."""
    steps = []
    with torch.device("meta"):
        transformer = build_transformer(MODEL)
        for size in (*SHRUNK, LONG):
            clips = max(SolidsTrainConfig().least_clips, SolidsTrainConfig().tokens_per_batch // size.tokens)
            latents = torch.empty(1, 48, (size.frames + 3) // 4, size.height // 8, size.width // 8)
            with FlopCounterMode(display=False) as counted, torch.no_grad():
                transformer(latents, torch.empty(1), torch.empty(1, 32, MODEL.text_dim), return_dict=False)
            steps.append(3 * clips * counted.get_total_flops() / 1e12)
    page = (Path(__file__).parents[1] / "docs/solids.md").read_text()
    assert f"{steps[0]:.0f} to {steps[2]:.0f} TFLOP" in page and f"{steps[3]:.0f} TFLOP at 160 x 256" in page


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
    trainer.stop()  # already over
    trainer.train()
    assert [stage.step for stage in trainer.stages] == [0, 0, 0]
    assert (tmp_path / "short" / "state.safetensors").is_file()


def test_the_rate_follows_the_planned_time_over_all_calls():
    """Even while a call ends and another begins, and down at the end of the plan alone."""
    rates = [late_fall(progress) for progress in (0.0, 0.3, CONSTANT, 0.8, 1.0)]
    assert rates == pytest.approx([1, 1, 1, 0.5, 0.01])


def test_a_call_that_finishes_lets_the_rate_fall_by_its_end(tmp_path):
    plan = replace(QUICK, steps=10**6, seconds=1e6)
    first = trainer_in(tmp_path / "run", plan)
    first.save_when_due = lambda: first.stop() if first.flow.stage.step >= 2 else None
    first.train()
    stage = first.flow.stage
    assert stage.step == 2 and stage.progress < 1e-3 and stage.rate(1.0, 1) == 1
    last = SolidsTrainer(tmp_path / "run", TOY, plan, CPU, finish=True)
    assert last.resume() and last.flow.stage.step == 2
    last.deadline = time.monotonic() + last.seconds["last_showing"] + 1.0
    last.train()
    assert last.flow.stage.progress >= 0.99 and last.flow.stage.rate(1.0, 1) <= 0.05


def test_a_call_leaves_weights_samples_loss_and_times(tmp_path):
    trainer = trainer_in(tmp_path / "run")
    trainer.train()
    trainer.show()
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"state.safetensors", "checkpoint", "packed", "samples.png", "loss.svg", "times.json"} <= left
    times = json.loads((tmp_path / "run/times.json").read_text())
    assert times["stages"]["transformer"]["steps"] == 4 and times["library"][0]["rendered"] > 0


def test_a_command_that_is_asked_to_end_writes_its_results_first(tmp_path):
    options = "--small --autoencoder-steps 2 --decoder-steps 1 --tokens-per-batch 96 --autoencoder-batch 2 --device cpu"
    command = [sys.executable, "-m", "parklab.solids.train", "--out", str(tmp_path), *options.split()]
    command += ["--library", "64", "--library-first", "4", "--steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            if line.startswith("transformer step"):
                running.send_signal(signal.SIGTERM)
                break
        rest = running.stdout.read()
    assert running.returncode == 0 and "steps of the transformer" in rest
    assert (tmp_path / "packed" / INDEX).is_file() and (tmp_path / "samples.png").is_file()


def test_one_report_has_everything_the_page_needs(tmp_path):
    trainer = trainer_in(tmp_path / "run")
    trainer.train()
    trainer.show()
    judge.save_judge(judge.Judge(), tmp_path / "judge.safetensors", {})
    command = [sys.executable, "-m", "parklab.solids.report", "--model", str(tmp_path / "run/packed")]
    command += ["--judge", str(tmp_path / "judge.safetensors"), "--out", str(tmp_path / "report"), "--device", "cpu"]
    sizes = ["--size", "5", "48", "64", "--long-size", "9", "48", "48"]
    fewer = ["--count", "3", "--long", "1", "--steps", "2", "--speed-seconds", "0"]
    subprocess.run([*command, *sizes, *fewer], check=True, capture_output=True)
    made = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"samples.png", "held-out.png", "held-out-0.webp", "long.png", "long-0.webp", "times.json"} <= made
    record = json.loads((tmp_path / "report/following.jsonl").read_text())
    assert record["prompts"] == 3 and record["training"]["stages"]["transformer"]["steps"] == 4
    assert set(record["judge_on_renders"]) >= {"colour", "shuffled_colour"}
    (tmp_path / "judge.safetensors").write_bytes(b"junk")  # one part fails, the others are made
    command[command.index("--out") + 1] = str(tmp_path / "without")
    failed = subprocess.run([*command, *sizes, *fewer], check=False, capture_output=True, text=True)
    assert failed.returncode == 1 and "got none of following" in failed.stderr
    assert {"samples.png", "long.png"} <= {path.name for path in (tmp_path / "without").iterdir()}


def test_a_step_whose_graph_does_not_fit_is_computed_without_it(monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    monkeypatch.setattr(gradients, "GraphedGradients", full)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    descent = gradients.Descent({"weight": weight}, set())
    for given in (3.0, 4.0):
        report = descent.gradients(lambda x: ((weight * x).sum(), x), (torch.tensor([given]),), "size")
        assert report == given and weight.grad == given
    assert capsys.readouterr().out.count("no graph for size") == 1
