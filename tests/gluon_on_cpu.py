"""Gluon kernels without a GPU: their Python is run as it stands, with PyTorch behind the language and a thread for
every partition.

Triton's interpreter knows no Gluon. What a warp-specialised kernel needs is little: pointers, shared memory, mbarriers,
copies by TMA, asynchronous products, hardware barriers. Time is the enemy here as on the GPU: copies are carried out in
any order by a thread of their own, and what they will overwrite is NaN from the moment they are issued; products read
shared memory when they are issued or, with `late`, only when they are waited for; and one of the threads may be `slow`.
So a slot given back too early, a wait too few and a record overwritten show as wrong numbers, a wait too many as a
time-out, and a load past its buffer as an error. What no thread can show is the order of one warp's own instructions,
which the machine code decides.
"""

from __future__ import annotations

import functools
import operator
import random
import re
import sys
import threading
import time
import types
from collections import deque

import torch

PATIENCE_S = 20


def poison(dtype: torch.dtype) -> float:
    """What stands where nothing was written yet; whole numbers have no NaN, but no step is -128 of them."""
    return torch.nan if dtype.is_floating_point else -128


class Memory:
    """A pointer: the elements of a tensor's storage, and where in them it points (an int or a tensor of them)."""

    def __init__(self, elements: torch.Tensor, at=0):
        self.elements, self.at = elements, at
        self.dtype = types.SimpleNamespace(element_ty=elements.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(torch.as_strided(tensor.detach(), (count,), (1,), 0), tensor.storage_offset())

    def __add__(self, offset) -> Memory:
        return Memory(self.elements, self.at + (offset.long() if isinstance(offset, torch.Tensor) else offset))

    def where(self, mask) -> torch.Tensor:
        at = torch.as_tensor(self.at)
        at = at if mask is None else torch.where(mask, at, 0)
        inside = (at >= 0) & (at < self.elements.numel())
        assert bool(inside.all()), f"an access at {at[~inside][:3].tolist()} of {self.elements.numel()} elements"
        return at


class Shared:
    """A piece of shared memory, seen through views of one tensor."""

    def __init__(self, view: torch.Tensor):
        self.view, self.dtype = view, view.dtype

    def index(self, i) -> Shared:
        return Shared(self.view[int(i)])

    def permute(self, order) -> Shared:
        return Shared(self.view.permute(*order))

    def load(self, layout=None) -> torch.Tensor:
        return self.view.clone()

    def store(self, value: torch.Tensor) -> None:
        self.view.copy_(value)

    def reinterpret(self, dtype, shape, layout) -> Slabs | Shared:
        return Slabs(self.view, *shape[1:]) if len(shape) == 3 else Shared(self.view.view(dtype).view(shape))


class Slabs:
    """A tile [rows, d] with 128-byte swizzle is kept as column slabs of 128 bytes: granules of its rows, slab by slab."""

    def __init__(self, view: torch.Tensor, height: int, width: int):
        self.view, self.height, self.width = view, height, width

    def index(self, i) -> Shared:
        column, row = divmod(int(i), self.view.shape[0] // self.height)
        rows, columns = (slice(i * size, (i + 1) * size) for i, size in ((row, self.height), (column, self.width)))
        return Shared(self.view[rows, columns])


class Descriptor:
    def __init__(self, tensor, shape=None, strides=None, block_shape=None, layout=None):
        self.tensor, self.box, self.layout, self.dtype = tensor, block_shape, layout, tensor.dtype

    @classmethod
    def from_tensor(cls, tensor, block_shape, layout) -> Descriptor:
        return cls(tensor, block_shape=block_shape, layout=layout)


class Barrier:
    """An mbarrier: a phase ends when everybody has arrived and all bytes are there."""

    def __init__(self) -> None:
        self.phase = self.bytes = 0
        self.count = self.pending = None


class Machine:
    """One program at a time: its shared memory, barriers, copies under way."""

    def __init__(self, seed: int, late: bool, slow: int | None):
        self.random, self.late, self.slow = random.Random(seed), late, slow
        self.changed, self.local = threading.Condition(), threading.local()
        self.program, self.failures = 0, deque()
        self.copies: list = []
        self.barriers: dict[str, list[int]] = {}

    def until(self, done, what: str) -> None:
        """With the lock held; time passes for everybody else."""
        if not self.changed.wait_for(lambda: done() or self.failures, PATIENCE_S):
            raise TimeoutError(f"nobody ended the wait for {what}")
        if self.failures and not done():
            raise RuntimeError("another partition failed")

    def dawdle(self) -> None:
        if self.local.__dict__.get("partition") == self.slow or self.random.random() < 0.02:
            time.sleep(3e-4)

    # mbarriers ------------------------------------------------------------------------------------
    def settle(self, bar: Barrier) -> None:
        if bar.pending == 0 and bar.bytes == 0:
            bar.phase, bar.pending = bar.phase + 1, bar.count
            self.changed.notify_all()

    def arrive(self, bar: Barrier, count: int = 1, expected: int = 0) -> None:
        self.dawdle()
        with self.changed:
            assert bar.pending >= count, "more arrivals than the barrier counts"
            bar.pending, bar.bytes = bar.pending - count, bar.bytes + expected
            self.settle(bar)
        self.dawdle()  # who still needs what was given back here finds it overwritten

    def wait(self, bar: Barrier, parity) -> None:
        self.dawdle()
        with self.changed:
            self.until(lambda: bar.phase & 1 != int(parity), f"an mbarrier in phase {bar.phase}")

    # copies ---------------------------------------------------------------------------------------
    def copy(self, desc: Descriptor, coordinates, bar: Barrier, target: Shared) -> None:
        assert list(target.view.shape) == list(desc.box)
        with self.changed:
            target.view.fill_(poison(target.dtype))
            self.copies.append((desc, [int(c) for c in coordinates], bar, target))
            self.changed.notify_all()

    def carry(self, over, number: int) -> None:
        """The thread that carries out copies, one at a time and in any order."""
        self.local.partition = number
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.copies or over())
                if not self.copies:
                    return
                desc, (row, column), bar, target = self.copies.pop(self.random.randrange(len(self.copies)))
            self.dawdle()
            height, width = desc.box
            box = torch.zeros(height, width, dtype=desc.dtype)
            there = desc.tensor[row : row + height, column : column + width] if row < desc.tensor.shape[0] else box[:0]
            box[: there.shape[0], : there.shape[1]] = there
            with self.changed:
                target.view.copy_(box)
                bar.bytes -= box.numel() * box.element_size()
                self.settle(bar)

    # products -------------------------------------------------------------------------------------
    def under_way(self) -> deque:
        return self.local.__dict__.setdefault("products", deque())

    def multiply(self, a, b, acc, use_acc: bool, asynchronous: bool):
        def product() -> torch.Tensor:
            left, right = ((x.view if isinstance(x, Shared) else x).float() for x in (a, b))
            return left @ right + (acc if use_acc else 0.0)

        pending = types.SimpleNamespace(product=product, value=None)
        if not self.late:
            pending.value = product()
        self.under_way().append(pending)
        return pending if asynchronous else self.finish(0, (pending,))

    def finish(self, remaining: int, deps):
        self.dawdle()
        while len(self.under_way()) > remaining:
            done = self.under_way().popleft()
            done.value = done.product() if done.value is None else done.value
        values = tuple(getattr(x, "value", x) for x in deps)
        assert all(isinstance(x, torch.Tensor) for x in values), "a product is used that was not waited for"
        return values[0] if len(values) == 1 else values

    # hardware barriers ----------------------------------------------------------------------------
    def cross_barrier(self, number: str, waits: bool) -> None:
        self.dawdle()
        with self.changed:
            state = self.barriers.setdefault(number, [0, 0])  # arrived, completed
            state[0] += 128
            assert state[0] <= 256, f"barrier {number}: the same warpgroup arrived twice"
            held = state[1]
            if state[0] == 256:
                state[:] = [0, held + 1]
                self.changed.notify_all()
            elif waits:
                self.until(lambda: state[1] > held, f"barrier {number}")

    def specialize(self, partitions) -> None:
        running = [threading.Thread(target=self.partition, args=(i, *p)) for i, p in enumerate(partitions)]
        engine = threading.Thread(
            target=self.carry, args=(lambda: not any(t.is_alive() for t in running), len(partitions))
        )
        for thread in running:
            thread.start()
        engine.start()
        for thread in running:
            thread.join()
        with self.changed:
            self.changed.notify_all()
        engine.join()
        if self.failures:
            raise self.failures[0]
        assert not any(arrived for arrived, _ in self.barriers.values()), "an arrival was left without its wait"

    def partition(self, number: int, function, arguments) -> None:
        self.local.partition = number
        try:
            function(*arguments)
        except BaseException as failure:  # raised again by the thread that joins this one
            with self.changed:
                self.failures.append(failure)
                self.changed.notify_all()


def _number(x):
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


class Language:
    """What kernels call `gl`."""

    int32, int64, float16, float32, bfloat16 = torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16
    constexpr = None

    def __init__(self, machine: Machine):
        self.machine = machine
        self.NVMMADistributedLayout = self.NVMMASharedLayout = self.SwizzledSharedLayout = lambda *a, **k: None
        self.SliceLayout = self.DotOperandLayout = self.BlockedLayout = lambda *a, **k: None
        self.static_range, self.log2 = range, torch.log2
        self.arange = lambda first, last, layout=None: torch.arange(first, last, dtype=torch.int32)
        self.full = lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype)
        self.zeros = lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype)
        self.where = lambda condition, yes, no: torch.where(_number(condition), yes, no)
        self.maximum = lambda a, b: torch.maximum(*torch.broadcast_tensors(_number(a), _number(b)))
        self.minimum = lambda a, b: torch.minimum(*torch.broadcast_tensors(_number(a), _number(b)))
        self.max, self.sum, self.reshape = torch.amax, torch.sum, torch.reshape
        self.join = lambda a, b: torch.stack([a, b], -1)
        self.split = lambda x: x.unbind(-1)
        self.convert_layout = lambda x, layout, assert_trivial=False: x
        self.warp_specialize = lambda partitions, warps, registers: machine.specialize(partitions)
        self.program_id = lambda axis: torch.tensor(machine.program)

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout != "mbarrier":
            return Shared(torch.full(shape, poison(dtype), dtype=dtype))
        bars = [Barrier() for _ in range(shape[0])]
        return bars[0] if len(shape) == 1 else types.SimpleNamespace(index=lambda i: bars[int(i)])

    def load(self, pointer, mask=None, other=0):
        found = pointer.elements[pointer.where(mask)]
        return found if mask is None else torch.where(mask, found, other)

    def store(self, pointer, value, mask=None):
        at, value = torch.broadcast_tensors(_number(pointer.at), _number(value))
        keep = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.broadcast_to(at.shape)
        at = Memory(pointer.elements, at).where(keep)
        pointer.elements[at[keep]] = value[keep].to(pointer.elements.dtype)

    def atomic_add(self, pointer, value, sem=None):
        with self.machine.changed:
            before = self.load(pointer).clone()
            self.store(pointer, before + value)
        return before

    def exp2(self, x):
        """As the GPU has it: what would be denormal is 0."""
        found = torch.exp2(x)
        return torch.where(found < 2.0**-126, 0.0, found)

    def inline_asm_elementwise(self, text, constraints, values, dtype, is_pure, pack):
        barrier = re.match(r"barrier\.(sync|arrive) (\d+), 256;", text)
        if barrier:
            return self.machine.cross_barrier(barrier[2], waits=barrier[1] == "sync")
        if "mul.f32" in text:
            return operator.mul(*values)
        if text.startswith("cvt.rn."):  # two to a register where both are given
            kind = torch.bfloat16 if ".bf16x2" in text else torch.float16
            return values[0].to(dtype) if len(values) == 1 else torch.stack(values, -1).to(kind).view(dtype)[..., 0]
        if text == "mov.b32 $0, $1;":  # and out of it
            return values[0][..., :1].contiguous().view(dtype)
        assert "nanosleep" in text, f"an instruction unknown here: {text}"
        return values[0]


def on_cpu(kernel, *, seed: int = 0, late: bool = False, slow: int | None = None) -> Launcher:
    """The kernel, to be launched as on a GPU, on tensors of the CPU; one program after the other.

    slow: the partition that falls behind, in the order of `warp_specialize`; the thread that copies comes after them.
    """
    machine = Machine(seed, late, slow)
    stand_ins = {
        "gl": Language(machine),
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: "mbarrier",
            init=lambda bar, count: vars(bar).update(count=count, pending=count),
            expect=lambda bar, expected: machine.arrive(bar, 1, expected),
            arrive=machine.arrive,
            wait=machine.wait,
        ),
        # as `triton_versions` names them, whatever the version
        "copy_to_shared": machine.copy,
        "reinterpret": Shared.reinterpret,
        "thread_barrier": lambda: None,
        "fence_async_shared": lambda: None,
        "warpgroup_mma_init": lambda acc: acc,
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=False: machine.multiply(a, b, acc, use_acc, is_async),
        "warpgroup_mma_wait": lambda remaining, deps: machine.finish(remaining, deps),
    }
    modules: dict[str, dict] = {}

    def names_of(module: str) -> dict:
        if module not in modules:
            modules[module] = names = dict(vars(sys.modules[module]))
            for name, value in names.items():
                kind = type(value).__name__
                names[name] = (
                    function_of(value)
                    if kind.endswith("JITFunction")
                    else value.value
                    if kind == "constexpr"
                    else value
                )
            names.update({name: stand_in for name, stand_in in stand_ins.items() if name in names})
        return modules[module]

    def function_of(jitted) -> types.FunctionType:
        plain = jitted.fn
        return types.FunctionType(
            plain.__code__, names_of(plain.__module__), plain.__name__, plain.__defaults__, plain.__closure__
        )

    def launch(programs: int, *arguments, num_warps, maxnreg, enable_fp_fusion, **constants) -> None:
        given = [Memory.of(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        for machine.program in range(programs):
            function_of(kernel)(*given, **constants)

    return Launcher(launch)


class Launcher:
    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid: tuple[int]):
        return functools.partial(self.launch, grid[0])
