"""Every method by name. A new one is a file under baselines/ and a row here."""

from __future__ import annotations

from collections.abc import Callable

from parkattn.attention import Park
from parkattn.baselines.dense import Dense
from parkattn.checks import expect_choice
from parkattn.config import ParkConfig
from parkattn.site import AttentionMethod

METHODS: dict[str, Callable[[ParkConfig], AttentionMethod]] = {
    "dense": lambda config: Dense(),
    "park": Park,
    # the paper's ablations: without PAMA, without QRKC, and without both, which is retrieval by centroids
    "park-no-pama": lambda config: Park(config.replace(importance="query-centroid"), "park-no-pama"),
    "park-no-qrkc": lambda config: Park(config.replace(key_metric="euclidean"), "park-no-qrkc"),
    "centroid": lambda config: Park(config.replace(importance="query-centroid", key_metric="euclidean"), "centroid"),
}


def make_method(name: str, config: ParkConfig | None = None) -> AttentionMethod:
    """A fresh method with no state."""
    expect_choice("method", name, METHODS)
    return METHODS[name](config or ParkConfig())
