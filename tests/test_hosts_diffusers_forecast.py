"""Forwards that are forecast in diffusers pipelines: whatever stands around a transformer, and that nothing is left
behind.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
import tiny_families as families  # noqa: E402
import tiny_pipelines as tiny  # noqa: E402
from parkattn import ParkConfig, disable, enable, summary  # noqa: E402
from parkattn.hosts.diffusers.session import session_of  # noqa: E402
from parklab.research import ResearchConfig  # noqa: E402
from test_hosts_diffusers import everything_on, tolerance  # noqa: E402
from test_profiles_around import AROUND, CACHES, fresh_compiler, pytestmark  # noqa: E402, F401

STEPS = 12
# weights are random, so that forwards change much from step to step: a tolerance that no video should have
LOOSE = 0.3
EVERY_BLOCK = ResearchConfig(query_clusters=4, key_clusters=6, kmeans_iterations=2, top_p=1.0, dense_steps=0)
FORECAST = EVERY_BLOCK.replace(tolerance=LOOSE)


@pytest.fixture
def wan():
    return tiny.wan()


def counted(pipe) -> tuple[int, int]:
    """Forwards that ran: by the engine's count, and by a hook of a block's."""
    return summary(pipe).forwards["computed"], sum(summary(pipe).calls.values()) // len(summary(pipe).layers)


def test_without_a_tolerance_nothing_is_put_on_a_forward_and_nothing_changes(wan):
    stock = tiny.run_wan(wan, steps=STEPS)
    enable(wan, EVERY_BLOCK)
    assert wan.transformer._compiled_call_impl is None and summary(wan).forwards == {}
    kept = tiny.run_wan(wan, steps=STEPS)
    torch.testing.assert_close(kept, stock, rtol=0, atol=tolerance(stock, steps=STEPS))
    enable(wan, FORECAST)
    assert not torch.equal(tiny.run_wan(wan, steps=STEPS), kept)
    enable(wan, FORECAST, tolerance=0)
    assert torch.equal(tiny.run_wan(wan, steps=STEPS), kept)


KEEPS_ALL = {
    **{
        profile: ("park", profile, {"top_p": 1.0, "query_clusters": 3, "key_clusters": 8})
        for profile in ParkConfig.PROFILES
    },
    "mc-sparse": ("mc-sparse", None, {"top_k": 1.0, "group": 8, "least_tokens": 1, "dense_layers": ()}),
    "chipmunk": ("chipmunk", None, {"top_k": 1.0, "voxel": (1, 2, 2), "dense_layers": ()}),
}


@pytest.mark.parametrize("name", KEEPS_ALL)
def test_with_every_block_kept_and_no_tolerance_all_is_stock(wan, name):
    method, config, changes = KEEPS_ALL[name]
    stock = tiny.run_wan(wan, steps=STEPS)
    enable(wan, config, method=method, tolerance=0, **changes)
    # an anchor's residual is what two computations of one output differ by, and later steps add it
    torch.testing.assert_close(tiny.run_wan(wan, steps=STEPS), stock, rtol=0, atol=3 * tolerance(stock, steps=STEPS))
    found = summary(wan)
    assert found.calls["reuse"] + found.calls["refresh"] > 0 and found.density == 1 and found.forwards == {}


def test_forecast_forwards_are_not_run_and_disable_leaves_nothing(wan):
    stock = tiny.run_wan(wan, steps=STEPS)
    before = everything_on(wan)
    enable(wan, FORECAST)
    tiny.run_wan(wan, steps=STEPS)
    computed, ran = counted(wan)
    left_out = summary(wan).steps["forecast"]
    assert (
        computed == ran == 2 * (STEPS - len(left_out)) < 2 * STEPS and min(left_out) > 2 and max(left_out) < STEPS - 1
    )
    assert summary(wan).forwards["forecast"] == 2 * len(left_out) and "forecast" in str(summary(wan))
    assert session_of(wan).engine.state_bytes == 0
    disable(wan)
    assert everything_on(wan) == before and torch.equal(tiny.run_wan(wan, steps=STEPS), stock)


@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_a_transformer_does_not_change_a_forecast(name):
    make, run, put_on, profile = AROUND[name]
    config = ResearchConfig.profile(profile, query_clusters=3, key_clusters=8, kmeans_iterations=2, tolerance=LOOSE)
    pipe = make()
    enable(pipe, config)
    plain = run(pipe, steps=STEPS)
    forwards = summary(pipe).forwards
    assert forwards["forecast"]
    disable(pipe)
    off = name in CACHES or name == "compiled whole"
    put_on(pipe)
    fuse = True if name == "blocks fused by enable" else None
    enable(pipe, config, fuse=fuse)
    found = run(pipe, steps=STEPS)
    if off:
        (reason,) = summary(pipe).forwards["off"]
        assert ("step cache" if name in CACHES else "compiled whole") in reason and summary(pipe).forwards[
            "forecast"
        ] == 0
        enable(pipe, config, tolerance=0)
        assert torch.equal(run(pipe, steps=STEPS), found)
    else:
        assert {key: summary(pipe).forwards[key] for key in ("computed", "forecast")} == {
            key: forwards[key] for key in ("computed", "forecast")
        }
        torch.testing.assert_close(found, plain, rtol=0, atol=tolerance(plain, steps=STEPS))


def test_a_cache_of_another_package_is_seen_by_the_forward_that_it_replaced(wan):
    enable(wan, FORECAST)
    stock = wan.transformer.forward
    wan.transformer.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    tiny.run_wan(wan, steps=STEPS)
    (reason,) = summary(wan).forwards["off"]
    assert "replaced" in reason and __name__ in reason and counted(wan) == (0, 2 * STEPS)


def test_a_transformer_that_is_compiled_after_enable_runs_every_forward_and_says_so(wan):
    enable(wan, FORECAST)
    wan.transformer.compile(backend="eager")
    tiny.run_wan(wan, steps=STEPS)
    assert summary(wan).forwards["forecast"] == 0 and any(
        "compiled whole" in reason for reason in summary(wan).forwards["off"]
    )


@pytest.mark.parametrize(
    "between",
    ["nothing", "a failure between steps", "a failure in a forward", "a pipeline told to stop", "another size"],
)
def test_a_second_video_never_sees_the_first_ones_outputs(wan, between):
    enable(wan, FORECAST)
    fresh = tiny.run_wan(wan, steps=STEPS, seed=1)
    disable(wan)
    enable(wan, FORECAST)

    def stop(*_):
        raise KeyboardInterrupt

    def fail(pipe, step, timestep, tensors):
        if step == 5 and between == "a failure between steps":
            stop()
        if step == 5 and between == "a failure in a forward":
            hooks.append(pipe.transformer.proj_out.register_forward_hook(stop))
        pipe._interrupt = step >= 5 and between == "a pipeline told to stop"  # as diffusers' guide has it
        return tensors

    hooks, size = [], {"height": 32} if between == "another size" else {}
    with contextlib.suppress(KeyboardInterrupt):
        tiny.run_wan(wan, steps=STEPS, callback_on_step_end=fail, **size)
    for hook in hooks:
        hook.remove()
    assert session_of(wan).engine.state_bytes == 0
    assert torch.equal(tiny.run_wan(wan, steps=STEPS, seed=1), fresh)


def test_interleaved_pipelines_do_not_affect_each_other(wan):
    other = tiny.hunyuan(seed=5)
    enable(wan, FORECAST)
    enable(other, FORECAST)
    alone, other_alone, between = tiny.run_wan(wan, steps=STEPS), tiny.run_hunyuan(other, steps=STEPS), []

    def run_the_other(pipe, step, timestep, tensors):
        between.append(tiny.run_hunyuan(other, steps=STEPS) if step in (4, 8) else other_alone)
        return tensors

    assert torch.equal(tiny.run_wan(wan, steps=STEPS, callback_on_step_end=run_the_other), alone)
    assert all(torch.equal(latents, other_alone) for latents in between)


def test_two_experts_share_a_decision_and_no_line():
    pipe = tiny.wan(experts=2)
    enable(pipe, FORECAST)
    tiny.run_wan(pipe, steps=24)
    # the second expert begins where the noise falls below 0.875
    switch = next(step for step, level in enumerate(pipe.scheduler.sigmas.tolist()) if level < 0.875)
    left_out = set(summary(pipe).steps["forecast"])
    assert left_out and not left_out & {switch, switch + 1, switch + 2} and max(left_out) > switch


def test_a_step_cache_on_the_second_expert_alone_keeps_its_forwards():
    pipe = tiny.wan(experts=2)
    enable(pipe, FORECAST)
    tiny.run_wan(pipe, steps=24)
    switch = next(step for step, level in enumerate(pipe.scheduler.sigmas.tolist()) if level < 0.875)
    assert max(summary(pipe).steps["forecast"]) > switch
    pipe.transformer_2.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
    tiny.run_wan(pipe, steps=24)
    assert max(summary(pipe).steps["forecast"]) < switch
    (reason,) = summary(pipe).forwards["off"]
    assert "step cache" in reason
    pipe.transformer_2.disable_cache()
    tiny.run_wan(pipe, steps=24)
    assert max(summary(pipe).steps["forecast"]) > switch and not summary(pipe).forwards["off"]


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_bare_transformer_returns_what_its_forward_would(return_dict):
    transformer = tiny.wan_transformer()
    given = {"encoder_hidden_states": tiny.noise(1, 6, 16), "return_dict": return_dict}
    latents, outputs = tiny.noise(1, 16, 3, 4, 4), []
    with torch.no_grad(), enable(transformer, FORECAST, total_steps=STEPS) as session:
        for step in range(STEPS):
            out = transformer(latents, torch.tensor([1000.0 - 80 * step]), **given)
            outputs.append(out)
            latents = latents - 0.02 * out[0]
        forwards = session.summary().forwards
    assert forwards["forecast"] > 3 and forwards["computed"] + forwards["forecast"] == STEPS
    assert {type(out) for out in outputs} == {type(transformer(latents, torch.tensor([1.0]), **given))}
    assert {(out[0].shape, out[0].dtype) for out in outputs} == {(latents.shape, latents.dtype)}


def test_with_gradients_every_forward_runs_and_the_summary_says_why():
    transformer, (latents, words) = tiny.wan_transformer(), (tiny.noise(1, 16, 3, 4, 4), tiny.noise(1, 6, 16))
    with enable(transformer, FORECAST, total_steps=STEPS) as session:
        for step in range(STEPS):
            transformer(latents, torch.tensor([1000.0 - 80 * step]), encoder_hidden_states=words)
        assert session.summary().forwards["off"] == {"gradients are on": STEPS}


def test_a_pipeline_out_of_an_enabled_one_and_a_scheduler_without_noise_levels():
    pipe, kind = families.cogvideox(), families.FAMILIES["cogvideox"]
    enable(pipe, FORECAST)
    found = kind.run(pipe, steps=STEPS)
    forwards = summary(pipe).forwards
    assert forwards["forecast"]
    other = type(pipe).from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    assert (
        torch.equal(kind.run(other, steps=STEPS), found) and summary(other).forwards["forecast"] == forwards["forecast"]
    )
