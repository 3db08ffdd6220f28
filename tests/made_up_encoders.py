"""A pytest plugin for diffusers' own pipeline tests: the tiny text encoders and tokenizers that they take from the hub
are made here.

What they expect of exact frames then fails, with stock attention too; what compares two runs of a pipeline says as much
as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

import tiny_pipelines

HUB = ("hf-internal-testing/", "finetrainers/")
TOKENIZERS = (
    "AutoTokenizer",
    "T5Tokenizer",
    "T5TokenizerFast",
    "CLIPTokenizer",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
)


def _t5_config(*_: Any, **__: Any) -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=0.0
    )


def _t5_encoder(*_: Any, **__: Any) -> transformers.T5EncoderModel:
    torch.manual_seed(0)
    return transformers.T5EncoderModel(_t5_config()).eval()


def pytest_configure(config: Any) -> None:
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
