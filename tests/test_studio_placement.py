"""park generate with weights that wait in CPU memory or are rounded, and with the pipelines of newer models."""

import dataclasses
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
import diffusers

import tiny_models
import tiny_pipelines as tiny
from parkattn.models import MODELS
from parklab.extras import install_command
from parklab.studio import checkpoints, generate, placement
from parklab.studio.model_folder import PIPELINES, ROLES, judge_index
from parklab.studio.request import Request, prepare, repeat_command

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


@pytest.mark.parametrize("data", [b"", b"junk" * 99, b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + b"\xff" * 16])
def test_a_file_that_is_no_gguf_is_named_and_not_the_folder(wan, tmp_path, data):
    needs("gguf")
    file = tmp_path / "a.gguf"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"^quantise: expected weights of [^\n]*a\.gguf, got [^\n]*; pass a GGUF file"):
        checkpoints.load_pipeline(wan, quantise=(str(file), placement.judge_quantise(str(file), "cpu", wan)))


def test_a_gguf_file_that_changed_since_the_run_began_is_named_and_not_the_folder(wan, tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"other")
    with pytest.raises(ValueError, match=r"^quantise: expected [^\n]*a\.gguf as it was when the run began"):
        checkpoints.load_pipeline(wan, quantise=(str(file), "0" * 16))


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
