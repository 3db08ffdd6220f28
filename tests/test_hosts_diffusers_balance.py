"""Heads go to ranks by planned density, on two and four gloo ranks. Run by torchrun, this file is the worker.

torchrun --nproc-per-node 2 tests/test_hosts_diffusers_balance.py cuda    the same on one GPU, with its kernels
"""

from __future__ import annotations

import sys

import pytest
import torch

from interpreted import begin_rank, compared, reported, run_on_ranks, tell
from parkattn.balance import assign_heads, imbalance, reassign
from parkattn.park import Park
from parklab.research import AdaptivePark, ResearchConfig

HEADS, STEPS = 8, 6
BLOCKS = {"query_clusters": 4, "key_clusters": 6, "kmeans_iterations": 2, "reference_steps": 6, "top_p": 0.6}
ANCHORED = {**BLOCKS, "anchors": 3, "residual_rank": 2}
CASES = {
    "refreshes that start warm": ("wan", {**BLOCKS, "dense_steps": 1, "refresh_interval": 2}),
    "anchors with residuals": ("wan", ANCHORED),
    "branches that share a plan": ("wan", {**ANCHORED, "share_branches": True, "compensate": True}),
    "anchors by measured error": ("wan", {**ANCHORED, "guard_rows": 4, "anchor_error": 1e-3}),
    "text and padding, queries in tiles": ("hunyuan", {**BLOCKS, "dense_steps": 1, "refresh_interval": 2, "query_tile": 4}),
}  # fmt: skip


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    """case -> what so many ranks made of it, with heads by density, in the model's order, and one process."""
    pytest.importorskip("diffusers")
    return {row["case"]: row for row in run_on_ranks(__file__, ranks=request.param)}


@pytest.mark.parametrize("case", CASES)
def test_heads_by_density_give_the_latents_of_the_plain_assignment_bit_for_bit(ranks, case):
    row = ranks[case]
    assert row["balanced - plain"] == 0
    # projections of a part of the tokens may round differently, as in test_hosts_diffusers_parallel
    assert row["difference"] <= row["tolerance"] < row["sparse - dense"]
    assert row["calls"] == row["calls of one process"] and row["calls"]["reuse"] > 0
    assert row["plan bytes"] == row["plan bytes of one process"] // row["ranks"], "each rank has the plans of its heads"


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_more_even_and_the_summary_says_so(ranks, case):
    found = ranks[case]["balance"]
    assert found["plans"] > 0 and not found["off"]
    assert 1 <= found["assigned"] < found["plain"]
    assert "heads by planned density: slowest rank" in ranks[case]["said"]
    assert ranks[case]["plan bytes"] == ranks[case]["plain plan bytes"]


def test_heads_that_may_not_move_stay_and_the_summary_says_why(ranks):
    for case, reason in (("a method of its own", "dense does not say"), ("one head each", "each rank has one head")):
        (said,) = ranks[case]["balance"]["off"]
        assert reason in said and f"heads stay with their ranks: {said}" in ranks[case]["said"]
        assert ranks[case]["balance"]["plans"] == 0


def test_every_rank_gets_as_many_heads_and_the_largest_go_to_those_with_the_least():
    assert assign_heads(torch.tensor([8.0, 7.0, 1.0, 2.0, 6.0, 3.0]), 2).tolist() == [[0, 5, 3], [1, 4, 2]]
    made = torch.Generator().manual_seed(0)
    for ranks in (1, 2, 4, 8):
        for _ in range(50):
            cost = torch.rand(40, generator=made, dtype=torch.float64)
            heads = assign_heads(cost, ranks)
            assert heads.shape == (ranks, 40 // ranks) and heads.flatten().sort().values.tolist() == list(range(40))
            assert imbalance(cost, heads) <= imbalance(cost, torch.arange(40).view(ranks, -1))


def test_equal_heads_stay_in_the_models_order():
    assert assign_heads(torch.ones(8), 4).flatten().tolist() == list(range(8))


class Both:
    """Two ranks in one process: what each has is told beforehand."""

    def __init__(self, rank, whole):
        self.rank, self.whole = rank, whole

    def gather(self, x):
        return self.whole.pop(0)


def test_what_is_held_moves_to_the_rank_that_computes_its_head():
    """Twice: the second time heads are no longer in the model's order."""
    names = torch.arange(100.0, 104.0)
    held, order = names.view(2, 1, 2), None
    for cost in (torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1.0, 4.0, 1.0, 4.0])):
        at = torch.arange(4) if order is None else order
        changes = [reassign(cost[at].view(2, 2)[r], order, Both(r, [cost[at].view(2, 2), held])) for r in (0, 1)]
        held, order = torch.stack([change.move(held[r]) for r, change in enumerate(changes)]), changes[0].order
        assert torch.equal(changes[0].order, changes[1].order)
        assert torch.equal(held.flatten(), names[order])
        loads = cost[order].view(2, 2).sum(1)
        assert loads[0] == loads[1] == cost.sum() / 2 and changes[0].imbalance[1] == 1


def uneven(pipe):
    """Heads whose attention is sharper and sharper, so that their plans differ in density."""
    for name, weight in pipe.transformer.named_parameters():
        if name.endswith("attn1.norm_q.weight"):  # Wan's, over all heads
            weight.data.view(HEADS, -1).mul_(torch.linspace(1, 30, HEADS).unsqueeze(1))
        elif name.endswith(("attn.to_q.weight", "attn.to_k.weight")):
            weight.data.view(HEADS, -1).mul_(torch.linspace(1, 4, HEADS).unsqueeze(1))
    return pipe


def made_with(settings):
    error = settings.get("anchor_error")
    config = ResearchConfig(**{name: value for name, value in settings.items() if name != "anchor_error"})
    return Park(config) if error is None else AdaptivePark(config, error)


def work(device: str = "cpu") -> None:
    from diffusers import ContextParallelConfig

    import tiny_pipelines as tiny
    from parkattn.hosts.diffusers import disable, enable, processor, sequence_parallel_plan, summary

    compares = begin_rank()
    world, movable = torch.distributed.get_world_size(), processor.why_not_balanced
    run = {"wan": tiny.run_wan, "hunyuan": tiny.run_hunyuan}

    def report(case: str, made, **row) -> None:
        if compares:
            tell(case=case, said=str(made), balance=made.balance, **row)

    def split(pipe):
        degrees = ContextParallelConfig(ulysses_degree=world)
        pipe.transformer.enable_parallelism(config=degrees, cp_plan=sequence_parallel_plan(pipe))
        return pipe

    for case, (family, settings) in CASES.items():
        wide = {"attention_head_dim": 64} if (device, family) == ("cuda", "wan") else {}  # kernels have no other widths
        pipe = uneven(getattr(tiny, family)(num_attention_heads=HEADS, **wide)).to(device)
        if compares:
            dense = run[family](pipe, steps=STEPS)
            enable(pipe, method=made_with(settings))
            alone, report_alone = run[family](pipe, steps=STEPS), summary(pipe)
            disable(pipe)
        enable(split(pipe), method=made_with(settings))
        balanced, made = run[family](pipe, steps=STEPS), summary(pipe)
        processor.why_not_balanced = lambda *_: "the plain assignment"
        plain, still = run[family](pipe, steps=STEPS), summary(pipe)
        processor.why_not_balanced = movable
        if not compares:
            continue
        row = compared(balanced, alone, dense, STEPS) | {"balanced - plain": (balanced - plain).abs().max().item()}
        row |= {"plain plan bytes": still.peak_state_bytes, "ranks": world}
        report(case, made, **row | reported(made, report_alone))
    for case, heads, asked in (
        ("a method of its own", HEADS, {"method": "dense"}),
        ("one head each", world, {"config": ResearchConfig(**BLOCKS)}),
    ):
        pipe = split(tiny.wan(num_attention_heads=heads).to(device))
        enable(pipe, **asked)
        tiny.run_wan(pipe)
        report(case, summary(pipe))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    work(*sys.argv[1:])
