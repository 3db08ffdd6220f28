"""The first picture of an image-to-video run: judged before it is decoded, and known by its content."""

from __future__ import annotations

import hashlib
import io
import warnings
from pathlib import Path
from typing import Any

from parkattn.files import read_regular
from parklab.extras import package

FORMATS = ("PNG", "JPEG", "WEBP")
LARGEST_FILE, MOST_PIXELS = 2**26, 2**26  # bytes; pixels, which a small file can claim many of


def picture_hash(path: str) -> str:
    """Of a picture that can be decoded: equal hashes mean equal bytes."""
    data = _read(path)
    _decoded(path, data)
    return hashlib.sha256(data).hexdigest()[:16]


def load_picture(path: str, width: int, height: int, expected_hash: str | None) -> Any:
    """RGB in the video's size: scaled until it covers the frame, then cropped around its centre, never stretched."""
    data = _read(path)
    if expected_hash is not None and hashlib.sha256(data).hexdigest()[:16] != expected_hash:
        raise ValueError(f"image: expected {path} as it was when the run began, got other bytes; run again.")
    return package("PIL.ImageOps", "pictures").fit(_decoded(path, data), (width, height))


def _read(path: str) -> bytes:
    data = read_regular(Path(path), LARGEST_FILE)
    if data is None:
        expected = f"a file of at most {LARGEST_FILE >> 20} MiB"
        raise ValueError(f"image: expected {expected}, got {path!r}, which is none; check the path.")
    return data


def _decoded(path: str, data: bytes) -> Any:
    image = package("PIL.Image", "pictures")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)
            opened = image.open(io.BytesIO(data), formats=FORMATS)
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(f"{opened.width} x {opened.height} pixels")
            return package("PIL.ImageOps", "pictures").exif_transpose(opened).convert("RGB")
    except Exception as error:  # a damaged file ends in any of a decoder's errors
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = "no picture of these formats" if type(error).__name__ == "UnidentifiedImageError" else why
        expected = f"a whole PNG, JPEG or WebP of at most {MOST_PIXELS >> 20} million pixels"
        raise ValueError(f"image: expected {expected}, got {path!r} ({why}); convert it.") from None
