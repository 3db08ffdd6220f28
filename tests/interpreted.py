"""A test file in processes of its own: in a pytest where Triton interprets its kernels, which must be chosen before
triton is imported, or as a program on several gloo ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own pytest")
outside = pytest.mark.skipif(INTERPRETED, reason="about a process without the interpreter")
# its numpy: rows without keys give -inf - 0, loop bounds are arrays of one element
quiet_numpy = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def run_interpreted(file: str, at_least: int) -> None:
    """Fails where a test of the file fails there, or fewer than `at_least` ran."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-x", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= at_least, f"{passed and passed[0]}, expected at least {at_least}"


def run_on_ranks(file: str, *words: str, ranks: int = 2, seconds: int = 300) -> list[dict[str, Any]]:
    """What `work(*words)` of the file prints as JSON on gloo ranks, a line each: as if torchrun ran the file."""
    run = subprocess.run(
        [sys.executable, __file__, file, str(ranks), *words], cwd=Path(file).parent, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}, timeout=seconds,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def begin_rank() -> bool:
    """Joins the ranks; whether this one compares, of which the others have no need."""
    import torch

    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by the number of accelerators
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank() == 0


def tell(**row: Any) -> None:
    """A line of what `run_on_ranks` returns."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def compared(latents: Any, sparse: Any, dense: Any, steps: int) -> dict[str, float]:
    """What ranks made beside what one process made, sparse and dense."""
    import torch

    # as in test_hosts_diffusers: n eps per step, times 2 g - 1
    rounding = 112 * torch.finfo(torch.float32).eps * steps * 9 * dense.abs().max().item()
    apart = {"difference": latents - sparse, "dense difference": latents - dense, "sparse - dense": sparse - dense}
    return {"tolerance": rounding} | {name: x.abs().max().item() for name, x in apart.items()}


def reported(ours: Any, alone: Any) -> dict[str, Any]:
    """Two summaries, of ranks and of one process."""
    found = {"calls": ours.calls, "plan bytes": ours.peak_state_bytes}
    return found | {"calls of one process": alone.calls, "plan bytes of one process": alone.peak_state_bytes}


def fork_ranks(file: str, ranks: int, words: list[str]) -> bool:
    """Whether `work(*words)` of the file ends well on every rank. Ranks are forks: to import what they need takes longer
    than their work.
    """
    work = importlib.import_module(Path(file).stem).work
    importlib.import_module("tiny_pipelines")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ["WORLD_SIZE"] = str(ranks)
    started = []
    for rank in range(ranks):
        started.append(os.fork())
        if started[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            failed = 1
            try:
                work(*words)
                failed = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failed)
    good = True
    for _ in started:  # one that fails would leave the others waiting for it
        ended, status = os.wait()
        if status and good:
            good = False
            for other in set(started) - {ended}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return good


def hasten_the_interpreter() -> None:
    """Triton's interpreter patches the language anew at every call of a device function; here once in a launch, with
    the same results.

    So are exclusive ors, the inside of a sort, reduced by numpy and not one by one, scans of whole numbers made in
    doublings, and shapes of tensors made once each. What a sum would be in 64 bits is not computed where nothing
    compares it. A Triton with other insides stays as slow as it is.
    """
    try:
        import numpy
        from triton.runtime import interpreter

        tl, executor, operations = interpreter.tl, interpreter.GridExecutor, interpreter.ReduceOps
        patch, launch, reduce = interpreter._patch_lang, executor.__call__, operations.apply_impl
        xor, numpy_dtype = tl.standard._xor_combine, functools.cache(interpreter._get_np_dtype)
        scans, core, semantic = interpreter.ScanOps, tl.core, interpreter.interpreter_semantic
        scan, sanitise = scans.generic_scan, type(semantic).binary_op_sanitize_overflow_impl
        assert isinstance(semantic.builder.options.debug, bool) and core.block_type and core.tensor and core.constexpr
        assert hasattr(interpreter, "_LangPatchScope")  # what a launch patches it takes back, and nothing else
    except (ImportError, AttributeError, AssertionError):
        return
    patched: set[str] = set()

    @functools.cache
    def languages(function) -> frozenset[str]:
        return frozenset(x.__name__ for x in (tl, tl.core) if any(x is seen for seen in function.__globals__.values()))

    def patch_once(function):
        missing = languages(function) - patched
        patched.update(missing)
        return patch(function) if missing else None

    def launch_with_nothing_patched(self, *arguments, **named):
        patched.clear()
        return launch(self, *arguments, **named)

    def reduce_by_numpy(self, given):
        if self.combine_fn is not xor or self.axis is None:
            return reduce(self, given)
        return self.to_tensor(
            numpy.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims), given[0].dtype
        )

    def scan_in_doublings(self, given):
        """A function that may be scanned with is associative, and exact on whole numbers."""
        values = [each.handle.data for each in given]
        if not all(value.dtype.kind in "iu" for value in values):
            return scan(self, given)
        length, ones = values[0].shape[self.axis], [1] * values[0].ndim
        ones[self.axis] = length
        place, step = numpy.arange(length).reshape(ones), 1
        while step < length:
            before = [
                self.to_tensor(numpy.roll(x, step, self.axis), y.dtype) for x, y in zip(values, given, strict=True)
            ]
            here = [self.to_tensor(x, y.dtype) for x, y in zip(values, given, strict=True)]
            found = self.combine_fn.fn(*before, *here)
            both = zip(found if isinstance(found, tuple) else (found,), values, strict=True)
            values = [numpy.where(place < step, x, made.handle.data) for made, x in both]
            step *= 2
        return [self.to_tensor(x, y.dtype) for x, y in zip(values, given, strict=True)]

    def sanitise_where_it_is_asserted(self, left, right, operation):
        return sanitise(self, left, right, operation) if self.builder.options.debug else None

    make_shapes_once(core)
    scans.generic_scan = scan_in_doublings
    type(semantic).binary_op_sanitize_overflow_impl = sanitise_where_it_is_asserted
    interpreter._patch_lang, executor.__call__ = patch_once, launch_with_nothing_patched
    operations.apply_impl = reduce_by_numpy
    interpreter._get_np_dtype = lambda kind: numpy_dtype(
        tl.uint64 if isinstance(kind.scalar, tl.pointer_type) else kind.scalar
    )


def make_shapes_once(core: Any) -> None:
    """Types and tensors of one shape share what they hold of it; core is triton.language.core."""
    begin_type, begin_tensor = core.block_type.__init__, core.tensor.__init__

    @functools.cache
    def parts_of(sizes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a type of that shape and a tensor of that type hold, whatever their elements."""
        made, held = core.int32, core.tensor.__new__(core.tensor)
        if sizes:
            made = core.block_type.__new__(core.block_type)
            begin_type(made, core.int32, list(sizes))
        begin_tensor(held, None, made)
        own = ("handle", "type", "dtype")
        return vars(made), {name: value for name, value in vars(held).items() if name not in own}

    def type_of_known_shape(self, element_ty, shape):
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if not sizes or not all(type(size) is int for size in sizes):
            begin_type(self, element_ty, shape)
            return
        known = parts_of(sizes)[0]
        vars(self).update(known, element_ty=element_ty, name=known["name"].replace(str(core.int32), str(element_ty)))

    def tensor_of_known_shape(self, handle, type):
        known = parts_of(tuple(type.shape) if type.is_block() else ())[1]
        vars(self).update(known, handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = type_of_known_shape, tensor_of_known_shape


if __name__ == "__main__":
    sys.exit(not fork_ranks(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
