"""When a plan is rebuilt and where it is kept: the schedule of a run, and the one owner of state between steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from parkattn.config import ParkConfig
from parkattn.permute import arrange
from parkattn.plan import Blocks, Plan
from parkattn.site import SiteKey


class Phase(NamedTuple):
    name: str  # "dense", "refresh" or "reuse"
    reason: str


class Schedule:
    """What to do at (step, layer), counted from 0."""

    def __init__(self, config: ParkConfig, total_steps: int | None = None) -> None:
        if total_steps is None and (config.dense_last_steps or (config.dense_steps is None and config.dense_fraction > 0)):
            raise ValueError("total_steps: expected the number of steps, got None; pass it, or set dense_steps and dense_last_steps=0.")
        self.config = config
        self.total_steps = total_steps
        if config.dense_steps is not None:
            self.dense_steps = config.dense_steps
        else:
            # rounded up, so that a run of 4 steps still begins dense; 1e-9 because 0.2 * 50 must stay 10
            self.dense_steps = math.ceil(config.dense_fraction * (total_steps or 0) - 1e-9)
        # R is meant for a run of reference_steps: shorter runs move further per step and refresh sooner
        shrink = 1.0 if total_steps is None else min(1.0, total_steps / config.reference_steps)
        self.refresh_interval = max(1, round(config.refresh_interval * shrink))

    def phase(self, step: int, layer: int, last_refresh: int | None) -> Phase:
        """last_refresh: the step at which this layer's plan was built, None without one."""
        config = self.config
        if layer in config.dense_layers:
            return Phase("dense", f"layer {layer} is in dense_layers")
        if step < self.dense_steps:
            return Phase("dense", f"step {step} is one of the first {self.dense_steps} steps")
        if self.total_steps is not None and step >= self.total_steps:
            return Phase("dense", f"step {step}, counted from 0, is not one of {self.total_steps} steps; check total_steps")
        if self.total_steps is not None and step >= self.total_steps - config.dense_last_steps:
            return Phase("dense", f"step {step} is one of the last {config.dense_last_steps} steps")
        if last_refresh is None:
            return Phase("refresh", "no plan yet")
        if last_refresh > step:
            return Phase("refresh", f"the plan is from step {last_refresh} of an earlier run")
        if config.refresh_steps is not None:
            due = [s for s in config.refresh_steps if last_refresh < s <= step]
            return Phase("refresh", f"refresh step {due[-1]}") if due else Phase("reuse", f"plan of step {last_refresh}")
        # counted from the layer's own last refresh, so that steps skipped by a cache do not skip the refresh
        if step - last_refresh >= self.refresh_interval:
            return Phase("refresh", f"{step - last_refresh} steps since the last refresh")
        return Phase("reuse", f"plan of step {last_refresh}")


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

    def get(self, key: SiteKey, arrange: Callable[[Tensor, int], Blocks] = arrange) -> HeldPlan | None:
        """arrange: the backend's sort of labels into blocks."""
        if key not in self._packed:
            return None
        packed, step = self._packed[key]
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
        return sum(tensor.nbytes for packed, _ in self._packed.values() for tensor in (packed.query_labels, packed.key_labels, packed.bits))


class _PackedPlan(NamedTuple):
    query_labels: Tensor
    key_labels: Tensor
    bits: Tensor  # uint8, eight mask entries each
    mask_shape: torch.Size
    query_clusters: int
    key_clusters: int
    padding: bool
    estimated_mass: Tensor
    text: slice | None

    @classmethod
    def pack(cls, plan: Plan, text: slice | None) -> _PackedPlan:
        return cls(
            plan.queries.labels.to(_smallest(plan.queries.count)),
            plan.keys.labels.to(_smallest(plan.keys.count)),
            pack_bits(plan.mask),
            plan.mask.shape,
            plan.query_clusters,
            plan.key_clusters,
            plan.padding,
            plan.estimated_mass,
            text,
        )

    def unpack(self, arrange: Callable[[Tensor, int], Blocks]) -> Plan:
        return Plan(
            arrange(self.query_labels, self.mask_shape[2]),
            arrange(self.key_labels, self.mask_shape[3]),
            unpack_bits(self.bits, self.mask_shape),
            self.query_clusters,
            self.key_clusters,
            self.padding,
            self.estimated_mass,
        )


def pack_bits(mask: Tensor) -> Tensor:
    flat = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    flat = (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return flat.flatten()[: shape.numel()].bool().view(shape)


def _smallest(blocks: int) -> torch.dtype:
    return torch.uint8 if blocks <= 256 else torch.int16 if blocks <= 32768 else torch.int32
