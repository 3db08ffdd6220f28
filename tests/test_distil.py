"""The recipe of the few-step LoRA: it lowers the error, goes on after a kill, and diffusers loads the file."""

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from diffusers import WanPipeline

from parklab.sprites import CHECKPOINT, FEW_STEPS
from parklab.sprites.data import ClipSize
from parklab.sprites.distil import FILE, DistilConfig, Distillation, card_text
from parklab.sprites.following import look
from parklab.sprites.grammar import EXAMPLE, every_scene, parse
from parklab.sprites.model import SpriteModelConfig, build_pipeline
from parklab.studio.lora import add_lora, judge_lora

TINY = SpriteModelConfig(heads=1, head_dim=32, layers=1, ffn_dim=64, encoder_dim=8, decoder_dim=8, latent_channels=8)
CONFIG = DistilConfig(
    small=True, rank=4, guidance=20.0, teacher_steps=8, pool_tokens=800, steps=40, seconds=1e9, tokens_per_batch=200, warmup=1,
    evaluate=2, reference_steps=4, rate=3e-3,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny untrained pipeline whose velocity depends on its prompt."""
    torch.set_num_threads(1)
    pipe = build_pipeline(TINY)
    torch.manual_seed(0)
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.3)
    folder = tmp_path_factory.mktemp("tiny")
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    run = Distillation(tmp_path_factory.mktemp("whole"), CONFIG, CPU, model)
    run.train()
    return run


def error(run):
    """Of the student's samples in 4 steps, against those that the teacher made of the same noise."""
    pool = next(iter(run.pools.values()))
    states = run.states([run.sentences[row] for row in pool.rows])
    return (run.sample(pool.noise, states, 4, student=True) - pool.ends).square().mean().item()


def test_descents_bring_the_student_nearer_to_the_teacher(whole, model, tmp_path):
    (tmp_path / "pool.safetensors").symlink_to(whole.out / "pool.safetensors")
    untrained = Distillation(tmp_path, replace(CONFIG, steps=0), CPU, model)
    untrained.train()
    assert error(whole) < error(untrained)


def test_the_teacher_never_sees_a_held_out_sentence(whole):
    scenes = list(every_scene())
    assert all(scenes[row].held_out is None for pool in whole.pools.values() for row in pool.rows)


def test_a_killed_run_goes_on_as_if_it_had_not_been(whole, model, tmp_path, monkeypatch):
    killed = Distillation(tmp_path, replace(CONFIG, save_every=0.0), CPU, model)
    rollouts = []

    def third_is_killed(drawn, one=killed._student_rollout):
        if len(rollouts) == 2:
            raise KeyboardInterrupt
        rollouts.append(one(drawn))

    monkeypatch.setattr(killed, "_student_rollout", third_is_killed)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = Distillation(tmp_path, CONFIG, CPU, model)
    resumed.train()
    assert resumed.stage.step == whole.stage.step > killed.stage.step
    assert all(torch.equal(p, resumed.factors[name]) for name, p in whole.factors.items())
    with pytest.raises(ValueError, match="config: expected"):
        Distillation(tmp_path, replace(CONFIG, guidance=2.0), CPU, model).train()


def test_diffusers_loads_the_file_and_the_card_is_of_the_record(whole, model):
    whole.write_results()
    size = ClipSize(5, 48, 64)
    noise = whole.noise(1, size, 3)
    wanted = whole.sample(noise, whole.states([EXAMPLE]), 4, student=True)
    pipe = WanPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(whole.out, weight_name=FILE)
    got = pipe(
        EXAMPLE, height=size.height, width=size.width, num_frames=size.frames, num_inference_steps=4,
        guidance_scale=1.0, max_sequence_length=32, latents=noise, output_type="latent",
    ).frames  # fmt: skip
    # W + B A is summed before the product there and after it here: float32 rounding over 4 steps
    torch.testing.assert_close(got, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=0)
    record = json.loads((whole.out / "distillation.json").read_text())
    assert (whole.out / "MODEL_CARD.md").read_text() == card_text(record)
    assert {row["steps"] for row in record["results"]} == {4, 8}


def test_the_shipped_lora_is_small_its_card_is_of_its_record_and_it_beats_the_base_model_in_4_steps():
    record = json.loads((FEW_STEPS.parent / "distillation.json").read_text())
    assert record["bytes"] == FEW_STEPS.stat().st_size < 4 * 2**20
    assert (FEW_STEPS.parent / "MODEL_CARD.md").read_text() == card_text(record)
    for tokens in {row["tokens"] for row in record["results"]}:
        rows = {row["name"]: row for row in record["results"] if row["tokens"] == tokens}
        assert rows["LoRA"]["mse"] < rows["base"]["mse"] and not math.isnan(rows["LoRA"]["mse"])
        assert rows["LoRA"]["colour_and_shape"] > rows["base"]["colour_and_shape"]


def test_the_shipped_lora_loads_by_its_short_name_and_shows_what_the_prompt_asks_for_in_4_steps():
    pipe = WanPipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    add_lora(pipe, "few-steps", judge_lora("few-steps"))
    frames = pipe(
        EXAMPLE, height=64, width=96, num_frames=9, num_inference_steps=4, guidance_scale=1.0, max_sequence_length=32,
        generator=torch.Generator().manual_seed(0), output_type="pt",
    ).frames[0]  # fmt: skip
    seen, scene = look(frames.float().transpose(0, 1)), parse(EXAMPLE)
    assert (seen.colour, seen.shape) == (scene.colour, scene.shape)
