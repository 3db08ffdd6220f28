"""Blocks compiled by enable: the same result, one graph for all blocks of a kind, no trace after disable, and a reason
where it is not done.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import shutil
import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("diffusers")
import tiny_models
import tiny_pipelines as tiny
from parkattn.hosts.diffusers import disable, enable, fused, summary
from parkattn.hosts.diffusers.session import session_of
from test_hosts_diffusers import SPARSE
from test_hosts_diffusers_compile import apart_from_time, fresh_compiler, graphs, pytestmark  # noqa: F401 (a fixture and the warnings)

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


# torch 2.8 traces neither `&` of two objects nor nonzero
REFUSED_BY_TORCH_28 = {"hunyuan 1.5": "Failed to trace builtin operator", "mochi": "Dynamic shape operator"}


@pytest.mark.parametrize("name", tiny_models.every())
def test_every_family(tracing_compiler, name):
    transformer, inputs, _ = tiny_models.every()[name]
    outcome = []

    def once(fuse: bool) -> torch.Tensor:
        with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=fuse):
            out = tiny_models.video_of(transformer(**inputs, return_dict=False))
            outcome.append(summary(transformer))
        return out

    assert torch.equal(once(False), once(True))
    plain, compiled = outcome
    assert apart_from_time(plain) == apart_from_time(compiled)
    why = REFUSED_BY_TORCH_28.get(name) if torch.__version__.startswith("2.8.") else None
    assert compiled.fused == {f"no, torch.compile refused: {why}" if why else AS_ASKED: len(compiled.layers)}


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


@torch._dynamo.config.patch(recompile_limit=1)
def test_more_graphs_than_torch_allows_are_not_made_and_the_summary_names_the_limit(tracing_compiler):
    transformer = tiny.wan_transformer()
    assert list(output(transformer, fuse=True)[1].fused) == [AS_ASKED]
    transformer = tiny.wan_transformer(ffn_dim=64)
    expected, plain = output(transformer, fuse=False)
    out, report = output(transformer, fuse=True)
    assert torch.equal(out, expected)
    assert apart_from_time(report) == apart_from_time(plain)
    assert list(report.fused.values()) == [2]
    assert "torch._dynamo.config.recompile_limit" in next(iter(report.fused))


def test_a_refusal_without_words_has_its_name_in_the_summary(tracing_compiler, monkeypatch):
    def refuse(*_, **__):
        raise torch._dynamo.exc.SkipFrame

    transformer = tiny.wan_transformer()
    monkeypatch.setattr(fused, "_compiled", lambda *_: refuse)
    assert output(transformer, fuse=True)[1].fused == {"no, torch.compile refused: SkipFrame": 2}


def test_what_the_block_itself_refuses_is_no_word_of_the_compiler(tracing_compiler):
    transformer = tiny.wan_transformer()
    linear = transformer.blocks[0].ffn.net[2]
    whole = linear.weight
    with torch.no_grad(), enable(transformer, CONFIG, total_steps=1, fuse=True):
        linear.weight = torch.nn.Parameter(whole[:, 1:])
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            transformer(*INPUTS)
        linear.weight = whole
        transformer(*INPUTS)
        assert summary(transformer).fused == {AS_ASKED: 2}


@contextlib.contextmanager
def environment(**changes: str):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize(
    ("off", "why"),
    [
        (lambda: torch._dynamo.config.patch(disable=True), "torch.compile is switched off"),
        (lambda: environment(TORCHDYNAMO_DISABLE="1"), "torch.compile is switched off"),
        (lambda: torch.compiler.set_stance("force_eager"), "torch.compiler.set_stance says force_eager"),
        (lambda: torch.compiler.set_stance("fail_on_recompile"), "torch.compiler.set_stance says fail_on_recompile"),
        (lambda: FlopCounterMode(display=False), "inside _?FlopCounterMode"),
    ],
)
def test_where_compiling_is_switched_off_the_summary_says_so(tracing_compiler, off, why):
    transformer = tiny.wan_transformer()
    expected, plain = output(transformer, fuse=False)
    with off():
        out, report = output(transformer, fuse=True)
    assert torch.equal(out, expected)
    assert apart_from_time(report) == apart_from_time(plain)
    (reason,) = report.fused
    assert re.fullmatch(f"no, {why}", reason)
    assert graphs() == 0


def test_hooks_on_every_module_are_heard(tracing_compiler):
    transformer, heard = tiny.wan_transformer(), []

    def add_hook():
        hooks.enter_context(
            torch.nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(module))
        )

    with contextlib.ExitStack() as hooks:
        _, report = output(transformer, fuse=True, during=add_hook)
    assert report.fused == {"no, a hook is on every module": 2}
    assert set(heard) >= {transformer.blocks[0], transformer.blocks[1].attn1.to_q}


def test_blocks_are_compiled_again_when_hooks_are_gone(tracing_compiler):
    from diffusers import FirstBlockCacheConfig

    # another pipeline: diffusers 0.38 does not hear hooks that come after a transformer's first call
    pipe, plain = tiny.wan(num_layers=3), tiny.wan(num_layers=3)
    enable(plain, CONFIG, fuse=False)
    expected = tiny.run_wan(plain)
    enable(pipe, CONFIG, fuse=True)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    tiny.run_wan(pipe)
    assert summary(pipe).fused == {"no, a hook is on the block": 24}
    pipe.transformer.disable_cache()
    assert torch.equal(tiny.run_wan(pipe), expected)
    assert summary(pipe).fused == {AS_ASKED: 24}
    assert graphs() == 1


def test_a_forward_that_is_replaced_in_the_class_is_the_one_that_runs(tracing_compiler, monkeypatch):
    transformer = tiny.wan_transformer()
    kind = type(transformer.blocks[0])
    stock = kind.forward
    before, _ = output(transformer, fuse=True)
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: stock(*args, **kwargs) / 2)
    expected, _ = output(transformer, fuse=False)
    assert torch.equal(output(transformer, fuse=True)[0], expected)
    assert not torch.equal(expected, before)


@pytest.mark.parametrize("place", ["", "attn1.to_q", "norm1"])
@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "replaced forward", "another's forward"])
def test_hooks_inside_a_block_are_heard_whenever_they_come(tracing_compiler, place, kind):
    transformer = tiny.wan_transformer()
    module, heard = transformer.blocks[0].get_submodule(place), []

    def add_hook():
        if kind == "forward hook":
            module.register_forward_hook(lambda *_: heard.append(1))
        elif kind == "pre-hook":
            module.register_forward_pre_hook(lambda *_: heard.append(1))
        elif kind == "another's forward":
            heard.append(1)
            module.forward = transformer.blocks[1].get_submodule(place).forward
        else:
            stock = module.forward
            module.forward = lambda *args, **kwargs: [heard.append(1), stock(*args, **kwargs)][1]

    out, report = output(transformer, fuse=True, during=add_hook)
    assert heard == [1]
    assert torch.equal(out, output(transformer, fuse=False)[0])
    assert report.fused == {f"no, a hook is on {place or 'the block'}": 1, AS_ASKED: 1}


def test_gradients_are_left_to_the_plain_code(tracing_compiler):
    transformer = tiny.wan_transformer()
    hidden = tiny.noise(1, 16, 3, 8, 8).requires_grad_()
    with enable(transformer, CONFIG, total_steps=1, fuse=True):
        transformer(hidden, *INPUTS[1:], return_dict=False)[0].sum().backward()
        assert summary(transformer).fused == {"no, gradients are on": 2}
    assert hidden.grad.abs().sum() > 0
    assert graphs() == 0


WAN_14B, WAN_1_3B, HUNYUAN = (
    (75_600, 5120, 40),
    (75_600, 1536, 30),
    (115_200, 3072, 60),
)  # tokens, channels, blocks at 720p


@pytest.mark.parametrize(
    ("wanted", "device", "model", "steps", "why_not"),
    [
        (None, "cuda", WAN_14B, 50, None),
        (None, "cuda", WAN_1_3B, 50, None),
        (None, "cuda", HUNYUAN, 50, None),
        (None, "cuda", WAN_14B, 4, "4 steps of 75600 tokens do not pay for compiling"),
        (None, "cuda", (32_760, 1536, 30), 50, "50 steps of 32760 tokens do not pay for compiling"),
        (None, "cuda", (75_600, 256, 8), 50, "50 steps of 75600 tokens do not pay for compiling"),
        (None, "cuda", WAN_14B, None, "the number of steps is not known"),
        (None, "cpu", WAN_14B, 50, "not on a GPU"),
        (True, "cpu", (8, 8, 1), None, None),
    ],
)
def test_when_it_is_done(wanted, device, model, steps, why_not):
    tokens, channels, blocks = model

    class Hidden:
        shape = (1, tokens, channels)

        @staticmethod
        def numel():
            return tokens * channels

    Hidden.device = torch.device(device)
    with torch.no_grad():
        assert fused.BlockFusion(wanted, lambda: steps)._why_not(Hidden(), blocks) == why_not


def test_the_number_of_steps_is_that_of_the_run_under_way(tracing_compiler, monkeypatch):
    """As on a GPU, where nothing is said of fuse."""
    seen = []
    monkeypatch.setattr(
        fused.BlockFusion, "_why_not", lambda self, hidden, blocks: seen.append((self._steps(), blocks)) or "looked at"
    )
    pipe = tiny.wan(experts=2, num_layers=3)
    with enable(pipe, CONFIG):
        tiny.run_wan(pipe, steps=3)
    assert set(seen) == {(3, 3)}


def test_on_a_cpu_nothing_is_compiled_unasked(tracing_compiler):
    _, report = output(tiny.wan_transformer(), fuse=None)
    assert report.fused == {"no, not on a GPU": 2}
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


@pytest.mark.parametrize("wanted", ["no", 0, 1])
def test_anything_but_yes_no_and_none_is_refused_and_takes_nothing_off(wanted):
    transformer = tiny.wan_transformer()
    with enable(transformer, CONFIG, total_steps=1) as session:
        with pytest.raises(TypeError, match="fuse: expected True, False or None"):
            enable(transformer, CONFIG, total_steps=1, fuse=wanted)
        assert session_of(transformer) is session


def test_a_deleted_transformer_frees_its_weights_at_once():
    transformer = tiny.wan_transformer()
    enable(transformer, CONFIG, total_steps=1)
    weights = [weakref.ref(parameter) for parameter in transformer.parameters()]
    del transformer
    gc.collect()
    assert not any(reference() is not None for reference in weights)
