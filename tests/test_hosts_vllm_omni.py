"""PARK as a plug-in of vLLM-Omni, against stand-ins of its modules."""

from __future__ import annotations

import gc
import json
import sys
import types
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

import host_stand_ins as hosts
from host_stand_ins import GRID, HEADS, LAYERS, STEPS, VIDEO, DenseImpl
from parkattn.hosts import vllm_omni
from parkattn.hosts.served import ServedSettings

ROOT = "vllm_omni.diffusion"
DIM = 16
KEEP_ALL, SPARSE = json.dumps(hosts.KEEP_ALL), json.dumps(hosts.SPARSE)


class DenseBackend:
    get_impl_cls = staticmethod(lambda: DenseImpl)
    supports_attention_mask = staticmethod(lambda spec: False)


SETTINGS = ServedSettings(min_tokens=0)


class Context(types.SimpleNamespace):
    """What is read of a ForwardContext; one lives as long as a request runs."""

    def __init__(self, seed: int = 0, steps: int | None = STEPS) -> None:
        super().__init__(seed=seed, denoise_step_idx=None, total_denoise_steps=steps)


def layout(before: int = 0, grid: Any = GRID, used: int | None = None) -> Any:
    return types.SimpleNamespace(prefix_len=before, latent_grid=grid, used_len=used)


@pytest.fixture
def stand_in(monkeypatch):
    """Modules with what the plug-in takes of vLLM-Omni; told holds what vLLM-Omni would say."""
    told = types.SimpleNamespace(context=None)
    parts = {
        "attention.backends.abstract": {
            "AttentionBackend": object,
            "AttentionImpl": object,
            "AttentionMetadata": types.SimpleNamespace,
        },
        "attention.selector": {"HEAD_SIZE_UNKNOWN": -1, "_cached_get_backend_cls": lambda name, size: DenseBackend},
        "forward_context": {
            "get_forward_context": lambda: told.context,
            "is_forward_context_available": lambda: told.context is not None,
        },
    }
    monkeypatch.setenv(vllm_omni.VARIABLE, KEEP_ALL)
    told.backend = hosts.put_modules(monkeypatch, ROOT, "vllm_omni", parts)
    yield told
    sys.modules.pop("parkattn.hosts.vllm_omni.backend", None)


def layers(told: Any, prefix: str = "blocks.{}.attn1", count: int = LAYERS, **others: Any) -> list[Any]:
    fields = {"num_heads": HEADS, "head_size": DIM, "softmax_scale": DIM**-0.5, **others}
    return [
        told.backend.ParkImpl(prefix=prefix.format(i), qkv_layout=None, backend_kwargs=None, **fields)
        for i in range(count)
    ]


def tokens(count: int = VIDEO, seed: int = 0) -> torch.Tensor:
    return hosts.tokens(DIM, count, seed)


def step(
    told: Any, stack: list[Any], context: Context, number: int | None, where: Any = None, count: int = VIDEO
) -> list[torch.Tensor]:
    """One denoising step: both branches, all layers."""
    told.context, context.denoise_step_idx = context, number
    metadata = types.SimpleNamespace(video_layout=where or layout())
    return [
        layer.forward(*tokens(count, 100 * context.seed + (number or 0)), metadata) for _ in range(2) for layer in stack
    ]


def test_layers_steps_and_counted_branches_are_told_and_every_block_kept_is_dense(stand_in):
    stack, context = layers(stand_in), Context()
    with (
        mock.patch("parkattn.hosts.served.configured_method", lambda *a, **k: seen),
        mock.patch.object(vllm_omni, "settings", lambda: SETTINGS),
    ):
        seen = hosts.Recording()
        for number in range(STEPS):
            step(stand_in, stack, context, number)
    found = [(site.step, site.branch, site.layer) for site in seen.sites]
    assert found == [(s, b, layer) for s in range(STEPS) for b in ("cond", "uncond") for layer in range(LAYERS)]
    assert {(site.grid, site.total_steps, site.transformer) for site in seen.sites} == {(GRID, STEPS, "transformer")}
    context = Context()
    for number in range(STEPS):
        expected = DenseImpl(DIM**-0.5).forward(*tokens(seed=number))
        # softmax sums VIDEO terms in another order
        assert all(
            (out - expected).abs().max() < VIDEO * torch.finfo(torch.float32).eps
            for out in step(stand_in, stack, context, number)
        )
    report = vllm_omni.request_of(context).summary()
    assert report.state_bytes == 0 < report.peak_state_bytes and not report.dense_because


def test_two_requests_interleaved_equal_two_alone_and_one_that_is_cancelled_leaves_no_state(stand_in, monkeypatch):
    monkeypatch.setenv(vllm_omni.VARIABLE, SPARSE)
    stack = layers(stand_in)
    pair = hosts.expect_apart(Context, lambda context, number: step(stand_in, stack, context, number))
    assert vllm_omni.request_of(pair[0]).summary().density < 1
    state = weakref.ref(vllm_omni.request_of(pair[1]))
    del pair
    stand_in.context = None
    gc.collect()
    assert state() is None


@pytest.mark.parametrize(
    ("fields", "where", "number", "reason"),
    [
        ({"prefix": "attn"}, layout(), 0, "a layer that is not numbered self-attention"),
        ({"role": "cross"}, layout(), 0, "a layer that is not numbered self-attention"),
        ({}, layout(None, None, VIDEO), 0, "the model does not say where its video is, or it does not come last"),
        ({}, layout(8), 0, f"{VIDEO} tokens are fewer than the {VIDEO + 8} of the video and its prefix"),
        ({}, layout(), None, "the pipeline does not record its step, or how many there are"),
        ({}, layout(), 1, "step-wise execution: every step has a context of its own, and none names its request"),
    ],
)
def test_what_is_no_video_of_a_known_request_is_declined_with_a_reason(stand_in, fields, where, number, reason):
    context = Context()
    step(stand_in, layers(stand_in, **{"prefix": "blocks.{}.attn1", **fields}), context, number, where)
    assert vllm_omni.request_of(context).summary().dense_because == {reason: 2 * LAYERS}


def test_a_prefix_is_always_seen_and_padding_behind_the_video_is_cut_off(stand_in, monkeypatch):
    monkeypatch.setenv(vllm_omni.VARIABLE, SPARSE)
    out = step(stand_in, layers(stand_in), Context(), 0, layout(9), VIDEO + 12)[0]
    expected = DenseImpl(DIM**-0.5).forward(*(x[:, : VIDEO + 9] for x in tokens(VIDEO + 12)))
    assert out.shape[1] == VIDEO + 12 and not out[:, VIDEO + 9 :].any()
    assert torch.allclose(out[:, :9], expected[:, :9], atol=1e-5) and not torch.allclose(
        out[:, 9 : VIDEO + 9], expected[:, 9:], atol=1e-3
    )


def spans(*starts: int, used: int) -> Any:
    """As Ref2VA layouts say it: references of GRID, and the video, which comes last."""
    found = tuple(types.SimpleNamespace(start=start, latent_grid=GRID) for start in starts)
    return types.SimpleNamespace(prefix_len=None, latent_grid=None, used_len=used, video_spans=found)


@pytest.mark.parametrize("asked", [False, True])
def test_references_are_exact_or_where_asked_for_as_sparse_as_the_video(stand_in, monkeypatch, asked):
    """9 of text, a reference, 7 of sound, the video, 3 of padding."""
    given, video, used = slice(9, 9 + VIDEO), slice(16 + VIDEO, 16 + 2 * VIDEO), 16 + 2 * VIDEO
    where, count = spans(16 + VIDEO, 9, used=used), used + 3
    monkeypatch.setenv(vllm_omni.VARIABLE, KEEP_ALL.replace("}", f', "references": {str(asked).lower()}}}'))
    stack, context = layers(stand_in), Context()
    expected = DenseImpl(DIM**-0.5).forward(*(x[:, :used] for x in tokens(count)))
    rounding = used * torch.finfo(torch.float32).eps
    assert (step(stand_in, stack, context, 0, where, count)[0][:, :used] - expected).abs().max() < rounding
    monkeypatch.setenv(vllm_omni.VARIABLE, SPARSE.replace("}", f', "references": {str(asked).lower()}}}'))
    context = Context()
    error = (step(stand_in, stack, context, 0, where, count)[0][:, :used] - expected).abs().amax((0, 2, 3))
    assert error[video].max() > 10 * rounding and bool(error[given].max() > 10 * rounding) is asked
    assert max(error[:9].max(), error[given.stop : video.start].max()) < rounding
    assert not vllm_omni.request_of(context).summary().dense_because


def test_a_layout_whose_video_does_not_come_last_is_declined(stand_in):
    context = Context()
    step(stand_in, layers(stand_in), context, 0, spans(0, used=VIDEO + 4), VIDEO + 4)
    reason = "the model does not say where its video is, or it does not come last"
    assert vllm_omni.request_of(context).summary().dense_because == {reason: 2 * LAYERS}


def test_what_the_platforms_backend_can_do_with_packed_requests_holds_for_calls_that_go_to_it(stand_in):
    for name in ("supports_multi_doc_packed_varlen", "supports_packed_mask_free"):
        for can in (True, False):
            with mock.patch.object(DenseBackend, name, staticmethod(lambda can=can: can), create=True):
                assert getattr(stand_in.backend.ParkBackend, name)() is can


def test_one_compiled_graph_serves_every_layer(stand_in):
    def begin() -> Context:
        stand_in.context = Context()
        stand_in.context.denoise_step_idx = 0
        return stand_in.context

    stack, given = layers(stand_in, count=3), (*tokens(VIDEO + 12), types.SimpleNamespace(video_layout=layout(9)))
    with torch.no_grad():
        compiled = begin()
        found = hosts.in_one_graph(stack, *given)
        begin()
        torch.testing.assert_close(found, [hosts.Around(impl)(*given) for impl in stack], rtol=0, atol=0)
    assert list(hosts.calls_by_layer(vllm_omni.request_of(compiled).summary())) == [0, 1, 2]


def test_the_scheduler_says_how_many_steps_there_are_where_the_pipeline_does_not(stand_in):
    stand_in.context, told = Context(steps=None), []
    pipeline = types.SimpleNamespace(
        scheduler=types.SimpleNamespace(timesteps=torch.arange(STEPS), sigmas=torch.linspace(1, 0, STEPS + 1))
    )
    record = vllm_omni.telling_steps(lambda *a, **k: told.append((a, k)), sys.modules[f"{ROOT}.forward_context"])
    record(pipeline, 0, 999.0)
    assert told == [((pipeline, 0, 999.0, None), {})]
    assert stand_in.context.total_denoise_steps == STEPS and getattr(stand_in.context, vllm_omni.LEVELS) == (
        1.0,
        0.75,
        0.5,
        0.25,
    )


def test_settings_come_from_the_environment_and_what_is_not_known_is_refused(monkeypatch):
    monkeypatch.delenv(vllm_omni.VARIABLE, raising=False)
    assert vllm_omni.settings() == ServedSettings()
    for told, error in (("fats", ValueError), ('{"top_q": 1}', ValueError), ('{"top_p": ', ValueError)):
        monkeypatch.setenv(vllm_omni.VARIABLE, told)
        with pytest.raises(error, match=r"fats|top_q|^PARKATTN_SETTINGS: expected a profile or JSON"):
            vllm_omni.settings()
