"""The small trained model in the box: grammar, renderer, following rule, training script, shipped checkpoint."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parklab.sprites import CHECKPOINT, card, following, grammar
from parklab.sprites.corpus import RADIX
from parklab.sprites.data import ClipSize, render
from parklab.sprites.evaluation import evaluate
from parklab.sprites.gradients import orthogonalised
from parklab.sprites.model import (
    SpriteModelConfig,
    build_autoencoder,
    build_pipeline,
    build_text_encoder,
    build_tokenizer,
)
from parklab.sprites.recipe import TrainConfig, train_scenes
from parklab.sprites.reconstruction import WholeClips
from parklab.sprites.train import Trainer

TINY = SpriteModelConfig(heads=1, head_dim=32, layers=1, ffn_dim=64, encoder_dim=8, decoder_dim=8, latent_channels=8)
SMALL = TrainConfig(
    small=True,
    autoencoder_steps=4,
    decoder_steps=2,
    steps=4,
    tokens_per_batch=96,
    autoencoder_batch=2,
    pool=64,
    evaluate=2,
    autoencoder_seconds=1e9,
    decoder_seconds=1e9,
    seconds=1e9,
)
shipped = pytest.mark.skipif(not (CHECKPOINT / "model_index.json").is_file(), reason="no checkpoint in this tree")


# --- grammar
# ---------------------------------------------------------------------------------------------------------------
def test_every_sentence_parses_to_its_own_scene():
    scenes = list(grammar.every_scene())
    assert len(scenes) == grammar.SENTENCES == 8 * 6**4
    assert all(grammar.parse(scene.sentence) == scene for scene in scenes[::37])
    assert grammar.parse("  An ORANGE star  bounces over grey bricks. ").shape == "star"


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("a red cat moves right over blue waves", ["'cat'", "circle", "triangle"]),
        ("a red circle moves right", ["expected", "for example"]),
        ("a red circle moves right over orange waves", ["'orange'", "ground", "grey"]),
        ("a grey circle bounces over blue waves", ["'grey'", "colour", "white"]),
        ("", ["expected"]),
    ],
)
def test_a_wrong_prompt_is_named_in_one_line(prompt, names):
    with pytest.raises(ValueError, match="prompt:") as error:
        grammar.parse(prompt)
    assert "\n" not in str(error.value)
    assert all(name in str(error.value) for name in names)


def test_held_out_sentences_never_train():
    training = {tuple(row) for row in train_scenes().tolist()}
    held = grammar.held_out_scenes(50)
    assert len({scene.sentence for scene in held}) == 50
    assert [scene.held_out for scene in held] == ["pair"] * 25 + ["sentence"] * 25
    assert not any(scene.indices in training for scene in held)
    pairs = {row[:2] for row in training}
    assert all(scene.indices[:2] not in pairs for scene in held[:25])
    assert all(scene.indices[:2] in pairs for scene in held[25:])
    with pytest.raises(ValueError, match="count"):
        grammar.held_out_scenes(10_000)


# --- renderer and rule
# -----------------------------------------------------------------------------------------------------
def test_clips_are_seeded_and_independent_of_the_global_generator():
    scenes = grammar.held_out_scenes(2)
    torch.manual_seed(1)
    first = render(scenes, ClipSize(5, 48, 64), 3)
    torch.manual_seed(2)
    assert torch.equal(first, render(scenes, ClipSize(5, 48, 64), 3))
    assert not torch.equal(first, render(scenes, ClipSize(5, 48, 64), 4))
    assert first.shape == (2, 3, 5, 48, 64)
    assert first.abs().max() <= 1


@pytest.mark.parametrize("size", [(16, 48, 64), (17, 50, 64), (17, 48, 65), (0, 16, 16)])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(ValueError, match="clip size"):
        ClipSize(*size)


def test_the_paper_size_has_the_paper_tokens():
    assert ClipSize(81, 400, 576).tokens == 75_600


def test_the_rule_is_right_on_true_renders_and_at_chance_on_shuffled_prompts():
    result = following.check_the_rule(grammar.held_out_scenes(36, seed=1), ClipSize(9, 128, 160))
    assert result["true_renders"]["colour_and_shape"] >= 0.97
    assert result["shuffled_prompts"]["colour_and_shape"] <= 0.15
    assert following.look(torch.zeros(3, 5, 32, 32)).colour is None
    with pytest.raises(ValueError, match="clip"):
        following.look(torch.zeros(5, 32, 32))


# --- model and training
# ----------------------------------------------------------------------------------------------------
def test_whole_clips_equal_the_stock_chunks():
    torch.manual_seed(0)
    stock = build_autoencoder(TINY).double()
    for p in stock.parameters():  # nothing may be zero, or a path would go unchecked
        torch.nn.init.normal_(p, std=0.2)
    whole = build_autoencoder(TINY).double()
    whole.load_state_dict(stock.state_dict())
    whole = WholeClips(whole)
    for frames in (1, 5, 13):
        clips = torch.randn(2, 3, frames, 32, 48, dtype=torch.float64)
        with torch.no_grad():
            latents = stock.encode(clips).latent_dist.mode()
            torch.testing.assert_close(whole.encode(clips).mode(), latents)
            torch.testing.assert_close(whole.decode(latents).clamp(-1, 1), stock.decode(latents).sample)


@pytest.mark.parametrize("shape", [(3, 24, 60), (2, 50, 20)])
def test_orthogonalised_updates_keep_directions_and_level_their_sizes(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(orthogonalised(matrices), full_matrices=False)
    assert sizes.min() > 0.6  # the quintic leaves singular values between 0.68 and 1.14
    assert sizes.max() < 1.2
    whole_left, _, whole_right = torch.linalg.svd(matrices, full_matrices=False)
    torch.testing.assert_close(left @ right, whole_left @ whole_right)


def test_training_embeds_prompts_as_the_pipeline_does(tmp_path):
    trainer = Trainer(tmp_path, TINY, SMALL, torch.device("cpu"))
    flow = trainer.flow
    pipeline = build_pipeline(TINY, text_encoder=flow.text, transformer=flow.transformer)
    scenes = grammar.held_out_scenes(3)
    rows = (torch.tensor([s.indices for s in scenes]) * RADIX).sum(1)
    with torch.no_grad():
        ours = flow.text_states(torch.cat([rows, torch.tensor([len(flow.token_table) - 1])]), 24)
        theirs, _ = pipeline.encode_prompt(
            [s.sentence for s in scenes] + [""], do_classifier_free_guidance=False, max_sequence_length=24
        )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_untrained_text_encoder_already_tells_word_orders_apart():
    encoder, tokenizer = build_text_encoder(SpriteModelConfig()).eval(), build_tokenizer()
    sentences = ["a blue ring bounces over green dots", "a green ring bounces over blue dots"]
    with torch.no_grad():
        first, second = (encoder(**tokenizer(s, return_tensors="pt")).last_hidden_state[0] for s in sentences)
    for one, other in (
        (first[1], second[5]),
        (first[5], second[1]),
    ):  # the same word as the sprite's and as the ground's colour
        assert (one - other).norm() > 0.2 * one.norm()


def test_tokenizer_knows_every_word_and_ends_the_sentence():
    tokenizer = build_tokenizer()
    for scene in list(grammar.every_scene())[::401]:
        ids = tokenizer(scene.sentence).input_ids
        assert tokenizer.unk_token_id not in ids
        assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer("").input_ids == [tokenizer.eos_token_id]


def test_training_resumes_where_it_stopped_and_exports_a_loadable_folder(tmp_path):
    from dataclasses import replace

    from diffusers import WanPipeline

    half = Trainer(tmp_path / "resumed", TINY, replace(SMALL, steps=2), torch.device("cpu"))
    (tmp_path / "resumed").mkdir()
    half.train()
    rest = Trainer(tmp_path / "resumed", TINY, SMALL, torch.device("cpu"))
    assert rest.resume()
    assert [stage.step for stage in rest.stages] == [4, 2, 2]
    for name, p in half.parameters.items():
        assert torch.equal(p, rest.parameters[name])
        for part, value in half.descents[2].state(p).items():
            assert torch.equal(value, rest.descents[2].state(rest.parameters[name])[part])
    rest.train()
    folder = rest.export()
    evaluate(folder, tmp_path / "samples.png", SMALL, torch.device("cpu"))
    assert rest.stages[2].step == 4
    assert not list(tmp_path.rglob("*.partial"))
    assert not [f for f in folder.rglob("*") if f.suffix in (".bin", ".pt", ".ckpt", ".pkl")]
    text = card.write_card(folder).read_text()
    assert "Does it follow the prompt?" in text
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        grammar.EXAMPLE, height=48, width=64, num_frames=5, num_inference_steps=2, guidance_scale=2.0
    ).frames
    assert frames.shape == (1, 5, 48, 64, 3)
    with pytest.raises(ValueError, match="seed"):
        Trainer(tmp_path / "resumed", TINY, replace(SMALL, seed=1), torch.device("cpu")).resume()

    shutil.rmtree(folder / "transformer")  # weights-only start, with the parts that are there
    begun = Trainer(tmp_path / "begun", TINY, replace(SMALL, autoencoder_steps=0, decoder_steps=0), torch.device("cpu"))
    begun.start_from(folder)
    for name, p in begun.autoencoding.parameters.items():
        assert torch.equal(p, rest.parameters[name].half().float())
    assert torch.allclose(begun.autoencoding.std, rest.autoencoding.std)
    untouched = {name: p.clone() for name, p in begun.autoencoding.parameters.items()}
    begun.flow.train(lambda: None)
    assert all(torch.equal(p, untouched[name]) for name, p in begun.autoencoding.parameters.items())
    assert [stage.whole()["step"] for stage in begun.stages] == [4, 2, 8]
    with pytest.raises(ValueError, match="model"):
        Trainer(tmp_path / "begun", replace(TINY, layers=2), SMALL, torch.device("cpu")).start_from(folder)


def test_the_card_needs_its_records(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"training\.json"):
        card.write_card(tmp_path)


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, parklab.sprites.grammar; sys.exit(any(m in sys.modules for m in ('diffusers', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the shipped checkpoint
# ------------------------------------------------------------------------------------------------
@shipped
def test_the_shipped_checkpoint_is_small_pickle_free_and_documented():
    files = [file for file in Path(CHECKPOINT).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 40 * 2**20
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".md", ".svg", ".png"}
    records = [json.loads((CHECKPOINT / name).read_text()) for name in ("training.json", "following.json")]
    size = sum(file.stat().st_size for file in files if file.name != "MODEL_CARD.md")
    assert (CHECKPOINT / "MODEL_CARD.md").read_text() == card.card_text(*records, size)
    assert records[1]["results"][0]["prompts"] == 50


@shipped
def test_the_shipped_model_meets_the_bar_on_held_out_prompts():
    results = json.loads((CHECKPOINT / "following.json").read_text())["results"]
    assert all(result["colour_and_shape"] >= card.BAR for result in results)


@shipped
def test_the_shipped_model_loads_and_makes_finite_frames_that_depend_on_the_prompt():
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(CHECKPOINT)
    pipeline.set_progress_bar_config(disable=True)
    scenes = [grammar.parse(grammar.EXAMPLE), grammar.parse("a white ring bounces over green bricks")]
    clips = [next(iter(following.generate(pipeline, [scene], ClipSize(5, 96, 128), steps=3))) for scene in scenes]
    assert all(clip.shape == (3, 5, 96, 128) and bool(clip.isfinite().all()) for clip in clips)
    assert (clips[0] - clips[1]).abs().mean() > 0.02
