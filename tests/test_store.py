"""One store for results: finished or absent, never mixed, whatever stops it, fills its disk or shares its folder."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("av")

import disturbed_files as disturb
from parklab import files, record
from parklab.store import Cell, CellWriter, Store, content_hash, read_record, sealed

ROOT = Path(__file__).parents[1]


@pytest.fixture
def quiet():
    """The video commands without a model; what was made."""
    with disturb.without_a_model() as made:
        yield made


def cell(name: str = "a", seed: int = 0, **options) -> Cell:
    return Cell(name=name, format="test", request={"seed": seed}, **({"files": (f"{name}.bin",)} | options))


def make(making: CellWriter) -> None:
    for name in making.cell.files:
        making.write(name, f"{name} {making.cell.request}".encode())
    making.commit({"format": "test", "request": making.cell.request})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("how", [disturb.STOP, disturb.POWER_CUT, disturb.DISORDER, disturb.FULL_DISK])
def test_a_stop_before_any_file_operation_leaves_every_cell_finished_or_absent(tmp_path, how):
    trial = disturb.Trial(disturb.run_store, tmp_path)
    assert trial.count > 50 and trial.count_overwrite > 50
    found = sum((trial.fresh(at, how) for at in range(trial.count)), disturb.Tally())
    assert found.clean, found
    found = sum((trial.overwriting(at, how) for at in range(trial.count_overwrite)), disturb.Tally())
    assert found.clean, found


@pytest.mark.parametrize("name", disturb.COMMANDS)
def test_a_command_that_was_cut_off_goes_on_to_the_bytes_of_an_undisturbed_run(tmp_path, quiet, name):
    trial, found = disturb.Trial(disturb.COMMANDS[name], tmp_path), disturb.Tally()
    # a prime distance meets every kind of operation; tests/campaign_store.py takes all of them
    for number, at in enumerate(range(2, trial.count, 11)):
        found += trial.fresh(at, (disturb.STOP, disturb.POWER_CUT, disturb.FULL_DISK)[number % 3])
    for number, at in enumerate(range(5, trial.count_overwrite, 11)):
        found += trial.overwriting(at, (disturb.STOP, disturb.POWER_CUT, disturb.FULL_DISK)[number % 3])
    assert found.clean, found


def test_a_killed_process_is_completed_by_the_next(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "tests/campaign_store.py"),
        "--part",
        "sigkill",
        "--every",
        "5",
        "--only",
        "store",
    ]
    quietly = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=quietly, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"SIGKILL\s+store\s+\d\d+ runs: 0 lost, 0 mixed, 0 refused", done.stdout), done.stdout


def test_two_processes_on_one_folder_share_the_cells_and_make_none_twice(tmp_path):
    cells, made, meet = [cell(f"c{i}") for i in range(6)], [], threading.Barrier(2)

    def work(name: str) -> None:
        def slowly(making: CellWriter) -> None:
            if name not in [worker for _, worker in made]:
                meet.wait(timeout=60)  # both are at work at the same time
            made.append((making.cell.name, name))
            make(making)

        Store(tmp_path).fill(cells, slowly)

    workers = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert sorted(name for name, _ in made) == [c.name for c in cells]
    assert {worker for _, worker in made} == {"one", "two"}
    assert all(Store(tmp_path).find(c) is not None for c in cells)
    assert names(tmp_path) == sorted(f"c{i}{ending}" for i in range(6) for ending in (".bin", ".json"))


def test_a_cell_that_another_process_is_making_is_waited_for_and_kept(tmp_path):
    said, kept = [], []
    begun, go_on = threading.Event(), threading.Event()

    def slowly(making: CellWriter) -> None:
        begun.set()
        go_on.wait(timeout=60)
        make(making)

    other = threading.Thread(target=lambda: Store(tmp_path).fill([cell()], slowly))
    other.start()
    begun.wait(timeout=60)

    def say(line: str) -> None:
        said.append(line)
        go_on.set()

    Store(tmp_path, say).fill([cell()], lambda making: pytest.fail("made twice"), kept=lambda c: kept.append(c.name))
    other.join(timeout=60)
    assert kept == ["a"] and "another process is making it; waiting" in said[0]


def test_a_lock_that_was_waited_for_is_held_although_its_file_was_removed(tmp_path):
    waiting, seen = threading.Event(), []

    def wait() -> None:
        with (
            files.locked(tmp_path, "0" * 16, waiting=waiting.set),
            files.locked(tmp_path, "0" * 16, wait=False) as state,
        ):
            seen.append(state)

    other = threading.Thread(target=wait)
    with files.locked(tmp_path, "0" * 16):
        other.start()
        waiting.wait(timeout=60)
    other.join(timeout=60)
    assert seen == [files.BUSY] and not names(tmp_path)


def test_overwriting_in_two_processes_makes_a_cell_again_once(tmp_path):
    Store(tmp_path).fill([cell()], make)
    before = read_record(tmp_path / "a.json")

    def again(making: CellWriter) -> None:
        making.write("a.bin", b"again")
        making.commit({"format": "test", "request": making.cell.request})

    store = Store(tmp_path)
    look, done = store.look, []

    def look_and_let_another_in(asked: Cell):
        found = look(asked)
        if not done:
            done.append(Store(tmp_path).fill([cell()], again, overwrite=True))
        return found

    store.look = look_and_let_another_in
    records = store.fill([cell()], lambda making: pytest.fail("made twice"), overwrite=True)
    assert records["a"] == done[0]["a"] != before


def test_cells_of_one_group_are_made_under_one_lock(tmp_path):
    seen = []

    def busy(making: CellWriter) -> None:
        with files.locked(tmp_path, cell("b", group="g").mark, wait=False) as state:
            seen.append(state)
        make(making)

    Store(tmp_path).fill([cell("a", group="g"), cell("b", group="g")], busy)
    assert seen == [files.BUSY] * 2


def test_temporary_files_of_killed_runs_go_and_those_of_living_ones_stay(tmp_path):
    dead, living = cell("dead").mark, cell("living").mark
    for mark in (dead, living):
        files.temporary_path(tmp_path, mark).write_bytes(b"piece")
    (tmp_path / ".park-notes.tmp").write_bytes(b"no name of ours")
    said = []
    with files.locked(tmp_path, living):
        Store(tmp_path, said.append).tidy()
        assert [name for name in names(tmp_path) if dead in name] == []
        assert len([name for name in names(tmp_path) if living in name]) == 2  # the file and the lock
    assert said == [f"{tmp_path}: removed 1 temporary file of a stopped run"]
    Store(tmp_path).tidy()
    assert names(tmp_path) == [".park-notes.tmp"]


def test_another_request_under_the_same_name_is_refused_before_any_work(tmp_path):
    Store(tmp_path).fill([cell("b")], make)
    with pytest.raises(ValueError, match=r"b.bin made with other settings \(seed = 0, asked 1\); pass --overwrite, or"):
        Store(tmp_path).fill([cell("a", seed=1), cell("b", seed=1)], make)
    assert names(tmp_path) == ["b.bin", "b.json"]


def test_what_the_store_did_not_write_is_set_aside_and_said(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"holiday")
    (tmp_path / "a.json").mkdir()
    said = []
    Store(tmp_path, said.append).fill([cell()], make)
    assert (tmp_path / "a.aside-1.bin").read_bytes() == b"holiday" and (tmp_path / "a.aside-1.json").is_dir()
    assert [re.search(r"kept as (.*)$", line)[1] for line in said[1:]] == ["a.aside-1.bin", "a.aside-1.json"]
    (tmp_path / "a.bin").write_bytes(b"edited")
    Store(tmp_path).fill([cell()], make)
    assert (tmp_path / "a.aside-2.bin").read_bytes() == b"edited" and Store(tmp_path).find(cell()) is not None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("compare", "index.html"),
        ("compare", "metrics.csv"),
        ("ablation", "table.md"),
        ("ablation", "results.jsonl"),
        ("prompts", "index.json"),
    ],
)
def test_pages_indexes_and_tables_of_others_are_not_overwritten_silently(tmp_path, quiet, command, name):
    out, said = tmp_path / "out", []
    out.mkdir()
    (out / name).write_text("my own")
    disturb.COMMANDS[command](out, 0, say=said.append)
    assert (out / name).read_text() != "my own"
    aside = Path(name).stem + ".aside-1" + Path(name).suffix
    assert (out / aside).read_text() == "my own" and any(f"kept as {aside}" in line for line in said)
    said.clear()
    disturb.COMMANDS[command](out, 0, say=said.append)  # our own is replaced without a word
    assert not said and len([n for n in names(out) if "aside" in n]) == 1


def test_a_dangling_link_is_not_followed_and_a_fifo_does_not_hang(tmp_path, quiet):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    (out / "results.jsonl").symlink_to(elsewhere)
    os.mkfifo(out / "table.md")
    (out / "settings.json").symlink_to(elsewhere)
    disturb.run_ablation(out, 0)
    assert not elsewhere.exists()
    assert not (out / "results.jsonl").is_symlink()
    assert (out / "results.jsonl").is_file() and (out / "table.md").is_file()


def test_a_name_of_240_letters_works_and_one_that_cannot_be_written_is_found_before_the_work(tmp_path, quiet):
    from parklab.studio.generate import generate_video
    from parklab.studio.request import Request

    generate_video(Request(prompt=disturb.SENTENCES[0]), tmp_path / ("x" * 240 + ".mp4"))
    assert names(tmp_path) == ["x" * 240 + ".json", "x" * 240 + ".mp4"]
    quiet.clear()
    with pytest.raises(ValueError, match=r"expected a name that fits here, got x+\.json of 256 bytes; shorten it\."):
        generate_video(Request(prompt=disturb.SENTENCES[0]), tmp_path / ("x" * 251 + ".mp4"))
    assert not quiet and len(names(tmp_path)) == 2
    (tmp_path / ("y" * 250 + ".bin")).write_bytes(b"mine")
    Store(tmp_path).fill([cell("y" * 250)], make)
    assert (tmp_path / ("y" * 243 + ".aside-1.bin")).read_bytes() == b"mine"


WRONG = [
    b"", b"{", b"null", b"[]", b"3", b'"text"', b'{"request": null}', b'{"request": [], "files": 3}',
    b"\xff\xfe\x00", b"\0" * 100,
    b"[" * 100_000, b'{"hash": "0", "files": {}, "request": {}, "format": "test"}', b"1" * 10_000, b'{"a": NaN}',
    json.dumps(sealed({"files": {"../../etc/passwd": "0"}})).encode(), json.dumps(sealed({"files": None})).encode(),
    json.dumps(sealed({"files": {"a.bin": None}, "request": [1]})).encode(),
]  # fmt: skip


@pytest.mark.parametrize("data", WRONG, ids=lambda data: repr(data[:24]))
@pytest.mark.parametrize("name", ["a.json", "a.bin", "journal"])
def test_a_wrong_record_file_or_journal_is_made_again_without_a_traceback(tmp_path, data, name):
    Store(tmp_path).fill([cell()], make)
    whole = disturb.contents(tmp_path)
    (files.journal_path(tmp_path, cell().mark) if name == "journal" else tmp_path / name).write_bytes(data)
    Store(tmp_path).fill([cell()], make)
    assert disturb.contents(tmp_path) == whole


def test_a_changed_record_is_no_record(tmp_path):
    Store(tmp_path).fill([cell()], make)
    found = json.loads((tmp_path / "a.json").read_text())
    assert read_record(tmp_path / "a.json") == found
    (tmp_path / "a.json").write_text(json.dumps(found | {"extra": 1}))
    assert read_record(tmp_path / "a.json") is None and Store(tmp_path).find(cell()) is None


def test_a_cell_has_a_hash_of_its_content_whatever_the_order(tmp_path):
    assert content_hash({"a": 1, "b": {"c": 2, "d": 3}}) == content_hash({"b": {"d": 3, "c": 2}, "a": 1})
    assert Store(tmp_path).fill([cell()], make)["a"]["cell"] == cell().hash != cell(seed=1).hash


def test_compare_never_takes_frames_of_another_seed(tmp_path, quiet):
    """Another seed is put in the place of a finished comparison and killed in between; then the first seed again."""
    from safetensors.numpy import load_file

    out = tmp_path / "out"
    disturb.run_compare(out, 0)
    first = disturb.contents(out)
    disturb.run_compare(tmp_path / "other", 1)
    (out / "raw" / "dense.safetensors").write_bytes((tmp_path / "other/raw/dense.safetensors").read_bytes())
    said = []
    disturb.run_compare(out, 0, say=said.append)
    assert disturb.contents(out) == first
    assert "raw/dense.safetensors is not the file that dense.json describes" in said[0]
    assert load_file(out / "raw/dense.safetensors")["frames"].shape == (2, 32, 32, 3)


def test_ablation_resumes_from_torn_and_foreign_lines(tmp_path, quiet):
    out = tmp_path / "out"
    disturb.run_ablation(out, 0)
    whole = disturb.contents(out)
    for damage in (b'{"prompt": "a c', b"[1, 2]\n", b"null\n"):
        lines = whole["results.jsonl"]
        (out / "results.jsonl").write_bytes(lines[: len(lines) // 2] + damage)
        quiet.clear()
        disturb.run_ablation(out, 0)
        assert disturb.contents(out) == whole and not quiet, "a finished row was made again"


def test_a_failed_atomic_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    with disturb.disturbed() as through:
        files.write_atomically(path, b"old")
    for how in (disturb.STOP, disturb.FULL_DISK):
        for at in range(through.count):
            with disturb.disturbed(at, how):
                try:
                    files.write_atomically(path, b"new" * 100)
                except OSError as error:
                    assert str(error) == files.NO_ROOM.format(path)
            assert path.read_bytes() in (b"old", b"new" * 100)
            with disturb.disturbed():
                files.write_atomically(path, b"old")
            assert names(tmp_path) == ["a.json"]


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    assert Store(tmp_path).fill([cell()], make)["a"]["files"].keys() == {"a.bin"}
    assert names(tmp_path) == ["a.bin", "a.json"]


def test_lines_are_appended_after_a_torn_one_and_not_through_a_link(tmp_path):
    path = tmp_path / "below" / "results.jsonl"
    record.append_records(path, [{"a": 1}])
    path.write_bytes(path.read_bytes() + b'{"a": ')
    record.append_records(path, [{"a": 2}, {"a": 3}])
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a": ', '{"a": 2}', '{"a": 3}']
    assert record.read_records(path) == [{"a": 1}, {"a": 2}, {"a": 3}] and record.read_records(tmp_path / "none") == []
    for target in ("nothing", "below/results.jsonl"):
        (tmp_path / "link").symlink_to(tmp_path / target)
        with pytest.raises(
            OSError, match=r"expected an ordinary file at .*link, got a link; have it removed, or choose"
        ):
            record.append_records(tmp_path / "link", [{}])
        (tmp_path / "link").unlink()
    assert not (tmp_path / "nothing").exists() and len(path.read_text().splitlines()) == 4


def test_the_package_has_one_atomic_write():
    renames = r"os\.replace|os\.rename|\.replace\((path|final|out)\)|mkstemp|NamedTemporaryFile|\.partial\""
    rivals = re.compile(renames + r"|save_file|savefig\((?!data|buffer)|\.write_(text|bytes)\(|open\(\"[wax]")
    sources = [
        path for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "lab/src").rglob("*.py")] if path.name != "files.py"
    ]
    found = {path.name for path in sources if rivals.search(path.read_text())}
    why = "train.py and make.py rename a folder; sanitize.py writes in a folder of tempfile"
    assert found <= {"train.py", "make.py", "sanitize.py"}, why


@pytest.mark.parametrize(("name", "record"), [("generate", "a.json"), ("compare", "park-quality.json")])
def test_a_video_without_its_record_is_made_again_and_no_other(tmp_path, quiet, name, record):
    disturb.COMMANDS[name](tmp_path, 0)
    whole = disturb.contents(tmp_path)
    quiet.clear()
    (tmp_path / record).unlink()
    disturb.COMMANDS[name](tmp_path, 0)
    assert disturb.contents(tmp_path) == whole and len(quiet) == 1


def test_compare_makes_truncated_frames_again(tmp_path, quiet):
    disturb.run_compare(tmp_path, 0)
    whole = disturb.contents(tmp_path)
    os.truncate(tmp_path / "raw/dense.safetensors", 100)
    disturb.run_compare(tmp_path, 0)
    assert disturb.contents(tmp_path) == whole
