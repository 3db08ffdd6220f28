"""MC-Sparse and Chipmunk against restatements by another author: groups, kept keys, residuals and later steps."""

import dataclasses
from random import Random

import pytest
import torch

from definitions import output_rounding
from parklab.baselines import chipmunk, mc_sparse
from plans import problem, token_mask
from restated.chipmunk import restate as restated_chipmunk
from restated.mc_sparse import restate as restated_mc_sparse

CASES = 240
torch.set_num_threads(1)


def mc_sparse_settings(draw):
    return {
        "group": draw.randint(2, 8),
        "multiple": draw.randint(1, 4),
        "top_k": draw.choice((0.1, 0.25, 0.5, 1.0)),
        "power_iterations": draw.choice((1, 4)),
        "whiten": draw.random() < 0.4,
    }


def chipmunk_settings(draw):
    return {
        "voxel": draw.choice(((1, 2, 2), (2, 1, 3), (1, 1, 2), (2, 2, 1), (3, 2, 2))),
        "multiple": draw.randint(1, 4),
        "top_k": draw.choice((0.05, 0.1, 0.2, 0.2, 0.5, 1.0)),
        "random_keys": draw.choice((0.0, 0.01, 0.1, 0.2)),
        "local_voxels": draw.choice((0, 0, 0, 1, 2)),
        "seed": draw.choice((0, 7, 2**40 + 3)),
    }


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
