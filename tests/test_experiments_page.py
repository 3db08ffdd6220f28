"""The page of `park reproduce`, also in a real browser (conftest.py says which)."""

import base64
import hashlib
import html
import re

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("av")
pytest.importorskip("PIL")

from comparison_pages import DESKTOP, PHONE, opened, picture
from parklab.experiments import figures
from parklab.experiments.paper_numbers import PAPER
from parklab.experiments.report import FEW_ROWS, NOT_ASKED, sections_of, to_page
from parklab.experiments.results import Dots, Result
from parklab.experiments.tables import Column, Finding, Table, text_table, to_html

EMPTY = "tab:module_ablation"
ABOUT = {"model": "m </script> & more", "video": "9 frames", "runs": "8 prompts, seed 0"}
FINDINGS = (
    Finding("a statement <b>", 0.5, "dB", 0.1),
    Finding("a second", -0.2, "dB", 0.3),
    Finding("another", None, reason="density: expected more; " * 6),
)


def page_of(folder, judged: bool = True):
    """Every table as wide as the paper's own but for one that was not run, and a reason as long as reasons get."""
    results = {
        label: Result(text_table(printed.columns, printed.rows), FINDINGS)
        for label, printed in PAPER.items() if label != EMPTY
    }  # fmt: skip
    path = folder / "index.html"
    path.write_text(to_page(sections_of(results), ABOUT, {}, judged), encoding="utf-8")
    return path, len(results)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return page_of(tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["1440", "390"])
def test_nothing_on_the_page_is_wider_than_the_screen_or_comes_from_outside(browser, made, size):
    tab = opened(browser, made[0], color_scheme="light", **size)
    assert tab.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"]
    assert tab.evaluate("() => { scrollTo(500, 0); return scrollX; }") == 0
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    picture(tab, f"reproduce-{size['viewport']['width']}")
    assert tab.requests == [made[0].as_uri()] and not tab.failures


def test_the_tally_says_how_many_held_what_that_rests_on_and_where(browser, made):
    path, count = made
    tab = opened(browser, path, **DESKTOP)
    assert tab.locator("#verdict").inner_text() == f"{count} of {2 * count} measured statements held."
    told = tab.locator("#verdict + p").inner_text()
    assert told == "It rests on: m </script> & more, 9 frames, 8 prompts, seed 0."
    cards = dict(zip(*(tab.locator(f".figures {part}").all_inner_texts() for part in ("small", "b")), strict=True))
    assert cards == {"held": f"{count}", "not held": f"{count}", "of both, less than their interval": f"{count}", "not measured": f"{count}"}  # fmt: skip
    links = tab.locator("main a").all_inner_texts()
    assert len(links) == count and not any(re.match(r"(tab|fig):", text) for text in links)
    assert tab.locator("tbody tr:has(a)").first.locator("td").all_inner_texts() == ["1"] * 4


def test_every_count_of_the_tally_is_seen_on_a_phone(browser, made):
    tab = opened(browser, made[0], **PHONE)
    assert tab.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('.tally').parentElement)") <= 0


def test_what_the_paper_prints_is_folded_where_it_is_long(made):
    text = made[0].read_text(encoding="utf-8")
    for printed in PAPER.values():
        told = html.escape(f"printed in the paper: {printed.caption}")
        long = len(printed.rows) > FEW_ROWS
        assert (f"<summary>{told} ({len(printed.rows)} rows)</summary>" in text) == long
        assert (f"<h3>{told}</h3>" in text) == (not long)


def test_a_section_without_records_is_folded_and_one_with_them_is_open(browser, made):
    tab = opened(browser, made[0], **DESKTOP)
    empty = tab.locator("#tab-module_ablation")
    assert empty.evaluate("e => e.tagName === 'DETAILS' && !e.open") and not empty.locator("table").is_visible()
    empty.locator("summary").click()
    assert NOT_ASKED.format(EMPTY) in empty.inner_text() and empty.locator("table").is_visible()
    assert tab.locator("section#tab-main_quality_efficiency table").first.is_visible()


def test_a_quick_run_judges_nothing(browser, tmp_path):
    path, count = page_of(tmp_path, judged=False)
    tab = opened(browser, path, **DESKTOP)
    assert "no statement is judged" in tab.locator("#verdict").inner_text()
    assert tab.locator("li.held, li.not-held").count() == 0 and "not held" not in tab.locator("body").inner_text()
    assert tab.locator(".figures small").all_inner_texts() == ["computed", "not measured"]
    assert tab.locator("main li").filter(has_text="margin +0.5 ± 0.1 dB").count() == count


def test_text_of_records_is_escaped_and_the_page_allows_its_own_script_alone(made):
    page = made[0].read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; img-src" in page
    assert "a statement &lt;b&gt;" in page and page.count("<script") == 1


def test_an_axis_of_values_spans_their_difference_and_not_zero(monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(figures, "_as_png", lambda canvas: drawn.append(canvas) or b"")
    figures.draw(Dots((("recall, %", ("Euclidean", "QRKC"), (90.66, 90.88)),)))
    low, high = drawn[0].axes[0].get_ylim()
    assert 90 < low < 90.66 and 90.88 < high < 91.5


def test_rows_that_were_not_run_are_counted_and_not_shown(tmp_path):
    columns = tuple(
        Column(name, digits) for name, digits in (("method", None), ("runs", None), ("PSNR", 2), ("note", None))
    )
    ran, unrun = (
        ("park", 8, 45.08, ""),
        [(name, 0, None, "not run: left to another shard") for name in ("one", "other")],
    )
    label = "tab:module_ablation"

    def page(*rows):
        return to_page(sections_of({label: Result(Table(columns, rows), FINDINGS)}), ABOUT, {})

    text = page(ran, *unrun)
    assert "2 rows without runs: left to another shard." in text and '<th scope="row">one</th>' not in text
    assert '<th scope="row">park</th>' in text and "rows without runs" not in page(ran)


def test_numbers_that_are_printed_as_text_stand_below_each_other():
    table = text_table(("name", "PSNR", "Speedup", "who"), [("64", "29.38", "1.68×", "a"), ("128", "–", "10×", "2 b")])
    heads = re.findall(r'<th scope="col" class="(\w*)">(\w+)', to_html(table))
    assert heads == [("text", "name"), ("", "PSNR"), ("", "Speedup"), ("text", "who")]


def test_a_figure_of_which_the_paper_prints_nothing_has_no_empty_column_beside_it():
    table = text_table(("a", "b"), [("x", "1")])
    text = to_page(sections_of({"fig:retrieval_mismatches": Result(table, FINDINGS)}), ABOUT, {})
    assert (
        "The paper prints no numbers of this figure." in text
        and text.partition("Without records")[0].count("<h3>") == 1
    )
