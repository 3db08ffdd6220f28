"""Every row of the models table, on a random transformer of that family."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("diffusers")
import diffusers
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn.attention.flex_attention import create_block_mask

import tiny_models
import tiny_pipelines as tiny
from parkattn import ParkConfig
from parkattn.hosts.diffusers import disable, enable, summary
from parkattn.models import MODELS, SIZES, STAY_DENSE
from test_hosts_diffusers import EVERY_BLOCK, SPARSE, trace

# autocast, asked for by Mochi, does nothing in float32 on a CPU and says so
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
ROOT = Path(__file__).resolve().parents[1]
TINY = tiny_models.every()
NOT_ON_A_GRID = {"helios", "framepack"}  # history, at other resolutions, is in the sequence too


@pytest.fixture(params=TINY)
def name(request):
    yield request.param
    disable(TINY[request.param][0])


@pytest.fixture
def model(name):
    return TINY[name]


def run(transformer, inputs) -> torch.Tensor:
    with torch.no_grad():
        return tiny_models.video_of(transformer(**inputs, return_dict=False))


def tolerance(reference: torch.Tensor) -> float:
    """n eps for a sum of n terms in another order, once per layer: at most 3 layers of at most 92 tokens."""
    return 3 * 92 * torch.finfo(torch.float32).eps * reference.abs().max().item()


def test_every_row_of_the_table_is_tried_here():
    here = {name for name, row in MODELS.items() if hasattr(diffusers, name) and not row.image}
    assert {type(transformer).__name__ for transformer, _, _ in TINY.values()} == here


# rows of classes that the pinned diffusers lacks -> the release or the package that has them
ELSEWHERE: dict[str, str] = {}


def test_every_row_names_a_class_of_the_pinned_diffusers_or_says_who_has_it():
    """A misspelt name is in no other test: they leave out classes that the installed diffusers lacks."""
    pinned = re.search(r"^diffusers==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if tuple(map(int, diffusers.__version__.split(".")[:2])) < tuple(map(int, pinned.groups())):
        pytest.skip("this diffusers is older than the pinned one")
    assert {name for name in (*MODELS, *STAY_DENSE) if not has(name)} == {*ELSEWHERE}


def has(name: str) -> bool:
    return hasattr(diffusers, name) or hasattr(diffusers.models.transformers, name)


def classes_of_diffusers() -> list[str]:
    return [name for name, cls in vars(diffusers.models.transformers).items() if isinstance(cls, type)]


@pytest.mark.parametrize("name", classes_of_diffusers())
def test_every_transformer_class_has_a_row_a_reason_or_a_name_that_is_no_videos(name):
    """A class of a new release fails here until somebody has looked at it."""
    verdicts = {
        "supported": name in MODELS,
        "stays dense": name in STAY_DENSE,
        "not a candidate": name not in MODELS and bool(re.search("[12]D", name)),
    }
    assert sum(verdicts.values()) == 1, verdicts


def test_with_every_block_the_output_is_that_of_dense_attention(model):
    transformer, inputs, _ = model
    dense = run(transformer, inputs)
    enable(transformer, EVERY_BLOCK, total_steps=1, dense_steps=0)
    torch.testing.assert_close(run(transformer, inputs), dense, rtol=0, atol=tolerance(dense))
    report = summary(transformer)
    assert len(report.layers) == len(MODELS[type(transformer).__name__].attentions(transformer))
    assert report.calls["dense"] == report.calls["reuse"] == 0
    assert all(row["refresh"] == 1 for row in report.layers)


def test_sparse_attention_sees_the_video_and_keeps_text_apart(name, model):
    transformer, inputs, text = model
    dense = run(transformer, inputs)
    enable(transformer, SPARSE, total_steps=2)
    seen = trace(transformer)
    sparse = run(transformer, inputs)
    assert (sparse - dense).abs().max() > tolerance(dense)
    assert all(site.text == text for site, _ in seen)
    assert all(stats.phase == "refresh" for _, stats in seen)
    assert {site.grid for site, _ in seen} == {None if name in NOT_ON_A_GRID else (3, 4, 4)}
    disable(transformer)
    assert torch.equal(run(transformer, inputs), dense)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # stock Wan's norms
def test_under_autocast_attention_sees_what_the_stock_attention_would(name, model):
    if name == "cosmos 3":
        pytest.skip("stock code adds two dtypes under autocast")
    transformer, inputs, _ = model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = run(transformer, inputs)
        enable(transformer, EVERY_BLOCK, total_steps=1, dense_steps=0)
        out = run(transformer, inputs)
    assert out.dtype == dense.dtype and summary(transformer).calls["refresh"] > 0 == summary(transformer).calls["dense"]
    # each rounds its attention once, in at most 3 layers
    torch.testing.assert_close(
        out, dense, rtol=0, atol=3 * 2 * torch.finfo(torch.bfloat16).eps * dense.abs().max().item()
    )


@pytest.mark.parametrize(
    "name", [name for name in ("wan", "hunyuan", "cogvideox", "minimax h3", "cosmos 3") if name in TINY]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_flow_through_kept_blocks_and_survive_checkpointing(name, checkpointing):
    """Recomputed in the backward pass, a refresh is a reuse: both must keep the same tensors for it."""
    transformer, inputs, _ = copy.deepcopy(TINY[name])
    weights = [
        getattr(MODELS[type(transformer).__name__].attentions(transformer)[0], to).weight
        for to in ("to_q", "to_k", "to_v")
    ]

    def gradients():
        transformer.zero_grad()
        tiny_models.video_of(transformer(**inputs, return_dict=False)).square().sum().backward()
        return [weight.grad.clone() for weight in weights]

    dense = gradients()
    if checkpointing:
        transformer.enable_gradient_checkpointing()
        transformer.train()
    with enable(transformer, EVERY_BLOCK, total_steps=1, dense_steps=0) as session:
        found = gradients()
        masses = [call.stats.estimated_mass for call in session.engine.log.calls]
        assert not any(mass.requires_grad for mass in masses if mass is not None)
    for ours, theirs in zip(found, dense, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance(theirs))
        assert theirs.abs().max() > 0


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan i2v", "hunyuan 1.5", "mochi"])
def test_padding_never_reaches_the_video(name):
    """Whatever a refiner makes of padded text: what stands there at the first block must not matter."""
    transformer, inputs, _ = TINY[name]
    padding = ~inputs["encoder_attention_mask"].bool()
    changed = {**inputs, "encoder_hidden_states": torch.where(padding[..., None], 3.0, inputs["encoder_hidden_states"])}
    outputs = []
    for arguments in (inputs, changed):
        with enable(transformer, SPARSE, total_steps=1):
            outputs.append(run(transformer, arguments))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=tolerance(outputs[0]))


def test_the_two_halves_of_a_batched_guidance_call_keep_plans_of_their_own():
    """Mochi's stock processor attends to one batch element after the other."""
    transformer, inputs, _ = TINY["mochi"]
    other = {name: value.flip(1) if value.ndim > 2 else value for name, value in inputs.items()}
    both = {name: torch.cat([inputs[name], other[name]]) for name in inputs}
    later = {"timestep": torch.tensor([100, 100])}
    with enable(transformer, SPARSE, total_steps=2, refresh_interval=2, reference_steps=1):
        run(transformer, both)
        together = run(transformer, {**both, **later})
        assert summary(transformer).calls == {"dense": 0, "refresh": 4, "reuse": 4}
    with enable(transformer, SPARSE, total_steps=2, refresh_interval=2, reference_steps=1):
        run(transformer, other)
        alone = run(transformer, {**other, "timestep": torch.tensor([100])})
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=tolerance(alone))


def test_a_block_causal_mask_stays_dense_with_a_reason():
    transformer = tiny.wan_transformer(cls="SkyReelsV2Transformer3DModel", num_frame_per_block=3)
    inputs = TINY["skyreels"][1]
    dense = run(transformer, inputs)
    enable(transformer, SPARSE, total_steps=1)
    assert torch.equal(run(transformer, inputs), dense)
    assert summary(transformer).dense_because == {"the mask [1, 1, 48, 48] of torch.bool is more than key padding": 2}


def test_hunyuan15_never_builds_the_mask_of_all_pairs(monkeypatch):
    """[tokens, tokens] is 5.7 GB at 75,600 tokens."""
    transformer, inputs, _ = TINY["hunyuan 1.5"]
    tokens, built = 48 + 25, []
    repeat = torch.Tensor.repeat

    def watched(self, *times):
        out = repeat(self, *times)
        built.extend([out.shape] if out.shape[-2:] == (tokens, tokens) else [])
        return out

    monkeypatch.setattr(torch.Tensor, "repeat", watched)
    run(transformer, inputs)
    assert len(built) == 2, "the stock processor builds one per layer"
    built.clear()
    for dense_steps in (0, 1):
        with enable(transformer, SPARSE, total_steps=2, dense_steps=dense_steps):
            run(transformer, inputs)
    assert built == []


def test_a_model_outside_the_table_is_refused_by_name():
    torch.manual_seed(0)
    latte = diffusers.LatteTransformer3DModel(
        num_attention_heads=1, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=1, sample_size=8, patch_size=2,
        cross_attention_dim=8, caption_channels=8, norm_type="ada_norm_single", num_embeds_ada_norm=10,
    )  # fmt: skip
    with pytest.raises(
        ValueError,
        match=r"expected one of .*, WanVACETransformer3DModel, got LatteTransformer3DModel; .*within a frame",
    ):
        enable(latte, total_steps=1)


@pytest.mark.parametrize("name", SIZES)
def test_a_released_size_is_what_its_class_makes_of_it(name):
    size = SIZES[name]
    with torch.device("meta"):
        made = getattr(diffusers, size.transformer)(**size.made_with)
    row = MODELS[size.transformer]
    blocks = row.all_blocks(made)
    feed_forward = {
        module.out_features for block in blocks for module in block.modules() if isinstance(module, torch.nn.Linear)
    }
    assert len(blocks) == size.layers and size.ffn in feed_forward
    assert {attention.heads for attention in row.attentions(made)} == {size.heads}
    assert (made.config.num_attention_heads, made.config.attention_head_dim) == (size.heads, size.head_dim)
    config = made.config
    patch = (
        config.patch_size
        if isinstance(config.patch_size, (tuple, list))
        else (config.patch_size_t, config.patch_size, config.patch_size)
    )
    assert size.pixels == size.latent_pixels * patch[1] and patch[0] == 1
    frames, height, width = row.grid(
        {"hidden_states": torch.empty(1, 16, *size.latents(*size.video), device="meta")}, made.config
    )
    assert frames * height * width == size.tokens(*size.video)


def test_the_sizes_are_those_of_the_presets_and_of_the_paper():
    assert set(SIZES) == set(ParkConfig.PRESETS) and {row.preset for row in MODELS.values()} <= set(SIZES)
    assert {name: size.tokens(*size.video) for name, size in SIZES.items()} == {
        "wan2.1-1.3b": 75_600, "wan2.1-14b": 75_600, "wan2.2-14b": 75_600, "hunyuanvideo": 115_200,
    }  # fmt: skip


def project(attn, hidden_states):
    return (layer(hidden_states).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))


class GroupedDispatch:
    _attention_backend = _parallel_config = None

    def __call__(self, attn, hidden_states, *args, **kwargs):
        q, k, v = project(attn, hidden_states)
        out = dispatch_attention_fn(q, k[:, :, :1], v[:, :, :1], enable_gqa=True, backend=self._attention_backend)
        return attn.to_out[0](out.flatten(2))


class GroupedDirectly:
    def __call__(self, attn, hidden_states, *args, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in project(attn, hidden_states))
        out = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


class FlexMask:
    _attention_backend, _parallel_config = "flex", None

    def __call__(self, attn, hidden_states, *args, **kwargs):
        q, k, v = project(attn, hidden_states)
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, q.shape[1], k.shape[1], device="cpu")
        out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=self._attention_backend)
        return attn.to_out[0](out.flatten(2))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "stock,said", [(GroupedDispatch, "enable_gqa"), (GroupedDirectly, "enable_gqa"), (FlexMask, "BlockMask")]
)
def test_a_call_that_a_method_cannot_answer_is_the_stock_one_and_says_why(stock, said):
    transformer, inputs, _ = tiny.transformers()["wan"]
    for block in transformer.blocks:
        block.attn1.set_processor(stock())
    dense = run(transformer, inputs)
    enable(transformer, SPARSE, total_steps=1)
    assert torch.equal(run(transformer, inputs), dense)
    ((reason, calls),) = summary(transformer).dense_because.items()
    assert said in reason and calls == 2
