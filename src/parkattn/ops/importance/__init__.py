"""How much attention a query block gives to a key block (PAMA), and which blocks are kept."""

from parkattn.ops import operation
from parkattn.ops.importance import definition

KERNELS = f"{__name__}.kernels"

estimate = operation(definition.estimate, KERNELS)
score_spread = operation(definition.score_spread, KERNELS)
