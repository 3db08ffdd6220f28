"""What a method says about itself: how it is made, set and named."""

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
    make: Callable[[Any], AttentionMethod]  # from a value of `config`
    line: str  # what it is, in one line
    config: type[MethodConfig] = MethodConfig
    budgets: tuple[str, ...] = ()  # fields in (0, 1] that set its density, the usual one first
    paper: str = ""  # where it is described

    def with_budget(self, config: MethodConfig, field: str, value: float) -> MethodConfig:
        """The config with one of its budgets set, and those off that would compete with it."""
        expect_choice("budget", field, self.budgets)
        optional = {f.name for f in dataclasses.fields(config) if "None" in str(f.type)}
        return config.replace(**{other: None for other in self.budgets if other != field and other in optional}, **{field: value})
