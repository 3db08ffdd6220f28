"""Attention by the kernels, on tensors in token order: over a plan's kept blocks, over every key, or both at an anchor.

Everything around a kernel is here: gather into block order, rounding to INT8, means of skipped blocks, the way back. No
function waits for the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parkattn.checks import expect_choice, shape_of
from parkattn.plan import Blocks, Plan
from parkattn.settings import Precision

from ..permute import triton as permute
from ..residual.triton import merge_parts
from ..tiles import expect_dense_rows
from .tiles import HOPPER_HEAD_DIMS, TRITON_HEAD_DIMS
from .triton import attend_ragged

KEY_ROUNDINGS: dict[Precision, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"int8": permute.key_rounding}
"""The rounding that `permute.round_rows` and `gather_with_means` take, in each precision but bf16."""


@dataclass(frozen=True)
class AttentionKernel:
    """The Hopper kernels or the plain Triton one, and the numbers that Q K^T is computed in."""

    hopper: bool
    precision: Precision = "bf16"

    def __post_init__(self) -> None:
        expect_choice("precision", self.precision, HOPPER_HEAD_DIMS if self.hopper else TRITON_HEAD_DIMS)

    def over_kept(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> Tensor:
        over, stand_ins = self._attention(q, k, v, plan, scale, compensate)
        return over(plan.mask, **stand_ins)[0]

    def over_all(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None) -> Tensor:
        return self.over_all_with_lse(q, k, v, scale=scale, key_valid=key_valid)[0]

    def over_all_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, key_valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """softmax(Q K^T scale) V and its log-sum-exp [b h n]; key_valid bool [b m].

        In Triton as one block that keeps one block, read in place; in Gluon q, k and v are copied first unless they are
        contiguous. With key_valid keys and values are gathered, those that count first: which do is known on the GPU
        alone.
        """
        if self.hopper:
            return self._dense_hopper(q, k, v, scale, key_valid)
        (b, h, n, _), m = q.shape, k.shape[2]
        # not copied from the host, which would wait
        both = torch.arange(2, dtype=torch.int32, device=q.device).expand(b, h, 2)
        order, ends = None, both * m
        if key_valid is not None:
            order = (~key_valid).to(torch.uint8).argsort(stable=True).int()[:, None].expand(b, h, m)
            ends = torch.nn.functional.pad(key_valid.sum(-1, dtype=torch.int32)[:, None, None], (1, 1), value=m)
            ends[..., 0] = 0
            ends = ends.expand(b, h, 3)
        mask = torch.arange(ends.shape[-1] - 1, device=q.device).expand(b, h, 1, -1) == 0
        whole = torch.zeros((), dtype=torch.int32, device=q.device)
        sides = Blocks(whole.expand(b, h, n), None, both * n), Blocks(whole.expand(b, h, m), order, ends)
        plan = Plan(*sides, mask, 1, 1, key_valid is not None, whole.expand(b, h).float())
        over, _ = self._attention(q, k, v, plan, scale, False)
        out, lse = over(mask, with_lse=True)
        return out, lse.view(b, h, n)

    def over_both(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None, compensate: bool
    ) -> tuple[Tensor, Tensor]:
        """Dense attention, and what of it `attend` with this plan misses, in the work of one dense call: kept keys,
        skipped keys and the stand-ins of skipped blocks are attended apart and merged.
        """
        over, stand_ins = self._attention(q, k, v, plan, scale, compensate)
        skipped = ~plan.mask
        if plan.padding:
            skipped[..., -1] = False
        parts = [over(kept, with_lse=True) for kept in (plan.mask, skipped)]
        if compensate:
            weight = plan.keys.sizes.float().log().unsqueeze(-2) if plan.bias is None else plan.bias
            enters = {"pair_bias": torch.where(plan.mask, -torch.inf, weight).flatten(0, 1)}
            parts.append(over(torch.zeros_like(plan.mask), with_lse=True, **(stand_ins | enters)))
        return merge_parts(*parts)

    def _dense_hopper(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, key_valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from .hopper_dense import attend_dense_hopper

        self._expect_attendable(q, k, v, scale)
        (b, h, n, d), m = q.shape, k.shape[2]
        order = counts = steps = None
        if key_valid is not None:
            order = (~key_valid).to(torch.uint8).argsort(stable=True).int()[:, None].expand(b, h, m).contiguous()
            counts = key_valid.sum(-1, dtype=torch.int32)[:, None].expand(b, h).flatten().contiguous()
        if (rounding := self._key_rounding(k)) is not None:
            (rows, row_steps), (keys, step) = permute.round_rows(q, None), permute.round_rows(k, order, rounding)
            steps = row_steps, step / d
        else:
            rows, keys = permute.gather_rows(q, None), permute.gather_rows(k, order)
        values = permute.gather_rows(v, order)
        out, lse = attend_dense_hopper(
            rows, keys, values, counts, scale=scale, out=torch.empty_like(q), with_lse=True, steps=steps
        )
        assert lse is not None
        return out, lse.view(b, h, n)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None, compensate: bool
    ) -> tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any]]:
        """Attention over any mask of the plan's blocks, (out [b h n d], lse [b*h n]), and stand-ins' arguments."""
        self._expect_attendable(q, k, v, scale)
        b, h, _, d = k.shape
        # the kernels take a plan's tensors as contiguous; one cut out of a larger plan is not
        offsets = [x.reshape(b * h, -1).contiguous() for x in (plan.queries.offsets, plan.keys.offsets)]
        order, key_order = (None if x is None else x.contiguous() for x in (plan.queries.order, plan.keys.order))
        token_of_row = None if order is None else order.view(b * h, -1)
        keys, values, means = k, v, []
        rounding = self._key_rounding(k)
        if compensate and (rounding is not None or key_order is not None):
            key_order = plan.keys.permutation().contiguous()
            keys, values, *means = permute.gather_with_means(k, v, key_order, plan.keys.offsets.contiguous(), rounding)
        elif compensate:
            means = [permute.block_means(x, plan.keys.offsets.contiguous()) for x in (k, v)]
        elif rounding is not None:
            keys = permute.round_rows(k, key_order, rounding)[0]
            values = v if key_order is None else permute.gather_rows(v, key_order)
        elif key_order is not None:
            keys, values = permute.gather_rows(k, key_order), permute.gather_rows(v, key_order)
        stand_ins: dict[str, Any] = {}
        if compensate:
            stand_ins = {
                "compensate": plan.compensable().reshape(b * h, -1),
                **dict(zip(("centroids", "mean_values"), means, strict=True)),
            }
            if plan.bias is not None:
                stand_ins["pair_bias"] = plan.bias.reshape(b * h, *plan.bias.shape[2:]).contiguous()
        attend: Callable[..., Any]
        rows, steps = q, None
        if rounding is not None:
            rows, row_steps = permute.round_rows(q, order)
            steps = row_steps, rounding[1] / d
        if self.hopper:
            from .hopper import attend_hopper

            # tokens in block order are read in place, but copied first where the memory is [b n h d]: the copy engine
            # wants a head's rows together
            flat = [x if x.ndim == 3 else permute.gather_rows(x, None) for x in (keys, values)]
            rows = permute.gather_rows(q, order) if rounding is None else rows
            attend = functools.partial(attend_hopper, rows, *flat, *offsets, out_order=token_of_row, steps=steps)
        else:
            by_head = (x.view(b, h, -1, d) if x.ndim == 3 else x for x in (rows, keys, values))
            attend = functools.partial(attend_ragged, *by_head, *offsets, query_order=token_of_row, steps=steps)

        def over(mask: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
            found: Any = attend(
                mask.reshape(b * h, *mask.shape[2:]).contiguous(), scale=scale, out=torch.empty_like(q), **how
            )
            return found

        return over, stand_ins

    def _key_rounding(self, k: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.precision == "bf16":
            return None
        rounding = KEY_ROUNDINGS[self.precision]  # called by name: tests take a called subscript for a kernel launch
        return rounding(k)

    def _expect_attendable(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
        expect_dense_rows(q=q, k=k, v=v)
        if v.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"v: expected q's head dim {q.shape[-1]} with backend='triton', got {shape_of(v)}; "
                "use backend='reference'."
            )
        if scale is not None and not scale > 0:
            raise ValueError(
                f"scale: expected a positive number with backend='triton', got {scale}; use backend='reference'."
            )
