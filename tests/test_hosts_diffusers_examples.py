"""What users write: the examples, a pipeline of their own, and wrong values for enable, disable and summary."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from parkattn.hosts.diffusers import disable, enable, summary
from test_errors import refused
from test_hosts_diffusers import SPARSE
from tiny_pipelines import diffusers

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # numpy's complaint about schedulers of diffusers
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's about itself
    pytest.mark.filterwarnings("ignore:Dynamo detected a call"),  # and about stock code of older releases
]
EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {"height": 64, "width": 64, "num_frames": 9, "output_type": "latent", "max_sequence_length": 16}
STEPS = {"num_inference_steps": 4}


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_wan(module):
    return module.generate(tiny.wan(), "a cat", **SMALL, **STEPS)[1]


def on_wan22(module):
    return module.generate(tiny.wan(experts=2), "a cat", **SMALL, **STEPS)[1]


def on_hunyuan(module):
    template = {"prompt_template": {"template": "{}", "crop_start": 0}}
    dense, sparse, report = module.generate(tiny.hunyuan(), "a cat", **SMALL, **STEPS, **template)
    assert dense.shape == sparse.shape
    return report


def on_image_to_video(module):
    from PIL import Image

    return module.generate(
        tiny.wan_image_to_video(), Image.new("RGB", (64, 64), "gray"), "a cat", compiler="eager", **SMALL, **STEPS
    )[1]


class LowRank(torch.nn.Module):
    """What PEFT puts around a projection."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(0)
        self.down = torch.randn(2, base.in_features, generator=generator)
        self.up = torch.randn(base.out_features, 2, generator=generator) * 0.1

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.T @ self.up.T


def with_lora(module):
    def load_lora(pipe):
        for block in pipe.transformer.blocks:
            block.attn1.to_q = LowRank(block.attn1.to_q)

    return module.generate(tiny.wan(), "a cat", load_lora, **SMALL)[1]


def with_cache(module):
    return module.generate(tiny.wan(), "a cat", **SMALL, num_inference_steps=12)[1]


def on_the_shipped_model(module, out):
    from parklab.studio.video import read_mp4

    pipe = module.WanPipeline.from_pretrained(module.CHECKPOINT)
    before = [block.attn1.processor for block in pipe.transformer.blocks]
    size = {"height": 64, "width": 96, "num_frames": 9}
    report = module.generate(
        pipe, "A red circle moves right over blue waves.", out, **size, guidance_scale=1.0, **STEPS
    )
    assert [block.attn1.processor for block in pipe.transformer.blocks] == before
    film = read_mp4(out)
    assert film.shape == (9, 64, 96, 3)
    # a small red sprite and nothing else that is red; of noise it would be 0.29
    assert 0.005 < (film[..., 0] > film[..., 2].astype(int) + 60).mean() < 0.1
    with pytest.raises(ValueError, match="unknown word 'cat'"):
        module.generate(pipe, "a cat moves right over blue waves", out)
    return report


TRIED = {
    "small_model": on_the_shipped_model, "wan_text_to_video": on_wan, "wan22_text_to_video": on_wan22,
    "hunyuan_text_to_video": on_hunyuan, "wan_image_to_video": on_image_to_video, "wan_lora": with_lora,
    "wan_first_block_cache": with_cache,
}  # fmt: skip


@pytest.mark.parametrize("name", TRIED)
def test_the_example_runs_and_reports_sparse_steps(name, tmp_path):
    torch._dynamo.reset()
    report = TRIED[name](load(name), *([tmp_path / "a.mp4"] if name == "small_model" else []))
    assert report.calls["anchor"] > 0 < report.calls["refresh"] + report.calls["reuse"]


def test_every_example_is_short_and_tried():
    elsewhere = {"multi_gpu"}  # by two ranks, in test_hosts_diffusers_parallel
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(TRIED) | elsewhere
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES.glob("*.py"))


def test_image_to_video_equals_dense_with_every_block():
    from PIL import Image

    from parkattn.hosts.diffusers import enable, summary
    from test_hosts_diffusers import EVERY_BLOCK, tolerance

    pipe, image = tiny.wan_image_to_video(), Image.new("RGB", (64, 64), "gray")
    dense = tiny.run_wan(pipe, image=image)
    enable(pipe, EVERY_BLOCK)
    torch.testing.assert_close(tiny.run_wan(pipe, image=image), dense, rtol=0, atol=tolerance(dense))
    assert summary(pipe).steps == {"dense": [0], "refresh": [1, 2, 3], "reuse": []}
    disable(pipe)


# A pipeline of somebody's own: what it must call, and what waits where it does not ----------------------


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


# Wrong values, and advice -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wan():
    return tiny.wan_transformer()


@pytest.mark.parametrize(
    "steps,error", [(-1, ValueError), (0, ValueError), (2.5, TypeError), ("x", TypeError), (True, TypeError)]
)
def test_a_number_of_steps_that_is_none_is_refused(wan, steps, error):
    refused(enable, wan, total_steps=steps, named="total_steps", came=str(steps), error=error)


@pytest.mark.parametrize("config", [5, 0, [], object()])
def test_a_config_that_is_none_is_refused(wan, config):
    refused(enable, wan, config, total_steps=50, named="config", came="", error=TypeError)


def test_a_dense_layer_that_the_model_has_not_is_refused(wan):
    refused(enable, wan, total_steps=50, dense_layers=(0, 2), named="dense_layers", came="2")
    with enable(wan, total_steps=50, dense_layers=(0, 1)):
        pass


@pytest.mark.parametrize("target", [None, 5, "pipe", object()])
@pytest.mark.parametrize("verb", [enable, disable, summary])
def test_a_target_without_a_transformer_is_refused(verb, target):
    refused(verb, target, named="target", came=type(target).__name__, error=TypeError)


@pytest.mark.parametrize("name", ["ltx", "cogvideox", "mochi", "hunyuan 1.5", "wan", "hunyuan"])
def test_a_model_that_borrows_a_preset_says_so_unless_it_was_set(name):
    transformer, _, _ = tiny.transformers()[name]
    borrows = name not in ("wan", "hunyuan")
    with enable(transformer, total_steps=50) as session:
        assert ("borrows" in str(session.summary())) == borrows
        assert len(session.summary().to_dict()["advice"]) == borrows
    with enable(transformer, {"top_p": 0.8}, total_steps=50) as session:
        assert not session.summary().advice
    with enable(transformer, method="dense", total_steps=50) as session:
        assert not session.summary().advice
