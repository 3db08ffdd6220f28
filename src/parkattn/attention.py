"""PARK on one page: cluster, permute, estimate, select, attend.

q, k ──▶ cluster ──▶ importance ──▶ selection ──▶ Plan ──▶ attend over kept blocks ──▶ out
         k-means(q)   PAMA           top-p / top-k   │
         QRKC(k | q)                                 └─ reused for R steps
"""

from __future__ import annotations

from torch import Tensor

from parkattn.attend import dense_attention
from parkattn.backend import Backend, explain_out_of_memory, resolve
from parkattn.borders import fitting_multiple
from parkattn.checks import asks_for_gradient, expect_attention_inputs, expect_finite, shape_of
from parkattn.config import ParkConfig
from parkattn.plan import Plan
from parkattn.reuse import PlanStore, Schedule
from parkattn.roles import assign_roles
from parkattn.segments import outside_autocast
from parkattn.selection import kept_mass, select_top_k, select_top_p
from parkattn.site import AttentionOutput, AttentionStats, CallSite


@explain_out_of_memory
@outside_autocast
def build_plan(
    q: Tensor,
    k: Tensor,
    config: ParkConfig | None = None,
    *,
    text: slice | None = None,
    key_valid: Tensor | None = None,
    scale: float | None = None,
    start: Plan | None = None,
) -> Plan:
    """Decide what attends to what. q [b h n d], k [b h m d].

    text: the span of text tokens, the same in q and k: never clustered, always on. key_valid [b m]: False where a key is
    padding. start: an earlier plan to warm-start the clusters from.
    """
    config = config or ParkConfig()
    expect_attention_inputs(q, k)
    # a choice of blocks has no gradient, and a plan that lives for steps must not keep the graph of this one
    q, k = q.detach(), k.detach()
    _check_finite(q, k, config)
    backend = _backend(q, config)
    roles = assign_roles(q, k, text, key_valid)
    warm = start if start is not None and start.fits(q, k) else None
    iterations = config.kmeans_iterations if warm is None else config.warm_iterations
    old_queries, old_keys = (None, None) if warm is None else (warm.queries.labels, warm.keys.labels)

    queries = backend.cluster_queries(q, config, iterations=iterations, start=old_queries, valid=roles.clustered_queries)
    keys = backend.cluster_keys(
        k, q, config, iterations=iterations, start=old_keys, valid=roles.clustered_keys, query_valid=roles.clustered_queries
    )
    queries = backend.round_borders(q, queries, fitting_multiple(config.query_multiple, q.shape[2], queries.clusters))
    keys = backend.round_borders(k, keys, fitting_multiple(config.key_multiple, k.shape[2], keys.clusters))
    query_blocks = backend.arrange(*roles.query_blocks(queries.labels, queries.clusters))
    key_blocks = backend.arrange(*roles.key_blocks(keys.labels, keys.clusters))
    importance = backend.importance(config.importance, q, k, query_blocks, queries, keys, scale=scale)
    if config.top_k is not None:
        mask = select_top_k(importance, config.top_k, sizes=keys.sizes)
    else:
        assert config.top_p is not None
        mask = select_top_p(importance, config.top_p, sizes=keys.sizes, floor=config.floor)

    return Plan(
        query_blocks,
        key_blocks,
        roles.extend(mask),
        queries.clusters,
        keys.clusters,
        padding=key_valid is not None,
        estimated_mass=kept_mass(importance, mask, queries.sizes),
    )


@explain_out_of_memory
@outside_autocast
def park_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: ParkConfig | None = None,
    *,
    plan: Plan | None = None,
    text: slice | None = None,
    key_valid: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Sparse attention of q over k, v: [b h n d]. Equal to dense attention when every block is kept.

    Without a plan one is built for this call; with one, text and padding are the plan's and must not be given again.
    """
    config = config or ParkConfig()
    expect_attention_inputs(q, k, v)
    backend = _backend(q, config)
    if asks_for_gradient(q, k, v) and not backend.differentiable:
        raise ValueError(
            f"q, k, v: expected tensors without gradient with backend={backend.name!r}, got requires_grad=True; "
            "call under torch.no_grad(), or use backend='reference', which has a gradient."
        )
    if plan is None:
        plan = build_plan(q, k, config, text=text, key_valid=key_valid, scale=scale)
    else:
        _expect_plan(plan, q, k, text, key_valid)
        _check_finite(q, k, config)
    return backend.attend(q, k, v, plan, scale=scale, compensate=config.compensate)


class Park:
    """PARK as an AttentionMethod: a config, and the plans it holds between the steps of one generation.

    Which keys are padding must stay the same for as long as a plan is reused: to compare them would wait for the GPU.
    """

    def __init__(self, config: ParkConfig | None = None, name: str = "park") -> None:
        self.config = config or ParkConfig()
        self.name = name
        self.plans = PlanStore()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        # for dense steps too: what no backend can run is refused at the first step, not after the warm-up
        backend = _backend(q, self.config)
        phase = Schedule(self.config, site.total_steps).phase(site.step, site.layer, self.plans.refreshed_at(site.key))
        if phase.name != "dense" and asks_for_gradient(q, k, v) and not backend.differentiable:
            phase = phase._replace(name="dense", reason="gradients are asked for, which the kernels do not compute; use torch.no_grad()")
        if phase.name == "dense":
            out = site.dense() if site.dense is not None else dense_attention(q, k, v, scale=site.scale, key_valid=site.key_valid)
            return AttentionOutput(out, AttentionStats(phase.name, phase.reason, q.new_ones(q.shape[:2])))
        held = self.plans.get(site.key, backend.arrange)
        if held is not None and not held.plan.fits(q, k):
            phase, held = phase._replace(name="refresh", reason="the number of tokens changed"), None
        elif held is not None and (held.text, held.plan.padding) != (site.text, site.key_valid is not None):
            phase, held = phase._replace(name="refresh", reason="text or padding changed"), None
        if phase.name == "refresh" or held is None:
            start = held.plan if held is not None and self.config.warm_start else None
            plan = build_plan(q, k, self.config, text=site.text, key_valid=site.key_valid, scale=site.scale, start=start)
            self.plans.put(site.key, plan, site.step, site.text)
        else:
            plan = held.plan
        out = park_attention(q, k, v, self.config, plan=plan, scale=site.scale)
        stats = AttentionStats(phase.name, phase.reason, plan.density(), plan.estimated_mass, backend.reason, plan)
        return AttentionOutput(out, stats)

    @property
    def state_bytes(self) -> int:
        return self.plans.nbytes

    def reset(self) -> None:
        self.plans.reset()


def _backend(q: Tensor, config: ParkConfig) -> Backend:
    return resolve(config.backend, q.device, q.dtype, q.shape[-1])


def _check_finite(q: Tensor, k: Tensor, config: ParkConfig) -> None:
    if config.check_finite:
        expect_finite("q", q)
        expect_finite("k", k)


def _expect_plan(plan: Plan, q: Tensor, k: Tensor, text: slice | None, key_valid: Tensor | None) -> None:
    if text is not None or key_valid is not None:
        raise ValueError("text, key_valid: expected None beside a plan, which holds them already, got a value; pass them to build_plan.")
    if not plan.fits(q, k):
        made_for = f"queries {list(plan.queries.labels.shape)} and keys {list(plan.keys.labels.shape)} on {plan.mask.device}"
        raise ValueError(
            f"plan: expected one built for q {shape_of(q)} and k {shape_of(k)} on {q.device}, got one for {made_for}; call build_plan again."
        )
