"""The command line as a user meets it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import parkattn
from parklab import cli
from parklab.bench import cpu

PARK = [sys.executable, "-c", "from parklab.cli import main; main()"]


@pytest.fixture
def park(monkeypatch, capsys):
    """The command as a user types it, in this process: a fresh one imports torch for two seconds."""

    def run(*words: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["park", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=shown.out, stderr=shown.err)

    return run


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # numpy's, of matplotlib's way with tensors
def test_the_scene_is_written_as_a_picture_and_a_record(park, tmp_path):
    done = park("scene", "--out", str(tmp_path / "scene"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "scene" / "result.json").read_text())
    rows = {row["method"]: row for row in record["results"]}
    assert (tmp_path / "scene" / "scene.png").read_bytes().startswith(b"\x89PNG")
    assert record["environment"]["torch"] and record["config"]["top_p"] == 0.9
    # at a fixed budget each half of PARK adds recall on this scene
    for budget in ("0.15", "0.2"):
        at = {name: row["recall_at_budget"][budget] for name, row in rows.items() if name != "dense"}
        assert (
            at["park"] > max(at["park-no-pama"], at["park-no-qrkc"])
            and min(at["park-no-pama"], at["park-no-qrkc"]) > at["centroid"]
        )


def test_an_unwritable_folder_is_one_line_and_exit_code_2(park, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    failed = park("scene", "--out", str(blocker / "scene"))
    assert failed.returncode == 2
    assert failed.stderr.startswith("park: ") and "Traceback" not in failed.stderr


def test_presets_are_printed_by_their_differences_and_whole_as_json(park):
    presets = json.loads(park("presets", "--json").stdout)
    assert presets["hunyuanvideo"]["key_clusters"] == 1024 and presets["wan2.1-14b"]["key_clusters"] == 512
    text = park("presets").stdout
    assert (
        len(text.splitlines()) <= 40 and "key_clusters=1024" in text and "anchors=12" in text and "alpha=" not in text
    )


def test_version_is_the_packages_in_a_process_of_its_own():
    done = subprocess.run(
        [*PARK, "--version"], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, parkattn.__version__, "")


def test_an_error_in_a_process_of_its_own_is_one_line():
    failed = subprocess.run(
        [*PARK, "genrate"], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert failed.returncode == 2 and failed.stderr.startswith("park: ") and failed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["genrate", "x"], "got 'genrate'; did you mean generate?"),
        (
            ["generate", "--sead", "1"],
            "--sead: expected an option of park generate, got none of them; did you mean --seed?",
        ),
        (["generate", "x", "--seed", "y"], "--seed: expected a value as its help says, got another ("),
        (["bench", "cpuu"], "got 'cpuu'; did you mean cpu?"),
        (["generate", "a", "b"], "park generate: expected its arguments as its help says, got another ("),
    ],
)
def test_a_command_line_that_does_not_parse_is_one_line_with_the_nearest_name(park, words, said):
    failed = park(*words)
    assert failed.returncode == 2
    assert failed.stderr.startswith("park: ") and failed.stderr.count("\n") == 1 and said in failed.stderr


@pytest.mark.parametrize("command", [[], ["bench"], ["demo", "--help"]])
def test_help_is_shown_without_a_traceback(park, command):
    shown = park(*command)
    assert "Usage" in shown.stdout + shown.stderr and "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["compare"], ["doctor"], ["bench"], ["bench", "e2e"], ["reproduce"]]
)
def test_help_shows_a_flag_by_its_name_alone(park, command):
    text = park(*command, "--help").stdout
    assert "--help" in text and "bool" not in text.lower()


def test_benchmark_appends_records_with_their_environment(park, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "GRID", (4, 16, 16))
    path = tmp_path / "results" / "cpu.jsonl"
    done = park("bench", "cpu", "--repeats", "1", "--threads", "1", "--record", str(path))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["asked_density"] for record in records] == [0.5, 0.25, 0.1]
    assert all(record["environment"]["cpu"] and record["dense_ms"] > 0 for record in records)


def test_help_and_version_import_no_torch():
    code = "import sys; sys.modules['torch'] = None; from parklab.cli import main; main()"
    for word in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_a_benchmark_says_what_it_is_doing(monkeypatch):
    monkeypatch.setattr(cpu, "GRID", (4, 16, 16))
    said = []
    list(cpu.measure_cpu(densities=(0.5,), repeats=1, threads=1, advance=said.append))
    assert said[0] == "correctness gate" and len(said) == cpu.rounds(1, 1)
