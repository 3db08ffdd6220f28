"""PARK: training-free block-sparse attention for video diffusion transformers.

import parkattn
parkattn.enable(pipe)                   # a diffusers pipeline: Wan, HunyuanVideo and their family
out = parkattn.park_attention(q, k, v)  # or one attention call: [batch, heads, tokens, dim]
"""

from parkattn.attention import Park, build_plan, park_attention
from parkattn.config import ParkConfig
from parkattn.hosts.diffusers import disable, enable, sequence_parallel_plan, summary
from parkattn.methods import METHODS, make_method
from parkattn.plan import Plan
from parkattn.site import AttentionMethod, AttentionOutput, AttentionStats, CallSite

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "AttentionMethod",
    "AttentionOutput",
    "AttentionStats",
    "CallSite",
    "Park",
    "ParkConfig",
    "Plan",
    "build_plan",
    "disable",
    "enable",
    "make_method",
    "park_attention",
    "sequence_parallel_plan",
    "summary",
]
