"""Methods that keep single keys per group of queries, and add to later steps all that these keys missed at a full step.

Per head; group u of queries keeps the keys S_u, chosen at a full step, s the scale:

    sparse_i = softmax over j in S_u of s q_i.k_j, times v_j
    full step:    out = dense,        R = dense - sparse
    later steps:  out = sparse + R    with that step's q, k, v and the full step's S_u

R is kept whole, in the dtype of the output: n d numbers per head. With `residual_rank` it is kept as PARK keeps its own
(docs/corrections.md). In a plan every key of the video is a block of its own, so that density, text and padding mean
what they mean for other methods. No kernel here walks blocks of one token: PyTorch gathers the keys of each group, on
every device, and waits for the GPU once per head to learn how many they are. Seconds are therefore not the authors'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from parkattn.backend import resolve_for
from parkattn.checks import expect_choice, expect_count, expect_fraction
from parkattn.ops import Backend, cluster, explained_memory, outside_autocast, residual
from parkattn.plan import Plan, assign_roles
from parkattn.planned import PlannedCall, PlannedMethod, Planner
from parkattn.reuse import HeldPlan, History, Phase, Schedule, always_dense, dense_prefix
from parkattn.segments import aligned, by_head, compute_dtype
from parkattn.site import AttentionOutput, CallSite
from parklab.baselines.settings import StudiedConfig
from parklab.baselines.video import cut_runs, keep_best

SCORES_AT_ONCE = 2**26  # bounds the scores of some groups of one head: 256 MB in float32
KEYS_AT_ONCE = 2**21  # bounds the gathered keys and values of some groups of one head


@dataclass(frozen=True, kw_only=True)
class TokenGroupsConfig(StudiedConfig):
    """What methods of this kind share."""

    top_k: float = 0.25
    """Share of the video's keys that a group keeps for their mass; 1: all of them."""
    multiple: int = 128
    """The number of these keys is a multiple of this."""
    least_tokens: int = 1
    """Calls of fewer tokens stay dense."""
    dense_layers: tuple[int, ...] = (0, 1)
    backend: Literal["reference"] = "reference"
    """No kernel gathers single keys: PyTorch on every device."""
    precision: Literal["bf16"] = "bf16"
    """The tensors' own dtype."""

    def __post_init__(self) -> None:
        expect_choice("backend", self.backend, ("reference",))
        expect_choice("precision", self.precision, ("bf16",))
        super().__post_init__()
        expect_fraction("top_k", self.top_k, zero=False)
        for name in ("multiple", "least_tokens"):
            expect_count(name, getattr(self, name))
        if self.compensate:
            raise ValueError(
                "compensate: expected False, since the stand-in of a single key is the key, got True; leave it out."
            )

    def kept_keys(self, video: Tensor) -> Tensor:
        """How many keys a group keeps for their mass, of so many [1] in the video."""
        raise NotImplementedError


class FullSteps(Schedule):
    """Every plan is made at a full step: the last of the first dense ones, then wherever one is due."""

    def phase(self, site: CallSite, history: History) -> Phase:
        found = super().phase(site, history)
        if found.name == "refresh":
            return found._replace(name="anchor")
        if found.name == "dense" and self.when.anchors is None and always_dense(self.when, site) is None:
            return self._first(found, site, dense_prefix(self.when, site.total_steps))
        return found

    def _first(self, dense: Phase, site: CallSite, count: int) -> Phase:
        """One of the first `count` steps."""
        return Phase("anchor", f"the last of the first {count} steps") if site.step == count - 1 else dense


class AddResidual:
    """The repair of a sparse step: all that a full step missed is added."""

    def repair(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, site: CallSite) -> Tensor:
        return out + plan.memory["residual"] if "residual" in plan.memory else out


class GroupedMethod(PlannedMethod):
    """A planned method over single keys; the residual of a plan is in its memory, or of a rank beside it."""

    config: TokenGroupsConfig

    def __init__(self, name: str, planner: Planner, config: TokenGroupsConfig, schedule: Schedule) -> None:
        super().__init__(name, planner, config, schedule=schedule, repair=AddResidual())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, site: CallSite, backend: Backend) -> Tensor:
        with outside_autocast(q), explained_memory(q, k, "attention"):
            return attend_gathered(q, k, v, plan, site.scale)

    def _anchor(self, call: PlannedCall, phase: Phase, held: HeldPlan | None) -> AttentionOutput:
        q, k, v, site, backend, key = call
        least, rank = self.config.least_tokens, self.config.rank_for(q.shape[2])
        if q.shape[2] < least:
            few = Phase("dense", f"{q.shape[2]} tokens are fewer than least_tokens = {least}")
            return self._dense(call, few)
        earlier = held if held is not None and held.step < site.step else None  # a plan of an earlier run says nothing
        plan = self._plan(call, earlier, self.planner).plan
        done = self._dense(call, phase)
        with torch.no_grad():
            missed = done.out.detach() - self.attend(q.detach(), k.detach(), v.detach(), plan, site, backend)
        kept = {name: tensor for name, tensor in plan.memory.items() if name != "residual"}
        plan = replace(plan, memory=kept if rank else {**kept, "residual": missed})
        self.plans.put(
            key, plan, site.step, site.text, residual.factor(backend, missed, rank) if rank else None, site.grid
        )
        return done

    def _phase(self, call: PlannedCall) -> tuple[Phase, HeldPlan | None]:
        phase, held = super()._phase(call)
        width = None if held is None else held.plan.memory.get("residual")
        if width is not None and width.shape[3] != call.v.shape[3]:
            phase, held = Phase("anchor", "the values' width changed"), None
        return (phase._replace(name="anchor") if phase.name == "refresh" else phase), held


class Groups(NamedTuple):
    """Queries of one head in groups of equal size; a place without a query holds n, one past the last."""

    places: Tensor  # [groups size] int64

    @classmethod
    def of(cls, order: Tensor, size: int, member: Tensor | None, tokens: int) -> Groups:
        """Runs of `size` tokens of an order; member [n]: False leaves a token's place empty."""
        places = pad(order, (0, -len(order) % size), value=tokens).view(-1, size)
        return cls(places if member is None else torch.where(pad(member, (0, 1))[places], places, tokens))

    def labels(self, tokens: int) -> Tensor:
        """[n] int32: each query's group, the number of groups where it has none."""
        count, size = self.places.shape
        group = torch.arange(count, dtype=torch.int32, device=self.places.device).repeat_interleave(size)
        return group.new_full((tokens + 1,), count).scatter_(0, self.places.flatten(), group)[:tokens]


GroupsOf = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Groups]


def plan_tokens(
    q: Tensor,
    k: Tensor,
    site: CallSite,
    config: TokenGroupsConfig,
    size: int,
    groups_of: GroupsOf,
    *,
    always: Tensor | None = None,
    log_sums: Tensor | None = None,
    remember: bool = False,
) -> Plan:
    """The plan of a call. groups_of: from q [n d], k [m d] of a head and the members of both sides [n], [m], None for
    all.

    always [groups m]: keys that are kept in any case; log_sums [b h n]: of an earlier step, for its mass; remember:
    keep this one's.
    """
    (b, h, n, _), backend = q.shape, resolve_for(q, config.backend)
    roles = assign_roles(q, k, site.text, site.key_valid)
    runs = cut_runs(k, roles.clustered_keys, 1, site)
    groups = -(-(n - site.text_tokens) // size)
    mask = torch.empty(b, h, groups, runs.count, dtype=torch.bool, device=q.device)
    labels = torch.empty(b, h, n, dtype=torch.int32, device=q.device)
    sums = torch.empty(b, h, n, dtype=compute_dtype(q.dtype), device=q.device)
    mass = torch.empty(b, h, dtype=torch.float32, device=q.device)
    for i, j in itertools.product(range(b), range(h)):
        queries, keys = aligned(q[i, j]), aligned(k[i, j])
        asks, video, valid = (
            None if role is None else role[i]
            for role in (roles.clustered_queries, roles.clustered_keys, roles.key_valid)
        )
        found = groups_of(queries, keys, asks, video)
        head = keep_keys(
            queries,
            keys,
            found,
            torch.ones(len(keys), dtype=torch.bool, device=k.device) if video is None else video,
            valid,
            q.shape[-1] ** -0.5 if site.scale is None else site.scale,
            config.kept_keys(runs.members[i : i + 1]),
            always,
            None if log_sums is None else log_sums[i, j],
        )
        labels[i, j], mass[i, j], sums[i, j] = found.labels(n), head.mass, head.log_sums
        mask[i, j] = head.mask if runs.order is None else head.mask.index_select(1, runs.order[i, : runs.count])
    return Plan(
        cluster.arrange(backend, *roles.query_blocks(labels, groups)),
        runs.key_blocks(k, roles, backend),
        mask if roles.clustered_keys is None else roles.extend(mask),
        groups,
        runs.count,
        padding=roles.key_valid is not None,
        estimated_mass=mass,
        memory={"log_sums": sums} if remember else {},
    )


class KeptKeys(NamedTuple):
    """What the groups of a head keep."""

    mask: Tensor  # [groups m] bool, over tokens
    mass: Tensor  # []: share of the mass on the video's keys
    log_sums: Tensor  # [n]


def keep_keys(
    q: Tensor,
    k: Tensor,
    groups: Groups,
    video: Tensor,
    attendable: Tensor | None,
    scale: float,
    count: Tensor,
    always: Tensor | None,
    log_sums: Tensor | None,
) -> KeptKeys:
    """The `count` [1] keys of the video [m] with the most mass in each group, ties to the lower index, and `always`.

    A group whose mass is not a number keeps everything, and shows in the output as it would in dense attention.
    """
    mask = torch.empty(len(groups.places), len(k), dtype=torch.bool, device=k.device)
    found = torch.zeros(len(q) + 1, dtype=compute_dtype(q.dtype), device=q.device)
    kept, total = found.new_zeros(()), found.new_zeros(())
    for which, mass, sums in column_mass(q, k, groups, attendable, scale, log_sums):
        keep = keep_best(mass, count, video) | mass.isnan().any(-1, keepdim=True)
        mask[which] = (keep if always is None else keep | always[which]) & video
        kept, total = kept + (mass * mask[which]).sum(), total + (mass * video).sum()
        found.scatter_(0, groups.places[which].flatten(), sums)
    return KeptKeys(mask, kept / total, found[:-1])


def column_mass(
    q: Tensor, k: Tensor, groups: Groups, attendable: Tensor | None, scale: float, log_sums: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some groups of a head at a time: which, sum over a group's queries of e^{s q_i.k_j - l_i} [groups m], and the
    log-sum-exp of their rows [places].

    l_i is that log-sum-exp, or log_sums [n] of an earlier step.
    """
    dtype, (count, size) = compute_dtype(q.dtype), groups.places.shape
    rows, keys = pad(q, (0, 0, 0, 1)).to(dtype) * scale, k.to(dtype)
    given = None if log_sums is None else pad(log_sums.to(dtype), (0, 1))
    at_once = max(1, SCORES_AT_ONCE // (size * len(k)))
    for start in range(0, count, at_once):
        which = slice(start, min(start + at_once, count))
        places = groups.places[which].flatten()
        scores = rows[places] @ keys.T
        if attendable is not None:
            scores.masked_fill_(~attendable, -torch.inf)
        sums = scores.logsumexp(-1)
        less = (sums if given is None else given[places]).masked_fill(places == len(q), torch.inf)  # e^-inf: no mass
        scores.sub_(less.unsqueeze(-1)).exp_()
        yield which, scores.view(-1, size, len(k)).sum(1), sums


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None) -> Tensor:
    """`attend` over a plan whose own key blocks are single tokens: some groups at a time, with their keys gathered."""
    starts = plan.queries.offsets.tolist()
    order = plan.queries.permutation().long()
    heads = []
    for i, j in itertools.product(range(q.shape[0]), range(q.shape[1])):
        first = starts[i][j]
        size = max(last - begin for begin, last in itertools.pairwise(first[: plan.query_clusters + 1]))
        seen = plan.mask[i, j].index_select(1, plan.keys.labels[i, j].long())  # [query blocks m], over tokens
        rows, parts = q[i, j].index_select(0, order[i, j]), []
        own = seen[: plan.query_clusters]
        if size:
            begin, last = (torch.tensor(first[at : at + plan.query_clusters], device=q.device) for at in (0, 1))
            parts.append(_attend_groups(rows, k[i, j], v[i, j], own, begin, last, size, scale))
        if len(rows) > (rest := first[plan.query_clusters]):
            allowed = seen[plan.query_clusters]
            parts.append(
                scaled_dot_product_attention(
                    rows[None, None, rest:],
                    k[i, j][None, None],
                    v[i, j][None, None],
                    attn_mask=allowed[None, None, None],
                    scale=scale,
                )[0, 0]
            )
        heads.append(torch.cat(parts).index_select(0, order[i, j].argsort()))
    return by_head(heads, q).to(q.dtype)


def _attend_groups(
    rows: Tensor, k: Tensor, v: Tensor, seen: Tensor, begin: Tensor, last: Tensor, size: int, scale: float | None
) -> Tensor:
    """Rows in groups begin .. last [groups], no longer than size, over the keys that each sees [groups m]: [rows d]"""
    counts = seen.sum(-1)
    most, even = int(counts.max()), bool((counts == counts[0]).all())
    picked = pad(seen.nonzero()[:, 1], (0, most))
    ahead, place = counts.cumsum(0) - counts, torch.arange(most, device=k.device)
    inside = torch.arange(size, device=k.device)
    parts = []
    for some in torch.arange(len(counts), device=k.device).split(max(1, KEYS_AT_ONCE // max(1, most))):
        columns = picked[ahead[some].unsqueeze(1) + place]
        at = begin[some].unsqueeze(1) + inside
        filled = at < last[some].unsqueeze(1)
        allowed = None if even else (place < counts[some].unsqueeze(1))[:, None, None]
        out = scaled_dot_product_attention(
            rows[at.clamp(max=len(rows) - 1)].unsqueeze(1),
            k[columns].unsqueeze(1),
            v[columns].unsqueeze(1),
            attn_mask=allowed,
            scale=scale,
        )
        parts.append(out.squeeze(1)[filled])
    return torch.cat(parts)
