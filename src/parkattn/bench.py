"""A pointer for one release: this moved to the laboratory."""

raise ImportError(
    "parkattn.bench: expected parklab.bench, where it moved; pip install parklab, in a clone pip install ./lab."
)
