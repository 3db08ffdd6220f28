"""What park doctor says of memory, and weights that wait in CPU memory or are rounded."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from parkattn.models import SIZES, row_for
from parkattn.park import ParkConfig
from parklab.studio import memory
from parklab.studio.doctor import examine, shown_examination

pytest.importorskip("diffusers")
import diffusers

import tiny_models
import tiny_pipelines as tiny
from parkattn.models import MODELS
from parklab.extras import install_command
from parklab.studio import checkpoints, generate, placement
from parklab.studio.model_folder import PIPELINES, ROLES, judge_index
from parklab.studio.request import Request, prepare, repeat_command

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


# Weights that wait or are rounded, and pipelines of newer models ----------------------------------------


SMALL = {"prompt": "a cat", "steps": 3, "height": 32, "width": 32, "frames": 5, "guidance": 1.0, "device": "cpu"}
SPARSE = {"query_clusters": 2, "key_clusters": 4, "top_p": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore")  # optional packages warn when they are imported


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "wan"
    tiny.wan(attention_head_dim=32, ffn_dim=128).save_pretrained(folder)
    return folder


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: {install_command('quant')}")


def latents(pipe):
    words = {"prompt": "a cat", "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    return pipe(**words, guidance_scale=1.0, output_type="latent", generator=torch.Generator().manual_seed(0)).frames


def test_group_offload_changes_no_number(wan):
    stock = latents(checkpoints.load_pipeline(wan))
    pipe = checkpoints.load_pipeline(wan)
    placement.offload_groups(pipe, torch.device("cpu"))
    for part in (pipe.transformer, pipe.text_encoder):
        assert any(hasattr(module, "_diffusers_hook") for module in part.modules())
    assert torch.equal(latents(pipe), stock)


@pytest.mark.parametrize("kind", ["group", "sequential"])
def test_offload_of_rounded_weights_changes_no_number(wan, kind):
    needs("torchao")
    import accelerate

    made = [checkpoints.load_pipeline(wan, dtype="bfloat16", quantise=("int8", None)) for _ in range(2)]
    if kind == "group":
        placement.offload_groups(made[0], torch.device("cpu"))
    else:
        accelerate.cpu_offload(made[0].transformer, torch.device("cpu"))
    assert torch.equal(*map(latents, made))


def test_rounded_weights_make_a_video_and_its_record_repeats_them(wan, tmp_path):
    needs("torchao")
    request = Request(**SMALL, model=str(wan), changes=SPARSE, dtype="bfloat16", quantise="int8")
    record, _ = generate.generate_video(request, tmp_path / "a.mp4")
    assert "--quantise int8" in record["command"] and record["measured"]["density"] < 1
    pipe = generate.pipeline_for(*prepare(request))
    kinds = {type(block.attn1.to_q.weight).__name__ for block in pipe.transformer.blocks}
    assert len(kinds) == 1 and "Int8" in kinds.pop()


def gguf_of(folder, path):
    """As `city96`'s converter writes Wan: its own names, linears of blocks in 8 bits."""
    import gguf

    stored, writer = gguf.GGMLQuantizationType.Q8_0, gguf.GGUFWriter(str(path), "wan")
    for name, weights in diffusers.WanTransformer3DModel.from_pretrained(folder / "transformer").state_dict().items():
        values, original = weights.float().numpy(), name.replace(".norm2.", ".norm3.")
        if name.startswith("blocks.") and weights.ndim == 2 and weights.shape[1] % 32 == 0:
            writer.add_tensor(original, gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(original, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_takes_the_place_of_the_weights_and_is_known_by_its_bytes(wan, tmp_path):
    needs("gguf")
    file = tmp_path / "wan-Q8_0.gguf"
    gguf_of(wan, file)
    request, folder = prepare(Request(**SMALL, model=str(wan), dtype="bfloat16", quantise=str(file)))
    pipe = generate.pipeline_for(request, folder)
    assert "GGUF" in type(pipe.transformer.blocks[0].attn1.to_q.weight).__name__
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(
        ValueError, match=r"quantise: expected .* as it was when the run began, got other bytes; run again\."
    ):
        generate.pipeline_for(request, folder)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("float4", r"quantise: expected float8, int8 or a \.gguf file, got 'float4'; pick one of these\."),
        ("none.gguf", r"quantise: expected a file, got 'none\.gguf', which is none; check the path\."),
        ("float8", r"quantise: expected int8 or a \.gguf file on cpu, got float8; float8 needs a GPU\."),
    ],
)
def test_another_scheme_is_refused_in_one_line(wan, monkeypatch, scheme, message):
    monkeypatch.setattr(placement, "package", lambda *names: None)
    with pytest.raises(ValueError, match=message):
        placement.judge_quantise(scheme, "cpu", wan)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_float8_is_refused_on_a_gpu_that_does_not_multiply_it(wan, monkeypatch, capability):
    monkeypatch.setattr(placement, "package", lambda *names: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    if capability >= (8, 9):
        assert placement.judge_quantise("float8", "cuda", wan) is None
    else:
        with pytest.raises(ValueError, match=r"expected int8 or a \.gguf file on NVIDIA A100, got float8; .* sm_89"):
            placement.judge_quantise("float8", "cuda", wan)


def test_one_file_is_refused_for_two_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "package", lambda *names: None)
    tiny.wan(2).save_pretrained(tmp_path / "model")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="two transformers"):
        placement.judge_quantise(str(tmp_path / "a.gguf"), "cpu", tmp_path / "model")


@pytest.mark.parametrize("scheme", [None, "int8", "float8", "a.gguf"])
@pytest.mark.parametrize("offload", placement.OFFLOADS)
def test_offload_and_quantise_work_together_or_are_refused_before_anything_is_loaded(wan, monkeypatch, scheme, offload):
    """GGUF under sequential offload fails inside accelerate."""
    monkeypatch.setattr("parklab.studio.request.judge_quantise", lambda *given: None)
    request = Request(**SMALL, model=str(wan), quantise=scheme, offload=offload)
    if scheme == "a.gguf" and offload == "sequential":
        with pytest.raises(
            ValueError, match=r"offload: expected none, model or group .* got 'sequential'.*; pass group"
        ):
            prepare(request)
    else:
        assert prepare(request)[0].offload == offload


def test_a_missing_package_is_named_with_its_install_line(wan, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("quant"))):
        prepare(Request(**SMALL, model=str(wan), quantise="int8"))


def test_group_offload_wants_a_gpu(wan):
    with pytest.raises(ValueError, match="offload: expected none on cpu, got 'group'"):
        checkpoints.load_pipeline(wan, offload="group")


def test_records_of_before_quantise_are_still_found():
    request = Request(prompt="a cat")
    assert generate.UNSAID.keys() >= {"quantise", "quantise_hash"}
    assert "quantise" not in repeat_command(request, Path("a.mp4"))


def transformer_of(cls):
    """The class that a pipeline's constructor names for its transformer."""
    annotation = str(inspect.signature(cls.__init__).parameters.get("transformer", ""))
    return next((name for name in MODELS if re.search(rf"\b{name}\b", annotation)), None)


def video_pipelines():
    found = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")}
    classes = {name: transformer_of(cls) for name, cls in found.items()}
    return {name: cls for name, cls in classes.items() if cls is not None and not MODELS[cls].image}


# why a prompt and a folder are not enough
ELSEWHERE = {"Cosmos": "it loads a guard of its own from the hub", "LucyEdit": "it edits a video"}


def test_every_video_pipeline_is_accepted_or_has_a_reason():
    known = {name for name in video_pipelines() if re.fullmatch(PIPELINES, name)}
    others = {name for name in video_pipelines().keys() - known if not name.startswith(tuple(ELSEWHERE))}
    assert not others and len(known) >= 20


def test_an_index_of_ltx2_is_accepted_and_one_with_another_library_is_not(tmp_path):
    if not hasattr(diffusers, "LTX2Pipeline"):
        pytest.skip("this diffusers has no LTX-2")
    index = {
        "_class_name": "LTX2Pipeline", "audio_vae": ["diffusers", "AutoencoderKLLTX2Audio"], "connectors": ["ltx2", "LTX2TextConnectors"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "text_encoder": ["transformers", "Gemma3ForConditionalGeneration"],
        "tokenizer": ["transformers", "GemmaTokenizerFast"], "transformer": ["diffusers", "LTX2VideoTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLLTX2Video"], "vocoder": ["ltx2", "LTX2Vocoder"],
    }  # fmt: skip
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    from parklab.studio.components import BASES, public_class

    for role, cls in judge_index(tmp_path).values():
        assert cls.startswith(public_class(role.library, cls, *BASES[role.library]).__name__)
    index["vocoder"] = ["os", "system"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"vocoder in model_index\.json to be a known class of ltx2"):
        judge_index(tmp_path)


@pytest.mark.parametrize(
    ("pipeline", "name", "scheduler"),
    [
        ("AnyFlowPipeline", "anyflow", "FlowMapEulerDiscreteScheduler"),
        ("HeliosPipeline", "helios", "FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_a_folder_of_a_newer_model_makes_a_sparse_video(tmp_path, pipeline, name, scheduler):
    if not hasattr(diffusers, pipeline):
        pytest.skip(f"this diffusers has no {pipeline}")
    stock = tiny.wan()
    cls, sizes, _, _ = tiny_models.newer()[name]
    transformer = tiny_models.made(cls, {**sizes, "in_channels": 16, "out_channels": 16})
    parts = {part: getattr(stock, part) for part in ("tokenizer", "text_encoder", "vae")}
    made = getattr(diffusers, pipeline)(**parts, transformer=transformer, scheduler=getattr(diffusers, scheduler)())
    made.save_pretrained(tmp_path / "model")
    request = Request(
        **{**SMALL, "frames": 9}, model=str(tmp_path / "model"), changes={**SPARSE, "dense_fraction": 0.0}
    )
    record, _ = generate.generate_video(dataclasses.replace(request, preset="paper"), tmp_path / "a.mp4")
    assert record["measured"]["density"] < 1 and (tmp_path / "a.mp4").stat().st_size


def test_roles_name_a_library_that_has_a_home():
    from parklab.studio.components import BASES

    assert {role.library for role in ROLES.values()} <= BASES.keys()
