"""PARK: training-free block-sparse attention for video diffusion transformers.

import parkattn
parkattn.enable(pipe)                   # a diffusers pipeline: Wan, HunyuanVideo and their family
out = parkattn.park_attention(q, k, v)  # or one attention call: [batch, heads, tokens, dim]
"""

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
