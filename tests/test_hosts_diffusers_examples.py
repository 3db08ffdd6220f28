"""Every file in examples/ runs: on tiny pipelines, and the small trained model in the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from parkattn.hosts.diffusers import disable
from test_hosts_diffusers_tracker import LowRank

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
    "small_model": on_the_shipped_model,
    "wan_text_to_video": on_wan,
    "wan22_text_to_video": on_wan22,
    "hunyuan_text_to_video": on_hunyuan,
    "wan_image_to_video": on_image_to_video,
    "wan_lora": with_lora,
    "wan_first_block_cache": with_cache,
}


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
