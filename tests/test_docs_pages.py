"""What single pages promise: README's words and numbers, commands for real models, and the reference."""

import dataclasses
import inspect
import json
import re
import shlex
import statistics
import sys
import typing
from importlib import import_module
from pathlib import Path

import pytest
import typer

import parkattn
from parkattn import ParkConfig, build_plan
from parkattn.engine import Clock, Engine
from parkattn.engine.summary import Summary
from parkattn.hosts import comfyui
from parkattn.hosts.diffusers.session import Session
from parkattn.methods import METHODS
from parkattn.models import SIZES
from parkattn.ops.importance.definition import ESTIMATORS
from parkattn.plan import Blocks
from parklab import cli
from parklab.bench.frontier import read_records
from parklab.experiments.catalogue import choose_experiments
from parklab.experiments.paper_numbers import PAPER
from parklab.experiments.reproduce import parse_shard
from parklab.metrics.measures import MEASURES
from parklab.research import ResearchConfig, studied_entry
from parklab.scene import clustered_scene
from parklab.studio.gain import measured_forwards

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST_SCREEN = " ".join(" ".join(README.splitlines()[:40]).split())


def test_the_readme_names_its_paper_spells_out_its_words_and_says_how_to_install():
    text = " ".join(README.split())
    paper = "PARK: Accurate Block Retrieval for Sparse Attention in Video Diffusion Transformers"
    for said in (
        paper,
        "QRKC, query-response key clustering",
        "PAMA, per-query attention-mass aggregation",
        "pip install '.[",
        "CITATION.cff",
    ):
        assert said in text


def test_the_first_screen_of_the_readme_fits_40_lines():
    assert README.splitlines().index("## Install") <= 41, "40 lines, and an empty one before the next heading"


def test_the_density_in_the_readme_is_that_of_its_snippet():
    q, k, *_ = clustered_scene()
    density = build_plan(q, k, ParkConfig(top_p=0.9)).density().mean()
    assert f"# {100 * density:.0f} %" in README


def test_every_figure_of_the_first_screen_is_one_of_its_records_or_of_the_paper():
    models = measured_forwards()["models"]
    compiling = [own["compiling_s"] for own in models.values()]
    densities = {name: own["density"] for name, own in models["wan2.1-14b"]["profiles"].items()}
    printed = next(row for row in PAPER["tab:main_quality_efficiency"].rows if row[:2] == ("Wan2.1-14B", "PARK"))
    short = {
        setting: statistics.median(
            row["seconds"] for row in read_records(ROOT / "benchmarks/results/frontier.jsonl")
            if (row["steps"], row["guidance"], row["setting"]) == (4, 1.0, setting)
        )
        for setting in ("quality", "dense")
    }  # fmt: skip
    for said in (
        f"Compiling takes {min(compiling):.0f} to {max(compiling):.0f} s",
        f"compute {densities['paper']['reuse']:.0%} of the token pairs, with `fast` {densities['fast']['reuse']:.0%}".replace(
            "%", " %"
        ),
        f"`quality` compute {densities['quality']['refresh']:.0%} and those of `fast` {densities['fast']['refresh']:.0%}".replace(
            "%", " %"
        ),
        f"{float(printed[2]):.1f} dB PSNR against dense at {printed[-1].replace('×', 'x')}",
        f"{short['quality']:.2f} s with `quality` and {short['dense']:.2f} s dense",
        "below SVG2, SVOO and SVG-EAR at equal density",
        "<!-- /table -->",
    ):
        assert said in FIRST_SCREEN


def test_the_state_that_profiles_keep_is_that_of_the_records():
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/e2e_profile.jsonl").read_text().splitlines()]
    memory = [row["memory"] for row in lines if row.get("model") == "wan2.1-14b" and "memory" in row][-1]
    kept, plans = memory["state_with_guidance_gb"], memory["plans_with_guidance_gb"]
    assert f"{kept:.1f} GB for Wan2.1-14B at 720p, `paper` {plans:.1f} GB" in " ".join(README.split())


def test_the_cost_of_the_plain_triton_kernel_is_that_of_the_records():
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/gpu_attend.jsonl").read_text().splitlines()]
    ms = {
        row["kernel"]: row["ms"]
        for row in lines
        if row.get("case") == "wan2.1-14b, density 0.25" and row.get("borders") == "rounded"
    }
    assert f"takes {ms['triton'] / ms['gluon']:.1f} times as long" in README


def test_the_prompts_that_the_small_model_follows_are_those_of_its_card():
    card = (ROOT / "lab/src/parklab/sprites/checkpoint/MODEL_CARD.md").read_text()
    both, motion = re.search(r"^\| 33 x 160 x 256 .* \| \*\*(\d+) %\*\* \| (\d+) % \|$", card, re.MULTILINE).groups()
    assert f"colour and shape for {both} % of 50 held-out prompts, and the asked motion for {motion} %" in " ".join(
        README.split()
    )


# Commands of docs/real-models.md and docs/metrics.md: the program takes them; nothing is run ------------


COMMAND = re.compile(r"^(?:    )?(?:CUDA_VISIBLE_DEVICES=\d+ )?park (.*)$", re.MULTILINE)
PAGES = ("real-models.md", "metrics.md")
COMMANDS = [(page, line) for page in PAGES for line in COMMAND.findall((ROOT / "docs" / page).read_text())]


def parse(line: str) -> tuple[str, dict]:
    """The command's name and its values, by the parser that runs it."""
    words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    group = typer.main.get_command(cli.app)
    path = []
    context = group.make_context("park", words)
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, [*getattr(context, "_protected_args", ()), *context.args])
        path.append(name)
        context = group.make_context(name, list(rest), parent=context)
    return " ".join(path), context.params


IDS = [f"{page} {number}" for number, (page, _) in enumerate(COMMANDS)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=IDS)
def test_every_command_of_the_page_is_accepted(page, line):
    command, values = parse(line)
    if command == "reproduce":
        assert values["listed"] or choose_experiments(list(values["names"]))
        parse_shard(values["shard"] or "0/1")
        chosen = (values["methods"] or "park").split(",")
        assert set(chosen) <= set(METHODS)
        for entry in values["settings"] or ():
            name, _, value = entry.partition("=")
            fields = {field.name for method in chosen for field in dataclasses.fields(studied_entry(method).config)}
            assert name in fields and json.loads(value) is not None
    if command == "doctor":
        assert values["model"] in SIZES
    if command == "metrics" and values["measures"] not in (None, "all"):
        assert set(values["measures"].split(",")) <= set(MEASURES)


@pytest.mark.parametrize("line", ["reproduce all --promts 8", "reproduce --prompts x", "doctor --frames 0", "generat"])
def test_a_command_that_is_not_one_is_noticed(line):
    with pytest.raises(cli.CommandLineError):
        parse(line)


def test_every_model_of_the_paper_and_both_protocols_are_there():
    found = [values for command, values in (parse(line) for _, line in COMMANDS) if command == "reproduce"]
    main = [values for values in found if "tab:main_quality_efficiency" in (values["names"] or ())]
    main = [values for values in main if not values["quick"]]
    for prompts, models in (("vbench.txt", 4), ("penguin.txt", 3)):
        assert len({values["model"] for values in main if str(values["prompt_file"]) == prompts}) == models
    assert {(values["height"], values["width"], values["steps"]) for values in main} == {(720, 1280, 50)}
    assert {values["shard"] for values in found} == {None, "0/2", "1/2"}


def test_what_decoding_takes_is_the_recorded_figure():
    lines = (ROOT / "benchmarks/results/e2e.jsonl").read_text().splitlines()
    (decode,) = (record for record in map(json.loads, lines) if record.get("benchmark") == "e2e decode")
    text = " ".join((ROOT / "docs/real-models.md").read_text().split())
    assert f"decoding {decode['frames'][2]} frames of 720p took {decode['peak_gb']:.0f} GB" in text


# The reference is whole: everything public has a docstring and a place ----------------------------------


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
        for name in re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
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
