"""LoRAs: a file in a pipeline and in every method, and the recipe of the few-step one, which diffusers loads."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

from diffusers import WanPipeline  # noqa: E402

import tiny_pipelines as tiny  # noqa: E402
from parklab.sprites import CHECKPOINT, FEW_STEPS  # noqa: E402
from parklab.sprites.data import ClipSize  # noqa: E402
from parklab.sprites.distil import FILE, DistilConfig, Distillation, card_text  # noqa: E402
from parklab.sprites.following import look  # noqa: E402
from parklab.sprites.grammar import EXAMPLE, every_scene, parse  # noqa: E402
from parklab.sprites.model import SpriteModelConfig, build_pipeline  # noqa: E402
from parklab.studio.lora import METADATA, add_lora, judge_lora  # noqa: E402

# numpy's complaint about schedulers of diffusers
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A LoRA with alpha = 4 r, saved as diffusers' training scripts save one, and the latents of the pipeline that it
    came from.
    """
    folder = tmp_path_factory.mktemp("lora")
    pipe = tiny.wan()
    torch.manual_seed(7)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    layers = peft.utils.get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(folder, transformer_lora_layers=layers)
    wanted = tiny.run_wan(pipe, steps=2)
    plain = folder / "pytorch_lora_weights.safetensors"
    told = {
        "format": "pt",
        METADATA: json.dumps({"transformer.r": 2, "transformer.lora_alpha": 8, "transformer.megatron_core": "os"}),
    }
    save_file(load_file(plain), folder / "told.safetensors", metadata=told)
    return folder, wanted


def test_a_lora_gives_the_video_of_the_pipeline_that_it_came_from(made):
    folder, wanted = made
    pipe = tiny.wan()
    before = tiny.run_wan(pipe, steps=2)
    path = str(folder / "told.safetensors")
    add_lora(pipe, path, judge_lora(path))
    got = tiny.run_wan(pipe, steps=2)
    # alpha / r is a power of two: B is scaled before instead of after the product, and nothing rounds differently
    assert torch.equal(got, wanted) and not torch.equal(got, before)


def test_a_file_that_says_nothing_of_its_scale_has_scale_1_as_in_diffusers(made):
    folder, _ = made
    ours, theirs = tiny.wan(), tiny.wan()
    path = str(folder / "pytorch_lora_weights.safetensors")
    add_lora(ours, path, None)
    theirs.load_lora_weights(path)
    assert torch.equal(tiny.run_wan(ours, steps=2), tiny.run_wan(theirs, steps=2))


@pytest.mark.parametrize(
    "kind", ["pickle", "absent", "model", "cut", "metadata", "pattern", "nan", "other model", "scale", "rank"]
)
def test_what_is_no_lora_of_this_model_is_refused_in_one_line(made, tmp_path, capfd, kind):
    folder, _ = made
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    path = tmp_path / ("a.pt" if kind == "pickle" else "a.safetensors")
    metadata = {"format": "pt"}
    if kind == "pickle":
        path.write_bytes(b"\x80\x04N.")
    elif kind == "model":
        save_file(tiny.wan_transformer().state_dict(), path, metadata=metadata)
    elif kind != "absent":
        if kind == "metadata":
            metadata[METADATA] = "[" * 10
        if kind == "pattern":
            metadata[METADATA] = json.dumps(
                {"transformer.r": 2, "transformer.lora_alpha": 2, "transformer.alpha_pattern": {"to_q": 9}}
            )
        if kind == "scale":
            metadata[METADATA] = json.dumps({"transformer.r": 2, "transformer.lora_alpha": 1e300})
        if kind == "rank":
            first = next(iter(tensors))
            tensors[first] = torch.zeros(3, tensors[first].shape[1])
        if kind == "nan":
            tensors[next(iter(tensors))][0, 0] = float("nan")
        if kind == "other model":
            tensors = {name.replace("blocks.1.", "blocks.77."): value for name, value in tensors.items()}
        save_file(tensors, path, metadata=metadata)
        if kind == "cut":
            path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"^lora: expected a LoRA in a safetensors file, got .*; [^;\n]*\.$"):
        judge_lora(str(path))
        add_lora(tiny.wan(), str(path), None)
    assert "size mismatch" not in capfd.readouterr().err, "the loader's own lines are not said beside ours"


def test_a_file_that_changed_since_the_run_began_is_refused(made):
    with pytest.raises(ValueError, match="as it was when the run began, got other bytes; run again"):
        add_lora(tiny.wan(), str(made[0] / "told.safetensors"), "0" * 16)


def test_without_peft_the_install_line_is_named(made, monkeypatch):
    pipe = tiny.wan()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"peft: expected for LoRA files, got no such package; .*parklab\[lora\]"
    ):
        add_lora(pipe, str(made[0] / "told.safetensors"), None)


# The recipe of the few-step LoRA: it lowers the error, goes on after a kill, and diffusers loads the file


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
