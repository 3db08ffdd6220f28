"""A pipeline that somebody writes: which of diffusers' methods it must call, and what waits where it does not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from parkattn.hosts.diffusers import enable, summary
from test_hosts_diffusers import SPARSE
from tiny_pipelines import diffusers


class OwnPipeline(diffusers.DiffusionPipeline):
    bar = frees = True  # no arguments: diffusers takes those for modules

    def __init__(self, transformer, scheduler) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def __call__(self, inputs) -> torch.Tensor:
        self.scheduler.set_timesteps(tiny.STEPS)
        latents, times = inputs["hidden_states"], self.scheduler.timesteps
        for time in self.progress_bar(times) if self.bar else times:
            given = {**inputs, "hidden_states": latents, "timestep": time[None]}
            made = self.transformer(**given, return_dict=False)[0]
            latents = self.scheduler.step(made, time, latents, return_dict=False)[0]
        if self.frees:
            self.maybe_free_model_hooks()
        return latents


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("bar", [False, True])
def test_runs_are_counted_and_plans_wait_for_the_next_one_without_a_bar_and_without_an_end(bar, frees):
    transformer, inputs, _ = tiny.transformers()["wan"]
    pipe = OwnPipeline(transformer, tiny.wan().scheduler)
    pipe.bar, pipe.frees = bar, frees
    with enable(pipe, SPARSE) as session:
        first, counted = pipe(inputs), summary(pipe).calls
        held = session.engine.state_bytes
        assert (held > 0) == (not bar and not frees)
        assert torch.equal(pipe(inputs), first), "the second run has plans of its own"
        assert summary(pipe).calls == counted and counted["refresh"] > 0 < counted["reuse"]
        assert session.engine.state_bytes == held
