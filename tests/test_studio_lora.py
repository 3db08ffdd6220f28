"""LoRA files: what is taken, how its scale is read, and what is refused before a loader sees it."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

import tiny_pipelines as tiny  # noqa: E402
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
