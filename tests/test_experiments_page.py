"""The page of `park reproduce` in a real browser. Needs Debian's chromium (or PARK_CHROMIUM=/path) and the package playwright."""

import os
import shutil

import pytest

pytest.importorskip("diffusers")

from parklab.experiments.paper_numbers import PAPER
from parklab.experiments.report import sections_of, to_page
from parklab.experiments.results import Result
from parklab.experiments.tables import Finding, text_table

BROWSER = os.environ.get("PARK_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """Every table as wide as the paper's own, and a reason as long as reasons get."""
    findings = (Finding("a statement <b>", 0.5, "dB", 0.1), Finding("another", None, reason="density: expected more; " * 6))
    results = {label: Result(text_table(printed.columns, printed.rows), findings) for label, printed in PAPER.items()}
    page = to_page(sections_of(results), {"model": "m </script> & more"}, {})
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_on_the_page_is_wider_than_the_screen_or_comes_from_outside(page_file, width):
    sync_api = pytest.importorskip("playwright.sync_api")
    asked = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        too_wide = page.evaluate("[...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length")
        held = page.locator("li.held").count()
        shown = page.locator("#tab-module_ablation + p + div td").first.is_visible()
        browser.close()
    assert too_wide == 0
    assert held > 0 and shown
    assert asked == [page_file.as_uri()]


def test_text_of_records_is_escaped(page_file):
    page = page_file.read_text()
    assert "</script>" not in page and "a statement &lt;b&gt;" in page
    assert """http-equiv="Content-Security-Policy" content="default-src 'none'; style-src""" in page and "script-src" not in page
