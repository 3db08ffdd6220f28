"""Kernels compiled for absent GPUs, and what tests read out of their PTX and machine code."""

import functools
import itertools
import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple


def key_loops(code: str) -> list[list[str]]:
    """Machine code -> the instructions of its innermost loops with products."""
    instructions: list[str] = []
    labels = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    jumps = [
        (labels[to[1]], at)
        for at, text in enumerate(instructions)
        if (to := re.search(r"BRA `\((\.L_x_\d+)\)", text)) and labels[to[1]] < at
    ]
    # a wait that failed is repeated past the program's end, and comes back from there
    within = [(a, b) for a, b in jumps if not any("EXIT" in text for text in instructions[a:b])]
    with_products = [(a, b) for a, b in within if any("MMA" in text for text in instructions[a:b])]
    innermost = [
        (a, b) for a, b in with_products if not any((a, b) != (c, d) and a <= c and d <= b for c, d in with_products)
    ]
    return [instructions[a : b + 1] for a, b in innermost]


def given_back_unread(code: str) -> set[str]:
    """Registers loaded from shared memory that nothing has read when the next arrival lets others write there: no
    barrier waits for a load.
    """
    unread: set[str] = set()
    found: set[str] = set()
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", code):
        unread -= set(re.findall(r"\bR\d+\b", instruction.partition(",")[2]))
        if load := re.search(r"\bLDS(?:\.(\d+))? R(\d+),", instruction):
            unread |= {f"R{int(load[2]) + i}" for i in range(int(load[1] or 32) // 32)}
        found |= unread if "SYNCS.ARRIVE" in instruction else set()
    return found


def before_arrivals(ptx: str) -> set[str]:
    """What stands last before one thread arrives at an mbarrier for its group: only a barrier of the group makes it
    speak for all.
    """
    events = re.findall(
        r"bar\.sync|bar\.warp\.sync|mbarrier\.\w+(?:\.expect_tx)?|(?:st|ld)\.shared|barrier\.sync|wgmma\.wait_group",
        ptx,
    )
    return {before for before, event in itertools.pairwise(events) if event == "mbarrier.arrive"}


def barriers(ptx: str) -> tuple[set[str], set[str]]:
    """The numbers of the hardware barriers: those of `barriers`, where two warpgroups wait for each other, and Triton's
    own.
    """
    numbers = re.findall(r"\bbar(?:rier)?\.(?:sync|arrive|red)[.\w]*\s+(\d+)(?:,\s*(\d+))?;", ptx)
    return {number for number, threads in numbers if threads == "256"}, {
        number for number, threads in numbers if threads != "256"
    }


class Build(NamedTuple):
    shared: int
    stack: int  # spills
    registers: int
    asm: dict

    @property
    def ptx(self) -> str:
        return self.asm["ptx"]

    @property
    def code(self) -> str:
        return read("nvdisasm", "-c", self.asm["cubin"])


@functools.cache
def read(tool: str, what: str, cubin: bytes) -> str:
    """What a tool of Triton's says of machine code."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        return subprocess.run([path, what, file.name], capture_output=True, text=True, check=True).stdout


def compiled(
    kernel, types: dict[str, str], constants: dict, arch: int, *, gluon=False, sixteens=(), **options
) -> Build:
    """The kernel for an absent GPU; sixteens: whole numbers that are multiples of 16, as pointers are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from parkattn.ops.triton_versions import FP_FUSION

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    place = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    aligned = {
        place[name]: [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind[0] == "*" or name.startswith(("stride", "out_")) or name in sixteens
    }
    source = (GluonASTSource if gluon else ASTSource)(
        kernel, signature, {place[name]: value for name, value in constants.items()}, aligned
    )
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options | FP_FUSION)
    usage = read("cuobjdump", "-res-usage", binary.asm["cubin"])
    stack, registers = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "REG"))
    return Build(binary.metadata.shared, stack, registers, binary.asm)


def products(ptx: str) -> set[str]:
    """The matrix instructions of a kernel."""
    return set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.[\w.:]+", ptx))


def plain_attention(arch: int, d: int, *, int8: bool, everything: bool, element: str = "bf16") -> Build:
    """The attention kernel of every GPU but Hopper's, in its own tile; everything: tokens in any order, stand-ins,
    log-sum-exp.
    """
    from parkattn.ops.attend.tiles import triton_tile
    from parkattn.ops.attend.triton import attend_kernel

    tile = triton_tile(d, arch, int8=int8)
    types = dict.fromkeys(("v", "mean_values", "out"), f"*{element}") | {"unit": "fp32"}
    types |= dict.fromkeys(("q", "k", "centroids"), "*i8" if int8 else f"*{element}")
    types |= dict.fromkeys(("wide_lists", "tail_lists", "tiles", "count", "query_order"), "*i32")
    types |= dict.fromkeys(("bias", "lse", "q_steps", "k_steps"), "*fp32")
    constants = {"D": d, "QUERIES": tile.queries, "KEYS": tile.keys, "WIDE": 32, "TAIL": 8, "STEPS": int8}
    constants |= dict.fromkeys(("GATHER_Q", "COMPENSATE", "LSE"), everything)
    return compiled(attend_kernel, types, constants, arch, num_warps=tile.warps, num_stages=tile.stages)
