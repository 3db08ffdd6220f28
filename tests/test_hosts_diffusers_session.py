"""What a session remembers, and that it forgets: other videos, failures, experts one by one, training, pipelines out of
pipelines.
"""

from __future__ import annotations

import gc

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
import tiny_families as families  # noqa: E402
import tiny_pipelines as tiny  # noqa: E402
from parkattn import disable, enable, summary  # noqa: E402
from parkattn.hosts.diffusers.session import session_of  # noqa: E402
from test_hosts_diffusers import SPARSE, everything_on, tolerance, trace  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # numpy's complaint about schedulers of diffusers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
EVERY_BLOCK = SPARSE.replace(top_p=1.0, top_k=None)
STEPS = tiny.STEPS


def plans(target) -> int:
    return len(session_of(target).method.plans)


# disable leaves nothing behind


def test_the_summary_of_experts_enabled_one_by_one_is_of_both_and_they_are_disabled_together():
    pipe = tiny.wan(experts=2)
    enable(pipe, SPARSE)
    tiny.run_wan(pipe)
    together = summary(pipe)
    disable(pipe)
    before = everything_on(pipe)
    enable(pipe.transformer, SPARSE, total_steps=STEPS)
    enable(pipe.transformer_2, SPARSE, total_steps=STEPS)
    tiny.run_wan(pipe)
    apart = summary(pipe)
    assert sum(apart.calls.values()) == sum(together.calls.values()) == 2 * 2 * STEPS
    assert [(row["transformer"], row["layer"]) for row in apart.layers] == [
        (row["transformer"], row["layer"]) for row in together.layers
    ]
    assert apart.method == "park"
    # each expert alone has its own part of it
    halves = [summary(part) for part in (pipe.transformer, pipe.transformer_2)]
    assert sum(sum(half.calls.values()) for half in halves) == sum(apart.calls.values())
    disable(pipe)
    assert everything_on(pipe) == before


def test_enabling_one_expert_leaves_the_other_enabled():
    pipe = tiny.wan(experts=2)
    tiny.run_wan(pipe)  # which leaves things of its own on the pipeline
    before = everything_on(pipe)
    enable(pipe, SPARSE)
    first = pipe.transformer.blocks[0].attn1.processor
    enable(pipe.transformer_2, EVERY_BLOCK, total_steps=STEPS)
    assert pipe.transformer.blocks[0].attn1.processor is first
    tiny.run_wan(pipe)
    assert {row["transformer"] for row in summary(pipe).layers} == {"transformer", "transformer_2"}
    assert all(row["refresh"] + row["reuse"] for row in summary(pipe).layers)
    disable(pipe)
    assert everything_on(pipe) == before


def test_one_module_that_is_both_experts_is_enabled_once():
    pipe = tiny.wan(experts=2)
    pipe.transformer_2 = pipe.transformer
    dense, before = tiny.run_wan(pipe), everything_on(pipe)
    enable(pipe, EVERY_BLOCK)
    torch.testing.assert_close(tiny.run_wan(pipe), dense, rtol=0, atol=tolerance(dense))
    assert {row["transformer"] for row in summary(pipe).layers} == {"transformer"}
    disable(pipe)
    assert everything_on(pipe) == before


def test_processors_saved_while_enabled_are_stock_when_set_later():
    pipe = tiny.wan()
    dense, stock = tiny.run_wan(pipe), pipe.transformer.blocks[0].attn1.processor
    enable(pipe, SPARSE)
    sparse, saved = tiny.run_wan(pipe), dict(pipe.transformer.attn_processors)
    disable(pipe)
    pipe.transformer.set_attn_processor(dict(saved))
    assert torch.equal(tiny.run_wan(pipe), dense)
    enable(pipe, SPARSE)
    assert pipe.transformer.blocks[0].attn1.processor.stock is stock
    assert torch.equal(tiny.run_wan(pipe), sparse)
    disable(pipe)
    pipe.transformer.set_attn_processor(dict(saved))
    disable(pipe)
    assert pipe.transformer.blocks[0].attn1.processor is stock


# a second video never sees the first one's plan or padding


def hunyuan_forward(transformer, words: int, timestep: float, seed: int = 0):
    """words: how many of the 16 places for text are filled."""
    inputs = dict(tiny.transformers()["hunyuan"][1])
    inputs |= {"encoder_attention_mask": (torch.arange(16) < words)[None], "timestep": torch.tensor([timestep])}
    inputs |= {"hidden_states": tiny.noise(*inputs["hidden_states"].shape, seed=seed)}
    with torch.no_grad():
        return transformer(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("total_steps", [1, 50])
@pytest.mark.parametrize(
    "timesteps", [(900.0, 500.0), (500.0, 500.0), (100.0, 500.0)], ids=["falling", "constant", "rising"]
)
@pytest.mark.parametrize("named", [False, True])
def test_other_padding_on_a_bare_transformer_gets_a_plan_of_its_own(total_steps, timesteps, named):
    transformer = tiny.hunyuan_transformer()

    def both():
        found = []
        for words, timestep in zip((3, 8), timesteps, strict=True):
            if named:
                with transformer.cache_context("cond"):
                    found.append(hunyuan_forward(transformer, words, timestep))
            else:
                found.append(hunyuan_forward(transformer, words, timestep))
        return found

    dense = both()
    enable(transformer, EVERY_BLOCK, total_steps=total_steps)
    for ours, theirs in zip(both(), dense, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance(theirs, steps=1, guidance=1.0))
    calls = summary(transformer).calls
    assert calls["dense"] == calls["reuse"] == 0


@pytest.mark.parametrize("named", [False, True])
def test_other_latents_at_the_same_timestep_are_another_video(named):
    transformer = tiny.hunyuan_transformer()

    def forward(seed):
        if not named:
            return hunyuan_forward(transformer, 8, 500.0, seed)
        with transformer.cache_context("cond"):
            return hunyuan_forward(transformer, 8, 500.0, seed)

    with enable(transformer, SPARSE, total_steps=1):
        alone = forward(1)
    with enable(transformer, SPARSE, total_steps=1):
        forward(0)
        assert torch.equal(forward(1), alone)
        assert summary(transformer).calls["reuse"] == 0


def test_training_steps_at_random_timesteps_are_runs_of_their_own():
    """With one prompt for all, as in personalisation: nothing but training says that these are different videos."""
    transformer, inputs, _ = tiny.transformers()["wan"]
    transformer.train()
    with enable(transformer, SPARSE, total_steps=50):
        seen = trace(transformer)
        for seed, timestep in enumerate((900.0, 700.0, 300.0)):
            latents = tiny.noise(*inputs["hidden_states"].shape, seed=seed)
            transformer(
                **{**inputs, "hidden_states": latents, "timestep": torch.tensor([timestep])}, return_dict=False
            )[0].sum().backward()
    assert {stats.phase for _, stats in seen} == {"refresh"}
    assert {site.step for site, _ in seen} == {0}


def test_guidance_whose_branches_come_and_go_keeps_each_branch_its_plan():
    """A bare loop that leaves the unconditional branch, which comes first, out of some steps."""
    transformer, inputs, _ = tiny.transformers()["wan"]
    words = {"cond": tiny.noise(1, 16, 16, seed=1), "uncond": tiny.noise(1, 16, 16, seed=2)}
    with enable(transformer, SPARSE, total_steps=4), torch.no_grad():
        seen = trace(transformer)
        order = []
        for timestep, branches in ((900.0, ("uncond", "cond")), (600.0, ("cond",)), (300.0, ("uncond", "cond"))):
            for branch in branches:
                order.append(branch)
                transformer(
                    **{**inputs, "timestep": torch.tensor([timestep]), "encoder_hidden_states": words[branch]},
                    return_dict=False,
                )
        where = [(site.step, site.branch) for site, _ in seen if site.layer == 0]
    names = {"uncond": "forward 0", "cond": "forward 1"}
    assert where == [(step, names[branch]) for step, branch in zip((0, 0, 1, 2, 2), order, strict=True)]


# state is bounded


@pytest.mark.parametrize("latents", ["same", "other"])
def test_plans_do_not_grow_with_forwards_at_one_timestep(latents):
    transformer, inputs, _ = tiny.transformers()["wan"]
    layers = 2
    with enable(transformer, SPARSE, total_steps=50), torch.no_grad():
        for i in range(30):
            given = tiny.noise(*inputs["hidden_states"].shape, seed=i if latents == "other" else 0)
            transformer(**{**inputs, "hidden_states": given}, return_dict=False)
            assert plans(transformer) <= layers * (8 if latents == "same" else 1)


# failures


@pytest.mark.parametrize("where", ["between steps", "inside a forward", "interrupted"])
def test_a_failed_run_leaves_no_plan_behind(where):
    pipe = tiny.wan()
    enable(pipe, SPARSE)
    held = []

    def after_a_step(pipe, step, timestep, tensors):
        held.append(plans(pipe))
        if where != "inside a forward":
            raise KeyboardInterrupt if where == "interrupted" else MemoryError
        pipe.transformer.proj_out.register_forward_hook(lambda *_: 1 / 0)
        return tensors

    with pytest.raises((KeyboardInterrupt, MemoryError, ZeroDivisionError)):
        tiny.run_wan(pipe, callback_on_step_end=after_a_step)
    assert held[0] > 0 == plans(pipe)


def test_plans_are_gone_before_the_video_is_decoded():
    pipe = tiny.wan()
    enable(pipe, SPARSE)
    held = []
    decode = pipe.vae.decode
    pipe.vae.decode = lambda *args, **kwargs: held.append(plans(pipe)) or decode(*args, **kwargs)
    pipe(
        prompt="a cat",
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=2,
        max_sequence_length=16,
        output_type="pt",
    )
    assert held == [0] and summary(pipe).peak_state_bytes > 0


# a whole generation


def test_the_summary_of_a_long_video_counts_every_chunk():
    pipe = families.skyreels("SkyReelsV2DiffusionForcingPipeline")

    def run():
        return pipe(
            prompt=None, **{**families.SIZE, "num_frames": 25}, base_num_frames=9, overlap_history=1, **families.embeds(), guidance_scale=1.0,
            num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="latent", addnoise_condition=0,
        ).frames  # fmt: skip

    enable(pipe, SPARSE)
    forwards = []
    hook = pipe.transformer.register_forward_hook(lambda *_: forwards.append(1))
    for _ in range(2):  # and nothing of the video before
        forwards.clear()
        run()
        assert len(forwards) >= 3 * 3
        assert sum(summary(pipe).calls.values()) == 2 * len(forwards)
    hook.remove()


# gradients


def gradients_of(transformer, forwards: list[dict], **checkpointing) -> list[torch.Tensor]:
    """Of the sum over several forwards, in one backward pass."""
    transformer.zero_grad()
    if checkpointing:
        transformer.enable_gradient_checkpointing(**checkpointing)
    else:
        transformer.disable_gradient_checkpointing()
    sum(transformer(**inputs, return_dict=False)[0].square().sum() for inputs in forwards).backward()
    return [parameter.grad.clone() for parameter in transformer.parameters() if parameter.grad is not None]


def reentrant(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)


@pytest.mark.parametrize(
    "config", [SPARSE.replace(refresh_interval=1), SPARSE.replace(refresh_interval=4), EVERY_BLOCK]
)
@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("timesteps", [(900.0, 500.0, 100.0), (500.0, 500.0)], ids=["falling", "constant"])
def test_gradients_under_checkpointing_are_those_without_it(config, kind, timesteps):
    transformer, inputs, _ = tiny.transformers()["wan"]
    transformer.train()
    forwards = [
        {
            **inputs,
            "timestep": torch.tensor([timestep]),
            "hidden_states": tiny.noise(*inputs["hidden_states"].shape, seed=i).requires_grad_(),
        }
        for i, timestep in enumerate(timesteps)
    ]
    checkpointing = (
        {"gradient_checkpointing_func": reentrant} if kind == "reentrant" else {"gradient_checkpointing_func": None}
    )
    with enable(transformer, config, total_steps=50):
        plain = gradients_of(transformer, forwards)
        counted = summary(transformer).calls
        found = gradients_of(transformer, forwards, **checkpointing)
        # every forward is a run of its own, and what is computed again is not counted again
        assert summary(transformer).calls == counted == {"dense": 0, "refresh": 2, "reuse": 0}
    assert len(found) == len(plain)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance(theirs, steps=1, guidance=1.0))


def test_checkpointing_that_nobody_told_us_of_is_refused_with_a_reason():
    transformer, inputs, _ = tiny.transformers()["wan"]
    for block in transformer.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: torch.utils.checkpoint.checkpoint(
            forward, *args, use_reentrant=False
        )
    with enable(transformer, SPARSE, total_steps=50):
        out = transformer(**inputs, return_dict=False)[0]
        with pytest.raises(
            RuntimeError,
            match=r"expected a backward pass that does not call attention again.*enable_gradient_checkpointing",
        ):
            out.sum().backward()


def test_dense_steps_under_checkpointing_say_that_every_call_is_step_0():
    transformer, inputs, _ = tiny.transformers()["wan"]
    transformer.train()
    transformer.enable_gradient_checkpointing()
    with enable(transformer, SPARSE, total_steps=50, dense_steps=3):
        transformer(**inputs, return_dict=False)[0].sum().backward()
        (reason,) = summary(transformer).dense_because
    assert reason == "step 0 is one of the first 3 steps; under gradient checkpointing every call counts as step 0"


# pipelines out of pipelines


@pytest.mark.parametrize("kept", [False, True])
def test_a_pipeline_made_from_an_enabled_one_runs_as_it_did(kept):
    pipe = families.cogvideox()
    kind = families.FAMILIES["cogvideox"]
    enable(pipe, SPARSE)
    sparse, calls = kind.run(pipe), summary(pipe).calls
    before, pipe = pipe if kept else None, type(pipe).from_pipe(pipe)
    pipe.set_progress_bar_config(disable=True)
    gc.collect()
    for _ in range(2):
        assert torch.equal(kind.run(pipe), sparse)
        assert summary(pipe).calls == calls
        assert plans(pipe) == 0
    disable(pipe)
    assert session_of(pipe) is None
    del before


def test_a_pipeline_made_before_the_first_run_counts_its_steps():
    pipe, kind = families.cogvideox(), families.FAMILIES["cogvideox"]
    enable(pipe, SPARSE.replace(dense_steps=None))
    kept = pipe, type(pipe).from_pipe(pipe)
    kind.run(kept[1])
    wanted = summary(kept[1]).calls
    disable(kept[1])
    enable(pipe, SPARSE.replace(dense_steps=None))
    del kept
    pipe = type(pipe).from_pipe(pipe)
    gc.collect()
    kind.run(pipe)
    assert summary(pipe).calls == wanted and sum(wanted.values()) > wanted["dense"] > 0


# what the clock reads


@pytest.mark.parametrize("steps", [2, 5])
def test_noise_levels_are_the_schedulers_one_per_step(steps):
    for pipe, run in ((tiny.wan(), tiny.run_wan), (tiny.hunyuan(), tiny.run_hunyuan)):
        enable(pipe, SPARSE)
        seen = trace(pipe)
        run(pipe, steps=steps)
        (levels,) = {site.noise_levels for site, _ in seen}
        assert len(levels) == steps and list(levels) == sorted(levels, reverse=True) and levels[-1] > 0
        assert levels == tuple(pipe.scheduler.sigmas[:steps].tolist())
    pipe = families.cogvideox()  # whose scheduler has none
    enable(pipe, SPARSE)
    seen = trace(pipe)
    families.FAMILIES["cogvideox"].run(pipe)
    assert {site.noise_levels for site, _ in seen} == {None}
