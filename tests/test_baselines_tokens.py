"""MC-Sparse and Chipmunk: single keys per group of queries, whole residuals, the steps at which they are taken, and restatements."""

import dataclasses
from random import Random

import pytest
import torch

import plans
from definitions import output_rounding
from parkattn.methods import make_method
from parkattn.ops import REFERENCE, attend
from parkattn.ops.attend.definition import dense_attention
from parkattn.reuse import count_phases
from parklab.baselines import chipmunk, mc_sparse
from parklab.baselines.mc_sparse import principal_order
from plans import problem, token_mask
from restated.chipmunk import restate as restated_chipmunk
from restated.mc_sparse import restate as restated_mc_sparse

SMALL = {
    "mc-sparse": {"group": 4, "multiple": 1, "top_k": 0.3, "least_tokens": 1, "dense_layers": ()},
    "chipmunk": {"voxel": (1, 2, 2), "multiple": 1, "top_k": 0.3, "dense_layers": ()},
}
NAMES = tuple(SMALL)
every_method = pytest.mark.parametrize("name", NAMES)


def made(name, **changes):
    return make_method(name, SMALL[name] | {"dense_steps": 0} | changes)


def dense(given):
    return dense_attention(*given.tensors, scale=given.scale, key_valid=given.key_valid)


def phases(name, steps, **changes):
    return plans.phases(make_method(name, changes).schedule, steps, layer=5)


@every_method
def test_a_step_like_the_full_one_is_dense_whatever_is_kept(name):
    """The residual is whole: with unchanged q, k and v nothing is missing."""
    for seed in range(0, 96, 5):
        given, method = problem(seed), made(name)
        full, after = (method(*given.tensors, given.site(step=step, total_steps=50)) for step in (0, 1))
        assert (full.stats.phase, after.stats.phase) == ("anchor", "reuse")
        assert torch.equal(full.out, dense(given)) and float(full.stats.density.min()) == 1
        bound = 3 * output_rounding(*given.tensors, given.scale, torch.float64)
        torch.testing.assert_close(after.out, full.out, rtol=0, atol=bound)


@every_method
def test_attention_over_gathered_keys_is_the_definition_of_the_plan(name):
    for seed in range(0, 96, 5):
        given, method = problem(seed), made(name)
        plan = [method(*given.tensors, given.site(step=step, total_steps=50)) for step in (0, 1)][1].stats.plan
        defined = attend.over_kept(REFERENCE, *given.tensors, plan, scale=given.scale)
        found = method.attend(*given.tensors, plan, given.site(), REFERENCE)
        bound = output_rounding(*given.tensors, given.scale, torch.float64)
        torch.testing.assert_close(found, defined, rtol=0, atol=bound)


@every_method
def test_every_key_kept_is_dense_attention_of_the_later_step(name):
    for seed in range(0, 96, 7):
        given, method = problem(seed), made(name, top_k=1.0)
        later = dataclasses.replace(given, q=given.q.flip(-1), k=given.k.flip(-2), v=given.v.flip(-1))
        method(*given.tensors, given.site(step=0, total_steps=50))
        after = method(*later.tensors, given.site(step=1, total_steps=50))
        assert float(after.stats.density.min()) == 1 and after.stats.phase == "reuse"
        bound = 3 * output_rounding(*given.tensors, given.scale, torch.float64)
        bound += 2 * output_rounding(*later.tensors, given.scale, torch.float64)
        torch.testing.assert_close(after.out, dense(later), rtol=0, atol=bound)


@every_method
def test_a_larger_budget_keeps_what_a_smaller_one_kept(name):
    for seed in range(0, 96, 7):
        given, kept = problem(seed), None
        for budget in (0.05, 0.3, 0.6, 0.9, 1.0):
            method = made(name, top_k=budget)
            plan = [method(*given.tensors, given.site(step=step, total_steps=50)) for step in (0, 1)][1].stats.plan
            mask = token_mask(plan)
            assert kept is None or bool((mask | ~kept).all()), (seed, budget)
            kept = mask


@every_method
def test_an_element_is_planned_as_if_it_were_alone(name):
    for seed in (s for s in range(200) if problem(s).q.shape[0] == 2 and problem(s).key_valid is not None):
        given, masks = problem(seed), []
        for part in (slice(0, 2), slice(0, 1), slice(1, 2)):
            method, valid = made(name), given.key_valid[part]
            some = dataclasses.replace(given, q=given.q[part], k=given.k[part], v=given.v[part], key_valid=valid)
            plan = [method(*some.tensors, some.site(step=step, total_steps=50)) for step in (0, 1)][1].stats.plan
            masks.append(token_mask(plan))
        assert torch.equal(masks[0], torch.cat(masks[1:])), seed


@every_method
def test_branches_of_guidance_keep_residuals_of_their_own(name):
    """With one plan for both, too: each is exact at its own full step."""
    first, second = problem(0, largest=(4, 4, 4)), problem(0, largest=(4, 4, 4))
    second = dataclasses.replace(second, q=second.q.flip(2), v=second.v + 1)
    for shared in (False, True):
        method = made(name, share_branches=shared)
        for step in (0, 1):
            for branch, given in (("cond", first), ("uncond", second)):
                out = method(*given.tensors, given.site(step=step, total_steps=50, branch=branch)).out
                bound = 3 * output_rounding(*given.tensors, given.scale, torch.float64)
                torch.testing.assert_close(out, dense(given), rtol=0, atol=bound)


@every_method
def test_a_second_run_sees_nothing_of_the_first(name):
    given, other = problem(0), dataclasses.replace(problem(0), q=problem(0).q.flip(2))
    method = made(name, dense_steps=1)
    for step in (0, 1, 5):
        method(*given.tensors, given.site(step=step, total_steps=50))
    again = [method(*other.tensors, other.site(step=step, total_steps=50)) for step in (0, 1)]
    fresh = made(name, dense_steps=1)
    expected = [fresh(*other.tensors, other.site(step=step, total_steps=50)) for step in (0, 1)]
    assert [x.stats.phase for x in again] == ["anchor", "reuse"]
    assert all(torch.equal(x.out, y.out) for x, y in zip(again, expected, strict=True))
    method.reset()
    assert method.state_bytes == 0


@every_method
def test_a_residual_may_be_kept_in_a_low_rank(name):
    """Less memory than the whole one, and nearer to dense attention than none."""
    given = problem(0, largest=(5, 5, 5), dim=16)
    bytes_of, errors = {}, {}
    for rank in (0, 4):
        method = made(name, residual_rank=rank, top_k=0.1)
        outs = [method(*given.tensors, given.site(step=step, total_steps=50)) for step in (0, 1)]
        bytes_of[rank], errors[rank] = method.state_bytes, (outs[1].out - dense(given)).norm()
    alone = method.attend(*given.tensors, outs[1].stats.plan, given.site(), REFERENCE)
    assert bytes_of[4] < bytes_of[0]
    assert errors[0] < errors[4] < (alone - dense(given)).norm()


def test_the_authors_steps_are_full():
    assert phases("mc-sparse", 50) == ["dense"] * 9 + ["anchor"] + ["reuse"] * 40
    full = [step for step, phase in enumerate(phases("chipmunk", 50)) if phase == "anchor"]
    assert full == [0, 1, 10, 20, 30, 40]
    preset = chipmunk.ChipmunkConfig.preset("hunyuanvideo").to_dict()
    full = [step for step, phase in enumerate(phases("chipmunk", 50, **preset)) if phase == "anchor"]
    assert full == [0, 1, 10, 40]
    for name in NAMES:
        assert count_phases(make_method(name).schedule, 50, layer=1) == {"dense": 50}


@pytest.mark.parametrize("steps", [2, 4, 8, 20, 30])
def test_shorter_runs_have_fewer_full_steps_and_sparse_ones_between(steps):
    plan = phases("mc-sparse", steps)
    first = -(-steps // 5)
    assert plan == ["dense"] * (first - 1) + ["anchor"] + ["reuse"] * (steps - first)
    full = [step for step, phase in enumerate(phases("chipmunk", steps)) if phase == "anchor"]
    every = max(2, round(steps / 5))
    assert full == sorted({0, *range(0, steps, every), *([1] if steps > 25 else [])})


def test_mc_sparse_leaves_short_calls_dense_and_says_why():
    given = problem(0)
    method = make_method("mc-sparse", {"dense_layers": (), "dense_steps": 0})
    for step in (0, 1):
        out, stats = method(*given.tensors, given.site(step=step, total_steps=50))
        assert stats.phase == "dense" and "fewer than least_tokens = 4096" in stats.reason
        assert torch.equal(out, dense(given))
    assert method.state_bytes == 0


def test_groups_of_mc_sparse_are_equal_and_hold_like_queries():
    """Four far centres of 8 queries each, shuffled: every group of 8 is one of them."""
    source = torch.Generator().manual_seed(1)
    centre = torch.randperm(32, generator=source) % 4
    x = 10 * torch.randn(4, 6, generator=source)[centre] + 0.1 * torch.randn(32, 6, generator=source)
    order = principal_order(x, None, 8, 4)
    assert sorted(order.tolist()) == list(range(32))
    assert all(len(set(centre[group].tolist())) == 1 for group in order.view(4, 8))


def test_levels_halve_blocks_until_one_is_left():
    assert list(mc_sparse.levels(1)) == []
    assert list(mc_sparse.levels(5)) == [[(0, 5)], [(0, 2), (2, 5)], [(3, 5)]]


def test_random_keys_of_chipmunk_are_as_many_as_asked_for_and_other_ones_at_another_step():
    where = [problem(0).site(step=step, layer=layer) for step, layer in ((3, 0), (3, 1), (4, 0))]
    drawn = [chipmunk.random_keys(50, 2000, 0.1, 0, site, torch.device("cpu")) for site in where]
    for one in drawn:
        # two draws of 0.1: 0.19 of 100,000, six standard deviations of the mean
        assert abs(one.double().mean().item() - 0.19) < 6 * (0.19 * 0.81 / 1e5) ** 0.5
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert (drawn[0] & drawn[1]).any(0).sum() > 0  # the run's own draw is in all


# Restatements by another author: groups, kept keys, residuals and later steps ---------------------------


CASES = 240


def mc_sparse_settings(draw):
    return {
        "group": draw.randint(2, 8), "multiple": draw.randint(1, 4), "top_k": draw.choice((0.1, 0.25, 0.5, 1.0)),
        "power_iterations": draw.choice((1, 4)), "whiten": draw.random() < 0.4,
    }  # fmt: skip


def chipmunk_settings(draw):
    return {
        "voxel": draw.choice(((1, 2, 2), (2, 1, 3), (1, 1, 2), (2, 2, 1), (3, 2, 2))), "multiple": draw.randint(1, 4),
        "top_k": draw.choice((0.05, 0.1, 0.2, 0.2, 0.5, 1.0)), "random_keys": draw.choice((0.0, 0.01, 0.1, 0.2)),
        "local_voxels": draw.choice((0, 0, 0, 1, 2)), "seed": draw.choice((0, 7, 2**40 + 3)),
    }  # fmt: skip


METHODS = {
    "mc-sparse": (mc_sparse, mc_sparse_settings, restated_mc_sparse, {"least_tokens": 1}),
    "chipmunk": (chipmunk, chipmunk_settings, restated_chipmunk, {}),
}


def moved(given, seed):
    """q, k, v of a later step."""
    source = torch.Generator().manual_seed(1000 + seed)
    return tuple(x + 0.3 * torch.randn(x.shape, generator=source, dtype=x.dtype) for x in given.tensors)


@pytest.mark.parametrize("name", METHODS)
def test_masks_residuals_and_later_steps_are_those_of_the_restatement(name):
    module, settings_for, restated, short = METHODS[name]
    sparse = 0
    for seed in range(CASES):
        given, settings = problem(seed, largest=(5, 4, 6)), settings_for(Random(seed))
        later = moved(given, seed)
        place = {"step": seed % 3, "layer": seed % 5}
        want = restated(
            *given.tensors, **given.inputs, **settings, later=later, **(place if name == "chipmunk" else {})
        )
        entry = module.ENTRIES[0]
        method = entry.make(entry.config(dense_steps=0, dense_layers=(), refresh_interval=50, **short, **settings))
        site = given.site(total_steps=100, **place)
        full = method(*given.tensors, site)
        after = method(*later, dataclasses.replace(site, step=site.step + 1))
        assert (full.stats.phase, after.stats.phase) == ("anchor", "reuse"), seed
        assert torch.equal(token_mask(after.stats.plan), want.allowed), (seed, settings)
        sparse += bool(after.stats.density.min() < 1)
        bound = output_rounding(*given.tensors, given.scale, torch.float64)
        torch.testing.assert_close(
            full.out, want.out, rtol=0, atol=bound, msg=lambda text, seed=seed: f"{seed}: {text}"
        )
        # three outputs that are rounded apart: two in the residual, one later
        bound = 2 * bound + output_rounding(*later, given.scale, torch.float64)
        torch.testing.assert_close(
            after.out, want.notes["later"], rtol=0, atol=bound, msg=lambda text, seed=seed: f"{seed}: {text}"
        )
    assert sparse > CASES / 2


def test_chipmunk_weighs_rows_by_the_full_step_before():
    """The column sums of a second full step take the first one's log-sum-exp, as the restatement does when given it."""
    differ = 0
    for seed in range(60):
        given, settings = problem(seed, largest=(5, 4, 6)), chipmunk_settings(Random(seed)) | {"random_keys": 0.0}
        entry, second = chipmunk.ENTRIES[0], moved(given, seed)
        method = entry.make(entry.config(dense_steps=2, dense_layers=(), **settings))
        for step, tensors in enumerate((given.tensors, second, second)):
            found = method(*tensors, given.site(step=step, total_steps=50))
        first = restated_chipmunk(*given.tensors, **given.inputs, **settings)
        want = restated_chipmunk(*second, **given.inputs, **settings, step=1, log_sums=first.notes["log_sums"])
        assert found.stats.phase == "reuse"
        assert torch.equal(token_mask(found.stats.plan), want.allowed), seed
        differ += not torch.equal(want.allowed, restated_chipmunk(*second, **given.inputs, **settings, step=1).allowed)
    assert differ > 0
