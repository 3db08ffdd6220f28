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

    So are exclusive ors, the inside of a sort, reduced by numpy and not one by one. A Triton with other insides stays
    as slow as it is.
    """
    try:
        import numpy
        from triton.runtime import interpreter

        tl, executor, operations = interpreter.tl, interpreter.GridExecutor, interpreter.ReduceOps
        patch, launch, reduce = interpreter._patch_lang, executor.__call__, operations.apply_impl
        xor, numpy_dtype = tl.standard._xor_combine, functools.cache(interpreter._get_np_dtype)
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

    interpreter._patch_lang, executor.__call__ = patch_once, launch_with_nothing_patched
    operations.apply_impl = reduce_by_numpy
    interpreter._get_np_dtype = lambda kind: numpy_dtype(
        tl.uint64 if isinstance(kind.scalar, tl.pointer_type) else kind.scalar
    )


if __name__ == "__main__":
    sys.exit(not fork_ranks(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
