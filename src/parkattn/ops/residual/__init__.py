"""The low-rank part of dense attention that sparse attention misses."""

from parkattn.ops import operation
from parkattn.ops.residual import definition

KERNELS = f"{__name__}.kernels"

factor = operation(definition.factor, KERNELS)
add_residual = operation(definition.add_residual, KERNELS)
