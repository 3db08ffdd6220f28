"""Estimated attention of query blocks to key blocks (PAMA), and the selection of blocks."""

from parkattn.ops import operation
from parkattn.ops.importance import definition

KERNELS = f"{__name__}.kernels"

estimate = operation(definition.estimate, KERNELS)
score_spread = operation(definition.score_spread, KERNELS)
