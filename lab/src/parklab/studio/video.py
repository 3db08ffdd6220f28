"""Frames to mp4 and back, the side-by-side picture, and first pictures of videos. Frames are uint8 [frames, height,
width, 3].
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parkattn.checks import first_line
from parklab.extras import install_command, package
from parklab.files import read_file, read_regular

Frames = NDArray[np.uint8]
CODEC = "libx264"
# mbtree=0: its AVX-512 form reads past the last row of macroblocks, and the bytes follow what memory held there
ENCODING = {"crf": "14", "preset": "medium", "bf": "0", "mbtree": "0"}
DIFFERENCE_GAIN = 4  # differences of sparse attention are faint: they are shown four times as strong
LABEL_HEIGHT = 24
LARGEST_FILE = LARGEST_VIDEO = 2**31  # bytes of an mp4 that is read, and of its frames: 776 of 720p
FORMATS = ("PNG", "JPEG", "WEBP")
LARGEST_PICTURE, MOST_PIXELS = 2**26, 2**26  # bytes; pixels, which a small file can claim many of
# the last box of an mp4 that we wrote, which players skip: the hash of all before it, since H.264 has no checksum
HASH_BOX = struct.pack(">I4s", 56, b"uuid") + b"parkattn.sha256\0"
HASH_BYTES = 32


def video_library() -> Any:
    """PyAV with an H.264 encoder, or one line that says what is missing."""
    av = package("av", "mp4 files")
    if CODEC not in av.codecs_available:
        raise ModuleNotFoundError(
            f"ffmpeg: expected one with {CODEC}, got PyAV {av.__version__} without it; install a full one with: "
            f"{install_command()}"
        )
    return av


def as_bytes(frames: NDArray[np.floating]) -> Frames:
    """[0, 1] to 8 bits, as a PNG of the frame would hold it."""
    return np.round(np.clip(frames, 0, 1) * 255).astype(np.uint8)


def to_npy(frames: Frames) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, frames, allow_pickle=False)
    return buffer.getvalue()


def from_npy(data: bytes) -> Frames:
    frames: Frames = np.load(io.BytesIO(data), allow_pickle=False)
    return frames


def write_mp4(path: Path | str, frames: Frames, fps: int) -> None:
    """H.264, yuv420p, playable before it is fully loaded, with a hash of itself; odd sizes gain one repeated row or
    column. The same frames give the same bytes.

    The muxer goes back to put its index first, so this is no atomic write: path is a temporary name of the store.
    """
    av, path = video_library(), Path(path)
    if path.suffix.lower() not in (".mp4", ".tmp"):  # of a user, of the store
        raise ValueError(f"path: expected a file name ending in .mp4, got {path}; rename it.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"path: expected a file in a folder that exists, got {path}; make {path.parent} first.")
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
        got = f"{frames.dtype} {list(frames.shape)}"
        raise ValueError(
            f"frames: expected uint8 [frames, height, width, 3], got {got}; pass as_bytes(video) of a pipeline's video."
        )
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(CODEC, rate=Fraction(fps), options=ENCODING)
        stream.codec_context.thread_count = 1  # slices, and so the bytes, follow the number of threads
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    with path.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.write(HASH_BOX + digest)


def read_mp4(path: Path) -> Frames:
    """[frames height width 3]; damage is an error, where a player would hide it: any in our own files, in those of
    others all that the decoder notices. About a tenth of single flipped bits decode there as other pictures.
    """
    av = video_library()
    data, found = read_file("video", path, "an mp4", most=LARGEST_FILE), 0
    try:
        whole, box = data[: -len(HASH_BOX) - HASH_BYTES], data[-len(HASH_BOX) - HASH_BYTES :]
        if box.startswith(HASH_BOX) and hashlib.sha256(whole).digest() != box[len(HASH_BOX) :]:
            raise ValueError("one that was changed since it was written")
        # from memory and as one format: a playlist or a script that calls itself mp4 would open other files
        with av.open(io.BytesIO(data), format="mp4") as container:
            stream = container.streams.video[0]
            codec = stream.codec_context
            codec.options = {"err_detect": "explode"}
            codec.thread_count = 1  # a second thread drops its error with the last frames
            shape = stream.frames, codec.height, codec.width, 3
            if not 0 < math.prod(shape) <= LARGEST_VIDEO:
                raise ValueError(f"{stream.frames} frames of {codec.width} x {codec.height} pixels")
            frames = np.empty(shape, np.uint8)
            for frame in container.decode(stream):
                if frame.is_corrupt or (frame.height, frame.width) != shape[1:3]:
                    raise ValueError(f"damage in frame {found + 1} of {stream.frames}")
                frames[found] = frame.to_ndarray(format="rgb24")
                found += 1
            if found != stream.frames:
                raise ValueError(f"{found} of {stream.frames} frames")
        return frames
    except Exception as error:  # a damaged file ends in any of a decoder's errors
        said = (str(error).splitlines() or ["no video"])[0]
        raise ValueError(f"{path}: expected a whole video, got {said}; make it again.") from None


def side_by_side(clips: dict[str, Frames], reference: str) -> Frames:
    """Labelled clips in a grid whose free places show differences from the reference, so that none stays empty."""
    names = [reference, *(name for name in clips if name != reference)]
    rows, columns = grid_for(len(names))
    base = clips[reference].astype(np.int16)
    panels = [_labelled(name, clips[name]) for name in names]
    for name in names[1 : rows * columns - len(names) + 1]:
        apart = np.clip(np.abs(clips[name].astype(np.int16) - base) * DIFFERENCE_GAIN, 0, 255).astype(np.uint8)
        panels.append(_labelled(f"{name}: difference x {DIFFERENCE_GAIN}", apart))
    lines = [np.concatenate(panels[row * columns : (row + 1) * columns], axis=2) for row in range(rows)]
    return np.concatenate(lines, axis=1)


def grid_for(clips: int) -> tuple[int, int]:
    """(rows, columns), as square as can be; two clips stand in a row with their difference."""
    if clips == 2:
        return 1, 3
    columns = math.ceil(math.sqrt(clips))
    return math.ceil(clips / columns), columns


def still(frames: Frames, width: int = 256) -> bytes:
    """The middle frame as a small JPEG."""
    picture = package("PIL.Image", "pictures").fromarray(frames[len(frames) // 2])
    picture.thumbnail((width, width))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=80)
    return data.getvalue()


def _labelled(text: str, frames: Frames) -> Frames:
    return np.concatenate([_label(text, frames.shape, frames.shape[2]), frames], axis=1)


def _label(text: str, shape: tuple[int, ...], width: int) -> Frames:
    image, draw = package("PIL.Image", "labels in videos"), package("PIL.ImageDraw", "labels in videos")
    strip = image.new("RGB", (width, LABEL_HEIGHT), (16, 18, 24))
    draw.Draw(strip).text((8, 6), text, fill=(235, 238, 245))
    return np.broadcast_to(np.asarray(strip), (shape[0], LABEL_HEIGHT, width, 3))


# The first picture of an image-to-video run: judged before it is decoded, and known by its content


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
    data = read_regular(Path(path), LARGEST_PICTURE)
    if data is None:
        expected = f"a file of at most {LARGEST_PICTURE >> 20} MiB"
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
        unknown = type(error).__name__ == "UnidentifiedImageError"
        why = "no picture of these formats" if unknown else first_line(error)
        expected = f"a whole PNG, JPEG or WebP of at most {MOST_PIXELS >> 20} million pixels"
        raise ValueError(f"image: expected {expected}, got {path!r} ({why}); convert it.") from None
