"""Blocks compiled by enable: the same result, one graph for all blocks of a kind, no trace after disable, and a reason where it is not done."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from parkattn.integrations import disable, enable, fused, summary
from test_integrations import SPARSE
from test_integrations_compile import apart_from_time, fresh_compiler, graphs, pytestmark  # noqa: F401 (a fixture and the warnings)

CONFIG = SPARSE.replace(refresh_interval=2)
EVERY_BLOCK = SPARSE.replace(top_p=None, top_k=1.0)
AS_ASKED = "yes, as asked"
INPUTS = (tiny.noise(1, 16, 3, 8, 8), torch.tensor([5.0]), tiny.noise(1, 16, 16))  # of a tiny Wan transformer


@pytest.fixture
def tracing_compiler(monkeypatch, fresh_compiler):  # noqa: F811
    """Traces and guards as any other, and runs the operators of eager mode."""
    monkeypatch.setattr(fused, "COMPILER", "aot_eager")


def output(transformer, *, fuse: bool | None, during=lambda: None):
    """(output, summary) of one forward; during: what happens between two forwards of the same session."""
    with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=fuse) as session:
        transformer(*INPUTS, return_dict=False)
        during()
        session.reset()
        return transformer(*INPUTS, return_dict=False)[0], summary(transformer)


def test_one_graph_serves_all_layers_steps_branches_and_sessions(tracing_compiler):
    pipe = tiny.wan(num_layers=3)
    stock = tiny.run_wan(pipe)
    enable(pipe, CONFIG, fuse=False)
    expected, report = tiny.run_wan(pipe), summary(pipe)
    assert report.fused == {}
    assert graphs() == 0
    for _ in range(2):
        enable(pipe, CONFIG, fuse=True)
        for _ in range(2):
            assert torch.equal(tiny.run_wan(pipe), expected)
            assert apart_from_time(summary(pipe)) == apart_from_time(report)
            assert summary(pipe).fused == {AS_ASKED: sum(report.calls.values())}
        assert graphs() == 1
    assert f"blocks compiled by enable: {AS_ASKED} (24x)" in str(summary(pipe))
    disable(pipe)
    assert all("_compiled_call_impl" not in module.__dict__ for module in pipe.transformer.modules())
    assert torch.equal(tiny.run_wan(pipe), stock)
    assert graphs() == 1


def test_other_sizes_need_one_more_graph(tracing_compiler):
    pipe = tiny.wan()
    for frames in (9, 17, 5, 13):
        enable(pipe, CONFIG, fuse=False)
        expected = tiny.run_wan(pipe, num_frames=frames)
        enable(pipe, CONFIG, fuse=True)
        assert torch.equal(tiny.run_wan(pipe, num_frames=frames), expected)
        assert list(summary(pipe).fused) == [AS_ASKED]
    assert graphs() < 4, "one of the sizes makes a graph for any size"


@pytest.mark.parametrize("name", tiny.transformers())
def test_every_family(tracing_compiler, name):
    transformer, inputs, _ = tiny.transformers()[name]
    outcome = []

    def once(fuse: bool) -> torch.Tensor:
        with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=fuse):
            out = transformer(**inputs, return_dict=False)[0]
            outcome.append(summary(transformer))
        return out

    assert torch.equal(once(False), once(True))
    plain, compiled = outcome
    assert apart_from_time(plain) == apart_from_time(compiled)
    assert compiled.fused == {AS_ASKED: len(compiled.layers)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU inductor needs a C++ compiler")
def test_generated_code_gives_stock_dense_with_every_block_kept():
    pipe = tiny.wan()
    stock = tiny.run_wan(pipe)
    with enable(pipe, EVERY_BLOCK, fuse=True):
        ours = tiny.run_wan(pipe)
        assert list(summary(pipe).fused) == [AS_ASKED]
        assert torch.equal(tiny.run_wan(pipe), ours)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_what_the_compiler_refuses_runs_as_stock_wrote_it_and_the_summary_says_why(tracing_compiler, monkeypatch):
    transformer = tiny.wan_transformer()
    expected, _ = output(transformer, fuse=False)
    linear = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", torch.compiler.disable(linear))
    out, report = output(transformer, fuse=True)
    assert torch.equal(out, expected)
    assert report.calls["refresh"] == 2
    (reason,) = report.fused
    assert reason.startswith("no, torch.compile refused: ")


def test_what_attention_raises_is_not_taken_for_a_refusal(tracing_compiler, monkeypatch):
    def attend(*args, **kwargs):
        raise MemoryError("as large as that")

    transformer = tiny.wan_transformer()
    with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=True) as session:
        monkeypatch.setattr(type(session.method), "__call__", attend)
        with pytest.raises(MemoryError, match="as large as that"):
            transformer(*INPUTS)
        monkeypatch.undo()
        monkeypatch.setattr(fused, "COMPILER", "aot_eager")
        transformer(*INPUTS)
        assert list(summary(transformer).fused) == [AS_ASKED]


@pytest.mark.parametrize("place", ["", "attn1.to_q", "norm1"])
@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "replaced forward"])
def test_hooks_inside_a_block_are_heard_whenever_they_come(tracing_compiler, place, kind):
    transformer = tiny.wan_transformer()
    module, heard = transformer.blocks[0].get_submodule(place), []

    def add_hook():
        if kind == "forward hook":
            module.register_forward_hook(lambda *_: heard.append(1))
        elif kind == "pre-hook":
            module.register_forward_pre_hook(lambda *_: heard.append(1))
        else:
            stock = module.forward
            module.forward = lambda *args, **kwargs: [heard.append(1), stock(*args, **kwargs)][1]

    expected, _ = output(transformer, fuse=False)
    out, report = output(transformer, fuse=True, during=add_hook)
    assert torch.equal(out, expected)
    assert heard == [1]
    assert report.fused == {f"no, a hook is on {place or 'the block'}": 1, AS_ASKED: 1}


def test_gradients_are_left_to_the_plain_code(tracing_compiler):
    transformer = tiny.wan_transformer()
    hidden = tiny.noise(1, 16, 3, 8, 8).requires_grad_()
    with enable(transformer, CONFIG, total_steps=1, fuse=True):
        transformer(hidden, *INPUTS[1:], return_dict=False)[0].sum().backward()
        assert summary(transformer).fused == {"no, gradients are on": 2}
    assert hidden.grad.abs().sum() > 0
    assert graphs() == 0


@pytest.mark.parametrize(
    ("wanted", "device", "tokens", "why_not"),
    [
        (None, "cpu", 75_600, "on cpu"),
        (None, "cuda", 75_600, None),
        (None, "cuda", 29_999, "29999 tokens, fewer than 30000"),
        (True, "cpu", 8, None),
    ],
)
def test_when_it_is_done(wanted, device, tokens, why_not):
    class Hidden:
        shape = (1, tokens, 64)

    Hidden.device = torch.device(device)
    with torch.no_grad():
        assert fused.Fusing(wanted)._why_not(Hidden()) == why_not


def test_on_a_cpu_nothing_is_compiled_unasked(tracing_compiler):
    _, report = output(tiny.wan_transformer(), fuse=None)
    assert report.fused == {"no, on cpu": 2}
    assert graphs() == 0


@pytest.mark.parametrize("enabled_first", [True, False])
def test_blocks_compiled_by_the_user_are_theirs_before_and_after(tracing_compiler, enabled_first):
    pipe = tiny.wan()
    enable(pipe, CONFIG, fuse=False)
    expected = tiny.run_wan(pipe)
    disable(pipe)
    if enabled_first:
        enable(pipe, CONFIG, fuse=True)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    theirs = [block._compiled_call_impl for block in pipe.transformer.blocks]
    if not enabled_first:
        enable(pipe, CONFIG, fuse=True)
    assert torch.equal(tiny.run_wan(pipe), expected)
    assert summary(pipe).fused == {}
    assert graphs() == 1
    disable(pipe)
    assert [block._compiled_call_impl for block in pipe.transformer.blocks] == theirs


def test_a_transformer_compiled_whole_after_enable_is_one_graph(tracing_compiler):
    pipe = tiny.wan(num_layers=3)
    enable(pipe, CONFIG, fuse=False)
    expected = tiny.run_wan(pipe)
    enable(pipe, CONFIG, fuse=True)
    pipe.transformer.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(tiny.run_wan(pipe), expected)
    assert graphs() == 1


def test_a_copy_of_a_fused_transformer_is_stock(tracing_compiler):
    transformer = tiny.wan_transformer()
    with torch.no_grad():
        stock = transformer(*INPUTS, return_dict=False)[0]
        with enable(transformer, CONFIG, total_steps=1, fuse=True):
            transformer(*INPUTS)
            copied = copy.deepcopy(transformer)
        assert all("_compiled_call_impl" not in module.__dict__ for module in copied.modules())
        assert torch.equal(copied(*INPUTS, return_dict=False)[0], stock)
