"""The profiles with anchors, residuals and shared plans beside everything else that users put around a model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
import tiny_families as families  # noqa: E402
import tiny_pipelines as tiny  # noqa: E402
from parkattn import ParkConfig  # noqa: E402
from parkattn.hosts.diffusers import disable, enable, fused, summary  # noqa: E402
from parkattn.reuse import History, Schedule  # noqa: E402
from test_hosts_diffusers import tolerance, trace  # noqa: E402
from test_hosts_diffusers_compile import pytestmark  # noqa: E402, F401 (pytest reads it)
from test_hosts_diffusers_pipelines import left_on  # noqa: E402
from test_hosts_diffusers_session import gradients_of  # noqa: E402

STEPS = 8
BLOCKS = {"query_clusters": 3, "key_clusters": 8}
CPU = torch.device("cpu")


def profile(name: str, **changes) -> ParkConfig:
    # short of reference_steps plans do not reach from anchor to anchor, and are refreshed in between
    return ParkConfig.profile(name, **BLOCKS, **changes)


def one_batch(pipe, steps=STEPS):
    return families.FAMILIES["ltx"].run(pipe, steps=steps)


def cache(config):
    def put_on(pipe):
        pipe.transformer.enable_cache(config)

    return put_on


def offload_model(pipe):
    import accelerate

    accelerate.cpu_offload_with_hook(pipe.transformer, CPU)


def offload_sequentially(pipe):
    import accelerate

    accelerate.cpu_offload(pipe.transformer, CPU)


def offload_groups(pipe):
    pipe.transformer.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type="block_level", num_blocks_per_group=1
    )


def nothing(pipe):
    pass


def compile_blocks(pipe):
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")


def compile_whole(pipe):
    pipe.transformer.compile(fullgraph=True, backend="eager")


TAYLOR = {"cache_interval": 2, "disable_cache_before_step": 3, "cache_identifiers": [r"blocks\.\d+\.attn1"]}
MAGNITUDES = {"num_inference_steps": STEPS, "mag_ratios": torch.linspace(1.0, 0.9, STEPS), "max_skip_steps": 2}
# name -> (pipeline, how to run it, what is put around it, profile)
AROUND = {
    "guidance in two forwards": (tiny.wan, tiny.run_wan, nothing, "quality"),
    "guidance in one batch": (families.ltx, one_batch, nothing, "fast"),
    "two experts": (lambda: tiny.wan(experts=2), tiny.run_wan, nothing, "fast"),
    "padded text": (tiny.hunyuan, tiny.run_hunyuan, nothing, "quality"),
    "compiled blocks": (tiny.wan, tiny.run_wan, compile_blocks, "fast"),
    "compiled whole": (tiny.wan, tiny.run_wan, compile_whole, "quality"),
    "blocks fused by enable": (tiny.wan, tiny.run_wan, nothing, "fast"),
    "FirstBlockCache": (tiny.wan, tiny.run_wan, cache(diffusers.FirstBlockCacheConfig(threshold=0.15)), "quality"),
    "TaylorSeer": (tiny.wan, tiny.run_wan, cache(diffusers.TaylorSeerCacheConfig(**TAYLOR)), "fast"),
    "MagCache": (tiny.wan, tiny.run_wan, cache(diffusers.MagCacheConfig(**MAGNITUDES)), "quality"),
    "model offload": (tiny.wan, tiny.run_wan, offload_model, "fast"),
    "sequential offload": (tiny.wan, tiny.run_wan, offload_sequentially, "quality"),
    "group offload": (tiny.wan, tiny.run_wan, offload_groups, "fast"),
}
# tokens of a call and guidance, where they are not Wan's; HunyuanVideo's guidance is distilled
SUMS = {"guidance in one batch": (48, 3.0), "padded text": (112, 1.0)}
CACHES = {"FirstBlockCache", "TaylorSeer", "MagCache"}


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    monkeypatch.setattr(fused, "COMPILER", "eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def follow(seen, config) -> Counter:
    """Each call did what the schedule says, given the steps that its layer and branch ran: phase -> calls."""
    schedule, last = Schedule(config), {}
    for site, stats in seen:
        key = site.transformer, site.layer, site.branch
        wanted = schedule.phase(site, History(last.get(key))).name
        assert stats.phase == wanted, (key, site.step)
        if wanted in ("anchor", "refresh"):
            last[key] = site.step
    return Counter(stats.phase for _, stats in seen)


@pytest.mark.parametrize("name", AROUND)
def test_with_every_block_kept_a_profile_is_stock_and_without_it_keeps_its_schedule(name):
    build, run, put_on, which = AROUND[name]
    pipe, fuse = build(), name == "blocks fused by enable"
    put_on(pipe)
    stock, before = run(pipe, steps=STEPS), left_on(pipe)
    tokens, guidance = SUMS.get(name, (48, 5.0))
    # a step rounds in attention, and once more in a residual that is nothing but rounding
    rounding = 2 * tolerance(stock, tokens, STEPS, guidance)

    enable(pipe, profile(which, top_p=1.0), fuse=fuse)
    torch.testing.assert_close(run(pipe, steps=STEPS), stock, rtol=0, atol=rounding)

    config = profile(which)
    session = enable(pipe, config, fuse=fuse)
    seen = trace(pipe)
    first, report = run(pipe, steps=STEPS), summary(pipe)
    assert {phase: count for phase, count in report.calls.items() if count} == follow(seen, config)
    assert min(report.calls[phase] for phase in ("anchor", "refresh", "reuse")) > 0
    assert bool(first.isfinite().all()) and report.density < 1 and not torch.equal(first, stock)
    ran = {site.step for site, _ in seen if site.layer == 1}
    assert (len(ran) < STEPS) == (name in CACHES), "a cache must skip something for this test to say anything"
    assert not fuse or set(report.fused) == {"yes, as asked"}
    assert torch.equal(run(pipe, steps=STEPS), first)
    assert report.peak_state_bytes > 0 == session.method.state_bytes == len(session.method.plans)

    disable(pipe)
    assert left_on(pipe) == before and torch.equal(run(pipe, steps=STEPS), stock)


def falling_forwards(inputs):
    shape = inputs["hidden_states"].shape
    return [
        {**inputs, "timestep": torch.tensor([timestep]), "hidden_states": tiny.noise(*shape, seed=i).requires_grad_()}
        for i, timestep in enumerate((900.0, 500.0))
    ]


def test_gradients_at_anchors_are_those_of_dense_attention_checkpointed_or_not():
    """Every forward of training is a run of its own, and its first step an anchor."""
    transformer, inputs, _ = tiny.transformers()["wan"]
    transformer.train()
    forwards = falling_forwards(inputs)
    dense = gradients_of(transformer, forwards)
    for checkpointing in ({}, {"gradient_checkpointing_func": None}):
        with enable(transformer, profile("fast"), total_steps=STEPS) as session:
            found = gradients_of(transformer, forwards, **checkpointing)
            assert summary(transformer).calls == {"dense": 0, "refresh": 0, "reuse": 0, "anchor": 2}
        assert session.method.state_bytes == 0
        for ours, theirs in zip(found, dense, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance(theirs, steps=1, guidance=1.0))


def test_halves_of_a_batch_share_a_plan_where_they_are_one_video_and_nowhere_else():
    def shared(build, run):
        pipe = build()
        with enable(pipe, profile("fast")):
            seen = trace(pipe)
            run(pipe)
        plans = [stats.plan for _, stats in seen if stats.plan is not None]
        return [torch.equal(*plan.mask.chunk(2)) and torch.equal(*plan.queries.labels.chunk(2)) for plan in plans]

    assert all(shared(families.ltx, lambda pipe: one_batch(pipe, steps=4)))
    assert all(shared(families.cogvideox, lambda pipe: families.FAMILIES["cogvideox"].run(pipe, steps=4)))
    two = {"prompt": ["a cat walks on the grass", "rain"], "negative_prompt": ["blurry"] * 2}
    assert not any(shared(tiny.wan, lambda pipe: tiny.run_wan(pipe, steps=4, **two)))


FASTER = {"spatial_attention_timestep_skip_range": (-1, -1), "unconditional_batch_timestep_skip_range": (-1, 1000)}


@pytest.mark.parametrize("which", ["quality", "paper"])
@pytest.mark.parametrize("name", ["cogvideox", "mochi"])
def test_a_cache_that_skips_the_unconditional_half_leaves_the_other_its_own_plans(name, which):
    """With every block kept its runs are stock; the conditional branch is filed under one name in a pair and another
    alone.
    """
    family = families.FAMILIES[name]
    # prompts of one length: nothing but the batch tells the branches of Mochi apart
    inputs = {key: torch.ones_like(x) if key.endswith("attention_mask") else x for key, x in family.inputs().items()}
    pipe = family.build()
    config = diffusers.FasterCacheConfig(
        **FASTER, unconditional_batch_skip_range=3, current_timestep_callback=lambda: 500, tensor_format="BFCHW"
    )
    pipe.transformer.enable_cache(config)

    def run(profiled=None):
        if profiled is not None:
            enable(pipe, profiled)
        return pipe(
            **inputs, num_inference_steps=12, generator=torch.Generator().manual_seed(0), output_type="latent"
        ).frames

    stock = run()
    torch.testing.assert_close(run(profile(which, top_p=1.0)), stock, rtol=0, atol=2 * tolerance(stock, 64, 12, 6.0))
    enable(pipe, profile(which))
    seen = trace(pipe)
    run()
    batches = {(site.branch, stats.density.shape[0], site.paired) for site, stats in seen}
    assert len(batches) == (3 if name == "mochi" else 2), "a cache must skip something for this test to say anything"


def test_the_peak_of_a_run_counts_residuals_that_were_dropped_before_its_end():
    pipe = tiny.wan()
    with enable(pipe, profile("fast")) as session:
        held = []
        method, call = type(session.method), type(session.method).__call__

        class Weighed(method):
            def __call__(self, *args):
                made = call(self, *args)
                held.append(self.state_bytes)
                return made

        session.method.__class__ = Weighed
        tiny.run_wan(pipe, steps=STEPS)
        assert summary(pipe).peak_state_bytes == max(held) > held[-1]
