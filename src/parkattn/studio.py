"""A pointer for one release: this moved to the laboratory."""

raise ImportError(
    "parkattn.studio: expected parklab.studio, where it moved; pip install parklab, in a clone pip install ./lab."
)
