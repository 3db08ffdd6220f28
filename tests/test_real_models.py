"""The commands of docs/real-models.md and docs/metrics.md are ones that the program takes; nothing is run."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from parkattn.methods import METHODS
from parkattn.models import SIZES
from parklab import cli
from parklab.experiments.catalogue import choose_experiments
from parklab.experiments.reproduce import parse_shard
from parklab.metrics.measures import MEASURES
from parklab.research import studied_entry

ROOT = Path(__file__).parents[1]
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
