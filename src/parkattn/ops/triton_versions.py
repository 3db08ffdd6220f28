"""What differs between the versions of Triton, in one place: kernels take these names from here.

| here             | 3.6                               | 3.7            | 3.8            | 3.9           |
|------------------|-----------------------------------|----------------|----------------|---------------|
| `thread_barrier` | `gl.thread_barrier`               | `gl.barrier`   | `gl.barrier`   | `gl.barrier`  |
| `reinterpret`    | `_reinterpret`                    | `_reinterpret` | `_reinterpret` | `reinterpret` |
| `copy_to_shared` | `tma.async_copy_global_to_shared` | the same       | the same       | `async_load`  |
| FP fusion        | on unless told otherwise          | on             | on             | off           |
"""

import triton

OLDEST, NEWEST = (3, 6), (3, 9)
# a multiply and an add with one rounding; said at every launch, so that no default changes a result
FP_FUSION = {"enable_fp_fusion": True}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def why_no_gluon(version: str = triton.__version__) -> str | None:
    """Why the Hopper kernels, written in Gluon, are left alone with this Triton; None where they build."""
    number = _number(version)
    if OLDEST <= number <= NEWEST:
        return None
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    return f"the Hopper kernel builds with Triton {oldest} to {newest}, not with {version}"


NUMBER = _number(triton.__version__)

if why_no_gluon() is None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma

    thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    _memory = gl.shared_memory_descriptor
    reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
    copy_to_shared = tma.async_copy_global_to_shared if NUMBER < (3, 9) else tma.async_load
    # attention without shared query tiles, the shorter loop, spills there
    ALWAYS_SHARE = NUMBER == (3, 8)
