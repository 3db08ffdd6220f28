"""Settings of every method for a few dozen tokens: some blocks are skipped, and three of four steps are sparse."""

from __future__ import annotations

_CLUSTERS = {"query_clusters": 4, "key_clusters": 6, "top_p": None, "top_k": 0.4}
_RUN = {"dense_steps": 1, "dense_layers": ()}
_AUTHORS = {**_CLUSTERS, **_RUN, "kmeans_iterations": 2, "floor": 0.0}

SMALL = {
    "dense": {},
    **{name: {**_CLUSTERS, **_RUN} for name in ("park", "park-no-pama", "park-no-qrkc", "centroid")},
    "sparge": {"block_q": 8, "block_k": 8, "topk": 0.4, **_RUN},
    "xattention": {"block": 8, "stride": 2, "threshold": 0.4, **_RUN},
    "svg": {"tile": 4, "block": 4, "sparsity": 0.3, "layout": "wan", **_RUN},
    "svg2": _AUTHORS,
    "svoo": {**_AUTHORS, "recluster_interval": 2},
    "svg-ear": _AUTHORS,
    "sparsepr": {"query_clusters": 4, "key_clusters": 6, "kmeans_iterations": 2, "density": 0.6, "probes": 2, **_RUN},
    "sol": {"block": 8, "tau": 1.0, **_RUN},
    "sta": {"tile": (1, 2, 2), "window": (3, 1, 1), **_RUN},
    "radial": {"block": 4, "decay": 0.2, "sink": False, **_RUN},
    "mc-sparse": {"group": 8, "multiple": 1, "least_tokens": 1, **_RUN},
    "chipmunk": {"voxel": (1, 2, 2), "multiple": 1, "top_k": 0.2, **_RUN},
}
