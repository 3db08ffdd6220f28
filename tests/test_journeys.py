"""Two calls, followed file by file: few files, in the order that DESIGN.md draws, and never up a layer."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import parkattn

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from parklab.research import ResearchConfig

ROOT = Path(parkattn.__file__).parent
PROJECT = Path(__file__).parents[1]
SPARSE = ResearchConfig(
    query_clusters=4, key_clusters=6, kmeans_iterations=2, dense_steps=0, refresh_interval=4, reference_steps=4
)


class Journey:
    """Files of the package in the order in which they are first entered, and every call between two of them."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.calls: set[tuple[str, str]] = set()

    def note(self, frame, event, _) -> None:
        name = _module(frame)
        if event != "call" or name is None:
            return
        if name not in self.files:
            self.files.append(name)
        above = frame.f_back
        while above is not None and _module(above) is None:
            above = above.f_back
        if above is not None:
            self.calls.add((_module(above), name))

    def follow(self, function):
        before = sys.getprofile()
        sys.setprofile(self.note)
        try:
            return function()
        finally:
            sys.setprofile(before)


def _module(frame) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def cpu_call() -> Journey:
    q, k, v = torch.randn(3, 1, 2, 300, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    journey, attention = Journey(), parkattn.park_attention  # looked up here: the first look imports it
    journey.follow(lambda: attention(q, k, v))
    return journey


def reuse_step(monkeypatch) -> Journey:
    wan, journey = tiny.wan(), Journey()
    parkattn.enable(wan, SPARSE)
    processor = wan.transformer.blocks[0].attn1.processor
    stock = type(processor).__call__

    def traced(self, *args, **kwargs):
        if self is processor and self.engine.clock.step == 1:
            return journey.follow(lambda: stock(self, *args, **kwargs))
        return stock(self, *args, **kwargs)

    traced.__signature__ = inspect.signature(stock)
    monkeypatch.setattr(type(processor), "__call__", traced)
    tiny.run_wan(wan, guidance_scale=1.0)
    assert parkattn.summary(wan).calls["reuse"] > 0
    return journey


def layer_of(name: str) -> int:
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    module = name.partition("/")[0].removesuffix(".py")
    return next(i for i, line in enumerate(contracts[1]["layers"]) if module in line.replace(" ", "").split("|"))


@pytest.mark.parametrize(("kind", "most"), [("cpu call", 12), ("reuse step", 13)])
def test_a_journey_is_short_goes_down_and_is_drawn_in_the_design(kind, most, monkeypatch):
    journey = cpu_call() if kind == "cpu call" else reuse_step(monkeypatch)
    assert len(journey.files) <= most, journey.files
    climbs = [(a, b) for a, b in journey.calls if layer_of(a) > layer_of(b)]
    assert not climbs, climbs
    drawn = re.search(rf"```text\n{kind}\n(.*?)```", (PROJECT / "DESIGN.md").read_text(), flags=re.DOTALL)
    assert drawn is not None
    assert re.findall(r"[\w/]+\.py", drawn[1]) == journey.files
