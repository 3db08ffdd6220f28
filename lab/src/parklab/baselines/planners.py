"""Shared by planners that see one call: settings, the backend of a call, and the entry of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from parkattn.backend import resolve_for
from parkattn.ops import Backend
from parkattn.planned import PlannedMethod, Planner, Repair
from parkattn.registry import MethodEntry
from parkattn.settings import PlannedConfig
from parkattn.site import CallSite

Config = TypeVar("Config", bound=PlannedConfig)


class ConfiguredPlanner(Generic[Config]):
    def __init__(self, config: Config) -> None:
        self.config = config

    def backend(self, q: Tensor, site: CallSite) -> Backend:
        return site.backend or resolve_for(q, self.config.backend)


def planned_entry(
    name: str,
    planner: Callable[[Any], Planner],
    config: type[PlannedConfig],
    line: str,
    paper: str,
    *budgets: str,
    repair: Callable[[Any], Repair | None] = lambda settings: None,
) -> MethodEntry:
    """Of a method that is made of its settings. budgets: the usual one first."""

    def make(settings: Any) -> PlannedMethod:
        return PlannedMethod(name, planner(settings), settings, repair=repair(settings))

    return MethodEntry(name, make, line, config, budgets=budgets, paper=paper)
