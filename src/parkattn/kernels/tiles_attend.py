"""Frozen tile choices of the attention kernels: pure functions of head dimension and architecture, each with what chose it.

Times: one H200, bf16, (heads, tokens, d) = (40, 75600, 128), 128 x 512 uneven blocks, density 0.25, cuDNN dense 202-210 ms.
The card is at its power limit there: a call that took 55 ms when repeated took 50 ms after a light spell, so only repeated calls of
one kernel are compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TritonTile(NamedTuple):
    """queries x keys per step, warps, software-pipeline stages"""

    queries: int
    keys: int
    warps: int
    stages: int


class GluonTile(NamedTuple):
    """keys per step, rows of the small granules, key/value ring slots, registers of the producer warp"""

    keys: int = 128
    tail: int = 8
    stages: int = 3
    producer_registers: int = 24

    def constants(self, d: int) -> dict[str, int]:
        """The kernel's constants. Three register shares of 168 are split between two consumers and the producer."""
        return {
            "D": d,
            "KEYS": self.keys,
            "WIDE": 32,
            "TAIL": self.tail,
            "STAGES": self.stages,
            "CONSUMER_REGISTERS": (504 - self.producer_registers) // 2,
            "PRODUCER_REGISTERS": self.producer_registers,
        }


def arch_of(device: torch.device) -> int:
    """80, 90, 120, ...; 90 stands in where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def gluon_tile(d: int) -> GluonTile:
    """sm_90 only; 227 KB of shared memory at d = 128, 115 KB at d = 64.

    Measured at d = 128, attention with its work list, calls repeated alone; figures of one sentence are from one session, in the order of
    its rounds. Borders on multiples of 64 and 32: 44.3, 44.8, 45.3 ms; with one tile per turn of the loop 45.0, 45.6, 46.1; that and two slots
    instead of three 45.3, 46.0, 46.9. With two slots and one tile per turn: 44.7 and 45.3 without a maximum per tile, 50.8 and 50.3 with it;
    44.9 and 44.9 with weights packed by hand, 44.8 and 44.6 with queries in registers as well (which spills). Reading all keys from 2,048 rows
    that stay in the cache gained 1.5 of 50.0 ms. With loops of their own for one tile, tails and stand-ins: 44.8, 45.4, 45.3 (compensated 47.8, 46.7,
    46.4); with one loop for tails and stand-ins, their bias read from memory, 46.4, 45.4, 45.3 (47.3, 46.9, 46.7). One loop for all tiles came
    after that and was timed by `park bench attend` alone.

    Older versions, two slots, rescaling at every step. Borders as clustered: 54.8 ms (two sessions of ten calls;
    sessions differ by up to 1.5 ms). Clearly slower: 64 keys x 4 slots, 61.1 against 55.6 to 57.0. No difference beyond that spread: tail 16
    (59.0 against 58.5, first version; more padding), one query slot (56.4 against 55.3 and 56.4), three key slots (56.9 against 57.1), taking
    turns at the matrix unit (58.5 with against 58.7 without, then 57.1 against 56.7), tiles that mix wide granules with tails (54.8 against
    54.8): the simplest was kept. Borders on multiples of 128 and 32, twenty calls, two rounds, the card at 691 W and 1.56 to 1.65 GHz: 48.6
    and 50.0; with row sums joined once per query tile 49.8 and 50.1, with 160 keys per step (128 + 32) 50.3 and 50.8, with both 52.5 and 52.3,
    with queries gathered by the producer (160 keys, one query slot) 52.6 and 52.4. Borders on other multiples (queries, keys), the same
    kernel: (128, 8) 50.3 and 50.0; (64, 32) 51.2 and 51.0; (64, 16) 52.0 and 51.2; (64, 8) 51.9 and 51.4; (1, 1) 56.1 and 54.9.
    d = 64 takes the same choice, not timed.
    """
    return GluonTile()


def triton_tile(d: int, arch: int) -> TritonTile:
    """At most 64 KB of shared memory except on sm_90, so 99 KB cards have room; no spills in the plain form.

    Measured on sm_90, d = 128: 128x128 w8 s3 82.6 ms, 64x64 w4 s3 88.4, 128x128 w8 s2 91.1, 128x64 w8 s3 91.3, 128x64 w4 s3 92.2,
    64x128 w4 s3 113.5. Other rows were not timed (no such card here): the largest tile that compiles without spills.
    """
    if d == 256:
        return TritonTile(64, 64, 8, 2) if arch == 90 else TritonTile(64, 32, 8, 2)
    if arch == 90:
        return TritonTile(128, 128, 8, 3)
    return TritonTile(128, 64, 8, 2)
