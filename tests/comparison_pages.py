"""Comparison pages with made-up figures, and a browser tab that looks at one."""

import os

import numpy as np

from parkattn.park import ParkConfig
from parklab.studio.compare import main_variant
from parklab.studio.page import render_page
from parklab.studio.scores import variant_label
from parklab.studio.video import still, write_mp4

FRAMES, FPS = 24, 12
DESKTOP = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
WARNING = "The speed-up is rough, because timing was unsteady."
VERDICT = "{}: about 1.30× the speed of dense; worst frame 11 of 24 (0.8 s) 25.0 dB, strongest in the lower centre; mean 31.7 dB."
PSNR = [30.0 + (i % 5) for i in range(FRAMES)]
WORST = 10
PSNR[WORST] = 25.0


def method_row(name: str, level: float, *, equal: bool = False) -> dict:
    steps = [
        {
            "step": i,
            "phase": "refresh" if i else "dense",
            "density": level,
            "recall": 0.9 if i else None,
            "seconds": 1.0,
        }
        for i in range(4)
    ]
    sparse = name != "dense"
    before, _, last = name.rpartition("-")
    method, profile = (before, last) if last in ParkConfig.PROFILES else (name, None)
    psnr = PSNR if sparse and not equal else [100.0] * FRAMES
    return {
        "name": name, "label": variant_label(method, profile), "method": method, "profile": profile, "config": {}, "changes": {"top_p": 0.8} if method == "park" else {},
        "command": f"park generate x --method {method}", "verdict": VERDICT.format(variant_label(method, profile)),
        "psnr": {"mean": sum(psnr) / FRAMES, "worst": min(psnr), "per_frame": psnr},
        "equal_frames": sum(y == 100 for y in psnr), "worst_frame": {"frame": psnr.index(min(psnr)), "psnr": min(psnr), "place": "centre"},
        "ssim": {"mean": 0.9, "worst": 0.8}, "lpips": None, "speedup": 1.3, "steps": steps, "density": level,
        "density_sparse_steps": level if sparse else None, "recall": {"mean": 0.9, "p05": 0.8, "worst": 0.7} if sparse else None,
        "heat": {"recall": [[0.9, 0.7]] * 3 if sparse else None, "density": [[0.3, 0.5]] * 3 if sparse else None},
        "map": {"layers": [["transformer", i] for i in range(3)], "density": [[1.0, 0.4, 0.5, 0.6]] * 3,
                "recall": [[None, 0.9, 0.8, 0.7]] * 3 if sparse else None},
        "phase_seconds": {"dense": 1.0, "refresh": 2.0, "reuse": 0.0}, "seconds": {"denoise": 3.0, "attention": 2.0, "decode": 1.0},
    }  # fmt: skip


def write_page(
    folder, methods: dict[str, int], *, prompts=("a </script> sentence & more",), warning=None, equal=(), speeds=()
):
    """methods: the red of each one's first frame; a further case is that many levels greener. speeds: of each method."""
    cases, clips, stills = [], [], []
    for number, prompt in enumerate(prompts):
        made = {}
        for name, start in methods.items():
            frames = np.zeros((FRAMES, 64, 96, 3), np.uint8)
            frames[..., 0] = start + 6 * np.arange(FRAMES)[:, None, None]
            frames[..., 1] = 60 * number
            write_mp4(folder / f"{name}.mp4", frames, FPS)
            made[name] = (folder / f"{name}.mp4").read_bytes()
        rows = [method_row(name, 0.4 if name != "dense" else 1.0, equal=name in equal) for name in methods]
        for row, speed in zip(rows, speeds, strict=False):
            row["speedup"] = speed
        cases.append({
            "name": f"case-{number}" if len(prompts) > 1 else "", "prompt": prompt, "seed": number, "tokens": 5400, "methods": rows,
            "timing_warning": warning, "videos": {name: f"{name}-{number}.mp4" for name in methods}, "side_by_side": "side_by_side.mp4",
        })  # fmt: skip
        clips.append(made)
        stills.append(still(frames))
    settings = {
        "prompt": prompts[0], "frames": FRAMES, "width": 96, "height": 64, "steps": 4, "seed": 0, "fps": FPS,
        "device": "cpu",
    }  # fmt: skip
    report = {
        "settings": settings, "command": "park compare --methods dense,park", "tokens": 5400, "lpips": "no", "protocol": "as written",
        "environment": {"cpu": "a CPU", "threads": 1}, "timing_warning": warning, "methods": cases[0]["methods"], "cases": cases,
        "main": main_variant(cases[0]["methods"]),
    }  # fmt: skip
    page = folder / "index.html"
    page.write_text(render_page(report, clips, stills), encoding="utf-8")
    return page, clips


def opened(browser, path, part: str = "", **options):
    tab = browser.new_context(**options).new_page()
    tab.requests, tab.failures = [], []
    tab.on("request", lambda request: tab.requests.append(request.url))
    tab.on("pageerror", lambda error: tab.failures.append(str(error)))
    tab.goto(path.as_uri() + part)
    return tab


# browsers keep media time in whole microseconds
TIMES = "[...document.querySelectorAll('video')].map(v => v.currentTime)"
RED = "x => document.getElementById('canvas').getContext('2d').getImageData(x, 5, 1, 1).data[0]"


def until(tab, condition: str) -> None:
    """Playwright's own waiting evaluates strings inside the page, which the page's content policy forbids."""
    for _ in range(600):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}; video times {tab.evaluate(TIMES)}, errors {tab.failures}")


def at_frame(tab, frame: int) -> None:
    """Paused there, and drawn. frame: counted from 0."""
    until(tab, f"{TIMES}.every(t => t > 0)")
    tab.evaluate(
        f"document.getElementById('scrub').value = {frame}; document.getElementById('scrub').dispatchEvent(new Event('input'))"
    )
    until(tab, f"document.getElementById('clock').textContent.startsWith('frame {frame + 1} ')")
    until(tab, "[...document.querySelectorAll('video')].every(v => !v.seeking)")


def picture(tab, name: str) -> None:
    if os.environ.get("PARK_SCREENSHOTS"):
        tab.screenshot(path=os.path.join(os.environ["PARK_SCREENSHOTS"], f"{name}.png"), full_page=True)  # noqa: PTH118


# key -> what it makes true, one after the other in a tab of three cases
KEYS = {
    "3": "document.querySelector('[data-mode=heat]').getAttribute('aria-pressed') === 'true'",
    "]": "document.getElementById('gain-told').textContent === '× 11.3'",
    "[": "document.getElementById('gain-told').textContent === '× 8'",
    "2": "document.querySelector('[data-mode=blink]').getAttribute('aria-pressed') === 'true'",
    "1": "document.querySelector('[data-mode=wipe]').getAttribute('aria-pressed') === 'true'",
    "+": "document.getElementById('zoom').value === '1.5'",
    "Shift+ArrowRight": "new DOMMatrix(document.getElementById('canvas').style.transform.replace(/%/g, 'px')).e < 0",
    "-": "document.getElementById('zoom').value === '1'",
    "End": f"document.getElementById('clock').textContent.startsWith('frame {FRAMES} ')",
    "ArrowLeft": f"document.getElementById('clock').textContent.startsWith('frame {FRAMES - 1} ')",
    "Home": "document.getElementById('clock').textContent.startsWith('frame 1 ')",
    "s": "document.getElementById('a').value === 'park'",
    "n": "document.getElementById('case').value === '1'",
    "p": "document.getElementById('case').value === '0'",
    "t": "document.documentElement.dataset.theme === 'dark'",
    " ": "document.getElementById('play').getAttribute('aria-label') === 'Pause'",
}
