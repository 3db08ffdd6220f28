"""A pointer for one release: this moved to the laboratory."""

raise ImportError(
    "parkattn.metrics: expected parklab.metrics, where it moved; pip install parklab, in a clone pip install ./lab."
)
