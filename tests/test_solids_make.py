"""One command that makes the model of solids in a given time: processes that break, parcels, losses that are not finite."""

import hashlib
import json
import os
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch

from parklab.solids import make
from parklab.solids.packing import INDEX, unpack
from parklab.solids.recipe import RENDERING, TOY, TOY_RENDERED
from parklab.solids.train import STATE, SolidsTrainer
from parklab.sprites.training_state import load_state
from test_solids_model import CPU, QUICK, library_in, trainer_in

TOY_OPTIONS = "--small --autoencoder-steps 2 --decoder-steps 1 --tokens-per-batch 96 --autoencoder-batch 2"
TOY_OPTIONS += " --library 64 --library-first 4"


# --- parcels
def gathered(out, whole):
    for parcel in out.glob("parcels/*/*"):
        files = [path for path in parcel.rglob("*") if path.is_file()]
        assert len(files) <= 8 and sum(path.stat().st_size for path in files) <= 62 * 2**20
        subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=parcel, check=True)
    make.gather(out / "parcels", whole)


def max_number(out):
    return max(int(path.name) for path in out.glob("parcels/[0-9]*"))


def test_parcels_hold_new_and_changed_files_alone_and_make_the_folder_again(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "PARCEL_BYTES", 1000)
    out, whole = tmp_path / "out", tmp_path / "whole"
    (out / "packed").mkdir(parents=True)
    whole.mkdir()
    for index in range(9):
        (out / f"packed/weights-{index}").write_bytes(os.urandom(300))
    (out / "samples.png").write_bytes(b"first")
    parcels = make.Parcels(out)
    parcels.write()
    (out / "samples.png").write_bytes(b"second")
    make.Parcels(out).write()  # another process knows what was sent
    parcels = make.Parcels(out)
    parcels.write()
    assert max_number(out) == 2  # nothing was new the third time
    names = {path.name for path in (out / "parcels/2").rglob("*") if path.is_file()}
    assert names == {"samples.png", "SHA256SUMS"}
    gathered(out, whole)
    assert (whole / "samples.png").read_bytes() == b"second"
    for path in (out / "packed").iterdir():
        assert (whole / "packed" / path.name).read_bytes() == path.read_bytes()


def test_parcels_that_are_not_whole_or_reach_outside_are_refused_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="gather: expected parcels in"):
        make.gather(tmp_path, tmp_path / "whole")
    parcel = tmp_path / "parcels/1/1"
    parcel.mkdir(parents=True)
    (parcel / "a.txt").write_text("a")
    (tmp_path / "parcels/1/b.txt").write_text("a")
    for line in (f"{'0' * 64}  a.txt", f"{hashlib.sha256(b'a').hexdigest()}  ../b.txt"):
        (parcel / "SHA256SUMS").write_text(line)
        with pytest.raises(ValueError, match=r"gather: expected [^\n]* whole in"):
            make.gather(tmp_path / "parcels", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


# --- processes
class Programme(make.Making):
    """Runs a script in place of the modules; `way` and time left are its arguments."""

    def __init__(self, out, script, seconds=1e4):
        super().__init__(out, time.time() + seconds, "cpu", [], [])
        self.script, self.asked = script, []

    def _process(self, words, ends, quiet):
        self.asked.append([str(word) for word in words])
        return self.script(self, self.asked[-1])


def packs(making):
    (making.out / "packed").mkdir(exist_ok=True)
    (making.out / "packed" / INDEX).write_text("{}")
    return True


def test_training_that_breaks_goes_on_without_graphs_and_then_uncompiled(tmp_path):
    def script(making, words):
        if words[0] == "train":
            return packs(making) if "--compile" not in words else False
        return True

    making = Programme(tmp_path, script)
    assert making.run()
    ways = [[word for word in ("--graphs", "--compile") if word in words] for words in making.asked]
    assert ways == [["--graphs", "--compile"], ["--compile"], [], []]
    assert making.asked[-1][0] == "report"


def test_a_run_that_always_breaks_still_packs_its_last_state(tmp_path):
    def script(making, words):
        until = float(words[words.index("--until") + 1]) if words[0] == "train" else 0.0
        return packs(making) if words[0] == "train" and until <= time.time() else False

    making = Programme(tmp_path, script)
    assert making.run()
    assert [words[0] for words in making.asked] == ["train"] * 4 + ["report"]


def test_a_run_that_breaks_after_its_first_results_packs_what_it_learned_since(tmp_path):
    def script(making, words):
        packs(making)
        return words[0] == "report" or float(words[words.index("--until") + 1]) <= time.time()

    making = Programme(tmp_path, script)
    assert making.run()
    assert [words[0] for words in making.asked] == ["train"] * 4 + ["report"]


def test_without_a_model_there_is_no_report(tmp_path):
    making = Programme(tmp_path, lambda making, words: False)
    assert not making.run()
    assert {words[0] for words in making.asked} == {"train"}


def test_a_silent_process_is_killed_and_so_is_one_beyond_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "POLL", 0.05)
    monkeypatch.setattr(make.sys, "executable", str(tmp_path / "program"))
    (tmp_path / "program").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "program").chmod(0o755)
    making = make.Making(tmp_path, time.time() + 1e4, "cpu", [], [])
    assert not making._process(["report"], time.time() + 1e4, lambda: True)
    assert not making._process(["report"], time.time() + 0.2, lambda: False)
    assert making.running is None


def test_a_run_asked_to_end_packs_what_it_has_and_parcels_make_it_again(tmp_path, monkeypatch):
    """A true training process, stopped in the midst."""
    monkeypatch.setattr(make, "WAYS", ((),))
    making = make.Making(tmp_path, time.time() + 3600, "cpu", TOY_OPTIONS.split(), [])
    log = tmp_path / "train.log"

    def stop_in_time():
        while "transformer step" not in (log.read_text() if log.is_file() else ""):
            time.sleep(0.2)
        making.stop()

    threading.Thread(target=stop_in_time, daemon=True).start()
    assert making.run()
    assert not (tmp_path / "report").exists()
    whole = tmp_path / "whole"
    whole.mkdir()
    gathered(tmp_path, whole)
    folder = unpack(whole / "packed", tmp_path / "unpacked")
    steps = json.loads((folder / "training.json").read_text())["stages"]["transformer"]["step"]
    assert steps == load_state(tmp_path / STATE)[1]["stages"][2]["step"] > 0
    names = {path.name: path for path in whole.rglob("*") if path.is_file()}
    assert {INDEX, "samples.png", "loss.svg", "times.json", "train.log"} <= names.keys()
    shard = next((whole / "packed").glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="got other contents than its name says"):
        unpack(whole / "packed", tmp_path / "broken")


# --- training that goes wrong
@pytest.mark.parametrize("save_every", [0.0, 1e9])  # the last state: of the step before, or from before the stage
def test_a_loss_that_is_not_finite_goes_back_to_the_last_state_at_half_the_rate(tmp_path, capsys, save_every):
    trainer = trainer_in(tmp_path / "run", replace(QUICK, steps=8, save_every=save_every))
    step, broken = trainer.flow._step, []

    def breaking(*arguments):
        if trainer.flow.stage.step == 5 and not broken:
            broken.append(5)
            with torch.no_grad():
                trainer.flow.transformer.proj_out.bias.fill_(torch.nan)
        step(*arguments)

    trainer.flow._step = breaking
    trainer.train()
    assert trainer.flow.stage.step == 8 and trainer.config.rate == trainer.flow.config.rate == QUICK.rate / 2
    assert capsys.readouterr().out.count("from the last state at half the rate") == 1
    tensors, _ = load_state(tmp_path / "run" / STATE)
    assert all(value.isfinite().all() for value in tensors.values())


def test_a_run_that_never_becomes_finite_says_so_and_leaves_a_finite_state(tmp_path):
    trainer = trainer_in(tmp_path / "run")
    step = trainer.flow._step

    def breaking(*arguments):
        step(*arguments)
        with torch.no_grad():
            trainer.flow.transformer.proj_out.bias.fill_(torch.nan)

    trainer.flow._step = breaking
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert all(value.isfinite().all() for value in load_state(tmp_path / "run" / STATE)[0].values())


def test_results_that_cannot_be_written_in_between_end_no_run(tmp_path, monkeypatch, capsys):
    def full(self):
        raise OSError("No space left on device")

    trainer = trainer_in(tmp_path / "run", replace(QUICK, show_every=0.0))
    monkeypatch.setattr(SolidsTrainer, "show", full)
    trainer.train()
    assert trainer.flow.stage.step == QUICK.steps
    assert "No space left on device; the run goes on without them" in capsys.readouterr().out


def test_a_slow_renderer_takes_no_more_than_its_share(tmp_path):
    library = library_in(tmp_path, lambda clips: clips[:, :, :1, ::16, ::16].bfloat16())
    library.allowed = lambda: 0.0
    pool = library.pool(TOY_RENDERED, 2, 10)
    assert pool.made == 2 and library.shelves[0].made == 2  # as many as the step takes
    library.allowed = lambda: 1e9
    assert library.pool(TOY_RENDERED, 2, 10).made == 24
    trainer = SolidsTrainer(tmp_path / "run", TOY, QUICK, CPU)
    assert trainer.library.allowed() == pytest.approx(RENDERING[0] * QUICK.seconds)
