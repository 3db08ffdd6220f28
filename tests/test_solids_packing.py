"""Packed folders of the model of solids, from anywhere, and the judge of its videos."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from parklab.solids import following, grammar, judge, report
from parklab.solids.grammar import Scene, Thing
from parklab.solids.motion import any_clip, clip_of, words_of
from parklab.solids.packing import GROUP, INDEX, SHARD_BYTES, Kind, pack, restored, rounded, unpack
from parklab.solids.renderer import render
from test_solids_model import CPU, QUICK, trainer_in


# --- export
@pytest.mark.parametrize("bits", [6, 8])
def test_rounding_keeps_every_weight_within_half_a_step_of_its_group(bits):
    drawn = torch.Generator().manual_seed(0)
    weights = torch.randn(20, 30, 7, generator=drawn) * torch.logspace(-3, 2, 20).view(-1, 1, 1)
    numbers, step = rounded(weights, bits)
    groups = math.ceil(210 / GROUP)
    assert numbers.dtype == torch.uint8 and numbers.numel() == 20 * groups * GROUP * bits // 8
    assert step.shape == (20, groups) and step.dtype == torch.bfloat16
    error = (restored(numbers, step, Kind(bits, [20, 30, 7])) - weights).abs().flatten(1)
    each = step.float().repeat_interleave(GROUP, 1)[:, :210]
    assert (error <= 0.5001 * each).all()
    # the step itself: the group's largest number and 2**-8 for each of its two roundings
    padded = torch.nn.functional.pad(weights.flatten(1), (0, groups * GROUP - 210)).unflatten(1, (-1, GROUP))
    assert (step.float() <= padded.abs().amax(2) / (2 ** (bits - 1) - 1) * (1 + 2**-7)).all()
    assert restored(*rounded(torch.zeros(2, 3), bits), Kind(bits, [2, 3])).abs().max() == 0


@pytest.mark.parametrize("name", ["../outside.json", "/outside.json", "a/../../outside.json"])
def test_names_of_a_packed_folder_reach_nothing_outside(tmp_path, name):
    packed = tmp_path / "in/packed"
    packed.mkdir(parents=True)
    (packed / INDEX).write_text(
        json.dumps({"files": {"model_index.json": "{}", name: "{}"}, "shards": [], "rounded": {}})
    )
    with pytest.raises(ValueError, match="packed: expected names below"):
        unpack(packed, tmp_path / "in/out")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [INDEX]


KIND = b'{"files": {}, "shards": ["steps.safetensors"], "rounded": {"a.safetensors:w": %b}}'
HOSTILE_INDEXES = {
    "a list": b"[]", "no shards": b'{"files": {}}', "shards of text": b'{"files": {}, "shards": "abc", "rounded": {}}', "deep": b"[" * 100_000,
    "a number as text": b'{"files": {"a.json": 3}, "shards": [], "rounded": {}}', "junk": b"\xff\xfe", "half a letter": b'{"files": {"a.json": "\\ud800"}, "shards": [], "rounded": {}}',
    "a hook": b'{"files": {".git/hooks/pre-commit": "x"}, "shards": [], "rounded": {}}', "a hidden config": b'{"files": {".a.json": "x"}, "shards": [], "rounded": {}}',
    "code": b'{"files": {"transformer/model.py": "x"}, "shards": [], "rounded": {}}', "a shard that is a FIFO": b'{"files": {}, "shards": ["fifo.safetensors"], "rounded": {}}',
    "a shard of junk": b'{"files": {}, "shards": ["junk.safetensors"], "rounded": {}}', "a tensor of no file": b'{"files": {}, "shards": ["stray.safetensors"], "rounded": {}}',
    "steps of nothing rounded": b'{"files": {}, "shards": ["steps.safetensors"], "rounded": {}}', "no rounded": b'{"files": {}, "shards": []}',
    "other steps": KIND % b'{"bits": 8, "shape": [2, 3]}', "other bits": KIND % b'{"bits": 64, "shape": [2, 3]}',
    "a shape beyond memory": KIND % b'{"bits": 8, "shape": [9999999999, 9999999999]}', "a shape of text": KIND % b'{"bits": 8, "shape": "ab"}',
 "weights as a hook": b'{"files": {}, "shards": ["hook.safetensors"], "rounded": {}}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_INDEXES)
def test_a_hostile_packed_folder_is_refused_in_one_line_and_brings_configs_and_weights_alone(tmp_path, name):
    (tmp_path / INDEX).write_bytes(HOSTILE_INDEXES[name])
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk" * 99)
    numbers = {"a.safetensors:w": torch.ones(2, 3, dtype=torch.uint8)}
    save_file({"w": torch.ones(2)}, tmp_path / "stray.safetensors")
    save_file(numbers | {"a.safetensors:w.step": torch.ones(5)}, tmp_path / "steps.safetensors")
    save_file({".git/hooks/a.safetensors:w": torch.ones(2)}, tmp_path / "hook.safetensors")
    with pytest.raises(ValueError, match=r"^packed: expected [^\n]*, got [^\n]*; [^\n]*\.$"):
        unpack(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_packed_folder_is_not_unpacked_through_a_link(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / INDEX).write_text(json.dumps({"files": {"authorized_keys.json": "x"}, "shards": [], "rounded": {}}))
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
    with torch.no_grad():
        trainer.flow.average["transformer.proj_out.bias"] += 1
    again = pack(trainer.export(), tmp_path / "packed")  # over the earlier one, whose files are gone
    assert sorted((tmp_path / "packed").iterdir()) == sorted(again) != sorted(files)
    unpacked = unpack(tmp_path / "packed", tmp_path / "unpacked")
    before, after = (WanPipeline.from_pretrained(each) for each in (folder, unpacked))
    for part in ("transformer", "vae", "text_encoder"):
        weights = dict(getattr(before, part).named_parameters())
        for name, p in getattr(after, part).named_parameters():
            rows = lambda x: x.detach().flatten(1) if x.ndim > 1 else x.detach()[None]  # noqa: E731
            largest, error = rows(weights[name]).abs().amax(1), rows(p - weights[name]).abs().amax(1)
            # half a step of a row's largest group, both roundings of the step, and half precision's own
            step = largest / (31 if part == "transformer" else 127) * (1 + 2**-7)
            assert (error <= 0.5 * step + largest * 2**-11 + 2**-25).all()
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


@pytest.mark.parametrize("kind", ["nothing", "junk", "other weights", "NaN", "a FIFO", "steps of another shape"])
def test_what_holds_no_judge_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "judge.safetensors"
    nan = {name: value.detach() * float("nan") for name, value in judge.Judge().state_dict().items()}
    make = {
        "nothing": path.touch, "junk": lambda: path.write_bytes(b"junk" * 99), "a FIFO": lambda: os.mkfifo(path),
        "other weights": lambda: save_file({"x": torch.ones(2)}, path), "NaN": lambda: save_file(nan, path),
        "steps of another shape": lambda: save_file(
            {"places": torch.ones(9, dtype=torch.uint8), "places.step": torch.ones(3, dtype=torch.bfloat16)}, path
        ),
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
    apart = [(a - b).abs().max() for a, b in zip(loaded(shown * 2 - 1), whole(shown * 2 - 1), strict=True)]
    assert max(apart) < 0.05, "of scores near 1, from weights in 8 bits"
    assert judge.judge_record(tmp_path / "judge.safetensors") == {"clips": 8}
    with pytest.raises(FileNotFoundError, match="judge"):
        judge.load_judge(tmp_path / "none")
    with pytest.raises(ValueError, match="clips"):
        judge.verdicts(whole, shown[0])


def test_the_judge_in_the_package_is_right_on_renders_it_was_not_trained_on():
    """Of its own record; a sentence in eight may be missed in one of the four words."""
    told = judge.judge_record()["held_out_renders"]
    assert all(told[name] >= bar + report.JUDGE_ABOVE for name, bar in following.BARS.items())
    scenes = grammar.held_out_scenes(8, seed=5)
    seen = judge.accuracy(judge.load_judge(), scenes, judge.LOOK, CPU, seed=5)
    assert sum(seen[name] for name in following.BARS) >= 4 - 2 / 8
    assert sum(seen[f"shuffled_{name}"] for name in following.BARS) < 2, "with the sentences exchanged"


def test_scores_count_each_answer_by_kind():
    scenes = grammar.held_out_scenes(6)
    right = [judge.Verdict(s.first.colour, s.first.material, s.first.shape, s.motion) for s in scenes]
    found = [replace(right[0], colour="none"), *right[1:]]
    result = following.score(scenes, found)
    assert result["colour"] == pytest.approx(5 / 6) and result["motion"] == result["shape"] == result["material"] == 1
    assert result["by_kind"]["pair"]["colour"] == 0.5 and result["by_kind"]["sentence"]["colour"] == 1
    assert json.loads(json.dumps(result))["rows"][0]["prompt"] == scenes[0].sentence
