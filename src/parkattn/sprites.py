"""A pointer for one release: this moved to the laboratory."""

raise ImportError(
    "parkattn.sprites: expected parklab.sprites, where it moved; pip install parklab, in a clone pip install ./lab."
)
