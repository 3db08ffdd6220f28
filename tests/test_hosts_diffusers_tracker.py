"""Step, branch and layer identity: schedulers, caches, guidance, experts, bare transformers, and what else moves
modules about.
"""

from __future__ import annotations

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
import tiny_families as families  # noqa: E402
import tiny_pipelines as tiny  # noqa: E402
from parkattn.hosts.diffusers import disable, enable, summary  # noqa: E402
from parkattn.planned import plan_key  # noqa: E402
from test_hosts_diffusers import EVERY_BLOCK, SPARSE, built, tolerance, trace  # noqa: E402

# numpy's complaint about schedulers of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.fixture
def wan():
    pipe = built("wan")
    scheduler = pipe.scheduler
    yield pipe
    disable(pipe)
    pipe.scheduler = scheduler


@pytest.fixture
def hunyuan():
    pipe = built("hunyuan")
    yield pipe
    disable(pipe)


def schedulers():
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return {
        "unipc": lambda: diffusers.UniPCMultistepScheduler(**flow),
        "dpm++": lambda: diffusers.DPMSolverMultistepScheduler(**flow),
        "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "lcm": lambda: diffusers.FlowMatchLCMScheduler(shift=3.0),
        "heun": lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0),
    }


@pytest.mark.parametrize("scheduler", schedulers())
def test_steps_are_counted_with_every_scheduler_that_replaces_one_on_the_first_and_second_run(wan, scheduler):
    enable(wan, SPARSE)
    tiny.run_wan(wan, steps=2)
    wan.scheduler = schedulers()[scheduler]()
    for _ in range(2):
        seen = trace(wan)
        tiny.run_wan(wan, steps=3)
        steps = [site.step for site, _ in seen if site.layer == 0 and site.branch == "cond"]
        assert steps == list(range(len(wan.scheduler.timesteps)))
        assert {site.total_steps for site, _ in seen} == {len(wan.scheduler.timesteps)}


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_sigmas_that_count_signal_give_the_noise_levels_of_those_that_count_noise():
    """Mochi's own scheduler inverts them."""
    found = []
    for inverted in (False, True):
        pipe = families.mochi()
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=inverted)
        enable(pipe, "quality", query_clusters=3, key_clusters=8)
        seen = trace(pipe)
        families.FAMILIES["mochi"].run(pipe, steps=16)
        found.append([(site.step, stats.phase, site.noise_levels) for site, stats in seen])
    levels = found[0][0][2]
    assert levels[0] == 1 and list(levels) == sorted(levels, reverse=True)
    for (step, phase, noise), (other_step, other_phase, signal) in zip(*found, strict=True):
        assert (step, phase) == (other_step, other_phase) and signal == pytest.approx(noise, abs=1e-6)


def test_steps_are_counted_where_contexts_carry_no_step(hunyuan):
    enable(hunyuan, SPARSE)
    seen = trace(hunyuan)
    tiny.run_hunyuan(hunyuan, steps=3, true_cfg_scale=3.0, negative_prompt="blurry")
    for branch in ("cond", "uncond"):
        assert [site.step for site, _ in seen if site.layer == 0 and site.branch == branch] == [0, 1, 2]
    assert {site.grid for site, _ in seen} == {(3, 4, 4)}
    assert all(site.text == slice(48, 48 + 64) for site, _ in seen)


def test_a_pipeline_that_opens_no_contexts_has_its_branches_told_apart_by_their_order():
    from PIL import Image

    pipe = tiny.wan(pipeline=diffusers.WanVideoToVideoPipeline)
    frames = [Image.new("RGB", (64, 64), (20 * i, 100, 200)) for i in range(9)]

    def run():
        return pipe(
            video=frames, prompt="a cat", negative_prompt="blurry", height=64, width=64, num_inference_steps=5, strength=0.8,
            max_sequence_length=16, generator=torch.Generator().manual_seed(0), output_type="latent",
        ).frames  # fmt: skip

    dense = run()
    enable(pipe, EVERY_BLOCK, dense_steps=0)
    seen = trace(pipe)
    torch.testing.assert_close(run(), dense, rtol=0, atol=tolerance(dense))
    where = [(site.step, site.branch, site.total_steps) for site, _ in seen if site.layer == 0]
    # strength 0.8 begins at step 1 of 5
    assert where == [(step, branch, 5) for step in (1, 2, 3, 4) for branch in ("forward 0", "forward 1")]


def test_a_scheduler_whose_run_is_over_does_not_count_the_run_of_another_pipeline(hunyuan):
    """Two pipelines with one transformer and a scheduler each; enabled on the first."""
    other = type(hunyuan)(**{**hunyuan.components, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)})
    other.set_progress_bar_config(disable=True)
    enable(hunyuan, SPARSE)
    tiny.run_hunyuan(hunyuan, steps=3)
    for _ in range(2):
        seen = trace(other)
        tiny.run_hunyuan(other, steps=3)
        assert [site.step for site, _ in seen if site.layer == 0] == [0, 1, 2]


def test_conditional_and_unconditional_plans_are_kept_apart(wan):
    enable(wan, SPARSE)

    def first_plans(**guidance):
        seen = trace(wan)
        tiny.run_wan(wan, **guidance)
        return {plan_key(site): stats.plan for site, stats in seen if site.step == 0}

    guided, unguided = first_plans(), first_plans(guidance_scale=1.0)
    assert {key.branch for key in guided} == {"cond", "uncond"}
    assert len(guided) == 4
    # the first step sees the same latents with and without guidance: so does the plan of the conditional branch
    assert {key.branch for key in unguided} == {"cond"}
    for key, plan in unguided.items():
        assert torch.equal(plan.keys.labels, guided[key].keys.labels)
    last = wan.transformer.config.num_layers - 1
    labels = [plan.queries.labels for key, plan in guided.items() if key.layer == last]
    assert not torch.equal(*labels)


def test_the_second_expert_of_wan22_does_not_restart_the_warm_up():
    pipe = built("wan2.2")
    with enable(pipe, SPARSE, dense_steps=1):
        seen = trace(pipe)
        tiny.run_wan(pipe, steps=6)
        report = summary(pipe)
    by_expert = {
        name: [(site.step, stats.phase) for site, stats in seen if site.transformer == name]
        for name in ("transformer", "transformer_2")
    }
    handover = min(step for step, _ in by_expert["transformer_2"])
    assert handover > 1
    assert {phase for step, phase in by_expert["transformer"] if step == 0} == {"dense"}
    assert {phase for step, phase in by_expert["transformer_2"] if step == handover} == {"refresh"}
    assert "dense" not in {phase for _, phase in by_expert["transformer_2"]}
    assert [row["transformer"] for row in report.layers] == ["transformer"] * 2 + ["transformer_2"] * 2


def test_two_videos_in_one_batch_equal_dense_with_every_block(wan, hunyuan):
    for pipe, run, prompts in (
        (wan, tiny.run_wan, ["a cat", "two dogs on the beach"]),
        (hunyuan, tiny.run_hunyuan, ["a cat", "two dogs on the beach"]),
    ):
        extra = {"negative_prompt": ["blurry", "blurry"]} if run is tiny.run_wan else {}
        dense = run(pipe, prompt=prompts, **extra)
        with enable(pipe, EVERY_BLOCK):
            torch.testing.assert_close(run(pipe, prompt=prompts, **extra), dense, rtol=0, atol=tolerance(dense))


def test_a_video_is_the_same_alone_and_in_a_batch_of_equals(hunyuan):
    enable(hunyuan, SPARSE)
    latents = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    alone = tiny.run_hunyuan(hunyuan, latents=latents)
    twice = tiny.run_hunyuan(hunyuan, prompt=["a cat walks on the grass"] * 2, latents=latents.repeat(2, 1, 1, 1, 1))
    # projections of a larger batch may round differently, attention and plans do not
    torch.testing.assert_close(twice, alone.repeat(2, 1, 1, 1, 1), rtol=0, atol=tolerance(alone))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_few_step_schedules_begin_dense_and_then_refresh_every_step(wan, steps):
    enable(wan, "wan2.1-1.3b", query_clusters=4, key_clusters=6)
    tiny.run_wan(wan, steps=steps, guidance_scale=1.0)
    assert summary(wan).steps == {"dense": [0], "refresh": list(range(1, steps)), "reuse": []}


def test_layers_that_a_cache_skips_refresh_when_their_own_plan_is_old(wan):
    steps, interval = 12, 3
    wan.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    try:
        enable(wan, SPARSE, refresh_interval=interval, reference_steps=1)
        seen = trace(wan)
        first = tiny.run_wan(wan, steps=steps)
        ran = {
            layer: [(site.step, stats.phase) for site, stats in seen if site.layer == layer and site.branch == "cond"]
            for layer in (0, 1)
        }
        assert len(ran[0]) == steps
        assert 1 < len(ran[1]) < steps, "the threshold must skip some steps and not all for this test to say anything"
        for calls in ran.values():
            refreshed = None
            for step, phase in calls:
                due = refreshed is None or step - refreshed >= interval
                assert phase == ("refresh" if due else "reuse"), (step, refreshed)
                refreshed = step if due else refreshed
        assert torch.equal(tiny.run_wan(wan, steps=steps), first)
    finally:
        disable(wan)
        wan.transformer.disable_cache()


def forward(transformer, timestep: float, seed: int = 0, text_seed: int = 1):
    def noise(shape, s):
        return torch.randn(shape, generator=torch.Generator().manual_seed(s))

    return transformer(
        hidden_states=noise((1, 16, 3, 8, 8), seed),
        timestep=torch.tensor([timestep]),
        encoder_hidden_states=noise((1, 16, 16), text_seed),
        return_dict=False,
    )[0]


@pytest.mark.parametrize("timesteps", [(999.0, 600.0, 200.0), (0.0, 400.0, 900.0)], ids=["falling", "rising"])
def test_a_bare_transformer_counts_steps_by_its_timesteps(timesteps):
    transformer = tiny.wan_transformer()
    enable(transformer, SPARSE, total_steps=3, dense_steps=1, refresh_interval=1)
    seen = trace(transformer)
    with torch.no_grad():
        for _ in range(2):
            del seen[:]
            for timestep in timesteps:
                forward(transformer, timestep)
                forward(transformer, timestep, text_seed=2)
            where = [(site.step, site.branch, stats.phase) for site, stats in seen if site.layer == 0]
            assert where == [
                (0, "forward 0", "dense"), (0, "forward 1", "dense"),
                (1, "forward 0", "refresh"), (1, "forward 1", "refresh"),
                (2, "forward 0", "refresh"), (2, "forward 1", "refresh"),
            ]  # fmt: skip


def test_a_bare_transformer_forgets_a_run_that_failed_inside():
    transformer = tiny.wan_transformer()

    def two_steps():
        return [forward(transformer, timestep) for timestep in (999.0, 600.0)]

    with torch.no_grad():
        enable(transformer, SPARSE, total_steps=3)
        fresh = two_steps()
        session = enable(transformer, SPARSE, total_steps=3)
        hook = transformer.proj_out.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(transformer, 999.0, seed=7)
        assert len(session.method.plans) == 0
        hook.remove()
        assert all(map(torch.equal, two_steps(), fresh))
        assert summary(transformer).calls == {"dense": 0, "refresh": 2, "reuse": 2}


def test_a_new_video_after_reset_counts_from_its_first_step():
    """What cannot be seen: a video that begins at a lower timestep with the same prompt."""
    transformer = tiny.wan_transformer()
    session = enable(transformer, SPARSE, total_steps=3)
    seen = trace(transformer)
    with torch.no_grad():
        forward(transformer, 900.0)
        session.reset()
        forward(transformer, 600.0, seed=7)
    assert [(site.step, stats.phase) for site, stats in seen if site.layer == 0] == [(0, "refresh"), (0, "refresh")]


def test_forwards_of_one_step_without_names_keep_a_bounded_number_of_plans():
    """A scheduler that does not move on: every forward is a branch of its own, until there are too many."""
    from types import SimpleNamespace

    from parkattn.engine import Clock
    from parkattn.hosts.diffusers.tracker import StepTracker

    scheduler, told = SimpleNamespace(timesteps=torch.tensor([9.0, 5.0]), step_index=0), []
    clock = Clock()
    tracker = StepTracker(clock, lambda: scheduler, lambda: told.append("run"), lambda: told.append("drop"))
    branches = []
    for _ in range(10):
        tracker.begin_forward({})
        branches.append(clock.branch)
    assert len(set(branches)) == 10  # no plan is ever another forward's
    assert told == ["run", "drop", "drop"]  # the 9th and the 10th find none


def test_a_bare_transformer_asks_for_the_number_of_steps_at_once():
    with pytest.raises(ValueError, match="total_steps: expected the number of steps, got None"):
        enable(tiny.wan_transformer())


def test_per_token_timesteps_do_not_hide_a_new_step():
    """Image-to-video gives its clean first frame the timestep 0."""
    transformer = tiny.wan_transformer()
    enable(transformer, SPARSE, total_steps=2)
    seen = trace(transformer)
    with torch.no_grad():
        for timestep in (900.0, 300.0):
            per_token = torch.full((1, 48), timestep)
            per_token[:, :16] = 0
            transformer(
                hidden_states=torch.zeros(1, 16, 3, 8, 8),
                timestep=per_token,
                encoder_hidden_states=torch.zeros(1, 16, 16),
                return_dict=False,
            )
    assert [site.step for site, _ in seen if site.layer == 0] == [0, 1]


def test_fused_projections_give_the_same_result(wan):
    enable(wan, SPARSE)
    apart = tiny.run_wan(wan)
    wan.transformer.fuse_qkv_projections()
    try:
        torch.testing.assert_close(tiny.run_wan(wan), apart, rtol=0, atol=tolerance(apart))
    finally:
        wan.transformer.unfuse_qkv_projections()
    assert summary(wan).calls["refresh"] > 0
