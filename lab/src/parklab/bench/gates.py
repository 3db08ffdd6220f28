"""How gates judge: errors against float64, repeats, and calls that wait for the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]


def verdict(name: str, error: Tensor | float, allowed: Tensor | float, **more: Any) -> Case:
    """One line of a gate. NaN fails."""
    error, allowed = float(error), float(allowed)
    return {"gate": name, "ok": error <= allowed, "error": error, "allowed": allowed, **more}


def in_float64_and_own(definition: Callable[..., Any], *inputs: Tensor) -> Iterator[Any]:
    """What a definition makes of the inputs in float64, and in their own dtype."""
    return (definition(*(x.to(dtype) for x in inputs)) for dtype in (torch.float64, inputs[0].dtype))


def against_exact(
    name: str, found: Tensor, exact: Tensor, plain: Tensor, *,
    units: float = 1, unit: Tensor | float | None = None, **more: Any,
) -> Case:  # fmt: skip
    """The rule of every gate: at most twice the error of PyTorch in the same dtype (plain), both against float64, plus
    `units` of the last place of the largest value.
    """
    exact, plain = (x.to(found.device, torch.float64) for x in (exact, plain))
    unit = torch.finfo(found.dtype).eps * exact.abs().max() if unit is None else unit
    error, of_plain = ((x.double() - exact).abs().max() for x in (found, plain))
    return verdict(name, error, 2 * of_plain + units * unit, **more)


def repeated(name: str, call: Callable[[], Any], times: int) -> Case:
    """How many repeats differ from the first, which gives a tensor or several."""

    def parts() -> list[Tensor]:
        found = call()
        return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]

    first = parts()
    differing = sum(not all(map(torch.equal, first, parts())) for _ in range(times - 1))
    return verdict(f"{name}: repeats bit-equal", differing, 0)


def quick_as_careful(name: str, run: Callable[[bool], Tensor]) -> Case:
    """run: attention with quick exponentials, or without; the careful one is taken as exact."""
    out, careful = run(True), run(False)
    return against_exact(f"{name}: quick as careful where scores are steep", out, careful, careful, units=2)


@contextlib.contextmanager
def unsynchronised(device: torch.device) -> Iterator[None]:
    """What waits for the GPU in here fails."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def expect_all_pass(cases: Iterator[Case]) -> list[Case]:
    """The gate before a measurement: a fast wrong answer is not a result."""
    found = list(cases)
    for case in found:
        if not case["ok"]:
            why = case.get("failure") or f"error {case['error']} is above {case['allowed']}"
            raise RuntimeError(f"gate {case['gate']!r}: {why}, so nothing was timed.")
    return found
