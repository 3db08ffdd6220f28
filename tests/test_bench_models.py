"""park bench models: its gate, phases and record, here with tiny transformers of the same classes on a CPU."""

import math

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.42")

from parklab.bench import models
from parklab.bench.real_models import REAL, TINY
from parklab.research import ResearchConfig

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # stock Kandinsky in bfloat16
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TINY)
def test_each_model_passes_its_gate_and_has_every_phase(name):
    *cases, found = [
        record
        for record in models.of_model(name, TINY[name], CPU, math.inf, rehearse=False)
        if "whole" not in record["benchmark"]
    ]
    assert len(cases) == 3 and all(case["ok"] for case in cases), cases
    assert found["ok"] and found["tokens"] == TINY[name].tokens
    assert {profile: set(found[profile]["block_s"]) for profile in models.PHASES} == {
        profile: set(phases) for profile, phases in models.PHASES.items()
    }


def test_the_whole_model_has_as_many_blocks_as_fit():
    *_, whole = models.of_model(models.WHOLE, TINY[models.WHOLE], CPU, math.inf, rehearse=False)
    assert whole["blocks"] == TINY[models.WHOLE].blocks and set(whole["seconds"]) == {"dense", "refresh", "reuse"}


def test_without_time_the_whole_model_is_left_out_with_a_reason():
    *_, whole = models.of_model(models.WHOLE, TINY[models.WHOLE], CPU, 0.0, rehearse=False)
    assert not whole["ok"] and "out of time" in whole["failure"] and "seconds" not in whole


def test_a_wrong_attention_is_not_timed(monkeypatch):
    whole = ResearchConfig.profile
    monkeypatch.setattr(  # leaves blocks out where all should be kept
        ResearchConfig, "profile", lambda name, **changes: whole(name, **{**changes, "top_p": None, "top_k": 0.25})
    )
    records = list(models.of_model("cosmos-2.5-14b", TINY["cosmos-2.5-14b"], CPU, math.inf, rehearse=False))
    assert [record["gate"] for record in records if not record["ok"]] == ["every block kept is stock"]
    assert len(records) == 3


def test_a_model_that_fails_says_so_and_the_others_go_on(monkeypatch):
    def broken(name, *_, **__):
        if name == "ltx-2.5":
            raise ValueError("broken: expected nothing.\nMore")
        yield {"ok": True}

    monkeypatch.setattr(models, "of_model", broken)
    records = []
    assert not models.run_models(["ltx-2.5", "minimax-h3"], CPU, records.append, budget_s=0)
    assert records == [
        {"model": "ltx-2.5", "ok": False, "failure": "ValueError: broken: expected nothing."},
        {"model": "minimax-h3", "ok": True},
    ]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("minimax-h3", 104_179), ("ltx-2.5", 109_120), ("kandinsky-5-pro", 119_040), ("cosmos-2.5-14b", 84_480)],
)
def test_sizes_are_those_of_released_videos(name, tokens):
    assert REAL[name].tokens == tokens
