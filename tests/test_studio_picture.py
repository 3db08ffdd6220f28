"""Pictures for image-to-video: what is decoded, how it is cropped, and what is refused in one line."""

import struct
import zlib

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

from parklab.studio.picture import load_picture, picture_hash  # noqa: E402


@pytest.mark.parametrize("form", ["png", "jpg", "webp"])
def test_a_picture_is_cropped_around_its_centre_and_never_stretched(tmp_path, form):
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, 40:80] = (200, 100, 50)  # the middle third, a square
    path = str(tmp_path / f"a.{form}")
    Image.fromarray(pixels).save(path, quality=95)
    square = np.array(load_picture(path, 20, 20, picture_hash(path))).astype(int)
    assert square.shape == (20, 20, 3) and np.abs(square[4:-4, 4:-4] - (200, 100, 50)).max() < 16


def test_other_bytes_than_those_of_the_request_are_refused(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)
    known = picture_hash(str(path))
    Image.new("RGB", (8, 8), "red").save(path)
    with pytest.raises(
        ValueError, match=r"image: expected .*a\.png as it was when the run began, got other bytes; run again\."
    ):
        load_picture(str(path), 8, 8, known)


def huge_png() -> bytes:
    """A few bytes that claim 100,000 x 100,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def whole_png(folder) -> bytes:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(folder / "whole.png")
    return (folder / "whole.png").read_bytes()


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "huge", "gif", "folder", "absent"])
def test_what_is_no_whole_picture_of_a_known_format_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "a.png"
    if kind == "gif":
        Image.new("RGB", (8, 8)).save(path, format="GIF")
    elif kind == "folder":
        path.mkdir()
    elif kind != "absent":
        whole = whole_png(tmp_path)
        path.write_bytes(
            {"text": b"no picture", "empty": b"", "cut": whole[: len(whole) // 2], "huge": huge_png()}[kind]
        )
    with pytest.raises(ValueError, match=r"^image: expected .*, got .*; (convert it|check the path)\.$"):
        picture_hash(str(path))
