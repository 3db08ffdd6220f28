"""`park generate`, `park compare` and `park ablation` on a tiny pipeline: what is written, repeated, resumed and
measured.
"""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("av")

from parkattn.engine import Engine
from parkattn.ops.attend.definition import dense_attention
from parkattn.park import Park, ParkConfig
from parkattn.planned import plan_key
from parkattn.site import CallSite
from parklab.experiments import ablation
from parklab.metrics.budget import CLOSE_ENOUGH, solve_budget
from parklab.metrics.retrieval import attention_recall
from parklab.research import ResearchConfig
from parklab.scene import clustered_scene
from parklab.store import sealed
from parklab.studio import checkpoints, compare, generate, video
from parklab.studio.gain import what_was_saved, why_no_gain
from parklab.studio.observe import Observer, measured, sampled_recall
from parklab.studio.request import Request, config_for, fit_to_pipeline, understood

CASE = compare.Case("", "a red circle moves right over blue waves", 0)
SMALL = {"steps": 4, "height": 32, "width": 48, "frames": 5, "text_tokens": 32, "guidance": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained pipeline of the shipped model's classes, as a folder."""
    from parklab.sprites.model import SpriteModelConfig, build_pipeline

    folder = tmp_path_factory.mktemp("models") / "tiny"
    shape = SpriteModelConfig(
        heads=2, head_dim=32, layers=2, ffn_dim=64, encoder_dim=8, decoder_dim=8, latent_channels=8
    )
    pipe = build_pipeline(shape)
    # an untrained output layer predicts zero, and every method would give the same frames
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder


def asked(model, **changes) -> Request:
    config = {"query_clusters": 2, "key_clusters": 4, "top_p": 0.5}
    return Request(
        prompt="a red circle moves right over blue waves", model=str(model), changes=config, **(SMALL | changes)
    )


def test_generate_writes_a_video_and_a_record_that_repeats_it(model, tmp_path):
    reports = []
    record, made = generate.generate_video(asked(model), tmp_path / "a.mp4", progress=reports.append)
    assert made and sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.mp4"]
    assert video.read_mp4(tmp_path / "a.mp4").shape == (5, 32, 48, 3)
    assert record == json.loads((tmp_path / "a.json").read_text())
    assert [(r.step, r.phase) for r in reports] == [
        (0, "dense"),
        (1, "refresh"),
        (2, "refresh"),
        (3, "refresh"),
        (4, "done"),
    ]
    assert [row["phase"] for row in record["measured"]["steps"]] == ["dense", "refresh", "refresh", "refresh"]
    assert record["measured"]["density"] == pytest.approx(
        np.mean([row["density"] for row in record["measured"]["steps"]])
    )
    assert 0 < record["measured"]["density_sparse_steps"] < 1
    again = Request(**{name: value for name, value in record["resolved"].items() if name != "config"})
    generate.generate_video(again, tmp_path / "b.mp4")
    assert np.array_equal(video.read_mp4(tmp_path / "a.mp4"), video.read_mp4(tmp_path / "b.mp4"))


def test_a_second_run_is_done_already_and_other_settings_are_refused(model, tmp_path):
    path = tmp_path / "a.mp4"
    generate.generate_video(asked(model), path)
    before = path.stat().st_mtime_ns
    assert generate.generate_video(asked(model), path)[1] is False
    with pytest.raises(ValueError, match=r"seed = 0, asked 1.*--overwrite"):
        generate.generate_video(asked(model, seed=1), path)
    assert path.stat().st_mtime_ns == before
    assert generate.generate_video(asked(model, seed=1), path, overwrite=True)[1] is True
    made, said = path.read_bytes(), []
    path.write_bytes(b"cut short")
    assert generate.generate_video(asked(model, seed=1), path, say=said.append)[1] is True
    assert path.read_bytes() == made and (tmp_path / "a.aside-1.mp4").read_bytes() == b"cut short"
    assert (
        "a.mp4 is not the file that a.json describes; it is made again" in said[0]
        and "kept as a.aside-1.mp4" in said[1]
    )


def test_a_record_holds_what_was_left_to_the_pipeline_and_a_missing_video_is_made_again(model, tmp_path):
    path = tmp_path / "a.mp4"
    record, _ = generate.generate_video(asked(model, guidance=None, text_tokens=None), path)
    assert (record["resolved"]["guidance"], record["resolved"]["text_tokens"]) == (5.0, 512)
    made = path.read_bytes()
    path.unlink()
    assert generate.generate_video(asked(model, guidance=None, text_tokens=None), path)[1] is True
    assert path.read_bytes() == made


def test_a_text_that_would_be_cut_is_refused_and_one_that_just_fits_is_not(model):
    pipe = checkpoints.load_pipeline(model)  # a token a word, and one for the end: 9
    assert fit_to_pipeline(asked(model, text_tokens=9), pipe).text_tokens == 9
    with pytest.raises(
        ValueError, match=r"at least 9 for this prompt, got 8, which would cut it; leave out --text-tokens\."
    ):
        fit_to_pipeline(asked(model, text_tokens=8), pipe)
    with pytest.raises(ValueError, match=r"at least 13 for this negative, got 9"):
        fit_to_pipeline(asked(model, text_tokens=9, guidance=3.0, negative="blue " * 12), pipe)
    # beyond the pipeline's own 512 leaving the option out would not help
    long = dataclasses.replace(asked(model, text_tokens=None), prompt="red " * 512)
    with pytest.raises(ValueError, match=r"at least 513 .* got 512, .*; shorten the prompt, or pass --text-tokens 513"):
        fit_to_pipeline(long, pipe)
    assert fit_to_pipeline(dataclasses.replace(long, text_tokens=513), pipe).text_tokens == 513


def test_the_template_of_hunyuanvideo_is_not_counted_as_prompt():
    import inspect

    import tiny_pipelines as tiny

    pipe = tiny.hunyuan()
    template = inspect.signature(pipe.__call__).parameters["prompt_template"].default
    whole = len(pipe.tokenizer(template["template"].format("a cat")).input_ids)
    kept = whole - template["crop_start"]
    checkpoints.expect_whole_text(pipe, "prompt", "a cat", kept)
    with pytest.raises(ValueError, match=f"at least {kept} for this prompt, got {kept - 1}"):
        checkpoints.expect_whole_text(pipe, "prompt", "a cat", kept - 1)
    # the same words as the pipeline's own encoder sees them: with one token less of room its last one is lost
    for room, seen in ((kept + 1, kept), (kept, kept), (kept - 1, kept - 1)):
        mask = pipe._get_llama_prompt_embeds("a cat", template, max_sequence_length=room)[1]
        assert mask.sum() == seen


def test_an_option_the_pipeline_does_not_know_is_refused_by_name(model):
    class Plain:
        def __call__(self, prompt, height=32, width=48, num_frames=5, num_inference_steps=2):
            raise AssertionError

    with pytest.raises(
        ValueError,
        match=r"guidance: expected none, since Plain takes no guidance_scale, got 1\.0; leave out --guidance",
    ):
        fit_to_pipeline(asked(model), Plain())
    with pytest.raises(ValueError, match=r"text_tokens: expected none.*leave out --text-tokens"):
        fit_to_pipeline(asked(model, guidance=None), Plain())


def test_the_shipped_model_gets_its_grammar_and_another_the_words_as_they_are(model):
    spoken = "A Red circle  moves right over blue waves."
    assert understood(spoken, checkpoints.find_model(None)) == "a red circle moves right over blue waves"
    assert understood(spoken, model) == spoken


def test_an_interruption_leaves_nothing_behind(model, tmp_path):
    def interrupt(report):
        if report.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate.generate_video(asked(model), tmp_path / "a.mp4", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_the_observer_measures_the_plans_recall_in_nobodys_time():
    q, k, v, *_ = clustered_scene(heads=2, grid=(4, 8, 8), dim=32)
    config = ParkConfig(query_clusters=4, key_clusters=8, top_p=0.7, dense_steps=0)
    engine = Engine(Park(config))
    engine.watch = observer = Observer(recall_rows=10**6)
    engine.begin_run(total_steps=4)
    engine.clock.step = 1
    out = engine.attend(q, k, v, layer=0, dense=lambda: dense_attention(q, k, v))
    alone, site = Park(config), CallSite(step=1, total_steps=4)
    assert torch.equal(out, alone(q, k, v, site).out) and engine.log.calls[0].stats.phase == "refresh"
    plan = alone.plans.get(plan_key(site)).plan
    assert torch.allclose(observer.recalls[0], attention_recall(q, k, plan))
    # an even sample of a quarter of the rows: within four standard errors of a share in [0, 1]
    assert (sampled_recall(q, k, plan, 64) - attention_recall(q, k, plan)).abs().max() < 4 * 0.5 / 64**0.5
    assert observer.measuring[1] > 0


def test_a_run_without_dense_calls_times_one_apart_and_one_with_them_none():
    q, k, v, *_ = clustered_scene(heads=2, grid=(4, 8, 8), dim=32)
    cases = (
        ("quality", {}, 0, 2),
        ("paper", {"dense_steps": 1}, 2, 0),
        ("quality", {"dense_layers": (0,), "own_dense": False}, 4, 2),
    )
    for profile, changes, by_method, timed in cases:
        asked_for = []

        def dense(calls=asked_for):
            calls.append(q)
            return dense_attention(q, k, v)

        engine = Engine(Park(ResearchConfig.profile(profile, query_clusters=4, key_clusters=8, **changes)))
        engine.watch = observer = Observer()
        engine.begin_run(total_steps=4)
        with torch.no_grad():
            for step, layer in itertools.product(range(4), range(2)):
                engine.clock.step = step
                engine.attend(q, k, v, layer=layer, dense=dense)
        assert (
            len(asked_for) == by_method + timed and sum(c.stats.phase == "dense" for c in engine.log.calls) == by_method
        )
        found = measured(engine.log.calls, engine.summary(), observer, [1.0, 2.0, 3.0, 4.0], 4)
        assert found["attention_seconds_saved"] is not None and (3 in observer.measuring) == bool(timed)
        assert found["attention_saved_against"] == ("sample" if timed else "run")
        assert timed or found["attention_seconds_saved"] == engine.summary().seconds_saved


def test_a_run_that_gains_nothing_says_so_in_one_line_with_what_to_do():
    def record(method: str, saved: float | None) -> dict:
        found = {"attention_seconds_saved": saved, "seconds": {"denoise": 10.0, "attention": 6.0}, "steps": [{}] * 8}
        return {"request": {"method": method}, "tokens": 1200, "measured": found}

    line = why_no_gain(record("park", -2.0))
    assert line.startswith("Nothing is gained at 1,200 tokens and 8 steps: attention took 6.0 s")
    assert "dense attention would take about 4.0 s" in line
    assert line.endswith("make the video longer or larger, or pass --method dense.") and "\n" not in line
    assert why_no_gain(record("park", 0.1)).startswith("Little is gained")
    against = {"attention_seconds_saved": 2.0, "attention_saved_against": "sample"}
    assert (
        what_was_saved(against) == "dense attention would take about 2.0 s more, by one dense call that was timed apart"
    )
    assert (
        what_was_saved({"attention_seconds_saved": None})
        == "what was saved is not known, since no dense call was timed"
    )
    assert [why_no_gain(record(*given)) for given in (("park", 3.0), ("park", None), ("dense", 0.0))] == [None] * 3


@pytest.fixture(scope="module")
def compared(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    return out, compare.compare(asked(model), ["dense", "park", "centroid"], out)


def test_compare_writes_everything_and_measures_against_dense(compared):
    out, report = compared
    names = {
        "dense.mp4", "park-quality.mp4", "centroid-quality.mp4", "side_by_side.mp4", "metrics.json", "metrics.csv",
        "heads.csv", "index.html",
    }  # fmt: skip
    assert names <= {p.name for p in out.iterdir()}
    rows = {row["method"]: row for row in report["methods"]}
    assert rows["dense"]["psnr"]["mean"] == 100 and rows["dense"]["density"] == 1 and rows["dense"]["recall"] is None
    assert (
        rows["park"]["psnr"]["mean"] < 100 and 0 < rows["park"]["recall"]["worst"] <= rows["park"]["recall"]["mean"] < 1
    )
    assert np.shape(rows["park"]["heat"]["recall"]) == np.shape(rows["park"]["heat"]["density"]) == (2, 2)
    assert sum(rows["park"]["phase_seconds"].values()) == pytest.approx(rows["park"]["seconds"]["denoise"])
    assert (out / "metrics.csv").read_text().splitlines()[2].startswith("park,")
    assert len((out / "heads.csv").read_text().splitlines()) == 1 + 2 * 2 * 2
    assert video.read_mp4(out / "side_by_side.mp4").shape == (5, 2 * (32 + video.LABEL_HEIGHT), 2 * 48, 3)
    assert rows["park"]["command"].startswith("park generate") and report["command"].startswith("park compare")


def test_recall_that_was_not_measured_is_no_part_of_a_comparison_that_asks_for_it(compared, model):
    """A column would stay blank."""
    out, _ = compared
    with pytest.raises(ValueError, match=r"recall_rows.*--overwrite"):
        compare.compare(asked(model), ["dense", "park"], out, recall_rows=0)


def test_compare_keeps_finished_methods_and_adds_new_ones(compared, model):
    out, _ = compared
    before = {name: (out / f"{name}.mp4").stat().st_mtime_ns for name in ("dense", "park-quality")}
    events = []
    report = compare.compare(
        asked(model), ["dense", "park", "park-no-pama"], out, announce=lambda *event: events.append(event)
    )
    assert events == [
        ("dense", "kept"),
        ("park-quality", "kept"),
        ("park-no-pama-quality", "start"),
        ("park-no-pama-quality", "done"),
    ]
    assert before == {name: (out / f"{name}.mp4").stat().st_mtime_ns for name in before}
    assert [row["method"] for row in report["methods"]] == ["dense", "park", "park-no-pama"]
    with pytest.raises(ValueError, match="steps = 4, asked 3"):
        compare.compare(asked(model, steps=3), ["dense", "park"], out)


def test_disturbed_steps_are_in_the_metrics_and_a_sentence_in_the_terminal(
    compared, model, tmp_path, monkeypatch, capsys
):
    import shutil

    from parklab.studio import commands

    out, _ = compared
    shutil.copytree(out, tmp_path / "out")
    record = json.loads((out / "dense.json").read_text())
    for hung, mark in ((0.0, ""), (5.0, "~")):
        for row in record["measured"]["steps"]:
            row["seconds"], row["attention_seconds"] = 2.0, 1.0
        record["measured"]["steps"][2]["seconds"] += hung
        park = json.loads((out / "park-quality.json").read_text())
        for row in park["measured"]["steps"]:
            row["seconds"], row["attention_seconds"] = 2.0, 1.0
        report = compare.write_report({CASE: {"dense": sealed(record), "park-quality": sealed(park)}}, tmp_path / "out")
        monkeypatch.setattr(compare, "compare", lambda *arguments, report=report, **options: report)
        commands.compare(prompt="a red circle", out=tmp_path / "out")
        shown = " ".join(capsys.readouterr().out.split())
        # four steps of 2 s, one of which took longer
        assert report["methods"][0]["steadiness"] == {"step_spread": hung / (8 + hung), "dense_apart": 0.0}
        assert f"{mark}1.00x" in shown and ("~1.00x" in shown) == bool(hung)
        assert ("timing was unsteady (in the run of dense" in shown) == bool(hung) == bool(report["timing_warning"])
        assert json.loads((tmp_path / "out" / "metrics.json").read_text())["timing_warning"] == report["timing_warning"]
        header, row = (line.split(",") for line in (tmp_path / "out" / "metrics.csv").read_text().splitlines()[:2])
        assert float(row[header.index("timing_step_spread")]) == pytest.approx(hung / (8 + hung))


def test_methods_are_chosen_by_name_and_dense_comes_first():
    assert compare.choose_methods("centroid,park,centroid") == ["dense", "centroid", "park"]
    assert compare.choose_methods(None) == list(compare.DEFAULT_METHODS)
    with pytest.raises(ValueError, match="expected all or some of"):
        compare.choose_methods("park,parc")


def test_short_videos_keep_the_papers_tokens_per_block_and_a_named_preset_is_taken_as_it_is(model):
    pipe = checkpoints.load_pipeline(model)
    request = dataclasses.replace(asked(model, height=160, width=240, frames=33), changes={})
    assert checkpoints.token_count(pipe, 33, 160, 240) == 5400
    config = config_for(request, pipe)
    assert (config.query_clusters, config.key_clusters) == (10, 41)
    assert config_for(dataclasses.replace(request, preset="hunyuanvideo"), pipe).key_clusters == 1024
    assert config_for(dataclasses.replace(request, frames=337), pipe).key_clusters == 512


def test_false_position_finds_the_budget_of_a_density():
    for curve in (lambda x: x**3, lambda x: x**0.3, lambda x: np.ceil(x * 41) / 41):
        value, reached = solve_budget(curve, 0.4)
        assert curve(value) == reached and abs(reached - 0.4) <= max(CLOSE_ENOUGH, 0.5 / 41)


def test_ablation_compares_at_equal_density_and_resumes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CHECKPOINT", model)
    size = {name: getattr(asked(None), name) for name in ("steps", "height", "width", "frames", "device", "dtype")}
    blocks = {"query_clusters": 2, "key_clusters": 4}
    evaluation = ablation.ablation_of(2, methods=("park", "centroid"), densities=(0.6,), changes=blocks, **size)
    table = ablation.run_ablation(evaluation, tmp_path)
    assert [(line["method"], line["runs"]) for line in table["lines"]] == [
        ("park", 2),
        ("centroid", 2),
        ("dense again", 2),
    ]
    floor = table["lines"][-1]
    assert floor["psnr"] == 100 and table["lines"][0]["psnr"] < 100
    assert "| dense again | 2 | 100.00 |" in (tmp_path / "table.md").read_text()
    said = []
    kept = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(kept) == 6 and all(json.loads(line)["environment"]["torch"] == torch.__version__ for line in kept)
    next((tmp_path / "cells").glob("quality-centroid-*.json")).unlink()
    assert ablation.run_ablation(evaluation, tmp_path, say=said.append)["lines"] == table["lines"]
    assert len(said) == 1  # the one run that was missing
    with pytest.raises(ValueError, match=r"made with other settings \(settings.density = 0.6, asked 0.5\)"):
        ablation.run_ablation(dataclasses.replace(evaluation, densities=(0.5,)), tmp_path)
