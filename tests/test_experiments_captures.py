"""`park capture`: which calls are kept, in which file, and what is measured on them; and the dense steps that runs of one
prompt begin with and share, with the same videos.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from parkattn.dense import Dense
from parkattn.methods import configured_method
from parkattn.ops.importance.definition import pama, select_top_p
from parkattn.plan import Plan, arrange
from parkattn.settings import MethodConfig
from parkattn.site import CallSite
from parklab.experiments import captures, mismatches, opening, reproduce, runner
from parklab.experiments.captures import (
    MODEL,
    Capture,
    CapturedCall,
    Selection,
    blocks_for,
    capture_calls,
    pack_captures,
    preset_in,
    read_about,
    read_captures,
    settings_of_plans,
)
from parklab.experiments.mismatches import measure_call
from parklab.metrics.retrieval import attention_recall
from parklab.research import ResearchConfig
from parklab.sprites.grammar import EXAMPLE
from parklab.store import read_record
from parklab.studio import checkpoints
from parklab.studio.generate import generate_frames
from parklab.studio.request import Request, fit_to_pipeline, prepare
from reproduce_cases import quick


def test_a_long_call_is_measured_on_a_sample_of_its_queries_for_the_log_mass_alone(monkeypatch):
    q, k = (2 * x for x in _problem(heads=1, tokens=256)[:2])
    config = ResearchConfig(query_clusters=4, key_clusters=16)
    whole = measure_call(CapturedCall(q, k, CallSite()), config)
    monkeypatch.setattr(mismatches, "LOG_MASS_QUERIES", 64)
    part = measure_call(CapturedCall(q, k, CallSite()), config)
    for metric in ("euclidean", "query-response"):
        sample, all_of_it = part["keys"][metric].pop("log_mass")[0], whole["keys"][metric].pop("log_mass")[0]
        # 64 of 256 rows, each within a factor of 3 of the mean: half the mean is six standard errors
        assert sample != all_of_it and abs(sample - all_of_it) < 0.5 * all_of_it
    assert part == whole


def _problem(heads=4, tokens=48):
    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, 16) for _ in range(3)]


def _captured(selection, **site):
    capture = Capture(selection, layers=2, steps=3)
    q, k, v = _problem()
    for step in range(3):
        for branch in ("cond", "uncond"):
            for layer in range(2):
                capture(
                    q + step,
                    k + layer,
                    v,
                    CallSite(layer=layer, step=step, branch=branch, grid=(3, 4, 4), total_steps=3, **site),
                )
    return capture


def test_a_capture_keeps_the_chosen_calls_and_its_file_gives_them_back(tmp_path):
    chosen = Selection(layers=(1,), heads=(0, 3), steps=(0, 2), first_branch=True, values=True)
    valid = torch.arange(48).lt(40).unsqueeze(0)
    calls = list(
        _captured(
            chosen, text=slice(0, 4), key_valid=valid, noise_levels=(1.0, 0.5, 0.1), video=1, paired=True
        ).kept.values()
    )
    assert [call.name for call in calls] == ["transformer/1/0/cond/1", "transformer/1/2/cond/1"]
    q, k, v = _problem()
    assert torch.equal(calls[1].q, (q + 2)[:, [0, 3]]) and torch.equal(calls[1].k, (k + 1)[:, [0, 3]])
    assert len({pack_captures(calls, {"prompt": "p"}) for _ in range(4)}) == 1
    (tmp_path / "c.safetensors").write_bytes(pack_captures(calls, {"prompt": "p"}))
    back, about = read_captures(tmp_path / "c.safetensors")
    assert about == {"prompt": "p"}
    for call, same in zip(calls, back, strict=True):
        assert (
            torch.equal(call.q, same.q) and torch.equal(call.k, same.k) and torch.equal(v[:, [0, 3]], same.site.values)
        )
        assert torch.equal(same.site.key_valid, valid)
        plain = [dataclasses.replace(c.site, values=None, key_valid=None) for c in (call, same)]
        assert plain[0] == plain[1]
    assert [x.shape[2] for x in back[0].video_tokens()] == [36, 36], "text and padding are no video tokens"


def test_a_capture_beyond_its_limit_is_refused_at_the_first_call_or_has_fewer_heads():
    one_head = 2 * 3 * 2 * 48 * 16 * 4  # layers, steps, q and k, tokens, features, bytes
    with pytest.raises(
        ValueError, match=r"^limit: expected captures of at most .*; choose fewer layers, heads or steps\.$"
    ):
        _captured(Selection(first_branch=True, limit=4 * one_head - 1))
    thinned = _captured(Selection(first_branch=True, limit=2 * one_head, thin_heads=True))
    assert thinned.bytes == 2 * one_head and all(
        torch.equal(call.q[0, 1], _problem()[0][0, 2] + call.site.step) for call in thinned.kept.values()
    )


def test_files_that_are_no_capture_are_refused_in_one_line(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("no tensors")
    save_file({"x": torch.zeros(1)}, str(tmp_path / "other"))
    for name in ("absent", "text", "other"):
        with pytest.raises(ValueError, match=r"^captures: expected a file written by park capture, got [^\n]*\.$"):
            read_captures(Path(tmp_path / name))


def test_the_measured_recall_is_that_of_the_plan_and_exact_estimates_have_no_error():
    q, k = (2 * x for x in _problem(heads=2, tokens=256)[:2])
    config = ResearchConfig(query_clusters=4, key_clusters=16)
    found = measure_call(CapturedCall(q, k, CallSite()), config)
    assert found["tv"]["exact"] == [0.0] * q.shape[1]
    assert min(found["recall"]["Clustered"]["top_p"]["exact"]) >= 0.9 - 1e-6
    labels = torch.arange(q.shape[2]).div(q.shape[2] // 4, rounding_mode="floor").int().expand(q.shape[:3])
    keys = torch.arange(k.shape[2]).div(k.shape[2] // 16, rounding_mode="floor").int().expand(k.shape[:3])
    mask = select_top_p(pama(q, k, labels, 4, keys, 16), 0.9)
    plan = Plan(arrange(labels, 4), arrange(keys, 16), mask, 4, 16)
    assert found["recall"]["Original"]["top_p"]["pama"] == pytest.approx(
        attention_recall(q, k, plan).flatten().tolist(), abs=1e-5
    )


def test_a_run_ends_with_the_last_call_that_is_captured_and_the_calls_are_those_of_a_whole_run():
    size = {"steps": 4, "frames": 5, "height": 64, "width": 64}
    prompt = "a red circle moves right over blue waves"
    request, folder = prepare(Request(prompt=prompt, method="dense", device="cpu", **size))
    pipe = checkpoints.load_pipeline(folder, device="cpu")
    request = fit_to_pipeline(request, pipe)
    forwards = []
    pipe.transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    found = {steps: capture_calls(pipe, request, Selection(steps=steps, layers=(0, 5))) for steps in ((1,), (1, 3))}
    assert len(forwards) == 2 + 4 and not pipe.interrupt
    for call, wanted in zip(found[1,], found[1, 3], strict=False):
        assert call.name == wanted.name and torch.equal(call.q, wanted.q) and torch.equal(call.k, wanted.k)
    assert [len(calls) for calls in found.values()] == [2, 4]
    whole = generate_frames(pipe, request, MethodConfig(), recall_rows=0, decode=False)  # the next run is not cut short
    assert whole.measured["phase_steps"]["dense"] == 4 and len(forwards) == 10


# Numbers of blocks that retrieval is measured with ------------------------------------------------------


LONG = 75_600  # tokens of a 720p video


def _capture(folder: Path, preset: str | None) -> Path:
    q, k = torch.randn(2, 1, 1, 48, 16)
    path = folder / f"{preset}.safetensors"
    path.write_bytes(pack_captures([CapturedCall(q, k, CallSite())], {} if preset is None else {MODEL: preset}))
    return path


def _counts(cell):
    found = ResearchConfig.from_dict(cell.request["config"]).counts(LONG, LONG)
    return found.queries, found.keys


def test_a_long_video_has_the_blocks_of_its_models_preset_unless_others_are_asked_for():
    assert blocks_for("hunyuanvideo", {}).counts(LONG, LONG).keys == 1024
    assert blocks_for("wan2.1-14b", {}).counts(LONG, LONG).keys == 512
    assert blocks_for("hunyuanvideo", {"key_clusters": 64, "no_field": 1}).counts(LONG, LONG).keys == 64
    # what else a preset sets does not make other cells
    assert blocks_for("wan2.1-14b", {}) == ResearchConfig()


@pytest.mark.parametrize(("name", "keys"), [("HunyuanVideoTransformer3DModel", 1024), ("WanTransformer3DModel", 512)])
def test_retrieval_of_a_model_is_measured_with_the_blocks_of_its_folder(tmp_path, monkeypatch, name, keys):
    monkeypatch.setattr(captures, "judge_index", lambda folder: {"transformer": (None, name)})
    lab = runner.Lab(quick(frames=81, height=720, width=1280), tmp_path)
    assert [_counts(cell) for cell in lab.retrieval_cells()] == [(128, keys)]
    path = _capture(tmp_path, "wan2.1-14b")
    lab.evaluation = quick(captures=(path,), model=str(checkpoints.find_model(None)))
    assert [_counts(cell) for cell in lab.retrieval_cells()] == [(128, keys)], (
        "a model that is given comes before the file's"
    )


def test_a_capture_says_its_model_or_the_model_is_asked_for_in_one_line(tmp_path):
    told, silent = _capture(tmp_path, "hunyuanvideo"), _capture(tmp_path, None)
    # the small model's own blocks are not those of the capture
    assert [_counts(cell) for cell in runner.Lab(quick(captures=(told,)), tmp_path).retrieval_cells()] == [(128, 1024)]
    with pytest.raises(
        ValueError,
        match=r"^model: expected the model of None\.safetensors, which does not say it, got none; pass --model",
    ):
        runner.Lab(quick(captures=(silent,)), tmp_path).retrieval_cells()
    asked = quick(captures=(silent,), changes={"query_clusters": 16, "key_clusters": 64})
    assert [_counts(cell) for cell in runner.Lab(asked, tmp_path).retrieval_cells()] == [(16, 64)]


def test_what_is_captured_says_its_model(tmp_path):
    request = Request(prompt=EXAMPLE, method="dense", steps=1, frames=5, height=32, width=48, device="cpu")
    reproduce.capture_file(request, Selection(layers=(0,), first_branch=True), tmp_path / "c.safetensors")
    assert read_about(tmp_path / "c.safetensors")[MODEL] == preset_in(checkpoints.find_model(None)) == "wan2.1-14b"


def test_records_of_before_the_laboratory_had_its_own_config_are_found():
    """A cell's name is the hash of its request, so the same config must be asked for again."""
    records = Path(__file__).parents[1] / "benchmarks/results/gpu_75600.jsonl"
    asked = [json.loads(line).get("request") for line in records.read_text().splitlines()]
    configs = [request["config"] for request in asked if request and "config" in request]
    assert configs and all(settings_of_plans(ResearchConfig.from_dict(config)) == config for config in configs)


# The dense steps that runs of one prompt share --------------------------------------------------------


NAMES = ["tab:main_quality_efficiency"]
TIMES = {
    "seconds",
    "dense_seconds",
    "denoise_seconds",
    "dense_denoise_seconds",
    "attention_seconds",
    "dense_attention_seconds",
}


def _rows(folder):
    found = map(read_record, folder.glob("cells/quality-*.json"))
    return {(r["request"]["method"], r["request"]["prompt"], r["request"]["guidance"]): r["row"] for r in found}


def _evaluation(**given):
    """Two prompts, so that one's steps could be taken for the other's."""
    return dataclasses.replace(
        quick(methods=("park",), guidances=(5.0,), frames=5, **given),
        prompts=tuple(reproduce.held_out_prompts(2)[0]),
    )


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    out = tmp_path_factory.mktemp("timed")
    reproduce.run_experiments(NAMES, _evaluation(keep="records"), out)
    return _rows(out)


@pytest.mark.parametrize("keep", ["records", "all"])
def test_untimed_rows_are_the_timed_ones_without_seconds(timed, tmp_path, monkeypatch, keep):
    taken = []

    class Watched(opening.ResumedMethod):
        def __call__(self, *call):
            found = super().__call__(*call)
            taken.append(self.taken)
            return found

    monkeypatch.setattr(opening, "ResumedMethod", Watched)
    outcome = reproduce.run_experiments(NAMES, _evaluation(timed=False, keep=keep), tmp_path)
    found = _rows(tmp_path)
    assert len(found) == 4 and timed.keys() == found.keys()
    for which, row in found.items():
        measured, expected = (
            {name: value for name, value in each.items() if name not in TIMES} for each in (row, timed[which])
        )
        assert measured == expected
        assert all(row[name] is None and timed[which][name] is not None for name in TIMES)
    assert max(taken) == 2 * 6  # one step, two branches, six layers
    table = next(section.result.table for section in outcome.sections if section.result is not None)
    columns = [column.name for column in table.columns]
    assert "PSNR" in columns and "seconds" not in columns and "speedup" not in columns
    # what a later run finds in the store it does not take for its own
    for path in (tmp_path / "cells").glob("quality-park-*.json"):
        path.unlink()
    reproduce.run_experiments(NAMES, _evaluation(timed=False, keep=keep), tmp_path)
    assert all(_rows(tmp_path)[which]["psnr"] == row["psnr"] for which, row in timed.items())


def test_nothing_is_taken_after_a_sparse_call_nor_beyond_the_limit():
    q, k, v = (torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    kept = opening.DenseOpening(40, limit=3 * q.nbytes)
    for step in range(4):
        kept(q, k, v, CallSite(step=step, total_steps=40))
    assert len(kept.outputs) == 3
    resumed = opening.ResumedMethod(Dense(), kept)
    computed = []
    site = CallSite(total_steps=40, dense=lambda: computed.append(1) or torch.zeros_like(q))
    out = [resumed(q, k, v, dataclasses.replace(site, step=step)).out for step in range(4)]
    assert (
        torch.equal(out[2], kept.outputs[opening._place(CallSite(step=2))])
        and len(computed) == 1
        and resumed.taken == 3
    )
    out[0].zero_()
    assert kept.outputs[opening._place(CallSite())].abs().sum() > 0  # what a run does with its copy is its own affair

    sparse = opening.ResumedMethod(configured_method("park", dense_steps=1, query_clusters=4, key_clusters=4), kept)
    phases = [sparse(q, k, v, dataclasses.replace(site, step=step)).stats.phase for step in (0, 1, 0)]
    assert phases[:2] == ["dense", "refresh"] and sparse.taken == 1
