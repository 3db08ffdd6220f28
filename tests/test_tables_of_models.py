"""Tables of quality with records of a second model: a table for each, disagreements first, and nothing mixed."""

import functools
import json
import re
import sys

import pytest

from parklab.bench.frontier import FORMAT
from test_tables import ROOT, loaded

OTHER = "0123456789abcdef"
# by table: what it reads
DECORATED = {
    "profiles": {"frontier.jsonl", "run_75600.jsonl"}, "short_runs_at_equal_cost": {"frontier_equal_cost.jsonl"},
    "few_steps": {"few_steps.jsonl"}, "forecast_profiles": {"run_75600.jsonl"}, "int8_videos": {"run_75600.jsonl"},
    "forecast_caches": {"run_7168.jsonl"}, "matched_2k": {"matched_2k"}, "matched_on_h200": {"gpu_75600"},
    "same_schedule_on_h200": {"gpu_75600_same_schedule"},
    "own_settings_on_h200": {"gpu_75600"}, "profiles_above_methods": {"gpu_7168", "frontier.jsonl"},
    "blocks_on_h200": {"gpu_75600"}, "schedules_on_h200": {"gpu_75600"},
}  # fmt: skip


@pytest.fixture(scope="module")
def tables():
    return loaded("tables")


@pytest.fixture
def second(tables, tmp_path, monkeypatch):
    """Every record once more, of another model: `change` says how its PSNR differs."""
    records = sys.modules["records"]
    read = records._campaign.__wrapped__

    def of_both(change, files, videos=None):
        """videos: of so many prompts; None: of all."""
        for name in {name for name in files if name.endswith(".jsonl")}:
            lines = [json.loads(line) for line in (ROOT / "benchmarks/results" / name).read_text().splitlines()]
            prompts = list(dict.fromkeys(line["prompt"] for line in lines))[:videos]
            more = [
                _changed({**line, "model": OTHER + line["model"]}, change)
                for line in lines
                if line["prompt"] in prompts
            ]
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))

        @functools.cache
        def campaign(name):
            found = read(name)
            if name not in files:
                return found
            prompts = list(dict.fromkeys(cell["request"]["prompt"] for cell in found.values() if "row" in cell))[
                :videos
            ]
            return found | {
                f"{OTHER} {key}": _changed({**cell, "request": {**cell["request"], "weights": OTHER}}, change)
                for key, cell in found.items() if cell["request"]["prompt"] in prompts
            }  # fmt: skip

        monkeypatch.setattr(records, "_campaign", campaign)
        place = ROOT / "benchmarks/results"

        class Results:
            def __truediv__(self, name):
                return tmp_path / name if (tmp_path / name).exists() else place / name

        for module in ("records", "quality_tables", "run_tables"):
            monkeypatch.setattr(sys.modules[module], "RESULTS", Results())

    return of_both


def _changed(record, change):
    if record.get("format") == FORMAT:
        return {**record, "psnr": change(record["psnr"])}
    return {**record, "row": {**record["row"], "psnr": change(record["row"]["psnr"])}} if "row" in record else record


def test_every_table_that_is_made_for_each_model_is_tried_here(tables):
    several = {name for name, table in tables.TABLES.items() if hasattr(table, "__wrapped__")}
    assert several - {"costs_2k", "costs_7k"} == set(DECORATED)


@pytest.mark.parametrize("name", DECORATED)
def test_a_second_model_has_a_table_of_its_own_and_the_first_ones_is_as_before(tables, second, name):
    before = tables.TABLES[name]()
    second(lambda psnr: psnr + 1, DECORATED[name])
    after = tables.TABLES[name]()
    found = re.search(r"Model `sprites`:\n\n(.*?)\n\nModel `0123456789abcdef`:\n\n(.*)", after, re.DOTALL)
    assert found and found[1] == before.rstrip()
    assert found[2].splitlines()[0] == before.splitlines()[0] and len(found[2].splitlines()) > 2


@pytest.mark.parametrize("name", DECORATED)
def test_one_video_of_a_second_model_is_enough_for_a_table_or_leaves_the_page_as_it_is(tables, second, name):
    before = tables.TABLES[name]()
    second(lambda psnr: psnr + 1, DECORATED[name], videos=1)
    after = tables.TABLES[name]()
    assert after == before or f"Model `{OTHER}`:" in after


def test_models_that_rank_alike_are_said_to_agree(tables, second):
    second(lambda psnr: psnr + 1, {"frontier.jsonl"})
    assert tables.TABLES["profiles"]().startswith("\nThe models agree in every order and sign.\n")


def test_another_order_is_said_first_with_the_clearest_pair(tables, second):
    second(lambda psnr: 100 - psnr, {"frontier.jsonl"})
    text = tables.TABLES["profiles"]()
    assert text.startswith("\nWhere models disagree:\n\n- 1, PSNR against dense: 3 of 3 pairs in another order; ")
    assert text.index("disagree") < text.index("Model `sprites`") < text.index(f"Model `{OTHER}`")


def test_another_sign_is_a_disagreement_and_values_that_one_lacks_are_none(tables):
    models = sys.modules["of_models"]
    how = models.Compared(heads=1, name=0, ranked=("PSNR",))
    head = "| method | PSNR | above svg2 |\n|---|---|---|\n"
    two = {
        "one": head + "| a | 30.1 ± 2.0 dB | +1.5 ± 0.4 dB |\n| b | 28.0 dB |  |\n| c | 9.0 dB | +1 |\n",
        "other": head + "| a | 20.0 dB | -0.5 dB |\n| b | 21.5 dB | +3 |\n| d | 1.0 dB | -2 |\n",
    }
    assert models.disagreements(two, how) == [
        "PSNR: 1 of 1 pairs in another order; b less a is -2.1 with one, +1.5 with other",
        "a, above svg2: +1.5 with one, -0.5 with other",
    ]


def test_a_record_names_its_model_by_its_weights_and_kernels_have_none(tables):
    model_of = sys.modules["of_models"].model_of
    first = sys.modules["of_models"].FIRST
    assert model_of({"format": FORMAT, "model": ""}) == model_of({"format": FORMAT, "model": "+lora:ac"}) == first
    assert model_of({"format": FORMAT, "model": OTHER + "+lora:ac"}) == OTHER
    assert model_of({"format": "f", "request": {"weights": OTHER}}) == OTHER
    assert model_of({"benchmark": "e2e", "model": "wan2.1-14b"}) is None


def test_the_first_model_is_the_one_in_the_package():
    from parklab.sprites import CHECKPOINT
    from parklab.studio.checkpoints import fingerprint

    assert fingerprint(CHECKPOINT) == sys.modules["of_models"].FIRST
