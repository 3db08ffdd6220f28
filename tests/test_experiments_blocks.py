"""Which numbers of blocks retrieval is measured with."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from parkattn.site import CallSite
from parklab.experiments import blocks, reproduce, runner
from parklab.experiments.blocks import blocks_for, preset_in, settings_of_plans
from parklab.experiments.captures import MODEL, CapturedCall, Selection, pack_captures, read_about
from parklab.research import ResearchConfig
from parklab.sprites.grammar import EXAMPLE
from parklab.studio import checkpoints
from parklab.studio.request import Request
from reproduce_cases import quick

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
    monkeypatch.setattr(blocks, "judge_index", lambda folder: {"transformer": (None, name)})
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
