"""Beside other engines: cache-dit, where it is installed, and modules that hold a part of the heads (tensor
parallelism).

Run by torchrun, this file is the worker that splits tokens with cache-dit.
"""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from interpreted import run_on_ranks
from parkattn.hosts.diffusers import disable, enable, summary
from test_hosts_diffusers import EVERY_BLOCK, SPARSE, tolerance

# numpy's complaint about schedulers of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.parametrize("first", ["cache-dit", "parkattn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_cache_dit_skips_blocks_and_the_rest_is_dense_with_every_block(first):
    cache_dit = pytest.importorskip("cache_dit")
    steps, cache = (
        8,
        cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, residual_diff_threshold=0.2, max_warmup_steps=2
        ),
    )
    pipe = tiny.wan(num_layers=4)
    dense = tiny.run_wan(pipe, steps=steps)
    cache_dit.enable_cache(pipe, cache_config=cache)
    cached = tiny.run_wan(pipe, steps=steps)
    if first == "parkattn":
        cache_dit.disable_cache(pipe)
    enable(pipe, EVERY_BLOCK, dense_steps=1)
    if first == "parkattn":
        cache_dit.enable_cache(pipe, cache_config=cache)
    ours = tiny.run_wan(pipe, steps=steps)
    torch.testing.assert_close(ours, cached, rtol=0, atol=tolerance(cached, steps=steps))
    counts = [row["dense"] + row["refresh"] + row["reuse"] for row in summary(pipe).layers]
    assert counts[0] == 2 * steps > counts[1], "the cache must skip something for this test to say anything"
    assert torch.equal(tiny.run_wan(pipe, steps=steps), ours)
    disable(pipe)
    cache_dit.disable_cache(pipe)
    assert torch.equal(tiny.run_wan(pipe, steps=steps), dense)


def with_some_heads(transformer, part: int, parts: int):
    """As tensor parallelism leaves it: each rank has some heads of every attention, and adds up what comes out."""
    made = copy.deepcopy(transformer)
    for block in made.transformer_blocks:
        attention = block.attn
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            linear = getattr(attention, name)
            linear.weight.data, linear.bias.data = (x.data.chunk(parts)[part] for x in (linear.weight, linear.bias))
        for linear in (attention.to_out[0], attention.to_add_out):
            linear.weight.data, linear.bias.data = linear.weight.data.chunk(parts, 1)[part], linear.bias.data / parts
        attention.heads //= parts
    return made


def test_modules_with_a_part_of_the_heads_add_up_to_the_whole():
    whole = tiny.hunyuan_transformer(num_attention_heads=4)
    ranks = [with_some_heads(whole, part, 2) for part in range(2)]
    _, inputs, _ = tiny.transformers()["hunyuan"]
    given, parts, bytes_held = {}, [], []
    whole.transformer_blocks[0].attn.register_forward_hook(
        lambda m, args, kwargs, out: given.update(kwargs=kwargs, out=out), with_kwargs=True
    )
    with torch.no_grad():
        with enable(whole, SPARSE, total_steps=1, dense_layers=(1, 2)) as session:  # so that only layer 0 has a plan
            whole(**inputs)
            held = session.method.state_bytes
        for rank in ranks:
            with enable(rank, SPARSE, total_steps=1) as session:
                session.tracker.begin_forward({"timestep": inputs["timestep"]})
                parts.append(rank.transformer_blocks[0].attn(**given["kwargs"]))
                assert summary(rank).calls == {"dense": 0, "refresh": 1, "reuse": 0}
                bytes_held.append(session.method.state_bytes)
    for one, other, together in zip(*parts, given["out"], strict=True):
        torch.testing.assert_close(one + other, together, rtol=0, atol=tolerance(together, steps=1, guidance=1.0))
    assert held == sum(bytes_held) > 0


@pytest.mark.parametrize("first", ["cache-dit", "parkattn"])
def test_the_context_parallelism_of_cache_dit_gives_the_latents_of_one_process(first):
    pytest.importorskip("cache_dit")
    rows = run_on_ranks(__file__, first)
    assert [row["family"] for row in rows] == ["wan", "hunyuan"]
    for row in rows:
        assert row["difference"] <= row["tolerance"] < row["sparse - dense"]
        assert row["calls"] == row["calls of one process"]
        assert row["calls"]["reuse"] > 0


def work(first: str) -> None:
    import cache_dit

    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # cache-dit divides by the number of accelerators
    torch.distributed.init_process_group("gloo")
    sparse = SPARSE.replace(dense_steps=1, refresh_interval=2)
    for family, build, run in (("wan", tiny.wan, tiny.run_wan), ("hunyuan", tiny.hunyuan, tiny.run_hunyuan)):
        pipe = build(num_attention_heads=4)
        dense = run(pipe)
        if first == "parkattn":
            enable(pipe, sparse)
        cache_dit.enable_cache(pipe, cache_config=None, parallelism_config=cache_dit.ParallelismConfig(ulysses_size=2))
        if first == "cache-dit":
            enable(pipe, sparse)
        latents, report = run(pipe), summary(pipe)
        single = build(num_attention_heads=4)
        single.transformer._cp_config = None  # cache-dit has changed the class, which now asks for it
        enable(single, sparse)
        alone = run(single)
        row = {
            "family": family,
            "difference": (latents - alone).abs().max().item(),
            "sparse - dense": (alone - dense).abs().max().item(),
            "tolerance": tolerance(dense),
            "calls": report.calls,
            "calls of one process": summary(single).calls,
        }
        if torch.distributed.get_rank() == 0:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1])
