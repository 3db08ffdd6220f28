"""What a stock processor is given as its text mask, so that no mask over pairs of tokens is ever made."""

from __future__ import annotations

from torch import Tensor


class KeyPadding:
    """A text mask [b s] that withstands being blown up to [b 1 n n] by stock code: every step of that leaves it as it is."""

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self.shape = valid.shape

    def bool(self) -> KeyPadding:
        return KeyPadding(self.valid.bool())

    def view(self, *shape: int) -> KeyPadding:
        return self

    def repeat(self, *times: int) -> KeyPadding:
        return self

    def transpose(self, *axes: int) -> KeyPadding:
        return self

    def __and__(self, other: KeyPadding) -> KeyPadding:
        return self
