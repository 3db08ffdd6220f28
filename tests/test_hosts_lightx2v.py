"""PARK in LightX2V's registry; with its own Wan model and scheduler, tiny, where LIGHTX2V_SOURCE names its folder."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from host_stand_ins import Recording, relative_error
from parkattn.hosts.lightx2v import RegisteredAttention, register_attention
from parkattn.methods import configured_method
from parkattn.ops.attend.definition import dense_attention

SMALL = {"query_clusters": 4, "key_clusters": 6, "min_tokens": 0}
PLANNED = {"dense_steps": 0, "refresh_interval": 25}  # of 50 steps: 2 of 4
KEEP_ALL = {**SMALL, **PLANNED, "top_p": 1.0}
SPARSE = {**SMALL, **PLANNED, "top_p": None, "top_k": 0.34}
GRID, HEADS, DIM, STEPS, LAYERS = (3, 8, 8), 2, 32, 4, 2
TOKENS = 3 * 8 * 8


class Dense:
    """As TorchSDPAWeight: [n h d] in, [n h*d] out."""

    def apply(self, q, k, v, **told):
        return dense_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1).flatten(1)


def schedule(steps: int = STEPS) -> types.SimpleNamespace:
    """What is read of a WanScheduler after prepare."""
    levels = torch.linspace(1, 0, steps + 1)
    run = types.SimpleNamespace(step_index=0, infer_steps=steps, infer_condition=True)
    run.sigmas, run.timesteps = levels, levels[:-1].clone()
    return run


def run(state: RegisteredAttention, scheduler: Any, numbers=range(LAYERS), **changes: Any) -> list[torch.Tensor]:
    q, k, v = torch.randn(3, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    outputs = []
    steps = range(scheduler.infer_steps)
    for step, condition, (layer, number) in itertools.product(steps, (True, False), enumerate(numbers)):
        scheduler.step_index, scheduler.infer_condition = step, condition
        told = {"block_idx": layer, "scheduler": scheduler, "grid_sizes": GRID, **changes}
        outputs.append(state.attend(number, Dense(), q, k, v, told))
    return outputs


def test_layers_steps_branches_and_the_grid_are_told_to_the_method():
    method = Recording()
    run(RegisteredAttention(method, 0), schedule())
    found = [(site.step, site.branch, site.layer) for site in method.sites]
    assert found == [(s, b, layer) for s in range(STEPS) for b in ("cond", "uncond") for layer in range(LAYERS)]
    assert {(site.grid, site.total_steps, site.transformer) for site in method.sites} == {(GRID, STEPS, "transformer")}
    assert method.sites[0].noise_levels == (1.0, 0.75, 0.5, 0.25)


def test_every_block_kept_is_dense_and_plans_are_released_with_the_last_call():
    fields = {name: value for name, value in KEEP_ALL.items() if name != "min_tokens"}
    state = RegisteredAttention(configured_method("park", "paper", **fields), 0)
    q, k, v = torch.randn(3, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    stock = Dense().apply(q, k, v)
    # softmax sums TOKENS terms in another order
    assert max((out - stock).abs().max() for out in run(state, schedule())) < TOKENS * torch.finfo(torch.float32).eps
    report = state.summary()
    assert report.state_bytes == 0 < report.peak_state_bytes
    assert len(report.steps["refresh"]) == len(report.steps["reuse"]) == 2


def test_new_timesteps_or_an_earlier_step_begin_a_run():
    method = Recording()
    state, scheduler = RegisteredAttention(method, 0), schedule(steps=1)
    run(state, scheduler)
    resets, scheduler.timesteps = method.resets, scheduler.timesteps.clone()
    run(state, scheduler)
    assert method.resets > resets and sum(state.summary().calls.values()) == 2 * LAYERS
    scheduler = schedule()
    run(state, scheduler)
    run(state, scheduler)
    assert sum(state.summary().calls.values()) == 2 * LAYERS * STEPS


def test_two_transformers_and_two_calls_of_a_layer_have_plans_of_their_own():
    method = Recording()
    state, scheduler = RegisteredAttention(method, 0), schedule(steps=2)
    q = torch.randn(TOKENS, HEADS, DIM)
    for step, number in ((0, 7), (1, 8), (1, 8)):
        scheduler.step_index = step
        state.attend(number, Dense(), q, q, q, {"block_idx": 0, "scheduler": scheduler, "grid_sizes": GRID})
    told = [(site.transformer, site.branch) for site in method.sites]
    assert told == [("transformer", "cond"), ("transformer_2", "cond"), ("transformer_2", "cond, part 1")]


def packed_schedule(before: int, steps: int = STEPS) -> types.SimpleNamespace:
    """What is read of a MiniMaxH3Scheduler: its timesteps stay from video to video."""
    run = schedule(steps)
    run.video_sigmas, run.layout_cpu = run.sigmas, types.SimpleNamespace(sequence_length=before + TOKENS)
    run.num_latent_frames, run.latent_height, run.latent_width = (n * p for n, p in zip(GRID, (1, 2, 2), strict=True))
    run.config = {}
    del run.sigmas, run.timesteps
    return run


def attend_packed(state: RegisteredAttention, scheduler: Any, tokens: int) -> torch.Tensor:
    q, k, v = torch.randn(3, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    for step, layer in itertools.product(range(scheduler.infer_steps), range(LAYERS)):
        scheduler.step_index = step
        out = state.attend(layer, Dense(), q, k, v, {"block_idx": layer, "scheduler": scheduler, "causal": False})
    return out - Dense().apply(q, k, v)


def test_a_packed_sequence_keeps_all_before_the_video_exact():
    method, before = Recording(), 11
    state, scheduler = RegisteredAttention(method, 0), packed_schedule(before)
    attend_packed(state, scheduler, before + TOKENS)
    assert {(site.grid, str(site.text), site.total_steps) for site in method.sites} == {
        (GRID, "slice(0, 11, None)", STEPS)
    }
    assert method.sites[0].noise_levels == (1.0, 0.75, 0.5, 0.25)
    resets, scheduler.layout_cpu = method.resets, types.SimpleNamespace(sequence_length=before + TOKENS)
    scheduler.infer_steps = 1
    attend_packed(state, scheduler, before + TOKENS)
    assert method.resets > resets  # a new layout is a new video, also in a run of one step

    fields = {name: value for name, value in SPARSE.items() if name != "min_tokens"}
    rest = attend_packed(
        RegisteredAttention(configured_method("park", "paper", **fields), 0), packed_schedule(before), before + TOKENS
    )
    exact = TOKENS * torch.finfo(torch.float32).eps
    assert rest[:before].abs().max() < exact < rest[before:].abs().max()


def test_a_packed_sequence_with_padding_stays_dense_with_a_reason():
    state = RegisteredAttention(Recording(), 0)
    attend_packed(state, packed_schedule(11, steps=1), 11 + TOKENS + 3)
    reason = f"{TOKENS + 14} tokens are not the {TOKENS + 11} of the packed sequence: padding may be among them"
    assert state.summary().dense_because == {reason: LAYERS}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_idx": None}, "a call without block_idx and scheduler, such as cross-attention or HunyuanVideo's"),
        ({"attn_mask": torch.ones(1)}, "the call has a mask or dropout"),
        ({"causal": True}, "the call has a mask or dropout"),
        ({"cu_seqlens_q": torch.tensor([0, 10, TOKENS])}, "several sequences in one call"),
    ],
)
def test_what_is_no_self_attention_of_a_video_is_declined_with_a_reason(changes, reason):
    method = Recording()
    state = RegisteredAttention(method, 0)
    run(state, schedule(steps=1), **changes)
    assert not method.sites and state.summary().dense_because == {reason: 2 * LAYERS}


def test_short_sequences_other_tokens_and_an_unknown_step_stay_dense_with_a_reason():
    for tokens, grid, scheduler, reason in (
        (TOKENS + 1, GRID, schedule(steps=1), f"{TOKENS} tokens are fewer than min_tokens={TOKENS + 1}"),
        (
            0,
            (3, 8, 7),
            schedule(steps=1),
            f"{TOKENS} tokens are not those of the grid (3, 8, 7): text, sound or padding may be among them",
        ),
        (0, GRID, types.SimpleNamespace(), "the scheduler has no step_index: the step is unknown"),
    ):
        method, q = Recording(), torch.randn(TOKENS, HEADS, DIM)
        state = RegisteredAttention(method, tokens)
        state.attend(0, Dense(), q, q, q, {"block_idx": 0, "scheduler": scheduler, "grid_sizes": grid})
        assert not method.sites and state.summary().dense_because == {reason: 1}


def test_without_lightx2v_registering_is_one_line():
    with (
        mock.patch.dict(sys.modules, {"lightx2v": None}),
        pytest.raises(ModuleNotFoundError, match=r"^lightx2v.*: expected for LightX2V"),
    ):
        register_attention()


@pytest.fixture(scope="module")
def lightx2v():
    """Its Wan model and scheduler. Its root's __init__ imports every model and service it has, so that is not run."""
    source = os.environ.get("LIGHTX2V_SOURCE")
    if not source:
        pytest.skip("needs LightX2V's source: set LIGHTX2V_SOURCE to its folder; it imports einops, loguru and gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [source, *sys.path])
        root = types.ModuleType("lightx2v")
        root.__path__ = [os.path.join(source, "lightx2v")]  # noqa: PTH118
        patch.setitem(sys.modules, "lightx2v", root)
        importlib.import_module("transformers")  # looks for torchvision itself, and must not find the stand-ins
        for package in ("imageio", "imageio_ffmpeg", "torchvision"):
            if importlib.util.find_spec(package) is None:
                for name in (package, f"{package}.transforms", f"{package}.transforms.functional"):
                    patch.setitem(sys.modules, name, mock.MagicMock(__spec__=None))
        importlib.import_module("lightx2v_platform.base.global_var").AI_DEVICE = "cpu"
        empty = torch.empty  # pinned memory needs a GPU
        patch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))
        found = types.SimpleNamespace()
        found.WanModel = importlib.import_module("lightx2v.models.networks.wan.model").WanModel
        found.WanScheduler = importlib.import_module("lightx2v.models.schedulers.wan.scheduler").WanScheduler
        found.registry = importlib.import_module("lightx2v.utils.registry_factory").ATTN_WEIGHT_REGISTER
        yield found


WIDTH, FFN, TEXT = HEADS * DIM, 128, 24
CONFIG = {
    "task": "t2v", "model_cls": "wan2.1", "dim": WIDTH, "ffn_dim": FFN, "freq_dim": 32, "num_heads": HEADS,
    "num_layers": LAYERS, "in_dim": 16, "out_dim": 16, "text_len": 9, "eps": 1e-6, "cross_attn_norm": True,
    "qk_norm": True, "window_size": (-1, -1), "patch_size": (1, 2, 2), "vae_stride": (4, 8, 8), "infer_steps": STEPS,
    "target_video_length": 9, "sample_shift": 3.0, "sample_guide_scale": 3.0, "enable_cfg": True,
    "cfg_parallel": False, "seq_parallel": False, "feature_caching": "NoCaching", "cpu_offload": False,
    "rms_norm_type": "torch", "layer_norm_type": "torch", "rope_type": "torch_complex_rope", "modulate_type": "torch",
    "mxfp8_fuse_enable": False, "cross_attn_1_type": "torch_sdpa", "cross_attn_2_type": "torch_sdpa",
}  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A checkpoint in the names of Wan's own files."""
    linears = {"text_embedding.0": (WIDTH, TEXT), "text_embedding.2": (WIDTH, WIDTH), "time_embedding.0": (WIDTH, 32)}
    linears |= {"time_embedding.2": (WIDTH, WIDTH), "time_projection.1": (6 * WIDTH, WIDTH), "head.head": (64, WIDTH)}
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (WIDTH, 16, 1, 2, 2),
        "patch_embedding.bias": (WIDTH,),
    }
    shapes["head.modulation"] = (1, 2, WIDTH)
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        for kind in ("self_attn", "cross_attn"):
            linears |= {f"{block}.{kind}.{part}": (WIDTH, WIDTH) for part in "qkvo"}
            shapes |= {f"{block}.{kind}.norm_{part}.weight": (WIDTH,) for part in "qk"}
        linears |= {f"{block}.ffn.0": (FFN, WIDTH), f"{block}.ffn.2": (WIDTH, FFN)}
        shapes |= {
            f"{block}.norm3.weight": (WIDTH,),
            f"{block}.norm3.bias": (WIDTH,),
            f"{block}.modulation": (1, 6, WIDTH),
        }
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("wan")
    save_file(
        {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


def sampled(
    lightx2v: Any, weights: Any, attention: str, videos: int = 1, experts: int = 1, **changes: Any
) -> torch.Tensor:
    """The loop of its runner over steps, with its model and scheduler; the last video's latents. Wan2.2 has 2 experts."""
    config = {**CONFIG, "self_attn_1_type": attention, **changes}
    scheduler = lightx2v.WanScheduler(config)
    models = [lightx2v.WanModel(str(weights), config, torch.device("cpu")) for _ in range(experts)]
    for model in models:
        model.to_cuda()  # to AI_DEVICE
        model.set_scheduler(scheduler)
    words = torch.randn(2, 9, TEXT, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    inputs = {"text_encoder_output": {"context": words[0], "context_null": words[1]}}
    for _ in range(videos):
        scheduler.generator = None
        scheduler.prepare(seed=0, latent_shape=(16, 3, 16, 16))
        for step in range(STEPS):
            scheduler.step_pre(step_index=step)
            models[step * experts // STEPS].infer(inputs)
            scheduler.step_post()
        latents = scheduler.latents
        scheduler.clear()
    return latents


class TestWithSource:
    def test_every_block_kept_is_its_own_attention_and_fewer_are_not(self, lightx2v, weights):
        keep = register_attention("paper", name="park_keep", **KEEP_ALL)
        register_attention("paper", name="park_fewer", **SPARSE)
        stock, kept, fewer = (sampled(lightx2v, weights, name) for name in ("torch_sdpa", "park_keep", "park_fewer"))
        # LightX2V computes in bfloat16: sums in another order may round to the neighbour
        rounding = torch.finfo(torch.bfloat16).eps
        assert relative_error(kept, stock) < rounding < 4 * rounding < relative_error(fewer, stock)
        assert keep.summary().steps["refresh"] == [0, 2] and keep.summary().steps["reuse"] == [1, 3]
        assert keep.summary().state_bytes == 0 < keep.summary().peak_state_bytes

    def test_its_model_and_scheduler_tell_layers_steps_branches_and_the_grid(self, lightx2v, weights):
        state, method = register_attention("paper", name="park_told", **KEEP_ALL), Recording()
        state.engine.method = method
        sampled(lightx2v, weights, "park_told", cross_attn_1_type="park_told")
        found = [(site.step, site.branch, site.layer) for site in method.sites]
        assert found == [(s, b, layer) for s in range(STEPS) for b in ("cond", "uncond") for layer in range(LAYERS)]
        places = {(site.grid, site.total_steps, site.transformer) for site in method.sites}
        assert places == {(GRID, STEPS, "transformer")}
        levels = method.sites[0].noise_levels
        assert len(levels) == STEPS and list(levels) == sorted(levels, reverse=True)
        because = state.summary().dense_because
        assert because["a call without block_idx and scheduler, such as cross-attention or HunyuanVideo's"] == len(
            found
        )

    @pytest.mark.parametrize("profile", ["paper", "quality"])
    def test_a_second_video_is_unaffected_by_the_first(self, lightx2v, weights, profile):
        register_attention(profile, name=f"park_{profile}", **SMALL)
        first, second = (sampled(lightx2v, weights, f"park_{profile}", videos=videos) for videos in (1, 2))
        assert torch.equal(first, second)

    def test_two_transformers_of_one_run_have_plans_of_their_own(self, lightx2v, weights):
        state = register_attention("paper", name="park_experts", **SPARSE)
        sampled(lightx2v, weights, "park_experts", experts=2)
        rows = [(row["transformer"], row["layer"], row["refresh"], row["reuse"]) for row in state.summary().layers]
        # two steps and two branches each: a plan in the first step, its reuse in the second
        assert rows == [(name, layer, 2, 2) for name in ("transformer", "transformer_2") for layer in range(LAYERS)]

    def test_the_layout_of_its_minimax_h3_is_read(self, lightx2v):
        module = importlib.import_module("lightx2v.models.schedulers.minimax_h3.scheduler")
        scheduler, method = module.MiniMaxH3Scheduler({"infer_steps": 3}), Recording()
        scheduler.prepare(0, 124, 64, 96, torch.ones(7, dtype=torch.long))
        packed = scheduler.layout_cpu
        state, q = RegisteredAttention(method, 0), torch.randn(packed.sequence_length, 1, 8)
        for step in range(scheduler.infer_steps):
            scheduler.step_pre(step)
            state.attend(0, Dense(), q, q, q, {"block_idx": 0, "scheduler": scheduler, "causal": False})
        site = method.sites[-1]
        assert (site.grid, site.step, site.total_steps) == ((37, 2, 3), 1, 2)
        # the video comes last, and what is before it has other tags
        assert (packed.token_tags[site.text] != 0).all() and (packed.token_tags[site.text.stop :] == 0).all()

    def test_a_name_that_is_taken_and_an_unknown_dense_entry_are_one_line(self, lightx2v):
        with pytest.raises(
            ValueError,
            match=r"^name: expected one that LightX2V's registry has not, got 'sol_attn'; pass another name\.$",
        ):
            register_attention(name="sol_attn")
        with pytest.raises(ValueError, match=r"^dense: expected one of .*torch_sdpa.*, got 'sdpa'; "):
            register_attention(dense="sdpa")
