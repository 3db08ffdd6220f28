"""Frozen tile choices of the attention kernels: pure functions of head dimension and architecture."""

from __future__ import annotations

from typing import NamedTuple

import torch

from parkattn.settings import Precision

# the head dims that each attention kernel has in a precision; a precision that is not here has no kernel
TRITON_HEAD_DIMS: dict[Precision, tuple[int, ...]] = {"bf16": (64, 128, 256), "int8": (64, 128)}
HOPPER_HEAD_DIMS: dict[Precision, tuple[int, ...]] = {"bf16": (64, 128), "int8": (64, 128)}


class TritonTile(NamedTuple):
    """queries x keys per step, warps, software-pipeline stages"""

    queries: int
    keys: int
    warps: int
    stages: int


class GluonTile(NamedTuple):
    """keys per step, rows of the small granules, key/value ring slots, registers of the producer warp, consumer
    warpgroups, how quick exponentials sum (`hopper_softmax`)
    """

    keys: int = 128
    tail: int = 8
    stages: int = 3
    producer_registers: int = 24
    groups: int = 2
    quick: int = 1

    @property
    def launch_registers(self) -> int:
        """Registers that every warpgroup starts with: a share of 512 in steps of 8."""
        return 512 // (self.groups + 1) // 8 * 8

    def constants(self, d: int) -> dict[str, int]:
        """The kernel's constants. The registers of all warpgroups are split between consumers and producer."""
        return {
            "D": d,
            "KEYS": self.keys,
            "WIDE": 32,
            "TAIL": self.tail,
            "STAGES": self.stages,
            "GROUPS": self.groups,
            "CONSUMER_REGISTERS": (self.launch_registers * (self.groups + 1) - self.producer_registers) // self.groups,
            "PRODUCER_REGISTERS": self.producer_registers,
        }

    def for_lost_rows(self) -> GluonTile:
        """Careful exponentials need the registers of two warpgroups; lists of tiles are the same."""
        return self if self.groups == 2 else self._replace(groups=2, stages=6, producer_registers=24, quick=1)


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


def int8_tile(d: int, block_rows: float, quick: bool) -> GluonTile:
    """For INT8 keys, whose tiles are half as large: three warpgroups of 64 rows where query blocks fill them; sm_90
    only.

    block_rows: the mean, empty blocks among them; of 75,600 queries in tiles of 192 rows it is 145, of 128 rows 105.
    docs/diary.md, "INT8 in tiles of 128 and 192 queries", has the times of other choices.
    """
    if quick and block_rows > 140:
        return GluonTile(keys=64, stages=8, producer_registers=32, groups=3, quick=2)
    return GluonTile(quick=2)


def dense_tile(int8: bool, quick: bool) -> GluonTile:
    """The same without lists; sm_90 only."""
    return GluonTile(keys=64, stages=8, producer_registers=32, groups=3, quick=2) if int8 and quick else GluonTile()


def triton_tile(d: int, arch: int, int8: bool = False) -> TritonTile:
    """At most 99 KB of shared memory except on sm_90, no spills in any form.

    INT8 keys leave room for a third stage. The row of sm_90 with d = 128 is the fastest of six that were timed
    (docs/diary.md, "What was tried"); the others were chosen by counts of instructions and bytes (docs/cards.md).
    """
    if int8:
        return TritonTile(128, 64, 8, 3)
    if d == 256:
        return TritonTile(64, 64, 8, 2) if arch == 90 else TritonTile(64, 32, 8, 2)
    if arch == 90:
        return TritonTile(128, 128, 8, 3)
    return TritonTile(128, 64, 8, 2)
