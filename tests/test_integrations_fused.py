"""Norms and RoPE around attention, compiled by us: the same result, one graph per processor, and a reason where it is not done."""

from __future__ import annotations

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


@pytest.fixture
def tracing_compiler(monkeypatch, fresh_compiler):  # noqa: F811
    """Traces and guards as any other, and runs the operators of eager mode."""
    monkeypatch.setattr(fused, "COMPILER", "aot_eager")
    # the copied stock code is kept per class, and with it the compiler it was first given to
    from parkattn.integrations import processor

    processor._class_for.cache_clear()
    yield
    processor._class_for.cache_clear()


def without_fused(report) -> dict:
    return {**apart_from_time(report), "fused": None}


def test_one_graph_serves_all_layers_steps_branches_and_sessions(tracing_compiler):
    pipe = tiny.wan(num_layers=3)
    stock = tiny.run_wan(pipe)
    enable(pipe, CONFIG, fuse=False)
    expected, report = tiny.run_wan(pipe), summary(pipe)
    assert report.fused == "no: as asked"
    assert graphs() == 0
    for _ in range(2):
        enable(pipe, CONFIG, fuse=True)
        for _ in range(2):
            assert torch.equal(tiny.run_wan(pipe), expected)
            assert without_fused(summary(pipe)) == without_fused(report)
            assert summary(pipe).fused == "yes: as asked"
        assert graphs() == 1
    disable(pipe)
    assert torch.equal(tiny.run_wan(pipe), stock)


def test_two_sizes_share_a_process(tracing_compiler):
    pipe = tiny.wan()
    for frames in (9, 17, 5):
        enable(pipe, CONFIG, fuse=False)
        expected = tiny.run_wan(pipe, num_frames=frames)
        enable(pipe, CONFIG, fuse=True)
        assert torch.equal(tiny.run_wan(pipe, num_frames=frames), expected)
        assert summary(pipe).fused == "yes: as asked"
    assert graphs() <= 2, "the second size makes a graph for any size"


@pytest.mark.parametrize("name", tiny.transformers())
def test_every_family(tracing_compiler, name):
    transformer, inputs, _ = tiny.transformers()[name]
    outcome = []

    def output(fuse: bool) -> torch.Tensor:
        with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=fuse):
            out = transformer(**inputs, return_dict=False)[0]
            outcome.append(summary(transformer))
        return out

    assert torch.equal(output(False), output(True))
    plain, compiled = outcome
    assert without_fused(plain) == without_fused(compiled)
    assert compiled.fused == "yes: as asked"


@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU inductor needs a C++ compiler")
def test_generated_code_gives_stock_dense_with_every_block_kept():
    pipe = tiny.wan()
    stock = tiny.run_wan(pipe)
    with enable(pipe, EVERY_BLOCK, fuse=True):
        ours = tiny.run_wan(pipe)
        assert summary(pipe).fused == "yes: as asked"
        assert torch.equal(tiny.run_wan(pipe), ours)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_what_the_compiler_refuses_runs_as_stock_wrote_it_and_the_summary_says_why(tracing_compiler):
    transformer = tiny.wan_transformer()
    inputs = (tiny.noise(1, 16, 3, 8, 8), torch.tensor([5.0]), tiny.noise(1, 16, 16))
    attention = transformer.blocks[0].attn1
    with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=False):
        expected = transformer(*inputs, return_dict=False)[0]
    # as hooks of offloading are
    attention.to_q.forward = torch.compiler.disable(attention.to_q.forward)
    with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=True):
        out = transformer(*inputs, return_dict=False)[0]
        report = summary(transformer)
    assert torch.equal(out, expected)
    assert report.calls["refresh"] == 2
    assert report.fused.startswith("no: torch.compile refused: ")


def test_what_attention_raises_is_not_taken_for_a_refusal(tracing_compiler, monkeypatch):
    def attend(*args, **kwargs):
        raise MemoryError("as large as that")

    transformer = tiny.wan_transformer()
    inputs = (tiny.noise(1, 16, 3, 8, 8), torch.tensor([5.0]), tiny.noise(1, 16, 16))
    with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=True) as session:
        monkeypatch.setattr(type(session.method), "__call__", attend)
        with pytest.raises(MemoryError, match="as large as that"):
            transformer(*inputs)
        assert summary(transformer).fused == "yes: as asked"


def test_gradients_are_left_to_the_plain_code(tracing_compiler):
    transformer = tiny.wan_transformer()
    hidden = tiny.noise(1, 16, 3, 8, 8).requires_grad_()
    with enable(transformer, CONFIG, total_steps=1, fuse=True):
        transformer(hidden, torch.tensor([5.0]), tiny.noise(1, 16, 16), return_dict=False)[0].sum().backward()
        assert summary(transformer).fused == "no: gradients are on"
    assert hidden.grad.abs().sum() > 0
    assert graphs() == 0


@pytest.mark.parametrize(
    ("wanted", "device", "tokens", "reason"),
    [
        (None, "cpu", 75_600, "no: on cpu"),
        (None, "meta", 75_600, "no: on meta"),
        (None, "cuda", 75_600, "yes: 75600 tokens"),
        (None, "cuda", 29_999, "no: 29999 tokens, fewer than 30000"),
        (True, "cpu", 8, "yes: as asked"),
        (False, "cuda", 75_600, "no: as asked"),
    ],
)
def test_when_it_is_done_and_why(wanted, device, tokens, reason):
    class Hidden:
        shape = (1, tokens, 64)

    Hidden.device = torch.device(device)
    fusing = fused.Fusing(wanted)
    with torch.no_grad():
        assert fusing.applies_to(Hidden()) == reason.startswith("yes")
    assert fusing.reason == reason


def test_a_transformer_compiled_by_its_user_is_not_compiled_again(tracing_compiler):
    pipe = tiny.wan()
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    with enable(pipe, CONFIG, fuse=True):
        tiny.run_wan(pipe)
        assert summary(pipe).calls["reuse"] > 0
    assert graphs() == 1
