"""The parts of tools/campaign.py that have no short form elsewhere still run."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

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
