"""diffusers' step caches as rows of the frontier: what they computed is counted, and nothing of them stays."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
import tiny_pipelines as tiny  # noqa: E402
from parkattn.methods import configured_method  # noqa: E402
from parklab.bench import frontier, step_caches  # noqa: E402
from parklab.bench.frontier import Setting, Task, measure_frontier  # noqa: E402
from parklab.sprites import grammar  # noqa: E402

pytest.importorskip("diffusers", minversion="0.37", reason="the first release that has all three caches")
STEPS = 8


@pytest.fixture(scope="module")
def wan():
    return tiny.wan()


def run(pipe, setting: str):
    asked = Setting.parse(setting)
    task = Task("a cat walks", 9, 64, 64, STEPS, 5.0, 0)
    return frontier._run(pipe, task, asked, configured_method(asked.method, asked.config, **asked.changes))


@pytest.mark.parametrize(
    ("setting", "share", "attention"),
    [
        ("dense cache=first-block threshold=0", 1.0, 1.0),
        # the first block of two runs in each forward
        ("dense cache=first-block threshold=1e9", 1 / STEPS, 1 / STEPS + (STEPS - 1) / STEPS / 2),
        ("dense cache=mag threshold=0", 1.0, 1.0),
        # the first two steps, and then every third
        ("dense cache=mag threshold=1e9 max_skip_steps=2 retention_ratio=0.25", 4 / STEPS, 4 / STEPS),
        # 0, 1, 2, and then (step - 4) % 3 == 0
        ("dense cache=taylorseer cache_interval=3", 5 / STEPS, 5 / STEPS),
        ("dense cache=taylorseer cache_interval=3 use_lite_mode=true", 5 / STEPS, 5 / STEPS),
        ("dense steps=2", 2 / STEPS, 2 / STEPS),
    ],
)
def test_what_a_cache_computed_is_counted_and_nothing_of_it_stays(wan, setting, share, attention):
    stock = tiny.run_wan(wan)
    frames, found = run(wan, setting)
    assert (found["share_computed"], found["cost"]) == pytest.approx((share, attention))
    assert (frames == run(wan, "dense")[0]).all() == (share == 1)
    assert torch.equal(tiny.run_wan(wan), stock)


def test_magcache_is_calibrated_on_a_sentence_that_is_in_no_table(wan):
    _, found = run(wan, "dense cache=mag threshold=0.1")
    assert len(found["calibrated"]) == STEPS and found["calibrated"][0] == 1
    assert grammar.parse(step_caches.CALIBRATION).held_out is None


def test_rows_of_dense_attention_are_told_apart(wan, tmp_path):
    settings = [
        "dense tolerance=0.5",
        "dense steps=2",
        "dense cache=first-block",
        "dense cache=first-block threshold=0.5",
    ]
    found = list(
        measure_frontier(
            wan, ["a"], settings, tmp_path / "f.jsonl", sizes=[(9, 64, 64)], steps=4, guidances=(1.0,), timed=False
        )
    )
    assert len({record["key"] for record in found}) == 5 and {record["seconds"] for record in found} == {None}
    assert found[0]["config"] == {} and found[0]["psnr"] > max(record["psnr"] for record in found[2:3])


def test_a_cache_that_is_not_known_is_refused(wan):
    for wrong, words in [
        ("dense cache=teacache", "cache: expected first-block, mag, taylorseer, got 'teacache'"),
        ("dense cache=mag top_p=0.3", "cache: expected fields out of max_skip_steps, retention_ratio, threshold"),
        ("fast cache=mag", "cache: expected beside dense attention"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(wan, wrong)
