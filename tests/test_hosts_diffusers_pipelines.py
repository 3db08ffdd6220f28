"""The whole family as pipelines: stock diffusers pipelines of every row of the table, with every block kept and with
some.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
import tiny_families as families  # noqa: E402
import tiny_newer_families as newer  # noqa: E402
import tiny_pipelines as tiny  # noqa: E402
from parkattn.compat import loops_of  # noqa: E402
from parkattn.hosts.diffusers import disable, enable, summary  # noqa: E402
from parkattn.models import MODELS, row_for  # noqa: E402
from test_hosts_diffusers import EVERY_BLOCK, SPARSE, everything_on, tolerance, trace  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # numpy's complaint about schedulers of diffusers
    pytest.mark.filterwarnings(
        "ignore:In CPU autocast"
    ),  # Mochi asks for autocast, which does nothing in float32 on a CPU
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FAMILIES = {**families.FAMILIES, **newer.FAMILIES}
ONE_OF_EACH = {"dense_steps": 1, "refresh_interval": 2, "reference_steps": 1}


@functools.cache
def built(name: str):
    return FAMILIES[name].build()


@pytest.fixture(params=FAMILIES)
def family(request):
    """(pipeline, its Family), with nothing enabled before and after."""
    pipe = built(request.param)
    yield pipe, FAMILIES[request.param]
    disable(pipe)


# what pipelines leave behind by themselves after every video: LTX's, and Cosmos 3's
OWN_TRACES = {("pipe", name) for name in ("_current_timestep", "_mixed_precision_config", "_mixed_precision_trace")}


def left_on(pipe) -> dict:
    return {name: value for name, value in everything_on(pipe).items() if name not in OWN_TRACES}


def test_every_row_of_the_table_runs_as_a_pipeline_somewhere():
    here = {type(built(name).transformer).__name__ for name in FAMILIES}
    elsewhere = {"WanTransformer3DModel", "HunyuanVideoTransformer3DModel"}  # text to video, in test_hosts_diffusers
    videos = {name for name, row in MODELS.items() if hasattr(diffusers, name) and not row.image}
    assert videos == here | elsewhere


def test_with_every_block_the_latents_are_those_of_dense_attention(family):
    pipe, kind = family
    dense = kind.run(pipe)
    enable(pipe, EVERY_BLOCK, **ONE_OF_EACH)
    # guidance is at most 6 here
    torch.testing.assert_close(kind.run(pipe), dense, rtol=0, atol=tolerance(dense, steps=families.STEPS, guidance=6.0))
    report = summary(pipe)
    # Mochi's stock code attends to one batch element after the other
    calls = kind.forwards * (kind.batch if type(pipe).__name__ == "MochiPipeline" else 1)
    assert report.calls == dict.fromkeys(("dense", "refresh", "reuse"), calls * len(report.layers) - kind.left_out)
    assert report.steps == {"dense": [0], "refresh": [1], "reuse": [2]}
    assert len(report.layers) == len(MODELS[type(pipe.transformer).__name__].attentions(pipe.transformer))


def test_disable_leaves_no_trace_and_a_second_video_is_like_the_first(family):
    pipe, kind = family
    dense, before = kind.run(pipe), left_on(pipe)
    enable(pipe, SPARSE)
    first = kind.run(pipe)
    assert (first - dense).abs().max() > tolerance(dense, steps=families.STEPS, guidance=6.0)
    other = kind.run(pipe, seed=1)
    assert not torch.equal(other, first)
    assert torch.equal(kind.run(pipe), first)
    assert summary(pipe).state_bytes == 0
    disable(pipe)
    assert left_on(pipe) == before
    assert torch.equal(kind.run(pipe), dense)


def test_pipelines_that_run_inside_each_others_steps_do_not_affect_each_other(family):
    pipe, kind = family
    other = built("ltx") if pipe is not built("ltx") else built("cogvideox")
    their = families.FAMILIES["ltx" if pipe is not built("ltx") else "cogvideox"]
    enable(pipe, SPARSE)
    enable(other, SPARSE)
    alone, other_alone, between = kind.run(pipe), their.run(other), []
    hook = pipe.transformer.register_forward_hook(lambda *_: between.append(their.run(other)))
    try:
        assert torch.equal(kind.run(pipe), alone)
    finally:
        hook.remove()
        disable(other)
    assert len(between) == kind.forwards * families.STEPS
    assert all(torch.equal(latents, other_alone) for latents in between)


def test_a_run_that_fails_inside_a_block_leaves_nothing_behind(family):
    pipe, kind = family
    enable(pipe, SPARSE)
    fresh = kind.run(pipe)
    seen = []

    def stop(*_):
        seen.append(1)
        if len(seen) == kind.forwards + 1:  # in the second step
            raise KeyboardInterrupt

    hook = row_for(pipe.transformer).all_blocks(pipe.transformer)[-1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        kind.run(pipe, seed=1)
    hook.remove()
    assert torch.equal(kind.run(pipe), fresh)


@pytest.mark.skipif("minimax h3" not in FAMILIES, reason="this diffusers lacks MiniMax-H3")
def test_the_transformer_for_references_is_enabled_too_and_every_loop_of_the_whole_pipeline_is_watched():
    pipe, kind = newer.minimax_h3("transformer_ref"), FAMILIES["minimax h3"]
    dense = kind.run(pipe)
    enable(pipe, EVERY_BLOCK, **ONE_OF_EACH)
    torch.testing.assert_close(kind.run(pipe), dense, rtol=0, atol=tolerance(dense, steps=families.STEPS, guidance=1.0))
    report = summary(pipe)
    assert report.calls == {"dense": 2, "refresh": 2, "reuse": 2} and {row["transformer"] for row in report.layers} == {
        "transformer_ref"
    }
    assert report.state_bytes == 0
    whole = SimpleNamespace(_blocks=diffusers.MiniMaxH3Blocks())
    assert {type(loop).__name__ for loop in loops_of(whole)} == {"MiniMaxH3DenoiseStep", "MiniMaxH3Ref2VADenoiseStep"}


@pytest.mark.parametrize("extra", [{}, {"ar_step": 1, "causal_block_size": 1}, {"ar_step": 5}], ids=str)
def test_diffusion_forcing_counts_the_iterations_of_its_loop(extra):
    """SkyReels-V2's long videos: every frame has a noise level of its own, and the scheduler of the pipeline counts
    nothing.
    """
    pipe = families.skyreels("SkyReelsV2DiffusionForcingPipeline")

    def run():
        return pipe(
            prompt=None, **families.SIZE, **families.embeds(), **extra, guidance_scale=5.0, num_inference_steps=3,
            generator=torch.Generator().manual_seed(0), output_type="latent",
        ).frames  # fmt: skip

    dense = run()
    enable(pipe, EVERY_BLOCK, **ONE_OF_EACH)
    seen = trace(pipe)
    ours, iterations = run(), pipe.num_timesteps
    assert iterations == 3 + 2 * min(extra.get("ar_step", 0), 3)
    torch.testing.assert_close(ours, dense, rtol=0, atol=tolerance(dense, steps=iterations))
    for branch in ("cond", "uncond"):
        assert [site.step for site, _ in seen if site.layer == 0 and site.branch == branch] == list(range(iterations))
    assert {site.total_steps for site, _ in seen} == {iterations}


@pytest.mark.parametrize("name", ["wan", "wan vace", "hunyuan", "cogvideox", "ltx", "mochi"])
def test_layers_that_a_guider_skips_are_not_attended_to_and_the_others_are(name):
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    transformer, inputs, _ = tiny.transformers()[name]
    layer, blocks = 0 if name == "hunyuan" else 1, "blocks" if name.startswith("wan") else "transformer_blocks"
    with torch.no_grad():
        whole = transformer(**inputs, return_dict=False)[0]
        enable(transformer, EVERY_BLOCK, total_steps=1, dense_steps=0)
        apply_layer_skip(transformer, LayerSkipConfig(indices=[layer], fqn=blocks))
        ours = transformer(**inputs, return_dict=False)[0]
        calls = {row["layer"] for row in summary(transformer).layers}
        disable(transformer)
        stock = transformer(**inputs, return_dict=False)[0]
    assert layer not in calls
    assert calls
    assert (stock - whole).abs().max() > tolerance(stock, steps=1)
    torch.testing.assert_close(ours, stock, rtol=0, atol=tolerance(stock, steps=1))


def test_skipping_attention_alone_is_refused_with_and_without_us():
    """diffusers keeps a list of processors it can skip, on which none of a model in the table stands."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    transformer = tiny.wan_transformer()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"WanAttnProcessor'> not registered"):
            apply_layer_skip(transformer, LayerSkipConfig(indices=[1], fqn="blocks", skip_ff=False))
        enable(transformer, EVERY_BLOCK, total_steps=1)


def test_windows_of_a_long_video_are_one_summary_though_its_pipeline_checks_no_inputs():
    made = families.ltx()
    parts = {name: getattr(made, name) for name in ("transformer", "scheduler", "vae", "text_encoder", "tokenizer")}
    pipe = families.quiet(diffusers.LTXI2VLongMultiPromptPipeline(**parts))
    pipe.encode_prompt = lambda **_: (families.words(), families.SOME_WORDS, families.words(2), families.SOME_WORDS)
    vae = {"latents_mean": torch.zeros(8), "latents_std": torch.ones(8), "config": SimpleNamespace(scaling_factor=1.0)}
    pipe.vae = SimpleNamespace(**vae)
    size = {"height": 128, "width": 128, "num_frames": 41, "temporal_tile_size": 24, "temporal_overlap": 8}
    session = enable(pipe, SPARSE)
    seen = trace(pipe)
    for run in (1, 2):
        held = session.method.state_bytes
        pipe(
            prompt="a",
            **size,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(0),
            skip_steps_sigma_threshold=None,
        )
        windows = sum(site.layer == site.step == 0 for site, _ in seen)
        assert windows > 1 and sum(summary(pipe).calls.values()) * run == len(seen)
        assert held == session.method.state_bytes == 0


def test_a_modular_pipeline_drops_plans_before_it_decodes_and_is_left_as_it_was():
    from diffusers.modular_pipelines.wan.modular_blocks_wan import WanBlocks

    source, pipe = tiny.wan(), WanBlocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in source.components.items() if name != "transformer_2"})
    held, decode = [], source.vae.decode
    source.vae.decode = lambda *args, **kwargs: (held.append(session.method.state_bytes), decode(*args, **kwargs))[1]
    loops = [block for block in pipe._blocks.sub_blocks.values() if hasattr(block, "sub_blocks")]
    before = [dict(vars(block)) for block in loops]
    with enable(pipe, "quality", query_clusters=3, key_clusters=8) as session:
        for _ in range(2):
            pipe(prompt="a cat", height=64, width=64, num_frames=9, num_inference_steps=4, max_sequence_length=16)
            assert summary(pipe).peak_state_bytes > 0 == session.method.state_bytes
            assert sum(summary(pipe).calls.values()) == 2 * 4 * 2
    assert held == [0, 0] and [dict(vars(block)) for block in loops] == before
