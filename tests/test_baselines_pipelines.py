"""Every method in real pipelines: tiny Wan and HunyuanVideo, compiled, the shipped model, two gloo ranks.

Run by torchrun, this file is the worker.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from interpreted import begin_rank, compared, reported, run_on_ranks, tell
from parkattn import dense, park
from parkattn.hosts.diffusers import enable, sequence_parallel_plan, summary
from parkattn.methods import METHODS
from parklab import baselines
from parklab.baselines.density_profile import DensityProfile
from parklab.experiments.ablation import budgeted_methods
from parklab.sprites import grammar
from parklab.studio import checkpoints
from parklab.studio.compare import choose_methods
from parklab.studio.density import measure_profile
from parklab.studio.generate import generate_frames
from parklab.studio.request import Request, config_for
from test_hosts_diffusers_compile import pytestmark  # noqa: F401 (pytest reads it)

NAMES = [entry.name for module in (dense, park, baselines) for entry in module.ENTRIES]
HEADS, STEPS = 4, 2  # of the runs on two ranks
FAMILIES = {"wan": (tiny.wan, tiny.run_wan), "hunyuan": (tiny.hunyuan, tiny.run_hunyuan)}
# settings of every method for a few dozen tokens: some blocks are skipped, and three of four steps are sparse
_CLUSTERS = {"query_clusters": 4, "key_clusters": 6, "top_p": None, "top_k": 0.4}
_RUN = {"dense_steps": 1, "dense_layers": ()}
_AUTHORS = {**_CLUSTERS, **_RUN, "kmeans_iterations": 2, "floor": 0.0}

SMALL = {
    "dense": {},
    **{name: {**_CLUSTERS, **_RUN} for name in ("park", "park-no-pama", "park-no-qrkc", "centroid")},
    "sparge": {"block_q": 8, "block_k": 8, "topk": 0.4, **_RUN},
    "xattention": {"block": 8, "stride": 2, "threshold": 0.4, **_RUN},
    "svg": {"tile": 4, "block": 4, "sparsity": 0.3, "layout": "wan", **_RUN},
    "svg2": _AUTHORS,
    "svoo": {**_AUTHORS, "recluster_interval": 2},
    "svg-ear": _AUTHORS,
    "sparsepr": {"query_clusters": 4, "key_clusters": 6, "kmeans_iterations": 2, "density": 0.6, "probes": 2, **_RUN},
    "sol": {"block": 8, "tau": 1.0, **_RUN},
    "sta": {"tile": (1, 2, 2), "window": (3, 1, 1), **_RUN},
    "radial": {"block": 4, "decay": 0.2, "sink": False, **_RUN},
    "mc-sparse": {"group": 8, "multiple": 1, "least_tokens": 1, **_RUN},
    "chipmunk": {"voxel": (1, 2, 2), "multiple": 1, "top_k": 0.2, **_RUN},
}
every_method = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module", params=FAMILIES)
def pipeline(request):
    """A pipeline, how it is run, and its dense latents."""
    build, run = FAMILIES[request.param]
    pipe = build()
    return pipe, run, run(pipe)


def sparse_latents(pipe, run, name):
    with enable(pipe, SMALL[name], method=name):
        return run(pipe), summary(pipe)


def test_every_method_is_run_here():
    assert set(SMALL) == set(NAMES) == set(METHODS)


@every_method
def test_a_method_runs_end_to_end_and_is_sparse(pipeline, name):
    pipe, run, dense = pipeline
    made, report = sparse_latents(pipe, run, name)
    assert made.isfinite().all()
    if name == "dense":
        assert torch.equal(made, dense)
    else:
        planned = report.calls["refresh"] + report.calls.get("anchor", 0)
        assert planned > 0 and 0 < report.density < 1 and not torch.equal(made, dense)


@pytest.fixture(scope="module")
def compiled():
    """Wan in compiled blocks, and the same in eager ones; methods come and go without compiling again."""
    torch._dynamo.reset()
    pipes = tiny.wan(num_layers=1), tiny.wan(num_layers=1)
    pipes[0].transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    yield pipes
    torch._dynamo.reset()


@every_method
def test_a_method_in_compiled_blocks_gives_the_latents_of_eager_ones(compiled, name):
    (made, report), (expected, said) = (sparse_latents(pipe, tiny.run_wan, name) for pipe in compiled)
    # this compiler traces and guards as any other, and runs the operators of eager mode
    assert torch.equal(made, expected)
    assert report.calls == said.calls


SIZE = {"height": 64, "width": 96, "frames": 9, "steps": 2}
SHIPPED = Request(prompt=grammar.EXAMPLE, guidance=1.0, device="cpu", dtype="float32", **SIZE)


@pytest.fixture(scope="module")
def shipped():
    """The trained model in the box."""
    return checkpoints.load_pipeline(checkpoints.find_model(None))


@every_method
def test_a_method_runs_at_its_defaults_with_the_shipped_model(shipped, name):
    asked = dataclasses.replace(SHIPPED, method=name)
    made = generate_frames(shipped, asked, config_for(asked, shipped), recall_rows=0, decode=False).measured
    # a frame has fewer cells than STA's window of 3 tiles of 8 x 8, the video fewer tokens than MC-Sparse's least
    assert (made["density_sparse_steps"] in (None, 1.0)) == (name in ("dense", "sta", "mc-sparse"))


def test_svoo_takes_the_profile_of_the_model_in_the_box_unless_told_otherwise(shipped, tmp_path):
    asked = dataclasses.replace(SHIPPED, method="svoo")
    assert config_for(asked, shipped).density_profile == "sprites"
    assert config_for(dataclasses.replace(asked, changes={"density_profile": None}), shipped).density_profile is None
    assert config_for(dataclasses.replace(asked, model="another"), shipped).density_profile is None
    (tmp_path / "link").symlink_to(checkpoints.find_model(None))
    by_path = dataclasses.replace(asked, model=str(tmp_path / "link"))
    assert config_for(by_path, shipped) == config_for(asked, shipped)


def test_park_profile_writes_what_the_heads_of_a_model_need(shipped, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *_, **__: shipped)
    prompts, out = (
        [grammar.EXAMPLE, "a cyan star moves down over grey checks"],
        tmp_path / "new" / "density.safetensors",
    )
    made = measure_profile(SHIPPED, prompts, out, samples=8)
    assert made.densities.shape == (2, 6, 3) and not made.densities.isnan().any()
    assert torch.equal(DensityProfile.load(out).densities, made.densities)
    with pytest.raises(
        ValueError, match=r"density.safetensors made with other settings \(samples = 8, asked null\); pass --overwrite"
    ):
        measure_profile(SHIPPED, prompts, out)


def test_a_comparison_of_all_methods_takes_every_one():
    assert choose_methods("all") == NAMES


def test_an_ablation_of_all_methods_takes_those_whose_density_can_be_set():
    assert set(NAMES) - set(budgeted_methods("all")) == {"dense", "sta"}
    assert budgeted_methods("park,sol") == ("park", "sol")


@pytest.fixture(scope="module")
def ranks():
    """(family, method) -> what two ranks made of it, compared with one process."""
    return {(row["family"], row["method"]): row for row in run_on_ranks(__file__)}


@every_method
@pytest.mark.parametrize("family", FAMILIES)
def test_a_method_on_two_ranks_gives_the_latents_of_one_process(ranks, family, name):
    row = ranks[family, name]
    # a head's plan is its own, so only projections of half the tokens may round differently
    assert row["difference"] <= row["tolerance"]
    assert row["calls"] == row["calls of one process"]
    assert name == "dense" or row["tolerance"] < row["sparse - dense"]
    # each rank plans for its heads only; labels that all heads share are held once on each
    assert name == "dense" or row["plan bytes"] < row["plan bytes of one process"]


def work() -> None:
    from diffusers import ContextParallelConfig

    compares = begin_rank()
    for family, (build, run) in FAMILIES.items():
        pipe = build(num_attention_heads=HEADS)
        run = functools.partial(run, steps=STEPS)
        if compares:
            dense, alone = run(pipe), {name: sparse_latents(pipe, run, name) for name in NAMES}
        pipe.transformer.enable_parallelism(
            config=ContextParallelConfig(ulysses_degree=2), cp_plan=sequence_parallel_plan(pipe)
        )
        for name in NAMES:
            latents, report = sparse_latents(pipe, run, name)
            if not compares:
                continue
            sparse, said = alone[name]
            tell(family=family, method=name, **compared(latents, sparse, dense, STEPS), **reported(report, said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    work()
