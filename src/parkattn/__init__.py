"""PARK: training-free block-sparse attention for video diffusion transformers.

import parkattn
parkattn.enable(pipe)                   # a diffusers pipeline: Wan, HunyuanVideo and their family
out = parkattn.park_attention(q, k, v)  # or one attention call: [batch, heads, tokens, dim]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parkattn.hosts.diffusers import disable, enable, sequence_parallel_plan, summary
    from parkattn.methods import METHODS, make_method, register
    from parkattn.park import Park, ParkConfig, build_plan, park_attention
    from parkattn.plan import Plan
    from parkattn.planned import PlannedMethod, Planner
    from parkattn.registry import MethodEntry
    from parkattn.site import AttentionMethod, AttentionOutput, AttentionStats, CallSite

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "AttentionMethod",
    "AttentionOutput",
    "AttentionStats",
    "CallSite",
    "MethodEntry",
    "Park",
    "ParkConfig",
    "Plan",
    "PlannedMethod",
    "Planner",
    "build_plan",
    "disable",
    "enable",
    "make_method",
    "park_attention",
    "register",
    "sequence_parallel_plan",
    "summary",
]

_MODULES = {
    "hosts.diffusers": ("disable", "enable", "sequence_parallel_plan", "summary"),
    "methods": ("METHODS", "make_method", "register"),
    "park": ("Park", "ParkConfig", "build_plan", "park_attention"),
    "plan": ("Plan",),
    "planned": ("PlannedMethod", "Planner"),
    "registry": ("MethodEntry",),
    "site": ("AttentionMethod", "AttentionOutput", "AttentionStats", "CallSite"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: PyTorch takes two seconds, which `park --help` has no use for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
