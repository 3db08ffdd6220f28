"""The comparison page in a real browser. Needs Debian's chromium (or PARK_CHROMIUM=/path) and the package playwright."""

import base64
import json
import os
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("av")

from parkattn.studio.page import render_page
from parkattn.studio.video import write_mp4

FRAMES, FPS = 24, 12
BROWSER = os.environ.get("PARK_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]


def method_row(name: str, level: float) -> dict:
    steps = [
        {"step": i, "phase": "refresh" if i else "dense", "density": level, "recall": 0.9 if i else None, "seconds": 1.0} for i in range(4)
    ]
    sparse = name != "dense"
    return {
        "method": name, "config": {}, "psnr": {"mean": 30.0 if sparse else 100.0, "worst": 28.0, "per_frame": [30.0] * FRAMES},
        "ssim": {"mean": 0.9, "worst": 0.8}, "lpips": None, "speedup": 1.3, "steps": steps, "density": level,
        "density_sparse_steps": level if sparse else None, "recall": {"mean": 0.9, "p05": 0.8, "worst": 0.7} if sparse else None,
        "heat": {"recall": [[0.9, 0.7]] * 3 if sparse else None, "density": [[0.3, 0.5]] * 3 if sparse else None},
        "phase_seconds": {"dense": 1.0, "refresh": 2.0, "reuse": 0.0}, "seconds": {"denoise": 3.0, "attention": 2.0, "decode": 1.0},
    }  # fmt: skip


WARNING = "The speed-up is rough, because timing was unsteady."


def write_page(folder, methods: dict[str, int], **changes):
    """methods: the red of each one's first frame."""
    clips = {}
    for name, start in methods.items():
        frames = np.zeros((FRAMES, 64, 96, 3), np.uint8)
        for i in range(FRAMES):
            frames[i, :, :, 0] = start + 6 * i
        write_mp4(folder / f"{name}.mp4", frames, FPS)
        clips[name] = (folder / f"{name}.mp4").read_bytes()
    settings = {
        "prompt": "a </script> sentence & more",
        "frames": FRAMES,
        "width": 96,
        "height": 64,
        "steps": 4,
        "seed": 0,
        "fps": FPS,
        "device": "cpu",
    }
    settings |= changes.pop("settings", {})
    report = {"settings": settings, "tokens": 5400, "lpips": "no", "protocol": "as written", "environment": {"cpu": "a CPU", "threads": 1}}
    report |= {"timing_warning": None, "methods": [method_row(name, 0.4 if name != "dense" else 1.0) for name in methods]}
    page = folder / "index.html"
    page.write_text(render_page(report | changes, clips), encoding="utf-8")
    return page, clips


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("page"), {"dense": 0, "park": 40})


@pytest.fixture(scope="module")
def wide_page(tmp_path_factory):
    """Every method, a long word in the prompt, and times that cannot be trusted."""
    methods = dict.fromkeys(("dense", "park", "park-no-pama", "park-no-qrkc", "centroid"), 0)
    return write_page(
        tmp_path_factory.mktemp("wide"), methods, timing_warning=WARNING, settings={"prompt": "a " + "very" * 30 + " long word"}
    )[0]


def test_the_page_holds_its_videos_and_names_nothing_outside(page_file):
    page, clips = page_file
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text) and "@import" not in text and "fetch(" not in text
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["settings"]["prompt"] == "a </script> sentence & more"
    assert {name: base64.b64decode(uri.partition(",")[2]) for name, uri in data["videos"].items()} == clips


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or set PARK_CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield chromium
        chromium.close()


def opened(browser, path, **options):
    tab = browser.new_context(**options).new_page()
    tab.requests, tab.failures = [], []
    tab.on("request", lambda request: tab.requests.append(request.url))
    tab.on("pageerror", lambda error: tab.failures.append(str(error)))
    tab.goto(path.as_uri())
    return tab


# browsers keep media time in whole microseconds
TIMES = "[...document.querySelectorAll('video')].map(v => v.currentTime)"


def until(tab, condition: str) -> None:
    """Playwright's own waiting evaluates strings inside the page, which the page's content policy forbids."""
    for _ in range(600):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}; video times {tab.evaluate(TIMES)}, errors {tab.failures}")


def test_videos_play_together_and_nothing_is_requested(browser, page_file):
    tab = opened(browser, page_file[0], viewport={"width": 1280, "height": 900})
    until(tab, f"{TIMES}.every(t => t > 0.2)")  # playing by itself; fails by time-out otherwise
    tab.click("#play")
    assert tab.evaluate("[...document.querySelectorAll('video')].every(v => v.paused)")
    until(tab, "[...document.querySelectorAll('video')].every(v => !v.seeking)")
    assert len(set(tab.evaluate(TIMES))) == 1
    tab.evaluate("document.getElementById('scrub').value = 7; document.getElementById('scrub').dispatchEvent(new Event('input'))")
    assert tab.evaluate(TIMES) == pytest.approx([7.5 / FPS] * 2, abs=1e-5)
    tab.click("#forward")
    assert tab.evaluate(TIMES) == pytest.approx([8.5 / FPS] * 2, abs=1e-5)
    tab.click("#back")
    tab.click("#back")
    assert tab.evaluate(TIMES) == pytest.approx([6.5 / FPS] * 2, abs=1e-5)
    assert not [url for url in tab.requests if not url.startswith(("file:", "blob:", "data:"))] and not tab.failures
    if os.environ.get("PARK_SCREENSHOTS"):
        tab.screenshot(path=os.path.join(os.environ["PARK_SCREENSHOTS"], "page-desktop.png"), full_page=True)  # noqa: PTH118


def test_the_large_view_shows_both_videos_and_their_difference(browser, page_file):
    tab = opened(browser, page_file[0])
    until(tab, f"{TIMES}.every(t => t > 0)")
    tab.evaluate("document.getElementById('scrub').value = 3; document.getElementById('scrub').dispatchEvent(new Event('input'))")
    until(tab, "document.getElementById('clock').textContent.startsWith('frame 4 ')")
    red = "x => document.getElementById('canvas').getContext('2d').getImageData(x, 5, 1, 1).data[0]"
    left, right = tab.evaluate(red, 10), tab.evaluate(red, 85)
    assert 25 < right - left < 55  # the videos are 40 levels apart; the codec moves either by a few
    tab.click("[data-mode=difference]")
    until(tab, f"({red})(85) > 100")


def test_a_phone_shows_everything_without_scrolling_sideways(browser, page_file):
    tab = opened(browser, page_file[0], viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True, color_scheme="dark")
    until(tab, f"{TIMES}.every(t => t > 0)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.locator(".heat").count() == 1 and tab.locator(".chart").count() == 4 and tab.locator("#table tbody tr").count() == 2
    if os.environ.get("PARK_SCREENSHOTS"):
        tab.screenshot(path=os.path.join(os.environ["PARK_SCREENSHOTS"], "page-phone.png"), full_page=True)  # noqa: PTH118


def test_a_wide_table_scrolls_in_its_own_box_and_the_page_does_not(browser, wide_page):
    tab = opened(browser, wide_page, viewport={"width": 375, "height": 812}, is_mobile=True, has_touch=True)
    box = tab.locator(".scroll")
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    assert tab.evaluate("() => { scrollTo(500, 0); return scrollX; }") == 0
    assert box.evaluate("b => b.scrollWidth > 2 * b.clientWidth && b.getBoundingClientRect().right <= 375")
    last, names = tab.locator("#table th").last, tab.locator("#table td").first
    assert last.bounding_box()["x"] > 375
    box.evaluate("b => { b.scrollLeft = b.scrollWidth; }")
    assert last.bounding_box()["x"] + last.bounding_box()["width"] <= 375 and tab.evaluate("scrollX") == 0
    # the names of the methods stay, and leave most of the box to the figures
    assert names.bounding_box()["x"] == box.bounding_box()["x"] + 1 and names.bounding_box()["width"] < box.bounding_box()["width"] / 2
    # without a finger: the arrow keys scroll what can be reached by tab
    box.focus()
    tab.keyboard.press("ArrowLeft")
    until(tab, "(b => b.scrollLeft < b.scrollWidth - b.clientWidth)(document.querySelector('.scroll'))")
    assert tab.locator("#table th").all_inner_texts()[:3] == ["method", "PSNR dB", "speed-up"] and not tab.failures


def test_unsteady_times_are_told_beside_the_speed_up(browser, page_file, wide_page):
    for page, warned in ((wide_page, True), (page_file[0], False)):
        tab = opened(browser, page, viewport={"width": 375, "height": 812})
        note, figure = tab.locator("#rough"), tab.locator("#figures b").nth(1).inner_text()
        assert note.is_visible() == warned and figure == ("≈ 1.30×" if warned else "1.30×")
        assert note.inner_text() == (WARNING if warned else "")
        assert tab.locator("#figures").evaluate("f => f.nextElementSibling.id") == "rough"
