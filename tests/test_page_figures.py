"""Figures on pages, in a real browser (conftest.py says which): the page of `park reproduce`, and the curve, the tables
and the maps of the comparison page.
"""

import base64
import hashlib
import html
import re

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("av")
pytest.importorskip("PIL")

from comparison_pages import (
    DESKTOP,
    FRAMES,
    PHONE,
    PSNR,
    WARNING,
    WORST,
    at_frame,
    opened,
    picture,
    until,
    write_page,
)  # fmt: skip
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


# The comparison page ----------------------------------------------------------------------------------


PROFILES = {"dense": 0, "park-paper": 20, "park-quality": 30, "park-fast": 40}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("page"), {"dense": 0, "park": 40})


@pytest.fixture(scope="module")
def wide_page(tmp_path_factory):
    """Every method, a long word in the prompt, and times that cannot be trusted."""
    methods = dict.fromkeys(("dense", "park", "park-no-pama", "park-no-qrkc", "centroid"), 0)
    return write_page(
        tmp_path_factory.mktemp("wide"), methods, warning=WARNING, prompts=("a " + "very" * 30 + " long word",)
    )[0]


@pytest.fixture(scope="module")
def profiles_page(tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("profiles"), PROFILES, speeds=(1.0, 0.9, 0.33, 0.5))[0]


def test_a_click_on_the_curve_seeks_and_the_worst_frame_is_a_key_away(browser, page_file):
    tab = opened(browser, page_file[0], **DESKTOP)
    at_frame(tab, 0)
    box = tab.locator("#curve").bounding_box()
    tab.mouse.click(box["x"] + (17 + 0.5) / FRAMES * box["width"], box["y"] + 20)
    until(tab, f"document.getElementById('clock').textContent === 'frame 18 of {FRAMES}'")
    assert tab.locator("#curve").get_attribute("aria-valuetext") == f"frame 18 of {FRAMES}, {PSNR[17]:.1f} dB"
    tab.locator("#curve").focus()
    tab.keyboard.press("ArrowRight")
    until(tab, "document.getElementById('curve').getAttribute('aria-valuenow') === '19'")
    tab.keyboard.press("w")
    until(tab, f"document.getElementById('clock').textContent.startsWith('frame {WORST + 1} ')")
    assert "worst, 25.0 dB" in tab.locator("#curve").inner_text()


def test_equal_is_explained_and_has_no_curve(browser, tmp_path):
    page = write_page(tmp_path, {"dense": 0, "park": 0}, equal=("park",))[0]
    tab = opened(browser, page)
    assert tab.locator("#figures b").first.inner_text() == "equal"
    assert "no PSNR to draw" in tab.locator("#curve").inner_text()
    told = " ".join(tab.locator("#shown").inner_text().split())
    assert "no 8-bit value of a frame differs" in told
    assert "What you see is mp4" in told
    assert "measured on the raw frames" in told


def test_the_maps_show_layers_by_step_and_by_head(browser, page_file):
    tab = opened(browser, page_file[0])
    assert tab.locator(".heat rect").count() == 3 * 4
    assert tab.locator(".heat rect[fill='var(--line)']").count() == 3  # dense steps
    assert (
        tab.locator(".heat svg").get_attribute("aria-label")
        == "recall of PARK, paper by layer and step: mean 0.80, from 0.70 to 0.90"
    )
    tab.click("[data-heat=density]")
    assert "density of PARK, paper by layer and step: mean 0.63" in tab.locator(".heat svg").get_attribute("aria-label")
    tab.click("[data-axis=head]")
    assert tab.locator(".heat rect").count() == 3 * 2


def test_a_wide_table_scrolls_in_its_own_box_and_the_page_does_not(browser, wide_page):
    tab = opened(browser, wide_page, viewport={"width": 375, "height": 812}, is_mobile=True, has_touch=True)
    box = tab.locator(".scroll:has(#table)")
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    assert tab.evaluate("() => { scrollTo(500, 0); return scrollX; }") == 0
    assert box.evaluate("b => b.scrollWidth > 2 * b.clientWidth && b.getBoundingClientRect().right <= 375")
    last, names = tab.locator("#table thead th").last, tab.locator("#table tbody th").first
    assert last.bounding_box()["x"] > 375
    box.evaluate("b => { b.scrollLeft = b.scrollWidth; }")
    assert last.bounding_box()["x"] + last.bounding_box()["width"] <= 375 and tab.evaluate("scrollX") == 0
    # the names of the methods stay, and leave most of the box to the figures
    assert names.bounding_box()["x"] == box.bounding_box()["x"] + 1
    assert names.bounding_box()["width"] < box.bounding_box()["width"] / 2
    # without a finger: the arrow keys scroll what can be reached by tab
    box.focus()
    tab.keyboard.press("ArrowLeft")
    until(tab, "(b => b.scrollLeft < b.scrollWidth - b.clientWidth)(document.querySelector('.scroll:has(#table)'))")
    assert tab.locator("#table thead th").all_inner_texts()[:3] == ["method", "PSNR dB", "speed-up"]
    assert not tab.failures


def test_unsteady_times_are_told_beside_the_speed_up(browser, page_file, wide_page):
    for page, warned in ((wide_page, True), (page_file[0], False)):
        tab = opened(browser, page, viewport={"width": 375, "height": 812})
        note, figure = tab.locator("#rough"), tab.locator("#figures b").nth(1).inner_text()
        assert note.is_visible() == warned and figure == ("≈\u00a01.30×" if warned else "1.30×")
        assert note.inner_text() == (WARNING if warned else "")


@pytest.mark.parametrize("width", [1440, 390])
def test_every_curve_is_named_and_neither_curves_nor_the_playhead_cross_a_word(browser, profiles_page, width):
    tab = opened(browser, profiles_page, f"#frame={WORST + 1}", viewport={"width": width, "height": 900})
    until(tab, f"document.getElementById('clock').textContent.startsWith('frame {WORST + 1} ')")
    words = tab.locator("#curve .key span:not(.dot)").all_inner_texts()
    assert words == ["PARK, paper", "PARK, quality", "PARK, fast", "25.0 to 34.0 dB", "worst, 25.0 dB"]
    box = "e => { const r = e.getBoundingClientRect(); return [r.top, r.bottom]; }"
    words_end = max(each.evaluate(box)[1] for each in tab.locator("#curve .key span").all())
    drawn = [each.evaluate(box)[0] for each in tab.locator("#curve polyline, #curve line, #curve i").all()]
    assert len(drawn) == len(PROFILES) + 1 and words_end <= min(drawn)
    picture(tab, f"curve-{width}")


def test_every_column_is_in_view_on_a_desktop(browser, profiles_page, wide_page):
    for page in (profiles_page, wide_page):
        tab = opened(browser, page, **DESKTOP)
        assert tab.locator(".scroll:has(#table)").evaluate("b => b.scrollWidth <= b.clientWidth")


def test_a_value_is_best_only_where_methods_differ_and_a_time_only_where_dense_is_slower(
    browser, tmp_path, profiles_page
):
    best = "[...document.querySelectorAll('#table .best')].map(c => c.textContent)"
    assert opened(browser, profiles_page, **DESKTOP).evaluate(best) == []
    faster = write_page(tmp_path, PROFILES, speeds=(1.0, 1.2, 0.33, 0.5))[0]
    assert opened(browser, faster, **DESKTOP).evaluate(best) == ["1.20×", "3.0"]


def test_no_two_labels_of_an_axis_are_alike(browser, page_file, profiles_page):
    labels = "[...document.querySelectorAll('.chart svg')].map(s => [...s.querySelectorAll('.tick')].map(t => t.textContent))"
    for file in (page_file[0], profiles_page):
        axes = opened(browser, file, **DESKTOP).evaluate(labels)
        assert len(axes) == 3 and all(len(set(axis)) == len(axis) > 2 for axis in axes), axes


def test_the_colour_of_the_best_is_explained_where_a_value_has_it(browser, page_file, tmp_path):
    told = "!document.getElementById('best-told').hidden"
    assert not opened(browser, page_file[0], **DESKTOP).evaluate(told)
    faster = write_page(tmp_path, PROFILES, speeds=(1.0, 1.2, 0.33, 0.5))[0]
    assert opened(browser, faster, **DESKTOP).evaluate(told)
