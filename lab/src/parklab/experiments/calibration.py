"""Which budget of a method gives a density, and which density makes a run cost a share of all-dense attention.

cost = a + (1 - a) density, where a is the share of calls that the method's schedule leaves dense.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parkattn.methods import make_method, method_entry
from parkattn.models import MODELS
from parkattn.park import ParkConfig
from parkattn.planned import PlannedMethod
from parkattn.reuse import count_phases, dense_prefix
from parkattn.settings import MethodConfig
from parkattn.site import AttentionMethod
from parklab.experiments.captures import CapturedCall
from parklab.experiments.evaluation import named_cell
from parklab.metrics.budget import density_of_sparse_calls, solve_budget
from parklab.research import ResearchConfig, studied_entry
from parklab.store import Cell, Record
from parklab.studio.model_folder import judge_folder

OWN_SETTINGS = "compare it at its own settings."
MATCHED = 0.05  # a density further off is not the one that was asked for


def named_profile(profile: str | None) -> dict[str, Any]:
    """What a request says of a profile: with its settings, so that a profile that changed is measured again."""
    return {} if profile is None else {"profile": profile, "profile_settings": dict(ResearchConfig.PROFILES[profile])}


def budget_cell(spare: Mapping[str, Any], wanted: Mapping[str, Any]) -> Cell:
    """The budget of a quality cell's request. spare: what is asked of the prompt that budgets are found on."""
    fields = ("method", "density", "changes", "file_hashes", "profile", "profile_settings")
    label = f"{wanted.get('profile') or wanted['method']}-at-{wanted['density']:g}"
    return named_cell("budget", label, {**spare, **{name: wanted[name] for name in fields if name in wanted}})


def budget_field(method: str, asked: str | None = None) -> str:
    """The budget that a density is reached by: the one asked for where the method has it."""
    budgets = method_entry(method).budgets
    if not budgets:
        raise ValueError(f"method: expected one whose density can be set, got {method!r}; {OWN_SETTINGS}")
    return asked if asked in budgets else budgets[0]


def captured_steps(which: str, steps: int | None) -> tuple[int, ...]:
    """The paper's first sparse step, where a plan is made; for calibration ("spread") the last one too."""
    assert steps
    first = min(dense_prefix(ParkConfig(), steps), steps - 1)
    return (first,) if which == "first" else tuple(sorted({first, steps - 1}))


def find_budget(
    method: str, config: MethodConfig, density: float, calls: Sequence[CapturedCall], field: str | None = None
) -> Record:
    """The budget with which the calls that the method leaves sparse have the density on average."""
    field, entry = field or budget_field(method), studied_entry(method)

    def reached(value: float) -> float:
        budgeted = _planned(make_method(entry, entry.with_budget(config, field, value)))
        return density_of_sparse_calls(budgeted, ((call.q, call.k, call.site) for call in calls))

    value, got = solve_budget(reached, density)
    return {"field": field, "value": value, "density": got}


def density_refusal(budget: Record, name: str, density: float) -> str:
    """Empty where the density is the one asked for. name: of the method, or of the profile."""
    if abs(budget["density"] - density) <= MATCHED:
        return ""
    wanted = f"density: expected a {budget['field']} of {name} that gives {density:g} at this size"
    return f"{wanted}, got {budget['density']:.2f} at best; {OWN_SETTINGS}"


def cost_refusal(name: str, density: float, share: float) -> str:
    """Empty where a run can have the density that a cost leaves to its sparse calls."""
    if 0 < density < 1:
        return ""
    wanted = f"cost: expected one between {share:.3g}, the dense calls of {name}, and 1"
    return f"{wanted}, got {cost_at(density, share):.3g}; ask for another density."


def cost_at(density: float, share: float) -> float:
    """share: of the calls that are dense."""
    return share + (1 - share) * density


def density_at(cost: float, share: float) -> float:
    # rounded, so that costs that are equal but for float arithmetic ask for one cell
    return round((cost - share) / (1 - share), 6) if share < 1 else 0.0


def dense_share(method: AttentionMethod, steps: int, layers: int) -> float:
    """Share of a run's calls that the schedule of a method leaves dense, anchors among them.

    Noise levels move anchors and leave their number as it is, so none are needed.
    """
    return sum(phases["dense"] + phases["anchor"] for phases in scheduled_phases(method, steps, layers)) / (
        layers * steps
    )


def scheduled_phases(method: AttentionMethod, steps: int, layers: int) -> list[Counter[str]]:
    """By layer."""
    return [count_phases(_planned(method).schedule, steps, layer) for layer in range(layers)]


def layers_in(folder: Path) -> int:
    """Attention layers of the transformer in a diffusers folder, by the names of its weights: nothing is loaded."""
    part = next(part for part in judge_folder(folder).components if part.name == "transformer")
    patterns = [rf"({re.escape(blocks)}\.\d+\.{re.escape(own)})\." for blocks, own in MODELS[part.class_name].blocks]
    found = (re.match(pattern, name) for pattern in patterns for name in part.tensors)
    return len({match[1] for match in found if match})


def _planned(method: AttentionMethod) -> PlannedMethod:
    if not isinstance(method, PlannedMethod):
        raise ValueError(f"method: expected one that plans blocks, got {method.name!r}; {OWN_SETTINGS}")
    return method
