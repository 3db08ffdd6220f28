"""Packages that only the video commands need, and the one line that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "pip install 'parkattn[video]'"


def package(name: str, purpose: str) -> Any:
    """The module, or one line that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        lacking = (missing.name or name).partition(".")[0]
        raise ModuleNotFoundError(
            f"{lacking}: expected for {purpose}, got no such package; install it with: {INSTALL}", name=lacking
        ) from None
