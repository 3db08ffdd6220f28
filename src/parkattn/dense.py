"""Dense attention: the yardstick."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from parkattn.checks import expect_attention_inputs, expect_call_site, expect_key_valid
from parkattn.ops.attend.definition import dense_attention
from parkattn.registry import MethodEntry
from parkattn.settings import Forecasts
from parkattn.site import AttentionOutput, AttentionStats, CallSite


class Dense:
    name = "dense"
    state_bytes = 0
    tolerance = 0.0

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = tolerance

    def computes(self, site: CallSite) -> bool:
        """No step differs from the others."""
        return False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        expect_attention_inputs(q, k, v)
        expect_call_site(site)
        if site.key_valid is not None:
            expect_key_valid(site.key_valid, k)
        dense = site.dense or partial(dense_attention, q, k, v, scale=site.scale, key_valid=site.key_valid)
        return AttentionOutput(dense(), AttentionStats("dense", "the method is dense", q.new_ones(q.shape[:2])))

    def reset(self) -> None:
        """Dense attention remembers nothing."""


LINE = "every query attends to every key; the reference of the other methods"
ENTRIES = (MethodEntry("dense", lambda config: Dense(config.tolerance), LINE, Forecasts),)
