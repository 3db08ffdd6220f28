"""The reference is whole: everything public has a docstring and a place, and a choice takes the names it tells."""

import dataclasses
import inspect
import re
import sys
import typing
from importlib import import_module
from pathlib import Path

import pytest

import parkattn
from parkattn.engine import Clock, Engine
from parkattn.engine.summary import Summary
from parkattn.hosts import comfyui
from parkattn.hosts.diffusers.session import Session
from parkattn.ops.importance.definition import ESTIMATORS
from parkattn.plan import Blocks
from parklab.research import ResearchConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))
methods_page = import_module("methods_page")

# Docstrings ---------------------------------------------------------------------------------------------------

CONFIGS = {entry.config for entry in parkattn.METHODS.values()} | {ResearchConfig}
PUBLIC = [
    *(getattr(parkattn, name) for name in parkattn.__all__ if name != "METHODS"),
    *sorted(CONFIGS, key=lambda kind: kind.__name__),
    *(Blocks, Clock, Engine, Session, Summary, comfyui.patch_model, comfyui.summary_of),
]


def undocumented(thing) -> list[str]:
    """Names without a docstring: the thing itself, its public methods and its fields; what a base class says counts."""
    if not inspect.isclass(thing):
        return [] if inspect.getdoc(thing) else [thing.__name__]
    ours = [kind for kind in thing.__mro__ if kind.__module__.startswith(("parkattn", "parklab"))]
    said = {name for kind in ours for name in methods_page.field_docstrings(kind)}
    missing = [kind.__name__ for kind in ours if not kind.__dict__.get("__doc__")]
    fields = {name for kind in ours for name in inspect.get_annotations(kind) if not name.startswith("_")}
    missing += [f"{thing.__name__}.{name}" for name in sorted(fields - said)]
    for kind in ours:
        for name, member in kind.__dict__.items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(getattr(thing, name)):
                missing.append(f"{thing.__name__}.{name}")
    return missing


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_everything_public_has_a_docstring(thing):
    assert undocumented(thing) == []


def test_everything_public_is_in_the_reference():
    told = {
        name.rpartition(".")[2]
        for path in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", path.read_text(), flags=re.MULTILINE)
    }
    assert set(parkattn.__all__) <= told
    groups = {
        kind.__name__ for kind in parkattn.ParkConfig.__mro__ if kind.__module__.startswith(("parkattn", "parklab"))
    }
    assert groups <= told


# Choices ------------------------------------------------------------------------------------------------------


def literal_of(hint) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next((names for part in typing.get_args(hint) if (names := literal_of(part))), ())


CHOICES = [
    (kind, field.name, literal_of(typing.get_type_hints(kind)[field.name]))
    for kind in sorted(CONFIGS, key=lambda kind: kind.__name__)
    for field in dataclasses.fields(kind)
    if literal_of(typing.get_type_hints(kind)[field.name])
]


@pytest.mark.parametrize(("kind", "field", "names"), CHOICES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_choice_takes_the_names_of_its_literal_and_no_other(kind, field, names):
    for name in names:
        assert getattr(kind(**{field: name}), field) == name
    with pytest.raises(ValueError) as refused:
        kind(**{field: "nothing"})
    expected = ", ".join(sorted(names))
    assert str(refused.value) == f"{field}: expected one of {expected}, got 'nothing'; pick one of these."


def test_every_choice_of_a_config_is_a_literal():
    hints = [(kind, name, hint) for kind in CONFIGS for name, hint in typing.get_type_hints(kind).items()]
    free = {f"{kind.__name__}.{name}" for kind, name, hint in hints if hint in (str, str | None)}
    assert free == {"SvooConfig.density_profile"}  # a path
    assert {"key_metric", "metric_root", "backend", "importance"} <= {field for _, field, _ in CHOICES}
    assert set(literal_of(typing.get_type_hints(ResearchConfig)["importance"])) == set(ESTIMATORS)
