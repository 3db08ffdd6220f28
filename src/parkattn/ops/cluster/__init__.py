"""Clusters of queries (k-means) and of keys (QRKC), block borders at tiles, and clusters as blocks."""

from parkattn.ops import operation
from parkattn.ops.cluster import borders, definition
from parkattn.plan import arrange as sort_into_blocks

KERNELS = f"{__name__}.kernels"

kmeans = operation(definition.kmeans, KERNELS)
first_centroids = operation(definition.first_centroids, KERNELS)
lloyd = operation(definition.lloyd, KERNELS)
cluster_keys = operation(definition.cluster_keys, KERNELS)
round_borders = operation(borders.round_borders, KERNELS)
arrange = operation(sort_into_blocks, KERNELS)
