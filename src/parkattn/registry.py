"""What a method says about itself: how it is made, set and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parkattn.settings import MethodConfig
from parkattn.site import AttentionMethod


@dataclass(frozen=True)
class MethodEntry:
    """One method by name. Another package offers its own under the entry point group "parkattn.methods"."""

    name: str
    make: Callable[[Any], AttentionMethod]  # from a value of `config`
    line: str  # what it is, in one line
    config: type[MethodConfig] = MethodConfig
    budgets: tuple[str, ...] = ()  # fields in (0, 1] that set its density, the usual one first
    paper: str = ""  # where it is described
