"""PARK as a plug-in of SGLang diffusion, against stand-ins of its modules."""

from __future__ import annotations

import enum
import gc
import sys
import types
import weakref
from typing import Any

import pytest
import torch

import host_stand_ins as hosts
from host_stand_ins import GRID, HEADS, KEEP_ALL, LAYERS, SPARSE, STEPS, VIDEO, DenseImpl
from parkattn.hosts import served, sglang

ROOT = "sglang.multimodal_gen.runtime"
DIM = 32


class Request(types.SimpleNamespace):
    """What is read of a Req, by PARK and by SGLang's transformers."""

    def __init__(self, seed: int = 0, steps: int = STEPS) -> None:
        super().__init__(
            seed=seed,
            extra={},
            is_cfg_negative=False,
            raw_latent_shape=torch.Size((1, 4, 5, 16, 16)),
            num_inference_steps=steps,
        )
        self.timesteps, self.scheduler = (
            torch.arange(steps, 0, -1),
            types.SimpleNamespace(sigmas=torch.linspace(1, 0, steps + 1)),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def arguments(park: Any = None, prefix: str = "wan", **others: Any) -> Any:
    config = types.SimpleNamespace(patch_size=(1, 2, 2), prefix=prefix)
    pipeline = types.SimpleNamespace(dit_config=config)
    return types.SimpleNamespace(
        attention_backend_config={"park": park} if park else {}, pipeline_config=pipeline, **others
    )


class Member(enum.Enum):
    FA = 1
    SPARGE_ATTN = 2


class DenseBackend:
    get_impl_cls = staticmethod(lambda: DenseImpl)


@pytest.fixture
def stand_in(monkeypatch):
    """Modules with what the plug-in takes of SGLang; told holds what SGLang would say."""
    told = types.SimpleNamespace(context=None, args=arguments(KEEP_ALL), ranks=1, hooks={})
    platform = types.SimpleNamespace(get_attn_backend_cls_str=lambda member, size, dtype: f"{__name__}.DenseBackend")
    parts = {
        "platforms": {"AttentionBackendEnum": Member, "current_platform": platform},
        "platforms.plugins": {
            "HookRegistry": types.SimpleNamespace(
                register=lambda target, hook, kind: told.hooks.setdefault(target, hook)
            ),
            "HookType": types.SimpleNamespace(AROUND="around"),
        },
        "server_args": {"get_global_server_args": lambda: told.args},
        "distributed.parallel_state": {"get_sp_world_size": lambda: told.ranks},
        "layers.attention.backends.attention_backend": {"AttentionBackend": object, "AttentionImpl": object},
        "managers.forward_context": {"get_forward_context_or_none": lambda: told.context},
        "utils.precision": {"get_compute_dtype": lambda: torch.float32},
    }
    told.backend = hosts.put_modules(monkeypatch, ROOT, "sglang", parts)
    yield told
    sys.modules.pop("parkattn.hosts.sglang.backend", None)


def layers(told: Any, prefix: str = "blocks.{}.attn1.impl", count: int = LAYERS) -> list[Any]:
    return [
        told.backend.ParkImpl(num_heads=HEADS, head_size=DIM, softmax_scale=DIM**-0.5, prefix=prefix.format(i))
        for i in range(count)
    ]


def tokens(count: int = VIDEO, seed: int = 0) -> torch.Tensor:
    return hosts.tokens(DIM, count, seed)


def step(told: Any, stack: list[Any], request: Request, number: int, count: int = VIDEO) -> list[torch.Tensor]:
    """One denoising step of a request: both branches, all layers."""
    told.context = types.SimpleNamespace(current_timestep=number, attn_metadata=None, forward_batch=request)
    outputs = []
    for negative in (False, True):
        request.is_cfg_negative = negative
        outputs += [layer.forward(*tokens(count, 100 * request.seed + number), None) for layer in stack]
    return outputs


def test_hooks_are_registered_and_choose_park_for_its_member_where_the_config_asks(stand_in):
    sglang.register_hooks()
    choose = stand_in.hooks[f"{ROOT}.platforms.cuda.CudaPlatform.get_attn_backend_cls_str"]
    assert choose(lambda *a: "theirs", object, Member.SPARGE_ATTN, 128, torch.bfloat16) == sglang.BACKEND
    assert choose(lambda *a: "theirs", object, Member.FA, 128, torch.bfloat16) == "theirs"
    stand_in.args = arguments(None)
    assert choose(lambda *a: "theirs", object, Member.SPARGE_ATTN, 128, torch.bfloat16) == "theirs"


def test_settings_come_from_the_config_and_what_is_not_known_is_refused():
    assert sglang.settings_of(arguments("fast")).profile == "fast"
    assert sglang.settings_of(arguments({"top_p": 0.7, "dense_layers": [1]})).changes == {
        "top_p": 0.7,
        "dense_layers": (1,),
    }
    assert sglang.settings_of(arguments("paper", prefix="Hunyuan")).model == "hunyuanvideo"
    with pytest.raises(ValueError, match="top_q"):
        sglang.settings_of(arguments({"top_q": 0.7}))
    with pytest.raises(ValueError, match=r"references: expected False, since SGLang does not say"):
        sglang.settings_of(arguments({"references": True}))
    with pytest.raises(TypeError, match=r"^park: expected a profile or a mapping, got 3"):
        served.ServedSettings.read("park", 3)


def test_layers_steps_branches_and_the_grid_are_told_and_every_block_kept_is_dense(stand_in):
    stack, request = layers(stand_in), Request()
    for number in range(STEPS):
        q, k, v = tokens(seed=number)
        expected = DenseImpl(DIM**-0.5).forward(q, k, v, None)
        # softmax sums VIDEO terms in another order
        assert all(
            (out - expected).abs().max() < VIDEO * torch.finfo(torch.float32).eps
            for out in step(stand_in, stack, request, number)
        )
    report = request.extra[sglang.KEY].summary()
    assert hosts.calls_by_layer(report) == dict.fromkeys(range(LAYERS), 2 * STEPS)
    assert request.extra[sglang.KEY].engine.clock.grid == GRID and not report.dense_because
    assert report.state_bytes == 0 < report.peak_state_bytes  # released with the last call of the last step


def test_two_requests_interleaved_equal_two_alone(stand_in):
    stand_in.args, stack = arguments(SPARSE), layers(stand_in)
    pair = hosts.expect_apart(Request, lambda request, number: step(stand_in, stack, request, number))
    assert pair[0].extra[sglang.KEY].summary().density < 1


def test_a_request_that_fails_leaves_no_state_and_says_what_was_done(stand_in, caplog):
    stack, request = layers(stand_in), Request()

    def cancelled(stage, batch):
        step(stand_in, stack, batch, 0)
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"), caplog.at_level("INFO", sglang.LOGGER):
        sglang.release_after(cancelled, None, request)
    assert sglang.KEY not in request.extra
    assert [record.getMessage() for record in caplog.records] == [
        "parkattn computed 100% of dense attention; dense calls: none"
    ]
    step(stand_in, stack, request, 0)  # where no stage of SGLang's releases it, it goes with the request
    state = weakref.ref(request.extra[sglang.KEY])
    del request
    stand_in.context = None
    gc.collect()
    assert state() is None


@pytest.mark.parametrize(
    ("prefix", "count", "ranks", "reason"),
    [
        ("blocks.{}.attn2.impl", VIDEO, 1, "a layer that is not numbered self-attention, such as cross-attention"),
        ("blocks.{}.attn1.impl", VIDEO + 9, 1, f"{VIDEO + 9} tokens are not the {VIDEO} of the video"),
        ("Hunyuan.double_blocks.{}.attn.impl", VIDEO + 9, 2, "text is spread over GPUs, between parts of the video"),
    ],
)
def test_what_is_no_video_is_declined_with_a_reason(stand_in, prefix, count, ranks, reason):
    stand_in.ranks, request = ranks, Request()
    step(stand_in, layers(stand_in, prefix), request, 0, count)
    assert request.extra[sglang.KEY].summary().dense_because == {reason: 2 * LAYERS}


def test_text_behind_the_video_is_always_seen_packed_sequences_and_encoders_are_dense(stand_in):
    stand_in.args, request = arguments(SPARSE), Request()
    stack = layers(stand_in, "Hunyuan.single_blocks.{}.attn.impl")
    q, k, v = tokens(VIDEO + 9, 0)
    expected = DenseImpl(DIM**-0.5).forward(q, k, v, None)
    out = step(stand_in, stack, request, 0, VIDEO + 9)[0]
    assert out.is_contiguous()  # its single blocks take a view of it
    assert torch.allclose(out[:, VIDEO:], expected[:, VIDEO:], atol=1e-5) and not torch.allclose(
        out[:, :VIDEO], expected[:, :VIDEO], atol=1e-3
    )
    stack[0].forward_varlen(q[0], k[0], v[0], cu_seqlens=torch.tensor([0, VIDEO + 9]), max_seqlen=VIDEO + 9)
    assert request.extra[sglang.KEY].declined == {"packed sequences, without a word where the video is": 1}
    stand_in.context = None
    assert torch.equal(stack[0].forward(q, k, v, None), expected)


def packed_request(seed: int = 0) -> Request:
    """MiniMax-H3's: no scheduler, and the levels of its own loop; raw_latent_shape is the video's alone."""
    request = Request(seed)
    request.extra["minimax_h3_sigmas"] = {"video": [1.0, 0.75, 0.5, 0.25, 0.0], "audio": []}
    request.timesteps = request.scheduler = None
    return request


def packed_step(told: Any, stack: list[Any], request: Request, number: int, before: int, padding: int) -> Any:
    told.context = types.SimpleNamespace(current_timestep=number, attn_metadata=None, forward_batch=request)
    q, k, v = (x[0] for x in tokens(before + VIDEO + padding, 100 * request.seed + number))
    ends = (0, before + VIDEO, before + VIDEO + padding)
    given = {"cu_seqlens": torch.tensor(ends), "max_seqlen": ends[1], "cu_seqlens_host": ends}
    whole = [x[: ends[1]][None] for x in (q, k, v)]
    return [layer.forward_varlen(q, k, v, **given) for layer in stack], DenseImpl(DIM**-0.5).forward(*whole, None)[0]


@pytest.mark.parametrize(("before", "padding"), [(9, 0), (9, 7), (200, 3)])
def test_all_that_is_packed_before_the_video_is_exact_and_padding_is_nothing(stand_in, before, padding):
    stack, kept = layers(stand_in, "blocks.{}.attn"), packed_request()
    used = before + VIDEO
    rounding = used * torch.finfo(torch.float32).eps
    for number in range(STEPS):
        found, expected = packed_step(stand_in, stack, kept, number, before, padding)
        assert all((out[:used] - expected).abs().max() < rounding and not out[used:].any() for out in found)
    report, clock = kept.extra[sglang.KEY].summary(), kept.extra[sglang.KEY].engine.clock
    assert [row["layer"] for row in report.layers] == list(range(LAYERS)) and not report.dense_because
    assert (clock.grid, clock.total_steps, clock.noise_levels) == (GRID, STEPS, (1.0, 0.75, 0.5, 0.25))
    stand_in.args, fewer = arguments(SPARSE), packed_request()
    found, expected = packed_step(stand_in, stack, fewer, 0, before, padding)
    assert (
        (found[0][:before] - expected[:before]).abs().max()
        < rounding
        < (found[0][before:used] - expected[before:]).abs().max()
    )
    assert fewer.extra[sglang.KEY].summary().density < 1


def test_a_packed_text_refiner_and_a_dense_step_are_its_own_attention(stand_in):
    refiner, request = layers(stand_in, "token_refiner.blocks.{}.attn", count=1), packed_request()
    found, expected = packed_step(stand_in, refiner, request, 0, 9, 0)
    assert torch.equal(found[0], expected)
    assert request.extra[sglang.KEY].declined == {"packed sequences, without a word where the video is": 1}
    stand_in.args, request = arguments({**KEEP_ALL, "dense_steps": 1}), packed_request()
    found, expected = packed_step(stand_in, layers(stand_in, "blocks.{}.attn"), request, 0, 9, 0)
    assert torch.equal(found[0], expected) and request.extra[sglang.KEY].summary().calls["dense"] == LAYERS


def test_minimax_h3_borrows_the_preset_of_hunyuanvideo():
    told = arguments("paper")
    told.pipeline_config.dit_config = type("MiniMaxH3DiTConfig", (), {"patch_size": (1, 2, 2), "prefix": ""})()
    assert sglang.settings_of(told).model == "hunyuanvideo"


def test_one_compiled_graph_serves_every_layer(stand_in):
    def of(request: Request) -> None:
        stand_in.context = types.SimpleNamespace(current_timestep=0, attn_metadata=None, forward_batch=request)

    compiled, stack, given = Request(), layers(stand_in, count=3), (*tokens(), None)
    with torch.no_grad():
        of(compiled)
        found = hosts.in_one_graph(stack, *given)
        of(Request())
        torch.testing.assert_close(found, [hosts.Around(impl)(*given) for impl in stack], rtol=0, atol=0)
    assert list(hosts.calls_by_layer(compiled.extra[sglang.KEY].summary())) == [0, 1, 2]
