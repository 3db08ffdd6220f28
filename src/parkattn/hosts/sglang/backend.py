"""The classes that SGLang makes for PARK; importing them needs SGLang."""

from __future__ import annotations

import functools
import math
from pkgutil import resolve_name
from typing import Any

import torch
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_world_size
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend, AttentionImpl
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from sglang.multimodal_gen.runtime.utils.precision import get_compute_dtype
from torch import Tensor

from parkattn.hosts.served import ServedLayer
from parkattn.hosts.sglang import MEMBER, Block, grid_of_request, request_of, server_args, steps_of


class ParkBackend(AttentionBackend):
    @staticmethod
    def get_enum() -> AttentionBackendEnum:
        return AttentionBackendEnum[MEMBER]

    @staticmethod
    def get_impl_cls() -> type[ParkImpl]:
        return ParkImpl

    @staticmethod
    def get_metadata_cls() -> Any:
        raise NotImplementedError  # as SGLang's backends without metadata do

    @staticmethod
    def get_builder_cls() -> Any:
        return None


class ParkImpl(ServedLayer, AttentionImpl):
    """One layer, [b n h d]. dense: the backend that SGLang takes where none is asked for."""

    def __init__(self, **given: Any) -> None:
        """given: by which SGLang makes any of its backends, such as head_size and softmax_scale."""
        self.index, self.text_follows, self.packed = Block.read(given.get("prefix", ""))
        self.scale, self.causal = given["softmax_scale"], given.get("causal", False)
        path = current_platform.get_attn_backend_cls_str(None, given["head_size"], get_compute_dtype())
        self.dense = resolve_name(path).get_impl_cls()(**given)
        self.number_for_graphs()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        return self.ask(query, key, value, [])

    def forward_varlen(self, query: Tensor, key: Tensor, value: Tensor, **told: Any) -> Tensor:
        """[n h d]: one packed sequence and padding after it, as MiniMax-H3's."""
        ends = told.get("cu_seqlens_host")
        if self.packed and ends is not None and len(ends) == 3 and ends[2] == len(query):
            return self.ask(query[None], key[None], value[None], [ends[1]])[0]
        batch = getattr(get_forward_context_or_none(), "forward_batch", None)
        if batch is not None:
            request_of(batch, server_args()).declined["packed sequences, without a word where the video is"] += 1
        return self.dense.forward_varlen(query, key, value, **told)

    def answer(self, q: Tensor, k: Tensor, v: Tensor, place: list[int]) -> Tensor:
        """place: where a packed sequence ends; empty: it is none."""
        context = get_forward_context_or_none()
        metadata = getattr(context, "attn_metadata", None)

        def dense() -> Tensor:
            if not place:
                return self.dense.forward(q, k, v, metadata)
            ends = (0, place[0], q.shape[1])
            told = {"cu_seqlens": sequence_ends(ends, q.device), "cu_seqlens_host": ends, "max_seqlen": place[0]}
            return self.dense.forward_varlen(q[0], k[0], v[0], **told)[None]

        batch = getattr(context, "forward_batch", None)
        if batch is None:  # an encoder, before the request's video
            return dense()
        args = server_args()
        request, grid = request_of(batch, args), grid_of_request(batch, args)
        tokens, video = place[0] if place else q.shape[1], math.prod(grid) if grid else None
        reason = self._why_not_video(q, k, v, tokens, video)
        if grid is None or video is None or reason is not None:
            request.declined[str(reason)] += 1
            return dense()
        step = context.current_timestep
        branch = "uncond" if batch.is_cfg_negative else "cond"
        request.stand_at(step if isinstance(step, int) else None, *steps_of(batch), branch, grid)
        if place:
            used = (q[:, :tokens], k[:, :tokens], v[:, :tokens])
            out = request.attend(self, *used, lambda: dense()[:, :tokens], before=tokens - video)
            return torch.cat([out, out.new_zeros(1, q.shape[1] - tokens, *out.shape[2:])], 1)  # nobody reads padding
        return request.attend(self, q, k, v, dense, after=tokens - video)

    def _why_not_video(self, q: Tensor, k: Tensor, v: Tensor, tokens: int, video: int | None) -> str | None:
        if self.index is None:
            return "a layer that is not numbered self-attention, such as cross-attention"
        if not q.shape == k.shape == v.shape or self.causal:
            return "q, k and v are not of one shape, or attention is causal"
        if video is None:
            return "the request has no latents of a video"
        if tokens != video and not ((self.text_follows or self.packed) and tokens > video):
            return f"{tokens} tokens are not the {video} of the video"
        if self.text_follows and tokens > video and get_sp_world_size() > 1:
            return "text is spread over GPUs, between parts of the video"
        return None


@functools.lru_cache(maxsize=8)
def sequence_ends(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """As kernels take them; kept, because making them waits for the GPU. Reset: cache_clear."""
    return torch.tensor(ends, dtype=torch.int32, device=device)
