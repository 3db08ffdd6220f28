"""The frontier's bookkeeping: settings in words, costs from a summary, runs that are not made twice, the table, step caches."""

import types

import numpy as np
import pytest
import torch

from parkattn import ParkConfig
from parkattn.methods import configured_method
from parklab.bench import frontier
from parklab.bench.frontier import Setting, costs, measure_frontier, read_records
from parklab.experiments.frontier import tabulate
from parklab.experiments.tables import interval
from parklab.research import ResearchConfig, studied_entry

diffusers = pytest.importorskip("diffusers")
import tiny_pipelines as tiny  # noqa: E402
from parklab.bench import step_caches  # noqa: E402
from parklab.bench.frontier import Task  # noqa: E402
from parklab.sprites import grammar  # noqa: E402

pytest.importorskip("diffusers", minversion="0.37", reason="the first release that has all three caches")


def test_settings_are_a_method_or_profile_and_fields():
    assert Setting.parse("fast top_p=0.3 anchors=8") == Setting(
        "fast top_p=0.3 anchors=8", "park", "fast", {"top_p": 0.3, "anchors": 8}
    )
    assert Setting.parse("park-no-qrkc quality").config == "quality"
    assert Setting.parse("park top_p=0.9").config is None
    assert Setting.parse("paper key_metric=euclidean").changes == {"key_metric": "euclidean"}
    with pytest.raises(ValueError, match="method: expected one of"):
        Setting.parse("prak")
    with pytest.raises(ValueError, match="setting: expected METHOD or PROFILE"):
        Setting.parse("top_p=0.3")


@pytest.mark.parametrize(
    ("forwards", "share"), [({}, 1.0), ({"computed": 10, "forecast": 30, "mean_error": 0.02}, 0.25)]
)
def test_a_second_pass_at_anchors_costs_their_density_and_a_forecast_nothing(forwards, share):
    calls, run = (
        {"dense": 0, "refresh": 0, "reuse": 8, "anchor": 2},
        {"steps": {}, "attention_seconds": {}, "peak_state_bytes": 1},
    )
    found = costs(types.SimpleNamespace(calls=calls, density=(2 + 8 * 0.25) / 10, forwards=forwards, **run))
    assert found["cost"] == pytest.approx(0.4 * share) and found["density_sparse"] == pytest.approx(0.25)
    assert found["cost_two_passes"] == pytest.approx((0.4 + 0.2 * 0.25) * share) and found["share_computed"] == share


def test_the_interval_is_students():
    assert interval([1.0]) is None
    assert interval([1.0, 3.0]) == pytest.approx(12.71 * 2**0.5 / 2**0.5)


@pytest.fixture
def runs(monkeypatch):
    """measure_frontier without a model: a video of the method's own shade, and what was made."""
    made = []

    def run(pipe, task, setting, method):
        shade = 100 if method.name == "dense" else 101 if method.config.top_p > 0.6 else 104
        made.append((task.prompt, task.guidance, method.name))
        found = {"cost": 0.5, "cost_two_passes": 0.6, "seconds": 1.0}
        return np.full((2, 16, 16, 3), shade, np.uint8), found

    monkeypatch.setattr(frontier, "_run", run)
    monkeypatch.setattr(
        frontier,
        "_method",
        lambda pipe, setting: configured_method(studied_entry(setting.method), setting.config, **setting.changes),
    )
    return made


PIPE = types.SimpleNamespace(transformer=torch.nn.Linear(1, 1))


def measure(path, prompts=("a", "b"), settings=("paper", "fast")):
    return list(measure_frontier(PIPE, prompts, settings, path, sizes=[(2, 16, 16)], steps=4, guidances=(1.0,)))


def test_a_run_that_is_there_is_not_made_again(runs, tmp_path):
    path = tmp_path / "frontier.jsonl"
    first = measure(path)
    assert len(runs) == len(read_records(path)) == 6 and [prompt for prompt, _, name in runs if name == "dense"] == [
        "a",
        "b",
    ]
    assert [{**record} for record in measure(path)] == first and len(runs) == 6
    measure(path, settings=("paper", "fast", "fast top_p=0.7"))
    assert len(runs) == 8


def test_the_dtype_is_that_of_the_weights_and_not_of_a_small_part_kept_in_float32(runs, tmp_path, monkeypatch):
    mixed = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4).bfloat16())
    monkeypatch.setattr(PIPE, "transformer", mixed)
    assert {record["dtype"] for record in measure(tmp_path / "frontier.jsonl", prompts=("a",))} == {"bfloat16"}


def test_a_line_that_was_cut_off_is_made_again(runs, tmp_path):
    path = tmp_path / "frontier.jsonl"
    measure(path)
    path.write_text(path.read_text()[:-40])
    measure(path)
    assert len(runs) == 7 and len(read_records(path)) == 6


def test_the_table_compares_on_the_same_prompts(runs, tmp_path):
    rows = {row["setting"]: row for row in tabulate(measure(tmp_path / "frontier.jsonl"))}
    assert set(rows) == {"paper", "fast"} and rows["fast"]["runs"] == 2
    # 1 and 4 shades off: 20 log10 4 dB
    assert rows["fast"]["gain_db"] == pytest.approx(-20 * np.log10(4))
    assert rows["paper"]["psnr"] == pytest.approx(20 * np.log10(255))


def test_profiles_are_the_models_in_a_record(runs, tmp_path):
    record = next(r for r in measure(tmp_path / "frontier.jsonl") if r["setting"] == "fast")
    assert ResearchConfig.from_dict(record["config"]) == ResearchConfig.of(ParkConfig.profile("fast"))


# diffusers' step caches as rows: what they computed is counted, and nothing of them stays ---------------


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
