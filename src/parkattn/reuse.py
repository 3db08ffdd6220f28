"""When a plan is rebuilt and where it is kept: the schedule of a run, and the one owner of state between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parkattn.plan import Blocks, Plan, arrange
from parkattn.settings import When
from parkattn.site import CallSite, SiteKey


class Phase(NamedTuple):
    name: str  # "dense", "refresh" or "reuse"
    reason: str  # for people


class History(NamedTuple):
    """What a schedule may know of the layer and branch it decides about."""

    refreshed_at: int | None = None  # the step at which the plan was built


class Scheduling(Protocol):
    """Decides what a call does. An adaptive rule reads `site.noise_levels` or keeps state of its own, which reset drops."""

    def phase(self, site: CallSite, history: History) -> Phase: ...

    def reset(self) -> None: ...


class Schedule:
    """The paper's rule: the first steps are dense, then a plan is built every R steps and reused between."""

    def __init__(self, when: When) -> None:
        self.when = when

    def reset(self) -> None:
        """Nothing is remembered."""

    def phase(self, site: CallSite, history: History) -> Phase:
        when, step, total, last = self.when, site.step, site.total_steps, history.refreshed_at
        first = dense_prefix(when, total)
        if site.layer in when.dense_layers:
            return Phase("dense", f"layer {site.layer} is in dense_layers")
        if step < first:
            return Phase("dense", f"step {step} is one of the first {first} steps")
        if total is not None and step >= total:
            return Phase("dense", f"step {step}, counted from 0, is not one of {total} steps; check total_steps")
        if total is not None and step >= total - when.dense_last_steps:
            return Phase("dense", f"step {step} is one of the last {when.dense_last_steps} steps")
        if last is None:
            return Phase("refresh", "no plan yet")
        if last > step:
            return Phase("refresh", f"the plan is from step {last} of an earlier run")
        if when.refresh_steps is not None:
            due = [s for s in when.refresh_steps if last < s <= step]
            return Phase("refresh", f"refresh step {due[-1]}") if due else Phase("reuse", f"plan of step {last}")
        # counted from the layer's own last refresh, so that steps skipped by a cache do not skip the refresh
        interval = plan_lifetime(when, total)
        if interval is not None and step - last >= interval:
            return Phase("refresh", f"{step - last} steps since the last refresh")
        return Phase("reuse", f"plan of step {last}")


def dense_prefix(when: When, total_steps: int | None) -> int:
    """How many first steps are dense."""
    if total_steps is None and (when.dense_last_steps or (when.dense_steps is None and when.dense_fraction > 0)):
        raise ValueError("total_steps: expected the number of steps, got None; pass it, or set dense_steps and dense_last_steps=0.")
    if when.dense_steps is not None:
        return when.dense_steps
    # rounded up, so that a run of 4 steps still begins dense; 1e-9 because 0.2 * 50 must stay 10
    return math.ceil(when.dense_fraction * (total_steps or 0) - 1e-9)


def plan_lifetime(when: When, total_steps: int | None) -> int | None:
    """R is meant for a run of reference_steps: shorter runs move further per step and refresh sooner."""
    if when.refresh_interval is None:
        return None
    shrink = 1.0 if total_steps is None else min(1.0, total_steps / when.reference_steps)
    return max(1, round(when.refresh_interval * shrink))


class HeldPlan(NamedTuple):
    plan: Plan
    step: int
    text: slice | None  # the span it was built with


class PlanStore:
    """Plans between steps, by (transformer, layer, branch).

    Kept packed (labels in one or two bytes, mask in bits: 9 MB per layer and branch at 40 heads and 75,600 tokens); the
    order inside a plan is sorted again from the labels when it is used.
    """

    def __init__(self) -> None:
        self._packed: dict[SiteKey, tuple[_PackedPlan, int]] = {}

    def get(self, key: SiteKey, arrange: Callable[[Tensor, int], Blocks] = arrange, key_valid: Tensor | None = None) -> HeldPlan | None:
        """arrange: the backend's sort of labels into blocks; key_valid [b m]: padding as it is now (`repadded`)."""
        if key not in self._packed:
            return None
        packed, step = self._packed[key]
        if packed.padding and key_valid is not None and key_valid.shape == packed.keys.labels.shape[::2]:
            packed = packed.repadded(key_valid)
        return HeldPlan(packed.unpack(arrange), step, packed.text)

    def put(self, key: SiteKey, plan: Plan, step: int, text: slice | None = None) -> None:
        self._packed[key] = (_PackedPlan.pack(plan, text), step)

    def refreshed_at(self, key: SiteKey) -> int | None:
        return self._packed[key][1] if key in self._packed else None

    def reset(self) -> None:
        self._packed.clear()

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed, _ in self._packed.values())


class _PackedSide(NamedTuple):
    """Labels in the smallest integer type. Blocks in token order need no sort, and labels that all heads share are kept once."""

    labels: Tensor
    blocks: int
    offsets: Tensor | None  # of blocks in token order; None: labels are sorted again

    @classmethod
    def pack(cls, blocks: Blocks) -> _PackedSide:
        small = torch.uint8 if blocks.count <= 256 else torch.int16 if blocks.count <= 32768 else torch.int32
        shared = blocks.labels.stride()[:2] == (0, 0)
        labels = blocks.labels[:1, :1].to(small).expand(blocks.labels.shape) if shared else blocks.labels.to(small)
        return cls(labels, blocks.count, blocks.offsets if blocks.order is None else None)

    def unpack(self, arrange: Callable[[Tensor, int], Blocks]) -> Blocks:
        return arrange(self.labels, self.blocks) if self.offsets is None else Blocks(self.labels.to(torch.int32), None, self.offsets)


class _PackedPlan(NamedTuple):
    queries: _PackedSide
    keys: _PackedSide
    bits: Tensor  # uint8, eight mask entries each
    mask_shape: torch.Size
    query_clusters: int
    key_clusters: int
    padding: bool
    estimated_mass: Tensor | None
    bias: Tensor | None
    memory: Mapping[str, Tensor]
    text: slice | None

    @classmethod
    def pack(cls, plan: Plan, text: slice | None) -> _PackedPlan:
        sides = _PackedSide.pack(plan.queries), _PackedSide.pack(plan.keys)
        bits, shape = pack_bits(plan.mask), plan.mask.shape
        return cls(
            *sides, bits, shape, plan.query_clusters, plan.key_clusters, plan.padding, plan.estimated_mass, plan.bias, plan.memory, text
        )

    def unpack(self, arrange: Callable[[Tensor, int], Blocks]) -> Plan:
        mask = unpack_bits(self.bits, self.mask_shape)
        counts = self.query_clusters, self.key_clusters, self.padding
        return Plan(self.queries.unpack(arrange), self.keys.unpack(arrange), mask, *counts, self.estimated_mass, self.bias, self.memory)

    def repadded(self, key_valid: Tensor) -> _PackedPlan:
        """The plan for other padding, without asking the GPU which: keys that are padding now go to the block nobody sees,
        keys that no longer are to the text block, or to the first block where there is no text.
        """
        labels, padding = self.keys.labels, self.keys.blocks - 1
        back = self.key_clusters if padding > self.key_clusters else 0
        valid = torch.where(labels == padding, back, labels)
        return self._replace(keys=self.keys._replace(labels=torch.where(key_valid.unsqueeze(1), valid, padding).to(labels.dtype)))

    @property
    def nbytes(self) -> int:
        held = (self.queries.labels, self.keys.labels, self.bits, self.bias, *self.memory.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)


def pack_bits(mask: Tensor) -> Tensor:
    flat = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    flat = (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return flat.flatten()[: shape.numel()].bool().view(shape)
