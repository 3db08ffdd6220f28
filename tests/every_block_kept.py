"""A pytest plugin for diffusers' own tests: every supported transformer that they make runs PARK with every block kept,
which is dense.

PYTHONPATH=tests python -m pytest -p every_block_kept DIFFUSERS/tests/models/transformers/test_models_transformer_wan.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import diffusers

import parkattn
from parkattn.models import MODELS, row_for
from parklab.research import ResearchConfig

KEEP_ALL = ResearchConfig(
    query_clusters=4, key_clusters=6, kmeans_iterations=2, top_p=1.0, dense_steps=0, reference_steps=4
)


def pytest_configure(config: Any) -> None:
    for name in MODELS:
        made: Any = getattr(diffusers, name, None)
        if made is not None:
            made.__init__ = _then_enabled(made.__init__)


def _then_enabled(initialise: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialise)
    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        parkattn.enable(self, KEEP_ALL, image=row_for(self).image)

    return initialised
