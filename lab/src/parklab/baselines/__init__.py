"""Methods that PARK is compared with: one file and one AttentionMethod each.
They may use the operations, never PARK itself.
"""

from parklab.baselines import (
    chipmunk,
    mc_sparse,
    radial,
    sol,
    sparge,
    sparsepr,
    sta,
    svg,
    svg2,
    svg_ear,
    svoo,
    xattention,
)

MODULES = (sparge, xattention, svg, svg2, svoo, svg_ear, sparsepr, sol, sta, radial, mc_sparse, chipmunk)
ENTRIES = tuple(entry for module in MODULES for entry in module.ENTRIES)
