"""torch.compile: full graphs, no more of them than stock, whatever the number of layers, and the same result."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_families as families
import tiny_newer_families as newer
import tiny_pipelines as tiny
from parkattn.hosts.diffusers import disable, enable, summary
from test_hosts_diffusers import SPARSE, trace

pytestmark = [
    # numpy's complaint about schedulers of diffusers, and torch.compile's about itself
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CONFIG = SPARSE.replace(refresh_interval=2)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def apart_from_time(report) -> dict:
    """And from who compiled the blocks."""
    return {**report.to_dict(), "attention_seconds": None, "seconds_saved": None, "fused": None}


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_whole(pipe) -> None:
    pipe.transformer.compile(fullgraph=True, backend="eager")


def compile_wrapped(pipe) -> None:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")


def compile_blocks(pipe) -> None:
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("way", [compile_whole, compile_blocks])
def test_wan_compiles_to_one_full_graph_for_all_layers_steps_and_branches(way):
    pipe = tiny.wan(num_layers=3)
    enable(pipe, CONFIG)
    eager, expected = tiny.run_wan(pipe), summary(pipe)
    assert expected.calls["refresh"] > 0 < expected.calls["reuse"]
    way(pipe)
    for _ in range(2):
        compiled = tiny.run_wan(pipe)
        # this backend traces and guards as any other, and runs the operators of eager mode
        assert torch.equal(compiled, eager)
        assert apart_from_time(summary(pipe)) == apart_from_time(expected)
    assert graphs() == 1


@pytest.mark.parametrize("way", [compile_whole, compile_wrapped, compile_blocks])
def test_the_grid_is_known_in_compiled_transformers(way):
    pipe = tiny.wan()
    enable(pipe, CONFIG)
    way(pipe)
    seen = trace(pipe)
    tiny.run_wan(pipe, steps=2)
    tiny.run_wan(pipe, steps=2, height=96)
    assert list(dict.fromkeys(site.grid for site, _ in seen)) == [(3, 4, 4), (3, 6, 4)]


def test_enabling_after_compile_and_disabling_again():
    pipe = tiny.wan()
    dense = tiny.run_wan(pipe)
    enable(pipe, CONFIG)
    sparse = tiny.run_wan(pipe)
    disable(pipe)
    compile_wrapped(pipe)
    assert torch.equal(tiny.run_wan(pipe), dense)
    enable(pipe, CONFIG)
    assert torch.equal(tiny.run_wan(pipe), sparse)
    disable(pipe)
    assert torch.equal(tiny.run_wan(pipe), dense)


@pytest.mark.parametrize("name", ["skyreels", "hunyuan 1.5", "cogvideox", "ltx", "mochi"])
def test_any_family_compiled_whole_is_as_sparse_as_eager_and_disable_leaves_nothing_in_its_graphs(name):
    """Graphs may break, as Mochi's do."""
    family = families.FAMILIES[name]
    pipe = family.build()
    stock = family.run(pipe)
    enable(pipe, CONFIG)
    eager, expected = family.run(pipe), summary(pipe)
    disable(pipe)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    enable(pipe, CONFIG)
    assert torch.equal(family.run(pipe), eager) and summary(pipe).calls == expected.calls
    disable(pipe)
    assert torch.equal(family.run(pipe), stock)
    other = family.build()
    other.transformer.compile(backend="eager")
    assert torch.equal(family.run(other), stock)


def test_hunyuan_compiles_to_as_many_graphs_as_stock():
    pipe = tiny.hunyuan(num_layers=2, num_single_layers=2)
    compile_blocks(pipe)
    tiny.run_hunyuan(pipe, steps=2)
    stock = graphs()
    pipe = tiny.hunyuan(num_layers=2, num_single_layers=2)
    enable(pipe, CONFIG)
    eager, expected = tiny.run_hunyuan(pipe), summary(pipe)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(pipe)
    assert torch.equal(tiny.run_hunyuan(pipe), eager)
    assert apart_from_time(summary(pipe)) == apart_from_time(expected)
    assert graphs() == stock


@pytest.mark.parametrize("name", ["cogvideox", "ltx", "hunyuan 1.5"])
def test_blocks_of_other_families_compile_to_as_many_graphs_as_stock(name):
    build, words = {
        "cogvideox": (tiny.cogvideox, tiny.noise(1, 16, 16)),
        "ltx": (tiny.ltx, (torch.arange(16) < 9)[None]),
        "hunyuan 1.5": (tiny.hunyuan15, (torch.arange(16) < 9)[None]),
    }[name]
    transformer, inputs, _ = build(words)

    def compiled() -> torch.Tensor:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in transformer.transformer_blocks:
            block.compile(fullgraph=True, backend="eager")
        return transformer(**inputs, return_dict=False)[0]

    with torch.no_grad():
        compiled()
        stock, transformer = graphs(), build(words)[0]
        with enable(transformer, CONFIG, total_steps=1) as session:
            eager = transformer(**inputs, return_dict=False)[0]
            session.reset()
            assert torch.equal(compiled(), eager)
            assert summary(transformer).calls["refresh"] == 2
    assert graphs() == stock


def test_a_whole_compiled_transformer_whose_step_nobody_counts_stays_dense_and_says_so():
    transformer = tiny.wan_transformer()
    inputs = {
        "hidden_states": tiny.noise(1, 16, 3, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": tiny.noise(1, 16, 16),
    }
    with torch.no_grad(), enable(transformer, CONFIG, total_steps=1):
        torch.compile(transformer, fullgraph=True, backend="eager")(**inputs)
        (reason,) = summary(transformer).dense_because
    assert reason.startswith("the step is unknown: a compiled transformer without a scheduler")


def test_a_packed_sequence_compiled_whole_stays_dense_and_says_so():
    """Where its video begins is in the arguments of forward, which are inside the graph."""
    if "minimax h3" not in newer.FAMILIES:
        pytest.skip("this diffusers has no MiniMax-H3")
    family = newer.FAMILIES["minimax h3"]
    pipe = family.build()
    dense = family.run(pipe)
    with enable(pipe, SPARSE) as session:
        family.run(pipe)
        assert summary(pipe).calls["dense"] == 0
        pipe.transformer.compile(backend="eager")
        torch.testing.assert_close(family.run(pipe), dense)
        ((reason, _),) = session.summary().dense_because.items()
        assert "which tokens are the video is unknown" in reason


def test_a_compiled_transformer_that_asks_for_gradients_is_refused_with_what_to_do():
    transformer = tiny.wan_transformer()
    transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    inputs = (tiny.noise(1, 16, 3, 8, 8), torch.tensor([5.0]), tiny.noise(1, 16, 16))
    with enable(transformer, CONFIG, total_steps=1):
        with pytest.raises(Exception, match=r"parkattn::attention: expected .* use torch.no_grad\(\)"):
            transformer(*inputs)
        with torch.no_grad():
            transformer(*inputs)
        assert summary(transformer).calls["refresh"] == 2


def test_the_operator_is_registered_as_torch_expects():
    transformer = tiny.wan_transformer(num_layers=1)
    enable(transformer, CONFIG, total_steps=1, dense_steps=1)
    transformer(tiny.noise(1, 16, 3, 8, 8), torch.tensor([5.0]), tiny.noise(1, 16, 16))
    q, k, v = (tiny.noise(1, 48, 2, 24, seed=seed) for seed in range(3))
    arguments = (q, k, v, None, transformer.blocks[0].attn1.processor.handle, 0, None, 0.0, False, False, False, 0)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.parkattn.attention.default, arguments, test_utils=checks)
    handle = arguments[4]
    disable(transformer)
    del transformer
    import gc

    gc.collect()
    gc.collect()
    with pytest.raises(RuntimeError, match="expected an enabled transformer, got a graph whose session is gone"):
        torch.ops.parkattn.attention(q, k, v, None, handle, 0, None, 0.0, False, False, False, 0)


def test_importing_the_integration_imports_neither_diffusers_nor_the_compiler():
    code = "import sys, parkattn.hosts.diffusers; print([m for m in ('diffusers', 'transformers', 'torch._inductor', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
