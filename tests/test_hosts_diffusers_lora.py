"""Real LoRA through PEFT and diffusers' loader, before and after enable, fused and not, on and off."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
import tiny_pipelines as tiny  # noqa: E402
from parkattn import ParkConfig  # noqa: E402
from parkattn.hosts.diffusers import disable, enable, fused, summary  # noqa: E402
from test_hosts_diffusers import EVERY_BLOCK, SPARSE, everything_on, tolerance  # noqa: E402

# numpy's complaint about schedulers of diffusers
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FAMILIES = {"wan": (tiny.wan, tiny.run_wan), "hunyuan": (tiny.hunyuan, tiny.run_hunyuan)}
FILE = "pytorch_lora_weights.safetensors"  # diffusers 0.38 does not look for it without a network
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def weights(family, tmp_path):
    """A folder with LoRA weights of that family, as a training script saves them."""
    build, _ = family
    pipe = build()
    torch.manual_seed(7)
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS, init_lora_weights=False))
    layers = peft.utils.get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=layers)
    return tmp_path


@pytest.mark.parametrize("enabled", ["before", "after"])
def test_lora_weights_loaded_before_or_after_enable_go_through_the_method(family, weights, enabled):
    build, run = family
    pipe = build()
    plain = run(pipe)
    if enabled == "before":
        enable(pipe, EVERY_BLOCK)
    pipe.load_lora_weights(weights, weight_name=FILE)
    if enabled == "after":
        enable(pipe, EVERY_BLOCK)
    adapted = run(pipe)
    assert summary(pipe).calls["refresh"] > 0
    assert summary(pipe).dense_because.keys() == {"step 0 is one of the first 1 steps"}
    disable(pipe)
    dense = run(pipe)
    assert (dense - plain).abs().max() > tolerance(dense)
    torch.testing.assert_close(adapted, dense, rtol=0, atol=tolerance(dense))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.compile's about itself
@pytest.mark.parametrize("compiled", [False, True])
def test_fusing_scaling_and_unloading_while_enabled(family, weights, compiled, monkeypatch):
    monkeypatch.setattr(fused, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    build, run = family
    pipe = build()
    plain = run(pipe)
    pipe.load_lora_weights(weights, weight_name=FILE, adapter_name="motion")
    with enable(pipe, SPARSE, fuse=compiled):
        apart = run(pipe)
        pipe.fuse_lora()
        # fused weights round once more; a plan made from them may not move a token, so only rounding is left
        torch.testing.assert_close(run(pipe), apart, rtol=0, atol=tolerance(apart))
        pipe.unfuse_lora()
        pipe.set_adapters("motion", 0.5)
        half = run(pipe)
        assert (half - apart).abs().max() > tolerance(apart)
        pipe.unload_lora_weights()
        without = run(pipe)
        assert list(summary(pipe).fused) == (["yes, as asked"] if compiled else [])
    with enable(pipe, SPARSE):
        torch.testing.assert_close(run(pipe), without, rtol=0, atol=0)
    # unfusing subtracts what fusing added, up to rounding
    torch.testing.assert_close(run(pipe), plain, rtol=0, atol=tolerance(plain))


# weights are random, so that forwards change much from step to step: a tolerance that no video should have
FORECAST = {"tolerance": 0.3}


@pytest.mark.parametrize(
    ("profile", "changes", "steps"), [*((name, {}, 4) for name in ParkConfig.PROFILES), ("fast", FORECAST, 12)]
)
def test_adapters_come_and_go_between_videos(family, weights, profile, changes, steps):
    """Each video is that of a pipeline that never had another one: plans, residuals and outputs that forecasts continue
    do not outlive the weights.
    """
    build, run = family
    settings = {"query_clusters": 2, "key_clusters": 4, **changes}

    def made(pipe):
        return run(pipe, steps=steps), summary(pipe).steps.get("forecast")

    def alone(adapted):
        pipe = build()
        if adapted:
            pipe.load_lora_weights(weights, weight_name=FILE)
        with enable(pipe, profile, **settings):
            return made(pipe)

    (plain, left_out), (adapted, adapted_left_out) = alone(False), alone(True)
    assert (adapted - plain).abs().max() > tolerance(plain) and bool(left_out and adapted_left_out) == bool(changes)
    pipe = build()
    with enable(pipe, profile, **settings):
        assert torch.equal(run(pipe, steps=steps), plain)
        pipe.load_lora_weights(weights, weight_name=FILE)
        latents, forecast = made(pipe)
        assert torch.equal(latents, adapted) and forecast == adapted_left_out
        pipe.fuse_lora()
        torch.testing.assert_close(run(pipe, steps=steps), adapted, rtol=0, atol=tolerance(adapted, steps=steps))
        pipe.unfuse_lora()
        pipe.unload_lora_weights()
        # unfusing subtracts what fusing added, up to rounding
        latents, forecast = made(pipe)
        torch.testing.assert_close(latents, plain, rtol=0, atol=tolerance(plain, steps=steps))
        assert forecast == left_out and not (changes and summary(pipe).forwards["off"])


def test_an_adapter_added_to_the_transformer_leaves_and_takes_no_trace():
    pipe = tiny.wan()
    torch.manual_seed(7)
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
    dense, before = tiny.run_wan(pipe), everything_on(pipe)
    enable(pipe, EVERY_BLOCK)
    torch.testing.assert_close(tiny.run_wan(pipe), dense, rtol=0, atol=tolerance(dense))
    disable(pipe)
    assert everything_on(pipe) == before
    assert torch.equal(tiny.run_wan(pipe), dense)
