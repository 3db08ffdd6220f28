"""A model, a ModelPatcher and a sampler that use the hooks as ComfyUI's do."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch

from host_stand_ins import Recording
from parkattn.site import CallSite

SMALL = {
    "query_clusters": 4,
    "key_clusters": 6,
    "min_tokens": 0,
    "dense_steps": 0,
    "refresh_interval": 25,  # of 50 steps: 2 of 4
}
KEEP_ALL = {**SMALL, "top_p": 1.0}
SPARSE = {**SMALL, "top_p": None, "top_k": 0.34}
STEPS = 4
# softmax sums at most this many terms in another order; the tiny models do not amplify it
ROUNDING = 256 * torch.finfo(torch.float32).eps


def scaled_dot_product(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **_):
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def ask(
    options: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **how: Any
) -> torch.Tensor:
    """Attention, as ComfyUI's wrapper of it is called."""
    given = {"transformer_options": options, "_inside_attn_wrapper": True, **how}
    override = options.get("optimized_attention_override")
    chosen = scaled_dot_product if override is None else functools.partial(override, scaled_dot_product)
    return chosen(q, k, v, heads, **given)


def recorded_sites(monkeypatch: Any) -> list[CallSite]:
    """Where every call stands, from now on: the method is dense and notes its sites here."""
    method = Recording()
    monkeypatch.setattr("parkattn.hosts.comfyui.configured_method", lambda *_, **__: method)
    return method.sites


class WanModel:
    """Two blocks of self- and cross-attention, 2 heads of 8; calls attention as ComfyUI's wrapper of it does."""

    patch_size = (1, 2, 2)
    blocks = (0, 1)

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}  # arguments of self-attention
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(2, 3, 16, 16, generator=generator) / 4

    def _forward(self, x, timestep, context, transformer_options):
        tokens = x.unflatten(3, (-1, 2)).unflatten(5, (-1, 2)).sum((4, 6)).flatten(2).transpose(1, 2)
        for index in self.blocks:
            transformer_options["block_index"] = index
            q, k, v = (tokens @ weight for weight in self.weights[index])
            tokens = tokens + ask(transformer_options, q, k, v, 2, **self.extra)
            tokens = tokens + ask(transformer_options, tokens, context, context, 2)
        return x * 0.9 + tokens.mean(1)[:, :, None, None, None] * timestep


class Patcher:
    """What of ComfyUI's ModelPatcher the host uses. model_sampling: sigma falls linearly."""

    model_sampling = types.SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)

    def __init__(self, diffusion_model: Any) -> None:
        self.diffusion_model = diffusion_model
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, list[Any]] = {}
        self.callbacks: dict[str, list[Any]] = {}

    def clone(self) -> Patcher:
        other = Patcher(self.diffusion_model)
        other.model_options = copy.deepcopy(self.model_options)
        other.wrappers = {name: list(entries) for name, entries in self.wrappers.items()}
        other.callbacks = {name: list(entries) for name, entries in self.callbacks.items()}
        return other

    def get_model_object(self, name: str) -> Any:
        return getattr(self, name)

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, []).append(wrapper)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, []).append(callback)

    def call(self, kind):
        for callback in self.callbacks.get(kind, ()):
            callback(self)


class Executor:
    def __init__(self, model: Any, wrappers: list[Any]) -> None:
        self.original, self.class_obj, self.wrappers = model._forward, model, wrappers

    def __call__(self, *args: Any) -> Any:
        if not self.wrappers:
            return self.original(*args)
        return self.wrappers[0](Executor(self.class_obj, self.wrappers[1:]), *args)


@torch.no_grad()
def denoise(patcher: Patcher, seed: int = 0, steps: int = STEPS, told: bool = True) -> torch.Tensor:
    """A sampler: two branches in every step. told: whether it says its sigmas, as ComfyUI's do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 16, 2, 8, 8, generator=generator)
    contexts = torch.randn(2, 1, 5, 16, generator=generator)
    schedule = torch.linspace(1, 0, steps + 1)
    patcher.call("on_pre_run")
    try:
        for sigma in schedule[:-1]:
            outs = []
            for kind in (0, 1):
                options = {
                    **patcher.model_options["transformer_options"],
                    "cond_or_uncond": [kind],
                    "uuids": [f"prompt {kind}"],
                }
                options |= {"sigmas": sigma[None], "sample_sigmas": schedule} if told else {}
                run = Executor(patcher.diffusion_model, patcher.wrappers.get("diffusion_model", []))
                outs.append(run(x, sigma, contexts[kind], options))
            x = x - 0.1 * (2 * outs[0] - outs[1])
    finally:
        patcher.call("on_cleanup")
    return x
