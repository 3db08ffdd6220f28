"""Frames to mp4 and back, and first pictures of videos: what is decoded, and what is refused in one line."""

import ctypes
import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("av")

import struct
import zlib

from parklab.store import Cell, CellWriter, Store
from parklab.studio import video

Image = pytest.importorskip("PIL.Image")

from parklab.studio.video import load_picture, picture_hash  # noqa: E402

# read as motion vectors of macroblocks, these lead from past the end of a row into it
STALE = (0x00000000, 0xFFE0FFC0, 0xFFC0FFE0, 0xFFFFFFFF, 0xFF80FFC0)


def fill_freed_memory(pattern: int) -> None:
    """What malloc hands out next holds the pattern."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.free(libc.malloc(2**24))  # from here on such blocks stay with the process
    blocks = [libc.malloc(2**20) for _ in range(24)]
    for block in blocks:
        ctypes.memmove(block, pattern.to_bytes(4, "little") * 2**18, 2**20)
    for block in blocks:
        libc.free(block)


def test_the_same_frames_give_the_same_bytes_whatever_memory_held_and_however_many_cores_there_are(tmp_path):
    cores = os.sched_getaffinity(0)
    for height in (56, 160):  # a side-by-side of the campaign, and one that an encoder shares among its threads
        picture = np.random.default_rng(0).integers(8, 248, (1, height, 96, 3)).astype(np.uint8)
        frames, found = (
            np.concatenate([picture, picture + 1, picture + 2]),
            set(),
        )  # later ones are predicted from the first
        for number, pattern in enumerate(STALE):
            fill_freed_memory(pattern)
            os.sched_setaffinity(0, {min(cores)} if number % 2 else cores)
            try:
                video.write_mp4(tmp_path / "a.mp4", frames, 8)
            finally:
                os.sched_setaffinity(0, cores)
            found.add((tmp_path / "a.mp4").read_bytes())
        assert len(found) == 1, height


def test_frames_of_odd_size_are_made_even_and_survive_the_codec(tmp_path):
    frames = np.zeros((3, 33, 47, 3), np.uint8)
    frames[:, 8:24, 8:24] = (200, 40, 40)
    video.write_mp4(tmp_path / "a.mp4", frames, 8)
    read = video.read_mp4(tmp_path / "a.mp4")
    assert read.shape == (3, 34, 48, 3)
    assert np.abs(read[:, 12:20, 12:20].astype(int) - (200, 40, 40)).max() < 16
    # the index stands before the frames, so that a browser can start at once
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize(
    ("name", "shape", "kind", "line"),
    [
        ("a.avi", (2, 32, 32, 3), "uint8", r"path: expected a file name ending in \.mp4, got .*a\.avi; rename it\."),
        (
            "no/a.mp4",
            (2, 32, 32, 3),
            "uint8",
            r"path: expected a file in a folder that exists, got .*; make .*no first\.",
        ),
        ("a.mp4", (2, 32, 32, 3), "float32", r"frames: expected uint8 .*, got float32 \[2, 32, 32, 3\]; pass as_bytes"),
        ("a.mp4", (32, 32, 3), "uint8", r"frames: expected uint8 .*, got uint8 \[32, 32, 3\]; pass as_bytes"),
    ],
)
def test_what_cannot_be_an_mp4_is_refused_in_one_line(tmp_path, name, shape, kind, line):
    with pytest.raises(ValueError, match=line):
        video.write_mp4(str(tmp_path / name), np.zeros(shape, kind), 8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [b"", b"no video", b"\0" * 4096, None], ids=["empty", "text", "zeros", "half"])
def test_a_broken_video_is_one_line(tmp_path, damage):
    video.write_mp4(tmp_path / "a.mp4", np.zeros((3, 32, 32, 3), np.uint8), 8)
    whole = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.raises(ValueError, match=r"a\.mp4: expected a whole video, got .*; make it again\."):
        video.read_mp4(tmp_path / "a.mp4")


def test_a_changed_byte_of_a_video_of_ours_is_found_without_its_record(tmp_path):
    path, frames = tmp_path / "a.mp4", np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3)).astype(np.uint8)
    video.write_mp4(path, frames, 8)
    whole, read = path.read_bytes(), video.read_mp4(path)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            assert np.array_equal(video.read_mp4(path), read), at  # of the hash itself, which no picture follows
            assert at >= len(whole) - len(video.HASH_BOX) - video.HASH_BYTES
        except ValueError as refused:
            assert "expected a whole video, got" in str(refused)


def test_a_video_of_others_is_read_without_a_hash(tmp_path):
    path = tmp_path / "a.mp4"
    video.write_mp4(path, np.zeros((3, 32, 32, 3), np.uint8), 8)
    path.write_bytes(path.read_bytes()[: -len(video.HASH_BOX) - video.HASH_BYTES])
    assert video.read_mp4(path).shape == (3, 32, 32, 3)


@pytest.mark.parametrize(
    ("count", "grid"), [(1, (1, 1)), (2, (1, 3)), (3, (2, 2)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3)), (9, (3, 3))]
)
def test_no_place_of_the_side_by_side_is_empty(count, grid):
    names = ["dense", *(f"m{i}" for i in range(1, count))]
    clips = {name: np.full((1, 32, 32, 3), 100 + i, np.uint8) for i, name in enumerate(names)}
    sheet = video.side_by_side(clips, "dense")
    rows, columns = grid
    assert sheet.shape == (1, rows * (32 + video.LABEL_HEIGHT), columns * 32, 3)
    places = [sheet[0, (r + 1) * (32 + video.LABEL_HEIGHT) - 1, c * 32] for r in range(rows) for c in range(columns)]
    # clips first, then differences of the first methods from the reference, four times as strong
    differences = [video.DIFFERENCE_GAIN * i for i in range(1, rows * columns - count + 1)]
    assert [int(place[0]) for place in places] == [100 + i for i in range(count)] + differences


def test_an_interruption_while_encoding_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(video.video_library(), "VideoFrame", SimpleNamespace(from_ndarray=interrupt))
    with (
        pytest.raises(KeyboardInterrupt),
        CellWriter(Store(tmp_path), Cell(name="a", format="test", files=("a.mp4",))) as making,
    ):
        making.write("a.mp4", lambda path: video.write_mp4(path, np.zeros((2, 32, 32, 3), np.uint8), 8))
    assert not list(tmp_path.iterdir())


# Pictures for image-to-video ----------------------------------------------------------------------------


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
