"""A method out of parts: a planner says what attends to what, a schedule when to ask it, a backend computes.

plan(q, k, site, earlier)  ──▶  Plan  ──▶  attend over its blocks  ──▶  out
          ▲                      │
    schedule: dense, anchor, refresh, reuse: held between steps by (transformer, layer, branch)
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parkattn.backend import resolve_for
from parkattn.checks import asks_for_gradient, expect_attention_inputs, expect_call_site, expect_key_valid
from parkattn.ops import Backend, attend, outside_autocast, planning, residual
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.attend.sage import attend_dense_sage, sage_version, why_no_sage
from parkattn.ops.residual.definition import LowRank
from parkattn.plan import Plan, expect_whole_plan
from parkattn.reuse import HeldPlan, History, Phase, PhaseRule, PlanStore, Schedule, always_runs
from parkattn.settings import PlannedConfig
from parkattn.site import AttentionOutput, AttentionStats, CallSite, SiteKey


class Planner(Protocol):
    """The only thing most methods define."""

    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        """q [b h n d], k [b h m d], without gradient; earlier: the plan before, to start from or to ignore."""


class Repair(Protocol):
    """Changes a method's output after sparse attention."""

    def repair(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, site: CallSite) -> Tensor: ...


class PlannedCall(NamedTuple):
    """One attention call, the backend that computes it, and the key of its plan."""

    q: Tensor  # [b h n d]
    k: Tensor  # [b h m d]
    v: Tensor
    site: CallSite
    backend: Backend
    key: SiteKey


class PlannedMethod:
    """An `AttentionMethod` from a planner: owns the plans between the steps of one generation."""

    def __init__(
        self,
        name: str,
        planner: Planner,
        config: PlannedConfig,
        *,
        schedule: PhaseRule | None = None,
        repair: Repair | None = None,
        between: Planner | None = None,
    ) -> None:
        """between: makes the plans between anchors, which no residual accompanies; `planner` where left out."""
        self.name = name
        self.planner = planner
        self.between = between or planner
        self.config = config
        self.schedule = schedule or Schedule(config)
        self.repair = repair
        self.plans = PlanStore(config.share_branches)

    @property
    def state_bytes(self) -> int:
        """Bytes that are held between steps."""
        return self.plans.nbytes

    @property
    def tolerance(self) -> float:
        """Of forecasts of whole forwards; 0: none."""
        return self.config.tolerance

    def computes(self, site: CallSite) -> bool:
        """Dense steps and anchors, which a schedule has at fixed steps, are never forecast."""
        return always_runs(self.config, site) or any(
            self._dense_by_plan(dataclasses.replace(site, layer=layer), step, with_residual)
            for layer, step, with_residual in self.plans.made(site.transformer)
        )

    def _dense_by_plan(self, site: CallSite, made_at: int, with_residual: bool) -> bool:
        """Whether a layer whose plan is of this step has a dense pass now."""
        if not isinstance(self.schedule, Schedule):  # another rule may count how often it is asked
            return False
        phase = self.schedule.phase(site, History(made_at)).name
        return phase == "anchor" or (phase == "refresh" and with_residual and self.config.anchors is None)

    def reset(self) -> None:
        """Forget plans and residuals."""
        self.plans.reset()
        self.schedule.reset()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        expect_attention_inputs(q, k, v)
        expect_call_site(site)
        # for dense steps too: a call that no backend can run is refused at the first step, not after the dense ones
        backend = resolve_for(q, self.config.backend, self.config.precision)
        site = dataclasses.replace(site, values=v, backend=backend)
        call = PlannedCall(q, k, v, site, backend, plan_key(site, q.shape[0]))
        phase, held = self._phase(call)
        if phase.name == "dense":
            if site.key_valid is not None and site.dense is None:
                expect_key_valid(site.key_valid, k)
            return self._dense(call, phase)
        if phase.name == "anchor":
            return self._anchor(call, phase, held)
        missed = density = imbalance = None
        if phase.name == "refresh" or held is None:
            made = self._plan(call, held, self.planner if self.config.anchors is None else self.between)
            imbalance = self._keep(call, made)
            plan = for_batch(made.plan, q)
        else:
            plan, missed, density = for_batch(held.plan, q), held.residual, held.density
        out = self._sparse(call, plan, self.attend(q, k, v, plan, site, backend))
        if missed is not None:
            out = residual.add_residual(backend, out, missed)
        error = None
        if self.config.guard_rows:
            error = sampled_error(q, k, v, out, self.config.guard_rows, scale=site.scale, key_valid=site.key_valid)
        density = plan.density() if density is None else density.repeat(q.shape[0] // density.shape[0], 1)
        mass, by = plan.estimated_mass, backend.reason
        stats = AttentionStats(phase.name, phase.reason, density, mass, by, plan, error, imbalance)
        return AttentionOutput(out, stats)

    def _anchor(self, call: PlannedCall, phase: Phase, held: HeldPlan | None) -> AttentionOutput:
        """The dense output, a plan, and the part of the output that the plan's sparse attention misses."""
        q, k, v, site, backend, _ = call
        made = self._plan(call, held, self.planner)
        plan = for_batch(made.plan, q)
        kept, stats = None, AttentionStats("anchor", phase.reason, q.new_ones(q.shape[:2]), backend=backend.reason)
        rank = self.config.rank_for(q.shape[2])
        if rank:
            out, missed = attend.over_both(backend, q, k, v, plan, scale=site.scale, compensate=self.config.compensate)
            with torch.no_grad():
                if self.repair is not None:
                    missed = out - self._sparse(call, plan, out - missed)
                kept = residual.factor(backend, missed.detach(), rank)
        else:
            out, stats = self._dense(call, phase)
        imbalance = self._keep(call, made, kept)
        return AttentionOutput(out, dataclasses.replace(stats, imbalance=imbalance))

    def _dense(self, call: PlannedCall, phase: Phase) -> AttentionOutput:
        """By the model's own attention, or by the backend's or SageAttention's where that is asked for and they can."""
        q, k, v, site, backend, _ = call
        by, why_no = "", why_no_sage(q, k, v, site.key_valid) if self.config.sage_dense else ""
        if why_no is None:
            out, by = attend_dense_sage(q, k, v, scale=site.scale), f"dense steps by SageAttention {sage_version()}"
        elif self.config.own_dense and (backend.differentiable or not asks_for_gradient(q, k, v)):
            out, by = attend.over_all(backend, q, k, v, scale=site.scale, key_valid=site.key_valid), backend.reason
        elif site.dense is not None:
            out = site.dense()
        else:
            out = dense_attention(q, k, v, scale=site.scale, key_valid=site.key_valid)
        by = "; ".join(filter(None, (by, why_no)))
        return AttentionOutput(out, AttentionStats(phase.name, phase.reason, q.new_ones(q.shape[:2]), backend=by))

    def _planned_for(self, call: PlannedCall) -> tuple[Tensor, Tensor, CallSite]:
        """A plan is made for all of the batch, or with `share_branches` and both branches in it for its first half.

        Padding, and a repair's memory in a plan, are each element's own: then all of it.
        """
        q, k, _, site, *_ = call
        half, odd = divmod(q.shape[0], 2)
        shared = self.config.share_branches and site.paired and not odd
        if not shared or site.key_valid is not None or self.repair is not None:
            return q, k, site
        return q[:half], k[:half], dataclasses.replace(site, values=None if site.values is None else site.values[:half])

    def _plan(self, call: PlannedCall, held: HeldPlan | None, planner: Planner) -> _Made:
        """A new plan, or with `share_branches` the one that another branch made at this step."""
        q, k, site = self._planned_for(call)
        if self.config.share_branches:
            sibling = self.plans.sibling(call.key, site.step)
            other = None if sibling is None else self.plans.get(sibling, call.backend, site.key_valid)
            usable = other is not None and other.plan.fits(q, k) and (other.text, other.grid) == (site.text, site.grid)
            if other is not None and usable and other.plan.padding == (site.key_valid is not None):
                return _Made(other.plan, sibling)
        earlier = None if held is None else held.plan
        return _Made(make_plan(q, k, planner, site, earlier, self.config.check_finite), None)

    def _keep(self, call: PlannedCall, made: _Made, residual: LowRank | None = None) -> Tensor | None:
        """-> how even a new plan is over the ranks, where heads may change places after it."""
        site, key = call.site, call.key
        if made.owner is not None:
            self.plans.share(key, made.owner, site.step, residual)
            return None
        self.plans.put(key, made.plan, site.step, site.text, residual, site.grid)
        return None if site.ranks is None else self.plans.balance(key, site.ranks)

    def _sparse(self, call: PlannedCall, plan: Plan, out: Tensor) -> Tensor:
        """The method's own sparse output, from that of the kept blocks."""
        return out if self.repair is None else self.repair.repair(call.q, call.k, call.v, plan, out, call.site)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, site: CallSite, backend: Backend) -> Tensor:
        """Attention over the plan's blocks, as the backend computes it."""
        return attend.over_kept(backend, q, k, v, plan, scale=site.scale, compensate=self.config.compensate)

    def _phase(self, call: PlannedCall) -> tuple[Phase, HeldPlan | None]:
        """The schedule's phase, unless the call cannot do that, and the plan held for the call.

        With a residual a first plan is built at an anchor, and without a schedule of anchors every plan is.
        """
        phase = self.schedule.phase(call.site, History(self.plans.refreshed_at(call.key)))
        if phase.name != "dense" and asks_for_gradient(*call[:3]) and not call.backend.differentiable:
            phase = Phase("dense", "gradients are asked for, which the kernels do not compute; use torch.no_grad()")
        if phase.name == "dense":
            return phase, None
        held = self.plans.get(call.key, call.backend, call.site.key_valid)
        if held is not None and (changed := self._changed(call, held)):
            phase, held = Phase("refresh", changed), None
        lone = held is None or self.config.anchors is None
        if phase.name == "refresh" and lone and self.config.rank_for(call.q.shape[2]):
            phase = Phase("anchor", phase.reason)
        return phase, held

    def _changed(self, call: PlannedCall, held: HeldPlan) -> str | None:
        """Why a plan does not serve this call; None: it does."""
        site, (batch, _, _, width) = call.site, call.v.shape
        if not held.plan.fits(*self._planned_for(call)[:2]):
            return "the number of tokens changed"
        if (held.text, held.plan.padding) != (site.text, site.key_valid is not None):
            return "text or padding changed"
        if held.grid != site.grid:
            return "the video's grid changed"
        # a residual is of the whole batch
        if held.residual is not None and not held.residual.fits(batch, call.q.shape[2], width):
            return "the values' width changed"
        return None


class _Made(NamedTuple):
    plan: Plan
    owner: SiteKey | None  # the branch that has it already; None: it is new


def for_batch(plan: Plan, q: Tensor) -> Plan:
    """A plan of the first half of a batch for both halves; any other as it is."""
    if plan.mask.shape[0] == q.shape[0]:
        return plan
    both = dataclasses.replace(plan, memory={}).moved(lambda x: torch.cat([x, x]))
    return dataclasses.replace(both, memory=plan.memory)


def make_plan(
    q: Tensor, k: Tensor, planner: Planner, site: CallSite, earlier: Plan | None, check_finite: bool = False
) -> Plan:
    """The planner's plan, checked; it sees an earlier one where that fits."""
    with planning(q, k, check_finite):
        earlier = earlier if earlier is not None and earlier.fits(q, k) else None
        plan = planner.plan(q.detach(), k.detach(), site, earlier)
    expect_whole_plan(plan, q, k)
    return plan


def values_of(q: Tensor, k: Tensor, site: CallSite) -> Tensor:
    """v [b h m d], for a planner that reads values too."""
    if site.values is None:
        raise ValueError(
            "site.values: expected the values [b, h, m, d] that this planner reads, got None; set CallSite.values."
        )
    expect_attention_inputs(q, k, site.values)
    return site.values


def sampled_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: int,
    *,
    scale: float | None = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    """|out - dense| / |dense| over `rows` evenly spread queries, whose dense attention is computed: [b h] float32"""
    stride = max(1, q.shape[2] // rows)
    chosen = slice(stride // 2, stride // 2 + stride * rows, stride)
    with torch.no_grad(), outside_autocast(q):
        exact = dense_attention(q[:, :, chosen], k, v, scale=scale, key_valid=key_valid).float()
        missed = (out[:, :, chosen].float() - exact).flatten(2).norm(dim=-1)
        return missed / exact.flatten(2).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


def plan_key(site: CallSite, batch: int = 1) -> SiteKey:
    """The key that plans are filed under."""
    return SiteKey(site.transformer, site.layer, site.branch, site.video, batch, site.paired)
