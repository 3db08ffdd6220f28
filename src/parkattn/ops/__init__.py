"""Operations, one folder each: `definition.py` is the paper's equation in PyTorch, the other files compute it in
kernels.

A folder's `__init__.py` is the operation's address: its functions take a `Backend` first, which says whether the
definition or a kernel runs. Kernels take and return plain tensors, and never wait for the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from parkattn.checks import expect_finite, shape_of
from parkattn.site import REFERENCE as REFERENCE
from parkattn.site import Backend as Backend

Given = ParamSpec("Given")
Found = TypeVar("Found")


def operation(definition: Callable[Given, Found], kernels: str) -> Callable[Concatenate[Backend, Given], Found]:
    """The function of that name in the module `kernels`, where the backend has kernels, else the definition itself."""

    @functools.wraps(definition)
    def chosen(backend: Backend, *given: Given.args, **named: Given.kwargs) -> Found:
        if backend.name == "reference":
            return definition(*given, **named)
        kernel: Callable[..., Found] = getattr(import_module(kernels), definition.__name__)
        with on_gpu_of(next(x for x in (*given, *named.values()) if isinstance(x, Tensor))):
            return kernel(*given, **named)

    return chosen


def on_gpu_of(x: Tensor) -> Any:
    """Kernels run on the current GPU, which need not be that of their tensors, as after pipe.to("cuda:1")."""
    return torch.cuda.device_of(x)


@contextlib.contextmanager
def explained_memory(q: Tensor, k: Tensor, doing: str) -> Iterator[None]:
    """An out-of-memory error inside says what was asked for and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if str(error).startswith("memory:"):  # explained further down already
            raise
        asked = re.search(r"allocate (\d[\d.]* \w+)", str(error))
        raise torch.OutOfMemoryError(
            f"memory: expected room for {asked[1] if asked else 'the tensors'} more on {q.device} in {doing} with q "
            f"{shape_of(q)} and k {shape_of(k)}, got out of memory; "
            "pass fewer heads at a time, a smaller resolution or fewer frames, or offload other models of the pipeline "
            "(enable_model_cpu_offload)."
        ) from error


@contextlib.contextmanager
def outside_autocast(q: Tensor) -> Iterator[None]:
    """Compute in the precision that is named: autocast would cluster and select in half precision."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield


@contextlib.contextmanager
def planning(q: Tensor, k: Tensor, check_finite: bool = False) -> Iterator[None]:
    """Around a planner: a plan that lives for steps keeps no graph of this one."""
    if check_finite:
        expect_finite("q", q)
        expect_finite("k", k)
    with torch.no_grad(), outside_autocast(q), explained_memory(q, k, "a plan"):
        yield


def keep_scratch_in_torch() -> None:
    """Memory for what a sanitizer of Triton's keeps per launch; our kernels need none."""
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
