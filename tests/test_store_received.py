"""Folders that came from others, disks that fail halfway, requests that look alike: results stay inside, whole and
one's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("av")

import campaign_store as campaign
import disturbed_files as disturb
from parkattn.methods import method_entry
from parklab import files, record
from parklab.baselines.density_profile import DensityProfile
from parklab.experiments import reproduce
from parklab.store import Cell, CellWriter, Store, read_record, sealed
from parklab.studio import checkpoints, generate
from parklab.studio.request import Request

REQUEST = Request(prompt=disturb.SENTENCES[0])


@pytest.fixture
def quiet():
    with disturb.without_a_model() as made:
        yield made


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    return disturb.Trial(disturb.run_store, tmp_path_factory.mktemp("trial"))


@contextlib.contextmanager
def files_of_at_most(size: int):
    """What a larger file gets is a short write, then an error."""
    before, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, action)


def make(making: CellWriter) -> None:
    for name in making.cell.files:
        making.write(name, name.encode())
    making.commit({"format": "test", "request": making.cell.request})


@pytest.mark.parametrize("what", campaign.RECEIVED)
@pytest.mark.parametrize("whose", ["a", "nobody's"])
def test_what_came_with_a_folder_neither_reaches_outside_nor_hangs_a_run(trial, what, whose):
    plant, may_refuse = campaign.RECEIVED[what]
    mark = files.mark_of(f"cell {whose}")
    found = campaign.receive(trial, what, plant, mark, may_refuse and (whose == "a" or "results" in what))
    assert found.clean, found


@pytest.mark.parametrize("what", [name for name, (_, refuses) in campaign.RECEIVED.items() if refuses])
def test_what_is_in_the_way_is_named_before_the_work(tmp_path, what):
    place, outside = tmp_path / "out", tmp_path / "outside"
    for folder in (place, outside):
        folder.mkdir()
    campaign.RECEIVED[what][0](place, outside, files.mark_of("cell a"))
    cell = Cell(name="a", format="test", files=("raw/a.bin",))
    with pytest.raises(
        (OSError, ValueError), match=r"^out: expected .*(\.park-|raw).*; (have it removed|remove it), or choose"
    ):
        Store(place).fill([cell], lambda making: pytest.fail("made in vain"))


def test_a_journal_of_others_moves_no_file_over_one_that_the_store_did_not_write(tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    campaign._journal({"thesis.txt": campaign.SHA256})(tmp_path, tmp_path / "outside", files.mark_of("cell x"))
    Store(tmp_path).tidy()
    assert "years" in [path.read_text() for path in tmp_path.glob("thesis*")]


def test_a_folder_of_cells_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"out: expected a folder, got the link .*rows; remove it"):
        Store(tmp_path / "out", below="rows")


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/../../escaped", ""])
def test_a_cell_whose_name_leads_outside_is_refused_before_the_work(tmp_path, name):
    with pytest.raises(ValueError, match="out: expected a place inside"):
        Store(tmp_path / "out").fill([Cell(name="a", format="test", files=(name,))], lambda making: pytest.fail("made"))


@pytest.mark.parametrize(("one", "other"), [*campaign.ALIKE, *(pair[::-1] for pair in campaign.ALIKE)], ids=str)
def test_requests_that_differ_in_null_absent_or_type_alone_are_two(tmp_path, one, other):
    Store(tmp_path).fill([Cell(name="a", format="test", request=one)], make)
    assert Store(tmp_path).find(Cell(name="a", format="test", request=one)) is not None
    with pytest.raises(ValueError, match=r"made with other settings \(.+\); pass --overwrite"):
        Store(tmp_path).find(Cell(name="a", format="test", request=other))


def test_a_setting_of_null_is_not_the_video_of_the_default(tmp_path, quiet):
    generate.generate_video(REQUEST, tmp_path / "a.mp4")
    with pytest.raises(ValueError, match=r"changes.anchors = not set, asked null"):
        generate.generate_video(dataclasses.replace(REQUEST, changes={"anchors": None}), tmp_path / "a.mp4")


def test_a_record_without_hashes_is_no_record(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps(sealed({"format": "test", "request": {}, "files": {"absent.bin": None}}))
    )
    assert read_record(tmp_path / "a.json") is None


def profiles(tmp_path: Path) -> Request:
    DensityProfile(torch.full((1, 1, 1), 0.5).double()).save(tmp_path / "p.safetensors")
    return dataclasses.replace(REQUEST, method="svoo", changes={"density_profile": str(tmp_path / "p.safetensors")})


def test_the_content_of_a_file_that_a_setting_names_is_part_of_the_request(tmp_path, quiet):
    asked = profiles(tmp_path)
    record, made = generate.generate_video(asked, tmp_path / "out/a.mp4")
    assert made and not generate.generate_video(asked, tmp_path / "out/a.mp4")[1]
    assert "file_hashes" in record["request"] and "file-hashes" not in record["command"]
    DensityProfile(torch.full((1, 1, 1), 0.9).double()).save(tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match=r"file_hashes.density_profile = .*, asked .*; pass --overwrite"):
        generate.generate_video(asked, tmp_path / "out/a.mp4")


def test_cells_of_another_file_under_the_same_name_are_other_cells(tmp_path, quiet):
    def names() -> set[str]:
        settings = {"quick": True, "device": "cpu", "changes": asked.changes}
        evaluation = reproduce.evaluation_for(model="tiny", prompts=1, prompt_file=None, **settings)
        lab = reproduce.Lab(evaluation, tmp_path / "out")
        request = lab.requests()[0]
        quality = lab.quality_cell(request, "svoo", density=0.5)
        return {
            cell.name
            for cell in (quality, lab._budget_cell(quality), lab.frames_cell(request, "svoo"), lab.times_cell("svoo"))
        }

    asked = profiles(tmp_path)
    before = names()
    assert names() == before
    DensityProfile(torch.full((1, 1, 1), 0.9).double()).save(tmp_path / "p.safetensors")
    assert not names() & before


def test_a_file_or_model_that_is_exchanged_during_a_run_is_refused_and_nothing_is_kept(tmp_path, quiet, monkeypatch):
    marks = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr(checkpoints, "fingerprint", lambda folder: next(marks))
    with pytest.raises(
        ValueError, match=r"model: expected .* as it was when the run began, got other files; run again"
    ):
        generate.generate_video(REQUEST, tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())


def test_a_profile_that_is_exchanged_before_it_is_read_is_refused(tmp_path):
    asked = profiles(tmp_path)
    asked = dataclasses.replace(asked, steps=1, file_hashes={"density_profile": "0" * 16})
    config = method_entry("svoo").config(**asked.changes)
    with pytest.raises(
        ValueError, match="density_profile: expected the file as it was when the run began, got other bytes"
    ):
        generate.generate_frames(object(), asked, config)


def test_a_density_profile_that_is_a_fifo_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "p.safetensors")
    with pytest.raises(
        ValueError, match=r"expected a file written by DensityProfile.save, got .* \(no ordinary file\)"
    ):
        DensityProfile.load(tmp_path / "p.safetensors")


@pytest.mark.parametrize("name", disturb.COMMANDS)
def test_locks_are_open_for_writing_as_nfs_wants_them_and_a_file_system_may_have_none(tmp_path, quiet, name):
    found = campaign.over_network(disturb.Trial(disturb.COMMANDS[name], tmp_path))
    assert found.clean, found


def test_a_lock_that_another_machine_holds_over_smb_is_waited_for(tmp_path, monkeypatch):
    real, said = files.fcntl.flock, []

    def over_smb(handle, operation):
        if operation & files.fcntl.LOCK_NB:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(handle, operation)

    monkeypatch.setattr(files.fcntl, "flock", over_smb)
    with files.locked(tmp_path, "0" * 16, wait=False) as state:
        assert state == files.BUSY
    with files.locked(tmp_path, "0" * 16, waiting=lambda: said.append("waits")) as state:
        assert state == files.HELD and said == ["waits"]


def test_a_lock_of_another_user_is_locked_for_reading_or_named(tmp_path, monkeypatch):
    path, opened = tmp_path / f".park-{'0' * 16}.lock", os.open
    path.touch()

    def refuse(flags: set[int]):
        def open_as_another(path, asked, *mode):
            if asked & os.O_ACCMODE in flags:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return opened(path, asked, *mode)

        monkeypatch.setattr(files.os, "open", open_as_another)

    refuse({os.O_RDWR})
    with files.locked(tmp_path, "0" * 16) as state:
        assert state == files.HELD
    path.touch()
    with (
        disturb.disturbed(how=disturb.NFS) as nfs,
        pytest.raises(OSError, match="got one of another user; have it removed"),
    ):
        nfs.open = os.open  # refuses writing, as above
        files.locked(tmp_path, "0" * 16).__enter__()
    assert path.exists(), "a lock that is not ours stays"
    refuse({os.O_RDWR, os.O_RDONLY})
    with pytest.raises(
        OSError, match=re.escape(f"out: expected a lock at {path}, got one of another user; have it removed")
    ):
        files.locked(tmp_path, "0" * 16).__enter__()


def test_a_lock_of_ours_can_be_locked_by_every_user_whatever_the_umask(tmp_path):
    path, mask = tmp_path / f".park-{'0' * 16}.lock", os.umask(0o077)
    try:
        with files.locked(tmp_path, "0" * 16):
            assert path.stat().st_mode & 0o444 == 0o444
        private = tmp_path / "private"
        private.touch()
        path.hardlink_to(private)
        with files.locked(tmp_path, "0" * 16):
            assert private.stat().st_mode & 0o077 == 0, "a file that came under the name of a lock stays private"
    finally:
        os.umask(mask)


@pytest.mark.parametrize("name", ["capture", "profile"])
def test_captures_and_profiles_get_the_modes_of_the_umask_and_leave_nothing_on_a_full_disk(tmp_path, quiet, name):
    with files_of_at_most(100), pytest.raises(OSError, match=r"out: expected room for .*, got a full disk or quota"):
        disturb.COMMANDS[name](tmp_path, 0)
    assert not list(tmp_path.iterdir())
    before = os.umask(0o027)
    try:
        disturb.COMMANDS[name](tmp_path, 0)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize("name", ["capture", "profile"])
def test_captures_and_profiles_set_foreign_files_aside_and_say_so(tmp_path, quiet, name):
    stem, said = {"capture": "c", "profile": "d"}[name], []
    (tmp_path / f"{stem}.safetensors").write_text("my own")
    disturb.COMMANDS[name](tmp_path, 0, say=said.append)
    assert (tmp_path / f"{stem}.aside-1.safetensors").read_text() == "my own"
    assert any(f"kept as {stem}.aside-1.safetensors" in line for line in said)


def test_a_profile_that_was_finished_is_found_again(tmp_path, quiet):
    disturb.run_profile(tmp_path, 0)
    quiet.clear()
    said = []
    disturb.run_profile(tmp_path, 0, say=said.append)
    assert not quiet and "is done already, with these settings" in said[0]


def test_tables_of_an_earlier_report_are_replaced_and_do_not_pile_up(tmp_path):
    said = []
    for seed, names in enumerate((("a", "b"), ("b",), ("a",), ("a", "b"))):
        contents = {f"tables/{name}.csv": f"{name} {seed}".encode() for name in names}
        Store(tmp_path, said.append).put(
            Cell(name="report", format="test", files=tuple(contents)), {"format": "test"}, contents
        )
    assert not said and sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["a.csv", "b.csv"]


def test_lines_that_do_not_all_fit_are_appended_not_at_all(tmp_path):
    path = tmp_path / "results.jsonl"
    record.append_records(path, [{"number": 0}])
    with (
        files_of_at_most(8192),
        pytest.raises(OSError, match=r"out: expected room for .*results\.jsonl, got a full disk"),
    ):
        record.append_records(path, [{"number": number, "text": "x" * 500} for number in range(30)])
    assert path.read_text() == '{"number": 0}\n'
    record.append_records(path, [{"number": 1}])
    assert path.read_text() == '{"number": 0}\n{"number": 1}\n'


def test_lines_that_ctrl_c_cuts_off_are_appended_not_at_all(tmp_path, monkeypatch):
    path, write, calls = tmp_path / "results.jsonl", os.write, []
    record.append_records(path, [{"number": 0}])

    def cut(handle, data):
        calls.append(data)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(handle, bytes(data)[:20])

    monkeypatch.setattr(files.os, "write", cut)
    with pytest.raises(KeyboardInterrupt):
        record.append_records(path, [{"number": number} for number in range(1, 9)])
    assert path.read_text() == '{"number": 0}\n'


def test_lines_are_not_appended_to_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "results.jsonl")
    with pytest.raises(OSError, match=r"out: expected an ordinary file at .*results\.jsonl, got none"):
        record.append_records(tmp_path / "results.jsonl", [{}])


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a link to a FIFO"])
def test_no_file_is_put_in_the_place_of_what_is_none(tmp_path, kind):
    path, mode = tmp_path / "a.json", (tmp_path / "a.json").lstat
    {
        "a FIFO": lambda: os.mkfifo(path), "a folder": path.mkdir,
        "a link to a FIFO": lambda: (os.mkfifo(tmp_path / "fifo"), path.symlink_to("fifo")),
    }[kind]()  # fmt: skip
    before = mode().st_mode
    for write in (lambda: files.write_atomically(path, b"x"), lambda: files.expect_place(path)):
        with pytest.raises(
            OSError, match=r"^out: expected an ordinary file at [^\n]*, got another; choose another place\.$"
        ):
            write()
    assert mode().st_mode == before
