"""Packages that only some commands need, and the one line that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "pip install 'parkattn[video]'"


def package(name: str, purpose: str, extra: str = "video") -> Any:
    """The module, or one line that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        lacking = (missing.name or name).partition(".")[0]
        raise ModuleNotFoundError(
            f"{lacking}: expected for {purpose}, got no such package; install it with: pip install 'parkattn[{extra}]'", name=lacking
        ) from None


def pyplot(purpose: str) -> Any:
    """matplotlib.pyplot that draws into files."""
    package("matplotlib", purpose, "plots").use("Agg")
    return package("matplotlib.pyplot", purpose, "plots")
