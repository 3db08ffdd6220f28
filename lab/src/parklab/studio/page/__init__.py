"""The page people look at first: one HTML file with the videos inside and nothing outside."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

TEMPLATE, STYLE = "page.html", "page.css"
THEME = "theme.js"
SCRIPTS = (THEME, "base.js", "stage.js", "charts.js", "report.js")  # in the order in which they run


def render_page(report: dict[str, Any], videos: Sequence[dict[str, bytes]], stills: Sequence[bytes] = ()) -> str:
    """index.html of a comparison. videos: mp4 by method, of each case; stills: a JPEG of each case, for the gallery."""
    data = {name: value for name, value in report.items() if name != "request"}
    data["stills"] = [f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}" for picture in stills]
    clips = [{name: base64.b64encode(mp4).decode() for name, mp4 in case.items()} for case in videos]
    # each case in an element of its own: only what is looked at is parsed
    element = '<script id="videos-{}" type="application/json">{}</script>'
    held = "\n".join(element.format(i, _as_json(case)) for i, case in enumerate(clips))
    parts = {
        "__STYLE__": page_part(STYLE),
        "__SCRIPT__": "\n".join(map(page_part, SCRIPTS)),
        "__DATA__": _as_json(data),
        "__VIDEOS__": held,
    }
    # in one pass: what a part says is no mark
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], page_part(TEMPLATE))


@functools.cache
def page_digest() -> str:
    """Of the files that a page is made of: a report made with others is written again. Reset: cache_clear."""
    return hashlib.sha256("".join(map(page_part, (TEMPLATE, STYLE, *SCRIPTS))).encode()).hexdigest()[:16]


def page_part(name: str) -> str:
    """A file of the page as text; other pages share the style and the theme."""
    return resources.files("parklab.studio.page").joinpath(name).read_text(encoding="utf-8")


def _as_json(value: Any) -> str:
    """ "</script>" inside a prompt must not end the script element; JSON in a browser has no NaN."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
