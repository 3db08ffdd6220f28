"""Entries of methods: how each is made, set and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parkattn.checks import expect_choice
from parkattn.settings import MethodConfig
from parkattn.site import AttentionMethod


@dataclass(frozen=True)
class MethodEntry:
    """One method by name. Another package offers its own under the entry point group "parkattn.methods"."""

    name: str
    """Name for users."""
    make: Callable[[Any], AttentionMethod]
    """Makes the method from a value of `config`."""
    line: str
    """Description in one line."""
    config: type[MethodConfig] = MethodConfig
    """Type of its settings."""
    budgets: tuple[str, ...] = ()
    """Fields in (0, 1] that set its density, the usual one first."""
    paper: str = ""
    """Where it is described."""

    def budget(self, field: str, value: float) -> dict[str, Any]:
        """The settings that give one of its budgets a value, and turn those off that would compete with it."""
        expect_choice("budget", field, self.budgets)
        optional = {f.name for f in dataclasses.fields(self.config) if "None" in str(f.type)}
        return {other: None for other in self.budgets if other != field and other in optional} | {field: value}

    def with_budget(self, config: MethodConfig, field: str, value: float) -> MethodConfig:
        """The config with one of its budgets set, and those off that would compete with it."""
        return config.replace(**self.budget(field, value))
