"""The page people look at first: one HTML file with the videos inside and nothing outside."""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import Any


def render_page(report: dict[str, Any], videos: dict[str, bytes]) -> str:
    """index.html of a comparison. videos: mp4 by method."""
    template = resources.files("parkattn.studio").joinpath("page.html").read_text(encoding="utf-8")
    data = {**report, "videos": {name: "data:video/mp4;base64," + base64.b64encode(mp4).decode() for name, mp4 in videos.items()}}
    # "</script>" inside a prompt must not end the script element
    return template.replace("__DATA__", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
