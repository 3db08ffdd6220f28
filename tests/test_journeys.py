"""Calls, followed place by place: few places, in the order that DESIGN.md draws, and never up a layer.

A place is a file, or the folder of an operation: its kernels, and the places that they call, belong to it. Triton's
interpreter stands in for a GPU, in a pytest of its own; device code is not followed.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import parkattn
from interpreted import hasten_the_interpreter, in_interpreter, outside, run_interpreted
from parkattn import planned

pytest.importorskip("diffusers")
import tiny_pipelines as tiny
from parklab.research import ResearchConfig

ROOT = Path(parkattn.__file__).parent
PROJECT = Path(__file__).parents[1]
SPARSE = ResearchConfig(
    query_clusters=4, key_clusters=6, kmeans_iterations=2, dense_steps=0, refresh_interval=4, reference_steps=4
)


class Journey:
    """Places of the package in the order in which they are first entered, and every call between two of them."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.calls: set[tuple[str, str]] = set()
        self.functions: list[str] = []

    def note(self, frame, event, _) -> None:
        name = _place(frame)
        if event != "call" or name is None or frame.f_code.co_name == "<module>":
            return
        above, callers = frame.f_back, []
        while above is not None:
            callers += [place] if (place := _place(above)) is not None else []
            above = above.f_back
        if any(place.endswith("/") for place in callers):
            return
        self.functions.append(frame.f_code.co_name)
        if name not in self.places:
            self.places.append(name)
        if callers:
            self.calls.add((callers[0], name))

    def follow(self, function):
        before = sys.getprofile()
        sys.setprofile(self.note)
        try:
            return function()
        finally:
            sys.setprofile(before)


def _place(frame) -> str | None:
    return _place_of(frame.f_code.co_filename)


@functools.cache  # asked for every call and all that stand above it
def _place_of(file: str) -> str | None:
    path = Path(file)
    if not path.is_relative_to(ROOT):
        return None
    parts = path.relative_to(ROOT).parts
    return f"ops/{parts[1]}/" if parts[0] == "ops" and len(parts) > 2 else "/".join(parts)


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


def journeys_of_a_run(monkeypatch) -> dict[str, Journey]:
    """The last call of the first layer in each phase of a run with the default profile, in the kernels."""
    from triton.runtime.interpreter import GridExecutor

    hasten_the_interpreter()
    launch, call, found = GridExecutor.__call__, planned.PlannedMethod.__call__, {}
    phases: list[str] = []

    def unfollowed(self, *args, **kwargs):
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return launch(self, *args, **kwargs)
        finally:
            sys.setprofile(profile)

    def noted(self, *args):
        made = call(self, *args)
        phases.append(made.stats.phase)
        return made

    wan = tiny.wan(attention_head_dim=64, num_attention_heads=1, num_layers=1)
    wan.transformer.to(torch.bfloat16)
    parkattn.enable(wan, backend="triton", query_clusters=2, key_clusters=4)
    processor = wan.transformer.blocks[0].attn1.processor
    stock = type(processor).__call__

    def traced(self, *args, **kwargs):
        journey = Journey()
        out = journey.follow(lambda: stock(self, *args, **kwargs))
        found[phases[-1]] = journey
        return out

    traced.__signature__ = inspect.signature(stock)
    monkeypatch.setattr(GridExecutor, "__call__", unfollowed)
    monkeypatch.setattr(planned.PlannedMethod, "__call__", noted)
    monkeypatch.setattr(type(processor), "__call__", traced)
    tiny.run_wan(wan, guidance_scale=1.0, steps=6)
    assert {"anchor", "reuse"} <= found.keys()
    return found


def layer_of(name: str) -> int:
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    module = name.partition("/")[0].removesuffix(".py")
    return next(i for i, line in enumerate(contracts[1]["layers"]) if module in line.replace(" ", "").split("|"))


def expect_drawn(journey: Journey, kind: str, most: int) -> None:
    assert len(journey.places) <= most, journey.places
    # a planner stands above the method that asks it, which knows it as a protocol
    climbs = {(a, b) for a, b in journey.calls if layer_of(a) > layer_of(b)} - {("planned.py", "park.py")}
    assert not climbs, climbs
    drawn = re.search(rf"```text\n{kind}\n(.*?)```", (PROJECT / "DESIGN.md").read_text(), flags=re.DOTALL)
    assert drawn is not None
    assert re.findall(r"[\w/]+\.py|ops/\w+/", drawn[1]) == journey.places


@outside
@pytest.mark.parametrize("kind", ["cpu call", "reuse step"])
def test_a_journey_is_short_goes_down_and_is_drawn_in_the_design(kind, monkeypatch):
    expect_drawn(cpu_call() if kind == "cpu call" else reuse_step(monkeypatch), kind, 11)


@outside
def test_journeys_on_a_gpu_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__, at_least=1)


@in_interpreter
def test_journeys_of_the_default_profile_on_a_gpu_are_short_and_drawn_in_the_design(monkeypatch):
    found = journeys_of_a_run(monkeypatch)
    for phase, most in (("anchor", 18), ("reuse", 14)):
        expect_drawn(found[phase], f"{phase} on a GPU", most)
        # inputs are checked, the backend is chosen and the phase decided once in a call
        for function in ("expect_attention_inputs", "resolve", "_phase"):
            assert found[phase].functions.count(function) == 1, function
