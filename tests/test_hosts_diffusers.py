"""enable, disable, summary on whole pipelines: stock diffusers code with and without a method in its attention."""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import weakref

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from parkattn.hosts.diffusers import disable, enable, summary
from parklab.research import ResearchConfig

# numpy's complaint about schedulers of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
EVERY_BLOCK = ResearchConfig(query_clusters=4, key_clusters=6, kmeans_iterations=2, top_p=1.0)
SPARSE = ResearchConfig(
    query_clusters=4, key_clusters=6, kmeans_iterations=2, top_p=None, top_k=0.4, dense_steps=0, reference_steps=4
)
FAMILIES = {
    "wan": (tiny.wan, tiny.run_wan),
    "wan2.2": (functools.partial(tiny.wan, experts=2), tiny.run_wan),
    "hunyuan": (tiny.hunyuan, tiny.run_hunyuan),
}


@functools.cache
def built(family: str):
    return FAMILIES[family][0]()


@pytest.fixture(params=FAMILIES)
def family(request):
    """(pipeline, how to run it), with nothing enabled before and after."""
    pipe, run = built(request.param), FAMILIES[request.param][1]
    yield pipe, run
    disable(pipe)


@pytest.fixture
def wan():
    pipe = built("wan")
    yield pipe
    disable(pipe)


def tolerance(reference: torch.Tensor, tokens: int = 48 + 64, steps: int = tiny.STEPS, guidance: float = 5.0) -> float:
    """A sum of n terms in another order differs by n eps at most; guidance g multiplies by 2 g - 1, and every step adds
    its own.
    """
    return tokens * torch.finfo(torch.float32).eps * steps * (2 * guidance - 1) * reference.abs().max().item()


def trace(pipe) -> list:
    """From now on, every (site, stats) of the enabled method."""
    from parkattn.hosts.diffusers.session import session_of

    session = session_of(pipe)
    method, seen = session.method, []

    class Recorder:
        name = method.name

        def __call__(self, q, k, v, site, **options):
            out = method(q, k, v, site, **options)
            seen.append((site, out.stats))
            return out

        def __getattr__(self, name):
            return getattr(method, name)

    session.engine.method = Recorder()
    return seen


def test_with_every_block_the_latents_are_those_of_dense_attention(family):
    pipe, run = family
    dense = run(pipe)
    enable(pipe, EVERY_BLOCK)
    torch.testing.assert_close(run(pipe), dense, rtol=0, atol=tolerance(dense))
    assert summary(pipe).calls["refresh"] > 0


def test_a_sparse_run_differs_from_dense_by_more_than_the_tolerance(family):
    pipe, run = family
    dense = run(pipe)
    enable(pipe, SPARSE)
    assert (run(pipe) - dense).abs().max() > tolerance(dense)


def test_a_dense_method_and_the_dense_steps_run_the_stock_attention_bit_for_bit(family):
    pipe, run = family
    dense = run(pipe)
    enable(pipe, method="dense")
    assert torch.equal(run(pipe), dense)
    enable(pipe, SPARSE, dense_steps=tiny.STEPS)
    assert torch.equal(run(pipe), dense)
    assert summary(pipe).calls["refresh"] == summary(pipe).calls["reuse"] == 0


def everything_on(pipe) -> dict:
    """What a trace of enable could be left in: attributes of the pipeline, modules, hooks, processors and their
    attributes.
    """
    modules = [
        m
        for name in ("transformer", "transformer_2")
        if getattr(pipe, name, None) is not None
        for m in getattr(pipe, name).modules()
    ]
    found = {("pipe", name): id(value) for name, value in vars(pipe).items()}
    for i, module in enumerate(modules):
        for name, value in vars(module).items():
            found[i, name] = [*value] if isinstance(value, dict) else id(value)
        for name, value in vars(getattr(module, "processor", object())).items() if hasattr(module, "processor") else ():
            found[i, "processor", name] = id(value)
    return found


def test_disable_leaves_no_trace(family):
    pipe, run = family
    dense, before = run(pipe), everything_on(pipe)
    enable(pipe, SPARSE)
    assert everything_on(pipe) != before
    run(pipe)
    disable(pipe)
    assert everything_on(pipe) == before
    assert torch.equal(run(pipe), dense)
    disable(pipe)  # a second time does nothing
    assert everything_on(pipe) == before


def test_the_session_is_a_context_manager(wan):
    dense, before = tiny.run_wan(wan), everything_on(wan)
    with pytest.raises(KeyError, match="inside"), enable(wan, SPARSE):
        assert not torch.equal(tiny.run_wan(wan), dense)
        raise KeyError("inside")
    assert everything_on(wan) == before


def test_the_callers_random_state_is_left_alone(wan):
    enable(wan, SPARSE)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    tiny.run_wan(wan)
    assert torch.equal(torch.get_rng_state(), before)


def test_enabling_again_replaces_what_was_enabled(wan):
    enable(wan, SPARSE)
    once, stock = tiny.run_wan(wan), wan.transformer.blocks[0].attn1.processor.stock
    enable(wan, EVERY_BLOCK)
    enable(wan.transformer, SPARSE, total_steps=tiny.STEPS)
    enable(wan, SPARSE)
    assert wan.transformer.blocks[0].attn1.processor.stock is stock
    assert torch.equal(tiny.run_wan(wan), once)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("where", ["between steps", "inside a block"])
def test_after_an_exception_the_next_run_equals_a_fresh_one(family, where, step):
    pipe, run = family
    enable(pipe, SPARSE)
    fresh = run(pipe)

    def stop(*_):
        raise KeyboardInterrupt

    if where == "between steps":
        with pytest.raises(KeyboardInterrupt):
            run(pipe, seed=1, callback_on_step_end=lambda pipe, at, t, tensors: stop() if at == step else tensors)
    else:
        hooks = []

        def arm(pipe, at, t, tensors):
            for name in ("transformer", "transformer_2"):
                transformer = getattr(pipe, name, None)
                if transformer is not None and at + 1 == step:
                    hooks.append(transformer.proj_out.register_forward_hook(stop))
            return tensors

        arm(pipe, -1, None, None)
        with pytest.raises(KeyboardInterrupt):
            run(pipe, seed=1, callback_on_step_end=arm)
        for hook in hooks:
            hook.remove()
    assert torch.equal(run(pipe), fresh)


def test_a_refused_pipeline_stays_as_it_was(wan):
    before = everything_on(wan)
    with pytest.raises(
        ValueError, match=r"transformer: expected one of .*CogVideoX.*got Linear; this model stays dense"
    ):
        enable(torch.nn.Linear(2, 2), total_steps=4)
    with pytest.raises(TypeError, match="target: expected a diffusers pipeline"):
        enable(object())
    with pytest.raises(ValueError, match="summary: expected a pipeline or transformer on which"):
        summary(wan)
    odd, stock = wan.transformer.blocks[1].attn1, wan.transformer.blocks[1].attn1.processor
    odd.set_processor(lambda *args: None)
    with pytest.raises(ValueError, match="processor: expected one that calls dispatch_attention_fn"):
        enable(wan, SPARSE)
    odd.set_processor(stock)
    assert everything_on(wan) == before


def test_keywords_still_reach_the_stock_processor(wan):
    """diffusers drops every keyword, RoPE included, that the signature of a processor does not name."""
    import inspect

    for pipe, attention in (
        (wan, wan.transformer.blocks[0].attn1),
        (built("hunyuan"), built("hunyuan").transformer.transformer_blocks[0].attn),
    ):
        stock = inspect.signature(attention.processor.__call__)
        with enable(pipe, SPARSE):
            assert inspect.signature(attention.processor.__call__) == stock


def collect() -> None:
    """Twice: the first round frees the pipeline, and with it the entry that held the session."""
    gc.collect()
    gc.collect()


def pickled(pipe):
    copied, file = copy.copy(pipe), io.BytesIO()
    torch.save(pipe.transformer, file)
    file.seek(0)
    copied.transformer = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_what_is_enabled_is_stock_and_apart(copied):
    pipe = tiny.wan()
    dense = tiny.run_wan(pipe)
    session = weakref.ref(enable(pipe, SPARSE))
    sparse, report = tiny.run_wan(pipe), str(summary(pipe))
    other = copied(pipe)
    assert torch.equal(tiny.run_wan(other), dense)
    assert str(summary(pipe)) == report
    assert other.transformer.cache_context.__self__ is other.transformer
    with enable(other, SPARSE):
        assert torch.equal(tiny.run_wan(other), sparse)
    assert torch.equal(tiny.run_wan(other), dense) and torch.equal(tiny.run_wan(pipe), sparse)
    if copied is copy.deepcopy:
        del pipe
        collect()
        assert session() is None


def test_a_deleted_pipeline_takes_its_session_along():
    pipe = tiny.wan()
    session = weakref.ref(enable(pipe, SPARSE))
    tiny.run_wan(pipe)
    del pipe
    collect()
    assert session() is None
    bare = tiny.wan_transformer()
    session = weakref.ref(enable(bare, SPARSE, total_steps=tiny.STEPS))
    del bare
    collect()
    assert session() is None


def test_summary_counts_phases_and_names_every_dense_reason(wan):
    enable(wan, SPARSE, dense_steps=1, dense_last_steps=1, dense_layers=(1,), refresh_interval=2)
    assert "nothing has run yet" in str(summary(wan))
    tiny.run_wan(wan, steps=5)
    report = summary(wan)
    # layer 0, two branches: step 0 dense, 1 refresh, 2 reuse, 3 refresh, 4 dense; layer 1 always dense
    assert report.calls == {"dense": 4 + 10, "refresh": 4, "reuse": 2}
    assert report.steps == {"dense": [0, 1, 2, 3, 4], "refresh": [1, 3], "reuse": [2]}
    assert report.dense_because == {
        "layer 1 is in dense_layers": 10,
        "step 0 is one of the first 1 steps": 2,
        "step 4 is one of the last 1 steps": 2,
    }
    layer, always_dense = report.layers
    assert 0 < layer["density"] < 1
    assert 0 < layer["estimated_mass"] < 1
    assert (always_dense["density"], always_dense["estimated_mass"]) == (1, None)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    table = str(report)
    assert all(reason in table for reason in report.dense_because)
    (computed_by,) = report.backends
    assert computed_by in table and "PyTorch" in computed_by
    assert "3 steps" not in table.splitlines()[0]
    assert table.splitlines()[0].startswith("park: 5 steps dense, 2 steps refresh, 1 step reuse; mean density")


def test_the_summary_of_a_run_of_nans_is_json():
    """A checkpoint that overflows in half precision: the record beside the black video can still be read."""
    pipe = tiny.wan()
    with torch.no_grad():
        next(pipe.transformer.parameters()).fill_(torch.nan)
    enable(pipe, SPARSE, dense_steps=1)
    tiny.run_wan(pipe)
    report = summary(pipe)
    assert report.calls["refresh"] > 0 and all(layer["estimated_mass"] is None for layer in report.layers)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()
    assert "refresh" in str(report)


def test_a_processor_set_after_enable_is_reported_and_kept(wan):
    enable(wan, SPARSE)
    attention = wan.transformer.blocks[0].attn1
    ours, stock = attention.processor, attention.processor.stock
    theirs = type(stock)()
    attention.set_processor(theirs)
    tiny.run_wan(wan)
    assert summary(wan).dense_because == {"another processor was set after enable; call enable again": 1}
    disable(wan)
    assert attention.processor is theirs
    attention.set_processor(ours.stock)


def test_backend_and_parallelism_chosen_while_enabled_survive_disable(wan, monkeypatch):
    registry = pytest.importorskip("diffusers.models.attention_dispatch")._AttentionBackendRegistry
    monkeypatch.setattr(
        registry, "_active_backend", registry._active_backend
    )  # set_attention_backend sets it for every model
    processor = wan.transformer.blocks[0].attn1.processor
    enable(wan, SPARSE)
    wan.transformer.set_attention_backend("_native_math")
    tiny.run_wan(wan)
    disable(wan)
    assert processor._attention_backend == "_native_math"
    wan.transformer.reset_attention_backend()
    for block in wan.transformer.blocks:
        vars(block.attn1.processor).pop("_attention_backend", None)
