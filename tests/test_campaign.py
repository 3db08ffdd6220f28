"""Short forms of the long tests of tools/campaign.py: many videos in one process, fuzzed calls and commands, hostile files."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("diffusers")


import json
import subprocess
import sys

import torch

from fuzz_calls import fuzz_api
from fuzz_commands import fuzz_commands

pytest.importorskip("av")

import hostile_files as hostile
from parklab.experiments.campaign import CampaignStore
from parklab.experiments.record_fields import read_lines
from parklab.experiments.tables import Column, Finding, Table, to_csv
from parklab.sealed import sealed
from parklab.store import Cell, Store
from parklab.studio import video

SOURCE = Path(__file__).parents[1] / "tools" / "campaign.py"


@pytest.fixture(scope="module")
def campaign():
    found = importlib.util.spec_from_file_location("campaign", SOURCE)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_videos_of_two_profiles_in_one_process_repeat_and_hold_nothing(campaign, capsys):
    assert campaign.soak(videos=64, warm_up=20)
    assert "64 videos" in capsys.readouterr().out


def test_a_pipeline_that_keeps_plans_or_does_not_repeat_fails_the_soak(campaign, monkeypatch, capsys):
    import tiny_pipelines as tiny

    seeds = iter(range(1000))
    run = tiny.run_wan
    monkeypatch.setattr(tiny, "run_wan", lambda pipe, seed, **options: run(pipe, seed=next(seeds), **options))
    assert not campaign.soak(videos=34, warm_up=0)
    assert "2 videos that did not repeat" in capsys.readouterr().out


def test_an_unknown_part_is_refused_by_name(campaign, monkeypatch, capsys):
    monkeypatch.setattr(campaign.sys, "argv", ["campaign.py", "shop"])
    with pytest.raises(SystemExit):
        campaign.main()
    assert "expected some of store, reproduce, folders, files" in capsys.readouterr().err


def test_fuzzed_calls_succeed_or_are_refused_in_one_line():
    tally = fuzz_api(400, seed=11)
    assert not tally.raw, "\n".join(tally.raw)
    assert tally.refused > 200  # most of what is drawn is wrong


def test_fuzzed_command_lines_succeed_or_are_refused_in_one_line():
    tally = fuzz_commands(60, seed=5)
    assert not tally.raw, "\n".join(tally.raw)
    assert tally.refused > 30


# Files that a command is given: they hang nothing, fill no memory and never become a verdict ------------


LINES = [name for name in hostile.CASES if " lines: " in name or name.startswith("cells: ")]


@pytest.mark.parametrize("name", [*(name for name in hostile.CASES if name not in LINES), *LINES[::8]])
def test_a_hostile_file_is_refused_in_one_line(tmp_path, monkeypatch, name):
    """tools/campaign.py has all lines and cells of --records."""
    monkeypatch.chdir(tmp_path)
    assert hostile.fault(name, tmp_path) == ""


def test_the_campaign_holds_420_hostile_files():
    assert len(hostile.CASES) >= 420


@pytest.mark.parametrize("value", ["x", float("nan")])
def test_a_cell_of_a_received_folder_that_no_table_can_read_counts_as_absent(tmp_path, value):
    told = hostile.cell_of("quality")
    cell = Cell(name="quality-a", format=told["format"], request=told["request"])
    for psnr, there in ((told["row"]["psnr"], 1), (value, 0)):
        record = sealed({**told, "row": {**told["row"], "psnr": psnr}})
        (tmp_path / "quality-a.json").write_text(json.dumps(record))
        store = CampaignStore(tmp_path)
        assert (store.read(cell) is not None) == bool(there) and len(store.records()) == there


@pytest.mark.parametrize("name", hostile.LINES)
def test_a_whole_line_of_records_is_read_and_one_that_a_stop_cut_off_is_skipped(tmp_path, name):
    hostile.lines(tmp_path / "a.jsonl", hostile.LINES[name])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps(hostile.LINES[name])[:30])
    assert read_lines([tmp_path / "a.jsonl"]) == [hostile.LINES[name]]


@pytest.mark.parametrize("name", hostile.LINES)
def test_a_line_is_drawn_without_any_field_that_it_may_lack(tmp_path, name):
    line, words = (
        hostile.LINES[name],
        [word.replace("NAME", hostile.EXPERIMENTS.get(name, name)) for word in hostile.RECORDS],
    )
    whole = line | dict.fromkeys(hostile.optional(line), 1.0)
    for number, field in enumerate(["", *hostile.optional(line)]):
        path, settings = tmp_path / f"{number}.jsonl", ("dense", "paper", "fast") if name == "frontier" else ("",)
        lacking = {key: value for key, value in whole.items() if key != field}
        path.write_text("".join(json.dumps(lacking | ({"setting": each} if each else {})) + "\n" for each in settings))
        code, said = hostile.run(
            *(word.replace("FILE", str(path)) for word in words), "--out", str(tmp_path / str(number))
        )
        assert code == 0, (field, said)


def test_a_capture_that_is_whole_is_measured(tmp_path):
    hostile.capture(tmp_path / "a.safetensors", q=torch.randn(1, 2, 16, 4), k=torch.randn(1, 2, 16, 4))
    words = [word.replace("FILE", str(tmp_path / "a.safetensors")) for word in hostile.CAPTURE]
    assert hostile.run(*words, "--out", str(tmp_path / "out"))[0] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_no_verdict_and_no_entry_of_a_table(value):
    with pytest.raises(ValueError, match="expected a finite margin"):
        Finding("a is above b", value)
    with pytest.raises(ValueError, match="expected a finite margin"):
        Finding("a is above b", 1.0, spread=value)
    with pytest.raises(ValueError, match="expected finite numbers under 'ms'"):
        Table((Column("ms"),), ((value,),))


def test_a_text_that_a_spreadsheet_would_calculate_is_marked_as_text():
    written = to_csv(Table((Column("a"), Column("b")), (("=1+1", -1.5), ("@x", 2))))
    assert written == "a,b\n'=1+1,-1.5\n'@x,2\n"


def test_a_video_that_is_not_what_its_record_describes_is_refused_also_as_a_single_file(tmp_path):
    """A flipped bit may decode as another picture: only the record's hash tells."""
    good, path = hostile.whole_mp4(), tmp_path / "a.mp4"
    Store(tmp_path).put(Cell(name="a", format="x", files=("a.mp4",)), {"format": "x"}, {"a.mp4": good})
    hostile.put(tmp_path / "good.mp4", good)
    assert hostile.run("metrics", str(path), str(tmp_path / "good.mp4"))[0] == 0
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    code, said = hostile.run("metrics", str(path), str(tmp_path / "good.mp4"))
    assert code == 1 and "expected the file that its record describes, got another" in said


def test_a_video_larger_than_memory_should_hold_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    hostile.put(tmp_path / "a.mp4", hostile.whole_mp4())
    assert video.read_mp4(tmp_path / "a.mp4").shape == (9, 96, 128, 3)
    monkeypatch.setattr(video, "LARGEST_VIDEO", 9 * 96 * 128 * 3 - 1)
    with pytest.raises(ValueError, match="expected a whole video, got 9 frames of 128 x 96 pixels; make it again"):
        video.read_mp4(tmp_path / "a.mp4")


def test_output_in_letters_that_the_terminal_lacks_does_not_end_a_run():
    program = "from parklab import cli; cli.app = lambda **_: cli.console.print('2 \u00d7 \u732b'); cli.main()"
    ran = subprocess.run([sys.executable, "-c", program], env={"PYTHONIOENCODING": "ascii", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
                         capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 0 and ran.stdout == "2 \\xd7 \\u732b\n", ran.stderr
