"""Packages that only some commands need, and the one line that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any


def install_command(extra: str | None = None) -> str:
    """Adds an extra to the installed parklab, or the packages that it always needs: pip asks no index for parklab
    itself.
    """
    return "pip install parklab" if extra is None else f"pip install 'parklab[{extra}]'"


def package(name: str, purpose: str, extra: str | None = None) -> Any:
    """The module, or one line that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        lacking = (missing.name or name).partition(".")[0]
        line = f"{lacking}: expected for {purpose}, got no such package; install it with: {install_command(extra)}"
        raise ModuleNotFoundError(line, name=lacking) from None


def pyplot(purpose: str) -> Any:
    """matplotlib.pyplot that draws into files."""
    package("matplotlib", purpose, "plots").use("Agg")
    return package("matplotlib.pyplot", purpose, "plots")
