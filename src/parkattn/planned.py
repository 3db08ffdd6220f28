"""A method out of parts: a planner says what attends to what, a schedule when to ask it, a backend computes.

plan(q, k, site, earlier)  ──▶  Plan  ──▶  attend over its blocks  ──▶  out
          ▲                      │
    schedule: dense, anchor, refresh, reuse: held between steps by (transformer, layer, branch)
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from parkattn.backend import resolve_for
from parkattn.checks import (
    asks_for_gradient,
    expect_attention_inputs,
    expect_call_site,
    expect_key_valid,
)
from parkattn.ops import Backend, attend, outside_autocast, planning, residual
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.attend.sage import attend_dense_sage, sage_version, why_no_sage
from parkattn.ops.residual.definition import LowRank
from parkattn.plan import Blocks, Plan, expect_whole_plan
from parkattn.reuse import HeldPlan, History, Phase, PhaseRule, PlanStore, Schedule, always_runs
from parkattn.settings import PlannedConfig
from parkattn.site import AttentionOutput, AttentionStats, CallSite, SiteKey


class Planner(Protocol):
    """The only thing most methods define."""

    def plan(self, q: Tensor, k: Tensor, site: CallSite, earlier: Plan | None) -> Plan:
        """What attends to what. q [b h n d], k [b h m d], without gradient; earlier: the plan before, to start from or
        to ignore.
        """


class Repair(Protocol):
    """What a method does to the output after sparse attention."""

    def repair(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, site: CallSite) -> Tensor: ...


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
        """What is held between steps."""
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
        key = plan_key(site, q.shape[0])
        phase, held = self._phase(key, q, k, v, site, backend)
        if phase.name == "dense":
            if site.key_valid is not None and site.dense is None:
                expect_key_valid(site.key_valid, k)
            return self._dense(phase, q, k, v, site, backend)
        asked = self._planned_for(q, k, site)
        if phase.name == "anchor":
            return self._anchor(phase, key, q, k, v, site, backend, held)
        missed = density = imbalance = None
        if phase.name == "refresh" or held is None:
            made = self._plan(
                key, *asked, backend, held, self.between if self.config.anchors is not None else self.planner
            )
            imbalance = self._keep(key, made, site)
            plan = for_batch(made.plan, q)
        else:
            plan, missed, density = for_batch(held.plan, q), held.residual, held.density
        out = self._sparse(q, k, v, plan, site, self.attend(q, k, v, plan, site, backend))
        if missed is not None:
            out = residual.add_residual(backend, out, missed)
        error = None
        if self.config.guard_rows:
            error = sampled_error(q, k, v, out, self.config.guard_rows, scale=site.scale, key_valid=site.key_valid)
        density = plan.density() if density is None else density.repeat(q.shape[0] // density.shape[0], 1)
        mass, by = plan.estimated_mass, backend.reason
        stats = AttentionStats(phase.name, phase.reason, density, mass, by, plan, error, imbalance)
        return AttentionOutput(out, stats)

    def _anchor(
        self,
        phase: Phase,
        key: SiteKey,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        site: CallSite,
        backend: Backend,
        held: HeldPlan | None,
    ) -> AttentionOutput:
        """The dense output, a plan, and what the plan's sparse output misses of it."""
        made = self._plan(key, *self._planned_for(q, k, site), backend, held, self.planner)
        plan = for_batch(made.plan, q)
        kept, stats = None, AttentionStats("anchor", phase.reason, q.new_ones(q.shape[:2]), backend=backend.reason)
        rank = self.config.rank_for(q.shape[2])
        if rank:
            out, missed = attend.over_both(backend, q, k, v, plan, **self._how(site))
            with torch.no_grad():
                if self.repair is not None:
                    missed = out - self._sparse(q, k, v, plan, site, out - missed)
                kept = residual.factor(backend, missed.detach(), rank)
        else:
            out, stats = self._dense(phase, q, k, v, site, backend)
        imbalance = self._keep(key, made, site, kept)
        return AttentionOutput(out, dataclasses.replace(stats, imbalance=imbalance))

    def _dense(
        self, phase: Phase, q: Tensor, k: Tensor, v: Tensor, site: CallSite, backend: Backend
    ) -> AttentionOutput:
        """By the model's own attention, or by the backend's or SageAttention's where that is asked for and they can."""
        why_no = why_no_sage(q, k, v, site.key_valid) if self.config.sage_dense else ""
        if why_no is None:
            out, by = attend_dense_sage(q, k, v, scale=site.scale), f"dense steps by SageAttention {sage_version()}"
        elif self.config.own_dense and (backend.differentiable or not asks_for_gradient(q, k, v)):
            out, by = attend.over_all(backend, q, k, v, scale=site.scale, key_valid=site.key_valid), backend.reason
        else:
            out = (
                site.dense()
                if site.dense is not None
                else dense_attention(q, k, v, scale=site.scale, key_valid=site.key_valid)
            )
            by = ""
        by = "; ".join(filter(None, (by, why_no)))
        return AttentionOutput(out, AttentionStats(phase.name, phase.reason, q.new_ones(q.shape[:2]), backend=by))

    def _planned_for(self, q: Tensor, k: Tensor, site: CallSite) -> tuple[Tensor, Tensor, CallSite]:
        """What a plan is made for: with `share_branches` and both branches in one batch, its first half.

        Padding is each element's own, and what a repair remembers in a plan is of every element: then all of it.
        """
        half, odd = divmod(q.shape[0], 2)
        shared = self.config.share_branches and site.paired and not odd
        if not shared or site.key_valid is not None or self.repair is not None:
            return q, k, site
        return q[:half], k[:half], dataclasses.replace(site, values=None if site.values is None else site.values[:half])

    def _plan(
        self,
        key: SiteKey,
        q: Tensor,
        k: Tensor,
        site: CallSite,
        backend: Backend,
        held: HeldPlan | None,
        planner: Planner,
    ) -> _Made:
        """A new plan, or with `share_branches` the one that another branch made at this step."""
        if self.config.share_branches:
            sibling = self.plans.sibling(key, site.step)
            other = None if sibling is None else self.plans.get(sibling, backend, site.key_valid)
            usable = other is not None and other.plan.fits(q, k) and (other.text, other.grid) == (site.text, site.grid)
            if other is not None and usable and other.plan.padding == (site.key_valid is not None):
                return _Made(other.plan, sibling)
        return _Made(
            make_plan(q, k, planner, site, None if held is None else held.plan, self.config.check_finite), None
        )

    def _keep(self, key: SiteKey, made: _Made, site: CallSite, residual: LowRank | None = None) -> Tensor | None:
        """-> how even a new plan is over the ranks, where heads may change places after it."""
        if made.owner is not None:
            self.plans.share(key, made.owner, site.step, residual)
            return None
        self.plans.put(key, made.plan, site.step, site.text, residual, site.grid)
        return None if site.ranks is None else self.plans.balance(key, site.ranks)

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, site: CallSite, out: Tensor) -> Tensor:
        """The method's own sparse output, from that of the kept blocks."""
        return out if self.repair is None else self.repair.repair(q, k, v, plan, out, site)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, site: CallSite, backend: Backend) -> Tensor:
        """Attention over the plan's blocks, as the backend computes it."""
        return attend.over_kept(backend, q, k, v, plan, **self._how(site))

    def _how(self, site: CallSite) -> dict[str, Any]:
        return {"scale": site.scale, "compensate": self.config.compensate}

    def _phase(
        self, key: SiteKey, q: Tensor, k: Tensor, v: Tensor, site: CallSite, backend: Backend
    ) -> tuple[Phase, HeldPlan | None]:
        """What the call does, with the plan held for it: the schedule's phase, unless the call cannot do that.

        With a residual a first plan is built at an anchor, and without a schedule of anchors every plan is.
        """
        phase = self.schedule.phase(site, History(self.plans.refreshed_at(key)))
        if phase.name != "dense" and asks_for_gradient(q, k, v) and not backend.differentiable:
            phase = Phase("dense", "gradients are asked for, which the kernels do not compute; use torch.no_grad()")
        if phase.name == "dense":
            return phase, None
        held = self.plans.get(key, backend, site.key_valid)
        if held is not None and (changed := self._changed(held, q, k, v, site)):
            phase, held = Phase("refresh", changed), None
        lone = held is None or self.config.anchors is None
        if phase.name == "refresh" and lone and self.config.rank_for(q.shape[2]):
            phase = Phase("anchor", phase.reason)
        return phase, held

    def _changed(self, held: HeldPlan, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> str | None:
        """Why a plan does not serve this call; None: it does."""
        if not held.plan.fits(*self._planned_for(q, k, site)[:2]):
            return "the number of tokens changed"
        if (held.text, held.plan.padding) != (site.text, site.key_valid is not None):
            return "text or padding changed"
        if held.grid != site.grid:
            return "the video's grid changed"
        # a residual is of the whole batch
        if held.residual is not None and not held.residual.fits(v.shape[0], q.shape[2], v.shape[3]):
            return "the values' width changed"
        return None


class _Made(NamedTuple):
    plan: Plan
    owner: SiteKey | None  # the branch that has it already; None: it is new


def for_batch(plan: Plan, q: Tensor) -> Plan:
    """A plan of the first half of a batch for both halves; any other as it is."""
    if plan.mask.shape[0] == q.shape[0]:
        return plan

    def twice(x: Tensor) -> Tensor:
        return torch.cat([x, x])

    def of_both(side: Blocks) -> Blocks:
        return Blocks(twice(side.labels), None if side.order is None else twice(side.order), twice(side.offsets))

    mass, bias = (None if x is None else twice(x) for x in (plan.estimated_mass, plan.bias))
    queries, keys = of_both(plan.queries), of_both(plan.keys)
    return dataclasses.replace(plan, queries=queries, keys=keys, mask=twice(plan.mask), estimated_mass=mass, bias=bias)


def make_plan(
    q: Tensor, k: Tensor, planner: Planner, site: CallSite, earlier: Plan | None, check_finite: bool = False
) -> Plan:
    """What the planner decides, checked."""
    with planning(q, k, check_finite):
        plan = planner.plan(
            q.detach(), k.detach(), site, earlier if earlier is not None and earlier.fits(q, k) else None
        )
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
    """What plans are filed under."""
    return SiteKey(site.transformer, site.layer, site.branch, site.video, batch, site.paired)
