"""What tests read out of a kernel's PTX and machine code."""

import itertools
import re


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
    with_products = [(a, b) for a, b in within if any("GMMA" in text for text in instructions[a:b])]
    innermost = [(a, b) for a, b in with_products if not any((a, b) != (c, d) and a <= c and d <= b for c, d in with_products)]
    return [instructions[a : b + 1] for a, b in innermost]


def given_back_unread(code: str) -> set[str]:
    """Registers loaded from shared memory that nothing has read when the next arrival lets others write there: no barrier waits for a load."""
    unread: set[str] = set()
    found: set[str] = set()
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", code):
        unread -= set(re.findall(r"\bR\d+\b", instruction.partition(",")[2]))
        if load := re.search(r"\bLDS(?:\.(\d+))? R(\d+),", instruction):
            unread |= {f"R{int(load[2]) + i}" for i in range(int(load[1] or 32) // 32)}
        found |= unread if "SYNCS.ARRIVE" in instruction else set()
    return found


def before_arrivals(ptx: str) -> set[str]:
    """What stands last before one thread arrives at an mbarrier for its group: only a barrier of the group makes it speak for all."""
    events = re.findall(r"bar\.sync|bar\.warp\.sync|mbarrier\.\w+(?:\.expect_tx)?|(?:st|ld)\.shared|barrier\.sync|wgmma\.wait_group", ptx)
    return {before for before, event in itertools.pairwise(events) if event == "mbarrier.arrive"}


def barriers(ptx: str) -> tuple[set[str], set[str]]:
    """The numbers of the hardware barriers: those of `barriers`, where two warpgroups wait for each other, and Triton's own."""
    numbers = re.findall(r"\bbar(?:rier)?\.(?:sync|arrive|red)[.\w]*\s+(\d+)(?:,\s*(\d+))?;", ptx)
    return {number for number, threads in numbers if threads == "256"}, {number for number, threads in numbers if threads != "256"}
