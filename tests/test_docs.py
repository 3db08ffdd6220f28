"""The documentation holds what it says: code runs, commands parse, links lead somewhere, tables are of the records."""

import ast
import functools
import inspect
import itertools
import json
import re
import shlex
import sys
import tomllib
import typing
import unicodedata
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from parkattn import dense, park
from parkattn.hosts.served import ServedSettings
from parklab import baselines

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))
methods_page = import_module("methods_page")

PAGES = sorted(DOCS.rglob("*.md"))
BESIDE = (
    "lab/README.md",
    "benchmarks/results/README.md",
    "src/parkattn/ops/*/README.md",
    "lab/src/parklab/sprites/*/MODEL_CARD.md",
)
BESIDE_CODE = sorted(path for pattern in BESIDE for path in ROOT.glob(pattern))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md", *PAGES, *BESIDE_CODE]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n$")
FENCE = re.compile(r"^(?P<fence>```+)(?P<language>\w*)\n(?P<body>.*?)^(?P=fence)\n", flags=re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)(?:(?: {4}.*)?\n)*(?=\n|\Z|\S)")
# blocks of code that no test runs, each with the reason that its page gives
UNTESTED = {
    "docs/integrate.md": ["it needs one process per GPU; tests run the same calls of examples/multi_gpu.py"],
    "docs/quantised.md": ["it needs a GPU and the model's weights; tests load tiny models the same way"] * 4,
    "docs/hosts.md": ["it needs LightX2V; tests run the same call against its source"],
    "docs/metrics.md": ["it converts weights that have to be downloaded first"],
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


class Block(typing.NamedTuple):
    language: str
    body: str
    not_run: str | None


def blocks_of(text: str) -> list[Block]:
    """Fenced blocks, and those indented by four, whose language is what they parse as, or else a shell's."""
    found = []
    for match in FENCE.finditer(text):
        reason = NOT_RUN.search(text[: match.start()])
        language = match["language"] or language_of(match["body"])
        found.append((match.start(), Block(language, match["body"], reason and reason[1])))
    unfenced = FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)
    for match in INDENTED.finditer(unfenced):
        body = inspect.cleandoc(match[0])
        found.append((match.start(), Block(language_of(body), body, None)))
    return [block for _, block in sorted(found, key=lambda entry: entry[0])]


def language_of(body: str) -> str:
    for language, parse in (("python", ast.parse), ("toml", tomllib.loads)):
        try:
            parse(body)
            return language
        except (SyntaxError, tomllib.TOMLDecodeError):
            continue
    return "bash"


def prose_of(text: str) -> str:
    """Without blocks of code and without code in a line."""
    return re.sub(r"`[^`\n]+`", "code", FENCE.sub("\n", text))


# Code ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_models(monkeypatch, tmp_path):
    """Large models are tiny random ones on the CPU, every video is small, and a page writes into a folder of its own."""
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("av")
    import tiny_pipelines as tiny

    class TinyWan(diffusers.WanPipeline):
        def to(self, *_, **__):
            return self

    stock, whole = diffusers.WanPipeline.from_pretrained.__func__, diffusers.WanPipeline.__call__

    def from_pretrained(cls, path, **options):
        return stock(cls, path, **options) if Path(path).is_dir() else tiny.wan(pipeline=TinyWan)

    @functools.wraps(whole)
    def small_call(self, *args, **options):
        small = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 4, "max_sequence_length": 16}
        return whole(self, *args, **{**options, **small})

    monkeypatch.setattr(diffusers.WanPipeline, "__call__", small_call)
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.chdir(tmp_path)


WITH_CODE = [path for path in TEXTS if any(block.language == "python" for block in blocks_of(path.read_text()))]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # numpy's complaint about schedulers of diffusers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_every_block_of_python_runs(path, tiny_models):
    known = {"prompt": "a cat walks on the grass"}  # blocks of a page follow each other
    for block in blocks_of(path.read_text()):
        if block.language == "python" and block.not_run is None:
            exec(compile(block.body, name_of(path), "exec"), known)


def test_blocks_that_no_test_runs_are_listed_with_their_reasons():
    found = {name_of(path): [b.not_run for b in blocks_of(path.read_text()) if b.not_run] for path in TEXTS}
    assert {name: reasons for name, reasons in found.items() if reasons} == UNTESTED


def test_every_block_is_code_that_is_run_or_parsed_or_plain_text():
    for path in TEXTS:
        for block in blocks_of(path.read_text()):
            assert block.language in ("python", "bash", "toml", "text"), f"{name_of(path)}: {block.body[:60]}"


# Commands -----------------------------------------------------------------------------------------------------

TARGETS = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
LAB_EXTRAS = set(tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]["optional-dependencies"])


def expect_command(words: list[str]) -> None:
    """A command that exists, with options that it has."""
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        words = words[1:]
    program, *rest = list(itertools.takewhile(lambda word: word not in (">", "|", "&&"), words))
    if program == "park":
        expect_park(rest)
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS, rest
    elif program == "pip":
        for whose, extras in re.findall(r"(parkattn|parklab|lab|\.)\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= (LAB_EXTRAS if whose.endswith("lab") else EXTRAS), extras
    elif program == "torchrun":
        start = next(i for i, word in enumerate(rest) if word == "park" or word.endswith(".py"))
        expect_command(rest[start:] if rest[start] == "park" else ["python", *rest[start:]])
    elif re.fullmatch(r"pytest|python[\d.]*", program):
        module = rest[1] if rest[:1] == ["-m"] else "pytest" if program == "pytest" else None
        assert module is None or find_spec(module) is not None, module
        for word in rest:
            if word.endswith(".py"):
                assert (ROOT / word).exists(), word
    elif program in ("sglang", "vllm"):
        for told in (json.loads(word) for word in rest if word.startswith("{")):
            ServedSettings.read("park", told.get("park", "quality"))
    else:
        # a program in an environment of another package, or of the system
        known = re.fullmatch(r"[\w-]+/bin/\w+", program) or program in (".", "cd", "git", "tar")
        assert known, f"{program} is no command that is known here"


def expect_park(words: list[str]) -> None:
    import typer

    from parklab.cli import app

    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    assert not words or not hasattr(command, "commands"), f"park has no command {words[0]}"
    if words:  # a single capital stands for a number
        command.make_context("park", [re.sub(r"^[A-Z]$", "16", word) for word in words])


def commands_in(text: str) -> list[list[str]]:
    """Lines of a shell, continued ones as one, without what is said beside them, and commands in running text."""
    bodies = [re.sub(r"\\\n\s*", " ", block.body) for block in blocks_of(text) if block.language == "bash"]
    shell = [re.split(r"(?<=\S) {4,}", line)[0] for body in bodies for line in body.splitlines()]
    inline = re.findall(
        r"`((?:park |make |torchrun |pip install |python -m |python tools/)[^`\n]+)`", FENCE.sub("\n", text)
    )
    return [words for line in (*shell, *inline) if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("path", [path for path in TEXTS if commands_in(path.read_text())], ids=name_of)
def test_every_command_parses(path):
    for words in commands_in(path.read_text()):
        try:
            expect_command([word for word in words if word != "..."])
        except Exception as error:
            pytest.fail(f"{name_of(path)}: {' '.join(words)}: {type(error).__name__}: {error}")


# Links --------------------------------------------------------------------------------------------------------

# a package page shows no file of the repository; a picture needs the address of one, and there is none yet
WITHOUT_ADDRESS = {"docs/compare.png", "docs/pictures/run.svg"}


def whole(path: Path) -> str:
    """A page with the files that it includes."""
    return re.sub(r'^--8<-- "(.+)"$', lambda match: (ROOT / match[1]).read_text(), path.read_text(), flags=re.MULTILINE)


def anchors_in(text: str) -> set[str]:
    """As Python-Markdown names headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("\n", text), flags=re.MULTILINE)
    plain = [unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode() for title in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def links_in(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose_of(text))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_of_the_docs_lead_to_pages_and_headings(path):
    for link in links_in(whole(path)):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        page = path if not target else (path.parent / target).resolve()
        assert page.is_relative_to(DOCS) and page.is_file(), f"{name_of(path)}: {link}"
        assert not anchor or anchor in anchors_in(whole(page)), f"{name_of(path)}: {link}"


def test_links_of_the_readme_work_on_a_package_page():
    text = (ROOT / "README.md").read_text()
    for link in links_in(text):
        if link in WITHOUT_ADDRESS:
            assert (ROOT / link).is_file()
        elif link.startswith("#"):
            assert link[1:] in anchors_in(text)
        else:
            assert link.startswith("https://"), f"{link} is not absolute"


def test_files_of_the_docs_that_anything_names_exist():
    named = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *PAGES]
    for folder in ("src", "tools", "examples", "integrations"):
        named += sorted((ROOT / folder).rglob("*.py"))
    for path in named:
        for name in re.findall(r"\bdocs/[\w/.-]+\.(?:md|png|svg)\b", path.read_text()):
            assert (ROOT / name).is_file(), f"{name_of(path)} names {name}"


def test_every_page_is_in_the_navigation():
    told = set(re.findall(r"([\w/-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert {path.relative_to(DOCS).as_posix() for path in PAGES} == told, "add the page to nav in mkdocs.yml"


# What pages are made from -------------------------------------------------------------------------------------


def test_pages_of_methods_and_profiles_are_what_their_tool_writes():
    written = methods_page.pages()
    for name, text in written.items():
        assert (DOCS / name).read_text() == text, "run python tools/methods_page.py texts"
    there = {path.relative_to(DOCS).as_posix() for path in (DOCS / "methods").glob("*.md")}
    assert there == written.keys() - {"methods.md", "profiles.md"}


def test_every_method_has_a_paragraph_and_a_picture_of_its_own():
    drawn = {path.stem for path in (DOCS / "methods").glob("*.svg")}
    assert (
        methods_page.ABOUT.keys()
        == drawn
        == {entry.name for module in (dense, park, baselines) for entry in module.ENTRIES}
    )


def described(path: Path) -> str:
    return re.search(r"<desc[^>]*>(.*)</desc>", path.read_text())[1]


def test_pictures_of_the_concepts_are_what_their_tool_draws():
    pytest.importorskip("diffusers")
    concepts_page = import_module("concepts_page")

    drawn = {*concepts_page.DRAWN, "gpu_scaling", "frontier", "run", "caches"}
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == drawn
    for name in ("reuse", "anchors"):  # the others are computed from a video, in minutes
        assert described(DOCS / f"pictures/{name}.svg") == concepts_page.DRAWN[name]().description


@pytest.mark.parametrize("name", methods_page.OF_THE_GRID)
def test_masks_that_depend_on_the_grid_alone_are_what_their_method_chooses(name):
    pytest.importorskip("diffusers")
    assert described(DOCS / f"methods/{name}.svg") == methods_page.picture(name).description


def test_the_picture_of_the_scaling_is_that_of_its_records():
    drawn = re.findall(r"<!-- (\w+): exponent (\S+) -->", (DOCS / "pictures/gpu_scaling.svg").read_text())
    recorded = import_module("records").lines("gpu_scaling.jsonl", "scaling")
    fits = [(line["part"].removesuffix(": fit"), f"{line['exponent']:.2f}") for line in recorded if "exponent" in line]
    assert drawn == fits, "run park bench scaling with --plot"


@pytest.mark.parametrize("name", ["frontier", "run", "caches"])
def test_the_pictures_of_frontiers_are_those_of_their_records(name, tmp_path):
    import_module("frontier_pictures").DRAWINGS[name]().write(tmp_path / "it.svg")
    stored = (DOCS / f"pictures/{name}.svg").read_text()
    assert (tmp_path / "it.svg").read_text() == stored, "run python tools/frontier_pictures.py"


def test_versions_in_the_docs_are_the_bounds_of_the_package():
    extras = PROJECT["project"]["optional-dependencies"]["diffusers"]
    bound = next(line.partition(">=")[2] for line in extras if line.startswith("diffusers>="))
    assert f"diffusers {bound} and newer are taken" in (DOCS / "integrate.md").read_text()
    python = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert f"Python {python} or newer" in (DOCS / "quickstart.md").read_text()


def test_tools_of_the_docs_are_pinned_and_no_dependency_of_the_package():
    tools = PROJECT["dependency-groups"]["docs"]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in tools)
    extras = [line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines]
    required = [*PROJECT["project"]["dependencies"], *extras]
    assert not [line for line in required if line.startswith("mkdocs")]


def test_no_page_uses_words_of_ours_alone():
    private = ("left no record", "bar of reuse", "meetings")
    assert [(name_of(path), word) for path in TEXTS for word in private if word in path.read_text()] == []
