"""SpargeAttn, XAttention and Sol-Attn: blocks of consecutive video tokens, chosen by pooled scores."""

from dataclasses import replace
from random import Random

import pytest
import torch

from definitions import output_rounding
from parkattn.plan import assign_roles
from parkattn.planned import PlannedMethod
from parklab.baselines import chipmunk, mc_sparse, radial, sol, sparge, sta, svg, xattention
from plans import RESTATED, attend, problem, token_mask
from restated.cases import sparge_settings, xattention_settings

CASES = 240


def video_tokens(given):
    """[b n] bool"""
    video = assign_roles(given.q, given.k, given.text, given.key_valid).clustered_keys
    return torch.ones(given.q.shape[0], given.q.shape[2], dtype=torch.bool) if video is None else video


def sol_settings(draw, given):
    least = int(video_tokens(given).sum(1).min())
    sink = draw.randint(0, min(4, least))
    return {
        "block": draw.choice((1, 2, 3, 5)), "tau": draw.choice((-0.5, 0.0, 0.5, 1.0, 1.3)),
        "threshold": draw.choice(("diag", "exact")), "topk": draw.choice((None, None, 0.1, 0.25, 0.5, 1.0)),
        "sink_tokens": sink, "sink_start": draw.choice((None, draw.randint(0, least - sink))),
    }  # fmt: skip


METHODS = {
    "sparge": (sparge, sparge_settings),
    "xattention": (xattention, xattention_settings),
    "sol": (sol, sol_settings),
}


@pytest.mark.parametrize("name", METHODS)
def test_mask_and_output_are_those_of_the_independent_restatement(name):
    module, settings_for = METHODS[name]
    for seed in range(CASES):
        given = problem(seed)
        settings = settings_for(Random(seed), given)
        got, want = attend(module, given, **settings), RESTATED[name](*given.tensors, **given.inputs, **settings)
        assert torch.equal(token_mask(got.stats.plan), want.allowed), (seed, settings)
        bound = output_rounding(*given.tensors, given.scale, torch.float64)
        torch.testing.assert_close(got.out, want.out, rtol=0, atol=bound, msg=lambda text, seed=seed: f"{seed}: {text}")


@pytest.mark.parametrize("name", METHODS)
def test_tokens_without_roles_are_not_moved(name):
    given = problem(0, largest=(3, 3, 5))
    assert given.text is None and given.key_valid is None
    plan = attend(METHODS[name][0], given).stats.plan
    assert plan.queries.order is None and plan.keys.order is None


@pytest.mark.parametrize("name", METHODS)
def test_an_element_is_planned_as_if_it_were_alone(name):
    module, settings_for = METHODS[name]
    for seed in (s for s in range(200) if problem(s).q.shape[0] == 2 and problem(s).key_valid is not None):
        given = problem(seed)
        settings = settings_for(Random(seed), given)
        both = token_mask(attend(module, given, **settings).stats.plan)
        for b in range(2):
            q, k, v = (x[b : b + 1] for x in given.tensors)
            alone = replace(given, q=q, k=k, v=v, key_valid=given.key_valid[b : b + 1])
            assert torch.equal(token_mask(attend(module, alone, **settings).stats.plan)[0], both[b]), seed


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (sparge, {"simthreshd1": 1.1, "block_q": 4, "block_k": 2}),  # no mean cosine is above 1
        (sparge, {"cdfthreshd": 1.0, "block_q": 4, "block_k": 2}),
        (sparge, {"topk": 1.0, "block_q": 4, "block_k": 2}),
        (xattention, {"threshold": 1.0, "block": 4, "stride": 2}),
        (sol, {"topk": 1.0, "block": 2}),
        (sol, {"tau": -1e6, "block": 2}),
    ],
)
def test_a_full_budget_is_dense(module, settings):
    for seed in range(0, 96, 7):
        given = problem(seed)
        plan = attend(module, given, **settings).stats.plan
        valid = torch.ones_like(given.k[:, 0, :, 0], dtype=torch.bool) if given.key_valid is None else given.key_valid
        assert torch.equal(token_mask(plan), valid[:, None, None].expand_as(token_mask(plan))), seed
        assert torch.equal(plan.density(), torch.ones_like(plan.density()))


@pytest.mark.parametrize(
    ("module", "field", "settings"),
    [
        (sparge, "topk", {"block_q": 3, "block_k": 2}),
        (sparge, "cdfthreshd", {"block_q": 3, "block_k": 2, "simthreshd1": -2.0}),
        (xattention, "threshold", {"block": 4, "stride": 2}),
        (sol, "topk", {"block": 2}),
    ],
)
def test_a_larger_budget_keeps_what_a_smaller_one_kept(module, field, settings):
    assert field in module.ENTRIES[0].budgets
    for seed in range(0, 96, 7):
        given, kept = problem(seed), None
        for budget in (0.05, 0.3, 0.6, 0.9, 1.0):
            mask = token_mask(attend(module, given, **settings, **{field: budget}).stats.plan)
            assert kept is None or bool((mask | ~kept).all()), (seed, budget)
            kept = mask


def test_sol_keeps_the_normaliser_over_all_keys():
    """Where the keys of every block are equal the pooled tail is exact, so whatever is skipped the output is dense."""
    for seed in range(0, 48, 5):
        given = problem(seed)
        if given.text is not None or given.key_valid is not None:
            continue
        equal = given.k[:, :, torch.arange(given.k.shape[2]) // 2 * 2]
        flat = replace(given, k=equal)
        out = attend(sol, flat, block=2, tau=1e6).out
        dense = torch.nn.functional.scaled_dot_product_attention(flat.q, flat.k, flat.v, scale=given.scale)
        bound = 2 * output_rounding(*flat.tensors, given.scale, torch.float64)
        torch.testing.assert_close(out, dense, rtol=0, atol=bound)


def test_sol_of_nearly_equal_scores_is_that_of_the_restatement():
    """Here the 1e-6 under the root decides, and with it the base of the logarithm that scores are in."""
    kept = []
    for seed in range(48):
        given = replace(problem(seed), scale=1e-3)
        settings = {"block": 1, "tau": 0.5, "threshold": ("diag", "exact")[seed % 2]}
        mask = token_mask(attend(sol, given, **settings).stats.plan)
        assert torch.equal(mask, RESTATED["sol"](*given.tensors, **given.inputs, **settings).allowed), seed
        kept.append(mask.double().mean())
    assert min(kept) < 1


def test_sol_is_not_compensated_if_told_so():
    given = problem(48)
    settings = {"block": 1, "tau": 1e6}
    assert not torch.equal(attend(sol, given, **settings).out, attend(sol, given, compensate=False, **settings).out)


@pytest.mark.parametrize("name", METHODS)
def test_every_call_of_a_run_plans_afresh_after_the_authors_dense_steps(name):
    entry = METHODS[name][0].ENTRIES[0]
    method = entry.make(entry.config(backend="reference"))
    assert isinstance(method, PlannedMethod) and method.name == name
    given = problem(7)
    phases = [method(*given.tensors, given.site(step=step, total_steps=50, layer=1)).stats.phase for step in range(12)]
    dense = {"sparge": 0, "xattention": 5, "sol": 10}[name]
    assert phases == ["dense"] * dense + ["refresh"] * (12 - dense)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (svg, {"layout": "cog"}, "layout: expected one of hunyuan, wan"),
        (svg, {"sparsity": 1.5}, "sparsity: expected a number in"),
        (sta, {"tile": (6, 8)}, "tile: expected .frames, height, width."),
        (sta, {"window": ((3, 3, 3), 4)}, "window: expected .frames, height, width."),
        (radial, {"decay": 0.0}, "decay: expected a number in"),
        (mc_sparse, {"top_k": 0.0}, "top_k: expected a number in"),
        (mc_sparse, {"group": 0}, "group: expected a whole number"),
        (mc_sparse, {"backend": "triton"}, "backend: expected one of reference"),
        (mc_sparse, {"compensate": True}, "compensate: expected False"),
        (chipmunk, {"voxel": (4, 6)}, "voxel: expected"),
        (chipmunk, {"precision": "int8"}, "precision: expected one of bf16"),
        (chipmunk, {"random_keys": 2.0}, "random_keys: expected a number in"),
        (sparge, {"cdfthreshd": 0.0}, "cdfthreshd: expected a number in"),
        (sparge, {"simthreshd1": "high"}, "simthreshd1: expected a number or None"),
        (xattention, {"block": 100}, "block: expected a multiple of stride 8"),
        (sol, {"tau": float("nan")}, "tau: expected a finite number"),
        (sol, {"threshold": "full"}, "threshold: expected one of diag, exact"),
        (sol, {"tua": 1.0}, "did you mean tau"),
    ],
)
def test_settings_out_of_range_are_refused(module, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        module.ENTRIES[0].config(**settings)
