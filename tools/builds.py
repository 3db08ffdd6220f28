"""What the plain attention kernel takes of each GPU that it is built for: registers, spills, shared memory,
instructions.

    python tools/builds.py

compiles it ahead of time, needs no GPU and writes benchmarks/results/builds.json.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from records import write_rows

from parkattn.ops.attend.tiles import triton_tile
from parklab.record import environment, installed

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
DIM = 128


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from machine_code import plain_attention, products

    rows = []
    for arch, int8, everything in itertools.product(ARCHITECTURES, (False, True), (False, True)):
        built = plain_attention(arch, DIM, int8=int8, everything=everything)
        rows.append(
            {
                "arch": arch, "int8": int8, "everything": everything, "tile": list(triton_tile(DIM, arch, int8=int8)),
                "registers": built.registers, "stack": built.stack, "shared": built.shared,
                "products": sorted(products(built.ptx)),
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    write_rows("builds", rows, environment=environment() | {"triton": installed("triton")})


if __name__ == "__main__":
    main()
