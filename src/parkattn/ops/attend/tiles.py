"""Frozen tile choices of the attention kernels: pure functions of head dimension and architecture."""

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


def arch_or_hopper(device: torch.device) -> int:
    """80, 90, 120, ...; 90 stands in where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def gluon_tile(d: int) -> GluonTile:
    """sm_90 only; 227 KB of shared memory at d = 128, 115 KB at d = 64, which takes the same choice and was not timed.

    docs/diary.md, "What was tried", has the times of other choices.
    """
    return GluonTile()


def triton_tile(d: int, arch: int) -> TritonTile:
    """At most 64 KB of shared memory except on sm_90, so 99 KB cards have room; no spills in the plain form.

    The row of sm_90 with d = 128 is the fastest of six that were timed (docs/diary.md, "What was tried"); the others were not timed.
    """
    if d == 256:
        return TritonTile(64, 64, 8, 2) if arch == 90 else TritonTile(64, 32, 8, 2)
    if arch == 90:
        return TritonTile(128, 128, 8, 3)
    return TritonTile(128, 64, 8, 2)
