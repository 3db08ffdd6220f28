"""Models whose sequence is more than one video and its text: audio, given frames, second streams, keys alone, images."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("diffusers")
import diffusers
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

import tiny_models
import tiny_pipelines as tiny
from parkattn.hosts.diffusers import enable, fused, summary
from parkattn.hosts.diffusers.processor import MethodProcessor
from parkattn.models import MODELS, grid_of_packed_rows, references_of_packed_rows
from test_hosts_diffusers import EVERY_BLOCK, SPARSE, trace
from test_models import TINY, run, tolerance


def of(name):
    """(transformer, arguments of a forward, text span)."""
    return TINY[name] if name in TINY else pytest.skip("this diffusers lacks the class")


def test_audio_and_what_crosses_to_it_keep_their_processors():
    transformer, _, _ = of("ltx2")
    with enable(transformer, SPARSE, total_steps=1):
        ours = {
            name
            for name, module in transformer.named_modules()
            if isinstance(getattr(module, "processor", None), MethodProcessor)
        }
    assert ours == {"transformer_blocks.0.attn1", "transformer_blocks.1.attn1"}


@pytest.mark.parametrize("perturbed", [0.0, 1.0])
def test_a_perturbed_layer_is_not_attended_to_and_one_that_is_not_is(perturbed):
    """LTX-2's skip guidance: a mask of zeros takes the values for the attention of a layer."""
    transformer, inputs, _ = of("ltx2")
    inputs = {**inputs, "spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.full((1, 1, 1), perturbed)}
    dense = run(transformer, inputs)
    with enable(transformer, EVERY_BLOCK, total_steps=1, dense_steps=0):
        torch.testing.assert_close(run(transformer, inputs), dense, rtol=0, atol=tolerance(dense))
        assert [row["layer"] for row in summary(transformer).layers] == ([0, 1] if perturbed else [0])


def test_a_second_stream_of_the_video_is_no_text():
    """Motif's decoder blocks attend to the stream of its encoder, which is as long as their own."""
    of("motif")
    cls, sizes, inputs, text = tiny_models.newer()["motif"]
    transformer = tiny_models.made(cls, {**sizes, "num_decoder_layers": 1})
    dense = run(transformer, inputs)
    with enable(transformer, SPARSE, total_steps=1):
        seen = trace(transformer)
        run(transformer, inputs)
    assert [(site.text, site.grid) for site, _ in seen] == [(text, (3, 4, 4)), (text, (3, 4, 4)), (None, None)]
    with enable(transformer, EVERY_BLOCK, total_steps=1, dense_steps=0):
        torch.testing.assert_close(run(transformer, inputs), dense, rtol=0, atol=tolerance(dense))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_trained_sparse_mask_stays_dense_with_a_reason(monkeypatch):
    """Kandinsky 5's NABLA hands over a flex BlockMask."""
    monkeypatch.setattr(
        registry, "_active_backend", registry._active_backend
    )  # set_attention_backend sets it for every model
    transformer, inputs, _ = copy.deepcopy(of("kandinsky5"))
    transformer.set_attention_backend("flex")
    places = [torch.arange(size) for size in (2, 8, 8)]
    nabla = {"to_fractal": True, "sta_mask": torch.ones(1, 1, 2, 2, dtype=torch.bool), "P": 0.9}
    inputs = {**inputs, "hidden_states": tiny.noise(1, 2, 16, 16, 4), "visual_rope_pos": places, "sparse_params": nabla}
    dense = run(transformer, inputs)
    enable(transformer, SPARSE, total_steps=1)
    assert torch.equal(run(transformer, inputs), dense)
    ((reason, calls),) = summary(transformer).dense_because.items()
    assert "BlockMask" in reason and calls == 1


def packed(prefix: list[tuple[int, int]], grid=(3, 4, 2)) -> dict[str, torch.Tensor]:
    """prefix: (tag, timestep) of what is before the video, 8 rows each."""
    frames = torch.cartesian_prod(*(1.5 * torch.arange(size) for size in grid))
    rows = [*prefix, (0, 0)]
    lengths = [8] * len(prefix) + [len(frames)]
    tags, times = (
        torch.repeat_interleave(torch.tensor(column), torch.tensor(lengths)) for column in zip(*rows, strict=True)
    )
    places = torch.cat([torch.zeros(8 * len(prefix), 3), frames])
    return {"position_ids": places, "token_tags": tags, "timestep_indices": times}


@pytest.mark.parametrize(
    "prefix",
    [[], [(1, 1)], [(1, 2), (0, 1), (2, 0)], [(1, 2), (0, 1)], [(1, 1), (0, 1), (2, 1), (0, 1), (2, 0)]],
    ids=str,
)
@pytest.mark.parametrize("grid", [(3, 4, 2), (1, 4, 2), (2, 1, 3), (2, 3, 1)], ids=str)
def test_the_video_of_a_packed_sequence_is_found_behind_text_frames_references_and_audio(prefix, grid):
    assert grid_of_packed_rows(packed(prefix, grid), None) == grid
    assert grid_of_packed_rows({"position_ids": torch.zeros(3, 3)}, None) is None


def test_the_step_of_a_packed_sequence_is_that_of_its_video():
    """MiniMax-H3's timesteps rise, and what is given has the last of them all along."""
    transformer, inputs, _ = of("minimax h3")
    with enable(transformer, SPARSE, total_steps=3, refresh_interval=2, reference_steps=1):
        seen = trace(transformer)
        for video in (0.0, 0.3, 0.6):
            run(
                transformer,
                {
                    **inputs,
                    "timestep": torch.tensor([video, 0.9, 1.0]),
                    "hidden_states": inputs["hidden_states"] + video,
                },
            )
    assert [(site.step, stats.phase) for site, stats in seen if site.layer == 0] == [
        (0, "refresh"),
        (1, "reuse"),
        (2, "refresh"),
    ]


@pytest.mark.parametrize("sound", [True, False])
def test_keys_without_queries_are_exact_in_every_phase(sound):
    """Cosmos 3: the prompt has keys alone; the dense steps, whose output the residual is taken from, are in the same
    order.
    """
    transformer, inputs, _ = of("cosmos 3")
    if not sound:
        inputs = {key: value for key, value in inputs.items() if not key.startswith("sound")} | {"sequence_length": 56}
        inputs["position_ids"] = inputs["position_ids"][:, :56]
    times = [{**inputs, "vision_timesteps": torch.full((48,), at)} for at in (900.0, 600.0, 300.0, 100.0)]
    dense = [run(transformer, arguments) for arguments in times]
    settings = {"dense_steps": 1, "refresh_interval": 2, "reference_steps": 1, "total_steps": 4}
    with enable(transformer, EVERY_BLOCK, **settings):
        seen = trace(transformer)
        for arguments, expected in zip(times, dense, strict=True):
            torch.testing.assert_close(run(transformer, arguments), expected, rtol=0, atol=tolerance(expected))
    assert [stats.phase for site, stats in seen if site.layer == 0] == ["dense", "refresh", "reuse", "refresh"]
    assert {(site.step, site.text.stop) for site, _ in seen} == {(step, 13 if sound else 8) for step in range(4)}
    with enable(transformer, "quality", total_steps=4):  # with a residual
        assert all(torch.isfinite(run(transformer, arguments)).all() for arguments in times)


def test_several_videos_in_one_sequence_stay_dense_with_a_reason():
    transformer, inputs, _ = of("cosmos 3")
    halves = {
        "vision_tokens": [tiny.noise(1, 4, 1, 8, 8), tiny.noise(1, 4, 2, 8, 8)],
        "vision_token_shapes": [(1, 4, 4), (2, 4, 4)],
    }
    inputs = {**inputs, **halves, "vision_noisy_frame_indexes": [torch.arange(1), torch.arange(2)]}
    dense = run(transformer, inputs)
    with enable(transformer, SPARSE, total_steps=1):
        torch.testing.assert_close(run(transformer, inputs), dense, rtol=0, atol=tolerance(dense))
        ((reason, calls),) = summary(transformer).dense_because.items()
    assert "several videos or images" in reason and calls == 2


IMAGES = {
    "QwenImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6)},
        {"img_shapes": [(1, 6, 8)], "encoder_hidden_states_mask": torch.ones(1, 8).long()},
    ),
    "Flux2Transformer2DModel": (
        {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "joint_attention_dim": 16,
         "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        {"img_ids": torch.cartesian_prod(*map(torch.arange, (1, 6, 8, 1)))[None], "txt_ids": torch.zeros(1, 8, 4),
         "guidance": torch.tensor([1.0])},
    ),
}  # fmt: skip


def of_image(cls: str, **changes):
    """(transformer, arguments of a forward)."""
    sizes, inputs = IMAGES[cls]
    words = {"encoder_hidden_states": tiny.noise(1, 8, 16, seed=1), "timestep": torch.tensor([0.5])}
    transformer = tiny_models.made(cls, {**tiny_models.HEADS, **sizes, **changes})
    return transformer, {"hidden_states": tiny.noise(1, 48, 16), **words, **inputs}


def test_every_row_of_images_is_tried_here():
    here = {name for name, row in MODELS.items() if row.image and hasattr(diffusers, name)}
    assert {name for name in IMAGES if hasattr(diffusers, name)} == here


@pytest.mark.parametrize("cls", IMAGES)
def test_images_are_sparse_where_that_is_asked_for_and_keep_text_apart(cls):
    if not hasattr(diffusers, cls):
        pytest.skip("this diffusers lacks the class")
    transformer, inputs = of_image(cls)
    dense = run(transformer, inputs)
    with pytest.raises(ValueError, match=r"image: expected True for .* which makes images, got False"):
        enable(transformer, SPARSE, total_steps=1)
    with enable(transformer, EVERY_BLOCK, total_steps=1, dense_steps=0, image=True):
        torch.testing.assert_close(run(transformer, inputs), dense, rtol=0, atol=tolerance(dense))
    with enable(transformer, SPARSE, total_steps=1, image=True):
        seen = trace(transformer)
        assert (run(transformer, inputs) - dense).abs().max() > tolerance(dense)
    assert [(site.text, site.grid, stats.phase) for site, stats in seen] == [(slice(0, 8), (1, 6, 8), "refresh")] * len(
        MODELS[cls].attentions(transformer)
    )


def with_references() -> dict[str, torch.Tensor]:
    """MiniMax-H3's references: 8 of text, of which 4 are about a picture, a picture of 16, sound of 6, a video of 3 x 16,
    10 of audio, 48 of video.
    """
    _, _, inputs, _ = tiny_models.newer()["minimax h3"]
    text, picture, sound, given, audio, clip = torch.arange(136).split([8, 16, 6, 48, 10, 48])
    frame = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))

    def frames(count: int, begin: float) -> torch.Tensor:
        times = begin + 1.5 * torch.arange(count).repeat_interleave(16)
        return torch.cat([times[:, None], frame.repeat(count, 1)], 1)

    places = torch.zeros(136, 3)
    places[text, 0] = torch.arange(8.0)
    for rows, positions in ((picture, frames(1, 8.0)), (given, frames(3, 9.0)), (clip, frames(3, 15.0))):
        places[rows] = positions
    tags, times = torch.zeros(136).long(), torch.zeros(136).long()
    tags[text[:4]], tags[sound], tags[audio] = 1, 2, 2
    times[picture], times[given], times[audio], times[sound] = 1, 1, 2, 3
    return {
        **inputs, "hidden_states": tiny.noise(1, 112, 16), "audio_hidden_states": tiny.noise(1, 16, 4, seed=2),
        "timestep": torch.tensor([0.5, 0.9, 0.6, 1.0]), "timestep_indices": times, "token_tags": tags,
        "position_ids": places.double(), "video_indices": torch.cat([picture, given, clip]),
        "audio_indices": torch.cat([sound, audio]), "text_indices": text,
    }  # fmt: skip


def test_references_that_are_videos_are_told_from_pictures_sound_and_words():
    inputs = with_references()
    assert references_of_packed_rows(inputs) == (range(30, 78),)
    assert grid_of_packed_rows(inputs, None) == (3, 4, 4)
    assert references_of_packed_rows(packed([(1, 2), (0, 1), (2, 0)])) == ()
    assert references_of_packed_rows({"position_ids": torch.zeros(3, 3)}) == ()


@pytest.mark.parametrize("fuse", [False, True])
def test_references_are_exact_and_where_asked_for_as_sparse_as_the_video(monkeypatch, fuse):
    monkeypatch.setattr(fused, "COMPILER", "aot_eager")
    transformer, _, _ = of("minimax h3")
    inputs, settings = with_references(), {"total_steps": 3, "fuse": fuse, "dense_steps": 1, "refresh_interval": 2}
    times = [{**inputs, "timestep": torch.tensor([at, 0.9, 0.6, 1.0])} for at in (0.1, 0.3, 0.5)]
    dense, densities = [run(transformer, arguments) for arguments in times], []
    for asked, exact in ((False, 88), (True, 40)):
        with enable(transformer, EVERY_BLOCK, references=asked, reference_steps=1, **settings):
            seen = trace(transformer)
            for arguments, expected in zip(times, dense, strict=True):
                torch.testing.assert_close(run(transformer, arguments), expected, rtol=0, atol=tolerance(expected))
            assert list(summary(transformer).fused) == (["yes, as asked"] if fuse else [])
        assert [stats.phase for site, stats in seen if site.layer == 0] == ["dense", "refresh", "reuse"]
        assert {(site.text.stop, site.grid) for site, _ in seen if site.step} == {(exact, None if asked else (3, 4, 4))}
        with enable(transformer, SPARSE, references=asked, total_steps=1):
            assert (run(transformer, inputs) - dense[0]).abs().max() > 0
            densities.append(summary(transformer).density)
    assert densities[1] < densities[0] < 1


def test_a_model_without_references_refuses_to_make_them_sparse():
    transformer, _, _ = of("wan")
    with pytest.raises(ValueError, match=r"references: expected False for Wan2.1, .* got True; leave it out"):
        enable(transformer, SPARSE, total_steps=1, references=True)
