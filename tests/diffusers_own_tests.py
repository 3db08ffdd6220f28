"""A pytest plugin for diffusers' own tests: the tiny text encoders and tokenizers that they take from the hub are made
here, and with --keep-every-block every supported transformer that they make runs PARK with every block kept, which is
dense.

PYTHONPATH=tests python -m pytest -p diffusers_own_tests --keep-every-block DIFFUSERS/tests/models/transformers

What they expect of exact frames fails with made-up encoders, with stock attention too; what compares two runs of a
pipeline says as much as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

import parkattn
import tiny_pipelines
from parkattn.models import MODELS, row_for
from parklab.research import ResearchConfig

KEEP_ALL = ResearchConfig(
    query_clusters=4, key_clusters=6, kmeans_iterations=2, top_p=1.0, dense_steps=0, reference_steps=4
)
HUB = ("hf-internal-testing/", "finetrainers/")
TOKENIZERS = (
    "AutoTokenizer", "T5Tokenizer", "T5TokenizerFast", "CLIPTokenizer", "LlamaTokenizer", "LlamaTokenizerFast",
    "Qwen2Tokenizer",
)  # fmt: skip


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--keep-every-block", action="store_true", help="run PARK in every supported transformer")


def pytest_configure(config: Any) -> None:
    _make_encoders()
    if config.getoption("--keep-every-block"):
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


def _t5_config(*_: Any, **__: Any) -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=0.0
    )


def _t5_encoder(*_: Any, **__: Any) -> transformers.T5EncoderModel:
    torch.manual_seed(0)
    return transformers.T5EncoderModel(_t5_config()).eval()


def _make_encoders() -> None:
    made: dict[str, Callable[..., Any]] = {"AutoConfig": _t5_config, "T5EncoderModel": _t5_encoder}
    made |= {
        name: lambda *_, bos=None if "T5" in name or "Auto" in name else "<s>", **__: tiny_pipelines.tokenizer(77, bos)[
            0
        ]
        for name in TOKENIZERS
    }
    for name, make in made.items():
        kind: Any = getattr(transformers, name, None)
        if kind is not None:
            kind.from_pretrained = _unless_on_the_hub(kind.from_pretrained, make)


def _unless_on_the_hub(load: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        return make() if str(name).startswith(HUB) else load(name, *args, **kwargs)

    return from_pretrained
