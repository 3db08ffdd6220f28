"""Configs say what every field of theirs means."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import parkattn
import parklab
from parkattn import ParkConfig
from parkattn.methods import METHODS
from parklab.research import ResearchConfig

SOURCES = sorted(path for package in (parkattn, parklab) for path in Path(package.__file__).parent.rglob("*.py"))


def classes():
    return [
        node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]


def bases(config):
    return {getattr(base, "id", getattr(base, "attr", "")) for base in config.bases}


def config_classes():
    """MethodConfig and whatever inherits from it, by the names in the source."""
    every, found = classes(), {"MethodConfig": None}
    while True:
        new = {config.name: config for config in every if config.name in found or bases(config) & found.keys()}
        if new.keys() == found.keys():
            return new
        found = new


CONFIGS = config_classes()


def fields(config):
    """name -> whether a string follows."""
    following = zip(config.body, [*config.body[1:], None], strict=True)
    return {
        node.target.id: isinstance(then, ast.Expr)
        and isinstance(then.value, ast.Constant)
        and bool(str(then.value.value).strip())
        for node, then in following
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    }


def explained(config):
    """Fields with a string of their own, or of the class that they change the default of."""
    inherited = {field for base in bases(config) & CONFIGS.keys() for field in explained(CONFIGS[base])}
    return inherited | {field for field, has_string in fields(config).items() if has_string}


def test_the_configs_of_all_methods_are_looked_at():
    assert {entry.config.__name__ for entry in METHODS.values()} <= CONFIGS.keys()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_config_field_is_explained_where_it_is_defined(name):
    assert fields(CONFIGS[name]).keys() <= explained(CONFIGS[name])


def test_every_field_of_park_is_a_profiles_a_models_or_named_in_a_page_for_users():
    """What only research changes is a field of parklab.research.ResearchConfig."""
    config, root = parkattn.ParkConfig, Path(__file__).parents[1]
    set_by_us = {name for changes in (*config.PROFILES.values(), *config.PRESETS.values()) for name in changes}
    pages = [*root.glob("docs/*.md"), root / "README.md"]
    text = " ".join(path.read_text() for path in pages if path.name not in ("diary.md", "measured.md", "reproduce.md"))
    fields = {field.name for field in dataclasses.fields(config)}
    assert not {name for name in fields - set_by_us if not re.search(rf"\b{name}\b", text)}
    assert len(fields) <= 20


@pytest.mark.parametrize(
    ("old", "advice"),
    [
        ({"refresh_top_p": 0.9}, r"write top_p=\(0.7, 0.9\)"),
        ({"short_residual_rank": 32}, r"write residual_rank=\(12, 32\)"),
        ({"query_multiple": 1}, "a field of parklab.research.ResearchConfig"),
    ],
)
def test_a_field_of_an_earlier_version_says_where_it_went(old, advice):
    with pytest.raises(ValueError, match=f"expected other fields, got {next(iter(old))}; .*{advice}"):
        ParkConfig.profile("quality", **old)


def test_every_setting_of_research_alone_is_named_where_the_library_refuses_it():
    newer = {"noise_tau", "exact_anchors", "s_min"}  # never in the library
    ours, theirs = ({field.name for field in dataclasses.fields(kind)} for kind in (ParkConfig, ResearchConfig))
    assert set(ParkConfig.MOVED) == theirs - ours - newer
