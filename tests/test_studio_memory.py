"""What park doctor says of memory, and weights that wait in CPU memory or are rounded."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from parkattn.models import SIZES, row_for
from parkattn.park import ParkConfig
from parklab.studio import memory
from parklab.studio.doctor import examine, shown_examination

pytest.importorskip("diffusers")


RESULTS = Path(__file__).parents[1] / "benchmarks/results"
AT_720P = {"frames": 81, "height": 720, "width": 1280}


def records(kind: str) -> list[dict]:
    lines = [json.loads(line) for path in sorted(RESULTS.glob("e2e*.jsonl")) for line in path.read_text().splitlines()]
    return [line for line in lines if line.get("benchmark") == kind and not line.get("rehearsal")]


def estimated(name: str, video) -> dict:
    found = memory.memory(name, SIZES[name], frames=video[0], height=video[1], width=video[2])
    assert found is not None
    return found


def bounds(estimate: float, measured: float) -> bool:
    """At least what was measured, at most 15 % more."""
    return measured <= estimate <= 1.15 * measured


def test_every_peak_of_the_records_is_bounded_closely():
    found = records("e2e")
    assert {line["model"] for line in found} == {"wan2.1-1.3b", "wan2.1-14b", "hunyuanvideo"}
    for line in found:
        parts, measured = estimated(line["model"], line["video"]), line["memory"]
        weights, state = parts["weights_gb"]["bfloat16"], measured["state_gb"]
        assert weights == pytest.approx(measured["weights_gb"], rel=0.01)
        dense = weights + parts["activations_gb"]["compiled" if line["compiled"] else "stock"]
        if line["compiled"]:  # without PARK a compiled block holds less, since nothing is permuted
            assert measured["dense_peak_gb"] <= dense
        else:
            assert bounds(dense, measured["dense_peak_gb"])
        fused = any(outcome.startswith("yes") for outcome in line.get("fused", ())) or line["compiled"]
        activations = parts["activations_gb"]["compiled" if fused else "stock"]
        assert bounds(weights + activations + state, measured["park_peak_gb"])


def test_every_forward_of_the_records_is_bounded_closely():
    for line in records("e2e forward"):
        if line["phase"].endswith("not fused"):
            parts, passes = estimated(line["model"], SIZES[line["model"]].video), SIZES[line["model"]].passes
            plans = parts["plans_gb"]["paper"] / passes
            assert bounds(parts["weights_gb"]["bfloat16"] + parts["activations_gb"]["stock"] + plans, line["peak_gb"])


def test_plans_take_what_the_records_say():
    for line in records("e2e"):
        size = SIZES[line["model"]]
        state = memory.state_gb(ParkConfig.preset(line["model"]), size, size.tokens(*line["video"])) / size.passes
        assert bounds(state, line["memory"]["state_gb"])


def test_a_residual_takes_what_the_records_say():
    found = [line for line in records("e2e profile") if line["profile"] == "fast"]
    if not found:
        pytest.skip("no record of a profile is here: park bench e2e --profile fast")
    for line in found:
        one_branch = dataclasses.replace(SIZES[line["model"]], passes=1)
        config = ParkConfig.profile("fast", model=line["model"], query_tile=line["config"].get("query_tile"))
        state = memory.state_gb(config, one_branch, one_branch.tokens(*line["video"]))
        assert bounds(state, line["memory"]["state_gb"])


def test_branches_share_their_plans_and_not_their_residuals():
    size = SIZES["wan2.1-14b"]
    once = dataclasses.replace(size, passes=1)
    fast = ParkConfig.profile("fast", model="wan2.1-14b")
    states = {
        (shared, rank): [
            memory.state_gb(fast.replace(share_branches=shared, residual_rank=rank), each, 75_600)
            for each in (once, size)
        ]
        for shared in (True, False)
        for rank in (0, 12)
    }
    plans, state = states[True, 0][0], states[True, 12][0]
    assert states[True, 0] == [plans, plans] and states[False, 0] == [plans, 2 * plans]
    assert states[True, 12][1] == pytest.approx(plans + 2 * (state - plans))


def test_decoding_takes_what_the_record_says():
    found = records("e2e decode")
    assert found
    for line in found:
        _, _, frames, height, width = line["frames"]
        parts = memory.memory(line["model"], SIZES[line["model"]], frames=frames, height=height, width=width)
        # the transformer stayed where it was
        assert bounds(parts["weights_gb"]["bfloat16"] + parts["autoencoder_gb"] + parts["decode_gb"], line["peak_gb"])


def test_parameters_are_those_of_the_classes():
    diffusers = pytest.importorskip("diffusers")
    for name, (billions, *_) in memory.PARAMETERS.items():
        with torch.device("meta"):
            made = getattr(diffusers, SIZES[name].transformer)(**SIZES[name].made_with)
        assert sum(p.numel() for p in made.parameters()) / 1e9 == pytest.approx(billions, abs=0.0006)
        blocks = row_for(made).all_blocks(made)
        in_blocks = sum(p.numel() for block in blocks for p in block.parameters()) / 1e9
        assert 1 - in_blocks / billions <= memory.OUTSIDE_BLOCKS
        linears = [m for block in blocks for m in block.modules() if isinstance(m, torch.nn.Linear)]
        rounded = sum(m.weight.numel() for m in linears) / 1e9
        assert (2 * billions - rounded) / (2 * billions) <= memory.FLOAT8_SHARE


def test_every_known_size_has_an_estimate_and_larger_videos_take_more():
    for name, size in SIZES.items():
        small, large = (estimated(name, (frames, 480, 832)) for frames in (33, 81))
        assert all(large["peaks_gb"][way] >= small["peaks_gb"][way] for way in large["peaks_gb"])
        fits = estimated(name, size.video)["fits"]
        assert list(fits) == ["12", "16", "24", "32", "48", "80", "141"]
        assert all(set(small) <= set(large) for small, large in itertools.pairwise(fits.values()))


def test_doctor_says_what_fits():
    found = examine(model="wan2.1-14b", **AT_720P, gpu="H200")["memory"]
    assert found["fits"]["24"] == ["bfloat16, group offload", "float8, group offload"]
    assert "float8, model offload" in found["fits"]["48"] and "bfloat16" not in found["fits"]["48"]
    assert "bfloat16" in found["fits"]["80"]


SOLD = {"RTX 3090": [24], "RTX 4090": [24], "RTX 5090": [32], "L40S": [48], "A100": [40, 80], "H100": [80], "H200": [141], "B200": [180]}  # fmt: skip


@pytest.mark.parametrize("gpu", SOLD)
@pytest.mark.parametrize("name", SIZES)
def test_doctor_says_what_fits_the_gpu_that_is_named(gpu, name):
    found = examine(model=name, **dict(zip(("frames", "height", "width"), SIZES[name].video, strict=True)), gpu=gpu)
    own = found["memory"]["on_gpu"]
    assert list(own["fits"]) == [str(size) for size in SOLD[gpu]]
    for size, ways in own["fits"].items():
        peaks = found["memory"]["peaks_gb"]
        fitting = [way for way, peak in peaks.items() if peak <= int(size)]
        assert ways == [way for way in fitting if own["float8"] or not way.startswith("float8")]
        assert size not in found["memory"]["fits"] or set(ways) <= set(found["memory"]["fits"][size])
    assert own["float8"] is (gpu not in ("RTX 3090", "A100"))
    text = shown(found)
    ways = "; ".join(own["fits"][str(SOLD[gpu][0])]) or "none of the ways below"
    assert f"fits {SOLD[gpu][0]} GB {gpu}: {ways}" in text and ("it multiplies no float8" in text) is not own["float8"]
    assert ("every part but decoding" in text) is (name == "hunyuanvideo")


def shown(found):
    console = Console(width=400, file=io.StringIO())
    for part in shown_examination(found, "wan2.1-14b"):
        console.print(part)
    return " ".join(console.file.getvalue().split())


def test_doctor_says_which_parts_a_forward_and_which_a_whole_video_takes():
    found = examine(model="wan2.1-14b", **AT_720P, gpu="H200")
    parts = found["memory"]
    measured = next(
        line["memory"]["dense_peak_gb"]
        for line in records("e2e")
        if line["model"] == "wan2.1-14b" and not line["compiled"]
    )
    assert bounds(parts["transformer_forward_gb"], measured)
    alone = (
        parts["transformer_forward_gb"]
        + parts["text_encoders_gb"]
        + parts["autoencoder_gb"]
        + parts["plans_gb"]["quality"]
    )
    decoding = parts["decode_gb"] - parts["activations_gb"]["stock"] - parts["plans_gb"]["quality"]
    assert parts["peaks_gb"]["bfloat16"] == pytest.approx(alone + max(0, decoding))
    text = shown(found)
    assert "37.4 are a dense forward of the transformer alone" in text
    assert all(word in text for word in ("text encoders 11.4", "VAE 0.3", "decoding 11.6", "with the state of quality"))


def test_one_forward_per_step_keeps_the_state_of_one_branch():
    two, one = (examine(model="wan2.1-14b", **AT_720P, guidance=scale)["memory"] for scale in (5.0, 1.0))
    assert two["plans_gb"]["paper"] == pytest.approx(2 * one["plans_gb"]["paper"])
    light = examine(model="wan2.1-14b", **AT_720P, profile="paper")["memory"]
    saved = two["plans_gb"]["quality"] - two["plans_gb"]["paper"]
    assert two["peaks_gb"]["bfloat16, model offload"] - light["peaks_gb"]["bfloat16, model offload"] == pytest.approx(
        saved
    )


def test_the_shipped_model_needs_no_estimate():
    assert examine(model="sprites", frames=17, height=96, width=160)["memory"] is None
