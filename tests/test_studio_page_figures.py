"""The curve, the tables and the maps of the comparison page, in a real browser (conftest.py says which)."""

import pytest

pytest.importorskip("av")
pytest.importorskip("PIL")

from comparison_pages import DESKTOP, FRAMES, PSNR, WARNING, WORST, at_frame, opened, picture, until, write_page

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
