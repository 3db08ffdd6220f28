"""When a plan is rebuilt and where it is kept: the schedule of a run, and the one owner of state between steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from parkattn.anchors import anchor_count, anchor_steps, levels_of, outlived
from parkattn.balance import Ranks, reassign
from parkattn.ops import REFERENCE, Backend, cluster
from parkattn.ops.residual.definition import LowRank
from parkattn.plan import Blocks, Plan
from parkattn.settings import Timetable
from parkattn.site import CallSite, SiteKey


class Phase(NamedTuple):
    name: Literal["dense", "anchor", "refresh", "reuse"]  # anchor: dense, and a plan is built
    reason: str  # for people


class History(NamedTuple):
    """Facts for a schedule about the layer and branch that it decides about."""

    refreshed_at: int | None = None  # the step at which the plan was built


class PhaseRule(Protocol):
    """The phase of each call. An adaptive rule reads `site.noise_levels` or has state of its own, which reset drops."""

    def phase(self, site: CallSite, history: History) -> Phase: ...

    def reset(self) -> None: ...


class Schedule:
    """The paper's rule: the first steps are dense, then a plan is built every R steps and reused between.

    With `when.anchors`: a plan is built at dense steps that are spread over the run, and reused between.
    """

    def __init__(self, when: Timetable) -> None:
        self.when = when

    def reset(self) -> None:
        """Nothing is remembered."""

    def phase(self, site: CallSite, history: History) -> Phase:
        when, step, total, last = self.when, site.step, site.total_steps, history.refreshed_at
        if when.anchors is not None:
            return always_dense(when, site) or self._anchored(site, last)
        first = dense_prefix(when, total)
        if step < first and site.layer not in when.dense_layers:
            return Phase("dense", f"step {step} is one of the first {first} steps")
        if (dense := always_dense(when, site)) is not None:
            return dense
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

    def _anchored(self, site: CallSite, last: int | None) -> Phase:
        steps = anchor_steps(anchor_count(self.when, site.total_steps), *levels_of(site))
        # anchors that a cache skipped are made up at the next step that runs
        due = [step for step in steps if (-1 if last is None else last) < step <= site.step]
        if site.step in steps and site.step + 1 in steps:
            return Phase("dense", f"anchor step {site.step}, whose plan no step would use: the next is an anchor too")
        if due and last is not None:
            return Phase("anchor", f"anchor step {due[-1]}")
        if last is not None and last <= site.step and outlived(self.when, last, site):
            return Phase("refresh", f"the plan of step {last} is from another noise level")
        return unanchored(site, last)


def count_phases(schedule: PhaseRule, steps: int, layer: int = 0) -> Counter[str]:
    """A layer's calls of a run by phase. Noise levels move anchors and leave their number."""
    refreshed, found = None, Counter[str]()
    for step in range(steps):
        phase = schedule.phase(CallSite(layer=layer, step=step, total_steps=steps), History(refreshed)).name
        refreshed = step if phase in ("anchor", "refresh") else refreshed
        found[phase] += 1
    return found


def always_dense(when: Timetable, site: CallSite) -> Phase | None:
    """Calls that every rule leaves dense."""
    step, total = site.step, site.total_steps
    if site.layer in when.dense_layers:
        return Phase("dense", f"layer {site.layer} is in dense_layers")
    if total is not None and step >= total:
        return Phase("dense", f"step {step}, counted from 0, is not one of {total} steps; check total_steps")
    if total is not None and step >= total - when.dense_last_steps:
        return Phase("dense", f"step {step} is one of the last {when.dense_last_steps} steps")
    return None


def always_runs(when: Timetable, site: CallSite) -> bool:
    """Whether a step is dense or an anchor by a fixed rule; one that does not run is made up at the next that does."""
    if site.total_steps is not None and site.step >= site.total_steps - when.dense_last_steps:
        return True
    if when.anchors is None:
        return site.step < dense_prefix(when, site.total_steps)
    return site.step in anchor_steps(anchor_count(when, site.total_steps), *levels_of(site))


def unanchored(site: CallSite, last: int | None) -> Phase:
    """A step at which no anchor is due: one all the same where there is no plan of this run."""
    if last is None:
        return Phase("anchor", "no plan yet")
    if last > site.step:
        return Phase("anchor", f"the plan is from step {last} of an earlier run")
    return Phase("reuse", f"plan of step {last}")


def dense_prefix(when: Timetable, total_steps: int | None) -> int:
    """Number of first steps that are dense."""
    if when.anchors is not None:
        return min(1, anchor_count(when, total_steps))
    if total_steps is None and (when.dense_last_steps or (when.dense_steps is None and when.dense_fraction > 0)):
        raise ValueError("total_steps: expected the number of steps, got None; pass it, or set dense_steps.")
    if when.dense_steps is not None:
        return when.dense_steps
    # rounded up, so that a run of 4 steps still begins dense; 1e-9 because 0.2 * 50 must stay 10
    return math.ceil(when.dense_fraction * (total_steps or 0) - 1e-9)


def plan_lifetime(when: Timetable, total_steps: int | None) -> int | None:
    """R is meant for a run of reference_steps: shorter runs move further per step and refresh sooner."""
    if when.refresh_interval is None:
        return None
    shrink = 1.0 if total_steps is None else min(1.0, total_steps / when.reference_steps)
    return max(1, round(when.refresh_interval * shrink))


class HeldPlan(NamedTuple):
    plan: Plan
    step: int
    text: slice | None  # the span it was built with
    grid: tuple[int, int, int] | None = None  # and the video's
    residual: LowRank | None = None  # what this plan's sparse output missed at that step
    density: Tensor | None = None  # of the plan, [b h]; None where padding has changed since


class _Entry(NamedTuple):
    packed: _PackedPlan
    step: int
    text: slice | None
    grid: tuple[int, int, int] | None
    residual: LowRank | None


class PlanStore:
    """Plans between steps, by (transformer, layer, branch, batch), each with the residual that belongs to it.

    Kept packed (labels in one or two bytes, mask in bits: 9 MB per layer and branch at 40 heads and 75,600 tokens, and
    24 MB for a residual of rank 8); the order inside a plan is sorted again from the labels when it is used.
    """

    def __init__(self, share_branches: bool = False) -> None:
        self._held: dict[SiteKey, _Entry] = {}
        self._orders: dict[SiteKey, Tensor] = {}  # the head at each place of all ranks; absent: the model's order
        self._share_branches = share_branches

    def get(self, key: SiteKey, backend: Backend = REFERENCE, key_valid: Tensor | None = None) -> HeldPlan | None:
        """backend: sorts labels into blocks; key_valid [b m]: padding as it is now (`repadded`)."""
        if key not in self._held:
            return None
        held = self._held[key]
        packed = held.packed
        if packed.padding and key_valid is not None and key_valid.shape == packed.keys.labels.shape[::2]:
            packed = packed.repadded(key_valid)
        return HeldPlan(packed.unpack(backend), held.step, held.text, held.grid, held.residual, packed.density)

    def put(
        self,
        key: SiteKey,
        plan: Plan,
        step: int,
        text: slice | None = None,
        residual: LowRank | None = None,
        grid: tuple[int, int, int] | None = None,
    ) -> None:
        self._held[key] = _Entry(_PackedPlan.pack(plan), step, text, grid, residual)

    def share(self, key: SiteKey, owner: SiteKey, step: int, residual: LowRank | None = None) -> None:
        """The plan of `owner` also under `key`, held once."""
        self._held[key] = self._held[owner]._replace(step=step, residual=residual)

    def refreshed_at(self, key: SiteKey) -> int | None:
        return self._held[key].step if key in self._held else None

    def made(self, transformer: str) -> set[tuple[int, int, bool]]:
        """Layer and step of each plan, and whether it has a residual."""
        held = ((key, entry) for key, entry in self._held.items() if key.transformer == transformer)
        return {(key.layer, entry.step, entry.residual is not None) for key, entry in held}

    def sibling(self, key: SiteKey, step: int) -> SiteKey | None:
        """Another branch of the same video in the same layer whose plan is of this step."""
        same = (other for other in self._held if other != key and other._replace(branch=key.branch) == key)
        return next((other for other in same if self._held[other].step == step), None)

    def _team(self, key: SiteKey) -> SiteKey:
        """Branches that share plans have one order of heads."""
        return key._replace(branch="") if self._share_branches else key

    def head_order(self, key: SiteKey) -> Tensor | None:
        return self._orders.get(self._team(key))

    def balance(self, key: SiteKey, ranks: Ranks) -> Tensor:
        """Assign heads to ranks by the density of the plan under `key`, and bring along what is held of them.

        -> [2]: the slowest rank over the mean, in the model's order and from now on.
        """
        density, team = self._held[key].packed.density, self._team(key)
        assert density is not None  # a plan as it was made
        change = reassign(density.double().sum(0), self._orders.get(team), ranks)
        moved: dict[int, _PackedPlan] = {}  # branches may share one
        for other in [other for other in self._held if self._team(other) == team]:
            entry = self._held[other]
            if id(entry.packed) not in moved:
                moved[id(entry.packed)] = entry.packed.moved(change.move)
            residual = None if entry.residual is None else entry.residual.moved(change.move)
            self._held[other] = entry._replace(packed=moved[id(entry.packed)], residual=residual)
        self._orders[team] = change.order
        return change.imbalance

    def reset(self) -> None:
        self._held.clear()
        self._orders.clear()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        plans = {id(entry.packed): entry.packed.nbytes for entry in self._held.values()}  # branches may share one
        return sum(plans.values()) + self.residual_nbytes

    @property
    def residual_nbytes(self) -> int:
        return sum(entry.residual.nbytes for entry in self._held.values() if entry.residual is not None)


class _PackedSide(NamedTuple):
    """Labels in the smallest integer type; those that all heads share are kept once."""

    labels: Tensor
    blocks: int
    offsets: Tensor | None  # of blocks in token order; None: labels are sorted again

    @classmethod
    def pack(cls, blocks: Blocks) -> _PackedSide:
        small = torch.uint8 if blocks.count <= 256 else torch.int16 if blocks.count <= 32768 else torch.int32
        shared = blocks.labels.stride()[:2] == (0, 0)
        labels = blocks.labels[:1, :1].to(small).expand(blocks.labels.shape) if shared else blocks.labels.to(small)
        return cls(labels, blocks.count, blocks.offsets if blocks.order is None else None)

    def moved(self, move: Callable[[Tensor], Tensor]) -> _PackedSide:
        return self._replace(labels=move(self.labels), offsets=None if self.offsets is None else move(self.offsets))

    def unpack(self, backend: Backend) -> Blocks:
        if self.offsets is None:
            return cluster.arrange(backend, self.labels, self.blocks)
        return Blocks(self.labels.to(torch.int32), None, self.offsets)


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
    density: Tensor | None
    nbytes: int

    @classmethod
    def pack(cls, plan: Plan) -> _PackedPlan:
        queries, keys, bits = _PackedSide.pack(plan.queries), _PackedSide.pack(plan.keys), pack_bits(plan.mask)
        held = (queries.labels, keys.labels, bits, plan.bias, *plan.memory.values())
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)
        counts = plan.mask.shape, plan.query_clusters, plan.key_clusters, plan.padding
        return cls(queries, keys, bits, *counts, plan.estimated_mass, plan.bias, plan.memory, plan.density(), nbytes)

    def unpack(self, backend: Backend) -> Plan:
        queries, keys = self.queries.unpack(backend), self.keys.unpack(backend)
        counts = self.query_clusters, self.key_clusters, self.padding
        mask = unpack_bits(self.bits, self.mask_shape)
        return Plan(queries, keys, mask, *counts, self.estimated_mass, self.bias, self.memory)

    def moved(self, move: Callable[[Tensor], Tensor]) -> _PackedPlan:
        """The plan of other heads: `move` brings them here, tensor by tensor."""
        mass, bias, density = (None if x is None else move(x) for x in (self.estimated_mass, self.bias, self.density))
        return self._replace(
            queries=self.queries.moved(move),
            keys=self.keys.moved(move),
            bits=pack_bits(move(unpack_bits(self.bits, self.mask_shape))),
            estimated_mass=mass,
            bias=bias,
            memory={name: move(tensor) for name, tensor in self.memory.items()},
            density=density,
        )

    def repadded(self, key_valid: Tensor) -> _PackedPlan:
        """The plan for other padding, without waiting for the GPU: keys that are padding now go to the unseen block,
        keys that no longer are to the text block, or to the first block where there is no text.
        """
        labels, padding = self.keys.labels, self.keys.blocks - 1
        back = self.key_clusters if padding > self.key_clusters else 0
        valid = torch.where(labels == padding, back, labels)
        keys = self.keys._replace(labels=torch.where(key_valid.unsqueeze(1), valid, padding).to(labels.dtype))
        return self._replace(keys=keys, density=None)


def pack_bits(mask: Tensor) -> Tensor:
    flat = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    flat = (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return flat.flatten()[: shape.numel()].bool().view(shape)
