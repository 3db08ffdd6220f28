"""What a caller may pass. Every message names the argument, what was expected, what came and what to do.

Nothing here repairs or casts input.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = torch.finfo(torch.float32).max
LARGEST_COUNT = 2**31 - 1  # blocks, layers and steps are counted in int32
SHOWN = 120  # characters of a value in a message


def shown(value: object) -> str:
    """A value on one line of bounded length, whatever its repr does."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {shape_of(value)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of somebody else's, or a whole number of more digits than Python prints
        text = f"a value of type {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def first_line(error: BaseException) -> str:
    """Of what an error says; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(given: object, known: Iterable[str], otherwise: str) -> str:
    """Advice that ends a message: the nearest known name, where one is near."""
    near = difflib.get_close_matches(str(given), sorted(known), n=1) if isinstance(given, str) else []
    return f"did you mean {near[0]}?" if near else otherwise


def shape_of(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def expect_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected a torch.Tensor, got {type(value).__name__}; convert it with torch.as_tensor."
        )


def expect_heads(name: str, value: object) -> None:
    """A floating [b, h, n, d] tensor that holds at least one element."""
    expect_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.layout != torch.strided or value.is_quantized:
        raise TypeError(
            f"{name}: expected an ordinary tensor, got {value.layout} of {value.dtype}; "
            f"convert it with {name}.to_dense()."
        )
    if value.device.type == "meta":
        raise ValueError(f"{name}: expected a tensor with values, got one on the device meta; make it on a CPU or GPU.")
    if value.ndim != 4:
        raise ValueError(
            f"{name}: expected [batch, heads, tokens, dim], got {shape_of(value)}; "
            "add the missing axis with unsqueeze or view."
        )
    if value.dtype not in FLOATS:
        raise TypeError(
            f"{name}: expected float32, bfloat16, float16 or float64, got {value.dtype}; cast it with {name}.float()."
        )
    if value.numel() == 0:
        raise ValueError(
            f"{name}: expected at least one token and one channel, got {shape_of(value)}; "
            "skip the call for empty input."
        )


def expect_attention_inputs(q: Tensor, k: Tensor, *values: Tensor) -> None:
    """q [b h n d], k and, where given, v [b h m d] on one device in one dtype."""
    expect_heads("q", q)
    for name, other in zip(("k", "v"), (k, *values), strict=False):
        expect_heads(name, other)
        if other.device != q.device:
            raise ValueError(
                f"{name}: expected device {q.device} as q has, got {other.device}; move it with {name}.to(q.device)."
            )
        if other.dtype != q.dtype:
            raise TypeError(
                f"{name}: expected dtype {q.dtype} as q has, got {other.dtype}; cast it with {name}.to(q.dtype)."
            )
        if other.shape[:2] != q.shape[:2] or (name == "k" and other.shape[3] != q.shape[3]):
            b, h, _, d = q.shape
            hint = (
                "repeat k and v to the query heads" if other.shape[1] != h else "use the same batch and head dimension"
            )
            if other.shape[1] != h and (other.shape[1] == q.shape[2] or other.shape[2] == h):
                hint = "q, k and v are [batch, heads, tokens, dim]: transpose(1, 2) what is [batch, tokens, heads, dim]"
            raise ValueError(
                f"{name}: expected [{b}, {h}, tokens, {d}] to match q {shape_of(q)}, got {shape_of(other)}; {hint}."
            )
    if values and values[0].shape[2] != k.shape[2]:
        raise ValueError(
            f"v: expected {k.shape[2]} tokens as k has, got {values[0].shape[2]}; "
            "pass the values that belong to these keys."
        )


def expect_finite(name: str, value: Tensor) -> None:
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(
            f"{name}: expected finite values, got {bad} NaN or Inf of {value.numel()}; "
            "look for overflow before attention (fp16 activations, a bad checkpoint)."
        )


def asks_for_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def expect_no_gradient(backend: str, *tensors: Tensor) -> None:
    if asks_for_gradient(*tensors):
        raise ValueError(
            f"q, k, v: expected tensors without gradient with backend={backend!r}, got requires_grad=True; "
            "call under torch.no_grad(), or use backend='reference', which has a gradient."
        )


def expect_key_valid(key_valid: Tensor, k: Tensor) -> None:
    """bool [b, m] on k's device, with at least one True per row, which is not checked on a GPU."""
    expect_tensor("key_valid", key_valid)
    b, m = k.shape[0], k.shape[2]
    if key_valid.dtype != torch.bool:
        raise TypeError(
            f"key_valid: expected torch.bool, True where a key may be attended, got {key_valid.dtype}; "
            "cast it with .bool()."
        )
    if tuple(key_valid.shape) != (b, m):
        raise ValueError(
            f"key_valid: expected [{b}, {m}] (batch, key tokens), got {shape_of(key_valid)}; "
            "squeeze or expand it to that shape."
        )
    if key_valid.device != k.device:
        raise ValueError(
            f"key_valid: expected device {k.device} as k has, got {key_valid.device}; move it with .to(k.device)."
        )
    if key_valid.is_cuda:  # reading values would wait for the GPU
        return
    empty = (~key_valid.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"key_valid: expected at least one valid key per batch element, got none in element {empty[0]}; "
            "drop that element."
        )


def expect_text(text: slice, n: int, m: int) -> None:
    """A span start:stop inside both sequences that leaves something to cluster."""
    if not (isinstance(text, slice) and _is_whole(text.start) and _is_whole(text.stop) and text.step in (None, 1)):
        raise TypeError(
            f"text: expected slice(start, stop) with both ends given, got {shown(text)}; "
            "write slice(first_text_token, last_text_token + 1)."
        )
    shorter = min(n, m)
    if not 0 <= text.start <= text.stop <= shorter:
        raise ValueError(
            f"text: expected a span inside 0..{shorter} (the shorter of q and k), got "
            f"{shown(text.start)}..{shown(text.stop)}; count tokens after patching."
        )
    if text.stop - text.start >= shorter:
        raise ValueError(
            f"text: expected at least one token outside the span, got {text.start}..{text.stop} of {shorter}; "
            "use dense attention for text alone."
        )


def expect_count(name: str, value: object, least: int = 1, most: int = LARGEST_COUNT) -> None:
    if not _is_whole(value):
        raise TypeError(f"{name}: expected a whole number >= {least}, got {shown(value)}; pass an int.")
    assert isinstance(value, int)
    if value < least:
        raise ValueError(
            f"{name}: expected a whole number >= {least}, got {shown(value)}; raise it to at least {least}."
        )
    if value > most:
        raise ValueError(f"{name}: expected a whole number <= {most}, got {shown(value)}; lower it.")


def expect_by_length(name: str, value: Any, least: int) -> Any:
    """A pair may come out of JSON, as a list; only a number that is at least 1 may be left to a rule."""
    if not isinstance(value, (tuple, list)):
        expect_count(name, value, least=least)
        return value
    if len(value) != 2:
        raise TypeError(
            f"{name}: expected a whole number or two, for a long and for a short video, got {shown(value)}; "
            "write (12, 32)."
        )
    for count in value:
        if count is not None or least == 0:
            expect_count(name, count, least=least)
    return value[0], value[1]


def _fits_float32(value: float) -> bool:
    """Not so for NaN and Inf; PyTorch takes no whole number past int64."""
    return abs(value) <= (LARGEST if isinstance(value, float) else LARGEST_COUNT)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def expect_string(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}: expected some text, got {shown(value)}; pass a str.")


def expect_path(name: str, value: object) -> None:
    if not isinstance(value, (str, os.PathLike)) or os.fsdecode(value) == "" or "\0" in os.fsdecode(value):
        raise TypeError(f"{name}: expected a path, got {shown(value)}; pass a str or a pathlib.Path.")


def expect_device(name: str, value: object) -> None:
    """A device that is here and holds values."""
    advice = "pass cpu, or the device of q."
    try:
        device = torch.device(value) if isinstance(value, (str, torch.device)) else None
    except RuntimeError:
        device = None
    if device is None or device.type == "meta":
        raise TypeError(f"{name}: expected a device that holds values, got {shown(value)}; {advice}")
    if device.type != "cpu" and not 0 <= (device.index or 0) < torch.get_device_module(device.type).device_count():
        raise ValueError(f"{name}: expected a device that this machine has, got {shown(value)}; {advice}")


def expect_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}; pass a bool.")


def expect_indices(name: str, value: Any) -> tuple[int, ...]:
    """Sorted, each once, counted from 0."""
    try:
        indices = None if isinstance(value, (str, bytes, Mapping)) else tuple(value)
    except TypeError:
        indices = None
    if indices is None:
        raise TypeError(
            f"{name}: expected a collection of indices counted from 0, got {shown(value)}; write (0, 1) or range(...)."
        )
    for index in indices:
        expect_count(name, index, least=0)
    return tuple(sorted(set(indices)))


def expect_fraction(name: str, value: object, *, zero: bool) -> None:
    """A number in [0, 1] or, with zero=False, in (0, 1]."""
    interval = "[0, 1]" if zero else "(0, 1]"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number in {interval}, got {shown(value)}; pass a float.")
    if not (0 <= value <= 1) or (value == 0 and not zero):
        raise ValueError(f"{name}: expected a number in {interval}, got {shown(value)}; choose a value inside.")


def expect_positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a positive number, got {shown(value)}; pass a float.")
    if not (value > 0 and _fits_float32(value)):
        raise ValueError(
            f"{name}: expected a positive number that float32 holds, got {shown(value)}; "
            "choose a small value such as 1e-6."
        )


def expect_choice(name: str, value: object, choices: Iterable[str]) -> None:
    allowed = sorted(choices)
    if not isinstance(value, str) or value not in allowed:
        advice = did_you_mean(value, allowed, "pick one of these.")
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {shown(value)}; {advice}")


def expect_scale(scale: object) -> None:
    """None, or a finite number."""
    if scale is None:
        return
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale: expected a number or None for head_dim ** -0.5, got {shown(scale)}; pass a float.")
    if not _fits_float32(scale):
        raise ValueError(
            f"scale: expected a finite number that float32 holds, got {shown(scale)}; pass None for head_dim ** -0.5."
        )


def expect_call_site(site: Any) -> None:
    """The fields of a `site.CallSite`, before a method reads them."""
    for name in ("layer", "step", "video"):
        expect_count(name, getattr(site, name, None), least=0)
    for name in ("branch", "transformer"):
        expect_string(name, getattr(site, name))
    expect_flag("paired", site.paired)
    if site.total_steps is not None:
        expect_count("total_steps", site.total_steps)
    if site.grid is not None:
        if not isinstance(site.grid, tuple) or len(site.grid) != 3:
            raise TypeError(
                f"grid: expected (frames, height, width) in tokens, got {shown(site.grid)}; pass three whole numbers."
            )
        for size in site.grid:
            expect_count("grid", size)
    if site.noise_levels is not None and not isinstance(site.noise_levels, tuple):
        raise TypeError(
            f"noise_levels: expected a tuple of numbers, one per step, got {shown(site.noise_levels)}; pass a tuple."
        )
    if site.dense is not None and not callable(site.dense):
        raise TypeError(
            f"dense: expected a function that returns attention's output, got {shown(site.dense)}; "
            "pass a function or None."
        )
    if site.ranks is not None and not callable(getattr(site.ranks, "gather", None)):
        raise TypeError(
            f"ranks: expected an object with rank and gather, or None, got {shown(site.ranks)}; "
            "leave it out in one process."
        )
    expect_scale(site.scale)
