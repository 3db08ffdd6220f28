"""What a caller may pass. Every message names the argument, what was expected, what came and what to do.

Nothing here repairs or casts input.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def shape_of(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def expect_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}; convert it with torch.as_tensor.")


def expect_heads(name: str, value: object) -> None:
    """A floating [b, h, n, d] tensor that holds at least one element."""
    expect_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.ndim != 4:
        raise ValueError(
            f"{name}: expected [batch, heads, tokens, dim], got {shape_of(value)}; add the missing axis with unsqueeze or view."
        )
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {value.dtype}; cast it with {name}.float().")
    if value.numel() == 0:
        raise ValueError(f"{name}: expected at least one token and one channel, got {shape_of(value)}; skip the call for empty input.")


def expect_attention_inputs(q: Tensor, k: Tensor, *values: Tensor) -> None:
    """q [b h n d], k and, where given, v [b h m d] on one device in one dtype."""
    expect_heads("q", q)
    for name, other in zip(("k", "v"), (k, *values), strict=False):
        expect_heads(name, other)
        if other.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q has, got {other.device}; move it with {name}.to(q.device).")
        if other.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as q has, got {other.dtype}; cast it with {name}.to(q.dtype).")
        if other.shape[:2] != q.shape[:2] or (name == "k" and other.shape[3] != q.shape[3]):
            b, h, _, d = q.shape
            hint = "repeat k and v to the query heads" if other.shape[1] != h else "use the same batch and head dimension"
            raise ValueError(f"{name}: expected [{b}, {h}, tokens, {d}] to match q {shape_of(q)}, got {shape_of(other)}; {hint}.")
    if values and values[0].shape[2] != k.shape[2]:
        raise ValueError(f"v: expected {k.shape[2]} tokens as k has, got {values[0].shape[2]}; pass the values that belong to these keys.")


def expect_finite(name: str, value: Tensor) -> None:
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(
            f"{name}: expected finite values, got {bad} NaN or Inf of {value.numel()}; look for overflow before attention (fp16 activations, a bad checkpoint)."
        )


def asks_for_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def expect_key_valid(key_valid: Tensor, k: Tensor) -> None:
    """bool [b, m] on k's device, with at least one True per row."""
    expect_tensor("key_valid", key_valid)
    b, m = k.shape[0], k.shape[2]
    if key_valid.dtype != torch.bool:
        raise TypeError(f"key_valid: expected torch.bool, True where a key may be attended, got {key_valid.dtype}; cast it with .bool().")
    if tuple(key_valid.shape) != (b, m):
        raise ValueError(
            f"key_valid: expected [{b}, {m}] (batch, key tokens), got {shape_of(key_valid)}; squeeze or expand it to that shape."
        )
    if key_valid.device != k.device:
        raise ValueError(f"key_valid: expected device {k.device} as k has, got {key_valid.device}; move it with .to(k.device).")
    empty = (~key_valid.any(dim=1)).nonzero().flatten().tolist() if key_valid.device.type != "meta" else []
    if empty:
        raise ValueError(
            f"key_valid: expected at least one valid key per batch element, got none in element {empty[0]}; drop that element."
        )


def expect_text(text: slice, n: int, m: int) -> None:
    """A span start:stop inside both sequences that leaves something to cluster."""
    if not isinstance(text, slice) or text.start is None or text.stop is None or text.step not in (None, 1):
        raise TypeError(
            f"text: expected slice(start, stop) with both ends given, got {text!r}; write slice(first_text_token, last_text_token + 1)."
        )
    shorter = min(n, m)
    if not 0 <= text.start <= text.stop <= shorter:
        raise ValueError(
            f"text: expected a span inside 0..{shorter} (the shorter of q and k), got {text.start}..{text.stop}; count tokens after patching."
        )
    if text.stop - text.start >= shorter:
        raise ValueError(
            f"text: expected at least one token outside the span, got {text.start}..{text.stop} of {shorter}; use dense attention for text alone."
        )


def expect_count(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number >= {least}, got {value!r}; pass an int.")
    if value < least:
        raise ValueError(f"{name}: expected a whole number >= {least}, got {value}; raise it to at least {least}.")
    if most is not None and value > most:
        raise ValueError(f"{name}: expected a whole number <= {most}, got {value}; lower it.")


def expect_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}; pass a bool.")


def expect_indices(name: str, value: Any) -> tuple[int, ...]:
    """Sorted, each once, counted from 0."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected a collection of indices counted from 0, got {value!r}; write ({value!r},) or range(...).")
    indices = tuple(value)
    for index in indices:
        expect_count(name, index, least=0)
    return tuple(sorted(set(indices)))


def expect_fraction(name: str, value: object, *, zero: bool) -> None:
    """A number in [0, 1] or, with zero=False, in (0, 1]."""
    interval = "[0, 1]" if zero else "(0, 1]"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number in {interval}, got {value!r}; pass a float.")
    if not (0 <= value <= 1) or (value == 0 and not zero):
        raise ValueError(f"{name}: expected a number in {interval}, got {value}; choose a value inside.")


def expect_positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a positive number, got {value!r}; pass a float.")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a positive finite number, got {value}; choose a small value such as 1e-6.")


def expect_choice(name: str, value: object, choices: Iterable[str]) -> None:
    allowed = sorted(choices)
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        advice = f"did you mean {near[0]}?" if near else "pick one of these."
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}; {advice}")


def expect_scale(scale: object) -> None:
    """None, or a finite number."""
    if scale is None:
        return
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale: expected a number or None for head_dim ** -0.5, got {scale!r}; pass a float.")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}; pass None for head_dim ** -0.5.")
