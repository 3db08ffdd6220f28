"""Two warpgroups of a warp-specialised kernel hand shared memory to each other, at the hardware's numbered barriers.

Gluon offers mbarriers alone, and there one thread arrives for its warpgroup: NVIDIA's racecheck does not follow that,
and reports what was handed over as a race (docs/diary.md, "Hand-overs that a sanitizer cannot follow"). Here every
thread arrives. Triton itself uses the numbers 0 to 2 in these kernels; the test suite looks for a clash in the PTX.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _in_every_thread(instruction: gl.constexpr):
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(instruction + "; mov.b32 $0, $1;", "=r,r", [threads], gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_sync(NUMBER: gl.constexpr):
    """Wait for the other warpgroup: what it did before its `barrier_sync` or `barrier_arrive` with this number is seen
    from here on.
    """
    _in_every_thread("barrier.sync " + NUMBER + ", 256")


@gluon.jit
def barrier_arrive(NUMBER: gl.constexpr):
    """Let the other warpgroup's `barrier_sync` with this number pass, without waiting for it."""
    _in_every_thread("barrier.arrive " + NUMBER + ", 256")
