"""Weights that are quantised or wait on another device: attention gets what stock attention would get, and blocks are
compiled only where that gives the same numbers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
import diffusers

import tiny_pipelines as tiny
from parkattn.hosts.diffusers import disable, enable, fused, summary
from parkattn.models import SIZES
from parklab.studio.memory import memory
from test_hosts_diffusers import SPARSE
from test_hosts_diffusers_compile import apart_from_time, fresh_compiler, graphs  # noqa: F401 (a fixture)

CONFIG = SPARSE.replace(refresh_steps=(9,))  # a plan in the first step, reused in the second
AS_ASKED = "yes, as asked"
CPU = torch.device("cpu")
# these packages warn when they are imported, and on machines without a GPU
pytestmark = pytest.mark.filterwarnings("ignore")
# 64 columns at least, which is a block of 4-bit weights
WAN = {"attention_head_dim": 32, "ffn_dim": 128, "text_dim": 64, "freq_dim": 64, "num_layers": 3}


@pytest.fixture(autouse=True)
def tracing_compiler(monkeypatch, fresh_compiler):  # noqa: F811
    """Traces and guards as any other, and runs the operators of eager mode."""
    monkeypatch.setattr(fused, "COMPILER", "aot_eager")


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[quant]'")


def by_torchao(folder, monkeypatch, scheme: str):
    needs("torchao")
    from torchao import quantization
    from torchao.quantization import quant_api

    # it asks for a GPU; its arithmetic does not
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    per_row = {"granularity": quantization.PerRow()} if scheme == "Float8DynamicActivationFloat8WeightConfig" else {}
    outside = {"modules_to_not_convert": ["condition_embedder", "proj_out"]}
    config = diffusers.TorchAoConfig(getattr(quantization, scheme)(**per_row), **outside)
    loaded = {"quantization_config": config, "torch_dtype": torch.bfloat16}
    return diffusers.WanTransformer3DModel.from_pretrained(folder, **loaded)


def by_bitsandbytes(folder, monkeypatch, scheme: str):
    needs("bitsandbytes")
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    kind = {"8bit": bnb_quantizer.BnB8BitDiffusersQuantizer, "4bit": bnb_quantizer.BnB4BitDiffusersQuantizer}[scheme]
    # it asks for a GPU; bitsandbytes does not
    monkeypatch.setattr(kind, "validate_environment", lambda *args, **kwargs: None)
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16} if scheme == "4bit" else {}
    config = diffusers.BitsAndBytesConfig(**{f"load_in_{scheme}": True}, **four)
    placed = {"torch_dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    return diffusers.WanTransformer3DModel.from_pretrained(folder, quantization_config=config, **placed)


def by_gguf(folder, monkeypatch, scheme: str):
    needs("gguf")
    import gguf

    stored, path = getattr(gguf.GGMLQuantizationType, scheme), folder / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "wan")
    for name, weights in diffusers.WanTransformer3DModel.from_pretrained(folder).state_dict().items():
        rounded = name.startswith("blocks.") and weights.ndim == 2 and weights.shape[1] % 32 == 0
        values = weights.float().numpy()
        original = name.replace(".norm2.", ".norm3.")  # Wan's own name of it
        if rounded:
            writer.add_tensor(original, gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(original, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = diffusers.GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    return diffusers.WanTransformer3DModel.from_single_file(
        str(path), config=str(folder), quantization_config=config, torch_dtype=torch.bfloat16
    )


TORCHAO = dict.fromkeys(
    (
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Float8WeightOnlyConfig",
        "Float8DynamicActivationFloat8WeightConfig",
    ),
    by_torchao,
)
OTHERS = {"8bit": by_bitsandbytes, "4bit": by_bitsandbytes, "Q8_0": by_gguf, "Q4_0": by_gguf}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("wan")
    tiny.wan_transformer(**WAN).bfloat16().save_pretrained(made)
    return made


def inputs(timestep: float):
    return {
        "hidden_states": tiny.noise(1, 16, 3, 8, 8).bfloat16(),
        "timestep": torch.tensor([timestep]),
        "encoder_hidden_states": tiny.noise(1, 16, 64).bfloat16(),
    }


def outputs(transformer, steps: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([transformer(**inputs(9.0 - step), return_dict=False)[0] for step in range(steps)])


def answers(transformer, fuse: bool, method=CONFIG):
    """(outputs of two steps, summary)"""
    with enable(transformer, method, total_steps=2, fuse=fuse):
        return outputs(transformer), summary(transformer)


@pytest.mark.parametrize("scheme", [*TORCHAO, *OTHERS])
def test_every_scheme_is_attended_to_sparsely_and_is_stock_afterwards(folder, monkeypatch, scheme):
    transformer = {**TORCHAO, **OTHERS}[scheme](folder, monkeypatch, scheme)
    before, stock = type(transformer.blocks[0].attn1.to_q.weight), outputs(transformer)
    assert before is not torch.nn.Parameter
    out, report = answers(transformer, fuse=False)
    assert report.calls == {"dense": 0, "refresh": 3, "reuse": 3}
    assert report.density < 1
    assert out.isfinite().all() and not torch.equal(out, stock)
    assert type(transformer.blocks[0].attn1.to_q.weight) is before
    assert torch.equal(outputs(transformer), stock)
    with enable(transformer, method="dense", total_steps=2, fuse=False):
        assert torch.equal(outputs(transformer), stock)


@pytest.mark.parametrize("scheme", TORCHAO)
def test_torchaos_linears_are_compiled_to_one_graph_with_the_same_numbers(folder, monkeypatch, scheme):
    transformer = by_torchao(folder, monkeypatch, scheme)
    plain, unfused = answers(transformer, fuse=False)
    out, report = answers(transformer, fuse=True)
    assert torch.equal(out, plain)
    assert type(out) is torch.Tensor
    assert report.fused == {AS_ASKED: 6}
    assert apart_from_time(report) == apart_from_time(unfused)
    assert graphs() == 1


@pytest.mark.parametrize("scheme", OTHERS)
def test_other_weights_are_not_compiled_and_the_summary_says_whose(folder, monkeypatch, scheme):
    kind = {"8bit": "Int8Params", "4bit": "Params4bit"}.get(scheme, "GGUFParameter")
    transformer = OTHERS[scheme](folder, monkeypatch, scheme)
    plain, _ = answers(transformer, fuse=False)
    out, report = answers(transformer, fuse=True)
    assert torch.equal(out, plain)
    assert report.fused == {f"no, the weights of attn1.to_q are {kind}, which a graph may take for a plain tensor": 6}
    assert graphs() == 0


def test_weights_of_an_unknown_class_are_not_compiled():
    """Without any package: what a class does by itself in its linears, a graph might not do."""

    class Halved(torch.nn.Parameter):
        pass

    transformer = tiny.wan_transformer(**WAN).bfloat16()
    plain, _ = answers(transformer, fuse=True)
    transformer.blocks[1].ffn.net[2].weight = Halved(transformer.blocks[1].ffn.net[2].weight.data, requires_grad=False)
    out, report = answers(transformer, fuse=True)
    assert torch.equal(out, plain)
    assert report.fused == {
        AS_ASKED: 4,
        "no, the weights of ffn.net.2 are Halved, which a graph may take for a plain tensor": 2,
    }


def offload_groups(transformer, level: str, blocks: int | None = None) -> None:
    try:
        there = {"onload_device": CPU, "offload_device": CPU}
        transformer.enable_group_offload(**there, offload_type=level, num_blocks_per_group=blocks)
    except AttributeError:
        pytest.skip("this release of diffusers offloads nothing on a machine without an accelerator")


@pytest.mark.parametrize("blocks", [1, 2])
def test_blocks_under_group_offload_are_compiled_inside_of_it(blocks):
    transformer = tiny.wan_transformer(**WAN).bfloat16()
    resident, _ = answers(transformer, fuse=True)
    offload_groups(transformer, "block_level", blocks)
    loaded = []
    groups = [block._diffusers_hook.hooks["group_offloading"].group for block in transformer.blocks]
    for group in {id(group): group for group in groups}.values():
        group.onload_ = lambda load=group.onload_: [loaded.append(1), load()][1]
    forwards = [block.forward for block in transformer.blocks]
    references = [block._diffusers_hook._fn_refs[0].forward for block in transformer.blocks]
    out, report = answers(transformer, fuse=True)
    assert torch.equal(out, resident)
    assert report.fused == {AS_ASKED: 6}
    assert len(loaded) == 2 * -(-3 // blocks), "a group is loaded once per forward"
    assert graphs() == 1
    assert [block.forward for block in transformer.blocks] == forwards
    assert [block._diffusers_hook._fn_refs[0].forward for block in transformer.blocks] == references


def test_a_refusal_under_group_offload_runs_stock_inside_of_it(monkeypatch):
    transformer = tiny.wan_transformer(**WAN).bfloat16()
    plain, _ = answers(transformer, fuse=False)
    offload_groups(transformer, "block_level", 1)
    monkeypatch.setattr(torch.nn.Linear, "forward", torch.compiler.disable(torch.nn.Linear.forward))
    out, report = answers(transformer, fuse=True)
    assert torch.equal(out, plain)
    assert [reason.split(":")[0] for reason in report.fused] == ["no, torch.compile refused"]
    assert sum(report.fused.values()) == 6


@pytest.mark.parametrize("other", ["leaf_level", "cache", "hook"])
def test_anything_else_around_or_inside_of_a_block_keeps_it_from_being_compiled(other):
    transformer = tiny.wan_transformer(**WAN).bfloat16()
    resident, _ = answers(transformer, fuse=False)
    offload_groups(transformer, *(("leaf_level",) if other == "leaf_level" else ("block_level", 1)))
    assert torch.equal(answers(transformer, fuse=False)[0], resident)
    if other == "cache":
        from diffusers import FirstBlockCacheConfig

        transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    elif other == "hook":
        for block in transformer.blocks:
            block.register_forward_hook(lambda *_: None)

    def run(fuse: bool):
        with transformer.cache_context("cond"):
            return answers(transformer, fuse)

    plain, _ = run(False)
    out, report = run(True)
    assert torch.equal(out, plain)
    assert report.fused == {f"no, a hook is on {'attn1.to_q' if other == 'leaf_level' else 'the block'}": 6}


def test_torchaos_linears_under_group_offload(folder, monkeypatch):
    transformer = by_torchao(folder, monkeypatch, "Int8WeightOnlyConfig")
    resident, _ = answers(transformer, fuse=True)
    offload_groups(transformer, "block_level", 1)
    out, report = answers(transformer, fuse=True)
    assert torch.equal(out, resident)
    assert report.fused == {AS_ASKED: 6}


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_cpu_offload_changes_nothing(family, kind):
    """With accelerate's functions, which the pipelines' methods call with a GPU as the device to run on."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    pipe, run = {"wan": (tiny.wan, tiny.run_wan), "hunyuan": (tiny.hunyuan, tiny.run_hunyuan)}[family]
    pipe = pipe()
    enable(pipe, SPARSE, fuse=True)
    resident = run(pipe)
    calls = summary(pipe).calls
    if kind == "model":
        accelerate.cpu_offload_with_hook(pipe.transformer, CPU)
    else:
        accelerate.cpu_offload(pipe.transformer, CPU)
    assert torch.equal(run(pipe), resident)
    report = summary(pipe)
    assert report.calls == calls and calls["refresh"] > 0
    assert all(outcome.startswith(AS_ASKED if kind == "model" else "no, a hook is on ") for outcome in report.fused)
    assert sum(report.fused.values()) == sum(calls.values())
    disable(pipe)


def test_hunyuanvideos_linears_in_int8_are_compiled_with_the_same_numbers():
    needs("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    pipe = tiny.hunyuan()
    pipe.transformer.bfloat16()
    blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    for block in blocks:
        quantize_(block, Int8DynamicActivationInt8WeightConfig())
    enable(pipe, SPARSE, fuse=False)
    plain = tiny.run_hunyuan(pipe)
    calls = summary(pipe).calls
    enable(pipe, SPARSE, fuse=True)
    assert torch.equal(tiny.run_hunyuan(pipe), plain)
    assert summary(pipe).calls == calls and calls["refresh"] > 0
    assert list(summary(pipe).fused) == [AS_ASKED]
    disable(pipe)


def test_the_page_about_it_names_what_exists():
    """Its code needs weights that nobody has here: every import, and every argument of a call of ours, is looked up."""
    page = (Path(__file__).parents[1] / "docs/quantised.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(node.module.partition(".")[0]) is not None:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), f"{node.module}: {block}"
        assert block.count("parkattn.enable(pipe)") == 1
    offloading = inspect.signature(diffusers.WanTransformer3DModel.enable_group_offload).parameters
    assert {"onload_device", "offload_device", "offload_type", "num_blocks_per_group", "use_stream"} <= set(offloading)


def test_the_page_about_it_says_what_doctor_says():
    page = (Path(__file__).parents[1] / "docs/quantised.md").read_text()
    for name, size in SIZES.items():
        found = memory(name, size, frames=81, height=720, width=1280)
        several = f"{found['transformers']} x " if found["transformers"] > 1 else ""
        weights = [f"{several}{found['weights_gb'][kind]:.1f}" for kind in ("bfloat16", "float8")]
        active = ", ".join(f"{found['activations_gb'][kind]:.1f}" for kind in ("stock", "compiled"))
        state = ", ".join(f"{found['plans_gb'][profile]:.2f}" for profile in ("quality", "paper"))
        assert f"| {name} | {' | '.join(weights)} | {active} | {state} |" in page
