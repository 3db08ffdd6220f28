"""The classes that vLLM-Omni makes for PARK; importing them needs vLLM-Omni."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.selector import HEAD_SIZE_UNKNOWN, _cached_get_backend_cls
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

from parkattn.hosts.served import ServedLayer
from parkattn.hosts.vllm_omni import LEVELS, MEMBER, VideoPlace, request_of, why_dense


def platform_default(head_size: int) -> type[AttentionBackend]:
    """vLLM-Omni's choice where nothing is asked for."""
    return _cached_get_backend_cls(None, head_size)


class ParkBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return MEMBER

    @staticmethod
    def get_impl_cls() -> type[ParkImpl]:
        return ParkImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> Any:
        return None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return platform_default(HEAD_SIZE_UNKNOWN).supports_attention_mask(None)

    # of calls that go to the platform's backend: several requests in one sequence, and padding without a mask

    @classmethod
    def supports_multi_doc_packed_varlen(cls) -> bool:
        return platform_default(HEAD_SIZE_UNKNOWN).supports_multi_doc_packed_varlen()

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        return platform_default(HEAD_SIZE_UNKNOWN).supports_packed_mask_free()


class ParkImpl(ServedLayer, AttentionImpl):
    """One layer, [b n h d]. dense: the platform's own backend."""

    def __init__(self, backend_explicit: bool = False, **given: Any) -> None:
        """given: by which vLLM-Omni makes any of its backends; the platform's own was not asked for explicitly."""
        found = re.search(r"(?:^|\.)(\d+)\.", given.get("prefix", ""))
        self.index = int(found[1]) if found and given.get("role", "self") == "self" else None
        self.numbered = self.index is not None  # all that a graph reads of it, so that one graph serves every layer
        self.scale, self.causal = given["softmax_scale"], given.get("causal", False)
        self.dense = platform_default(given["head_size"]).get_impl_cls()(**given)
        self.number_for_graphs()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        place = VideoPlace.read(getattr(attn_metadata, "video_layout", None))
        reason = self._why_not_video(query, key, value, place)
        if place is None or reason is not None:
            decline(str(reason))
            return self.dense.forward(query, key, value, attn_metadata)
        tokens, used = query.shape[1], place.used
        # a layout also says that a mask covers nothing but the padding behind the video
        out = self.ask(query[:, :used], key[:, :used], value[:, :used], place.packed())
        return out if used == tokens else torch.nn.functional.pad(out, (0, 0, 0, 0, 0, tokens - used))

    def answer(self, q: Tensor, k: Tensor, v: Tensor, place: list[int]) -> Tensor:
        where = VideoPlace.unpacked(place)

        def dense() -> Tensor:
            return self.dense.forward(q, k, v, AttentionMetadata())

        context = get_forward_context()
        request = request_of(context)
        reason = why_dense(context, request)
        if reason is not None:
            request.declined[reason] += 1
            return dense()
        steps, levels = context.total_denoise_steps, getattr(context, LEVELS, None)
        request.stand_at(context.denoise_step_idx, steps, levels, "cond", where.grid)
        return request.attend(
            self, q, k, v, dense, before=where.before, references=where.references, counted_branches=True
        )

    def _why_not_video(self, q: Tensor, k: Tensor, v: Tensor, place: VideoPlace | None) -> str | None:
        if not self.numbered:
            return "a layer that is not numbered self-attention"
        if place is None:
            return "the model does not say where its video is, or it does not come last"
        if not q.shape == k.shape == v.shape or self.causal:
            return "q, k and v are not of one shape, or attention is causal"
        if q.shape[1] < place.used:
            return f"{q.shape[1]} tokens are fewer than the {place.used} of the video and its prefix"
        return None


@torch.compiler.disable
def decline(reason: str) -> None:
    if is_forward_context_available():
        request_of(get_forward_context()).declined[reason] += 1
