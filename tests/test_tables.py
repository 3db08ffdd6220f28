"""Every table that comes from records is the one its records give, and its tool says where one is not."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parkattn.models import SIZES, ModelRow
from parklab import cli
from parklab.bench.frontier import FORMAT
from parklab.studio import gain

ROOT = Path(__file__).parents[1]


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables():
    return loaded("tables")


def test_the_page_of_support_has_every_row_and_claims_no_pipeline_of_images(monkeypatch):
    page = loaded("support_page")
    written = page.table(("model", "settings", "how far"), page.models())
    assert written in (ROOT / "docs/support.md").read_text(), "run python tools/matrix.py page"
    row = ModelRow((), "Pond")
    monkeypatch.setattr(page, "ROWS", {"Pond3DModel": row, "Pond2DModel": dataclasses.replace(row, image=True)})
    assert [how_far for _, _, how_far in page.models()] == [page.SMALL, page.ALONE, page.TRAINED[-1]]


def test_every_marked_table_is_the_one_of_its_records(tables):
    for page in tables.pages():
        text = page.read_text()
        assert tables.filled(text) == text, f"{page.name}: run python tools/tables.py"


def test_every_table_of_the_tool_stands_in_a_page(tables):
    marked = [found[2] for page in tables.pages() for found in tables.MARKED.finditer(page.read_text())]
    assert sorted(set(marked)) == sorted(tables.TABLES)


def test_no_measured_figure_stands_in_a_table_that_is_typed_in(tables):
    measured = re.compile(r"\d\.\d+ ?(dB|ms|s|GB|%|x)(?!\w)|± ?\d")
    written = {"methods.md", "profiles.md", "support.md"}  # whole pages of tools/methods_page.py and support_page.py
    for page in tables.pages():
        if page.name not in written:
            text = tables.MARKED.sub("", page.read_text())
            typed = [line for line in text.splitlines() if line.startswith("|") and measured.search(line)]
            assert not typed, f"{page.name}: make it a table of tools/tables.py"


def test_every_marker_is_closed(tables):
    for page in tables.pages():
        text = page.read_text()
        whole = len(tables.MARKED.findall(text))
        assert text.count("<!-- table: ") == text.count("<!-- /table -->") == whole, page.name


def test_a_figure_that_differs_from_its_record_is_noticed_and_written_anew(tables, tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    text = (ROOT / "docs/measured/calls.md").read_text()
    page.write_text(re.sub(r"(?<=<!-- table: cpu -->\n)(.*\n.*\n\| )\d", r"\g<1>9", text))
    assert page.read_text() != text
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for words, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr(sys, "argv", ["tables.py", *words])
        with pytest.raises(SystemExit) as ended:
            tables.main()
        assert ended.value.code == code
    assert page.read_text() == text
    assert "README.md: its tables are not those of the records" in capsys.readouterr().out


def test_a_record_that_changes_changes_its_table(tables, tmp_path, monkeypatch):
    before = tables.cpu()
    lines = (ROOT / "benchmarks/results/cpu.jsonl").read_text()
    (tmp_path / "cpu.jsonl").write_text(re.sub(r'"dense_ms": [\d.]+', '"dense_ms": 1.5', lines))
    monkeypatch.setattr(sys.modules["records"], "RESULTS", tmp_path)
    assert tables.cpu() != before and tables.cpu().count("| 1.5 |") == 3


def _lines(rows):
    """Lines of the frontier: (setting, steps, guidance, PSNR of two videos, share of forwards, cost)."""
    size, phases = {"frames": 81, "height": 400, "width": 576}, {"dense": [0], "anchor": [1], "forecast": [3]}
    return "".join(
        json.dumps({
            "format": FORMAT, "key": f"{row} {prompt}", "prompt": prompt, "seed": 0, "setting": row[0], "steps": row[1], "guidance": row[2],
            "psnr": psnr, "share_computed": row[4], "cost": row[5], "steps_by_phase": phases, **size,
        }) + "\n"
        for row in rows
        for prompt, psnr in zip("ab", row[3], strict=True)
    )  # fmt: skip


def _cells(table):
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_tables_of_runs_compare_each_row_with_the_same_profile_on_the_same_videos(tables, tmp_path, monkeypatch):
    run_tables = sys.modules["run_tables"]
    monkeypatch.setattr(run_tables, "RESULTS", tmp_path)
    names = ("forecast_profiles", "forecast_caches", "int8_videos", "few_steps", "run_seconds")
    assert {tables.TABLES[name]() for name in names} == {run_tables.NOT_RUN}
    lines = [
        ("fast", 50, 5.0, (30.0, 40.0), 1.0, 0.2),
        ("fast tolerance=0.006", 50, 5.0, (29.0, 42.0), 0.5, 0.15),
        ("fast precision=int8", 50, 5.0, (29.5, 39.5), 1.0, 0.2),
        ("quality tolerance=0.004", 50, 5.0, (50.0, 50.0), 0.6, 0.3),  # nothing to compare it with
        ("dense tolerance=0.004", 50, 5.0, (60.0, 60.0), 0.6, 0.6),
    ]
    (tmp_path / "run_75600.jsonl").write_text(_lines(lines))
    few = [("paper", 4, 1.0, (40.0, 42.0), 1.0, 0.49), ("turbo", 4, 1.0, (45.0, 48.0), 1.0, 0.37)]
    (tmp_path / "few_steps.jsonl").write_text(_lines(few))
    row = "75,600 | 50 | 5 | `fast tolerance=0.006` | 2 | 0.50 (0.50) | 35.5 | -0.50 ± 19.06 | +1.00 | 30.0, 29.0"
    assert _cells(run_tables.forecast_profiles()) == [row.split(" | ")]
    assert _cells(run_tables.int8_videos()) == [["75,600", "5", "fast", "2", "34.5", "+0.50 ± 0.00", "+0.50"]]
    (turbo, paper) = _cells(run_tables.few_steps())
    assert turbo[:4] == ["4", "`turbo`", "2", "37.0%"] and turbo[-1].startswith("+5.5 ±") and paper[-1] == ""
    seconds = [row for row in _cells(run_tables.run_seconds()) if row[2].startswith("`fast tolerance=0.006`")]
    # float8 linears were timed in one model, INT8 in two, and no model has videos without guidance here
    kinds = {row[2].removeprefix("`fast tolerance=0.006`") for row in seconds if row[0] == "Wan2.1-14B"}
    assert kinds == {"", ", float8 linears", ", INT8 attention", ", INT8 attention, float8 linears"}
    assert [row[2] for row in seconds if row[0] == "Wan2.1-1.3B"] == [
        f"`fast tolerance=0.006`{kind}" for kind in ("", ", INT8 attention")
    ]
    assert all(bool(row[3]) == row[2].endswith("`") for row in seconds), "videos were made in one way alone"
    own = gain.measured_forwards()["models"]["wan2.1-1.3b"]
    plain, rounded = seconds[-2:]
    taken = 2 * gain.seconds_of_phases(own["profiles"]["fast"]["seconds"], {"dense": 1, "anchor": 1}, 2)
    assert plain[5] == f"{taken:,.0f} s" and plain[6] == f"{100 * own['dense']['stock'] / taken:.2f}x"
    int8 = own["int8"]["fast"]
    taken = 2 * int8["seconds"]["dense"] + int8["seconds"]["anchor_cold"] + int8["seconds"]["anchor_second"]
    assert rounded[5] == f"{taken:,.0f} s" and rounded[6] == f"{100 * int8['dense']['stock'] / taken:.2f}x"


def test_relatives_stand_beside_the_rivals_once_they_were_run(tables, monkeypatch):
    quality_tables = sys.modules["quality_tables"]
    before, cells = _cells(tables.TABLES["profiles_above_methods"]()), quality_tables._all_cells

    def with_relatives(folder):
        """As if mc-sparse had been run where svg2 was, with its results."""
        found = cells(folder)
        made = [cell for cell in found if cell["request"]["method"] == "svg2" and folder == "gpu_7168"]
        return [*found, *({**cell, "request": {**cell["request"], "method": "mc-sparse"}} for cell in made)]

    costs = quality_tables._costs("gpu_7168", guidances=(1.0,), densities=quality_tables.COST_DENSITIES)
    monkeypatch.setattr(quality_tables, "_all_cells", with_relatives)
    head = tables.TABLES["profiles_above_methods"]().splitlines()[0]
    after = _cells(tables.TABLES["profiles_above_methods"]())
    assert head.endswith("| above sol | above mc-sparse |") and [row[:-1] for row in after] == before
    rivals = 4 + quality_tables.RIVALS.index("svg2")
    assert [row[-1] for row in after] == [row[rivals] if row[0] == "7,168" else "" for row in before]
    # its cells are not among those of matched_costs: the column is empty, and nothing else changes
    beside = quality_tables._costs("gpu_7168", guidances=(1.0,), densities=quality_tables.COST_DENSITIES)
    assert beside.splitlines()[0].endswith("| above mc-sparse, dB |")
    assert [row[:-1] for row in _cells(beside)] == _cells(costs)


def test_the_forwards_in_the_package_are_those_of_the_records(tables):
    assert json.loads(tables.PACKAGED.read_text()) == tables.forwards(), "run python tools/tables.py"


def test_a_composed_run_is_the_one_that_its_record_composed(tables):
    fast = {row["model"]: row["runs"]["fast"]["park_s"] for row in tables.last_profiles()}
    bits = {
        row["model"]: row["runs"] for row in tables.lines("e2e_bits.jsonl", "e2e bits") if row["precision"] == "bf16"
    }
    fast |= {model: runs["fast"]["park_s"] for model, runs in bits.items()}
    paper = {row["model"]: row["run"]["park_s"] for row in tables.whole_models_recorded() if not row["compiled"]}
    for model, own in tables.forwards()["models"].items():
        run = gain.composed_run(own, own.get("model", model), steps=50, forwards_per_step=1)["profiles"]
        assert run["fast"]["seconds"] == pytest.approx(fast[model])
        assert model not in paper or run["paper"]["seconds"] == pytest.approx(paper[model])
        assert model not in bits or run["quality"]["seconds"] == pytest.approx(bits[model]["quality"]["park_s"])


def test_doctor_and_the_table_of_gains_agree_in_every_row():
    readme, index = (
        (ROOT / page).read_text().partition("<!-- table: gains -->\n")[2] for page in ("README.md", "docs/index.md")
    )
    rows = readme.partition("<!-- /table -->")[0]
    assert index.startswith(rows)
    models = {"Wan2.1-1.3B": "wan2.1-1.3b", "Wan2.1-14B": "wan2.1-14b", "HunyuanVideo": "hunyuanvideo"}
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()[2:]]
    assert {row[1].partition(" ")[0] for row in found} == {"4", "50"}
    for row in found:
        name, frames, height = row[0].split(", ")
        steps, each = map(int, row[1].split(" x "))
        command = [
            "doctor", "--json", "--gpu", "H200", "--model", models[name], "--frames", frames.split()[0], "--steps",
            str(steps), *(["--height", "480", "--width", "832"] if height == "480p" else []),
        ]  # fmt: skip
        told = json.loads(CliRunner().invoke(cli.app, [*command, "--guidance", str(5 if each == 2 else 1)]).stdout)[
            "estimate"
        ]
        assert (told["source"], told["forwards_per_step"]) == ("measured", each)
        assert row[2:5] == [f"{seconds:,.0f} s" for seconds in told["dense_s"].values()]
        for cell, park in zip(row[5:], told["profiles"].values(), strict=True):
            gains = f"{park['speedup']['compiled']:.2f}x ({park['speedup']['own kernel']:.2f}x)"
            assert cell == f"{park['seconds']:,.0f} s, {gains}" + ", estimated" * park["estimated"]


def test_doctor_and_the_table_of_runs_agree_with_forecasts_and_without():
    page = (ROOT / "docs/measured/runs.md").read_text().partition("<!-- table: run_seconds -->\n")[2]
    models = {"Wan2.1-1.3B": "wan2.1-1.3b", "Wan2.1-14B": "wan2.1-14b", "HunyuanVideo": "hunyuanvideo"}
    seen = 0
    for line in page.partition("<!-- /table -->")[0].splitlines()[2:]:
        name, tokens, run, _, _, seconds, stock, compiled, source = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        if tokens != "75,600" or "float8" in run:
            continue
        setting, _, kind = run.partition("`, ")
        profile, *fields = setting.strip("`").split()
        asked = dict(field.split("=") for field in fields) | ({"precision": "int8"} if kind == "INT8 attention" else {})
        command = ["doctor", "--json", "--gpu", "H200", "--model", models[name], "--profile", profile]
        command += ["--frames", str(SIZES[models[name]].video[0])]
        command += [word for field, value in asked.items() for word in (f"--{field}", value)]
        told = json.loads(CliRunner().invoke(cli.app, command).stdout)["estimate"]["profiles"]
        park = told[profile]
        assert list(told) == [profile] and park["no_forecasts"] is None and park["no_precision"] is None
        assert seconds == f"{park['seconds']:,.0f} s" and (source == "estimated") is park["estimated"]
        assert (stock, compiled) == tuple(f"{park['speedup'][way]:.2f}x" for way in ("stock", "compiled"))
        seen += 1
    assert seen == 29


def test_ranks_of_a_simulated_layer_are_as_even_as_its_heads_allow(tables):
    """Six heads of one density and six of three times as much, as they were or changed places in the second plan."""
    import head_balance

    def records(*plans):
        density = [[[value] * 3 for value in plan] for plan in plans]
        made = [{"step": step, "steps": 1, "density": layers} for step, layers in enumerate(density)]
        return [{"profile": "fast", "plans": made}]

    light, heavy = [0.2, 0.2, 0.6, 0.6], [0.6, 0.6, 0.2, 0.2]
    kept, swapped = (
        head_balance.evenness(records(light, later), "fast", "all layers", 12, 2) for later in (light, heavy)
    )
    assert kept.reuse == kept.refresh == 1 < kept.plain < kept.worst_plain <= 1.5
    assert swapped.reuse == 1 and swapped.refresh == 1  # places of equal numbers of both stay even
    even = head_balance.evenness(records([0.5] * 4, [0.3] * 4), "fast", "one layer", 3, 3)
    assert set(even) == {1}


def test_an_unknown_table_is_refused(tables):
    with pytest.raises(ValueError, match="got 'cpuu'; correct the marker"):
        tables.filled("<!-- table: cpuu -->\n<!-- /table -->")


def test_quality_is_shown_at_the_guidance_that_users_run(tables):
    rows = re.findall(r"^\| (\w+)[\w, ]* \| (\d+) \|", tables.profiles(), re.MULTILINE)
    for name in ("paper", "quality", "fast"):
        assert {guidance for found, guidance in rows if found == name} >= {"1", "5"}


def test_the_losses_of_forecasts_in_the_readme_are_those_of_the_table():
    cells = [
        row.strip("| ").split(" | ")
        for row in (ROOT / "docs/forecast.md").read_text().splitlines()
        if row.startswith("| 75,600")
    ]
    lost = {(row[2], row[3]): (float(row[7].split()[0]), float(row[8])) for row in cells if row[1] == "50"}
    fast = [lost[guidance, "`fast tolerance=0.006`"] for guidance in ("1", "5")]
    assert all(mean <= 0 for mean, _ in fast)
    alone, guided = (lost[guidance, "`quality tolerance=0.003`"] for guidance in ("1", "5"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"and up to {max(worst for _, worst in fast):.1f} dB in one video" in readme
    assert (
        f"loses {guided[0]:.1f} dB on the mean with guidance, and without it {alone[0]:.1f} dB and up to {alone[1]:.1f} dB in one video"
        in readme
    )
