"""The comparison page in a real browser. Needs Debian's chromium (or PARK_CHROMIUM=/path) and the package playwright.

The accessibility test also needs axe-core: the package axe-playwright-python, or PARK_AXE=/path/to/axe.min.js from npm.
"""

import base64
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("av")
pytest.importorskip("PIL")

from comparison_pages import (
    DESKTOP,
    FPS,
    FRAMES,
    KEYS,
    PHONE,
    RED,
    TIMES,
    VERDICT,
    WARNING,
    at_frame,
    opened,
    picture,
    until,
    write_page,
)  # fmt: skip
from parklab.studio.page import SCRIPTS, render_page


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
def gallery_page(tmp_path_factory):
    prompts = ("a red circle", "a blue square over a long road by the sea", "a third one")
    return write_page(tmp_path_factory.mktemp("gallery"), {"dense": 0, "park": 40, "centroid": 20}, prompts=prompts)[0]


def test_the_page_holds_its_videos_and_names_nothing_outside(page_file):
    page, clips = page_file
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text) and "@import" not in text and "fetch(" not in text
    data = json.loads(text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0])
    assert data["cases"][0]["prompt"] == "a </script> sentence & more"
    held = json.loads(text.partition('<script id="videos-0" type="application/json">')[2].partition("</script>")[0])
    assert {name: base64.b64decode(mp4) for name, mp4 in held.items()} == clips[0]


def test_no_part_of_the_page_is_long_and_a_number_that_json_lacks_is_left_out():
    folder = Path(importlib.util.find_spec("parklab.studio.page").origin).parent
    parts = {
        path.name: path.read_text().splitlines() for path in folder.iterdir() if path.suffix in (".js", ".css", ".html")
    }
    assert set(SCRIPTS) < set(parts) and max(len(lines) for lines in parts.values()) <= 400
    text = render_page({"cases": [{"density": float("nan")}]}, [{}])
    assert '{"cases":[{"density":null}],"stills":[]}' in text


def test_videos_play_together_and_nothing_is_requested(browser, page_file):
    tab = opened(browser, page_file[0], **DESKTOP)
    until(tab, f"{TIMES}.every(t => t > 0.2)")  # playing by itself; fails by time-out otherwise
    tab.click("#play")
    assert tab.evaluate("[...document.querySelectorAll('video')].every(v => v.paused)")
    until(tab, "[...document.querySelectorAll('video')].every(v => !v.seeking)")
    assert len(set(tab.evaluate(TIMES))) == 1
    at_frame(tab, 7)
    assert tab.evaluate(TIMES) == pytest.approx([7.5 / FPS] * 2, abs=1e-5)
    tab.click("#forward")
    assert tab.evaluate(TIMES) == pytest.approx([8.5 / FPS] * 2, abs=1e-5)
    tab.click("#back")
    tab.click("#back")
    assert tab.evaluate(TIMES) == pytest.approx([6.5 / FPS] * 2, abs=1e-5)
    assert not [url for url in tab.requests if not url.startswith(("file:", "blob:", "data:"))] and not tab.failures
    picture(tab, "page-desktop")


def test_a_reader_who_wants_no_motion_starts_the_videos_himself(browser, page_file):
    tab = opened(browser, page_file[0], reduced_motion="reduce")
    until(tab, "[...document.querySelectorAll('video')].every(v => v.readyState >= 3)")
    tab.wait_for_timeout(300)
    assert tab.evaluate(TIMES) == [0, 0]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["1440x900", "390x844"])
def test_the_video_its_transport_and_the_curve_are_in_view_and_nothing_is_wider_than_the_screen(
    browser, size, page_file, gallery_page, wide_page
):
    for page in (page_file[0], gallery_page, wide_page):
        tab = opened(browser, page, **size)
        until(tab, f"{TIMES}.every(t => t > 0)")
        view, height = tab.locator("#frame").bounding_box(), size["viewport"]["height"]
        assert view["y"] > 0 and view["height"] >= 180
        for part in (".transport", "#curve"):
            box = tab.locator(part).bounding_box()
            assert box["y"] >= view["y"] + view["height"] - 1 and box["y"] + box["height"] <= height, part
        assert tab.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"] and not tab.failures


def test_wipe_shows_one_video_left_of_the_line_and_the_other_right_of_it(browser, page_file):
    tab = opened(browser, page_file[0], **DESKTOP)
    at_frame(tab, 3)
    left, right = tab.evaluate(RED, 10), tab.evaluate(RED, 85)
    assert 25 < right - left < 55  # the videos are 40 levels apart; the codec moves either by a few
    box = tab.locator("#frame").bounding_box()
    tab.mouse.click(box["x"] + 0.95 * box["width"], box["y"] + box["height"] / 2)
    until(tab, f"({RED})(85) < {left + 12}")
    assert tab.locator("#split").input_value() == "95"
    tab.locator("#split").focus()
    tab.keyboard.press("Home")  # the slider's own key, which is no frame of the video
    until(tab, f"({RED})(10) > {right - 12}")
    assert tab.locator("#clock").inner_text() == f"frame 4 of {FRAMES}"


def test_the_heat_map_grows_with_its_gain_and_says_what_white_means(browser, page_file):
    tab = opened(browser, page_file[0], "#mode=heat&gain=1&frame=4", **DESKTOP)
    until(tab, "document.getElementById('clock').textContent.startsWith('frame 4 ')")
    until(tab, f"({RED})(10) > 0")
    # 40 levels of red are 8.5 of luma
    assert tab.evaluate(RED, 10) < 60 and "white from 255 of 255 levels on" in tab.locator("#tag-a").inner_text()
    tab.locator("#gain").fill("6")
    until(tab, f"({RED})(10) > 240")
    assert "× 64: white from 4 of 255" in tab.locator("#tag-a").inner_text()
    assert tab.locator("#gain-told").inner_text() == "× 64"


def test_settings_that_were_changed_are_shown_with_their_method(browser, page_file):
    assert opened(browser, page_file[0], "", **DESKTOP).locator("#seed").inner_text().endswith("· top_p=0.8")


def test_blink_shows_both_in_turn_no_faster_than_is_safe(browser, page_file):
    tab = opened(browser, page_file[0], "#mode=blink&every=0.4&frame=4", **DESKTOP)
    until(tab, "document.getElementById('tag-a').textContent === 'dense'")
    until(tab, "document.getElementById('tag-a').textContent === 'PARK, paper'")
    until(tab, f"({RED})(10) > 35")
    assert float(tab.locator("#every").get_attribute("min")) >= 1 / 3  # at most three flashes a second
    tab.click("[data-mode=wipe]")
    assert tab.locator("#every").is_hidden() and tab.locator("#split").is_visible()


def test_zoom_enlarges_the_picture_and_the_line_stays_where_it_is(browser, page_file):
    tab = opened(browser, page_file[0], "#frame=4", **DESKTOP)
    until(tab, "document.getElementById('clock').textContent.startsWith('frame 4 ')")
    before, line = tab.locator("#canvas").bounding_box(), tab.locator("#wipe").bounding_box()
    tab.locator("#zoom").fill("4")
    after = tab.locator("#canvas").bounding_box()
    assert after["width"] == pytest.approx(4 * before["width"], rel=0.01)
    assert tab.locator("#wipe").bounding_box() == line
    x, y = before["x"] + before["width"] / 4, before["y"] + before["height"] / 2
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + 60, y + 20)
    tab.mouse.up()
    moved = tab.locator("#canvas").bounding_box()
    assert moved["x"] - after["x"] == pytest.approx(60, abs=1.5)
    assert moved["y"] - after["y"] == pytest.approx(20, abs=1.5)
    tab.keyboard.press("0")
    assert tab.locator("#canvas").bounding_box() == before


def test_the_address_holds_the_view_and_opens_it_again(browser, gallery_page):
    tab = opened(browser, gallery_page, **DESKTOP)
    until(tab, f"{TIMES}.every(t => t > 0)")
    tab.select_option("#b", "centroid")
    tab.click("[data-mode=heat]")
    tab.locator("#zoom").fill("2")
    tab.click("[data-heat=density]")
    at_frame(tab, 5)
    until(tab, "location.hash.includes('frame=6')")
    part = tab.evaluate("location.hash")
    assert part == "#b=centroid&mode=heat&zoom=2&heat=density&frame=6"
    again = opened(browser, gallery_page, part, **DESKTOP)
    until(again, "document.getElementById('clock').textContent.startsWith('frame 6 ')")
    assert again.locator("#b").input_value() == "centroid"
    assert again.locator("[data-mode=heat]").get_attribute("aria-pressed") == "true"
    assert again.locator("#zoom").input_value() == "2"
    assert again.locator("[data-heat=density]").get_attribute("aria-pressed") == "true"
    assert again.locator("#verdict").inner_text() == VERDICT.format("centroid")
    assert again.evaluate("[...document.querySelectorAll('video')].every(v => v.paused)")
    strange = opened(browser, gallery_page, "#b=nobody&mode=x&zoom=1e9&case=77&frame=abc&gain=", **DESKTOP)
    until(strange, f"{TIMES}.every(t => t > 0)")
    assert strange.locator("#b").input_value() == "park"
    assert strange.locator("#zoom").input_value() == "8"
    assert not strange.failures


def test_every_key_does_what_the_page_says_and_every_control_can_be_reached(browser, gallery_page):
    tab = opened(browser, gallery_page, "#frame=4", color_scheme="light", **DESKTOP)
    until(tab, "document.getElementById('clock').textContent.startsWith('frame 4 ')")
    for key, comes_true in KEYS.items():
        assert not tab.evaluate(comes_true), key
        tab.keyboard.press(key)
        until(tab, comes_true)
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    controls = "[...document.querySelectorAll('button, select, input, a[href], [role=slider], summary')].filter(c => c.offsetParent)"
    count = tab.evaluate(f"{controls}.length")
    reached = tab.evaluate(
        f"{controls}.filter(c => {{ c.focus(); return document.activeElement === c && c.tabIndex === 0; }}).length"
    )
    assert reached == count > 20 and not tab.failures


def test_the_theme_is_remembered(browser, page_file):
    tab = opened(browser, page_file[0], color_scheme="dark")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.click("#theme")
    tab.reload()
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert tab.locator("#theme").get_attribute("aria-pressed") == "false"


def test_a_gallery_shows_every_prompt_and_seed_and_opens_one(browser, gallery_page):
    tab = opened(browser, gallery_page, **DESKTOP)
    until(tab, f"{TIMES}.every(t => t > 0)")
    assert tab.locator("#gallery button").count() == 3 and tab.locator("#overall tbody tr").count() == 3
    assert "seed 0" in tab.locator("#seed").inner_text()
    tab.locator("#gallery button").nth(1).click()
    assert tab.locator("#prompt").inner_text() == "a blue square over a long road by the sea"
    at_frame(tab, 3)
    green = "document.getElementById('canvas').getContext('2d').getImageData(10, 5, 1, 1).data[1]"
    until(tab, f"{green} > 40")
    assert tab.locator("#gallery [aria-current=true] b").inner_text() == "a blue square over a long road by the sea"
    tab.keyboard.press("n")
    assert tab.locator("#prompt").inner_text() == "a third one" and tab.locator("#case").input_value() == "2"
    tab.click("#case-forward")
    assert tab.locator("#case").input_value() == "0" and not tab.failures
    picture(tab, "page-gallery")


def test_one_comparison_has_no_gallery(browser, page_file):
    tab = opened(browser, page_file[0])
    assert tab.locator("#gallery-part").is_hidden() and tab.locator("#case-tools").is_hidden()


def test_commands_are_copied_and_what_is_shown_is_downloaded(browser, page_file):
    page, clips = page_file
    tab = opened(browser, page, permissions=["clipboard-read", "clipboard-write"], accept_downloads=True, **DESKTOP)
    at_frame(tab, 3)
    for button, text in (
        ("#copy-compare", "park compare --methods dense,park"),
        ("#copy-method", "park generate x --method park"),
    ):
        tab.click(button)
        until(tab, "document.getElementById('told').textContent.endsWith('copied.')")
        assert tab.evaluate("navigator.clipboard.readText()") == text
    tab.click("#copy-link")
    until(tab, "document.getElementById('told').textContent === 'Link copied.'")
    assert tab.evaluate("navigator.clipboard.readText()") == page.as_uri() + "#frame=4"
    with tab.expect_download() as video:
        tab.click("#save-video")
    assert video.value.suggested_filename == "park-0.mp4" and Path(video.value.path()).read_bytes() == clips[0]["park"]
    with tab.expect_download() as metrics:
        tab.click("#save-metrics")
    assert json.loads(Path(metrics.value.path()).read_text())["cases"][0]["methods"][1]["method"] == "park"
    with tab.expect_download() as frame:
        tab.click("#save-frame")
    assert frame.value.suggested_filename == "compare-wipe-frame-4.png"
    assert Path(frame.value.path()).read_bytes()[1:4] == b"PNG"


@pytest.fixture(scope="module")
def axe():
    """The text of axe-core."""
    path = os.environ.get("PARK_AXE")
    if path is None:
        found = importlib.util.find_spec("axe_playwright_python")
        path = Path(found.origin).parent / "axe.min.js" if found is not None and found.origin else None
    if path is None or not Path(path).is_file():
        pytest.skip(
            "no axe-core on this machine: pip install axe-playwright-python, or npm install axe-core and set PARK_AXE"
        )
    return Path(path).read_text(encoding="utf-8")


@pytest.mark.parametrize(("size", "theme", "kind"), [(DESKTOP, "light", "gallery"), (DESKTOP, "dark", "wide"), (PHONE, "light", "wide"), (PHONE, "dark", "gallery")],
    ids=["1440x900, gallery", "1440x900, dark", "390x844", "390x844, dark, gallery"])  # fmt: skip
def test_axe_has_no_serious_finding(browser, gallery_page, wide_page, axe, size, theme, kind):
    page, part = (gallery_page, "#mode=heat&frame=4&axis=head") if kind == "gallery" else (wide_page, "#frame=4&zoom=2")
    tab = opened(browser, page, part, color_scheme=theme, **size)
    until(tab, "document.getElementById('clock').textContent.startsWith('frame 4 ')")
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    tab.evaluate(axe)
    found = tab.evaluate("axe.run(document).then(r => r.violations)")
    serious = [
        (each["id"], each["nodes"][0]["html"][:120]) for each in found if each["impact"] in ("serious", "critical")
    ]
    assert not serious, serious
    picture(tab, f"axe-{theme}-{size['viewport']['width']}-{kind}")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["1440x900", "390x844"])
def test_profiles_of_one_method_are_told_apart(browser, tmp_path, size):
    tab = opened(
        browser, write_page(tmp_path, {"dense": 0, "park-paper": 20, "park-quality": 30, "park-fast": 40})[0], **size
    )
    assert tab.locator("#b option").all_inner_texts() == ["dense", "PARK, paper", "PARK, quality", "PARK, fast"]
    assert tab.locator("#b").input_value() == "park-quality" and tab.title() == "PARK, quality against dense attention"
    tab.locator("#b").select_option("park-fast")
    until(tab, "document.getElementById('tag-b').textContent === 'PARK, fast'")
    assert tab.locator("#verdict").inner_text().startswith("PARK, fast: ")
    tab.locator("#a").select_option("park-paper")
    tab.locator("[data-mode=heat]").click()
    until(
        tab,
        "document.getElementById('canvas').getAttribute('aria-label') === 'luma difference of PARK, paper and PARK, fast'",
    )
    assert tab.locator("#title").inner_text() == tab.title() == "PARK, fast against PARK, paper"
    assert tab.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"] and not tab.failures
    picture(tab, f"profiles-{size['viewport']['width']}")
