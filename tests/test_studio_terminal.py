"""What takes long before the first bar is told on stderr, once it does, and nothing else is."""

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("av")

from parklab.studio import compare, generate, terminal
from parklab.studio.generate import LOADING, READING, StepReport
from test_studio import asked, model  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_a_stage_that_takes_long_is_one_line_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LONG", 0.0)
    wait = terminal.WaitingNotice()
    wait.begin("loading the model")
    wait._timer.join()
    shown = capsys.readouterr()
    assert shown.err == "park: loading the model ...\n" and shown.out == ""


def test_a_stage_that_is_over_soon_is_not_told(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LONG", 3600.0)
    with terminal.step_bars() as bars:
        bars.stage(READING)
        first = bars._waiting._timer
        bars.stage(LOADING)
        second = bars._waiting._timer
        bars.begin("park")(StepReport(0, 1, "dense", 1.0))
        bars.stage("measuring")
        third = bars._waiting._timer
    for timer in (first, second, third):
        timer.join()  # the next stage, the first step or the end took it back: it does not wait for the hour
    assert capsys.readouterr().err == ""


def test_generate_and_compare_tell_what_they_are_doing_in_order(model, tmp_path):  # noqa: F811
    told = []
    request = asked(model, steps=2)
    generate.generate_video(request, tmp_path / "a.mp4", stage=told.append)
    assert told == [READING, LOADING, "encoding the prompt"]
    told.clear()
    compare.compare(request, ["dense", "park"], tmp_path / "out", recall_rows=0, stage=told.append)
    warming = "warming up, untimed"
    assert told == [READING, LOADING, warming, warming, "measuring the videos and writing the page"]
