"""What README promises in words and numbers; its code, commands, links and tables are tested with those of the docs."""

from pathlib import Path

from parkattn import ParkConfig, build_plan
from parklab.scene import clustered_scene

README = (Path(__file__).parents[1] / "README.md").read_text()


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


def test_the_density_in_the_readme_is_that_of_its_snippet():
    q, k, *_ = clustered_scene()
    density = build_plan(q, k, ParkConfig(top_p=0.9)).density().mean()
    assert f"# {100 * density:.0f} %" in README
