"""What `park bench` records is what the tables show: the last of each thing, from the fields that benches write."""

# ruff: noqa: F811 (a fixture is taken from another file)

from __future__ import annotations

import json
import re
import shutil
import sys
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from parkattn.ops import Backend
from parklab.bench import attend, dense, layer, timing
from parklab.bench.problems import TINY
from test_tables import _cells, tables  # noqa: F401 (a fixture)


def test_what_is_measured_again_takes_the_place_of_what_was_measured_before(tables, tmp_path, monkeypatch):
    records = sys.modules["records"]
    names = (
        "attention", "attention_calls", "blocks_of_newer_models", "borders_on_scene", "clustering", "cpu", "dense_calls", "eight_bits_whole_models",
        "flashinfer", "float8_linears", "official_kernels", "one_layer", "pama", "sanitizers", "whole_minimax_h3", "whole_models",
    )  # fmt: skip

    def shown():
        costs = records.lines("gpu_methods.jsonl", "methods")
        return {name: tables.TABLES[name]() for name in names} | {"costs": costs, "forwards": tables.forwards()}

    before = shown()
    shutil.copytree(records.RESULTS, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        older = [
            line | {name: 2 * line[name] for name in line if name in ("ms", "reuse_s", "dense_ms")} for line in lines
        ]
        if {line.get("benchmark") for line in lines} & records.MEASURED.keys():
            gates = [{"gate": "of the benches", "ok": True}]
            path.write_text("".join(json.dumps(line) + "\n" for line in [*older, *gates, *lines]))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert shown() == before


@pytest.fixture
def benches(monkeypatch):
    """Attention of `park bench` as on a Hopper GPU, at tiny sizes by the definitions."""

    def as_on_a_gpu(kernels, dim):
        return {f"{kernel} {precision}".removesuffix(" bf16"): Backend("reference", "", precision)
                for kernel in kernels for precision in ("bf16", "int8")}  # fmt: skip

    for bench in (attend, dense):
        monkeypatch.setattr(bench, "kernels_for", lambda device, dim: ["gluon", "triton"])
        monkeypatch.setattr(bench, "in_precisions", as_on_a_gpu)
    for bench in (dense, layer):
        monkeypatch.setattr(bench, "resolve", lambda *_: Backend("reference", "the definitions"))
        monkeypatch.setattr(bench, "WAN_14B", TINY)
        monkeypatch.setattr(
            bench, "dense_calls", lambda q, k, v: {"cudnn": partial(scaled_dot_product_attention, q, k, v)}
        )
    monkeypatch.setattr(attend, "dense_calls", layer.dense_calls)
    monkeypatch.setattr(attend, "CASES", dict.fromkeys(attend.CASES, (TINY, 0.5)))
    monkeypatch.setattr(attend, "_padding", lambda plan, kernel: 1.0)
    monkeypatch.setattr(dense, "HUNYUAN", TINY)
    monkeypatch.setattr(layer, "PAPER", layer.SMALL.replace(backend="reference"))
    monkeypatch.setattr(timing, "_each_ms", lambda call, repeats: [call() is None or 7777.0])
    return [partial(bench.measure, torch.device("cpu"), {"tflops": 1.0}, repeats=1) for bench in (attend, dense, layer)]


def test_tables_of_calls_are_filled_by_what_the_benches_record(tables, benches, tmp_path, monkeypatch):
    shutil.copytree(sys.modules["records"].RESULTS, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(sys.modules["records"], "RESULTS", tmp_path)

    def append(name, rows):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(row | {"environment": {"commit": "later"}}) + "\n" for row in rows)

    of_attention, of_dense, of_layer = benches
    append("gpu_attend", of_attention())
    append("gpu_attend", of_layer())
    append("gpu_dense", of_dense())
    append("gpu_attend_int8", of_attention(only=list(attend.CASES)[:4]))  # what a short lease is for
    append("gpu_attend_int8", of_dense(barred=True))
    for name in ("attention", "attention_calls", "dense_calls", "one_layer", "attention_in_int8"):
        rows = tables.TABLES[name]().splitlines()[2:]
        assert all(re.search(r"7777\.0|7\.78e\+03", row) for row in rows), name


def test_a_run_of_fast_alone_has_a_row_and_takes_nothing_from_a_whole_one(tables, tmp_path, monkeypatch):
    records = sys.modules["records"]
    rows, made = tables.TABLES["eight_bits_whole_models"]().splitlines(), tables.forwards()
    last = [
        row
        for row in records.lines("e2e_bits.jsonl", "e2e bits")
        if row["model"] == "wan2.1-14b" and row["linears"] == "bfloat16"
    ][-1]
    alone = {name: value for name, value in last.items() if "quality" not in name} | {"alone": True, "reuse_s": 1.25}
    shutil.copytree(records.RESULTS, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "e2e_bits.jsonl").open("a") as file:
        file.write(json.dumps(alone) + "\n")
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    *before, added = tables.TABLES["eight_bits_whole_models"]().splitlines()
    assert before == rows and "| 1.25 | |" in added
    assert tables.forwards() == made
    alone |= {"linears": "float8", "baselines": {}}  # where no stock forward was timed in the same commit
    (tmp_path / "e2e_bits.jsonl").write_text(json.dumps(alone) + "\n")
    assert "| float8 | INT8 | | " in tables.TABLES["eight_bits_whole_models"]()


def test_the_anchor_of_a_second_branch_is_that_of_the_same_record_or_none(tables, tmp_path, monkeypatch):
    """720p timed again with it, in bf16: no other precision and no shorter video takes it over."""
    records = sys.modules["records"]
    found = records.lines("e2e_bits.jsonl", "e2e bits")
    again = [
        row | {"anchor_second_s": 1.5} for row in found if (row["model"], row["precision"]) == ("wan2.1-14b", "bf16")
    ]
    shutil.copytree(records.RESULTS, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "e2e_bits.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in again)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    made = tables.forwards()["models"]
    whole, shorter = made["wan2.1-14b"], made["wan2.1-14b-480p"]
    assert {
        name: own["seconds"].get("anchor_second") for name, own in whole["profiles"].items() if name != "paper"
    } == {"quality": 1.5, "fast": 1.5}
    for own in (whole["int8"], shorter["profiles"], shorter["int8"]):
        assert not any("anchor_second" in profile["seconds"] for profile in own.values())


def test_whole_runs_in_int8_stand_beside_those_in_bf16(tables, tmp_path, monkeypatch):
    run_tables = sys.modules["run_tables"]
    for module in (run_tables, sys.modules["records"]):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    steps = {"reuse": [1, 2], "forecast": [3]}
    run = {
        "model": "wan2.1-1.3b",
        "profile": "fast",
        "method": "park",
        "density_sparse_steps": 0.1,
        "steps_by_phase": steps,
        "composed_s": 40.0,
    }
    for name, more in {
        "e2e_profile": {"guidance_scale": 1.0},
        "e2e_bits": {"guidance_scale": 5.0, "precision": "int8"},
    }.items():
        line = run | more | {"benchmark": f"{name.replace('_', ' ')} run", "denoise_s": 42.0}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    names = ["wan2.1-1.3b, `fast`", "wan2.1-1.3b, `fast`, INT8, guidance 5"]
    assert _cells(tables.TABLES["whole_runs"]()) == [[name, "1", "0.10", "42.0 s", "40.0 s", "+5.0%"] for name in names]
