"""What README promises in words and numbers; its code, commands, links and tables are tested with those of the docs."""

import json
import re
import statistics
from pathlib import Path

from parkattn import ParkConfig, build_plan
from parklab.bench.frontier import read_records
from parklab.experiments.paper_numbers import PAPER
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


def test_the_prompts_that_the_small_model_follows_are_those_of_its_card():
    card = (ROOT / "lab/src/parklab/sprites/checkpoint/MODEL_CARD.md").read_text()
    both, motion = re.search(r"^\| 33 x 160 x 256 .* \| \*\*(\d+) %\*\* \| (\d+) % \|$", card, re.MULTILINE).groups()
    assert f"colour and shape for {both} % of 50 held-out prompts, and the asked motion for {motion} %" in " ".join(
        README.split()
    )
