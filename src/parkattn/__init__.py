"""PARK: training-free block-sparse attention for video diffusion transformers.

from parkattn import ParkConfig, park_attention
out = park_attention(q, k, v, ParkConfig(top_p=0.9))  # [batch, heads, tokens, dim]
"""

from parkattn.attention import Park, build_plan, park_attention
from parkattn.config import ParkConfig
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
    "make_method",
    "park_attention",
]
