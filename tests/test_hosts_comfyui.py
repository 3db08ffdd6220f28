"""PARK in ComfyUI: a model that speaks to the hooks as ComfyUI's do, and, where its source is given, its own classes."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from parkattn.hosts.comfyui import patch_model, summary_of
from parkattn.hosts.comfyui_calls import step_of
from parkattn.hosts.comfyui_nodes import NODE_CLASS_MAPPINGS, block_numbers

ROOT = Path(__file__).parents[1]
SMALL = {
    "query_clusters": 4,
    "key_clusters": 6,
    "kmeans_iterations": 2,
    "min_tokens": 0,
    "dense_steps": 0,
    "refresh_interval": 2,
    "reference_steps": 4,
}
KEEP_ALL = {**SMALL, "top_p": 1.0}
SPARSE = {**SMALL, "top_p": None, "top_k": 0.34}
STEPS = 4


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# --- without ComfyUI ---------------------------------------------------------------------------------------------


def scaled_dot_product(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **_):
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class WanModel:
    """Two blocks of self- and cross-attention over [b, tokens, 2 heads of 8]; asks as ComfyUI's attention wrapper does."""

    patch_size = (1, 2, 2)
    blocks = (0, 1)

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}  # arguments of self-attention
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(2, 3, 16, 16, generator=generator) / 4

    def ask(self, q, k, v, options, **extra):
        given = {"heads": 2, "transformer_options": options, "_inside_attn_wrapper": True, **extra}
        override = options.get("optimized_attention_override")
        return override(scaled_dot_product, q, k, v, **given) if override else scaled_dot_product(q, k, v, **given)

    def _forward(self, x, timestep, context, transformer_options):
        tokens = x.unflatten(3, (-1, 2)).unflatten(5, (-1, 2)).sum((4, 6)).flatten(2).transpose(1, 2)
        for index in self.blocks:
            transformer_options["block_index"] = index
            q, k, v = (tokens @ weight for weight in self.weights[index])
            tokens = tokens + self.ask(q, k, v, transformer_options, **self.extra)
            tokens = tokens + self.ask(tokens, context, context, transformer_options)
        return x * 0.9 + tokens.mean(1)[:, :, None, None, None] * timestep


class Patcher:
    """What of ComfyUI's ModelPatcher the host uses. model_sampling: sigma falls linearly."""

    model_sampling = types.SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)

    def __init__(self, diffusion_model: Any) -> None:
        self.diffusion_model = diffusion_model
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, list[Any]] = {}
        self.callbacks: dict[str, list[Any]] = {}

    def clone(self) -> Patcher:
        other = Patcher(self.diffusion_model)
        other.model_options = copy.deepcopy(self.model_options)
        other.wrappers = {name: list(entries) for name, entries in self.wrappers.items()}
        other.callbacks = {name: list(entries) for name, entries in self.callbacks.items()}
        return other

    def get_model_object(self, name: str) -> Any:
        return getattr(self, name)

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, []).append(wrapper)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, []).append(callback)

    def call(self, kind):
        for callback in self.callbacks.get(kind, ()):
            callback(self)


class Executor:
    def __init__(self, model: Any, wrappers: list[Any]) -> None:
        self.original, self.class_obj, self.wrappers = model._forward, model, wrappers

    def __call__(self, *args: Any) -> Any:
        if not self.wrappers:
            return self.original(*args)
        return self.wrappers[0](Executor(self.class_obj, self.wrappers[1:]), *args)


@torch.no_grad()
def denoise(patcher: Patcher, seed: int = 0, steps: int = STEPS, told: bool = True) -> torch.Tensor:
    """A sampler: two branches in every step. told: whether it says its sigmas, as ComfyUI's do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 16, 2, 8, 8, generator=generator)
    contexts = torch.randn(2, 1, 5, 16, generator=generator)
    schedule = torch.linspace(1, 0, steps + 1)
    patcher.call("on_pre_run")
    try:
        for sigma in schedule[:-1]:
            outs = []
            for kind in (0, 1):
                options = {**patcher.model_options["transformer_options"], "cond_or_uncond": [kind], "uuids": [f"prompt {kind}"]}
                options |= {"sigmas": sigma[None], "sample_sigmas": schedule} if told else {}
                run = Executor(patcher.diffusion_model, patcher.wrappers.get("diffusion_model", []))
                outs.append(run(x, sigma, contexts[kind], options))
            x = x - 0.1 * (2 * outs[0] - outs[1])
    finally:
        patcher.call("on_cleanup")
    return x


def test_every_block_kept_is_dense_and_fewer_blocks_are_not():
    model = Patcher(WanModel())
    dense = denoise(model)
    assert relative_error(denoise(patch_model(model, "paper", **KEEP_ALL)), dense) < 1e-5
    assert relative_error(denoise(patch_model(model, "paper", **SPARSE)), dense) > 1e-4
    assert torch.equal(denoise(model), dense)  # the model that came in is as it was


def test_a_run_leaves_no_trace_in_the_next_one_and_no_plans_behind():
    patched = patch_model(Patcher(WanModel()), "paper", **SPARSE)
    denoise(patched, seed=1)
    first = summary_of(patched)
    assert first.state_bytes == 0 < first.peak_state_bytes
    again = denoise(patched, seed=2)
    assert torch.equal(again, denoise(patch_model(Patcher(WanModel()), "paper", **SPARSE), seed=2))
    assert summary_of(patched).calls == first.calls  # of the last run alone


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
    assert [(row["transformer"], row["layer"]) for row in summary_of(patched).layers] == [("model", 0), ("model, call 2", 0)]


def test_a_sigma_between_two_steps_belongs_to_the_earlier():
    levels = (1.0, 0.75, 0.5, 0.25)
    asked = {1.2: 0, 1.0: 0, 0.8: 0, 0.75: 1, 0.5: 2, 0.3: 2, 0.0: 3}
    assert [step_of(sigma, levels) for sigma in asked] == list(asked.values())


def test_what_cannot_be_patched_is_refused():
    class Flux:
        pass

    with pytest.raises(ValueError, match=r"^model: expected Wan or HunyuanVideo, got Flux; remove the node"):
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
    with pytest.raises(ValueError, match=r"^dense_blocks: expected numbers and ranges as in 0, 2-4, got 'two'; correct it"):
        block_numbers("0, two")


def defaults_of(node: Any) -> dict[str, Any]:
    return {name: spec[1]["default"] for name, spec in node.INPUT_TYPES()["required"].items() if len(spec) > 1}


def test_the_nodes_run_with_their_defaults():
    node, report = NODE_CLASS_MAPPINGS["ParkAttention"], NODE_CLASS_MAPPINGS["ParkAttentionSummary"]
    (patched,) = getattr(node(), node.FUNCTION)(Patcher(WanModel()), **{**defaults_of(node), "dense_blocks": "0", "top_p": 0.8})
    latent = {"samples": denoise(patched)}
    shown = getattr(report(), report.FUNCTION)(patched, latent)
    assert shown["result"][0] is latent and "min_tokens=8192" in shown["result"][1] == shown["ui"]["text"][0]


def test_the_custom_node_folder_declares_the_nodes():
    path = ROOT / "integrations/comfyui/parkattn_node/__init__.py"
    spec = importlib.util.spec_from_file_location("parkattn_node", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS.keys() == module.NODE_DISPLAY_NAME_MAPPINGS.keys() == {"ParkAttention", "ParkAttentionSummary"}


def test_the_workflow_gives_the_nodes_what_they_take():
    workflow = json.loads((ROOT / "integrations/comfyui/wan_t2v_park.json").read_text())
    ours = {entry["class_type"]: entry["inputs"] for entry in workflow.values() if entry["class_type"] in NODE_CLASS_MAPPINGS}
    assert ours.keys() == NODE_CLASS_MAPPINGS.keys()
    for name, inputs in ours.items():
        assert inputs.keys() == NODE_CLASS_MAPPINGS[name].INPUT_TYPES()["required"].keys()
    linked = [value[0] for entry in workflow.values() for value in entry["inputs"].values() if isinstance(value, list)]
    assert set(linked) <= workflow.keys()


# --- with ComfyUI's source ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comfy():
    """ComfyUI's package. torchvision, which it imports for other models, may be missing."""
    source = os.environ.get("COMFYUI_SOURCE")
    if not source:
        pytest.skip("needs ComfyUI's source: set COMFYUI_SOURCE to its folder, and have its requirements installed")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", ["comfyui", "--cpu"])
        patch.setattr(sys, "path", [source, *sys.path])
        if importlib.util.find_spec("torchvision") is None:
            patch.setitem(sys.modules, "torchvision", mock.MagicMock(__spec__=None))
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.ldm.wan.model
        import comfy.model_base
        import comfy.model_patcher
        import comfy.ops
        import comfy.sample

        yield comfy


def tiny(comfy: Any, made: str, latents: str, unet: dict[str, Any]) -> Any:
    config = types.SimpleNamespace(
        unet_config={**unet, "dtype": torch.float32},
        latent_format=getattr(comfy.latent_formats, latents)(),
        manual_cast_dtype=None,
        custom_operations=comfy.ops.disable_weight_init,
        optimizations={},
        sampling_settings={"shift": 3.0},
        memory_usage_factor=1.0,
    )
    model = getattr(comfy.model_base, made)(config, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


@pytest.fixture(scope="module")
def wan(comfy):
    sizes = {"dim": 128, "ffn_dim": 128, "freq_dim": 32, "text_dim": 24, "num_heads": 2, "num_layers": 2, "text_len": 16}
    return tiny(comfy, "WAN21", "Wan21", {"model_type": "t2v", "in_dim": 16, "out_dim": 16, **sizes})


@pytest.fixture(scope="module")
def hunyuan(comfy):
    sizes = {"hidden_size": 128, "num_heads": 2, "axes_dim": [16, 24, 24], "mlp_ratio": 1.0, "depth": 1, "depth_single_blocks": 2}
    inputs = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 8, "context_in_dim": 24, "patch_size": [1, 2, 2]}
    without = dict.fromkeys(("byt5", "meanflow", "use_cond_type_embedding", "meanflow_sum"), False)
    rest = {"theta": 256, "qkv_bias": True, "guidance_embed": True, "vision_in_dim": None}
    return tiny(comfy, "HunyuanVideo", "HunyuanVideo", {**sizes, **inputs, **without, **rest})


@pytest.fixture(params=["wan", "hunyuan"])
def model(request):
    return request.getfixturevalue(request.param)


def sampled(comfy: Any, model: Any, seed: int = 0, **how: Any) -> torch.Tensor:
    """KSampler's own path: comfy.sample.sample with guidance."""
    generator = torch.Generator().manual_seed(seed)
    latent = how.pop("latent", torch.zeros(1, 16, 3, 16, 16))
    noise = torch.randn(latent.shape, generator=generator)
    words = [[torch.randn(1, 9, 24, generator=generator), {"pooled_output": torch.randn(1, 8, generator=generator)}] for _ in range(2)]
    given = {"steps": STEPS, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "disable_pbar": True, "seed": 0, **how}
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, positive=[words[0]], negative=[words[1]], latent_image=latent, **given)


@pytest.mark.filterwarnings("ignore")
class TestWithSource:
    def test_every_block_kept_is_stock_and_fewer_are_not(self, comfy, model):
        stock = sampled(comfy, model)
        patched = patch_model(model, "paper", **KEEP_ALL)
        assert relative_error(sampled(comfy, patched), stock) < 1e-5
        assert summary_of(patched).calls["dense"] == 0 and summary_of(patched).steps["refresh"] == [0, 2]
        assert relative_error(sampled(comfy, patch_model(model, "paper", **SPARSE)), stock) > 1e-4
        assert torch.equal(sampled(comfy, model), stock)

    def test_layers_of_all_kinds_are_counted_and_other_calls_are_named(self, comfy, wan, hunyuan):
        for model, layers, foreign in (
            (wan, [0, 1], {"cross-attention"}),
            (hunyuan, [0, 1, 2], {"a call outside the numbered blocks"}),
        ):
            patched = patch_model(model, "paper", **SPARSE)
            sampled(comfy, patched)
            assert [row["layer"] for row in summary_of(patched).layers] == layers
            assert summary_of(patched).dense_because.keys() == foreign

    def test_a_second_prompt_is_unaffected_by_the_first(self, comfy, model):
        patched = patch_model(model, "paper", **SPARSE)
        sampled(comfy, patched, seed=1)
        assert summary_of(patched).state_bytes == 0 < summary_of(patched).peak_state_bytes
        fresh = sampled(comfy, patch_model(model, "paper", **SPARSE), seed=2)
        assert torch.equal(sampled(comfy, patched, seed=2), fresh)

    def test_two_samplers_in_one_graph_do_not_share_plans(self, comfy, model):
        first, second = {"last_step": 2, "force_full_denoise": False}, {"start_step": 2, "disable_noise": True}
        patched = patch_model(model, "paper", **SPARSE)
        middle = sampled(comfy, patched, **first)
        both = sampled(comfy, patched, latent=middle, **second)
        alone = [patch_model(model, "paper", **SPARSE) for _ in range(2)]
        apart = sampled(comfy, alone[1], latent=sampled(comfy, alone[0], **first), **second)
        assert torch.equal(both, apart)
        assert summary_of(patched).steps["refresh"] == [0, 1]  # the second sampler's own

    def test_two_patched_models_in_one_graph_keep_their_settings(self, comfy, wan):
        near, far = patch_model(wan, "paper", **KEEP_ALL), patch_model(wan, "paper", **SPARSE)
        sampled(comfy, near), sampled(comfy, far)
        assert summary_of(near).density == 1 > summary_of(far).density

    def test_an_earlier_override_gets_what_stays_dense(self, comfy, model):
        asked = []

        def earlier(func, *args, **kwargs):
            asked.append(args)
            return func(*args, **kwargs)

        other = model.clone()
        other.model_options["transformer_options"]["optimized_attention_override"] = earlier
        patched = patch_model(other, "paper", **{**SPARSE, "dense_steps": 1})
        sampled(comfy, patched)
        assert len(asked) == sum(summary_of(patched).dense_because.values())

    def test_a_patched_model_can_be_patched_by_other_nodes(self, comfy, wan):
        patched = patch_model(wan, "paper", **SPARSE)
        sampled(comfy, patched.clone())
        assert summary_of(patched).calls["refresh"] > 0

    def test_masks_and_short_sequences_are_declined(self, comfy, hunyuan, wan):
        patched = patch_model(wan, "paper", **{**SPARSE, "min_tokens": 193})
        assert torch.equal(sampled(comfy, patched), sampled(comfy, wan))
        assert "192 tokens are fewer than min_tokens=193" in summary_of(patched).dense_because
        patched = patch_model(hunyuan, "paper", **SPARSE)
        x, t, words, pooled = torch.randn(1, 16, 3, 16, 16), torch.tensor([0.5]), torch.randn(1, 9, 24), torch.randn(1, 8)
        mask = torch.tensor([[1] * 5 + [0] * 4])
        options = {
            **patched.model_options["transformer_options"],
            "wrappers": patched.wrappers,
            "sigmas": t,
            "sample_sigmas": torch.tensor([0.5, 0.0]),
        }
        stock = hunyuan.model.diffusion_model
        with torch.no_grad():
            out = stock(x, t, words, pooled, guidance=t, attention_mask=mask, transformer_options=options)
            assert torch.equal(out, stock(x, t, words, pooled, guidance=t, attention_mask=mask, transformer_options={}))
        assert summary_of(patched).dense_because["the call has a mask"] == 3

    def test_an_interrupted_sampler_releases_its_plans(self, comfy, wan):
        patched = patch_model(wan, "paper", **SPARSE)

        def interrupt(step, *_):
            if step == 1:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            sampled(comfy, patched, callback=interrupt)
        assert summary_of(patched).state_bytes == 0 < summary_of(patched).peak_state_bytes

    def test_the_sigma_window_is_the_models(self, comfy, wan):
        patched = patch_model(wan, "paper", **SPARSE, start_percent=0.3, end_percent=0.7)
        sampled(comfy, patched)
        sigmas = wan.model.model_sampling.percent_to_sigma
        schedule = comfy.samplers.calculate_sigmas(wan.model.model_sampling, "simple", STEPS)[:-1].tolist()
        inside = [step for step, sigma in enumerate(schedule) if sigmas(0.7) <= sigma <= sigmas(0.3)]
        sparse = summary_of(patched).steps
        assert sorted(sparse["refresh"] + sparse["reuse"]) == inside != []

    def test_profiles_run(self, comfy, model):
        for profile in ("paper", "quality", "fast"):
            patched = patch_model(model, profile, min_tokens=0)
            assert sampled(comfy, patched, steps=8).isfinite().all()
            assert sum(summary_of(patched).calls[phase] for phase in ("refresh", "reuse")) > 0
