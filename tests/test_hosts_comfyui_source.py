"""PARK in ComfyUI's own Wan and HunyuanVideo, tiny ones, under its own samplers: COMFYUI_SOURCE names its folder."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from comfyui_stand_ins import KEEP_ALL, ROUNDING, SPARSE, STEPS, recorded_sites
from host_stand_ins import relative_error
from parkattn.hosts.comfyui import patch_model, summary_of


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
            importlib.import_module("transformers")  # looks for torchvision itself, and must not find the stand-ins
            for part in ("", ".ops", ".transforms", ".transforms.functional"):
                patch.setitem(sys.modules, f"torchvision{part}", mock.MagicMock(__spec__=None))
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
        unet_config={**unet, "dtype": torch.float32}, latent_format=getattr(comfy.latent_formats, latents)(), manual_cast_dtype=None,
        custom_operations=comfy.ops.disable_weight_init, optimizations={}, sampling_settings={"shift": 3.0}, memory_usage_factor=1.0,
    )  # fmt: skip
    model = getattr(comfy.model_base, made)(config, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


WAN = {"in_dim": 16, "out_dim": 16, "dim": 128, "ffn_dim": 128, "freq_dim": 32, "text_dim": 24}
WAN |= {"num_heads": 2, "num_layers": 2, "text_len": 16}


@pytest.fixture(scope="module")
def wan(comfy):
    return tiny(comfy, "WAN21", "Wan21", {"model_type": "t2v", **WAN})


@pytest.fixture(scope="module")
def hunyuan(comfy):
    sizes = {"hidden_size": 128, "num_heads": 2, "axes_dim": [16, 24, 24], "mlp_ratio": 1.0}
    sizes |= {"depth": 1, "depth_single_blocks": 2}
    inputs = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 8, "context_in_dim": 24, "patch_size": [1, 2, 2]}
    without = dict.fromkeys(("byt5", "meanflow", "use_cond_type_embedding", "meanflow_sum"), False)
    rest = {"theta": 256, "qkv_bias": True, "guidance_embed": True, "vision_in_dim": None}
    return tiny(comfy, "HunyuanVideo", "HunyuanVideo", {**sizes, **inputs, **without, **rest})


@pytest.fixture(scope="module")
def ltx(comfy):
    """It does not number its blocks; LTX-2 extends it."""
    sizes = {"cross_attention_dim": 128, "attention_head_dim": 64, "num_attention_heads": 2, "caption_channels": 24}
    return tiny(comfy, "LTXV", "LTXV", {"in_channels": 128, "num_layers": 2, **sizes})


@pytest.fixture(params=["wan", "hunyuan", "ltx"])
def model(request):
    return request.getfixturevalue(request.param)


def sampled(comfy: Any, model: Any, seed: int = 0, **how: Any) -> torch.Tensor:
    """KSampler's own path: comfy.sample.sample with guidance."""
    generator = torch.Generator().manual_seed(seed)
    channels = 128 if type(model.model).__name__ == "LTXV" else 16
    size = (1, channels, 3, 8, 8) if channels == 128 else (1, channels, 3, 16, 16)
    needed = {"attention_mask": torch.ones(1, 9, dtype=torch.long)} if channels == 128 else {}
    latent, extra = how.pop("latent", torch.zeros(size)), needed | how.pop("extra", {})
    noise = torch.randn(latent.shape, generator=generator)
    texts, pooled = torch.randn(2, 1, 9, 24, generator=generator), torch.randn(2, 1, 8, generator=generator)
    words = [[text, {"pooled_output": vector, **extra}] for text, vector in zip(texts, pooled, strict=True)]
    given = {
        "steps": STEPS, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "disable_pbar": True, "seed": 0,
    }  # fmt: skip
    given |= how
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, positive=[words[0]], negative=[words[1]], latent_image=latent, **given)


@pytest.mark.filterwarnings("ignore")
class TestWithSource:
    def test_every_block_kept_is_stock_and_fewer_are_not(self, comfy, model):
        stock = sampled(comfy, model)
        patched = patch_model(model, "paper", **KEEP_ALL)
        assert relative_error(sampled(comfy, patched), stock) < ROUNDING
        assert summary_of(patched).calls["dense"] == 0 and summary_of(patched).steps["refresh"] == [0, 2]
        assert relative_error(sampled(comfy, patch_model(model, "paper", **SPARSE)), stock) > 10 * ROUNDING
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

    def test_grid_and_text_are_where_the_model_has_them(self, comfy, wan, hunyuan, monkeypatch):
        sites = recorded_sites(monkeypatch)
        reference = {"ref_latent": torch.zeros(1, 16, 1, 16, 16)}
        for model, extra, grid, text in (
            (wan, {}, (3, 8, 8), None),
            (hunyuan, {}, (3, 8, 8), slice(192, 201)),
            (hunyuan, reference, None, slice(256, 265)),
        ):
            sites.clear()
            sampled(comfy, patch_model(model, min_tokens=0), extra=extra, cfg=1.0)  # its reference takes no batch
            assert {(site.grid, str(site.text)) for site in sites} == {(grid, str(text))}
            assert [site.step for site in sites if site.layer == 0] == list(range(STEPS)) and sites[
                0
            ].total_steps == STEPS

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
        x, words, pooled = (torch.randn(1, *shape) for shape in ((16, 3, 16, 16), (9, 24), (8,)))
        t, mask = torch.tensor([0.5]), torch.tensor([[1] * 5 + [0] * 4])
        options = {**patched.model_options["transformer_options"], "wrappers": patched.wrappers}
        options |= {"sigmas": t, "sample_sigmas": torch.tensor([0.5, 0.0])}
        stock, given = hunyuan.model.diffusion_model, {"guidance": t, "attention_mask": mask}
        with torch.no_grad():
            out = stock(x, t, words, pooled, **given, transformer_options=options)
            assert torch.equal(out, stock(x, t, words, pooled, **given, transformer_options={}))
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

    @pytest.mark.parametrize("sampler", ["heun", "dpm_2", "uni_pc", "dpmpp_2m", "dpmpp_2s_ancestral", "lcm"])
    def test_samplers_that_ask_between_steps_and_add_noise_are_followed(self, comfy, wan, sampler):
        stock, patched = sampled(comfy, wan, sampler_name=sampler), patch_model(wan, "paper", **KEEP_ALL)
        assert relative_error(sampled(comfy, patched, sampler_name=sampler), stock) < ROUNDING
        found = summary_of(patched)
        assert found.steps["refresh"] == [0, 2] and found.dense_because.keys() == {"cross-attention"}

    def test_context_windows_have_plans_of_their_own(self, comfy, wan):
        import comfy.context_windows as windows

        patched = patch_model(wan, "paper", **SPARSE, share_branches=True)
        schedule = windows.get_matching_context_schedule("standard_static")
        fuse = windows.get_matching_fuse_method("pyramid")
        patched.model_options["context_handler"] = windows.IndexListContextHandler(schedule, fuse, 2, 1, dim=2)
        sampled(comfy, patched)
        names = {row["transformer"]: row["refresh"] for row in summary_of(patched).layers}
        assert names == {"frames 0 to 1": 2, "frames 1 to 2": 2}

    def test_vace_blocks_have_plans_of_their_own(self, comfy):
        vace = {"vace_layers": 1, "vace_in_dim": 96, "model_type": "vace"}
        model = tiny(comfy, "WAN21_Vace", "Wan21", {**WAN, **vace})
        patched = patch_model(model, "paper", **KEEP_ALL)
        assert relative_error(sampled(comfy, patched), sampled(comfy, model)) < ROUNDING
        rows = [(row["transformer"], row["layer"]) for row in summary_of(patched).layers]
        assert rows == [("model", 0), ("model", 1), ("model, call 2", 0)]

    def test_a_compiled_model_gives_the_same(self, comfy, wan):
        patched = patch_model(wan, "paper", **SPARSE)
        eager = sampled(comfy, patched)
        whole = torch.compile(wan.get_model_object("diffusion_model"), backend="eager")
        compiled = wan.clone()
        compiled.add_object_patch("diffusion_model", whole)
        compiled = patch_model(compiled, "paper", **SPARSE)
        assert torch.equal(sampled(comfy, compiled), eager)
        assert summary_of(compiled).dense_because.keys() == {"cross-attention"}

    def test_profiles_run(self, comfy, model):
        for profile in ("paper", "quality", "fast"):
            patched = patch_model(model, profile, min_tokens=0)
            assert sampled(comfy, patched, steps=8).isfinite().all()
            assert sum(summary_of(patched).calls[phase] for phase in ("refresh", "reuse")) > 0
