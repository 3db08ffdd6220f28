"""The registry, and the seam as somebody outside the package uses it: two methods of at most 60 lines in
examples/methods.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import parkattn
import tiny_pipelines
from parkattn import CallSite, MethodEntry, ParkConfig, make_method, methods
from parkattn.methods import METHODS, configured_method, method_entry, register, register_from, register_installed
from parkattn.ops.attend.definition import dense_attention
from parkattn.planned import make_plan

EXAMPLES = Path(__file__).parents[1] / "examples" / "methods"
PARK = Path(parkattn.__file__).parent


@pytest.fixture
def outside(monkeypatch):
    """Both example methods, registered for one test."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    known = dict(METHODS)
    entries = [register(importlib.import_module(name).ENTRY) for name in ("window", "tile_top_k")]
    yield {entry.name: entry for entry in entries}
    METHODS.clear()
    METHODS.update(known)


def problem(seed=0, grid=(3, 5, 6), words=0, heads=2):
    n = grid[0] * grid[1] * grid[2] + words
    q, k, v = torch.randn(3, 2, heads, n, 16, generator=torch.Generator().manual_seed(seed)).unbind(0)
    return q, k, v, CallSite(step=5, total_steps=10, grid=grid, text=slice(n - words, n) if words else None)


def test_an_example_method_has_at_most_60_lines():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


@pytest.mark.parametrize("name", ["window", "tile-top-k"])
@pytest.mark.parametrize("words", [0, 7])
@pytest.mark.parametrize("padded", [False, True])
def test_an_outside_method_keeping_everything_is_dense(outside, name, words, padded):
    q, k, v, site = problem(words=words)
    key_valid = None
    if padded:
        key_valid = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
        key_valid[1, -3:] = False
    site = CallSite(step=5, total_steps=10, grid=site.grid, text=site.text, key_valid=key_valid)
    settings = {"reach": 99} if name == "window" else {"tile": 16, "top_k": 1.0}
    out, stats = make_method(name, settings)(q, k, v, site)
    expected = dense_attention(q, k, v, key_valid=key_valid)
    assert stats.plan is not None and stats.density.eq(1).all()
    torch.testing.assert_close(out, expected)


def test_a_window_sees_its_neighbours_and_nobody_else(outside):
    q, k, v, site = problem()
    plan = make_method("window", {"tile": (1, 5, 6), "reach": 1})(q, k, v, site).stats.plan
    frame = torch.arange(90) // 30
    seen = plan.mask[0, 0][plan.queries.labels[0, 0].long()][:, plan.keys.labels[0, 0].long()]
    assert torch.equal(seen, (frame[:, None] - frame).abs() <= 1)


def test_contiguous_tiles_move_no_token(outside):
    q, k, v, site = problem()
    plan = make_method("tile-top-k", {"tile": 16})(q, k, v, site).stats.plan
    assert plan.queries.order is None and plan.keys.order is None and plan.queries.count == 6


def test_a_static_plan_is_made_once_and_kept_small(outside):
    method = make_method("window", {"dense_steps": 0})
    q, k, v, site = problem()
    phases = [method(q, k, v, CallSite(step=s, total_steps=60, grid=site.grid)).stats.phase for s in (0, 1, 30, 59)]
    assert phases == ["refresh", "reuse", "reuse", "reuse"]


def test_a_method_of_an_installed_package_is_found_by_name(tmp_path):
    """A wheel's metadata in a folder on the path is what an installation leaves behind."""
    (tmp_path / "plugin_window.py").write_text(
        (EXAMPLES / "window.py").read_text().replace('"window"', '"plugin-window"')
    )
    info = tmp_path / "plugin_window-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-window\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[parkattn.methods]\nwindow = plugin_window:ENTRY\n")
    program = (
        "import parkattn, torch; print(parkattn.make_method('plugin-window').name, 'plugin-window' in parkattn.METHODS)"
    )
    path = f"{tmp_path}:{PARK.parent}"
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True
    )
    assert run.stdout.split() == ["plugin-window", "True"], run.stderr


def test_listing_the_methods_lists_those_of_installed_packages(monkeypatch):
    """Loading one may list the table itself."""
    entry = MethodEntry("listed", lambda config: None, "one of another package")
    monkeypatch.setattr(methods, "METHODS", methods.MethodTable(METHODS.data))
    point = SimpleNamespace(value="elsewhere:ENTRY", load=lambda: [entry] if len(methods.METHODS) else [])
    monkeypatch.setattr(methods, "entry_points", lambda group: [point])
    assert "listed" in list(methods.METHODS) and methods.METHODS["listed"] is entry
    assert "listed" not in METHODS.data


def test_a_method_of_another_name_than_its_entry_is_refused(outside):
    entry = outside["window"]
    try:
        register(dataclasses.replace(entry, name="panes"))
        with pytest.raises(
            ValueError,
            match=r"^make: expected a method named 'panes' as its entry is, got 'window'; give both one name\.$",
        ):
            make_method("panes")
    finally:
        METHODS.pop("panes")


def test_an_entry_is_registered_by_module_and_name(outside):
    METHODS.pop("window")
    assert register_from("window:ENTRY").name == "window" and "window" in METHODS
    for where in ("window", "window:", ":ENTRY", "window:NOTHING", "no_such_module:ENTRY"):
        with pytest.raises(ValueError, match=r"^method: expected module:ENTRY"):
            register_from(where)


def test_labels_that_kernels_cannot_read_are_refused_on_every_device(outside):
    class Wide:
        def plan(self, q, k, site, earlier):
            plan = make_method("tile-top-k", {"tile": 16}).planner.plan(q, k, site, earlier)
            return dataclasses.replace(plan, keys=dataclasses.replace(plan.keys, labels=plan.keys.labels.long()))

    q, k, _, site = problem()
    with pytest.raises(
        ValueError, match=r"expected int32 labels .* got numbers of torch.int64; make blocks with arrange"
    ):
        make_plan(q, k, Wide(), site, None)


def test_a_static_plan_is_made_anew_for_another_grid_of_as_many_tokens(outside):
    method = make_method("window", {"dense_steps": 0, "tile": (1, 5, 6)})
    q, k, v, _ = problem()
    calls = [(0, (3, 5, 6)), (1, (3, 5, 6)), (2, (3, 6, 5)), (3, (3, 6, 5))]
    made = [method(q, k, v, CallSite(step=step, total_steps=60, grid=grid)).stats for step, grid in calls]
    assert [stats.phase for stats in made] == ["refresh", "reuse", "refresh", "reuse"]
    assert "grid" in made[2].reason and not torch.equal(made[2].plan.mask, made[1].plan.mask)


def test_settings_of_another_method_are_refused(outside):
    with pytest.raises(TypeError, match="expected a WindowConfig"):
        make_method("window", ParkConfig())
    with pytest.raises(ValueError, match="got top_p"):
        configured_method("window", top_p=0.5)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="which is taken"):
        register(MethodEntry("park", lambda config: None, "another one"))


@pytest.mark.parametrize(
    "name",
    ["../../escaped", "a/b", "", ".hidden", "-x", "a,b", "metrics", "side_by_side", "all", "x" * 65, "é", "a\n", 5],
)
def test_a_name_that_no_file_or_option_can_have_is_refused(name):
    with pytest.raises((ValueError, TypeError), match=r"name: expected .*, got .*; "):
        register(MethodEntry(name, lambda config: None, "a line"))
    assert name not in parkattn.METHODS.data


@pytest.mark.parametrize(
    "ending", ["sys.exit(3)", "raise SystemExit", "raise RuntimeError('x')", "raise GeneratorExit", "1 / 0"]
)
def test_a_package_that_ends_the_process_at_import_is_named_and_the_others_stay(tmp_path, monkeypatch, ending):
    (tmp_path / "ends_here.py").write_text(f"import sys\n{ending}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ends_here", raising=False)
    point = EntryPoint("ends", "ends_here:ENTRY", "parkattn.methods")
    monkeypatch.setattr("parkattn.methods.entry_points", lambda group: [point])
    with pytest.warns(UserWarning, match="plug-in ends_here:ENTRY: expected a MethodEntry, got"):
        register_installed()
    if "GeneratorExit" not in ending:
        with pytest.raises(
            ValueError, match=r"method: expected module:ENTRY on the import path, got 'ends_here:ENTRY' \(.+\); "
        ):
            register_from("ends_here:ENTRY")


def test_a_budget_switches_its_rival_off():
    entry = method_entry("park")
    config = entry.with_budget(ParkConfig(), "top_k", 0.2)
    assert (config.top_p, config.top_k) == (None, 0.2)


SMALL = {"height": 64, "width": 96, "frames": 9, "steps": 4, "device": "cpu"}


def test_outside_methods_are_compared_and_summarised_like_our_own(outside, tmp_path):
    from parklab.studio.compare import compare
    from parklab.studio.request import Request

    request = Request(prompt="a red circle moves right over blue waves", changes={"tile": 32}, **SMALL)
    report = compare(request, ["dense", "tile-top-k"], tmp_path / "tiles", recall_rows=8)
    windows = Request(prompt="a red circle moves right over blue waves", changes={"reach": 1}, **SMALL)
    report_window = compare(windows, ["dense", "window"], tmp_path / "window", recall_rows=8)
    for row in (report["methods"][1], report_window["methods"][1]):
        assert 0 < row["density_sparse_steps"] < 1 and 0 < row["recall"]["mean"] <= 1
        assert row["phase_steps"]["dense"] == 1 and np.isfinite(row["psnr"]["mean"])


def test_an_outside_method_takes_part_in_an_ablation_at_equal_density(outside, tmp_path):
    from parklab.experiments.ablation import ablation_of, run_ablation

    changes = {"tile": 16, "query_clusters": 4, "key_clusters": 16}
    evaluation = ablation_of(1, methods=("park", "tile-top-k"), changes=changes, **SMALL)
    table = run_ablation(evaluation, tmp_path, budget="top_k")
    density = {line["method"]: line["density"] for line in table["lines"]}
    assert set(density) >= {"park", "tile-top-k"} and abs(density["park"] - density["tile-top-k"]) < 0.2


def test_enable_runs_a_method_by_name_or_as_an_object(outside):
    wan = tiny_pipelines.wan()
    small = {"tile": (1, 1, 1), "reach": 1}
    for method, settings in (("window", small), (make_method("window", small), {})):
        with parkattn.enable(wan, method=method, **settings):
            tiny_pipelines.run_wan(wan)
            said = parkattn.summary(wan)
        assert said.method == "window" and said.calls["refresh"] > 0 and said.density < 1


KERNELS = """
import torch, window, tile_top_k
from parkattn import CallSite
q, k, v = torch.randn(3, 1, 1, 90, 64, generator=torch.Generator().manual_seed(0)).half().unbind(0)
for module, settings in ((window, {"tile": (1, 5, 3), "reach": 0}), (tile_top_k, {"tile": 32, "top_k": 0.5})):
    entry, outs = module.ENTRY, []
    for backend in ("reference", "triton"):
        method = entry.make(entry.config(**settings, dense_steps=0, backend=backend))
        outs += [method(q, k, v, CallSite(step=step, total_steps=9, grid=(3, 5, 6))).out.float() for step in (0, 1)]
    # weights and output are rounded to 11 bits each
    assert max((out - outs[0]).abs().max().item() for out in outs) <= 4 * 2.0**-11 * v.abs().max().item(), entry.name
    print(entry.name)
"""


def test_outside_methods_run_in_the_kernels(tmp_path):
    path = f"{EXAMPLES}:{PARK.parent}"
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert run.stdout.split() == ["window", "tile-top-k"], run.stderr
