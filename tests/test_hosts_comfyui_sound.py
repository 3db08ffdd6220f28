"""PARK in ComfyUI's LTX-2 and MiniMax-H3, which make sound too and do not number their blocks: stand-ins call attention in
the order in which ComfyUI's classes do."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from comfyui_stand_ins import KEEP_ALL, ROUNDING, SPARSE, STEPS, Executor, Patcher, relative_error, scaled_dot_product
from parkattn.hosts.comfyui import patch_model, summary_of
from parkattn.site import AttentionOutput, AttentionStats, CallSite

VIDEO = (1, 16, 2, 8, 8)  # latent; 128 tokens of LTX, 32 of MiniMax-H3


def ask(
    options: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **how: Any
) -> torch.Tensor:
    given = {"transformer_options": options, "_inside_attn_wrapper": True, **how}
    override = options.get("optimized_attention_override")
    return (
        override(scaled_dot_product, q, k, v, heads, **given)
        if override
        else scaled_dot_product(q, k, v, heads, **given)
    )


class LTXVModel:
    """Three blocks: self-attention of video and of sound, attention between them."""

    patchifier = types.SimpleNamespace(patch_size=(1, 1, 1))
    transformer_blocks = range(3)
    inner_dim = 16


class LTXAVModel(LTXVModel):
    sound = 130  # tokens: more than the video has

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(3, 3, 16, 16, generator=generator) / 8

    def _forward(self, x, timestep, context, attention_mask=None, frame_rate=25, transformer_options=None, **kwargs):
        video, sound = x[0].flatten(2).transpose(1, 2), x[1].flatten(2).transpose(1, 2)
        for index in self.transformer_blocks:
            if index not in transformer_options.get("stg_self_attn_blocks", ()):
                q, k, v = (video @ weight for weight in self.weights[index])
                video = video + ask(transformer_options, q, k, v, 2)
            sound = sound + ask(transformer_options, sound, sound, sound, 2)
            video = video + ask(transformer_options, video[..., :8], sound, sound, 2).repeat(1, 1, 2)
        return [x[0] * 0.9 + video.transpose(1, 2).reshape(x[0].shape) * timestep, x[1] * 0.9]


class MiniMaxH3Model:
    """A refiner of text, then two blocks over [text, sound, video]."""

    patch_size = (1, 2, 2)
    blocks = range(2)
    sound = 3  # latents of each of two channels

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(2, 3, 16, 16, generator=generator) / 2

    def _forward(self, x, timestep, context, transformer_options=None, **kwargs):
        words = context + ask(
            transformer_options, context[:, None], context[:, None], context[:, None], 1, skip_reshape=True
        )
        video = x[0].unflatten(3, (-1, 2)).unflatten(5, (-1, 2)).sum((4, 6)).flatten(2).transpose(1, 2)
        rows = torch.cat([words, x[1].flatten(2).transpose(1, 2).repeat(1, 1, 2), video], 1)
        for index in self.blocks:
            q, k, v = ((rows @ weight).unflatten(-1, (2, 8)).transpose(1, 2) for weight in self.weights[index])
            rows = rows + ask(transformer_options, q, k, v, 2, skip_reshape=True)
        return [x[0] * 0.9 + rows[:, -32:].mean(1)[:, :, None, None, None] * timestep, x[1] * 0.9]


@torch.no_grad()
def denoise(patcher: Patcher, seed: int = 0, steps: int = STEPS, **options: Any) -> torch.Tensor:
    generator, model = torch.Generator().manual_seed(seed), patcher.diffusion_model
    sound = (1, 8, 1, model.sound) if isinstance(model, LTXVModel) else (1, 8, 2, model.sound)
    x = [torch.randn(shape, generator=generator) for shape in (VIDEO, sound)]
    context, schedule = torch.randn(1, 5, 16, generator=generator), torch.linspace(1, 0, steps + 1)
    patcher.call("on_pre_run")
    try:
        for sigma in schedule[:-1]:
            told = {"cond_or_uncond": [0], "uuids": ["prompt"], "sigmas": sigma[None], "sample_sigmas": schedule}
            given = {**patcher.model_options["transformer_options"], **told, **options}
            run = Executor(model, patcher.wrappers.get("diffusion_model", []))
            arguments = (None, 25, given) if isinstance(model, LTXVModel) else (given,)
            out = run(x, sigma, context, *arguments)
            x = [latent - 0.1 * found for latent, found in zip(x, out, strict=True)]
    finally:
        patcher.call("on_cleanup")
    return x[0]


MODELS = {"ltx": (LTXAVModel, 3), "h3": (MiniMaxH3Model, 2)}


@pytest.mark.parametrize("name", MODELS)
def test_every_block_kept_is_dense_and_fewer_blocks_are_not(name):
    model = Patcher(MODELS[name][0]())
    dense = denoise(model)
    assert relative_error(denoise(patch_model(model, "paper", **KEEP_ALL)), dense) < ROUNDING
    patched = patch_model(model, "paper", **SPARSE)
    assert relative_error(denoise(patched), dense) > 10 * ROUNDING
    assert [row["layer"] for row in summary_of(patched).layers] == list(range(MODELS[name][1]))
    assert summary_of(patched).calls["dense"] == 0 and summary_of(patched).state_bytes == 0


@pytest.mark.parametrize(
    ("name", "declined"),
    [("ltx", {"attention of sound": 3, "cross-attention": 3}), ("h3", {"a call over a part of the video tokens": 1})],
)
def test_only_attention_of_the_video_is_taken(name, declined):
    patched = patch_model(Patcher(MODELS[name][0]()), "paper", **SPARSE)
    denoise(patched)
    assert summary_of(patched).dense_because == {reason: STEPS * count for reason, count in declined.items()}


def test_grid_and_what_is_packed_before_the_video_are_told_to_the_method(monkeypatch):
    sites: list[CallSite] = []

    class Recording:
        name, state_bytes = "recording", 0

        def __call__(self, q, k, v, site):
            sites.append(site)
            return AttentionOutput(site.dense(), AttentionStats("dense", "recorded", q.new_ones(q.shape[:2])))

        def reset(self):
            pass

    monkeypatch.setattr("parkattn.hosts.comfyui.configured_method", lambda *_, **__: Recording())
    for model, layers, grid, text in (
        (LTXAVModel(), 3, (2, 8, 8), None),
        (MiniMaxH3Model(), 2, (2, 4, 4), slice(0, 11)),
    ):
        sites.clear()
        denoise(patch_model(Patcher(model), min_tokens=0))
        assert {(site.grid, str(site.text)) for site in sites} == {(grid, str(text))}
        assert [(site.step, site.layer) for site in sites] == [
            (s, layer) for s in range(STEPS) for layer in range(layers)
        ]


def test_blocks_that_guidance_leaves_out_are_not_counted():
    patched = patch_model(Patcher(LTXAVModel()), "paper", **SPARSE)
    denoise(patched, stg_self_attn_blocks=(1,))
    assert [row["layer"] for row in summary_of(patched).layers] == [0, 2]


@pytest.mark.parametrize("name", MODELS)
def test_where_another_node_replaces_blocks_calls_stay_dense_with_a_reason(name):
    model = Patcher(MODELS[name][0]())
    patched = patch_model(model, "paper", **SPARSE)
    replaced = {"patches_replace": {"dit": {("double_block", 0): object()}}}
    assert torch.equal(denoise(patched, **replaced), denoise(model))
    assert "another node replaces blocks: the layer is unknown" in summary_of(patched).dense_because


def test_forecasts_say_that_a_model_of_sound_has_none():
    patched = patch_model(Patcher(MiniMaxH3Model()), "paper", **{**KEEP_ALL, "tolerance": 0.3})
    denoise(patched)
    assert summary_of(patched).forwards["off"] == {"the model returns a list": STEPS}


@pytest.mark.parametrize(("profile", "first"), [("quality", "anchor"), ("fast", "anchor"), ("paper", "dense")])
def test_a_sampler_of_two_steps_says_what_it_can_gain(profile, first):
    patched = patch_model(Patcher(LTXAVModel()), profile, min_tokens=0)
    denoise(patched, steps=2)
    found = summary_of(patched)
    assert found.steps[first] == [0] and found.density < 1
    assert any(line.startswith("1 of the 2 steps of this sampler are dense") for line in found.advice)
    denoise(patched, steps=8)
    assert not any("steps of this sampler" in line for line in summary_of(patched).advice)
