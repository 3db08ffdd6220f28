"""Beside other engines, where they are installed: cache-dit, xDiT (the package xfuser) with its transformers, its
processors and its USP on two gloo ranks; and modules that hold a part of the heads (tensor parallelism).

Run by torchrun, this file is the worker that splits tokens. xDiT imports on machines with an accelerator only: the
worker answers its questions about the machine as a GPU would (`xdit_on_a_cpu`); everything between a pipeline and the
attention function is xDiT's own code.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import sys

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_families
import tiny_pipelines as tiny
from interpreted import begin_rank, compared, reported, run_on_ranks, tell
from parkattn.hosts.diffusers import disable, enable, row_for, summary, transformers_of
from parkattn.hosts.diffusers.xdit import with_copies, without_copies
from test_hosts_diffusers import EVERY_BLOCK, SPARSE, tolerance, trace
from test_hosts_diffusers_parallel import HEADS
from test_hosts_diffusers_parallel import SPARSE as SPARSE_ON_RANKS

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
    rows = run_on_ranks(__file__, "cache-dit", first)
    assert [row["family"] for row in rows] == ["wan", "hunyuan"]
    for row in rows:
        assert row["difference"] <= row["tolerance"] < row["sparse - dense"]
        assert row["calls"] == row["calls of one process"]
        assert row["calls"]["reuse"] > 0


def work_with_cache_dit(first: str) -> None:
    import cache_dit

    compares = begin_rank()
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
        row = compared(latents, alone, dense, tiny.STEPS) | reported(report, summary(single))
        if compares:
            tell(family=family, **row)
    torch.distributed.destroy_process_group()


# xDiT -------------------------------------------------------------------------------------------------


ODD = {"height": 48, "width": 48}  # 27 tokens, of which xDiT makes 28
# with its start and its end the first prompt has 26 tokens, the second 25, which two ranks cannot share
SHARED, WHOLE = "a cat walks on the grass", "a cat walks on the gras"
WAN, HUNYUAN = (functools.partial(build, num_attention_heads=HEADS) for build in (tiny.wan, tiny.hunyuan))
CASES = {
    "wan": (WAN, tiny.run_wan), "wan2.2": (functools.partial(WAN, experts=2), tiny.run_wan),
    "wan, compiled blocks": (WAN, tiny.run_wan), "wan, compiled": (WAN, tiny.run_wan),
    "wan vace": (tiny_families.vace, tiny_families.FAMILIES["wan vace"].run),
    "hunyuan": (HUNYUAN, functools.partial(tiny.run_hunyuan, prompt=SHARED)),
    "hunyuan, whole text": (HUNYUAN, functools.partial(tiny.run_hunyuan, prompt=WHOLE)),
    "hunyuan, compiled blocks": (HUNYUAN, functools.partial(tiny.run_hunyuan, prompt=WHOLE)),
    "hunyuan 1.5": (tiny_families.hunyuan15, tiny_families.FAMILIES["hunyuan 1.5"].run),
    "hunyuan 1.5, masks of xDiT": (tiny_families.hunyuan15, tiny_families.FAMILIES["hunyuan 1.5"].run),
    "wan, odd": (WAN, functools.partial(tiny.run_wan, **ODD)), "wan, ring": (WAN, tiny.run_wan),
}  # fmt: skip
# what xDiT's runner gives to its transformers, or would to have text masked
GIVEN = {"wan": {"attention_kwargs": {"thw": None}}, "hunyuan 1.5, masks of xDiT": {"attention_kwargs": {}}}
LIKE_ONE_PROCESS = [case for case in CASES if not case.endswith(("odd", "ring", "masks of xDiT"))]


@pytest.fixture(scope="module")
def cases():
    """case -> what two ranks made of it, compared with stock diffusers in one process."""
    if importlib.util.find_spec("xfuser") is None:
        pytest.skip("xfuser is not installed")
    if importlib.metadata.version("xfuser").startswith(("0.4", "0.5")):
        pytest.skip("this xfuser builds HunyuanVideo in full size only")
    return {row["case"]: row for row in run_on_ranks(__file__, "xDiT", seconds=600) if "case" in row}


@pytest.mark.parametrize("case", LIKE_ONE_PROCESS)
def test_ulysses_of_xdit_gives_the_latents_of_one_process(cases, case):
    row = cases[case]
    assert row["difference"] <= row["tolerance"] < row["sparse - dense"]
    assert row["calls"] == row["calls of one process"]
    assert row["calls"]["refresh"] > 0 < row["calls"]["reuse"]


@pytest.mark.parametrize("case", LIKE_ONE_PROCESS)
def test_each_rank_plans_for_its_heads_and_disable_gives_the_processors_back(cases, case):
    row = cases[case]
    assert row["heads"] * 2 == row["heads of one process"]
    assert row["processors are back"]
    assert row["disabled - xDiT"] == 0


def test_each_rank_holds_the_plans_of_its_heads_over_the_whole_sequence(cases):
    assert cases["wan"]["plan bytes"] == cases["wan"]["plan bytes of one process"] // 2


def test_text_was_shared_in_one_case_and_whole_on_every_rank_in_the_other(cases):
    assert cases["hunyuan"]["text is shared"]
    assert not cases["hunyuan, whole text"]["text is shared"]
    assert not cases["hunyuan, compiled blocks"]["text is shared"]


def test_tokens_that_xdit_adds_are_attended_to_as_in_its_own_attention(cases):
    row = cases["wan, odd"]
    assert row["xDiT - dense"] > row["tolerance"], "padding changes what xDiT itself computes"
    assert row["every block - xDiT"] <= row["tolerance"]


def test_ring_runs_dense_and_says_why(cases):
    row = cases["wan, ring"]
    assert row["every block - xDiT"] <= row["tolerance"]
    assert row["calls"]["refresh"] == row["calls"]["reuse"] == 0
    assert list(row["dense because"]) == [
        "ring context parallelism shows each rank a part of the keys only; use ulysses_degree"
    ]


def test_a_call_whose_text_xdit_may_mask_runs_dense_and_says_why(cases):
    row = cases["hunyuan 1.5, masks of xDiT"]
    assert row["every block - xDiT"] == 0
    assert list(row["dense because"]) == ["xDiT's attention_kwargs may mask text; make its transformer without them"]


@pytest.mark.parametrize("text", ["first", "last"])
def test_text_that_every_rank_holds_appears_once(text):
    video, words = torch.arange(12.0), torch.arange(100.0, 104.0)
    whole = torch.cat([words, video] if text == "first" else [video, words])[None, :, None, None]
    shares = [(words, piece) if text == "first" else (piece, words) for piece in video.chunk(3)]
    spread = torch.cat([x for share in shares for x in share])[None, :, None, None]
    assert torch.equal(without_copies(spread, 3, 4, text), whole)
    assert torch.equal(with_copies(whole, 3, 4, text), spread)


def test_a_transformer_that_extends_one_of_the_table_has_its_row():
    class Wrapper(tiny.diffusers.WanVACETransformer3DModel):
        pass

    assert row_for(Wrapper.__new__(Wrapper)).blocks == (("blocks", "attn1"), ("vace_blocks", "attn1"))


def test_an_xdit_without_backends_is_refused(monkeypatch):
    class Processor:
        def __call__(self, attn, hidden_states):
            return USP(hidden_states, hidden_states, hidden_states)  # noqa: F821

    transformer = tiny.wan_transformer()
    transformer.blocks[1].attn1.processor = Processor()
    stock = transformer.blocks[0].attn1.processor
    monkeypatch.setitem(sys.modules, "xfuser", None)
    with pytest.raises(ValueError, match=r"xfuser: expected 0\.5 or newer.*diffusers' enable_parallelism"):
        enable(transformer, SPARSE_ON_RANKS, total_steps=4)
    assert transformer.blocks[0].attn1.processor is stock


def xdit_on_a_cpu():
    """Import xDiT and start its groups: two ranks of Ulysses over gloo."""
    stock = torch.backends.mps.is_available
    torch.backends.mps.is_available = lambda: True  # the one device for which xDiT chooses gloo
    import xfuser
    import yunchang.globals
    from xfuser.config import config
    from xfuser.core.distributed import group_coordinator, init_distributed_environment, parallel_state
    from xfuser.model_executor.layers import usp

    torch.backends.mps.is_available = stock
    for module in (config, group_coordinator, parallel_state):
        module.HAS_LONG_CTX_ATTN = True  # xDiT looks for yunchang on GPUs only
    usp.PROCESS_GROUP = yunchang.globals.PROCESS_GROUP
    torch.distributed.init_process_group("gloo")
    init_distributed_environment(backend="gloo")
    arguments = xfuser.xFuserArgs(model="tiny", ulysses_degree=2, attention_backend="sdpa")
    parallel_state.initialize_model_parallel(ulysses_degree=2, backend="gloo")
    return arguments.create_config()[0]


def in_xdit(transformer, **given):
    """xDiT's transformer with the same weights."""
    stock = type(transformer)
    module = importlib.import_module(f"xfuser.model_executor.models.transformers.{stock.__module__.rpartition('.')[2]}")
    made = getattr(module, f"xFuser{stock.__name__.removesuffix('Model')}Wrapper").from_config(
        transformer.config, **given
    )
    made.load_state_dict(transformer.state_dict())
    return made.eval()


def ring_by_gathering(attend, query, key, value, joint_attn_kwargs=None, **options):
    """Ring attention needs a GPU kernel that returns log-sums; on a CPU, all keys on every rank give what it would."""
    both = [[torch.empty_like(x) for _ in range(2)] for x in (key, value)]
    for pieces, x in zip(both, (key, value), strict=True):
        torch.distributed.all_gather(pieces, x.contiguous())
    return attend(query, *(torch.cat(pieces, 2) for pieces in both), **options)[0]


def processors(pipe) -> list:
    return [
        attention.processor
        for transformer in transformers_of(pipe).values()
        for attention in row_for(transformer).attentions(transformer)
    ]


def work_with_xdit() -> None:
    torch.set_num_threads(1)
    config = xdit_on_a_cpu()
    from xfuser.core.distributed import get_runtime_state, initialize_runtime_state, parallel_state
    from xfuser.model_executor.layers import usp

    for case, (build, run) in CASES.items():
        pipe = build()
        dense = run(pipe)
        enable(pipe, SPARSE_ON_RANKS)
        alone = trace(pipe)
        sparse, report = run(pipe), summary(pipe)
        disable(pipe)
        for name, transformer in transformers_of(pipe).items():
            setattr(pipe, name, in_xdit(transformer, **GIVEN.get(case, {})))
        if case.endswith("ring"):
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(ring_degree=2, backend="gloo")
            usp.ring_attn = ring_by_gathering
        initialize_runtime_state(pipe, config)
        theirs, before = run(pipe), processors(pipe)
        enable(pipe, EVERY_BLOCK)
        every_block = run(pipe)
        enable(pipe, SPARSE_ON_RANKS)
        if case.endswith("compiled blocks"):
            pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        elif case.endswith("compiled"):  # as xDiT's runner does it
            pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager")
        together = trace(pipe)
        latents, made = run(pipe), summary(pipe)
        disable(pipe)
        after = processors(pipe)
        row = {
            "every block - xDiT": (every_block - theirs).abs().max().item(),
            "xDiT - dense": (theirs - dense).abs().max().item(),
            "disabled - xDiT": (run(pipe) - theirs).abs().max().item(),
            "processors are back": all(one is other for one, other in zip(before, after, strict=True)),
            "dense because": made.dense_because,
            "heads": together[0][1].density.shape[1] if together else 0,
            "heads of one process": alone[0][1].density.shape[1],
            "text is shared": getattr(get_runtime_state(), "split_text_embed_in_sp", None),
        }
        if torch.distributed.get_rank() == 0:
            tell(case=case, **row, **compared(latents, sparse, dense, tiny.STEPS), **reported(made, report))
    torch.distributed.destroy_process_group()


def work(engine: str, *words: str) -> None:
    {"cache-dit": work_with_cache_dit, "xDiT": work_with_xdit}[engine](*words)


if __name__ == "__main__":
    work(*sys.argv[1:])
