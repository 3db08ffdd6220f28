"""A pointer for one release: this moved to the laboratory."""

raise ImportError(
    "parkattn.scene: expected parklab.scene, where it moved; pip install parklab, in a clone pip install ./lab."
)
