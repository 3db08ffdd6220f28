"""PARK in ComfyUI, under models and a sampler that speak to its hooks as ComfyUI's do."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from comfyui_stand_ins import (
    KEEP_ALL,
    ROUNDING,
    SPARSE,
    STEPS,
    Executor,
    Patcher,
    WanModel,
    ask,
    denoise,
    recorded_sites,
)
from host_stand_ins import relative_error
from parkattn.hosts.comfyui import patch_model, summary_of
from parkattn.hosts.comfyui_calls import step_of
from parkattn.hosts.comfyui_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, block_numbers

ROOT = Path(__file__).parents[1]


def test_every_block_kept_is_dense_and_fewer_blocks_are_not():
    model = Patcher(WanModel())
    dense = denoise(model)
    assert relative_error(denoise(patch_model(model, "paper", **KEEP_ALL)), dense) < ROUNDING
    assert relative_error(denoise(patch_model(model, "paper", **SPARSE)), dense) > 10 * ROUNDING
    assert torch.equal(denoise(model), dense)  # the model that came in is as it was


def test_a_run_leaves_no_trace_in_the_next_one_and_no_plans_behind():
    patched = patch_model(Patcher(WanModel()), "paper", **SPARSE)
    denoise(patched, seed=1)
    first = summary_of(patched)
    assert first.state_bytes == 0 < first.peak_state_bytes
    again = denoise(patched, seed=2)
    assert torch.equal(again, denoise(patch_model(Patcher(WanModel()), "paper", **SPARSE), seed=2))
    assert summary_of(patched).calls == first.calls  # of the last run alone


def test_forwards_are_forecast_within_a_tolerance_and_not_beside_the_cache_of_another_node():
    steps, loose = 16, {**KEEP_ALL, "tolerance": 0.3}
    model = Patcher(WanModel())
    dense, patched = denoise(model, steps=steps), patch_model(model, "paper", **loose)
    found = denoise(patched, steps=steps)
    forwards, left_out = summary_of(patched).forwards, summary_of(patched).steps["forecast"]
    assert (
        forwards["forecast"] == 2 * len(left_out) == 2 * steps - forwards["computed"] > 0 and max(left_out) < steps - 1
    )
    assert relative_error(found, dense) > ROUNDING and summary_of(patched).state_bytes == 0
    denoise(patched, seed=1, steps=steps)
    assert torch.equal(denoise(patched, steps=steps), found)
    model.model_options["transformer_options"]["easycache"] = object()
    cached = patch_model(model, "paper", **loose)
    assert relative_error(denoise(cached, steps=steps), dense) < ROUNDING
    assert summary_of(cached).forwards["off"] == {"the model has a step cache: easycache": 2 * steps}


def test_layers_steps_and_branches_are_told_to_the_method():
    patched = patch_model(Patcher(WanModel()), "paper", **{**SPARSE, "dense_steps": 1}, dense_layers=(1,))
    denoise(patched)
    found = summary_of(patched)
    assert (found.steps["dense"], found.steps["refresh"], found.steps["reuse"]) == ([0, 1, 2, 3], [1, 3], [2])
    rows = [(row["layer"], row["dense"], row["refresh"], row["reuse"]) for row in found.layers]
    assert rows == [(0, 2, 4, 2), (1, 8, 0, 0)]  # of two branches
    assert found.dense_because["layer 1 is in dense_layers"] == 2 * STEPS


def test_a_clone_shares_the_state_and_the_summary():
    patched = patch_model(Patcher(WanModel()), "paper", **SPARSE)
    denoise(patched.clone())
    assert summary_of(patched).calls["refresh"] == summary_of(patched.clone()).calls["refresh"] > 0


def test_an_earlier_override_gets_what_stays_dense():
    asked: list[tuple[int, ...]] = []

    def earlier(func, q, *args, **kwargs):
        asked.append(tuple(q.shape))
        return func(q, *args, **kwargs)

    model = Patcher(WanModel())
    model.model_options["transformer_options"]["optimized_attention_override"] = earlier
    denoise(patch_model(model, "paper", **SPARSE))
    assert len(asked) == 2 * 2 * STEPS  # cross-attention: layers, branches, steps
    asked.clear()
    denoise(patch_model(model, "paper", **{**SPARSE, "dense_steps": 1}))
    assert len(asked) == 2 * 2 * STEPS + 2 * 2


@pytest.mark.parametrize(
    "changes, extra, reason",
    [
        ({}, {"mask": torch.zeros(32, 32)}, "the call has a mask"),
        ({}, {"attn_precision": torch.float64}, "the call asks for a precision of torch.float64"),
        ({"min_tokens": 33}, {}, "32 tokens are fewer than min_tokens=33"),
    ],
)
def test_declined_calls_are_stock_and_say_why(changes, extra, reason):
    model = Patcher(WanModel())
    model.diffusion_model.extra = extra
    patched = patch_model(model, "paper", **{**SPARSE, **changes})
    assert torch.equal(denoise(patched), denoise(model))
    found = summary_of(patched)
    assert found.dense_because == {reason: 2 * 2 * STEPS, "cross-attention": 2 * 2 * STEPS}


def test_steps_outside_the_sigma_window_are_dense():
    patched = patch_model(Patcher(WanModel()), "paper", **SPARSE, start_percent=0.25, end_percent=0.6)
    denoise(patched)  # sigmas 1, 0.75, 0.5, 0.25; the window is 0.75 to 0.4
    found = summary_of(patched)
    assert (found.steps["refresh"], found.steps["reuse"], found.steps["dense"]) == ([1], [2], [0, 3])
    assert found.dense_because["sigma is outside the window of 0.25 to 0.6"] == 2 * 2 * 2


def test_a_sampler_that_tells_no_sigmas_stays_dense():
    patched = patch_model(Patcher(WanModel()), "paper", **SPARSE)
    assert torch.equal(denoise(patched, told=False), denoise(Patcher(WanModel())))
    assert "the sampler gives no sigmas or sample_sigmas: the step is unknown" in summary_of(patched).dense_because


def test_a_failed_sampler_releases_its_plans():
    patched = patch_model(Patcher(WanModel()), "paper", **SPARSE)
    patched.diffusion_model.blocks = (0, 1, 2)  # there are no weights of a third
    with pytest.raises(IndexError):
        denoise(patched)
    assert summary_of(patched).state_bytes == 0 < summary_of(patched).peak_state_bytes


def test_two_calls_of_one_block_have_plans_of_their_own():
    patched = patch_model(Patcher(WanModel()), "paper", **SPARSE)
    patched.diffusion_model.blocks = (0, 0)
    denoise(patched)
    assert [(row["transformer"], row["layer"]) for row in summary_of(patched).layers] == [
        ("model", 0),
        ("model, call 2", 0),
    ]


def test_a_sigma_between_two_steps_belongs_to_the_earlier():
    levels = (1.0, 0.75, 0.5, 0.25)
    asked = {1.2: 0, 1.0: 0, 0.8: 0, 0.75: 1, 0.5: 2, 0.3: 2, 0.0: 3}
    assert [step_of(sigma, levels) for sigma in asked] == list(asked.values())


def test_what_cannot_be_patched_is_refused():
    class Flux:
        pass

    with pytest.raises(
        ValueError, match=r"^model: expected Wan, HunyuanVideo, LTX or MiniMax-H3, got Flux; remove the node"
    ):
        patch_model(Patcher(Flux()))
    patched = patch_model(Patcher(WanModel()))
    with pytest.raises(ValueError, match=r"^model: expected one without PARK"):
        patch_model(patched)
    with pytest.raises(ValueError, match=r"^model: expected one with PARK"):
        summary_of(Patcher(WanModel()))
    with pytest.raises(ValueError, match=r"^dense_layers: expected blocks from 0 to 1, got 2; remove it"):
        patch_model(Patcher(WanModel()), dense_layers=(0, 2))
    with pytest.raises(ValueError, match=r"^end_percent: expected more than start_percent=0.5, got 0.5; raise it"):
        patch_model(Patcher(WanModel()), start_percent=0.5, end_percent=0.5)


def test_dense_blocks_are_numbers_and_ranges():
    assert block_numbers(" 0, 2-4,,9") == (0, 2, 3, 4, 9)
    with pytest.raises(ValueError, match=r"^dense_blocks: expected numbers and ranges .*, got 'two'; correct it"):
        block_numbers("0, two")


def defaults_of(node: Any) -> dict[str, Any]:
    return {name: spec[1]["default"] for name, spec in node.INPUT_TYPES()["required"].items() if len(spec) > 1}


def test_the_nodes_run_with_their_defaults():
    node, report = NODE_CLASS_MAPPINGS["ParkAttention"], NODE_CLASS_MAPPINGS["ParkAttentionSummary"]
    inputs = {**defaults_of(node), "dense_blocks": "0", "top_p": 0.8}
    (patched,) = getattr(node(), node.FUNCTION)(Patcher(WanModel()), **inputs)
    latent = {"samples": denoise(patched)}
    shown = getattr(report(), report.FUNCTION)(patched, latent)
    assert shown["result"][0] is latent and "min_tokens=8192" in shown["result"][1] == shown["ui"]["text"][0]


def test_the_custom_node_folder_declares_the_nodes():
    path = ROOT / "integrations/comfyui/parkattn_node/__init__.py"
    spec = importlib.util.spec_from_file_location("parkattn_node", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS.keys() == {"ParkAttention", "ParkAttentionSummary"}
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()


def test_the_workflow_gives_the_nodes_what_they_take():
    workflow = json.loads((ROOT / "integrations/comfyui/wan_t2v_park.json").read_text())
    by_class = {entry["class_type"]: entry["inputs"] for entry in workflow.values()}
    ours = {name: by_class[name] for name in by_class.keys() & NODE_CLASS_MAPPINGS.keys()}
    assert ours.keys() == NODE_CLASS_MAPPINGS.keys()
    for name, inputs in ours.items():
        assert inputs.keys() == NODE_CLASS_MAPPINGS[name].INPUT_TYPES()["required"].keys()
    linked = [value[0] for entry in workflow.values() for value in entry["inputs"].values() if isinstance(value, list)]
    assert set(linked) <= workflow.keys()


def test_the_registry_entry_names_the_package_its_version_and_the_node():
    import tomllib

    import parkattn

    entry = tomllib.loads((ROOT / "integrations/comfyui/parkattn_node/pyproject.toml").read_text())
    assert entry["project"]["version"] == parkattn.__version__ and entry["project"]["dependencies"] == ["parkattn"]
    assert entry["tool"]["comfy"]["DisplayName"] in NODE_DISPLAY_NAME_MAPPINGS.values()


# LTX-2 and MiniMax-H3 make sound too and do not number their blocks: attention is called in the order of their classes


VIDEO = (1, 16, 2, 8, 8)  # latent; 128 tokens of LTX, 32 of MiniMax-H3


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
def denoise_sound(patcher: Patcher, seed: int = 0, steps: int = STEPS, **options: Any) -> torch.Tensor:
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
def test_every_block_kept_is_dense_and_fewer_blocks_are_not_in_models_with_sound(name):
    model = Patcher(MODELS[name][0]())
    dense = denoise_sound(model)
    assert relative_error(denoise_sound(patch_model(model, "paper", **KEEP_ALL)), dense) < ROUNDING
    patched = patch_model(model, "paper", **SPARSE)
    assert relative_error(denoise_sound(patched), dense) > 10 * ROUNDING
    assert [row["layer"] for row in summary_of(patched).layers] == list(range(MODELS[name][1]))
    assert summary_of(patched).calls["dense"] == 0 and summary_of(patched).state_bytes == 0


@pytest.mark.parametrize(
    ("name", "declined"),
    [("ltx", {"attention of sound": 3, "cross-attention": 3}), ("h3", {"a call over a part of the video tokens": 1})],
)
def test_only_attention_of_the_video_is_taken(name, declined):
    patched = patch_model(Patcher(MODELS[name][0]()), "paper", **SPARSE)
    denoise_sound(patched)
    assert summary_of(patched).dense_because == {reason: STEPS * count for reason, count in declined.items()}


def test_grid_and_what_is_packed_before_the_video_are_told_to_the_method(monkeypatch):
    sites = recorded_sites(monkeypatch)
    for model, layers, grid, text in (
        (LTXAVModel(), 3, (2, 8, 8), None),
        (MiniMaxH3Model(), 2, (2, 4, 4), slice(0, 11)),
    ):
        sites.clear()
        denoise_sound(patch_model(Patcher(model), min_tokens=0))
        assert {(site.grid, str(site.text)) for site in sites} == {(grid, str(text))}
        assert [(site.step, site.layer) for site in sites] == [
            (s, layer) for s in range(STEPS) for layer in range(layers)
        ]


def test_blocks_that_guidance_leaves_out_are_not_counted():
    patched = patch_model(Patcher(LTXAVModel()), "paper", **SPARSE)
    denoise_sound(patched, stg_self_attn_blocks=(1,))
    assert [row["layer"] for row in summary_of(patched).layers] == [0, 2]


@pytest.mark.parametrize("name", MODELS)
def test_where_another_node_replaces_blocks_calls_stay_dense_with_a_reason(name):
    model = Patcher(MODELS[name][0]())
    patched = patch_model(model, "paper", **SPARSE)
    replaced = {"patches_replace": {"dit": {("double_block", 0): object()}}}
    assert torch.equal(denoise_sound(patched, **replaced), denoise_sound(model))
    assert "another node replaces blocks: the layer is unknown" in summary_of(patched).dense_because


def test_forecasts_say_that_a_model_of_sound_has_none():
    patched = patch_model(Patcher(MiniMaxH3Model()), "paper", **{**KEEP_ALL, "tolerance": 0.3})
    denoise_sound(patched)
    assert summary_of(patched).forwards["off"] == {"the model returns a list": STEPS}


@pytest.mark.parametrize(("profile", "first"), [("quality", "anchor"), ("fast", "anchor"), ("paper", "dense")])
def test_a_sampler_of_two_steps_says_what_it_can_gain(profile, first):
    patched = patch_model(Patcher(LTXAVModel()), profile, min_tokens=0)
    denoise_sound(patched, steps=2)
    found = summary_of(patched)
    assert found.steps[first] == [0] and found.density < 1
    assert any(line.startswith("1 of the 2 steps of this sampler are dense") for line in found.advice)
    denoise_sound(patched, steps=8)
    assert not any("steps of this sampler" in line for line in summary_of(patched).advice)
